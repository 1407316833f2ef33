"""Schemes that need no calibration, by name. The names are those of `kvq-eval --scheme` (formats/eval.md):

    bf16, fp8, fp8-head, fp8-unscaled, nvfp4, saw-int4
    naive-int<b>, quarot-int<b>, symmetric-norm-<b>, tq-mse-<b>, turboquant-qjl-<b>, kivi-<b>, kivi-scale-only-<b>

<b> is 1 to 8 bits; kivi, kivi-scale-only and turboquant-qjl mean 2 bits without it; kivi-<b>-r<n> has a residual of n
tokens; the suffix -k leaves values exact. Names of this package alone, for checks against an artifact or a table:

    exact                     nothing is coded
    affine2, integer4         affine min-max codes of 2 and 4 bits, float and integer zero; affine<b> is naive-int<b>
    norm2, least_squares3, absmax8
    hadamard-affine2g64       after a Hadamard rotation of the whole head, in groups of 64 channels

Scales are fp16; a group is the whole head unless `g` says otherwise. Where a scheme's scale is that of the data, the
data are the rows of one layer and side of the sequence at hand.
"""

import re
from dataclasses import dataclass

from .artifact import SidePlan
from .errors import usage
from .scheme import EXACT_BITS, Scheme
from .suggestion import nearest_name

KIVI_RESIDUAL = 128  # tokens, as published
RULES = re.compile(r"(hadamard-)?(affine|integer|absmax|least_squares|norm)([1-8])(?:g([1-9]\d*))?")


@dataclass(frozen=True)
class Named:
    """What a name says."""

    family: str  # a key of FAMILIES, `exact`, or `rules`
    bits: int = EXACT_BITS
    residual: int = 0  # tokens that KIVI keeps exact
    keys_only: bool = False
    rule: str = ""
    hadamard: bool = False
    group: int = 0  # 0: the head


@dataclass(frozen=True)
class Place:
    """The side that is stored."""

    layer: int
    side: str
    dim: int
    scale_type: str

    @property
    def hadamard_order(self) -> int:
        """The largest power of two that divides D."""
        return self.dim & -self.dim

    def affine(self, bits: int) -> Scheme:
        return Scheme("affine", bits, self.dim, self.scale_type, "minmax", "float")

    def plan(self, scheme: Scheme, order: int = 0) -> SidePlan:
        """Rows as they are, or after Hadamard blocks of this order."""
        kind = "block_hadamard" if order else "identity"
        return SidePlan((scheme,), kind, "layer", "H" if order else "I", order, self.dim, {})


def bf16(at: Place, of: Named):
    return at.plan(Scheme("exact", EXACT_BITS))


def fp8(scale: str):
    def make(at: Place, of: Named):
        from .torch_schemes import Fp8

        return Fp8(at.dim, scale)

    return make


def nvfp4(at: Place, of: Named):
    from .torch_schemes import Nvfp4

    return Nvfp4(at.dim)


def naive(at: Place, of: Named):
    return at.plan(at.affine(of.bits))


def quarot(at: Place, of: Named):
    return at.plan(at.affine(of.bits), at.hadamard_order)


def saw_int4(at: Place, of: Named):
    return at.plan(at.affine(4), min(128, at.hadamard_order) if at.side == "k" else 0)


def symmetric_norm(at: Place, of: Named):
    return at.plan(Scheme("symmetric", of.bits, at.dim, at.scale_type, "norm"), at.hadamard_order)


def tq_mse(at: Place, of: Named):
    import numpy as np

    from .random_matrices import haar_matrix, stream_of
    from .sphere_codebook import sphere_codebook

    table = tuple(np.float32(sphere_codebook(of.bits, at.dim)).tolist())
    scheme = Scheme("codebook", of.bits, at.dim, at.scale_type, "norm", codebook=table)
    rotation = haar_matrix(at.dim, 0, at.layer, stream_of(0, at.side)).astype(np.float32)
    return SidePlan((scheme,), "dense", "layer", "Haar", 0, at.dim, {"rotation": rotation[None]})


def turboquant_qjl(at: Place, of: Named):
    from .torch_schemes import QjlKeys

    return QjlKeys(at.dim, of.bits, at.layer) if at.side == "k" else tq_mse(at, of)


def kivi(at: Place, of: Named):
    from .torch_schemes import KiviKeys, KiviValues

    return KiviKeys(at.dim, of.bits) if at.side == "k" else KiviValues(at.dim, of.bits)


def kivi_scale_only(at: Place, of: Named):
    from .torch_schemes import KiviKeys

    return KiviKeys(at.dim, of.bits, scale_only=True) if at.side == "k" else tq_mse(at, of)


def by_rule(at: Place, of: Named):
    group = of.group or at.dim
    if at.dim % group:
        raise usage(f"--scheme: groups of {group} do not divide heads of {at.dim} channels")
    if of.rule in ("affine", "integer"):
        zero = "float" if of.rule == "affine" else "integer"
        scheme = Scheme("affine", of.bits, group, at.scale_type, "minmax", zero)
    else:
        scheme = Scheme("symmetric", of.bits, group, at.scale_type, of.rule)
    return at.plan(scheme, at.hadamard_order if of.hadamard else 0)


@dataclass(frozen=True)
class Family:
    make: object  # (Place, Named) -> SidePlan or a coder of torch_schemes.py
    fixed_bits: int = 0
    default_bits: int = 0  # if the name omits the bits; 0: the name must have them
    has_residual: bool = False


# The registry of kvq-eval: tests/cli/test_scheme_names.py compares the two lists.
FAMILIES = {
    "bf16": Family(bf16, fixed_bits=16),
    "fp8": Family(fp8("tensor"), fixed_bits=8),
    "fp8-head": Family(fp8("head"), fixed_bits=8),
    "fp8-unscaled": Family(fp8("one"), fixed_bits=8),
    "nvfp4": Family(nvfp4, fixed_bits=4),
    "naive-int<b>": Family(naive),
    "quarot-int<b>": Family(quarot),
    "saw-int4": Family(saw_int4, fixed_bits=4),
    "symmetric-norm-<b>": Family(symmetric_norm),
    "tq-mse-<b>": Family(tq_mse),
    "turboquant-qjl-<b>": Family(turboquant_qjl, default_bits=2),
    "kivi-<b>": Family(kivi, default_bits=2, has_residual=True),
    "kivi-scale-only-<b>": Family(kivi_scale_only, default_bits=2),
}


def parse_name(name: str) -> Named:
    """What a name says. Raises for a name that no family has."""
    if name == "exact":
        return Named("exact")
    if rules := RULES.fullmatch(name):
        hadamard, rule, bits, group = rules.groups()
        return Named("rules", int(bits), rule=rule, hadamard=bool(hadamard), group=int(group or 0))
    keys_only = name.endswith("-k")
    stem = name.removesuffix("-k")
    for pattern, family in FAMILIES.items():
        if found := _match(pattern, family, stem):
            bits, residual = found
            return Named(pattern, bits, residual, keys_only)
    raise usage(f'--scheme: unknown "{name}"', _hint(stem))


def _hint(stem: str) -> str:
    """In the words of kvq-eval, whose names come before those of this package."""
    if nearest := nearest_name(stem, scheme_names()) or nearest_name(stem, own_names()):
        return f"did you mean {nearest}? kvq-eval --help lists all schemes"
    return (
        f"choose one of {', '.join(FAMILIES)}; <b> is 1 to 8, -r32 behind kivi-<b> sets its residual (a multiple of "
        "32), the suffix -k codes keys only"
    )


def _match(pattern: str, family: Family, name: str) -> tuple[int, int] | None:
    """(bits, residual)"""
    if family.fixed_bits:
        return (family.fixed_bits, 0) if name == pattern else None
    stem = re.escape(pattern.removesuffix("<b>"))
    residual = r"(?:-r([1-9]\d{1,4}))?" if family.has_residual else "()"
    found = re.fullmatch(f"{stem}([1-8]){residual}", name)
    if not found and family.default_bits:
        found = re.fullmatch(f"{stem.removesuffix(re.escape('-'))}(){residual}", name)
    if not found:
        return None
    tokens = int(found[2] or KIVI_RESIDUAL) if family.has_residual else 0
    return None if tokens % 32 or tokens > 65536 else (int(found[1] or family.default_bits), tokens)


def scheme_names() -> list[str]:
    """All names of kvq-eval without a residual and the suffix -k."""
    names = []
    for pattern in FAMILIES:
        if "<b>" not in pattern:
            names.append(pattern)
        else:
            names += [pattern.replace("<b>", str(bits)) for bits in range(1, 9)]
    return names


def own_names() -> list[str]:
    """All names of this package alone, without a group size."""
    words = ("affine", "integer", "absmax", "least_squares", "norm")
    rules = [f"{rule}{bits}" for rule in words for bits in range(1, 9)]
    return ["exact", *rules, *(f"hadamard-{rule}" for rule in rules)]


class BuiltinPlans:
    """`plan_of` for CodedAttention: one scheme for all layers and both sides.

    `own_windows` has the tokens that the scheme keeps exact on each side, or is None. with_windows=False codes them."""

    def __init__(self, name: str, sides: str = "kv", unrounded_metadata: bool = False, with_windows: bool = True):
        self.named = parse_name(name)
        self.sides = sides.replace("v", "") if self.named.keys_only else sides
        self.scale_type = "fp32" if unrounded_metadata else "fp16"
        self.own_windows = None
        if with_windows and (residual := self.named.residual):
            from .coded_attention import Windows

            # Keys are quantized `residual` at a time, after the query of the last one has read them.
            self.own_windows = {"k": Windows(0, 1, residual), "v": Windows(0, residual + 1)}

    def __call__(self, layer: int, side: str, kv_heads: int, dim: int):
        """A SidePlan, a coder of torch_schemes.py, or None for what stays exact."""
        if self.named.family == "exact" or side not in self.sides:
            return None
        at = Place(layer, side, dim, self.scale_type)
        if self.named.family == "rules":
            return by_rule(at, self.named)
        return FAMILIES[self.named.family].make(at, self.named)
