"""Rows of mixed widths, by hand and through their bytes."""

import dataclasses

import numpy as np
import pytest
from code_samples import TABLES, check_torch, floats, gaussian, mixed_schemes, rows, same_bits, trellis, trellis_scheme

from kvq import packing
from kvq.scheme import MIXABLE_CODERS, SCALE_RULES, MixedScheme, Scheme, Tables, with_equal_rows


def test_a_mixed_row_by_hand():
    """3 channels of 5 bits in bytes, 3 of 2 bits, 2 without bits; two fp32 scales at a multiple of 4."""
    scheme = MixedScheme.make("symmetric", (5, 5, 5, 2, 2, 2, 0, 0), "fp32", "absmax")
    x = floats(15.5, -15.5, 0.5, 1.5, -0.5, -1.5, 7, -7)[None]
    coded = packing.encode(x, scheme)
    assert coded.codes[0].tolist() == [31, 0, 16, 3, 1, 0, 0, 0]
    assert coded.numbers[0].tolist() == [1, 1]
    assert packing.decode(coded, scheme)[0].tolist() == [15.5, -15.5, 0.5, 1.5, -0.5, -1.5, 0, 0]
    one = "0000803f"
    assert packing.pack(coded, scheme).tobytes().hex() == "1f0010" + "07" + one + one
    wider = dataclasses.replace(scheme, size=20)
    assert packing.pack(coded, wider).tobytes().hex() == "1f0010" + "07" + one + one + "00" * 8


@pytest.mark.parametrize("count, expected", [(256, "02"), (257, "0200")])
def test_the_index_stands_behind_the_scales(count, expected):
    mixed = MixedScheme.make("symmetric", (2, 2, 2, 0), "fp16", "absmax", centroids=count)
    coded = dataclasses.replace(packing.encode(floats(1.5, 0.5, -0.5, 9)[None], mixed), index=np.array([2]))
    packed = packing.pack(coded, mixed)
    assert packed.tobytes().hex() == "1b" + "00" + "003c" + expected + "00" * (8 - 4 - len(expected) // 2)
    assert packing.unpack(packed, mixed, 4).index.tolist() == [2]
    plain = Scheme("symmetric", 2, 3, "fp16", "absmax", centroids=count)
    coded = dataclasses.replace(packing.encode(floats(1.5, 0.5, -0.5)[None], plain), index=np.array([2]))
    assert packing.pack(coded, plain).tobytes().hex() == "1b" + "003c" + expected  # odd offset, no padding


@pytest.mark.parametrize("at", [0, 3])
def test_a_poisoned_mixed_row(at):
    """Any channel poisons the row, and channels of width 0 decode to NaN, too; the index becomes 0."""
    scheme = MixedScheme.make("symmetric", (2, 2, 2, 0), "fp16", "absmax", centroids=257)
    x = floats(1.5, 0.5, -0.5, 9, 1.5, 0.5, -0.5, 9).reshape(2, 4)
    x[1, at] = np.inf
    coded = dataclasses.replace(packing.encode(x, scheme), index=np.array([2, 2]))
    packed = packing.pack(coded, scheme)
    assert [row.tobytes().hex() for row in packed] == ["1b00003c02000000", "0000007e00000000"]
    back = packing.unpack(packed, scheme, 4)
    assert back.index.tolist() == [2, 0]
    assert np.isnan(packing.decode(back, scheme)).tolist() == [[False] * 4, [True] * 4]
    none = MixedScheme.make("symmetric", (0, 0), "fp16", "absmax")
    assert same_bits(packing.fake_quantize(floats(np.nan, 1)[None], none), floats(0, 0)[None])


@pytest.mark.parametrize("count", [0, 2, 300])
@pytest.mark.parametrize("dim", [1, 2, 7, 13, 64])
def test_mixed_rows_survive_their_bytes(dim, count):
    for seed, scheme in enumerate(mixed_schemes(100 + dim, dim, count)):
        coded = packing.encode(gaussian(seed, 5, dim), scheme)
        if count:
            coded = dataclasses.replace(coded, index=np.array([0, 1, count - 1, 1, 0]))
        packed = packing.pack(coded, scheme)
        assert packed.shape[1] % 4 == 0
        back = packing.unpack(packed, scheme, dim)
        assert (back.codes == coded.codes).all() and same_bits(back.numbers, coded.numbers), scheme
        assert (back.index == coded.index).all() if count else back.index is None


@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("length", range(1, 18))
def test_every_width_and_length_of_a_segment(width, length):
    stored = 8 if width in (5, 6, 7) else width
    scheme = MixedScheme.make("codebook", (width,) * length + (0,), "bf16", "norm", TABLES)
    assert scheme.code_bytes(length + 1) == -(-length * stored // 8)
    assert scheme.row_bytes(length + 1) == -(-(-(-scheme.code_bytes(length + 1) // 2) * 2 + 2) // 4) * 4
    codes = np.random.default_rng(width).integers(0, 2**width, (6, length + 1)).astype(np.uint8)
    codes[:, -1] = 0
    coded = packing.CodedRows(codes, np.ones((6, 1), np.float32))
    packed = packing.pack(coded, scheme)
    assert (packing.unpack(packed, scheme, length + 1).codes == codes).all()
    used = np.unpackbits(packed, axis=1, bitorder="little")[:, length * stored : scheme.numbers_begin(length + 1) * 8]
    assert not used.any()  # padding


def test_a_segment_is_coded_as_a_row_of_its_own():
    x, widths = rows(9, 20, 34), (8,) * 3 + (4,) * 10 + (2,) * 7 + (1,) * 9 + (0,) * 5
    for coder in MIXABLE_CODERS:
        for rule in SCALE_RULES[coder]:
            coded = packing.encode(x, scheme := MixedScheme.make(coder, widths, "fp16", rule, TABLES))
            for place, part in enumerate(scheme.parts):
                alone = packing.encode(x[:, part.begin : part.end], part.scheme)
                assert (coded.codes[:, part.begin : part.end] == alone.codes).all()
                assert same_bits(coded.numbers[:, place], alone.numbers[:, 0])
            decoded = packing.decode(coded, scheme)
            assert same_bits(decoded[:, 29:], np.zeros((20, 5), np.float32))


@pytest.mark.parametrize("rule, fallback", [("norm", "norm"), ("rms", "norm"), ("least_squares", "least_squares")])
def test_widths_without_a_theta_and_short_segments_are_symmetric(rule, fallback):
    tables = Tables(trellises={1: trellis(1, 1), 2: trellis(2, 1)})
    scheme = MixedScheme.make("trellis", (3,) * 9 + (2,) * 7 + (1,) * 8, "fp16", rule, tables)
    assert [(part.scheme.coder, part.scheme.scale_rule) for part in scheme.parts] == [
        ("symmetric", fallback),
        ("symmetric", fallback),
        ("trellis", rule),
    ]


@pytest.mark.parametrize("rule, fallback", [("norm", "norm"), ("rms", "norm"), ("least_squares", "least_squares")])
@pytest.mark.parametrize("size", [1, 4, 7, 8])
def test_short_groups_of_one_width_are_symmetric(size, rule, fallback, device):
    scheme = trellis_scheme(2, trellis(2, 3)[1], size, rule, "fp16")
    symmetric = Scheme("symmetric", 2, size, "fp16", fallback)
    x = rows(18, 9, 3 * size)
    packed = packing.pack(coded := packing.encode(x, scheme), scheme)
    assert scheme.coder == "trellis" and scheme.row_bytes(3 * size) == symmetric.row_bytes(3 * size)
    assert (packed == packing.pack(packing.encode(x, symmetric), symmetric)).all() == (size < 8)
    back = packing.unpack(packed, scheme, 3 * size)
    assert (back.codes == coded.codes).all()
    if size < 8:
        assert same_bits(packing.decode(back, scheme), packing.decode(back, symmetric))
    check_torch(x, scheme, device)


def test_heads_have_equal_rows():
    heads = [
        MixedScheme.make("symmetric", widths, "fp16", "norm") for widths in ((8,) * 8, (8, 1) + (0,) * 6, (0,) * 8)
    ]
    assert [head.row_bytes(8) for head in heads] == [12, 8, 0]  # 8 + 2, 1 + 1 + 4, nothing
    equal = with_equal_rows(heads)
    assert [head.row_bytes(8) for head in equal] == [12, 12, 12]
    assert packing.pack(packing.encode(rows(10, 3, 8), equal[2]), equal[2]).tolist() == [[0] * 12] * 3


def test_bytes_that_no_encoder_writes_are_refused():
    scheme = MixedScheme.make("codebook", (5, 5), "fp16", "norm", TABLES, centroids=3)
    packed = packing.pack(dataclasses.replace(packing.encode(gaussian(1, 1, 2), scheme), index=np.array([1])), scheme)
    for place, value, match in ((0, 32, "codes of 5 bits"), (4, 3, "3 centroids")):
        damaged = packed.copy()
        damaged[0, place] = value
        with pytest.raises(ValueError, match=match):
            packing.unpack(damaged, scheme, 2)
    with pytest.raises(ValueError, match="index"):
        packing.pack(packing.encode(gaussian(1, 1, 2), scheme), scheme)
