"""Codebook and trellis codes: tables on the sphere, fitted tables, and what they bring."""

import subprocess
from itertools import product

import numpy as np
import pytest
import reference
from calibrations import GTQ, KVQ, SMALL, TQ, real, rows_of, verified
from kvq_tools import BIN

from kvq.artifact import SidePlan
from kvq.sphere_codebook import sphere_codebook


def sphere_means(entries: np.ndarray, dim: int) -> np.ndarray:
    """Means of the cells under the marginal of a point on the sphere of radius sqrt(dim), integrated over the angle,
    which avoids singular ends."""
    edges = np.concatenate([[-np.pi / 2], np.arcsin((entries[1:] + entries[:-1]) / 2 / dim**0.5), [np.pi / 2]])
    points, weights = np.polynomial.legendre.leggauss(80)
    angles = edges[:-1, None] + np.diff(edges)[:, None] * (points + 1) / 2
    density = weights * np.cos(angles) ** (dim - 2)
    return (dim**0.5 * np.sin(angles) * density).sum(axis=1) / density.sum(axis=1)


def check_table(table: np.ndarray, dim: int, tolerance: float) -> None:
    """Up to 4 bits the integers of at most 127, times a step, that are nearest to Lloyd-Max; else Lloyd-Max itself."""
    if len(table) > 16:
        assert table == pytest.approx(sphere_means(table, dim), abs=tolerance)
        return
    exact, most = np.array(sphere_codebook(int(np.log2(len(table))), dim)), np.abs(table).max()
    assert exact == pytest.approx(sphere_means(exact, dim), abs=tolerance)
    steps = most / np.arange(1, 128)
    levels = np.round(table / steps[:, None])
    assert np.abs(table - levels * steps[:, None]).max(axis=1).min() < 4e-7 * most
    assert np.abs(table - exact).max() < 0.51 * most / 64  # half a level of the coarsest grid
    # No grid that begins at the largest entry is nearer.
    grids = np.abs(exact).max() / np.arange(64, 128)
    others = np.round(exact / grids[:, None]) * grids[:, None]
    assert ((table - exact) ** 2).sum() <= ((others - exact) ** 2).sum(axis=1).min() + tolerance**2


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dim", [2, 3, 16, 48])
def test_tables_are_centroids_on_the_sphere(make_dump, tmp_path, dim, bits):
    dump = make_dump(layers=1, tokens=30, head_dim=dim * 2, rope="none")
    artifact = verified(
        dump, tmp_path / "out", "--method", "plain", "--codebook", "lloyd-max", "--bits", bits, "--group-size", dim
    )
    for plan in artifact.layers[0].sides.values():
        table = np.float64(plan.tensors[f"codebook.{bits}"])
        assert table.shape == (2**bits,)
        check_table(table, dim, 2e-6)
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
        check_table(table, length or 128, 1e-5)


def test_oscar_with_a_codebook(sample, tmp_path):
    artifact = verified(sample, tmp_path / "out", "--codebook", "lloyd-max", "--bits", 2, "--layers", 0)
    for side, plan in artifact.layers[0].sides.items():
        entry = artifact.manifest["layers"][0][side]
        assert (entry["coder"], entry["group_size"], entry["scale_rule"]) == ("codebook", 64, "norm")
        assert plan.tensors["codebook.2"].shape == (4,) and plan.row_bytes == 128 * 2 // 8 + 2 * 2
        check_table(np.float64(plan.tensors["codebook.2"]), 64, 1e-5)


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


@pytest.mark.parametrize("flags", [(*KVQ, "--budget-bits", 1), (*GTQ, "--coder", "trellis", "--bits", 1)], ids=str)
def test_widths_that_have_no_trellis(layered, tmp_path, flags):
    verified(layered, tmp_path / "out", *flags)


def test_errors_before_are_of_one_baseline(sample, tmp_path):
    """Methods with rows of as many bytes are compared with the same plain codes, whatever their own coder is."""
    before = {}
    for flags in [("--method", "tq-mse"), ("--method", "random", "--codebook", "fitted"), ("--method", "quarot")]:
        artifact = verified(sample, tmp_path / "out", *flags, "--layers", 4, "--group-size", 128)
        errors = [artifact.manifest["layers"][0][side]["error"] for side in "kv"]
        assert [error["baseline"] for error in errors] == [{"bits": 2, "group_size": 128}] * 2
        before[flags] = [error["before"] for error in errors]
    assert len({tuple(values) for values in before.values()}) == 1
    plan, layer, lost, energy = artifact.layers[4].sides["k"], real(4), 0.0, 0.0
    for head, x in enumerate(rows_of(layer, "k")):
        metric = reference.mean(reference.weighted(layer.queries(head).reshape(-1, 128)))
        lost += reference.cost(reference.plain_error(plan, x), metric, np.ones(len(x)))
        energy += reference.cost(np.float64(x), metric, np.ones(len(x)))
    assert before[flags][0] == pytest.approx(lost / energy, rel=1e-3)
