#!/usr/bin/env python3
"""Derives formats/page_vectors.json from the text of formats/pages.md, from the reader's side.

A third writing of the page layout, beside lib/kvq/plan/page_layout.h and the reader in tests/python: it walks over the
bytes of a tile as the lanes of a kernel do and asks which token and channel each bit belongs to, where the other two
ask for the byte of a channel. Standard library only.

    derive_page_vectors.py           writes formats/page_vectors.json
    derive_page_vectors.py --check   compares, exit code 6 if the file says something else
"""

import json
import struct
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import vector_file

VECTORS = Path(__file__).resolve().parents[2] / "formats" / "page_vectors.json"
TILE_TOKENS = 16
LARGEST_ZERO_GAP = 6  # a run of `bytes` includes gaps of up to this many zeros


@dataclass(frozen=True)
class Side:
    """One side of a layer, with the fields of a vector in page_vectors.json."""

    head_dim: int
    bits: int
    group_size: int = 0
    coder: str = "exact"
    scale_type: str = ""
    zero: str = "float"
    channel_bits: tuple[str, ...] = ()  # of mixed widths: by head, one digit a channel
    scale_scope: str = "segment"
    centroids: int = 0

    @property
    def exact(self) -> bool:
        return self.bits == 16

    @property
    def in_bit_tiles(self) -> bool:
        if self.exact:
            return False
        if self.coder not in ("affine", "symmetric") or self.channel_bits or self.bits not in (2, 3, 4):
            return True
        return self.head_dim * self.bits % 128 != 0 or self.group_size % 32 != 0

    @property
    def numbers(self) -> int:
        """of a group"""
        return {"affine": 2, "exact": 0}.get(self.coder, 1)

    @property
    def groups(self) -> int:
        return 0 if self.exact else self.head_dim // self.group_size

    def widths(self, head: int) -> list[int]:
        """the width of each channel's code"""
        return [int(w) for w in self.channel_bits[head]] if self.channel_bits else [self.bits] * self.head_dim

    def scales(self, head: int) -> int:
        """scales of a row"""
        if not self.channel_bits:
            return self.groups
        segments = len(set(self.widths(head)) - {0})
        return min(1, segments) if self.scale_scope == "row" else segments

    @property
    def row_words(self) -> int:
        """of bit tiles: 32-bit words of the longest row"""
        return max(1, *(-(-sum(self.widths(head)) // 32) for head in range(max(1, len(self.channel_bits)))))

    @property
    def row_numbers(self) -> int:
        """of bit tiles: numbers of a row of the head with the most"""
        return max(self.scales(head) for head in range(max(1, len(self.channel_bits)))) * self.numbers

    @property
    def index_bytes(self) -> int:
        return 0 if not self.centroids else 1 if self.centroids <= 256 else 2

    @property
    def code_digits(self) -> int:
        """hex digits of a code in a row's `codes`"""
        return 1 if self.bits <= 4 else 2

    @property
    def number_size(self) -> int:
        """bytes of a scale, a minimum or a zero point"""
        return 4 if self.scale_type == "fp32" else 2

    @property
    def second(self) -> str:
        """the second number of a group, as a field of a row"""
        return "zeros" if self.zero == "integer" else "minima"

    @property
    def units(self) -> int:
        """of three bits: words behind the pairs of a piece"""
        return self.words // 3

    @property
    def words(self) -> int:
        """32-bit words of a piece, which is a quarter of a row's codes"""
        return self.head_dim * self.bits // 128

    @property
    def codes_per_byte(self) -> int:
        return 8 // self.bits

    @property
    def code_bytes(self) -> int:
        return 64 * self.row_words if self.in_bit_tiles else 2 * self.head_dim * self.bits

    @property
    def number_bytes(self) -> int:
        numbers = self.row_numbers if self.in_bit_tiles else self.groups * self.numbers
        return self.number_size * TILE_TOKENS * numbers

    @property
    def tile_bytes(self) -> int:
        return self.code_bytes + self.number_bytes + TILE_TOKENS * self.index_bytes

    def fields(self) -> dict:
        common = {"head_dim": self.head_dim, "bits": self.bits}
        if self.exact:
            return common
        coded = {"group_size": self.group_size, "coder": self.coder, "scale_type": self.scale_type}
        if self.channel_bits:
            coded = {"channel_bits": list(self.channel_bits), "scale_scope": self.scale_scope} | coded
            del coded["group_size"]
        zero = {"zero": self.zero} if self.zero == "integer" else {}
        return common | coded | zero | ({"centroids": self.centroids} if self.centroids else {})


# Where codes lie, from one lane's view: byte x in the run of lane l holds parts of the codes of (token, channel).


@dataclass(frozen=True)
class Part:
    """What some bits of a byte hold: the bits of a channel's code from `first` on."""

    channel: int
    bits: range  # of the byte
    first: int = 0


def run_position(side: Side, lane: int, x: int) -> int:
    """The byte of the tile that holds byte x of the lane's run."""
    piece = 4 * side.words
    chunk = 16 if piece % 8 == 0 else 8
    return sum((32 * chunk * (x // chunk), chunk * lane, x % chunk))


def step_and_half(side: Side, word: int, k: int) -> tuple[int, int]:
    """(step, w): the step of 32 channels, and the half w of the step's eight channels, whose code is slice k of `word`
    of a piece."""
    if word == side.words - 1 and side.words % 2 == 1:
        return word // 2 * side.codes_per_byte + k // 2, k % 2
    return word // 2 * side.codes_per_byte + k, word % 2


def channel_of(side: Side, piece: int, y: int, k: int) -> int:
    step, half = step_and_half(side, y // 4, k)
    return 32 * step + 8 * piece + 4 * half + y % 4


def parts_of_byte(side: Side, piece: int, y: int) -> list[Part]:
    """What byte y of a piece holds, from its least significant bit on."""
    if side.bits != 3:
        codes = range(side.codes_per_byte)
        return [Part(channel_of(side, piece, y, k), range(k * side.bits, (k + 1) * side.bits)) for k in codes]
    word, in_word = divmod(y, 4)
    if word < 2 * side.units:
        first_step, half = 4 * (word // 2), word % 2
        channels = [32 * (first_step + s) + 8 * piece + 4 * half + in_word for s in range(3)]
        return [Part(channel, bits) for channel, bits in zip(channels, (range(3), range(3, 6), range(6, 8)))]
    first_step, parts = 4 * (word - 2 * side.units), []
    for half, low in ((0, 0), (1, 4)):
        channel = 32 * first_step + 8 * piece + 4 * half + in_word
        parts += [Part(channel + 96, range(low, low + 3)), Part(channel + 64, range(low + 3, low + 4), 2)]
    return parts


def key_codes(side: Side):
    """Yields (byte of the tile, token, part of a code) for all bits of a key tile."""
    piece_bytes = 4 * side.words
    for lane in range(32):
        row, piece = lane // 4, lane % 4
        run = [(row, y) for y in range(piece_bytes)] + [(row + 8, y) for y in range(piece_bytes)]
        for x, (token, y) in enumerate(run):
            for part in parts_of_byte(side, piece, y):
                yield run_position(side, lane, x), token, part


def half_bytes(side: Side, half: int) -> list[int]:
    """The bytes of a piece that belong to `half`, by rising index."""
    bytes_of_half = []
    if side.bits == 3:
        return [4 * word + 2 * half + i for word in range(side.words) for i in (0, 1)]
    for pair in range(side.words // 2):
        word = 2 * pair + half
        bytes_of_half += range(4 * word, 4 * word + 4)
    if side.words % 2:
        last = 4 * (side.words - 1)
        bytes_of_half += [last + 2 * half, last + 2 * half + 1]
    return bytes_of_half


def value_codes(side: Side):
    """Yields (byte of the tile, token, part of a code) for all bits of a value tile."""
    for lane in range(32):
        row, u = lane // 4, lane % 4
        for h, y in enumerate(half_bytes(side, row % 2)):
            for i, token in enumerate((2 * u, 2 * u + 8, 2 * u + 1, 2 * u + 9)):
                for part in parts_of_byte(side, row // 2, y):
                    yield run_position(side, lane, 4 * h + i), token, part


def value_order(side: Side) -> list[int]:
    """The channel at each place (permuted channel) of an exact value in the windows, in blocks of 16 rows of one matrix
    product."""
    if side.exact or side.in_bit_tiles:
        return list(range(side.head_dim))
    order = []
    if side.bits == 3:
        return three_bit_order(side)
    for pair in range(side.words):
        for k in range(side.codes_per_byte):
            for h in (2 * pair, 2 * pair + 1):
                order += [channel_of(side, row // 2, half_bytes(side, row % 2)[h], k) for row in range(8)]
    return order


def three_bit_order(side: Side) -> list[int]:
    """value_order() of three bits: rows r and r + 8 of a block are in two bytes of a word that are neighbours."""
    order = {}
    for word in range(side.words):
        for h in (2 * word, 2 * word + 1):
            for row in range(8):
                y = half_bytes(side, row % 2)[h]
                for part in parts_of_byte(side, row // 2, y):
                    block = 2 * (part.channel // 32) + part.channel % 8 // 4
                    place = 16 * block + 8 * (h % 2) + row
                    assert order.setdefault(place, part.channel) == part.channel, "two parts of a code disagree"
    return [order[place] for place in range(side.head_dim)]


def number_order(side: Side):
    """Yields (token, group, number) in the order in which scales and minima follow the codes."""
    for group in range(side.groups):
        for row in range(8):
            for token in (row, row + 8):
                for number in range(side.numbers):
                    yield token, group, number


# Bit tiles, likewise from one lane's view


def bit_tile_bytes(side: Side, is_value: bool):
    """Yields (token, byte of its row) for the bytes of a tile's codes in the order of memory."""
    words = side.row_words
    for first in range(0, words - 7, 8):
        for row, t in lanes():
            yield from of_four_tokens(row, t, first, 4) if is_value else of_two_tokens(row, (2 * t, 2 * t + 1), first)
    if words % 8 >= 4:
        first = words // 8 * 8
        for row, t in lanes():
            yield from of_four_tokens(row, t, first, 2) if is_value else of_two_tokens(row, (t,), first)
    rest = range(words // 4 * 4, words)
    if is_value:
        for y in range(4 * rest.start, 4 * rest.stop):
            for t in range(4):
                yield from ((token, y) for token in (2 * t, 2 * t + 8, 2 * t + 1, 2 * t + 9))
    else:
        for row in range(8):
            for word in rest:
                for token in (row, row + 8):
                    yield from ((token, 4 * word + i) for i in range(4))


def lanes():
    return ((lane // 4, lane % 4) for lane in range(32))


def of_two_tokens(row: int, words, first_word: int):
    """A lane's bytes of a chunk of keys: each of these words of the chunk, of two tokens."""
    for word in words:
        for token in (row, row + 8):
            yield from ((token, 4 * (first_word + word) + i) for i in range(4))


def of_four_tokens(row: int, t: int, first_word: int, count: int):
    """A lane's bytes of a chunk of values: words with one byte of four tokens."""
    for word in range(count):
        yield from ((token, 4 * first_word + row + 8 * word) for token in (2 * t, 2 * t + 8, 2 * t + 1, 2 * t + 9))


def fields_of(width: int) -> list[range]:
    """The bits of a code of a value, cut into fields of 8, 4, 2 and 1 bits."""
    fields, first = [], 0
    for size in (8, 4, 2, 1):
        if width & size:
            fields.append(range(first, first + size))
            first += size
    return fields


def bits_of_row(side: Side, head: int, is_value: bool) -> list[tuple[int, int]]:
    """(channel, bit of its code) for each bit of a row that is not padding."""
    widths, bits = side.widths(head), []
    for width in range(8, 0, -1):
        segment = [channel for channel in range(side.head_dim) if widths[channel] == width]
        for unit in (segment[i : i + 32] for i in range(0, len(segment), 32)):
            if is_value:
                bits += [(channel, bit) for field in fields_of(width) for channel in unit for bit in field]
            else:
                bits += [(channel, bit) for bit in range(width) for channel in unit]
    return bits


def tokens_by_pairs() -> list[int]:
    """The order of numbers and indices: 0, 8, 1, 9, ..."""
    return [token for row in range(8) for token in (row, row + 8)]


def exact_order(head_dim: int, token: int) -> list[int]:
    """The place (permuted channel) at each position of an exact row of a tile."""
    chunks = [range(8 * a, 8 * a + 8) for a in range(head_dim // 8)]
    if head_dim % 64 == 0:
        # Position a holds the chunk a ^ (token % 8) within its group of 8 chunks; xor is its own inverse.
        chunks = [chunks[a - a % 8 + (a % 8 ^ token % 8)] for a in range(len(chunks))]
    return [place for chunk in chunks for place in chunk]


# Tiles from rows by token


def codes_of(side: Side, row: dict) -> list[int]:
    n = side.code_digits
    return [int(row["codes"][n * c : n * (c + 1)], 16) for c in range(side.head_dim)]


def bit_tile(side: Side, is_value: bool, rows: dict[int, dict]) -> bytes:
    """A tile of bits without its indices."""
    tile = b""
    codes = {token: codes_of(side, row) for token, row in rows.items()}
    bits = {token: bits_of_row(side, row["head"], is_value) for token, row in rows.items()}
    for token, y in bit_tile_bytes(side, is_value):
        places = bits.get(token, [])[8 * y : 8 * y + 8]
        tile += bytes([sum((codes[token][channel] >> bit & 1) << i for i, (channel, bit) in enumerate(places))])
    for token in tokens_by_pairs():
        row = rows.get(token, {})
        texts = row.get("scales", []) + row.get(side.second, [])
        for text in texts + ["0"] * (side.row_numbers - len(texts)):
            tile += int(text, 16).to_bytes(side.number_size, "little")
    return tile


def indices_of(side: Side, rows: dict[int, dict]) -> bytes:
    return b"".join(
        (rows[token]["index"] if token in rows else 0).to_bytes(side.index_bytes, "little")
        for token in tokens_by_pairs()
    )


def code_tile(side: Side, is_value: bool, rows: dict[int, dict]) -> bytes:
    """A tile of codes without its indices."""
    tile = bytearray(side.code_bytes + side.number_bytes)
    for position, token, part in (value_codes if is_value else key_codes)(side):
        if token in rows:
            code = int(rows[token]["codes"][part.channel], 16) >> part.first
            tile[position] |= code % 2 ** len(part.bits) << part.bits[0]
    size = side.number_size
    for index, (token, group, number) in enumerate(number_order(side)):
        if token in rows:
            text = rows[token][side.second if number else "scales"][group]
            position = side.code_bytes + size * index
            tile[position : position + size] = int(text, 16).to_bytes(size, "little")
    return bytes(tile)


def exact_tile(head_dim: int, order: list[int], rows: dict[int, dict]) -> bytes:
    """A tile of exact rows; `order` is the channel at each place."""
    tile = b""
    for token in range(TILE_TOKENS):
        words = rows[token]["values"].split() if token in rows else ["0000"] * head_dim
        tile += b"".join(int(words[order[place]], 16).to_bytes(2, "little") for place in exact_order(head_dim, token))
    return tile


def tile_of(side: Side, is_value: bool, rows: dict[int, dict]) -> bytes:
    if side.exact:
        return exact_tile(side.head_dim, list(range(side.head_dim)), rows)
    tile = (bit_tile if side.in_bit_tiles else code_tile)(side, is_value, rows)
    tile += indices_of(side, rows) if side.centroids else b""
    assert len(tile) == side.tile_bytes
    return tile


def rows_of_tile(rows: list[dict], side: str, head: int, tile: int, row_of) -> dict[int, dict]:
    mine = [row for row in rows if row["side"] == side and row["head"] == head and row_of(row) // TILE_TOKENS == tile]
    assert len({row_of(row) for row in mine}) == len(mine), "two rows in one place"
    return {row_of(row) % TILE_TOKENS: row for row in mine}


def page_bytes(case: dict) -> bytes:
    page = b""
    for head in range(case["num_kv_heads"]):
        for name in ("k", "v"):
            for tile in range(case["page_size"] // TILE_TOKENS):
                rows = rows_of_tile(case["rows"], name, head, tile, lambda row: row["slot"])
                page += tile_of(case[name], name == "v", rows)
    return page


def window_bytes(case: dict) -> bytes:
    """A sink slot or a ring."""

    def row_of(row: dict) -> int:
        return row["position"] % case["window_rows"]

    orders = {"k": list(range(case["k"].head_dim)), "v": value_order(case["v"])}
    slot = b""
    for head in range(case["num_kv_heads"]):
        for tile in range(case["window_rows"] // TILE_TOKENS):
            for name, order in orders.items():
                slot += exact_tile(case[name].head_dim, order, rows_of_tile(case["rows"], name, head, tile, row_of))
    return slot


# Cases


def mixed_bits(*indices: int) -> int:
    """32 bits that look random, from integer arithmetic alone."""
    value = 0x9E3779B9
    for index in indices:
        value = (value ^ (index + 1)) * 0x85EBCA6B & 0xFFFFFFFF
        value = (value ^ value >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return value ^ value >> 16


def number_pattern(scale_type: str, is_scale: bool, *indices: int) -> str:
    """Hex pattern of a finite number of `scale_type`; scales are positive."""
    bits = mixed_bits(*indices)
    if scale_type == "fp32":
        return f"{(127 - bits % 6) << 23 | bits >> 9 & 0x7FFFFF | (0 if is_scale else bits & 1 << 31):08x}"
    exponent, fraction = (15 - bits % 6) << 10 | bits >> 8 & 0x3FF, bits >> 31
    if scale_type == "bf16":
        exponent = (127 - bits % 6) << 7 | bits >> 8 & 0x7F
    return f"{exponent | (0 if is_scale else fraction << 15):04x}"


def zero_pattern(scale_type: str, *indices: int) -> str:
    """Hex pattern of an integer from -8 to 22, in `scale_type`."""
    kind = {"fp16": "<e", "bf16": "<f", "fp32": "<f"}[scale_type]
    data = struct.pack(kind, mixed_bits(*indices) % 31 - 8)
    return (data[2:] if scale_type == "bf16" else data)[::-1].hex()


def made_up_row(side: Side, *indices: int) -> dict:
    """@param indices  the side's letter, head, slot or position"""
    if side.exact:
        return {"values": " ".join(number_pattern("bf16", False, *indices, c) for c in range(side.head_dim))}
    codes = [mixed_bits(*indices, c) >> 7 & (1 << width) - 1 for c, width in enumerate(side.widths(indices[1]))]
    row: dict = {"codes": "".join(f"{code:0{side.code_digits}x}" for code in codes)}
    scales = range(side.scales(indices[1]))
    row["scales"] = [number_pattern(side.scale_type, True, *indices, 1000 + g) for g in scales]
    if side.numbers == 2 and side.zero == "integer":
        row["zeros"] = [zero_pattern(side.scale_type, *indices, 2000 + g) for g in range(side.groups)]
    elif side.numbers == 2:
        row["minima"] = [number_pattern(side.scale_type, False, *indices, 2000 + g) for g in range(side.groups)]
    if side.centroids:
        row["index"] = mixed_bits(*indices, 3000) % side.centroids
    return row


def page_case(name: str, why: str, k: Side, v: Side, page_size: int, num_kv_heads: int, slots, rows=None) -> dict:
    """A case with made-up rows of all heads at `slots`, or with the given `rows`."""
    made_up = [
        {"side": s, "head": head, "slot": slot} | made_up_row(side, ord(s), head, slot)
        for head in range(num_kv_heads)
        for s, side in (("k", k), ("v", v))
        for slot in slots
    ]
    return {
        "name": name,
        "why": why,
        "kind": "page",
        "num_kv_heads": num_kv_heads,
        "page_size": page_size,
        "k": k,
        "v": v,
        "rows": made_up if rows is None else rows,
    }


def window_case(name: str, why: str, k: Side, v: Side, num_kv_heads: int, window_rows: int, positions) -> dict:
    """A sink slot or a ring with made-up rows of all heads at `positions`."""
    exact = {"k": Side(k.head_dim, 16), "v": Side(v.head_dim, 16)}
    rows = [
        {"side": s, "head": head, "position": position} | made_up_row(exact[s], ord(s), head, position)
        for head in range(num_kv_heads)
        for s in ("k", "v")
        for position in positions
    ]
    return {
        "name": name,
        "why": why,
        "kind": "windows",
        "num_kv_heads": num_kv_heads,
        "k": k,
        "v": v,
        "window_rows": window_rows,
        "rows": rows,
    }


def affine(head_dim: int, bits: int, group_size: int, scale_type: str = "fp16") -> Side:
    return Side(head_dim, bits, group_size, "affine", scale_type)


def with_zeros(head_dim: int, bits: int, group_size: int, scale_type: str = "fp16") -> Side:
    return Side(head_dim, bits, group_size, "affine", scale_type, "integer")


def symmetric(head_dim: int, bits: int, group_size: int, scale_type: str = "fp16") -> Side:
    return Side(head_dim, bits, group_size, "symmetric", scale_type)


def mixed(*heads: str, coder: str = "symmetric", scale_type: str = "fp16", scope: str = "segment") -> Side:
    """Mixed widths: of each head the channels of each width, "2x8 33x5"."""
    digits = [
        "".join(width * int(count) for count, width in (run.split("x") for run in head.split())) for head in heads
    ]
    bits = max(int(digit) for head in digits for digit in head)
    return Side(len(digits[0]), bits, 0, coder, scale_type, channel_bits=tuple(digits), scale_scope=scope)


def with_centroids(side: Side, count: int) -> Side:
    return replace(side, centroids=count)


def one_code(head_dim: int, channel: int, code: int) -> str:
    return "0" * channel + str(code) + "0" * (head_dim - channel - 1)


def cases() -> list[dict]:
    a, s = affine(128, 2, 128), symmetric(128, 2, 128)
    single = [
        {"side": side, "head": 0, "slot": 11, "codes": one_code(128, 77, 3), "scales": ["0000"], "minima": ["0000"]}
        for side in "kv"
    ]
    split = [  # channel 77 is of step 2: low bits 01, high bit 1
        {"side": side, "head": 0, "slot": 11, "codes": one_code(128, 77, 5), "scales": ["0000"], "minima": ["0000"]}
        for side in "kv"
    ]
    whole, edges = range(16), (0, 7, 8, 15)
    return [
        page_case("one code", "the example of pages.md, by hand", a, a, 16, 1, (), single),
        page_case("128 2 bits affine", "a whole tile, both words of one pair", a, a, 16, 1, whole),
        page_case(
            "128 2 bits symmetric page 64",
            "one number a group; four tiles of keys before those of values",
            s,
            s,
            64,
            1,
            (0, 1, 9, 16, 31, 32, 46, 63),
        ),
        page_case(
            "128 4 bits group 64 page 32",
            "two pairs of words, two groups, two heads",
            *[affine(128, 4, 64)] * 2,
            32,
            2,
            (0, 7, 8, 31),
        ),
        page_case("128 2 bits group 32", "each step has its own numbers", *[affine(128, 2, 32)] * 2, 16, 1, edges),
        page_case(
            "64 2 bits group 64 bf16",
            "a single word: both halves of a step at neighbouring slices, chunks of 8 bytes",
            *[affine(64, 2, 64, "bf16")] * 2,
            16,
            1,
            whole,
        ),
        page_case("64 4 bits group 32", "one pair of words at 4 bits", *[symmetric(64, 4, 32)] * 2, 16, 1, whole),
        page_case(
            "64 4 bits group 32 affine page 32",
            "number by number: s, m of a group and token are neighbours",
            *[affine(64, 4, 32)] * 2,
            32,
            1,
            edges + (16, 30),
        ),
        page_case("256 2 bits group 128", "two chunks of 16 bytes a lane", *[affine(256, 2, 128)] * 2, 16, 1, edges),
        page_case(
            "192 4 bits group 64", "three pairs of words, three groups", *[affine(192, 4, 64)] * 2, 16, 1, (3, 12)
        ),
        page_case(
            "96 4 bits group 96 page 64",
            "an odd number of words at 4 bits, three heads",
            *[symmetric(96, 4, 96)] * 2,
            64,
            3,
            (5, 22, 63),
        ),
        page_case(
            "192 2 bits group 96",
            "an odd number of words, one pair before the last",
            *[affine(192, 2, 96)] * 2,
            16,
            1,
            edges,
        ),
        page_case(
            "sides differ",
            "each side has its own format and tile size",
            affine(128, 4, 32),
            symmetric(64, 2, 32, "bf16"),
            32,
            2,
            (4, 18),
        ),
        page_case(
            "exact pages",
            "chunks are exchanged in rows of whole 128 bytes only",
            Side(64, 16),
            Side(80, 16),
            16,
            1,
            (0, 3, 9, 15),
        ),
        page_case(
            "128 2 bits page 128",
            "eight tiles of keys before those of values",
            a,
            a,
            128,
            2,
            (0, 17, 63, 64, 127),
        ),
        window_case("sinks 2 bits", "values in the order of their codes", a, a, 2, 16, (0, 4)),
        window_case("ring 2 bits", "both ends of the ring, two heads", a, a, 2, 32, (0, 15, 16, 31)),
        window_case("ring 2 bits wrapped", "position 37 is where 5 was", a, a, 1, 32, (31, 37, 64)),
        window_case("ring of three tiles", "48 rows: 100 is in row 4", a, a, 1, 48, (47, 96, 100)),
        window_case("ring 4 bits", "four words a piece", *[affine(128, 4, 64)] * 2, 1, 16, (7, 8, 17)),
        window_case("sinks 64 2 bits", "a single word; two tiles", *[symmetric(64, 2, 64)] * 2, 1, 32, (0, 15, 16)),
        window_case(
            "ring 96 4 bits", "an odd number of words, no exchange of chunks", *[affine(96, 4, 96)] * 2, 1, 16, (0, 6)
        ),
        window_case("ring of exact values", "places are channels", a, Side(64, 16), 1, 16, (2, 15)),
        # since 2.1
        page_case("128 3 bits one code", "a code in two parts", *[affine(128, 3, 128)] * 2, 16, 1, (), split),
        page_case(
            "128 3 bits affine", "a whole tile, one unit of four steps", *[affine(128, 3, 128)] * 2, 16, 1, whole
        ),
        page_case(
            "256 3 bits group 64 bf16 page 32",
            "two units: both pairs before both single words",
            *[symmetric(256, 3, 64, "bf16")] * 2,
            32,
            2,
            (0, 7, 8, 31),
        ),
        page_case(
            "three bits beside two",
            "sides differ in width",
            affine(128, 3, 32),
            symmetric(128, 2, 64, "bf16"),
            16,
            1,
            edges,
        ),
        page_case(
            "128 4 bits zero points",
            "a zero point where a minimum would be",
            *[with_zeros(128, 4, 128), with_zeros(128, 2, 32, "bf16")],
            16,
            1,
            edges,
        ),
        page_case(
            "128 3 bits zero points fp32",
            "numbers of four bytes",
            *[with_zeros(128, 3, 64, "fp32")] * 2,
            16,
            1,
            edges,
        ),
        page_case(
            "64 2 bits fp32 page 32",
            "four bytes a number, with and without a minimum",
            affine(64, 2, 32, "fp32"),
            symmetric(64, 4, 64, "fp32"),
            32,
            2,
            (0, 9, 31),
        ),
        window_case("ring 3 bits", "both parts of a code give one place", *[affine(128, 3, 64)] * 2, 1, 16, (3, 15)),
        window_case("sinks 256 3 bits", "two units", *[symmetric(256, 3, 128)] * 2, 1, 16, (0, 8)),
        *bit_tile_cases(),
    ]


def bit_tile_cases() -> list[dict]:
    """Since 2.2: bit tiles, and indices of centroids in both kinds of tiles."""
    whole, edges = range(16), (0, 7, 8, 15)
    single = [
        {"side": side, "head": 0, "slot": 11, "codes": one_code(140, 133, 5), "scales": ["0000"]} for side in "kv"
    ]
    several = mixed("2x8 3x7 33x6 4x5 8x1 14x0", "20x4 12x3 32x2", "64x0")
    return [
        page_case(
            "bits: one code",
            "14 words; channel 133 is the sixth of a unit of twelve: of a key at bits 389 and 413 of its row, of a "
            "value at bits 394 and 413",
            *[symmetric(140, 3, 140)] * 2,
            16,
            1,
            (),
            single,
        ),
        page_case("bits: 1 word", "no chunk, a whole tile", *[symmetric(32, 1, 32)] * 2, 16, 1, whole),
        page_case(
            "bits: 2 words, 1 bit affine",
            "a last unit of four channels, bits of padding, minima behind all scales of a row",
            *[affine(36, 1, 12)] * 2,
            16,
            1,
            (3, 9, 14),
        ),
        page_case(
            "bits: 3 words, zero points bf16",
            "zero points in bit tiles",
            *[with_zeros(96, 1, 32, "bf16")] * 2,
            16,
            1,
            edges,
        ),
        page_case(
            "bits: 4 words page 64",
            "one chunk of four words, a whole tile of the second head's page",
            *[affine(128, 1, 64)] * 2,
            64,
            2,
            (0, 1, 9, 31, 32, 46, 63),
        ),
        page_case(
            "bits: 5 words fp32",
            "a chunk of four words and one more",
            *[symmetric(80, 2, 80, "fp32")] * 2,
            16,
            1,
            edges,
        ),
        page_case(
            "bits: 8 words, trellis, indices",
            "a chunk of eight words; two bits, but not in code tiles; indices of one byte",
            *[with_centroids(Side(128, 2, 128, "trellis", "bf16"), 256)] * 2,
            16,
            2,
            edges,
        ),
        page_case(
            "bits: 8 words, a whole tile", "where each lane's words are", *[symmetric(256, 1, 256)] * 2, 16, 1, whole
        ),
        page_case(
            "bits: 9 words, 8 bits",
            "codes of two digits, a chunk of eight words and one more",
            *[affine(36, 8, 36)] * 2,
            16,
            1,
            edges,
        ),
        page_case(
            "bits: 13 words, a whole tile",
            "a chunk of eight words, one of four, and one more",
            *[symmetric(52, 8, 26, "fp32")] * 2,
            16,
            1,
            whole,
        ),
        page_case(
            "bits: 16 words, codebook, indices",
            "two chunks of eight words; indices of two bytes",
            *[with_centroids(Side(128, 4, 64, "codebook", "fp16"), 300)] * 2,
            16,
            1,
            edges,
        ),
        page_case(
            "bits: groups of 16",
            "groups that code tiles do not hold, of keys; units that end with less than 32 channels, of values",
            affine(64, 4, 16),
            symmetric(56, 3, 28, "bf16"),
            16,
            1,
            edges,
        ),
        page_case(
            "bits: mixed widths",
            "heads of other lengths and numbers; a segment of 33 channels; width 0; a head without bits",
            several,
            mixed("64x0", "1x8 31x6 32x1", "64x3", coder="codebook", scale_type="bf16"),
            16,
            3,
            edges,
        ),
        page_case(
            "bits: mixed widths, one scale a row",
            "one number for all segments, none for a head without bits; indices behind numbers of four bytes",
            with_centroids(replace(several, scale_scope="row", scale_type="fp32"), 9),
            with_centroids(mixed("64x5", "7x7 57x2", "64x0", coder="trellis", scope="row"), 4096),
            64,
            3,
            (2, 13, 29, 40, 60),
        ),
        page_case(
            "code tiles with indices",
            "indices behind the numbers, of one byte beside two",
            with_centroids(affine(128, 2, 128), 4),
            with_centroids(symmetric(64, 4, 32), 257),
            64,
            2,
            (0, 9, 17, 63),
        ),
        window_case("ring of values in bit tiles", "places are channels", *[symmetric(64, 1, 64)] * 2, 1, 16, (2, 15)),
    ]


def runs_of(data: bytes) -> list:
    """[offset, hex] of each run of bytes that are not zero."""
    runs: list[list] = []
    for offset, byte in enumerate(data):
        if not byte:
            continue
        if runs and offset - runs[-1][1] <= LARGEST_ZERO_GAP:
            runs[-1][1] = offset + 1
        else:
            runs.append([offset, offset + 1])
    return [[begin, data[begin:end].hex()] for begin, end in runs]


def derive(case: dict) -> dict:
    data = page_bytes(case) if case["kind"] == "page" else window_bytes(case)
    return case | {"k": case["k"].fields(), "v": case["v"].fields(), "num_bytes": len(data), "bytes": runs_of(data)}


def vectors_text() -> str:
    """The text of the whole file, with one vector in each line."""
    lines = ",\n".join(json.dumps(derive(case)) for case in cases())
    return f'{{"format": "kvq-page-vectors", "version": "2.2", "vectors": [\n{lines}\n]}}\n'


def main() -> int:
    return vector_file.run(__doc__, VECTORS, vectors_text, "pages.md and the cases here")


if __name__ == "__main__":
    sys.exit(main())
