"""Schemes whose rows no plan of an artifact describes (formats/eval.md, "Built-in schemes"), in PyTorch: fp8, nvfp4,
KIVI and TurboQuant with a QJL bit.

A coder has `reconstruct(x)`, x [Hkv, T, D] float32 of one sequence -> the rows as they are read back, and `row_bytes`,
bytes of a row without what many rows share."""

import math
from dataclasses import dataclass

import torch

from .random_matrices import QJL, gaussian_matrix, haar_matrix, stream_of
from .sphere_codebook import sphere_codebook
from .torch_codec import number, round_to

GROUP = 32  # tokens of a channel, or channels of a token, in KIVI


@dataclass(frozen=True)
class SmallFloat:
    """A floating-point format without infinities; beyond the largest number everything becomes the largest number."""

    mantissa_bits: int
    least_exponent: int
    largest: float

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """The nearest number of the format, of two equally near ones that with an even mantissa."""
        _, exponent = torch.frexp(x)  # x = m 2^exponent with m in [1/2, 1)
        shift = self.mantissa_bits - (exponent - 1).clamp(min=self.least_exponent)
        return torch.ldexp(torch.round(torch.ldexp(x, shift)), -shift).clamp(-self.largest, self.largest)


E4M3 = SmallFloat(3, -6, 448.0)
E2M1 = SmallFloat(1, 0, 6.0)


def where_positive(condition: torch.Tensor, value: torch.Tensor, other: float) -> torch.Tensor:
    return torch.where(condition > 0, value, torch.full_like(value, other))


@dataclass(frozen=True)
class Fp8:
    """e4m3 with one scale for all heads ("tensor"), one for each head ("head"), or scale 1 ("one")."""

    dim: int
    scale: str

    @property
    def row_bytes(self) -> int:
        return self.dim

    def reconstruct(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale == "one":
            return E4M3.round(x)
        largest = x.abs().amax((1, 2), keepdim=True)
        if self.scale == "tensor":
            largest = largest.amax(0, keepdim=True)
        scale = largest / number(E4M3.largest, x)
        scale = where_positive(scale, scale, 1.0)
        return E4M3.round(x / scale) * scale


@dataclass(frozen=True)
class Nvfp4:
    """e2m1 with an e4m3 scale for each 16 channels and a binary32 scale for all heads."""

    dim: int
    BLOCK = 16

    @property
    def row_bytes(self) -> int:
        return (self.dim + 1) // 2 + math.ceil(self.dim / self.BLOCK)

    def reconstruct(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax() / number(E4M3.largest * E2M1.largest, x)
        if not scale > 0:
            return torch.zeros_like(x)
        padding = -self.dim % self.BLOCK
        blocks = torch.nn.functional.pad(x, (0, padding)).unflatten(2, (-1, self.BLOCK))
        largest = blocks.abs().amax(3, keepdim=True)
        step = E4M3.round(largest / number(E2M1.largest, x) / scale) * scale
        coded = E2M1.round(blocks / where_positive(step, step, 1.0)) * step
        return coded.flatten(2)[:, :, : self.dim]


@dataclass(frozen=True)
class KiviKeys:
    """Affine groups of 32 tokens of a channel; the last group may be smaller."""

    dim: int
    bits: int
    scale_only: bool = False  # the range of a group is that of the group before

    @property
    def row_bytes(self) -> float:
        return self.dim * (self.bits / 8 + 4 / GROUP)

    def reconstruct(self, x: torch.Tensor) -> torch.Tensor:
        columns = x.transpose(1, 2)  # [Hkv, D, T]
        groups, before = [], None
        for first in range(0, x.shape[1], GROUP):
            group = columns[:, :, first : first + GROUP]
            ranged = group if before is None or not self.scale_only else before
            groups.append(in_range(group, ranged, self.bits))
            before = group
        return torch.cat(groups, dim=2).transpose(1, 2)


def in_range(x: torch.Tensor, ranged: torch.Tensor, bits: int) -> torch.Tensor:
    """x with the affine codes that the minimum and the maximum of `ranged` over its last axis give, fp16 numbers."""
    top = number(2**bits - 1, x)
    lowest = ranged.amin(-1, keepdim=True)
    scale = round_to((ranged.amax(-1, keepdim=True) - lowest) / top, "fp16")
    lowest = round_to(lowest, "fp16") + 0.0
    codes = torch.floor((x - lowest) / where_positive(scale, scale, 1.0) + 0.5).clamp(0, 2**bits - 1)
    return torch.where(scale > 0, codes * scale, torch.zeros_like(x)) + lowest


@dataclass(frozen=True)
class KiviValues:
    """Affine groups of 32 channels of a token; the last group may be smaller."""

    dim: int
    bits: int

    @property
    def row_bytes(self) -> float:
        return self.dim * self.bits / 8 + 4 * math.ceil(self.dim / GROUP)

    def reconstruct(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([in_range(part, part, self.bits) for part in x.split(GROUP, dim=2)], dim=2)


@dataclass(frozen=True)
class QjlKeys:
    """TurboQuant for inner products (arXiv 2504.19874, Algorithm 2): b - 1 bits and a QJL sign bit of the rest."""

    dim: int
    bits: int
    layer: int
    seed: int = 0

    @property
    def row_bytes(self) -> float:
        return self.dim * self.bits / 8 + 4

    def reconstruct(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self._head(rows, head) for head, rows in enumerate(x)])

    def _matrices(self, head: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stream = stream_of(head, "k")
        pair = (
            haar_matrix(self.dim, self.seed, self.layer, stream),
            gaussian_matrix(self.dim, self.seed, QJL, self.layer, stream),
        )
        return tuple(torch.from_numpy(matrix).to(like) for matrix in pair)

    def _head(self, x: torch.Tensor, head: int) -> torch.Tensor:
        rotation, sketch = self._matrices(head, x)
        length = x.double().norm(dim=1, keepdim=True)
        y = (x.double() / torch.where(length > 0, length, torch.ones_like(length))).float() @ rotation
        coded = self._nearest(y)
        rest = y - coded
        kept = round_to(rest.double().norm(dim=1, keepdim=True).float(), "fp16")
        factor = (kept.double() * math.sqrt(math.pi / 2) / self.dim).float()
        coded = coded + torch.where(rest @ sketch < 0, -factor, factor) @ sketch.T
        return round_to(length.float(), "fp16") * coded @ rotation.T

    def _nearest(self, y: torch.Tensor) -> torch.Tensor:
        if self.bits == 1:
            return torch.zeros_like(y)
        entries = torch.tensor(sphere_codebook(self.bits - 1, self.dim), dtype=torch.float64) / math.sqrt(self.dim)
        entries = entries.float().to(y.device)
        return entries[torch.bucketize(y, (entries[1:] + entries[:-1]) * 0.5, right=True)]
