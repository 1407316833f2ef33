"""Which tokens are held out, golden and counted. It follows from the lengths of the sequences alone, so it is decided
before the model runs, by the rules of formats/stats.md."""

from dataclasses import dataclass

import numpy as np

from ..errors import usage

LEAST_HELD_OUT = 8
MOST_HELD_OUT_QUERIES = 512


@dataclass(frozen=True)
class Span:
    """Tokens [first, first + count), counted over all sequences."""

    first: int = 0
    count: int = 0

    @property
    def end(self) -> int:
        return self.first + self.count

    def within(self, start: int, length: int) -> slice | None:
        """Its places in the sequence that begins at token `start`; None if it is of another sequence."""
        if self.count == 0 or not start <= self.first < start + length:
            return None
        return slice(self.first - start, self.end - start)


def choose_held_out(lengths: list[int], wanted: int) -> Span:
    """The first tokens of the longest sequence, the first of equal ones: at most `wanted` and a third of all tokens."""
    longest = int(np.argmax(lengths))
    count = min(lengths[longest], wanted, sum(lengths) // 3)
    return Span(sum(lengths[:longest]), count) if count >= LEAST_HELD_OUT else Span()


def choose_golden(lengths: list[int], wanted: int, held_out: Span) -> Span:
    """The last tokens of the sequence with the most tokens that are not held out, the first of equal ones."""
    starts = np.cumsum([0, *lengths])
    own = [length - (held_out.count if held_out.within(start, length) else 0) for start, length in zip(starts, lengths)]
    chosen = int(np.argmax(own))
    count = min(wanted, own[chosen])
    return Span(int(starts[chosen + 1]) - count, count)


class TokenPlan:
    """The sequences of a run and the part that each token plays.

    lengths    of the sequences, with the `generated` tokens at the end of each
    stride     of positions
    queries    whose queries count: all, generated or prompt
    """

    def __init__(self, lengths: list[int], generated: int, stride: int, queries: str, held_out: int, golden: int):
        self.lengths, self.generated, self.stride, self.queries = lengths, generated, stride, queries
        self.starts = np.cumsum([0, *lengths])
        self.held_out = choose_held_out(lengths, held_out)
        self.golden = choose_golden(lengths, golden, self.held_out)
        if not any(self.counts(index).any() for index in range(len(lengths))):
            left = self.tokens - self.held_out.count
            raise usage(f"--queries {queries}: none of the {left} tokens in the sums is one")

    @property
    def tokens(self) -> int:
        return int(self.starts[-1])

    def sequence_at(self, row: int) -> int:
        """Index of the sequence that has this token."""
        return int(np.searchsorted(self.starts, row, side="right")) - 1

    def in_sums(self, index: int) -> np.ndarray:
        """bool [length]: the tokens of a sequence that are not held out."""
        inside = np.ones(self.lengths[index], bool)
        if (held := self.held_out.within(int(self.starts[index]), self.lengths[index])) is not None:
            inside[held] = False
        return inside

    def counts(self, index: int) -> np.ndarray:
        """bool [length]: the tokens of a sequence whose queries are in the sums."""
        is_generated = np.arange(self.lengths[index]) >= self.lengths[index] - self.generated
        chosen = {"all": True, "generated": is_generated, "prompt": ~is_generated}[self.queries]
        return self.in_sums(index) & chosen

    def held_out_queries(self) -> np.ndarray:
        """int64 [m]: places among the held-out tokens, evenly spaced, of the queries that are kept."""
        count = self.held_out.count
        kept = min(MOST_HELD_OUT_QUERIES, count)
        return np.array([(2 * i + 1) * count // (2 * kept) for i in range(kept)], np.int64)
