"""The nearest centroid of a row, and of all heads of a token."""

import pytest
from code_samples import floats, gaussian, same_bits

from kvq import packing


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
