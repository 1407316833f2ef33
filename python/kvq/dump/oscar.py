"""Reads what OSCAR's serving fork dumps: <folder>/layer_<i>/{q,k,v,seq_lens}/<chunk>.pt.

One chunk is one forward pass of prefill. q is [t, Hq, D]; k and v are [t, Hkv, D], or [t, Hkv * D] as the attention
layer happened to receive them. seq_lens counts the tokens of each request in the chunk; older dumps lack it.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..errors import EXIT_NUMERICAL, KvqError, bad_input, one_line, unsupported

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


@dataclass(frozen=True)
class LayerTensors:
    """One layer of all kept chunks: q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv]; bfloat16 as uint16 patterns."""

    tensors: dict[str, np.ndarray]
    dtypes: dict[str, str]
    lengths: tuple[int, ...]  # [S] tokens of each request of each chunk, in order
    chunk_lengths: tuple[int, ...]


@dataclass(frozen=True)
class OscarDump:
    folder: Path
    layers: tuple[int, ...]
    chunks: tuple[int, ...]  # the chunks that are kept, in order
    dropped: tuple[int, ...]
    has_lengths: bool


def open_oscar_dump(folder: Path, keep_first_chunk: bool) -> OscarDump:
    """Finds layers and chunks; raises unless every layer has the same chunks of q, k and v."""
    if not folder.is_dir():
        raise bad_input(f"{folder}: no such folder")
    layers = _numbered(folder, r"layer_(\d+)")
    if not layers:
        raise bad_input(f"{folder}: expected folders layer_<i>, found none", "name the folder that holds layer_0")
    chunks = _numbered(folder / f"layer_{layers[0]}" / "q", r"(\d+)\.pt")
    has_lengths = (folder / f"layer_{layers[0]}" / "seq_lens").is_dir()
    for layer in layers:
        for name in ("q", "k", "v") + (("seq_lens",) if has_lengths else ()):
            found = _numbered(folder / f"layer_{layer}" / name, r"(\d+)\.pt")
            if found != chunks:
                odd = sorted(set(found) ^ set(chunks))
                raise bad_input(
                    f"{folder}/layer_{layer}/{name}: expected the chunks of layer_{layers[0]}/q, "
                    f"differs in {', '.join(map(str, odd[:5]))}",
                    "was the dump interrupted? remove the incomplete chunk",
                )
    kept = tuple(c for c in chunks if c != 0 or keep_first_chunk)
    if not kept:
        raise bad_input(f"{folder}: no chunks but the warm-up", "--keep-first-chunk keeps chunk 0")
    return OscarDump(folder, tuple(layers), kept, tuple(c for c in chunks if c not in kept), has_lengths)


def _numbered(folder: Path, pattern: str) -> list[int]:
    """Numbers in the names of the entries that match `pattern`, ascending."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for match in (re.fullmatch(pattern, name) for name in names) if match)


def load_tensor(path: Path) -> torch.Tensor:
    """Loads a tensor. weights_only refuses every other pickle."""
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises the errors of all parts that it calls
        raise bad_input(f"{path}: cannot load: {one_line(error)}") from error
    if not isinstance(value, torch.Tensor):
        raise bad_input(f"{path}: expected a tensor, found {type(value).__name__}")
    return value


def load_layer(dump: OscarDump, layer: int) -> LayerTensors:
    chunks = [_load_chunk(dump, layer, chunk) for chunk in dump.chunks]
    joined = {name: _join(dump, layer, name, [tensors[name] for tensors, _ in chunks]) for name in "qkv"}
    dtypes = {name: DTYPES[x.dtype] for name, x in joined.items()}
    return LayerTensors(
        {name: _to_numpy(x) for name, x in joined.items()},
        dtypes,
        tuple(length for _, lengths in chunks for length in lengths),
        tuple(len(tensors["q"]) for tensors, _ in chunks),
    )


def _load_chunk(dump: OscarDump, layer: int, chunk: int) -> tuple[dict[str, torch.Tensor], list[int]]:
    """({q, k, v} as [t, heads, dim], lengths of the requests)"""
    folder = dump.folder / f"layer_{layer}"
    where = f"{folder}/*/{chunk}.pt"
    q, k, v = (load_tensor(folder / name / f"{chunk}.pt") for name in "qkv")
    if q.ndim != 3 or 0 in q.shape:
        raise bad_input(f"{folder}/q/{chunk}.pt: expected [t, Hq, D], found {list(q.shape)}")
    k = _with_heads(k, f"{folder}/k/{chunk}.pt", dim=q.shape[2])
    v = _with_heads(v, f"{folder}/v/{chunk}.pt", heads=k.shape[1])
    if not len(q) == len(k) == len(v):
        raise bad_input(f"{where}: expected equal numbers of tokens, found {len(q)}, {len(k)}, {len(v)} in q, k, v")
    if k.shape[2] != q.shape[2] or v.shape[1] != k.shape[1] or q.shape[1] % k.shape[1]:
        raise bad_input(f"{where}: q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit each other")
    return {"q": q, "k": k, "v": v}, _request_lengths(dump, folder, chunk, len(q))


def _with_heads(x: torch.Tensor, where: str, heads: int = 0, dim: int = 0) -> torch.Tensor:
    """[t, H * D] -> [t, H, D] from H or D, whichever is given; a tensor with three axes stays as it is."""
    if x.ndim == 2:
        known = heads or dim
        if x.shape[1] == 0 or x.shape[1] % known:
            raise bad_input(f"{where}: expected [t, multiple of {known}], found {list(x.shape)}")
        x = x.reshape(len(x), heads or -1, dim or x.shape[1] // heads)
    if x.ndim != 3 or 0 in x.shape:
        raise bad_input(f"{where}: expected [t, Hkv, D] or [t, Hkv * D], found {list(x.shape)}")
    return x


def _request_lengths(dump: OscarDump, folder: Path, chunk: int, tokens: int) -> list[int]:
    if not dump.has_lengths:
        return [tokens]
    path = folder / "seq_lens" / f"{chunk}.pt"
    lengths = load_tensor(path)
    if lengths.ndim != 1 or lengths.is_floating_point() or lengths.is_complex():
        raise bad_input(f"{path}: expected a list of integers, found {lengths.dtype} {list(lengths.shape)}")
    counts = [n for n in lengths.tolist() if n != 0]  # a request that the prefix cache holds completely adds no token
    if any(n < 0 for n in counts) or sum(counts) != tokens:
        raise bad_input(f"{path}: expected lengths that add up to {tokens} tokens, found {sum(counts)}")
    return counts


def _join(dump: OscarDump, layer: int, name: str, chunks: list[torch.Tensor]) -> torch.Tensor:
    where = f"{dump.folder}/layer_{layer}/{name}"
    if len({(x.dtype, x.shape[1:]) for x in chunks}) > 1:
        raise bad_input(f"{where}: dtype or heads change from chunk to chunk")
    if chunks[0].dtype not in DTYPES:
        raise unsupported(
            f"{where}: dtype {chunks[0].dtype} is not supported", f"supported: {', '.join(DTYPES.values())}"
        )
    joined = torch.cat(chunks)
    if not torch.isfinite(joined).all():
        raise KvqError(EXIT_NUMERICAL, f"{where}: expected finite numbers, found NaN or Inf")
    if not joined.any():
        raise KvqError(EXIT_NUMERICAL, f"{where}: found only zeros")
    return joined


def _to_numpy(x: torch.Tensor) -> np.ndarray:
    return x.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else x.numpy()
