"""Calibrations of small dumps and of the real model, read back, and the errors that they should have.

Shapes: T tokens, H KV heads, D channels, L RoPE blocks, C centroids.
"""

import json
from functools import cache
from pathlib import Path

import h5py
import numpy as np
import reference
from kvq_tools import ROOT, calibrate, run, succeed

from kvq.artifact import Artifact, SidePlan
from kvq.artifact_reader import load_artifact

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
    return load_artifact(output)


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


@cache
def real(index: int) -> reference.Layer:
    return read(ROOT / "sample_data/calibration.h5", index)


def refused(flags: tuple, *arguments: object, hint: str = "") -> None:
    """Asserts exit code 2, one line of error and the hint."""
    result = run("kvq-calibrate", "--quiet", *arguments, *flags)
    assert result.code == USAGE, result
    error, *rest = result.stderr.splitlines()
    assert error.startswith("kvq-calibrate: error: ") and len(error) < 200 and result.stdout == ""
    assert len(rest) <= 1 and all(line.startswith("hint: ") for line in rest) and hint in "".join(rest)
