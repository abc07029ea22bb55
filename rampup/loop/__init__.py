"""A run in its folder: the loop over steps, checkpoints, metrics and other
processes.
"""
