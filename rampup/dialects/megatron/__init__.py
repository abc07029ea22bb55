"""Arguments of Megatron-LM."""
