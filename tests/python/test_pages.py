"""A reader of pages, channel by channel from formats/pages.md, against formats/page_vectors.json."""

import json

import derive_page_vectors as derived
import numpy as np
import pytest

FILE = json.loads(derived.VECTORS.read_text())
VECTORS = FILE["vectors"]
IDS = [vector["name"].replace(" ", "_") for vector in VECTORS]


class Side:
    """The parameters of one side, named by their letters in pages.md."""

    def __init__(self, fields: dict):
        self.D, self.b = fields["head_dim"], fields["bits"]
        self.N = {"affine": 2, "symmetric": 1}.get(fields.get("coder"), 0)
        self.S = 4 if fields.get("scale_type") == "fp32" else 2
        self.second = "zeros" if fields.get("zero") == "integer" else "minima"
        self.G = self.D // fields["group_size"] if self.N else 0
        self.exact = self.b == 16
        if not self.exact:
            self.B, self.C = self.D * self.b // 32, 8 // self.b
            self.W, self.U = self.B // 4, self.D // 128
            self.P, self.Q = self.W // 2, 16 if self.B % 8 == 0 else 8
        self.tile_bytes = 2 * self.D * self.b + 16 * self.G * self.N * self.S

    def parts(self, channel: int) -> list[tuple[int, int, int, int, int]]:
        """(piece, byte, its first bit, first bit of the code, bits) for each part of the channel's code"""
        if self.b != 3:
            t, y, k = self.piece_place(channel)
            return [(t, y, k * self.b, 0, self.b)]
        j, t, w, i = channel // 32, channel % 32 // 8, channel % 8 // 4, channel % 4
        n, s = j // 4, j % 4
        pair, single = (2 * n + w) * 4 + i, (2 * self.U + n) * 4 + i
        if s < 2:
            return [(t, pair, 3 * s, 0, 3)]
        if s == 2:
            return [(t, pair, 6, 0, 2), (t, single, 4 * w + 3, 2, 1)]
        return [(t, single, 4 * w, 0, 3)]

    def piece_place(self, channel: int) -> tuple[int, int, int]:
        """(piece, byte, slice) of 2 or 4 bits"""
        j, t, w, i = channel // 32, channel % 32 // 8, channel % 8 // 4, channel % 4
        if j < self.P * self.C:
            return t, (2 * (j // self.C) + w) * 4 + i, j % self.C
        return t, (self.W - 1) * 4 + i, 2 * (j - self.P * self.C) + w

    def half_place(self, y: int) -> tuple[int, int]:
        """(half, index)"""
        if self.b == 3:
            return y % 4 // 2, 2 * (y // 4) + y % 2
        if y < 8 * self.P:
            return y // 4 % 2, y // 8 * 4 + y % 4
        return y % 4 // 2, 4 * self.P + y % 2

    def at(self, lane: int, x: int) -> int:
        return x // self.Q * 32 * self.Q + lane * self.Q + x % self.Q

    def code_byte(self, is_value: bool, token: int, t: int, y: int) -> int:
        """of byte y of piece t"""
        if not is_value:
            return self.at(4 * (token % 8) + t, token // 8 * self.B + y)
        f, h = self.half_place(y)
        return self.at(4 * (2 * t + f) + token % 8 // 2, 4 * h + 2 * (token % 2) + token // 8)

    def number_byte(self, token: int, group: int, number: int) -> int:
        return 2 * self.D * self.b + self.S * (((8 * group + token % 8) * 2 + token // 8) * self.N + number)

    def place(self, channel: int) -> int:
        """of an exact value in the windows"""
        if self.exact:
            return channel
        if self.b == 3:
            j, w = channel // 32, channel % 8 // 4
            ((t, f, h),) = {(t, f, h % 2) for t, y, *_ in self.parts(channel) for f, h in [self.half_place(y)]}
            return 32 * j + 16 * w + 8 * h + 2 * t + f
        t, y, k = self.piece_place(channel)
        f, h = self.half_place(y)
        return (h // 2 * self.C + k) * 16 + h % 2 * 8 + 2 * t + f


def exact_byte(dim: int, token: int, place: int) -> int:
    chunk = place // 8
    if dim % 64 == 0:
        chunk = 8 * (place // 64) + (chunk % 8 ^ token % 8)
    return 2 * dim * token + 16 * chunk + 2 * (place % 8)


def pattern(data: bytes, at: int, size: int = 2) -> str:
    return data[at : at + size][::-1].hex()


def exact_row(tile: bytes, dim: int, token: int, place=lambda channel: channel) -> dict:
    return {"values": " ".join(pattern(tile, exact_byte(dim, token, place(channel))) for channel in range(dim))}


def coded_row(tile: bytes, side: Side, is_value: bool, token: int) -> dict:
    codes = [
        sum(
            (tile[side.code_byte(is_value, token, t, y)] >> shift & (1 << bits) - 1) << first
            for t, y, shift, first, bits in side.parts(c)
        )
        for c in range(side.D)
    ]
    numbers = {
        name: [pattern(tile, side.number_byte(token, group, number), side.S) for group in range(side.G)]
        for number, name in enumerate(("scales", side.second)[: side.N])
    }
    return {"codes": "".join(f"{code:x}" for code in codes)} | numbers


def row_of_page(vector: dict, data: bytes, side: str, head: int, slot: int) -> dict:
    k, v, n = Side(vector["k"]), Side(vector["v"]), vector["page_size"] // 16
    mine, begin = (v, n * k.tile_bytes) if side == "v" else (k, 0)
    begin += head * n * (k.tile_bytes + v.tile_bytes) + slot // 16 * mine.tile_bytes
    tile = data[begin : begin + mine.tile_bytes]
    return exact_row(tile, mine.D, slot % 16) if mine.exact else coded_row(tile, mine, side == "v", slot % 16)


def window_row(position: int, rows: int) -> int:
    return position % rows


def row_of_windows(vector: dict, data: bytes, side: str, head: int, position: int) -> dict:
    k, v = Side(vector["k"]), Side(vector["v"])
    row = window_row(position, vector["window_rows"])
    begin = (head * vector["window_rows"] // 16 + row // 16) * 32 * (k.D + v.D)
    if side == "k":
        return exact_row(data[begin:], k.D, row % 16)
    return exact_row(data[begin + 32 * k.D :], v.D, row % 16, v.place)


def bytes_of(vector: dict) -> bytes:
    data = bytearray(vector["num_bytes"])
    for offset, text in vector["bytes"]:
        run = bytes.fromhex(text)
        data[offset : offset + len(run)] = run
    assert len(data) == vector["num_bytes"]
    return bytes(data)


def read_rows(vector: dict) -> list[dict]:
    """All rows of the vector, read from its bytes."""
    data, rows = bytes_of(vector), []
    for row in vector["rows"]:
        reader, key = (row_of_page, "slot") if vector["kind"] == "page" else (row_of_windows, "position")
        place = {"side": row["side"], "head": row["head"], key: row[key]}
        rows.append(place | reader(vector, data, *place.values()))
    return rows


@pytest.mark.parametrize("vector", VECTORS, ids=IDS)
def test_the_reader_finds_every_row_of_the_vector(vector):
    assert read_rows(vector) == vector["rows"]


@pytest.mark.parametrize("vector", VECTORS, ids=IDS)
def test_nothing_but_the_rows_is_in_the_vector(vector):
    """The number of set bits equals that of the rows."""

    def bits_of(row: dict) -> int:
        words = (
            row.get("values", "").split()
            + row.get("scales", [])
            + row.get("minima", [])
            + row.get("zeros", [])
            + list(row.get("codes", ""))
        )
        return sum(int(word, 16).bit_count() for word in words)

    assert int.from_bytes(bytes_of(vector), "little").bit_count() == sum(map(bits_of, vector["rows"]))


def test_vectors_file_is_what_the_text_gives():
    assert FILE["format"] == "kvq-page-vectors" and FILE["version"] == "2.1"
    assert derived.vectors_text() == derived.VECTORS.read_text()


def test_vectors_cover_what_pages_md_defines():
    pages = [v for v in VECTORS if v["kind"] == "page"]
    sides = [v[side] for v in pages for side in "kv"]
    assert {v["page_size"] for v in pages} == {16, 32, 64, 128}
    assert {(s["head_dim"], s["bits"]) for s in sides} >= {
        (128, 2),
        (128, 4),
        (64, 2),
        (64, 4),
        (256, 2),
        (192, 4),
        (96, 4),
        (128, 3),
        (256, 3),
        (64, 16),
    }
    assert {(s["coder"], s["scale_type"]) for s in sides if s["bits"] != 16} == {
        (coder, scale_type) for coder in ("affine", "symmetric") for scale_type in ("fp16", "bf16", "fp32")
    }
    zeros = [s for s in sides if s.get("zero") == "integer"]
    assert {s["bits"] for s in zeros} == {2, 3, 4} and {s["scale_type"] for s in zeros} == {"fp16", "bf16", "fp32"}
    assert {Side(s).W % 2 for s in sides if s["bits"] != 16} == {0, 1}
    windows = [v for v in VECTORS if v["kind"] == "windows"]
    assert {v["v"]["bits"] for v in windows} == {2, 3, 4, 16}
    assert {Side(v["v"]).W for v in windows if v["v"]["bits"] in (2, 4)} >= {1, 2, 3, 4}
    assert any(row["position"] >= v["window_rows"] for v in windows for row in v["rows"])
    assert any(v["window_rows"] & v["window_rows"] - 1 for v in windows)  # not a power of two
    assert len({v["name"] for v in VECTORS}) == len(VECTORS)


# Misreadings: each changes one step of pages.md, and at least one vector must detect it.


def plain_at(self, lane, x):
    return lane * 2 * self.B + x


def neighboring_tokens(self, is_value, token, t, y):
    if not is_value:
        return self.at(4 * (token // 2) + t, token % 2 * self.B + y)
    f, h = self.half_place(y)
    return self.at(4 * (2 * t + f) + token // 4, 4 * h + token % 4)


def words_in_order(self, channel):
    """Steps one after the other, without pairs of words."""
    j, t, w, i = channel // 32, channel % 32 // 8, channel % 8 // 4, channel % 4
    position = 2 * j + w
    return t, position // self.C * 4 + i, position % self.C


def values_like_keys(self, is_value, token, t, y):
    return self.at(4 * (token % 8) + t, token // 8 * self.B + y)


def numbers_apart(self, token, group, number):
    """All scales of a tile before all minima."""
    return 2 * self.D * self.b + self.S * ((number * self.G + group) * 16 + token % 8 * 2 + token // 8)


def numbers_by_token(self, token, group, number):
    return 2 * self.D * self.b + self.S * ((token * self.G + group) * self.N + number)


def numbers_of_two_bytes(self, token, group, number):
    return 2 * self.D * self.b + 2 * (((8 * group + token % 8) * 2 + token // 8) * self.N + number)


def changed_parts(change):
    """parts() with the parts of three bits changed."""
    own = Side.parts
    return lambda self, channel: [change(self, channel, part) if self.b == 3 else part for part in own(self, channel)]


def high_bit_in_the_pair(self, channel, part):
    """The pair has the high bits of step 2, the single word the lowest."""
    t, y, shift, first, bits = part
    return (t, y, shift, {2: 1, 1: 0}[bits] if bits < 3 else first, bits)


def single_words_beside_pairs(self, channel, part):
    """The single word of a unit lies behind its pair, not behind all pairs."""
    t, y, *rest = part
    word, n = y // 4, channel // 128
    return (t, 4 * (3 * n + (2 if word >= 2 * self.U else word % 2)) + y % 4, *rest)


def halves_exchanged(self, channel, part):
    t, y, shift, *rest = part
    return (t, y, shift ^ 4 if y >= 8 * self.U else shift, *rest)


def halves_are_words(self, y):
    """Of three bits as of two: the two words of a pair are the halves."""
    pairs = 8 * self.P if self.b != 3 else 8 * self.U
    if y < pairs:
        return y // 4 % 2, y // 8 * 4 + y % 4
    return y % 4 // 2, pairs // 2 + 2 * ((y - pairs) // 4) + y % 2


MISREADINGS = {
    "runs are whole": {"at": plain_at},
    "neighboring tokens share a lane": {"code_byte": neighboring_tokens},
    "words in order": {"piece_place": words_in_order},
    "values like keys": {"code_byte": values_like_keys},
    "scales before minima": {"number_byte": numbers_apart},
    "numbers by token": {"number_byte": numbers_by_token},
    "channels of values in order": {"place": lambda self, channel: channel},
    "halves of every piece as of one word": {"half_place": lambda self, y: (y % 4 // 2, y // 4 * 2 + y % 2)},
    "numbers of two bytes": {"number_byte": numbers_of_two_bytes},
    "three bits: parts of a code exchanged": {"parts": changed_parts(high_bit_in_the_pair)},
    "three bits: single words beside pairs": {"parts": changed_parts(single_words_beside_pairs)},
    "three bits: halves of single words exchanged": {"parts": changed_parts(halves_exchanged)},
    "three bits: halves are words": {"half_place": halves_are_words},
}


def noticed() -> bool:
    try:
        return any(read_rows(vector) != vector["rows"] for vector in VECTORS)
    except (IndexError, ValueError):  # a byte that the tile does not have, or a channel with two places
        return True


@pytest.mark.parametrize("name", MISREADINGS)
def test_vectors_notice_a_misreading(name, monkeypatch):
    for method, wrong in MISREADINGS[name].items():
        monkeypatch.setattr(Side, method, wrong)
    assert noticed(), f"no vector notices: {name}"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda dim, token, place: 2 * dim * token + 2 * place,
        lambda dim, token, place: (
            2 * dim * token + 16 * (place // 64 * 8 + (place // 8 % 8 ^ token % 4)) + 2 * (place % 8)
        ),
    ],
    ids=["no exchange", "exchange of four"],
)
def test_vectors_notice_another_exchange_of_chunks(wrong, monkeypatch):
    monkeypatch.setitem(globals(), "exact_byte", wrong)
    assert noticed()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda position, rows: position % 16,
        lambda position, rows: position & rows - 1,
        lambda position, rows: (position - 4) % rows,
    ],
    ids=["one tile", "a mask", "behind the sinks"],
)
def test_vectors_notice_another_row_of_a_position(wrong, monkeypatch):
    monkeypatch.setitem(globals(), "window_row", wrong)
    assert noticed()


# Properties of the text

FITTING = [
    {"head_dim": D, "bits": b, "group_size": g, "coder": coder, "scale_type": "fp32" if g == 64 else "fp16"}
    for b in (2, 3, 4)
    for D in range(32, 321, 32)
    if D * b % 128 == 0
    for g in range(32, D + 1, 32)
    if D % g == 0
    for coder in ("affine", "symmetric")
]


@pytest.mark.parametrize("is_value", [False, True], ids=["keys", "values"])
def test_every_bit_of_a_tile_belongs_to_one_code_or_number(is_value):
    for fields in FITTING:
        side = Side(fields)
        taken = np.zeros(side.tile_bytes * 8, int)
        for token in range(16):
            for channel in range(side.D):
                for t, y, shift, _, bits in side.parts(channel):
                    first = side.code_byte(is_value, token, t, y) * 8 + shift
                    taken[first : first + bits] += 1
            for group in range(side.G):
                for number in range(side.N):
                    first = side.number_byte(token, group, number) * 8
                    taken[first : first + 8 * side.S] += 1
        assert (taken == 1).all(), fields


def test_a_block_of_places_belongs_to_the_step_that_pages_md_says():
    for fields in FITTING:
        side = Side(fields)
        places = {side.place(channel): channel for channel in range(side.D)}
        assert sorted(places) == list(range(side.D))
        for block in range(side.D // 16):
            h, k = block // side.C, block % side.C
            step = h // 2 * side.C + k if h < 2 * side.P else side.P * side.C + k // 2
            step = block // 2 if side.b == 3 else step
            assert {places[16 * block + row] // 32 for row in range(16)} == {step}, (fields, block)


def test_sizes_are_those_of_the_table():
    rows = [
        line.split("|")[1:-1]
        for line in (derived.VECTORS.parent / "pages.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    sizes = [[cell.strip() for cell in row] for row in rows if row[0].strip().isdigit()]
    assert len(sizes) >= 12
    for dim, bits, group, affine, symmetric, share in sizes:
        fields = {"head_dim": int(dim), "bits": int(bits)} | ({"group_size": int(group)} if group else {})
        found = [
            2 * Side(fields | {"coder": coder}).tile_bytes / 16
            for coder in (("affine", "symmetric") if group else ("exact",))
        ]
        assert [f"{n:g}" for n in found] == [n for n in (affine, symmetric) if n]
        assert [f"{n / (4 * int(dim)):.3f}" for n in found] == share.split(", ")
