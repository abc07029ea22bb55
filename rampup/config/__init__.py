"""Files -> plan: the keys, the reader and what a configuration means."""
