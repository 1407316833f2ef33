"""The second reader reads every golden file of every released version (formats/golden)."""

import pathlib

import pytest

import read_artifact

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "formats/golden"
ARTIFACTS = sorted(path for path in GOLDEN.glob("v*/*.safetensors") if path.stem != "stats")


def test_there_are_golden_files():
    assert len(ARTIFACTS) >= 3


@pytest.mark.parametrize("path", ARTIFACTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_golden_artifact_verifies(path, capsys):
    assert read_artifact.main([str(path), "--verify"]) == 0
    assert "orthogonality: ok" in capsys.readouterr().out


def test_golden_statistics_are_refused_as_an_artifact(capsys):
    assert read_artifact.main([str(GOLDEN / "v1.0/stats.safetensors")]) == 3
    assert "kvq-stats" in capsys.readouterr().err
