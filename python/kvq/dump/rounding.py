"""How far q and k redone in float64 may be from those of a model that computed in fewer bits.

A value may be off by the rounding of the file, by a few roundings of the model's arithmetic, and by the angle: the
model computes position * frequency in float32, so a late position is rotated by a slightly different angle. A norm
that takes the mean away leaves roundings of the size of the head, whatever remains in a channel.
"""

from dataclasses import dataclass

import numpy as np

from .rope import pair_channels

# Relative rounding error of one element.
EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
# Smallest error that counts: below it float16 is subnormal and has no relative precision.
FLOOR = {"float32": 1e-37, "float16": 2.0**-20, "bfloat16": 1e-37}
# Roundings from the projections' output through norm and rotation, with room for fused or reordered arithmetic of a
# device.
ROUNDINGS = 16


@dataclass(frozen=True)
class Rounding:
    """The arithmetic of a model, and the type in which its numbers were stored (float64: not stored at all)."""

    compute: str
    stored: str | None = None

    @property
    def relative(self) -> float:
        return ROUNDINGS * EPSILON[self.compute] + (EPSILON[self.stored] if self.stored else 0.0)

    @property
    def floor(self) -> float:
        return max(FLOOR[self.compute], FLOOR[self.stored] if self.stored else 0.0)

    def bound(self, size: np.ndarray, heads: np.ndarray) -> np.ndarray:
        """Allowed error of numbers of this size; heads [n, H, D] are the heads that they are part of."""
        head = EPSILON[self.compute] * np.sqrt(np.mean(heads * heads, axis=-1, keepdims=True))
        return np.maximum(self.relative * size + head, self.floor)


def pair_norms(x: np.ndarray, layout: str, pairs: int) -> np.ndarray:
    """Norm of every rotary pair of x [n, H, D]: [n, H, pairs]."""
    first, second = pair_channels(layout, 2 * pairs, 0)
    return np.hypot(x[..., first], x[..., second])


def distance(
    found: np.ndarray,
    expected: np.ndarray,
    positions: np.ndarray,
    inv_freq: np.ndarray,
    layout: str,
    rounding: Rounding,
) -> float:
    """Largest distance of a pair of `found` [n, H, D] from that of `expected`, in units of the pair's bound.

    RoPE does not touch channels outside the rotary slice, so their bound has no room for errors of the angle.
    """
    if found.shape != expected.shape:
        return np.inf
    pairs, difference = len(inv_freq), found - expected
    size = pair_norms(expected, layout, pairs)
    angle = positions[:, None, None] * inv_freq
    error = pair_norms(difference, layout, pairs) / (rounding.bound(size, expected) + angle * EPSILON["float32"] * size)
    outside = slice(2 * pairs, None)
    rest = np.abs(difference[..., outside]) / rounding.bound(np.abs(expected[..., outside]), expected)
    return float(max(error.max(initial=0.0), rest.max(initial=0.0)))
