"""Where the tests find scripts and tools, and the inputs that many of them share."""

import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

from calibrations import GEOMETRIES, SHORT, SMALL
from dumps import edited, replace, synthetic
from kvq_tools import BIN, ROOT


def pytest_addoption(parser):
    parser.addoption(
        "--update-expected", action="store_true", help="write tests/cli/expected/ anew from what the tools say"
    )


def pytest_configure(config):
    missing = [name for name in ("kvq-calibrate", "kvq-inspect", "kvq-eval", "kvq-diff") if not (BIN / name).is_file()]
    if missing:
        raise pytest.UsageError(f"{BIN}: no {' and no '.join(missing)}; build first, or set KVQ_BIN")


@pytest.fixture(scope="session")
def sample() -> Path:
    """The dump of a real model in sample_data/: 6 layers, 8 query heads and 2 KV heads, 128 channels, bfloat16."""
    return ROOT / "sample_data/calibration.h5"


@pytest.fixture(scope="session")
def make_dump(tmp_path_factory):
    """Makes synthetic dumps by their options; each dump is made once."""
    folder = tmp_path_factory.mktemp("dumps")
    made: dict[tuple, Path] = {}

    def make(**options) -> Path:
        key = tuple(sorted(options.items()))
        if key not in made:
            made[key] = synthetic(folder / f"dump{len(made)}.h5", **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def short(sample, tmp_path_factory) -> Path:
    """The start of the sample's first sequence."""

    def cut(file: h5py.File) -> None:
        replace(file, "cu_seqlens", np.array([0, SHORT]))
        replace(file, "positions", file["positions"][:SHORT])
        for name in [f"layers/{index}/{tensor}" for index in range(6) for tensor in "qkv"]:
            replace(file, name, file[name][:SHORT])

    return edited(sample, tmp_path_factory.mktemp("short") / "dump.h5", cut)


@pytest.fixture(scope="session")
def layered(make_dump) -> Path:
    """Three layers of two KV heads, 32 channels of keys and 48 of values."""
    return make_dump(**SMALL | {"layers": 3, "tokens": 120}, **GEOMETRIES["half"])
