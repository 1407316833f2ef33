"""The parameters of formats/packing.md, without numbers: shared by the numpy and the PyTorch codec."""

from dataclasses import dataclass

SCALE_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
SYMMETRIC_RULES = ("absmax", "least_squares", "norm")
ZERO_KINDS = ("float", "integer")
EXACT_BITS = 16

# step[b] of packing.md, b = 1 .. 8; the nearest binary32 values decide.
GAUSSIAN_STEP = (None, 1.5957691, 0.9956867, 0.58601946, 0.3352006, 0.18813878, 0.10406301, 0.056867674, 0.030762387)


@dataclass(frozen=True)
class Scheme:
    """How one row is coded. `zero` is None for symmetric codes; an exact row has nothing but `coder` and `bits`."""

    coder: str
    bits: int
    group_size: int = 0
    scale_type: str = "fp16"
    scale_rule: str = "minmax"
    zero: str | None = None
    clip_ratio: float = 1.0

    def __post_init__(self):
        fault = self._fault()
        if fault:
            raise ValueError(fault)

    def _fault(self) -> str | None:
        if self.coder == "exact":
            return None if self.bits == EXACT_BITS else f"exact rows have bits {EXACT_BITS}, found {self.bits}"
        if self.coder not in ("affine", "symmetric"):
            return f"coder: expected exact, affine or symmetric, found '{self.coder}'"
        if not 1 <= self.bits <= 8:
            return f"bits: expected 1 to 8, found {self.bits}"
        if self.group_size < 1:
            return f"group_size: expected at least 1, found {self.group_size}"
        if self.scale_type not in SCALE_BYTES:
            return f"scale_type: expected {', '.join(SCALE_BYTES)}, found '{self.scale_type}'"
        rules = ("minmax",) if self.coder == "affine" else SYMMETRIC_RULES
        if self.scale_rule not in rules:
            return f"scale_rule of {self.coder} codes: expected {' or '.join(rules)}, found '{self.scale_rule}'"
        if self.zero not in (ZERO_KINDS if self.coder == "affine" else (None,)):
            return f"zero of {self.coder} codes: found '{self.zero}'"
        if not 0 < self.clip_ratio <= 1:
            return f"clip_ratio: expected more than 0 and at most 1, found {self.clip_ratio}"
        return None

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
        return {"exact": 0, "symmetric": 1, "affine": 2}[self.coder]

    def code_bytes(self, dim: int) -> int:
        return (dim * self.bits + 7) // 8

    def row_bytes(self, dim: int) -> int:
        """Size of a packed row."""
        numbers = self.groups(dim) * self.numbers_per_group()
        return self.code_bytes(dim) + numbers * (SCALE_BYTES[self.scale_type] if numbers else 0)

    def clip_index(self, dim: int) -> int | None:
        """Index of tau among the row's ascending magnitudes; None if nothing is clipped."""
        if self.scale_rule != "minmax" or self.clip_ratio == 1 or self.coder == "exact":
            return None
        return min(int(self.clip_ratio * dim), dim - 1)  # the product is a binary64, and not negative
