"""How large the batch should be: noise scale, critical batch, designed ramps, constants
that follow the batch.
"""
