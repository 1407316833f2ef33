"""Codebook and trellis codes, mixed widths and centroids of packing.md 1.1: small cases by hand, and brute force."""

import dataclasses
import itertools

import derive_vectors as exact
import numpy as np
import pytest

from kvq import packing
from kvq.scheme import (
    MIXABLE_CODERS,
    SCALE_BYTES,
    SCALE_RULES,
    TABLE_RULES,
    MixedScheme,
    Scheme,
    Tables,
    with_equal_rows,
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


TABLES = Tables({bits: codebook(bits) for bits in range(1, 9)}, {1: trellis(1, 6), 2: trellis(2, 3), 4: trellis(4, 1)})


def codebook_scheme(entries, group_size, rule="rms", scale_type="fp32") -> Scheme:
    return Scheme("codebook", len(entries).bit_length() - 1, group_size, scale_type, rule, codebook=tuple(entries))


def trellis_scheme(bits, theta, group_size, rule="rms", scale_type="fp32") -> Scheme:
    return Scheme("trellis", bits, group_size, scale_type, rule, memory=len(theta) // bits - 1, theta=tuple(theta))


def table_schemes(group_size: int) -> list[Scheme]:
    return [
        scheme
        for scale_type in SCALE_BYTES
        for rule in TABLE_RULES
        for scheme in (
            *(codebook_scheme(codebook(bits), group_size, rule, scale_type) for bits in (1, 2, 3, 5, 8)),
            *(
                trellis_scheme(bits, trellis(bits, memory)[1], group_size, rule, scale_type)
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


def rows(seed: int, count: int, dim: int) -> np.ndarray:
    """Rows of different sizes: one is zero, one overflows, one is too small for fp16."""
    x = gaussian(seed, count, dim) * np.exp(np.random.default_rng(seed).uniform(-3, 3, (count, 1))).astype(np.float32)
    x[0], x[1], x[2] = 0, x[1] * np.float32(1e30), x[2] * np.float32(1e-9)
    return x


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and (a.view(np.uint32) == b.view(np.uint32)).all()


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    torch = pytest.importorskip("torch")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.device(request.param)


def check_torch(x: np.ndarray, scheme, device) -> None:
    import torch

    from kvq import torch_codec

    coded, rows = packing.encode(x, scheme), torch.from_numpy(x).to(device)
    codes, numbers = torch_codec.encode(rows, scheme)
    assert (codes.cpu().numpy() == coded.codes).all(), scheme
    assert same_bits(numbers.cpu().numpy(), coded.numbers), scheme
    decoded = packing.decode(coded, scheme)
    assert same_bits(torch_codec.decode(codes, numbers, scheme).cpu().numpy(), decoded), scheme
    assert same_bits(torch_codec.fake_quantize(rows, scheme).cpu().numpy(), decoded), scheme


# Codebook codes


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


# Trellis codes


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
    found = packing.trellis_values(np.array([3, 0, 2, 1, 0, 0, 2, 1], np.uint8), scheme)
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
    table = packing.trellis_table(scheme)
    codes = np.random.default_rng(2).integers(0, 2**bits, (50, 12)).astype(np.uint8)
    place = sum(codes[:, [(j - k) % 12 for j in range(12)]].astype(int) << bits * k for k in range(memory + 1))
    assert same_bits(table[place], packing.trellis_values(codes, scheme))


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
    cost = costs(np.concatenate([y, y]), packing.trellis_table(scheme)[place])
    codes = codes[cost == cost.min()].tolist()
    best = min(codes, key=lambda path: (path[-memory:], path[:-memory][::-1]))
    return best[size : size + memory]


def group_by_force(y: np.ndarray, seam: list[int], scheme: Scheme) -> list[int]:
    """The best of all closed paths through the seam."""
    open_end = sequences(2**scheme.bits, len(y) - len(seam))
    codes = np.concatenate([open_end, np.broadcast_to(np.uint8(seam), (len(open_end), len(seam)))], axis=1)
    return best_of(costs(y, packing.trellis_values(codes, scheme)), codes)


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
        for row, found in zip(y, packing.viterbi(y, scheme).tolist()):
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
    for row, found in zip(y, packing.viterbi(y, scheme).tolist()):
        assert found == group_by_force(row, found[-memory:], scheme), scheme.theta


def test_most_groups_are_the_cheapest_that_close():
    scheme, y = trellis_scheme(2, trellis(2, 1)[1], 8), gaussian(21, 60, 8)
    codes = sequences(4, 8)
    values = packing.trellis_values(codes, scheme)
    cheapest = [codes[costs(row, values).argmin()].tolist() for row in y]
    assert np.mean([a == b for a, b in zip(packing.viterbi(y, scheme).tolist(), cheapest)]) > 0.8


def reference_viterbi(y: np.ndarray, scheme: Scheme) -> list[list[int]]:
    """Codes of each row by the script that derives the vectors."""
    theta = [exact.from_decimal(repr(float(t))) for t in scheme.theta]
    rule = exact.Trellis(scheme.bits, scheme.memory, theta)
    return [exact.Spec().viterbi([exact.from_decimal(repr(float(v))) for v in row], rule) for row in y]


@pytest.mark.parametrize("bits, memory", [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)])
def test_ties_go_to_the_smallest_codes(bits, memory):
    rng = np.random.default_rng(bits + 10 * memory)
    for _ in range(12):
        scheme, y = small_integers(rng, bits, memory, 3, 9)
        assert packing.viterbi(y, scheme).tolist() == reference_viterbi(y, scheme), scheme.theta


@pytest.mark.parametrize("size", [8, 31, 32, 33, 63, 65, 100])
def test_groups_of_every_length_have_their_seam(size):
    for bits, memory in ((1, 3), (2, 2)):
        scheme, y = trellis_scheme(bits, trellis(bits, memory)[1], size), gaussian(22, 2, size)
        assert packing.viterbi(y, scheme).tolist() == reference_viterbi(y, scheme)
        scheme, y = small_integers(np.random.default_rng(size), bits, memory, 2, size)
        assert packing.viterbi(y, scheme).tolist() == reference_viterbi(y, scheme)


def test_the_seam_sees_32_channels_on_each_side():
    scheme, y = trellis_scheme(1, trellis(1, 6)[1], 96), gaussian(23, 200, 96)
    other = y.copy()
    other[:, 32:64] = gaussian(24, 200, 32)
    found, changed = packing.viterbi(y, scheme), packing.viterbi(other, scheme)
    assert (found[:, -6:] == changed[:, -6:]).all() and (found != changed).any(axis=1).all()


def outliers(size: int) -> np.ndarray:
    """Rows with one outlier, at every position. With fp16, the outlier's cost and all later costs are infinite."""
    x = gaussian(25, size, size) * np.float32(65504)
    np.fill_diagonal(x, 1e30)
    return x


@pytest.mark.parametrize("size", [8, 40])
def test_infinite_costs_tie(size):
    y = outliers(size) / np.float32(65504)
    for bits, memory in ((1, 3), (1, 7), (2, 2)):
        scheme = trellis_scheme(bits, trellis(bits, memory)[1], size)
        with np.errstate(over="ignore"):
            assert packing.viterbi(y, scheme).tolist() == reference_viterbi(y, scheme)


def test_all_paths_tie_to_zeros():
    scheme = trellis_scheme(2, (0.0,) * 6, 9)
    assert not packing.viterbi(gaussian(4, 3, 9), scheme).any()


def test_long_searches_are_cut_into_rows(monkeypatch):
    scheme, x = trellis_scheme(1, trellis(1, 6)[1], 48, "norm"), rows(5, 50, 96)
    whole = packing.encode(x, scheme)
    monkeypatch.setattr(packing, "CHUNK", 1 << 10)
    cut = packing.encode(x, scheme)
    assert (whole.codes == cut.codes).all() and same_bits(whole.numbers, cut.numbers)


def test_symmetric_codes_are_a_trellis_without_use_of_its_memory():
    """With theta[i] = 2^i and 0 for earlier codes, values are the levels of packing.md (b), and codes are the nearest
    levels."""
    x = gaussian(6, 40, 32)
    scheme = trellis_scheme(3, (1.0, 2.0, 4.0, 0.0, 0.0, 0.0), 32)
    values = packing.trellis_values(codes := packing.encode(x, scheme).codes, scheme)
    assert (values == packing.levels(codes, 3) / 2).all()


@pytest.mark.parametrize("scheme", [codebook_scheme(codebook(2), 64), trellis_scheme(1, trellis(1, 3)[1], 64)], ids=str)
def test_rules_fit_what_they_say(scheme):
    x = gaussian(8, 40, 64)
    decoded = {rule: packing.fake_quantize(x, dataclasses.replace(scheme, scale_rule=rule)) for rule in TABLE_RULES}
    np.testing.assert_allclose(np.linalg.norm(decoded["norm"], axis=1), np.linalg.norm(x, axis=1), rtol=1e-6)
    errors = {rule: ((own - x) ** 2).sum(1) for rule, own in decoded.items()}
    assert (errors["least_squares"] <= errors["norm"] * (1 + 1e-6)).all()
    assert (errors["least_squares"] <= errors["rms"] * (1 + 1e-6)).all()


# Mixed widths


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


# Centroids


def test_the_nearest_centroid_and_its_ties():
    centroids = floats(0, 0, 2, 0, 0, 2, 2, 0).reshape(1, 4, 2)
    x = floats(0.4, 0.1, 1, 0, 1.9, 0.1, 1, 1, 0, 1.5).reshape(1, 5, 2)
    assert packing.nearest_centroids(x, centroids).tolist() == [0, 0, 1, 0, 2]


def test_heads_decide_together():
    centroids = floats(0, 4, 1, 0).reshape(2, 2, 1)  # head 0: 0 or 4; head 1: 1 or 0
    x = floats(1, 1, 0, 1).reshape(2, 2, 1)  # tokens (1, 0) and (1, 1): alone head 1 chooses 1 and 0
    assert packing.nearest_centroids(x, centroids).tolist() == [0, 0]
    assert packing.nearest_centroids(x[1:], centroids[1:]).tolist() == [1, 0]


@pytest.mark.parametrize("dim", [1, 3, 8, 13])
def test_distances_are_the_trees(dim):
    x, centroids = gaussian(11, 30, dim), gaussian(12, 5, dim)
    found = packing.squared_distances(x, centroids)
    for c, centroid in enumerate(centroids):
        difference = x - centroid
        assert same_bits(found[c], packing.tree_sum(difference * difference))


# PyTorch


@pytest.mark.parametrize("scheme", table_schemes(12), ids=str)
def test_torch_equals_numpy_for_tables(scheme, device):
    check_torch(rows(13, 41, 24), scheme, device)


@pytest.mark.parametrize("seed", range(4))
def test_torch_equals_numpy_for_random_mixed_rows(seed, device):
    for scheme in mixed_schemes(seed, 70):
        check_torch(rows(14 + seed, 23, 70), scheme, device)


@pytest.mark.parametrize("size", [8, 31, 32, 33, 64, 70])
def test_torch_finds_the_same_seam(size, device):
    for bits, memory in ((1, 7), (2, 3)):
        check_torch(
            rows(19, 15, 2 * size), trellis_scheme(bits, trellis(bits, memory)[1], size, "norm", "fp16"), device
        )


def test_torch_has_the_largest_trellis(device):
    check_torch(rows(26, 4, 8), trellis_scheme(8, trellis(8, 1)[1], 8, "norm", "fp16"), device)


def test_torch_has_the_same_infinite_costs(device):
    check_torch(outliers(64), trellis_scheme(1, trellis(1, 6)[1], 64, "rms", "fp16"), device)


def test_torch_breaks_ties_as_numpy_does(monkeypatch, device):
    import torch

    from kvq import torch_codec

    monkeypatch.setitem(torch_codec.CHUNK, device.type, 1 << 9)
    rng = np.random.default_rng(15)
    for bits, memory in TRELLISES[:7]:
        scheme = trellis_scheme(bits, rng.integers(-2, 3, bits * (memory + 1)).astype(float).tolist(), 9)
        y = rng.integers(-1, 2, (20, 1, 9)).astype(np.float32)
        found = torch_codec.best_paths(torch.from_numpy(y).to(device), scheme)
        assert (found.cpu().numpy() == packing.best_paths(y, scheme)).all()


@pytest.mark.parametrize("chunk", [1, 64, 1 << 19])
def test_torch_finds_the_same_centroids(monkeypatch, chunk, device):
    import torch

    from kvq import torch_codec

    monkeypatch.setitem(torch_codec.CHUNK, device.type, chunk)
    x, centroids = gaussian(16, 3, 37, 13), gaussian(17, 3, 9, 13)
    centroids[:, 7] = centroids[:, 2]
    x[:, 5] = centroids[:, 7]
    rows, entries = (torch.from_numpy(array).to(device) for array in (x, centroids))
    for heads in (slice(0, 1), slice(0, 3)):
        expected = packing.nearest_centroids(x[heads], centroids[heads])
        found = torch_codec.nearest_centroids(rows[heads], entries[heads])
        assert (found.cpu().numpy() == expected).all() and expected[5] == 2
    distances = torch_codec.squared_distances(rows[0], entries[0]).cpu().numpy()
    assert same_bits(distances, packing.squared_distances(x[0], centroids[0]))


# Schemes


@pytest.mark.parametrize(
    "fields",
    [
        dict(coder="codebook", bits=2, codebook=(0.0, 1.0)),
        dict(coder="codebook", bits=1, codebook=(1.0, 1.0)),
        dict(coder="codebook", bits=1, codebook=(1.0, np.inf)),
        dict(coder="codebook", bits=1),
        dict(coder="codebook", bits=1, codebook=(0.0, 1.0), scale_rule="absmax"),
        dict(coder="symmetric", bits=2, scale_rule="rms"),
        dict(coder="symmetric", bits=1, codebook=(0.0, 1.0)),
        dict(coder="codebook", bits=1, codebook=(0.0, 1.0), zero="float"),
        dict(coder="trellis", bits=1, memory=0, theta=(1.0,)),
        dict(coder="trellis", bits=1, memory=2, theta=(1.0, 1.0)),
        dict(coder="trellis", bits=1, memory=9, theta=(1.0,) * 10),
        dict(coder="trellis", bits=3, memory=3, theta=(1.0,) * 12),
        dict(coder="trellis", bits=8, memory=2, theta=(1.0,) * 24),
        dict(coder="trellis", bits=1, memory=1, theta=(1.0, np.nan)),
        dict(coder="symmetric", bits=1, memory=1),
    ],
)
def test_impossible_tables_are_refused(fields):
    with pytest.raises(ValueError):
        Scheme(**{"group_size": 4, "scale_rule": "norm"} | fields)


@pytest.mark.parametrize(
    "coder, widths, match",
    [
        ("affine", (2, 1), "coder"),
        ("exact", (2, 1), "coder"),
        ("symmetric", (1, 2), "descending"),
        ("symmetric", (9, 2), "widths"),
        ("codebook", (3, 2), "codebook of 3 bits"),
    ],
)
def test_impossible_mixtures_are_refused(coder, widths, match):
    with pytest.raises(ValueError, match=match):
        MixedScheme.make(coder, widths, "fp16", "norm", Tables({2: codebook(2)}))


def test_channel_bits_must_fit_the_row():
    with pytest.raises(ValueError, match="channel_bits has 2"):
        packing.encode(gaussian(1, 2, 3), MixedScheme.make("symmetric", (2, 1), "fp16", "norm"))
