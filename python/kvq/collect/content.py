"""`content_hash` and `ranges`: those of the dump that this run does not write, so that statistics of such a dump and of
this run are known to hold the same tokens.

A dump's hash goes over the queries of all tokens, then all keys, then all values. Queries are hashed as they come; the
keys and values of several sequences wait in a temporary file without a name until the last query has come. Without
ranges no file is needed: the hash is then that of merged statistics of one dump for each sequence.
"""

import tempfile
from pathlib import Path

import numpy as np
import xxhash

from .token_plan import TokenPlan

HASH_NAME = "xxh3-128:"


def as_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class RowSpool:
    """Rows that wait: one file for all layers, in `folder`, which the system removes when the process ends."""

    def __init__(self, folder: Path):
        self._file = tempfile.TemporaryFile(prefix=".kvq-", dir=folder)
        self._end = 0
        self._places: dict[tuple[int, str], list[tuple[int, int]]] = {}

    def __enter__(self) -> "RowSpool":
        return self

    def __exit__(self, *_) -> None:
        self._file.close()

    def put(self, layer: int, name: str, rows: np.ndarray) -> None:
        content = as_bytes(rows)
        self._file.seek(self._end)
        self._file.write(content)
        self._places.setdefault((layer, name), []).append((self._end, content.size))
        self._end += content.size

    def take(self, layer: int, name: str):
        """The rows in the order of put(), one call's bytes at a time."""
        for place, size in self._places.get((layer, name), []):
            self._file.seek(place)
            yield self._file.read(size)


class DumpHash:
    """The content hash of one layer of the dump (kvq/dump/dump_file.h). `spool` is not used for one sequence."""

    def __init__(self, plan: TokenPlan, layer: int, spool: RowSpool | None):
        self._plan, self._layer, self._spool = plan, layer, spool
        self._state = xxhash.xxh3_128(as_bytes(plan.starts.astype("<i8")))
        for length in plan.lengths:
            self._state.update(as_bytes(np.arange(length, dtype="<i8") * plan.stride))

    def add(self, index: int, rows: dict[str, np.ndarray]) -> None:
        """rows: q, k and v of sequence `index` as stored; sequences come in order."""
        self._state.update(as_bytes(rows["q"]))
        for name in ("k", "v"):
            if name not in rows:
                continue
            if len(self._plan.lengths) == 1:
                self._state.update(as_bytes(rows[name]))
            else:
                self._spool.put(self._layer, name, rows[name])

    def result(self) -> str:
        state = self._state.copy()
        if self._spool is not None:
            for name in ("k", "v"):
                for content in self._spool.take(self._layer, name):
                    state.update(content)
        return HASH_NAME + state.hexdigest()


class JoinedHash:
    """The content hash of merged statistics of one dump for each sequence (`merge` in kvq/stats/layer_stats.cpp)."""

    def __init__(self, plan: TokenPlan):
        self._plan, self._hash = plan, ""

    def add(self, index: int, rows: dict[str, np.ndarray]) -> None:
        length = self._plan.lengths[index]
        state = xxhash.xxh3_128(as_bytes(np.array([0, length], "<i8")))
        state.update(as_bytes(np.arange(length, dtype="<i8") * self._plan.stride))
        for name in ("q", "k", "v"):
            if name in rows:
                state.update(as_bytes(rows[name]))
        own = HASH_NAME + state.hexdigest()
        self._hash = HASH_NAME + xxhash.xxh3_128(f"{self._hash}\n{own}".encode()).hexdigest() if self._hash else own

    def result(self) -> str:
        return self._hash
