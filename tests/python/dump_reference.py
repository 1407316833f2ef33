"""Reads a dump as formats/dump.md is written, and makes the capture a second time in another way.

The reference never touches the attention interface: forward hooks keep what the projections and QK-norms put out and
what the output projection takes in; RoPE and attention are then done here in float64, from what the dump itself says.
"""

from pathlib import Path

import h5py
import numpy as np
import torch
from transformers import AutoModelForCausalLM


class Dump:
    """A dump in memory, read by formats/dump.md: tensors in float64."""

    def __init__(self, path: Path):
        with h5py.File(path) as file:
            self.attrs = dict(file.attrs)
            self.cu_seqlens, self.positions = file["cu_seqlens"][:], file["positions"][:]
            self.generated = file["generated"][:] if "generated" in file else None
            self.layers = {int(name): DumpLayer(group) for name, group in file["layers"].items()}

    def sequences(self):
        return [slice(a, b) for a, b in zip(self.cu_seqlens, self.cu_seqlens[1:])]


class DumpLayer:
    def __init__(self, group):
        self.attrs = dict(group.attrs)
        self.stored = {name: dataset[()] for name, dataset in group.items()}
        self.dtypes = {name: group[name].attrs["kvq_dtype"] for name in "qkv" if name in group}
        self.contiguous = all(group[name].chunks is None for name in group)

    def __getitem__(self, name):
        if self.dtypes.get(name) == "bfloat16":
            return (self.stored[name].astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return self.stored[name].astype(np.float64)


# --- the reference ---


class Reference:
    """One sequence through a model, recorded by forward hooks."""

    MODULES = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")

    def __init__(self, folder, tokens: list[int], stride: int = 1):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.layers = [{} for _ in self.model.model.layers]
        for kept, layer in zip(self.layers, self.model.model.layers):
            self._watch(kept, layer.self_attn)
        ids = torch.tensor([tokens])
        with torch.no_grad():
            self.logits = self.model(
                ids, attention_mask=torch.ones_like(ids), position_ids=torch.arange(len(tokens))[None] * stride
            ).logits[0]

    def _watch(self, kept: dict, attention) -> None:
        for name in self.MODULES:
            module = getattr(attention, name, None)
            if module is not None:
                module.register_forward_hook(lambda _m, _in, out, name=name: kept.__setitem__(name, out[0]))
        attention.o_proj.register_forward_pre_hook(lambda _m, inputs: kept.__setitem__("output", inputs[0][0]))

    def heads(self, layer: int, name: str, num_heads: int) -> np.ndarray:
        """Output of a projection or norm as float64 [T, heads, channels]. In Gemma, the norm's output has heads
        first."""
        x = self.layers[layer][name].double().numpy()
        if x.ndim == 3:
            return x if x.shape[1] == num_heads else x.transpose(1, 0, 2)
        return x.reshape(len(x), num_heads, -1)


def rotate_as_specified(x, positions, layer: DumpLayer):
    """Rotates by formats/dump.md, pair by pair."""
    out = x.copy()
    offset, dim = int(layer.attrs["rotary_offset"]), int(layer.attrs["rotary_dim"])
    factor = layer.attrs.get("rope_attention_factor", 1.0)
    for j in range(dim // 2):
        half = layer.attrs["rope_layout"] == "half"
        i_a, i_b = (offset + j, offset + dim // 2 + j) if half else (offset + 2 * j, offset + 2 * j + 1)
        a, b, t = x[..., i_a], x[..., i_b], (positions * layer["rope_inv_freq"][j])[:, None]
        out[..., i_a] = (a * np.cos(t) - b * np.sin(t)) * factor
        out[..., i_b] = (b * np.cos(t) + a * np.sin(t)) * factor
    return out


def attention_as_specified(logits, v, window: int):
    """logits [Hq, T, T] (scaled), v [T, Hkv, Dv] -> [T, Hq * Dv], causal, with a sliding window if not 0."""
    length, shared = len(v), len(logits) // v.shape[1]
    query, key = np.arange(length)[:, None], np.arange(length)[None, :]
    visible = (key <= query) & ((query - key < window) if window else True)
    logits = np.where(visible, logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    heads = [weights[h] @ v[:, h // shared] for h in range(len(logits))]
    return np.concatenate(heads, axis=1)


def scaled_logits(q, k, scale: float):
    """q [T, Hq, D], k [T, Hkv, D] -> [Hq, T, T]"""
    shared = q.shape[1] // k.shape[1]
    return np.stack([scale * q[:, h] @ k[:, h // shared].T for h in range(q.shape[1])])


def assert_close(found, expected, what: str, tolerance: float = 2e-6):
    """Compares the largest error with the largest value; found is float32 arithmetic, expected is float64."""
    assert found.shape == expected.shape, what
    worst = np.abs(found - expected).max() / np.abs(expected).max()
    assert worst < tolerance, f"{what}: off by {worst:.2e} of the largest value"


def expected_qk(reference: Reference, layer: int, dumped: DumpLayer, tiny, config, positions):
    """q and k at the capture point, computed from hooks and rotated here."""
    num_heads = {"q": int(dumped.attrs["num_q_heads"]), "k": int(dumped.attrs["num_kv_heads"])}
    names = {"q": "q_norm" if tiny.norms else "q_proj", "k": "k_norm" if tiny.norms else "k_proj"}
    if tiny.is_mla:
        names = {"q": "q_b_proj" if config.q_lora_rank else "q_proj", "k": "kv_a_proj_with_mqa"}
    result = {}
    for tensor, name in names.items():
        x = reference.heads(layer, name, num_heads[tensor])
        if tiny.is_mla:
            x = x[..., -config.qk_rope_head_dim :]
            if config.model_type == "deepseek_v3" and config.rope_interleave:
                x = np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
        result[tensor] = rotate_as_specified(x, positions, dumped)
    return result["q"], result["k"]


def mla_attention(reference: Reference, layer: int, dumped: DumpLayer, config, rows) -> np.ndarray:
    """Attention's output; the rotary part of the logits comes from the dump, the rest from hooks."""
    heads, nope = config.num_attention_heads, config.qk_nope_head_dim
    q = reference.heads(layer, "q_b_proj" if config.q_lora_rank else "q_proj", heads)[..., :nope]
    kv = reference.layers[layer]["kv_b_proj"].double().numpy().reshape(len(q), heads, -1)
    scale = dumped.attrs["softmax_scale"]
    logits = scaled_logits(q, kv[..., :nope], scale) + scaled_logits(dumped["q"][rows], dumped["k"][rows], scale)
    return attention_as_specified(logits, kv[..., nope:], 0)


def assert_sequence_matches(dump: Dump, rows, reference: Reference, tiny) -> None:
    config = reference.model.config
    for index, dumped in dump.layers.items():
        q, k = expected_qk(reference, index, dumped, tiny, config, dump.positions[rows])
        assert_close(dumped["q"][rows], q, f"layer {index} q")
        assert_close(dumped["k"][rows], k, f"layer {index} k")
        if tiny.is_mla:
            output = mla_attention(reference, index, dumped, config, rows)
        else:
            v = reference.heads(index, "v_proj", int(dumped.attrs["num_kv_heads"]))
            assert_close(dumped["v"][rows], v, f"layer {index} v")
            logits = scaled_logits(dumped["q"][rows], dumped["k"][rows], dumped.attrs["softmax_scale"])
            output = attention_as_specified(logits, dumped["v"][rows], dumped.attrs["sliding_window"])
        assert_close(output, reference.layers[index]["output"].double().numpy(), f"layer {index} attention", 5e-6)
