"""Read from the text of a compiled program what it communicates, sums and keeps in
memory.
"""
