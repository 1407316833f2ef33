"""Puts the package and the scripts on the import path, so that a test can call `program.main` without starting a Python
for each dump."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
for folder in ("scripts", "scripts/experiments", "scripts/generate", "python"):
    sys.path.insert(0, str(ROOT / folder))


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    torch = pytest.importorskip("torch")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.device(request.param)
