"""Configurations of veRL."""
