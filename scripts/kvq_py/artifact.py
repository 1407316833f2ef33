"""formats/artifact.md: what an artifact says, and what it does to a row.

`artifact_reader.read_artifact` makes these from a file and refuses what has to be refused; `content_hash` and
`orthogonality_error` are checks that cost time and are made on request. Shapes: H heads (1 if the layer's heads share),
D channels, N rows.
"""

import dataclasses
import struct
from dataclasses import dataclass, field

import numpy as np

from .packing import CodedRows, decode, encode, pack
from .safetensors_file import SafetensorsFile
from .scheme import Scheme

ORTHOGONALITY_TOLERANCE = 1e-6


@dataclass(frozen=True)
class SidePlan:
    """How one layer's keys or values are stored."""

    scheme: Scheme  # clip ratio 1; see scheme_of()
    clip_ratio: tuple[float, ...]  # [H] for scale rule minmax, else empty
    kind: str  # identity, block_hadamard, dense
    scope: str  # kv_head, layer
    recipe: str
    order: int  # of the Hadamard blocks; 0 = none
    dim: int
    tensors: dict[str, np.ndarray] = field(repr=False)  # rotation, hadamard_signs, center, eigenbasis, spectrum

    def head_index(self, kv_head: int) -> int:
        return 0 if self.scope == "layer" else kv_head

    def scheme_of(self, kv_head: int) -> Scheme:
        if not self.clip_ratio:
            return self.scheme
        return dataclasses.replace(self.scheme, clip_ratio=self.clip_ratio[self.head_index(kv_head)])

    def matrix(self, kv_head: int) -> np.ndarray:
        """The rotation R, float64 [D, D], whatever its kind."""
        if self.kind == "identity":
            return np.eye(self.dim)
        if self.kind == "dense":
            return self.tensors["rotation"][self.head_index(kv_head)].astype(np.float64)
        blocks = np.kron(np.eye(self.dim // self.order), hadamard(self.order))
        if "hadamard_signs" in self.tensors:
            blocks = self.tensors["hadamard_signs"][self.head_index(kv_head)].astype(np.float64)[:, None] * blocks
        return blocks

    def rotate(self, x: np.ndarray, kv_head: int) -> np.ndarray:
        """x_rot of rows x, float32 [N, D]. The product is taken in binary64 and rounded once, as the codec does."""
        if "center" in self.tensors:
            x = x - self.tensors["center"][self.head_index(kv_head)]
        return (x.astype(np.float64) @ self.matrix(kv_head)).astype(np.float32)

    def unrotate(self, x_rot: np.ndarray, kv_head: int) -> np.ndarray:
        """The inverse of rotate."""
        x = x_rot.astype(np.float64) @ self.matrix(kv_head).T
        if "center" in self.tensors:
            x = x + self.tensors["center"][self.head_index(kv_head)].astype(np.float64)
        return x.astype(np.float32)

    def encode_rows(self, x: np.ndarray, kv_head: int) -> CodedRows:
        return encode(self.rotate(x, kv_head), self.scheme_of(kv_head))

    def pack_rows(self, x: np.ndarray, kv_head: int) -> np.ndarray:
        """Packed rows, uint8 [N, row_bytes]."""
        return pack(self.encode_rows(x, kv_head), self.scheme)

    def reconstruct(self, x: np.ndarray, kv_head: int) -> np.ndarray:
        """What is left of rows x after coding, float32 [N, D]."""
        return self.unrotate(decode(self.encode_rows(x, kv_head), self.scheme), kv_head)


@dataclass(frozen=True)
class LayerPlan:
    layer: int
    num_q_heads: int
    num_kv_heads: int
    sides: dict[str, SidePlan]  # "k", and "v" if the layer has values


@dataclass(frozen=True)
class Artifact:
    file: SafetensorsFile = field(repr=False)
    manifest: dict = field(repr=False)
    sink_tokens: int = 0
    recent_tokens: int = 0
    layers: dict[int, LayerPlan] = field(default_factory=dict)


def hadamard(order: int) -> np.ndarray:
    """Normalised Walsh-Hadamard matrix in Sylvester's order (OSCAR A.1), float64 [order, order]; a power of two."""
    matrix = np.ones((1, 1))
    while len(matrix) < order:
        matrix = np.kron(np.array([[1, 1], [1, -1]]), matrix)
    return matrix / np.sqrt(order)


# Checks on request

def orthogonality_error(plan: SidePlan) -> float:
    """Largest |R^T R - I| over the heads, in binary64; 0 for a kind that has no matrix in the file."""
    if plan.kind != "dense":
        return 0.0
    rotations = plan.tensors["rotation"].astype(np.float64)
    return float(np.abs(rotations.transpose(0, 2, 1) @ rotations - np.eye(plan.dim)).max())


def content_hash(file: SafetensorsFile) -> str | None:
    """"xxh3-128:..." over manifest and tensors as formats/artifact.md says; None without the package xxhash."""
    try:
        import xxhash
    except ModuleNotFoundError:
        return None
    state = xxhash.xxh3_128(file.metadata["kvq.manifest"].encode())
    state.update(b"\0")
    for name, info in file.tensors.items():
        state.update(name.encode() + b"\0" + info.dtype.encode() + b"\0")
        state.update(struct.pack(f"<{len(info.shape)}q", *info.shape))
        state.update(file.raw(name))
    return f"xxh3-128:{state.hexdigest()}"
