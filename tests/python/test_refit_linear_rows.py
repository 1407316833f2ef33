"""refit_linear_rows.py and channel_trellis.py against the codec, and refits of rows that Theta gave."""

import channel_trellis
import numpy as np
import pytest
import refit_linear_rows
from code_samples import gaussian, one_scale_schemes, trellis, trellis_scheme

from kvq import packing, trellis_codes

DIM = 40


class Plan:
    """What Coder reads of a plan."""

    dim, centroid_scope = DIM, ""

    def __init__(self, scheme):
        self.scheme = scheme

    def scheme_of(self, head: int):
        return self.scheme


CODERS, TRELLIS = ("trellis", "symmetric"), trellis_scheme(2, trellis(2, 3)[1], DIM, "norm")
MIXED = [s for s in one_scale_schemes(5, DIM) if s.coder in CODERS and s.scale_rule == "norm"]
LINEAR = [scheme.with_scale_type("fp32") for scheme in [*MIXED, TRELLIS]]


@pytest.mark.parametrize("bits, memory", [(1, 3), (2, 1), (2, 3), (3, 2)])
def test_search_with_equal_channels_is_that_of_the_codec(bits, memory):
    scheme, y = trellis_scheme(bits, trellis(bits, memory)[1], DIM), gaussian(bits, 50, DIM)
    shape = channel_trellis.Shape(bits, memory)
    tables = shape.tables(np.tile(scheme.theta, (DIM, 1)))
    assert (channel_trellis.search(y, tables, shape) == trellis_codes.best_paths(y[:, None], scheme)[:, 0]).all()


@pytest.mark.parametrize("scheme", LINEAR, ids=lambda scheme: scheme.coder)
def test_theta_decodes_as_the_codec_does(scheme):
    coder, x = refit_linear_rows.Coder(Plan(scheme), 0), gaussian(1, 30, DIM)
    decoded = coder.decode(x, coder.own_bits(x), coder.theta)
    assert decoded == pytest.approx(packing.decode(packing.encode(x, scheme), scheme), rel=1e-4, abs=1e-6)
    assert (coder.own_bits(x) != coder.searched_bits(x, coder.theta)).mean() < 1e-3


@pytest.mark.parametrize("kind", ["dense", "band", "metric", "tied"])
def test_refit_finds_the_theta_that_made_the_rows(kind):
    coder = refit_linear_rows.Coder(Plan(LINEAR[-1]), 0)
    bits, true = np.random.default_rng(0).integers(0, 2, (400, coder.width)) - 0.5, coder.theta.copy()
    coder.theta = true * (1 + (true != 0) * 0.1)
    x, metric = bits @ true.T, np.diag(np.arange(1.0, DIM + 1))
    equations = refit_linear_rows.Equations(coder, x, bits, true)
    assert equations.solve(kind, 0, metric) == pytest.approx(true, abs=1e-8)
