"""Finds the anatomy of every attention layer: one short forward pass, then the tries that fit what it showed.

Hooks keep what projections, norms and the output projection see; our attention interface keeps q and k as they enter
attention. A try is a layout of rotary pairs, a set of frequencies, a place of the norm and a cut of the projections'
output; it fits if q and k, redone by it in float64, are those of the model up to rounding (validators.py has the same
bounds). So a model that no table knows is taken if it does what some try says, and refused with findings otherwise.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ..errors import EXIT_UNSUPPORTED, KvqError
from .anatomy import (
    CUTS,
    OUTPUT_PROJECTIONS,
    Anatomy,
    Norm,
    cut_heads,
    find_norms,
    find_projections,
    part_of,
)
from .families import ANY_LAYOUTS, Family, supported_list
from .forward import positions_of, run_text
from .placement import input_device
from .rope import find_rope_sources, read_rope
from .rounding import Rounding, distance

TOKENS = 29  # a number that is no number of heads


@dataclass
class Seen:
    """What the pass showed of one layer; numbers are float64."""

    attention: torch.nn.Module
    projections: dict[str, torch.nn.Module]
    projected: dict[str, np.ndarray] = field(default_factory=dict)  # "q"/"k" -> [n, C]
    norm_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of the norms' input
    captured: dict[str, np.ndarray] = field(default_factory=dict)  # "q"/"k" -> [n, H, D]
    output: np.ndarray | None = None  # [n, Hq * Dv] of attention
    taken: np.ndarray | None = None  # the same, as the output projection takes it


class Survey:
    """Watches one pass; `attend` is the attention interface while it lasts."""

    def __init__(self, text, family: Family):
        self.text, self.family = text, family
        self.seen: dict[int, Seen] = {}
        self._hooks: list = []

    def run(self) -> dict[int, Seen]:
        """{layer: Seen} of all layers that call attention with keys of their own."""
        for module in self.text.modules():
            projections = find_projections(module)
            if projections and isinstance(getattr(module, "layer_idx", None), int):
                self.seen[module.layer_idx] = Seen(module, projections)
                self._watch(self.seen[module.layer_idx])
        try:
            ids = torch.from_numpy(np.random.default_rng(0).integers(0, self.text.config.vocab_size, TOKENS))[None]
            with torch.no_grad():
                device = input_device(self.text)
                run_text(self.text, ids.to(device), positions_of(0, TOKENS, 1, device))
        finally:
            for hook in self._hooks:
                hook.remove()
        return {layer: seen for layer, seen in self.seen.items() if seen.captured and seen.projected}

    def record(self, module, tensors: dict[str, torch.Tensor], output: torch.Tensor) -> None:
        """What enters attention and leaves it: tensors [n, H, D] each, output [1, n, Hq, Dv]."""
        seen = self.seen.get(getattr(module, "layer_idx", None))
        if seen is None or seen.attention is not module:
            return
        seen.captured = {name: numbers(tensors[name]) for name in "qk"}
        seen.output = numbers(output[0].flatten(1))

    def _watch(self, seen: Seen) -> None:
        for tensor, projection in seen.projections.items():
            self._hooks.append(projection.register_forward_hook(_keep_projected(seen, tensor)))
        for tensor, norm in find_norms(seen.attention).items():
            self._hooks.append(norm.register_forward_hook(_keep_shape(seen, tensor)))
        output = part_of(seen.attention, OUTPUT_PROJECTIONS)
        if output is not None:
            self._hooks.append(output.register_forward_hook(_keep_taken(seen)))


# A hook that returns something replaces the module's output, so these return nothing.


def _keep_projected(seen: Seen, tensor: str):
    def hook(_module, _inputs, output):
        seen.projected[tensor] = numbers(first_of(output)[0])

    return hook


def _keep_shape(seen: Seen, tensor: str):
    def hook(_module, inputs, _output):
        seen.norm_shapes[tensor] = tuple(inputs[0].shape)

    return hook


def _keep_taken(seen: Seen):
    def hook(_module, inputs, _output):
        seen.taken = numbers(inputs[0].reshape(TOKENS, -1))

    return hook


def first_of(output):
    return output[0] if isinstance(output, tuple) else output


def numbers(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().cpu().numpy()


@dataclass(frozen=True)
class Try:
    """An anatomy, and how far q and k redone by it are from the model's, in units of the allowed rounding."""

    anatomy: Anatomy
    errors: dict[str, float]

    @property
    def error(self) -> float:
        return max(self.errors.values())


def find_anatomy(seen: Seen, text, family: Family, rounding: Rounding) -> Try:
    """The first try that fits; else for a family of the table the layout of the table, for others the best try."""
    tries = _tries(seen, text, family.layouts(), rounding)
    if tries[-1].error <= 1.0:
        return tries[-1]
    if not family.is_known:
        return min(tries, key=lambda one: one.error)
    # With a wrong layout, cuts are chosen by chance. If another layout fits, its cuts hold, and a check of the dump can
    # name that layout.
    other = _tries(seen, text, ANY_LAYOUTS, rounding)[-1]
    if other.error <= 1.0:
        return replace(other, anatomy=replace(other.anatomy, layout=family.rope_layout))
    return next(one for one in tries if one.anatomy.layout == family.rope_layout)


def _tries(seen: Seen, text, layouts: list[tuple[str, str | None]], rounding: Rounding) -> list[Try]:
    """Tries in order, up to the first that fits."""
    tries = []
    for layout, moved_from in layouts:
        for norm_is_last in (False, True) if seen.norm_shapes else (False,):
            for source in _sources(seen, text, layout):
                anatomy = Anatomy(
                    seen.attention,
                    seen.projections,
                    norms=_norms(seen),
                    norm_is_last=norm_is_last,
                    layout=layout,
                    moved_from=moved_from,
                    rope=source,
                    plain_output=_takes_output(seen, rounding),
                )
                tries.append(_with_cuts(anatomy, seen, rounding))
                if tries[-1].error <= 1.0:
                    return tries
    return tries


def _sources(seen: Seen, text, layout: str) -> list:
    if layout == "none":
        return [None]
    types = getattr(text.config, "layer_types", None)
    layer = seen.attention.layer_idx
    own = getattr(seen.attention, "layer_type", None) or getattr(seen.attention, "attention_type", None)
    layer_type = own or (types[layer] if types and layer < len(types) else None)
    dim = seen.captured["k"].shape[2]
    sources = find_rope_sources(text, seen.attention, layer_type)
    return [source for source in sources if 0 < 2 * len(read_rope(source)[0]) <= dim]


def _norms(seen: Seen) -> dict[str, Norm]:
    parts = find_norms(seen.attention)
    return {tensor: Norm(parts[tensor], shape, TOKENS) for tensor, shape in seen.norm_shapes.items()}


def _takes_output(seen: Seen, rounding: Rounding) -> bool:
    if seen.taken is None or seen.taken.shape != seen.output.shape:
        return False
    return bool(np.abs(seen.taken - seen.output).max() <= rounding.relative * np.abs(seen.output).max())


def _with_cuts(anatomy: Anatomy, seen: Seen, rounding: Rounding) -> Try:
    """The anatomy with the cut that fits best, for q and for k."""
    heads, dim = (seen.captured["q"].shape[1], seen.captured["k"].shape[1]), seen.captured["k"].shape[2]
    cuts, gains, errors = {}, {}, {}
    for tensor in "qk":
        found = {}
        for cut in CUTS:
            heads_before = cut_heads(cut, tensor, seen.projected[tensor], heads, dim)
            if heads_before is None:
                continue
            for gain in (1.0, _gain(heads_before, seen.captured[tensor])) if not anatomy.norms else (1.0,):
                one = replace(anatomy, cuts={tensor: cut}, gains={tensor: gain})
                found[cut, gain] = _error(one, tensor, seen, heads, dim, rounding)
                if found[cut, gain] <= 1.0:
                    break
        cuts[tensor], gains[tensor] = min(found, key=found.get, default=("first", 1.0))
        errors[tensor] = min(found.values(), default=np.inf)
        if errors[tensor] > 1.0:  # a factor that explains nothing would hide what a check of the dump finds
            gains[tensor] = 1.0
    return Try(replace(anatomy, cuts=cuts, gains=gains), errors)


def _gain(before: np.ndarray, captured: np.ndarray) -> float:
    """The constant factor between heads that RoPE only rotates: the ratio of their sizes."""
    return float(np.linalg.norm(captured) / max(np.linalg.norm(before), 1e-30))


def _error(anatomy: Anatomy, tensor: str, seen: Seen, heads, dim: int, rounding: Rounding) -> float:
    inv_freq, factor = (np.zeros(0), 1.0) if anatomy.rope is None else read_rope(anatomy.rope)
    positions = np.arange(TOKENS)
    try:
        before = anatomy.before_rope(tensor, seen.projected[tensor], heads, dim)
        expected = anatomy.behind_rope(tensor, before, positions, inv_freq, factor, anatomy.layout)
    except RuntimeError:  # a norm that is not for this arrangement
        return np.inf
    return distance(seen.captured[tensor], expected, positions, inv_freq, anatomy.layout, rounding)


def survey(text, family: Family, record_with, layers: list[int], rounding: Rounding) -> dict[int, Anatomy]:
    """{layer: Anatomy} of those of `layers` that have attention with keys of their own.

    record_with(record): a context in which every attention calls record(module, tensors, output)
    A family of the table keeps its layout even if nothing fits: the checks of the finished dump then say what is wrong.
    @raises KvqError(unsupported) for an unknown model whose layers no try fits
    """
    watch = Survey(text, family)
    with record_with(watch.record):
        seen = watch.run()
    if not any(layer in seen for layer in layers):
        raise _refusal(family, "no layer calls the attention interface with keys that a projection of its own makes")
    found = {layer: find_anatomy(seen[layer], text, family, rounding) for layer in layers if layer in seen}
    if family.is_known:
        return {layer: one.anatomy for layer, one in found.items()}
    failed = {layer: one for layer, one in found.items() if not one.error <= 1.0}
    if failed:
        raise _refusal(family, _findings(failed, seen))
    return {layer: one.anatomy for layer, one in found.items()}


def _findings(failed: dict[int, Try], seen: dict[int, Seen]) -> str:
    layer = min(failed)
    tensor = max(failed[layer].errors, key=failed[layer].errors.get)
    norms = "with QK-norm before or after RoPE" if seen[layer].norm_shapes else "without QK-norm"
    return (
        f"RoPE: in {len(failed)} layers neither half nor interleaved pairs nor no RoPE give q and k, {norms}; the "
        f"first: layer {layer} {tensor}, at best off by {failed[layer].errors[tensor]:.3g} times the allowed rounding"
    )


def _refusal(family: Family, findings: str) -> KvqError:
    return KvqError(
        EXIT_UNSUPPORTED,
        f"model type '{family.label}' is not known, and was tried in vain: {findings}",
        f"supported: {supported_list()}",
    )
