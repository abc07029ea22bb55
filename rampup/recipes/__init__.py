"""Runs as functions."""
