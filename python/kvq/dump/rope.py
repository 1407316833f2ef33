"""Rotary embeddings: read from the model, and applied by hand in float64 as formats/dump.md writes them."""

import numpy as np

from ..errors import EXIT_UNSUPPORTED, KvqError


def read_rope(rotary, layer_type: str | None) -> tuple[np.ndarray, float]:
    """(inv_freq float64 [rotary_dim / 2], attention factor) as the model's rotary embedding holds them now.

    Gemma 3 has one set for each layer type (local and global); other models have one set. Dynamic and long-range RoPE
    change their frequencies with the sequence length, so the recorder calls read_rope at every capture.
    """
    prefix = "" if hasattr(rotary, "inv_freq") else f"{layer_type}_"
    inv_freq = getattr(rotary, f"{prefix}inv_freq", None)
    if inv_freq is None:
        raise KvqError(EXIT_UNSUPPORTED, f"{type(rotary).__name__} has no frequencies for layer type '{layer_type}'")
    factor = float(getattr(rotary, f"{prefix}attention_scaling", 1.0))
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
