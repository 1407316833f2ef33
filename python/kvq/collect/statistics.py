"""What the recorder writes to in place of a dump: rows of q, k and v of whole sequences go into the statistics of their
layer and are forgotten."""

from collections.abc import Callable

import numpy as np
import torch

from ..dump.array_writer import LayerFacts
from ..dump.capture import WitnessRows
from ..dump.model import DTYPES
from ..dump.writer import LayerLedger, encode, expect_extra, expect_metric
from .layer import LayerStatistics, StatsRequest, StoredRows
from .token_plan import TokenPlan


class Seen:
    """Rows of one layer that the checks redo: captured q and k as stored, and attention's output computed here."""

    def __init__(self, rows: WitnessRows):
        self._rows = rows
        self.captured: dict[str, list[np.ndarray]] = {"q": [], "k": []}
        self.outputs: list[np.ndarray] = []  # float64 [Hq, Dv], of rows.outputs

    def keep(self, first_row: int, rows: StoredRows, output_of: Callable[[int], np.ndarray] | None) -> None:
        """@param output_of  attention's output at a place of the sequence; None for a layer without values"""
        count = len(rows.host["k"])
        for name, kept in self.captured.items():
            kept.extend(rows.host[name][_places(self._rows.projected, first_row, count)])
        if output_of is not None:
            self.outputs += [output_of(int(place)) for place in _places(self._rows.outputs, first_row, count)]


def _places(rows: np.ndarray, first_row: int, count: int) -> np.ndarray:
    return rows[(rows >= first_row) & (rows < first_row + count)] - first_row


class Statistics(LayerLedger):
    """The statistics of all layers while a model runs: a Recorder's writer.

    `content_of(layer)` makes the layer's DumpHash or JoinedHash.
    """

    def __init__(self, plan: TokenPlan, request: StatsRequest, dtype: str, rows: WitnessRows, content_of: Callable):
        super().__init__(dtype)
        self.plan, self.request, self.rows, self.content_of = plan, request, rows, content_of
        self.statistics: dict[int, LayerStatistics] = {}
        self.seen: dict[int, Seen] = {}
        # Rows of sequences that are not complete: with generated tokens, a pass brings one row of every layer.
        self._parts: dict[int, list[dict[str, torch.Tensor]]] = {}

    def append(self, layer: int, facts: LayerFacts, first_row: int, tensors: dict[str, torch.Tensor]) -> None:
        """Rows `first_row ..` of a layer: q [n, Hq, D], k [n, Hkv, D], v [n, Hkv, Dv] (not for MLA)."""
        self.expect_same_facts(layer, facts)
        index = self.plan.sequence_at(first_row)
        start, length = int(self.plan.starts[index]), self.plan.lengths[index]
        if len(tensors["k"]) < length:
            parts = self._parts.setdefault(layer, [])
            parts.append({name: x.detach().clone() for name, x in tensors.items()})
            if sum(len(part["k"]) for part in parts) < length:
                return
            tensors = {name: torch.cat([part[name] for part in parts]) for name in tensors}
            del self._parts[layer]
        self._add(layer, facts, index, start, self._stored(layer, start, tensors))

    def write_metric(self, layer: int, metric: np.ndarray) -> None:
        """`o_proj_metric` of a layer, float32 [Hkv, Dv, Dv]."""
        expect_metric(layer, metric)
        self.statistics[layer].o_proj_metric = metric.astype(np.float64)

    def write_extra(self, layer: int, name: str, array: np.ndarray, **_) -> None:
        """`output_curvature` of a layer, float32 [Hq, Dv, Dv]."""
        expect_extra(layer, name, array)
        self.statistics[layer].curvature = array

    def _stored(self, layer: int, first_row: int, tensors: dict[str, torch.Tensor]) -> StoredRows:
        device, host = {}, {}
        for name, x in tensors.items():
            device[name] = x.detach().to(DTYPES[self.dtype])
            host[name], finite = encode(device[name], self.dtype)
            self.note_values(layer, name, first_row, x, finite)
        return StoredRows(device, host)

    def _add(self, layer: int, facts: LayerFacts, index: int, start: int, rows: StoredRows) -> None:
        has_values = "v" in rows.host
        if layer not in self.statistics:
            content = self.content_of(layer)
            self.statistics[layer] = LayerStatistics(layer, facts, has_values, self.plan, self.request, content)
            self.seen[layer] = Seen(self.rows)
        statistics = self.statistics[layer]
        statistics.add(index, rows)
        output_of = (lambda place: statistics.output_of(rows, place)) if has_values else None
        self.seen[layer].keep(start, rows, output_of)
