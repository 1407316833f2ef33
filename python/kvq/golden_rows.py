"""Golden rows of an artifact (formats/artifact.md): real rows with what a plan makes of them, checked by coding them
anew.

Shapes: N tokens, Hq query heads, Hkv KV heads, D channels, P probes.
"""

from dataclasses import dataclass

import numpy as np

from .artifact import GoldenRows, LayerPlan, SidePlan
from .packing import CodedRows, decode, encode, expect_finite, pack, quiet, squared_distances

PROBE = np.float32(2**-18)  # size of the step that moves x_rot, relative to the row's largest channel
CENTROID_GAP = np.float32(2**-14)
OUTPUT_TOLERANCE = 1e-6


@dataclass(frozen=True)
class CodedSide:
    packed: np.ndarray  # uint8 [N, Hkv, row_bytes]
    firm: np.ndarray  # uint8 [N, Hkv]
    decoded: np.ndarray  # float32 [N, Hkv, D], rotated back


def code_side(plan: SidePlan, x: np.ndarray) -> CodedSide:
    """Quantizes rows x [N, Hkv, D] by a plan. raises ValueError for rows that overflow in the rotation"""
    heads = x.transpose(1, 0, 2)
    chosen = choose_centroids(plan, heads)
    packed, firm, decoded = [], [], []
    for head, (rows, (index, clear)) in enumerate(zip(heads, chosen)):
        x_rot, scheme = plan.rotate(rows, head, index), plan.scheme_of(head)
        expect_finite(x_rot)
        coded = with_index(encode(x_rot, scheme), index)
        packed.append(pack(coded, scheme))
        firm.append(clear & survives_probes(plan, head, x_rot, index, packed[-1]))
        decoded.append(plan.unrotate(decode(coded, scheme), head, index))
    return CodedSide(np.stack(packed, axis=1), np.stack(firm, axis=1).astype(np.uint8), np.stack(decoded, axis=1))


def with_index(coded: CodedRows, index: np.ndarray | None) -> CodedRows:
    return CodedRows(coded.codes, coded.numbers, index)


@quiet
def choose_centroids(plan: SidePlan, x: np.ndarray) -> list[tuple[np.ndarray | None, np.ndarray]]:
    """For each head of x [Hkv, N, D]: the index of each row's centroid (or None), and whether the choice is clear, bool
    [N]."""
    count = len(x)
    if not plan.centroid_scope:
        return [(None, np.ones(x.shape[1], bool))] * count
    distances = [squared_distances(rows, plan.centroids(head)) for head, rows in enumerate(x)]
    if plan.centroid_scope == "joint":
        total = distances[0]
        for own in distances[1:]:
            total = total + own
        distances = [total] * count
    chosen = []
    for own in distances:
        best, second = np.partition(own, 1, axis=0)[:2]
        chosen.append((own.argmin(axis=0), second - best > best * CENTROID_GAP))
    return chosen


@quiet
def survives_probes(
    plan: SidePlan, head: int, x_rot: np.ndarray, index: np.ndarray | None, packed: np.ndarray
) -> np.ndarray:
    """bool [N]: whether moving all channels by a step, in any of the patterns of signs, leaves the bytes as they
    are."""
    if plan.kind == "identity":  # no rounding
        return np.ones(len(x_rot), bool)
    channels = np.arange(plan.dim)
    masks = [0] + [1 << bit for bit in range((plan.dim - 1).bit_length())]
    signs = np.stack([np.where(channels & mask, -sign, sign) for mask in masks for sign in (1, -1)]).astype(np.float32)
    largest = np.abs(x_rot).max(axis=1)
    step = largest * PROBE
    bounded = np.isfinite(largest + step)
    moved = x_rot + np.where(bounded, step, 0).astype(np.float32)[:, None] * signs[:, None, :]  # [P, N, D]
    scheme = plan.scheme_of(head)
    indices = None if index is None else np.tile(index, len(signs))
    found = pack(with_index(encode(moved.reshape(-1, plan.dim), scheme), indices), scheme)
    same = (found.reshape(len(signs), *packed.shape) == packed).all(axis=(0, 2))
    return same & bounded


def attend_last(rows: GoldenRows, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """float32 [Hq, Dv]: attention in binary64 over the k [N, Hkv, D] and v [N, Hkv, Dv] inside the sliding window."""
    first = max(0, len(k) - rows.sliding_window) if rows.sliding_window else 0
    k, v, q = k[first:].astype(np.float64), v[first:].astype(np.float64), rows.q.astype(np.float64)
    group = len(q) // k.shape[1]
    out = []
    for head, query in enumerate(q):
        scores = rows.softmax_scale * (k[:, head // group] @ query)
        if rows.logit_softcapping:
            scores = rows.logit_softcapping * np.tanh(scores / rows.logit_softcapping)
        weights = np.exp(scores - scores.max())
        out.append(weights / weights.sum() @ v[:, head // group])
    return np.stack(out).astype(np.float32)


@quiet
def golden_fault(layer: LayerPlan) -> str:
    """The first difference between the golden rows and the result of quantizing them again; empty if there is none."""
    rows = layer.golden
    try:
        coded = {side: code_side(plan, rows.x[side]) for side, plan in layer.sides.items()}
    except ValueError as error:  # rows that overflow in the rotation
        return f"layer {layer.layer}: {error}"
    for side, own in coded.items():
        for what, expected, found in (("bytes", own.packed, rows.packed[side]), ("firm", own.firm, rows.firm[side])):
            if (expected != found).any():
                token, head, *rest = map(int, np.argwhere(expected != found)[0])
                place = (token, head, *rest)
                return (
                    f"layer {layer.layer}: {side} of token {token} head {head}: {what}{rest or ''}: "
                    f"expected {expected[place]}, found {found[place]}"
                )
    if rows.out is None:
        return ""
    expected = attend_last(rows, coded["k"].decoded, coded["v"].decoded)
    bad = ~(np.abs(expected - rows.out) <= OUTPUT_TOLERANCE * np.abs(expected).max(axis=1, keepdims=True))
    if not bad.any():
        return ""
    head, channel = map(int, np.argwhere(bad)[0])
    return (
        f"layer {layer.layer}: output of query head {head} channel {channel}: expected {expected[head, channel]}, "
        f"found {rows.out[head, channel]}"
    )
