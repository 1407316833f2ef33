"""`python -m kvq.dump` runs the program that `scripts/dump_qkv.py` runs."""

import sys

from .program import main

sys.exit(main())
