"""Configurations of MaxText."""
