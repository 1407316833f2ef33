"""A strict reader of the safetensors container, on its own feet: it neither uses the safetensors package nor trusts it.

Nothing in the file is believed before it is checked: the header's length, its JSON (duplicate keys too), dtypes,
extents, and that the tensors cover the data without overlap and without holes.
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .errors import bad_input, unsupported

LENGTH_BYTES = 8
LARGEST_HEADER = 100_000_000
DEEPEST_JSON = 64
MOST_EXTENTS = 64
# The types that both readers know. bfloat16 is read as bit patterns, because numpy has no such type.
DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I8": "i1",
    "U16": "<u2",
    "U8": "u1",
}


@dataclass(frozen=True)
class TensorInfo:
    dtype: str
    shape: tuple[int, ...]
    begin: int  # offset in the data part
    end: int


class SafetensorsFile:
    """Parsed bytes. `tensors` is in order of name, `metadata` maps strings to strings."""

    def __init__(self, content: bytes, name: str):
        self.name = name
        header, self._data = _split(content, name)
        self.metadata = _metadata(header.pop("__metadata__", {}), name)
        names = sorted(header, key=str.encode)
        size = len(self._data)
        self.tensors = {key: _tensor_info(header[key], size, f"{name}: tensor '{key}'") for key in names}
        _expect_gapless(self.tensors, len(self._data), name)

    @staticmethod
    def open(path: Path) -> "SafetensorsFile":
        try:
            return SafetensorsFile(Path(path).read_bytes(), str(path))
        except OSError as error:
            raise bad_input(f"{path}: cannot read: {error.strerror}") from error

    def raw(self, tensor: str) -> memoryview:
        """Bytes of a tensor."""
        info = self.tensors[tensor]
        return self._data[info.begin : info.end]

    def array(self, tensor: str) -> np.ndarray:
        """A copy of a tensor."""
        info = self.tensors[tensor]
        return np.frombuffer(self.raw(tensor), DTYPES[info.dtype]).reshape(info.shape).copy()


def parse_json(text: str | bytes, where: str) -> object:
    """Strict JSON: no duplicate keys, no NaN, not deeper than DEEPEST_JSON, valid UTF-8."""
    try:
        value = json.loads(
            text if isinstance(text, str) else text.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_integer,
        )
        _check_nested(value)
    except (
        ValueError,
        RecursionError,
    ) as error:  # JSONDecodeError, UnicodeDecodeError and UnicodeEncodeError are ValueErrors
        raise bad_input(f"{where}: not valid JSON: {error or 'nested too deeply'}") from error
    return value


def _unique_keys(pairs: list[tuple[str, object]]) -> dict:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key '{next(k for k in keys if keys.count(k) > 1)}' stands there twice")
    return result


def _refuse_constant(word: str):
    raise ValueError(f"{word} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _integer(text: str) -> int | float:
    """An integer of 64 bits, else the nearest floating-point number, as the C++ reader has it."""
    value = int(text) if len(text) <= 20 else 2**64
    return value if -(2**63) <= value < 2**64 else _finite(text)


def _check_nested(value: object) -> None:
    """Checks depth, and that UTF-8 can hold all strings (an escape may be half a surrogate pair). Not recursive,
    because hostile JSON may be deep."""
    rest = [(value, 1)]
    while rest:
        item, level = rest.pop()
        if isinstance(item, str):
            item.encode()
        elif isinstance(item, (dict, list)):
            if level > DEEPEST_JSON:
                raise ValueError(f"nested more than {DEEPEST_JSON} levels deep")
            children = [*item, *item.values()] if isinstance(item, dict) else item
            rest += [(child, level + 1) for child in children]


def _split(content: bytes, name: str) -> tuple[dict, memoryview]:
    """(header, data)"""
    if len(content) < LENGTH_BYTES:
        raise bad_input(f"{name}: expected at least {LENGTH_BYTES} bytes, found {len(content)}")
    (length,) = struct.unpack_from("<Q", content)
    if length > min(LARGEST_HEADER, len(content) - LENGTH_BYTES):
        raise bad_input(f"{name}: header of {length} bytes does not fit the file's {len(content)} bytes")
    text = content[LENGTH_BYTES : LENGTH_BYTES + length]
    if not text.startswith(b"{"):
        raise bad_input(f"{name}: header: expected a JSON object")
    return parse_json(text, f"{name}: header"), memoryview(content)[LENGTH_BYTES + length :]


def _metadata(value: object, name: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise bad_input(f"{name}: __metadata__: expected an object of strings")
    return value


def _natural_numbers(value: object) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**63 for v in value)


def _tensor_info(entry: object, data_bytes: int, where: str) -> TensorInfo:
    """Checks in the order of the C++ reader, so that both name the same fault of several."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise bad_input(f"{where}: expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise bad_input(f"{where}: dtype: expected a string")
    if dtype not in DTYPES:
        raise unsupported(f"{where}: dtype {dtype!r} is not supported", f"supported: {', '.join(DTYPES)}")
    if not _natural_numbers(shape) or not _natural_numbers(offsets) or len(offsets) != 2 or len(shape) > MOST_EXTENTS:
        raise bad_input(f"{where}: expected extents and two offsets that are not negative")
    begin, end = offsets
    if end > data_bytes:
        raise bad_input(f"{where}: offsets end at {end}, found {data_bytes} bytes of data", "the file is cut off")
    size = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
    if end - begin != size:
        raise bad_input(f"{where}: {dtype} {shape} takes {size} bytes, found offsets {begin} to {end}")
    return TensorInfo(dtype, tuple(shape), begin, end)


def _expect_gapless(tensors: dict[str, TensorInfo], size: int, name: str) -> None:
    position = 0
    for key, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin != position:
            fault = "overlaps another tensor" if info.begin < position else "leaves a hole before it"
            raise bad_input(f"{name}: tensor '{key}' {fault}: expected offset {position}, found {info.begin}")
        position = info.end
    if position != size:
        raise bad_input(f"{name}: tensors take {position} bytes, found {size} bytes of data")
