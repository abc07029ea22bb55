"""The byte-level language model that `rampup train` trains."""
