"""Small artifacts written by hand, with the safetensors package where the reader under test has its own parser."""

import json
import struct

import numpy as np
import safetensors.numpy

DTYPE_NAMES = {np.dtype(np.float32): "F32", np.dtype(np.int8): "I8", np.dtype(np.float64): "F64"}


def orthogonal(seed: int, heads: int, dim: int) -> np.ndarray:
    """float32 [heads, dim, dim]"""
    matrices = np.random.default_rng(seed).standard_normal((heads, dim, dim))
    return np.stack([np.linalg.qr(m)[0] for m in matrices]).astype(np.float32)


def exact_plan() -> dict:
    return {"coder": "exact", "bits": 16, "center": False, "rotation": rotation("identity")}


def affine_plan(bits: int, group_size: int, heads: int, clip_ratio: float = 1.0, zero: str = "float",
                scale_type: str = "fp16", **rest) -> dict:
    return {"coder": "affine", "bits": bits, "group_size": group_size, "scale_type": scale_type, "scale_rule": "minmax",
            "zero": zero, "clip_ratio": [clip_ratio] * heads, "center": False, "rotation": rotation("identity")} | rest


def symmetric_plan(bits: int, group_size: int, rule: str = "norm", scale_type: str = "fp16", **rest) -> dict:
    return {"coder": "symmetric", "bits": bits, "group_size": group_size, "scale_type": scale_type, "scale_rule": rule,
            "center": False, "rotation": rotation("identity")} | rest


def rotation(kind: str, scope: str = "kv_head", **rest) -> dict:
    recipe = {"identity": "I", "block_hadamard": "H", "dense": "U*H"}[kind]
    return {"kind": kind, "scope": scope, "recipe": recipe, "signs": False, "eigenbasis": False} | rest


def geometry(q_heads: int, kv_heads: int, dim: int) -> dict:
    return {"num_q_heads": q_heads, "num_kv_heads": kv_heads, "head_dim": dim, "v_head_dim": dim,
            "softmax_scale": dim**-0.5, "sliding_window": 0, "kind": "gqa",
            "rope": {"layout": "half", "dim": dim, "offset": 0, "attention_factor": 1.0,
                     "inv_freq": [1e4 ** (-2 * j / dim) for j in range(dim // 2)]}}


def manifest(layers: list[dict], num_layers: int | None = None, sink: int = 0, recent: int = 0,
             fingerprint: str = "") -> dict:
    return {"format": "kvq-artifact", "version": "1.0", "requires": [],
            "model": {"name": "by hand", "fingerprint": fingerprint, "num_layers": num_layers or len(layers)},
            "calibration": {"method": "plain", "tool": "kvq 0.1.0", "tokens": 10, "sequences": 1, "seed": 0, "options": {},
                            "dump": {"hash": "xxh3-128:" + "0" * 32, "producer": "by hand", "capture_point": "post_rope"}},
            "windows": {"sink_tokens": sink, "recent_tokens": recent},
            "layers": layers}


def layer(index: int, shape: dict, k: dict, v: dict | None = None) -> dict:
    return {"layer": index, "geometry": shape, "k": k} | ({"v": v} if v else {})


def canonical(value) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def content_hash(text: str, tensors: dict[str, np.ndarray]) -> str:
    """formats/artifact.md, written down once more; "" without the package xxhash."""
    try:
        import xxhash
    except ModuleNotFoundError:
        return ""
    state = xxhash.xxh3_128(text.encode() + b"\0")
    for name in sorted(tensors):
        array = tensors[name]
        state.update(name.encode() + b"\0" + DTYPE_NAMES[array.dtype].encode() + b"\0")
        state.update(b"".join(struct.pack("<q", extent) for extent in array.shape) + array.tobytes())
    return "xxh3-128:" + state.hexdigest()


def metadata(tree: dict, tensors: dict[str, np.ndarray], **changes: str) -> dict[str, str]:
    text = canonical(tree)
    return {"format": "kvq-artifact", "version": "1.0", "requires": "", "kvq.manifest": text,
            "kvq.content_hash": content_hash(text, tensors)} | changes


def to_bytes(tree: dict, tensors: dict[str, np.ndarray] | None = None, **changes: str) -> bytes:
    tensors = tensors or {}
    return safetensors.numpy.save(tensors, metadata(tree, tensors, **changes))


def raw_bytes(header: dict | str, data: bytes = b"") -> bytes:
    """A container around any header, for files that the package would not write."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(text)) + text + data
