"""The search `integer` of formats/packing.md (d) against plain loops that follow the text."""

from fractions import Fraction

import numpy as np
import pytest
from code_samples import gaussian, rows, same_bits, trellis, trellis_scheme

from kvq import integer_search, packing, trellis_codes
from kvq.scheme import SEARCHES, Scheme

SEARCHED = {  # (bits, memory) to group sizes
    (1, 1): (8, 9, 39, 40, 41, 80, 95, 96, 97, 130),
    (1, 3): (8, 17, 39, 40, 41, 95, 96, 97, 128),
    (1, 8): (9, 40, 41, 97),
    (2, 1): (8, 13, 39, 40, 41, 95, 96, 97, 130),
    (2, 3): (8, 32, 39, 40, 41, 95, 96, 97),
    (2, 4): (11, 40),
    (3, 1): (8, 39, 40, 41, 95, 96, 97, 113),
    (3, 2): (16, 41),
    (4, 1): (8, 39, 40, 41, 96),
    (5, 1): (9,),
}
CASES = [(*shape, size) for shape, sizes in SEARCHED.items() for size in sizes]
SMALL = [case for case in CASES if case[0] * case[1] <= 3]
KNOWN = (0.955407229, 0.953921669, -0.519271679, 0.508955923, 0.482909586, 0.52327051, 0.956043081, -0.933100524)


def clamp(x, most):
    return min(max(x, -most), most)


class Loops:
    """One group y [g], one number at a time; round() of a fraction rounds ties to even, // rounds down."""

    def __init__(self, scheme: Scheme, y: list[float]):
        self.b, self.m, self.g = scheme.bits, scheme.memory, len(y)
        b, m, self.U = self.b, self.m, 20 * 4 ** (min(scheme.bits, 4) - 1)
        t = [clamp(v, 1152) if np.isinf(v) else clamp(round(Fraction(v) * 256), 1152) for v in y]
        a = [round(Fraction(clamp(theta, 2.5)) * 64 * self.U) for theta in scheme.theta]
        self.codes = range(2**b)
        A = [[sum(a[k * b + i] * self.sign(e, i) for i in range(b)) for e in self.codes] for k in range(m + 1)]
        half, whole = 8192 * self.U, 16384 * self.U
        self.F0 = [(sum(A[k][e] ** 2 for k in range(m + 1)) + half) // whole for e in self.codes]
        self.F = {
            (k, e, d): (2 * sum(A[n][e] * A[n + k][d] for n in range(m - k + 1)) + half) // whole
            for k in range(1, m + 1)
            for e in self.codes
            for d in self.codes
        }
        self.X = [
            [(sum(t[(j + k) % self.g] * a[k * b + i] for k in range(m + 1)) + 8192) // 16384 for i in range(b)]
            for j in range(self.g)
        ]

    def sign(self, e: int, i: int) -> int:
        return 1 if e >> i & 1 else -1

    def step(self, j: int, z: int, e: int) -> int:
        before = [z // 2 ** (self.b * (k - 1)) % 2**self.b for k in range(1, self.m + 1)]
        pairs = sum(self.F[k, e, d] for k, d in enumerate(before, start=1))
        return self.F0[e] + pairs - sum(self.X[j % self.g][i] * self.sign(e, i) for i in range(self.b))

    def run(self, channels: range, cost: list[int]) -> tuple[list[int], dict[int, list[int]]]:
        """(the costs at the end, the states before the step of each channel by the state after it)"""
        before, states = {}, len(cost)
        for j in channels:
            best = [(float("inf"), 0, 0)] * states  # cost, dropped code, state before
            for z in range(states):
                for e in self.codes:
                    after = e + z * 2**self.b % states
                    path = (cost[z] + self.step(j, z, e), z // 2 ** (self.b * (self.m - 1)), z)
                    best[after] = min(best[after], path)
            cost, before[j] = [own for own, _, _ in best], [z for _, _, z in best]
        return cost, before

    def path(self, z: int, channels: range, before: dict[int, list[int]]) -> tuple[int, list[int]]:
        """Of the path that ends in z: (the state before the first channel, the codes)."""
        codes = []
        for j in reversed(channels):
            codes.append(z % 2**self.b)
            z = before[j][z]
        return z, codes[::-1]

    def search(self) -> list[int]:
        n, states = self.g if self.g >= 96 else 40, 2 ** (self.b * self.m)
        cost, before = self.run(range(-40, n), [0] * states)
        seam, _ = self.path(cost.index(min(cost)), range(n), before)
        if self.g < 96:
            _, before = self.run(range(self.g), [0 if z == seam else 32 * self.U for z in range(states)])
        first, codes = self.path(seam, range(self.g), before)
        self.closes = first == seam
        return codes


def integer_scheme(bits: int, theta, size: int, *rest) -> Scheme:
    return trellis_scheme(bits, np.float32(theta).tolist(), size, *rest, search="integer")


def check(scheme: Scheme, y: np.ndarray) -> np.ndarray:
    """Compares X and codes of rows y [N, g]; returns the codes."""
    found, loops = trellis_codes.best_paths(y[:, None], scheme)[:, 0], [Loops(scheme, row) for row in y.tolist()]
    assert found.dtype == np.uint8
    assert trellis_codes.bit_gains(y.T, scheme).transpose(2, 0, 1).tolist() == [own.X for own in loops], scheme.theta
    assert found.tolist() == [own.search() for own in loops], scheme.theta
    return found


def test_by_hand():
    """b = 1, m = 1, theta = 1/2 1/2: a = 640 640, A = -640 -640 and 640 640, and all quotients are halves."""
    scheme = integer_scheme(1, (0.5, 0.5), 8)
    assert integer_search.integer_taps(scheme).tolist() == [[640], [640]]
    # F[0] = floor(2.5 + 0.5), F[1] = floor(+-2.5 + 0.5)
    assert integer_search.window_costs(scheme).tolist() == [3 + 3, 3 - 2, 3 - 2, 3 + 3]
    y = np.float32([0.125] * 4 + [-0.125] * 4)[:, None]  # t = 32 or -32
    assert trellis_codes.bit_gains(y, scheme).ravel().tolist() == [3, 3, 3, 0, -2, -2, -2, 0]


@pytest.mark.parametrize("bits, memory, size", CASES)
def test_codes_are_those_of_the_loops(bits, memory, size):
    check(integer_scheme(bits, trellis(bits, memory, size)[1], size), gaussian(size, 2, size))


@pytest.mark.parametrize("bits, memory, size", SMALL)
def test_ties_go_to_the_smallest_codes(bits, memory, size):
    rng = np.random.default_rng(size)
    theta = rng.integers(-2, 3, bits * (memory + 1))
    check(integer_scheme(bits, theta, size), rng.integers(-1, 2, (3, size)).astype(np.float32))


@pytest.mark.parametrize("bits, memory, size", SMALL)
def test_large_theta_and_infinite_targets_are_clamped(bits, memory, size):
    rng, y = np.random.default_rng(size), 4 * gaussian(size, 3, size)
    for row in y:
        row[rng.integers(0, size, 3)] = rng.choice([np.inf, -np.inf, 3e38, 4.5], 3)
    theta = 3 * gaussian(70 + size, bits * (memory + 1))
    theta[:2] = 4.25, -1e30
    check(integer_scheme(bits, theta, size), y)
    limits = np.clip(theta, -2.5, 2.5), np.clip(y, -4.5, 4.5)
    assert (
        check(integer_scheme(bits, limits[0], size), limits[1]) == check(integer_scheme(bits, theta, size), y)
    ).all()


@pytest.mark.parametrize("bits, memory, size", [(1, 1, 9), (1, 3, 41), (2, 1, 97), (3, 1, 8), (4, 1, 9)])
def test_halves_round_to_even(bits, memory, size):
    """y of odd multiples of 1/512, and theta whose products with 64 U are halves."""
    rng = np.random.default_rng(size)
    fine = 2 ** (9 + 2 * (bits - 1))
    theta = (2 * rng.integers(-fine // 2, fine // 2, bits * (memory + 1)) + 1) / fine
    y = ((2 * rng.integers(-600, 600, (4, size)) + 1) / 512).astype(np.float32)
    products = np.float32(theta).astype(float) * 64 * integer_search.unit(bits)
    assert (np.abs(products % 1) == 0.5).all() and (y * 256 % 1 == 0.5).all()
    scheme = integer_scheme(bits, theta, size)
    assert integer_search.integer_taps(scheme).ravel().tolist() == [round(Fraction(p)) for p in products.tolist()]
    check(scheme, y)


@pytest.mark.parametrize("size", [8, 40, 96])
@pytest.mark.parametrize("bits, memory", [(1, 8), (2, 2), (4, 1)])
def test_all_paths_tie_to_zeros(bits, memory, size):
    assert not check(integer_scheme(bits, [0.0] * bits * (memory + 1), size), gaussian(4, 1, size)).any()


@pytest.mark.parametrize("size, runs", [(8, 2), (39, 2), (41, 2), (95, 2), (96, 1), (97, 1)])
def test_long_groups_have_one_run(monkeypatch, size, runs):
    scheme, called, walk = integer_scheme(2, KNOWN, size), [], trellis_codes.integer_walk
    record = lambda gains, channels, *rest: called.append(channels) or walk(gains, channels, *rest)
    monkeypatch.setattr(trellis_codes, "integer_walk", record)
    trellis_codes.best_paths(gaussian(1, 1, 1, size), scheme)
    assert called == [range(-40, 0), range(size if size >= 96 else 40), range(size)][: runs + 1]


def wild(seed: int, size: int) -> tuple[Scheme, np.ndarray]:
    """A trellis and targets for which paths often do not close."""
    theta = np.random.default_rng(seed).uniform(-2.5, 2.5, 5)
    return integer_scheme(1, theta, size), 3 * gaussian(seed, 200, size)


@pytest.mark.parametrize("cost", [31, 33, 1000])
def test_other_states_cost_32_at_the_start(monkeypatch, cost):
    compared = 0
    for seed in range(60):
        scheme, y = wild(seed, 26)
        found = trellis_codes.integer_viterbi(y, scheme)
        with monkeypatch.context() as patch:
            patch.setattr(integer_search, "OTHER_STATES", cost)
            other = trellis_codes.integer_viterbi(y, scheme)
        differ = (found != other).any(axis=1)
        check(scheme, y[differ][:2])
        compared += differ.sum()
    assert compared > 0


def test_long_groups_need_not_close():
    """With theta = 1 1 and y = 0, alternating codes cost nothing. The best path ends in state 0, so z* is 1; but the
    alternating path that ends in 1 began in 0."""
    scheme, y = integer_scheme(1, (1.0, 1.0), 97), np.zeros((1, 97), np.float32)
    loops = Loops(scheme, y[0].tolist())
    assert check(scheme, y).tolist() == [loops.search()] == [[1, 0] * 48 + [1]]
    assert not loops.closes


@pytest.mark.parametrize("bits", range(1, 9))
def test_2000_steps_fit_32_bits(bits):
    for memory in range(1, min(8, 8 // bits, 16 // bits - 1) + 1):
        for sign in (1, -1):
            scheme = integer_scheme(bits, [9.0] * bits + [9.0 * sign] * bits * memory, 8)
            gains = trellis_codes.bit_gains(np.full((8, 1), np.inf, np.float32), scheme)
            largest = np.abs(integer_search.window_costs(scheme)).max() + np.abs(gains).sum(1).max()
            assert integer_search.INT32_STEPS * int(largest) + 32 * integer_search.unit(bits) < 2**31
            taps = np.abs(integer_search.integer_taps(scheme))
            assert 1152 * taps.sum(axis=0).max() + 8192 < 2**31


def test_long_searches_are_cut_into_rows(monkeypatch):
    scheme, x = integer_scheme(1, trellis(1, 6)[1], 48, "norm"), rows(5, 50, 96)
    whole = packing.encode(x, scheme)
    for chunk in (1, 1 << 10, 1 << 12):
        monkeypatch.setattr(trellis_codes, "CHUNK", chunk)
        cut = packing.encode(x, scheme)
        assert (whole.codes == cut.codes).all() and same_bits(whole.numbers, cut.numbers)


@pytest.mark.parametrize("size", [128, 95, 32, 16])
def test_errors_are_nearly_those_of_the_other_search(size):
    x, error = gaussian(6, 1000, size), {}
    for search in SEARCHES:
        scheme = trellis_scheme(2, np.float32(KNOWN).tolist(), size, "rms", "fp16", search)
        error[search] = np.square(packing.fake_quantize(x, scheme) - x).mean()
    assert 0.96 < error["integer"] / error["binary32"] < 1.005, "seed 6"


def test_decoding_does_not_depend_on_the_search():
    x = rows(7, 30, 64)
    plain = trellis_scheme(2, trellis(2, 3)[1], 32, "norm", "fp16")
    other = integer_scheme(2, plain.theta, 32, "norm", "fp16")
    coded = packing.encode(x, other)
    assert (coded.codes != packing.encode(x, plain).codes).any()
    assert same_bits(packing.decode(coded, plain), packing.decode(coded, other))
