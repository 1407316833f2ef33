"""kvq-eval: RoPE-logit MAE (Block-GTQ, Appendix B.3) as numpy finds it and in the paper's order of methods, tables,
JSON, refusals."""

import json
import subprocess
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from dumps import edited
from faulty_dumps import drop, set_attribute
from kvq_tools import BIN, ROOT, calibrate, run, succeed

from kvq.artifact_reader import load_artifact

USAGE, INPUT, UNSUPPORTED = 2, 3, 5
METHODS = ("tq-mse", "block-gtq")


@pytest.fixture(scope="module")
def held_out() -> Path:
    return ROOT / "sample_data/evaluation.h5"


@pytest.fixture(scope="module")
def artifacts(sample, tmp_path_factory) -> dict[tuple[str, int], Path]:
    folder = tmp_path_factory.mktemp("artifacts")
    return {
        (method, bits): calibrate(sample, folder / f"{method}-{bits}.safetensors", "--method", method, "--bits", bits)
        for method in METHODS
        for bits in (2, 3)
    }


def evaluate(*flags: object) -> dict:
    """The document, checked against the schema."""
    document = json.loads(succeed("kvq-eval", "--json", *flags).stdout)
    pytest.importorskip("jsonschema").validate(document, json.loads((ROOT / "formats/eval.schema.json").read_text()))
    return document


BY_ROPE = ("--metric", "rope_logit_mae")


def mae_of(document: dict, scheme: int, layer: int) -> float:
    return document["schemes"][scheme]["layers"][layer]["rope_logit_mae"]


def heads_of(document: dict, scheme: int, layer: int) -> list[float]:
    return [head["rope_logit_mae"] for head in document["schemes"][scheme]["layers"][layer]["heads"]]


def comparison(document: dict, scheme: str, metric: str) -> dict:
    return next(own for own in document["comparisons"] if (own["scheme"], own["metric"]) == (scheme, metric))


def refusal(*flags: object) -> tuple[int, str]:
    """Exit code and the line of the error; a hint may follow."""
    result = run("kvq-eval", *flags)
    lines = [line for line in result.stderr.splitlines() if not line.startswith("hint: ")]
    assert result.stdout == "" and len(lines) == 1, result
    return result.code, lines[0].removeprefix("kvq-eval: error: ")


# Numbers


@pytest.mark.parametrize("bits", [2, 3])
def test_block_gtq_beats_tq_mse_in_every_layer(held_out, artifacts, bits):
    """Tables 1 and 11 of the paper: at 2 and 3 bits of a key element, on every layer of every model."""
    document = evaluate("--model", held_out, *BY_ROPE, *(artifacts[method, bits] for method in METHODS))
    other, own = document["schemes"]
    against = comparison(document, own["name"], "rope_logit_mae")
    assert (against["wins"], against["losses"], against["layers"]) == (6, 0, 6)
    assert own["k_code_bits"] == other["k_code_bits"] == bits, "no more bits than the other"
    assert -0.5 < against["interval"][0] < against["change"] < against["interval"][1] < -0.1
    for layer in range(6):
        assert all(b < a for a, b in zip(heads_of(document, 0, layer), heads_of(document, 1, layer), strict=True))


def rotated(x: np.ndarray, positions: np.ndarray, attributes: dict, inv_freq: np.ndarray, factor: float) -> np.ndarray:
    """x [..., T, D] rotated by formats/dump.md; `factor` multiplies cos and sin."""
    first, count = int(attributes["rotary_offset"]), len(inv_freq)
    half = attributes["rope_layout"] == "half"
    a = first + np.arange(count) * (1 if half else 2)
    b = a + (count if half else 1)
    turn = factor * np.exp(1j * np.multiply.outer(positions, inv_freq))
    z = (x[..., a] + 1j * x[..., b]) * turn
    y = x.astype(np.float64)
    y[..., a], y[..., b] = z.real, z.imag
    return y


def reference(dump: Path, artifact: Path, layer: int, pairs: int) -> np.ndarray:
    """rope_logit_mae [Hkv] of a pre_rope dump, by the second reader and its codec, offset by offset."""
    with h5py.File(dump) as file:
        group, positions = file[f"layers/{layer}"], file["positions"][:].astype(np.float64)
        attributes, inv_freq = dict(group.attrs), group["rope_inv_freq"][:]
        q, k = (group[name][:].transpose(1, 0, 2).astype(np.float64) for name in "qk")
    factor = float(attributes["rope_attention_factor"])
    tokens = len(positions)
    query = np.arange(pairs) * tokens // pairs
    key = (7919 * query + 13) % tokens
    k_cached = rotated(k, positions, attributes, inv_freq, factor).astype(np.float32)
    k_hat = load_artifact(artifact).layers[layer].sides["k"].reconstruct_heads(k_cached)
    error = rotated(k_cached.astype(np.float64) - k_hat, -positions, attributes, inv_freq, 1 / factor)[:, key]
    q = q[:, query].reshape(len(k), -1, pairs, q.shape[-1])
    logits = [
        np.einsum("hgpd,hpd->hgp", q, rotated(error, np.full(pairs, offset), attributes, inv_freq, factor**2))
        for offset in np.linspace(-1024, 1024, 50)
    ]
    return np.abs(logits).mean(axis=(0, 2, 3))


LAYOUTS = [
    {"rope": "half"},
    {"rope": "interleaved"},
    {"rope": "half", "rotary_dim": 24, "rotary_offset": 5},
    {"rope": "interleaved", "rotary_dim": 24, "rotary_offset": 8, "rope_attention_factor": 1.25},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_numpy_finds_the_same_error(make_dump, tmp_path, layout):
    dump = make_dump(tokens=101, head_dim=48, capture="pre_rope", seed=5, **layout)
    for method, pairs in (("plain", 101), ("oscar", 60)):
        artifact = calibrate(dump, tmp_path / method, "--method", method, "--bits", 2, "--group-size", 0)
        document = evaluate("--model", dump, "--pairs", pairs, *BY_ROPE, artifact)
        assert document["settings"]["pairs"] == pairs
        for place, layer in enumerate(document["schemes"][0]["layers"]):
            expected = reference(dump, artifact, layer["index"], pairs)
            np.testing.assert_allclose(heads_of(document, 0, place), expected, rtol=1e-5)
            assert layer["rope_logit_mae"] == pytest.approx(expected.mean(), rel=1e-5)


def test_without_rope_there_is_an_error_as_well(make_dump, tmp_path):
    dump = make_dump(tokens=64, head_dim=32, rope="none")
    few, many = (calibrate(dump, tmp_path / f"{bits}", "--method", "plain", "--bits", bits) for bits in (2, 4))
    document = evaluate("--model", dump, few, many)
    assert comparison(document, "4", "rope_logit_mae")["wins"] == 2


def test_layers_without_values_are_measured(make_dump, tmp_path):
    dump = make_dump(tokens=64, head_dim=32, kind="mla_rope", kv_heads=1)
    artifact = calibrate(dump, tmp_path / "out", "--method", "plain")
    mean = evaluate("--model", dump, "--no-windows", artifact)["schemes"][0]["mean"]
    assert mean["rope_logit_mae"] > 0 and mean["attention_kl"]["mean"] > 0
    assert not mean.keys() & {"v_rel_mse", "sv_rel_mse", "output_rel_mse"}
    (scheme,) = evaluate("--model", dump, "--scheme", "naive-int2")["schemes"]
    assert scheme["effective_bits"] == 3
    assert all("v_effective_bits" not in layer and layer["k_effective_bits"] == 3 for layer in scheme["layers"])


def test_bits_are_weighted_by_elements(make_dump, tmp_path):
    """A row's scale and minimum take 32 / 32 bits of an element in one layer and 32 / 128 in the other layer, which has
    eight times as many elements."""
    wide = make_dump(tokens=64, layers=2, head_dim=128, q_heads=4, kv_heads=4)

    def replace(file):
        del file["layers/1"]
        with h5py.File(wide) as other:
            file.copy(other["layers/1"], "layers/1")

    dump = edited(make_dump(tokens=64, layers=2, head_dim=32, q_heads=4, kv_heads=2), tmp_path / "mixed.h5", replace)
    (scheme,) = evaluate("--model", dump, "--scheme", "naive-int2")["schemes"]
    assert [layer["k_effective_bits"] for layer in scheme["layers"]] == [3, 2.25]
    assert scheme["effective_bits"] == pytest.approx((3 + 8 * 2.25) / 9)


def test_one_pair_has_no_interval(make_dump):
    dump = make_dump(tokens=64, layers=1, head_dim=32, q_heads=2, kv_heads=1)
    flags = ("--model", dump, "--scheme", "naive-int2", "--scheme", "naive-int3")
    own = comparison(evaluate(*flags), "naive-int3", "output_rel_mse")
    assert own["change"] < 0 and own["interval"] == [None, None]
    last = succeed("kvq-eval", *flags).stdout.splitlines()[-1]
    assert f"{own['change']:+.1%} [-, -]" in last


def test_projected_outputs_are_compared_layer_by_layer(make_dump, tmp_path):
    def add(file):
        for layer in "01":
            file[f"layers/{layer}/o_proj"] = (
                np.random.default_rng(int(layer)).standard_normal((48, 64)).astype(np.float16)
            )

    dump = edited(make_dump(tokens=64, layers=2, head_dim=32, q_heads=2, kv_heads=1), tmp_path / "projected.h5", add)
    document = evaluate("--model", dump, "--scheme", "naive-int2", "--scheme", "naive-int3")
    own = comparison(document, "naive-int3", "o_proj_rel_mse")
    assert (own["wins"], own["losses"], own["layers"]) == (2, 0, 2)
    first, other = (sum(layer["o_proj_rel_mse"] for layer in scheme["layers"]) for scheme in document["schemes"])
    assert own["change"] == pytest.approx(other / first - 1)
    assert own["interval"][0] <= own["change"] <= own["interval"][1] < 0


def peak_megabytes(*flags: object) -> float:
    """Peak memory of a successful process, sampled from outside every few milliseconds."""
    process = subprocess.Popen(
        [BIN / "kvq-eval", "--quiet", "--threads", "1", *map(str, flags)], stdout=subprocess.DEVNULL
    )
    peak = 0.0
    while process.poll() is None:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        peak = max([peak, *(int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmHWM"))])
        time.sleep(0.002)
    assert process.returncode == 0
    return peak


def test_projected_outputs_take_little_memory(make_dump, tmp_path):
    """Floats [T, hidden] would take 134 MB for the exact outputs and as much for each scheme."""
    bare = make_dump(tokens=4096, sequences=1, layers=1, head_dim=16, q_heads=1, kv_heads=1)
    weights = np.random.default_rng(0).standard_normal((8192, 16)).astype(np.float16)
    projected = edited(
        bare, tmp_path / "projected.h5", lambda file: file.create_dataset("layers/0/o_proj", data=weights)
    )
    assert (
        peak_megabytes("--model", projected, "--scheme", "naive-int2")
        < peak_megabytes("--model", bare, "--scheme", "naive-int2") + 60
    )
    assert "o_proj" in succeed("kvq-eval", "--model", projected, "--scheme", "naive-int2").stdout


# Printed output


def shown(x: float) -> str:
    return "0" if x == 0 else f"{x:.4f}" if x >= 0.001 else f"{x:.1e}"


def test_layer_table(held_out, artifacts):
    paths = [artifacts["tq-mse", 2], artifacts["block-gtq", 2], artifacts["block-gtq", 3]]
    document = evaluate("--model", held_out, *BY_ROPE, *paths)
    result = succeed("kvq-eval", "--model", held_out, *BY_ROPE, *paths)
    title, *lines = result.stdout.splitlines()
    rows = [line.split() for line in lines]
    assert result.stderr == "" and title.startswith("rope_logit_mae: ")
    assert rows[0] == ["layer", "tq-mse-2", "block-gtq-2", "change", "block-gtq-3", "change"]
    for layer in range(6):
        a, b, c = (mae_of(document, scheme, layer) for scheme in range(3))
        assert rows[1 + layer] == [str(layer), shown(a), shown(b), f"{b / a - 1:+.1%}", shown(c), f"{c / a - 1:+.1%}"]
    means = [np.mean([mae_of(document, scheme, layer) for layer in range(6)]) for scheme in range(3)]
    assert [entry["mean"]["rope_logit_mae"] for entry in document["schemes"]] == pytest.approx(means)
    assert rows[7] == [
        "mean",
        shown(means[0]),
        shown(means[1]),
        f"{means[1] / means[0] - 1:+.1%}",
        shown(means[2]),
        f"{means[2] / means[0] - 1:+.1%}",
    ]
    assert rows[8] == ["K", "codes", "2.00", "2.00", "3.00"]
    assert rows[9] == ["bits", *(f"{entry['effective_bits']:.2f}" for entry in document["schemes"])]
    assert lines[10:] == [
        "block-gtq-2 wins 6/6 layers against tq-mse-2",
        "block-gtq-3 wins 6/6 layers against tq-mse-2",
    ]


def test_wide_layer_tables_are_cut_into_blocks(held_out):
    """Tables fit 80 columns; each block begins with the first candidate."""
    schemes = [f"tq-mse-{bits}" for bits in range(1, 9)]
    flags = [word for name in schemes for word in ("--scheme", name)]
    lines = succeed("kvq-eval", "--model", held_out, *BY_ROPE, *flags).stdout.splitlines()
    heads = [line.split() for line in lines if line.strip().startswith("layer")]
    assert len(heads) > 1 and all(len(line) <= 80 for line in lines[1:])
    assert [name for head in heads for name in head[2:] if name != "change"] == schemes[1:]
    assert all(head[:2] == ["layer", "tq-mse-1"] for head in heads)


def test_summary(held_out, artifacts):
    """All tables fit 80 columns and have the numbers of the document."""
    flags = (
        "--model",
        held_out,
        artifacts["tq-mse", 2],
        artifacts["block-gtq", 2],
        "--scheme",
        "kivi-2",
        "--by-context",
    )
    document = evaluate(*flags)
    lines = succeed("kvq-eval", *flags).stdout.splitlines()
    assert all(len(line) <= 80 for line in lines)
    rows = {line.split()[0]: line.split() for line in reversed(lines) if line}
    for scheme in document["schemes"]:
        mean = scheme["mean"]
        assert rows[scheme["name"]][:7] == [
            scheme["name"],
            f"{scheme['effective_bits']:.2f}",
            *(
                shown(mean[name])
                for name in ("k_rel_mse", "v_rel_mse", "logit_rel_mse", "sv_rel_mse", "output_rel_mse")
            ),
        ]
        kl = next(line.split() for line in lines[lines.index("") + 2 :] if line.startswith(scheme["name"]))
        assert kl[1:6] == [shown(mean["attention_kl"][name]) for name in ("mean", "median", "p95", "p99", "max")]
    text = " ".join(lines)
    for name in ("block-gtq-2", "kivi-2"):
        own = comparison(document, name, "output_rel_mse")
        assert f"{own['change']:+.1%} [{own['interval'][0]:+.1%}, {own['interval'][1]:+.1%}]" in text
    assert [bucket["first"] for bucket in document["schemes"][0]["layers"][0]["buckets"]] == [0, 64]
    assert rows["0+"][1] == str(3 * 64 * 8) and rows["64+"][1] == str((447 - 3 * 64) * 8)


def test_json_is_one_document(held_out, artifacts):
    document = evaluate("--model", held_out, "--layers", "2,4", *(artifacts[method, 2] for method in METHODS))
    assert document.keys() == {"schema_version", "tool", "dump", "settings", "schemes", "comparisons", "notes"}
    assert document["dump"]["tokens"] == 447 and document["dump"]["sequences"] == 3
    assert document["settings"]["pairs"] == 447, "a query token has one pair"
    assert document["settings"]["rope_offsets"] == pytest.approx(np.linspace(-1024, 1024, 50))
    assert [entry["method"] for entry in document["schemes"]] == list(METHODS)
    fixed = {
        "index",
        "k_rel_mse",
        "v_rel_mse",
        "logit_rel_mse",
        "rope_logit_mae",
        "sv_rel_mse",
        "attention_kl",
        "top10_overlap",
        "output_rel_mse",
    }
    for scheme in document["schemes"]:
        assert [layer["index"] for layer in scheme["layers"]] == [2, 4]
        assert all(fixed <= layer.keys() for layer in scheme["layers"])


def test_windows(sample, held_out, tmp_path):
    """A window as long as every sequence leaves no token to quantize; with --no-windows every token is quantized."""
    windowed, bare = (
        calibrate(sample, tmp_path / name, "--method", "plain", "--recent-tokens", tokens)
        for name, tokens in (("w", 149), ("b", 0))
    )
    inside, outside, plain = (
        evaluate("--model", held_out, *flags)["schemes"][0]["mean"]
        for flags in ((windowed,), ("--no-windows", windowed), (bare,))
    )
    assert (
        inside["attention_kl"]["max"] == inside["output_rel_mse"] == inside["k_rel_mse"] == 0
        and inside["top10_overlap"] == 1
    )
    assert outside == plain and plain["attention_kl"]["mean"] > 0
    assert "--no-windows" in succeed("kvq-eval", "--model", held_out, windowed).stdout.splitlines()[-1]
    partly = evaluate(
        "--model",
        held_out,
        calibrate(sample, tmp_path / "p", "--method", "plain", "--sink-tokens", 8, "--recent-tokens", 32),
    )
    assert 0 < partly["schemes"][0]["mean"]["attention_kl"]["mean"] < plain["attention_kl"]["mean"]


def test_windows_of_kivi(held_out):
    """Without windows, neither errors nor bits depend on them."""
    inside, outside = (
        evaluate("--model", held_out, "--scheme", "kivi-2", "--context", 1024, *flags)["schemes"][0]
        for flags in ((), ("--no-windows",))
    )
    # The query of token 1023 reads 128 keys and 129 values exactly: its own token, and what the residual holds.
    assert outside["effective_bits"] == 3
    assert inside["effective_bits"] == pytest.approx(3 + 13 * (128 + 129) / 2 / 1024)
    assert inside["mean"]["output_rel_mse"] < outside["mean"]["output_rel_mse"]


def test_residual_of_kivi(held_out):
    document = evaluate("--model", held_out, "--scheme", "kivi-2", "--scheme", "kivi-2-r128", "--scheme", "kivi-2-r32")
    published, same, short = document["schemes"]
    assert published["mean"] == same["mean"] and published["effective_bits"] == same["effective_bits"]
    assert short["effective_bits"] < published["effective_bits"]
    assert short["mean"]["output_rel_mse"] > published["mean"]["output_rel_mse"]


B4 = ("attention_kl_b4", "top10_overlap_b4")


def test_weights_as_block_gtq_b4_defines_them(make_dump, tmp_path):
    """Queries of the second half, softmax over the keys before the query's own; here by numpy."""
    dump = make_dump(tokens=101, sequences=1, layers=2, head_dim=16, q_heads=4, kv_heads=2)
    artifact = calibrate(dump, tmp_path / "out", "--method", "plain", "--bits-v", 16, "--sink-tokens", 0)
    documents = [evaluate("--model", dump, "--no-windows", "--metric", name, artifact) for name in B4]
    assert documents[0]["schemes"] == documents[1]["schemes"]
    for layer, said in enumerate(documents[0]["schemes"][0]["layers"]):
        with h5py.File(dump) as file:
            group = file[f"layers/{layer}"]
            q, k = (group[name][:].transpose(1, 0, 2).astype(np.float64) for name in "qk")
            scale = float(group.attrs["softmax_scale"])
        k_hat = load_artifact(artifact).layers[layer].sides["k"].reconstruct_heads(k.astype(np.float32))
        divergence, overlap = [], []
        for head, queries in enumerate(q):
            for i in range(51, 101):
                s, s_hat = (scale * own[head // 2, :i] @ queries[i] for own in (k, k_hat.astype(np.float64)))
                p, p_hat = (np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in (s, s_hat))
                divergence.append((p * np.log(p / p_hat)).sum())
                overlap.append(len(set(np.argsort(-s)[:10]) & set(np.argsort(-s_hat)[:10])) / 10)
        assert said["attention_kl_b4"] == pytest.approx(np.mean(divergence), rel=1e-5)
        assert said["top10_overlap_b4"] == pytest.approx(np.mean(overlap), abs=1e-3)
        assert said["attention_kl_b4"] != said["attention_kl"]["mean"]


def test_weights_of_b4_are_measured_only_if_asked_for(held_out):
    said = evaluate("--model", held_out, "--layers", 0, "--scheme", "tq-mse-2-k")
    assert not set(B4) & said["schemes"][0]["mean"].keys()


def test_losses_are_no_wins(held_out, artifacts):
    good, bad = artifacts["block-gtq", 3], artifacts["block-gtq", 2]
    result = succeed("kvq-eval", "--model", held_out, *BY_ROPE, good, bad, good)
    # `good` is given twice: equal stems are replaced by paths, and the second of equal paths gets a number.
    assert result.stdout.splitlines()[-2:] == [
        f"{name} wins 0/6 layers against {good}" for name in ("block-gtq-2", f"{good} (2)")
    ]


def test_equal_names_are_numbered(make_dump, tmp_path):
    """Comparisons identify schemes by name, so names must be unique."""
    dump = make_dump(tokens=64, head_dim=32)
    artifact = calibrate(dump, tmp_path / "kivi-2.safetensors", "--method", "plain")
    document = evaluate("--model", dump, artifact, "--scheme", "kivi-2", "--scheme", "bf16", "--scheme", "kivi-2")
    names = ["kivi-2", "kivi-2 (2)", "bf16", "kivi-2 (3)"]
    assert [scheme["name"] for scheme in document["schemes"]] == names
    assert {own["scheme"] for own in document["comparisons"]} == set(names[1:])


def test_threads_change_nothing_and_a_seed_does(held_out, artifacts):
    flags = ("--model", held_out, artifacts["block-gtq", 2], "--json")
    one, two, other = (
        succeed("kvq-eval", *flags, *more).stdout for more in (("--threads", 1), ("--threads", 3), ("--seed", 1))
    )
    assert one == two
    mean, other_mean = (json.loads(text)["schemes"][0]["mean"]["rope_logit_mae"] for text in (one, other))
    assert mean != other_mean and mean == pytest.approx(other_mean, rel=0.1)


def test_some_layers(held_out, sample, artifacts, tmp_path):
    some = calibrate(sample, tmp_path / "some.safetensors", "--method", "tq-mse", "--layers", "1,3")
    document = evaluate("--model", held_out, "--layers", "1,3", some, artifacts["block-gtq", 2])
    assert [layer["index"] for layer in document["schemes"][0]["layers"]] == [1, 3]
    code, message = refusal("--model", held_out, some)
    assert code == INPUT and message == f"{some}: has no layer 0, but the dump has"


def test_several_dumps(held_out, sample, artifacts):
    document = evaluate("--model", held_out, "--model", sample, artifacts["block-gtq", 2])
    assert document["dump"]["tokens"] == 2 * 447


# Refusals


def test_artifact_of_another_model(held_out, artifacts, tmp_path):
    artifact = artifacts["block-gtq", 2]
    other = edited(held_out, tmp_path / "other.h5", set_attribute("/", "model_fingerprint", "ab" * 32))
    code, message = refusal("--model", other, artifact)
    assert code == INPUT
    assert message.startswith(
        f"{artifact}: of another model (kvq-tiny, fingerprint 948642df26e0...; the dump: kvq-tiny, abab"
    )
    unknown = edited(held_out, tmp_path / "unknown.h5", lambda file: file.attrs.pop("model_fingerprint"))
    assert evaluate("--model", unknown, artifact)["dump"]["fingerprint"] == "", "nothing to compare with"


def shift_frequency(file: h5py.File) -> None:
    file["layers/2/rope_inv_freq"][3] *= 1.5


ROPE = {
    "kind": ("layers/2", "rope_layout", "interleaved", "rope layout: half, but the dump has interleaved"),
    "factor": ("layers/2", "rope_attention_factor", 1.5, "rope_attention_factor: 1, but the dump has 1.5"),
    "layers": ("/", "num_layers", 9, "of a model of 6 layers, but the dump's has 9"),
}


@pytest.mark.parametrize("name", ROPE)
def test_artifact_of_another_geometry(held_out, artifacts, tmp_path, name):
    place, attribute, value, words = ROPE[name]
    code, message = refusal(
        "--model",
        edited(held_out, tmp_path / "other.h5", set_attribute(place, attribute, value)),
        artifacts["tq-mse", 2],
    )
    assert code == INPUT and message.endswith(words)


def test_artifact_of_other_frequencies(held_out, artifacts, tmp_path):
    code, message = refusal("--model", edited(held_out, tmp_path / "other.h5", shift_frequency), artifacts["tq-mse", 2])
    assert code == INPUT and "layer 2 rope_inv_freq[3]: " in message


SLICE, ONE_HEAD = {"rotary_dim": 16}, {"kv_heads": 1}
OTHERS = [
    ({}, {"q_heads": 8}, "num_q_heads: 4, but the dump has 8"),
    ({}, {"kv_heads": 4}, "num_kv_heads: 2, but the dump has 4"),
    ({}, {"head_dim": 64}, "head_dim: 32, but the dump has 64"),
    ({}, SLICE, "rotary_dim: 32, but the dump has 16"),
    (SLICE, {"rotary_offset": 8}, "rotary_offset: 0, but the dump has 8"),
    (ONE_HEAD, {"kind": "mla_rope"}, "kind: gqa, but the dump has mla_rope"),
    ({}, {"layers": 3}, "of a model of 2 layers, but the dump's has 3"),
]


@pytest.mark.parametrize("options, other, words", OTHERS, ids=str)
def test_artifact_of_another_size(make_dump, tmp_path, options, other, words):
    options = {"tokens": 64, "head_dim": 32} | options
    artifact = calibrate(make_dump(**options), tmp_path / "out", "--method", "plain")
    code, message = refusal("--model", make_dump(**options | other), artifact)
    assert code == INPUT and message.endswith(words)


def test_every_artifact_is_checked(held_out, make_dump, artifacts, tmp_path):
    stranger = calibrate(make_dump(layers=6), tmp_path / "stranger", "--method", "plain")
    code, message = refusal("--model", held_out, artifacts["tq-mse", 2], stranger)
    assert code == INPUT and message.startswith(f"{stranger}: ")


WORDS = [
    (("--metric", "kl"), USAGE, '--metric: unknown "kl"'),
    (("--layers", "6"), USAGE, "--layers: layer 6 is not there"),
    (("--layers", "x"), USAGE, "--layers: expected a list"),
    (("--pairs", "0"), USAGE, "--pairs: "),
    (("--seed", "-1"), USAGE, "--seed: "),
    (("no.safetensors",), INPUT, "no.safetensors: "),
]


@pytest.mark.parametrize("flags, code, words", WORDS, ids=str)
def test_flags_that_make_no_sense(held_out, artifacts, flags, code, words):
    found, message = refusal("--model", held_out, artifacts["tq-mse", 2], *flags)
    assert found == code and message.startswith(words)


def test_files_are_needed(held_out, artifacts):
    assert refusal("--model", held_out)[0] == USAGE
    assert refusal(artifacts["tq-mse", 2]) == (USAGE, "--model is required")
    assert refusal("--model", artifacts["tq-mse", 2], artifacts["tq-mse", 2])[0] == INPUT
    assert refusal("--model", held_out, held_out)[0] == INPUT


def test_dump_that_cannot_be_used(held_out, artifacts, tmp_path):
    newer = edited(held_out, tmp_path / "newer.h5", set_attribute("/", "version", "2.0"))
    assert refusal("--model", newer, artifacts["tq-mse", 2])[0] == UNSUPPORTED
    broken = edited(held_out, tmp_path / "broken.h5", drop("layers/1/k"))
    assert refusal("--model", broken, artifacts["tq-mse", 2])[0] == INPUT
