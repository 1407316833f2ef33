"""Writes formats/dump.md from numpy arrays."""

from dataclasses import dataclass, fields
from pathlib import Path

import h5py
import numpy as np

from ..packing import to_bf16_bits

FORMAT, VERSION = "kvq-dump", "1.0"
METRIC_VERSION = "1.1"  # of a file that has o_proj_metric
FEATURES_VERSION = "1.2"  # of a file that has one of FEATURES
FEATURES = ("logit_softcapping", "sink_logits")  # a reader that ignored them would compute another softmax
DATASETS = ("rope_inv_freq", "sink_logits")
# float16_bits: float16 as bit patterns in uint16, as other writers of HDF5 store it.
DTYPES = ("float32", "float16", "float16_bits", "bfloat16")


@dataclass(frozen=True)
class LayerFacts:
    """The attributes of one layer group; those of DATASETS are datasets beside them."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    softmax_scale: float
    sliding_window: int = 0
    kind: str = "gqa"
    rope_layout: str = "none"
    rotary_dim: int = 0
    rotary_offset: int = 0
    rope_attention_factor: float = 1.0
    rope_inv_freq: tuple[float, ...] = ()
    logit_softcapping: float | None = None
    sink_logits: tuple[float, ...] = ()

    def attributes(self) -> dict[str, object]:
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in DATASETS}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def features(self) -> set[str]:
        """Words of `requires`."""
        return {name for name in FEATURES if getattr(self, name)}


def write_layer_facts(file: h5py.File, index: int, facts: LayerFacts) -> h5py.Group:
    """Makes the group of a layer with its attributes and small datasets; the root's `requires` and `version` follow."""
    group = file.create_group(f"layers/{index}")
    group.attrs.update(facts.attributes())
    for name in DATASETS:
        if getattr(facts, name):
            group.create_dataset(name, data=np.array(getattr(facts, name), dtype="<f8"))
    if facts.features:
        known = set(file.attrs.get("requires", "").split(",")) - {""}
        file.attrs["requires"] = ",".join(sorted(known | facts.features))
        raise_version(file, FEATURES_VERSION)
    return group


def output_metric(o_proj: np.ndarray, kv_heads: int, v_head_dim: int) -> np.ndarray:
    """float32 [Hkv, Dv, Dv], symmetric: the sum of W_h^T W_h over the query heads of each KV head, summed in binary64.

    o_proj: [hidden, Hq * Dv], row = output channel; W_h has the columns of query head h
    """
    metric = np.empty((kv_heads, v_head_dim, v_head_dim), np.float32)
    for head, columns in enumerate(np.split(o_proj, kv_heads, axis=1)):
        rows = columns.reshape(-1, v_head_dim).astype(np.float64)  # of all query heads of the group
        square = rows.T @ rows
        metric[head] = (square + square.T) / 2
    return metric


def to_stored(x: np.ndarray, dtype: str) -> tuple[np.ndarray, str]:
    """(x as the file stores it, its `kvq_dtype`). float32 rounds to nearest even; 16-bit patterns are stored
    unchanged."""
    if dtype == "bfloat16":
        bits = x if x.dtype == np.uint16 else to_bf16_bits(np.ascontiguousarray(x, np.float32))
        return bits.astype("<u2"), "bfloat16"
    if dtype == "float16_bits":
        return x.astype("<f2").view("<u2"), "float16"
    return x.astype("<f2" if dtype == "float16" else "<f4"), dtype


def raise_version(file: h5py.File, version: str) -> None:
    """Versions are compared as text, because 1.x has one digit."""
    file.attrs["version"] = max(version, str(file.attrs["version"]))


class ArrayWriter:
    """One dump file; use as a context manager. The caller makes the file appear atomically (files.atomic_path)."""

    def __init__(self, path: Path):
        # The oldest encodings that HDF5 1.10 reads, because h5py may bundle a newer library.
        self.file = h5py.File(path, "w", libver=("earliest", "v110"))

    def __enter__(self) -> "ArrayWriter":
        return self

    def __exit__(self, *_) -> None:
        self.file.close()

    def root(self, **attributes: object) -> None:
        """Writes attributes of the root: model_name, capture_point, num_layers, producer and optional ones; None omits
        an attribute."""
        for name, value in ({"format": FORMAT, "version": VERSION} | attributes).items():
            if value is not None:
                self.file.attrs[name] = value

    def tokens(self, lengths: np.ndarray, positions: np.ndarray, generated: np.ndarray | None = None) -> None:
        """lengths [S] of the sequences, positions [T], generated [T] of 0 and 1."""
        self.file["cu_seqlens"] = np.concatenate([[0], np.cumsum(lengths)]).astype("<i8")
        self.file["positions"] = positions.astype("<i8")
        if generated is not None:
            self.file["generated"] = generated.astype(np.uint8)

    def layer(self, index: int, facts: LayerFacts, tensors: dict[str, np.ndarray], dtypes: dict[str, str]) -> None:
        """tensors: q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] (not for mla_rope); dtypes: one of DTYPES for each."""
        group = write_layer_facts(self.file, index, facts)
        for name, x in tensors.items():
            stored, kvq_dtype = to_stored(x, dtypes[name])
            group.create_dataset(name, data=stored).attrs["kvq_dtype"] = kvq_dtype

    def metric(self, index: int, metric: np.ndarray) -> None:
        """o_proj_metric [Hkv, Dv, Dv] of a layer. Call it after root() and after layer()."""
        self.file[f"layers/{index}"].create_dataset("o_proj_metric", data=metric.astype("<f4"))
        raise_version(self.file, METRIC_VERSION)
