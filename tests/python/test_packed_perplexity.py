"""scripts/experiments/packed_perplexity.py without a GPU: structures against runtime.h, the cache's bookkeeping with a
stand-in for the library, and how the program refuses."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import artifact_builder as build  # noqa: E402
import packed_perplexity as packed  # noqa: E402
import runtime_binding as rt  # noqa: E402
from fake_runtime import FakeRuntime  # noqa: E402
from packed_cache import LayerShape, PackedCache, Sizes  # noqa: E402
from test_perplexity import DIM, KV_HEADS, Q_HEADS, save_tokenizer, write_artifact  # noqa: E402
from tiny_models import save_tiny  # noqa: E402

from kvq import coded_attention, perplexity  # noqa: E402
from kvq.errors import KvqError  # noqa: E402
from kvq.fingerprint import model_fingerprint  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
WINDOW = 61
PLAN = build.symmetric_plan(2, 20, rotation=build.rotation("block_hadamard", order=4))


# The binding


def test_structures_are_those_of_the_header(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    lines, expected = [], []
    for structure in rt.STRUCTURES:
        name = structure.__name__
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {ctypes.sizeof(structure)}")
        for field, *_ in structure._fields_:
            place = getattr(structure, field)
            size = f"sizeof((({name}*)0)->{field})"
            lines.append(f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), {size});')
            expected.append(f"{name}.{field} {place.offset} {place.size}")
    for name, value in (
        ("KVQ_KERNEL_DECODE", rt.DECODE),
        ("KVQ_KERNEL_PREFILL", rt.PREFILL),
        ("KVQ_OK", rt.OK),
        ("KVQ_UNSUPPORTED", rt.UNSUPPORTED),
        ("KVQ_MISMATCH", rt.MISMATCH),
        ("KVQ_IO", rt.IO),
    ):
        lines.append(f'printf("{name} %d\\n", {name});')
        expected.append(f"{name} {value}")
    for name, value in (("KVQ_BF16", rt.ACTIVATIONS["bf16"]), ("KVQ_FP16", rt.ACTIVATIONS["fp16"])):
        lines.append(f'printf("{name} %d\\n", {name});')
        expected.append(f"{name} {value}")
    lines.append('printf("%d %d\\n", KVQ_MODEL_WITHOUT_WINDOWS, KVQ_ABI_VERSION / 100);')
    expected.append(f"{rt.WITHOUT_WINDOWS} {rt.MAJOR}")
    source, program = tmp_path / "probe.c", tmp_path / "probe"
    body = "\n  ".join(lines)
    source.write_text(f"#include <kvq/runtime.h>\n#include <stdio.h>\nint main(void) {{\n  {body}\n  return 0;\n}}\n")
    subprocess.run([compiler, "-std=c99", f"-I{ROOT / 'lib'}", source, "-o", program], check=True)
    assert subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines() == expected


def test_all_fields_and_parameters_of_the_header_are_there():
    header = (ROOT / "lib/kvq/runtime.h").read_text()
    for name, parameters in rt.CALLS.items():
        declared = header[header.index(f"KVQ_API kvq_status {name}(") :]
        declared = declared[: declared.index(");")]
        assert declared.count(",") == len(parameters), name  # and kvq_error*


@pytest.fixture(scope="module")
def library():
    for path in rt.candidate_paths():
        if path.is_file():
            return rt.Runtime(path)
    pytest.skip("libkvq_runtime is not built")


def test_the_library_loads_an_artifact_and_refuses_what_does_not_fit(library, tmp_path):
    dim = 64
    shape = build.geometry(4, 2, dim)
    plan = build.symmetric_plan(2, dim, rotation=build.rotation("block_hadamard", order=64))
    path = tmp_path / "a.safetensors"
    path.write_bytes(build.to_bytes(build.manifest([build.layer(0, shape, plan, plan)], 1, sink=3, recent=5), None))
    geometry = (rt.kvq_layer_geometry * 1)(rt.kvq_layer_geometry(num_q_heads=4, num_kv_heads=2, head_dim=dim))
    options = rt.kvq_model_options(num_layers=1, num_geometries=1, geometry=geometry, page_size=32)
    model, info = library.made("kvq_model_load", str(path).encode(), options), rt.kvq_model_info()
    library.call("kvq_model_query", model, info)
    assert (info.page_size, info.sink_tokens, info.recent_tokens, info.layer_count) == (32, 3, 5, 1)
    layer = rt.kvq_layer_info()
    library.call("kvq_model_query_layer", model, 0, layer)
    assert (layer.num_q_heads, layer.head_dim, layer.v_head_dim, layer.k_bits) == (4, dim, dim, 2)
    assert layer.ring_slot_bytes == 2 * 2 * (dim + dim) * 16
    library.destroy("kvq_model_destroy", model)
    geometry[0].num_kv_heads = 1
    with pytest.raises(KvqError, match=r"kvq_model_load: mismatch: .*num_kv_heads: expected 1, found 2") as raised:
        library.made("kvq_model_load", str(path).encode(), options)
    assert raised.value.exit_code == 3
    options.num_geometries = 3
    with pytest.raises(KvqError, match="invalid argument: num_geometries: expected") as raised:
        library.made("kvq_model_load", str(path).encode(), options)
    assert raised.value.exit_code == 1


def test_a_file_that_is_no_library(tmp_path, monkeypatch):
    path = tmp_path / rt.FILE
    with pytest.raises(KvqError, match="no such library"):
        rt.find_library(path)
    monkeypatch.setenv("KVQ_RUNTIME", str(path))
    with pytest.raises(KvqError, match=r"no libkvq_runtime\.so, expected one of"):
        rt.find_library(None)
    path.write_text("not a library")
    assert rt.find_library(None) == path
    with pytest.raises(KvqError, match="cannot load"):
        rt.Runtime(path)


# The bookkeeping


def cache_of(tmp_path, mode, batch=3, tokens=50, step=1, **windows) -> tuple[PackedCache, FakeRuntime]:
    runtime = FakeRuntime()
    artifact = write_artifact(tmp_path / "a", PLAN, PLAN, **windows)
    layers = {i: LayerShape(Q_HEADS, KV_HEADS, DIM, DIM, 0, 0.3) for i in range(2)}
    return PackedCache(runtime, artifact, layers, Sizes(batch, tokens, step, 16), mode, device="cpu"), runtime


def test_pages_of_all_sequences_are_distinct_and_slots_too(tmp_path):
    cache, _ = cache_of(tmp_path, "prefill", step=7, sink=2, recent=8)
    assert cache.page_table.shape == (3, 4) and cache.page_table.dtype == torch.int32
    assert sorted(cache.page_table.flatten().tolist()) == list(range(12))
    written = set()
    for new_tokens in (7, 7, 1, 5):
        cache.begin(new_tokens)
        slots = cache.slot_mapping[: 3 * new_tokens].tolist()
        assert all(0 <= slot < 12 * 16 for slot in slots) and not written & set(slots)
        written |= set(slots)
    assert len(written) == 3 * 20 and cache.lengths.tolist() == [20] * 3 and cache.lengths_before.tolist() == [15] * 3


def test_a_step_beyond_the_cache_is_a_mistake(tmp_path):
    cache, _ = cache_of(tmp_path, "prefill", tokens=10, step=6)
    for wrong in (0, 7):
        with pytest.raises(ValueError):
            cache.begin(wrong)
    cache.begin(6)
    with pytest.raises(ValueError, match="5 tokens behind 6"):
        cache.begin(5)


def test_pools_begin_as_nan_and_handles_are_given_back(tmp_path):
    cache, runtime = cache_of(tmp_path, "decode", sink=2, recent=8)
    assert np.isnan(runtime.pool(0, "pages", 12 * 16)).all()
    assert cache.kernels == "mixed"
    cache.close()
    assert runtime.destroyed == [
        "kvq_cache_destroy",
        "kvq_plan_destroy",
        "kvq_device_model_destroy",
        "kvq_model_destroy",
    ]


def test_a_fault_is_an_error(tmp_path):
    cache, runtime = cache_of(tmp_path, "decode")
    cache.check_faults()
    runtime.fault = 2
    with pytest.raises(KvqError, match="fault number 2: sequence 0"):
        cache.check_faults()


# The whole measurement, with the stand-in


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(f"w{i}" for i in np.random.default_rng(0).integers(0, 80, 400)))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folders = {}
    for name in ("qwen3", "mistral"):
        folders[name] = save_tiny(name, tmp_path_factory.mktemp(name))
        save_tokenizer(folders[name])
    return folders


def measured(model, text, artifact, *more) -> dict:
    arguments = ["--text", text, "--artifact", artifact, "--window", WINDOW, "--num-windows", 3, "--quiet", *more]
    args = packed.parse_arguments([str(each) for each in (model, *arguments)])
    args.device = "cpu"
    return packed.measure(args, FakeRuntime())


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
@pytest.mark.parametrize("windows", [{}, {"sink": 3, "recent": 4}, {"sink": 2, "recent": 70}])
def test_the_packed_cache_equals_the_codec(models, text, tmp_path, name, windows):
    artifact = write_artifact(tmp_path / "a.safetensors", PLAN, PLAN, **windows)
    document = measured(models[name], text, artifact, "--chunk", 7, "--page-size", 16)
    assert document["tokens"] == 180 and document["passed"]
    assert [each["mode"] for each in document["results"]] == ["decode", "prefill"]
    for each in document["results"]:
        np.testing.assert_allclose(each["packed"]["window_nll"], each["codec"]["window_nll"], rtol=2e-4)
        same_rows = each["codec_same_rows"]["window_nll"]
        np.testing.assert_allclose(each["packed"]["window_nll"], same_rows, rtol=2e-5)
        if windows.get("recent") != 70:
            assert abs(each["packed"]["nll"] - document["exact"]["nll"]) > 1e-3
    decode, prefill = (each["codec"]["nll"] for each in document["results"])
    assert abs(decode - prefill) > 1e-4 or windows


def test_fp16_rows_and_chunks_of_any_size(models, text, tmp_path):
    artifact = write_artifact(tmp_path / "a.safetensors", PLAN, PLAN, sink=3, recent=9)
    found = {}
    for chunk in (1, 16, 500):
        document = measured(
            models["qwen3"], text, artifact, "--chunk", chunk, "--activations", "fp16", "--mode", "prefill"
        )
        (result,) = document["results"]
        np.testing.assert_allclose(result["packed"]["window_nll"], result["codec"]["window_nll"], rtol=2e-4)
        found[chunk] = result["codec"]["nll"]
    assert found[500] == pytest.approx(document["exact"]["nll"], rel=1e-4)
    assert abs(found[1] - found[500]) > 1e-3


def test_windows_may_be_left_out(models, text, tmp_path):
    artifact = write_artifact(tmp_path / "a.safetensors", PLAN, PLAN, sink=3, recent=9)
    plain = write_artifact(tmp_path / "b.safetensors", PLAN, PLAN)
    with_them = measured(models["qwen3"], text, artifact, "--mode", "decode")["results"][0]
    without = measured(models["qwen3"], text, artifact, "--mode", "decode", "--windows", "none")["results"][0]
    assert without["packed"] | {"seconds": 0} == measured(models["qwen3"], text, plain)["results"][0]["packed"] | {
        "seconds": 0
    }
    assert without["codec"] != with_them["codec"]


def test_the_codecs_decode_is_that_of_perplexity_py(models, text, tmp_path, capsys):
    artifact = write_artifact(tmp_path / "a.safetensors", PLAN, PLAN, sink=3, recent=9)
    own = measured(models["mistral"], text, artifact, "--mode", "decode")["results"][0]["codec"]
    flags = ("--text", text, "--window-tokens", WINDOW, "--num-windows", 3, "--artifact", artifact, "--json")
    assert perplexity.main([str(each) for each in (models["mistral"], *flags)]) == 0
    other = json.loads(capsys.readouterr().out)["results"][-1]
    np.testing.assert_allclose(own["window_nll"], other["window_nll"], rtol=3e-3)  # its rows are not rounded


def test_attention_in_one_chunk_is_exact_attention():
    from packed_attention import attend_in_chunks

    generator = torch.Generator().manual_seed(3)
    random = lambda *shape: torch.randn(*shape, generator=generator)
    q, exact = random(6, 40, 8), coded_attention.KeysValues(random(2, 40, 8), random(2, 40, 5))
    nothing = coded_attention.KeysValues(torch.full_like(exact.k, torch.nan), torch.full_like(exact.v, torch.nan))
    for sliding in (0, 6):
        found = attend_in_chunks(q, exact, nothing, nothing, coded_attention.Windows(2, 3), 40, 0.4, sliding)
        expected = coded_attention.attend(q, exact, None, 0.4, coded_attention.Windows(), sliding)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


# The program


def document(difference: float) -> dict:
    figures = {"perplexity": 23.4567, "nll": 3.1, "window_nll": [3.1]}
    return {
        "device": "NVIDIA H100 80GB HBM3",
        "library": "0.2.0",
        "activations": "bf16",
        "page_size": 64,
        "chunk": 512,
        "num_windows": 6,
        "window_tokens": 4096,
        "tokens": 24570,
        "tolerance": 0.001,
        "exact": figures,
        "results": [
            {
                "name": "segment-scales-kvq-2-bits-uniform-layout",
                "mode": mode,
                "kernels": "generic",
                "packed": figures,
                "codec": figures,
                "codec_same_rows": figures,
                "difference": -0.002,
                "interval": [-0.004, 0.001],
                "difference_same_rows": difference,
            }
            for mode in packed.MODES
        ],
        "passed": abs(difference) <= 0.001,
    }


@pytest.mark.parametrize("difference, code", [(0.0009, 0), (-0.0011, 1)])
def test_the_table_and_the_exit_code_say_whether_they_agree(monkeypatch, capsys, text, difference, code):
    monkeypatch.setattr(packed.rt, "find_library", lambda path: path)
    monkeypatch.setattr(packed.rt, "Runtime", lambda path: None)
    monkeypatch.setattr(packed, "require_gpu", lambda device: None)
    monkeypatch.setattr(packed, "measure", lambda args, runtime: document(difference))
    assert packed.main(["model", "--text", str(text), "--artifact", "a"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and f"{100 * difference:+.4f}%" in lines[5]
    assert lines[-1].startswith("no difference exceeds" if code == 0 else "a difference exceeds")
    assert packed.main(["model", "--text", str(text), "--artifact", "a", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["passed"] == (code == 0)


def test_chance_does_not_fail_the_check_but_the_same_rows_do():
    result = {"difference": 0.002, "interval": [-0.001, 0.005], "difference_same_rows": 0.0004}
    assert packed.agrees(result, 0.001)
    assert not packed.agrees(result | {"difference_same_rows": -0.0011}, 0.001)
    assert not packed.agrees(result | {"interval": [0.0011, 0.003]}, 0.001)
    assert not packed.agrees(result | {"interval": [-0.003, -0.0011]}, 0.001)
    assert not packed.agrees(result | {"interval": None}, 0.001)


def run(*arguments, **variables) -> tuple[int, str]:
    program = ROOT / "scripts/experiments/packed_perplexity.py"
    done = subprocess.run(
        [sys.executable, program, *map(str, arguments)], capture_output=True, text=True, env={**os.environ, **variables}
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--window", 1], "--window: expected at least 2, found 1"),
        (["--chunk", 0], "--chunk: expected at least 1, found 0"),
        (["--tolerance", "-1"], "--tolerance: expected 0 or more"),
        (["--tolerance", "nan"], "--tolerance: expected 0 or more"),
        (["--device", "cpu"], "--device: expected cuda or cuda:N, found cpu"),
        (["--mode", "append"], "expected decode, prefill"),
    ],
)
def test_wrong_flags(flags, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        packed.parse_arguments([str(each) for each in ("model", "--text", "t", "--artifact", "a", *flags)])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_without_the_library_it_says_what_to_do(text, tmp_path):
    code, error = run("model", "--text", text, "--artifact", "a", KVQ_RUNTIME=str(tmp_path / "none.so"))
    assert code == 5 and error.splitlines()[0].startswith("packed_perplexity.py: error: no libkvq_runtime.so")
    assert "hint: cmake --build" in error and len(error.splitlines()) == 2


def test_without_a_gpu_it_says_what_to_do(monkeypatch, text, capsys):
    monkeypatch.setattr(packed.rt, "find_library", lambda path: path)
    monkeypatch.setattr(packed.rt, "Runtime", lambda path: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert packed.main(["model", "--text", str(text), "--artifact", "a"]) == 5
    error = capsys.readouterr().err.splitlines()
    assert error[0].startswith("packed_perplexity.py: error: no CUDA device") and error[1].startswith("hint: ")


def test_an_artifact_of_another_model_is_refused(models, text, tmp_path):
    own = model_fingerprint(models["qwen3"])
    artifact = write_artifact(tmp_path / "own.safetensors", PLAN, PLAN, fingerprint=own)
    assert measured(models["qwen3"], text, artifact, "--mode", "decode")["passed"]
    artifact = write_artifact(tmp_path / "other.safetensors", PLAN, PLAN, fingerprint="0" * 64)
    with pytest.raises(KvqError, match=r"other\.safetensors: expected model 0000000000000000"):
        measured(models["qwen3"], text, artifact)


def test_a_text_that_is_too_short_is_refused(models, tmp_path):
    short, artifact = tmp_path / "t", write_artifact(tmp_path / "a", PLAN, PLAN)
    short.write_text("w1 w2 w3")
    with pytest.raises(KvqError, match="expected at least 60 tokens, found 3"):
        measured(models["qwen3"], short, artifact)
