"""Configurations of SkyRL."""
