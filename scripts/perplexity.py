#!/usr/bin/env python3
"""Perplexity of a Hugging Face model with an artifact's codes: python/kvq/perplexity.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from kvq.perplexity import main

if __name__ == "__main__":
    sys.exit(main())
