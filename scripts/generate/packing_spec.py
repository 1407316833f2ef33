"""formats/packing.md in exact arithmetic, slow and without numpy; derive_vectors.py explains what for."""

import functools
import itertools
import math
import struct
from array import array
from dataclasses import dataclass
from fractions import Fraction

from exact_numbers import (
    BINARY32,
    BINARY64,
    HALF,
    QUIET_NAN,
    SCALE_TYPES,
    ZERO,
    NotANumberError,
    Real,
    add,
    as_float,
    binary32s,
    channel_of,
    clamped,
    divide,
    floor,
    from_decimal,
    from_pattern,
    given_channel,
    hex_pattern,
    is_finite,
    multiply,
    nearest_even,
    pattern,
    rounded,
    square_root,
    subtract,
)

STEPS = {
    b: from_decimal(text)
    for b, text in enumerate(
        "1.5957691 0.9956867 0.58601946 0.3352006 0.18813878 0.10406301 0.056867674 0.030762387".split(), start=1
    )
}


@dataclass(frozen=True)
class Group:
    """One quantized group: codes, scale, second number (None unless affine), decoded channels."""

    codes: list[int]
    scale: Real
    zero: Real | None
    decoded: list[Real]


@dataclass(frozen=True)
class Trellis:
    """theta and memory of one width, and how its codes are searched"""

    bits: int
    memory: int
    theta: list[Real]
    search: str = "binary32"

    @staticmethod
    def of(entry: dict) -> "Trellis":
        theta = [from_pattern(text) for text in entry["theta_bits"]]
        trellis = Trellis(entry["bits"], entry["memory"], theta, entry.get("search", "binary32"))
        assert trellis.memory >= 1 and trellis.bits * trellis.memory <= 8 and len(trellis.theta) <= 16
        assert len(trellis.theta) == trellis.bits * (trellis.memory + 1), "one theta for each bit that a value sees"
        return trellis


@dataclass(frozen=True)
class Search:
    """A run of Viterbi: the cost of the path to each state, and the code that each step dropped on the way to each."""

    costs: array | list[int]
    dropped: list[list[int]]


class Spec:
    """The algorithms of packing.md, in the order of its paragraphs. Tests override methods to prove that the vectors
    detect a misreading."""

    # Arithmetic

    def to_scale_type(self, value: Real, scale_type: str) -> Real:
        """R(y)"""
        target = SCALE_TYPES[scale_type]
        result = rounded(value, target)
        return Real(result.negative, target.largest) if result.is_infinite else result

    def tree(self, values: list[Real]) -> Real:
        """Sum in the order of packing.md: adds neighbors until one number is left, after padding with zeros to a power
        of two."""
        padded = values + [ZERO] * ((1 << (len(values) - 1).bit_length()) - len(values))
        while len(padded) > 1:
            padded = [add(padded[i], padded[i + 1]) for i in range(0, len(padded), 2)]
        return padded[0]

    def divide(self, a: Real, b: Real) -> Real:
        return divide(a, b)

    def multiply_add(self, a: Real, b: Real, c: Real) -> Real:
        return add(multiply(a, b), c)

    # Rows that are not finite

    def is_poisoned(self, row: list[Real | None], case: dict) -> bool:
        return not all(map(is_finite, row))

    def quiet_nan(self, scale_type: str) -> int:
        return QUIET_NAN[scale_type]

    def poisoned_codes(self, row: list[Real | None], case: dict) -> list[int]:
        return [0] * len(row)

    def decoded_without_bits(self, poisoned: bool) -> str:
        """A channel of width 0, decoded."""
        return f"{QUIET_NAN['fp32']:08x}" if poisoned else hex_pattern(ZERO)

    def derive_poisoned(self, row: list[Real | None], case: dict) -> dict:
        assert case.get("centroid", 0) == 0, "sums that are not finite tie"
        segments = (
            [(width, size) for width, size in self.segments(case["channel_bits"]) if width]
            if "channel_bits" in case
            else [(case["bits"], case["group_size"])] * (len(row) // case["group_size"])
        )
        number = self.quiet_nan(case["scale_type"])
        scales = [number] * self.scale_count(len(segments), case)
        zeros = scales if case["coder"] == "affine" else []
        codes = self.poisoned_codes(row, case)
        begins = [0, *itertools.accumulate(size for _, size in segments)]
        parts = [(width, codes[begin : begin + size]) for (width, size), begin in zip(segments, begins)]
        dropped = len(row) - begins[-1]
        return {
            **self.results(parts, scales, zeros, dropped, case),
            "decoded_bits": [f"{QUIET_NAN['fp32']:08x}"] * begins[-1] + [self.decoded_without_bits(True)] * dropped,
        }

    # Clip

    def clip_index(self, size: int, ratio: float) -> int:
        product = rounded(Real.of(Fraction(ratio) * size), BINARY64)
        return min(math.floor(product.exact), size - 1)

    def clip(self, row: list[Real], group_size: int, ratio: float) -> list[Real]:
        if ratio == 1:
            return row
        return self.clip_at_quantile(row, ratio)

    def clip_at_quantile(self, row: list[Real], ratio: float) -> list[Real]:
        threshold = sorted(map(abs, row))[self.clip_index(len(row), ratio)]
        return [self.smaller(self.larger(x, -threshold), threshold) for x in row]

    @staticmethod
    def smaller(a: Real, b: Real) -> Real:
        return b if b < a else a

    @staticmethod
    def larger(a: Real, b: Real) -> Real:
        return b if a < b else a

    # (a) Affine codes

    def affine_scale(self, x: list[Real], n: Real) -> Real:
        span = subtract(max(x), min(x))
        span = ZERO if span.is_zero else span
        if span.is_infinite:
            span = Real(False, BINARY32.largest)
        return divide(span, n)

    def scale_for_codes(self, unrounded: Real, stored: Real) -> Real:
        """The scale that codes are derived from: the scale as stored."""
        return stored

    def stored_minimum(self, x: list[Real], scale_type: str) -> Real:
        minimum = self.to_scale_type(min(x), scale_type)
        return ZERO if minimum.is_zero else minimum

    def clamp(self, value: Real, top: int) -> int:
        if value < ZERO:
            return 0
        return top if not value < Real.of(top) else int(value.exact)

    def affine(self, x: list[Real], bits: int, zero: str, scale_type: str) -> Group:
        top = 2**bits - 1
        unrounded = self.affine_scale(x, Real.of(top))
        scale = self.to_scale_type(unrounded, scale_type)
        if scale.is_zero:
            minimum = self.stored_minimum(x, scale_type) if zero == "float" else ZERO
            return Group([0] * len(x), scale, minimum, [minimum] * len(x))
        divisor = self.scale_for_codes(unrounded, scale)
        return (self.float_zero if zero == "float" else self.integer_zero)(x, top, scale, divisor, scale_type)

    def float_zero(self, x, top, scale, divisor, scale_type) -> Group:
        minimum = self.stored_minimum(x, scale_type)
        codes = [self.clamp(floor(add(self.divide(subtract(v, minimum), divisor), HALF)), top) for v in x]
        return Group(codes, scale, minimum, [self.multiply_add(Real.of(c), scale, minimum) for c in codes])

    def integer_zero(self, x, top, scale, divisor, scale_type) -> Group:
        zero = self.to_scale_type(floor(add(self.divide(-min(x), divisor), HALF)), scale_type)
        codes = [self.clamp(add(floor(add(self.divide(v, divisor), HALF)), zero), top) for v in x]
        return Group(codes, scale, zero, [multiply(subtract(Real.of(c), zero), scale) for c in codes])

    # (b) Symmetric codes

    def symmetric_code(self, x: Real, scale: Real, bits: int) -> int:
        return self.clamp(add(floor(self.divide(x, scale)), Real.of(2 ** (bits - 1))), 2**bits - 1)

    def symmetric(self, x: list[Real], bits: int, rule: str, scale_type: str) -> Group:
        unrounded = self.first_step(x, bits, rule)
        step = self.to_scale_type(unrounded, scale_type)
        if step.is_zero:  # also when E is 0
            codes, scale = [2 ** (bits - 1)] * len(x), step
        else:
            divisor = self.scale_for_codes(unrounded, step)
            codes = [self.symmetric_code(v, divisor, bits) for v in x]
            scale = step if rule == "absmax" else self.refit(x, codes, bits, rule, scale_type)
        levels = [self.level(c, bits) for c in codes]
        return Group(codes, scale, None, [multiply(scale, multiply(level, HALF)) for level in levels])

    def level(self, code: int, bits: int) -> Real:
        return Real.of(2 * code - 2**bits + 1)

    def energy(self, x: list[Real]) -> Real:
        return self.tree([multiply(v, v) for v in x])

    def first_step(self, x: list[Real], bits: int, rule: str) -> Real:
        """The scale of absmax, or the first d of the two refitted rules, before rounding R."""
        if rule == "absmax":
            return divide(multiply(Real.of(2), max(map(abs, x))), Real.of(2**bits - 1))
        mean_square = divide(self.energy(x), Real.of(len(x)))
        return multiply(STEPS[bits], square_root(mean_square))

    def refit(self, x: list[Real], codes: list[int], bits: int, rule: str, scale_type: str) -> Real:
        levels = [self.level(c, bits) for c in codes]
        norm = rounded(Real.of(sum(int(level.exact) ** 2 for level in levels)))
        if rule == "least_squares":
            product = self.tree([multiply(v, level) for v, level in zip(x, levels)])
            return self.to_scale_type(divide(multiply(Real.of(2), product), norm), scale_type)
        ratio = divide(multiply(Real.of(4), self.energy(x)), norm)
        return self.to_scale_type(square_root(ratio), scale_type)

    # (c) Codebook codes, and steps that trellis codes share with them

    def normalized(self, x: list[Real], bits: int, rule: str, scale_type: str, encode, values_of) -> Group:
        """A group of a codebook or a trellis: `encode` gives the codes of y, `values_of` gives the v of codes."""
        unrounded = square_root(divide(self.energy(x), Real.of(len(x))))
        d = self.to_scale_type(unrounded, scale_type)
        if d.is_zero:  # also when E is 0
            codes = [2 ** (bits - 1)] * len(x)
            return Group(codes, d, None, [multiply(d, v) for v in values_of(codes)])
        divisor = self.scale_for_codes(unrounded, d)
        codes = encode([self.divide(v, divisor) for v in x])
        values = values_of(codes)
        scale = self.scale_of_values(x, values, d, rule, scale_type)
        return Group(codes, scale, None, [multiply(scale, v) for v in values])

    def scale_of_values(self, x: list[Real], values: list[Real], d: Real, rule: str, scale_type: str) -> Real:
        norm = self.energy(values)
        if rule == "rms" or norm.is_zero:
            return d
        if rule == "least_squares":
            try:
                product = self.tree([multiply(a, v) for a, v in zip(x, values)])
            except NotANumberError:
                return d
            return self.to_scale_type(divide(product, norm), scale_type)
        assert rule == "norm"
        return self.to_scale_type(square_root(divide(self.energy(x), norm)), scale_type)

    def threshold(self, lower: Real, upper: Real) -> Real:
        return multiply(add(lower, upper), HALF)

    def nearest_entry(self, y: Real, thresholds: list[Real]) -> int:
        return sum(not y < t for t in thresholds)

    def codebook(self, x: list[Real], bits: int, rule: str, scale_type: str, entries: list[Real]) -> Group:
        return self.normalized(x, bits, rule, scale_type, *self.codebook_coder(bits, entries))

    def codebook_coder(self, bits: int, entries: list[Real]) -> tuple:
        """(codes of y, values of codes), two functions"""
        assert len(entries) == 2**bits and all(a < b for a, b in itertools.pairwise(entries)), "strictly ascending"
        thresholds = [self.threshold(a, b) for a, b in itertools.pairwise(entries)]
        return (
            lambda y: [self.nearest_entry(v, thresholds) for v in y],
            lambda codes: [entries[c] for c in codes],
        )

    # (d) Trellis codes. A window is the integer c[j] + c[j-1] 2^b + ..., so that its lowest bits belong to theta[0].

    def trellis_value(self, window: tuple[int, ...], trellis: Trellis) -> Real:
        """v of a channel. `window` is the channel's code and the codes before, newest first."""
        total = None
        for k, code in enumerate(window):
            for i in range(trellis.bits):
                half = multiply(trellis.theta[k * trellis.bits + i], HALF)
                term = half if code >> i & 1 else -half
                total = term if total is None else add(total, term)
        return total

    def trellis_values(self, codes: list[int], trellis: Trellis) -> list[Real]:
        """The group is tail-biting: indices below 0 count from the end of the group, as Python's do."""
        windows = [tuple(codes[j - k] for k in range(trellis.memory + 1)) for j in range(len(codes))]
        return [self.trellis_value(window, trellis) for window in windows]

    def trellis_table(self, trellis: Trellis) -> array:
        """trellis_value of all windows: adds the term of each code to the sums of all terms before."""
        halves = [multiply(theta, HALF) for theta in trellis.theta]
        sums = [-halves[0], halves[0]]
        for half in halves[1:]:
            sums = [add(total, term) for term in (-half, half) for total in sums]
        return array("f", [float(total.exact) for total in sums])

    def better(self, cost: float, best: float) -> bool:
        """Whether `cost` replaces `best`. On a tie `best` stays, because paths and states are visited in the order of
        packing.md."""
        return cost < best

    def survivors(self, reached, trellis: Trellis) -> tuple:
        """(cost, dropped code) of each state, from the costs of the paths to all windows. The state after a window is
        the m newest codes of the window, so the windows that lead to one state differ only in the dropped code."""
        states = 2 ** (trellis.bits * trellis.memory)
        costs, drops = reached[:states], [0] * states
        for oldest in range(1, 2**trellis.bits):
            for state, cost in enumerate(reached[oldest * states : (oldest + 1) * states]):
                if self.better(cost, costs[state]):
                    costs[state], drops[state] = cost, oldest
        return costs, drops

    def path(self, end: int, run: Search, trellis: Trellis) -> list[int]:
        """The states after 0, 1, ... steps of the path that ends in `end`."""
        states = [end]
        for drops in reversed(run.dropped):
            state = states[-1]
            states.append((state >> trellis.bits) + (drops[state] << trellis.bits * (trellis.memory - 1)))
        return states[::-1]

    def cheapest(self, costs) -> int:
        best = 0
        for state, cost in enumerate(costs):
            if state and self.better(cost, costs[best]):
                best = state
        return best

    def viterbi(self, y: list[Real], trellis: Trellis) -> list[int]:
        return {"integer": self.integer_search, "binary32": self.binary32_search}[trellis.search](y, trellis)

    # Search `integer`

    def cost_unit(self, bits: int) -> int:
        """U"""
        return 20 * 4 ** (min(bits, 4) - 1)

    def rint(self, value: Fraction) -> int:
        nearest = nearest_even(abs(value.numerator), value.denominator)
        return -nearest if value < 0 else nearest

    def channel_bound(self) -> int:
        return 1152

    def integer_channel(self, y: Real) -> int:
        """t"""
        bound = self.channel_bound()
        if y.is_infinite:
            return -bound if y.negative else bound
        return clamped(self.rint(y.exact * 256), bound)

    def theta_bound(self) -> Fraction:
        return Fraction(5, 2)

    def integer_theta(self, theta: Real, bits: int) -> int:
        """a"""
        return self.rint(clamped(theta.exact, self.theta_bound()) * 64 * self.cost_unit(bits))

    def nearest_cost(self, numerator: int, denominator: int) -> int:
        """The quotient to the nearest integer, upwards on a tie: a floor, of negative numbers, too"""
        return (numerator + denominator // 2) // denominator

    def signed_sum(self, terms: list[int], code: int) -> int:
        """sum over i of (bit i of code ? +terms[i] : -terms[i])"""
        return sum(term if code >> i & 1 else -term for i, term in enumerate(terms))

    def codes_of(self, window: int, trellis: Trellis) -> list[int]:
        """The codes of a window, newest first"""
        return [window >> trellis.bits * k & 2**trellis.bits - 1 for k in range(trellis.memory + 1)]

    def costs_without_y(self, a: list[int], trellis: Trellis) -> list[int]:
        """F[0][e] + sum over k of F[k][e, d[k]] of every window"""
        bits, memory, codes = trellis.bits, trellis.memory, range(2**trellis.bits)
        unit = 16384 * self.cost_unit(bits)
        sums = [[self.signed_sum(a[k * bits : (k + 1) * bits], e) for e in codes] for k in range(memory + 1)]  # A
        own = [self.nearest_cost(sum(sums[k][e] ** 2 for k in range(memory + 1)), unit) for e in codes]
        pairs = [
            [
                [
                    self.nearest_cost(2 * sum(sums[l][e] * sums[l + k][d] for l in range(memory - k + 1)), unit)
                    for d in codes
                ]
                for e in codes
            ]
            for k in range(1, memory + 1)
        ]
        windows = (self.codes_of(window, trellis) for window in range(2 ** (bits * (memory + 1))))
        return [own[e] + sum(pair[e][d] for pair, d in zip(pairs, before)) for e, *before in windows]

    def gains(self, t: list[int], j: int, a: list[int], trellis: Trellis) -> list[int]:
        """X[j]"""
        return [
            self.nearest_cost(
                sum(t[(j + k) % len(t)] * a[k * trellis.bits + i] for k in range(trellis.memory + 1)), 16384
            )
            for i in range(trellis.bits)
        ]

    def step_costs(self, y: list[Real], trellis: Trellis) -> list[list[int]]:
        """For each channel what a step adds, by window"""
        a, t = [self.integer_theta(v, trellis.bits) for v in trellis.theta], [self.integer_channel(v) for v in y]
        fixed, steps = self.costs_without_y(a, trellis), []
        for j in range(len(t)):
            gains = self.gains(t, j, a, trellis)
            of_code = [self.signed_sum(gains, e) for e in range(2**trellis.bits)]
            steps.append([cost - of_code[window % len(of_code)] for window, cost in enumerate(fixed)])
        return steps

    def integer_run(self, channels: range, costs: list[int], steps: list[list[int]], trellis: Trellis) -> Search:
        dropped = []
        for j in channels:
            reached = [costs[window >> trellis.bits] + cost for window, cost in enumerate(steps[j % len(steps)])]
            costs, drops = self.survivors(reached, trellis)
            dropped.append(drops)
        return Search(costs, dropped)

    def lead(self, size: int) -> int:
        """Channels of the first run before j = 0"""
        return 40

    def has_one_run(self, size: int) -> bool:
        return size >= 96

    def first_end(self, size: int) -> int:
        """n"""
        return size if self.has_one_run(size) else 40

    def second_start(self, seam: int, trellis: Trellis) -> list[int]:
        """The costs that the second run starts from"""
        states = range(2 ** (trellis.bits * trellis.memory))
        return [0 if state == seam else 32 * self.cost_unit(trellis.bits) for state in states]

    def integer_path(self, y: list[Real], trellis: Trellis) -> list[int]:
        """The states before and after each channel on the path that gives the codes; the last one is z*."""
        steps, size = self.step_costs(y, trellis), len(y)
        lead, start = self.lead(size), [0] * 2 ** (trellis.bits * trellis.memory)
        first = self.integer_run(range(-lead, self.first_end(size)), start, steps, trellis)
        seam = self.path(self.cheapest(first.costs), first, trellis)[lead]
        if self.has_one_run(size):
            return self.path(seam, first, trellis)[lead:]
        second = self.integer_run(range(size), self.second_start(seam, trellis), steps, trellis)
        return self.path(seam, second, trellis)

    def integer_search(self, y: list[Real], trellis: Trellis) -> list[int]:
        return [state % 2**trellis.bits for state in self.integer_path(y, trellis)[1:]]

    # Search `binary32`

    def branch_costs(self, sample: float, table: array) -> array:
        """e * e of every window"""
        return binary32s(e * e for e in binary32s(sample - v for v in table))

    def path_costs(self, costs: array, branches: array, trellis: Trellis) -> array:
        """For each window: the cost of the path to the window's old state, plus the cost of the step."""
        return binary32s(costs[window >> trellis.bits] + branch for window, branch in enumerate(branches))

    def search(self, y: list[float], costs: array, table: array, trellis: Trellis) -> Search:
        """Steps over y."""
        dropped = []
        for sample in y:
            reached = self.path_costs(costs, self.branch_costs(sample, table), trellis)
            costs, drops = self.survivors(reached, trellis)
            dropped.append(drops)
        return Search(costs, dropped)

    def seam_length(self, size: int) -> int:
        return min(size, 32)

    def seam(self, y: list[float], table: array, trellis: Trellis) -> int:
        """z*"""
        length = self.seam_length(len(y))
        run = self.search(
            y[len(y) - length :] + y[:length], array("f", [0.0] * 2 ** (trellis.bits * trellis.memory)), table, trellis
        )
        return self.path(self.cheapest(run.costs), run, trellis)[length]

    def closed_path(self, y: list[float], seam: int, table: array, trellis: Trellis) -> list[int]:
        """The codes from the seam's state to itself"""
        costs = array("f", [math.inf] * 2 ** (trellis.bits * trellis.memory))
        costs[seam] = 0.0
        states = self.path(seam, self.search(y, costs, table, trellis), trellis)
        assert states[0] == seam, "the path closes"
        return [state % 2**trellis.bits for state in states[1:]]

    def binary32_search(self, y: list[Real], trellis: Trellis) -> list[int]:
        table, samples = self.trellis_table(trellis), list(map(as_float, y))
        return self.closed_path(samples, self.seam(samples, table, trellis), table, trellis)

    def trellis(self, x: list[Real], rule: str, scale_type: str, trellis: Trellis) -> Group:
        return self.normalized(x, trellis.bits, rule, scale_type, *self.trellis_coder(trellis))

    def trellis_coder(self, trellis: Trellis) -> tuple:
        """(codes of y, values of codes), two functions"""
        return (
            lambda y: self.viterbi(y, trellis),
            lambda codes: self.trellis_values(codes, trellis),
        )

    def bites_its_tail(self, size: int) -> bool:
        """False if the group is too short for the trellis; short groups of a trellis coder are symmetric."""
        return size >= 8

    # Mixed widths

    def segments(self, widths: list[int]) -> list[tuple[int, int]]:
        """(width, channels) of each run"""
        assert all(a >= b for a, b in itertools.pairwise(widths)), "widths descend"
        return [(w, len(list(run))) for w, run in itertools.groupby(widths)]

    def fallback_rule(self, rule: str) -> str:
        """Scale rule of symmetric groups in a trellis coder: of widths that have no theta, and of short groups."""
        return rule if rule == "least_squares" else "norm"

    def stored_bits(self, width: int) -> int:
        return 8 if width in (5, 6, 7) else width

    def padding(self, size: int, multiple: int) -> bytes:
        return bytes(-size % multiple)

    def mixed_bytes(self, parts: list[tuple[int, list[int]]], numbers: bytes, index: bytes, case: dict) -> bytes:
        codes = b"".join(self.pack_codes(own, self.stored_bits(width)) for width, own in parts)
        row = codes + self.padding(len(codes), SCALE_TYPES[case["scale_type"]].storage_bytes) + numbers
        row += self.padding(len(row), len(index) or 1) + index
        assert len(row) <= case["row_bytes"] and case["row_bytes"] % 4 == 0, f"{case['name']}: needs {len(row)} bytes"
        return row + bytes(case["row_bytes"] - len(row))

    # One scale a row

    def has_one_scale(self, case: dict) -> bool:
        return case.get("scale_scope") == "row"

    def scale_count(self, segments: int, case: dict) -> int:
        """Scales of a row with so many groups or segments of width 1..8"""
        return min(segments, 1) if self.has_one_scale(case) else segments

    def gain(self, width: int, case: dict) -> Real:
        gain = from_pattern(case["gains_bits"][width - 1])
        assert Fraction(1, 2**24) <= gain.exact <= 2**24, f"{case['name']}: gain of width {width}"
        return gain

    def square(self, gain: Real) -> Real:
        """q"""
        return multiply(gain, gain)

    def sum_of_segments(self, terms: list[Real]) -> Real:
        """Adds the terms of the segments, which stand widest first."""
        return functools.reduce(add, terms)

    def coded_channels(self, parts: list[tuple[int, list[Real]]], row: list[Real]) -> int:
        """n"""
        return sum(len(x) for _, x in parts)

    def first_scale(self, parts: list[tuple[int, list[Real]]], row: list[Real], case: dict) -> Real:
        """d before rounding R"""
        terms = [divide(self.energy(x), self.square(self.gain(width, case))) for width, x in parts]
        return square_root(divide(self.sum_of_segments(terms), Real.of(self.coded_channels(parts, row))))

    def unit_step(self, gain: Real, d: Real, scale_type: str) -> Real:
        """t"""
        return multiply(gain, d)

    def unit_symmetric_code(self, x: Real, t: Real, width: int) -> int:
        return self.symmetric_code(self.divide(x, t), STEPS[width], width)

    def unit_symmetric_value(self, code: int, width: int) -> Real:
        return multiply(STEPS[width], multiply(self.level(code, width), HALF))

    def unit_coder(self, width: int, size: int, t: Real, case: dict) -> tuple:
        """(codes of x, unit values of codes) of a segment, two functions"""
        if case["coder"] == "codebook":
            encode, values_of = self.codebook_coder(
                width, [from_pattern(text) for text in case["codebook"][str(width)]]
            )
        elif entry := self.trellis_of(width, size, case):
            encode, values_of = self.trellis_coder(Trellis.of(entry))
        else:
            return (
                lambda x: [self.unit_symmetric_code(v, t, width) for v in x],
                lambda codes: [self.unit_symmetric_value(c, width) for c in codes],
            )
        return lambda x: encode([self.divide(v, t) for v in x]), values_of

    def row_scale(self, parts: list, values: list[list[Real]], d: Real, case: dict) -> Real:
        """s of a row whose d is not 0. parts: (width, channels) of each segment; values: v of each segment"""
        gains = [self.gain(width, case) for width, _ in parts]
        norm = self.sum_of_segments([multiply(self.square(g), self.energy(v)) for g, v in zip(gains, values)])
        if case["scale_rule"] == "rms" or norm.is_zero:
            return d
        if case["scale_rule"] == "least_squares":
            try:
                product = self.sum_of_segments(
                    [
                        self.tree([multiply(a, multiply(g, b)) for a, b in zip(x, v)])
                        for g, (_, x), v in zip(gains, parts, values)
                    ]
                )
            except NotANumberError:
                return d
            return self.to_scale_type(divide(product, norm), case["scale_type"])
        assert case["scale_rule"] == "norm"
        energy = self.sum_of_segments([self.energy(x) for _, x in parts])
        return self.to_scale_type(square_root(divide(energy, norm)), case["scale_type"])

    def decoded(self, scale: Real, gain: Real, value: Real) -> Real:
        """x_hat"""
        return multiply(scale, multiply(gain, value))

    def encode_one_scale(self, row: list[Real], case: dict) -> list[tuple[int, Group]]:
        """Width and group of each segment of width 1..8; all groups have the scale of the row."""
        parts = [(width, x) for width, x in self.cut(row, case) if width]
        if not parts:
            return []
        unrounded = self.first_scale(parts, row, case)
        d = self.to_scale_type(unrounded, case["scale_type"])
        codes, values = [], []
        for width, x in parts:
            t = self.unit_step(self.gain(width, case), self.scale_for_codes(unrounded, d), case["scale_type"])
            encode, values_of = self.unit_coder(width, len(x), t, case)
            codes.append([2 ** (width - 1)] * len(x) if d.is_zero or t.is_zero else encode(x))
            values.append(values_of(codes[-1]))
        scale = d if d.is_zero else self.row_scale(parts, values, d, case)
        return [
            (width, Group(own, scale, None, [self.decoded(scale, self.gain(width, case), v) for v in unit]))
            for (width, _), own, unit in zip(parts, codes, values)
        ]

    # Centroids

    def distance(self, row: list[Real], centroid: list[Real]) -> Real:
        return self.energy([subtract(x, m) for x, m in zip(row, centroid)])

    def nearest_centroid(self, row: list[Real | None], centroids: list[list[Real]]) -> int:
        if not all(map(is_finite, row)):  # all sums are NaN, or all are infinite
            return 0
        distances = [self.distance(row, centroid) for centroid in centroids]
        return distances.index(min(distances))  # the first of equal distances

    def index_bytes(self, case: dict) -> bytes:
        if "centroid" not in case:
            return b""
        return case["centroid"].to_bytes(1 if len(case["centroids_bits"]) <= 256 else 2, "little")

    # Rows and bytes

    def encode_group(self, x: list[Real], bits: int, case: dict) -> Group:
        """A group of a symmetric, codebook or trellis coder."""
        coder, rule, scale_type = case["coder"], case["scale_rule"], case["scale_type"]
        if coder == "codebook":
            entries = [from_pattern(text) for text in case["codebook"][str(bits)]]
            return self.codebook(x, bits, rule, scale_type, entries)
        if coder == "trellis":
            if entry := self.trellis_of(bits, len(x), case):
                return self.trellis(x, rule, scale_type, Trellis.of(entry))
            rule = self.fallback_rule(rule)
        return self.symmetric(x, bits, rule, scale_type)

    def trellis_of(self, bits: int, size: int, case: dict) -> dict | None:
        """The trellis of a group; None if the group is symmetric."""
        entry = next((t for t in case.get("trellis", []) if t["bits"] == bits), None)
        return entry if entry and self.bites_its_tail(size) else None

    def cut(self, row: list[Real], case: dict) -> list[tuple[int, list[Real]]]:
        """Width and channels of each segment"""
        begins = [0, *itertools.accumulate(size for _, size in self.segments(case["channel_bits"]))]
        assert begins[-1] == len(row)
        return [(case["channel_bits"][a], row[a:b]) for a, b in itertools.pairwise(begins)]

    def encode_segments(self, row: list[Real], case: dict) -> list[tuple[int, Group]]:
        """Width and group of each segment of width 1..8"""
        return [(width, self.encode_group(x, width, case)) for width, x in self.cut(row, case) if width]

    def encode_groups(self, row: list[Real], case: dict) -> list[Group]:
        size = case["group_size"]
        if case["coder"] == "affine":
            row = self.clip(row, size, case["clip_ratio"])
        groups = [row[i : i + size] for i in range(0, len(row), size)]
        if case["coder"] == "affine":
            return [self.affine(g, case["bits"], case["zero"], case["scale_type"]) for g in groups]
        return [self.encode_group(g, case["bits"], case) for g in groups]

    def pack_codes(self, codes: list[int], bits: int) -> bytes:
        stream = sum(code << (j * bits) for j, code in enumerate(codes))
        return stream.to_bytes((len(codes) * bits + 7) // 8, "little")

    def derive(self, case: dict) -> dict:
        """The expected results of one case, with the fields of vectors.md."""
        row = [channel_of(text) for text in case["x"]]
        texts, bits = zip(*map(given_channel, case["x"]))
        given = {**case, "x": list(texts), "x_bits": list(bits)}
        if "centroids_bits" in case:
            centroids = [[from_pattern(text) for text in centroid] for centroid in case["centroids_bits"]]
            given["centroid"] = self.nearest_centroid(row, centroids)
            row = [None if x is None else subtract(x, m) for x, m in zip(row, centroids[given["centroid"]])]
        if case["coder"] == "exact":
            return given | self.derive_exact(row)
        return given | (self.derive_poisoned if self.is_poisoned(row, given) else self.derive_coded)(row, given)

    def exact_bits(self, x: Real | None) -> int:
        return pattern(self.to_scale_type(x, "bf16"), SCALE_TYPES["bf16"]) if is_finite(x) else QUIET_NAN["bf16"]

    def derive_exact(self, row: list[Real | None]) -> dict:
        stored = [self.exact_bits(x) for x in row]
        return {
            "codes": [],
            "scales": [],
            "zeros": [],
            "bytes": b"".join(struct.pack("<H", x) for x in stored).hex(),
            "decoded_bits": [f"{x << 16:08x}" for x in stored],
        }

    def results(self, parts: list[tuple[int, list[int]]], scales: list, zeros: list, dropped: int, case: dict) -> dict:
        """The fields of a row but for what it decodes to.

        parts: width and codes of each group or segment; scales, zeros: patterns; dropped: channels of width 0, which
        all stand at the end
        """
        codes, size = [c for _, own in parts for c in own], SCALE_TYPES[case["scale_type"]].storage_bytes
        numbers, index = b"".join(n.to_bytes(size, "little") for n in scales + zeros), self.index_bytes(case)
        packed = (
            self.mixed_bytes(parts, numbers, index, case)
            if "channel_bits" in case
            else self.pack_codes(codes, case["bits"]) + numbers + index
        )
        return {
            "codes": codes + [0] * dropped,
            "scales": [f"{n:0{2 * size}x}" for n in scales],
            "zeros": [f"{n:0{2 * size}x}" for n in zeros],
            "bytes": packed.hex(),
        }

    def derive_coded(self, row: list[Real], case: dict) -> dict:
        if "channel_bits" not in case:
            coded = [(case["bits"], group) for group in self.encode_groups(row, case)]
        else:
            coded = (self.encode_one_scale if self.has_one_scale(case) else self.encode_segments)(row, case)
        groups = [group for _, group in coded]
        parts = [(width, group.codes) for width, group in coded]
        target = SCALE_TYPES[case["scale_type"]]
        scales = [pattern(g.scale, target) for g in groups[: self.scale_count(len(groups), case)]]
        zeros = [pattern(g.zero, target) for g in groups if g.zero is not None]
        decoded = [hex_pattern(x) for g in groups for x in g.decoded]
        dropped = len(row) - len(decoded)
        return {
            **self.results(parts, scales, zeros, dropped, case),
            "decoded_bits": decoded + [self.decoded_without_bits(False)] * dropped,
        }


def with_patterns(case: dict) -> dict:
    """Replaces the decimals of codebooks, thetas, centroids and gains by the hex patterns of vectors.md."""

    def patterns(texts):
        return [hex_pattern(from_decimal(text)) for text in texts]

    result = {}
    for key, value in case.items():
        if key == "codebook":
            result[key] = {str(bits): patterns(entries) for bits, entries in value.items()}
        elif key == "trellis":
            result[key] = [
                {name: entry for name, entry in t.items() if name != "theta"} | {"theta_bits": patterns(t["theta"])}
                for t in value
            ]
        elif key == "centroids":
            result["centroids_bits"] = [patterns(centroid) for centroid in value]
        elif key == "gains":
            result["gains_bits"] = patterns(value)
        else:
            result[key] = value
    return result
