#!/usr/bin/env python3
"""Dumps the queries, keys and values of a Hugging Face model (formats/dump.md): python/kvq/dump/program.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from kvq.dump.program import main

if __name__ == "__main__":
    sys.exit(main())
