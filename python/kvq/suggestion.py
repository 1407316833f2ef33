"""The name that a mistyped word most likely means. lib/kvq/core/suggestion.h has the same rule for the tools."""

from collections.abc import Iterable

LONGEST_WORD, SHORTEST_START = 64, 3


def folded(word: str) -> str:
    return word.lower().replace("_", "-")


def edit_distance(a: str, b: str) -> int:
    """Letters changed, added, left out or swapped with their neighbor."""
    before: list[int] = []
    last = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            row.append(min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (x != y)))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                row[j] = min(row[j], before[j - 2] + 1)
        before, last = last, row
    return last[-1]


def nearest_name(word: str, names: Iterable[str]) -> str | None:
    """The name with the fewest changed letters, at most one in three (at least one), else the only name that begins
    with the word. Letters of either case, and '-' and '_', count as equal."""
    names = list(names)
    if not 0 < len(word) <= LONGEST_WORD:
        return None
    typed = folded(word)
    distances = [(edit_distance(typed, folded(name)), place) for place, name in enumerate(names)]
    least, place = min(distances, default=(len(typed), 0))
    if least <= max(1, len(typed) // 3) and least < len(typed):
        return names[place]
    begun = [name for name in names if folded(name).startswith(typed)]
    return begun[0] if len(begun) == 1 and len(typed) >= SHORTEST_START else None
