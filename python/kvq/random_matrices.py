"""Random matrices of the schemes: the same numbers as kvq-eval draws, up to the rounding of double arithmetic.

Philox4x32-10 with the seed as key and the counter (block, purpose, layer, stream): a stream for each use, layer, head
and side."""

import numpy as np

HAAR, QJL = 1, 6  # purposes
MULTIPLIERS, WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
LOW = np.uint64(0xFFFFFFFF)


def philox(counters: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """counters uint64 [N, 4] of 32-bit words -> random words of the same shape."""
    c, k = counters.T.astype(np.uint64), list(key)
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(MULTIPLIERS[0]), c[2] * np.uint64(MULTIPLIERS[1])
        high0, high1 = p0 >> np.uint64(32), p1 >> np.uint64(32)
        c = np.stack([high1 ^ c[1] ^ np.uint64(k[0]), p1 & LOW, high0 ^ c[3] ^ np.uint64(k[1]), p0 & LOW])
        k = [(word + step) & 0xFFFFFFFF for word, step in zip(k, WEYL)]
    return c.T


def normals(count: int, seed: int, purpose: int, layer: int, stream: int) -> np.ndarray:
    """Standard Gaussian numbers by Box and Muller, float64 [count]."""
    pairs = (count + 1) // 2  # a pair takes two uniform numbers, each of them two words
    blocks = np.zeros((pairs, 4), np.uint64)
    blocks[:, 0], blocks[:, 1:] = np.arange(pairs), (purpose, layer, stream)
    words = philox(blocks, (seed & 0xFFFFFFFF, seed >> 32)).reshape(pairs, 2, 2)
    bits = (words[..., 0] >> np.uint64(5) << np.uint64(26)) | (words[..., 1] >> np.uint64(6))
    first, second = ((bits.astype(np.float64) + 0.5) * 2.0**-53).T
    radius, angle = np.sqrt(-2.0 * np.log(first)), 2.0 * np.pi * second
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).ravel()[:count]


def gaussian_matrix(dim: int, seed: int, purpose: int, layer: int, stream: int) -> np.ndarray:
    return normals(dim * dim, seed, purpose, layer, stream).reshape(dim, dim)


def haar_matrix(dim: int, seed: int, layer: int, stream: int) -> np.ndarray:
    """An orthogonal matrix of the Haar measure, float64 [dim, dim]."""
    q, r = np.linalg.qr(gaussian_matrix(dim, seed, HAAR, layer, stream))
    return q * np.where(np.diag(r) < 0, -1.0, 1.0)


def stream_of(kv_head: int, side: str) -> int:
    """The random stream of a head and a side."""
    return 2 * kv_head + (side == "v")
