"""The PyTorch codec equals the numpy codec bit for bit: tables, trellises, mixed rows, centroids."""

import numpy as np
import pytest
from code_samples import (
    TRELLISES,
    any_nan,
    check_torch,
    gaussian,
    mixed_schemes,
    one_scale_schemes,
    outliers,
    rows,
    same_bits,
    spoiled,
    table_schemes,
    trellis,
    trellis_scheme,
)

from kvq import packing
from kvq.scheme import SEARCHES


@pytest.mark.parametrize("scheme", table_schemes(12), ids=str)
def test_torch_equals_numpy_for_tables(scheme, device):
    check_torch(spoiled(13, rows(13, 41, 24)), scheme, device)


@pytest.mark.parametrize("seed", range(4))
def test_torch_equals_numpy_for_random_mixed_rows(seed, device):
    for scheme in mixed_schemes(seed, 70):
        check_torch(spoiled(seed, rows(14 + seed, 23, 70)), scheme, device)


@pytest.mark.parametrize("seed", range(4))
def test_torch_equals_numpy_for_random_rows_with_one_scale(seed, device):
    for scheme in one_scale_schemes(seed, 70):
        check_torch(spoiled(seed, rows(24 + seed, 23, 70)), scheme, device)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("size", [8, 31, 32, 33, 39, 40, 41, 64, 70, 95, 96, 97])
def test_torch_finds_the_same_seam(size, search, device):
    for bits, memory in ((1, 7), (2, 3)):
        scheme = trellis_scheme(bits, trellis(bits, memory)[1], size, "norm", "fp16", search)
        check_torch(rows(19, 15, 2 * size), scheme, device)


@pytest.mark.parametrize("search", SEARCHES)
def test_torch_has_the_largest_trellis(search, device):
    check_torch(rows(26, 4, 8), trellis_scheme(8, trellis(8, 1)[1], 8, "norm", "fp16", search), device)


@pytest.mark.parametrize("search", SEARCHES)
def test_torch_has_the_same_infinite_costs(search, device):
    check_torch(outliers(64), trellis_scheme(1, trellis(1, 6)[1], 64, "rms", "fp16", search), device)


@pytest.mark.parametrize("steps", [0, 2000])
def test_torch_has_the_largest_integers(monkeypatch, steps, device):
    """With int64, which longer groups need, and with int32."""
    import torch

    from kvq import integer_search, torch_codec

    monkeypatch.setattr(integer_search, "INT32_STEPS", steps)
    y = np.where(gaussian(27, 3, 1, 1024) < 0, -np.inf, np.inf).astype(np.float32)
    y[1], y[2] = np.inf, -np.inf
    for bits, memory in ((1, 8), (4, 2), (5, 1)):
        for theta in ([9.0] * bits * (memory + 1), [-9.0] * bits + [9.0] * bits * memory):
            scheme = trellis_scheme(bits, theta, 1024, search="integer")
            found = torch_codec.best_paths(torch.from_numpy(y).to(device), scheme)
            assert (found.cpu().numpy() == packing.best_paths(y, scheme)).all(), scheme


@pytest.mark.parametrize("search", SEARCHES)
def test_torch_breaks_ties_as_numpy_does(monkeypatch, search, device):
    import torch

    from kvq import torch_codec

    monkeypatch.setitem(torch_codec.CHUNK, device.type, 1 << 9)
    rng = np.random.default_rng(15)
    for bits, memory in TRELLISES[:7]:
        theta = rng.integers(-2, 3, bits * (memory + 1)).astype(float).tolist()
        scheme = trellis_scheme(bits, theta, 9, search=search)
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
    x[1, 9, 3], x[0, 11, 12], x[2, 30, 0], x[0, 30, 1] = np.nan, np.inf, -np.inf, np.nan
    rows, entries = (torch.from_numpy(array).to(device) for array in (x, centroids))
    for heads in (slice(0, 1), slice(0, 3)):
        expected = packing.nearest_centroids(x[heads], centroids[heads])
        found = torch_codec.nearest_centroids(rows[heads], entries[heads])
        assert (found.cpu().numpy() == expected).all() and expected[5] == 2
        assert not expected[[11, 30]].any() and (expected[9] == 0 or heads.stop == 1)
    distances = torch_codec.squared_distances(rows[0], entries[0]).cpu().numpy()
    assert same_bits(any_nan(distances), any_nan(packing.squared_distances(x[0], centroids[0])))
