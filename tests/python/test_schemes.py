"""Schemes that cannot be are refused."""

import numpy as np
import pytest
from code_samples import codebook, gaussian, trellis

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
        dict(coder="trellis", bits=1, memory=1, theta=(1.0, 1.0), search="float"),
        dict(coder="trellis", bits=1, memory=1, theta=(1.0, 1.0), search=""),
        dict(coder="symmetric", bits=1, search="integer"),
        dict(coder="codebook", bits=1, codebook=(0.0, 1.0), search="integer"),
        dict(coder="exact", bits=16, search="integer"),
    ],
)
def test_impossible_tables_are_refused(fields):
    with pytest.raises(ValueError):
        Scheme(**{"group_size": 4, "scale_rule": "norm"} | fields)


def test_a_search_is_refused_in_one_line():
    for fields, message in (
        (dict(coder="trellis", memory=1, theta=(1.0, 1.0)), "search of trellis codes: expected binary32 or integer"),
        (dict(coder="symmetric"), "search of symmetric codes: expected binary32"),
    ):
        with pytest.raises(ValueError) as error:
            Scheme(**{"bits": 1, "group_size": 4, "scale_rule": "norm", "search": "best"} | fields)
        assert str(error.value) == f"{message}, found 'best'"


def test_each_width_has_its_own_search():
    tables = Tables(trellises={1: (*trellis(1, 2), "integer"), 2: trellis(2, 1), 3: (*trellis(3, 1), "integer")})
    mixed = MixedScheme.make("trellis", (3,) * 7 + (2,) * 8 + (1,) * 8, "fp16", "norm", tables)
    found = [(part.scheme.coder, part.scheme.search) for part in mixed.parts]
    assert found == [("symmetric", "binary32"), ("trellis", "binary32"), ("trellis", "integer")]
    assert [part.scheme.search for part in mixed.with_scale_type("fp32").parts] == [search for _, search in found]
    short, whole = (tables.scheme("trellis", 1, size, "fp16", "norm") for size in (4, 8))
    assert whole.search == short.search == "integer"
    assert [scheme.segments(8)[0].scheme.search for scheme in (short, whole)] == ["binary32", "integer"]


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
