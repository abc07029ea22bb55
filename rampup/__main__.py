"""`python -m rampup`."""

import sys

from rampup.cli import main

sys.exit(main())
