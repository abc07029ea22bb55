"""The compiled training step: what runs on the devices."""
