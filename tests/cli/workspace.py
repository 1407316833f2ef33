"""The folder in which the table of test_cli.py runs: sound inputs, and spoiled ones by name.

Everything is named relative to it, so that messages are the same on every machine.
"""

import shutil
from pathlib import Path

from dumps import edited, synthetic
from faulty_artifacts import faulty_artifacts
from faulty_dumps import FAULTS, as_bfloat16, drop, set_attribute, with_metric
from kvq_tools import ROOT, calibrate

SIZE = {"tokens": 61, "sequences": 3, "layers": 2}


def fill(folder: Path) -> None:
    (folder / "sample.h5").symlink_to(ROOT / "sample_data/calibration.h5")
    dump = synthetic(folder / "dump.h5", head_dim=32, **SIZE)
    for name, edit in FAULTS.items():
        edited(dump, folder / f"{name}.h5", edit)
    write_what_is_no_dump(folder, dump)
    write_second_files(folder)
    artifact = calibrate(dump, folder / "artifact.safetensors", "--clip", 0.96, "--stats", folder / "stats.safetensors")
    for name, content in faulty_artifacts(artifact.read_bytes()).items():
        (folder / f"{name}.safetensors").write_bytes(content)
    for name in ("precious_1.h5", "precious_2.h5"):  # inputs for commands that could overwrite them
        shutil.copy(dump, folder / name)
    shutil.copy(folder / "stats.safetensors", folder / "precious.safetensors")
    (folder / "bad.ini").write_text("no-such-flag=1\n")


def write_what_is_no_dump(folder: Path, dump: Path) -> None:
    content = dump.read_bytes()
    sizes = {"empty": 0, "cut_1": len(content) // 100, "cut_50": len(content) // 2, "cut_last": len(content) - 1}
    for name, size in sizes.items():
        (folder / f"{name}.h5").write_bytes(content[:size])
    (folder / "text.h5").write_text("this is no HDF5 file\n")
    edited(dump, folder / "foreign.h5", lambda file: (file.clear(), file.attrs.clear()))


def write_second_files(folder: Path) -> None:
    """Writes dumps with other sequences that do not fit dump.h5."""
    other = synthetic(folder / "more.h5", head_dim=32, seed=7, **SIZE)
    synthetic(folder / "wide.h5", head_dim=64, **SIZE)
    edited(other, folder / "one_layer.h5", drop("layers/0"))
    edited(other, folder / "other_model.h5", set_attribute("/", "model_name", "another"))
    edited(other, folder / "other_window.h5", set_attribute("layers/1", "sliding_window", 9))
    edited(other, folder / "other_metric.h5", with_metric(lambda x: x))
    edited(other, folder / "other_type.h5", as_bfloat16("layers/1/k"))
