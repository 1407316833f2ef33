#!/usr/bin/env python3
"""Turns a dump of OSCAR's serving fork into a kvq dump (formats/dump.md): python/kvq/dump/convert_oscar.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from kvq.dump.convert_oscar import main

if __name__ == "__main__":
    sys.exit(main())
