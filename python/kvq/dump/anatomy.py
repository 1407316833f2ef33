"""How the attention of one layer makes q and k from the output of its projections.

Models name their parts differently and put them in another order. What stays is: a projection (of its own, or one for
q, k and v together), perhaps a norm in front of RoPE or behind it, and RoPE on pairs of channels, or none. An Anatomy
says which of these a layer has; survey.py finds it out, and the validators redo q and k by it.
"""

import copy
from dataclasses import dataclass, field

import numpy as np
import torch

from .placement import linear_weight
from .rope import RopeSource, change_layout, rotate

QUERY_PROJECTIONS = ("q_b_proj", "q_proj", "query", "wq", "q_lin")
KEY_PROJECTIONS = ("kv_a_proj_with_mqa", "k_proj", "key", "wk", "k_lin")
FUSED_PROJECTIONS = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "wqkv", "att_proj")
OUTPUT_PROJECTIONS = ("o_proj", "dense", "out_proj", "c_proj", "wo", "out_lin", "attn_out")
NORMS = {
    "q": ("q_norm", "q_layernorm", "query_layernorm", "query_norm", "qk_norm"),
    "k": ("k_norm", "k_layernorm", "key_layernorm", "key_norm", "qk_norm"),
}


def part_of(attention, names: tuple[str, ...]) -> torch.nn.Module | None:
    """The first part of an attention module that has one of these names."""
    found = (getattr(attention, name, None) for name in names)
    return next((part for part in found if isinstance(part, torch.nn.Module)), None)


def find_projections(attention) -> dict[str, torch.nn.Module]:
    """{"q": module, "k": module}; one module for both if q, k and v have one projection; empty if there are none."""
    query, key = part_of(attention, QUERY_PROJECTIONS), part_of(attention, KEY_PROJECTIONS)
    fused = part_of(attention, FUSED_PROJECTIONS)
    if query is not None and key is not None:
        return {"q": query, "k": key}
    return {} if fused is None else {"q": fused, "k": fused}


def find_norms(attention) -> dict[str, torch.nn.Module]:
    found = {tensor: part_of(attention, names) for tensor, names in NORMS.items()}
    return {tensor: norm for tensor, norm in found.items() if norm is not None}


def output_weight(attention, dtype: torch.dtype) -> np.ndarray | None:
    """The output projection, float32 [hidden, Hq * Dv], row = output channel; None if there is none by a known name.
    The weight of a quantized or offloaded projection is computed in `dtype`."""
    projection = part_of(attention, OUTPUT_PROJECTIONS)
    weight = getattr(projection, "weight", None)
    if weight is None or weight.ndim != 2:
        return None
    # GPT-2's Conv1D stores the weight the other way round.
    weight = weight.detach().T if type(projection).__name__ == "Conv1D" else linear_weight(projection, dtype)
    return weight.float().cpu().numpy()


# Where q or k lies in a projection's output: the first or the last channels of each head; one after the other (all of
# q, then k, then v); or group by group (the queries of a KV head, its key, its value).
CUTS = ("first", "last", "sequence", "group")


def cut_heads(how: str, tensor: str, x: np.ndarray, heads: tuple[int, int], dim: int) -> np.ndarray | None:
    """q or k [n, H, dim] from a projection's output x [n, C]; None if the channels cannot lie so. heads: (Hq, Hkv)"""
    queries, keys = heads
    own, tokens, channels = (queries if tensor == "q" else keys), len(x), x.shape[1]
    if how in ("first", "last"):
        if channels % own or channels // own < dim:
            return None
        per_head = x.reshape(tokens, own, -1)
        return per_head[..., :dim] if how == "first" else per_head[..., -dim:]
    if how == "sequence":
        first = 0 if tensor == "q" else queries * dim
        return x[:, first : first + own * dim].reshape(tokens, own, dim) if channels >= first + own * dim else None
    group = queries // keys
    if channels != (queries + 2 * keys) * dim:
        return None
    groups = x.reshape(tokens, keys, group + 2, dim)
    return (groups[:, :, :group] if tensor == "q" else groups[:, :, group : group + 1]).reshape(tokens, own, dim)


def plain_copy(module: torch.nn.Module) -> torch.nn.Module:
    """A copy in CPU memory without hooks. accelerate's hook moves inputs to the module's device, and weights that it
    keeps elsewhere between calls."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        hook.pre_forward(module)
    try:
        copied = copy.deepcopy(module, {id(hook): None})  # the hook may hold the weights of the whole model
    finally:
        if hook is not None:
            hook.post_forward(module, None)
    for part in copied.modules():
        for name in ("_hf_hook", "_old_forward", "forward"):  # what accelerate sets
            part.__dict__.pop(name, None)
        part._forward_hooks.clear()
    return copied.cpu()


class Norm:
    """A QK-norm: the model's own module, copied to float64, on heads in the arrangement in which the model calls it."""

    def __init__(self, module: torch.nn.Module, input_shape: tuple[int, ...], tokens: int):
        self.module = plain_copy(module).double()
        self.flat = len(input_shape) == 3
        self.heads_first = len(input_shape) == 4 and input_shape[2] == tokens and input_shape[1] != tokens

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """x float64 [n, H, D] -> the same"""
        heads = torch.from_numpy(np.ascontiguousarray(x))[None]
        shape = heads.shape
        with torch.no_grad():
            if self.flat:
                return self.module(heads.flatten(2)).reshape(shape)[0].double().numpy()
            if self.heads_first:
                return self.module(heads.transpose(1, 2)).transpose(1, 2)[0].double().numpy()
            return self.module(heads)[0].double().numpy()


@dataclass(frozen=True)
class Anatomy:
    """One layer's way from the projections' output to q and k.

    cuts          "q"/"k" -> one of CUTS
    norms         "q"/"k" -> Norm, where the layer has QK-norm
    norm_is_last  RoPE comes before the norm
    layout        of rotary pairs in q and k; "none": the layer has no RoPE
    moved_from    layout in the projections' output, if RoPE moves the pairs; None: they stay in place
    rope          where the frequencies are; None for "none"
    gains         "q"/"k" -> a constant factor behind the projection (the key multiplier of Falcon-H1), if it is not 1
    plain_output  the output projection takes attention's output as it is, without a gate or a norm between
    """

    attention: torch.nn.Module
    projections: dict[str, torch.nn.Module]
    cuts: dict[str, str] = field(default_factory=dict)
    norms: dict[str, Norm] = field(default_factory=dict)
    norm_is_last: bool = False
    layout: str = "none"
    moved_from: str | None = None
    rope: RopeSource | None = None
    gains: dict[str, float] = field(default_factory=dict)
    plain_output: bool = True

    def before_rope(self, tensor: str, projected: np.ndarray, heads: tuple[int, int], dim: int) -> np.ndarray:
        """q or k [n, H, dim] in front of RoPE, behind a norm that stands there, from the projection's output [n, C]."""
        x = self.gains.get(tensor, 1.0) * cut_heads(self.cuts[tensor], tensor, projected, heads, dim)
        return self.norms[tensor](x) if tensor in self.norms and not self.norm_is_last else x

    def behind_rope(
        self, tensor: str, x: np.ndarray, positions: np.ndarray, inv_freq: np.ndarray, factor: float, layout: str
    ) -> np.ndarray:
        """What enters attention, if pairs lie as `layout` says, from the result of before_rope()."""
        x = change_layout(x, 2 * len(inv_freq), 0, self.moved_from or layout, layout)
        x = rotate(x, positions, inv_freq, layout, factor)
        return self.norms[tensor](x) if tensor in self.norms and self.norm_is_last else x
