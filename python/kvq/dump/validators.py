"""Checks of the finished file, before it gets its name. Each is one line of output; one failure and there is no dump.

They read the bytes that were written and redo the model's work on a few tokens in float64, from the projections' output
(capture.py) and what the file itself says of positions, layout, frequencies, scale and window. So a wrong layout in
families.py, a row written to the wrong place or a window that is not applied does not reach calibration.

Bounds: a value may be off by the rounding of the file, by a few roundings of the model's arithmetic, and by the angle:
the model computes position * frequency in float32, so a late position is rotated by a slightly different angle.
"""

from dataclasses import dataclass

import h5py
import numpy as np

from .capture import NormFacts, Witness, WitnessRows
from .rope import change_layout, pair_channels, rotate
from .writer import decode

# Relative rounding error of one element.
EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
# Smallest error that counts: below it float16 is subnormal and has no relative precision.
FLOOR = {"float32": 1e-37, "float16": 2.0**-20, "bfloat16": 1e-37}
# Roundings from the projections' output through norm and rotation, with room for fused or reordered arithmetic of a
# device.
ROUNDINGS = 16
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
        return self.group["rope_inv_freq"][:]

    @property
    def stored_dtype(self) -> str:
        return self.group["k"].attrs["kvq_dtype"]

    def rows(self, tensor: str, rows) -> np.ndarray:
        """Rows of q, k or v as float64 [n, heads, channels]; `rows` a sorted array or a slice."""
        return decode(self.group[tensor][rows], self.stored_dtype)


class Validator:
    """Runs the checks on a file that is complete but not yet renamed.

    @param moved_from  layout of the rotary pairs in the projections' output; None: RoPE leaves the pairs in place
    """

    def __init__(
        self,
        file: h5py.File,
        witnesses: dict[int, Witness],
        rows: WitnessRows,
        compute_dtype: str,
        moved_from: str | None,
    ):
        self.file, self.witnesses, self.rows = file, witnesses, rows
        self.compute_dtype, self.moved_from = compute_dtype, moved_from
        positions = file["positions"][:]
        self.layers = {layer: LayerView(file[f"layers/{layer}"], positions) for layer in witnesses}

    def run(self) -> list[Check]:
        return [self.check_qk_norm(), self.check_rope(), self.check_attention_output()]

    # --- QK-norm: before RoPE, every head has the RMS that the norm and its weight give ---

    def check_qk_norm(self) -> Check:
        name, errors = "QK-norm", []
        for layer, witness in self.witnesses.items():
            errors += [(self._qk_norm_error(layer, tensor), layer, tensor) for tensor in witness.norms]
        if not errors:
            return Check(name, True, "the model has none")
        error, layer, tensor = max(errors)
        detail = f"RMS of un-rotated heads off by {error:.1e} (allowed {self._rounding():.1e})"
        return self._verdict(name, error <= self._rounding(), detail, layer, tensor, "captured without the norm?")

    def _qk_norm_error(self, layer: int, tensor: str) -> float:
        """Largest relative error of a head's RMS. The RMS ignores angles, so the check tells a missing norm from a
        wrong rotation."""
        view = self.layers[layer]
        rows = self.rows.projected
        captured = rotate(
            view.rows(tensor, rows),
            view.positions[rows],
            view.inv_freq,
            view["rope_layout"],
            view["rope_attention_factor"],
            inverse=True,
        )
        expected = _rms(self._before_rope(layer, tensor, view["rope_layout"]))
        return float(np.max(np.abs(_rms(captured) - expected) / expected))

    # --- RoPE: the projections' output, rotated here, gives the captured tensors ---

    def check_rope(self) -> Check:
        tensors = [(layer, tensor) for layer in self.witnesses for tensor in ("q", "k")]
        error, layer, tensor = max(
            (self._rope_error(layer, tensor, self.layers[layer]["rope_layout"]), layer, tensor)
            for layer, tensor in tensors
        )
        blocks = max(self._block_norm_error(layer, tensor) for layer, tensor in tensors)
        detail = (
            f"rotated by hand, pairs off by at most {error:.2g} and pair norms by {blocks:.2g} of the allowed rounding"
        )
        passed = max(error, blocks) <= 1.0
        return self._verdict("RoPE", passed, detail, layer, tensor, "" if passed else self._rope_suspect(layer, tensor))

    def _rope_error(self, layer: int, tensor: str, layout: str) -> float:
        """Largest distance of a captured pair from the pair rotated here, in units of the pair's bound."""
        view, rows = self.layers[layer], self.rows.projected
        rotated = rotate(
            self._before_rope(layer, tensor, layout),
            view.positions[rows],
            view.inv_freq,
            layout,
            view["rope_attention_factor"],
        )
        difference = view.rows(tensor, rows) - rotated
        bound = self._pair_bound(view, rows) * _pair_norms(rotated, layout, len(view.inv_freq))
        error = _pair_norms(difference, layout, len(view.inv_freq)) / np.maximum(bound, self._floor())
        # RoPE does not touch channels outside the rotary slice, so their bound has no room for angle errors.
        outside = slice(2 * len(view.inv_freq), None)
        bound = np.maximum(self._rounding() * np.abs(rotated[..., outside]), self._floor())
        return float(max(error.max(), (np.abs(difference[..., outside]) / bound).max(initial=0.0)))

    def _block_norm_error(self, layer: int, tensor: str) -> float:
        """Largest change of a pair's norm, which rotation keeps (but for the attention factor), in units of the pair's
        bound."""
        view = self.layers[layer]
        layout = view["rope_layout"]
        before = self._before_rope(layer, tensor, layout)
        expected = _pair_norms(before, layout, len(view.inv_freq)) * view["rope_attention_factor"]
        found = _pair_norms(view.rows(tensor, self.rows.projected), layout, len(view.inv_freq))
        bound = np.maximum(self._rounding() * expected, self._floor())
        return float((np.abs(found - expected) / bound).max())

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
        return self._verdict(name, error <= bound, detail, layer, where, "softmax scale, window, GQA order or borders")

    def _output_error(self, layer: int, row: int, expected: np.ndarray) -> float:
        found = attention_of_token(self.layers[layer], row, self._sequence_start(row))
        return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30))

    # --- shared ---

    def _verdict(self, name: str, passed: bool, detail: str, layer: int, where: str, suspect: str) -> Check:
        return Check(name, passed, detail if passed else f"{detail}; worst in layer {layer} {where}: {suspect}")

    def _stored_dtype(self) -> str:
        return next(iter(self.layers.values())).stored_dtype

    def _coarsest_dtype(self) -> str:
        return max(self._stored_dtype(), self.compute_dtype, key=EPSILON.get)

    def _rounding(self) -> float:
        return ROUNDINGS * EPSILON[self.compute_dtype] + EPSILON[self._stored_dtype()]

    def _floor(self) -> float:
        return max(FLOOR[self.compute_dtype], FLOOR[self._stored_dtype()])

    def _pair_bound(self, view: LayerView, rows: np.ndarray) -> np.ndarray:
        """Allowed error of a pair relative to its norm, [n, 1, pairs]."""
        angle = view.positions[rows, None, None] * view.inv_freq
        return self._rounding() + angle * EPSILON["float32"]

    def _sequence_start(self, row: int) -> int:
        cu_seqlens = self.file["cu_seqlens"][:]
        return int(cu_seqlens[np.searchsorted(cu_seqlens, row, side="right") - 1])

    def _before_rope(self, layer: int, tensor: str, layout: str) -> np.ndarray:
        """q or k directly before RoPE, float64 [n, heads, D], with pairs in `layout`.

        In the output of an MLA projection the rotary part is the last channels (for a query: of each head).
        """
        view, norm = self.layers[layer], self.witnesses[layer].norms.get(tensor)
        num_heads = view["num_q_heads"] if tensor == "q" else view["num_kv_heads"]
        projected = self.witnesses[layer].kept[tensor]
        heads = projected.reshape(len(projected), num_heads, -1)[..., -view["head_dim"] :]
        if norm is not None:
            heads = _normalize(heads, norm)
        return change_layout(heads, 2 * len(view.inv_freq), 0, self.moved_from or layout, layout)


def attention_of_token(view: LayerView, row: int, start: int) -> np.ndarray:
    """Attention's output at token `row` of a sequence that begins at `start`, computed from the dump alone; float64
    [Hq, Dv]."""
    window = view["sliding_window"]
    first = max(start, row + 1 - window) if window else start
    query = view.rows("q", slice(row, row + 1))[0]
    key, value = view.rows("k", slice(first, row + 1)), view.rows("v", slice(first, row + 1))
    shared = len(query) // key.shape[1]
    logits = np.einsum("hd,thd->ht", query, np.repeat(key, shared, axis=1)) * view["softmax_scale"]
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return np.einsum("ht,thd->hd", weights, np.repeat(value, shared, axis=1))


def _normalize(x: np.ndarray, norm: NormFacts) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + norm.epsilon) * norm.weight


def _rms(x: np.ndarray) -> np.ndarray:
    return np.sqrt(np.mean(x * x, axis=-1))


def _pair_norms(x: np.ndarray, layout: str, pairs: int) -> np.ndarray:
    """Norm of every rotary pair of x [n, H, D]: [n, H, pairs]."""
    first, second = pair_channels(layout, 2 * pairs, 0)
    return np.hypot(x[..., first], x[..., second])
