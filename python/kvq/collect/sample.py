"""The token sample: tokens with the smallest keys. A key follows from the content of the token's sequence, its place
and the layer, so the sample is that of a dump of the same tokens, and samples of several runs merge."""

import numpy as np
import xxhash

MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


def philox(counter: list[np.ndarray], key: tuple[int, int]) -> list[np.ndarray]:
    """Philox4x32-10 (Salmon et al., SC'11): four uint64 arrays that hold 32-bit numbers -> the same."""
    c, k = list(counter), list(key)
    for _ in range(ROUNDS):
        first, second = MULTIPLIERS[0] * c[0], MULTIPLIERS[1] * c[2]
        c = [
            (second >> HALF) ^ c[1] ^ np.uint64(k[0]),
            second & LOW,
            (first >> HALF) ^ c[3] ^ np.uint64(k[1]),
            first & LOW,
        ]
        k = [(word + step) & 0xFFFFFFFF for word, step in zip(k, KEY_STEPS)]
    return c


def sampling_keys(seed: int, keys: np.ndarray, layer: int) -> np.ndarray:
    """int64 [n], the sampling key of each token of a sequence. @param keys  its k rows as stored [n, Hkv, D]"""
    content = xxhash.xxh3_64_intdigest(keys.reshape(-1).view(np.uint8))
    count = len(keys)
    words = (content & 0xFFFFFFFF, content >> 32, None, layer)
    counter = [np.arange(count, dtype=np.uint64) if w is None else np.full(count, w, np.uint64) for w in words]
    block = philox(counter, (seed & 0xFFFFFFFF, seed >> 32))
    return (((block[0] << HALF) | block[1]) >> np.uint64(1)).astype(np.int64)


class TokenSample:
    """At most `limit` tokens of one layer, those with the smallest keys, ascending.

    rows           "q", "k", "v" -> rows as stored [n, H, D]
    value_weights  float32 [n, Hkv], or None
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.keys = np.empty(0, np.int64)
        self.tokens = np.empty(0, np.int64)
        self.rows: dict[str, np.ndarray] = {}
        self.value_weights: np.ndarray | None = None

    def choose(self, keys: np.ndarray, allowed: np.ndarray) -> np.ndarray:
        """Places in a sequence of the tokens that enter the sample. @param allowed  bool [n]"""
        if len(self.keys) == self.limit:
            allowed = allowed & (keys < self.keys[-1])
        places = np.flatnonzero(allowed)
        return places[np.argsort(keys[places], kind="stable")][: self.limit]

    def add(
        self, keys: np.ndarray, tokens: np.ndarray, rows: dict[str, np.ndarray], value_weights: np.ndarray | None
    ) -> None:
        """Adds chosen tokens of one sequence, all behind those of earlier sequences."""
        all_keys, all_tokens = np.concatenate([self.keys, keys]), np.concatenate([self.tokens, tokens])
        order = np.lexsort((all_tokens, all_keys))[: self.limit]
        self.keys, self.tokens = all_keys[order], all_tokens[order]
        self.rows = {name: _joined(self.rows.get(name), own, order) for name, own in rows.items()}
        if value_weights is not None:
            self.value_weights = _joined(self.value_weights, value_weights, order)


def _joined(known: np.ndarray | None, own: np.ndarray, order: np.ndarray) -> np.ndarray:
    return (own if known is None else np.concatenate([known, own]))[order]
