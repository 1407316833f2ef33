"""Checks of what one artifact says twice (formats/artifact.md, "Verifying"). Each returns the first fault, or ""."""

import numpy as np

from .artifact import Artifact, LayerPlan, SidePlan
from .artifact_reader import KNOWN_FEATURES

SPECTRUM_ROUNDING = 1e-6  # of the largest eigenvalue


def lowest_minor(used: list[str], golden: bool, of_1_3: bool) -> int:
    """`of_1_3`: whether there are fields that 1.3 added."""
    if "integer_search" in used:
        return 5
    if "row_scale" in used:
        return 4
    if of_1_3:
        return 3
    if "transform" in used:
        return 2
    return 1 if used or golden else 0


def has_fields_of_1_3(manifest: dict) -> bool:
    """Whether there are baselines of errors, errors on held-out tokens, soft caps or learned sinks."""
    sides = [layer[side] for layer in manifest["layers"] for side in ("k", "v") if side in layer]
    geometries = [layer["geometry"] for layer in manifest["layers"]]
    return (
        "held_out" in manifest["calibration"]
        or any("baseline" in side.get("error", {}) for side in sides)
        or any(name in geometry for geometry in geometries for name in ("logit_softcapping", "sink_logits"))
    )


def version_fault(artifact: Artifact) -> str:
    """`requires` against the features of the plans, and `version` against the lowest version that has these
    features."""
    plans = [plan for layer in artifact.layers.values() for plan in layer.sides.values()]
    words = {word for plan in plans for word in plan.features}
    if any("logit_softcapping" in layer["geometry"] for layer in artifact.manifest["layers"]):
        words.add("logit_softcapping")
    used = [word for word in KNOWN_FEATURES if word in words]
    metadata = artifact.file.metadata
    if metadata["requires"] != ",".join(used):
        return f"requires: expected '{','.join(used)}', the features of the plans, found '{metadata['requires']}'"
    golden = any(layer.golden for layer in artifact.layers.values())
    lowest = lowest_minor(used, golden, has_fields_of_1_3(artifact.manifest))
    if int(metadata["version"].partition(".")[2]) < lowest:
        return f"version: expected 1.{lowest} or higher for these features, found {metadata['version']}"
    return ""


def geometry_fault(layer: LayerPlan, geometry: dict) -> str:
    """Kind, heads and values of a layer against each other."""
    if geometry["kind"] == "mla_rope" and layer.num_kv_heads != 1:
        return f"layer {layer.layer}: kind mla_rope: expected 1 KV head, found {layer.num_kv_heads}"
    if geometry["kind"] == "gqa" and "v" not in layer.sides:
        return f"layer {layer.layer}: kind gqa: expected a plan of the values, found none"
    return ""


def spectrum_fault(plan: SidePlan) -> str:
    """Eigenvalues: descending, and none below 0 by more than rounding explains."""
    for head, own in enumerate(plan.tensors.get("spectrum", ())):
        if (own[1:] > own[:-1]).any():
            place = int((own[1:] > own[:-1]).argmax())
            return f"head {head}: spectrum: expected descending numbers, found {own[place + 1]} behind {own[place]}"
        if own[0] < 0 or float(own.min()) < -SPECTRUM_ROUNDING * float(own[0]):
            return f"head {head}: spectrum: expected numbers that are not negative, found {own.min()}"
    return ""


def blocks_of_channels(geometry: dict) -> np.ndarray:
    """Index of the RoPE block of each channel, int [D]."""
    dim, rope = geometry["head_dim"], geometry["rope"]
    rotary, offset = rope["dim"], rope["offset"]
    index = np.empty(dim, int)
    slots = np.arange(rotary)
    pairs = slots // 2 if rope["layout"] == "interleaved" else slots % max(1, rotary // 2)
    index[offset : offset + rotary] = pairs
    rest = [channel for channel in range(dim) if not offset <= channel < offset + rotary]
    index[rest] = rotary // 2 + np.arange(len(rest)) // 2
    return index


def widths_fault(plan: SidePlan, geometry: dict) -> str:
    """Widths of RoPE blocks and sources of channels against the widths of channels, for mixed widths."""
    if "channel_bits" not in plan.tensors:
        return ""
    of_blocks = "block_bits" in plan.tensors
    block_of = blocks_of_channels(geometry) if of_blocks else np.arange(plan.dim)
    for head, widths in enumerate(plan.tensors["channel_bits"]):
        order, keys = plan.tensors["channel_order"][head].astype(int), np.arange(plan.dim)
        if of_blocks:
            own, energies = plan.tensors["block_bits"][head], plan.tensors["block_energy"][head]
            # Scores of 0 and the smallest width for all blocks: the channels were mixed before they got widths.
            if energies.any() or (own != widths.min()).any():
                keys = block_of
                bad = own[block_of[order]] != widths
                if bad.any():
                    place = int(bad.argmax())
                    block = int(block_of[order[place]])
                    return (
                        f"head {head}: block_bits of block {block}: expected {widths[place]}, the width of its channel "
                        f"{order[place]}, found {own[block]}"
                    )
        # Channels of one width are gathered in ascending order of their sources; the channels of a block stay together.
        ranks = keys[order] * plan.dim + order
        wrong = (widths[1:] == widths[:-1]) & (ranks[1:] <= ranks[:-1])
        if wrong.any():
            place = int(wrong.argmax())
            return (
                f"head {head}: channel_order: expected ascending sources of one width, found {order[place + 1]} behind "
                f"{order[place]}"
            )
    return ""
