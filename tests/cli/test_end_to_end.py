"""From a model and a text to a verified artifact, as a user would do it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from kvq_tools import ROOT, calibrate, succeed

pytest.importorskip("torch")
pytest.importorskip("transformers")

TEXT = """\
It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife.
However little known the feelings or views of such a man may be on his first entering a neighbourhood, this truth is so
well fixed in the minds of the surrounding families, that he is considered as the rightful property of some one or other
of their daughters. "My dear Mr. Bennet," said his lady to him one day, "have you heard that Netherfield Park is let at
last?" Mr. Bennet replied that he had not. "But it is," returned she; "for Mrs. Long has just been here, and she told me
all about it." Mr. Bennet made no answer. "Do not you want to know who has taken it?" cried his wife, impatiently.
"""


@pytest.fixture(scope="module")
def dump(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "text.txt").write_text(TEXT)
    subprocess.run(
        [
            sys.executable,
            ROOT / "scripts/dump_qkv.py",
            ROOT / "sample_data/model",
            "--text",
            folder / "text.txt",
            "--sequence-length",
            "64",
            "--output",
            folder / "dump.h5",
            "--quiet",
            "--threads",
            "2",
        ],
        check=True,
    )
    return folder / "dump.h5"


@pytest.mark.parametrize("flags", [("--method", "oscar"), ("--coder", "symmetric", "--center", "kv")], ids=" ".join)
def test_dump_calibrate_inspect(dump, tmp_path, flags):
    artifact = calibrate(dump, tmp_path / "out", *flags)
    succeed("kvq-inspect", artifact, "--verify")
    manifest = json.loads(succeed("kvq-inspect", artifact, "--json").stdout)["manifest"]
    assert manifest["model"]["num_layers"] == len(manifest["layers"]) == 6
    for layer in manifest["layers"]:
        assert [layer["geometry"][name] for name in ("num_q_heads", "num_kv_heads", "head_dim")] == [8, 2, 128]
        assert all(layer[side]["error"]["after"] < layer[side]["error"]["before"] for side in "kv")


def test_artifact_knows_its_model(dump, sample, tmp_path):
    """The fingerprint of the model folder gets from the dump into the artifact. Two dumps of one model have the same
    fingerprint."""
    artifacts = [calibrate(source, tmp_path / source.name, "--layers", 0) for source in (dump, sample)]
    models = [
        json.loads(succeed("kvq-inspect", artifact, "--json").stdout)["manifest"]["model"] for artifact in artifacts
    ]
    assert models[0]["fingerprint"] == models[1]["fingerprint"] and len(models[0]["fingerprint"]) == 64
    assert (
        models[0]["config"] == models[1]["config"] == json.loads((ROOT / "sample_data/model/config.json").read_text())
    )
