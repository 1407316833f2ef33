"""Artifacts with one fault each, by name, made from the bytes of a sound one."""

import json
from collections.abc import Callable

import numpy as np
import xxhash  # noqa: F401, content_hash() does without; here it has to be there

from kvq_py.artifact import content_hash
from kvq_py.safetensors_file import SafetensorsFile

ROTATION = "layers.1.v.rotation"


def data_start(content: bytes) -> int:
    return 8 + int.from_bytes(content[:8], "little")


def with_metadata(content: bytes, **changes: str) -> bytes:
    """The same file with other words in `__metadata__`."""
    start = data_start(content)
    header = json.loads(content[8:start])
    header["__metadata__"] |= {key.replace("__", "."): value for key, value in changes.items()}
    text = json.dumps(header, separators=(",", ":"), sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[start:]


def edit_rotation(content: bytes, edit: Callable[[np.ndarray], None]) -> bytes:
    """`edit` changes one rotation [2, 32, 32] in place; the content hash stays as it was."""
    copy = bytearray(content)
    place = data_start(content) + SafetensorsFile(content, "artifact").tensors[ROTATION].begin
    edit(np.frombuffer(copy, "<f4", 2 * 32 * 32, place).reshape(2, 32, 32))
    return bytes(copy)


def flip_last_bit(rotation: np.ndarray) -> None:
    rotation.view(np.uint32)[1, 2, 3] ^= 1


def stretch(rotation: np.ndarray) -> None:
    rotation[1] *= np.float32(1.00001)


def put_nan(rotation: np.ndarray) -> None:
    rotation[1, 2, 3] = np.nan


def hashed(content: bytes) -> bytes:
    """The same file with the content hash it should have: only other checks can find the fault."""
    return with_metadata(content, kvq__content_hash=content_hash(SafetensorsFile(content, "artifact")))


def faulty_artifacts(content: bytes) -> dict[str, bytes]:
    return {
        "cut_1": content[:len(content) // 100],
        "cut_50": content[:len(content) // 2],
        "cut_last": content[:-1],
        "flipped": edit_rotation(content, flip_last_bit),
        "stretched": hashed(edit_rotation(content, stretch)),
        "nan": hashed(edit_rotation(content, put_nan)),
        "version_2": with_metadata(content, version="2.0"),
        "requires": with_metadata(content, requires="telepathy"),
        "other_format": with_metadata(content, format="kvq-artefact"),
        "no_manifest": with_metadata(content, kvq__manifest="{}"),
    }
