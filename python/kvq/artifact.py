"""formats/artifact.md: what an artifact says, and what it does to a row.

`artifact_reader.load_artifact` makes these from a file and refuses what has to be refused; `content_hash`,
`orthogonality_error`, `inverse_error` and `transform_condition` are checks that cost time and are made on request.
Shapes: H heads (1 if the layer's heads share), D channels, N rows or tokens, C centroids, Hq query heads, Hkv KV
heads."""

import dataclasses
import struct
from dataclasses import dataclass, field

import numpy as np

from .errors import unsupported, usage
from .packing import CodedRows, decode, encode, nearest_centroids, pack
from .safetensors_file import SafetensorsFile
from .scheme import AnyScheme

ORTHOGONALITY_TOLERANCE = 1e-6
INVERSE_TOLERANCE = 1e-6  # largest |A^-1 A - I|, times the condition
CLAIM_TOLERANCE = 1e-3  # largest relative error of a condition in the manifest
MOST_CONDITION = 4096.0


@dataclass(frozen=True)
class Transform:
    """The manifest's facts about an A that is not orthogonal; tuples are [H]."""

    kind: str  # diagonal, balanced, klt, mixed
    outlier_gain: tuple[float, ...]
    condition: tuple[float, ...]


@dataclass(frozen=True)
class SidePlan:
    """How one layer's keys or values are stored."""

    schemes: tuple[AnyScheme, ...]  # [H]; heads differ in clip ratio, codebook, widths or gains, not in row size
    kind: str  # identity, block_hadamard, dense
    scope: str  # kv_head, layer
    recipe: str
    order: int  # of the Hadamard blocks; 0: no Hadamard
    dim: int
    tensors: dict[str, np.ndarray] = field(repr=False)  # by the end of their names, after `layers.<i>.<k|v>.`
    centroid_scope: str = ""  # kv_head, joint; empty without centroids
    transform: Transform | None = None  # None: A is orthogonal
    features: tuple[str, ...] = ()  # words of `requires`

    @property
    def scheme(self) -> AnyScheme:
        """The scheme of the first head, for facts that all heads have in common."""
        return self.schemes[0]

    @property
    def clip_ratio(self) -> tuple[float, ...]:
        """[H] for affine codes, else empty."""
        return tuple(scheme.clip_ratio for scheme in self.schemes) if self.scheme.coder == "affine" else ()

    @property
    def row_bytes(self) -> int:
        return self.scheme.row_bytes(self.dim)

    @property
    def page_row_bytes(self) -> int:
        """Bytes of a token and head in pages. All heads have the words of the longest row and the numbers of the row
        with the most."""
        codes = max(scheme.page_bytes(self.dim) - scheme.number_bytes(self.dim) for scheme in self.schemes)
        return codes + max(scheme.number_bytes(self.dim) for scheme in self.schemes)

    def head_index(self, kv_head: int) -> int:
        return 0 if self.scope == "layer" else kv_head

    def scheme_of(self, kv_head: int) -> AnyScheme:
        return self.schemes[0 if len(self.schemes) == 1 else self.head_index(kv_head)]

    def matrix(self, kv_head: int) -> np.ndarray:
        """A as a matrix, float64 [D, D], for every kind of rotation."""
        if self.kind == "dense":
            return self._of_head("rotation", kv_head)
        own = self._blocks(kv_head)
        return self._of_head("channel_scale", kv_head)[:, None] * own if "channel_scale" in self.tensors else own

    def inverse(self, kv_head: int) -> np.ndarray:
        """A^-1, float64 [D, D]: the tensor `inverse`, or for an orthogonal A the transpose. Queries are multiplied by
        the transpose of A^-1."""
        if self.kind == "dense":
            return self._of_head("inverse", kv_head) if "inverse" in self.tensors else self.matrix(kv_head).T
        own = self._blocks(kv_head).T
        return own / self._of_head("channel_scale", kv_head) if "channel_scale" in self.tensors else own

    def _blocks(self, kv_head: int) -> np.ndarray:
        """Signs and Hadamard blocks, or the identity: the factors after a channel_scale."""
        if self.kind == "identity":
            return np.eye(self.dim)
        blocks = np.kron(np.eye(self.dim // self.order), hadamard(self.order))
        return (
            self._of_head("hadamard_signs", kv_head)[:, None] * blocks if "hadamard_signs" in self.tensors else blocks
        )

    def _of_head(self, name: str, kv_head: int) -> np.ndarray:
        return self.tensors[name][self.head_index(kv_head)].astype(np.float64)

    def centroids(self, kv_head: int) -> np.ndarray:
        """float32 [C, D]"""
        return self.tensors["centroids"][self.head_index(kv_head)]

    def offset(self, kv_head: int, index: np.ndarray | None = None) -> np.ndarray | None:
        """The offset that is subtracted before the rotation: the center [D], the centroids of rows [N, D], or None."""
        if index is not None:
            return self.centroids(kv_head)[index]
        return self.tensors["center"][self.head_index(kv_head)] if "center" in self.tensors else None

    def rotate(self, x: np.ndarray, kv_head: int, index: np.ndarray | None = None) -> np.ndarray:
        """x_rot of rows x, float32 [N, D]. The product is computed in binary64 and rounded once, as in the codec."""
        offset = self.offset(kv_head, index)
        if offset is not None:
            x = x - offset
        return (x.astype(np.float64) @ self.matrix(kv_head)).astype(np.float32)

    def unrotate(self, x_rot: np.ndarray, kv_head: int, index: np.ndarray | None = None) -> np.ndarray:
        """The inverse of rotate."""
        x = x_rot.astype(np.float64) @ self.inverse(kv_head)
        offset = self.offset(kv_head, index)
        if offset is not None:
            x = x + offset.astype(np.float64)
        return x.astype(np.float32)

    # One head

    def nearest(self, x: np.ndarray, kv_head: int) -> np.ndarray | None:
        """Indices of the centroids of rows x [N, D], int64 [N]; None without centroids.

        raises KvqError if all heads of a token choose one centroid together
        """
        if not self.centroid_scope:
            return None
        if self.centroid_scope == "joint":
            raise usage(
                "centroids of scope joint: one head cannot be coded without the others", "give the rows of all heads"
            )
        return nearest_centroids(x[None], self.centroids(kv_head)[None])

    def encode_rows(self, x: np.ndarray, kv_head: int) -> CodedRows:
        return self._encode(x, kv_head, self.nearest(x, kv_head))

    def pack_rows(self, x: np.ndarray, kv_head: int) -> np.ndarray:
        """Packed rows, uint8 [N, row_bytes]."""
        return pack(self.encode_rows(x, kv_head), self.scheme_of(kv_head))

    def reconstruct(self, x: np.ndarray, kv_head: int) -> np.ndarray:
        """Rows x after encoding and decoding, float32 [N, D]."""
        return self._decode(self.encode_rows(x, kv_head), kv_head)

    def _encode(self, x: np.ndarray, kv_head: int, index: np.ndarray | None) -> CodedRows:
        coded = encode(self.rotate(x, kv_head, index), self.scheme_of(kv_head))
        return dataclasses.replace(coded, index=index)

    def _decode(self, coded: CodedRows, kv_head: int) -> np.ndarray:
        return self.unrotate(decode(coded, self.scheme_of(kv_head)), kv_head, coded.index)

    # All heads of the same tokens, x [Hkv, N, D]

    def encode_heads(self, x: np.ndarray) -> list[CodedRows]:
        if self.centroid_scope != "joint":
            return [self.encode_rows(rows, head) for head, rows in enumerate(x)]
        index = nearest_centroids(x, np.stack([self.centroids(head) for head in range(len(x))]))
        return [self._encode(rows, head, index) for head, rows in enumerate(x)]

    def pack_heads(self, x: np.ndarray) -> np.ndarray:
        """Packed rows, uint8 [Hkv, N, row_bytes]."""
        return np.stack([pack(coded, self.scheme_of(head)) for head, coded in enumerate(self.encode_heads(x))])

    def reconstruct_heads(self, x: np.ndarray) -> np.ndarray:
        """x after encoding and decoding, float32 [Hkv, N, D]."""
        return np.stack([self._decode(coded, head) for head, coded in enumerate(self.encode_heads(x))])


@dataclass(frozen=True)
class GoldenRows:
    """Golden rows of one layer. `x`, `packed` and `firm` have the keys "k" and, if the layer has values, "v"."""

    first: int  # index of the first token in the dump
    q: np.ndarray = field(repr=False)  # float32 [Hq, D], of the last token
    x: dict[str, np.ndarray] = field(repr=False)  # float32 [N, Hkv, D]
    packed: dict[str, np.ndarray] = field(repr=False)  # uint8 [N, Hkv, row_bytes]
    firm: dict[str, np.ndarray] = field(repr=False)  # uint8 [N, Hkv]
    out: np.ndarray | None = field(repr=False)  # float32 [Hq, Dv]
    softmax_scale: float = 1.0
    sliding_window: int = 0
    logit_softcapping: float = 0.0  # 0: none


@dataclass(frozen=True)
class LayerPlan:
    layer: int
    num_q_heads: int
    num_kv_heads: int
    sides: dict[str, SidePlan]  # "k", and "v" if the layer has values
    golden: GoldenRows | None = None


@dataclass(frozen=True)
class Artifact:
    file: SafetensorsFile = field(repr=False)
    manifest: dict = field(repr=False)
    sink_tokens: int = 0
    recent_tokens: int = 0
    layers: dict[int, LayerPlan] = field(default_factory=dict)


def hadamard(order: int) -> np.ndarray:
    """Normalized Walsh-Hadamard matrix in Sylvester's order (OSCAR A.1), float64 [order, order]; `order` is a power of
    two."""
    matrix = np.ones((1, 1))
    while len(matrix) < order:
        matrix = np.kron(np.array([[1, 1], [1, -1]]), matrix)
    return matrix / np.sqrt(order)


# Checks on request


def orthogonality_error(plan: SidePlan) -> float:
    """Largest |R^T R - I| of rotation and eigenbasis over the heads, in binary64; 0 for a transform, and for a kind
    without a matrix in the file."""
    names = ["rotation"] if plan.kind == "dense" and "inverse" not in plan.tensors else []
    names += ["eigenbasis"] if "eigenbasis" in plan.tensors else []
    errors = [0.0]
    for name in names:
        matrices = plan.tensors[name].astype(np.float64)
        errors.append(np.abs(matrices.transpose(0, 2, 1) @ matrices - np.eye(plan.dim)).max())
    return float(np.max(errors))  # NaN if one is


def inverse_error(plan: SidePlan) -> np.ndarray:
    """Largest |A^-1 A - I| of each head of a plan with a transform, float64 [H]; 0 if the file has no tensor
    `inverse`."""
    if "inverse" not in plan.tensors:
        return np.zeros(len(plan.transform.condition))
    a, inverse = (plan.tensors[name].astype(np.float64) for name in ("rotation", "inverse"))
    return np.abs(inverse @ a - np.eye(plan.dim)).max(axis=(1, 2))


def transform_condition(plan: SidePlan) -> np.ndarray:
    """Root mean square over channels i of |row i of A| |column i of A^-1|, of each head of a plan with a transform,
    float64 [H]."""
    if "inverse" not in plan.tensors:
        return np.ones(len(plan.transform.condition))
    rows = np.square(plan.tensors["rotation"].astype(np.float64)).sum(axis=2)
    columns = np.square(plan.tensors["inverse"].astype(np.float64)).sum(axis=1)
    return np.maximum(np.sqrt((rows * columns).mean(axis=1)), 1.0)  # each product is at least 1, except for rounding


def stated_hash(file: SafetensorsFile) -> str:
    """The content hash that the file's metadata state, or "none"."""
    return file.metadata.get("kvq.content_hash", "none")


def content_hash(file: SafetensorsFile) -> str:
    """ "xxh3-128:..." over manifest and tensors as formats/artifact.md says."""
    try:
        import xxhash
    except ModuleNotFoundError as error:
        raise unsupported(
            f"{file.name}: the content hash needs the Python package xxhash", "pip install xxhash"
        ) from error
    state = xxhash.xxh3_128(file.metadata["kvq.manifest"].encode())
    state.update(b"\0")
    for name, info in file.tensors.items():
        state.update(name.encode() + b"\0" + info.dtype.encode() + b"\0")
        state.update(struct.pack(f"<{len(info.shape)}q", *info.shape))
        state.update(file.raw(name))
    return f"xxh3-128:{state.hexdigest()}"
