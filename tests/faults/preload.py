"""What every victim needs, imported once in the process that they are forked from; no device is touched here."""

import rampup.recipes.lm  # noqa: F401
