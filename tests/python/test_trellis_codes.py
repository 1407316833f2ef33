"""Trellis codes of formats/packing.md: small cases by hand, and the best paths by brute force."""

import dataclasses

import exact_numbers as exact
import numpy as np
import packing_spec
import pytest
from code_samples import (
    TRELLISES,
    codebook,
    codebook_scheme,
    floats,
    gaussian,
    outliers,
    rows,
    same_bits,
    trellis,
    trellis_scheme,
)

from kvq import packing, trellis_codes
from kvq.scheme import TABLE_RULES, Scheme


def test_trellis_by_hand():
    """b = 1, m = 1, theta = 1 1: v is +1 or -1 if a code equals the previous channel's, else 0."""
    x = floats(0, 2, 0, 0, 0, 0, 0, -2)[None]  # E = 8, so d = 1; v = x / 2, N = 2, x v = 4
    for rule, scale in (("rms", 1), ("norm", 2), ("least_squares", 2)):
        coded = packing.encode(x, scheme := trellis_scheme(1, (1.0, 1.0), 8, rule))
        assert coded.codes[0].tolist() == [
            1,
            1,
            0,
            1,
            0,
            1,
            0,
            0,
        ]  # the group is tail-biting: the last 0 comes before the first 1
        assert coded.numbers[0].tolist() == [scale]
        assert packing.decode(coded, scheme)[0].tolist() == [0, scale, 0, 0, 0, 0, 0, -scale]


def test_before_the_first_code_come_the_last_ones():
    scheme = trellis_scheme(2, (1.0, 2.0, 0.5, 0.25, 0.125, 0.0625), 8)
    found = trellis_codes.trellis_values(np.array([3, 0, 2, 1, 0, 0, 2, 1], np.uint8), scheme)
    h = lambda *terms: sum(terms) / 2
    assert found[:4].tolist() == [
        h(1, 2, 0.5, -0.25, -0.125, 0.0625),
        h(-1, -2, 0.5, 0.25, 0.125, -0.0625),
        h(-1, 2, -0.5, -0.25, 0.125, 0.0625),
        h(1, -2, -0.5, 0.25, -0.125, -0.0625),
    ]


@pytest.mark.parametrize("bits, memory", [*TRELLISES, (8, 1)])
def test_the_table_is_the_values(bits, memory):
    scheme = trellis_scheme(bits, trellis(bits, memory)[1], 12)
    table = trellis_codes.trellis_table(scheme)
    codes = np.random.default_rng(2).integers(0, 2**bits, (50, 12)).astype(np.uint8)
    place = sum(codes[:, [(j - k) % 12 for j in range(12)]].astype(int) << bits * k for k in range(memory + 1))
    assert same_bits(table[place], trellis_codes.trellis_values(codes, scheme))


def sequences(alphabet: int, length: int) -> np.ndarray:
    """All sequences, uint8 [alphabet^length, length]."""
    place = np.arange(alphabet**length)[:, None]
    return (place // alphabet ** np.arange(length)[::-1] % alphabet).astype(np.uint8)


def costs(y: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Costs of paths with values [P, n], summed along the paths in binary32."""
    cost, error = np.zeros(len(values), np.float32), y - values
    for j in range(len(y)):
        cost = cost + error[:, j] * error[:, j]
    return cost


def best_of(cost: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """The cheapest code sequence; on a tie the smallest last code decides, then the smallest second to last, ..."""
    return min(codes[cost == cost.min()].tolist(), key=lambda path: path[::-1])


def seam_by_force(y: np.ndarray, scheme: Scheme) -> list[int]:
    """The codes of z*, oldest first, on the best of all paths from any state.

    On a tie the smallest z wins, in which the oldest code has the highest digit.
    """
    size, memory = len(y), scheme.memory
    codes = sequences(2**scheme.bits, memory + 2 * size)
    window = [codes[:, memory - k : codes.shape[1] - k].astype(int) for k in range(memory + 1)]
    place = sum(before << scheme.bits * k for k, before in enumerate(window))
    cost = costs(np.concatenate([y, y]), trellis_codes.trellis_table(scheme)[place])
    codes = codes[cost == cost.min()].tolist()
    best = min(codes, key=lambda path: (path[-memory:], path[:-memory][::-1]))
    return best[size : size + memory]


def group_by_force(y: np.ndarray, seam: list[int], scheme: Scheme) -> list[int]:
    """The best of all closed paths through the seam."""
    open_end = sequences(2**scheme.bits, len(y) - len(seam))
    codes = np.concatenate([open_end, np.broadcast_to(np.uint8(seam), (len(open_end), len(seam)))], axis=1)
    return best_of(costs(y, trellis_codes.trellis_values(codes, scheme)), codes)


def small_integers(rng, bits: int, memory: int, count: int, size: int) -> tuple[Scheme, np.ndarray]:
    """A trellis and targets with many ties and without rounding."""
    theta = rng.integers(-2, 3, bits * (memory + 1)).astype(float).tolist()
    return trellis_scheme(bits, theta, size), rng.integers(-1, 2, (count, size)).astype(np.float32)


@pytest.mark.parametrize("memory", [1, 2])
@pytest.mark.parametrize("ties", [False, True])
def test_both_runs_find_the_best_of_all_paths(memory, ties):
    rng = np.random.default_rng(20 + memory)
    for k in range(8):
        scheme, y = small_integers(rng, 1, memory, 2, 8)
        if not ties:
            scheme, y = trellis_scheme(1, trellis(1, memory, k)[1], 8), gaussian(30 + k, 2, 8)
        for row, found in zip(y, trellis_codes.viterbi(y, scheme).tolist()):
            seam = seam_by_force(row, scheme)
            assert found[-memory:] == seam, scheme.theta
            assert found == group_by_force(row, seam, scheme), scheme.theta


@pytest.mark.parametrize(
    "bits, memory, size", [(1, 1, 12), (1, 2, 9), (1, 3, 13), (1, 7, 8), (1, 7, 14), (2, 1, 8), (2, 3, 9), (3, 2, 8)]
)
@pytest.mark.parametrize("ties", [False, True])
def test_the_group_is_the_best_path_through_the_seam(bits, memory, size, ties):
    rng = np.random.default_rng(40 + size)
    scheme, y = small_integers(rng, bits, memory, 6, size)
    if not ties:
        scheme, y = trellis_scheme(bits, trellis(bits, memory)[1], size), gaussian(3, 6, size)
    for row, found in zip(y, trellis_codes.viterbi(y, scheme).tolist()):
        assert found == group_by_force(row, found[-memory:], scheme), scheme.theta


def test_most_groups_are_the_cheapest_that_close():
    scheme, y = trellis_scheme(2, trellis(2, 1)[1], 8), gaussian(21, 60, 8)
    codes = sequences(4, 8)
    values = trellis_codes.trellis_values(codes, scheme)
    cheapest = [codes[costs(row, values).argmin()].tolist() for row in y]
    assert np.mean([a == b for a, b in zip(trellis_codes.viterbi(y, scheme).tolist(), cheapest)]) > 0.8


def reference_viterbi(y: np.ndarray, scheme: Scheme) -> list[list[int]]:
    """Codes of each row by the script that derives the vectors."""
    theta = [exact.from_decimal(repr(float(t))) for t in scheme.theta]
    rule = packing_spec.Trellis(scheme.bits, scheme.memory, theta)
    return [packing_spec.Spec().viterbi([exact.from_decimal(repr(float(v))) for v in row], rule) for row in y]


@pytest.mark.parametrize("bits, memory", [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)])
def test_ties_go_to_the_smallest_codes(bits, memory):
    rng = np.random.default_rng(bits + 10 * memory)
    for _ in range(12):
        scheme, y = small_integers(rng, bits, memory, 3, 9)
        assert trellis_codes.viterbi(y, scheme).tolist() == reference_viterbi(y, scheme), scheme.theta


@pytest.mark.parametrize("size", [8, 31, 32, 33, 63, 65, 100])
def test_groups_of_every_length_have_their_seam(size):
    for bits, memory in ((1, 3), (2, 2)):
        scheme, y = trellis_scheme(bits, trellis(bits, memory)[1], size), gaussian(22, 2, size)
        assert trellis_codes.viterbi(y, scheme).tolist() == reference_viterbi(y, scheme)
        scheme, y = small_integers(np.random.default_rng(size), bits, memory, 2, size)
        assert trellis_codes.viterbi(y, scheme).tolist() == reference_viterbi(y, scheme)


def test_the_seam_sees_32_channels_on_each_side():
    scheme, y = trellis_scheme(1, trellis(1, 6)[1], 96), gaussian(23, 200, 96)
    other = y.copy()
    other[:, 32:64] = gaussian(24, 200, 32)
    found, changed = trellis_codes.viterbi(y, scheme), trellis_codes.viterbi(other, scheme)
    assert (found[:, -6:] == changed[:, -6:]).all() and (found != changed).any(axis=1).all()


@pytest.mark.parametrize("size", [8, 40])
def test_infinite_costs_tie(size):
    y = outliers(size) / np.float32(65504)
    for bits, memory in ((1, 3), (1, 7), (2, 2)):
        scheme = trellis_scheme(bits, trellis(bits, memory)[1], size)
        with np.errstate(over="ignore"):
            assert trellis_codes.viterbi(y, scheme).tolist() == reference_viterbi(y, scheme)


def test_all_paths_tie_to_zeros():
    scheme = trellis_scheme(2, (0.0,) * 6, 9)
    assert not trellis_codes.viterbi(gaussian(4, 3, 9), scheme).any()


def test_long_searches_are_cut_into_rows(monkeypatch):
    scheme, x = trellis_scheme(1, trellis(1, 6)[1], 48, "norm"), rows(5, 50, 96)
    whole = packing.encode(x, scheme)
    monkeypatch.setattr(trellis_codes, "CHUNK", 1 << 10)
    cut = packing.encode(x, scheme)
    assert (whole.codes == cut.codes).all() and same_bits(whole.numbers, cut.numbers)


def test_symmetric_codes_are_a_trellis_without_use_of_its_memory():
    """With theta[i] = 2^i and 0 for earlier codes, values are the levels of packing.md (b), and codes are the nearest
    levels."""
    x = gaussian(6, 40, 32)
    scheme = trellis_scheme(3, (1.0, 2.0, 4.0, 0.0, 0.0, 0.0), 32)
    values = trellis_codes.trellis_values(codes := packing.encode(x, scheme).codes, scheme)
    assert (values == packing.levels(codes, 3) / 2).all()


@pytest.mark.parametrize("scheme", [codebook_scheme(codebook(2), 64), trellis_scheme(1, trellis(1, 3)[1], 64)], ids=str)
def test_rules_fit_what_they_say(scheme):
    x = gaussian(8, 40, 64)
    decoded = {rule: packing.fake_quantize(x, dataclasses.replace(scheme, scale_rule=rule)) for rule in TABLE_RULES}
    np.testing.assert_allclose(np.linalg.norm(decoded["norm"], axis=1), np.linalg.norm(x, axis=1), rtol=1e-6)
    errors = {rule: ((own - x) ** 2).sum(1) for rule, own in decoded.items()}
    assert (errors["least_squares"] <= errors["norm"] * (1 + 1e-6)).all()
    assert (errors["least_squares"] <= errors["rms"] * (1 + 1e-6)).all()
