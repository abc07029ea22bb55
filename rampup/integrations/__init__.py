"""Adapters for other people's trainers; each needs the trainer's own package."""
