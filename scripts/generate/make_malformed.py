#!/usr/bin/env python3
"""Writes the hostile safetensors files of formats/malformed/.

Every file must be refused with a clear error; tests/unit/container/malformed_test.cpp holds the reader to that. The
files are small and the same on every run."""

import argparse
import json
import pathlib
import struct

GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DATA = bytes(range(8))


def packed(header, data=DATA):
    """A file with this header: a dict, or text that is written unchanged."""
    text = header if isinstance(header, str) else json.dumps(header, separators=(",", ":"))
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw + data


def tensor(**changes):
    return packed({"a": {**GOOD, **changes}})


def without(key):
    return packed({"a": {name: value for name, value in GOOD.items() if name != key}})


def two_tensors(first, second, data_bytes):
    entries = {
        name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for name, (begin, end) in {"a": first, "b": second}.items()
    }
    return packed(entries, bytes(data_bytes))


def cases():
    good = packed({"a": GOOD})
    return {
        # the length before the header
        "empty": b"",
        "length_cut_off": good[:5],
        "length_zero": struct.pack("<Q", 0),
        "length_huge": struct.pack("<Q", 2**64 - 1) + good[8:],
        "length_above_cap": struct.pack("<Q", 100_000_001) + good[8:],
        "length_past_end": struct.pack("<Q", len(good)) + good[8:],
        "header_cut_off": good[:20],
        # the JSON
        "not_json": packed("{dtype}"),
        "not_an_object": packed("[]", b""),
        "leading_space": packed(' {"a":' + json.dumps(GOOD) + "}"),
        "duplicate_tensor": packed('{"a":%s,"a":%s}' % (json.dumps(GOOD), json.dumps(GOOD))),
        "duplicate_field": packed('{"a":{"dtype":"F32","dtype":"I8","shape":[2],"data_offsets":[0,8]}}'),
        "depth_bomb": packed('{"a":' + "[" * 5000 + "]" * 5000 + "}"),
        "trailing_text": packed('{"a":' + json.dumps(GOOD) + "}x"),
        "trailing_zero_bytes": packed('{"a":' + json.dumps(GOOD) + "}\0\0"),
        "invalid_utf8": struct.pack("<Q", 5) + b'{"\xff"' + DATA,
        # __metadata__
        "metadata_not_an_object": packed({"__metadata__": "kvq", "a": GOOD}),
        "metadata_not_a_string": packed({"__metadata__": {"version": 1}, "a": GOOD}),
        # one tensor
        "tensor_not_an_object": packed({"a": 3}),
        "dtype_missing": without("dtype"),
        "dtype_not_a_string": tensor(dtype=3),
        "dtype_unknown": tensor(dtype="F99"),
        "dtype_wrong": tensor(dtype="F64"),
        "shape_missing": without("shape"),
        "shape_not_an_array": tensor(shape=2),
        "shape_negative": tensor(shape=[-2]),
        "shape_fraction": tensor(shape=[2.0]),
        "shape_too_large": tensor(shape=[2**64]),
        "shape_overflow": tensor(shape=[2**32, 2**32]),
        "shape_overflow_to_size": tensor(shape=[2**62 + 1, 2]),
        "shape_overflow_times_zero": tensor(shape=[2**62, 2**62, 0], data_offsets=[0, 0]),
        "shape_wrong": tensor(shape=[3]),
        "offsets_missing": without("data_offsets"),
        "offsets_one": tensor(data_offsets=[0]),
        "offsets_three": tensor(data_offsets=[0, 8, 8]),
        "offsets_negative": tensor(data_offsets=[-8, 0]),
        "offsets_backwards": tensor(data_offsets=[8, 0]),
        "offsets_past_end": tensor(shape=[4], data_offsets=[0, 16]),
        "offsets_huge": tensor(data_offsets=[2**64 - 8, 2**64 - 1]),
        # all tensors
        "data_cut_off": good[:-1],
        "data_left_over": good + b"\0",
        "data_of_nobody": packed({}, DATA),
        "overlap": two_tensors((0, 8), (4, 12), 12),
        "same_bytes": two_tensors((0, 8), (0, 8), 8),
        "hole": two_tensors((0, 4), (8, 12), 12),
        "hole_at_begin": two_tensors((4, 8), (8, 12), 12),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = pathlib.Path(__file__).resolve().parents[2] / "formats" / "malformed"
    parser.add_argument("--out", type=pathlib.Path, default=default, help="folder to write to (default: %(default)s)")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in cases().items():
        (folder / f"{name}.safetensors").write_bytes(raw)
    print(f"{len(cases())} files in {folder}")


if __name__ == "__main__":
    main()
