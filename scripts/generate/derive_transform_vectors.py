#!/usr/bin/env python3
"""Derives formats/transform_vectors.json from "One formula" and "Transforms (1.2)" of formats/artifact.md, in exact
arithmetic.

Rows through a map before coding that is not orthogonal, and back. What is expected of the map is written down by hand
below, in `x_rot`, `q_rot` and, for dense maps, `inverse`; this script multiplies everything out with fractions and
refuses a case where it finds something else, or where a product is not exact in binary64: then it would matter in which
order a reader adds. What is between x_rot and x_hat_rot are codes of packing.md, from derive_vectors.py.

    derive_transform_vectors.py           writes formats/transform_vectors.json
    derive_transform_vectors.py --check   compares, exit code 6 if the file says something else
"""

import json
import sys
from fractions import Fraction
from pathlib import Path

import vector_file
from exact_numbers import BINARY64, Real, from_decimal, from_pattern, hex_pattern, rounded, shortest_decimal
from packing_spec import Spec

VECTORS = Path(__file__).resolve().parents[2] / "formats" / "transform_vectors.json"

Row = list[Fraction]
Matrix = list[Row]


def affine(bits: int, group_size: int, zero: str = "float", scale_type: str = "fp16") -> dict:
    return {
        "coder": "affine",
        "scale_rule": "minmax",
        "zero": zero,
        "bits": bits,
        "group_size": group_size,
        "scale_type": scale_type,
        "clip_ratio": 1.0,
    }


def symmetric(bits: int, group_size: int, rule: str, scale_type: str = "fp16") -> dict:
    return {"coder": "symmetric", "scale_rule": rule, "bits": bits, "group_size": group_size, "scale_type": scale_type}


# Numbers are decimals, separated by spaces; rows of a matrix by semicolons.
BY_HAND = "2 0 0 0; 1 1 0 0; 0 0 0.5 0; 0 0 0.25 4"
BY_HAND_INVERSE = "0.5 0 0 0; -0.5 1 0 0; 0 0 2 0; 0 0 -0.125 0.25"
CASES = [
    {
        "name": "dense",
        "why": "the way back is A^-1, not the transpose of A; queries take the transpose of A^-1, not A",
        "rotation": {"kind": "dense", "matrix": BY_HAND, "inverse": BY_HAND_INVERSE},
        "plan": affine(4, 4),
        "x": "3 -2 4 1",
        "q": "1 2 3 4",
        "x_rot": "4 -2 2.25 4",
        "q_rot": "0.5 1.5 6 0.625",
    },
    {
        "name": "dense with center",
        "why": "the center is subtracted before A and added behind A^-1, never transformed itself",
        "rotation": {"kind": "dense", "matrix": BY_HAND, "inverse": BY_HAND_INVERSE},
        "plan": symmetric(4, 4, "absmax"),
        "center": "1 -1 0.5 -2",
        "x": "3 -2 4 1",
        "q": "-1 0.5 0.25 2",
        "x_rot": "3 -1 2.5 12",
        "q_rot": "-0.5 1 0.5 0.46875",
    },
    {
        "name": "dense, triangular",
        "why": "every channel of x_rot but the first mixes two; A and A^-1 differ from their transposes everywhere",
        "rotation": {
            "kind": "dense",
            "matrix": "1 1 0 0; 0 1 2 0; 0 0 1 1; 0 0 0 2",
            "inverse": "1 -1 2 -1; 0 1 -2 1; 0 0 1 -0.5; 0 0 0 0.5",
        },
        "plan": symmetric(3, 2, "least_squares", "bf16"),
        "x": "1 2 3 4",
        "q": "1 0 -1 2",
        "x_rot": "1 3 7 11",
        "q_rot": "-3 4 -2 1",
    },
    {
        "name": "dense, explained by signs and an order",
        "why": "hadamard_signs and order of a dense map explain it and are not applied",
        "rotation": {
            "kind": "dense",
            "order": 4,
            "signs": [-1, -1, 1, -1],
            "matrix": BY_HAND,
            "inverse": BY_HAND_INVERSE,
        },
        "plan": affine(2, 2, "integer"),
        "x": "3 -2 4 1",
        "q": "1 2 3 4",
        "x_rot": "4 -2 2.25 4",
        "q_rot": "0.5 1.5 6 0.625",
    },
    {
        "name": "scaled Hadamard with signs",
        "why": "scales first, then signs, then the blocks; back the other way round, with a division",
        "rotation": {"kind": "block_hadamard", "order": 4, "signs": [1, -1, -1, 1], "channel_scale": "4 0.5 1 2"},
        "plan": affine(4, 4),
        "x": "1 2 3 4",
        "q": "4 -1 2 6",
        # scaled 4 1 3 8, signed 4 -1 -3 8, added in pairs 3 5 5 -11, then halves, halved; queries 1 -2 2 3, 1 2 -2 3
        "x_rot": "4 -3 -1 8",
        "q_rot": "2 -3 1 2",
    },
    {
        "name": "scaled Hadamard without signs, in two blocks, with center",
        "why": "each block of 4 channels for itself, in Sylvester's order",
        "rotation": {"kind": "block_hadamard", "order": 4, "channel_scale": "1 2 4 8 0.5 0.25 1 2"},
        "plan": symmetric(4, 8, "norm", "fp32"),
        "center": "1 0 0 0.5 0 -4 1 0",
        "x": "2 3 -1 1 4 4 5 -2",
        "q": "1 2 4 8 2 1 -1 4",
        # x - center 1 3 -1 0.5 4 8 4 -2; scaled 1 6 -4 4 and 2 2 4 -4; queries 1 1 1 1 and 4 4 -1 2
        "x_rot": "3.5 -6.5 3.5 1.5 2 4 2 -4",
        "q_rot": "2 0 0 0 4.5 -1.5 3.5 1.5",
    },
    {
        "name": "scaled identity",
        "why": "a power of two for each channel, from the smallest to the largest; nothing is rounded",
        "rotation": {"kind": "identity", "channel_scale": "16777216 0.000000059604644775390625 1 0.25"},
        "plan": affine(8, 4, scale_type="bf16"),
        "x": "0.000000178813934326171875 -83886080 2 4",
        "q": "16777216 0.000000059604644775390625 3 -1",
        "x_rot": "3 -5 2 1",
        "q_rot": "1 1 3 -4",
    },
    {
        "name": "scaled identity with signs that are not applied",
        "why": "kind identity has no blocks, and its signs explain nothing",
        "rotation": {"kind": "identity", "signs": [-1, -1, -1, -1], "channel_scale": "2 0.5 1 8"},
        "plan": symmetric(2, 4, "norm"),
        "center": "0.5 0 0 0",
        "x": "1.5 4 -1 0.125",
        "q": "1 1 1 1",
        "x_rot": "2 2 -1 1",
        "q_rot": "0.5 2 1 0.125",
    },
]


def numbers(text: str) -> Row:
    return [from_decimal(word).exact for word in text.split()]


def patterns(values: Row) -> list[str]:
    """Hex patterns of numbers that are exact in binary32."""
    return [hex_pattern(Real.of(value)) for value in values]


def product(row: Row, matrix: Matrix) -> Row:
    """Product in exact arithmetic. Asserts that binary64 gives the same in any order, because each partial sum is exact
    in binary64."""
    columns = [[value * own for value, own in zip(row, column)] for column in transposed(matrix)]
    for terms in columns:
        finest = max(term.denominator for term in terms)  # all denominators are powers of two
        assert sum(map(abs, terms)) * finest < 2**53, "not exact in binary64"
    return [sum(terms) for terms in columns]


def transposed(matrix: Matrix) -> Matrix:
    return [list(column) for column in zip(*matrix)]


def diagonal(values: Row) -> Matrix:
    return [[value if i == j else Fraction(0) for j in range(len(values))] for i, value in enumerate(values)]


def sylvester(order: int) -> Matrix:
    """Normalized Sylvester matrix. For orders 1, 4, 16, ... the factor is a power of two."""
    signs = [[Fraction(-1 if bin(i & j).count("1") % 2 else 1) for j in range(order)] for i in range(order)]
    root = next(n for n in range(1, order + 1) if n * n == order)
    return [[sign / root for sign in row] for row in signs]


def multiply(a: Matrix, b: Matrix) -> Matrix:
    return [product(row, b) for row in a]


def map_of(rotation: dict, dim: int) -> tuple[Matrix, Matrix]:
    """(A, A^-1)"""
    if rotation["kind"] == "dense":
        return tuple([numbers(row) for row in rotation[name].split(";")] for name in ("matrix", "inverse"))
    scale = numbers(rotation["channel_scale"])
    a, inverse = diagonal(scale), diagonal([1 / value for value in scale])
    if rotation["kind"] == "identity":
        return a, inverse
    order, signs = rotation["order"], diagonal([Fraction(sign) for sign in rotation.get("signs", [1] * dim)])
    small = sylvester(order)
    blocks = [
        [small[i % order][j % order] if i // order == j // order else Fraction(0) for j in range(dim)]
        for i in range(dim)
    ]
    return multiply(multiply(a, signs), blocks), multiply(multiply(blocks, signs), inverse)


def condition(a: Matrix, inverse: Matrix) -> float:
    def square(row: Row) -> Fraction:
        return sum(value * value for value in row)

    mean = sum(square(row) * square(column) for row, column in zip(a, transposed(inverse))) / len(a)
    return float(mean) ** 0.5


def stored(rotation: dict) -> dict:
    """The rotation as the file stores it: hex patterns for numbers."""
    given = {key: value for key, value in rotation.items() if key in ("kind", "order", "signs")}
    for name in ("matrix", "inverse", "channel_scale"):
        if name in rotation:
            given[f"{name}_bits"] = patterns(numbers(rotation[name].replace(";", " ")))
    return given


def derive(case: dict) -> dict:
    """The expected results of one case, with the fields of vectors.md."""
    x, q = numbers(case["x"]), numbers(case["q"])
    center = numbers(case["center"]) if "center" in case else [Fraction(0)] * len(x)
    a, inverse = map_of(case["rotation"], len(x))
    assert multiply(inverse, a) == diagonal([Fraction(1)] * len(x)), f"{case['name']}: the inverse is not A's"
    offset = [value - own for value, own in zip(x, center)]
    x_rot, q_rot = product(offset, a), product(q, transposed(inverse))
    assert x_rot == numbers(case["x_rot"]) and q_rot == numbers(case["q_rot"]), (
        f"{case['name']}: by hand it is something else"
    )
    dot = sum(own * value for own, value in zip(q, offset))
    assert dot == sum(own * value for own, value in zip(q_rot, x_rot)), f"{case['name']}: q . x is not kept"
    coded = Spec().derive(
        {
            "name": case["name"],
            "why": case["why"],
            **case["plan"],
            "x": [shortest_decimal(Real.of(value)) for value in x_rot],
        }
    )
    decoded = [from_pattern(text).exact for text in coded["decoded_bits"]]
    back = [own + value for own, value in zip(product(decoded, inverse), center)]
    assert all(rounded(Real.of(value), BINARY64) == Real.of(value) for value in back), (
        f"{case['name']}: not exact in binary64"
    )
    results = {name: coded[name] for name in ("codes", "scales", "zeros", "bytes")}
    return {
        "name": case["name"],
        "why": case["why"],
        **case["plan"],
        "rotation": stored(case["rotation"]),
        **({"center_bits": patterns(center)} if "center" in case else {}),
        "condition": condition(a, inverse),
        "x": case["x"].split(),
        "x_bits": patterns(x),
        "q_bits": patterns(q),
        "x_rot_bits": patterns(x_rot),
        "q_rot_bits": patterns(q_rot),
        "dot": float(dot),
        **results,
        "decoded_bits": coded["decoded_bits"],
        "x_hat_bits": [hex_pattern(rounded(Real.of(value))) for value in back],
    }


def vectors_text() -> str:
    """The text of the whole file, with one vector in each line."""
    lines = ",\n".join(json.dumps(derive(case)) for case in CASES)
    return f'{{"format": "kvq-transform-vectors", "version": "1.0", "vectors": [\n{lines}\n]}}\n'


def main() -> int:
    return vector_file.run(__doc__, VECTORS, vectors_text, "artifact.md and the cases here")


if __name__ == "__main__":
    sys.exit(main())
