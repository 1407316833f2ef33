"""k-means centroids: of heads, of tokens, of shared heads, before and after the rotation."""

import numpy as np
import pytest
from calibrations import GTQ, KVQ, USAGE, real, rows_of, verified
from kvq_tools import calibrate, run, succeed

from kvq.artifact_reader import load_artifact
from kvq.packing import nearest_centroids


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


def test_more_centroids_than_tuned_kernels_take_are_named(sample, tmp_path):
    flags = ("--model", sample, "--output", tmp_path / "out", "--method", "saw-int4", "--layers", "1,3")
    said = succeed("kvq-calibrate", *flags, "--kmeans-v", 257, "--kmeans-k", 256)
    hint = next(line for line in said.stderr.splitlines() if line.startswith("hint: "))
    assert hint.startswith("hint: layer 1: 257 centroids ") and hint.endswith("(--kmeans-v 256)")
    assert "serving  generic" in said.stdout
    served = succeed("kvq-calibrate", *flags, "--kmeans", 256)
    assert "hint: layer" not in served.stderr and "serving  tuned" in served.stdout
    # Groups of 32 have no tuned kernel with fewer centroids either.
    assert "hint: layer" not in succeed("kvq-calibrate", *flags, "--kmeans", 257, "--group-size", 32).stderr


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
        assert list(tmp_path.iterdir()) == [tmp_path / "out.parts"] and str(tmp_path / "out.parts") in hint
    calibrate(sample, tmp_path / "out", "--kmeans", 447, "--layers", 0)


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
    assert all("centroids" in plan.tensors for plan in load_artifact(tmp_path / "out").layers[0].sides.values())
