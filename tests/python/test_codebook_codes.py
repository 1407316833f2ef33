"""Codebook codes of formats/packing.md: small cases by hand."""

import dataclasses
import itertools

import numpy as np
import pytest
from code_samples import codebook, codebook_scheme, floats, gaussian, same_bits, trellis_scheme

from kvq import packing
from kvq.scheme import TABLE_RULES


def test_codebook_by_hand():
    x = floats(3, -1, 1, -1, 3, -3, 1, 1)[None]  # E = 32, d = 2, y = 1.5 -0.5 0.5 -0.5 1.5 -1.5 0.5 0.5
    entries = (-2.0, -0.5, 0.25, 1.5)  # thresholds -1.25 -0.125 0.875
    codes = [3, 1, 2, 1, 3, 0, 2, 2]
    values = floats(*entries)[codes]  # N = 2.25 0.25 0.0625 0.25 2.25 4 0.0625 0.0625 = 9.1875; x v = 16.75
    for rule, scale in (
        ("rms", 2.0),
        ("norm", np.sqrt(floats(32) / floats(9.1875))[0]),
        ("least_squares", 16.75 / 9.1875),
    ):
        coded = packing.encode(x, scheme := codebook_scheme(entries, 8, rule))
        assert coded.codes[0].tolist() == codes
        assert same_bits(coded.numbers[0], floats(scale)), rule
        assert same_bits(packing.decode(coded, scheme)[0], floats(scale) * values)


def test_a_value_on_a_threshold_gets_the_upper_entry():
    scheme = codebook_scheme((-1.5, -0.5, 0.5, 1.5), 8)
    x = floats(1, -1, 0, -0.0, 1, -1, 0, 2)[None]  # E = 8, d = 1
    assert packing.encode(x, scheme).codes[0].tolist() == [3, 1, 2, 2, 3, 1, 2, 3]


@pytest.mark.parametrize("bits", range(1, 9))
def test_codebook_codes_count_thresholds(bits):
    entries = floats(*codebook(bits))
    y = np.concatenate([gaussian(1, 300), (entries[:-1] + entries[1:]) / 2, entries]).astype(np.float32)
    thresholds = [(a + b) * np.float32(0.5) for a, b in itertools.pairwise(entries)]
    found = packing.nearest_entries(y[None, None], codebook_scheme(entries.tolist(), len(y)))
    assert found[0, 0].tolist() == [sum(t <= v for t in thresholds) for v in y]


@pytest.mark.parametrize("rule", TABLE_RULES)
@pytest.mark.parametrize(
    "scheme",
    [codebook_scheme((-1.0, -0.5, 0.5, 1.0), 8), trellis_scheme(2, (1.0, 2.0, 0.1, 0.2), 8)],
    ids=["codebook", "trellis"],
)
def test_a_group_without_scale_has_middle_codes(scheme, rule):
    scheme = dataclasses.replace(scheme, scale_rule=rule, scale_type="fp16")
    x = np.zeros((1, 24), np.float32)
    x[0, [8, 9, 16]] = 1e-9, -1e-9, 1e-30  # no energy; d below fp16; E underflows
    coded = packing.encode(x, scheme)
    assert (coded.codes == 2).all()
    assert same_bits(coded.numbers[0], floats(0, 0, 0))


@pytest.mark.parametrize("rule", TABLE_RULES)
def test_values_without_norm_keep_the_deviation(rule):
    coded = packing.encode(floats(2, 2)[None], codebook_scheme((-1e9, 0.0, 1e9, 2e9), 2, rule))
    assert coded.codes[0].tolist() == [1, 1]
    assert same_bits(coded.numbers[0], floats(2))
