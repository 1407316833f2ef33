#!/usr/bin/env python3
"""Reads an artifact (formats/artifact.md) independently of the C++ library: python/kvq/read_artifact.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from kvq.read_artifact import main

if __name__ == "__main__":
    sys.exit(main())
