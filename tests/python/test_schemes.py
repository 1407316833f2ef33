"""Schemes that cannot be are refused."""

import numpy as np
import pytest
from code_samples import codebook, gaussian

from kvq import packing
from kvq.scheme import MixedScheme, Scheme, Tables


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


FINE = (0.5, 2.0**-24, 1.0, 2.0**24, 1.0, 1.0, 1.0, 1.0)  # of widths 4, 2 and 1


@pytest.mark.parametrize(
    "coder, rule, gains, match",
    [
        ("symmetric", "absmax", FINE, "scale_rule"),
        ("symmetric", "rms", FINE, "scale_rule"),
        ("symmetric", "norm", FINE[:7], "8 gains"),
        ("symmetric", "norm", (0.5, 0.0, *FINE[2:]), "width 2"),
        ("symmetric", "norm", (-0.5, *FINE[1:]), "width 1"),
        ("symmetric", "norm", (np.nan, *FINE[1:]), "width 1"),
        ("symmetric", "norm", (*FINE[:3], np.nextafter(2.0**24, np.inf), *FINE[4:]), "width 4"),
        ("symmetric", "norm", (0.5, np.nextafter(2.0**-24, 0), *FINE[2:]), "width 2"),
        ("symmetric", "norm", (*FINE[:2], 1.5, *FINE[3:]), "width 3, which the row does not have"),
    ],
)
def test_impossible_gains_are_refused(coder, rule, gains, match):
    assert MixedScheme.make("symmetric", (4, 2, 1, 0), "fp16", "norm", gains=FINE).gains == (2.0**24, 2.0**-24, 0.5)
    with pytest.raises(ValueError, match=match):
        MixedScheme.make(coder, (4, 2, 1, 0), "fp16", rule, gains=gains)


def test_channel_bits_must_fit_the_row():
    with pytest.raises(ValueError, match="channel_bits has 2"):
        packing.encode(gaussian(1, 2, 3), MixedScheme.make("symmetric", (2, 1), "fp16", "norm"))
