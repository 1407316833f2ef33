"""Text of unknown origin, made safe to show: the same rules as lib/kvq/core/text.h."""

import re

# What a terminal or a CI runner acts on: C0, DEL and C1, marks that change the direction of text, separators of lines
# and paragraphs, byte order marks, and lone surrogates (bytes of a file name that are not UTF-8).
_ACTED_ON = "\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff"
_CONTROL = re.compile(f"[{_ACTED_ON}]")
_CONTROL_OR_LINE = re.compile(f"[{_ACTED_ON}\n]")
# Commands to GitHub's runner: "::" at the start of a line, "##[" anywhere.
_COMMAND = re.compile(r"^( *):(?=:)|#(?=#\[)", re.MULTILINE)
_COMMAND_AT_START = re.compile(r"\A( *):(?=:)|#(?=#\[)")


def _escaped(match: re.Match) -> str:
    point = ord(match[0])
    if 0xDC80 <= point <= 0xDCFF:  # surrogateescape: a byte
        return f"\\x{point - 0xDC00:02x}"
    return f"\\x{point:02x}" if point < 0x20 else f"\\u{point:04x}"


def _escaped_command(match: re.Match) -> str:
    return f"{match[1]}\\u003a" if match[1] is not None else "\\u0023"


def safe_line(text: object) -> str:
    """One line: a file's name, or a name inside a file."""
    return _COMMAND_AT_START.sub(_escaped_command, _CONTROL_OR_LINE.sub(_escaped, str(text)))


def safe_text(text: object) -> str:
    """Several lines: line feeds stay."""
    return _COMMAND.sub(_escaped_command, _CONTROL.sub(_escaped, str(text)))
