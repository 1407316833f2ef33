"""Floating-point numbers and their operations in exact rational arithmetic: each is computed with `fractions` and then
rounded once, to nearest even, which is what an IEEE operation is."""

import functools
import math
from array import array
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Format:
    """A binary floating-point format; the smallest quantum is 2^(min_exponent - precision + 1)."""

    precision: int  # bits of the significand, the hidden one included
    min_exponent: int
    max_exponent: int
    storage_bytes: int

    @functools.cached_property
    def largest(self) -> Fraction:
        return (2 - Fraction(2) ** (1 - self.precision)) * Fraction(2) ** self.max_exponent


BINARY64 = Format(53, -1022, 1023, 8)
BINARY32 = Format(24, -126, 127, 4)
SCALE_TYPES = {"fp32": BINARY32, "fp16": Format(11, -14, 15, 2), "bf16": Format(8, -126, 127, 2)}


@dataclass(frozen=True)
class Real:
    """A number of any format: a sign, which zeros have, too, and an exact magnitude; the magnitude None is infinity."""

    negative: bool
    magnitude: Fraction | None

    @staticmethod
    def of(value) -> "Real":
        return Real(value < 0, abs(Fraction(value)))

    @property
    def exact(self) -> Fraction:
        return -self.magnitude if self.negative else self.magnitude

    @property
    def is_zero(self) -> bool:
        return self.magnitude == 0

    @property
    def is_infinite(self) -> bool:
        return self.magnitude is None

    def __neg__(self) -> "Real":
        return Real(not self.negative, self.magnitude)

    def __abs__(self) -> "Real":
        return Real(False, self.magnitude)

    def __lt__(self, other: "Real") -> bool:
        if self.is_infinite or other.is_infinite:
            return self.order() < other.order()
        return self.exact < other.exact

    def order(self) -> int:
        """-1, 0 or 1: orders numbers when infinities are among them."""
        return (-1 if self.negative else 1) if self.is_infinite else 0


ZERO = Real(False, Fraction(0))
HALF = Real.of(Fraction(1, 2))


def floor_log2(value: Fraction) -> int:
    """Largest e with 2^e <= value, value > 0."""
    e = value.numerator.bit_length() - value.denominator.bit_length()
    return e if value.denominator << max(e, 0) <= value.numerator << max(-e, 0) else e - 1


def nearest_even(numerator: int, denominator: int) -> int:
    """Nearest integer of a quotient >= 0; a tie goes to the even integer."""
    below, rest = divmod(numerator, denominator)
    return below + (2 * rest > denominator or (2 * rest == denominator and below % 2 == 1))


def clamped(value, bound):
    """clamp(value, bound) of packing.md (d)"""
    return min(max(value, -bound), bound)


def rounded(value: Real, target: Format = BINARY32) -> Real:
    """Rounds an exact result once, as IEEE 754 does: keeps subnormals and the sign, overflows to infinity."""
    if value.is_infinite or value.is_zero:
        return value
    numerator, denominator = value.magnitude.numerator, value.magnitude.denominator
    quantum = max(floor_log2(value.magnitude), target.min_exponent) - target.precision + 1  # its exponent
    units = nearest_even(numerator << max(-quantum, 0), denominator << max(quantum, 0))
    magnitude = Fraction(units << quantum) if quantum >= 0 else Fraction(units, 1 << -quantum)
    return Real(value.negative, magnitude if magnitude <= target.largest else None)


# The binary32 operations. Infinities appear only where packing.md allows overflow; an operation that would give NaN
# raises.


class NotANumberError(ArithmeticError):
    """An operation whose IEEE result is NaN."""


def add(a: Real, b: Real) -> Real:
    if a.is_infinite or b.is_infinite:
        if a.is_infinite and b.is_infinite and a.negative != b.negative:
            raise NotANumberError("inf - inf")
        return a if a.is_infinite else b
    total = a.exact + b.exact
    if total == 0:
        return Real(a.negative and b.negative, Fraction(0))  # x + (-x) = +0; only -0 + -0 = -0
    return rounded(Real.of(total))


def subtract(a: Real, b: Real) -> Real:
    return add(a, -b)


def multiply(a: Real, b: Real) -> Real:
    negative = a.negative != b.negative
    if a.is_infinite or b.is_infinite:
        assert not (a.is_zero or b.is_zero), "0 * inf"
        return Real(negative, None)
    return rounded(Real(negative, a.magnitude * b.magnitude))


def divide(a: Real, b: Real) -> Real:
    assert not b.is_zero, "packing.md divides by no zero"
    negative = a.negative != b.negative
    if b.is_infinite:
        if a.is_infinite:
            raise NotANumberError("inf / inf")
        return Real(negative, Fraction(0))
    return Real(negative, None) if a.is_infinite else rounded(Real(negative, a.magnitude / b.magnitude))


def square_root(a: Real) -> Real:
    """Correctly rounded square root: 160 bits of the root and one sticky bit decide the rounding."""
    if a.is_infinite or a.is_zero:
        return a
    shift = 160 - floor_log2(a.magnitude) // 2
    scaled = a.magnitude * Fraction(4) ** shift
    root = math.isqrt(scaled.numerator // scaled.denominator)
    sticky = Fraction(0) if root * root == scaled else Fraction(1, 2)
    return rounded(Real(False, (root + sticky) / Fraction(2) ** shift))


def floor(a: Real) -> Real:
    if a.is_infinite or a.is_zero:
        return a
    whole = a.exact.numerator // a.exact.denominator
    return Real(a.negative, Fraction(abs(whole)))


def as_float(value: Real) -> float:
    """A binary32 number as a Python float, which represents it exactly."""
    if value.is_infinite:
        return -math.inf if value.negative else math.inf
    return float(value.exact)


def binary32s(values) -> array:
    """Sums, differences and products of two binary32 numbers each, given as Python floats, rounded to binary32.

    Python's floats are binary64, whose 53 bits are at least 2 * 24 + 2. Rounding the exact result to binary64 and then
    to binary32 therefore gives the same as rounding it once. (A product is even exact in binary64, and so is a sum that
    is subnormal in binary32.) Overflow gives infinity."""
    return array("f", values)


# Bit patterns


def pattern(value: Real, target: Format = BINARY32) -> int:
    """Bits of a datum that `target` represents exactly."""
    fraction_bits = target.precision - 1
    sign = int(value.negative) << (8 * target.storage_bytes - 1)
    infinity = (target.max_exponent - target.min_exponent + 2) << fraction_bits
    if value.is_infinite:
        return sign | infinity
    if value.is_zero:
        return sign
    exponent = max(floor_log2(value.magnitude), target.min_exponent)
    units = value.magnitude / Fraction(2) ** (exponent - fraction_bits)
    assert units.denominator == 1, "not a number of this format"
    # A subnormal has no hidden bit, so the sum below gives biased exponent 0.
    return sign | ((exponent - target.min_exponent) << fraction_bits) + units.numerator


def hex_pattern(value: Real, target: Format = BINARY32) -> str:
    return f"{pattern(value, target):0{2 * target.storage_bytes}x}"


QUIET_NAN = {"fp32": 0x7FC00000, "fp16": 0x7E00, "bf16": 0x7FC0}
NAMED = {"nan": 0x7FC00000, "-nan": 0xFFC00000, "snan": 0x7F800001, "inf": 0x7F800000, "-inf": 0xFF800000}


def channel_of(text: str) -> Real | None:
    """A channel of an input row: a decimal or a name of NAMED. NaN is None."""
    if text in NAMED:
        return Real(text.startswith("-"), None) if text.endswith("inf") else None
    return from_decimal(text)


def given_channel(text: str) -> tuple[str, str]:
    """The fields x and x_bits of a channel."""
    if text in NAMED:
        return text, f"{NAMED[text]:08x}"
    value = from_decimal(text)
    return shortest_decimal(value), hex_pattern(value)


def is_finite(x: Real | None) -> bool:
    return x is not None and not x.is_infinite


def from_decimal(text: str) -> Real:
    """The binary32 nearest to a decimal or a C hexadecimal float."""
    negative = text.startswith("-")
    digits = text.lstrip("+-")
    magnitude = Fraction(float.fromhex(digits)) if digits.startswith("0x") else Fraction(digits)
    value = rounded(Real(negative, magnitude))
    assert not value.is_infinite, f"{text}: beyond the largest binary32"
    return value


def from_pattern(text: str) -> Real:
    """The finite binary32 of a hex pattern."""
    bits = int(text, 16)
    exponent, fraction = bits >> 23 & 0xFF, bits & 0x7FFFFF
    assert exponent != 0xFF, f"{text}: not finite"
    units = fraction + (1 << 23 if exponent else 0)
    return Real(bool(bits >> 31), units * Fraction(2) ** (max(exponent, 1) - 150))


def shortest_decimal(value: Real) -> str:
    """Shortest decimal that rounds back to the same binary32."""
    sign = "-" if value.negative else ""
    if value.is_zero:
        return f"{sign}0"
    for digits in range(1, 10):
        text = f"{float(value.magnitude):.{digits - 1}e}"  # a binary32 is exact in Python's binary64
        if rounded(Real(False, Fraction(text))) == abs(value):
            plain = repr(float(text))
            return sign + (plain.removesuffix(".0"))
    raise AssertionError("nine digits always suffice")
