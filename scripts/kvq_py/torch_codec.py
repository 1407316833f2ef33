"""formats/packing.md in PyTorch, for running a model on what its codes give back. Equal to packing.py bit for bit.

Only elementwise operations are used, each of them one binary32 operation; sums go through `tree_sum`. No bytes are made
here: packing.py does that, and packing is exact.

Shapes: N rows of D channels, G groups of g channels.
"""

import torch

from .scheme import GAUSSIAN_STEP, Scheme

LARGEST = torch.finfo(torch.float32).max
STORED_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def number(value: float, like: torch.Tensor) -> torch.Tensor:
    """A binary32 scalar on the device of `like`.

    Dividing by a Python number is a product with its reciprocal in some CUDA kernels, and the number itself a binary64.
    """
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def round_to(x: torch.Tensor, scale_type: str) -> torch.Tensor:
    """R(x), widened again to float32."""
    dtype = STORED_DTYPES[scale_type]
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype).float()


def square_root(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded, which torch.sqrt on float32 is not: it may call a vector library that errs by one unit.

    The root of a binary32 stays at least 2^-51 of itself away from a rounding edge, so a binary64 root, even one unit
    off, rounds to the right binary32.
    """
    return x.double().sqrt().float()


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Sums the last axis in the order of packing.md: neighbours first, zeros pad to a power of two."""
    size = x.shape[-1]
    x = torch.nn.functional.pad(x, (0, (1 << (size - 1).bit_length()) - size))
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def clip_rows(x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """x [N, D] within the threshold of each row."""
    index = scheme.clip_index(x.shape[1])
    if index is None:
        return x
    threshold = x.abs().kthvalue(index + 1, dim=1, keepdim=True).values
    return torch.minimum(torch.maximum(x, -threshold), threshold)


def divide(x: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """x / divisor; groups whose divisor is 0 get x, and their codes are decided otherwise."""
    return x / torch.where(divisor == 0, torch.ones_like(divisor), divisor)


def affine(x: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """x [N, G, g] -> (codes float32 [N, G, g], [scale, minimum or zero point], each [N, G, 1])"""
    lowest, highest = x.amin(2, keepdim=True), x.amax(2, keepdim=True)
    extent = (highest - lowest).clamp(max=LARGEST) + 0.0  # -0 + 0 = +0: it does not matter which zeros were found
    scale = round_to(extent / number(scheme.top, x), scheme.scale_type)
    if scheme.zero == "float":
        second = round_to(lowest, scheme.scale_type) + 0.0
        codes = torch.floor(divide(x - second, scale) + 0.5)
    else:
        second = round_to(torch.floor(divide(-lowest, scale) + 0.5), scheme.scale_type)
        second = torch.where(scale == 0, torch.zeros_like(second), second)
        codes = torch.floor(divide(x, scale) + 0.5) + second
    return torch.where(scale == 0, torch.zeros_like(codes), codes.clamp(0, scheme.top)), [scale, second]


def symmetric(x: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """x [N, G, g] -> (codes float32 [N, G, g], [scale [N, G, 1]])"""
    if scheme.scale_rule == "absmax":
        first = round_to(2.0 * x.abs().amax(2, keepdim=True) / number(scheme.top, x), scheme.scale_type)
    else:
        energy = tree_sum(x * x).unsqueeze(2)
        deviation = square_root(energy / number(x.shape[2], x))
        first = round_to(number(GAUSSIAN_STEP[scheme.bits], x) * deviation, scheme.scale_type)
    middle = 2 ** (scheme.bits - 1)
    codes = (torch.floor(divide(x, first)) + middle).clamp(0, scheme.top)
    codes = torch.where(first == 0, torch.full_like(codes, middle), codes)
    if scheme.scale_rule == "absmax":
        return codes, [first]
    scale = round_to(refit(x, codes, energy, scheme), scheme.scale_type)
    return codes, [torch.where(first == 0, torch.zeros_like(scale), scale)]


def refit(x: torch.Tensor, codes: torch.Tensor, energy: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """The stored scale of `least_squares` and `norm` before R, [N, G, 1]."""
    level = 2 * codes - scheme.top
    norm = level.long().square().sum(2, keepdim=True).float()
    if scheme.scale_rule == "least_squares":
        return 2.0 * tree_sum(x * level).unsqueeze(2) / norm
    return square_root(4.0 * energy / norm)


def encode(x: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes finite rows x [N, D] float32, affine or symmetric.

    returns (codes uint8 [N, D], numbers float32 [N, G * (1 or 2)] in the order of the bytes)
    """
    groups = clip_rows(x, scheme).reshape(len(x), scheme.groups(x.shape[1]), scheme.group_size)
    codes, numbers = (affine if scheme.coder == "affine" else symmetric)(groups, scheme)
    return codes.reshape(x.shape).to(torch.uint8), torch.cat(numbers, dim=1).squeeze(2)


def decode(codes: torch.Tensor, numbers: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """x_hat, float32 [N, D]."""
    count, dim = codes.shape
    groups = scheme.groups(dim)
    code = codes.reshape(count, groups, scheme.group_size).float()
    scale, *second = numbers.reshape(count, -1, groups, 1).unbind(1)
    if scheme.coder == "symmetric":
        x = scale * ((2 * code - scheme.top) * 0.5)
    elif scheme.zero == "integer":
        x = (code - second[0]) * scale
    else:
        x = code * scale + second[0]
    return x.reshape(count, dim)


def fake_quantize(x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """What the codes of x [N, D] give back."""
    if scheme.coder == "exact":
        return round_to(x, "bf16")
    return decode(*encode(x, scheme), scheme)
