"""Dumps with one fault each, by name: what formats/dump.md tells a reader to refuse.

Every edit works on a copy of a sound dump of 2 layers, 3 sequences, 61 tokens, 4 query and 2 key/value heads of 32
channels."""

from collections.abc import Callable

import h5py
import numpy as np
from dumps import replace

Edit = Callable[[h5py.File], None]


def set_attribute(group: str, name: str, value: object) -> Edit:
    def edit(file):
        file[group].attrs[name] = value

    return edit


def drop_attribute(group: str, name: str) -> Edit:
    def edit(file):
        del file[group].attrs[name]

    return edit


def drop(name: str) -> Edit:
    def edit(file):
        del file[name]

    return edit


def set_element(name: str, index: tuple[int, ...], value: float) -> Edit:
    def edit(file):
        file[name][index] = value

    return edit


def change(name: str, function: Callable[[np.ndarray], np.ndarray], **options) -> Edit:
    """Replaces a dataset by function(array)."""

    def edit(file):
        replace(file, name, function(file[name][()]), **options)

    return edit


def both(*edits: Edit) -> Edit:
    def edit(file):
        for one in edits:
            one(file)

    return edit


def rename_layer(old: str, new: str) -> Edit:
    def edit(file):
        file.move(f"layers/{old}", f"layers/{new}")

    return edit


def as_bfloat16(name: str) -> Edit:
    """Truncates float32 data to bfloat16."""
    upper_half = change(name, lambda x: (x.view(np.uint32) >> 16).astype(np.uint16))
    return both(upper_half, set_attribute(name, "kvq_dtype", "bfloat16"))


def numbers() -> dict[str, Edit]:
    """NaN, infinity, too large numbers and zeros in every tensor. The faults are in layer 1, to detect a message that
    always says layer 0."""
    edits: dict[str, Edit] = {}
    for tensor in "qkv":
        name = f"layers/1/{tensor}"
        edits[f"nan_{tensor}"] = set_element(name, (7, 1, 5), np.nan)
        edits[f"inf_{tensor}"] = set_element(name, (60, 0, 31), -np.inf)
        edits[f"huge_{tensor}"] = set_element(name, (7, 1, 5), 1e25)  # its square overflows float32
        edits[f"zero_{tensor}"] = change(name, np.zeros_like)
    edits["nan_bfloat16"] = both(as_bfloat16("layers/1/k"), set_element("layers/1/k", (7, 1, 5), 0x7FC0))
    return edits


def with_metric(function: Callable[[np.ndarray], np.ndarray]) -> Edit:
    """Replaces the o_proj_metric of layer 1 by function(valid metric)."""

    def edit(file):
        metric = np.tile(np.diag(np.arange(1.0, 33.0)).astype(np.float32), (2, 1, 1))
        file["layers/1/o_proj_metric"] = function(metric)

    return edit


def with_element(index: tuple[int, ...], value: float) -> Callable[[np.ndarray], np.ndarray]:
    def function(x):
        x[index] = value
        return x

    return function


def both_sides(index: tuple[int, int, int], value: float) -> Callable[[np.ndarray], np.ndarray]:
    """Sets an element of a matrix and its mirror."""

    def function(x):
        head, i, j = index
        x[head, i, j] = x[head, j, i] = value
        return x

    return function


def with_curvature(function: Callable[[np.ndarray], np.ndarray]) -> Edit:
    """Replaces the output_curvature of layer 1 by function(valid curvature)."""

    def edit(file):
        curvature = np.tile(np.diag(np.arange(1.0, 33.0)).astype(np.float32), (4, 1, 1))
        file["layers/1/output_curvature"] = function(curvature)

    return edit


CURVATURE_FAULTS: dict[str, Edit] = {
    "curvature_asymmetric": with_curvature(with_element((3, 5, 3), 0.001)),
    "curvature_diagonal": with_curvature(with_element((3, 5, 5), -0.001)),
    "curvature_indefinite": with_curvature(both_sides((3, 5, 3), 30.0)),
    "nan_curvature": with_curvature(with_element((3, 5, 3), np.nan)),
}

METRIC_FAULTS: dict[str, Edit] = {
    "metric_shape": with_metric(lambda x: x[:1]),
    "metric_double": with_metric(lambda x: x.astype(np.float64)),
    "metric_asymmetric": with_metric(with_element((1, 5, 3), 0.001)),
    "metric_diagonal": with_metric(with_element((1, 5, 5), -0.001)),
    "metric_indefinite": with_metric(both_sides((1, 5, 3), 30.0)),
    "nan_metric": with_metric(with_element((1, 5, 3), np.nan)),
    "inf_metric": with_metric(with_element((1, 5, 5), np.inf)),
    "zero_metric": with_metric(np.zeros_like),
}


ROOT_FAULTS: dict[str, Edit] = {
    "other_format": set_attribute("/", "format", "kvq-jump"),
    "no_format": drop_attribute("/", "format"),
    "version_2": set_attribute("/", "version", "2.0"),
    "version_text": set_attribute("/", "version", "one"),
    "requires": set_attribute("/", "requires", "paged_positions"),
    "no_model_name": drop_attribute("/", "model_name"),
    "capture_point": set_attribute("/", "capture_point", "mid_rope"),
    "fingerprint": set_attribute("/", "model_fingerprint", "CAFE"),
    "config_text": set_attribute("/", "model_config", "hidden_size: 64"),
    "config_list": set_attribute("/", "model_config", "[64]"),
    "num_layers": set_attribute("/", "num_layers", 1),
    "num_layers_large": set_attribute("/", "num_layers", 5000),
    "no_layers": drop("layers"),
    "leading_zero": rename_layer("1", "01"),
    "no_positions": drop("positions"),
    "positions_type": change("positions", lambda x: x.astype(np.int32)),
    "positions_order": set_element("positions", (1,), 0),
    "empty_sequence": change("cu_seqlens", lambda x: np.insert(x, 1, x[1])),
    "sequences_start": set_element("cu_seqlens", (0,), 1),
    "sequences_end": set_element("cu_seqlens", (-1,), 60),
}

LAYER_FAULTS: dict[str, Edit] = {
    "no_head_dim": drop_attribute("layers/1", "head_dim"),
    "head_dim": set_attribute("layers/1", "head_dim", 64),
    "head_dim_large": set_attribute("layers/1", "head_dim", 4096),
    "heads": set_attribute("layers/1", "num_kv_heads", 3),
    "heads_many": set_attribute("layers/1", "num_q_heads", 8192),
    "angle": set_element("layers/1/rope_inv_freq", (3,), 1e300),
    "rotary_offset": both(
        set_attribute("layers/1", "rope_layout", "none"),
        set_attribute("layers/1", "rotary_dim", 0),
        set_attribute("layers/1", "rotary_offset", 33),
    ),
    "scale": set_attribute("layers/1", "softmax_scale", -1.0),
    "scale_large": set_attribute("layers/1", "softmax_scale", 1e30),
    "window_large": set_attribute("layers/1", "sliding_window", 2**31 - 1),
    "kind": set_attribute("layers/1", "kind", "linear"),
    "rope_layout": set_attribute("layers/1", "rope_layout", "spiral"),
    "rotary_odd": set_attribute("layers/1", "rotary_dim", 31),
    "rotary_slice": set_attribute("layers/1", "rotary_offset", 8),
    "no_inv_freq": drop("layers/1/rope_inv_freq"),
    "no_k": drop("layers/1/k"),
    "no_v": drop("layers/1/v"),
    "dtype": set_attribute("layers/1/q", "kvq_dtype", "int8"),
    "dtype_differs": set_attribute("layers/1/q", "kvq_dtype", "bfloat16"),
    "tokens": change("layers/1/v", lambda x: x[:-1]),
    "rank": change("layers/1/k", lambda x: x.reshape(len(x), -1)),
    "compressed": change("layers/1/k", lambda x: x, compression="gzip"),
    "double": change("layers/1/k", lambda x: x.astype(np.float64)),
    "big_endian": change("layers/1/k", lambda x: x.astype(">f4")),
    "two_faults": both(drop("layers/0/k"), set_attribute("layers/1", "head_dim", 64)),
}

FAULTS: dict[str, Edit] = ROOT_FAULTS | LAYER_FAULTS | METRIC_FAULTS | CURVATURE_FAULTS | numbers()
