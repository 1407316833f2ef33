"""Captures q, k and v where they enter attention.

Projections are the wrong place: QK-norm and RoPE come after them, and a collector that forgets either calibrates
on tensors no cache ever holds. transformers 5 routes every attention layer through one interface,

    interface(module, query, key, value, attention_mask, scaling=..., sliding_window=..., ...)

called after norm, RoPE and the cache update, before the KV heads are repeated. We register our own function there: it
runs the ordinary SDPA attention and writes what went in, with the scale and the window that the model really uses.

Beside that, hooks keep the projections' output of a few tokens, and attention's output of fewer. The validators redo
norm, RoPE and attention on those by hand, and compare with the finished file.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..errors import EXIT_UNSUPPORTED, KvqError
from .array_writer import LayerFacts
from .families import Family
from .placement import execution_device
from .progress import Progress
from .rope import read_rope
from .writer import DumpWriter

INTERFACE_NAME = "kvq_dump"
# Further terms of the logits that some models pass to the attention interface. A dump has no field for them.
FOREIGN_TERMS = {
    "softcap": "attention logit soft-capping",
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
}


@dataclass
class NormFacts:
    """A QK-norm: y = x / sqrt(mean(x^2) + epsilon) * weight, over the head dimension. weight float64 [D]."""

    weight: np.ndarray
    epsilon: float


@dataclass(frozen=True)
class WitnessRows:
    """Rows of the dump for which witnesses are kept: sorted int64 arrays."""

    projected: np.ndarray
    outputs: np.ndarray


@dataclass
class Witness:
    """Reference data of one layer, for the validators.

    norms  "q"/"k" -> NormFacts, where the model has QK-norm
    kept   float64, one entry for each of the WitnessRows: "q"/"k" the projections' output [n, channels], "output"
           that of attention [n, Hq, Dv]. Each array is allocated once, at its first token, because small arrays that
           outlive a forward pass would fragment the heap between its large arrays, and memory would grow with every
           prompt.
    """

    norms: dict[str, NormFacts] = field(default_factory=dict)
    kept: dict[str, np.ndarray] = field(default_factory=dict)

    def keep(self, name: str, rows: np.ndarray, first_row: int, x: torch.Tensor) -> None:
        """Keeps the rows of x [n, ...] that are in `rows`. The first token of x is row `first_row` of the dump."""
        inside = np.flatnonzero((rows >= first_row) & (rows < first_row + len(x)))
        if name not in self.kept:
            self.kept[name] = np.zeros((len(rows), *x.shape[1:]))
        self.kept[name][inside] = x[rows[inside] - first_row].double().cpu().numpy()


def choose_witness_rows(cu_seqlens: np.ndarray, most_projected: int = 64, most_outputs: int = 3) -> WitnessRows:
    """Chooses witness rows: rows spread over the dump for the projections, and the ends of sequences, which have the
    longest past, for attention."""
    last = int(cu_seqlens[-1]) - 1
    projected = np.unique(np.linspace(0, last, most_projected).astype(np.int64))
    ends = cu_seqlens[1:] - 1
    chosen = np.unique(np.linspace(0, len(ends) - 1, most_outputs).astype(np.int64))
    return WitnessRows(projected, ends[chosen])


class Recorder:
    """Attached to a model; writes the attention inputs of each forward pass to a DumpWriter.

    `row` is the dump's row for the first token of the next forward pass; None: the pass is not recorded.
    """

    def __init__(
        self, model, family: Family, writer: DumpWriter, layers: list[int], rows: WitnessRows, progress: Progress
    ):
        self.model, self.family, self.writer = model, family, writer
        self.rows, self.progress = rows, progress
        self.witnesses = {layer: Witness() for layer in layers}
        self.row: int | None = None
        self._hooks = []

    def __enter__(self):
        self._previous = self.model.config._attn_implementation
        AttentionInterface.register(INTERFACE_NAME, self.attend)
        AttentionMaskInterface.register(INTERFACE_NAME, sdpa_mask)
        self.model.set_attn_implementation(INTERFACE_NAME)
        for layer in self.witnesses:
            self._watch(layer, self.attention_module(layer))
        return self

    def __exit__(self, *_):
        for hook in self._hooks:
            hook.remove()
        self.model.set_attn_implementation(self._previous)

    def attention_module(self, layer: int) -> torch.nn.Module:
        return self.model.base_model.layers[layer].self_attn

    def attend(self, module, query, key, value, attention_mask, **kwargs):
        """The registered interface. query [1, Hq, n, D]; key, value [1, Hkv, past + n, D or Dv]."""
        refuse_foreign_terms(module, kwargs)
        output, weights = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        if self.row is not None:
            if module.layer_idx in self.witnesses:
                self._record(module, query, key, value, output, kwargs)
            self.progress.advance(query.shape[2])
        return output, weights

    def _record(self, module, query, key, value, output, kwargs) -> None:
        layer = module.layer_idx
        tensors = attention_inputs(self.family, module, query, key, value)
        facts = self._facts(module, tensors, value.shape[-1], query.shape[-1], kwargs)
        self.writer.append(layer, facts, self.row, tensors)
        self.witnesses[layer].keep("output", self.rows.outputs, self.row, output[0])

    def _facts(self, module, tensors, v_head_dim: int, logit_dim: int, kwargs) -> LayerFacts:
        inv_freq, factor = read_rope(self.model.base_model.rotary_emb, getattr(module, "layer_type", None))
        scale = kwargs.get("scaling")
        return LayerFacts(
            num_q_heads=tensors["q"].shape[1],
            num_kv_heads=tensors["k"].shape[1],
            head_dim=tensors["k"].shape[2],
            v_head_dim=v_head_dim,
            softmax_scale=float(logit_dim**-0.5 if scale is None else scale),
            sliding_window=int(kwargs.get("sliding_window") or 0),
            kind=self.family.kind,
            rope_layout=self.family.rope_layout,
            rotary_dim=2 * len(inv_freq),
            rotary_offset=0,
            rope_attention_factor=factor,
            rope_inv_freq=tuple(inv_freq),
        )

    def _watch(self, layer: int, attention: torch.nn.Module) -> None:
        for name, projection in self.family.projections(attention).items():
            norm = getattr(attention, f"{name}_norm", None)
            if norm is not None:
                self.witnesses[layer].norms[name] = norm_facts(norm)
            self._hooks.append(projection.register_forward_hook(self._keep_projected(layer, name)))

    def _keep_projected(self, layer: int, name: str):
        def hook(_module, _inputs, output):  # output [1, n, channels]
            if self.row is not None:
                self.witnesses[layer].keep(name, self.rows.projected, self.row, output[0])

        return hook


def norm_facts(norm: torch.nn.Module) -> NormFacts:
    """Weight and epsilon of an RMSNorm. The weight is measured on an input of ones, because Gemma stores the weight
    minus one."""
    epsilon = float(getattr(norm, "variance_epsilon", None) or norm.eps)
    with torch.no_grad():
        ones = torch.ones(norm.weight.shape, dtype=norm.weight.dtype, device=execution_device(norm))
        answer = norm(ones).double().cpu().numpy()
    return NormFacts(answer * np.sqrt(1.0 + epsilon), epsilon)


def refuse_foreign_terms(module, kwargs) -> None:
    for argument, meaning in FOREIGN_TERMS.items():
        if kwargs.get(argument) is not None:
            raise KvqError(
                EXIT_UNSUPPORTED, f"layer {module.layer_idx}: {meaning} is not supported: a dump cannot express it"
            )
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise KvqError(EXIT_UNSUPPORTED, f"layer {module.layer_idx}: attention that is not causal is not supported")


def attention_inputs(family: Family, module, query, key, value) -> dict[str, torch.Tensor]:
    """The new tokens of this forward pass as a dump holds them: q [n, Hq, D], k [n, Hkv, D], v [n, Hkv, Dv].

    With a cache, key and value begin with the past, and the new tokens are the last n. For MLA, q and k are only the
    rotary part: the last `qk_rope_head_dim` channels, in which all heads have the same key.
    """
    count = query.shape[2]
    if family.kind == "mla_rope":
        query, key = query[..., -module.qk_rope_head_dim :], key[..., -module.qk_rope_head_dim :]
        if not torch.equal(key, key[:, :1].expand_as(key)):
            raise KvqError(EXIT_UNSUPPORTED, f"layer {module.layer_idx}: expected one rotary key for all heads")
        return {"q": query[0].transpose(0, 1), "k": key[0, :1, -count:].transpose(0, 1)}
    return {
        "q": query[0].transpose(0, 1),
        "k": key[0, :, -count:].transpose(0, 1),
        "v": value[0, :, -count:].transpose(0, 1),
    }
