"""Trellis codes of formats/packing.md in numpy: the values of codes, and the search for codes, many rows at a time.

Shapes: N rows, G groups of g channels, S states of a trellis.
"""

import numpy as np

from . import integer_search as integer
from .scheme import LONGEST_SEAM, Scheme

HALF = np.float32(0.5)
# Elements of the largest temporary array of the trellis search and of the centroid search, so that the array fits a
# cache.
CHUNK = 1 << 18


def trellis_values(codes: np.ndarray, scheme: Scheme) -> np.ndarray:
    """v of the codes [..., g], float32, by the definition."""
    value = None
    for q, half in enumerate(np.array(scheme.theta, np.float32) * HALF):
        k, i = divmod(q, scheme.bits)
        term = np.where(np.roll(codes, k, axis=-1) >> i & 1, half, -half)
        value = term if value is None else value + term
    return value


def trellis_table(scheme: Scheme) -> np.ndarray:
    """v of a channel for all windows, float32 [2^(b (m + 1))]. Index: c[0] + c[-1] 2^b + c[-2] 2^(2 b) + ..., where
    c[-k] is the code k channels before."""
    half = np.array(scheme.theta, np.float32) * HALF
    place = np.arange(2 ** len(half))
    value = np.where(place & 1, half[0], -half[0])
    for q in range(1, len(half)):
        value = value + np.where(place >> q & 1, half[q], -half[q])
    return value


def best_paths(y: np.ndarray, scheme: Scheme) -> np.ndarray:
    """Codes of y [N, G, g], uint8, by Viterbi."""
    targets = y.reshape(-1, y.shape[2])
    codes = np.empty(targets.shape, np.uint8)
    if scheme.search == "integer":
        search, rows = integer_viterbi, integer.rows_of_chunk(CHUNK, y.shape[2], scheme)
    else:
        search, rows = viterbi, max(1, CHUNK >> (scheme.bits * (scheme.memory + 1)))
    for first in range(0, len(targets), rows):
        codes[first : first + rows] = search(targets[first : first + rows], scheme)
    return codes.reshape(y.shape)


# Search binary32


def viterbi(y: np.ndarray, scheme: Scheme) -> np.ndarray:
    """Codes of y [N, g], uint8. The first search finds the state at the seam, the second search the codes from the seam
    around to the seam.

    Costs are [S, N], with rows along the last axis, so that numpy's inner loops run over rows.
    """
    y = np.ascontiguousarray(y.T)
    size, count = y.shape
    length, cost = min(size, LONGEST_SEAM), np.zeros((2 ** (scheme.bits * scheme.memory), count), np.float32)
    cost, oldest = walk(np.concatenate([y[size - length :], y[:length]]), cost, scheme)
    seam, _ = trace_back(first_smallest(cost), oldest[length:], scheme)
    cost = np.full(cost.shape, np.inf, np.float32)
    cost[seam, np.arange(count)] = 0
    return trace_back(seam, walk(y, cost, scheme)[1], scheme)[1]


def walk(y: np.ndarray, cost: np.ndarray, scheme: Scheme) -> tuple[np.ndarray, list[np.ndarray]]:
    """Steps over y [n, N] from the costs [S, N].

    returns (the costs at the end, for each step the code that the best path to each state dropped, uint8 [S, N])
    """
    values, alphabet, oldest = trellis_table(scheme)[:, None], 2**scheme.bits, []
    for channel in y:
        error = channel - values
        paths = (error * error).reshape(len(cost), alphabet, -1) + cost[:, None]
        cost, dropped = smallest(paths.reshape(alphabet, len(cost), -1))
        oldest.append(dropped)
    return cost, oldest


# Search integer


def integer_viterbi(y: np.ndarray, scheme: Scheme) -> np.ndarray:
    """Codes of y [N, g], uint8. As in viterbi(), costs are [S, N], but int64."""
    gains = bit_gains(np.ascontiguousarray(y.T), scheme)
    size, count = len(gains), y.shape[0]
    cost = np.zeros((2 ** (scheme.bits * scheme.memory), count), np.int64)
    cost, _ = integer_walk(gains, range(-integer.SEAM, 0), cost, scheme)
    cost, oldest = integer_walk(gains, range(integer.first_run(size)), cost, scheme)
    seam, _ = trace_back(first_smallest(cost), oldest, scheme)
    if size < integer.ONE_RUN:
        cost = np.full(cost.shape, integer.OTHER_STATES * integer.unit(scheme.bits))
        cost[seam, np.arange(count)] = 0
        _, oldest = integer_walk(gains, range(size), cost, scheme)
    return trace_back(seam, oldest, scheme)[1]


def bit_gains(y: np.ndarray, scheme: Scheme) -> np.ndarray:
    """X of y [g, N], int64 [g, b, N]."""
    # Clamped first, so that nothing overflows; 256 * 4.5 is an integer, so t is the same.
    t = np.rint(y.clip(-integer.LARGEST_TARGET, integer.LARGEST_TARGET) * integer.TARGET_UNIT).astype(np.int64)
    total = sum(np.roll(t, -k, axis=0)[:, None] * own[:, None] for k, own in enumerate(integer.integer_taps(scheme)))
    return (total + (1 << integer.GAIN_SHIFT - 1)) >> integer.GAIN_SHIFT


def integer_walk(
    gains: np.ndarray, channels: range, cost: np.ndarray, scheme: Scheme
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Steps over the channels, each modulo g, with the X of all g channels [g, b, N]; otherwise as walk()."""
    windows, oldest = integer.window_costs(scheme).reshape(len(cost), -1, 1), []
    signs = integer.code_signs(scheme.bits)
    for j in channels:
        paths = cost[:, None] + windows
        cost, dropped = smallest(paths.reshape(len(signs), len(cost), -1))
        gain = signs @ gains[j % len(gains)]  # the same for all paths that reach a state
        cost.reshape(-1, *gain.shape)[:] -= gain
        oldest.append(dropped)
    return cost, oldest


# Both searches


def smallest(paths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """paths [K, S, N] -> (the minimum over K, the first index of the minimum as uint8), each [S, N]"""
    best, place = paths[0], np.zeros(paths.shape[1:], np.uint8)
    for k in range(1, len(paths)):
        place[paths[k] < best] = k
        best = np.minimum(best, paths[k])
    return best, place


def first_smallest(cost: np.ndarray) -> np.ndarray:
    """cost [S, N] -> index of the minimum over S, the first on a tie, int64 [N]"""
    return cost.argmin(axis=0)


def trace_back(state: np.ndarray, oldest: list[np.ndarray], scheme: Scheme) -> tuple[np.ndarray, np.ndarray]:
    """For the paths that end in state [N]: (the state before the first step [N], codes [N, n])."""
    codes = np.empty((len(oldest), len(state)), np.uint8)
    rows, top_place = np.arange(len(state)), scheme.bits * (scheme.memory - 1)
    for j in reversed(range(len(oldest))):
        codes[j] = state & scheme.top
        state = (state >> scheme.bits) + (oldest[j][state, rows].astype(np.int64) << top_place)
    return state, codes.T
