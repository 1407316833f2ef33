"""The numbers of the search `integer` of trellis codes (formats/packing.md (d)), for the numpy and the PyTorch codec.

Both codecs take the same path through them: trellis_codes.py and torch_codec.py.
"""

import numpy as np

from .scheme import Scheme

SEAM = 40  # steps of the first run before the group, and after its begin if a second run follows
ONE_RUN = 96  # channels; groups of so many have their codes from the first run
TARGET_UNIT, LARGEST_TARGET = 256, 4.5  # of y
LARGEST_THETA = 2.5
GAIN_SHIFT = 14  # floor((x + 8192) / 16384) is a shift
OTHER_STATES = 32  # cost of states other than z* at the start of the second run, in units of 1
# Runs of so many steps have costs that fit int32. A step changes a cost by less than 2^20: with |a| <= 160 U, F[0] and
# the F[k] come to at most (b (m + 1) 160 U)^2 / (16384 U) <= 400 U, the X to at most b (m + 1) 1152 160 U / 16384 <=
# 180 U, their roundings to at most 17 / 2, and U is at most 1280. The sums in X fit int32, too: they are at most
# (m + 1) 1152 160 U < 2^30, because m + 1 <= 3 where U is 1280.
INT32_STEPS = 2000


def first_run(size: int) -> int:
    """Steps of the first run of a group of `size` channels, without those before the group."""
    return size if size >= ONE_RUN else SEAM


def unit(bits: int) -> int:
    """U"""
    return 20 * 4 ** (min(bits, 4) - 1)


def integer_taps(scheme: Scheme) -> np.ndarray:
    """a, int64 [m + 1, b]. The products are exact in binary64: theta has 24 bits, 64 U is 5 times a power of two."""
    theta = np.array(scheme.theta, np.float32).astype(np.float64).clip(-LARGEST_THETA, LARGEST_THETA)
    return np.rint(theta * (64 * unit(scheme.bits))).astype(np.int64).reshape(-1, scheme.bits)


def code_signs(bits: int) -> np.ndarray:
    """Of each code and bit: 1 if the bit is set, else -1; int64 [2^b, b]."""
    return (np.arange(2**bits)[:, None] >> np.arange(bits) & 1) * 2 - 1


def window_costs(scheme: Scheme) -> np.ndarray:
    """F[0] + the sum of F[k] for all windows, int64 [2^(b (m + 1))]. Index: as in trellis_codes.trellis_table."""
    bits, memory, divisor = scheme.bits, scheme.memory, 16384 * unit(scheme.bits)
    half = divisor // 2
    sums = code_signs(bits) @ integer_taps(scheme).T  # A[l][e], [2^b, m + 1]
    code = [np.arange(2 ** (bits * (memory + 1))) >> bits * k & scheme.top for k in range(memory + 1)]
    cost = ((np.square(sums).sum(axis=1) + half) // divisor)[code[0]]
    for k in range(1, memory + 1):
        pairs = 2 * sums[:, : memory + 1 - k] @ sums[:, k:].T  # [e, d]
        cost = cost + ((pairs + half) // divisor)[code[0], code[k]]
    return cost


def rows_of_chunk(chunk: int, size: int, scheme: Scheme) -> int:
    """Rows of `size` channels whose costs of paths and whose X have at most `chunk` elements each; at least one."""
    return max(1, chunk // max(2 ** (scheme.bits * (scheme.memory + 1)), size * scheme.bits))
