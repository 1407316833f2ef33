"""Text of the tools without what differs between machines, versions and processors."""

import re

from kvq_tools import BIN


def hide_digits(match: re.Match) -> str:
    return re.sub(r"\d", "#", match[0])


def normalized(text: str) -> str:
    """Replaces numbers that differ between machines; columns keep their widths."""
    text = text.replace(f"{BIN}/", "")
    text = re.sub(r"\b(kvq|kvq-\w+|make_synthetic_dump\.py) \d+\.\d+\.\d+( \([0-9a-f]+\))?", r"\1 VERSION", text)
    text = re.sub(r"xxh3-128:[0-9a-f]{32}", "xxh3-128:HASH", text)
    text = re.sub(r"eof = \d+", "eof = N", text)
    text = re.sub(r"about .* on (\d+) threads \(.*\)", r"about TIME on \1 threads (RATE)", text)
    text = re.sub(r"memory    about .*", "memory    about SIZE", text)
    text = re.sub(r"(wrote \S+) \(.*\)", r"\1 (SIZE)", text)
    # The manifest's numbers vary in length, so the sizes of files and headers vary, too.
    text = re.sub(r"(header of|file has only|but only) \d+ bytes", r"\1 N bytes", text)
    # Float arithmetic also decides how many rows are firm, and which row a damaged rotation changes first.
    text = re.sub(r"coded alike, \d+ of them firm", "coded alike, N of them firm", text)
    text = re.sub(r"(FAILED  golden rows: )layer \d+: .*", r"\1PLACE", text)
    text = re.sub(r"[▁▂▃▄▅▆▇█]", "▄", text)
    # Results of float arithmetic: numbers with three or more digits after the point, or with a power of ten.
    return re.sub(r"\d+\.\d{3,}|\d+\.\d+e-\d+", hide_digits, text)
