"""`python -m kvq.collect` runs the program that `scripts/collect_stats.py` runs."""

import sys

from .program import main

sys.exit(main())
