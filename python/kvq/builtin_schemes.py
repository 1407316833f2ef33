"""Schemes that need no calibration, by name: for checks against an artifact or against a table.

    exact                     nothing is coded
    affine2, integer4         affine min-max codes of 2 and 4 bits, float and integer zero
    norm2, least_squares3, absmax8
    hadamard-affine2g64       after a Hadamard rotation of the whole head, in groups of 64 channels

Scales are fp16; a group is the whole head unless `g` says otherwise.
"""

import re

from .artifact import SidePlan
from .errors import usage
from .scheme import Scheme
from .suggestion import nearest_name

PATTERN = re.compile(r"(hadamard-)?(affine|integer|absmax|least_squares|norm)([1-8])(?:g([1-9]\d*))?")
EXAMPLES = "exact, affine2, integer4, norm2, hadamard-affine2g64"


def scheme_names() -> list[str]:
    """All names without a group size."""
    names = [
        f"{rule}{bits}" for rule in ("affine", "integer", "absmax", "least_squares", "norm") for bits in range(1, 9)
    ]
    return ["exact", *names, *(f"hadamard-{name}" for name in names)]


class BuiltinPlans:
    """`plan_of` for CodedAttention: one scheme for all layers and both sides."""

    def __init__(self, name: str, sides: str = "kv", unrounded_metadata: bool = False):
        match = PATTERN.fullmatch(name)
        if name != "exact" and not match:
            nearest = nearest_name(name, scheme_names())
            raise usage(
                f"--scheme: unknown scheme '{name}'", f"did you mean {nearest}?" if nearest else f"as in {EXAMPLES}"
            )
        self.match, self.sides = match, sides
        self.scale_type = "fp32" if unrounded_metadata else "fp16"

    def __call__(self, layer: int, side: str, kv_heads: int, dim: int) -> SidePlan | None:
        if self.match is None or side not in self.sides:
            return None
        hadamard, rule, bits, group = self.match.groups()
        order = (dim & -dim) if hadamard else 0  # the largest power of two that divides D
        kind = "block_hadamard" if hadamard else "identity"
        scheme = self.scheme(rule, int(bits), int(group or dim))
        if dim % scheme.group_size:
            raise usage(f"--scheme: groups of {scheme.group_size} do not divide heads of {dim} channels")
        return SidePlan((scheme,), kind, "layer", "H" if hadamard else "I", order, dim, {})

    def scheme(self, rule: str, bits: int, group_size: int) -> Scheme:
        if rule in ("affine", "integer"):
            zero = "float" if rule == "affine" else "integer"
            return Scheme("affine", bits, group_size, self.scale_type, "minmax", zero)
        return Scheme("symmetric", bits, group_size, self.scale_type, rule)
