"""The numbers in statistics and artifacts, against numpy in float64 (reference.py)."""

import json
from pathlib import Path

import numpy as np
import pytest
import reference
from kvq_tools import calibrate, succeed
from safetensors import safe_open

from kvq.artifact_reader import load_artifact

DOUBLE, SINGLE = 1e-12, 1e-5
TOLERANCE = {
    "query": DOUBLE,
    "key": DOUBLE,
    "value": DOUBLE,
    "scored_value": SINGLE,
    "scored_query": SINGLE,
    "sst": SINGLE,
}
SMALL = {
    "tokens": 150,
    "sequences": 4,
    "layers": 2,
    "q_heads": 6,
    "kv_heads": 2,
    "head_dim": 32,
    "v_head_dim": 48,
    "query_spectrum": 0.9,
    "channel_means": 0.5,
}
WINDOWED = SMALL | {"sliding_window": 17, "sink": True}


def collect(dump: Path, folder: Path, *flags: object) -> dict[str, np.ndarray]:
    calibrate(dump, folder / "out", "--collect", "all", "--stats", folder / "stats", *flags)
    return load(folder / "stats")


def load(path: Path) -> dict[str, np.ndarray]:
    """All tensors but bfloat16 samples, because numpy has no such type."""
    with safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys() if file.get_slice(name).get_dtype() != "BF16"}


def stored_moment(
    stats: dict[str, np.ndarray], layer: int, name: str, head: int
) -> tuple[np.ndarray, np.ndarray, float]:
    prefix = f"layers.{layer}.{name}"
    return stats[f"{prefix}.sum"][head], stats[f"{prefix}.first"][head], float(stats[f"{prefix}.weight"][head])


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """Frobenius norm of the difference, relative."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


# Statistics


@pytest.mark.parametrize(
    "options", [SMALL, WINDOWED, SMALL | {"sequences": 150}], ids=["causal", "windowed", "one-token sequences"]
)
def test_moments(make_dump, tmp_path, options):
    dump = make_dump(**options)
    stats = collect(dump, tmp_path)
    for index in range(2):
        layer = reference.read_layer(dump, index)
        for head in range(layer.heads):
            moments = reference.moments(layer, head)
            for name, expected in moments.items():
                found = stored_moment(stats, index, name, head)
                assert found[2] == pytest.approx(expected[2], rel=TOLERANCE[name]), name
                if not np.any(expected[0]):  # queries that see only one token have weight 0 in C_SQ
                    assert np.abs(found[0]).max() < 1e-6 * moments["query"][0].max(), name
                    continue
                assert relative(found[0], expected[0]) < TOLERANCE[name], name
                assert relative(found[1], expected[1]) < TOLERANCE[name] * 10, name
                assert np.array_equal(found[0], found[0].T), name


def test_moments_of_a_real_model(sample, tmp_path):
    stats = collect(sample, tmp_path, "--layers", "1,4")
    for index in (1, 4):
        layer = reference.read_layer(sample, index)
        for name, expected in reference.moments(layer, 1).items():
            assert relative(stored_moment(stats, index, name, 1)[0], expected[0]) < TOLERANCE[name], name


def test_sample_holds_rows_of_the_dump(make_dump, tmp_path):
    dump = make_dump(**SMALL)
    stats = collect(dump, tmp_path, "--sample-tokens", 40)
    for index in range(2):
        layer = reference.read_layer(dump, index)
        tokens = stats[f"layers.{index}.sample.token"]
        assert len(set(tokens)) == 40 and (np.diff(stats[f"layers.{index}.sample.key"]) > 0).all()
        for name in "qkv":
            assert np.array_equal(stats[f"layers.{index}.sample.{name}"], getattr(layer, name)[tokens])
        for head in range(layer.heads):
            found = stats[f"layers.{index}.sample.value_weight"][:, head]
            assert found == pytest.approx(reference.column_energy(layer, head)[tokens], rel=SINGLE)
    assert set(stats["layers.0.sample.token"]) != set(stats["layers.1.sample.token"])


@pytest.mark.parametrize(
    "rope",
    [
        {"rope": "half"},
        {"rope": "interleaved", "rotary_dim": 16, "rotary_offset": 8},
        {"rope": "half", "rotary_dim": 8, "rope_attention_factor": 1.3},
    ],
    ids=str,
)
def test_pre_rope_dumps_are_rotated_on_reading(make_dump, tmp_path, rope):
    options = SMALL | rope
    (tmp_path / "pre").mkdir()
    post = collect(make_dump(**options), tmp_path)
    pre = collect(make_dump(**options, capture="pre_rope"), tmp_path / "pre")
    for name in ("query", "key", "scored_value", "scored_query"):
        assert relative(pre[f"layers.1.{name}.sum"], post[f"layers.1.{name}.sum"]) < SINGLE
    untouched = make_dump(**options, capture="pre_rope")
    assert (
        relative(reference.moments(reference.read_layer(untouched, 1), 0)["key"][0], post["layers.1.key.sum"][0]) > 0.01
    )


# Rotations

METHODS = [
    (),
    ("--composition", "uh"),
    ("--composition", "u"),
    ("--composition", "residual"),
    ("--method", "saw-int4"),
    ("--method", "quarot", "--random-signs"),
    ("--method", "random"),
    ("--share", "layer"),
    ("--target-v", "sst"),
]


@pytest.mark.parametrize("flags", METHODS, ids=str)
def test_rotations_are_orthogonal(sample, tmp_path, flags):
    artifact = load_artifact(calibrate(sample, tmp_path / "out", "--layers", "0,5", *flags))
    for layer in artifact.layers.values():
        for plan in layer.sides.values():
            for head in range(layer.num_kv_heads):
                rotation = plan.matrix(head)
                assert np.abs(rotation.T @ rotation - np.eye(plan.dim)).max() < 1e-6


def target(dump: Path, index: int, head: int, side: str, plan) -> np.ndarray:
    """C_Q of keys, exact C_S of values, around the center if the plan has one."""
    moment = reference.moments(reference.read_layer(dump, index), head)["query" if side == "k" else "scored_value"]
    center = plan.tensors["center"][head].astype(np.float64) if side == "v" and "center" in plan.tensors else None
    return reference.mean(moment, center)


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("composition", ["uh", "uhp"])
@pytest.mark.parametrize("center", ["none", "kv"])
def test_importance_is_constant_within_hadamard_blocks(make_dump, tmp_path, head_dim, composition, center):
    """OSCAR Lemma 1 and Eq. 3: every channel of a block has the same share of the target."""
    dump = make_dump(**SMALL | {"head_dim": head_dim, "v_head_dim": 64})
    artifact = load_artifact(calibrate(dump, tmp_path / "out", "--composition", composition, "--center", center))
    for index, layer in artifact.layers.items():
        for side, plan in layer.sides.items():
            for head in range(2):
                rotation = plan.matrix(head)
                diagonal = np.diag(rotation.T @ target(dump, index, head, side, plan) @ rotation)
                if composition == "uhp":
                    diagonal = reference.bit_reversal(plan.dim) @ diagonal
                blocks = diagonal.reshape(-1, plan.order)
                assert blocks == pytest.approx(
                    np.repeat(blocks.mean(axis=1, keepdims=True), plan.order, axis=1), rel=1e-5
                )


@pytest.mark.parametrize("center", ["none", "kv"])
def test_eigenbasis_and_spectrum(make_dump, tmp_path, center):
    dump = make_dump(**SMALL)
    artifact = load_artifact(calibrate(dump, tmp_path / "out", "--stats", tmp_path / "stats", "--center", center))
    stats = load(tmp_path / "stats")
    for index, layer in artifact.layers.items():
        for side, plan in layer.sides.items():
            for head in range(2):
                expected = np.linalg.eigvalsh(target(dump, index, head, side, plan))[::-1]
                basis, spectrum = plan.tensors["eigenbasis"][head].astype(np.float64), plan.tensors["spectrum"][head]
                assert np.abs(spectrum - expected).max() < 1e-6 * expected[0] and (np.diff(spectrum) <= 0).all()
                moved = target(dump, index, head, side, plan) @ basis
                assert np.abs(moved - basis * spectrum).max() < 3e-6 * expected[0]
                largest = np.abs(basis).argmax(axis=0)
                assert (basis[largest, range(plan.dim)] > 0).all(), "the largest component is positive"
                if side == "k":  # C_Q is summed in double, so its eigenvalues are those of the dump
                    collected = reference.mean(stored_moment(stats, index, "query", head))
                    assert np.abs(np.linalg.eigvalsh(collected)[::-1] - expected).max() < 1e-8 * expected[0]


@pytest.mark.parametrize("head_dim", [64, 80, 96])
@pytest.mark.parametrize("composition", ["uhp", "uh", "u", "up", "uph", "hp", "p", "hup", "hpu"])
def test_recipe_and_eigenbasis_give_the_rotation(make_dump, tmp_path, head_dim, composition):
    dump = make_dump(head_dim=head_dim, tokens=120, layers=1)
    artifact = load_artifact(calibrate(dump, tmp_path / "out", "--composition", composition))
    for plan in artifact.layers[0].sides.values():
        assert plan.recipe == "*".join(composition.upper())
        for head in range(2):
            basis = plan.tensors["eigenbasis"][head] if "eigenbasis" in plan.tensors else np.eye(head_dim)
            assert np.abs(reference.composed(plan.recipe, np.float64(basis)) - plan.matrix(head)).max() < 1e-6


def test_shared_rotation_is_that_of_the_mean(make_dump, tmp_path):
    dump = make_dump(**SMALL)
    artifact = load_artifact(calibrate(dump, tmp_path / "out", "--share", "layer"))
    for side, plan in artifact.layers[1].sides.items():
        expected = np.linalg.eigvalsh(np.mean([target(dump, 1, head, side, plan) for head in range(2)], axis=0))[::-1]
        assert np.abs(plan.tensors["spectrum"][0] - expected).max() < 1e-6 * expected[0]


@pytest.mark.parametrize("share", ["kv_head", "layer"])
def test_centers_are_the_channel_means(make_dump, tmp_path, share):
    dump = make_dump(**SMALL)
    artifact = load_artifact(calibrate(dump, tmp_path / "out", "--center", "kv", "--share", share))
    layer = reference.read_layer(dump, 0)
    for side, rows in (("k", layer.k), ("v", layer.v)):
        means = rows.mean(axis=0)
        expected = means if share == "kv_head" else means.mean(axis=0, keepdims=True)
        assert artifact.layers[0].sides[side].tensors["center"] == pytest.approx(expected, rel=1e-5, abs=1e-6)


# Errors


def metric_and_weights(layer: reference.Layer, head: int, side: str) -> tuple[np.ndarray, np.ndarray]:
    if side == "k":
        return reference.mean(reference.moments(layer, head)["query"]), np.ones(len(layer.k))
    return np.eye(layer.v.shape[2]), reference.column_energy(layer, head)


def recomputed_errors(dump: Path, index: int, side: str, plan) -> tuple[float, float]:
    """(before, after) by the definitions of the manifest."""
    layer = reference.read_layer(dump, index)
    plain = coded = energy = 0.0
    for head in range(layer.heads):
        x = (layer.k if side == "k" else layer.v)[:, head]
        metric, weights = metric_and_weights(layer, head, side)
        plain += reference.cost(reference.plain_error(plan, x), metric, weights)
        coded += reference.cost(reference.plan_error(plan, head, x), metric, weights)
        energy += reference.cost(x, metric, weights)
    return plain / energy, coded / energy


CODERS = [
    ("--coder", "symmetric"),
    ("--coder", "symmetric", "--center", "kv", "--bits", 3),
    (),
    ("--coder", "symmetric", "--scale-rule", "least_squares", "--scale-type", "bf16", "--share", "layer"),
    ("--coder", "symmetric", "--scale-rule", "absmax", "--method", "quarot"),
    ("--center", "kv", "--zero", "integer", "--bits", 4),
    ("--method", "random", "--clip", 0.9),
]


@pytest.mark.parametrize("flags", CODERS, ids=str)
def test_reported_errors(sample, tmp_path, flags):
    """A second implementation of rotation, codes and metric gives the tool's errors to 1e-4."""
    artifact = calibrate(sample, tmp_path / "out", "--layers", 2, "--collect", "scored_value", *flags)
    (layer,) = load_artifact(artifact).manifest["layers"]
    for side, plan in load_artifact(artifact).layers[2].sides.items():
        before, after = recomputed_errors(sample, 2, side, plan)
        assert layer[side]["error"]["before"] == pytest.approx(before, rel=1e-4)
        assert layer[side]["error"]["after"] == pytest.approx(after, rel=1e-4)


KEY_SHRINK_WEIGHT, WINDOWS_SHRINK_FACTOR = 4.0, 2.0
NO_WINDOWS = ("--sink-tokens", 0, "--recent-tokens", 0)


def shrink_weight(layer: reference.Layer, head: int, side: str, x: np.ndarray, weights: np.ndarray) -> float:
    """For values: the mean |o|^2 over the attention-weighted energy of a row."""
    if side == "k":
        return KEY_SHRINK_WEIGHT
    mean_output = np.trace(reference.mean(reference.moments(layer, head)["scored_value"]))
    return float(mean_output * len(x) / (weights @ (x**2).sum(axis=1)))


@pytest.mark.parametrize("flags", [(), NO_WINDOWS, ("--composition", "u"), ("--share", "layer")], ids=str)
def test_clip_ratios_are_the_best_of_the_grid(sample, tmp_path, flags):
    artifact = load_artifact(calibrate(sample, tmp_path / "out", "--layers", 3, *flags))
    layer = reference.read_layer(sample, 3)
    for side, plan in artifact.layers[3].sides.items():
        costs = np.zeros((len(plan.clip_ratio), 16))
        for head in range(layer.heads):
            x = (layer.k if side == "k" else layer.v)[:, head]
            metric, weights = metric_and_weights(layer, head, side)
            shrink = shrink_weight(layer, head, side, x, weights) * (
                1.0 if flags == NO_WINDOWS else WINDOWS_SHRINK_FACTOR
            )
            errors = [reference.plan_error(plan, head, x, ratio) for ratio in np.arange(85, 101) / 100]
            costs[plan.head_index(head)] += [reference.clip_cost(e, x, metric, weights, shrink) for e in errors]
        for entry, ratio in enumerate(plan.clip_ratio):
            chosen = round(ratio * 100) - 85
            assert ratio == (85 + chosen) / 100, "on the grid"
            assert costs[entry, chosen] <= costs[entry].min() * (1 + 1e-5)


def test_rotation_report(sample, tmp_path):
    """OSCAR Table 10 and Figure 7, computed without kvq's coder except for tr(E)."""
    report = succeed(
        "kvq-calibrate", "--json", "--model", sample, "--output", tmp_path / "out", "--layers", 2, "--report-rotations"
    )
    layer = reference.read_layer(sample, 2)
    for index, head in enumerate(json.loads(report.stdout)["rotations"][0]["heads"]):
        moments = reference.moments(layer, index)
        c_q, c_k = reference.mean(moments["query"]), reference.mean(moments["key"])
        basis = np.linalg.eigh(c_q)[1][:, ::-1]
        for row in head["k"]:
            rotation = reference.composed(row["rotation"], basis)
            x, diagonal = layer.k[:, index] @ rotation, np.diag(rotation.T @ c_q @ rotation)
            if row["rotation"] in ("I", "H", "U"):  # signs of eigenvectors decide the others
                assert row["max_abs"] == pytest.approx(np.abs(x).max(), rel=1e-5)
            if row["rotation"] in ("I", "H"):
                groups = x.reshape(len(x), -1, 64)
                assert row["group_range"] == pytest.approx((groups.max(axis=2) - groups.min(axis=2)).mean(), rel=1e-5)
            assert row["importance_max_over_mean"] == pytest.approx(diagonal.max() / diagonal.mean(), rel=1e-5)
            assert row["importance_spread"] < 1e-6 or row["rotation"] in ("I", "H", "U")
        key_basis = np.linalg.eigh(c_k)[1][:, ::-1]
        assert head["top8_alignment"] == pytest.approx(np.abs((basis * key_basis).sum(axis=0))[:8].mean(), rel=1e-4)


def test_rotation_report_of_a_shared_rotation(sample, tmp_path):
    """OSCAR Table 10 as published: C_Q is averaged over the KV heads, so U*H makes its diagonal flat for all heads."""
    flags = ("--layers", 2, "--share", "layer", "--clip", 0.96, "--report-rotations")
    report = succeed("kvq-calibrate", "--json", "--model", sample, "--output", tmp_path / "out", *flags)
    layer = reference.read_layer(sample, 2)
    moments = [reference.moments(layer, index) for index in range(2)]
    c_q, c_k = (np.mean([reference.mean(own[name]) for own in moments], axis=0) for name in ("query", "key"))
    basis, key_basis = (np.linalg.eigh(c)[1][:, ::-1] for c in (c_q, c_k))
    heads = json.loads(report.stdout)["rotations"][0]["heads"]
    assert len(heads) == 2
    for head in heads:
        rows = {row["rotation"]: row for row in head["k"]}
        for name, row in rows.items():
            rotation = reference.composed(name, basis)
            diagonal = np.diag(rotation.T @ c_q @ rotation)
            assert row["importance_max_over_mean"] == pytest.approx(diagonal.max() / diagonal.mean(), rel=1e-5)
        assert rows["U*H"]["importance_max_over_mean"] == pytest.approx(1.0, abs=5e-3)
        assert rows["I"]["importance_max_over_mean"] > 1.1
        assert head["top8_alignment"] == pytest.approx(np.abs((basis * key_basis).sum(axis=0))[:8].mean(), rel=1e-4)
    assert heads[0]["k"] != heads[1]["k"], "each head's own keys are rotated"
