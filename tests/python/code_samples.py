"""Schemes with tables and widths drawn at random, rows of every size, and the comparison of both codecs of the second
reader."""

import numpy as np

from kvq import packing
from kvq.scheme import (
    MIXABLE_CODERS,
    ONE_SCALE_RULES,
    SCALE_BYTES,
    SCALE_RULES,
    SEARCHES,
    TABLE_RULES,
    MixedScheme,
    Scheme,
    Tables,
)

TRELLISES = [(1, 1), (1, 3), (1, 6), (1, 7), (2, 1), (2, 3), (3, 2), (4, 1), (4, 2)]  # bits, memory


def floats(*values) -> np.ndarray:
    return np.array(values, np.float32)


def gaussian(seed: int, *shape) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def codebook(bits: int, seed: int = 0) -> tuple[float, ...]:
    return tuple(np.sort(gaussian(50 + bits + seed, 2**bits)).tolist())


def trellis(bits: int, memory: int, seed: int = 0) -> tuple[int, tuple[float, ...]]:
    return memory, tuple(gaussian(70 + bits + seed, bits * (memory + 1)).tolist())


TABLES = Tables(
    {bits: codebook(bits) for bits in range(1, 9)},
    {1: trellis(1, 6), 2: (*trellis(2, 3), "integer"), 4: (*trellis(4, 1), "integer")},
)


def codebook_scheme(entries, group_size, rule="rms", scale_type="fp32") -> Scheme:
    return Scheme("codebook", len(entries).bit_length() - 1, group_size, scale_type, rule, codebook=tuple(entries))


def trellis_scheme(bits, theta, group_size, rule="rms", scale_type="fp32", search="binary32") -> Scheme:
    memory, theta = len(theta) // bits - 1, tuple(theta)
    return Scheme("trellis", bits, group_size, scale_type, rule, memory=memory, theta=theta, search=search)


def table_schemes(group_size: int) -> list[Scheme]:
    return [
        scheme
        for scale_type in SCALE_BYTES
        for rule in TABLE_RULES
        for scheme in (
            *(codebook_scheme(codebook(bits), group_size, rule, scale_type) for bits in (1, 2, 3, 5, 8)),
            *(
                trellis_scheme(bits, trellis(bits, memory)[1], group_size, rule, scale_type, search)
                for search in SEARCHES
                for bits, memory in TRELLISES
            ),
        )
    ]


def random_widths(rng, dim: int) -> tuple[int, ...]:
    """Up to five widths, so few that some segments are long enough for a trellis."""
    return tuple(sorted(rng.choice(rng.permutation(9)[:5], dim).tolist(), reverse=True))


def mixed_schemes(seed: int, dim: int, centroids: int = 0) -> list[MixedScheme]:
    """Schemes of every coder, rule and scale type, each with its own widths."""
    rng = np.random.default_rng(seed)
    return [
        MixedScheme.make(coder, random_widths(rng, dim), scale_type, rule, TABLES, centroids)
        for coder in MIXABLE_CODERS
        for rule in SCALE_RULES[coder]
        for scale_type in SCALE_BYTES
    ]


def random_gains(rng, widths: tuple[int, ...]) -> tuple[float, ...]:
    """Gains of widths 1 to 8, from 1/8 to 8; 1 for widths that are not there."""
    drawn = np.exp2(rng.uniform(-3, 3, 8)).astype(np.float32).tolist()
    return tuple(gain if width in widths else 1.0 for width, gain in enumerate(drawn, start=1))


def one_scale_schemes(seed: int, dim: int, centroids: int = 0) -> list[MixedScheme]:
    """Schemes of every coder, rule and scale type that rows with one scale may have, each with its own widths and
    gains."""
    rng, schemes = np.random.default_rng(seed), []
    for coder in MIXABLE_CODERS:
        for rule in (rule for rule in ONE_SCALE_RULES if rule in SCALE_RULES[coder]):
            for scale_type in SCALE_BYTES:
                widths = random_widths(rng, dim)
                gains = random_gains(rng, widths)
                schemes.append(MixedScheme.make(coder, widths, scale_type, rule, TABLES, centroids, gains))
    return schemes


def rows(seed: int, count: int, dim: int) -> np.ndarray:
    """Rows of different sizes: one is zero, one overflows, one is too small for fp16."""
    x = gaussian(seed, count, dim) * np.exp(np.random.default_rng(seed).uniform(-3, 3, (count, 1))).astype(np.float32)
    x[0], x[1], x[2] = 0, x[1] * np.float32(1e30), x[2] * np.float32(1e-9)
    return x


def spoiled(seed: int, x: np.ndarray) -> np.ndarray:
    """A copy of rows x in which every third row has NaN or infinity in one to three channels."""
    rng, x = np.random.default_rng(seed), x.copy()
    for row in x[::3]:
        row[rng.integers(0, len(row), rng.integers(1, 4))] = rng.choice([np.nan, -np.nan, np.inf, -np.inf])
    return x


def any_nan(x: np.ndarray) -> np.ndarray:
    """Decoded rows with one NaN for all: a decoder may give any."""
    return np.where(np.isnan(x), packing.NAN, x)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and (a.view(np.uint32) == b.view(np.uint32)).all()


def check_torch(x: np.ndarray, scheme, device) -> None:
    import torch

    from kvq import torch_codec

    coded, rows = packing.encode(x, scheme), torch.from_numpy(x).to(device)
    codes, numbers = torch_codec.encode(rows, scheme)
    assert (codes.cpu().numpy() == coded.codes).all(), scheme
    assert same_bits(numbers.cpu().numpy(), coded.numbers), scheme
    decoded = any_nan(packing.decode(coded, scheme))
    assert same_bits(any_nan(torch_codec.decode(codes, numbers, scheme).cpu().numpy()), decoded), scheme
    assert same_bits(any_nan(torch_codec.fake_quantize(rows, scheme).cpu().numpy()), decoded), scheme


def outliers(size: int) -> np.ndarray:
    """Rows with one outlier, at every position. With fp16, the outlier's cost and all later costs are infinite."""
    x = gaussian(25, size, size) * np.float32(65504)
    np.fill_diagonal(x, 1e30)
    return x
