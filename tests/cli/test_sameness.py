"""kvq-diff says whether two artifacts are identical, equal but for rounding, or different; calibrations of one build on
other processors are equal but for rounding."""

import json
import os
import platform
from pathlib import Path

import numpy as np
import pytest
from artifact_file import ArtifactFile
from kvq_tools import calibrate, run, succeed

METHODS = {
    "oscar": ("--method", "oscar"),
    "blocks": ("--method", "block-gtq", "--bits-k", 2.5, "--v-allocation", "channel"),
    "balanced": ("--method", "quarot", "--transform", "balanced"),
}
# Kernels of OpenBLAS for processors that every x86-64 processor with AVX can stand in for. They add in another order.
CORES = ("Sandybridge", "Nehalem")


def compared(old: Path, new: Path) -> tuple[int, dict]:
    result = run("kvq-diff", "--json", old, new)
    assert result.code in (0, 6), result
    return result.code, json.loads(result.stdout)["sameness"]


@pytest.fixture(scope="module")
def dump(make_dump) -> Path:
    return make_dump(tokens=80, sequences=2, layers=2, head_dim=32, outlier_channels=2, channel_means=0.5)


@pytest.fixture(scope="module")
def own(dump, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("own")
    return {name: calibrate(dump, folder / name, *flags) for name, flags in METHODS.items()}


def test_the_same_bytes_are_identical(own, dump, tmp_path):
    """On one machine the number of threads does not change a byte."""
    for name, flags in METHODS.items():
        again = calibrate(dump, tmp_path / name, *flags, "--threads", 1)
        assert again.read_bytes() == own[name].read_bytes()
        assert compared(own[name], again) == (0, {"verdict": "identical", "numbers": [], "golden_rows": 0})
    assert "The files are identical.\n" in succeed("kvq-diff", own["oscar"], own["oscar"]).stdout


@pytest.mark.parametrize("core", CORES)
def test_another_processor_gives_the_same_but_for_rounding(own, dump, tmp_path, core):
    verdicts = []
    for name, flags in METHODS.items():
        command = ("--quiet", "--model", dump, "--output", tmp_path / name, *flags)
        succeed("kvq-calibrate", *command, env=os.environ | {"OPENBLAS_CORETYPE": core})
        code, sameness = compared(own[name], tmp_path / name)
        assert code == 0 and sameness["verdict"] != "different", sameness
        assert all(0 < number["difference"] <= 1e-3 for number in sameness["numbers"])
        verdicts.append(sameness["verdict"])
    if platform.machine() == "x86_64":
        assert "equal_but_for_rounding" in verdicts, "OpenBLAS has one kernel only?"


def test_differences_are_measured(own, tmp_path):
    file = ArtifactFile.read(own["oscar"])
    file.array("layers.1.k.spectrum")[0, 0] *= np.float32(1 + 8e-6)
    file.tree["layers"][0]["v"]["error"]["after"] *= 1 + 1e-7
    path = file.write(tmp_path / "near")
    code, sameness = compared(own["oscar"], path)
    assert code == 0 and sameness["verdict"] == "equal_but_for_rounding" and sameness["golden_rows"] == 0
    (spectrum, error) = sameness["numbers"]
    assert (spectrum["what"], spectrum["where"]) == ("spectrum", "layer 1 k")
    assert spectrum["difference"] == pytest.approx(8e-6, rel=0.02)
    assert (error["what"], error["where"]) == ("error/after", "layer 0 v")
    assert error["difference"] == pytest.approx(1e-7, rel=0.02)
    text = succeed("kvq-diff", own["oscar"], path).stdout
    assert (
        "The files are equal but for rounding: spectrum 8.0e-06 at layer 1 k, error/after 1.0e-07 at layer 0 v" in text
    )
    assert "equal but for rounding" in succeed("kvq-diff", own["oscar"], path, "--markdown").stdout


def test_other_facts_make_files_different(own, dump, tmp_path):
    seeded = calibrate(dump, tmp_path / "seed", *METHODS["oscar"], "--seed", 3)
    code, sameness = compared(own["oscar"], seeded)
    assert code == 0 and sameness["verdict"] == "different" and sameness["reason"] == "calibration/seed: 0 -> 3"
    file = ArtifactFile.read(own["oscar"])
    file.array("layers.0.k.spectrum")[0, 0] *= np.float32(1.01)
    _, sameness = compared(own["oscar"], file.write(tmp_path / "far"))
    assert sameness["verdict"] == "different" and sameness["reason"].startswith(
        "layers.0.k.spectrum: a number differs by"
    )
    _, sameness = compared(own["oscar"], own["balanced"])
    assert sameness["verdict"] == "different"
