#!/usr/bin/env python3
"""Writes the outlier twin of a model: python/kvq/outlier_twin.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from kvq.outlier_twin import main

if __name__ == "__main__":
    sys.exit(main())
