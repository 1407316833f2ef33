"""The checks of a dump (kvq/dump/validators.py), made without one: QK-norm and RoPE are redone by hand on some tokens,
which a dump in memory holds, and the attention that the sums are made of is compared with the model's own output."""

import h5py
import numpy as np

from ..dump.array_writer import FORMAT, VERSION, write_layer_facts
from ..dump.capture import Recorder, WitnessRows
from ..dump.rounding import EPSILON
from ..dump.validators import OUTPUT_BOUND, Check, Validator
from .statistics import Statistics


def check_statistics(recorder: Recorder, statistics: Statistics, compute_dtype: str) -> list[Check]:
    """One Check for each line of output, passed or failed."""
    kept = WitnessRows(np.arange(len(recorder.rows.projected)), np.zeros(0, np.int64))
    with h5py.File("witnesses", "w", driver="core", backing_store=False) as file:
        _write_witnesses(file, recorder, statistics)
        validator = Validator(file, recorder.witnesses, kept, compute_dtype)
        redone = [validator.check_qk_norm(), validator.check_rope()]
    return [*redone, _check_outputs(recorder, statistics, compute_dtype)]


def _write_witnesses(file: h5py.File, recorder: Recorder, statistics: Statistics) -> None:
    rows, plan = recorder.rows.projected, statistics.plan
    in_sequence = rows - plan.starts[np.searchsorted(plan.starts, rows, side="right") - 1]
    file.attrs.update({"format": FORMAT, "version": VERSION})
    file["positions"] = in_sequence * plan.stride
    for layer in recorder.witnesses:
        group = write_layer_facts(file, layer, statistics.layers[layer])
        for name, captured in statistics.seen[layer].captured.items():
            group.create_dataset(name, data=np.stack(captured)).attrs["kvq_dtype"] = statistics.dtype


def _check_outputs(recorder: Recorder, statistics: Statistics, compute_dtype: str) -> Check:
    name = "attention output"
    errors = [
        (float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30)), layer, int(row))
        for layer, witness in recorder.witnesses.items()
        if statistics.statistics[layer].has_values
        for row, found, expected in zip(recorder.rows.outputs, statistics.seen[layer].outputs, witness.kept["output"])
    ]
    if not errors:
        return Check(name, True, "not tested: MLA's rotary part alone does not determine it")
    error, layer, row = max(errors)
    bound = OUTPUT_BOUND[max(statistics.dtype, compute_dtype, key=EPSILON.get)]
    detail = f"recomputed for the sums, off by {error:.1e} of its norm (allowed {bound:.0e})"
    if error <= bound:
        return Check(name, True, detail)
    suspect = "softmax scale, window, cap, sinks, GQA order or borders"
    return Check(name, False, f"{detail}; worst in layer {layer} token {row}: {suspect}")
