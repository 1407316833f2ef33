"""The parameters of formats/packing.md, without arithmetic: shared by the numpy and the PyTorch codec.

`Scheme` is one width for every channel, `MixedScheme` a width of its own for each of them. Both say how a row falls
into segments and how many bytes it takes, so the codecs treat them alike."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import NamedTuple

SCALE_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
SYMMETRIC_RULES = ("absmax", "least_squares", "norm")
TABLE_RULES = ("norm", "least_squares", "rms")
SCALE_RULES = {"affine": ("minmax",), "symmetric": SYMMETRIC_RULES, "codebook": TABLE_RULES, "trellis": TABLE_RULES}
MIXABLE_CODERS = ("symmetric", "codebook", "trellis")
ZERO_KINDS = ("float", "integer")
EXACT_BITS = 16
LARGEST_MEMORY, LARGEST_WINDOW_BITS, LARGEST_STATE_BITS = 8, 16, 8  # m, b (m + 1) and b m of a trellis
SHORTEST_TRELLIS = 8  # channels; shorter groups are coded as symmetric
SEARCHES = ("binary32", "integer")  # of trellis codes
LONGEST_SEAM = 32  # channels on each side of the seam, in the first run of the search binary32
ROW_ALIGNMENT = 4
ONE_SCALE_RULES = ("norm", "least_squares", "rms")  # of rows with one scale; a symmetric coder has no rms
WIDTHS = tuple(range(1, 9))
SMALLEST_GAIN, LARGEST_GAIN = 2.0**-24, 2.0**24

# step[b] of packing.md, b = 1 .. 8; the nearest binary32 values decide.
GAUSSIAN_STEP = (None, 1.5957691, 0.9956867, 0.58601946, 0.3352006, 0.18813878, 0.10406301, 0.056867674, 0.030762387)


class Segment(NamedTuple):
    """Channels [begin, end) of a row and how they are coded."""

    begin: int
    end: int
    scheme: "Scheme"
    stored_bits: int  # width of a code in the row

    @property
    def code_bytes(self) -> int:
        return ((self.end - self.begin) * self.stored_bits + 7) // 8


def words(bits: int) -> int:
    """Words of a row in bit tiles."""
    return max(1, (bits + 31) // 32)


def index_bytes(centroids: int) -> int:
    """Bytes of the index of one of `centroids` centroids; 0 without centroids."""
    return 0 if centroids == 0 else 1 if centroids <= 256 else 2


def trellis_fault(bits: int, memory: int) -> str | None:
    most = min(LARGEST_MEMORY, LARGEST_STATE_BITS // bits, LARGEST_WINDOW_BITS // bits - 1)
    return None if 1 <= memory <= most else f"trellis of {bits} bits: expected a memory of 1 to {most}, found {memory}"


def gains_fault(gains: tuple[float, ...], scale_rule: str, widths: set[int]) -> str | None:
    """What is wrong with gains of widths 1 to 8 of a row that has these widths."""
    if scale_rule not in ONE_SCALE_RULES:
        return f"scale_rule of rows with one scale: expected {' or '.join(ONE_SCALE_RULES)}, found '{scale_rule}'"
    if len(gains) != len(WIDTHS):
        return f"segment_gain: expected {len(WIDTHS)} gains, found {len(gains)}"
    for width, gain in zip(WIDTHS, gains):
        if not SMALLEST_GAIN <= gain <= LARGEST_GAIN:  # also true for NaN
            return f"segment_gain of width {width}: expected 2^-24 to 2^24, found {gain:.9g}"
        if width not in widths and gain != 1:
            return f"segment_gain of width {width}, which the row does not have: expected 1, found {gain:.9g}"
    return None


def symmetric_instead(bits: int, group_size: int, scale_type: str, scale_rule: str) -> "Scheme":
    """The scheme of groups in a trellis coder that are too short for a trellis or have no theta."""
    rule = "least_squares" if scale_rule == "least_squares" else "norm"
    return Scheme("symmetric", bits, group_size, scale_type, rule)


@dataclass(frozen=True)
class Scheme:
    """How one row of one width is quantized.

    `zero` is None for all but affine codes; an exact row has only `coder` and `bits`. `codebook` has 2^bits entries,
    `theta` has bits * (memory + 1); both hold binary32 numbers. `centroids` is C of packing.md, or 0. `search` says how
    codes of a trellis are found. Groups of a trellis may be too short for the trellis, so use `segments` to learn how
    groups are quantized.
    """

    coder: str
    bits: int
    group_size: int = 0
    scale_type: str = "fp16"
    scale_rule: str = "minmax"
    zero: str | None = None
    clip_ratio: float = 1.0
    codebook: tuple[float, ...] = field(default=(), repr=False)
    memory: int = 0
    theta: tuple[float, ...] = field(default=(), repr=False)
    centroids: int = 0
    search: str = "binary32"

    def __post_init__(self):
        fault = self._fault() or self._search_fault() or self._table_fault()
        if fault:
            raise ValueError(fault)

    def _fault(self) -> str | None:
        if self.coder == "exact":
            return None if self.bits == EXACT_BITS else f"exact rows have bits {EXACT_BITS}, found {self.bits}"
        if self.coder not in SCALE_RULES:
            return f"coder: expected exact, {', '.join(SCALE_RULES)}, found '{self.coder}'"
        if not 1 <= self.bits <= 8:
            return f"bits: expected 1 to 8, found {self.bits}"
        if self.group_size < 1:
            return f"group_size: expected at least 1, found {self.group_size}"
        if self.scale_type not in SCALE_BYTES:
            return f"scale_type: expected {', '.join(SCALE_BYTES)}, found '{self.scale_type}'"
        rules = SCALE_RULES[self.coder]
        if self.scale_rule not in rules:
            return f"scale_rule of {self.coder} codes: expected {' or '.join(rules)}, found '{self.scale_rule}'"
        if self.zero not in (ZERO_KINDS if self.coder == "affine" else (None,)):
            return f"zero of {self.coder} codes: found '{self.zero}'"
        if not 0 < self.clip_ratio <= 1:
            return f"clip_ratio: expected more than 0 and at most 1, found {self.clip_ratio}"
        return None

    def _search_fault(self) -> str | None:
        expected = SEARCHES if self.coder == "trellis" else SEARCHES[:1]
        if self.search not in expected:
            return f"search of {self.coder} codes: expected {' or '.join(expected)}, found '{self.search}'"
        return None

    def _table_fault(self) -> str | None:
        entries = 2**self.bits if self.coder == "codebook" else 0
        if len(self.codebook) != entries:
            found = len(self.codebook)
            return f"codebook of {self.coder} codes of {self.bits} bits: expected {entries} entries, found {found}"
        if any(not a < b for a, b in zip(self.codebook, self.codebook[1:])):
            return "codebook: expected strictly ascending entries"
        if self.coder == "trellis" and (fault := trellis_fault(self.bits, self.memory)):
            return fault
        thetas = self.bits * (self.memory + 1) if self.coder == "trellis" else 0
        if len(self.theta) != thetas or (self.memory and not thetas):
            return f"theta of {self.coder} codes: expected {thetas} numbers, found {len(self.theta)}"
        if not all(map(math.isfinite, self.codebook + self.theta)):
            return "codebook and theta: expected finite numbers"
        return None

    @property
    def one_scale(self) -> bool:
        """False: each group has a scale."""
        return False

    @property
    def top(self) -> int:
        """The largest code."""
        return 2**self.bits - 1

    def groups(self, dim: int) -> int:
        """G of a row of `dim` channels."""
        if self.coder == "exact":
            return 0
        if dim % self.group_size:
            raise ValueError(f"group_size {self.group_size} does not divide {dim} channels")
        return dim // self.group_size

    def numbers_per_group(self) -> int:
        return {"exact": 0, "affine": 2}.get(self.coder, 1)

    def segments(self, dim: int) -> tuple[Segment, ...]:
        short = self.coder == "trellis" and self.group_size < SHORTEST_TRELLIS
        own = symmetric_instead(self.bits, self.group_size, self.scale_type, self.scale_rule) if short else self
        return (Segment(0, dim, own, self.bits),)

    def code_bytes(self, dim: int) -> int:
        return (dim * self.bits + 7) // 8

    def numbers_begin(self, dim: int) -> int:
        """Offset of the numbers in the row."""
        return self.code_bytes(dim)

    def number_bytes(self, dim: int) -> int:
        numbers = self.groups(dim) * self.numbers_per_group()
        return numbers * SCALE_BYTES[self.scale_type] if numbers else 0

    def row_bytes(self, dim: int) -> int:
        """Size of a packed row."""
        return self.numbers_begin(dim) + self.number_bytes(dim) + index_bytes(self.centroids)

    def page_bytes(self, dim: int) -> int:
        """Bytes of a row in pages: formats/pages.md. Code tiles have no padding, bit tiles have whole words."""
        in_code_tiles = self.coder == "exact" or (
            self.coder in ("affine", "symmetric")
            and self.bits in (2, 3, 4)
            and dim * self.bits % 128 == 0
            and self.group_size % 32 == 0
        )
        codes = self.code_bytes(dim) if in_code_tiles else 4 * words(dim * self.bits)
        return codes + self.number_bytes(dim) + index_bytes(self.centroids)

    def clip_index(self, dim: int) -> int | None:
        """Index of tau among the row's ascending magnitudes; None if the row is not clipped."""
        if self.scale_rule != "minmax" or self.clip_ratio == 1 or self.coder == "exact":
            return None
        return min(int(self.clip_ratio * dim), dim - 1)  # the product is in binary64 and not negative

    def with_scale_type(self, scale_type: str) -> "Scheme":
        return dataclasses.replace(self, scale_type=scale_type)


class Trellis(NamedTuple):
    """The trellis of one width."""

    memory: int
    theta: tuple[float, ...]
    search: str = "binary32"


@dataclass(frozen=True)
class Tables:
    """Tables of codebook and trellis codes, by width: entries, and trellises. A trellis may also be a plain tuple, with
    or without a search."""

    codebooks: dict[int, tuple[float, ...]] = field(default_factory=dict)
    trellises: dict[int, Trellis | tuple] = field(default_factory=dict)

    def scheme(self, coder: str, bits: int, group_size: int, scale_type: str, scale_rule: str) -> Scheme:
        """The scheme of a group of one width, with its table; raises ValueError if the width has no table."""
        if coder == "codebook":
            if bits not in self.codebooks:
                raise ValueError(f"there is no codebook of {bits} bits")
            return Scheme(coder, bits, group_size, scale_type, scale_rule, codebook=self.codebooks[bits])
        if coder == "trellis":
            if bits not in self.trellises:
                raise ValueError(f"there is no trellis of {bits} bits")
            own = Trellis(*self.trellises[bits])
            return Scheme(coder, bits, group_size, scale_type, scale_rule, **own._asdict())
        return Scheme(coder, bits, group_size, scale_type, scale_rule)

    def mixed_scheme(self, coder: str, bits: int, group_size: int, scale_type: str, scale_rule: str) -> Scheme:
        """The scheme of a segment of a mixed row, which is one group; a trellis coder quantizes some segments as
        symmetric."""
        if coder == "trellis" and (bits not in self.trellises or group_size < SHORTEST_TRELLIS):
            return symmetric_instead(bits, group_size, scale_type, scale_rule)
        return self.scheme(coder, bits, group_size, scale_type, scale_rule)


@dataclass(frozen=True)
class MixedScheme:
    """How one row with mixed widths is quantized; `make` builds it.

    `widths` is channel_bits. `parts` are the segments of width 1 to 8, each one group. `gains` are the gains of these
    segments, binary32 numbers, in rows with one scale; None: each segment has a scale. `size` is the row size that all
    heads of a layer share; 0: the size that this row needs.
    """

    coder: str
    scale_type: str
    scale_rule: str
    widths: tuple[int, ...] = field(repr=False)
    parts: tuple[Segment, ...]
    centroids: int = 0
    size: int = 0
    gains: tuple[float, ...] | None = None

    @staticmethod
    def make(
        coder: str,
        widths: tuple[int, ...],
        scale_type: str,
        scale_rule: str,
        tables: Tables = Tables(),
        centroids: int = 0,
        gains: tuple[float, ...] | None = None,
    ) -> "MixedScheme":
        """`gains` has the gains of widths 1 to 8, for rows with one scale. Raises ValueError for what cannot be."""
        if coder not in MIXABLE_CODERS:
            raise ValueError(f"coder of mixed rows: expected {' or '.join(MIXABLE_CODERS)}, found '{coder}'")
        if not all(0 <= w <= 8 for w in widths) or list(widths) != sorted(widths, reverse=True):
            raise ValueError("channel_bits: expected widths from 0 to 8, descending")
        if gains is not None and (fault := gains_fault(gains, scale_rule, set(widths))):
            raise ValueError(fault)
        parts, begin = [], 0
        for width in sorted(set(widths) - {0}, reverse=True):
            end = begin + widths.count(width)
            scheme = tables.mixed_scheme(coder, width, end - begin, scale_type, scale_rule)
            parts.append(Segment(begin, end, scheme, 8 if width > 4 else width))
            begin = end
        own = None if gains is None else tuple(gains[part.scheme.bits - 1] for part in parts)
        return MixedScheme(coder, scale_type, scale_rule, tuple(widths), tuple(parts), centroids, gains=own)

    @property
    def one_scale(self) -> bool:
        """Whether a row has one scale, and a gain for each segment."""
        return self.gains is not None

    @property
    def bits(self) -> int:
        """The largest width."""
        return max(self.widths)

    def segments(self, dim: int) -> tuple[Segment, ...]:
        if dim != len(self.widths):
            raise ValueError(f"channel_bits has {len(self.widths)} channels, the row {dim}")
        return self.parts

    def code_bytes(self, dim: int) -> int:
        return sum(part.code_bytes for part in self.segments(dim))

    def numbers_begin(self, dim: int) -> int:
        return round_up(self.code_bytes(dim), SCALE_BYTES[self.scale_type])

    def scale_count(self, dim: int) -> int:
        """Scales of a row. A row without channels of width 1 to 8 has none."""
        count = len(self.segments(dim))
        return min(count, 1) if self.one_scale else count

    def number_bytes(self, dim: int) -> int:
        return self.scale_count(dim) * SCALE_BYTES[self.scale_type]

    def page_bytes(self, dim: int) -> int:
        """Bytes of a row in pages if no other head's row is longer: formats/pages.md, "Bit tiles"."""
        codes = 4 * words(sum(self.widths[:dim]))
        return codes + self.number_bytes(dim) + index_bytes(self.centroids)

    def needed_bytes(self) -> int:
        """Size without the zero bytes that pad to the row size."""
        dim = len(self.widths)
        # Scales have 2 or 4 bytes and are aligned, so the offset of a two-byte index after the scales is even.
        return self.numbers_begin(dim) + self.number_bytes(dim) + index_bytes(self.centroids)

    def row_bytes(self, dim: int) -> int:
        """Size of a packed row."""
        self.segments(dim)  # checks dim
        return self.size or round_up(self.needed_bytes(), ROW_ALIGNMENT)

    def with_scale_type(self, scale_type: str) -> "MixedScheme":
        parts = tuple(part._replace(scheme=part.scheme.with_scale_type(scale_type)) for part in self.parts)
        return dataclasses.replace(self, scale_type=scale_type, parts=parts, size=0)


AnyScheme = Scheme | MixedScheme


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def with_equal_rows(heads: list[MixedScheme]) -> tuple[MixedScheme, ...]:
    """The heads of a layer, each with the row size that the largest head needs."""
    size = round_up(max(head.needed_bytes() for head in heads), ROW_ALIGNMENT)
    return tuple(dataclasses.replace(head, size=size) for head in heads)
