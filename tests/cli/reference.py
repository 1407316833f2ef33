"""What a calibration computes, once more in numpy and float64, as plainly as formats/ and the papers write it down.

Shapes: T tokens, Hq query heads, H KV heads, D channels of q and k, Dv of v, n tokens of a sequence.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import h5py
import numpy as np

from kvq.artifact import SidePlan, hadamard
from kvq.packing import decode, encode, from_bf16_bits
from kvq.scheme import Scheme


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer of a dump; its hash is its identity, because moments() keeps results."""

    q: np.ndarray  # [T, Hq, D]
    k: np.ndarray  # [T, H, D]
    v: np.ndarray  # [T, H, Dv]
    cu_seqlens: np.ndarray
    scale: float
    window: int

    @property
    def heads(self) -> int:
        return self.k.shape[1]

    def queries(self, head: int) -> np.ndarray:
        """[T, group, D]: the queries of the query heads that read a KV head."""
        group = self.q.shape[1] // self.heads
        return self.q[:, head * group : (head + 1) * group]

    def sequences(self) -> list[slice]:
        return [slice(a, b) for a, b in zip(self.cu_seqlens, self.cu_seqlens[1:])]


def widened(stored: np.ndarray) -> np.ndarray:
    return np.float64(from_bf16_bits(stored) if stored.dtype == np.uint16 else stored)


@lru_cache(maxsize=16)
def read_layer(dump: Path, index: int) -> Layer:
    """A layer of a post_rope dump in float32 or bfloat16."""
    with h5py.File(dump) as file:
        group = file[f"layers/{index}"]
        tensors = [widened(group[name][()]) for name in "qkv"]
        return Layer(*tensors, file["cu_seqlens"][()], group.attrs["softmax_scale"], group.attrs["sliding_window"])


def causal_softmax(layer: Layer, head: int, rows: slice) -> np.ndarray:
    """Softmax scores S of one sequence, [group, n, n]."""
    logits = layer.scale * np.einsum("igd,jd->gij", layer.queries(head)[rows], layer.k[rows, head])
    distance = np.subtract.outer(np.arange(logits.shape[1]), np.arange(logits.shape[1]))
    visible = (distance >= 0) & (distance < (layer.window or np.inf))
    logits = np.where(visible, logits, -np.inf)
    weights = np.exp(logits - logits.max(axis=2, keepdims=True))
    return weights / weights.sum(axis=2, keepdims=True)


# Moments of one KV head (formats/stats.md): (sum [D, D], first [D], weight)


def weighted(x: np.ndarray, w: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, float]:
    w = np.ones(len(x)) if w is None else w
    return (x.T * w) @ x, w @ x, float(w.sum())


def outputs(layer: Layer, head: int) -> np.ndarray:
    """o = S V of every query, [T * group, Dv]."""
    return np.concatenate(
        [
            (causal_softmax(layer, head, rows) @ layer.v[rows, head]).reshape(-1, layer.v.shape[2])
            for rows in layer.sequences()
        ]
    )


def query_weights(layer: Layer, head: int) -> np.ndarray:
    """w_i = scale^2 sum_t S_it^2 |v_t - o_i|^2 of every query, [group, T]."""
    parts = []
    for rows in layer.sequences():
        s, v = causal_softmax(layer, head, rows), layer.v[rows, head]
        distance = ((v[None, None] - (s @ v)[:, :, None]) ** 2).sum(axis=3)
        parts.append(layer.scale**2 * (s**2 * distance).sum(axis=2))
    return np.concatenate(parts, axis=1)


def column_energy(layer: Layer, head: int) -> np.ndarray:
    """Sum of S^2 over the queries that see a token, per query head: [T]."""
    return np.concatenate(
        [(causal_softmax(layer, head, rows) ** 2).sum(axis=1).mean(axis=0) for rows in layer.sequences()]
    )


@lru_cache(maxsize=16)
def moments(layer: Layer, head: int) -> dict[str, tuple[np.ndarray, np.ndarray, float]]:
    q, k, v = layer.queries(head), layer.k[:, head], layer.v[:, head]
    rows = q.reshape(-1, q.shape[2])
    query = weighted(rows)
    scored_query = weighted(q.transpose(1, 0, 2).reshape(rows.shape), query_weights(layer, head).reshape(-1))
    return {
        "query": query,
        "key": weighted(k),
        "value": weighted(v),
        "scored_value": weighted(outputs(layer, head)),
        "scored_query": (*scored_query[:2], float(len(rows))),  # a mean over queries, not over weights
        "sst": weighted(v, np.einsum("ti,ij,tj->t", k, query[0] / query[2], k)),
    }


def mean(moment: tuple[np.ndarray, np.ndarray, float], center: np.ndarray | None = None) -> np.ndarray:
    """E (x - c)(x - c)^T."""
    second, first = moment[0] / moment[2], moment[1] / moment[2]
    if center is None:
        return second
    return second - np.outer(first, center) - np.outer(center, first) + np.outer(center, center)


# Rotations


def bit_reversal(dim: int) -> np.ndarray:
    """P [D, D]: row k has its 1 at the position of channel k. Positions are reversed binary numbers without those
    beyond D."""
    bits = (dim - 1).bit_length()
    reversed_numbers = [int(format(i, f"0{bits}b")[::-1], 2) for i in range(2**bits)]
    return np.eye(dim)[[place for place in reversed_numbers if place < dim]]


def block_hadamard(dim: int) -> np.ndarray:
    order = dim & -dim
    return np.kron(np.eye(dim // order), hadamard(order))


def composed(recipe: str, basis: np.ndarray) -> np.ndarray:
    """The product of a recipe's factors, such as U*H*P, from left to right."""
    dim = len(basis)
    factors = {"U": basis, "H": block_hadamard(dim), "P": bit_reversal(dim), "I": np.eye(dim)}
    return np.linalg.multi_dot([np.eye(dim), *(factors[letter] for letter in recipe.split("*")), np.eye(dim)])


# Errors


def inner(a: np.ndarray, b: np.ndarray, metric: np.ndarray, weights: np.ndarray) -> float:
    """sum_t w_t a_t M b_t^T"""
    return float(np.einsum("t,ti,ij,tj->", weights, a, metric, b, optimize=True))


def cost(error: np.ndarray, metric: np.ndarray, weights: np.ndarray) -> float:
    return inner(error, error, metric, weights)


def clip_cost(error: np.ndarray, x: np.ndarray, metric: np.ndarray, weights: np.ndarray, shrink_weight: float) -> float:
    """The cost that the clip search minimizes: e = -a x + r with one a for all rows, where a counts `shrink_weight`
    times."""
    length = cost(x, metric, weights)
    a = -inner(x, error, metric, weights) / length
    return cost(error + a * x, metric, weights) + shrink_weight * a**2 * length


def baseline(row_bytes: int, dim: int) -> Scheme:
    """The plain min-max codes that a plan of so many bytes is compared with (formats/artifact.md, "The baseline")."""
    schemes = [
        Scheme("affine", bits, group, "fp16", "minmax", "float")
        for bits in range(1, 9)
        for group in range(min(16, dim), dim + 1)
        if dim % group == 0
    ]
    large = [scheme for scheme in schemes if scheme.row_bytes(dim) >= row_bytes]
    if not large:
        return max(schemes, key=lambda scheme: (scheme.row_bytes(dim), scheme.bits))
    return min(large, key=lambda scheme: (scheme.row_bytes(dim), -scheme.bits))


def plain_error(plan: SidePlan, x: np.ndarray) -> np.ndarray:
    """Error of the baseline of the plan on rows without center, rotation and clip."""
    rows = x.astype(np.float32)
    scheme = baseline(plan.row_bytes, rows.shape[1])
    return np.float64(decode(encode(rows, scheme), scheme)) - rows


def plan_error(plan: SidePlan, head: int, x: np.ndarray, clip_ratio: float | None = None) -> np.ndarray:
    """Error of the plan's codes, rotated back: e = (decoded - x_rot) R^T."""
    scheme = plan.scheme_of(head) if clip_ratio is None else replace(plan.scheme, clip_ratio=clip_ratio)
    rotated = plan.rotate(x.astype(np.float32), head)
    return (np.float64(decode(encode(rotated, scheme), scheme)) - rotated) @ plan.matrix(head).T
