"""Typed access to a JSON value that knows where it stands, so that every fault names its place."""

import math

from .errors import KvqError, bad_input


class Node:
    """A JSON value and its path. Each accessor returns the value in the requested type or raises KvqError."""

    def __init__(self, value: object, where: str):
        self.value, self.where = value, where

    def __contains__(self, key: str) -> bool:
        return key in self.object()

    def __getitem__(self, key: str) -> "Node":
        members = self.object()
        if key not in members:
            raise bad_input(f"{self.where}: '{key}' is missing")
        return Node(members[key], f"{self.where}/{key}")

    def object(self) -> dict:
        if not isinstance(self.value, dict):
            raise self.fault("an object")
        return self.value

    def items(self, minimum: int = 0) -> list["Node"]:
        if not isinstance(self.value, list) or len(self.value) < minimum:
            raise self.fault("an array" + (f" of at least {minimum}" if minimum else ""))
        return [Node(value, f"{self.where}/{i}") for i, value in enumerate(self.value)]

    def integer(self, least: int, most: int) -> int:
        if type(self.value) is not int or not least <= self.value <= most:
            raise self.fault(f"an integer from {least} to {most}")
        return self.value

    def number(self, above: float = -math.inf, most: float = math.inf, least: float = -math.inf) -> float:
        fits = type(self.value) in (int, float) and above < self.value <= most and self.value >= least
        if not fits or abs(self.value) > 1e308:
            raise self.fault(
                "a number"
                + (f" above {above}" if above > -math.inf else "")
                + (f" of at least {least}" if least > -math.inf else "")
                + (f", at most {most}" if most < math.inf else "")
            )
        return float(self.value)

    def boolean(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.fault("true or false")
        return self.value

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.fault("a string")
        return self.value

    def texts(self) -> list[str]:
        return [item.text() for item in self.items()]

    def word(self, *allowed: str) -> str:
        if self.value not in allowed:
            raise self.fault(" or ".join(allowed))
        return self.value

    def fault(self, expected: str) -> KvqError:
        shown = repr(self.value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return bad_input(f"{self.where}: expected {expected}, found {shown}")
