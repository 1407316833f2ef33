"""Writes formats/dump.md, version 1.2 for capped logits or learned sinks, 1.1 with an o_proj_metric, else 1.0.

The number of tokens is known before the first forward pass, so every dataset is allocated whole and contiguous, and
each layer of each prompt goes straight to its rows: memory does not grow with the dump. Values are checked on their way
out; a NaN ends the run at once, not after an hour.
"""

import os
from contextlib import suppress
from pathlib import Path

import h5py
import numpy as np
import torch

from ..errors import EXIT_NUMERICAL, EXIT_UNSUPPORTED, KvqError
from .array_writer import FORMAT, METRIC_VERSION, VERSION, LayerFacts, raise_version, write_layer_facts


def encode(x: torch.Tensor, dtype: str) -> tuple[np.ndarray, bool]:
    """(x as the file stores it, whether all numbers are finite). bfloat16 is stored as uint16 bit patterns."""
    x = x.detach().to({"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[dtype]).cpu()
    finite = bool(torch.isfinite(x).all())
    if dtype == "bfloat16":
        return x.contiguous().view(torch.int16).numpy().view(np.uint16), finite
    return x.contiguous().numpy(), finite


def decode(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Stored values -> float64."""
    if dtype == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return raw.astype(np.float64)


class LayerLedger:
    """What a run knows of the layers whose rows it was given: their facts, which must not change, and magnitudes.

    A Recorder calls append(layer, facts, first_row, tensors) of a class derived from this.
    """

    def __init__(self, dtype: str):
        self.dtype = dtype
        self.layers: dict[int, LayerFacts] = {}
        self._peaks: dict[tuple[int, str], float] = {}

    def expect_same_facts(self, layer: int, facts: LayerFacts) -> bool:
        """@return  whether the layer is new"""
        known = self.layers.setdefault(layer, facts)
        if known is not facts and known != facts:
            changed = [name for name, value in vars(facts).items() if getattr(known, name) != value]
            raise KvqError(
                EXIT_UNSUPPORTED,
                f"layer {layer}: {', '.join(changed)} changed between two forward passes",
                "RoPE that depends on the length (dynamic, longrope): take sequences of one regime only",
            )
        return known is facts

    def note_values(self, layer: int, name: str, first_row: int, x: torch.Tensor, finite: bool) -> None:
        """@param finite  whether all numbers of x [n, H, D] are finite in the stored type"""
        if not finite:
            self._refuse_nonfinite(layer, name, first_row, x)
        self._peaks[layer, name] = max(self._peaks.get((layer, name), 0.0), x.abs().max().item())

    def largest_magnitudes(self) -> dict[str, float]:
        """{"q": ..., "k": ..., "v": ...} over all layers. Raises for a tensor of zeros, because every reader refuses
        one."""
        zeros = [f"layer {layer} {name}" for (layer, name), peak in self._peaks.items() if peak == 0]
        if zeros:
            raise KvqError(EXIT_NUMERICAL, f"{zeros[0]}: expected some values, found only zeros")
        return {
            name: max(peak for (_, other), peak in self._peaks.items() if other == name)
            for name in sorted({name for _, name in self._peaks}, key="qkv".index)
        }

    def _refuse_nonfinite(self, layer: int, name: str, first_row: int, x: torch.Tensor) -> None:
        if torch.isfinite(x).all():
            raise KvqError(
                EXIT_NUMERICAL,
                f"layer {layer} {name}: {x.abs().max().item():.3g} does not fit {self.dtype}",
                "use --dtype bfloat16 or --dtype float32",
            )
        bad = (~torch.isfinite(x)).flatten(1).any(1).nonzero()[0].item()
        raise KvqError(
            EXIT_NUMERICAL,
            f"layer {layer} {name}: found NaN or Inf at token {first_row + bad}",
            "the model itself may overflow: try --compute-dtype float32",
        )


def expect_extra(layer: int, name: str, array: np.ndarray) -> None:
    if not np.isfinite(array).all():
        raise KvqError(
            EXIT_NUMERICAL,
            f"layer {layer} {name}: found values that are not finite in {array.dtype.name}",
            "leave this part out",
        )


def expect_metric(layer: int, metric: np.ndarray) -> None:
    if not np.isfinite(metric).all() or not metric.any():
        found = "only zeros" if not metric.any() else "values that are not finite"
        raise KvqError(
            EXIT_NUMERICAL,
            f"layer {layer} o_proj_metric: expected the squares of an output projection, found {found}",
            "the weights of o_proj may be damaged",
        )


class DumpWriter(LayerLedger):
    """One dump being written. Use as a context manager; the file is complete only after the block."""

    def __init__(self, path: Path, num_tokens: int, dtype: str):
        super().__init__(dtype)
        self._path = path
        self.num_tokens = num_tokens
        # The oldest encodings that HDF5 1.10 reads, because h5py may bundle HDF5 2.0.
        self._file = h5py.File(path, "w", libver=("earliest", "v110"))

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self._file.close()
            return
        # The block failed. A full disk makes closing fail, too; the first error is the one to report, and an empty file
        # leaves HDF5 room for what it still wants to write.
        with suppress(OSError):
            os.truncate(self._path, 0)
        with suppress(OSError, RuntimeError):
            self._file.close()

    def write_root(self, attributes: dict[str, object]) -> None:
        self._file.attrs["format"] = FORMAT
        self._file.attrs["version"] = VERSION
        for name, value in attributes.items():
            if value is not None:
                self._file.attrs[name] = value

    def write_tokens(self, cu_seqlens: np.ndarray, positions: np.ndarray, generated: np.ndarray | None) -> None:
        """cu_seqlens [S + 1], positions [T], generated [T] of 0 and 1 or None."""
        self._file.create_dataset("cu_seqlens", data=cu_seqlens.astype("<i8"))
        self._file.create_dataset("positions", data=positions.astype("<i8"))
        if generated is not None:
            self._file.create_dataset("generated", data=generated.astype(np.uint8))

    def append(self, layer: int, facts: LayerFacts, first_row: int, tensors: dict[str, torch.Tensor]) -> None:
        """Writes rows `first_row ..` of a layer. tensors: q [n, Hq, D], k [n, Hkv, D], v [n, Hkv, Dv] (not for MLA)."""
        if self.expect_same_facts(layer, facts):
            write_layer_facts(self._file, layer, facts)
        for name, x in tensors.items():
            stored, finite = encode(x, self.dtype)
            dataset = self._dataset(layer, name, stored)
            self.note_values(layer, name, first_row, x, finite)
            dataset[first_row : first_row + len(stored)] = stored

    def write_extra(self, layer: int, name: str, array: np.ndarray, **attributes: str) -> None:
        """`o_proj` or `output_curvature` of a layer."""
        expect_extra(layer, name, array)
        dataset = self._file[f"layers/{layer}"].create_dataset(name, data=array)
        dataset.attrs.update(attributes)

    def write_metric(self, layer: int, metric: np.ndarray) -> None:
        """`o_proj_metric` of a layer, float32 [Hkv, Dv, Dv]."""
        expect_metric(layer, metric)
        self._file[f"layers/{layer}"].create_dataset("o_proj_metric", data=metric)
        raise_version(self._file, METRIC_VERSION)

    def _dataset(self, layer: int, name: str, stored: np.ndarray) -> h5py.Dataset:
        group = self._file[f"layers/{layer}"]
        if name not in group:
            dataset = group.create_dataset(
                name, shape=(self.num_tokens, *stored.shape[1:]), dtype=stored.dtype.newbyteorder("<")
            )
            dataset.attrs["kvq_dtype"] = self.dtype
        return group[name]
