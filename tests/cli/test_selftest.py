"""kvq-selftest without a GPU: what it says, and what it never counts as passed. With one: the sample's golden rows."""

import json
import os
import shutil
import subprocess

import pytest
from kvq_tools import BIN, ROOT, calibrate, run, succeed

UNSUPPORTED = 5

pytestmark = pytest.mark.skipif(not (BIN / "kvq-selftest").is_file(), reason="kvq-selftest is built only where nvcc is")


def has_gpu() -> bool:
    return (
        shutil.which("nvidia-smi") is not None
        and subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0
    )


@pytest.fixture(scope="module")
def artifact(sample, tmp_path_factory):
    return calibrate(sample, tmp_path_factory.mktemp("selftest") / "oscar.safetensors", "--group-size", 128)


@pytest.mark.parametrize("flags", [(), ("--json",), ("--device", 3)], ids=str)
def test_without_a_gpu_it_says_so(artifact, flags):
    result = run("kvq-selftest", artifact, *flags, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert result.code == UNSUPPORTED and result.stdout == ""
    error, hint = result.stderr.splitlines()
    assert error.startswith("kvq-selftest: error: no CUDA device: ") and hint.startswith("hint: kvq-inspect --verify")


@pytest.mark.skipif(not has_gpu(), reason="no GPU here")
def test_golden_rows_of_the_sample_pass_on_a_gpu(artifact):
    text = succeed("kvq-selftest", artifact).stdout
    assert max(map(len, text.splitlines())) <= 80 and text.endswith("6 of 6 layers passed, 0 failed, 0 not run\n")
    document = json.loads(succeed("kvq-selftest", artifact, "--json").stdout)
    pytest.importorskip("jsonschema").validate(
        document, json.loads((ROOT / "formats/selftest.schema.json").read_text())
    )
    assert (
        document["activation"] == "bf16"
        and document["status"] == "ok"
        and [layer["layer"] for layer in document["layers"]] == list(range(6))
    )
    half = json.loads(succeed("kvq-selftest", artifact, "--json", "--activation", "fp16").stdout)
    assert half["activation"] == "fp16" and half["status"] == "ok"
