"""The trellis search of formats/packing.md (d) in numpy, with values that every channel has for itself.

Tables [g, W, 2] have -2 v and v^2 of the W branches of each channel: (-2 v) y + v^2 = (y - v)^2 - y^2. The number of a
branch has the codes of a window, the newest in the lowest digit. Only rounding differs from packing.md: costs lack y^2.
Arrays have rows along their last axis."""

from dataclasses import dataclass

import numpy as np

from kvq.scheme import LONGEST_SEAM

CHUNK = 1 << 18  # numbers in the largest array of a search
UNREACHABLE = np.float32(1e30)


@dataclass(frozen=True)
class Shape:
    """Memory 0: each channel takes its nearest value."""

    bits: int
    memory: int

    @property
    def states(self) -> int:
        return 1 << self.bits * self.memory

    @property
    def branches(self) -> int:
        return 1 << self.bits * (self.memory + 1)

    def tables(self, taps: np.ndarray) -> np.ndarray:
        """taps [g, bits (memory + 1)]"""
        signs = (np.arange(self.branches)[:, None] >> np.arange(taps.shape[1]) & 1) - 0.5
        v = taps @ signs.T
        return np.stack([-2 * v, v * v], 2).astype(np.float32)


def forward(y, tables, cost, shape):
    """Costs [S, N] of the best path to each state before each step over y [n, N], and after the last."""
    costs, alphabet = [cost], 1 << shape.bits
    for own, table in zip(y, tables):
        branch = (table @ np.stack([own, np.ones_like(own)])).reshape(len(cost), alphabet, -1)
        branch += costs[-1][:, None]
        costs.append(branch.reshape(alphabet, len(cost), -1).min(0))
    return costs


def backward(y, tables, costs, state, shape):
    """For the best paths that end in state [N]: (the state before the first step [N], codes [n, N])."""
    lanes, codes = np.arange(len(state)), np.empty(y.shape, np.uint8)
    older = np.arange(1 << shape.bits)[:, None]
    for p in reversed(range(len(y))):
        codes[p] = state & (1 << shape.bits) - 1
        before = (state >> shape.bits) + older * (shape.states >> shape.bits)
        branch = tables[p][state + older * shape.states]
        total = costs[p][before, lanes] + branch[..., 0] * y[p] + branch[..., 1]
        state = before[total.argmin(0), lanes]
    return state, codes


def search(y: np.ndarray, tables: np.ndarray, shape: Shape) -> np.ndarray:
    """Tail-biting codes of y [N, g], uint8: the two runs of packing.md (d), with tables of every channel."""
    codes, rows = np.empty(y.shape, np.uint8), max(1, CHUNK // shape.branches)
    for first in range(0, len(y), rows):
        codes[first : first + rows] = search_rows(y[first : first + rows].T.astype(np.float32), tables, shape).T
    return codes


def search_rows(y, tables, shape):
    if not shape.memory:
        return np.stack([(table @ np.stack([own, np.ones_like(own)])).argmin(0) for own, table in zip(y, tables)])
    length, lanes = min(len(y), LONGEST_SEAM), np.arange(y.shape[1])
    around = np.r_[len(y) - length : len(y), :length]
    costs = forward(y[around], tables[around], np.zeros((shape.states, len(lanes)), np.float32), shape)
    seam, _ = backward(y[:length], tables[:length], costs[length:], costs[-1].argmin(0), shape)
    start = np.full((shape.states, len(lanes)), UNREACHABLE)
    start[seam, lanes] = 0
    return backward(y, tables, forward(y, tables, start, shape), seam, shape)[1]
