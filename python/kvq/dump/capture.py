"""Captures q, k and v where they enter attention.

Projections are the wrong place: QK-norm and RoPE come after them, and a collector that forgets either calibrates
on tensors no cache ever holds. transformers 5 routes every attention layer through one interface,

    interface(module, query, key, value, attention_mask, scaling=..., sliding_window=..., ...)

called after norm, RoPE and the cache update, before the KV heads are repeated. We register our own function there: it
runs the ordinary SDPA attention and writes what went in, with the scale and the window that the model really uses.

Beside that, hooks keep the projections' output of a few tokens, and attention's output of fewer. The validators redo
norm, RoPE and attention on those by hand, and compare with the finished file.
"""

from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from ..errors import EXIT_UNSUPPORTED, KvqError
from .anatomy import Anatomy
from .array_writer import LayerFacts
from .families import Family
from .progress import Progress
from .rope import read_rope
from .rounding import Rounding
from .softmax import attend
from .survey import survey
from .writer import LayerLedger

INTERFACE_NAME = "kvq_dump"
# Further terms of the logits that some models pass to the attention interface. A dump has no field for them.
FOREIGN_TERMS = {"position_bias": "a position bias"}


@contextmanager
def attention_interface(text, function):
    """Makes all attention of a model call `function`."""
    previous = text.config._attn_implementation
    AttentionInterface.register(INTERFACE_NAME, function)
    AttentionMaskInterface.register(INTERFACE_NAME, sdpa_mask)
    text.set_attn_implementation(INTERFACE_NAME)
    try:
        yield
    finally:
        text.set_attn_implementation(previous)


@dataclass(frozen=True)
class WitnessRows:
    """Rows of the dump for which witnesses are kept: sorted int64 arrays."""

    projected: np.ndarray
    outputs: np.ndarray


@dataclass
class Witness:
    """Reference data of one layer, for the validators.

    anatomy  how the layer makes q and k from its projections' output
    kept     float64, one entry for each of the WitnessRows: "q"/"k" the projections' output [n, channels], "output"
             that of attention [n, Hq, Dv]. Each array is allocated once, at its first token, because small arrays that
             outlive a forward pass would fragment the heap between its large arrays, and memory would grow with every
             prompt.
    """

    anatomy: Anatomy
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
    """Attached to a model; writes the attention inputs of each forward pass to a DumpWriter, or to another LayerLedger.

    `row` is the dump's row for the first token of the next forward pass; None: the pass is not recorded.
    `witnesses` has those of the wanted layers that have attention with keys of their own.
    """

    def __init__(
        self, text, family: Family, writer: LayerLedger, layers: list[int], rows: WitnessRows, progress: Progress
    ):
        self.text, self.family, self.writer = text, family, writer
        self.wanted, self.rows, self.progress = layers, rows, progress
        self.witnesses: dict[int, Witness] = {}
        self.row: int | None = None
        self._hooks = []

    def __enter__(self):
        compute_dtype = str(self.text.dtype).removeprefix("torch.")
        found = survey(self.text, self.family, self._surveyed, self.wanted, Rounding(compute_dtype))
        self.witnesses = {layer: Witness(anatomy) for layer, anatomy in found.items()}
        for layer, anatomy in found.items():
            for name, projection in anatomy.projections.items():
                self._hooks.append(projection.register_forward_hook(self._keep_projected(layer, name)))
        self._interface = attention_interface(self.text, self.attend)
        self._interface.__enter__()
        return self

    def __exit__(self, *reason):
        for hook in self._hooks:
            hook.remove()
        self._interface.__exit__(*reason)

    @property
    def layers_left_out(self) -> list[int]:
        """Wanted layers without attention, or with attention to another layer's keys."""
        return [layer for layer in self.wanted if layer not in self.witnesses]

    def attention_module(self, layer: int) -> torch.nn.Module:
        return self.witnesses[layer].anatomy.attention

    def _surveyed(self, record):
        """The attention interface of the survey."""

        def function(module, query, key, value, attention_mask, **kwargs):
            output, weights = attend(module, query, key, value, attention_mask, **kwargs)
            record(module, attention_inputs(module, query, key, value), output)
            return output, weights

        return attention_interface(self.text, function)

    def attend(self, module, query, key, value, attention_mask, **kwargs):
        """The registered interface. query [1, Hq, n, D]; key, value [1, Hkv, past + n, D or Dv]."""
        refuse_foreign_terms(module, kwargs)
        output, weights = attend(module, query, key, value, attention_mask, **kwargs)
        if self.row is not None:
            witness = self.witnesses.get(getattr(module, "layer_idx", None))
            if witness is not None and witness.anatomy.attention is module:
                self._record(module, query, key, value, output, kwargs)
            self.progress.advance(self.recorded_tokens(query))
        return output, weights

    def recorded_tokens(self, query) -> int:
        """Tokens of this pass that are recorded, for the progress."""
        return query.shape[2]

    def _record(self, module, query, key, value, output, kwargs) -> None:
        layer = module.layer_idx
        tensors = attention_inputs(module, query, key, value)
        facts = self._facts(module, tensors, value.shape[-1], query.shape[-1], kwargs)
        self.writer.append(layer, facts, self.row, tensors)
        self.witnesses[layer].keep("output", self.rows.outputs, self.row, output[0])

    def _facts(self, module, tensors, v_head_dim: int, logit_dim: int, kwargs) -> LayerFacts:
        anatomy = self.witnesses[module.layer_idx].anatomy
        inv_freq, factor = ((), 1.0) if anatomy.rope is None else read_rope(anatomy.rope)
        scale, cap, sinks = (kwargs.get(name) for name in ("scaling", "softcap", "s_aux"))
        return LayerFacts(
            num_q_heads=tensors["q"].shape[1],
            num_kv_heads=tensors["k"].shape[1],
            head_dim=tensors["k"].shape[2],
            v_head_dim=v_head_dim,
            softmax_scale=float(logit_dim**-0.5 if scale is None else scale),
            sliding_window=int(kwargs.get("sliding_window") or 0),
            kind="mla_rope" if is_mla(module) else "gqa",
            rope_layout=anatomy.layout,
            rotary_dim=2 * len(inv_freq),
            rotary_offset=0,
            rope_attention_factor=factor,
            rope_inv_freq=tuple(inv_freq),
            logit_softcapping=None if cap is None else float(cap),
            sink_logits=() if sinks is None else tuple(sinks.detach().double().flatten().tolist()),
        )

    def _keep_projected(self, layer: int, name: str):
        def hook(_module, _inputs, output):  # output [1, n, channels]
            if self.row is not None:
                projected = output[0] if isinstance(output, torch.Tensor) else output[0][0]
                self.witnesses[layer].keep(name, self.rows.projected, self.row, projected)

        return hook


def is_mla(module) -> bool:
    """Whether attention has one rotary key for all heads, beside a latent that the cache holds (DeepSeek-V2)."""
    return hasattr(module, "kv_a_proj_with_mqa") and hasattr(module, "qk_rope_head_dim")


def refuse_foreign_terms(module, kwargs) -> None:
    for argument, meaning in FOREIGN_TERMS.items():
        if kwargs.get(argument) is not None:
            raise KvqError(
                EXIT_UNSUPPORTED, f"layer {module.layer_idx}: {meaning} is not supported: a dump cannot express it"
            )
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise KvqError(EXIT_UNSUPPORTED, f"layer {module.layer_idx}: attention that is not causal is not supported")


def attention_inputs(module, query, key, value) -> dict[str, torch.Tensor]:
    """The new tokens of this forward pass as a dump holds them: q [n, Hq, D], k [n, Hkv, D], v [n, Hkv, Dv].

    With a cache, key and value begin with the past, and the new tokens are the last n. For MLA, q and k are only the
    rotary part: the last `qk_rope_head_dim` channels, in which all heads have the same key.
    """
    count = query.shape[2]
    if is_mla(module):
        query, key = query[..., -module.qk_rope_head_dim :], key[..., -module.qk_rope_head_dim :]
        if not torch.equal(key, key[:, :1].expand_as(key)):
            raise KvqError(EXIT_UNSUPPORTED, f"layer {module.layer_idx}: expected one rotary key for all heads")
        return {"q": query[0].transpose(0, 1), "k": key[0, :1, -count:].transpose(0, 1)}
    return {
        "q": query[0].transpose(0, 1),
        "k": key[0, :, -count:].transpose(0, 1),
        "v": value[0, :, -count:].transpose(0, 1),
    }
