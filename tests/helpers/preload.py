"""Imported once, in the process from which the processes of tests are forked. No device
is touched here.
"""

import rampup.cli
import rampup.lm.train  # noqa: F401
