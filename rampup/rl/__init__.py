"""Reinforcement learning: the sizes of a rollout, their plan, and the mini batches that execute it."""
