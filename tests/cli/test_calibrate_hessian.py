"""Rotations from Hessians (`saw-int4 --hessian`) against their equations in numpy."""

import numpy as np
import pytest
import reference
from calibrations import SAW, real, verified
from kvq_tools import calibrate


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
