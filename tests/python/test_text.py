"""Text of files is safe to show, by the same rules as the C++ tools (tests/unit/core/text_test.cpp)."""

import io

import pytest

from kvq import cli
from kvq.errors import bad_input
from kvq.text import safe_line, safe_text

SHOWN = [
    ("plain ~ \u00fc\u20ac\U0001f600", "plain ~ \u00fc\u20ac\U0001f600"),
    ("a\x1b[31mb\r\t\x00", "a\\x1b[31mb\\x0d\\x09\\x00"),
    ("\x7f\x80\x9b\x9f\xa0", "\\u007f\\u0080\\u009b\\u009f\xa0"),
    (
        "\u202a\u202e\u2066\u2069\u200e\u200f\u061c\u2028\u2029\ufeff",
        "".join(f"\\u{ord(c):04x}" for c in "\u202a\u202e\u2066\u2069\u200e\u200f\u061c\u2028\u2029\ufeff"),
    ),
    ("::error::no", "\\u003a:error::no"),
    ("  ::error::no", "  \\u003a:error::no"),
    ("a ::b :c", "a ::b :c"),
    ("x##[error]", "x\\u0023#[error]"),
    ("###[", "#\\u0023#["),
    ("\udcff", "\\xff"),
]


@pytest.mark.parametrize("text, shown", SHOWN, ids=ascii)
def test_what_a_terminal_acts_on_is_escaped(text, shown):
    assert safe_line(text) == shown
    assert safe_text(text) == shown


def test_lines_stay_in_text_and_not_in_a_line():
    assert safe_text("a\n::b\n") == "a\n\\u003a:b\n"
    assert safe_line("a\n::b") == "a\\x0a::b"


def test_programs_print_safe_text(capsys):
    def main():
        print("\x1b]0;title\x07\n::add-mask::x")
        raise bad_input("a\nb\x9b", "c\x1b")

    assert cli.run_script("tool.py", main) == 3
    captured = capsys.readouterr()
    assert captured.out == "\\x1b]0;title\\x07\n\\u003a:add-mask::x\n"
    assert captured.err == "tool.py: error: a\\x0ab\\u009b\nhint: c\\x1b\n"


def test_progress_may_rewrite_its_line_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    stream = cli.SafeStream(terminal)
    for text in ("\r\x1b[K", "\rdone \x1b[1m 3\x1b[K", "name\r\x1b[K"):
        stream.write(text)
    assert terminal.getvalue() == "\r\x1b[K\rdone \\x1b[1m 3\x1b[Kname\\x0d\\x1b[K"


@pytest.mark.parametrize("text", ["010", "+1", "0x10", "1_000", " 1", "1.0", "", "-", "-01", "\u0661"])
def test_integers_are_decimal(text):
    with pytest.raises(cli.argparse.ArgumentTypeError, match="decimal integer"):
        cli.decimal_integer(text)


def test_every_integer_of_a_program_is_decimal(capsys):
    parser = cli.Parser("tool.py", "does", "ends")
    parser.add_argument_group("numbers").add_argument("--count", type=int)
    assert parser.parse_args(["--count", "-10"]).count == -10
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--count", "010"])
    assert (
        "--count: expected a decimal integer without leading zeros, which could mean octal, found 010"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("text, value", [("0", 0), (str(2**63 - 1), 2**63 - 1), ("-1", None), (str(2**63), None)])
def test_seeds_are_63_bits(text, value):
    if value is not None:
        assert cli.seed(text) == value
        return
    with pytest.raises(cli.argparse.ArgumentTypeError, match="seed from 0 to"):
        cli.seed(text)
