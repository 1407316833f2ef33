"""Rows of mixed widths with one scale, by hand and through their bytes, and what the scale keeps."""

import dataclasses

import numpy as np
import pytest
from code_samples import (
    TABLES,
    any_nan,
    check_torch,
    codebook,
    floats,
    gaussian,
    one_scale_schemes,
    random_gains,
    random_widths,
    rows,
    same_bits,
    spoiled,
    trellis,
)

from kvq import packing
from kvq.scheme import MIXABLE_CODERS, SCALE_BYTES, TABLE_RULES, MixedScheme, Tables

WIDTHS = (4,) * 9 + (3,) * 4 + (2,) * 12 + (1,) * 8 + (0,) * 3  # of a trellis coder, width 3 is symmetric
STORED = 33


def scheme_of(coder: str, rule: str, scale_type: str = "fp32", gains=(0.5, 1.3, 2.5, 4.0)) -> MixedScheme:
    """Widths 1 to 4 with these gains."""
    return MixedScheme.make(coder, WIDTHS, scale_type, rule, TABLES, gains=(*gains, 1.0, 1.0, 1.0, 1.0))


def coder_rules() -> list[tuple[str, str]]:
    return [(c, r) for c in MIXABLE_CODERS for r in TABLE_RULES if (c, r) != ("symmetric", "rms")]


def test_a_row_by_hand():
    """q = 16 and 1/4. F = (20 + 12) / 16 + 4 / (1/4) = 18, n = 6, d = sqrt(3), t = 4 sqrt(3) and sqrt(3) / 2."""
    tables = Tables({2: (-1.5, -0.5, 0.5, 1.5), 1: (-1.0, 1.0)})
    gains = (0.5, 4.0, *(1.0,) * 6)
    rms, norm = (
        MixedScheme.make("codebook", (2, 2, 2, 2, 1, 1, 0), "fp32", rule, tables, gains=gains)
        for rule in ("rms", "norm")
    )
    root = np.sqrt(np.float32(2))
    x = floats(4, -2, 12**0.5, 0, root, -root, 9)[None]
    coded = packing.encode(x, rms)
    assert coded.codes[0].tolist() == [2, 1, 2, 2, 1, 0, 0]  # y = 0.58, -0.29, 0.5, 0, 1.6, -1.6
    np.testing.assert_allclose(coded.numbers, [[3**0.5]], rtol=1e-6)
    # N = 16 * 4 / 4 + 2 / 4 and E = 36
    refitted = packing.encode(x, norm)
    np.testing.assert_allclose(refitted.numbers, [[(36 / 16.5) ** 0.5]], rtol=1e-6)
    assert (refitted.codes == coded.codes).all()
    s = refitted.numbers[0, 0]
    expected = floats(s * 2, s * -2, s * 2, s * 2, s / 2, -s / 2, 0)[None]
    assert same_bits(packing.decode(refitted, norm), expected)
    assert packing.pack(coded, rms).tobytes().hex() == "a6" + "01" + "0000" + np.float32(coded.numbers).tobytes().hex()


@pytest.mark.parametrize("count, expected", [(0, ""), (256, "02"), (257, "0200")])
def test_the_index_stands_behind_the_scale(count, expected):
    scheme = MixedScheme.make("symmetric", (4, 2, 2, 0), "bf16", "norm", centroids=count, gains=(1.0,) * 8)
    coded = packing.encode(floats(0, 0, 0, 9)[None], scheme)
    coded = dataclasses.replace(coded, index=np.array([2]) if count else None)
    packed = packing.pack(coded, scheme)
    assert packed.tobytes().hex() == "080a" + "0000" + expected + "00" * (scheme.row_bytes(4) - 4 - len(expected) // 2)
    assert scheme.row_bytes(4) == (8 if count else 4)
    back = packing.unpack(packed, scheme, 4)
    assert back.numbers.shape == (1, 1) and (back.index.tolist() == [2] if count else back.index is None)


@pytest.mark.parametrize("count", [0, 2, 300])
@pytest.mark.parametrize("dim", [1, 2, 7, 13, 64])
def test_rows_with_one_scale_survive_their_bytes(dim, count):
    for seed, scheme in enumerate(one_scale_schemes(100 + dim, dim, count)):
        coded = packing.encode(spoiled(seed, rows(seed, 5, dim)), scheme)
        if count:
            index = np.where(packing.is_poisoned(coded.numbers), 0, [0, 1, count - 1, 1, 0])
            coded = dataclasses.replace(coded, index=index)
        packed = packing.pack(coded, scheme)
        assert packed.shape[1] % 4 == 0
        back = packing.unpack(packed, scheme, dim)
        assert (back.codes == coded.codes).all() and same_bits(back.numbers, coded.numbers), scheme
        assert (back.index == coded.index).all() if count else back.index is None


@pytest.mark.parametrize("scale_type", SCALE_BYTES)
def test_one_scale_takes_the_bytes_of_one(scale_type):
    """After 9 * 4, 4 * 3, 12 * 2 and 8 bits: 5 + 2 + 3 + 1 bytes of codes."""
    one = scheme_of("symmetric", "norm", scale_type)
    many = MixedScheme.make("symmetric", WIDTHS, scale_type, "norm")
    size = SCALE_BYTES[scale_type]
    assert (one.number_bytes(36), many.number_bytes(36)) == (size, 4 * size)
    assert (one.row_bytes(36), many.row_bytes(36)) == ((16, 28) if size == 4 else (16, 20))


def test_rows_without_widths_store_no_scale():
    scheme = MixedScheme.make("symmetric", (0,) * 4, "fp32", "norm", gains=(1.0,) * 8)
    x = spoiled(1, gaussian(1, 4, 4))
    coded = packing.encode(x, scheme)
    assert coded.numbers.shape == (4, 0) and scheme.row_bytes(4) == 0
    assert same_bits(packing.decode(coded, scheme), np.zeros((4, 4), np.float32))


@pytest.mark.parametrize("at", [0, 20, 35])
def test_a_poisoned_row_has_one_nan(at, device):
    """Any channel poisons the row, and channels of width 0 decode to NaN, too."""
    for coder, rule in coder_rules():
        scheme, x = scheme_of(coder, rule, "fp16"), gaussian(2, 3, 36)
        expected = packing.encode(x, scheme)
        x[1, at] = np.inf
        coded = packing.encode(x, scheme)
        assert not coded.codes[1].any() and same_bits(coded.numbers[1], floats(packing.NAN))
        assert (coded.codes[::2] == expected.codes[::2]).all()
        assert packing.pack(coded, scheme)[1].tobytes().hex() == "00" * 12 + "007e" + "0000"
        assert np.isnan(packing.decode(coded, scheme)).all(axis=1).tolist() == [False, True, False]
        check_torch(x, scheme, device)


# Properties


@pytest.mark.parametrize("rule", TABLE_RULES)
@pytest.mark.parametrize("scale_type", SCALE_BYTES)
def test_one_segment_with_gain_1_is_a_segment_with_a_scale(rule, scale_type):
    """For codebooks and trellises; symmetric codes round another first step."""
    tables = Tables({3: codebook(3)}, {3: trellis(3, 2)})
    for coder in ("codebook", "trellis"):
        arguments = coder, (3,) * 13 + (0,) * 2, scale_type, rule, tables
        x = spoiled(3, rows(3, 60, 15))
        one, segment = MixedScheme.make(*arguments, gains=(1.0,) * 8), MixedScheme.make(*arguments)
        found, expected = packing.encode(x, one), packing.encode(x, segment)
        assert (packing.pack(found, one) == packing.pack(expected, segment)).all()
        decoded = (any_nan(packing.decode(*pair)) for pair in ((found, one), (expected, segment)))
        assert same_bits(*decoded)


@pytest.mark.parametrize("coder", MIXABLE_CODERS)
def test_norm_keeps_the_length_of_the_row(coder):
    """Whatever the gains: also if they are far from the data, and the segments change their lengths."""
    x = gaussian(4, 50, 36) * np.exp(np.random.default_rng(4).uniform(-3, 3, (50, 1))).astype(np.float32)
    for gains in ((0.5, 1.3, 2.5, 4.0), (8.0, 0.1, 1.0, 0.3)):
        for scale_type, tolerance in (("fp32", 1e-6), ("fp16", 2**-11), ("bf16", 2**-8)):
            restored = packing.fake_quantize(x, scheme_of(coder, "norm", scale_type, gains))
            lengths = [np.linalg.norm(each[:, :STORED].astype(np.float64), axis=1) for each in (x, restored)]
            np.testing.assert_allclose(lengths[1], lengths[0], rtol=tolerance * 1.01)


@pytest.mark.parametrize("coder", MIXABLE_CODERS)
def test_least_squares_has_the_smallest_error_of_these_codes(coder):
    x = gaussian(5, 50, 36)
    least, *others = (packing.encode(x, scheme_of(coder, rule)) for c, rule in sorted(coder_rules()) if c == coder)
    scheme = scheme_of(coder, "least_squares")
    restored = packing.decode(least, scheme)
    residual = (x - restored)[:, :STORED].astype(np.float64)
    # The row is projected on the direction of its codes.
    np.testing.assert_allclose((residual * restored[:, :STORED]).sum(1), 0, atol=1e-4)
    for other in others:
        assert (other.codes == least.codes).all()
        worse = (x - packing.decode(other, scheme))[:, :STORED].astype(np.float64)
        assert ((residual**2).sum(1) <= (worse**2).sum(1) * (1 + 1e-6)).all()


@pytest.mark.parametrize("exponent", [-5, -1, 1, 6])
def test_a_common_power_of_two_in_the_gains_changes_the_scale_alone(exponent):
    factor = 2.0**exponent
    for coder, rule in coder_rules():
        for scale_type in SCALE_BYTES:
            x, gains = gaussian(6, 30, 36), (0.5, 1.3, 2.5, 4.0)
            own, scaled = (
                scheme_of(coder, rule, scale_type, tuple(float(np.float32(g)) * f for g in gains))
                for f in (1.0, factor)
            )
            coded, found = packing.encode(x, own), packing.encode(x, scaled)
            assert (found.codes == coded.codes).all(), (coder, rule)
            assert same_bits(found.numbers * np.float32(factor), coded.numbers), (coder, rule)
            assert same_bits(packing.decode(found, scaled), packing.decode(coded, own))


@pytest.mark.parametrize("exponent", [-6, 1, 7])
def test_a_power_of_two_in_the_row_changes_the_scale_alone(exponent):
    factor = np.float32(2.0**exponent)
    for seed, (coder, rule) in enumerate(coder_rules()):
        for scale_type in SCALE_BYTES:
            x, scheme = gaussian(7 + seed, 30, 36), scheme_of(coder, rule, scale_type)
            coded, found = packing.encode(x, scheme), packing.encode(x * factor, scheme)
            assert (found.codes == coded.codes).all(), (coder, rule)
            assert same_bits(found.numbers, coded.numbers * factor), (coder, rule)


def test_channels_of_width_0_do_not_count():
    for coder, rule in coder_rules():
        x, scheme = gaussian(8, 20, 36), scheme_of(coder, rule)
        other = x.copy()
        other[:, STORED:] *= 1e6
        assert same_bits(packing.fake_quantize(other, scheme), packing.fake_quantize(x, scheme))


def test_gains_near_the_data_serve_better_than_equal_ones():
    """Segments of very different sizes: without gains most codes are wasted."""
    sizes = np.float32([8] * 9 + [4] * 4 + [2] * 12 + [1] * 8 + [0] * 3)
    x = gaussian(9, 400, 36) * sizes
    for coder in ("symmetric", "codebook"):
        tables = Tables({w: tuple(np.linspace(-1.7, 1.7, 2**w).astype(np.float32).tolist()) for w in (1, 2, 3, 4)})
        errors = []
        for gains in ((1.0, 2.0, 4.0, 8.0), (4.0,) * 4):
            scheme = MixedScheme.make(coder, WIDTHS, "fp16", "norm", tables, gains=(*gains, *(1.0,) * 4))
            errors.append(np.square(packing.fake_quantize(x, scheme) - x).sum())
        assert errors[0] < 0.5 * errors[1], (coder, errors)


def test_rows_with_one_scale_do_not_see_each_other():
    for seed, scheme in enumerate(one_scale_schemes(10, 36)):
        x = spoiled(seed, rows(seed, 9, 36))
        together = packing.pack(packing.encode(x, scheme), scheme)
        alone = np.concatenate([packing.pack(packing.encode(row[None], scheme), scheme) for row in x])
        assert (together == alone).all(), scheme


def test_unrounded_scales_keep_their_gains():
    rng = np.random.default_rng(11)
    widths = random_widths(rng, 30)
    gains = random_gains(rng, widths)
    arguments = "codebook", widths, "norm", TABLES
    own, other = (
        MixedScheme.make(arguments[0], widths, scale_type, *arguments[2:], gains=gains)
        for scale_type in ("fp16", "fp32")
    )
    assert own.with_scale_type("fp32") == other
