"""Intervals of differences between two candidates that were measured on the same windows."""

import math
from dataclasses import dataclass

import numpy as np

SAMPLES = 2000


@dataclass(frozen=True)
class Change:
    """perplexity / perplexity of the baseline - 1, with a 95% interval; `low` and `high` are None for one window."""

    change: float
    low: float | None
    high: float | None


def paired_change(baseline: list[float], own: list[float], seed: int) -> Change:
    """The change from `baseline` to `own`, both -ln p a token of the same windows, all of one length.

    The interval holds 95% of 2000 bootstrap samples: each draws as many windows as there are, with replacement, and
    takes both candidates' numbers of a drawn window, so that what makes a text hard to predict cancels.
    """
    difference = np.subtract(own, baseline)
    change = math.expm1(difference.mean())
    if len(difference) < 2:
        return Change(change, None, None)
    drawn = np.random.default_rng(seed).integers(0, len(difference), (SAMPLES, len(difference)))
    low, high = np.percentile(np.expm1(difference[drawn].mean(axis=1)), [2.5, 97.5])
    return Change(change, float(low), float(high))
