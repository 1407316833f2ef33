"""Small artifacts written by hand, with the safetensors package where the reader under test has its own parser."""

import json
import struct

import numpy as np
import safetensors.numpy
import xxhash

DTYPE_NAMES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.int8): "I8",
    np.dtype(np.float64): "F64",
    np.dtype(np.uint8): "U8",
    np.dtype(np.uint16): "U16",
}


def orthogonal(seed: int, heads: int, dim: int) -> np.ndarray:
    """float32 [heads, dim, dim]"""
    matrices = np.random.default_rng(seed).standard_normal((heads, dim, dim))
    return np.stack([np.linalg.qr(m)[0] for m in matrices]).astype(np.float32)


def exact_plan() -> dict:
    return {"coder": "exact", "bits": 16, "center": False, "rotation": rotation("identity")}


def affine_plan(
    bits: int,
    group_size: int,
    heads: int,
    clip_ratio: float = 1.0,
    zero: str = "float",
    scale_type: str = "fp16",
    **rest,
) -> dict:
    return {
        "coder": "affine",
        "bits": bits,
        "group_size": group_size,
        "scale_type": scale_type,
        "scale_rule": "minmax",
        "zero": zero,
        "clip_ratio": [clip_ratio] * heads,
        "center": False,
        "rotation": rotation("identity"),
    } | rest


def symmetric_plan(bits: int, group_size: int, rule: str = "norm", scale_type: str = "fp16", **rest) -> dict:
    return {
        "coder": "symmetric",
        "bits": bits,
        "group_size": group_size,
        "scale_type": scale_type,
        "scale_rule": rule,
        "center": False,
        "rotation": rotation("identity"),
    } | rest


def codebook_plan(bits: int, group_size: int, rule: str = "norm", per_head: bool = False, **rest) -> dict:
    books = {"bits": [bits], "per_head": per_head, "source": "fitted"}
    return symmetric_plan(bits, group_size, rule, **{"coder": "codebook", "codebooks": books} | rest)


def trellis_plan(bits: int, group_size: int, memory: int, rule: str = "norm", **rest) -> dict:
    listed = [{"bits": bits, "memory": memory}]
    return symmetric_plan(bits, group_size, rule, **{"coder": "trellis", "trellis": listed} | rest)


def mixed(plan: dict, widths: np.ndarray, row_bytes: int, unit: str = "channel") -> dict:
    """The plan with mixed rows; `widths` is its tensor channel_bits."""
    allocation = {
        "unit": unit,
        "score": "energy",
        "mean_bits": int(widths.sum()) / widths.size,
        "row_bytes": row_bytes,
        "objective": 0.5,
        "free_objective": 0.4,
    }
    plain = {key: value for key, value in plan.items() if key != "group_size"}
    return plain | {"bits": int(widths.max()), "allocation": allocation}


def one_scale(plan: dict) -> dict:
    """A plan with mixed rows, with one scale a row."""
    return plan | {"allocation": plan["allocation"] | {"scale_scope": "row"}}


def gains(seed: int, widths: np.ndarray) -> np.ndarray:
    """A segment_gain for widths [H, D], float32 [H, 8]."""
    drawn = np.exp2(np.random.default_rng(seed).uniform(-3, 3, (len(widths), 8))).astype(np.float32)
    there = np.stack([np.isin(np.arange(1, 9), own) for own in widths])
    return np.where(there, drawn, np.float32(1))


def sources(seed: int, widths: np.ndarray) -> np.ndarray:
    """A channel_order for widths [H, D]: random, but ascending among the channels of one width."""
    rng = np.random.default_rng(seed)
    orders = []
    for own in widths:
        order = rng.permutation(len(own))
        orders.append(np.concatenate([np.sort(order[own == width]) for width in sorted(set(own.tolist()))[::-1]]))
    return np.stack(orders).astype(np.uint16)


def centroids(count: int, heads: int, scope: str = "kv_head") -> dict:
    return {"centroids": {"count": count, "scope": scope, "order": "before", "inertia": [0.5] * heads}}


def transform(heads: int, kind: str = "balanced", gain: float = 1.5, condition: float | list[float] = 1.0) -> dict:
    conditions = condition if isinstance(condition, list) else [condition] * heads
    return {"transform": {"kind": kind, "outlier_gain": [gain] * heads, "condition": conditions}}


def inverse_pair(seed: int, heads: int, dim: int, spread: float = 4.0) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """(A, A^-1, condition): float32 [heads, dim, dim] twice, and the conditions [heads] for the manifest."""
    rng = np.random.default_rng(seed)
    matrices = [
        np.linalg.qr(rng.standard_normal((dim, dim)))[0]
        * spread ** rng.uniform(-1, 1, dim)
        @ np.linalg.qr(rng.standard_normal((dim, dim)))[0]
        for _ in range(heads)
    ]
    inverses = [np.linalg.inv(a) for a in matrices]
    conditions = [
        float(np.sqrt(np.mean([(a[i] @ a[i]) * (b[:, i] @ b[:, i]) for i in range(dim)])))
        for a, b in zip(matrices, inverses)
    ]
    return np.float32(matrices), np.float32(inverses), conditions


def rotation(kind: str, scope: str = "kv_head", **rest) -> dict:
    recipe = {"identity": "I", "block_hadamard": "S*H" if rest.get("signs") else "H", "dense": "Haar"}[kind]
    return {"kind": kind, "scope": scope, "recipe": recipe, "signs": False, "eigenbasis": False} | rest


def geometry(q_heads: int, kv_heads: int, dim: int) -> dict:
    return {
        "num_q_heads": q_heads,
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        "v_head_dim": dim,
        "softmax_scale": dim**-0.5,
        "sliding_window": 0,
        "kind": "gqa",
        "rope": {
            "layout": "half",
            "dim": dim,
            "offset": 0,
            "attention_factor": 1.0,
            "inv_freq": [1e4 ** (-2 * j / dim) for j in range(dim // 2)],
        },
    }


def version_of(requires) -> str:
    if "integer_search" in requires:
        return "1.5"
    if "row_scale" in requires:
        return "1.4"
    return "1.2" if "transform" in requires else "1.1" if requires else "1.0"


def manifest(
    layers: list[dict],
    num_layers: int | None = None,
    sink: int = 0,
    recent: int = 0,
    fingerprint: str = "",
    requires: tuple[str, ...] = (),
) -> dict:
    return {
        "format": "kvq-artifact",
        "version": version_of(requires),
        "requires": list(requires),
        "model": {"name": "by hand", "fingerprint": fingerprint, "num_layers": num_layers or len(layers)},
        "calibration": {
            "method": "plain",
            "tool": "kvq 0.2.0",
            "tokens": 10,
            "sequences": 1,
            "seed": 0,
            "options": {},
            "dump": {"hash": "xxh3-128:" + "0" * 32, "producer": "by hand", "capture_point": "post_rope"},
        },
        "windows": {"sink_tokens": sink, "recent_tokens": recent},
        "layers": layers,
    }


def layer(index: int, shape: dict, k: dict, v: dict | None = None) -> dict:
    return {"layer": index, "geometry": shape, "k": with_letter(k)} | ({"v": with_letter(v)} if v else {})


def with_letter(plan: dict) -> dict:
    """The plan with the letter of its transform in front of its recipe."""
    if "transform" not in plan:
        return plan
    letter, recipe = "D" if plan["transform"]["kind"] == "diagonal" else "B", plan["rotation"]["recipe"]
    return plan | {"rotation": plan["rotation"] | {"recipe": letter if recipe == "I" else f"{letter}*{recipe}"}}


def canonical(value) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def content_hash(text: str, tensors: dict[str, np.ndarray]) -> str:
    """A second implementation of the content hash of formats/artifact.md."""
    state = xxhash.xxh3_128(text.encode() + b"\0")
    for name in sorted(tensors):
        array = tensors[name]
        state.update(name.encode() + b"\0" + DTYPE_NAMES[array.dtype].encode() + b"\0")
        state.update(b"".join(struct.pack("<q", extent) for extent in array.shape) + array.tobytes())
    return "xxh3-128:" + state.hexdigest()


def metadata(tree: dict, tensors: dict[str, np.ndarray], **changes: str) -> dict[str, str]:
    text = canonical(tree)
    # A test may have changed `requires`.
    requires = [word for word in tree.get("requires", []) if word != "later"]
    return {
        "format": "kvq-artifact",
        "version": version_of(requires),
        "requires": ",".join(requires),
        "kvq.manifest": text,
        "kvq.content_hash": content_hash(text, tensors),
    } | changes


def to_bytes(tree: dict, tensors: dict[str, np.ndarray] | None = None, **changes: str) -> bytes:
    tensors = tensors or {}
    return safetensors.numpy.save(tensors, metadata(tree, tensors, **changes))


def raw_bytes(header: dict | str, data: bytes = b"") -> bytes:
    """A container with any header, for files that the safetensors package does not write."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(text)) + text + data
