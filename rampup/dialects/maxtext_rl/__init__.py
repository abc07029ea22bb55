"""Configurations of MaxText's reinforcement learning."""
