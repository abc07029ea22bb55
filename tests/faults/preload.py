"""What every victim needs, imported once in the process that they are forked from; no device is touched here."""

import rampup.lm.train  # noqa: F401
