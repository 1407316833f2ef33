#!/usr/bin/env python3
"""Writes a dump of made-up activations (formats/dump.md): python/kvq/dump/make_synthetic.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from kvq.dump.make_synthetic import main

if __name__ == "__main__":
    sys.exit(main())
