"""Rows, their order, and the batch of every step."""
