"""kvq-calibrate --device, --mem-limit and --dry-run for GPUs, where there is none. tests/cuda has what needs one."""

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


# --mem-limit


@pytest.mark.parametrize("size", ["four", "4XB", "-4GB", "0", "4 GB x"])
def test_sizes_that_are_none_are_refused(short, tmp_path, size):
    error = fail(2, *calibrate_words(short, tmp_path / "a.safetensors", f"--mem-limit={size}"))
    assert error.splitlines() == [
        f"kvq-calibrate: error: --mem-limit: expected a size such as 4GB, 512MiB or 80000000, found {size}"
    ]
    assert not list(tmp_path.iterdir())


def test_processors_have_no_limit_of_device_memory(short, tmp_path):
    words = calibrate_words(short, tmp_path / "a.safetensors", "--mem-limit", "4GB", "--quiet")
    error, hint = fail(2, *words, "--device", "cpu").splitlines()
    assert error.startswith("kvq-calibrate: error: --mem-limit is about memory of GPUs")
    assert hint.startswith("hint: ")
    if not shutil.which("nvidia-smi"):
        note = succeed(*words).stderr
        assert note.startswith("note: --mem-limit has no effect: processors compute (") and note.count("\n") == 1


# --dry-run

QWEN3_8B = "layers=36,q-heads=32,kv-heads=8,head-dim=128"


def predicted(*words) -> dict:
    return json.loads(succeed("kvq-calibrate", "--dry-run", "--json", *words).stdout)


def of_geometry(*words, tokens=8878, geometry=QWEN3_8B) -> dict:
    return predicted("--geometry", geometry, "--num-tokens", tokens, *words)


def test_predictions_for_a_gpu_are_near_what_was_measured():
    """docs/measurements.md, "On a GPU": 36 layers of 8878 tokens on an H200."""
    document = of_geometry("--method", "oscar", "--predict-for", "h200")
    assert document["device"] == "h200" and document["devices"] == 1 and document["threads"] == 16
    assert document["seconds"] == pytest.approx(3.3, rel=0.25)
    steps = ("start_seconds", "collect_seconds", "decide_seconds")
    assert sum(document[step] for step in steps) == pytest.approx(document["seconds"])
    budget = of_geometry("--method", "kvq", "--budget-bits", 2, "--predict-for", "h200")
    assert budget["seconds"] == pytest.approx(10.1, rel=0.25)
    assert document["device_bytes"] < budget["device_bytes"] < 8e9


def test_predictions_follow_tokens_heads_and_machines():
    short, long = (of_geometry("--predict-for", "h200", tokens=tokens) for tokens in (8192, 131072))
    assert 10 < long["seconds"] / short["seconds"] < 256
    assert long["read_bytes"] == 16 * short["read_bytes"]
    assert of_geometry("--predict-for", "h200:8", tokens=131072)["seconds"] < 0.6 * long["seconds"]
    two, sixteen = (of_geometry("--predict-for", f"cpu:{cores}:50") for cores in (2, 16))
    assert two["gemm_gflops"] == 100 and sixteen["gemm_gflops"] == 800 and two["device_bytes"] == 0
    assert 4 < two["seconds"] / sixteen["seconds"] <= 8


def test_a_geometry_predicts_what_a_dump_of_it_does(make_dump, tmp_path):
    dump = make_dump(tokens=512, sequences=2, layers=2, dtype="bfloat16")
    of_dump = predicted(dump, "--output", tmp_path / "a.safetensors", "--predict-for", "h200")
    shape = "layers=2,q-heads=4,kv-heads=2,head-dim=64,sequences=2"
    found = of_geometry("--predict-for", "h200", tokens=512, geometry=shape)
    assert {name for name in of_dump if of_dump[name] != found.get(name)} <= {
        "output",
        "gemm_gflops",
        "artifact_bytes",
        "peak_bytes",
    }
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("geometry", "tokens", "said"),
    [
        ("layers=1,q-heads=32,kv-heads=7,head-dim=128", 4096, "a multiple of kv-heads, found 32 and 7"),
        ("layers=1,q-heads=8,kv-heads=8,head-dim=1048576", 2**40, "more bytes than can be counted"),
    ],
)
def test_a_geometry_that_no_model_has_is_refused(geometry, tokens, said):
    assert said in fail(2, "kvq-calibrate", "--dry-run", "--geometry", geometry, "--num-tokens", tokens)


def test_a_limit_that_is_too_small_says_what_is_enough():
    words = ("kvq-calibrate", "--dry-run", "--geometry", QWEN3_8B, "--num-tokens", 131072, "--predict-for", "h200")
    error = fail(5, *words, "--mem-limit", "1GB")
    line, hint = error.splitlines()
    prefix = "kvq-calibrate: error: CUDA device: attention moments: expected room for at least "
    assert line.startswith(prefix) and line.endswith(" of device memory, found 1.00GB")
    enough = line.removeprefix(prefix).split()[0]
    assert hint.startswith(f"hint: --mem-limit {enough}")
    document = json.loads(succeed(*words, "--mem-limit", enough, "--json").stdout)
    assert document["device_bytes"] <= float(enough.removesuffix("GB")) * 1e9


@pytest.mark.parametrize(
    "words",
    [
        ("--geometry", "layers=2", "--num-tokens", 64),
        ("--geometry", "layers=2,q-heads=5,kv-heads=2,head-dim=64", "--num-tokens", 64),
        ("--geometry", "layers=2,q-heads=4,kv-heads=2,head-dim=x", "--num-tokens", 64),
        ("--geometry", f"{QWEN3_8B},heads=3", "--num-tokens", 64),
        ("--geometry", f"{QWEN3_8B},", "--num-tokens", 64),
        ("--geometry", QWEN3_8B),
        ("--geometry", QWEN3_8B, "--num-tokens", 64, "--predict-for", "h100"),
        ("--geometry", QWEN3_8B, "--num-tokens", 64, "--predict-for", "h200:0"),
        ("--geometry", QWEN3_8B, "--num-tokens", 64, "--predict-for", "cpu"),
        ("--geometry", QWEN3_8B, "--num-tokens", 64, "--predict-for", "cpu:2:x"),
        ("--geometry", QWEN3_8B, "--num-tokens", 64, "--predict-for", "cpu:2", "--device", "cpu"),
        ("--geometry", QWEN3_8B, "--num-tokens", 64, "--layers", 0),
    ],
    ids=lambda words: " ".join(map(str, words)),
)
def test_predictions_of_nothing_are_refused(words):
    error = fail(2, "kvq-calibrate", "--dry-run", *words)
    first = error.splitlines()[0]
    assert first.startswith("kvq-calibrate: error: --") and ("--geometry" in first or "--predict-for" in first)


@pytest.mark.parametrize("words", [("--geometry", QWEN3_8B, "--num-tokens", 64), ("DUMP", "--predict-for", "h200")])
def test_predictions_need_dry_run(short, words):
    error = fail(2, "kvq-calibrate", *(short if word == "DUMP" else word for word in words))
    assert "needs --dry-run" in error
