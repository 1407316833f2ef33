"""An artifact in parts that tests change and write again, as a damaged or hostile file would have them."""

import copy
import json
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from kvq.safetensors_file import SafetensorsFile


@dataclass
class Tensor:
    dtype: str  # in the header
    values: np.ndarray

    @property
    def raw(self) -> bytes:
        return np.ascontiguousarray(self.values).tobytes()


@dataclass
class ArtifactFile:
    """`metadata` is without the manifest, which is `tree`. `tensors` are written in order of name."""

    metadata: dict[str, str]
    tree: dict
    tensors: dict[str, Tensor]

    @staticmethod
    def parse(content: bytes) -> "ArtifactFile":
        file = SafetensorsFile(content, "artifact")
        tensors = {name: Tensor(info.dtype, file.array(name)) for name, info in file.tensors.items()}
        metadata = dict(file.metadata)
        return ArtifactFile(metadata, json.loads(metadata.pop("kvq.manifest")), tensors)

    @staticmethod
    def read(path: Path) -> "ArtifactFile":
        return ArtifactFile.parse(path.read_bytes())

    def copy(self) -> "ArtifactFile":
        return copy.deepcopy(self)

    def array(self, name: str) -> np.ndarray:
        return self.tensors[name].values

    def fit_words(self) -> None:
        """Sets version and `requires` of the metadata to those of the manifest, where these are texts."""
        if isinstance(self.tree.get("version"), str):
            self.metadata["version"] = self.tree["version"]
        words = self.tree.get("requires")
        if isinstance(words, list) and all(isinstance(word, str) for word in words):
            self.metadata["requires"] = ",".join(words)

    def manifest(self) -> str:
        return json.dumps(self.tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    def content_hash(self) -> str:
        state = xxhash.xxh3_128(self.manifest().encode() + b"\0")
        for name in sorted(self.tensors, key=str.encode):
            tensor = self.tensors[name]
            state.update(name.encode() + b"\0" + tensor.dtype.encode() + b"\0")
            state.update(struct.pack(f"<{tensor.values.ndim}q", *tensor.values.shape) + tensor.raw)
        return f"xxh3-128:{state.hexdigest()}"

    def to_bytes(self, fit_hash: bool = True) -> bytes:
        if fit_hash:
            self.metadata["kvq.content_hash"] = self.content_hash()
        header, data = {"__metadata__": self.metadata | {"kvq.manifest": self.manifest()}}, []
        end = 0
        for name in sorted(self.tensors, key=str.encode):
            tensor, begin = self.tensors[name], end
            data.append(tensor.raw)
            end += len(data[-1])
            header[name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.values.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text + b"".join(data)

    def write(self, path: Path, fit_hash: bool = True) -> Path:
        path.write_bytes(self.to_bytes(fit_hash))
        return path
