"""Attention with terms that SDPA does not know: capped logits and learned sinks."""

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# Logits that exist at once, in elements.
MOST_LOGITS = 1 << 26


def attend(module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **kwargs):
    """As an attention interface of transformers: query [B, Hq, n, D], key and value [B, Hkv, m, D or Dv] ->
    ([B, n, Hq, Dv], None). SDPA where it can, else the same in pieces of queries, with logits in float32.

    softcap  c: the softmax takes c tanh(logit / c)
    s_aux    [Hq] logits of learned sinks: they take part in the softmax and have no value
    """
    if softcap is None and s_aux is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    group = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    step = max(1, MOST_LOGITS // (query.shape[1] * keys.shape[2]))
    pieces = [
        _attend_piece(query[:, :, first : first + step], keys, values, mask, scale, softcap, s_aux)
        for first, mask in _masks(attention_mask, query.shape[2], keys.shape[2], step, query.device)
    ]
    return torch.cat(pieces, dim=1), None


def _masks(mask, queries: int, keys: int, step: int, device):
    """(first query, bool or additive mask [.., piece, keys]) of each piece; without a mask, attention is causal and the
    queries are the last tokens."""
    for first in range(0, queries, step):
        if mask is not None:
            yield first, mask[:, :, first : first + step, :keys]
        else:
            index = torch.arange(first, min(first + step, queries), device=device)[:, None] + keys - queries
            yield first, torch.arange(keys, device=device)[None] <= index


def _attend_piece(query, keys, values, mask, scale, softcap, sinks):
    logits = (query @ keys.transpose(2, 3)).float() * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    if sinks is not None:
        column = sinks.float().reshape(1, -1, 1, 1).expand(len(logits), -1, logits.shape[2], 1)
        logits = torch.cat([logits, column], dim=-1)
    weights = logits.softmax(-1)[..., : keys.shape[2]].to(values.dtype)
    return (weights @ values).transpose(1, 2).contiguous()
