"""The Lloyd-Max codebook of one coordinate of a random point on the sphere of radius sqrt(n) in n dimensions: the
table of TurboQuant's codes. kvq-eval computes the same table, with other quadrature."""

from functools import cache

import numpy as np

NODES, WEIGHTS = np.polynomial.legendre.leggauss(64)
MOST_STEPS, TOLERANCE = 10000, 1e-10  # of entries, which are stored as binary32


@cache
def sphere_codebook(bits: int, dim: int) -> tuple[float, ...]:
    """2^bits ascending entries."""
    n = max(dim, 2)
    edge = np.sqrt(n)
    grid = np.linspace(-edge, edge, 4097)
    companded = np.concatenate([[0.0], np.cumsum(density((grid[1:] + grid[:-1]) / 2, n) ** (1 / 3))])
    places = (np.arange(2**bits) + 0.5) / 2**bits
    entries = np.interp(places * companded[-1], companded, grid)
    residual, newton, means = step(entries, n)
    for _ in range(MOST_STEPS):
        if residual <= TOLERANCE:
            break
        if not (np.all(np.diff(newton) > 0) and np.all(np.abs(newton) < edge)) or step(newton, n)[0] >= residual:
            newton = means  # Lloyd's own step always lowers the distortion
        entries = newton
        residual, newton, means = step(entries, n)
    return tuple(float(x) for x in entries)


def density(t: np.ndarray, n: int) -> np.ndarray:
    """Not normalized, because only quotients are needed: with t = sqrt(n) sin(phi), cos(phi)^(n - 3)."""
    cosine = np.sqrt(np.maximum(0.0, 1.0 - t * t / n))
    return np.where(cosine > 0, np.maximum(cosine, 1e-300) ** (n - 3), 0.0)


def step(entries: np.ndarray, n: int) -> tuple[float, np.ndarray, np.ndarray]:
    """(largest distance of an entry from the mean of its cell, Newton's next entries, the means)"""
    edge = np.sqrt(n)
    borders = np.concatenate([[-edge], (entries[1:] + entries[:-1]) / 2, [edge]])
    angles = np.arcsin(borders / edge)
    middle, half = (angles[1:] + angles[:-1]) / 2, (angles[1:] - angles[:-1]) / 2
    phi = middle[:, None] + half[:, None] * NODES
    weights = half[:, None] * WEIGHTS * np.maximum(np.cos(phi), 0.0) ** (n - 2) * edge  # dt = sqrt(n) cos(phi) dphi
    mass = weights.sum(1)
    means = (weights * edge * np.sin(phi)).sum(1) / mass
    inner = density(borders[1:-1], n)
    low, high = (
        0.5 * inner * (means[1:] - borders[1:-1]) / mass[1:],
        0.5 * inner * (borders[1:-1] - means[:-1]) / mass[:-1],
    )
    slopes = np.diag(np.append(high, 0.0) + np.insert(low, 0, 0.0)) + np.diag(low, -1) + np.diag(high, 1)
    distance = means - entries
    return float(np.abs(distance).max()), entries + np.linalg.solve(np.eye(len(entries)) - slopes, distance), means
