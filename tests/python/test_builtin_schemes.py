"""Built-in schemes in PyTorch: names, rows of any size, and windows that end at whole granules. That rows are those of
kvq-eval is tested in tests/cli/test_scheme_names.py."""

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvq import coded_attention, random_matrices  # noqa: E402
from kvq.builtin_schemes import FAMILIES, BuiltinPlans, parse_name  # noqa: E402
from kvq.coded_attention import KeysValues, Windows, attend, reconstruct, spans  # noqa: E402
from kvq.errors import KvqError  # noqa: E402
from kvq.sphere_codebook import sphere_codebook, step  # noqa: E402


def gaussian(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.manual_seed(seed))


NAMES = [pattern.replace("<b>", bits) for pattern in FAMILIES for bits in ("2" if "<b>" in pattern else ("",))]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [10, 64])
def test_rows_of_any_size_are_restored(name, dim):
    plans = BuiltinPlans(name)
    for side, tokens in itertools.product("kv", (1, 33)):
        x = gaussian(1, 2, tokens, dim)
        plan = plans(0, side, 2, dim)
        found = reconstruct(plan, x)
        assert found.shape == x.shape and found.isfinite().all() and plan.row_bytes > 0
        assert float((found - x).norm() / x.norm()) < 1.5


@pytest.mark.parametrize("name", ["fp8", "fp8-head", "nvfp4", "kivi-2", "turboquant-qjl-2"])
def test_rows_of_zeros_stay_zeros(name):
    plans = BuiltinPlans(name)
    for side in "kv":
        assert torch.equal(reconstruct(plans(0, side, 1, 16), torch.zeros(1, 5, 16)), torch.zeros(1, 5, 16))


def test_suffix_k_leaves_values_exact():
    for name in ("fp8-k", "naive-int2-k", "kivi-2-r32-k"):
        assert BuiltinPlans(name)(0, "v", 1, 16) is None and BuiltinPlans(name)(0, "k", 1, 16) is not None


@pytest.mark.parametrize(
    "old, name",
    [("affine3", "naive-int3"), ("hadamard-affine2", "quarot-int2"), ("hadamard-norm2", "symmetric-norm-2")],
)
def test_old_names_are_the_same_schemes(old, name):
    x = gaussian(2, 2, 9, 32)
    for side in "kv":
        assert torch.equal(*(reconstruct(BuiltinPlans(own)(0, side, 2, 32), x) for own in (old, name)))


@pytest.mark.parametrize("name", ["", "k", "fp8-", "fp9", "naive-int0", "naive-int22", "kivi-", "kivi-k-2", "exact-k"])
def test_other_names_are_refused_with_the_name_that_was_meant_or_all_names(name):
    with pytest.raises(KvqError) as refused:
        parse_name(name)
    hint = refused.value.hint
    assert f'"{name}"' in str(refused.value)
    assert hint.startswith("did you mean ") or all(pattern in hint for pattern in FAMILIES)


@pytest.mark.parametrize(
    "name, meant", [("fp9", "fp8"), ("kivi-", "kivi-1"), ("exact-k", "exact"), ("qarot-int4", "quarot-int4")]
)
def test_a_mistyped_name_is_told_the_name_that_was_meant(name, meant):
    with pytest.raises(KvqError) as refused:
        parse_name(name)
    assert refused.value.hint == f"did you mean {meant}? kvq-eval --help lists all schemes"


# Windows


def attention_of_one(q, k, v, scale):
    return torch.softmax(k @ q * scale, 0) @ v


@pytest.mark.parametrize("keys", [Windows(0, 1, 8), Windows(2, 0, 5), Windows(0, 3, 7), Windows(0, 40, 8)])
@pytest.mark.parametrize("values", [None, Windows(0, 9), Windows(1, 2, 3)])
@pytest.mark.parametrize("block", [1, 6, 64])
def test_queries_read_whole_granules_as_codes(monkeypatch, keys, values, block):
    monkeypatch.setattr(coded_attention, "QUERY_BLOCK", block)
    tokens = 29
    q, exact = gaussian(3, 4, tokens, 6), KeysValues(gaussian(4, 2, tokens, 6), gaussian(5, 2, tokens, 5))
    decoded = KeysValues(gaussian(6, 2, tokens, 6), gaussian(7, 2, tokens, 5))
    found = attend(q, exact, decoded, 0.4, keys, value_windows=values)
    for head, i in itertools.product(range(4), range(tokens)):
        rows = {}
        for name, windows in (("k", keys), ("v", values or keys)):
            end = max(0, i + 1 - windows.recent_tokens) // windows.granule * windows.granule
            coded = [windows.sink_tokens <= j < end for j in range(i + 1)]
            rows[name] = torch.stack(
                [getattr(decoded if own else exact, name)[head // 2, j] for j, own in enumerate(coded)]
            )
        expected = attention_of_one(q[head, i], rows["k"], rows["v"], 0.4)
        torch.testing.assert_close(found[i, head], expected, atol=1e-5, rtol=1e-5)


def test_spans_with_granules_cover_every_key_once():
    for first, windows in itertools.product(range(0, 40, 5), (Windows(0, 1, 8), Windows(3, 0, 7), Windows(0, 9, 4))):
        found = spans(first, first + 5, windows)
        assert [found[0].begin, found[-1].end] == [0, first + 5]
        assert all(a.end == b.begin for a, b in itertools.pairwise(found))


# Tables and matrices


def test_codebooks_are_fixed_points():
    """Each entry is the mean of its cell; 1 bit in many dimensions is the mean of half a Gaussian."""
    for bits, dim in ((1, 2), (2, 16), (4, 128), (6, 80)):
        entries = np.array(sphere_codebook(bits, dim))
        assert len(entries) == 2**bits and step(entries, dim)[0] < 1e-9
        np.testing.assert_allclose(entries, -entries[::-1], atol=1e-9)
    assert sphere_codebook(1, 4096)[1] == pytest.approx(np.sqrt(2 / np.pi), rel=1e-3)


def test_philox_knows_its_published_answers():
    zeros = random_matrices.philox(np.zeros((1, 4), np.uint64), (0, 0))
    assert zeros.tolist() == [[0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]]
    ones = random_matrices.philox(np.full((1, 4), 0xFFFFFFFF, np.uint64), (0xFFFFFFFF, 0xFFFFFFFF))
    assert ones.tolist() == [[0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]]


def test_haar_matrices_are_orthogonal_and_differ():
    first, second = (random_matrices.haar_matrix(12, 0, layer, 3) for layer in (0, 1))
    np.testing.assert_allclose(first @ first.T, np.eye(12), atol=1e-12)
    assert not np.allclose(first, second)


def test_help_names_every_family():
    from kvq.builtin_schemes import FAMILIES
    from kvq.perplexity_options import EPILOG

    assert [name for name in FAMILIES if name not in EPILOG.replace("\n", " ")] == []
