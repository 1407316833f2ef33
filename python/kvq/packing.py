"""formats/packing.md in numpy: the second implementation, many rows at a time.

Every step is one binary32 operation. numpy never fuses two of them, never takes a reciprocal for a division and keeps
subnormals; only sums need care, because np.sum chooses its own order: `tree_sum` is used instead. Overflow to infinity
is part of the specification, so numpy's warnings about it are silenced.

Shapes: N rows of D channels, G groups of g channels, C centroids.
"""

from dataclasses import dataclass
from functools import reduce

import numpy as np

from .scheme import GAUSSIAN_STEP, AnyScheme, MixedScheme, Scheme, index_bytes
from .trellis_codes import CHUNK, best_paths, first_smallest, trellis_values

LARGEST = np.finfo(np.float32).max
ZERO = np.float32(0)
HALF = np.float32(0.5)
STORED_DTYPES = {"fp16": "<f2", "bf16": "<u2", "fp32": "<f4"}
NAN = np.uint32(0x7FC00000).view(np.float32)  # in the numbers of poisoned rows
BF16_NAN = np.uint16(0x7FC0)
TWO = np.float32(2)
FOUR = np.float32(4)


@dataclass(frozen=True)
class CodedRows:
    """Quantized rows before packing.

    codes: uint8 [N, D], or uint16 [N, D] bfloat16 patterns for exact rows.
    numbers: float32 [N, G * (1 or 2)] in the order of the bytes: all scales, then all minima or zero-points, each a
    number of the scale type. A mixed row has a scale for each segment, or one scale, and code 0 in channels of width 0.
    index: int64 [N], the centroids that were subtracted; None without centroids.
    """

    codes: np.ndarray
    numbers: np.ndarray
    index: np.ndarray | None = None


def quiet(function):
    """Silences numpy's warnings about overflow and underflow, because packing.md defines both."""
    return np.errstate(over="ignore", under="ignore", invalid="ignore")(function)


# Number types


def to_bf16_bits(x: np.ndarray) -> np.ndarray:
    """float32 -> uint16 patterns of R(x): nearest even, saturating; NaN stays NaN."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    sign = (bits >> 16).astype(np.uint16) & np.uint16(0x8000)
    return np.where(np.isnan(x), sign | BF16_NAN, sign | np.minimum(rounded & np.uint16(0x7FFF), np.uint16(0x7F7F)))


def from_bf16_bits(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_stored(x: np.ndarray, scale_type: str) -> np.ndarray:
    """R(x) as the file holds it: float16, uint16 patterns of bfloat16, or float32; little-endian."""
    if scale_type == "bf16":
        return to_bf16_bits(x).astype("<u2")
    dtype = np.dtype("<f2" if scale_type == "fp16" else "<f4")
    largest = np.float32(np.finfo(dtype).max)
    # Clamping before rounding gives the same result, because R saturates: a number beyond the largest finite number
    # becomes that number.
    return np.clip(x, -largest, largest).astype(dtype)


def from_stored(stored: np.ndarray, scale_type: str) -> np.ndarray:
    return from_bf16_bits(stored) if scale_type == "bf16" else stored.astype(np.float32)


def round_to(x: np.ndarray, scale_type: str) -> np.ndarray:
    """R(x), widened again to float32."""
    return from_stored(to_stored(x, scale_type), scale_type)


# Rows that are not finite


def finite_rows(x: np.ndarray) -> np.ndarray:
    """bool [N]: whether all channels of rows x [N, D] are finite. Other rows are poisoned."""
    return np.isfinite(x).all(axis=1)


def expect_finite(x: np.ndarray) -> None:
    """For readers whose rows are finite if their input is sound; raises ValueError for other rows x [N, D]."""
    if not finite_rows(x).all():
        raise ValueError("rows to encode: expected finite numbers")


def is_poisoned(numbers: np.ndarray) -> np.ndarray:
    """bool [N]: whether numbers [N, ...] are those of poisoned rows. False for rows without numbers."""
    return np.isnan(numbers[:, :1]).any(axis=1)


def exact_bits(x: np.ndarray) -> np.ndarray:
    """float32 -> uint16 patterns of exact rows: R(x), and NaN for what is not finite."""
    return np.where(np.isfinite(x), to_bf16_bits(x), BF16_NAN)


# Building blocks


def tree_sum(x: np.ndarray) -> np.ndarray:
    """Sums the last axis in the order of packing.md: neighbors first, zeros pad to a power of two."""
    size = x.shape[-1]
    padding = (1 << (size - 1).bit_length()) - size
    if padding:
        x = np.concatenate([x, np.zeros((*x.shape[:-1], padding), np.float32)], axis=-1)
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def clip_rows(x: np.ndarray, scheme: Scheme) -> np.ndarray:
    """Clips each row of x [N, D] to the row's threshold."""
    index = scheme.clip_index(x.shape[1])
    if index is None:
        return x
    threshold = np.partition(np.abs(x), index, axis=1)[:, index, None]
    return np.minimum(np.maximum(x, -threshold), threshold)


def divide_or_zero(x: np.ndarray, divisor: np.ndarray) -> np.ndarray:
    """x / divisor; 0 in groups whose divisor is 0, whose codes packing.md defines separately."""
    return np.divide(x, divisor, out=np.zeros_like(x), where=divisor != 0)


def levels(codes: np.ndarray, bits: int) -> np.ndarray:
    """The levels l(c), odd numbers, float32."""
    return (2 * codes.astype(np.int32) - (2**bits - 1)).astype(np.float32)


def symmetric_codes(y: np.ndarray, scheme: Scheme) -> np.ndarray:
    """Codes of y = x / s, float32."""
    return np.clip(np.floor(y) + np.float32(2 ** (scheme.bits - 1)), 0, np.float32(scheme.top))


# Encoding of groups x [N, G, g]. Each coder returns (codes float32 [N, G, g], its numbers, each [N, G]).


def encode_affine(x: np.ndarray, scheme: Scheme) -> tuple[np.ndarray, list[np.ndarray]]:
    lowest, highest = x.min(axis=2), x.max(axis=2)
    extent = np.minimum(highest - lowest, LARGEST) + ZERO  # -0 + 0 = +0, so signs of zero extremes do not matter
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
    codes = symmetric_codes(divide_or_zero(x, first[..., None]), scheme)
    if scheme.scale_rule == "absmax":
        return codes, [first]
    level = levels(codes, scheme.bits)
    norm = (level.astype(np.int64) ** 2).sum(axis=2).astype(np.float32)
    if scheme.scale_rule == "least_squares":
        refit = TWO * tree_sum(x * level) / norm
    else:
        refit = np.sqrt(FOUR * energy / norm)
    return codes, [np.where(first == 0, ZERO, round_to(refit, scheme.scale_type))]


def encode_table(x: np.ndarray, scheme: Scheme) -> tuple[np.ndarray, list[np.ndarray]]:
    """Codebook and trellis codes. Both share the scales; the searches for codes and the values of codes differ."""
    energy = tree_sum(x * x)
    deviation = round_to(np.sqrt(energy / np.float32(x.shape[2])), scheme.scale_type)
    y = divide_or_zero(x, deviation[..., None])
    codes = table_codes(y, scheme)
    codes = np.where(deviation[..., None] == 0, np.uint8(2 ** (scheme.bits - 1)), codes)
    if scheme.scale_rule == "rms":
        return codes, [deviation]
    value = table_values(codes, scheme)
    norm = tree_sum(value * value)
    if scheme.scale_rule == "norm":
        refit = np.sqrt(divide_or_zero(energy, norm))
    else:
        refit = divide_or_zero(tree_sum(x * value), norm)
    scale = np.where((norm == 0) | np.isnan(refit), deviation, round_to(refit, scheme.scale_type))
    return codes, [np.where(deviation == 0, ZERO, scale)]


def table_codes(y: np.ndarray, scheme: Scheme) -> np.ndarray:
    """Codes of y [N, G, g] in a codebook or a trellis, uint8."""
    return (nearest_entries if scheme.coder == "codebook" else best_paths)(y, scheme)


def table_values(codes: np.ndarray, scheme: Scheme) -> np.ndarray:
    """The values of codes [N, G, g] of a codebook or a trellis at scale 1, float32."""
    if scheme.coder == "codebook":
        return np.array(scheme.codebook, np.float32)[codes]
    return trellis_values(codes, scheme)


# Codebook codes


def nearest_entries(y: np.ndarray, scheme: Scheme) -> np.ndarray:
    """Codes of y, uint8: the number of thresholds that are at most y."""
    entries = np.array(scheme.codebook, np.float32)
    thresholds = (entries[:-1] + entries[1:]) * HALF
    return np.searchsorted(thresholds, y, side="right").astype(np.uint8)


# One scale a row. Sums of segments are added from the widest segment on.


def encode_one_scale(x: np.ndarray, scheme: MixedScheme) -> tuple[np.ndarray, np.ndarray]:
    """x [N, D] -> (codes uint8 [N, D], scales float32 [N, 1], or [N, 0] without channels of width 1 to 8)"""
    codes = np.zeros(x.shape, np.uint8)
    parts = [(x[:, part.begin : part.end], np.float32(gain), part) for part, gain in segments_with_gains(x, scheme)]
    if not parts:
        return codes, np.zeros((len(x), 0), np.float32)
    energies = [tree_sum(own * own) for own, _, _ in parts]
    reduced = reduce(np.add, [energy / (gain * gain) for energy, (_, gain, _) in zip(energies, parts)])
    count = np.float32(parts[-1][2].end)
    deviation = round_to(np.sqrt(reduced / count), scheme.scale_type)
    for own, gain, part in parts:
        codes[:, part.begin : part.end] = unit_codes(own, gain * deviation, part.scheme)
    if scheme.scale_rule == "rms":
        return codes, deviation[:, None]
    values = [unit_values(codes[:, part.begin : part.end], part.scheme) for _, _, part in parts]
    norm = reduce(np.add, [gain * gain * tree_sum(v * v) for v, (_, gain, _) in zip(values, parts)])
    if scheme.scale_rule == "norm":
        refit = np.sqrt(divide_or_zero(reduce(np.add, energies), norm))
    else:
        product = reduce(np.add, [tree_sum(own * (gain * v)) for v, (own, gain, _) in zip(values, parts)])
        refit = divide_or_zero(product, norm)
    scale = np.where((norm == 0) | np.isnan(refit), deviation, round_to(refit, scheme.scale_type))
    return codes, np.where(deviation == 0, ZERO, scale)[:, None]


def segments_with_gains(x: np.ndarray, scheme: MixedScheme):
    """(segment, gain) of each segment of width 1 to 8 of rows x [N, D]"""
    return zip(scheme.segments(x.shape[1]), scheme.gains)


def unit_codes(x: np.ndarray, step: np.ndarray, scheme: Scheme) -> np.ndarray:
    """Codes of a segment x [N, g] in units of step [N], that is t of packing.md; the middle code where it is 0."""
    y = divide_or_zero(x, step[:, None])
    if scheme.coder == "symmetric":
        codes = symmetric_codes(y / np.float32(GAUSSIAN_STEP[scheme.bits]), scheme)
    else:
        codes = table_codes(y[:, None], scheme)[:, 0]
    return np.where(step[:, None] == 0, 2 ** (scheme.bits - 1), codes).astype(np.uint8)


def unit_values(codes: np.ndarray, scheme: Scheme) -> np.ndarray:
    """v of the codes [N, g] of a segment, float32."""
    if scheme.coder == "symmetric":
        return np.float32(GAUSSIAN_STEP[scheme.bits]) * (levels(codes, scheme.bits) * HALF)
    return table_values(codes, scheme)


def decode_one_scale(codes: np.ndarray, scale: np.ndarray, scheme: MixedScheme, x: np.ndarray) -> None:
    """Writes x_hat of all channels that have bits into x [N, D]. codes: [N, D], scale: [N, 1]"""
    for part, gain in segments_with_gains(x, scheme):
        channels = slice(part.begin, part.end)
        x[:, channels] = scale * (np.float32(gain) * unit_values(codes[:, channels], part.scheme))


# Centroids


@quiet
def squared_distances(x: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """tree((x - M[c]) (x - M[c])) of rows x [N, D] and centroids [C, D], float32 [C, N]."""
    found = np.empty((len(centroids), len(x)), np.float32)
    rows = max(1, CHUNK // x.shape[1])
    for first in range(0, len(x), rows):
        block = np.ascontiguousarray(x[first : first + rows].T)
        for c, centroid in enumerate(centroids):
            difference = block - centroid[:, None]
            found[c, first : first + rows] = tree_sum((difference * difference).T)
    return found


@quiet
def nearest_centroids(x: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Index of the centroid of each token, int64 [N].

    x: [H, N, D], the heads that choose together, centroids: [H, C, D]
    """
    total = squared_distances(x[0], centroids[0])
    for rows, entries in zip(x[1:], centroids[1:]):
        total = total + squared_distances(rows, entries)
    return first_smallest(total)


# Rows

CODERS = {"affine": encode_affine, "symmetric": encode_symmetric, "codebook": encode_table, "trellis": encode_table}


@quiet
def encode(x: np.ndarray, scheme: AnyScheme) -> CodedRows:
    """Quantizes rows. A row with NaN or infinity is poisoned: codes 0, NaN in all numbers.

    x: float32 [N, D], already centered and rotated
    raises ValueError for rows that are not float32 or not whole groups
    """
    if x.dtype != np.float32 or x.ndim != 2:
        raise ValueError(f"rows to encode: expected float32 [N, D], found {x.dtype} {list(x.shape)}")
    if scheme.coder == "exact":
        return CodedRows(exact_bits(np.ascontiguousarray(x)), np.zeros((len(x), 0), np.float32))
    poisoned = ~finite_rows(x)
    x = np.where(poisoned[:, None], ZERO, x)
    codes, numbers = (encode_one_scale if scheme.one_scale else encode_segments)(x, scheme)
    codes[poisoned], numbers[poisoned] = 0, NAN
    return CodedRows(codes, numbers)


def encode_segments(x: np.ndarray, scheme: AnyScheme) -> tuple[np.ndarray, np.ndarray]:
    """x [N, D] -> (codes uint8 [N, D], all numbers float32 [N, G * (1 or 2)])"""
    codes, numbers = np.zeros(x.shape, np.uint8), [np.zeros((len(x), 0), np.float32)]
    for part in scheme.segments(x.shape[1]):
        channels = slice(part.begin, part.end)
        codes[:, channels], own = encode_segment(np.ascontiguousarray(x[:, channels]), part.scheme)
        numbers += own
    return codes, np.concatenate(numbers, axis=1)


def encode_segment(x: np.ndarray, scheme: Scheme) -> tuple[np.ndarray, list[np.ndarray]]:
    """x [N, d] -> (codes [N, d], numbers, each [N, G])"""
    groups = clip_rows(x, scheme).reshape(len(x), scheme.groups(x.shape[1]), scheme.group_size)
    codes, numbers = CODERS[scheme.coder](groups, scheme)
    return codes.reshape(x.shape), numbers


@quiet
def decode(rows: CodedRows, scheme: AnyScheme) -> np.ndarray:
    """x_hat, float32 [N, D]."""
    if scheme.coder == "exact":
        return from_bf16_bits(rows.codes)
    x, first = np.zeros(rows.codes.shape, np.float32), 0
    x[is_poisoned(rows.numbers)] = NAN  # for channels of width 0
    if scheme.one_scale:
        decode_one_scale(rows.codes, rows.numbers, scheme, x)
        return x
    for part in scheme.segments(x.shape[1]):
        channels = slice(part.begin, part.end)
        count = part.scheme.groups(part.end - part.begin) * part.scheme.numbers_per_group()
        x[:, channels] = decode_segment(rows.codes[:, channels], rows.numbers[:, first : first + count], part.scheme)
        first += count
    return x


def decode_segment(codes: np.ndarray, numbers: np.ndarray, scheme: Scheme) -> np.ndarray:
    """codes [N, d], numbers [N, G * (1 or 2)] -> x_hat [N, d]"""
    count, dim = codes.shape
    groups = scheme.groups(dim)
    codes = codes.reshape(count, groups, scheme.group_size)
    scale, *second = (numbers[:, i * groups : (i + 1) * groups, None] for i in range(scheme.numbers_per_group()))
    if scheme.coder == "symmetric":
        x = scale * (levels(codes, scheme.bits) * HALF)
    elif scheme.coder in ("codebook", "trellis"):
        x = scale * table_values(codes, scheme)
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


def pack(rows: CodedRows, scheme: AnyScheme) -> np.ndarray:
    """uint8 [N, row_bytes]: codes, numbers, the index of the centroid."""
    count, dim = rows.codes.shape
    if (rows.index is None) != (scheme.centroids == 0):
        raise ValueError(f"packed rows: expected an index of {scheme.centroids} centroids, or none")
    packed, begin = np.zeros((count, scheme.row_bytes(dim)), np.uint8), 0
    for part in scheme.segments(dim):
        packed[:, begin : begin + part.code_bytes] = pack_codes(rows.codes[:, part.begin : part.end], part.stored_bits)
        begin += part.code_bytes
    begin = scheme.numbers_begin(dim)
    end = begin + scheme.number_bytes(dim)
    packed[:, begin:end] = np.ascontiguousarray(to_stored(rows.numbers, scheme.scale_type)).view(np.uint8)
    if rows.index is not None:
        index = np.where(is_poisoned(rows.numbers), 0, rows.index)
        stored = index.astype("<u2")[:, None].view(np.uint8)
        size = index_bytes(scheme.centroids)
        packed[:, end : end + size] = stored[:, :size]
    return packed


def unpack(packed: np.ndarray, scheme: AnyScheme, dim: int) -> CodedRows:
    """The inverse of pack. packed: uint8 [N, row_bytes]; raises ValueError for codes and indices that do not exist."""
    if packed.ndim != 2 or packed.shape[1] != scheme.row_bytes(dim):
        raise ValueError(f"packed rows: expected [N, {scheme.row_bytes(dim)}] bytes, found {list(packed.shape)}")
    codes, begin = np.zeros((len(packed), dim), np.uint16 if scheme.bits > 8 else np.uint8), 0
    for part in scheme.segments(dim):
        found = unpack_codes(packed[:, begin : begin + part.code_bytes], part.stored_bits, part.end - part.begin)
        if (found > part.scheme.top).any():
            raise ValueError(f"packed rows: expected codes of {part.scheme.bits} bits, found {found.max()}")
        codes[:, part.begin : part.end] = found
        begin += part.code_bytes
    begin = scheme.numbers_begin(dim)
    end = begin + scheme.number_bytes(dim)
    stored = np.ascontiguousarray(packed[:, begin:end]).view(STORED_DTYPES[scheme.scale_type])
    return CodedRows(codes, from_stored(stored, scheme.scale_type), unpack_index(packed[:, end:], scheme.centroids))


def unpack_index(rest: np.ndarray, centroids: int) -> np.ndarray | None:
    """The index of the centroid from the bytes after the numbers, int64 [N]."""
    if not centroids:
        return None
    index = sum(rest[:, i].astype(np.int64) << 8 * i for i in range(index_bytes(centroids)))
    if (index >= centroids).any():
        raise ValueError(f"packed rows: expected the index of one of {centroids} centroids, found {index.max()}")
    return index


def fake_quantize(x: np.ndarray, scheme: AnyScheme) -> np.ndarray:
    """x [N, D] after encoding and decoding."""
    return decode(encode(x, scheme), scheme)
