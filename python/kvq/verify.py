"""The checks of `read_artifact.py --verify` (formats/artifact.md, "Verifying"): the same as those of
`kvq-inspect --verify`, by the same names, in the same order."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from .artifact import (
    CLAIM_TOLERANCE,
    INVERSE_TOLERANCE,
    MOST_CONDITION,
    ORTHOGONALITY_TOLERANCE,
    Artifact,
    SidePlan,
    content_hash,
    inverse_error,
    orthogonality_error,
    stated_hash,
    transform_condition,
)
from .golden_rows import golden_fault
from .packing import quiet
from .recipe_check import recipe_fault
from .repeated_facts import geometry_fault, spectrum_fault, version_fault, widths_fault


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    detail: str


def sides(artifact: Artifact) -> Iterator[tuple[str, dict, SidePlan]]:
    """(place, geometry, plan) of each side of each layer."""
    for entry in artifact.manifest["layers"]:
        for side, plan in artifact.layers[entry["layer"]].sides.items():
            yield f"layer {entry['layer']} {side}", entry["geometry"], plan


def first_fault(artifact: Artifact, find: Callable[[SidePlan, dict], str]) -> str:
    for place, geometry, plan in sides(artifact):
        if fault := find(plan, geometry):
            return f"{place}: {fault}"
    return ""


def of_fault(name: str, fault: str, fine: str) -> Check:
    return Check(name, not fault, fault or fine)


def check_hash(artifact: Artifact) -> Check:
    stated, found = stated_hash(artifact.file), content_hash(artifact.file)
    return Check("content hash", found == stated, found if found == stated else f"expected {stated}, found {found}")


def check_geometry(artifact: Artifact) -> Check:
    faults = [
        geometry_fault(artifact.layers[entry["layer"]], entry["geometry"]) for entry in artifact.manifest["layers"]
    ]
    return of_fault("geometry", next(filter(None, faults), ""), "kinds, heads and values agree")


@quiet
def check_orthogonality(artifact: Artifact) -> Check:
    errors = [(orthogonality_error(plan), place) for place, _, plan in sides(artifact)]
    worst, place = errors[int(np.argmax([error for error, _ in errors]))]  # NaN if one is
    return Check(
        "orthogonality",
        worst <= ORTHOGONALITY_TOLERANCE,
        f"max |R^T R - I| = {worst:.2e} ({place}), allowed {ORTHOGONALITY_TOLERANCE:g}",
    )


@quiet
def check_transforms(artifact: Artifact) -> list[Check]:
    """Two checks, A^-1 A = I and the conditions in the manifest; no checks if all rotations are orthogonal."""
    errors, conditions, wrong_claim = [], [], ""
    plans = [(place, plan) for place, _, plan in sides(artifact) if plan.transform]
    for place, plan in plans:
        found = transform_condition(plan)
        errors.append((inverse_error(plan) / found).max())
        conditions.append(found.max())
        for head, (own, claimed) in enumerate(zip(found.tolist(), plan.transform.condition)):
            if not wrong_claim and not abs(own - claimed) <= CLAIM_TOLERANCE * own:
                wrong_claim = f"{place} head {head}: expected {own:.6g}, found {claimed:.6g}"
    if not plans:
        return []
    error, largest = np.max(errors), np.max(conditions)
    return [
        Check(
            "inverses",
            bool(error <= INVERSE_TOLERANCE),
            f"max |A^-1 A - I| / condition = {error:.2e}, allowed {INVERSE_TOLERANCE:g}",
        ),
        Check(
            "condition",
            not wrong_claim and bool(largest <= MOST_CONDITION),
            wrong_claim or f"largest {largest:.3g}, allowed {MOST_CONDITION:g}",
        ),
    ]


def check_golden_rows(artifact: Artifact) -> list[Check]:
    """One check; none if no layer has golden rows."""
    layers = [layer for layer in artifact.layers.values() if layer.golden]
    if not layers:
        return []
    fault = next(filter(None, map(golden_fault, layers)), "")
    flags = [layer.golden.firm[side].ravel() for layer in layers for side in layer.sides]
    rows, firm = sum(map(len, flags)), sum(int(own.sum()) for own in flags)
    return [of_fault("golden rows", fault, f"{rows} rows in {len(layers)} layers coded alike, {firm} of them firm")]


def verify_artifact(artifact: Artifact) -> list[Check]:
    """All checks of an artifact that was loaded; a check that has nothing to check is left out."""
    has_basis, has_widths = (
        any(name in plan.tensors for _, _, plan in sides(artifact)) for name in ("eigenbasis", "channel_bits")
    )
    read = f"{len(artifact.layers)} layers, {len(artifact.file.tensors)} tensors"
    checks = [
        Check("schema, tensors, finite values", True, read),
        check_hash(artifact),
        of_fault("version", version_fault(artifact), artifact.file.metadata["version"]),
        check_geometry(artifact),
        check_orthogonality(artifact),
    ]
    if has_basis:
        fault = first_fault(artifact, lambda plan, _: spectrum_fault(plan))
        checks.append(of_fault("spectra", fault, "descending, not negative"))
    fault = first_fault(
        artifact, lambda plan, _: f and f"recipe {plan.recipe}: {f}" if (f := recipe_fault(plan)) else ""
    )
    checks.append(of_fault("recipes", fault, "agree with the tensors"))
    if has_widths:
        checks.append(of_fault("widths", first_fault(artifact, widths_fault), "of blocks, channels and sources agree"))
    return checks + check_transforms(artifact) + check_golden_rows(artifact)
