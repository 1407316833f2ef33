"""kvq-calibrate's methods and axes of 1.1: mixed widths, codebooks, trellis codes, centroids, Hessian rotations and
budgets, against numpy in float64, the second reader and the formats' own words.

Shapes: T tokens, H KV heads, D channels, L RoPE blocks, C centroids.
"""

import json
import signal
import subprocess
import sys
from functools import cache
from itertools import pairwise, product
from pathlib import Path

import h5py
import numpy as np
import pytest
import reference
from dumps import edited, replace
from kvq_py.artifact import Artifact, SidePlan
from kvq_py.artifact_reader import read_artifact
from kvq_py.packing import fake_quantize, nearest_centroids
from kvq_tools import BIN, ROOT, calibrate, run, shards, start, succeed, wait_for_layers

USAGE = 2
SHORT = 96  # tokens of the real model for tests in which the whole sample would take too long
SMALL = {"tokens": 54, "sequences": 3, "layers": 1, "query_spectrum": 0.9, "channel_means": 0.5, "outlier_channels": 1}
GEOMETRIES = {
    "half": {"head_dim": 32, "v_head_dim": 48},
    "interleaved, windowed, pre_rope": {
        "head_dim": 24,
        "rope": "interleaved",
        "rotary_dim": 16,
        "rotary_offset": 4,
        "sliding_window": 9,
        "capture": "pre_rope",
    },
    "half, partial, odd": {"head_dim": 33, "v_head_dim": 17, "rotary_dim": 10, "rotary_offset": 5},
    "mla": {"kind": "mla_rope", "head_dim": 32, "rope": "interleaved"},
    "no rope": {"head_dim": 20, "v_head_dim": 10, "rope": "none", "q_heads": 6, "kv_heads": 3},
}
GTQ, TQ, KVQ, SAW = (("--method", name) for name in ("block-gtq", "tq-mse", "kvq", "saw-int4"))
JOINT = (*GTQ, "--joint", "--max-bits", 4)
VARIANTS = {
    "block-gtq": GTQ,
    "channels": (*GTQ, "--bits", 2.5, "--k-allocation", "channel", "--v-allocation", "channel"),
    "dropped channels": (*GTQ, "--min-bits", 0, "--max-bits", 4, "--v-allocation", "channel", "--center", "kv"),
    "shared": (*GTQ, "--share", "layer", "--v-allocation", "channel"),
    "whole head": (*GTQ, "--k-allocation", "none", "--bits-v", 3),
    "trellis": (*GTQ, "--coder", "trellis", "--mixing", "hadamard"),
    "symmetric": (*GTQ, "--coder", "symmetric", "--scale-rule", "least_squares", "--scale-type", "bf16"),
    "fitted": (*GTQ, "--codebook", "fitted", "--bits", 3),
    "tq-mse": TQ,
    "tq-mse rms": (*TQ, "--mixing", "hadamard", "--scale-rule", "rms", "--bits", 4),
    "plain trellis": ("--method", "plain", "--coder", "trellis", "--memory", 2, "--bits", 3),
    "oscar lloyd-max": ("--codebook", "lloyd-max", "--center", "kv"),
    "random fitted": ("--method", "random", "--codebook", "fitted", "--share", "layer"),
    "kmeans": ("--kmeans", 5),
    "kmeans joint after": (*SAW, "--kmeans", 4, "--kmeans-scope", "joint", "--kmeans-order", "after"),
    "kmeans trellis": ("--method", "quarot", "--coder", "trellis", "--kmeans-k", 3),
    "hessian paper": (*SAW, "--hessian", "paper", "--hadamard", "kv", "--random-signs"),
    "hessian consistent": (*SAW, "--hessian", "consistent"),
    "kvq": KVQ,
    "kvq uniform": (*KVQ, "--uniform-layout", "--budget-bits", 3),
    "kvq shared": (*KVQ, "--share", "layer"),
    "joint": (*JOINT, "--budget-bytes", 160),
    "joint uniform": (*JOINT, "--uniform-layout", "--budget-bits", 2.5),
}
HOLD_OUT = {name for name, flags in VARIANTS.items() if "kvq" in flags or "--joint" in flags}


def read(dump: Path, index: int = 0) -> reference.Layer:
    """A layer of a post_rope dump; a layer without values gets zeros with one channel."""
    with h5py.File(dump) as file:
        group = file[f"layers/{index}"]
        q, k = (reference.widened(group[name][()]) for name in "qk")
        v = reference.widened(group["v"][()]) if "v" in group else np.zeros((*k.shape[:2], 1))
        return reference.Layer(
            q, k, v, file["cu_seqlens"][()], group.attrs["softmax_scale"], group.attrs["sliding_window"]
        )


def rows_of(layer: reference.Layer, side: str) -> np.ndarray:
    """float32 [H, T, D]"""
    return np.ascontiguousarray((layer.k if side == "k" else layer.v).transpose(1, 0, 2).astype(np.float32))


def manifest_of(artifact: Path) -> dict:
    return json.loads(succeed("kvq-inspect", artifact, "--json").stdout)["manifest"]


def verified(dump: Path, output: Path, *flags: object) -> Artifact:
    """Calibrates with one thread; runs kvq-inspect --verify and returns the artifact from the second reader."""
    calibrate(dump, output, "--threads", 1, *flags)
    checks = json.loads(succeed("kvq-inspect", output, "--verify", "--json").stdout)["verify"]
    assert all(check["passed"] for check in checks) and len(checks) >= 3
    return read_artifact(output)


def held_out(layer: reference.Layer, wanted: int = 1024) -> slice:
    """The held-out tokens by formats/stats.md: the start of the longest sequence, at most a third of the dump."""
    longest = max(layer.sequences(), key=lambda rows: rows.stop - rows.start)
    return slice(longest.start, longest.start + min(longest.stop - longest.start, wanted, len(layer.k) // 3))


def kept_tokens(layer: reference.Layer, holds_out: bool) -> np.ndarray:
    kept = np.ones(len(layer.k), bool)
    if holds_out:
        kept[held_out(layer)] = False
    return kept


def measured_error(layer: reference.Layer, side: str, plan: SidePlan, metric: str, kept: np.ndarray) -> float:
    """The expected `error.after` if the sample has every kept token."""
    x = rows_of(layer, side)[:, kept]
    errors = np.float64(plan.reconstruct_heads(x)) - x
    lost = energy = 0.0
    for head, (rows, error) in enumerate(zip(np.float64(x), errors)):
        matrix, weights = np.eye(plan.dim), np.ones(len(rows))
        if metric == "query_weighted":
            matrix = reference.mean(reference.weighted(layer.queries(head)[kept].reshape(-1, plan.dim)))
        elif metric == "attention_weighted":
            weights = reference.column_energy(layer, head)[kept]
        lost += reference.cost(error, matrix, weights)
        energy += reference.cost(rows, matrix, weights)
    return lost / energy


# Every variant on every dump


def check_variant(dump: Path, layers: dict[int, reference.Layer], folder: Path, name: str, *more: object):
    flags = (*VARIANTS[name], *more)
    artifact = verified(dump, folder / "one", *flags)
    two = calibrate(dump, folder / "two", "--threads", 2, *flags)
    assert two.read_bytes() == (folder / "one").read_bytes()
    assert list(artifact.layers) == list(layers)
    for entry in artifact.manifest["layers"]:
        layer = layers[entry["layer"]]
        for side, plan in artifact.layers[entry["layer"]].sides.items():
            error = entry[side]["error"]
            assert 0 < error["after"] < 0.6 and error["before"] > 0
            found = measured_error(layer, side, plan, error["metric"], kept_tokens(layer, name in HOLD_OUT))
            assert error["after"] == pytest.approx(found, rel=5e-3), side  # codes near an edge may differ


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_on_every_geometry(make_dump, tmp_path, name, geometry):
    options = SMALL | GEOMETRIES[geometry]
    after_rope = make_dump(**options | {"capture": "post_rope"})  # the same activations as the tool rotates them
    check_variant(make_dump(**options), {0: read(after_rope)}, tmp_path, name)


@pytest.fixture(scope="module")
def short(sample, tmp_path_factory) -> Path:
    """The start of the sample's first sequence."""

    def cut(file: h5py.File) -> None:
        replace(file, "cu_seqlens", np.array([0, SHORT]))
        replace(file, "positions", file["positions"][:SHORT])
        for name in [f"layers/{index}/{tensor}" for index in range(6) for tensor in "qkv"]:
            replace(file, name, file[name][:SHORT])

    return edited(sample, tmp_path_factory.mktemp("short") / "dump.h5", cut)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_on_a_real_model(short, tmp_path, name):
    check_variant(short, {4: read(short, 4)}, tmp_path, name, "--layers", 4)


@cache
def real(index: int) -> reference.Layer:
    return read(ROOT / "sample_data/calibration.h5", index)


# Scores and widths

SCORES = {
    "qk_avg": lambda q, k: (q + k) / 2,
    "qk_max": np.maximum,
    "qk_product": lambda q, k: np.sqrt(q * k),
    "k_only": lambda q, k: k,
    "q_only": lambda q, k: q,
    "qk_energy_product": lambda q, k: q * k,
}


def rope_blocks(rope: dict, head_dim: int) -> list[list[int]]:
    """RoPE blocks by formats/artifact.md: rotary pairs by frequency, then the other channels in pairs."""
    first, half = rope["offset"], rope["dim"] // 2
    if rope["layout"] == "interleaved":
        pairs = [[first + 2 * i, first + 2 * i + 1] for i in range(half)]
    else:
        pairs = [[first + i, first + half + i] for i in range(half)]
    rest = [j for j in range(head_dim) if not first <= j < first + 2 * half]
    return pairs + [rest[i : i + 2] for i in range(0, len(rest), 2)]


def block_scores(
    layer: reference.Layer, head: int, blocks: list[list[int]], score: str, centered: bool = False
) -> np.ndarray:
    """Scores of Block-GTQ Eq. 4 and C.2 from mean squared lengths over tokens and the group's query heads."""
    k = layer.k[:, head] - (layer.k[:, head].mean(axis=0) if centered else 0)
    q = layer.queries(head).reshape(-1, k.shape[1])
    energies = [[(x[:, block] ** 2).sum(axis=1).mean() for block in blocks] for x in (q, k)]
    return SCORES[score](*np.array(energies))


def greedy(scores: np.ndarray, budget: int, least: int = 1, most: int = 8) -> np.ndarray:
    """Algorithm 1 of Block-GTQ, bit by bit; on a tie the lowest index wins."""
    bits = np.full(len(scores), least)
    for _ in range(budget - least * len(scores)):
        gains = np.where(bits < most, scores * (4.0**-bits - 4.0 ** -(bits + 1)), -1)
        bits[gains.argmax()] += 1
    return bits


def check_layout(
    plan: SidePlan, head: int, basis: np.ndarray, units: list[list[int]], bits: np.ndarray, mixing: str = "haar"
):
    """channel_bits, channel_order and rotation of one head: basis, gather, one orthogonal matrix for each width."""
    order = np.argsort(-bits, kind="stable")
    sources = np.concatenate([units[i] for i in order])
    assert np.array_equal(plan.tensors["channel_order"][head], sources)
    widths = np.concatenate([[bits[i]] * len(units[i]) for i in order])
    assert np.array_equal(plan.tensors["channel_bits"][head], widths)
    mixed = basis[:, sources].T @ plan.matrix(head)
    same = widths[:, None] == widths
    assert np.abs(mixed[~same]).max(initial=0) < 1e-6
    for width in set(widths):
        block = mixed[np.ix_(widths == width, widths == width)]
        assert np.abs(block.T @ block - np.eye(len(block))).max() < 1e-5
        if mixing == "hadamard" and (len(block) & (len(block) - 1)) == 0:
            assert np.abs(np.abs(block) - len(block) ** -0.5).max() < 1e-6


LAYOUTS = GEOMETRIES | {
    "interleaved": {"head_dim": 32, "rope": "interleaved", "rotary_dim": 20, "rotary_offset": 6},
    "6 queries a key": {"head_dim": 16, "kv_heads": 1, "q_heads": 6},
}


@pytest.mark.parametrize("center", ["none", "k"])
@pytest.mark.parametrize("geometry", LAYOUTS)
def test_block_energies_and_widths(make_dump, tmp_path, geometry, center):
    options = SMALL | LAYOUTS[geometry]
    layer = read(make_dump(**options | {"capture": "post_rope"}))
    limits = {
        "qk_avg": (1, 8),
        "qk_max": (2, 4),
        "qk_product": (0, 5),
        "k_only": (1, 3),
        "q_only": (0, 8),
        "qk_energy_product": (1, 6),
    }
    for number, score in enumerate(SCORES):
        least, most = limits[score]
        bits = 2.0 + number * 0.13
        artifact = verified(
            make_dump(**options),
            tmp_path / score,
            *GTQ,
            "--score",
            score,
            "--center",
            center,
            "--bits-k",
            bits,
            "--min-bits",
            least,
            "--max-bits",
            most,
            "--coder",
            "symmetric",
        )
        entry = artifact.manifest["layers"][0]
        plan, blocks = artifact.layers[0].sides["k"], rope_blocks(entry["geometry"]["rope"], options["head_dim"])
        assert entry["k"]["allocation"]["score"] == score and entry["k"]["allocation"]["unit"] == "rope_block"
        objective = 0.0
        for head in range(layer.heads):
            expected = block_scores(layer, head, blocks, score, center == "k")
            assert plan.tensors["block_energy"][head] == pytest.approx(expected, rel=1e-5)
            found = plan.tensors["block_bits"][head].astype(int)
            assert found.sum() == int(len(blocks) * bits + 1e-9)
            assert found.min() >= least and found.max() <= most
            wanted = greedy(expected, int(len(blocks) * bits + 1e-9), least, most)
            if options.get("capture") != "pre_rope":  # RoPE is applied in float there, so near ties may differ
                assert np.array_equal(found, wanted)
            check_layout(plan, head, np.eye(plan.dim), blocks, found)
            objective += (expected * 4.0**-found).sum()
        allocation = entry["k"]["allocation"]
        assert allocation["objective"] == allocation["free_objective"] == pytest.approx(objective, rel=1e-5)
        assert allocation["mean_bits"] == pytest.approx(plan.tensors["channel_bits"].mean(), abs=1e-6)


@pytest.mark.parametrize("bits", [1, 1.7, 2, 2.99, 4])
def test_widths_of_a_real_model(sample, tmp_path, bits):
    artifact = verified(sample, tmp_path / "out", *GTQ, "--bits-k", bits, "--layers", "1,5", "--mixing", "hadamard")
    blocks = [[i, 64 + i] for i in range(64)]
    for index in (1, 5):
        plan = artifact.layers[index].sides["k"]
        for head in range(2):
            scores = block_scores(real(index), head, blocks, "qk_avg")
            assert plan.tensors["block_energy"][head] == pytest.approx(scores, rel=1e-5)
            found = plan.tensors["block_bits"][head].astype(int)
            assert np.array_equal(found, greedy(scores, int(64 * bits)))
            check_layout(plan, head, np.eye(128), blocks, found, "hadamard")


def flattened(zeros: int):
    """Makes all blocks equal, except the last `zeros` blocks, which become zero."""

    def edit(file: h5py.File) -> None:
        for name in "qk":
            rows = file[f"layers/0/{name}"][()]
            half = rows.shape[2] // 2
            rows[:] = np.concatenate(
                [np.repeat(rows[..., :1], half, axis=2), np.repeat(rows[..., 1:2], half, axis=2)], axis=2
            )
            rows[..., half - zeros : half] = rows[..., 2 * half - zeros :] = 0
            replace(file, f"layers/0/{name}", rows)

    return edit


def test_ties_go_to_the_lowest_block(make_dump, tmp_path):
    dump = edited(make_dump(**SMALL, head_dim=32), tmp_path / "ties.h5", flattened(0))
    plan = read_artifact(calibrate(dump, tmp_path / "out", *GTQ, "--bits-k", 2.3)).layers[0].sides["k"]
    assert plan.tensors["block_bits"].tolist() == [[3] * 4 + [2] * 12] * 2


def test_blocks_without_energy_share_what_is_left(make_dump, tmp_path):
    dump = edited(make_dump(**SMALL, head_dim=32), tmp_path / "zeros.h5", flattened(8))
    plan = read_artifact(calibrate(dump, tmp_path / "out", *GTQ, "--bits-k", 3, "--max-bits", 4)).layers[0].sides["k"]
    assert plan.tensors["block_bits"].tolist() == [[4] * 8 + [2] * 8] * 2


@pytest.mark.parametrize("center", ["none", "kv"])
def test_widths_by_channel_of_an_eigenbasis(sample, tmp_path, center):
    """Keys: the query's eigenvalue times the keys' energy; values: the energy in the score-weighted eigenbasis."""
    artifact = verified(
        sample,
        tmp_path / "out",
        *GTQ,
        "--k-allocation",
        "channel",
        "--v-allocation",
        "channel",
        "--bits-k",
        1.9,
        "--bits-v",
        2.6,
        "--layers",
        2,
        "--center",
        center,
        "--min-bits",
        0,
        "--max-bits",
        6,
    )
    layer, units = real(2), [[j] for j in range(128)]
    for (side, plan), bits in zip(artifact.layers[2].sides.items(), (1.9, 2.6)):
        assert (
            artifact.manifest["layers"][0][side]["allocation"]["unit"] == "channel" and "block_bits" not in plan.tensors
        )
        for head in range(2):
            own = reference.weighted((layer.k if side == "k" else layer.v)[:, head])
            mean = own[1] / own[2] if center == "kv" else None
            seen = layer.queries(head).reshape(-1, 128) if side == "k" else reference.outputs(layer, head)
            target = reference.mean(reference.weighted(seen), None if side == "k" else mean)
            basis, spectrum = (np.float64(plan.tensors[name][head]) for name in ("eigenbasis", "spectrum"))
            assert np.abs(basis.T @ target @ basis - np.diag(spectrum)).max() < 1e-5 * spectrum[0]
            scores = np.diag(basis.T @ reference.mean(own, mean) @ basis) * (spectrum if side == "k" else 1)
            found = widths_by_source(plan, head)
            assert found.sum() == int(128 * bits) and found.max() <= 6
            best = (scores * 4.0 ** -greedy(scores, int(128 * bits), 0, 6)).sum()
            assert (scores * 4.0**-found).sum() == pytest.approx(best, rel=1e-5)
            check_layout(plan, head, basis, units, found)


def widths_by_source(plan: SidePlan, head: int) -> np.ndarray:
    found = np.zeros(plan.dim, int)
    found[plan.tensors["channel_order"][head]] = plan.tensors["channel_bits"][head]
    return found


# Rows of a given size


def best_of_row(scores: np.ndarray, channels: int, row_bytes: int, widths: tuple[int, ...]) -> float:
    """The smallest objective over all counts of blocks at these widths that fit into the row; scales take two bytes."""
    ordered, best = np.concatenate([[0], np.sort(scores)[::-1].cumsum()]), np.inf
    for counts in product(range(len(scores) + 1), repeat=len(widths) - 1):
        counts = (*counts, len(scores) - sum(counts))
        if counts[-1] < 0:
            continue
        used = [(count, width) for count, width in zip(counts, widths) if count]
        codes = sum((count * channels * width + 7) // 8 for count, width in used if width)
        if codes + codes % 2 + 2 * sum(width > 0 for _, width in used) > row_bytes:
            continue
        ends = np.cumsum((0, *counts))
        best = min(best, sum((ordered[b] - ordered[a]) * 4.0**-w for a, b, w in zip(ends, ends[1:], widths)))
    return best


@pytest.mark.parametrize("flags", [(), ("--coder", "trellis"), ("--scale-type", "fp32", "--min-bits", 0)], ids=str)
def test_row_bytes(sample, tmp_path, flags):
    artifact = verified(
        sample,
        tmp_path / "out",
        *GTQ,
        "--row-bytes-k",
        40,
        "--v-allocation",
        "channel",
        "--row-bytes-v",
        36,
        "--layers",
        "0,3",
        *flags,
    )
    for entry in artifact.manifest["layers"]:
        for side, size in (("k", 40), ("v", 36)):
            allocation, plan = entry[side]["allocation"], artifact.layers[entry["layer"]].sides[side]
            assert allocation["row_bytes"] == plan.row_bytes <= size
            assert set(plan.tensors["channel_bits"].flatten()) <= {0, 1, 2, 3, 4, 8} - (
                set() if "--min-bits" in flags else {0}
            )
            assert allocation["objective"] >= allocation["free_objective"] * (1 - 1e-12)


@pytest.mark.parametrize("row_bytes", [8, 12, 16, 24])
def test_rows_are_filled_as_well_as_can_be(make_dump, tmp_path, row_bytes):
    dump = make_dump(**SMALL, head_dim=24)
    artifact = verified(dump, tmp_path / "out", *GTQ, "--row-bytes-k", row_bytes, "--coder", "symmetric")
    layer, blocks = read(dump), [[i, 12 + i] for i in range(12)]
    best = sum(
        best_of_row(block_scores(layer, head, blocks, "qk_avg"), 2, row_bytes, (8, 4, 3, 2, 1)) for head in range(2)
    )
    assert artifact.manifest["layers"][0]["k"]["allocation"]["objective"] == pytest.approx(best, rel=1e-9)
    assert artifact.layers[0].sides["k"].row_bytes <= row_bytes


# Codebooks


def sphere_means(entries: np.ndarray, dim: int) -> np.ndarray:
    """Means of the cells under the marginal of a point on the sphere of radius sqrt(dim), integrated over the angle,
    which avoids singular ends."""
    edges = np.concatenate([[-np.pi / 2], np.arcsin((entries[1:] + entries[:-1]) / 2 / dim**0.5), [np.pi / 2]])
    points, weights = np.polynomial.legendre.leggauss(80)
    angles = edges[:-1, None] + np.diff(edges)[:, None] * (points + 1) / 2
    density = weights * np.cos(angles) ** (dim - 2)
    return (dim**0.5 * np.sin(angles) * density).sum(axis=1) / density.sum(axis=1)


@pytest.mark.parametrize("bits", [1, 2, 3, 5])
@pytest.mark.parametrize("dim", [2, 3, 16, 48])
def test_tables_are_centroids_on_the_sphere(make_dump, tmp_path, dim, bits):
    dump = make_dump(layers=1, tokens=30, head_dim=dim * 2, rope="none")
    artifact = verified(
        dump, tmp_path / "out", "--method", "plain", "--codebook", "lloyd-max", "--bits", bits, "--group-size", dim
    )
    for plan in artifact.layers[0].sides.values():
        table = np.float64(plan.tensors[f"codebook.{bits}"])
        assert table.shape == (2**bits,)
        assert table == pytest.approx(sphere_means(table, dim), abs=2e-6)
        assert table == pytest.approx(-table[::-1], abs=1e-6)


def test_wide_codebooks_are_quick(make_dump, tmp_path):
    """A sphere codebook takes well below a second; with a solver that missed its tolerance it took a minute."""
    dump = make_dump(**SMALL, head_dim=64)
    command = [BIN / "kvq-calibrate", "--quiet", "--model", dump, "--output", tmp_path / "out", *TQ, "--bits", "8"]
    subprocess.run(command, check=True, timeout=10)


def test_mixed_tables_fit_the_length_of_their_segment(sample, tmp_path):
    artifact = verified(sample, tmp_path / "out", *GTQ, "--bits", 2, "--layers", 3)
    entry = artifact.manifest["layers"][0]["k"]["codebooks"]
    assert entry["per_head"] and entry["source"] == "sphere"
    plan = artifact.layers[3].sides["k"]
    for head, bits in product(range(2), entry["bits"]):
        table, length = (
            np.float64(plan.tensors[f"codebook.{bits}"][head]),
            int((plan.tensors["channel_bits"][head] == bits).sum()),
        )
        assert table == pytest.approx(sphere_means(table, length or 128), abs=1e-5)


def test_oscar_with_a_codebook(sample, tmp_path):
    artifact = verified(sample, tmp_path / "out", "--codebook", "lloyd-max", "--bits", 2, "--layers", 0)
    for side, plan in artifact.layers[0].sides.items():
        entry = artifact.manifest["layers"][0][side]
        assert (entry["coder"], entry["group_size"], entry["scale_rule"]) == ("codebook", 64, "norm")
        assert plan.tensors["codebook.2"].shape == (4,) and plan.row_bytes == 128 * 2 // 8 + 2 * 2
        assert np.float64(plan.tensors["codebook.2"]) == pytest.approx(
            sphere_means(np.float64(plan.tensors["codebook.2"]), 64), abs=1e-5
        )


def table_error(plan: SidePlan, x: np.ndarray, tables: np.ndarray, groups: int) -> float:
    """Squared error of rows [H, T, D] in units of each group's root mean square."""
    total = 0.0
    for head, rows in enumerate(x):
        y = np.float64(plan.rotate(rows, head)).reshape(len(rows) * groups, -1)
        y = y / np.sqrt((y**2).mean(axis=1, keepdims=True))
        total += (np.abs(y[..., None] - tables[head]).min(axis=2) ** 2).sum()
    return total


@pytest.mark.parametrize("method", ["oscar", "random", "plain"])
def test_fitted_tables_have_smaller_errors(sample, tmp_path, method):
    flags = ("--method", method, "--layers", 5, "--group-size", 64)
    sphere, fitted = (verified(sample, tmp_path / word, *flags, "--codebook", word) for word in ("lloyd-max", "fitted"))
    for side, plan in fitted.layers[5].sides.items():
        entry = fitted.manifest["layers"][0][side]["codebooks"]
        assert entry == {"bits": [2], "per_head": True, "source": "fitted"}
        x = rows_of(real(5), side)
        own, other = plan.tensors["codebook.2"], sphere.layers[5].sides[side].tensors["codebook.2"]
        assert own.shape == (2, 4)
        assert table_error(plan, x, own, 2) < table_error(plan, x, np.stack([other] * 2), 2)
        after = [artifact.manifest["layers"][0][side]["error"]["after"] for artifact in (fitted, sphere)]
        assert after[0] < after[1] * 1.02


def test_better_codes_have_smaller_errors(sample, tmp_path):
    """Error falls from affine to symmetric, codebook and trellis with longer and longer memory, at equal bits and
    rotation."""
    chain = [("affine",), ("symmetric",), ("codebook",), *(("trellis", "--memory", m) for m in (1, 2, 3))]
    errors = []
    for coder in chain:
        artifact = verified(
            sample, tmp_path / "out", "--method", "random", "--layers", 1, "--center", "kv", "--coder", *coder
        )
        errors.append([artifact.manifest["layers"][0][side]["error"]["after"] for side in "kv"])
    assert (np.diff(np.array(errors), axis=0) < 0).all(), errors


# Centroids


def inertia(x: np.ndarray, centroids: np.ndarray) -> float:
    """Mean squared residual over mean squared distance from the mean, for rows [H, T, D] whose heads choose
    together."""
    index = nearest_centroids(x, centroids)
    residuals = np.float64(x) - centroids[:, index]
    return float((residuals**2).sum() / ((np.float64(x) - np.float64(x).mean(axis=1, keepdims=True)) ** 2).sum())


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("scope", ["kv_head", "joint"])
@pytest.mark.parametrize("method", ["oscar", "plain"])
def test_inertia_and_residual_errors(sample, tmp_path, method, scope, order):
    flags = ("--method", method, "--layers", "2,5", "--bits", 3, "--clip", "none")
    plain = verified(sample, tmp_path / "plain", *flags).manifest["layers"]
    artifact = verified(
        sample, tmp_path / "out", *flags, "--kmeans", 12, "--kmeans-scope", scope, "--kmeans-order", order
    )
    for entry, without in zip(artifact.manifest["layers"], plain):
        for side, plan in artifact.layers[entry["layer"]].sides.items():
            x, centroids = rows_of(real(entry["layer"]), side), plan.tensors["centroids"]
            stated = entry[side]["centroids"]
            assert (stated["count"], stated["scope"], stated["order"]) == (12, scope, order) and centroids.shape == (
                2,
                12,
                128,
            )
            groups = [slice(0, 2)] * 2 if scope == "joint" else [slice(h, h + 1) for h in range(2)]
            expected = [inertia(x[heads], centroids[heads]) for heads in groups]
            assert stated["inertia"] == pytest.approx(expected, rel=1e-4) and max(expected) < 0.95
            assert entry[side]["error"]["after"] < without[side]["error"]["after"]
            assert plan.row_bytes == without_index(without[side]) + 1
            for heads in groups:  # at Lloyd's fixed point a centroid is nearly the mean of its rows
                index = nearest_centroids(x[heads], centroids[heads])
                means = np.stack([x[heads][:, index == c].mean(axis=1) for c in range(12)], axis=1)
                moved = ((means - centroids[heads]) ** 2).sum()
                assert moved < 1e-2 * x[heads].var(axis=1).sum()


def without_index(plan: dict) -> int:
    """Bytes of a row of 128 channels with affine codes in fp16, without the index."""
    return 128 * plan["bits"] // 8 + 128 // plan["group_size"] * 4


def test_centroids_of_shared_heads(sample, tmp_path):
    artifact = verified(sample, tmp_path / "out", "--kmeans", 6, "--share", "layer", "--layers", 0)
    for side, plan in artifact.layers[0].sides.items():
        x = rows_of(real(0), side).reshape(1, -1, 128)
        assert plan.tensors["centroids"].shape == (1, 6, 128)
        stated = artifact.manifest["layers"][0][side]["centroids"]["inertia"]
        assert stated == pytest.approx([inertia(x, plan.tensors["centroids"])], rel=1e-4)


@pytest.mark.parametrize("method", ["oscar", "saw-int4", "tq-mse", "block-gtq"])
def test_one_centroid_is_the_mean(sample, tmp_path, method):
    flags = ("--method", method, "--layers", 1)
    one = calibrate(sample, tmp_path / "one", *flags, "--kmeans", 1)
    assert one.read_bytes() == calibrate(sample, tmp_path / "mean", *flags, "--center", "kv").read_bytes()


def test_centroids_of_one_side(sample, tmp_path):
    sides = verified(sample, tmp_path / "out", "--kmeans-v", 300, "--layers", 1).layers[1].sides
    assert "centroids" not in sides["k"].tensors and sides["v"].tensors["centroids"].shape == (2, 300, 128)
    assert sides["v"].row_bytes == sides["k"].row_bytes + 2, "an index above 255 takes two bytes"
    both = verified(sample, tmp_path / "out", "--kmeans", 4, "--kmeans-v", 8, "--layers", 1).layers[1].sides
    assert [both[side].tensors["centroids"].shape[1] for side in "kv"] == [4, 8]


def test_restarts_keep_the_best(sample, tmp_path):
    flags = ("--method", "plain", "--kmeans", 20, "--layers", 3)
    once, often = (verified(sample, tmp_path / str(n), *flags, "--kmeans-restarts", n) for n in (1, 6))
    for side in "kv":
        before, after = (artifact.manifest["layers"][0][side]["centroids"]["inertia"] for artifact in (once, often))
        assert all(b <= a for a, b in zip(before, after)) and before != after


def test_more_centroids_than_rows_are_refused(sample, tmp_path):
    for flags in (
        ("--kmeans", 448),
        ("--kmeans-v", 65, "--sample-tokens", 64),
        ("--kmeans", 448, "--kmeans-scope", "joint"),
    ):
        result = run("kvq-calibrate", "--model", sample, "--output", tmp_path / "out", "--layers", 0, *flags)
        error, hint = result.stderr.splitlines()[-2:]
        assert result.code == USAGE and error.startswith("kvq-calibrate: error: ") and f"--kmeans {flags[1]} " in error
        assert hint.startswith("hint: ") and "--sample-tokens" in hint
        assert list(tmp_path.iterdir()) == []
    calibrate(sample, tmp_path / "out", "--kmeans", 447, "--layers", 0)


# Hessian rotations


def damped(moment: np.ndarray) -> np.ndarray:
    """The damped moment of SAW-INT4 Eq. 9."""
    return moment + 0.01 * np.diag(moment).mean() * np.eye(len(moment))


def check_eigenbasis(basis: np.ndarray, spectrum: np.ndarray, moment: np.ndarray) -> None:
    """Checks descending order, canonical signs, and numpy's eigenvectors for each well separated eigenvalue."""
    values, vectors = np.linalg.eigh(moment)
    values, vectors = values[::-1], vectors[:, ::-1]
    assert spectrum == pytest.approx(values, rel=1e-5, abs=1e-6 * values[0]) and (np.diff(spectrum) <= 0).all()
    assert np.abs(basis.T @ moment @ basis - np.diag(values)).max() < 1e-5 * values[0]
    assert (basis[np.abs(basis).argmax(axis=0), np.arange(len(basis))] > 0).all()
    gaps = np.abs(np.diff(values, prepend=np.inf, append=-np.inf))
    apart = np.minimum(gaps[:-1], gaps[1:]) > 1e-3 * values[0]
    assert apart.sum() >= 3
    vectors = vectors * np.sign(vectors[np.abs(vectors).argmax(axis=0), np.arange(len(basis))])
    assert np.abs(basis - vectors)[:, apart].max() < 1e-4


@pytest.mark.parametrize("order", [16, 64, 128])
def test_hessian_as_the_paper_has_it(sample, tmp_path, order):
    """SAW-INT4 A.3: the eigenbasis of the unrotated moment, pooled over all heads, follows the Hadamard blocks (Eq.
    7-11)."""
    artifact = verified(
        sample,
        tmp_path / "out",
        *SAW,
        "--hessian",
        "paper",
        "--hadamard",
        "kv",
        "--hadamard-order",
        order,
        "--layers",
        4,
    )
    layer = real(4)
    pooled = {"k": layer.q.reshape(-1, 128), "v": layer.v.reshape(-1, 128)}
    blocks = np.kron(np.eye(128 // order), reference.hadamard(order))
    for side, plan in artifact.layers[4].sides.items():
        moment = damped(pooled[side].T @ pooled[side] / len(pooled[side]))
        rotation = artifact.manifest["layers"][0][side]["rotation"]
        assert (rotation["recipe"], rotation["order"], rotation["target"]) == (
            "H*U",
            order,
            "query" if side == "k" else "value",
        )
        for head in range(2):
            basis = np.float64(plan.tensors["eigenbasis"][head])
            check_eigenbasis(basis, plan.tensors["spectrum"][head], moment)
            assert np.abs(plan.matrix(head) - blocks @ basis).max() < 1e-6


@pytest.mark.parametrize("share", ["kv_head", "layer"])
def test_consistent_hessian_diagonalizes_what_it_meets(sample, tmp_path, share):
    artifact = verified(
        sample, tmp_path / "out", *SAW, "--hessian", "consistent", "--hadamard", "kv", "--layers", 4, "--share", share
    )
    layer, blocks = real(4), reference.hadamard(128)
    for side, plan in artifact.layers[4].sides.items():
        rows = [layer.queries(head).reshape(-1, 128) if side == "k" else layer.v[:, head] for head in range(2)]
        moments = [reference.mean(reference.weighted(own)) for own in rows]
        if share == "layer":
            moments = [np.mean(moments, axis=0)] * 2
        for head, moment in enumerate(moments):
            rotation = plan.matrix(head)
            turned = rotation.T @ moment @ rotation
            assert np.abs(turned - np.diag(np.diag(turned))).max() < 1e-5 * turned.max()
            assert (np.diff(np.diag(turned)) <= 1e-5 * turned.max()).all()
            entry = plan.head_index(head)
            check_eigenbasis(
                np.float64(plan.tensors["eigenbasis"][entry]),
                plan.tensors["spectrum"][entry],
                blocks.T @ damped(moment) @ blocks,
            )


def test_hessian_needs_a_rotated_side(sample, tmp_path):
    sides = verified(sample, tmp_path / "out", *SAW, "--hessian", "paper", "--layers", 0).layers[0].sides
    assert [sides[side].kind for side in "kv"] == ["dense", "identity"]
    none = calibrate(sample, tmp_path / "none", *SAW, "--hessian", "none", "--layers", 0)
    assert none.read_bytes() == calibrate(sample, tmp_path / "plain", *SAW, "--layers", 0).read_bytes()


# Budgets


def budget_of(artifact: Artifact) -> dict:
    return artifact.manifest["calibration"]["budget"]


def code_bits(artifact: Artifact, *layers: int) -> float:
    """Mean code bits over the channels of these layers, which have two KV heads each."""
    plans = [plan for index in layers for plan in artifact.layers[index].sides.values()]
    return sum(sum(plan.scheme_of(head).widths) for plan in plans for head in range(2)) / sum(
        2 * plan.dim for plan in plans
    )


def row_bytes(artifact: Artifact) -> float:
    """Bytes of a token: mean over layers with two KV heads each."""
    return sum(2 * plan.row_bytes for layer in artifact.layers.values() for plan in layer.sides.values()) / len(
        artifact.layers
    )


def attention(layer: reference.Layer, head: int, rows: slice, k: np.ndarray) -> np.ndarray:
    """[group, n, n] with these keys [n, D]."""
    only = slice(0, k.shape[0])
    part = reference.Layer(
        layer.queries(head)[rows],
        k[:, None],
        layer.v[rows, head : head + 1],
        np.array([0, len(k)]),
        layer.scale,
        layer.window,
    )
    return reference.causal_softmax(part, 0, only)


def output_cost(
    layer: reference.Layer, plans: dict[str, SidePlan], rows: slice, curvature: np.ndarray | None = None
) -> float:
    """Change of attention's output on the held-out tokens, with keys and values changed separately: nats a token with a
    curvature [Hq, Dv, Dv], else squared and relative to the layer's outputs."""
    exact = {side: rows_of(layer, side)[:, rows] for side in "kv"}
    coded = {side: np.float64(plan.reconstruct_heads(exact[side])) for side, plan in plans.items()}
    changed = outputs = 0.0
    for head in range(layer.heads):
        group = layer.q.shape[1] // layer.heads
        metric = (
            np.stack([np.eye(layer.v.shape[2])] * group)
            if curvature is None
            else curvature[head * group : (head + 1) * group]
        )
        weights, v = attention(layer, head, rows, layer.k[rows, head]), layer.v[rows, head]
        errors = []
        if "k" in coded:
            errors.append((attention(layer, head, rows, coded["k"][head]) - weights) @ v)
        if "v" in coded:
            errors.append(weights @ (coded["v"][head] - v))
        changed += sum(np.einsum("gni,gij,gnj->", error, metric, error) for error in errors) / len(v) / 2
        outputs += ((weights @ v) ** 2).sum() / len(v) / 2
    return changed if curvature is not None else changed / outputs


@pytest.fixture(scope="module")
def kvq(short, tmp_path_factory) -> Path:
    """An artifact of --method kvq with default options, on a real model, and its statistics."""
    folder = tmp_path_factory.mktemp("kvq")
    return calibrate(short, folder / "out", *KVQ, "--layers", "0,4", "--stats", folder / "stats")


@pytest.fixture(scope="module")
def layered(make_dump) -> Path:
    """Three layers of two KV heads, 32 channels of keys and 48 of values."""
    return make_dump(**SMALL | {"layers": 3, "tokens": 120}, **GEOMETRIES["half"])


def test_budget_report(kvq, short):
    artifact = read_artifact(kvq)
    budget = budget_of(artifact)
    assert budget.keys() == {
        "unit",
        "budget",
        "spent",
        "mean_bits",
        "mean_bytes",
        "metric",
        "cost",
        "gap",
        "held_out_tokens",
    }
    assert (budget["unit"], budget["budget"], budget["metric"], budget["held_out_tokens"]) == (
        "bits",
        2,
        "relative_output",
        SHORT // 3,
    )
    assert (
        budget["spent"] == budget["mean_bits"] == pytest.approx(code_bits(artifact, 0, 4))
        and 1.9 < budget["spent"] <= 2
    )
    assert budget["mean_bytes"] == pytest.approx(row_bytes(artifact))
    layers = {index: read(short, index) for index in artifact.layers}
    cost = sum(
        output_cost(layers[index], plans.sides, held_out(layers[index])) for index, plans in artifact.layers.items()
    )
    assert budget["cost"] == pytest.approx(cost, rel=1e-3) and 0 <= budget["gap"] < 0.2
    assert artifact.manifest["calibration"]["options"]["budget_bits"] == 2


@pytest.mark.parametrize(
    "flags",
    [
        (*KVQ, "--budget-bits", 1.5),
        (*KVQ, "--budget-bits", 3.3, "--coder", "symmetric"),
        (*GTQ, "--joint", "--budget-bits", 2.2),
        (*GTQ, "--joint", "--bits", 3),
        (*KVQ, "--k-allocation", "channel", "--v-allocation", "none"),
        (*KVQ, "--sink-tokens", 4, "--recent-tokens", 8),
    ],
    ids=str,
)
def test_bits_stay_within_the_budget(layered, tmp_path, flags):
    artifact = verified(layered, tmp_path / "out", *flags)
    budget = budget_of(artifact)
    assert budget["spent"] == pytest.approx(code_bits(artifact, 0, 1, 2))
    assert budget["budget"] * 0.9 < budget["spent"] <= budget["budget"] + 1e-12


@pytest.mark.parametrize("flags", [KVQ, (*KVQ, "--uniform-layout"), (*GTQ, "--joint", "--coder", "symmetric")], ids=str)
@pytest.mark.parametrize("wanted", [61, 96.5])
def test_bytes_stay_within_the_budget(layered, tmp_path, wanted, flags):
    artifact = verified(layered, tmp_path / "out", *flags, "--budget-bytes", wanted)
    budget = budget_of(artifact)
    assert (budget["unit"], budget["budget"]) == ("bytes", wanted)
    assert budget["spent"] == budget["mean_bytes"] == pytest.approx(row_bytes(artifact))
    assert wanted * 0.85 < budget["spent"] <= wanted
    if "--uniform-layout" in flags:
        assert len({tuple(plan.row_bytes for plan in layer.sides.values()) for layer in artifact.layers.values()}) == 1


def test_uniform_layouts_have_equal_rows(layered, tmp_path):
    artifact = verified(layered, tmp_path / "out", *KVQ, "--uniform-layout", "--budget-bits", 2.5)
    for side in "kv":
        assert len({layer.sides[side].row_bytes for layer in artifact.layers.values()}) == 1
    assert 2 < budget_of(artifact)["spent"] <= 2.5 and artifact.manifest["calibration"]["options"]["uniform_layout"]


def test_more_budget_costs_less(layered, tmp_path):
    costs = [
        budget_of(verified(layered, tmp_path / "out", *KVQ, "--budget-bits", bits))["cost"] for bits in (1.5, 2, 3, 4)
    ]
    assert all(b < 0.8 * a for a, b in pairwise(costs)), costs


def test_exact_layers_take_no_part(layered, tmp_path):
    artifact = verified(layered, tmp_path / "out", *KVQ, "--exact-layers", 1)
    assert {side: plan.scheme.coder for side, plan in artifact.layers[1].sides.items()} == {"k": "exact", "v": "exact"}
    assert (
        budget_of(artifact)["spent"] == pytest.approx(code_bits(artifact, 0, 2))
        and 1.9 < budget_of(artifact)["spent"] <= 2
    )


INGREDIENTS = [
    "Block-GTQ keys, TQ-MSE values",
    "+ norm kept",
    "+ centred",
    "+ score qk_energy_product",
    "+ trellis codes",
    "+ widths by the coder's own law",
    "+ basis chosen head by head",
    "+ transforms chosen head by head",
    "+ one budget for layers and sides",
]


def test_ablation(kvq, short, tmp_path):
    flags = ("--model", short, "--output", tmp_path / "out", *KVQ, "--layers", "0,4", "--report-ablation")
    rows, last = (
        json.loads(succeed("kvq-calibrate", *flags, "--json").stdout)["ablation"],
        budget_of(read_artifact(kvq)),
    )
    assert (tmp_path / "out").read_bytes() == kvq.read_bytes()
    assert [row["ingredient"] for row in rows] == INGREDIENTS
    assert all(row.keys() == last.keys() | {"ingredient"} and row["mean_bits"] <= 2 and row["cost"] > 0 for row in rows)
    assert {name: value for name, value in rows[-1].items() if name != "ingredient"} == last
    assert last["cost"] < 0.8 * rows[0]["cost"]


def test_ablation_as_text(layered, tmp_path):
    text = succeed("kvq-calibrate", "--model", layered, "--output", tmp_path / "out", *KVQ, "--report-ablation").stdout
    assert all(ingredient in text for ingredient in INGREDIENTS)


def test_statistics_decide_as_the_dump_does(kvq, tmp_path):
    again = tmp_path / "again"
    succeed("kvq-calibrate", "--quiet", "--stats", kvq.parent / "stats", *KVQ, "--output", again)
    assert again.read_bytes() == kvq.read_bytes()
    succeed("kvq-calibrate", "--quiet", "--stats", kvq.parent / "stats", *GTQ, "--joint", "--output", again)
    assert budget_of(read_artifact(again))["held_out_tokens"] == SHORT // 3


@pytest.mark.parametrize("flags", [KVQ, (*GTQ, "--joint")], ids=str)
def test_statistics_without_held_out_tokens_are_refused(layered, tmp_path, flags):
    calibrate(layered, tmp_path / "out", *GTQ, "--stats", tmp_path / "stats")
    refused(flags, "--stats", tmp_path / "stats", "--output", tmp_path / "new", hint="--held-out-tokens")
    calibrate(layered, tmp_path / "out", *GTQ, "--stats", tmp_path / "stats", "--held-out-tokens", 40)
    succeed("kvq-calibrate", "--quiet", "--stats", tmp_path / "stats", *flags, "--output", tmp_path / "new")


def test_curvature_counts_in_nats(tmp_path):
    """With the loss's curvature in the dump, the budget's cost is in nats a token."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    dump = tmp_path / "dump.h5"
    subprocess.run(
        [
            sys.executable,
            ROOT / "scripts/dump_qkv.py",
            ROOT / "sample_data/model",
            "--synthetic-tokens",
            "60",
            "--sequence-length",
            "30",
            "--layers",
            "2,3",
            "--curvature",
            "--dtype",
            "float32",
            "--threads",
            "1",
            "--quiet",
            "--output",
            dump,
        ],
        check=True,
    )
    artifact = verified(dump, tmp_path / "out", *KVQ)
    budget = budget_of(artifact)
    assert budget["metric"] == "nll" and budget["held_out_tokens"] == 20
    with h5py.File(dump) as file:
        curvatures = [np.float64(file[f"layers/{index}/output_curvature"][()]) for index in (2, 3)]
    layers = [read(dump, index) for index in (2, 3)]
    cost = sum(
        output_cost(layer, plans.sides, held_out(layer), curvature)
        for layer, plans, curvature in zip(layers, artifact.layers.values(), curvatures)
    )
    assert budget["cost"] == pytest.approx(cost, rel=1e-3)
    assert (
        "nats a token"
        in succeed("kvq-calibrate", "--model", dump, "--output", tmp_path / "out", *KVQ, "--layers", 2).stdout
    )


# Refusals


def refused(flags: tuple, *arguments: object, hint: str = "") -> None:
    """Asserts exit code 2, one line of error and the hint."""
    result = run("kvq-calibrate", "--quiet", *arguments, *flags)
    assert result.code == USAGE, result
    error, *rest = result.stderr.splitlines()
    assert error.startswith("kvq-calibrate: error: ") and len(error) < 200 and result.stdout == ""
    assert len(rest) <= 1 and all(line.startswith("hint: ") for line in rest) and hint in "".join(rest)


REFUSED = [
    ("--bits", 2.5),
    (*TQ, "--bits-v", 1.5),
    (*GTQ, "--bits-v", 2.5),
    ("--coder", "affine", *GTQ),
    (*KVQ, "--coder-v", "affine"),
    (*GTQ, "--group-size", 32),
    (*KVQ, "--group-size", 32),
    ("--score", "qk_avg"),
    (*TQ, "--score", "qk_avg"),
    (*GTQ, "--score", "k_q"),
    (*KVQ, "--bits", 2),
    (*KVQ, "--bits-v", 3),
    ("--kmeans", 5000),
    ("--kmeans", 0),
    ("--kmeans", 4, "--center", "k"),
    ("--kmeans-k", 4, "--center", "kv"),
    ("--kmeans", 4, "--kmeans-scope", "layer"),
    ("--kmeans", 4, "--kmeans-order", "never"),
    ("--kmeans", 4, "--kmeans-restarts", 0),
    ("--kmeans", 4, "--kmeans-scope", "joint", "--share", "layer"),
    ("--hessian", "paper"),
    ("--method", "quarot", "--hessian", "paper"),
    (*SAW, "--hessian", "proper"),
    ("--coder", "trellis", "--memory", 4),
    ("--coder", "trellis", "--memory", 0),
    ("--coder", "trellis", "--bits", 5),
    (*GTQ, "--min-bits", 5, "--max-bits", 3),
    (*GTQ, "--max-bits", 9),
    (*GTQ, "--min-bits", -1),
    (*GTQ, "--bits-k", 4, "--max-bits", 3),
    (*GTQ, "--bits-k", 1, "--min-bits", 2),
    (*GTQ, "--budget-bits", 2),
    (*GTQ, "--budget-bytes", 99),
    (*GTQ, "--uniform-layout"),
    ("--budget-bits", 2),
    ("--joint",),
    (*KVQ, "--budget-bits", 2, "--budget-bytes", 99),
    (*KVQ, "--budget-bits", 0.5),
    (*KVQ, "--budget-bytes", 0),
    ("--coder", "symmetric", "--scale-rule", "rms"),
    ("--scale-rule", "rms"),
    (*TQ, "--scale-rule", "absmax"),
    (*TQ, "--scale-rule", "minmax"),
    (*TQ, "--clip", 0.9),
    ("--codebook", "lloyd-max", "--clip-k", "search"),
    ("--coder", "trellis", "--clip", 0.9),
    ("--codebook", "fitted", "--coder", "trellis"),
    ("--codebook", "lloyd"),
    (*GTQ, "--k-allocation", "head"),
    (*GTQ, "--v-allocation", "rope_block"),
    (*GTQ, "--mixing", "none"),
    ("--mixing", "haar"),
    (*GTQ, "--row-bytes-v", 40),
    (*GTQ, "--row-bytes-k", 4),
    (*KVQ, "--row-bytes-k", 40),
    (*TQ, "--row-bytes-k", 40),
    (*GTQ, "--report-ablation"),
    (*KVQ, "--held-out-tokens", 0),
    (*KVQ, "--held-out-tokens", -1),
    ("--memory", 2),
    (*KVQ, "--coder", "symmetric", "--memory", 2),
    ("--kmeans-scope", "joint"),
    ("--kmeans", 1, "--kmeans-order", "after"),
    ("--kmeans", 1, "--center", "k"),
    (*SAW, "--hessian", "paper", "--hadamard", "none"),
    (*GTQ, "--score", "k_only", "--k-allocation", "none"),
    (*GTQ, "--budget-per-layer"),
    (*KVQ, "--budget-per-layer", "--uniform-layout"),
    ("--budget-per-layer",),
    (*GTQ, "--joint", "--kmeans-v", 4),
    (*KVQ, "--max-bits", 0, "--min-bits", 0),
    (*GTQ, "--joint", "--bits", 2, "--budget-bits", 3),
    (*GTQ, "--joint", "--bits", 16),
    (*KVQ, "--budget-bytes", 200, "--min-bits", 8),
]


@pytest.mark.parametrize("flags", REFUSED, ids=lambda flags: " ".join(map(str, flags)))
def test_refusals(make_dump, tmp_path, flags):
    refused(flags, "--model", make_dump(**SMALL, head_dim=64), "--output", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# Regressions


@pytest.mark.parametrize("flags", [GTQ, (*GTQ, "--v-allocation", "channel"), (*KVQ, "--center", "none")], ids=str)
def test_kmeans_is_an_axis_of_every_method(sample, tmp_path, flags):
    """`--kmeans` works with any method. A method that cannot quantize residuals must refuse it instead of ignoring
    it."""
    result = run(
        "kvq-calibrate",
        "--quiet",
        "--model",
        sample,
        "--output",
        tmp_path / "out",
        "--layers",
        0,
        "--kmeans",
        4,
        *flags,
    )
    if result.code == USAGE:
        return
    assert result.code == 0
    assert all("centroids" in plan.tensors for plan in read_artifact(tmp_path / "out").layers[0].sides.values())


@pytest.mark.parametrize("flags", [(*KVQ, "--budget-bytes", 1), (*KVQ, "--min-bits", 5)], ids=str)
def test_budgets_below_every_row_are_refused(short, tmp_path, flags):
    refused(flags, "--model", short, "--layers", 0, "--output", tmp_path / "out")


def test_rows_without_any_code_are_refused(layered, tmp_path):
    refused(
        (*GTQ, "--row-bytes-k", 4, "--scale-type", "fp32", "--min-bits", 0),
        "--model",
        layered,
        "--output",
        tmp_path / "out",
    )


@pytest.mark.parametrize("flags", [(*KVQ, "--budget-bits", 1), (*GTQ, "--coder", "trellis", "--bits", 1)], ids=str)
def test_widths_that_have_no_trellis(layered, tmp_path, flags):
    verified(layered, tmp_path / "out", *flags)


@pytest.mark.parametrize("size", [18, 23])
def test_rows_of_an_odd_size_stay_within_it(layered, tmp_path, size):
    assert verified(layered, tmp_path / "out", *GTQ, "--row-bytes-k", size).layers[0].sides["k"].row_bytes <= size


@pytest.mark.parametrize("unit, size", [("--budget-bits", 2.5), ("--budget-bytes", 96)])
def test_budget_of_each_layer(layered, tmp_path, unit, size):
    """No layer spends more than its own share; in some layer, keys and values get different shares."""
    flags = (*GTQ, "--joint", unit, size, "--coder", "symmetric")
    artifact = verified(layered, tmp_path / "out", *flags, "--budget-per-layer")
    spent = [
        code_bits(artifact, layer)
        if unit == "--budget-bits"
        else sum(2 * plan.row_bytes for plan in artifact.layers[layer].sides.values())
        for layer in artifact.layers
    ]
    assert all(size * 0.8 < own <= size + 1e-9 for own in spent)
    free = budget_of(verified(layered, tmp_path / "free", *flags))
    assert free["cost"] <= budget_of(artifact)["cost"] * (1 + 1e-9), "one budget for all layers has more to choose from"


def test_uniform_layout_of_values_alone(layered, tmp_path):
    flags = ("--joint", "--uniform-layout", "--bits-k", 16, "--budget-bits", 2.5, "--coder", "symmetric")
    artifact = verified(layered, tmp_path / "out", *GTQ, *flags)
    assert budget_of(artifact)["spent"] == 2  # 48 channels in the next larger row, 20 bytes, take more than 2.5 bits


@pytest.mark.parametrize("flags", [("--bits-k", 3), ("--row-bytes-k", 40)], ids=str)
def test_sizes_of_a_side_do_not_go_with_one_budget(layered, tmp_path, flags):
    refused((*GTQ, "--joint", *flags), "--model", layered, "--output", tmp_path / "out")


@pytest.mark.parametrize("first, second", [(GTQ, KVQ), (KVQ, GTQ), (KVQ, (*KVQ, "--held-out-tokens", 32))], ids=str)
def test_resumed_runs_hold_out_what_whole_ones_do(make_dump, tmp_path, first, second):
    dump, output = make_dump(tokens=150, layers=4), tmp_path / "out"
    while not shards(output):
        process = start(dump, output, *first)
        wait_for_layers(process, output, 1)
        process.send_signal(signal.SIGKILL)
        process.wait()
    fresh = calibrate(dump, tmp_path / "fresh", *second)
    assert calibrate(dump, output, "--resume", *second).read_bytes() == fresh.read_bytes()


@pytest.mark.parametrize(
    "flags",
    [GTQ, TQ, (*KVQ, "--transform", "klt"), (*KVQ, "--transform", "orthogonal"), (*SAW, "--hessian", "paper")],
    ids=str,
)
def test_dry_run_predicts_the_size(short, tmp_path, flags):
    arguments = ("--model", short, "--output", tmp_path / "out", "--layers", 0, *flags)
    prediction = json.loads(succeed("kvq-calibrate", "--dry-run", "--json", *arguments).stdout)
    succeed("kvq-calibrate", "--quiet", *arguments)
    assert prediction["artifact_bytes"] == pytest.approx((tmp_path / "out").stat().st_size, rel=0.2)


def test_dry_run_takes_the_larger_size_where_transforms_are_chosen(short, tmp_path):
    def predicted(*flags) -> int:
        return json.loads(
            succeed(
                "kvq-calibrate", "--dry-run", "--json", "--model", short, "--output", tmp_path / "out", *KVQ, *flags
            ).stdout
        )["artifact_bytes"]

    assert predicted() == pytest.approx(predicted("--transform", "klt"), rel=0.01)
    assert predicted() > predicted("--transform", "orthogonal")


def test_fitted_tables_before(sample, tmp_path):
    artifact = verified(sample, tmp_path / "out", "--method", "random", "--codebook", "fitted", "--layers", 4)
    plan, layer, lost, energy = artifact.layers[4].sides["k"], real(4), 0.0, 0.0
    for head, x in enumerate(rows_of(layer, "k")):
        error = np.float64(fake_quantize(x, plan.scheme_of(head))) - x
        metric = reference.mean(reference.weighted(layer.queries(head).reshape(-1, 128)))
        lost += reference.cost(error, metric, np.ones(len(x)))
        energy += reference.cost(np.float64(x), metric, np.ones(len(x)))
    assert artifact.manifest["layers"][0]["k"]["error"]["before"] == pytest.approx(lost / energy, rel=1e-3)
