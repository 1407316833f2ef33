"""Attention over keys and values as the codes of an artifact give them back, for models of Hugging Face transformers.

Inside the windows of the artifact a token is exact. What is recent depends on who looks: query i sees exact keys and
values for positions below `sink` and above i - `recent`, and decoded ones between. So each key exists twice, and a
block of queries [a, b) meets four spans of keys:

    0 ..... sink | ........ a - recent + 1 | .......... b - recent | ........ b
       exact     |   decoded for all       |  depends on the query |   exact for all

Everything is plain float32 arithmetic in blocks of queries; no part of the n x n logits outlives its block.
Shapes: T tokens, Hq query heads, Hkv KV heads, D and Dv channels; one sequence at a time.
"""

import dataclasses
from dataclasses import dataclass

import torch

from .artifact import SidePlan
from .errors import bad_input, unsupported
from .torch_codec import fake_quantize, nearest_centroids

NAME = "kvq_coded"
QUERY_BLOCK = 512


@dataclass(frozen=True)
class Windows:
    """Tokens that a query reads exactly. Tokens are coded `granule` at a time."""

    sink_tokens: int = 0
    recent_tokens: int = 0
    granule: int = 1

    def coded_end(self, query):
        """Query `query`, an index or a tensor of them, reads the tokens from sink_tokens up to the result as codes."""
        rest = query + 1 - self.recent_tokens
        rest = rest.clamp(min=0) if isinstance(rest, torch.Tensor) else max(0, rest)
        return rest // self.granule * self.granule


@dataclass(frozen=True)
class Extras:
    """What some models add to softmax(q k): logits become cap * tanh(logits / cap), and each query head has a learned
    sink [Hq], a logit that takes weight and has no value."""

    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True)
class KeysValues:
    """k [Hkv, T, D], v [Hkv, T, Dv]"""

    k: torch.Tensor
    v: torch.Tensor

    def span(self, begin: int, end: int) -> "KeysValues":
        return KeysValues(self.k[:, begin:end], self.v[:, begin:end])


@dataclass(frozen=True)
class Span:
    """Keys [begin, end) of a query block. `kind` says whether the keys are exact, decoded, or both, depending on the
    query."""

    begin: int
    end: int
    kind: str


def spans(first: int, last: int, windows: Windows) -> list[Span]:
    """The spans of keys for queries [first, last), without empty spans."""
    sink = min(windows.sink_tokens, last)
    # Without recent tokens no query reads an exact key after the sink, so there is no mixed span; the general formula
    # would start one at first + 1.
    plain = windows.recent_tokens == 0 and windows.granule == 1
    mixed = last if plain else min(max(windows.coded_end(first), sink), last)
    exact = min(max(windows.coded_end(last - 1), mixed), last)
    found = (
        Span(0, sink, "exact"),
        Span(sink, mixed, "decoded"),
        Span(mixed, exact, "mixed"),
        Span(exact, last, "exact"),
    )
    return [span for span in found if span.begin < span.end]


def attend(
    q: torch.Tensor,
    exact: KeysValues,
    decoded: KeysValues | None,
    scale: float,
    windows: Windows,
    sliding_window: int = 0,
    value_windows: Windows | None = None,
    extras: Extras = Extras(),
) -> torch.Tensor:
    """Causal attention of one sequence.

    q: [Hq, T, D]; decoded: None if everything is exact; value_windows: None if values have the windows of keys
    returns [T, Hq, Dv]
    """
    heads, tokens, _ = q.shape
    kv_heads = exact.k.shape[0]
    grouped = q.reshape(kv_heads, heads // kv_heads, tokens, -1)
    out = q.new_empty(tokens, heads, exact.v.shape[2])
    for first in range(0, tokens, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, tokens)
        of_values = value_windows or windows
        all_exact = [Span(0, last, "exact")]
        keys, values = (all_exact if decoded is None else spans(first, last, own) for own in (windows, of_values))
        block = _Block(grouped[:, :, first:last], first, scale, windows, of_values, extras)
        weights = block.weights(keys, exact, decoded, sliding_window)
        out[first:last] = block.output(weights, values, exact, decoded)
    return out


class _Block:
    """Attention of queries [first, first + n) of every head. `queries` is [Hkv, Hq / Hkv, n, D]."""

    def __init__(
        self,
        queries: torch.Tensor,
        first: int,
        scale: float,
        key_windows: Windows,
        value_windows: Windows,
        extras: Extras,
    ):
        self.kv_heads, self.group, self.count, _ = queries.shape
        self.queries = queries.reshape(self.kv_heads, self.group * self.count, -1) * scale
        self.index = torch.arange(first, first + self.count, device=queries.device)[:, None]
        self.key_windows, self.value_windows, self.extras = key_windows, value_windows, extras

    def is_recent(self, span: Span, windows: Windows) -> torch.Tensor:
        """[Hq / Hkv * n, keys]: whether the key is in the query's recent window."""
        keys = torch.arange(span.begin, span.end, device=self.index.device)
        return (keys >= windows.coded_end(self.index)).repeat(self.group, 1)

    def weights(
        self, parts: list[Span], exact: KeysValues, decoded: KeysValues | None, sliding_window: int
    ) -> torch.Tensor:
        """Softmax, [Hkv, Hq / Hkv * n, keys]."""
        logits = [self._logits(span, exact, decoded) for span in parts]
        logits = logits[0] if len(logits) == 1 else torch.cat(logits, dim=2)
        if self.extras.softcap is not None:
            logits = self.extras.softcap * torch.tanh(logits / self.extras.softcap)
        self._hide(logits, sliding_window)
        if self.extras.sinks is None:
            return torch.softmax(logits, dim=2)
        return torch.softmax(torch.cat([logits, self._sinks()], dim=2), dim=2)[:, :, :-1]

    def _sinks(self) -> torch.Tensor:
        """The learned sink of each query's head, [Hkv, Hq / Hkv * n, 1]."""
        sinks = self.extras.sinks.to(self.queries).view(self.kv_heads, self.group, 1)
        return sinks.expand(-1, -1, self.count).reshape(self.kv_heads, -1, 1)

    def _hide(self, logits: torch.Tensor, sliding_window: int) -> None:
        """Masks keys that a query must not see. Without a sliding window, only keys of the block itself can be
        masked."""
        first, end = int(self.index[0]), logits.shape[2]
        begin = 0 if sliding_window else first
        keys = torch.arange(begin, end, device=logits.device)
        hidden = keys > self.index
        if sliding_window:
            hidden |= keys <= self.index - sliding_window
        by_query = logits.view(self.kv_heads, self.group, self.count, end)
        by_query[..., begin:].masked_fill_(hidden, -torch.inf)

    def _logits(self, span: Span, exact: KeysValues, decoded: KeysValues | None) -> torch.Tensor:
        def product(source: KeysValues) -> torch.Tensor:
            return self.queries @ source.span(span.begin, span.end).k.transpose(1, 2)

        if span.kind == "mixed":
            return torch.where(self.is_recent(span, self.key_windows), product(exact), product(decoded))
        return product(exact if span.kind == "exact" else decoded)

    def output(
        self, weights: torch.Tensor, parts: list[Span], exact: KeysValues, decoded: KeysValues | None
    ) -> torch.Tensor:
        """[n, Hq, Dv]"""

        def product(span: Span, weight: torch.Tensor, source: KeysValues) -> torch.Tensor:
            return weight @ source.span(span.begin, span.end).v

        products = []
        for span in parts:
            weight = weights[:, :, span.begin : span.end]
            if span.kind == "mixed":
                recent = self.is_recent(span, self.value_windows)
                products += [product(span, weight * recent, exact), product(span, weight * ~recent, decoded)]
            else:
                products.append(product(span, weight, exact if span.kind == "exact" else decoded))
        return sum(products[1:], start=products[0]).reshape(self.kv_heads * self.group, self.count, -1).transpose(0, 1)


def reconstruct(plan, x: torch.Tensor) -> torch.Tensor:
    """x [Hkv, T, D] after encoding and decoding. Rotations are computed in binary64 and rounded once, as in the
    codec. plan: a SidePlan, or a coder of torch_schemes.py, which does it alone"""
    if not isinstance(plan, SidePlan):
        return plan.reconstruct(x)
    matrices, inverses = (
        [torch.from_numpy(of(head)).to(x.device) for head in range(len(x))] for of in (plan.matrix, plan.inverse)
    )
    offsets = _offsets(plan, x)
    rows = x if offsets is None else x - offsets
    rotated = torch.stack([(own.double() @ matrix).float() for own, matrix in zip(rows, matrices)])
    coded = _code_heads(plan, rotated)
    restored = torch.stack([own.double() @ inverse for own, inverse in zip(coded, inverses)])
    return (restored if offsets is None else restored + offsets.double()).float()


def _offsets(plan: SidePlan, x: torch.Tensor) -> torch.Tensor | None:
    """The offset that is subtracted from x [Hkv, T, D] before the rotation, [Hkv, 1 or T, D]: centers or nearest
    centroids."""

    def by_head(name: str) -> torch.Tensor:
        return torch.from_numpy(plan.tensors[name]).to(x.device)[[plan.head_index(head) for head in range(len(x))]]

    if not plan.centroid_scope:
        return by_head("center")[:, None] if "center" in plan.tensors else None
    centroids = by_head("centroids")
    if plan.centroid_scope == "joint":
        return centroids[:, nearest_centroids(x, centroids)]
    return torch.stack([own[nearest_centroids(rows[None], own[None])] for rows, own in zip(x, centroids)])


def _code_heads(plan: SidePlan, x: torch.Tensor) -> torch.Tensor:
    """x_hat of x_rot [Hkv, T, D]. Heads with equal schemes are quantized together, so that long loops over channels run
    once."""
    heads_of: dict = {}
    for head in range(len(x)):
        heads_of.setdefault(plan.scheme_of(head), []).append(head)
    coded = torch.empty_like(x)
    for scheme, heads in heads_of.items():
        coded[heads] = fake_quantize(x[heads].flatten(0, 1), scheme).unflatten(0, (len(heads), x.shape[1]))
    return coded


def use_attention(model, attention) -> None:
    """Lets `attention` do the attention of every layer of a transformers model."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
    model.set_attn_implementation(NAME)


class CodedAttention:
    """An attention function for transformers' AttentionInterface.

    `plan_of(layer, side, kv_heads, dim)` gives the plan of "k" or "v" of a layer, or None for what stays exact.
    """

    def __init__(self, plan_of, windows: Windows, after_layer=lambda: None):
        """`after_layer()` is called after the attention of each layer."""
        self.plan_of, self.windows, self.after_layer = plan_of, windows, after_layer

    def __call__(
        self,
        module,
        query,
        key,
        value,
        attention_mask,
        scaling=None,
        dropout=0.0,
        sliding_window=None,
        softcap=None,
        s_aux=None,
        **_,
    ):
        """query [1, Hq, T, D], key and value [1, Hkv, T, D or Dv], after RoPE -> ([1, T, Hq, Dv], None)

        There is no cache and no padding, so the mask is known: causal, within the sliding window if there is one.
        """
        if len(query) != 1 or query.shape[2] != key.shape[2] or attention_mask is not None:
            raise unsupported("expected one sequence without padding and without a cache")
        exact = KeysValues(key[0], value[0])
        k, v = (self._decoded(module.layer_idx, side, x) for side, x in (("k", exact.k), ("v", exact.v)))
        decoded = None
        if k is not None or v is not None:
            decoded = KeysValues(exact.k if k is None else k, exact.v if v is None else v)
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        extras = Extras(softcap, s_aux)
        k_windows, v_windows = (self._windows(side) for side in "kv")
        output = attend(query[0], exact, decoded, scale, k_windows, sliding_window or 0, v_windows, extras)[None]
        self.after_layer()
        return output, None

    def _windows(self, side: str) -> Windows:
        """The windows that were asked for, else those that the scheme itself has."""
        own = getattr(self.plan_of, "own_windows", None)
        return own[side] if own and self.windows == Windows() else self.windows

    def _decoded(self, layer: int, side: str, x: torch.Tensor) -> torch.Tensor | None:
        plan = self.plan_of(layer, side, x.shape[0], x.shape[2])
        return None if plan is None else reconstruct(plan, x)


class GeometryProbe:
    """An attention function that computes nothing of use: it notes the shapes of each layer's keys and values."""

    def __init__(self):
        self.layers: dict[int, tuple[int, int, int]] = {}  # KV heads, D, Dv

    def __call__(self, module, query, key, value, attention_mask, **_):
        self.layers[module.layer_idx] = (key.shape[1], key.shape[3], value.shape[3])
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


class ArtifactPlans:
    """`plan_of` for CodedAttention: the plans of an artifact. Each plan is checked against the model when it is asked
    for."""

    def __init__(self, artifact, sides: str = "kv", unrounded_metadata: bool = False):
        for index, layer in artifact.layers.items():
            if set(layer.sides) != {"k", "v"}:
                raise unsupported(f"{artifact.file.name}: layer {index} has no values (mla_rope): not supported here")
        self.artifact, self.sides, self.unrounded_metadata = artifact, sides, unrounded_metadata

    def __call__(self, layer: int, side: str, kv_heads: int, dim: int) -> SidePlan | None:
        entry = self.artifact.layers.get(layer)
        if entry is None or side not in self.sides:
            return None
        plan = entry.sides[side]
        if (entry.num_kv_heads, plan.dim) != (kv_heads, dim):
            raise bad_input(
                f"{self.artifact.file.name}: layer {layer} {side}: the model has {kv_heads} KV heads of "
                f"{dim} channels, the artifact {entry.num_kv_heads} of {plan.dim}",
                "is it of another model?",
            )
        return unrounded(plan) if self.unrounded_metadata else plan


def unrounded(plan: SidePlan) -> SidePlan:
    """The plan with scales, minima and zero-points in float32, so that storing them does not round."""
    return dataclasses.replace(plan, schemes=tuple(scheme.with_scale_type("fp32") for scheme in plan.schemes))
