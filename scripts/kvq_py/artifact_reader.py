"""Reads formats/artifact.md: checks everything that a reader has to refuse, then hands out plans."""

from pathlib import Path

import numpy as np

from .artifact import Artifact, LayerPlan, SidePlan
from .errors import bad_input, unsupported
from .json_node import Node
from .safetensors_file import SafetensorsFile, parse_json
from .scheme import SCALE_BYTES, SYMMETRIC_RULES, Scheme

FORMAT, MAJOR = "kvq-artifact", 1
KNOWN_FEATURES: frozenset[str] = frozenset()  # 1.0 defines none
LARGEST_DIM = 1024


def read_artifact(path: Path) -> Artifact:
    """Opens and checks an artifact; raises ScriptError for everything that a reader has to refuse."""
    return parse_artifact(SafetensorsFile.open(path))


def parse_artifact(file: SafetensorsFile) -> Artifact:
    _check_versions(file)
    where = f"{file.name}: kvq.manifest"
    manifest = parse_json(_metadata(file, "kvq.manifest"), where)
    root = Node(manifest, where)
    root["format"].word(FORMAT)
    outside = (file.metadata["version"], _words(file.metadata["requires"]))
    if (root["version"].text(), root["requires"].texts()) != outside:
        raise bad_input(f"{where}: version or requires differ from __metadata__")
    num_layers = root["model"]["num_layers"].integer(1, 4096)
    for key in ("calibration", "windows"):
        root[key].object()
    tensors = _TensorReader(file)
    layers = _read_layers(root["layers"], num_layers, tensors)
    tensors.expect_all_read()
    windows = root["windows"]
    return Artifact(file, manifest, windows["sink_tokens"].integer(0, 2**30 - 1),
                    windows["recent_tokens"].integer(0, 2**30 - 1), layers)


def _metadata(file: SafetensorsFile, key: str) -> str:
    if key not in file.metadata:
        raise bad_input(f"{file.name}: __metadata__ has no '{key}': not a kvq file")
    return file.metadata[key]


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _check_versions(file: SafetensorsFile) -> None:
    if _metadata(file, "format") != FORMAT:
        raise bad_input(f"{file.name}: expected format {FORMAT}, found '{file.metadata['format']}'")
    major, dot, minor = _metadata(file, "version").partition(".")
    if not (dot and major.isascii() and major.isdigit() and minor.isascii() and minor.isdigit()):
        raise bad_input(f"{file.name}: version: expected major.minor, found '{file.metadata['version']}'")
    if int(major) != MAJOR:
        raise unsupported(f"{file.name}: {FORMAT} version {major}.{minor}: this reader reads {MAJOR}.x")
    unknown = [word for word in _words(_metadata(file, "requires")) if word not in KNOWN_FEATURES]
    if unknown:
        raise unsupported(f"{file.name}: requires the feature '{unknown[0]}', which this reader does not know")


class _TensorReader:
    """Hands out tensors that the manifest announces and remembers which ones nobody asked for."""

    def __init__(self, file: SafetensorsFile):
        self._file = file
        # layers.<i>.golden.* is reserved for test rows.
        self._unread = {name for name in file.tensors if name.split(".")[2:3] != ["golden"]}

    def take(self, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        info = self._file.tensors.get(name)
        if info is None:
            raise bad_input(f"{self._file.name}: tensor {name} is missing, though the manifest announces it")
        if (info.dtype, info.shape) != (dtype, shape):
            raise bad_input(f"{self._file.name}: {name}: expected {dtype} {list(shape)}, found {info.dtype} "
                            f"{list(info.shape)}")
        self._unread.discard(name)
        array = self._file.array(name)
        if dtype == "F32" and not np.isfinite(array).all():
            index = np.unravel_index(int(np.argmin(np.isfinite(array))), shape)
            raise bad_input(f"{self._file.name}: {name}: element {[int(i) for i in index]} is not finite")
        return array

    def expect_all_read(self) -> None:
        if self._unread:
            raise bad_input(f"{self._file.name}: tensor {min(self._unread)} is not announced by the manifest")


def _read_layers(node: Node, num_layers: int, tensors: _TensorReader) -> dict[int, LayerPlan]:
    layers: dict[int, LayerPlan] = {}
    for item in node.items(minimum=1):
        index = item["layer"].integer(0, num_layers - 1)
        if layers and index <= max(layers):
            raise bad_input(f"{item.where}: expected ascending layers, found {index} after {max(layers)}")
        layers[index] = _read_layer(item, index, tensors)
    return layers


def _read_layer(node: Node, index: int, tensors: _TensorReader) -> LayerPlan:
    geometry = node["geometry"]
    kv_heads = geometry["num_kv_heads"].integer(1, 4096)
    q_heads = geometry["num_q_heads"].integer(1, 4096)
    if q_heads % kv_heads:
        raise bad_input(f"{geometry.where}: {q_heads} query heads are no multiple of {kv_heads} KV heads")
    _check_geometry(geometry)
    sides = {}
    for side, dim_name in (("k", "head_dim"), ("v", "v_head_dim")):
        if side == "k" or side in node:
            dim = geometry[dim_name].integer(1, LARGEST_DIM)
            sides[side] = _SideReader(node[side], kv_heads, dim, f"layers.{index}.{side}", tensors).read()
    return LayerPlan(index, q_heads, kv_heads, sides)


def _check_geometry(geometry: Node) -> None:
    geometry["softmax_scale"].number(above=0)
    geometry["sliding_window"].integer(0, 2**30 - 1)
    geometry["kind"].word("gqa", "mla_rope")
    rope = geometry["rope"]
    layout = rope["layout"].word("none", "half", "interleaved")
    dim, offset = rope["dim"].integer(0, LARGEST_DIM), rope["offset"].integer(0, LARGEST_DIM)
    rope["attention_factor"].number()
    frequencies = [item.number() for item in rope["inv_freq"].items()]
    if dim % 2 or offset + dim > geometry["head_dim"].integer(1, LARGEST_DIM) or (layout == "none") != (dim == 0):
        raise bad_input(f"{rope.where}: {dim} channels from {offset} on do not fit layout {layout} and the head")
    if len(frequencies) != dim // 2:
        raise bad_input(f"{rope.where}: expected {dim // 2} frequencies, found {len(frequencies)}")


class _SideReader:
    """One plan of the manifest and the tensors it announces."""

    def __init__(self, node: Node, kv_heads: int, dim: int, prefix: str, tensors: _TensorReader):
        self.node, self.dim, self.prefix, self.tensors = node, dim, prefix, tensors
        self.rotation = node["rotation"]
        self.scope = self.rotation["scope"].word("kv_head", "layer")
        self.heads = 1 if self.scope == "layer" else kv_heads

    def read(self) -> SidePlan:
        kind = self.rotation["kind"].word("identity", "block_hadamard", "dense")
        scheme = self.scheme()
        return SidePlan(scheme, self.clip_ratio(scheme), kind, self.scope, self.rotation["recipe"].text(),
                        self.order(kind), self.dim, self.read_tensors(kind))

    def scheme(self) -> Scheme:
        coder = self.node["coder"].word("exact", "affine", "symmetric")
        if coder == "exact":
            return Scheme(coder, self.node["bits"].integer(16, 16))
        affine = coder == "affine"
        scheme = Scheme(coder, self.node["bits"].integer(1, 8), self.node["group_size"].integer(1, LARGEST_DIM),
                        self.node["scale_type"].word(*SCALE_BYTES),
                        self.node["scale_rule"].word(*(("minmax",) if affine else SYMMETRIC_RULES)),
                        self.node["zero"].word("float", "integer") if affine else None)
        if self.dim % scheme.group_size:
            raise bad_input(f"{self.node.where}: group_size {scheme.group_size} does not divide {self.dim} channels")
        return scheme

    def clip_ratio(self, scheme: Scheme) -> tuple[float, ...]:
        expected = self.heads if scheme.coder == "affine" else 0
        items = self.node["clip_ratio"].items() if expected or "clip_ratio" in self.node else []
        if len(items) != expected:
            raise bad_input(f"{self.node.where}/clip_ratio: expected {expected} numbers, found {len(items)}")
        return tuple(item.number(above=0, most=1) for item in items)

    def order(self, kind: str) -> int:
        if kind != "block_hadamard":
            return self.rotation["order"].integer(1, LARGEST_DIM) if "order" in self.rotation else 0
        order = self.rotation["order"].integer(1, LARGEST_DIM)
        if order & (order - 1) or self.dim % order:
            raise bad_input(f"{self.rotation.where}/order: expected a power of two dividing {self.dim}, found {order}")
        return order

    def flag(self, name: str) -> bool:
        return name in self.rotation and self.rotation[name].boolean()

    def read_tensors(self, kind: str) -> dict[str, np.ndarray]:
        flat, square = (self.heads, self.dim), (self.heads, self.dim, self.dim)
        announced = [("rotation", "F32", square, kind == "dense"),
                     ("eigenbasis", "F32", square, self.flag("eigenbasis")),
                     ("spectrum", "F32", flat, self.flag("eigenbasis")),
                     ("center", "F32", flat, self.node["center"].boolean()),
                     ("hadamard_signs", "I8", flat, self.flag("signs"))]
        found = {name: self.tensors.take(f"{self.prefix}.{name}", dtype, shape)
                 for name, dtype, shape, there in announced if there}
        if "hadamard_signs" in found and not (np.abs(found["hadamard_signs"].astype(np.int16)) == 1).all():
            raise bad_input(f"{self.prefix}.hadamard_signs: expected +1 and -1 only")
        return found
