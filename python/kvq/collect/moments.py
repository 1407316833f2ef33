"""Second moments of rows: sums of outer products, float64 on the device of the rows.

Products of float64 are exact to 1e-16. A moment is a sum, never a mean, so that statistics merge by addition.
"""

import torch

# Rows that are widened to float64 at a time, over all heads.
BLOCK_ROWS = 1 << 14


def heads_first(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[n, H, D] -> [Hkv, n * H / Hkv, D], rows by token, then head: query heads of a group lie together."""
    tokens, heads, dim = x.shape
    grouped = x.reshape(tokens, kv_heads, heads // kv_heads, dim).transpose(0, 1)
    return grouped.reshape(kv_heads, -1, dim)


class Moment:
    """sum of w x^T x [Hkv, D, D], sum of w x [Hkv, D] and sum of w [Hkv], float64."""

    def __init__(self, kv_heads: int, dim: int, device: torch.device):
        self._sum = torch.zeros(kv_heads, dim, dim, dtype=torch.float64, device=device)
        self.first = torch.zeros(kv_heads, dim, dtype=torch.float64, device=device)
        self.weight = torch.zeros(kv_heads, dtype=torch.float64, device=device)

    @property
    def sum(self) -> torch.Tensor:
        """Symmetric to the last bit, which products are not."""
        return (self._sum + self._sum.transpose(1, 2)) / 2

    def add(self, rows: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """rows [Hkv, n, D]; weights float64 [Hkv, n], not negative; None: 1"""
        step = max(1, BLOCK_ROWS // len(rows))
        for begin in range(0, rows.shape[1], step):
            x = rows[:, begin : begin + step].double()
            w = x.new_ones(x.shape[:2]) if weights is None else weights[:, begin : begin + step]
            weighted = x if weights is None else x * w[..., None]
            self._sum.baddbmm_(weighted.transpose(1, 2), x)
            self.first += (w[:, None] @ x)[:, 0]
            self.weight += w.sum(1)
