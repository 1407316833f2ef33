"""Codebook and trellis codes, mixed widths and centroids of packing.md 1.1: small cases by hand, and brute force."""

import dataclasses
import itertools

import numpy as np
import pytest

import derive_vectors as exact
from kvq_py import packing
from kvq_py.scheme import MIXABLE_CODERS, SCALE_BYTES, SCALE_RULES, TABLE_RULES, MixedScheme, Scheme, Tables, with_equal_rows

TRELLISES = [(1, 1), (1, 3), (1, 6), (1, 8), (2, 1), (2, 3), (3, 2), (4, 1), (4, 2)]  # bits, memory


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
    return [scheme for scale_type in SCALE_BYTES for rule in TABLE_RULES for scheme in (
        *(codebook_scheme(codebook(bits), group_size, rule, scale_type) for bits in (1, 2, 3, 5, 8)),
        *(trellis_scheme(bits, trellis(bits, memory)[1], group_size, rule, scale_type) for bits, memory in TRELLISES))]


def random_widths(rng, dim: int) -> tuple[int, ...]:
    return tuple(sorted(rng.integers(0, 9, dim).tolist(), reverse=True))


def mixed_schemes(seed: int, dim: int, centroids: int = 0) -> list[MixedScheme]:
    """Every coder with every rule and type, with widths of its own."""
    rng = np.random.default_rng(seed)
    return [MixedScheme.make(coder, random_widths(rng, dim), scale_type, rule, TABLES, centroids)
            for coder in MIXABLE_CODERS for rule in SCALE_RULES[coder] for scale_type in SCALE_BYTES]


def rows(seed: int, count: int, dim: int) -> np.ndarray:
    """Rows of different size, one zero, one that overflows, one too small for fp16."""
    x = gaussian(seed, count, dim) * np.exp(np.random.default_rng(seed).uniform(-3, 3, (count, 1))).astype(np.float32)
    x[0], x[1], x[2] = 0, x[1] * np.float32(1e30), x[2] * np.float32(1e-9)
    return x


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and (a.view(np.uint32) == b.view(np.uint32)).all()


# Codebook codes

def test_codebook_by_hand():
    x = floats(3, -1, 1, -1, 3, -3, 1, 1)[None]  # E = 32, d = 2, y = 1.5 -0.5 0.5 -0.5 1.5 -1.5 0.5 0.5
    entries = (-2.0, -0.5, 0.25, 1.5)  # thresholds -1.25 -0.125 0.875
    codes = [3, 1, 2, 1, 3, 0, 2, 2]
    values = floats(*entries)[codes]  # N = 2.25 0.25 0.0625 0.25 2.25 4 0.0625 0.0625 = 9.1875; x v = 16.75
    for rule, scale in (("rms", 2.0), ("norm", np.sqrt(floats(32) / floats(9.1875))[0]), ("least_squares", 16.75 / 9.1875)):
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
    thresholds = [(a + b) * np.float32(0.5) for a, b in zip(entries, entries[1:])]
    found = packing.nearest_entries(y[None, None], codebook_scheme(entries.tolist(), len(y)))
    assert found[0, 0].tolist() == [sum(t <= v for t in thresholds) for v in y]


@pytest.mark.parametrize("rule", TABLE_RULES)
@pytest.mark.parametrize("scheme", [codebook_scheme((-1.0, -0.5, 0.5, 1.0), 4), trellis_scheme(2, (1.0, 2.0, 0.1, 0.2), 4)],
                         ids=["codebook", "trellis"])
def test_a_group_without_scale_has_middle_codes(scheme, rule):
    scheme = dataclasses.replace(scheme, scale_rule=rule, scale_type="fp16")
    x = floats(0, 0, 0, 0, 1e-9, -1e-9, 0, 0, 1e-30, 0, 0, 0)[None]  # no energy; d below fp16; E underflows
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
    """b = 1, m = 1, theta = 2 1: v[0] = +-1, v[j] = +-1 +-0.5."""
    scheme = trellis_scheme(1, (2.0, 1.0), 4)
    x = floats(1, -0.5, -1.5, 0.7071068)[None]  # E = 4, so d = 1
    coded = packing.encode(x, scheme)
    assert coded.codes[0].tolist() == [1, 0, 0, 1]  # v = 1, -0.5, -1.5, 0.5
    assert packing.decode(coded, scheme)[0].tolist() == [1, -0.5, -1.5, 0.5]


def test_trellis_values_see_no_codes_before_the_group():
    scheme = trellis_scheme(2, (1.0, 2.0, 0.5, 0.25, 0.125, 0.0625), 4)
    found = packing.trellis_values(np.array([3, 0, 2, 1], np.uint8), scheme)
    h = lambda *terms: sum(terms) / 2  # noqa: E731
    assert found.tolist() == [h(1, 2), h(-1, -2, 0.5, 0.25), h(-1, 2, -0.5, -0.25, 0.125, 0.0625),
                              h(1, -2, -0.5, 0.25, -0.125, -0.0625)]


@pytest.mark.parametrize("bits, memory", TRELLISES)
def test_tables_are_the_values(bits, memory):
    scheme = trellis_scheme(bits, trellis(bits, memory)[1], memory + 1)
    tables = packing.trellis_tables(scheme)
    codes = np.random.default_rng(2).integers(0, 2**bits, (50, memory + 1)).astype(np.uint8)
    values = packing.trellis_values(codes, scheme)
    for j in range(memory + 1):
        place = sum(codes[:, j - k].astype(int) << bits * k for k in range(j + 1))
        assert same_bits(tables[j][place], values[:, j])


def path_costs(y: np.ndarray, scheme: Scheme) -> tuple[np.ndarray, np.ndarray]:
    """All code sequences [P, g] and what each costs, summed along it in binary32."""
    sequences = np.array(list(itertools.product(range(2**scheme.bits), repeat=len(y))), np.uint8)
    error = y - packing.trellis_values(sequences, scheme)
    cost = np.zeros(len(sequences), np.float32)
    for j in range(len(y)):
        cost = cost + error[:, j] * error[:, j]
    return sequences, cost


@pytest.mark.parametrize("bits, memory, size", [(1, 1, 9), (1, 3, 9), (1, 6, 4), (1, 6, 10), (2, 1, 5), (2, 3, 6), (3, 2, 4),
                                                (4, 1, 3), (4, 2, 2), (1, 8, 11)])
def test_viterbi_finds_the_cheapest_of_all_sequences(bits, memory, size):
    scheme = trellis_scheme(bits, trellis(bits, memory)[1], size)
    y = gaussian(3, 12, size)
    codes = packing.viterbi(y, scheme)
    for row, found in zip(y, codes):
        sequences, cost = path_costs(row, scheme)
        assert cost[(sequences == found).all(axis=1)] == cost.min()


def reference_viterbi(y: np.ndarray, scheme: Scheme) -> list[list[int]]:
    """In exact arithmetic rounded step by step, one row at a time."""
    theta = [exact.from_decimal(repr(float(t))) for t in scheme.theta]
    rule = exact.Trellis(scheme.bits, scheme.memory, theta)
    return [exact.Spec().viterbi([exact.from_decimal(repr(float(v))) for v in row], rule) for row in y]


@pytest.mark.parametrize("bits, memory", [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)])
def test_ties_go_to_the_smallest_codes(bits, memory):
    """Small integers tie all the time."""
    rng = np.random.default_rng(bits + 10 * memory)
    for _ in range(12):
        theta = rng.integers(-2, 3, bits * (memory + 1)).astype(float).tolist()
        scheme = trellis_scheme(bits, theta, 6)
        y = rng.integers(-1, 2, (4, 6)).astype(np.float32)
        assert packing.viterbi(y, scheme).tolist() == reference_viterbi(y, scheme), theta


def test_all_paths_tie_to_zeros():
    scheme = trellis_scheme(2, (0.0,) * 6, 5)
    assert not packing.viterbi(gaussian(4, 3, 5), scheme).any()


def test_long_searches_are_cut_into_rows(monkeypatch):
    scheme, x = trellis_scheme(1, trellis(1, 6)[1], 48, "norm"), rows(5, 50, 96)
    whole = packing.encode(x, scheme)
    monkeypatch.setattr(packing, "CHUNK", 1 << 10)
    cut = packing.encode(x, scheme)
    assert (whole.codes == cut.codes).all() and same_bits(whole.numbers, cut.numbers)


def test_symmetric_codes_are_a_trellis_without_use_of_its_memory():
    """theta[i] = 2^i and nothing for the codes before: the levels of packing.md (b), nearest ones."""
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
    used = np.unpackbits(packed, axis=1, bitorder="little")[:, length * stored:scheme.numbers_begin(length + 1) * 8]
    assert not used.any()  # padding


def test_a_segment_is_coded_as_a_row_of_its_own():
    x, widths = rows(9, 20, 24), (8,) * 3 + (4,) * 10 + (1,) * 6 + (0,) * 5
    for coder in MIXABLE_CODERS:
        for rule in SCALE_RULES[coder]:
            coded = packing.encode(x, scheme := MixedScheme.make(coder, widths, "fp16", rule, TABLES))
            for place, part in enumerate(scheme.parts):
                alone = packing.encode(x[:, part.begin:part.end], part.scheme)
                assert (coded.codes[:, part.begin:part.end] == alone.codes).all()
                assert same_bits(coded.numbers[:, place], alone.numbers[:, 0])
            decoded = packing.decode(coded, scheme)
            assert same_bits(decoded[:, 19:], np.zeros((20, 5), np.float32))


@pytest.mark.parametrize("rule, fallback", [("norm", "norm"), ("rms", "norm"), ("least_squares", "least_squares")])
def test_widths_without_a_theta_are_symmetric(rule, fallback):
    scheme = MixedScheme.make("trellis", (3, 1), "fp16", rule, Tables(trellises={1: trellis(1, 1)}))
    assert [(part.scheme.coder, part.scheme.scale_rule) for part in scheme.parts] == [("symmetric", fallback),
                                                                                      ("trellis", rule)]


def test_heads_have_equal_rows():
    heads = [MixedScheme.make("symmetric", widths, "fp16", "norm") for widths in ((8,) * 8, (8, 1) + (0,) * 6, (0,) * 8)]
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

@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    torch = pytest.importorskip("torch")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.device(request.param)


def check_torch(x: np.ndarray, scheme, device) -> None:
    import torch
    from kvq_py import torch_codec
    coded, rows = packing.encode(x, scheme), torch.from_numpy(x).to(device)
    codes, numbers = torch_codec.encode(rows, scheme)
    assert (codes.cpu().numpy() == coded.codes).all(), scheme
    assert same_bits(numbers.cpu().numpy(), coded.numbers), scheme
    decoded = packing.decode(coded, scheme)
    assert same_bits(torch_codec.decode(codes, numbers, scheme).cpu().numpy(), decoded), scheme
    assert same_bits(torch_codec.fake_quantize(rows, scheme).cpu().numpy(), decoded), scheme


@pytest.mark.parametrize("scheme", table_schemes(12), ids=str)
def test_torch_equals_numpy_for_tables(scheme, device):
    check_torch(rows(13, 41, 24), scheme, device)


@pytest.mark.parametrize("seed", range(4))
def test_torch_equals_numpy_for_random_mixed_rows(seed, device):
    for scheme in mixed_schemes(seed, 40):
        check_torch(rows(14 + seed, 23, 40), scheme, device)


def test_torch_breaks_ties_as_numpy_does(monkeypatch, device):
    import torch
    from kvq_py import torch_codec
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
    from kvq_py import torch_codec
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

@pytest.mark.parametrize("fields", [
    dict(coder="codebook", bits=2, codebook=(0.0, 1.0)), dict(coder="codebook", bits=1, codebook=(1.0, 1.0)),
    dict(coder="codebook", bits=1, codebook=(1.0, np.inf)), dict(coder="codebook", bits=1),
    dict(coder="codebook", bits=1, codebook=(0.0, 1.0), scale_rule="absmax"), dict(coder="symmetric", bits=2, scale_rule="rms"),
    dict(coder="symmetric", bits=1, codebook=(0.0, 1.0)), dict(coder="codebook", bits=1, codebook=(0.0, 1.0), zero="float"),
    dict(coder="trellis", bits=1, memory=0, theta=(1.0,)), dict(coder="trellis", bits=1, memory=2, theta=(1.0, 1.0)),
    dict(coder="trellis", bits=1, memory=9, theta=(1.0,) * 10), dict(coder="trellis", bits=3, memory=3, theta=(1.0,) * 12),
    dict(coder="trellis", bits=1, memory=1, theta=(1.0, np.nan)), dict(coder="symmetric", bits=1, memory=1)])
def test_impossible_tables_are_refused(fields):
    with pytest.raises(ValueError):
        Scheme(**{"group_size": 4, "scale_rule": "norm"} | fields)


@pytest.mark.parametrize("coder, widths, match", [
    ("affine", (2, 1), "coder"), ("exact", (2, 1), "coder"), ("symmetric", (1, 2), "descending"),
    ("symmetric", (9, 2), "widths"), ("codebook", (3, 2), "codebook of 3 bits")])
def test_impossible_mixtures_are_refused(coder, widths, match):
    with pytest.raises(ValueError, match=match):
        MixedScheme.make(coder, widths, "fp16", "norm", Tables({2: codebook(2)}))


def test_channel_bits_must_fit_the_row():
    with pytest.raises(ValueError, match="channel_bits has 2"):
        packing.encode(gaussian(1, 2, 3), MixedScheme.make("symmetric", (2, 1), "fp16", "norm"))
