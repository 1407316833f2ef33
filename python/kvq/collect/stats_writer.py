"""Writes formats/stats.md: the manifest as canonical JSON, and the safetensors container of formats/artifact.md."""

import json
import struct
from pathlib import Path

import numpy as np
import xxhash

from ..dump.array_writer import LayerFacts
from .content import HASH_NAME, as_bytes
from .layer import LayerStatistics

FORMAT = "kvq-stats"
ROW_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
NUMPY_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "U16": "<u2"}
# Words of `requires`, in the order of kvq-calibrate.
GEOMETRY_FEATURES = ("logit_softcapping", "sink_logits")

Tensors = dict[str, tuple[str, np.ndarray]]  # name -> (dtype of the container, array)


def write_stats(path: Path, manifest: dict, tensors: Tensors) -> None:
    """Writes the file; the caller makes it appear atomically (files.atomic_path)."""
    names = sorted(tensors, key=str.encode)
    stored = {name: np.ascontiguousarray(tensors[name][1], NUMPY_TYPES[tensors[name][0]]) for name in names}
    text = canonical_json(manifest)
    header: dict[str, object] = {
        "__metadata__": {
            "format": manifest["format"],
            "version": manifest["version"],
            "requires": ",".join(manifest["requires"]),
            "kvq.content_hash": _content_hash(text, tensors, stored),
            "kvq.manifest": text,
        }
    }
    end = 0
    for name, array in stored.items():
        offsets = [end, end + array.nbytes]
        header[name] = {"dtype": tensors[name][0], "shape": list(array.shape), "data_offsets": offsets}
        end += array.nbytes
    content = canonical_json(header).encode()
    content += b" " * (-len(content) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(content)) + content)
        for array in stored.values():
            file.write(as_bytes(array))


def canonical_json(value: object) -> str:
    """Sorted keys, no white space, shortest round-trip numbers."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _content_hash(manifest: str, tensors: Tensors, stored: dict[str, np.ndarray]) -> str:
    state = xxhash.xxh3_128(manifest.encode() + b"\0")
    for name, array in stored.items():
        state.update(f"{name}\0{tensors[name][0]}\0".encode() + struct.pack(f"<{array.ndim}q", *array.shape))
        state.update(as_bytes(array))
    return HASH_NAME + state.hexdigest()


def make_manifest(model: dict, producer: str, layers: list[LayerStatistics], with_ranges: bool) -> dict:
    """@param model  `name`, `fingerprint`, `num_layers` and, if there is one, `config`"""
    request, queries = layers[0].request, layers[0].plan.queries
    rows = [_layer_row(layer, with_ranges) for layer in layers]
    required = [word for word in GEOMETRY_FEATURES if any(word in row["geometry"] for row in rows)]
    if queries != "all":
        required.append("queries")
    manifest = {
        "format": FORMAT,
        "version": _version(rows, required),
        "requires": required,
        "model": model,
        "dump": {"producer": producer, "capture_point": "post_rope"},
        "seed": request.seed,
        "sample_tokens": request.sample_tokens,
        "layers": rows,
    }
    return manifest if queries == "all" else {**manifest, "queries": queries}


def _version(rows: list[dict], required: list[str]) -> str:
    """The lowest that has what is there."""
    features = {"1.5": "ranges", "1.4": "o_proj_metric", "1.3": "golden_tokens", "1.1": "held_out_tokens"}
    found = (version for version, key in features.items() if any(key in row for row in rows))
    return "1.5" if required else next(found, "1.0")


def _layer_row(layer: LayerStatistics, with_ranges: bool) -> dict:
    content = layer.content.result()
    row = {
        "layer": layer.layer,
        "geometry": geometry(layer.facts),
        "has_values": layer.has_values,
        "tokens": layer.plan.tokens,
        "sequences": len(layer.plan.lengths),
        "moments": list(layer.moments()),
        "content_hash": content,
    }
    if layer.held_out:
        row |= {"held_out_tokens": len(layer.held_out["k"]), "curvature": layer.curvature is not None}
    if layer.golden:
        row["golden_tokens"] = len(layer.golden["k"])
    if layer.o_proj_metric is not None:
        row["o_proj_metric"] = True
    if with_ranges:
        row["ranges"] = [{"dump": content, "first": 0, "count": layer.plan.tokens}]
    return row


def geometry(facts: LayerFacts) -> dict:
    """`geometry` of formats/artifact.md."""
    found = facts.attributes()
    rope = {
        "layout": found.pop("rope_layout"),
        "dim": found.pop("rotary_dim"),
        "offset": found.pop("rotary_offset"),
        "attention_factor": found.pop("rope_attention_factor"),
        "inv_freq": [float(x) for x in facts.rope_inv_freq],
    }
    sinks = {"sink_logits": list(facts.sink_logits)} if facts.sink_logits else {}
    return {**found, "rope": rope, **sinks}


def layer_tensors(layer: LayerStatistics, dtype: str) -> Tensors:
    """All tensors of a layer. @param dtype  of its rows, as in a dump"""
    row_type, sample = ROW_TYPES[dtype], layer.sample
    found: Tensors = {"sample.key": ("I64", sample.keys), "sample.token": ("I64", sample.tokens)}
    found |= {f"sample.{name}": (row_type, rows) for name, rows in sample.rows.items()}
    if sample.value_weights is not None:
        found["sample.value_weight"] = ("F32", sample.value_weights)
    for name, moment in layer.moments().items():
        for part, values in (("sum", moment.sum), ("first", moment.first), ("weight", moment.weight)):
            found[f"{name}.{part}"] = ("F64", values.cpu().numpy())
    if layer.o_proj_metric is not None:
        found["o_proj_metric"] = ("F64", layer.o_proj_metric)
    if layer.held_out:
        found["held_out.token"] = ("I64", np.array([layer.plan.held_out.first]))
        found["held_out.query"] = ("I64", layer.plan.held_out_queries())
        found |= {f"held_out.{name}": (row_type, rows) for name, rows in layer.held_out.items()}
        if layer.curvature is not None:
            found["held_out.curvature"] = ("F32", layer.curvature)
    if layer.golden:
        found["golden.token"] = ("I64", np.array([layer.plan.golden.first]))
        found |= {f"golden.{name}": ("U16", rows) for name, rows in layer.golden.items()}
    return {f"layers.{layer.layer}.{name}": tensor for name, tensor in found.items()}
