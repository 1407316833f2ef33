"""scripts/collect_stats.py against a dump of the same texts and the statistics that kvq-calibrate collects from it."""

import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
import weakref
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("h5py")
pytest.importorskip("transformers", minversion="5.0")

from architectures import ARCHITECTURES, make_model  # noqa: E402
from tiny_models import save_tiny  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from kvq.collect import attention, content, layer, options, sample, statistics  # noqa: E402
from kvq.collect import program as collect_stats  # noqa: E402
from kvq.collect.token_plan import Span, TokenPlan, choose_golden, choose_held_out  # noqa: E402
from kvq.dump import placement  # noqa: E402
from kvq.dump import program as dump_qkv  # noqa: E402
from kvq.errors import KvqError  # noqa: E402
from kvq.safetensors_file import SafetensorsFile  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / os.environ.get("KVQ_BIN", "build/release/tools")
MOMENTS = options.MOMENTS
HELD_OUT, GOLDEN, SAMPLED = 11, 9, 31
# Sums over S are float32 inside, here and in kvq-calibrate. Relative to a head's largest magnitude.
BOUND = 1e-5
# Sums of products of rows are float64 on both sides.
EXACT_BOUND = 1e-12
OF_SOFTMAX = ("scored_value", "scored_query", "sample.value_weight")
TEXT = ("--synthetic-tokens", 100, "--seed", 11, "--sequence-length", 43)  # of 43, 43 and 17 tokens, with token 3


@pytest.fixture(autouse=True)
def one_thread():
    """The models are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Folders of saved tiny models by name, of tiny_models.py or architectures.py; each is made once."""
    made = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name) / "model"
            if name in ("gemma2", "gpt_oss"):  # with a soft cap, with learned sinks
                make_model(ARCHITECTURES[name].config()).save_pretrained(made[name])
            else:
                save_tiny(name, made[name])
        return made[name]

    return folder


def run(main, model, output, *arguments) -> int:
    try:
        return main([str(model), "--output", str(output), *map(str, arguments)])
    except SystemExit as stop:  # argparse
        return stop.code


def collect(model, output, *arguments, text=TEXT, sizes=(HELD_OUT, GOLDEN, SAMPLED)) -> "Stats":
    held_out, golden, sampled = sizes
    kept = ("--held-out-tokens", held_out, "--golden-tokens", golden, "--sample-tokens", sampled, "--sample-seed", 5)
    assert run(collect_stats.main, model, output, "--quiet", *text, *kept, *arguments) == 0
    return Stats(output)


def calibrate(*arguments) -> subprocess.CompletedProcess:
    tool = TOOLS / "kvq-calibrate"
    if not tool.exists():
        pytest.skip(f"no {tool}: build the tools, or set KVQ_BIN")
    command = [tool, *arguments, "--quiet"]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60)


def from_dump(model, folder, *dump_arguments, more=(), moments=MOMENTS, text=TEXT) -> "Stats":
    """Statistics of kvq-calibrate from a dump of the same texts."""
    dump, stats = folder / "dump.h5", folder / "dump.stats"
    assert run(dump_qkv.main, model, dump, "--quiet", *text, *dump_arguments) == 0
    kept = ("--held-out-tokens", HELD_OUT, "--golden-tokens", GOLDEN, "--sample-tokens", SAMPLED, "--seed", 5)
    plan = ("--method", "plain", "--bits", 8, "--group-size", 4, "--output", folder / "dump.artifact")
    done = calibrate(dump, "--stats", stats, "--collect", *moments, *kept, *plan, *more)
    assert done.returncode == 0, done.stderr
    return Stats(stats)


class Stats:
    """A statistics file in memory."""

    def __init__(self, path: Path):
        self.path, file = path, SafetensorsFile.open(path)
        self.metadata = file.metadata
        self.manifest = json.loads(file.metadata["kvq.manifest"])
        self.dtypes = {name: info.dtype for name, info in file.tensors.items()}
        self.arrays = {name: file.array(name) for name in file.tensors}

    def layer(self, index: int) -> dict:
        return self.manifest["layers"][index]


def assert_equal(found: Stats, expected: Stats) -> None:
    """Everything but sums is the same, bit for bit."""
    of_dump = {"producer": expected.manifest["dump"]["producer"], "capture_point": "post_rope"}
    assert found.manifest | {"dump": of_dump} == expected.manifest
    assert found.metadata["version"] == expected.metadata["version"]
    assert found.metadata["requires"] == expected.metadata["requires"]
    assert found.dtypes == expected.dtypes
    assert_sums_close(found, expected)
    for name, x in expected.arrays.items():
        if not is_sum(name):
            assert np.array_equal(found.arrays[name], x), name


def is_sum(name: str) -> bool:
    return name.endswith((".sum", ".first", "value_weight"))


def assert_sums_close(found: Stats, expected: Stats) -> None:
    for name, x in expected.arrays.items():
        if is_sum(name):
            bound = BOUND if any(part in name for part in OF_SOFTMAX) else EXACT_BOUND
            error = relative_error(found.arrays[name], x)
            assert error <= bound, f"{name}: off by {error:.2g} of the largest, allowed {bound}"


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Of the largest magnitude of each KV head; of rows [n, Hkv] of the largest of all."""
    heads = expected.reshape(len(expected), -1) if expected.ndim == 3 else expected.reshape(1, -1)
    largest = np.abs(heads).max(1, keepdims=True)
    return float((np.abs(found.reshape(heads.shape) - heads) / largest).max())


# --- the same as from a dump ---


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3_text", "gemma2", "gpt_oss", "glm4_moe"])
def test_statistics_are_those_of_a_dump(name, dtype, tiny, tmp_path):
    """Grouped queries, windows shorter than a sequence, windows in some layers only, a soft cap, learned sinks."""
    found = collect(tiny(name), tmp_path / "own.stats", "--dtype", dtype)
    assert_equal(found, from_dump(tiny(name), tmp_path, "--dtype", dtype))
    assert found.layer(0)["held_out_tokens"] == HELD_OUT and found.layer(0)["golden_tokens"] == GOLDEN
    assert len(found.arrays["layers.0.sample.key"]) == SAMPLED


def test_keys_alone_are_those_of_a_dump(tiny, tmp_path):
    """MLA: the rotary part of the key, without values."""
    found = collect(tiny("deepseek_v2"), tmp_path / "own.stats")
    assert found.layer(0)["moments"] == ["query", "key"]
    assert_equal(found, from_dump(tiny("deepseek_v2"), tmp_path, moments=("query", "key")))


@pytest.mark.parametrize("queries", ["all", "generated", "prompt"])
def test_generated_tokens_are_those_of_a_dump(queries, tiny, tmp_path):
    """Rows of a generated token come one by one, and queries are counted by them."""
    found = collect(tiny("mistral"), tmp_path / "own.stats", "--generate", 6, "--queries", queries)
    assert_equal(found, from_dump(tiny("mistral"), tmp_path, "--generate", 6, more=("--queries", queries)))
    weight = {"all": 121 - HELD_OUT, "generated": 18, "prompt": 103 - HELD_OUT}[queries]
    assert found.arrays["layers.0.query.weight"].tolist() == [3.0 * weight] * 2


@pytest.mark.parametrize("moments", [("key",), ("query", "value"), ("scored_query",), ("scored_value",)])
def test_chosen_moments_are_those_of_a_dump(moments, tiny, tmp_path):
    found = collect(tiny("llama"), tmp_path / "own.stats", "--collect", *moments)
    expected = from_dump(tiny("llama"), tmp_path, moments=("query", *moments))  # plain also collects queries
    kept = [name for name in expected.layer(0)["moments"] if name in found.layer(0)["moments"]]
    assert found.layer(0)["moments"] == kept and set(moments) <= set(kept)
    assert all(np.array_equal(found.arrays[name], expected.arrays[name]) for name in found.arrays if not is_sum(name))


def test_layers_positions_and_curvature_are_those_of_a_dump(tiny, tmp_path):
    flags = ("--layers", "1", "--stride", 3, "--curvature", "--model-name", "a/name", "--prepend", "3,7")
    found = collect(tiny("qwen3"), tmp_path / "own.stats", *flags)
    assert_equal(found, from_dump(tiny("qwen3"), tmp_path, *flags))
    assert "layers.1.held_out.curvature" in found.arrays and found.manifest["model"]["name"] == "a/name"


def test_nothing_held_out_golden_or_little_sampled_is_as_of_a_dump(tiny, tmp_path):
    none = ("--held-out-tokens", 0, "--golden-tokens", 0)
    found = collect(tiny("llama"), tmp_path / "own.stats", sizes=(0, 0, 4000))
    more = (*none, "--sample-tokens", 4000)
    dump = tmp_path / "dump.h5"
    assert run(dump_qkv.main, tiny("llama"), dump, "--quiet", *TEXT) == 0
    plan = ("--method", "plain", "--bits", 8, "--group-size", 4, "--output", tmp_path / "a", "--seed", 5)
    assert calibrate(dump, "--stats", tmp_path / "x", "--collect", *MOMENTS, *plan, *more).returncode == 0
    assert_equal(found, Stats(tmp_path / "x"))


# --- what the tool does with it ---


def test_the_tool_decides_from_it_and_merges_it_with_its_own(tiny, tmp_path):
    other = ("--synthetic-tokens", 90, "--seed", 12, "--sequence-length", 40)
    own = collect(tiny("llama"), tmp_path / "own.stats", text=other)
    same = from_dump(tiny("llama"), make(tmp_path / "same"), text=other)
    tool = from_dump(tiny("llama"), make(tmp_path / "tool"))
    for second, name in ((own, "with_own"), (same, "with_same")):
        done = calibrate("--merge-stats", tool.path, second.path, "--stats", tmp_path / name)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert_equal(Stats(tmp_path / "with_own"), Stats(tmp_path / "with_same"))
    plan = ("--method", "oscar", "--group-size", 4, "--output", tmp_path / "a")
    done = calibrate("--stats", tmp_path / "with_own", *plan)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("flags, fault", [((), "tokens 0 to 102 of dump"), (("--no-ranges",), "31 sampled tokens")])
def test_the_tool_finds_that_a_dump_holds_the_same_tokens(flags, fault, tiny, tmp_path):
    own = collect(tiny("llama"), tmp_path / "own.stats", *flags)
    tool = from_dump(tiny("llama"), tmp_path)
    done = calibrate("--merge-stats", tool.path, own.path, "--stats", tmp_path / "both")
    assert done.returncode == 3 and not (tmp_path / "both").exists()
    assert "the same dump data as in" in done.stderr if not flags else fault in done.stderr, done.stderr
    longer = ("--synthetic-tokens", 150, "--seed", 13, "--sequence-length", 43)
    rest = collect(tiny("llama"), tmp_path / "rest.stats", *flags, text=longer)
    assert calibrate("--merge-stats", own.path, rest.path, "--stats", tmp_path / "sum").returncode == 0
    done = calibrate("--merge-stats", tool.path, tmp_path / "sum", "--stats", tmp_path / "both")
    assert done.returncode == 3 and (fault if not flags else "sampled tokens are also in") in done.stderr, done.stderr


def test_the_hash_without_ranges_is_that_of_merged_dumps_of_one_sequence_each(tiny, tmp_path):
    own = collect(tiny("llama"), tmp_path / "own.stats", "--no-ranges", sizes=(0, 0, SAMPLED))
    tokens = dump_qkv.synthetic_tokens(100, 11, 89)
    parts = []
    for index, first in enumerate((0, 42, 84)):
        folder = make(tmp_path / str(index))
        part = ("--synthetic-tokens", 100, "--seed", 11, "--sequence-length", 43, "--skip", first)
        part = (*part, "--tokens", 1 + len(tokens[first : first + 42]))
        parts.append(collect(tiny("llama"), folder / "part.stats", text=part, sizes=(0, 0, SAMPLED)).path)
    assert calibrate("--merge-stats", *parts, "--stats", tmp_path / "merged").returncode == 0
    merged = Stats(tmp_path / "merged")
    assert own.layer(0)["content_hash"] == merged.layer(0)["content_hash"]
    assert "ranges" not in own.layer(0) and own.manifest["version"] == "1.4"
    assert np.array_equal(own.arrays["layers.1.sample.token"], merged.arrays["layers.1.sample.token"])
    assert_sums_close(own, merged)


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


# --- batches and memory ---


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gpt_oss", "deepseek_v2"])
def test_a_batch_gives_the_sums_of_its_sequences_and_padding_counts_in_nothing(name, tiny, tmp_path):
    one_by_one = collect(tiny(name), tmp_path / "one.stats")
    together = collect(tiny(name), tmp_path / "two.stats", "--batch", 3)
    pairs = collect(tiny(name), tmp_path / "pairs.stats", "--batch", 2)
    for batch in (together, pairs):
        assert batch.dtypes.keys() == one_by_one.dtypes.keys()
        for key in ("tokens", "sequences", "held_out_tokens", "golden_tokens", "geometry"):
            assert batch.layer(1)[key] == one_by_one.layer(1)[key]
        for part, x in one_by_one.arrays.items():
            if part.endswith((".sum", ".first", ".weight")):
                assert relative_error(batch.arrays[part], x) <= BOUND, part
            elif "held_out" in part or part.endswith("golden.token"):
                assert np.allclose(batch.arrays[part], x, rtol=1e-4, atol=1e-4), part


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes, and of S of a whole sequence."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.elements = max(self.elements, made.numel())
        return made


def test_memory_does_not_grow_with_the_number_of_tokens(tiny, tmp_path, monkeypatch):
    """Neither the largest tensor nor what Python holds, and rows of a sequence are gone when the next one comes."""
    rows, still_there = [], []
    stored = statistics.Statistics._stored

    def watched(*arguments):
        still_there.append(sum(row() is not None for row in rows))
        made = stored(*arguments)
        rows.extend(weakref.ref(x) for x in (*made.host.values(), *made.device.values()))
        return made

    def peaks(sequences: int) -> tuple[int, int]:
        text = ("--synthetic-tokens", 42 * sequences, "--seed", 1, "--sequence-length", 43)
        tracemalloc.start()
        with Largest() as largest:
            collect(tiny("llama"), tmp_path / "x.stats", "--layers", "1", text=text, sizes=(8, 4, 16))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return largest.elements, peak

    monkeypatch.setattr(statistics.Statistics, "_stored", watched)
    peaks(6)  # imports and caches
    few, many = peaks(6), peaks(60)
    assert many[0] == few[0]
    # Texts and places of rows, a few hundred bytes a sequence; its q, k and v take 43 * (6 + 2 + 2) * 20 * 4 bytes.
    assert many[1] - few[1] < 54 * 43 * 10 * 20 * 4 / 10
    assert len(rows) == (6 + 6 + 60) * 6 and not any(still_there)


def test_scores_of_a_whole_sequence_never_exist(monkeypatch):
    monkeypatch.setitem(attention.PANEL_ELEMENTS, "cpu", 6 * 700)
    length, generator = 700, torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(length, heads, 8, generator=generator) for heads in (6, 2, 2))
    sums = attention.AttentionSums(2, 8, 8, True, torch.device("cpu"))
    with Largest() as largest:
        sums.add(q, k, v, attention.SoftmaxShape(0.4), np.ones(length, bool))
    assert largest.elements <= length * 8 * 6  # q
    assert length * length > 10 * largest.elements


def test_only_several_sequences_with_ranges_wait_in_a_file(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(content, "RowSpool", lambda _: pytest.fail("a temporary file is made"))
    one = ("--synthetic-tokens", 60, "--sequence-length", 61)
    collect(tiny("llama"), tmp_path / "one.stats", text=one)
    collect(tiny("llama"), tmp_path / "several.stats", "--no-ranges")


# --- devices ---


def test_layers_on_several_devices_give_the_same_statistics(tiny, tmp_path, monkeypatch):
    """accelerate moves what lies on disk for each call, as it does between GPUs and CPU memory."""
    pytest.importorskip("accelerate")
    one = collect(tiny("llama"), tmp_path / "one.stats")
    spread = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu", "model.norm": "disk"}
    spread |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    monkeypatch.setattr(placement, "choose_placement", lambda _: placement.Placement("cpu", spread))
    assert_equal(collect(tiny("llama"), tmp_path / "two.stats"), one)


@pytest.mark.parametrize("device, gpus", [("cuda", 1), ("balanced", 2)])
def test_statistics_of_gpus_are_those_of_a_dump(device, gpus, tiny, tmp_path):
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    found = collect(tiny("gemma2"), tmp_path / "own.stats", "--device", device)
    assert_equal(found, from_dump(tiny("gemma2"), tmp_path, "--device", device))


# --- parts ---


@pytest.mark.parametrize("elements", [1, 600, 1 << 21])
@pytest.mark.parametrize("window, cap, has_sinks", [(0, None, False), (5, None, True), (2, 3.0, False), (0, 3.0, True)])
def test_attention_sums_are_those_of_the_whole_softmax(window, cap, has_sinks, elements, monkeypatch):
    monkeypatch.setitem(attention.PANEL_ELEMENTS, "cpu", elements)
    length, kv_heads, group, dim, v_dim, scale = 37, 2, 3, 6, 5, 0.7
    generator = torch.Generator().manual_seed(7)
    shapes = (kv_heads * group, dim), (kv_heads, dim), (kv_heads, v_dim)
    q, k, v = (torch.randn(length, *shape, generator=generator) for shape in shapes)
    sinks = torch.randn(kv_heads, group, generator=generator) if has_sinks else None
    counts = np.arange(length) % 7 != 2
    counts[:4] = False
    sums = attention.AttentionSums(kv_heads, dim, v_dim, True, torch.device("cpu"))
    energies = sums.add(q, k, v, attention.SoftmaxShape(scale, window, cap, sinks), counts)

    for head in range(kv_heads):
        outputs, scored, columns = np.zeros((v_dim, v_dim)), np.zeros((dim, dim)), np.zeros(length)
        for g in range(group):
            for t in np.flatnonzero(counts):
                first = max(0, t - window + 1) if window else 0
                query = q[t, head * group + g].double().numpy()
                keys, values = (x[first : t + 1, head].double().numpy() for x in (k, v))
                logits = scale * keys @ query
                slopes = np.ones(len(logits))
                if cap:
                    logits = cap * np.tanh(logits / cap)
                    slopes = 1 - (logits / cap) ** 2
                sink = np.exp(sinks[head, g].item()) if has_sinks else 0.0
                weights = np.exp(logits) / (np.exp(logits).sum() + sink)
                o = weights @ values
                w = scale**2 * np.sum((weights * slopes) ** 2 * ((values - o) ** 2).sum(1))
                outputs += np.outer(o, o)
                scored += w * np.outer(query, query)
                columns[first : t + 1] += weights**2
        assert np.allclose(sums.outputs.sum[head].numpy(), outputs, rtol=0, atol=1e-6 * np.abs(outputs).max())
        assert np.allclose(sums.scored_query.sum[head].numpy(), scored, rtol=0, atol=1e-5 * np.abs(scored).max())
        assert np.allclose(energies[:, head].numpy(), columns, rtol=1e-5, atol=1e-6)


def test_philox_gives_the_published_numbers():
    """Random123, kat_vectors: philox4x32 10."""
    digits = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    for counter, key, expected in (
        ([0, 0, 0, 0], (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (digits, (0xA4093822, 0x299F31D0), [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ):
        block = sample.philox([np.array([word], np.uint64) for word in counter], key)
        assert [int(word[0]) for word in block] == expected


def test_held_out_and_golden_tokens_follow_from_lengths():
    assert choose_held_out([5, 30, 30], 100) == Span(5, 21) and choose_held_out([5, 30, 30], 10) == Span(5, 10)
    assert choose_held_out([10, 9], 100) == Span() and choose_held_out([30, 30], 0) == Span()
    assert choose_golden([5, 30, 30], 4, Span(5, 10)) == Span(61, 4)
    assert choose_golden([5, 30, 15], 400, Span(5, 10)) == Span(15, 20)
    assert TokenPlan([4000], 0, 1, "all", 1024, 4).held_out_queries().tolist() == list(range(1, 1024, 2))
    assert TokenPlan([5, 30, 30], 0, 1, "all", 10, 4).in_sums(1).tolist() == [False] * 10 + [True] * 20
    with pytest.raises(KvqError, match="--queries generated: none of the 20 tokens in the sums is one"):
        TokenPlan([30], 0, 1, "generated", 10, 4)


# --- refusals ---


@pytest.mark.parametrize(
    "flags, code, fault",
    [
        ((), 2, "expected either --text or --dataset, or --synthetic-tokens"),
        (("--text", "nowhere.txt"), 3, "nowhere.txt: cannot read: No such file or directory"),
        ((*TEXT, "--collect", "sst"), 2, "sst weighs values by the query moment of all tokens"),
        ((*TEXT, "--collect", "keys"), 2, "found keys (did you mean key?)"),
        ((*TEXT, "--queries", "generated"), 2, "--queries generated: expected --generate"),
        ((*TEXT, "--generate", 3, "--batch", 2), 2, "--generate runs one sequence at a time, found 2"),
        ((*TEXT, "--golden-tokens", 5000), 2, "--golden-tokens: expected at most 4096, found 5000"),
        ((*TEXT, "--batch", 0), 2, "expected a number of at least 1, found 0"),
        ((*TEXT, "--layers", "7"), 2, "--layers: expected layers 0 to 1, found 7"),
    ],
)
def test_bad_input_ends_in_one_line(flags, code, fault, tiny, tmp_path, capsys):
    assert run(collect_stats.main, tiny("llama"), tmp_path / "x.stats", "--quiet", *flags) == code
    said = capsys.readouterr().err
    assert said.startswith("collect_stats.py: error: ") and fault in said and "Traceback" not in said
    assert len([line for line in said.splitlines() if not line.startswith("hint: ")]) == 1
    assert not (tmp_path / "x.stats").exists()


def test_outputs_and_models_that_cannot_be_are_refused(tiny, tmp_path, capsys):
    for model, output, code, fault in (
        (tiny("llama"), tmp_path / "no" / "x.stats", 3, f"found no {tmp_path / 'no'}"),
        (tiny("llama"), tmp_path, 3, "found a folder"),
        (tiny("llama"), "-", 2, "--output: expected a file, found -"),
        (tmp_path / "nothing", tmp_path / "x.stats", 3, "nothing"),
    ):
        assert run(collect_stats.main, model, output, "--quiet", "--local-files-only", *TEXT) == code
        assert fault in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moments", ["all", "key"])
def test_a_softmax_that_is_not_the_models_leaves_no_file(moments, tiny, tmp_path, monkeypatch, capsys):
    right = layer.SoftmaxShape
    monkeypatch.setattr(layer, "SoftmaxShape", lambda scale, *rest: right(1.3 * scale, *rest))
    flags = ("--quiet", *TEXT, "--collect", moments)
    assert run(collect_stats.main, tiny("llama"), tmp_path / "x.stats", *flags) == 4
    said = capsys.readouterr().err
    assert "attention output: recomputed for the sums, off by" in said and "no statistics were written" in said
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_run_leaves_no_file_and_an_old_one_as_it_was(tiny, tmp_path):
    output = tmp_path / "x.stats"
    output.write_text("old")
    text = ("--synthetic-tokens", 10**6, "--sequence-length", 100, "--quiet", "--threads", 1)
    command = [sys.executable, ROOT / "scripts/collect_stats.py", tiny("llama"), "--output", output, *text]
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[1]
    assert (process.returncode, said) == (130, "\ncollect_stats.py: interrupted; no statistics were written\n")
    assert list(tmp_path.iterdir()) == [output] and output.read_text() == "old"


def test_a_run_says_what_it_does(tiny, tmp_path, capsys):
    assert run(collect_stats.main, tiny("llama"), tmp_path / "x.stats", *TEXT) == 0
    said = capsys.readouterr()
    assert "check: attention output: ok" in said.err and "of keys and values beside the output" in said.err
    assert "103 tokens in 3 sequences, 34 of them held out" in said.out and "kvq-calibrate --stats" in said.out
