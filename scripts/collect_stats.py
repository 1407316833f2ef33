#!/usr/bin/env python3
"""Collects the statistics of a Hugging Face model (formats/stats.md) without a dump: python/kvq/collect/program.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from kvq.collect.program import main

if __name__ == "__main__":
    sys.exit(main())
