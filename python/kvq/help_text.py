"""Help texts of at most 80 columns, whatever the width of the terminal."""

import argparse
import re

COLUMNS = 80
FARTHEST_TEXT = COLUMNS // 2  # text that begins farther to the right moves to a line of its own


def indent_of(line: str) -> int:
    return len(line) - len(line.lstrip())


def gap_end(line: str) -> int:
    """Where the second part of a line begins, behind the first wide gap; 0 if there is none."""
    gap = re.search(r"\S(\s{2,})\S", line)
    return gap.end(1) if gap else 0


def is_command(line: str) -> bool:
    """Whether a line begins, indented, with the name of a program."""
    return bool(re.match(r"\s+(kvq-[a-z-]+|[a-z_]+\.py) ", line))


def break_line(line: str, start: int, indent: int, end: str = "") -> str:
    """Breaks `line` at spaces behind `start`. Continuation lines have the indent; `end` closes the others."""
    rows, row, words = [], line[:start], line[start:].split()
    for place, word in enumerate(words):
        fits = len(row) + 1 + len(word) + (len(end) if place + 1 < len(words) else 0) <= COLUMNS
        if row.strip() and row != line[:start] and not fits:
            rows.append(row + end)
            row = " " * indent
        row += word if not row.strip() or row == line[:start] else " " + word
    return "\n".join([*rows, row])


def wrap_line(line: str) -> str:
    """A line in as many lines as it needs. A command continues behind a backslash, other text below its beginning."""
    first, second = indent_of(line), gap_end(line)
    if second > FARTHEST_TEXT:
        return wrap_line(line[:second].rstrip()) + "\n" + wrap_line(" " * (first + 4) + line[second:])
    if len(line) <= COLUMNS:
        return line
    if second:
        return break_line(line, second, second)
    return break_line(line, first, first + 2, " \\") if is_command(line) else break_line(line, first, first)


def joined(lines: list[str]) -> list[str]:
    """Appends to a line the lines that continue it: those below its second part, and those behind a long line."""
    result: list[str] = []
    is_long = False
    for line in lines:
        before = result[-1] if result else ""
        indent = indent_of(line)
        if line.strip() and before.strip() and indent > FARTHEST_TEXT:
            result[-1] += ("  " if not gap_end(before) else " ") + line.strip()
        elif line.strip() and is_long and indent == indent_of(before) and not (is_command(line) or is_command(before)):
            result[-1] += " " + line.strip()
        else:
            result.append(line)
        is_long = len(line) > COLUMNS
    return result


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str):
        super().__init__(prog, width=COLUMNS, max_help_position=26)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(wrap_line(indent + line) for line in joined(text.splitlines()))
