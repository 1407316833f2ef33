"""Rotary embeddings: read from the model, and applied by hand in float64 as formats/dump.md writes them."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RopeSource:
    """Where a model keeps the frequencies of a layer: a rotary embedding module, and the prefix of its attributes'
    names. Gemma 3 has one set for each layer type (`full_attention_inv_freq`); most models have one (`inv_freq`)."""

    module: object
    prefix: str = ""


def find_rope_sources(text, attention, layer_type: str | None) -> list[RopeSource]:
    """All sets of frequencies that a layer may use: its own and that of its layer type, then the others."""
    modules = [m for m in attention.modules()] + [m for m in text.modules()]
    found = {}
    for module in modules:
        for name, _ in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name:
                found.setdefault((id(module), name), RopeSource(module, name.removesuffix("inv_freq")))
    return sorted(found.values(), key=lambda source: source.prefix not in ("", f"{layer_type}_"))


def read_rope(source: RopeSource) -> tuple[np.ndarray, float]:
    """(inv_freq float64 [rotary_dim / 2], attention factor) as the model's rotary embedding holds them now.

    Dynamic and long-range RoPE change their frequencies with the sequence length, so the recorder calls read_rope at
    every capture.
    """
    inv_freq = getattr(source.module, f"{source.prefix}inv_freq")
    factor = float(getattr(source.module, f"{source.prefix}attention_scaling", 1.0))
    return inv_freq.detach().double().cpu().numpy(), factor


def pair_channels(layout: str, rotary_dim: int, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """Channels (a, b) of every rotary pair, each [rotary_dim / 2]."""
    pairs = np.arange(rotary_dim // 2)
    if layout == "half":
        return offset + pairs, offset + rotary_dim // 2 + pairs
    return offset + 2 * pairs, offset + 2 * pairs + 1


def rotate(
    x: np.ndarray,
    positions: np.ndarray,
    inv_freq: np.ndarray,
    layout: str,
    factor: float,
    offset: int = 0,
    inverse: bool = False,
) -> np.ndarray:
    """Rotates x [T, H, D] to `positions` [T], or back if `inverse`; float64. Channels outside the rotary slice do not
    change."""
    out = np.array(x, dtype=np.float64)
    first, second = pair_channels(layout, 2 * len(inv_freq), offset)
    angle = positions[:, None, None].astype(np.float64) * inv_freq
    cos, sin = np.cos(angle), np.sin(angle)
    scale = 1.0 / factor if inverse else factor
    if inverse:
        sin = -sin
    a, b = out[..., first], out[..., second]
    out[..., first] = (a * cos - b * sin) * scale
    out[..., second] = (b * cos + a * sin) * scale
    return out


def change_layout(x: np.ndarray, rotary_dim: int, offset: int, old: str, new: str) -> np.ndarray:
    """Moves each rotary pair of x [..., D] from the channels of layout `old` to those of layout `new`."""
    if old == new:
        return x
    out = np.array(x)
    for source, target in zip(pair_channels(old, rotary_dim, offset), pair_channels(new, rotary_dim, offset)):
        out[..., target] = x[..., source]
    return out
