"""Sums over the causal softmax S of one sequence: what the output of attention is made of, and what errors cost.

S is needed row by row only, because o_i = S_i V is all that query i adds to the sums of outputs. So a panel of queries
against the keys that they see is enough at a time: its size is bounded, whatever the length of the sequence. All KV
heads of a layer share a panel. Products are float32, as in kvq-calibrate; what they add to the sums is float64.
"""

from dataclasses import dataclass

import numpy as np
import torch

from .moments import Moment, heads_first

# Numbers of S that exist at once, unless one token of all query heads needs more. A CPU keeps a small panel in its
# caches; a GPU needs a large one to be busy.
PANEL_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
LEAST_QUERIES = 64  # of a panel that is cut because of a window


@dataclass(frozen=True)
class SoftmaxShape:
    """What S of a layer is made with, beside queries and keys.

    window  0: all keys before and at the query, else the last `window`
    cap     c: the softmax takes c tanh(logit / c); None: no cap
    sinks   float32 [Hkv, Hq / Hkv] logits of learned sinks, which take weight and have no value; None: none
    """

    scale: float
    window: int = 0
    cap: float | None = None
    sinks: torch.Tensor | None = None

    def first_key(self, query: int) -> int:
        """The first key that this query sees."""
        return max(0, query - self.window + 1) if self.window else 0


@dataclass
class Panel:
    """S of the queries [first, end) of a sequence against the keys [first_key, end).

    weights  float32 [Hkv, (end - first) * Hq / Hkv, end - first_key], rows by token, then query head
    slopes   the cap's slopes, as `weights`; None without a cap
    """

    first_key: int
    weights: torch.Tensor
    slopes: torch.Tensor | None


def softmax_panel(queries: torch.Tensor, k: torch.Tensor, first: int, shape: SoftmaxShape) -> Panel:
    """S of queries [b, Hq, D], the tokens `first ..` of a sequence with keys k [Hkv, T, D]; both float32."""
    count, kv_heads = len(queries), len(k)
    first_key = shape.first_key(first)
    rows = heads_first(queries, kv_heads)
    keys = k[:, first_key : first + count]
    logits = torch.baddbmm(rows.new_empty(()), rows, keys.transpose(1, 2), beta=0, alpha=shape.scale)
    slopes = None
    if shape.cap is not None:
        relative = logits.div_(shape.cap).tanh_()
        slopes = 1.0 - relative * relative
        logits = relative.mul_(shape.cap)
    by_token = logits.view(kv_heads, count, -1, logits.shape[2])  # [Hkv, b, Hq / Hkv, keys]
    _mask(by_token, first, first_key, shape.window)
    if shape.sinks is None:
        return Panel(first_key, torch.softmax(logits, -1), slopes)
    column = shape.sinks[:, None, :, None].expand(*by_token.shape[:3], 1)
    weights = torch.softmax(torch.cat([by_token, column], -1), -1)[..., :-1]
    return Panel(first_key, weights.reshape(logits.shape), slopes)


def _mask(logits: torch.Tensor, first: int, first_key: int, window: int) -> None:
    """Forbids what causality and the window forbid: keys behind a query are among the last columns of the panel, keys
    before its window among the first."""
    count = logits.shape[1]
    query = torch.arange(first, first + count, device=logits.device)[:, None, None]
    logits[..., first - first_key :].masked_fill_(query.view(1, 1, -1) > query, -torch.inf)
    most = first + count - window - first_key if window else 0  # columns that some query of the panel does not see
    if most > 0:
        key = torch.arange(first_key, first_key + most, device=logits.device)
        logits[..., :most].masked_fill_(key <= query - window, -torch.inf)


class AttentionSums:
    """Moments over S of one layer, on its device; sequences are added one after another.

    outputs       sum of o^T o with o = S V (`scored_value` of formats/stats.md)
    scored_query  sum of w q^T q with w = scale^2 sum_t (S_t slope_t)^2 |v_t - o|^2; None if it was not asked for
    """

    def __init__(self, kv_heads: int, dim: int, v_dim: int, with_scored_query: bool, device: torch.device):
        self.outputs = Moment(kv_heads, v_dim, device)
        self.scored_query = Moment(kv_heads, dim, device) if with_scored_query else None
        self.panel_elements = PANEL_ELEMENTS.get(device.type, PANEL_ELEMENTS["cuda"])

    def add(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: SoftmaxShape, counts: np.ndarray
    ) -> torch.Tensor:
        """Adds a sequence: q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv], float32; counts [T] bool, whose queries count.
        @return  column energies, float64 [T, Hkv]: sum of S^2 over counted queries and the query heads of each KV head
        """
        keys, values = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
        extended = _extended(values) if self.scored_query else None
        energies = torch.zeros(len(keys), len(k), dtype=torch.float64, device=k.device)
        # What is before the first and behind the last counted query adds nothing.
        counted = np.flatnonzero(counts)
        first, stop = (int(counted[0]), int(counted[-1]) + 1) if len(counted) else (0, 0)
        while first < stop:
            end = min(stop, first + self._step(q.shape[1], first, shape))
            self._add_panel(q[first:end], keys, values, extended, first, shape, counts[first:end], energies)
            first = end
        return energies.T

    def _step(self, query_heads: int, first: int, shape: SoftmaxShape) -> int:
        """Queries of the panel that begins at query `first`: b queries see at most b + (keys before the first). With a
        window, most of a panel of many more queries than the window has keys would be masked."""
        seen = first - shape.first_key(first)
        fitting = round(((seen * seen + 4 * (self.panel_elements // query_heads)) ** 0.5 - seen) / 2)
        return max(1, min(fitting, max(shape.window, LEAST_QUERIES)) if shape.window else fitting)

    def _add_panel(self, queries, keys, values, extended, first, shape, counts, energies) -> None:
        panel = softmax_panel(queries, keys, first, shape)
        seen = slice(panel.first_key, first + len(queries))
        weights, slopes, rows = panel.weights, panel.slopes, heads_first(queries, len(keys))
        if not counts.all():
            chosen = torch.from_numpy(np.repeat(counts, queries.shape[1] // len(keys))).to(rows.device)
            weights, rows = weights[:, chosen], rows[:, chosen]
            slopes = None if slopes is None else slopes[:, chosen]
        outputs = (weights @ values[:, seen]).double()
        self.outputs.add(outputs)
        squares = weights.mul_(weights)
        energies[:, seen] += squares.sum(1)
        if self.scored_query is not None:
            if slopes is not None:
                squares = squares.mul_(slopes).mul_(slopes)
            self.scored_query.add(rows, _score(squares @ extended[:, seen], outputs, shape.scale))


def _extended(values: torch.Tensor) -> torch.Tensor:
    """v, |v|^2 and 1: [Hkv, T, Dv] -> [Hkv, T, Dv + 2]"""
    norms = values.double().square().sum(-1, keepdim=True).float()
    return torch.cat([values, norms, torch.ones_like(norms)], -1)


def _score(sums: torch.Tensor, outputs: torch.Tensor, scale: float) -> torch.Tensor:
    """w = scale^2 sum_t s_t^2 |v_t - o|^2 = scale^2 (A + (C o - 2 B).o), float64 [Hkv, rows].

    sums     float32 [Hkv, rows, Dv + 2]: B = sum s^2 v, A = sum s^2 |v|^2, C = sum s^2
    outputs  float64 [Hkv, rows, Dv]: o
    """
    sums = sums.double()
    spread = torch.addcmul(sums[..., :-2] * -2.0, outputs, sums[..., -1:]).mul_(outputs).sum(-1)
    return spread.add_(sums[..., -2]).mul_(scale**2).clamp_(min=0.0)


def output_of_token(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, token: int, shape: SoftmaxShape) -> torch.Tensor:
    """Attention's output at one token of a sequence, float32 [Hq, Dv]; tensors as in AttentionSums.add()."""
    panel = softmax_panel(q[token : token + 1], k.transpose(0, 1), token, shape)
    return (panel.weights @ v.transpose(0, 1)[:, panel.first_key : token + 1]).reshape(q.shape[1], -1)
