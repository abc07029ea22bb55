"""Search for the largest microbatch that fits in memory and for the fastest
settings.
"""
