"""What the `why` of vectors claims, and whether it is true."""

import math
from fractions import Fraction

from exact_numbers import Real
from packing_spec import Spec, Trellis, with_patterns
from vector_cases import CASES

# What the `why` of vectors of search `integer` claims: searches that find other codes, each as the methods in which its
# Spec differs.


def starts_at(*begins: int) -> list[dict]:
    """First runs that begin that many channels before the group"""
    return [{"lead": lambda self, size, begin=begin: begin} for begin in begins]


def ends_at(*ends: int) -> list[dict]:
    """Other n"""
    return [{"first_end": lambda self, size, end=end: end} for end in ends]


def other_starts_cost(*costs) -> list[dict]:
    """Costs in place of 32 (in units of 1) of the states that are not z*"""

    def start(cost):
        return lambda self, seam, trellis: [
            0 if state == seam else cost * self.cost_unit(trellis.bits)
            for state in range(2 ** (trellis.bits * trellis.memory))
        ]

    return [{"second_start": start(cost)} for cost in costs]


def half_up(value: Fraction) -> int:
    return math.floor(value + Fraction(1, 2))


def half_away(value: Fraction) -> int:
    return half_up(value) if value > 0 else -half_up(-value)


def other_spec(methods: dict) -> Spec:
    return type("Other", (Spec,), methods)()


def with_other(methods: dict, name: str):
    """A method `name` that calls other methods than all others do."""
    return lambda self, *arguments: getattr(other_spec(methods), name)(*arguments)


ONE_RUN = {"has_one_run": lambda self, size: True}
TWO_RUNS = {"has_one_run": lambda self, size: False}
OTHER_ROUNDINGS = [{"rint": lambda self, value: half_up(value)}, {"rint": lambda self, value: half_away(value)}]
OTHER_COSTS = [
    {"nearest_cost": lambda self, numerator, denominator: Spec().rint(Fraction(numerator, denominator))},
    {"nearest_cost": lambda self, numerator, denominator: half_away(Fraction(numerator, denominator))},
]
OTHER_CODES = {
    "integer, 95 channels": [ONE_RUN],
    "integer, 96 channels": [TWO_RUNS],
    "integer, 8 bit": [{"cost_unit": lambda self, bits: 20 * 4 ** (bits - 1)}],
    "integer, theta beyond 2.5": [{"theta_bound": lambda self: 4}, {"theta_bound": lambda self: 1000}],
    "integer, y beyond 4.5": [{"channel_bound": lambda self: 1024}, {"channel_bound": lambda self: 10**9}],
    "integer, ties of 256 y": OTHER_ROUNDINGS,
    "integer, ties of 64 U theta": OTHER_ROUNDINGS,
    "integer, ties of F": [{"costs_without_y": with_other(methods, "costs_without_y")} for methods in OTHER_COSTS],
    "integer, ties of X": [{"gains": with_other(methods, "gains")} for methods in OTHER_COSTS],
    "integer, ties of paths": [
        {"better": lambda self, cost, best: cost <= best, "cheapest": lambda self, costs: costs.index(min(costs))},
        {"cheapest": lambda self, costs: len(costs) - 1 - costs[::-1].index(min(costs))},
    ],
    "integer, second run": other_starts_cost(31, 33, math.inf),
    "integer, first run over 8 channels": [*starts_at(8, 32, 48), *ends_at(8, 32)],
    "integer, first run over 20 channels": starts_at(20, 32, 48),
    "integer, first run over 24 channels": [*starts_at(24), *ends_at(32, 48)],
    "integer, first run over 64 channels": ends_at(32, 64),
}
# Whether the path of each group begins in z*: name, methods of another search, and what is expected
CLOSES = [
    ("integer, 95 channels", {}, [True]),
    ("integer, 95 channels", ONE_RUN, [False]),
    ("integer, 96 channels", {}, [False]),
    ("integer, 96 channels", TWO_RUNS, [True]),
    ("integer, second run", {}, [False, True]),
]


def closes(case: dict, methods: dict) -> list[bool]:
    """Of each group that is searched in integers"""
    found = []

    def integer_path(self, y: list[Real], trellis: Trellis) -> list[int]:
        path = Spec.integer_path(self, y, trellis)
        found.append(path[0] == path[-1])
        return path

    other_spec({**methods, "integer_path": integer_path}).derive(case)
    return found


def check_whys(vectors: dict[str, dict]) -> None:
    cases = {case["name"]: with_patterns(case) for case in CASES}
    for name, others in OTHER_CODES.items():
        for methods in others:
            other = other_spec(methods).derive(cases[name])
            assert other["codes"] != vectors[name]["codes"], f"{name}: {list(methods)} changes no code"
    for name, methods, expected in CLOSES:
        assert closes(cases[name], methods) == expected, f"{name}: whether paths begin in z*, {list(methods)}"
    for name in cases:
        twin = name.replace("integer, ", "binary32, ")
        if twin != name and twin in cases:
            assert vectors[twin]["x_bits"] == vectors[name]["x_bits"], f"{name}: not the row of {twin}"
            assert vectors[twin]["codes"] != vectors[name]["codes"], f"{name}: the codes of {twin}"
