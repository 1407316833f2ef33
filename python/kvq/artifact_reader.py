"""Reads formats/artifact.md: checks everything that a reader has to refuse, then hands out plans."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from .artifact import MOST_CONDITION, Artifact, GoldenRows, LayerPlan, SidePlan, Transform, content_hash, stated_hash
from .errors import KvqError, bad_input, unsupported
from .json_node import Node
from .json_schema import schema_fault
from .packing import from_bf16_bits
from .safetensors_file import SafetensorsFile, parse_json
from .scheme import (
    EXACT_BITS,
    LARGEST_MEMORY,
    MIXABLE_CODERS,
    SCALE_BYTES,
    SCALE_RULES,
    WIDTHS,
    AnyScheme,
    MixedScheme,
    Scheme,
    Tables,
    Trellis,
    trellis_fault,
    with_equal_rows,
)

FORMAT, MAJOR = "kvq-artifact", 1
KNOWN_FEATURES = (  # in the order of `requires`
    "codebook",
    "trellis",
    "mixed_widths",
    "centroids",
    "transform",
    "logit_softcapping",
    "row_scale",
    "integer_search",
)
LARGEST_LOGIT = 1e6  # of caps and sinks
LARGEST_DIM = 1024
LARGEST_CENTROIDS = 4096
LARGEST_ROW = 4096
MOST_GOLDEN_TOKENS = 4096
LARGEST_SCALE_EXPONENT = 24  # of a channel_scale, and of its inverse
GOLDEN_TENSOR = re.compile(r"layers\.[0-9]+\.golden\.")
# Parts of a plan that only some coders have.
PARTS = {
    "scale_type": tuple(SCALE_RULES),
    "scale_rule": tuple(SCALE_RULES),
    "group_size": tuple(SCALE_RULES),
    "zero": ("affine",),
    "codebooks": ("codebook",),
    "trellis": ("trellis",),
    "allocation": MIXABLE_CODERS,
    "centroids": tuple(SCALE_RULES),
}
SCHEMA = Path(__file__).with_name("artifact.schema.json")
TRANSFORMS = ("diagonal", "balanced", "klt", "mixed")


def load_artifact(path: str | Path, check_hash: bool = True) -> Artifact:
    """Opens and checks an artifact; raises KvqError for every fault that formats/artifact.md tells a reader to refuse.

    `check_hash` is false only for callers that report a wrong content hash themselves.
    """
    return parse_artifact(SafetensorsFile.open(Path(path)), check_hash)


@cache
def artifact_schema() -> dict:
    return json.loads(SCHEMA.read_text())


def parse_artifact(file: SafetensorsFile, check_hash: bool = True) -> Artifact:
    _check_versions(file)
    where = f"{file.name}: kvq.manifest"
    manifest = parse_json(_metadata(file, "kvq.manifest"), where)
    if fault := schema_fault(manifest, artifact_schema()):
        raise bad_input(f"{where}: {fault}")
    root = Node(manifest, where)
    outside = (file.metadata["version"], file.metadata["requires"])
    if (root["version"].text(), ",".join(root["requires"].texts())) != outside:
        raise bad_input(f"{where}: version or requires differ from __metadata__")
    if check_hash:
        _check_hash(file)
    num_layers = root["model"]["num_layers"].integer(1, 4096)
    for key in ("calibration", "windows"):
        root[key].object()
    tensors = _TensorReader(file, frozenset(root["requires"].texts()))
    layers = _read_layers(root["layers"], num_layers, tensors)
    tensors.expect_all_read()
    windows = root["windows"]
    return Artifact(
        file,
        manifest,
        windows["sink_tokens"].integer(0, 2**30 - 1),
        windows["recent_tokens"].integer(0, 2**30 - 1),
        layers,
    )


def _metadata(file: SafetensorsFile, key: str) -> str:
    if key not in file.metadata:
        raise bad_input(f"{file.name}: __metadata__ has no '{key}': not a kvq file")
    return file.metadata[key]


def _check_hash(file: SafetensorsFile) -> None:
    stated, found = stated_hash(file), content_hash(file)
    if stated != found:
        raise bad_input(
            f"{file.name}: content hash: expected {stated}, found {found}",
            "the file was changed after it was written; --verify says what else is wrong",
        )


def _is_natural(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) < 2**31


def _check_versions(file: SafetensorsFile) -> None:
    if _metadata(file, "format") != FORMAT:
        raise bad_input(f"{file.name}: expected format {FORMAT}, found '{file.metadata['format']}'")
    major, dot, minor = _metadata(file, "version").partition(".")
    if not dot or not all(_is_natural(number) for number in (major, minor)):
        raise bad_input(f"{file.name}: version: expected major.minor, found '{file.metadata['version']}'")
    if int(major) != MAJOR:
        raise unsupported(f"{file.name}: {FORMAT} version {major}.{minor}: this reader reads {MAJOR}.x")
    text = _metadata(file, "requires")
    words = text.removesuffix(",").split(",") if text else []
    unknown = [word for word in words if word not in KNOWN_FEATURES]
    if unknown:
        raise unsupported(f"{file.name}: requires the feature '{unknown[0]}', which this reader does not know")


class _TensorReader:
    """Hands out tensors that the manifest announces, and remembers tensors that were not read.

    `features` is the manifest's list of features that a reader must know.
    """

    def __init__(self, file: SafetensorsFile, features: frozenset[str]):
        self._file = file
        self._features = features
        # Unread golden tensors (layers.<i>.golden.*) are no fault, because a later minor version may add some.
        self._unread = {name for name in file.tensors if not GOLDEN_TENSOR.match(name)}

    def use(self, feature: str, where: str) -> None:
        """Called for each use of a feature; raises if the file does not list it, because a reader without the feature
        would then read the file wrongly."""
        if feature not in self._features:
            raise bad_input(f"{where}: uses the feature '{feature}', which requires does not list")

    def take(self, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        info = self._file.tensors.get(name)
        if info is None:
            raise bad_input(f"{self._file.name}: tensor {name} is missing, though the manifest announces it")
        if (info.dtype, info.shape) != (dtype, shape):
            raise bad_input(
                f"{self._file.name}: {name}: expected {dtype} {list(shape)}, found {info.dtype} {list(info.shape)}"
            )
        self._unread.discard(name)
        array = self._file.array(name)
        if dtype == "F32" and not np.isfinite(array).all():
            index = np.unravel_index(int(np.argmin(np.isfinite(array))), shape)
            raise bad_input(f"{self._file.name}: {name}: element {[int(i) for i in index]} is not finite")
        return array

    def take_bf16(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """float32 [shape] from the bit patterns of bfloat16 numbers."""
        array = from_bf16_bits(self.take(name, "U16", shape))
        if not np.isfinite(array).all():
            raise bad_input(f"{self._file.name}: {name}: NaN or Inf")
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
    if "logit_softcapping" in geometry:
        tensors.use("logit_softcapping", geometry.where)
    sides = {}
    for side, dim_name in (("k", "head_dim"), ("v", "v_head_dim")):
        if side == "k" or side in node:
            dim = geometry[dim_name].integer(1, LARGEST_DIM)
            sides[side] = _SideReader(node[side], kv_heads, dim, f"layers.{index}.{side}", tensors).read()
    golden = _read_golden(node["golden"], geometry, index, q_heads, sides, tensors) if "golden" in node else None
    return LayerPlan(index, q_heads, kv_heads, sides, golden)


def _read_golden(
    node: Node, geometry: Node, index: int, q_heads: int, sides: dict[str, SidePlan], tensors: _TensorReader
) -> GoldenRows:
    prefix, kv_heads = f"layers.{index}.golden.", geometry["num_kv_heads"].integer(1, 4096)
    count = node["count"].integer(1, MOST_GOLDEN_TOKENS)
    x, packed, firm, out = {}, {}, {}, None
    for side, plan in sides.items():
        x[side] = tensors.take_bf16(f"{prefix}{side}", (count, kv_heads, plan.dim))
        packed[side] = tensors.take(f"{prefix}{side}_bytes", "U8", (count, kv_heads, plan.row_bytes))
        firm[side] = tensors.take(f"{prefix}{side}_firm", "U8", (count, kv_heads))
        if firm[side].max() > 1:
            raise bad_input(f"{prefix}{side}_firm: expected 0 and 1 only")
    if "v" in sides:
        out = tensors.take(f"{prefix}out", "F32", (q_heads, sides["v"].dim))
    return GoldenRows(
        node["first"].integer(0, 2**40),
        tensors.take_bf16(f"{prefix}q", (q_heads, sides["k"].dim)),
        x,
        packed,
        firm,
        out,
        geometry["softmax_scale"].number(above=0),
        geometry["sliding_window"].integer(0, 2**30 - 1),
        geometry["logit_softcapping"].number(above=0) if "logit_softcapping" in geometry else 0.0,
    )


def _check_geometry(geometry: Node) -> None:
    geometry["softmax_scale"].number(above=0)
    geometry["sliding_window"].integer(0, 2**30 - 1)
    geometry["kind"].word("gqa", "mla_rope")
    if "logit_softcapping" in geometry:
        geometry["logit_softcapping"].number(above=0, most=LARGEST_LOGIT)
    if "sink_logits" in geometry:
        sinks = [item.number(least=-LARGEST_LOGIT, most=LARGEST_LOGIT) for item in geometry["sink_logits"].items()]
        expected = geometry["num_q_heads"].integer(1, 4096)
        if len(sinks) != expected:
            raise bad_input(f"{geometry.where}: sink_logits: expected {expected} values, found {len(sinks)}")
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
    """Reads one plan of the manifest and the tensors that the plan announces."""

    def __init__(self, node: Node, kv_heads: int, dim: int, prefix: str, tensors: _TensorReader):
        self.node, self.dim, self.prefix, self.tensors = node, dim, prefix, tensors
        self.rotation = node["rotation"]
        self.scope = self.rotation["scope"].word("kv_head", "layer")
        self.heads = 1 if self.scope == "layer" else kv_heads
        self.coder = node["coder"].word("exact", *SCALE_RULES)
        self.mixed = "allocation" in node
        self.found: dict[str, np.ndarray] = {}  # tensors, by the end of their names
        self.features: list[str] = []

    def read(self) -> SidePlan:
        kind = self.rotation["kind"].word("identity", "block_hadamard", "dense")
        self.check_parts()
        self.check_sign_choice()
        self.read_tensors(kind)
        scope = self.read_centroids()
        tables = self.tables()
        schemes = self.mixed_schemes(tables) if self.mixed else self.schemes(tables)
        return SidePlan(
            schemes,
            kind,
            self.scope,
            self.rotation["recipe"].text(),
            self.order(kind),
            self.dim,
            self.found,
            scope,
            self.transform(),
            tuple(self.features),
        )

    def check_parts(self) -> None:
        """Refuses parts of the plan that do not fit the coder, and features that the file does not list."""
        for part, coders in PARTS.items():
            if part in self.node and self.coder not in coders:
                raise bad_input(f"{self.node.where}/{part}: does not go with the coder {self.coder}")
        if "group_size" in self.node and self.mixed:
            raise bad_input(f"{self.node.where}: mixed rows have no group_size")
        for feature, used in (
            ("codebook", self.coder == "codebook"),
            ("trellis", self.coder == "trellis"),
            ("mixed_widths", self.mixed),
            ("centroids", "centroids" in self.node),
            ("transform", "transform" in self.node),
            ("row_scale", self.mixed and "scale_scope" in self.node["allocation"]),
            ("integer_search", self.searches_integers()),
        ):
            if used:
                self.tensors.use(feature, self.node.where)
                self.features.append(feature)

    def searches_integers(self) -> bool:
        """Whether a trellis says so."""
        return "trellis" in self.node and any("search" in item for item in self.node["trellis"].items())

    def take(self, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        self.found[name] = self.tensors.take(f"{self.prefix}.{name}", dtype, shape)
        return self.found[name]

    def fault(self, tensor: str, expected: str) -> KvqError:
        return bad_input(f"{self.prefix}.{tensor}: expected {expected}")

    # Rows of one width

    def schemes(self, tables: list[Tables]) -> tuple[Scheme, ...]:
        """[H]; one scheme if the heads do not differ."""
        count = self.centroid_count()
        if self.coder == "exact":
            self.clip_ratio()
            return (Scheme(self.coder, self.node["bits"].integer(EXACT_BITS, EXACT_BITS)),) * self.heads
        bits, size = self.node["bits"].integer(1, 8), self.node["group_size"].integer(1, LARGEST_DIM)
        if self.dim % size:
            raise bad_input(f"{self.node.where}: group_size {size} does not divide {self.dim} channels")
        scale_type, rule = self.scale_type(), self.scale_rule()
        ratios = self.clip_ratio()
        if self.coder == "affine":
            zero = self.node["zero"].word("float", "integer")
            return tuple(
                Scheme(self.coder, bits, size, scale_type, rule, zero, ratio, centroids=count) for ratio in ratios
            )
        try:
            return tuple(
                replace(own.scheme(self.coder, bits, size, scale_type, rule), centroids=count) for own in tables
            )
        except ValueError as error:
            raise bad_input(f"{self.node.where}: {error}") from error

    def scale_type(self) -> str:
        return self.node["scale_type"].word(*SCALE_BYTES)

    def scale_rule(self) -> str:
        return self.node["scale_rule"].word(*SCALE_RULES[self.coder])

    def clip_ratio(self) -> list[float]:
        expected = self.heads if self.coder == "affine" else 0
        items = self.node["clip_ratio"].items() if expected or "clip_ratio" in self.node else []
        if len(items) != expected:
            raise bad_input(f"{self.node.where}/clip_ratio: expected {expected} numbers, found {len(items)}")
        return [item.number(above=0, most=1) for item in items]

    # Mixed rows

    def mixed_schemes(self, tables: list[Tables]) -> tuple[AnyScheme, ...]:
        """[H]"""
        self.clip_ratio()
        scale_type, rule = self.scale_type(), self.scale_rule()
        widths, count = self.channel_bits(), self.centroid_count()
        self.check_channel_order()
        row_bytes, gains = self.read_allocation(), self.gains()
        try:
            schemes = with_equal_rows(
                [
                    MixedScheme.make(self.coder, tuple(own.tolist()), scale_type, rule, table, count, gain)
                    for own, table, gain in zip(widths, tables, gains)
                ]
            )
        except ValueError as error:
            raise bad_input(f"{self.node.where}: {error}") from error
        mean = int(widths.sum()) / widths.size
        if self.node["allocation"]["mean_bits"].number() != mean:
            raise bad_input(f"{self.node.where}/allocation/mean_bits: expected {mean}, the mean of the widths")
        if schemes[0].row_bytes(self.dim) != row_bytes:
            raise bad_input(
                f"{self.node.where}/allocation/row_bytes: the widths need {schemes[0].row_bytes(self.dim)}, "
                f"found {row_bytes}"
            )
        return schemes

    def gains(self) -> list[tuple[float, ...] | None]:
        """[H]: gains of widths 1 to 8 for rows with one scale, else None"""
        if "scale_scope" not in self.node["allocation"]:
            return [None] * self.heads
        self.node["allocation"]["scale_scope"].word("row")
        return [tuple(own) for own in self.take("segment_gain", "F32", (self.heads, len(WIDTHS))).tolist()]

    def channel_bits(self) -> np.ndarray:
        widths = self.take("channel_bits", "U8", (self.heads, self.dim))
        if widths.max() > 8 or (widths[:, 1:] > widths[:, :-1]).any():
            raise self.fault("channel_bits", "widths from 0 to 8, descending")
        if self.node["bits"].integer(1, 8) != widths.max():
            raise bad_input(
                f"{self.node.where}/bits: the largest width is {widths.max()}, found {self.node['bits'].value}"
            )
        return widths

    def check_channel_order(self) -> None:
        order = self.take("channel_order", "U16", (self.heads, self.dim))
        if (np.sort(order, axis=1) != np.arange(self.dim)).any():
            raise self.fault("channel_order", f"a permutation of 0 to {self.dim - 1} for each head")

    def read_allocation(self) -> int:
        """Reads the allocation; returns the row size that the manifest states."""
        node = self.node["allocation"]
        is_key = self.prefix.endswith(".k")
        if node["unit"].word("channel", *(["rope_block"] if is_key else [])) == "rope_block":
            self.read_blocks()
        node["score"].text()
        node["mean_bits"].number(least=0, most=8)
        for name in ("free_objective", "objective"):
            node[name].number(least=0)
        return node["row_bytes"].integer(0, LARGEST_ROW)

    def read_blocks(self) -> None:
        shape = (self.heads, (self.dim + 1) // 2)
        if self.take("block_bits", "U8", shape).max() > 8:
            raise self.fault("block_bits", "widths from 0 to 8")
        if (self.take("block_energy", "F32", shape) < 0).any():
            raise self.fault("block_energy", "no negative numbers")

    # Codebooks, trellises, centroids

    def tables(self) -> list[Tables]:
        """[H]"""
        if self.coder == "codebook":
            return [Tables(codebooks=own) for own in self.codebooks()]
        trellises = self.trellises() if self.coder == "trellis" else {}
        return [Tables(trellises=trellises)] * self.heads

    def codebooks(self) -> list[dict[int, tuple[float, ...]]]:
        """[H]: entries by width"""
        node = self.node["codebooks"]
        node["source"].word("sphere", "fitted")
        per_head = node["per_head"].boolean()
        found: list[dict[int, tuple[float, ...]]] = [{} for _ in range(self.heads)]
        for bits in self.distinct(node["bits"].items(minimum=1)):
            shape = (self.heads, 2**bits) if per_head else (2**bits,)
            entries = self.take(f"codebook.{bits}", "F32", shape)
            if not (entries[..., 1:] > entries[..., :-1]).all():
                raise self.fault(f"codebook.{bits}", "strictly ascending entries")
            for own, row in zip(found, np.broadcast_to(entries, (self.heads, 2**bits)).tolist()):
                own[bits] = tuple(row)
        return found

    def trellises(self) -> dict[int, Trellis]:
        """By width; the thetas stand one after the other in one tensor."""
        items = self.node["trellis"].items(minimum=1)
        memories = {}
        widths = self.distinct([item["bits"] for item in items])
        if widths != sorted(widths):
            raise bad_input(f"{self.node.where}/trellis: expected ascending widths, found {widths}")
        for bits, item in zip(widths, items):
            memories[bits] = item["memory"].integer(1, LARGEST_MEMORY)
            if fault := trellis_fault(bits, memories[bits]):
                raise bad_input(f"{item.where}: {fault}")
        lengths = [bits * (memory + 1) for bits, memory in memories.items()]
        theta = self.take("trellis", "F32", (sum(lengths),))
        parts = np.split(theta, np.cumsum(lengths)[:-1])
        searches = [item["search"].word("integer") if "search" in item else "binary32" for item in items]
        return {
            bits: Trellis(memory, tuple(part.tolist()), search)
            for (bits, memory), part, search in zip(memories.items(), parts, searches)
        }

    def distinct(self, items: list[Node]) -> list[int]:
        """The widths of a list, each at most once."""
        widths = [item.integer(1, 8) for item in items]
        if len(set(widths)) < len(widths):
            raise bad_input(f"{items[0].where}: expected different widths, found {widths}")
        return widths

    def centroid_count(self) -> int:
        return self.found["centroids"].shape[1] if "centroids" in self.found else 0

    def read_centroids(self) -> str:
        """Reads the centroids; returns their scope, or an empty string if the plan has none."""
        if "centroids" not in self.node:
            return ""
        node = self.node["centroids"]
        if self.node["center"].boolean():
            raise bad_input(f"{self.node.where}: expected a center or centroids, found both")
        node["order"].word("before", "after")
        inertia = [item.number(least=0) for item in node["inertia"].items()]
        if len(inertia) != self.heads:
            raise bad_input(f"{node.where}/inertia: expected {self.heads} numbers, found {len(inertia)}")
        self.take("centroids", "F32", (self.heads, node["count"].integer(2, LARGEST_CENTROIDS), self.dim))
        return node["scope"].word("kv_head", "joint")

    # Rotation

    def order(self, kind: str) -> int:
        if kind != "block_hadamard" and "order" not in self.rotation:
            return 0
        order = self.rotation["order"].integer(1, LARGEST_DIM)
        if order & (order - 1) or self.dim % order:
            raise bad_input(f"{self.rotation.where}/order: expected a power of two dividing {self.dim}, found {order}")
        return order

    def transform(self) -> Transform | None:
        """The transform; refuses a plan that has a transform without a channel_scale or an inverse, or one of these
        without a transform."""
        stored = "inverse" in self.found or "channel_scale" in self.found
        if stored != ("transform" in self.node):
            raise bad_input(
                f"{self.node.where}: expected a transform and its channel_scale or inverse, found "
                f"{'no transform' if stored else 'neither of these two'}"
            )
        if not stored:
            return None
        for foreign, there in (("centroids", "centroids" in self.node), ("coder exact", self.coder == "exact")):
            if there:
                raise bad_input(f"{self.node.where}: a transform does not go with {foreign}")
        node = self.node["transform"]
        return Transform(
            node["kind"].word(*TRANSFORMS),
            self.per_head(node["outlier_gain"], least=1),
            self.per_head(node["condition"], least=1, most=MOST_CONDITION),
        )

    def per_head(self, node: Node, **bounds: float) -> tuple[float, ...]:
        """[H]"""
        items = node.items()
        if len(items) != self.heads:
            raise bad_input(f"{node.where}: expected {self.heads} numbers, found {len(items)}")
        return tuple(item.number(**bounds) for item in items)

    def check_sign_choice(self) -> None:
        """`sign_choice` has one text a head, or none."""
        choices = self.rotation["sign_choice"].texts() if "sign_choice" in self.rotation else []
        if choices and len(choices) != self.heads:
            raise bad_input(f"{self.rotation.where}/sign_choice: expected {self.heads} texts, found {len(choices)}")

    def flag(self, name: str) -> bool:
        return name in self.rotation and self.rotation[name].boolean()

    def read_tensors(self, kind: str) -> None:
        flat, square = (self.heads, self.dim), (self.heads, self.dim, self.dim)
        for name, fits in (("inverse", kind == "dense"), ("channel_scale", kind != "dense")):
            if self.flag(name) and not fits:
                raise bad_input(f"{self.rotation.where}/{name}: does not go with the kind {kind}")
        announced = [
            ("rotation", "F32", square, kind == "dense"),
            ("inverse", "F32", square, self.flag("inverse")),
            ("channel_scale", "F32", flat, self.flag("channel_scale")),
            ("eigenbasis", "F32", square, self.flag("eigenbasis")),
            ("spectrum", "F32", flat, self.flag("eigenbasis")),
            ("center", "F32", flat, self.node["center"].boolean()),
            ("hadamard_signs", "I8", flat, self.flag("signs")),
        ]
        for name, dtype, shape, there in announced:
            if there:
                self.take(name, dtype, shape)
        if "hadamard_signs" in self.found and not (np.abs(self.found["hadamard_signs"].astype(np.int16)) == 1).all():
            raise self.fault("hadamard_signs", "+1 and -1 only")
        if "channel_scale" in self.found:
            scale = self.found["channel_scale"]
            in_range = (scale >= 2.0**-LARGEST_SCALE_EXPONENT) & (scale <= 2.0**LARGEST_SCALE_EXPONENT)  # false for NaN
            if not (in_range & (scale.view(np.uint32) & 0xFFFF == 0)).all():
                raise self.fault(
                    "channel_scale", f"bfloat16 numbers from 2^-{LARGEST_SCALE_EXPONENT} to 2^{LARGEST_SCALE_EXPONENT}"
                )
