"""The numpy and PyTorch codecs against formats/vectors.json, the vectors against misreadings, and properties."""

import array
import dataclasses
import functools
import json
import math
import re
from fractions import Fraction

import derive_vectors
import exact_numbers as exact
import numpy as np
import packing_spec
import pytest
from code_samples import spoiled

from kvq import packing
from kvq.scheme import (
    MIXABLE_CODERS,
    ONE_SCALE_RULES,
    SCALE_BYTES,
    SYMMETRIC_RULES,
    TABLE_RULES,
    AnyScheme,
    MixedScheme,
    Scheme,
    Tables,
    Trellis,
)

VECTORS = json.loads(derive_vectors.VECTORS.read_text())["vectors"]
# To derive the trellis of eight bits takes longer than to derive all others.
QUICK_FIRST = sorted(VECTORS, key=lambda vector: vector["coder"] == "trellis" and vector.get("bits") == 8)
SCHEME_FIELDS = ("coder", "bits", "group_size", "scale_type", "scale_rule", "zero", "clip_ratio")
ODD_DIMS = (1, 2, 3, 7, 12, 13, 96, 128)


def patterns(texts: list[str]) -> np.ndarray:
    """float32 of binary32 patterns in hex"""
    return np.array([int(text, 16) for text in texts], np.uint32).view(np.float32)


def tables_of(vector: dict) -> Tables:
    codebooks = {int(bits): tuple(patterns(entries).tolist()) for bits, entries in vector.get("codebook", {}).items()}
    trellises = {
        t["bits"]: Trellis(t["memory"], tuple(patterns(t["theta_bits"]).tolist()), t.get("search", "binary32"))
        for t in vector.get("trellis", [])
    }
    return Tables(codebooks, trellises)


def scheme_of(vector: dict) -> AnyScheme:
    tables, count = tables_of(vector), len(vector.get("centroids_bits", []))
    if "channel_bits" in vector:
        gains = tuple(patterns(vector["gains_bits"]).tolist()) if "scale_scope" in vector else None
        widths = tuple(vector["channel_bits"])
        scheme = MixedScheme.make(
            vector["coder"], widths, vector["scale_type"], vector["scale_rule"], tables, count, gains
        )
        return dataclasses.replace(scheme, size=vector["row_bytes"])
    if vector["coder"] in ("codebook", "trellis"):
        fields = [vector[name] for name in ("coder", "bits", "group_size", "scale_type", "scale_rule")]
        return dataclasses.replace(tables.scheme(*fields), centroids=count)
    return Scheme(**{name: vector[name] for name in SCHEME_FIELDS if name in vector}, centroids=count)


@packing.quiet
def coded_row_of(vector: dict, nearest) -> tuple[np.ndarray, np.ndarray | None]:
    """(the row that the coder sees [1, D], the index of its centroid [1])"""
    x = patterns(vector["x_bits"])[None]
    if "centroids_bits" not in vector:
        return x, None
    centroids = np.stack([patterns(centroid) for centroid in vector["centroids_bits"]])
    index = nearest(x[None], centroids[None])
    assert index.tolist() == [vector["centroid"]]
    return x - centroids[index], index


def inputs_of(vector: dict) -> dict:
    """The vector as a case of vector_cases.py."""
    results = ("x_bits", "centroid", "codes", "scales", "zeros", "bytes", "decoded_bits")
    return {key: value for key, value in vector.items() if key not in results}


def float_bits(x: np.ndarray) -> list[str]:
    return [f"{bits:08x}" for bits in x.ravel().view(np.uint32)]


def all_schemes(group_size: int, bits=range(1, 9)) -> list[Scheme]:
    return [
        scheme
        for b in bits
        for scale_type in SCALE_BYTES
        for scheme in (
            *(
                Scheme("affine", b, group_size, scale_type, "minmax", zero, ratio)
                for zero in ("float", "integer")
                for ratio in (1.0, 0.92)
            ),
            *(Scheme("symmetric", b, group_size, scale_type, rule) for rule in SYMMETRIC_RULES),
        )
    ]


def rows(seed: int, count: int, dim: int) -> np.ndarray:
    """Rows of different sizes, some with outliers, one constant and one zero."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, dim)) * np.exp(rng.uniform(-3, 3, (count, 1)))
    x *= np.where(rng.random((count, dim)) < 0.05, 12, 1)
    x[0], x[count // 2] = 0, 1.5
    return x.astype(np.float32)


# Vectors


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["name"].replace(" ", "_"))
def test_numpy_gives_every_number_of_the_vector(vector):
    scheme = scheme_of(vector)
    x, index = coded_row_of(vector, packing.nearest_centroids)
    coded = dataclasses.replace(packing.encode(x, scheme), index=index)
    packed = packing.pack(coded, scheme)
    if scheme.coder != "exact":
        assert coded.codes[0].tolist() == vector["codes"]
    assert packed.tobytes().hex() == vector["bytes"]
    assert packed.shape == (1, scheme.row_bytes(x.shape[1]))
    back = packing.unpack(packed, scheme, x.shape[1])
    assert float_bits(packing.decode(back, scheme)) == vector["decoded_bits"]
    assert (None if back.index is None else back.index[0]) == vector.get("centroid")


@pytest.mark.parametrize(
    "vector", [v for v in VECTORS if v["coder"] != "exact"], ids=lambda v: v["name"].replace(" ", "_")
)
def test_torch_gives_every_number_of_the_vector(vector):
    torch = pytest.importorskip("torch")
    from kvq import torch_codec

    scheme = scheme_of(vector)
    x, index = coded_row_of(
        vector, lambda *arrays: torch_codec.nearest_centroids(*map(torch.from_numpy, arrays)).numpy()
    )
    codes, numbers = torch_codec.encode(torch.from_numpy(x), scheme)
    assert (
        packing.pack(packing.CodedRows(codes.numpy(), numbers.numpy(), index), scheme).tobytes().hex()
        == vector["bytes"]
    )
    assert float_bits(torch_codec.decode(codes, numbers, scheme).numpy()) == vector["decoded_bits"]


def test_vectors_file_is_what_the_text_gives():
    assert derive_vectors.vectors_text() == derive_vectors.VECTORS.read_text()


def test_vectors_cover_what_packing_md_defines():
    seen = {tuple(v.get(name) for name in ("scale_rule", "zero", "bits")) for v in VECTORS}
    rules = [("minmax", "float"), ("minmax", "integer"), *((rule, None) for rule in SYMMETRIC_RULES)]
    assert seen >= {(rule, zero, bits) for rule, zero in rules for bits in range(1, 9)}
    assert {(v["scale_rule"], v["scale_type"]) for v in VECTORS if "scale_type" in v} >= {
        (rule, scale_type) for rule in ("minmax", *SYMMETRIC_RULES) for scale_type in SCALE_BYTES
    }
    assert seen >= {(rule, None, bits) for rule in TABLE_RULES for bits in (1, 2, 3)}
    for coder in ("codebook", "trellis"):
        assert {v["scale_rule"] for v in VECTORS if v["coder"] == coder} == set(TABLE_RULES)
    assert {v["coder"] for v in VECTORS if "channel_bits" in v} == {"symmetric", "codebook", "trellis"}
    one_scale = {(v["coder"], v["scale_rule"]) for v in VECTORS if v.get("scale_scope") == "row"}
    assert one_scale == {(c, r) for c in MIXABLE_CODERS for r in ONE_SCALE_RULES} - {("symmetric", "rms")}
    for coder in MIXABLE_CODERS:
        found = {v["scale_type"] for v in VECTORS if v.get("scale_scope") == "row" and v["coder"] == coder}
        assert found == set(SCALE_BYTES), coder
    assert any("centroid" in v for v in VECTORS)
    assert len({v["name"] for v in VECTORS}) == len(VECTORS)


def test_steps_are_the_table_of_packing_md():
    text = (derive_vectors.VECTORS.parent / "packing.md").read_text()
    table = [float(cell) for cell in re.search(r"\| step\[b\] \|(.*)\|", text)[1].split("|")]
    assert table == list(packing.GAUSSIAN_STEP[1:])
    assert [exact.from_decimal(str(step)) for step in table] == list(packing_spec.STEPS.values())


# Misreadings: each changes one step of packing.md, and at least one vector must detect it.


def fused_energy(self, x):
    total = exact.ZERO
    for v in x:
        total = exact.rounded(exact.Real.of(v.exact**2 + total.exact)) if not total.is_infinite else total
    return total


def left_to_right(self, values):
    total = values[0]
    for value in values[1:]:
        total = exact.add(total, value)
    return total


def first_and_second_half(self, values):
    padded = values + [exact.ZERO] * ((1 << (len(values) - 1).bit_length()) - len(values))
    while len(padded) > 1:
        half = len(padded) // 2
        padded = [exact.add(padded[i], padded[i + half]) for i in range(half)]
    return padded[0]


def split_without_padding(self, values):
    half = (len(values) + 1) // 2
    if len(values) == 1:
        return values[0]
    return exact.add(split_without_padding(self, values[:half]), split_without_padding(self, values[half:]))


def flush_scale(self, value, scale_type):
    target = exact.SCALE_TYPES[scale_type]
    result = packing_spec.Spec.to_scale_type(packing_spec.Spec(), value, scale_type)
    return exact.ZERO if result.magnitude < Fraction(2) ** target.min_exponent else result


def scale_to_infinity(self, value, scale_type):
    """Scales of an implementation that converts without saturating."""
    result = exact.rounded(value, exact.SCALE_TYPES[scale_type])
    if result.is_infinite:
        raise OverflowError("the scale type has no such number")
    return result


def clip_each_group(self, row, group_size, ratio):
    if ratio == 1:
        return row
    return [x for i in range(0, len(row), group_size) for x in self.clip_at_quantile(row[i : i + group_size], ratio)]


def reciprocal(self, a, b):
    return exact.multiply(a, exact.divide(exact.Real.of(1), b))


def range_of_other_zeros(self, x, n):
    """The maximum is the last of equal channels, and the sign of zero is ignored."""
    return exact.divide(exact.subtract(max(reversed(x)), min(x)), n)


def fused_decode(self, a, b, c):
    product = a.exact * b.exact + c.exact
    return exact.rounded(exact.Real.of(product)) if product else exact.add(exact.multiply(a, b), c)


def refit_is_coded_again(self, x, bits, rule, scale_type):
    group = packing_spec.Spec.symmetric(self, x, bits, rule, scale_type)
    if rule == "absmax" or group.scale.is_zero:
        return group
    codes = [self.symmetric_code(v, group.scale, bits) for v in x]
    return packing_spec.Group(codes, group.scale, None, group.decoded)


def zeros_before_the_group(self, codes, trellis):
    padded = [0] * trellis.memory + codes
    return [self.trellis_value(tuple(padded[j : j + trellis.memory + 1][::-1]), trellis) for j in range(len(codes))]


def nothing_before_the_group(self, codes, trellis):
    return [
        self.trellis_value(tuple(codes[max(j - trellis.memory, 0) : j + 1][::-1]), trellis) for j in range(len(codes))
    ]


def free_costs(trellis):
    """+0 in every state"""
    return array.array("f", bytes(4 * 2 ** (trellis.bits * trellis.memory)))


def seam_of_one_round(self, y, table, trellis):
    """The state at the end of the cheapest path after one round through the group."""
    return self.cheapest(self.search(y, free_costs(trellis), table, trellis).costs)


def seam_at_the_end(self, y, table, trellis):
    """The state after 2 L steps."""
    length = self.seam_length(len(y))
    return self.cheapest(self.search(y[len(y) - length :] + y[:length], free_costs(trellis), table, trellis).costs)


def seam_of_the_last_channels(self, y, table, trellis):
    """Uses only the last L channels and ignores the channels that follow the seam."""
    return self.cheapest(self.search(y[-self.seam_length(len(y)) :], free_costs(trellis), table, trellis).costs)


def path_from_anywhere(self, y, seam, table, trellis):
    run = self.search(y, free_costs(trellis), table, trellis)
    return [state % 2**trellis.bits for state in self.path(seam, run, trellis)[1:]]


def path_to_anywhere(self, y, seam, table, trellis):
    costs = array.array("f", [math.inf] * 2 ** (trellis.bits * trellis.memory))
    costs[seam] = 0.0
    run = self.search(y, costs, table, trellis)
    return [state % 2**trellis.bits for state in self.path(self.cheapest(run.costs), run, trellis)[1:]]


def last_cheapest(self, costs):
    return max(state for state, cost in enumerate(costs) if cost == min(costs))


def nearest_values(self, y, trellis):
    """Chooses each channel's code alone, after the codes chosen before."""
    codes = []
    for sample in y:
        before = tuple(codes[::-1][: trellis.memory])
        codes.append(
            min(
                range(2**trellis.bits),
                key=lambda c: abs(exact.subtract(sample, self.trellis_value((c, *before), trellis))).exact,
            )
        )
    return codes


def last_nearest_centroid(self, row, centroids):
    if not all(map(exact.is_finite, row)):
        return 0
    distances = [self.distance(row, centroid) for centroid in centroids]
    return max(c for c, distance in enumerate(distances) if not min(distances) < distance)


def clip_bounds_infinity(self, row, case):
    """Only NaN poisons a row that is clipped."""
    if case.get("clip_ratio", 1) < 1:
        return None in row
    return packing_spec.Spec.is_poisoned(self, row, case)


def only_stored_channels(self, row, case):
    return packing_spec.Spec.is_poisoned(
        self, [x for x, width in zip(row, case.get("channel_bits", row)) if width != 0], case
    )


def poisons_its_group(self, row, case):
    """Groups whose own channels are finite keep their scales."""
    poisoned = packing_spec.Spec.derive_poisoned(self, row, case)
    if "channel_bits" in case:
        return poisoned
    finite = self.derive_coded([x if exact.is_finite(x) else exact.ZERO for x in row], case)
    size = case["group_size"]
    groups = [row[i : i + size] for i in range(0, len(row), size)]
    scales = [
        own if all(map(exact.is_finite, g)) else nan
        for g, own, nan in zip(groups, finite["scales"], poisoned["scales"])
    ]
    return {**poisoned, "scales": scales}


def infinity_saturates(self, x):
    return (
        exact.QUIET_NAN["bf16"]
        if x is None
        else exact.pattern(self.to_scale_type(x, "bf16"), exact.SCALE_TYPES["bf16"])
    )


def rms_of_the_row(self, parts, row, case):
    """Ignores the gains."""
    energy = self.sum_of_segments([self.energy(x) for _, x in parts])
    return exact.square_root(exact.divide(energy, exact.Real.of(self.coded_channels(parts, row))))


def gains_before_squares(self, parts, row, case):
    """Squares x / G, and divides no squares."""
    terms = [self.energy([exact.divide(v, self.gain(width, case)) for v in x]) for width, x in parts]
    return exact.square_root(exact.divide(self.sum_of_segments(terms), exact.Real.of(self.coded_channels(parts, row))))


def divided_twice(self, parts, row, case):
    """Divides by G two times, not by the rounded square."""
    terms = [
        exact.divide(exact.divide(self.energy(x), self.gain(width, case)), self.gain(width, case)) for width, x in parts
    ]
    return exact.square_root(exact.divide(self.sum_of_segments(terms), exact.Real.of(self.coded_channels(parts, row))))


def rounded_unit_step(self, gain, d, scale_type):
    return self.to_scale_type(exact.multiply(gain, d), scale_type)


def t_in_two_divisions(self, x, t, width):
    """(x / G) / d instead of x / (G d), for the gain 1.3 of the vector that is made for it."""
    gain = exact.from_decimal("1.3")
    d = self.to_scale_type(exact.divide(t, gain), "bf16")
    return self.symmetric_code(exact.divide(exact.divide(x, gain), d), packing_spec.STEPS[width], width)


def one_division(self, x, t, width):
    return self.symmetric_code(x, exact.multiply(packing_spec.STEPS[width], t), width)


def refit_of_one_segment(self, parts, values, d, case):
    """The scale of the widest segment alone."""
    return packing_spec.Spec.row_scale(self, parts[:1], values[:1], d, case)


def refit_without_gains(self, parts, values, d, case):
    return packing_spec.Spec.row_scale(self, parts, values, d, case | {"gains_bits": ["3f800000"] * 8})


def zero_without_values(self, parts, values, d, case):
    scale = packing_spec.Spec.row_scale(self, parts, values, d, case)
    return exact.ZERO if all(v.is_zero for own in values for v in own) else scale


def negative_scale_is_refused(self, parts, values, d, case):
    scale = packing_spec.Spec.row_scale(self, parts, values, d, case)
    return d if scale.negative else scale


MISREADINGS = {
    "sums from left to right": {"tree": left_to_right},
    "sums of halves": {"tree": first_and_second_half},
    "sums split without padding": {"tree": split_without_padding},
    "fused sum of squares": {"energy": fused_energy},
    "reciprocal": {"divide": reciprocal},
    "fused multiply-add": {"multiply_add": fused_decode},
    "codes from the unrounded scale": {"scale_for_codes": lambda self, unrounded, stored: unrounded},
    "unrounded minimum": {"stored_minimum": lambda self, x, scale_type: min(x)},
    "minimum keeps its sign of zero": {"stored_minimum": lambda self, x, t: self.to_scale_type(min(x), t)},
    "range keeps its sign of zero": {"affine_scale": range_of_other_zeros},
    "subnormal scales flushed": {"to_scale_type": flush_scale},
    "scales overflow": {"to_scale_type": scale_to_infinity},
    "threshold of the group": {"clip": clip_each_group},
    "threshold index rounded up": {"clip_index": lambda self, n, ratio: min(math.ceil(ratio * n), n - 1)},
    "threshold index of the exact product": {
        "clip_index": lambda self, n, ratio: min(math.floor(Fraction(ratio) * n), n - 1)
    },
    "threshold index of n - 1": {"clip_index": lambda self, n, ratio: math.floor(ratio * (n - 1))},
    "no upper clamp": {"clamp": lambda self, v, top: packing_spec.Spec.clamp(self, v, 255)},
    "codes after the refit": {"symmetric": refit_is_coded_again},
    "levels without half": {"level": lambda self, c, bits: exact.Real.of(2 * c - 2**bits)},
    "lower entry on a threshold": {"nearest_entry": lambda self, y, thresholds: sum(t < y for t in thresholds)},
    "threshold of halves": {"threshold": lambda self, lower, upper: upper},
    "greedy trellis": {"viterbi": nearest_values},
    "zeros before the group": {"trellis_values": zeros_before_the_group},
    "nothing before the group": {"trellis_values": nothing_before_the_group},
    "no seam": {"seam": lambda self, y, table, trellis: 0},
    "seam of one round": {"seam": seam_of_one_round},
    "seam at the end of its run": {"seam": seam_at_the_end},
    "seam of the last channels": {"seam": seam_of_the_last_channels},
    "seam of all channels": {"seam_length": lambda self, size: size},
    "seam of 16 channels": {"seam_length": lambda self, size: min(size, 16)},
    "last state on a tie": {"cheapest": last_cheapest},
    "the group starts anywhere": {"closed_path": path_from_anywhere},
    "the group ends anywhere": {"closed_path": path_to_anywhere},
    "groups of 7 bite their tails": {"bites_its_tail": lambda self, size: size > 6},
    "groups of 8 do not": {"bites_its_tail": lambda self, size: size > 8},
    "widths without a theta keep norm": {"fallback_rule": lambda self, rule: "norm"},
    "mixed widths straddle bytes": {"stored_bits": lambda self, width: width},
    "no alignment of scales": {"padding": lambda self, size, multiple: b""},
    "last path on a tie": {"better": lambda self, cost, best: not best < cost},
    "the clip bounds infinities": {"is_poisoned": clip_bounds_infinity},
    "channels of width 0 do not poison": {"is_poisoned": only_stored_channels},
    "only the group is poisoned": {"derive_poisoned": poisons_its_group},
    "NaN with a sign": {"quiet_nan": lambda self, t: exact.QUIET_NAN[t] | (1 << 31 if t == "fp32" else 1 << 15)},
    "NaN with all bits": {"quiet_nan": lambda self, t: 0x7FFFFFFF if t == "fp32" else 0x7FFF},
    "middle codes in poisoned rows": {"poisoned_codes": lambda self, row, case: [1] * len(row)},
    "poisoned channels of width 0 are zero": {"decoded_without_bits": lambda self, poisoned: "00000000"},
    "infinities saturate in exact rows": {"exact_bits": infinity_saturates},
    "last centroid on a tie": {"nearest_centroid": last_nearest_centroid},
    "nearest centroid is the first": {"nearest_centroid": lambda self, row, centroids: 0},
    "one scale: ignored by the bytes": {"scale_count": lambda self, segments, case: segments},
    "one scale: stored without widths": {"scale_count": lambda self, segments, case: 1},
    "one scale: from the narrowest segment": {"sum_of_segments": lambda self, terms: left_to_right(self, terms[::-1])},
    "one scale: a tree of segments": {"sum_of_segments": lambda self, terms: self.tree(terms)},
    "one scale: n of all channels": {"coded_channels": lambda self, parts, row: len(row)},
    "one scale: d without gains": {"first_scale": rms_of_the_row},
    "one scale: squares of x / G": {"first_scale": gains_before_squares},
    "one scale: G divides twice": {"first_scale": divided_twice},
    "one scale: gains not squared": {"square": lambda self, gain: gain},
    "one scale: t of the scale type": {"unit_step": rounded_unit_step},
    "one scale: codes without gains": {"unit_step": lambda self, gain, d, scale_type: d},
    "one scale: x / (step t)": {"unit_symmetric_code": one_division},
    "one scale: symmetric values without step": {
        "unit_symmetric_value": lambda self, c, width: exact.multiply(self.level(c, width), exact.HALF)
    },
    "one scale: refit of the first segment": {"row_scale": refit_of_one_segment},
    "one scale: refit without gains": {"row_scale": refit_without_gains},
    "one scale: N = 0 gives 0": {"row_scale": zero_without_values},
    "one scale: negative P": {"row_scale": negative_scale_is_refused},
    "one scale: (s G) v": {"decoded": lambda self, s, gain, v: exact.multiply(exact.multiply(s, gain), v)},
    "one scale: gains of the wrong width": {
        "gain": lambda self, w, case: packing_spec.Spec.gain(self, max(w - 1, 1), case)
    },
    "big-endian stream": {
        "pack_codes": lambda self, codes, bits: packing_spec.Spec.pack_codes(self, codes, bits)[::-1]
    },
}


def test_a_vector_notices_every_other_order_of_divisions():
    """The field `why` of the vector claims it."""
    vector = next(v for v in VECTORS if v["name"] == "one scale, order of divisions")
    for other in (one_division, t_in_two_divisions):
        spec = type("Misread", (packing_spec.Spec,), {"unit_symmetric_code": other})()
        assert spec.derive(inputs_of(vector))["codes"] != vector["codes"], other


def test_vectors_for_the_sum_notice_every_other_order():
    """The field `why` of these vectors claims it."""
    for name in ("tree of 8", "tree of 6", "tree of 12", "least squares tree"):
        vector = next(v for v in VECTORS if v["name"] == name)
        orders = [left_to_right, first_and_second_half] + ([split_without_padding] if name != "tree of 8" else [])
        for order in orders:
            assert type("Misread", (packing_spec.Spec,), {"tree": order})().derive(inputs_of(vector)) != vector, (
                name,
                order,
            )


@functools.cache
def steps_of(name: str) -> set[str]:
    """The steps, of those that misreadings change, that the vector's derivation takes."""
    vector = next(v for v in VECTORS if v["name"] == name)
    spec, taken = packing_spec.Spec(), set()

    def first_call(step: str):
        def record(*args):
            taken.add(step)
            delattr(spec, step)
            return getattr(spec, step)(*args)

        return record

    for step in {step for changes in MISREADINGS.values() for step in changes}:
        setattr(spec, step, first_call(step))
    assert spec.derive(inputs_of(vector)) == vector
    return taken


@pytest.mark.parametrize("name", MISREADINGS)
def test_vectors_notice_a_misreading(name):
    spec = type("Misread", (packing_spec.Spec,), MISREADINGS[name])()

    def notices(vector: dict) -> bool:
        if steps_of(vector["name"]).isdisjoint(MISREADINGS[name]):
            return False
        try:
            return spec.derive(inputs_of(vector)) != vector
        except (AssertionError, OverflowError):  # a number that the format cannot hold
            return True

    assert any(map(notices, QUICK_FIRST)), f"no vector notices: {name}"


# Properties


@pytest.mark.parametrize("bits", [*range(1, 9), 16])
@pytest.mark.parametrize("dim", ODD_DIMS)
def test_unpacking_gives_back_packed_codes(bits, dim):
    seed = 100 * bits + dim
    codes = np.random.default_rng(seed).integers(0, 2**bits, (5, dim)).astype(np.uint16 if bits == 16 else np.uint8)
    packed = packing.pack_codes(codes, bits)
    assert packed.shape == (5, -(-dim * bits // 8)), f"seed {seed}"
    assert (packing.unpack_codes(packed, bits, dim) == codes).all(), f"seed {seed}"


@pytest.mark.parametrize("scheme", all_schemes(6), ids=str)
def test_rows_survive_their_bytes(scheme):
    coded = packing.encode(rows(1, 7, 12), scheme)
    back = packing.unpack(packing.pack(coded, scheme), scheme, 12)
    assert (back.codes == coded.codes).all()
    assert float_bits(back.numbers) == float_bits(coded.numbers)


@pytest.mark.parametrize("scheme", all_schemes(32, bits=(2, 3, 8)), ids=str)
def test_torch_equals_numpy_bit_for_bit(scheme):
    torch = pytest.importorskip("torch")
    from kvq import torch_codec

    x = spoiled(2, rows(2, 61, 96))
    coded = packing.encode(x, scheme)
    codes, numbers = torch_codec.encode(torch.from_numpy(x), scheme)
    assert (codes.numpy() == coded.codes).all()
    assert float_bits(numbers.numpy()) == float_bits(coded.numbers)
    assert float_bits(torch_codec.decode(codes, numbers, scheme).numpy()) == float_bits(packing.decode(coded, scheme))


def test_torch_exact_rows_equal_numpy():
    torch = pytest.importorskip("torch")
    from kvq import torch_codec

    x, scheme = spoiled(3, rows(3, 61, 13)), Scheme("exact", 16)
    assert float_bits(torch_codec.fake_quantize(torch.from_numpy(x), scheme).numpy()) == float_bits(
        packing.fake_quantize(x, scheme)
    )


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("zero", ["float", "integer"])
def test_affine_error_is_half_a_step(bits, zero):
    x = rows(4, 50, 96)
    scheme = Scheme("affine", bits, 32, "fp32", "minmax", zero)
    coded = packing.encode(x, scheme)
    step = np.repeat(coded.numbers[:, :3], 32, axis=1).astype(np.float64)
    # An integer zero-point moves the grid by up to half a step more. The last term covers binary32 rounding.
    bound = step * (0.5 if zero == "float" else 1.0) + 1e-5 * np.abs(x).max(axis=1, keepdims=True)
    if zero == "integer":  # a constant group decodes to zero
        bound = np.where(step == 0, np.inf, bound)
    error = np.abs(packing.decode(coded, scheme).astype(np.float64) - x)
    assert (error <= bound).all(), f"worst {np.max(error - bound)}"


@pytest.mark.parametrize("bits", range(1, 9))
def test_absmax_error_is_half_a_step(bits):
    x = rows(5, 50, 96)
    coded = packing.encode(x, scheme := Scheme("symmetric", bits, 32, "fp32", "absmax"))
    step = np.repeat(coded.numbers, 32, axis=1).astype(np.float64)
    error = np.abs(packing.decode(coded, scheme).astype(np.float64) - x)
    assert (error <= 0.5001 * step).all()


@pytest.mark.parametrize("bits", range(1, 9))
def test_norm_keeps_the_norm_and_least_squares_the_smallest_error(bits):
    x = np.random.default_rng(6).standard_normal((40, 64)).astype(np.float32)
    norm = packing.fake_quantize(x, Scheme("symmetric", bits, 64, "fp32", "norm"))
    least = packing.fake_quantize(x, Scheme("symmetric", bits, 64, "fp32", "least_squares"))
    np.testing.assert_allclose(np.linalg.norm(norm, axis=1), np.linalg.norm(x, axis=1), rtol=1e-6)
    assert (((least - x) ** 2).sum(1) <= ((norm - x) ** 2).sum(1) * (1 + 1e-6)).all()
    # The refit is a projection on the codes, so the residual is orthogonal to the decoded row.
    np.testing.assert_allclose(((x - least) * least).sum(1), 0, atol=1e-4)


@pytest.mark.parametrize("bits, expected", [(1, 0.3634), (2, 0.1188), (3, 0.0374), (4, 0.01154)])
def test_gaussian_step_has_the_known_distortion(bits, expected):
    """Optimal uniform quantizers of a unit Gaussian (Max 1960)."""
    x = np.random.default_rng(7).standard_normal((400, 1024)).astype(np.float32)
    error = packing.fake_quantize(x, Scheme("symmetric", bits, 1024, "fp32", "least_squares")) - x
    assert np.mean(error**2) == pytest.approx(expected, rel=0.02), "seed 7"


def test_rows_do_not_see_each_other():
    x = rows(8, 31, 96)
    for scheme in all_schemes(32, bits=(3,)):
        together = packing.pack(packing.encode(x, scheme), scheme)
        alone = np.concatenate([packing.pack(packing.encode(row[None], scheme), scheme) for row in x])
        assert (together == alone).all(), scheme


def test_strided_rows_code_as_contiguous_ones():
    x = rows(9, 20, 24)
    scheme = Scheme("symmetric", 3, 12, "fp16", "norm")
    assert (packing.encode(x[::2, ::2], scheme).codes == packing.encode(x[::2, ::2].copy(), scheme).codes).all()


def test_no_rows_are_coded_to_no_bytes():
    for scheme in (Scheme("affine", 3, 4, "fp16", "minmax", "float"), Scheme("exact", 16)):
        packed = packing.pack(packing.encode(np.zeros((0, 12), np.float32), scheme), scheme)
        assert packed.shape == (0, scheme.row_bytes(12))
        assert packing.decode(packing.unpack(packed, scheme, 12), scheme).shape == (0, 12)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_poisoned_and_no_other(bad):
    x = rows(10, 5, 12)
    for scheme in all_schemes(6, bits=(1, 2, 3, 8)):
        expected = packing.encode(x, scheme)
        with_bad = x.copy()
        with_bad[1, 5], with_bad[3] = bad, bad
        coded = packing.encode(with_bad, scheme)
        for i in range(len(x)):
            if i in (1, 3):
                assert not coded.codes[i].any() and set(float_bits(coded.numbers[i])) == {"7fc00000"}, scheme
            else:
                assert (coded.codes[i] == expected.codes[i]).all(), scheme
                assert float_bits(coded.numbers[i]) == float_bits(expected.numbers[i]), scheme
        back = packing.unpack(packing.pack(coded, scheme), scheme, 12)
        assert float_bits(back.numbers) == float_bits(coded.numbers)
        assert np.isnan(packing.decode(back, scheme)).all(axis=1).tolist() == [False, True, False, True, False]


def test_exact_rows_are_poisoned_by_channel():
    x = patterns("3f800000 7f800000 ff800000 ff800001 7f7fffff ff7fffff 80000000".split())[None]
    coded = packing.encode(x, Scheme("exact", 16))
    assert [f"{bits:04x}" for bits in coded.codes[0]] == "3f80 7fc0 7fc0 7fc0 7f7f ff7f 8000".split()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_readers_refuse_rows_that_are_not_finite(bad):
    packing.expect_finite(x := rows(10, 3, 12))
    x[1, 5] = bad
    with pytest.raises(ValueError, match="finite"):
        packing.expect_finite(x)


@pytest.mark.parametrize(
    "fields",
    [
        dict(coder="affine", bits=0, group_size=4, zero="float"),
        dict(coder="affine", bits=9, group_size=4, zero="float"),
        dict(coder="affine", bits=2, group_size=0, zero="float"),
        dict(coder="affine", bits=2, group_size=4),
        dict(coder="symmetric", bits=2, group_size=4),
        dict(coder="exact", bits=8),
        dict(coder="lookup", bits=2, group_size=4),
        dict(coder="affine", bits=2, group_size=4, zero="float", scale_type="fp8"),
        dict(coder="affine", bits=2, group_size=4, zero="float", clip_ratio=0.0),
    ],
)
def test_impossible_schemes_are_refused(fields):
    with pytest.raises(ValueError):
        Scheme(**fields)


def test_groups_must_divide_the_row():
    with pytest.raises(ValueError, match="divide"):
        packing.encode(rows(11, 3, 12), Scheme("symmetric", 2, 5, "fp16", "norm"))
