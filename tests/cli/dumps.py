"""Small dumps for the tools to read, and edits that spoil them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np

from kvq.dump import make_synthetic


def synthetic(path: Path, **options: object) -> Path:
    """Runs scripts/make_synthetic_dump.py: `head_dim=80` becomes `--head-dim 80`, `sink=True` becomes `--sink`."""
    words = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in options.items()]
    assert make_synthetic.main([str(path), *words]) == 0
    return path


def edited(source: Path, target: Path, edit: Callable[[h5py.File], None]) -> Path:
    """Copies a dump and applies `edit` to the copy."""
    shutil.copyfile(source, target)
    with h5py.File(target, "r+") as file:
        edit(file)
    return target


def replace(file: h5py.File, name: str, values: np.ndarray, **options) -> None:
    """Replaces the array of a dataset and keeps its attributes."""
    attributes = dict(file[name].attrs)
    del file[name]
    file.create_dataset(name, data=values, **options).attrs.update(attributes)
