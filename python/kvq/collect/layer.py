"""The statistics of one layer: sequences in, sums and a few rows out. Sums lie on the layer's device, rows on the host.

Memory depends on the longest sequence and on how many rows are kept, not on the number of tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch

from ..dump.array_writer import LayerFacts
from ..errors import EXIT_NUMERICAL, KvqError
from .attention import AttentionSums, SoftmaxShape, output_of_token
from .moments import Moment, heads_first
from .options import MOMENTS
from .sample import TokenSample, sampling_keys
from .token_plan import TokenPlan

OF_VALUES = ("value", "scored_value", "scored_query")


@dataclass(frozen=True)
class StatsRequest:
    """What is collected; `moments` are of MOMENTS."""

    moments: tuple[str, ...]
    sample_tokens: int
    seed: int

    def of_layer(self, has_values: bool) -> tuple[str, ...]:
        return tuple(name for name in self.moments if has_values or name not in OF_VALUES)


@dataclass
class StoredRows:
    """A sequence's q, k and v: rounded to the stored type, on the model's device and, as bytes, on the host."""

    device: dict[str, torch.Tensor]
    host: dict[str, np.ndarray]


class LayerStatistics:
    """What formats/stats.md has of one layer.

    held_out, golden  "q", "k", "v" -> rows, as stored and as bits of bfloat16; empty if there are none
    o_proj_metric     float64 [Hkv, Dv, Dv], curvature  float32 [Hq, Dv, Dv]; None if there is none
    """

    def __init__(
        self, layer: int, facts: LayerFacts, has_values: bool, plan: TokenPlan, request: StatsRequest, content
    ):
        """@param content  DumpHash or JoinedHash of the layer"""
        self.layer, self.facts, self.has_values = layer, facts, has_values
        self.plan, self.request, self.content = plan, request, content
        self.names = request.of_layer(has_values)
        self.sample = TokenSample(request.sample_tokens)
        self.held_out: dict[str, np.ndarray] = {}
        self.golden: dict[str, np.ndarray] = {}
        self.o_proj_metric: np.ndarray | None = None
        self.curvature: np.ndarray | None = None
        self._counted = 0
        self._sums: dict[str, Moment] = {}
        self._attention: AttentionSums | None = None
        self._softmax: SoftmaxShape | None = None

    def add(self, index: int, rows: StoredRows) -> None:
        """Adds sequence `index`; sequences come in order."""
        if self._softmax is None:
            self._prepare(rows.device["q"].device)
        self.content.add(index, rows.host)
        self._keep_held_out(index, rows.host)
        self._keep_golden(index, rows)
        wide = {name: x.float() for name, x in rows.device.items()}
        self._add_moments(index, wide)
        energies = self._add_attention(index, wide)
        self._add_sample(index, rows.host, energies)

    def output_of(self, rows: StoredRows, token: int) -> np.ndarray:
        """Attention's output at one token of a sequence, as the sums take it, float64 [Hq, Dv]."""
        q, k, v = (rows.device[name].float() for name in ("q", "k", "v"))
        return output_of_token(q, k, v, token, self._softmax).double().cpu().numpy()

    def moments(self) -> dict[str, Moment]:
        """In the order of MOMENTS. @raises KvqError(numerical) for a sum that is not finite"""
        found = dict(self._sums)
        if "scored_value" in self.names:
            found["scored_value"] = self._attention.outputs
        if "scored_query" in self.names:
            found["scored_query"] = self._attention.scored_query
            # A mean over queries, so the weight is their number, not the sum of w.
            found["scored_query"].weight.fill_(self._counted * self.facts.num_q_heads // self.facts.num_kv_heads)
        for name, moment in found.items():
            if not bool(torch.isfinite(moment.sum).all() and torch.isfinite(moment.first).all()):
                raise KvqError(
                    EXIT_NUMERICAL,
                    f"layer {self.layer}: {name} moment: expected finite sums, found NaN or infinity",
                    "the model's numbers are too large for it: --collect chooses moments",
                )
        return {name: found[name] for name in MOMENTS if name in found}

    def _prepare(self, device: torch.device) -> None:
        facts = self.facts
        sinks = torch.tensor(facts.sink_logits, dtype=torch.float32, device=device) if facts.sink_logits else None
        self._softmax = SoftmaxShape(
            facts.softmax_scale,
            facts.sliding_window,
            facts.logit_softcapping,
            None if sinks is None else sinks.reshape(facts.num_kv_heads, -1),
        )
        dims = {"query": facts.head_dim, "key": facts.head_dim, "value": facts.v_head_dim}
        self._sums = {name: Moment(facts.num_kv_heads, dims[name], device) for name in self.names if name in dims}
        if "scored_value" in self.names:  # also wherever scored_query is
            scored = "scored_query" in self.names
            self._attention = AttentionSums(facts.num_kv_heads, facts.head_dim, facts.v_head_dim, scored, device)

    def _add_moments(self, index: int, wide: dict[str, torch.Tensor]) -> None:
        inside, counts = self.plan.in_sums(index), self.plan.counts(index)
        self._counted += int(counts.sum())
        for name, tensor, chosen in (("query", "q", counts), ("key", "k", inside), ("value", "v", inside)):
            if name in self._sums and chosen.any():
                x = wide[tensor]
                rows = x if chosen.all() else x[torch.from_numpy(chosen).to(x.device)]
                self._sums[name].add(heads_first(rows, self.facts.num_kv_heads))

    def _add_attention(self, index: int, wide: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """Column energies, float64 [T, Hkv]; None without moments of attention."""
        if self._attention is None:
            return None
        return self._attention.add(wide["q"], wide["k"], wide["v"], self._softmax, self.plan.counts(index))

    def _add_sample(self, index: int, host: dict[str, np.ndarray], energies: torch.Tensor | None) -> None:
        keys = sampling_keys(self.request.seed, host["k"], self.layer)
        places = self.sample.choose(keys, self.plan.in_sums(index))
        weights = None
        if energies is not None:
            group = self.facts.num_q_heads // self.facts.num_kv_heads
            chosen = energies[torch.from_numpy(places).to(energies.device)]
            weights = (chosen / group).float().cpu().numpy()
        rows = {name: x[places] for name, x in host.items()}
        self.sample.add(keys[places], places + int(self.plan.starts[index]), rows, weights)

    def _keep_held_out(self, index: int, host: dict[str, np.ndarray]) -> None:
        held = self.plan.held_out.within(int(self.plan.starts[index]), self.plan.lengths[index])
        if held is None:
            return
        queries = self.plan.held_out_queries()
        self.held_out = {name: x[held].copy() for name, x in host.items()}
        self.held_out["q"] = host["q"][held][queries]

    def _keep_golden(self, index: int, rows: StoredRows) -> None:
        golden = self.plan.golden.within(int(self.plan.starts[index]), self.plan.lengths[index])
        if golden is None:
            return
        self.golden = {name: bf16_bits(x[golden]) for name, x in rows.device.items()}
        self.golden["q"] = self.golden["q"][-1]


def bf16_bits(x: torch.Tensor) -> np.ndarray:
    """Rounded to nearest even, uint16 of the same shape."""
    return x.float().to(torch.bfloat16).contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
