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
        coder = fields.get("coder", "exact")
        self.N = {"affine": 2, "exact": 0}.get(coder, 1)  # of a group
        self.S = 4 if fields.get("scale_type") == "fp32" else 2
        self.second = "zeros" if fields.get("zero") == "integer" else "minima"
        self.exact = self.b == 16
        centroids = fields.get("centroids", 1)
        self.I = 0 if centroids == 1 else 1 if centroids <= 256 else 2
        group = fields.get("group_size", self.D)
        self.G = self.D // group if self.N else 0
        self.in_bit_tiles = not self.exact and not (
            coder in ("affine", "symmetric")
            and "channel_bits" not in fields
            and (self.b, self.D * self.b % 128, group % 32) in ((2, 0, 0), (3, 0, 0), (4, 0, 0))
        )
        if self.in_bit_tiles:
            heads = fields.get("channel_bits")
            self.heads = [[int(digit) for digit in head] for head in heads] if heads else [[self.b] * self.D]
            self.row_scale = fields.get("scale_scope") == "row"
            self.W = max(1, *((sum(head) + 31) // 32 for head in self.heads))
            self.row_numbers = max(self.numbers_of(head) for head in range(len(self.heads)))
            self.code_bytes, self.number_bytes = 64 * self.W, 16 * self.row_numbers * self.S
        else:
            if not self.exact:
                self.B, self.C = self.D * self.b // 32, 8 // self.b
                self.W, self.U = self.B // 4, self.D // 128
                self.P, self.Q = self.W // 2, 16 if self.B % 8 == 0 else 8
            self.code_bytes, self.number_bytes = 2 * self.D * self.b, 16 * self.G * self.N * self.S
        self.tile_bytes = self.code_bytes + self.number_bytes + 16 * self.I

    # Bit tiles

    def widths(self, head: int) -> list[int]:
        return self.heads[head if len(self.heads) > 1 else 0]

    def numbers_of(self, head: int) -> int:
        """numbers of the head's rows"""
        if len(self.heads) == 1:
            return self.G * self.N
        scales = len({width for width in self.widths(head) if width})
        return min(scales, 1) if self.row_scale else scales

    def field_of(self, width: int, i: int) -> tuple[int, int]:
        """(f, e): the field [f, f + e) of a value's code that has bit i"""
        f = 0
        for e in (8, 4, 2, 1):
            if width & e:
                if i < f + e:
                    return f, e
                f += e
        raise ValueError(i)

    def bit_in_unit(self, is_value: bool, width: int, m: int, q: int, i: int) -> int:
        if not is_value:
            return i * m + q
        f, e = self.field_of(width, i)
        return f * m + q * e + i - f

    def row_bit(self, is_value: bool, head: int, channel: int, i: int) -> int:
        """place in the row of bit i of the channel's code"""
        widths = self.widths(head)
        w = widths[channel]
        first, n = widths.index(w), widths.count(w)
        u, q = divmod(channel - first, 32)
        m = min(32, n - 32 * u)
        return sum(widths[:first]) + 32 * u * w + self.bit_in_unit(is_value, w, m, q, i)

    def row_byte(self, is_value: bool, token: int, y: int) -> int:
        """the tile's byte that is byte y of a token's row"""
        r, high, word, e = token % 8, token // 8, y // 4, self.W % 4
        chunk, eights, fours = y // 32, self.W // 8 * 8, self.W // 4 * 4
        if is_value:
            t, i = r // 2, 2 * (token % 2) + high
            if word < eights:
                return 512 * chunk + 16 * (4 * (y % 8) + t) + 4 * (y % 32 // 8) + i
            if word < fours:
                return 64 * eights + 8 * (4 * (y % 8) + t) + 4 * (y % 16 // 8) + i
            return 64 * fours + 4 * (4 * (y - 4 * fours) + t) + i
        if word < eights:
            return 512 * chunk + 16 * (4 * r + word % 8 // 2) + 8 * (word % 2) + 4 * high + y % 4
        if word < fours:
            return 64 * eights + 8 * (4 * r + word % 4) + 4 * high + y % 4
        return 64 * fours + 8 * (r * e + word - fours) + 4 * high + y % 4

    def row_number_byte(self, token: int, i: int) -> int:
        return self.code_bytes + self.S * ((2 * (token % 8) + token // 8) * self.row_numbers + i)

    def index_byte(self, token: int) -> int:
        return self.code_bytes + self.number_bytes + self.I * (2 * (token % 8) + token // 8)

    # Code tiles

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
        if self.exact or self.in_bit_tiles:
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


def bit_row(tile: bytes, side: Side, is_value: bool, head: int, token: int) -> dict:
    """A row of a bit tile."""
    row = b"".join(tile[side.row_byte(is_value, token, y)].to_bytes(1, "little") for y in range(4 * side.W))
    bits = int.from_bytes(row, "little")
    codes = [
        sum((bits >> side.row_bit(is_value, head, channel, i) & 1) << i for i in range(width))
        for channel, width in enumerate(side.widths(head))
    ]
    n = side.numbers_of(head)
    numbers = [pattern(tile, side.row_number_byte(token, i), side.S) for i in range(n)]
    names = ("scales", side.second)[: side.N]
    each = n // side.N
    return {"codes": "".join(f"{code:0{1 if side.b <= 4 else 2}x}" for code in codes)} | {
        name: numbers[each * k : each * (k + 1)] for k, name in enumerate(names)
    }


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
    token = slot % 16
    if mine.exact:
        return exact_row(tile, mine.D, token)
    row = (
        bit_row(tile, mine, side == "v", head, token)
        if mine.in_bit_tiles
        else coded_row(tile, mine, side == "v", token)
    )
    at = mine.index_byte(token)
    return row | ({"index": int.from_bytes(tile[at : at + mine.I], "little")} if mine.I else {})


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
            + [f"{row.get('index', 0):x}"]
        )
        return sum(int(word, 16).bit_count() for word in words)

    assert int.from_bytes(bytes_of(vector), "little").bit_count() == sum(map(bits_of, vector["rows"]))


def test_vectors_file_is_what_the_text_gives():
    assert FILE["format"] == "kvq-page-vectors" and FILE["version"] == "2.2"
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
    bit_sides, sides = [s for s in sides if Side(s).in_bit_tiles], [s for s in sides if not Side(s).in_bit_tiles]
    assert {(s["coder"], s["scale_type"]) for s in sides if s["bits"] != 16} == {
        (coder, scale_type) for coder in ("affine", "symmetric") for scale_type in ("fp16", "bf16", "fp32")
    }
    zeros = [s for s in sides if s.get("zero") == "integer"]
    assert {s["bits"] for s in zeros} == {2, 3, 4} and {s["scale_type"] for s in zeros} == {"fp16", "bf16", "fp32"}
    assert {Side(s).W % 2 for s in sides if s["bits"] != 16} == {0, 1}
    check_bit_sides(bit_sides)
    assert {Side(s).I for s in sides} == {0, 1, 2}
    windows = [v for v in VECTORS if v["kind"] == "windows"]
    assert {v["v"]["bits"] for v in windows} == {1, 2, 3, 4, 16}
    assert {Side(v["v"]).W for v in windows if v["v"]["bits"] in (2, 4)} >= {1, 2, 3, 4}
    assert any(row["position"] >= v["window_rows"] for v in windows for row in v["rows"])
    assert any(v["window_rows"] & v["window_rows"] - 1 for v in windows)  # not a power of two
    assert len({v["name"] for v in VECTORS}) == len(VECTORS)


def check_bit_sides(sides: list[dict]) -> None:
    for name in "kv":
        words = {Side(v[name]).W for v in VECTORS if v["kind"] == "page" and Side(v[name]).in_bit_tiles}
        assert words >= {1, 2, 3, 4, 5, 8, 9, 13, 16}
    assert {s["coder"] for s in sides} == {"affine", "symmetric", "codebook", "trellis"}
    assert {s["scale_type"] for s in sides} == {"fp16", "bf16", "fp32"}
    assert {s.get("zero", "float") for s in sides if s["coder"] == "affine"} == {"float", "integer"}
    assert {Side(s).I for s in sides} == {0, 1, 2}
    mixed = [s for s in sides if "channel_bits" in s]
    assert {s["scale_scope"] for s in mixed} == {"segment", "row"}
    assert {int(digit) for s in mixed for head in s["channel_bits"] for digit in head} == {0, 1, 2, 3, 4, 5, 6, 7, 8}
    assert any(head.count(digit) == 33 for s in mixed for head in s["channel_bits"] for digit in head)
    assert all(len({Side(s).numbers_of(head) for head in range(3)}) > 1 for s in mixed)
    assert {v["page_size"] for v in VECTORS if v["kind"] == "page" and Side(v["k"]).in_bit_tiles} == {16, 64}


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


def bytes_in_order(self, is_value, token, y):
    """Rows of bits one after the other."""
    return 4 * self.W * token + y


def keys_of_neighbors(self, is_value, token, y):
    """A lane has the same words of the tokens 2 r and 2 r + 1."""
    return ROW_BYTE(self, is_value, token if is_value else token // 2 + 8 * (token % 2), y)


def values_in_order(self, is_value, token, y):
    """The four tokens of a word are neighbours."""
    if is_value:
        token = 2 * (token // 4) + (0, 8, 1, 9)[token % 4]
    return ROW_BYTE(self, is_value, token, y)


def chunks_of_eight_only(self, is_value, token, y):
    """Words behind the chunks of eight words are not taken in chunks of four."""
    if self.W % 8 < 4 or y < self.W // 8 * 32:
        return ROW_BYTE(self, is_value, token, y)
    r, high, y = token % 8, token // 8, y - self.W // 8 * 32
    begin, e = self.W // 8 * 512, self.W % 8
    if is_value:
        return begin + 4 * (4 * y + r // 2) + 2 * (token % 2) + high
    return begin + 8 * (r * e + y // 4) + 4 * high + y % 4


def words_of_a_lane_apart(self, is_value, token, y):
    """Lane t has the words t and t + 4 of a chunk of eight."""
    word = y // 4
    if not is_value and word < self.W // 8 * 8:
        y = 4 * (word // 8 * 8 + word % 4 * 2 + word % 8 // 4) + y % 4
    return ROW_BYTE(self, is_value, token, y)


def rest_by_token(self, is_value, token, y):
    """Behind the chunks, keys lie token by token."""
    first = self.W // 4 * 4
    if is_value or y < 4 * first:
        return ROW_BYTE(self, is_value, token, y)
    return 64 * first + 4 * (token * (self.W % 4) + y // 4 - first) + y % 4


def planes_of_values(self, is_value, width, m, q, i):
    return i * m + q


def codes_of_keys(self, is_value, width, m, q, i):
    """Codes of keys side by side."""
    return q * width + i if not is_value else BIT_IN_UNIT(self, is_value, width, m, q, i)


def whole_units(self, is_value, width, m, q, i):
    """The last unit has room for 32 channels."""
    return BIT_IN_UNIT(self, is_value, width, 32, q, i)


def narrow_fields_first(self, width, i):
    f = 0
    for e in (1, 2, 4, 8):
        if width & e:
            if i < f + e:
                return f, e
            f += e


def codes_in_bytes(self, is_value, head, channel, i):
    """Codes of 5, 6 and 7 bits take 8, as in packing.md."""
    place, widths = ROW_BIT(self, is_value, head, channel, i), self.widths(head)
    return place + sum(8 - w for w in widths[: widths.index(widths[channel])] if 4 < w < 8)


def segments_of_whole_bytes(self, is_value, head, channel, i):
    """Each segment begins at a byte, as in packing.md."""
    widths = self.widths(head)
    first, begin = widths.index(widths[channel]), 0
    for w in range(8, widths[channel], -1):
        begin += (w * widths.count(w) + 7) // 8 * 8
    return ROW_BIT(self, is_value, head, channel, i) - sum(widths[:first]) + begin


def row_numbers_by_tile(self, token, i):
    """The first numbers of all tokens before the second ones."""
    return self.code_bytes + self.S * (16 * i + 2 * (token % 8) + token // 8)


def row_numbers_in_order(self, token, i):
    return self.code_bytes + self.S * (token * self.row_numbers + i)


def index_in_order(self, token):
    return self.code_bytes + self.number_bytes + self.I * token


ROW_BYTE, ROW_BIT, BIT_IN_UNIT = Side.row_byte, Side.row_bit, Side.bit_in_unit

MISREADINGS = {
    "bits: rows in order": {"row_byte": bytes_in_order},
    "bits: a lane has neighboring keys": {"row_byte": keys_of_neighbors},
    "bits: neighboring values in a word": {"row_byte": values_in_order},
    "bits: no chunks of four words": {"row_byte": chunks_of_eight_only},
    "bits: a lane's words are apart": {"row_byte": words_of_a_lane_apart},
    "bits: the last words by token": {"row_byte": rest_by_token},
    "bits: planes of values": {"bit_in_unit": planes_of_values},
    "bits: codes of keys side by side": {"bit_in_unit": codes_of_keys},
    "bits: whole units": {"bit_in_unit": whole_units},
    "bits: narrow fields first": {"field_of": narrow_fields_first},
    "bits: codes in bytes": {"row_bit": codes_in_bytes},
    "bits: segments of whole bytes": {"row_bit": segments_of_whole_bytes},
    "bits: numbers one by one": {"row_number_byte": row_numbers_by_tile},
    "bits: numbers in the order of tokens": {"row_number_byte": row_numbers_in_order},
    "indices in the order of tokens": {"index_byte": index_in_order},
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


@pytest.mark.parametrize("is_value", [False, True], ids=["keys", "values"])
def test_every_bit_of_a_bit_tile_belongs_to_one_bit_number_or_index(is_value):
    for words in range(1, 40):
        fields = {"head_dim": 4 * words, "bits": 8, "group_size": 2, "coder": "symmetric", "scale_type": "fp16"}
        side = Side(fields | {"centroids": 1 + words % 2 * 300})
        assert side.in_bit_tiles and side.W == words
        taken = np.zeros(side.tile_bytes, int)
        for token in range(16):
            for y in range(4 * side.W):
                taken[side.row_byte(is_value, token, y)] += 1
            for i in range(side.row_numbers):
                taken[side.row_number_byte(token, i) : side.row_number_byte(token, i + 1)] += 1
            taken[side.index_byte(token) : side.index_byte(token) + side.I] += 1
        assert (taken == 1).all(), fields


@pytest.mark.parametrize("is_value", [False, True], ids=["keys", "values"])
def test_the_codes_of_a_row_fill_its_bits(is_value):
    widths = [8] * 3 + [7] * 33 + [6] * 32 + [5] * 65 + [4] + [3] * 40 + [2] * 31 + [1] * 5 + [0] * 7
    heads = ["".join(map(str, widths)), "0" * len(widths)]
    fields = {"head_dim": len(widths), "bits": 8, "channel_bits": heads, "scale_scope": "row", "coder": "symmetric"}
    side = Side(fields | {"scale_type": "fp16"})
    places = [side.row_bit(is_value, 0, channel, i) for channel, width in enumerate(widths) for i in range(width)]
    assert sorted(places) == list(range(sum(widths))) and side.W == -(-sum(widths) // 32)


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
