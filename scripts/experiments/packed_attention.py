"""Attention functions for packed_perplexity.py, for Hugging Face transformers: through the packed cache, and the same
computation by the PyTorch codec.

query is [B, Hq, n, D], key and value are [B, Hkv, n, D], after RoPE; results are [B, n, Hq, Dv]."""

import torch
from packed_cache import LayerShape, PackedCache

from kvq.coded_attention import KeysValues, Windows, attend, reconstruct
from kvq.errors import unsupported
from kvq.torch_codec import exact_rows

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class PackedAttention:
    """Through the packed cache. Keeps the keys and values of all steps."""

    def __init__(self, cache: PackedCache):
        self.cache, self.dtype = cache, DTYPES[cache.activation]
        self._steps: dict[int, list] = {}  # by layer: keys and values [B, Hkv, n, D] of each step

    def __call__(self, module, query, key, value, attention_mask, **_):
        q, k, v = (x.transpose(1, 2).flatten(0, 1).to(self.dtype).contiguous() for x in (query, key, value))
        self._steps.setdefault(module.layer_idx, []).append((key.to(self.dtype), value.to(self.dtype)))
        out = self.cache.attend(module.layer_idx, q, k, v)
        return out.unflatten(0, (len(query), -1)).to(query.dtype), None

    def rows(self) -> dict[int, tuple]:
        """Keys and values [B, Hkv, T, D] of each layer."""
        return {layer: tuple(torch.cat(parts, dim=2) for parts in zip(*steps)) for layer, steps in self._steps.items()}


class CodecAttention:
    """One window through the PyTorch codec, all queries at once. Without a candidate: exact."""

    def __init__(self, layers: dict[int, LayerShape], activation: str, candidate=None, chunk: int = 0, rows=None):
        """chunk: 0 for decode; rows: of PackedAttention, which take the place of the model's own keys and values"""
        self.layers, self.dtype, self.candidate, self.chunk = layers, DTYPES[activation], candidate, chunk
        self.rows, self.window = rows, 0  # the window that the model gets, an index of rows

    def __call__(self, module, query, key, value, attention_mask, **_):
        layer = self.layers[module.layer_idx]
        if self.rows:
            key, value = (x[self.window, None, :, : query.shape[2]] for x in self.rows[module.layer_idx])
        q, k, v = (x[0].to(self.dtype).float() for x in (query, key, value))
        exact, arguments = KeysValues(k, v), (layer.scale, layer.sliding_window)
        if self.candidate is None:
            out = attend(q, exact, None, layer.scale, Windows(), layer.sliding_window)
        else:
            plans = (self.candidate.plan_of(module.layer_idx, side, *x.shape[::2]) for side, x in zip("kv", (k, v)))
            decoded = KeysValues(*(x if plan is None else reconstruct(plan, x) for plan, x in zip(plans, (k, v))))
            kept = KeysValues(exact_rows(k), exact_rows(v))  # rows of exact windows are bfloat16
            windows = self.candidate.windows
            if self.chunk:
                out = attend_in_chunks(q, exact, kept, decoded, windows, self.chunk, *arguments)
            else:
                out = attend(q, kept, decoded, layer.scale, windows, layer.sliding_window)
        return out[None].to(self.dtype).to(query.dtype), None


def attend_in_chunks(q, exact, kept, decoded, windows, chunk: int, scale: float, sliding_window: int):
    """Attention of q [Hq, T, D] in chunks, [T, Hq, Dv]. The chunk [a, b) sees its own tokens as `exact` has them; those
    before it as `kept`, where they are among the first ones or the last ones of the a tokens, else as `decoded`."""
    heads, tokens, dim = q.shape
    kv_heads = exact.k.shape[0]
    out = q.new_empty(tokens, heads, exact.v.shape[2])
    for a in range(0, tokens, chunk):
        b = min(a + chunk, tokens)
        sink = min(windows.sink_tokens, a)
        recent = max(a - windows.recent_tokens, sink)
        parts = (kept.span(0, sink), decoded.span(sink, recent), kept.span(recent, a), exact.span(a, b))
        k, v = (torch.cat([getattr(part, side) for part in parts], dim=1) for side in "kv")
        grouped = q[:, a:b].reshape(kv_heads, -1, dim)  # [Hkv, Hq / Hkv (b - a), D]
        logits = (grouped * scale @ k.transpose(1, 2)).view(heads, b - a, b)
        query, key = torch.arange(a, b, device=q.device)[:, None], torch.arange(b, device=q.device)
        hidden = key > query
        if sliding_window:
            hidden |= key <= query - sliding_window
        weights = torch.softmax(logits.masked_fill_(hidden, -torch.inf), dim=2)
        out[a:b] = (weights.view(kv_heads, -1, b) @ v).view(heads, b - a, -1).transpose(0, 1)
    return out


class ShapeProbe:
    """An attention function that only notes the shape of each layer."""

    def __init__(self):
        self.layers: dict[int, LayerShape] = {}

    def __call__(
        self,
        module,
        query,
        key,
        value,
        attention_mask,
        scaling=None,
        sliding_window=None,
        softcap=None,
        s_aux=None,
        **_,
    ):
        if softcap is not None or s_aux is not None:
            raise unsupported("models with capped logits or learned sinks: not measured by this program")
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        self.layers[module.layer_idx] = LayerShape(
            query.shape[1], key.shape[1], key.shape[3], value.shape[3], sliding_window or 0, scale
        )
        return value.new_zeros(*query.shape[:3], value.shape[3]).transpose(1, 2), None
