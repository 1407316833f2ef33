"""What a rotation's recipe says, against kind, tensors and transform (formats/artifact.md, "Verifying")."""

import numpy as np

from .artifact import SidePlan, hadamard

RECIPE_TOLERANCE = 1e-6  # of an element of the rotation
GATHER_TOLERANCE = 1e-5  # of a source channel's energy
RESIDUAL_WORDS = frozenset({"Uc", "J", "Ue^T", "Ue", "Uc^T"})  # made from an eigenbasis that the file does not have
WORDS = frozenset({"I", "U", "H", "P", "S", "G", "Haar", "D", "B"})


def parse_recipe(text: str) -> tuple[str, list[list[str]]]:
    """(letter of the transform or "", lists of factors): heads that differ have one of several lists."""
    alternatives = [alternative.split("*") for alternative in text.split(" or ")]
    letter, first = "", alternatives[0]
    if first[0] in ("D", "B"):
        letter, alternatives[0] = first[0], first[1:] or ["I"]
    return letter, alternatives


def recipe_fault(plan: SidePlan) -> str:
    """The first fault; empty if there is none, or if the recipe has words that this reader does not know."""
    letter, alternatives = parse_recipe(plan.recipe)
    words = {word for factors in alternatives for word in factors}
    if words - WORDS - RESIDUAL_WORDS:
        return ""
    return (
        transform_fault(plan, letter)
        or kind_fault(plan, alternatives)
        or tensors_fault(plan, alternatives, words)
        or matrix_fault(plan, alternatives)
    )


def transform_fault(plan: SidePlan, letter: str) -> str:
    kind = plan.transform.kind if plan.transform else "none"
    expected = {"none": "", "diagonal": "D"}.get(kind, "B")
    return "" if letter == expected else f"the transform is {kind}, whose letter is {expected or 'none'}"


def kind_fault(plan: SidePlan, alternatives: list[list[str]]) -> str:
    if plan.kind == "dense":
        return ""
    hadamard_factors = ["S", "H"] if "hadamard_signs" in plan.tensors else ["H"]
    expected = ["I"] if plan.kind == "identity" else hadamard_factors
    return "" if alternatives == [expected] else f"kind {plan.kind}: expected the recipe {'*'.join(expected)}"


def tensors_fault(plan: SidePlan, alternatives: list[list[str]], words: set[str]) -> str:
    has_basis, names_basis = "eigenbasis" in plan.tensors, "U" in words or bool(words & RESIDUAL_WORDS)
    if has_basis and not names_basis:
        return "an eigenbasis is there, which no factor names"
    # A transform, and heads of several kinds, leave the eigenbasis out.
    if names_basis and not has_basis and not plan.transform and len(alternatives) == 1:
        return "a factor U, and no eigenbasis"
    if "G" in words and "channel_bits" not in plan.tensors:
        return "a factor G, and all channels have one width"
    return ""


def matrix_fault(plan: SidePlan, alternatives: list[list[str]]) -> str:
    if plan.kind != "dense" or "inverse" in plan.tensors or len(alternatives) > 1:
        return ""
    (factors,) = alternatives
    in_file = {"I", "P"} | {
        word
        for word, there in (
            ("U", "eigenbasis" in plan.tensors),
            ("H", plan.order > 0),
            ("S", "hadamard_signs" in plan.tensors),
        )
        if there
    }
    for head in range(len(plan.tensors["rotation"])):
        fault = product_fault(plan, factors, head) if set(factors) <= in_file else ""
        if not fault and "G" in factors and "channel_bits" in plan.tensors:
            fault = gather_fault(plan, head)
        if fault:
            return fault
    return ""


def entry(plan: SidePlan, name: str, head: int) -> np.ndarray:
    return plan.tensors[name][head].astype(np.float64)


def bit_reversal_places(count: int) -> list[int]:
    """OSCAR A.4, P_br: the index that the k-th largest gets. Indices from `count` on are left out."""
    bits = (count - 1).bit_length()
    reversed_indices = [int(f"{i:0{bits}b}"[::-1], 2) if bits else 0 for i in range(1 << bits)]
    return [index for index in reversed_indices if index < count]


def composed(plan: SidePlan, factors: list[str], head: int) -> np.ndarray:
    """The product of the factors, float64 [D, D]."""
    result = np.eye(plan.dim)
    for word in factors:
        if word == "U":
            result = result @ entry(plan, "eigenbasis", head)
        elif word == "H":
            result = result @ np.kron(np.eye(plan.dim // plan.order), hadamard(plan.order))
        elif word == "S":
            result = result * entry(plan, "hadamard_signs", head)
        elif word == "P":
            source, result = result, np.empty_like(result)
            result[:, bit_reversal_places(plan.dim)] = source
    return result


def product_fault(plan: SidePlan, factors: list[str], head: int) -> str:
    worst = float(np.abs(composed(plan, factors, head) - entry(plan, "rotation", head)).max())
    if worst <= RECIPE_TOLERANCE:
        return ""
    return (
        f"head {head}: the rotation differs from the product of its factors by {worst:.2e}, "
        f"allowed {RECIPE_TOLERANCE:.0e}"
    )


def gather_fault(plan: SidePlan, head: int) -> str:
    """Of a gathered rotation: the energy of each source channel must stay among the channels of one width."""
    factor = entry(plan, "rotation", head)
    if "eigenbasis" in plan.tensors:
        factor = entry(plan, "eigenbasis", head).T @ factor
    widths = plan.tensors["channel_bits"][head].astype(int)
    energy = np.square(factor[plan.tensors["channel_order"][head]])  # row p: the source of place p
    inside = np.where(widths[:, None] == widths, energy, 0).sum(axis=1)
    bad = ~(np.abs(1 - inside) <= GATHER_TOLERANCE)
    if not bad.any():
        return ""
    place = int(bad.argmax())
    return (
        f"head {head}: channel_order says that source channel {plan.tensors['channel_order'][head][place]} has "
        f"{widths[place]} bits, but {inside[place]:.1%} of it has"
    )
