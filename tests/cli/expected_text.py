"""Text of the tools without what differs between machines, versions and processors."""

import re

from kvq_tools import BIN


def hide_digits(match: re.Match) -> str:
    return re.sub(r"\d", "#", match[0])


def normalised(text: str) -> str:
    """Columns keep their width."""
    text = text.replace(f"{BIN}/", "")
    text = re.sub(r"\b(kvq|kvq-\w+|make_synthetic_dump\.py) \d+\.\d+\.\d+( \([0-9a-f]+\))?", r"\1 VERSION", text)
    text = re.sub(r"xxh3-128:[0-9a-f]{32}", "xxh3-128:HASH", text)
    text = re.sub(r"eof = \d+", "eof = N", text)
    text = re.sub(r"about .* on (\d+) threads \(.*\)", r"about TIME on \1 threads (RATE)", text)
    text = re.sub(r"memory    about .*", "memory    about SIZE", text)
    text = re.sub(r"(wrote \S+) \(.*\)", r"\1 (SIZE)", text)
    # Numbers in a manifest vary in length, and sizes with them.
    text = re.sub(r"(header of|file has only|but only) \d+ bytes", r"\1 N bytes", text)
    # How near rows lie to an edge, and which one a damaged rotation moves over it, follows from float arithmetic too.
    text = re.sub(r"coded alike, \d+ of them firm", "coded alike, N of them firm", text)
    text = re.sub(r"(FAILED  golden rows: )layer \d+: .*", r"\1PLACE", text)
    text = re.sub(r"[▁▂▃▄▅▆▇█]", "▄", text)
    # Results of float arithmetic: three digits or more behind the point, or a power of ten.
    return re.sub(r"\d+\.\d{3,}|\d+\.\d+e-\d+", hide_digits, text)
