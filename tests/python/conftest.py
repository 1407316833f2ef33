"""Puts scripts/ on the import path, so that a test can call `dump_qkv.main` without starting a Python for each dump."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
