"""Tokens -> sequences: which tokens a dump holds, decided before the model is loaded.

Each text is cut into windows that follow one another; a sequence is the prepended tokens and one window. It never
crosses from one text into the next.
"""

import hashlib
from dataclasses import dataclass
from itertools import chain, zip_longest

from ..errors import EXIT_INPUT, KvqError

# A text's last window is dropped if it is shorter than this: a handful of tokens with almost no context would count as
# much per token as all others, and no use of a model looks like them.
SHORTEST_REST = 16


@dataclass(frozen=True)
class CutPlan:
    """How texts are cut into sequences. Lengths include the prepended tokens; None means no limit."""

    sequence_length: int
    skip: int = 0
    budget: int | None = None
    windows: int | None = None


def cut_windows(tokens: list[int], width: int, windows: int | None, name: str) -> list[list[int]]:
    """Windows of `width` tokens from the start of `tokens`; the last window may be shorter.

    With `windows`, only whole windows count. Of N whole windows, every max(1, N // windows)-th is taken, beginning with
    the first, so that a few windows still come from all over the text.
    """
    if windows is None:
        pieces = [tokens[start : start + width] for start in range(0, len(tokens), width)]
        return [piece for piece in pieces if len(piece) >= min(width, SHORTEST_REST)]
    available = len(tokens) // width
    if available < windows:
        raise KvqError(
            EXIT_INPUT,
            f"{name}: expected {windows} windows of {width} tokens, found {available}",
            "ask for fewer with --windows, or for shorter ones with --sequence-length",
        )
    every = max(1, available // windows)
    return [tokens[i * every * width : (i * every + 1) * width] for i in range(windows)]


def within_budget(sequences: list[list[int]], budget: int | None) -> list[list[int]]:
    """The first sequences whose lengths sum to `budget`; the last is shortened to fit."""
    if budget is None:
        return sequences
    kept, left = [], budget
    for sequence in sequences:
        sequence = sequence[:left]
        if not sequence or (kept and len(sequence) < SHORTEST_REST):
            break
        kept.append(sequence)
        left -= len(sequence)
    return kept


def plan_sequences(texts: list[tuple[str, list[int]]], prefix: list[int], plan: CutPlan) -> list[list[int]]:
    """Token ids of every prompt. Texts take turns, so that a budget is spread over all texts.

    @param texts   (name, token ids without special tokens) of each text
    @param prefix  token ids in front of every sequence
    """
    width = plan.sequence_length - len(prefix)
    per_text = []
    for name, tokens in texts:
        rest = tokens[plan.skip :]
        if not rest:
            raise KvqError(
                EXIT_INPUT, f"{name}: expected more than {plan.skip} tokens, found {len(tokens)}", "lower --skip"
            )
        per_text.append([prefix + window for window in cut_windows(rest, width, plan.windows, name)])
    in_turns = [sequence for sequence in chain.from_iterable(zip_longest(*per_text)) if sequence is not None]
    sequences = within_budget(in_turns, plan.budget)
    if not sequences:
        raise KvqError(
            EXIT_INPUT,
            f"expected at least {min(width, SHORTEST_REST)} tokens of text, found fewer",
            "give more text, or a smaller --sequence-length",
        )
    return sequences


def find_duplicates(sequences: list[list[int]]) -> list[tuple[int, int]]:
    """Pairs (first, again) of sequences with the same tokens."""
    seen: dict[bytes, int] = {}
    pairs = []
    for index, sequence in enumerate(sequences):
        digest = hashlib.sha256(repr(sequence).encode()).digest()
        if digest in seen:
            pairs.append((seen[digest], index))
        else:
            seen[digest] = index
    return pairs
