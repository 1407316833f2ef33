"""Checks of the finished file, before it gets its name. Each is one line of output; one failure and there is no dump.

They read the bytes that were written and redo the model's work on a few tokens in float64, from the projections' output
(capture.py), the anatomy of the layer (survey.py) and what the file itself says of positions, layout, frequencies,
scale, cap, sinks and window. So a wrong layout, a row written to the wrong place or a window that is not applied does
not reach calibration. A QK-norm is redone by the model's own module in float64. Bounds: rounding.py.
"""

from dataclasses import dataclass

import h5py
import numpy as np

from .capture import Witness, WitnessRows
from .rope import rotate
from .rounding import EPSILON, Rounding, distance, pair_norms
from .writer import decode

# Largest relative error of a layer's whole attention output. The bound is wide because exp(logit) amplifies the error
# of an element. A wrong scale, window or head order gives errors of tens of percent.
OUTPUT_BOUND = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
LAYOUTS = ("half", "interleaved")


@dataclass(frozen=True)
class Check:
    """Outcome of one check over all layers."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class LayerView:
    """One layer of a finished file: its attributes, and rows of its tensors in float64."""

    group: h5py.Group
    positions: np.ndarray

    def __getitem__(self, attribute: str):
        return self.group.attrs[attribute]

    @property
    def inv_freq(self) -> np.ndarray:
        return self.group["rope_inv_freq"][:] if "rope_inv_freq" in self.group else np.zeros(0)

    @property
    def heads(self) -> tuple[int, int]:
        return int(self["num_q_heads"]), int(self["num_kv_heads"])

    @property
    def stored_dtype(self) -> str:
        return self.group["k"].attrs["kvq_dtype"]

    def rows(self, tensor: str, rows) -> np.ndarray:
        """Rows of q, k or v as float64 [n, heads, channels]; `rows` a sorted array or a slice."""
        return decode(self.group[tensor][rows], self.stored_dtype)


class Validator:
    """Runs the checks on a file that is complete but not yet renamed."""

    def __init__(self, file: h5py.File, witnesses: dict[int, Witness], rows: WitnessRows, compute_dtype: str):
        self.file, self.witnesses, self.rows = file, witnesses, rows
        positions = file["positions"][:]
        self.layers = {layer: LayerView(file[f"layers/{layer}"], positions) for layer in witnesses}
        self.rounding = Rounding(compute_dtype, next(iter(self.layers.values())).stored_dtype)

    def run(self) -> list[Check]:
        return [self.check_qk_norm(), self.check_rope(), self.check_attention_output()]

    # --- QK-norm: every head has the RMS that the norm gives; RoPE does not change it ---

    def check_qk_norm(self) -> Check:
        name, errors = "QK-norm", []
        for layer, witness in self.witnesses.items():
            errors += [(self._qk_norm_error(layer, tensor), layer, tensor) for tensor in witness.anatomy.norms]
        if not errors:
            return Check(name, True, "the model has none")
        error, layer, tensor = max(errors)
        allowed = self.rounding.relative
        detail = f"RMS of un-rotated heads off by {error:.1e} (allowed {allowed:.1e})"
        return self._verdict(name, error <= allowed, detail, layer, tensor, "captured without the norm?")

    def _qk_norm_error(self, layer: int, tensor: str) -> float:
        """Largest relative error of a head's RMS. The RMS ignores angles, so the check tells a missing norm from a
        wrong rotation."""
        view, rows = self.layers[layer], self.rows.projected
        captured = view.rows(tensor, rows)
        if self.witnesses[layer].anatomy.norm_is_last:
            expected = self._redone(layer, tensor, view["rope_layout"])
        else:
            layout, factor = view["rope_layout"], view["rope_attention_factor"]
            captured = rotate(captured, view.positions[rows], view.inv_freq, layout, factor, inverse=True)
            expected = self._before_rope(layer, tensor)
        error = np.abs(_rms(captured) - _rms(expected))
        return float(
            np.max(error / np.maximum(_rms(expected), self.rounding.floor))
        )  # a padding token may be all zeros

    # --- RoPE: the projections' output, rotated here, gives the captured tensors ---

    def check_rope(self) -> Check:
        tensors = [(layer, tensor) for layer in self.witnesses for tensor in ("q", "k")]
        error, layer, tensor = max(
            (self._rope_error(layer, tensor, self.layers[layer]["rope_layout"]), layer, tensor)
            for layer, tensor in tensors
        )
        blocks = max(self._block_norm_error(layer, tensor) for layer, tensor in tensors)
        still = [layer for layer, view in self.layers.items() if view["rope_layout"] == "none"]
        without = f"; {len(still)} layers have no RoPE and equal the projections' output" if still else ""
        detail = (
            f"rotated by hand, pairs off by at most {error:.2g} and pair norms by {blocks:.2g} of the allowed rounding"
            f"{without}"
        )
        passed = max(error, blocks) <= 1.0
        return self._verdict("RoPE", passed, detail, layer, tensor, "" if passed else self._rope_suspect(layer, tensor))

    def _rope_error(self, layer: int, tensor: str, layout: str) -> float:
        """Largest distance of a captured pair from the pair rotated here, in units of the pair's bound."""
        view, rows = self.layers[layer], self.rows.projected
        redone = self._redone(layer, tensor, layout)
        positions = view.positions[rows]
        return distance(view.rows(tensor, rows), redone, positions, view.inv_freq, layout, self.rounding)

    def _block_norm_error(self, layer: int, tensor: str) -> float:
        """Largest difference of a pair's norm from that of the pair redone here, in units of the pair's bound, which
        has no room for errors of the angle."""
        view = self.layers[layer]
        layout, pairs = view["rope_layout"], len(view.inv_freq)
        redone = self._redone(layer, tensor, layout)
        expected = pair_norms(redone, layout, pairs)
        found = pair_norms(view.rows(tensor, self.rows.projected), layout, pairs)
        return float((np.abs(found - expected) / self.rounding.bound(expected, redone)).max(initial=0.0))

    def _rope_suspect(self, layer: int, tensor: str) -> str:
        recorded = self.layers[layer]["rope_layout"]
        fitting = [layout for layout in LAYOUTS if self._rope_error(layer, tensor, layout) <= 1.0]
        if fitting and recorded not in fitting:
            return f"recorded as '{recorded}', but '{fitting[0]}' fits"
        return f"neither {' nor '.join(LAYOUTS)} pairs fit: positions, frequencies or norm are not as recorded"

    # --- Attention: with the dump's scale, window, head order and sequence borders, attention gives the model's own
    # output ---

    def check_attention_output(self) -> Check:
        name = "attention output"
        errors = [
            (self._output_error(layer, row, output), layer, f"token {row}")
            for layer, witness in self.witnesses.items()
            if "v" in self.layers[layer].group
            for row, output in zip(self.rows.outputs, witness.kept["output"])
        ]
        if not errors:
            return Check(name, True, "not tested: MLA's rotary part alone does not determine it")
        error, layer, where = max(errors)
        bound = OUTPUT_BOUND[self._coarsest_dtype()]
        detail = f"recomputed from the dump, off by {error:.1e} of its norm (allowed {bound:.0e})"
        return self._verdict(
            name, error <= bound, detail, layer, where, "softmax scale, window, cap, sinks, GQA order or borders"
        )

    def _output_error(self, layer: int, row: int, expected: np.ndarray) -> float:
        found = attention_of_token(self.layers[layer], row, self._sequence_start(row))
        return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30))

    # --- shared ---

    def _verdict(self, name: str, passed: bool, detail: str, layer: int, where: str, suspect: str) -> Check:
        return Check(name, passed, detail if passed else f"{detail}; worst in layer {layer} {where}: {suspect}")

    def _coarsest_dtype(self) -> str:
        return max(self.rounding.stored, self.rounding.compute, key=EPSILON.get)

    def _sequence_start(self, row: int) -> int:
        cu_seqlens = self.file["cu_seqlens"][:]
        return int(cu_seqlens[np.searchsorted(cu_seqlens, row, side="right") - 1])

    def _before_rope(self, layer: int, tensor: str) -> np.ndarray:
        """q or k directly before RoPE, float64 [n, heads, D], with pairs where the projection puts them."""
        view, witness = self.layers[layer], self.witnesses[layer]
        return witness.anatomy.before_rope(tensor, witness.kept[tensor], view.heads, int(view["head_dim"]))

    def _redone(self, layer: int, tensor: str, layout: str) -> np.ndarray:
        """q or k as it should enter attention if pairs lie as `layout` says, float64 [n, heads, D]."""
        view, anatomy = self.layers[layer], self.witnesses[layer].anatomy
        positions, factor = view.positions[self.rows.projected], view["rope_attention_factor"]
        before = self._before_rope(layer, tensor)
        return anatomy.behind_rope(tensor, before, positions, view.inv_freq, factor, layout)


def attention_of_token(view: LayerView, row: int, start: int) -> np.ndarray:
    """Attention's output at token `row` of a sequence that begins at `start`, computed from the dump alone; float64
    [Hq, Dv]."""
    window = view["sliding_window"]
    first = max(start, row + 1 - window) if window else start
    query = view.rows("q", slice(row, row + 1))[0]
    key, value = view.rows("k", slice(first, row + 1)), view.rows("v", slice(first, row + 1))
    shared = len(query) // key.shape[1]
    logits = np.einsum("hd,thd->ht", query, np.repeat(key, shared, axis=1)) * view["softmax_scale"]
    if "logit_softcapping" in view.group.attrs:
        logits = view["logit_softcapping"] * np.tanh(logits / view["logit_softcapping"])
    if "sink_logits" in view.group:
        logits = np.concatenate([logits, view.group["sink_logits"][:][:, None]], axis=1)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return np.einsum("ht,thd->hd", weights[:, : len(value)], np.repeat(value, shared, axis=1))


def _rms(x: np.ndarray) -> np.ndarray:
    return np.sqrt(np.mean(x * x, axis=-1))
