"""Configurations of trlX."""
