"""Mixed widths: scores of RoPE blocks and channels, widths, and rows of a given size, against numpy."""

from itertools import product

import h5py
import numpy as np
import pytest
import reference
from calibrations import GEOMETRIES, GTQ, SMALL, read, real, refused, verified
from dumps import edited, replace
from kvq_tools import calibrate

from kvq.artifact import SidePlan
from kvq.artifact_reader import load_artifact

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
    plan = load_artifact(calibrate(dump, tmp_path / "out", *GTQ, "--bits-k", 2.3)).layers[0].sides["k"]
    assert plan.tensors["block_bits"].tolist() == [[3] * 4 + [2] * 12] * 2


def test_blocks_without_energy_share_what_is_left(make_dump, tmp_path):
    dump = edited(make_dump(**SMALL, head_dim=32), tmp_path / "zeros.h5", flattened(8))
    plan = load_artifact(calibrate(dump, tmp_path / "out", *GTQ, "--bits-k", 3, "--max-bits", 4)).layers[0].sides["k"]
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


def test_rows_without_any_code_are_refused(layered, tmp_path):
    refused(
        (*GTQ, "--row-bytes-k", 4, "--scale-type", "fp32", "--min-bits", 0),
        "--model",
        layered,
        "--output",
        tmp_path / "out",
    )


@pytest.mark.parametrize("size", [18, 23])
def test_rows_of_an_odd_size_stay_within_it(layered, tmp_path, size):
    assert verified(layered, tmp_path / "out", *GTQ, "--row-bytes-k", size).layers[0].sides["k"].row_bytes <= size
