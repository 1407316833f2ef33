"""kvq-calibrate --device, on machines without a CUDA device. tests/cuda has what needs one."""

import json
import shutil

import pytest
from kvq_tools import BIN, run, succeed

LIBRARY = BIN / "libkvq-cuda.so"
FLAGS = ("--layers", 0, "--method", "saw-int4")


def fail(code, *words) -> str:
    result = run(*words)
    assert result.code == code, result.stderr
    return result.stderr


def calibrate_words(dump, output, *words):
    return ("kvq-calibrate", dump, "--output", output, *FLAGS, *words)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "CUDA", "cpu:0"])
def test_other_words_are_refused(short, tmp_path, device):
    error = fail(2, *calibrate_words(short, tmp_path / "a.safetensors", "--device", device))
    assert "--device" in error
    assert not list(tmp_path.iterdir())


def test_without_a_device_cuda_is_refused_in_one_line(short, tmp_path):
    if shutil.which("nvidia-smi"):
        pytest.skip("a machine that may have a CUDA device")
    error = fail(5, *calibrate_words(short, tmp_path / "a.safetensors", "--device", "cuda"))
    lines = error.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("kvq-calibrate: error: --device cuda: ")
    if not LIBRARY.exists():
        assert lines[0].endswith("this build has no libkvq-cuda.so")
    assert lines[1] == "hint: --device cpu needs no GPU"
    assert not list(tmp_path.iterdir())


def test_auto_takes_processors_and_says_so(short, tmp_path):
    if shutil.which("nvidia-smi"):
        pytest.skip("a machine that may have a CUDA device")
    said = succeed(*calibrate_words(short, tmp_path / "a.safetensors")).stdout
    assert "computed on cpu\n" in said
    succeed(*calibrate_words(short, tmp_path / "b.safetensors", "--device", "cpu"))
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    document = json.loads(succeed(*calibrate_words(short, tmp_path / "c.safetensors", "--json")).stdout)
    assert document["device"] == "cpu"


def test_a_file_that_is_no_library_is_named(short, tmp_path):
    """A file that is no library beside the tool: auto does without, cuda names the file."""
    shutil.copy(BIN / "kvq-calibrate", tmp_path)
    (tmp_path / "libkvq-cuda.so").write_bytes(b"not a library")
    output = tmp_path / "a.safetensors"
    words = [tmp_path / "kvq-calibrate", short, "--output", output, *FLAGS]
    error = fail(5, *words, "--device", "cuda")
    assert str(tmp_path / "libkvq-cuda.so") in error
    succeed(*words, "--quiet")
    assert output.exists()
