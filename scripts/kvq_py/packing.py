"""formats/packing.md in numpy: the second implementation, many rows at a time.

Every step is one binary32 operation. numpy never fuses two of them, never takes a reciprocal for a division and keeps
subnormals; only sums need care, because np.sum chooses its own order: `tree_sum` is used instead. Overflow to infinity
is part of the specification, so numpy's warnings about it are silenced.

Shapes: N rows of D channels, G groups of g channels.
"""

from dataclasses import dataclass

import numpy as np

from .scheme import GAUSSIAN_STEP, Scheme

LARGEST = np.finfo(np.float32).max
ZERO = np.float32(0)
HALF = np.float32(0.5)
TWO = np.float32(2)
FOUR = np.float32(4)


@dataclass(frozen=True)
class CodedRows:
    """Rows between encode and pack.

    codes: uint8 [N, D], or uint16 [N, D] bfloat16 patterns for exact rows.
    numbers: float32 [N, G * (1 or 2)] in the order of the bytes: all scales, then all minima or zero points. Each is a
    number of the scale type.
    """

    codes: np.ndarray
    numbers: np.ndarray


def quiet(function):
    """Silences warnings about overflow and underflow, which packing.md defines."""
    return np.errstate(over="ignore", under="ignore", invalid="ignore")(function)


# Number types

def to_bf16_bits(x: np.ndarray) -> np.ndarray:
    """float32 -> uint16 patterns of R(x): nearest even, saturating."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    sign = rounded & np.uint16(0x8000)
    return sign | np.minimum(rounded & np.uint16(0x7FFF), np.uint16(0x7F7F))


def from_bf16_bits(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_stored(x: np.ndarray, scale_type: str) -> np.ndarray:
    """R(x) as the file holds it: float16, uint16 patterns of bfloat16, or float32; little-endian."""
    if scale_type == "bf16":
        return to_bf16_bits(x).astype("<u2")
    dtype = np.dtype("<f2" if scale_type == "fp16" else "<f4")
    largest = np.float32(np.finfo(dtype).max)
    # Clamping first is the same: nothing between the largest finite number and infinity is left to round.
    return np.clip(x, -largest, largest).astype(dtype)


def from_stored(stored: np.ndarray, scale_type: str) -> np.ndarray:
    return from_bf16_bits(stored) if scale_type == "bf16" else stored.astype(np.float32)


def round_to(x: np.ndarray, scale_type: str) -> np.ndarray:
    """R(x), widened again to float32."""
    return from_stored(to_stored(x, scale_type), scale_type)


# Pieces

def tree_sum(x: np.ndarray) -> np.ndarray:
    """Sums the last axis in the order of packing.md: neighbours first, zeros pad to a power of two."""
    size = x.shape[-1]
    padding = (1 << (size - 1).bit_length()) - size
    x = np.concatenate([x, np.zeros((*x.shape[:-1], padding), np.float32)], axis=-1)
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def clip_rows(x: np.ndarray, scheme: Scheme) -> np.ndarray:
    """x [N, D] within the threshold of each row."""
    index = scheme.clip_index(x.shape[1])
    if index is None:
        return x
    threshold = np.partition(np.abs(x), index, axis=1)[:, index, None]
    return np.minimum(np.maximum(x, -threshold), threshold)


def divide_or_zero(x: np.ndarray, divisor: np.ndarray) -> np.ndarray:
    """x / divisor, and 0 in groups whose divisor is 0: packing.md decides their codes otherwise."""
    return np.divide(x, divisor, out=np.zeros_like(x), where=divisor != 0)


def levels(codes: np.ndarray, bits: int) -> np.ndarray:
    """l(c), odd, float32."""
    return (2 * codes.astype(np.int32) - (2**bits - 1)).astype(np.float32)


# Encoding, on groups x [N, G, g]; each coder returns (codes float32 [N, G, g], its numbers, each [N, G])

def encode_affine(x: np.ndarray, scheme: Scheme) -> tuple[np.ndarray, list[np.ndarray]]:
    lowest, highest = x.min(axis=2), x.max(axis=2)
    extent = np.minimum(highest - lowest, LARGEST) + ZERO  # -0 + 0 = +0: it does not matter which zeros were found
    scale = round_to(extent / np.float32(scheme.top), scheme.scale_type)
    s = scale[..., None]
    if scheme.zero == "float":
        second = round_to(lowest, scheme.scale_type) + ZERO
        codes = np.floor(divide_or_zero(x - second[..., None], s) + HALF)
    else:
        second = round_to(np.floor(divide_or_zero(-lowest, scale) + HALF), scheme.scale_type)
        codes = np.floor(divide_or_zero(x, s) + HALF) + second[..., None]
    codes = np.where(s == 0, ZERO, np.clip(codes, 0, np.float32(scheme.top)))
    return codes, [scale, second]


def encode_symmetric(x: np.ndarray, scheme: Scheme) -> tuple[np.ndarray, list[np.ndarray]]:
    top = np.float32(scheme.top)
    if scheme.scale_rule == "absmax":
        first = round_to(TWO * np.abs(x).max(axis=2) / top, scheme.scale_type)
    else:
        energy = tree_sum(x * x)
        step = np.float32(GAUSSIAN_STEP[scheme.bits])
        first = round_to(step * np.sqrt(energy / np.float32(x.shape[2])), scheme.scale_type)
    middle = np.float32(2 ** (scheme.bits - 1))
    codes = np.clip(np.floor(divide_or_zero(x, first[..., None])) + middle, 0, top)
    if scheme.scale_rule == "absmax":
        return codes, [first]
    level = levels(codes, scheme.bits)
    norm = (level.astype(np.int64) ** 2).sum(axis=2).astype(np.float32)
    if scheme.scale_rule == "least_squares":
        refit = TWO * tree_sum(x * level) / norm
    else:
        refit = np.sqrt(FOUR * energy / norm)
    return codes, [np.where(first == 0, ZERO, round_to(refit, scheme.scale_type))]


@quiet
def encode(x: np.ndarray, scheme: Scheme) -> CodedRows:
    """Codes finite rows.

    x: float32 [N, D], already centred and rotated
    raises ValueError for rows that are not finite, not float32, or not whole groups
    """
    if x.dtype != np.float32 or x.ndim != 2:
        raise ValueError(f"rows to encode: expected float32 [N, D], found {x.dtype} {list(x.shape)}")
    if not np.isfinite(x).all():
        raise ValueError("rows to encode: expected finite numbers")
    x = np.ascontiguousarray(x)
    if scheme.coder == "exact":
        return CodedRows(to_bf16_bits(x), np.zeros((len(x), 0), np.float32))
    groups = clip_rows(x, scheme).reshape(len(x), scheme.groups(x.shape[1]), scheme.group_size)
    codes, numbers = (encode_affine if scheme.coder == "affine" else encode_symmetric)(groups, scheme)
    return CodedRows(codes.reshape(x.shape).astype(np.uint8), np.concatenate(numbers, axis=1))


@quiet
def decode(rows: CodedRows, scheme: Scheme) -> np.ndarray:
    """x_hat, float32 [N, D]."""
    if scheme.coder == "exact":
        return from_bf16_bits(rows.codes)
    count, dim = rows.codes.shape
    groups = scheme.groups(dim)
    codes = rows.codes.reshape(count, groups, scheme.group_size)
    scale, *second = (rows.numbers[:, i * groups:(i + 1) * groups, None] for i in range(scheme.numbers_per_group()))
    if scheme.coder == "symmetric":
        x = scale * (levels(codes, scheme.bits) * HALF)
    elif scheme.zero == "integer":
        x = (codes.astype(np.float32) - second[0]) * scale
    else:
        x = codes.astype(np.float32) * scale + second[0]
    return x.reshape(count, dim)


# Bytes

def pack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """codes [N, D] below 2^bits -> uint8 [N, ceil(D * bits / 8)], a little-endian bit stream per row."""
    stream = (codes[:, :, None] >> np.arange(bits, dtype=codes.dtype)) & codes.dtype.type(1)
    return np.packbits(stream.reshape(len(codes), codes.shape[1] * bits).astype(np.uint8), axis=1, bitorder="little")


def unpack_codes(packed: np.ndarray, bits: int, dim: int) -> np.ndarray:
    """The inverse of pack_codes: uint8 [N, dim], or uint16 if bits > 8. Padding bits are not looked at."""
    dtype = np.uint8 if bits <= 8 else np.uint16
    stream = np.unpackbits(packed, axis=1, count=dim * bits, bitorder="little").reshape(len(packed), dim, bits)
    return (stream.astype(dtype) << np.arange(bits, dtype=dtype)).sum(axis=2, dtype=dtype)


def pack(rows: CodedRows, scheme: Scheme) -> np.ndarray:
    """uint8 [N, row_bytes]: codes, then numbers."""
    numbers = to_stored(rows.numbers, scheme.scale_type)
    return np.concatenate([pack_codes(rows.codes, scheme.bits), np.ascontiguousarray(numbers).view(np.uint8)], axis=1)


def unpack(packed: np.ndarray, scheme: Scheme, dim: int) -> CodedRows:
    """The inverse of pack. packed: uint8 [N, row_bytes]."""
    if packed.ndim != 2 or packed.shape[1] != scheme.row_bytes(dim):
        raise ValueError(f"packed rows: expected [N, {scheme.row_bytes(dim)}] bytes, found {list(packed.shape)}")
    split = scheme.code_bytes(dim)
    codes = unpack_codes(packed[:, :split], scheme.bits, dim)
    dtype = {"fp16": "<f2", "bf16": "<u2", "fp32": "<f4"}[scheme.scale_type]
    stored = np.ascontiguousarray(packed[:, split:]).view(dtype)
    return CodedRows(codes, from_stored(stored, scheme.scale_type))


def fake_quantize(x: np.ndarray, scheme: Scheme) -> np.ndarray:
    """What the codes of x [N, D] give back."""
    return decode(encode(x, scheme), scheme)
