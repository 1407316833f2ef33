"""Flags from a file: `--config` takes lines of TOML, and an error names file and line without quoting the file."""

import os

import pytest
from kvq_tools import Result, calibrate, run, succeed

USAGE, INPUT = 2, 3
SECRET = "hunter2"


@pytest.fixture(scope="module")
def dump(make_dump):
    return make_dump(head_dim=32, tokens=61, layers=2)


def refused(dump, tmp_path, text: str | bytes, code: int, *words: str) -> Result:
    config = tmp_path / "recipe.toml"
    config.write_bytes(text.encode() if isinstance(text, str) else text)
    result = run("kvq-calibrate", "--model", dump, "--output", tmp_path / "out", "--config", config)
    assert result.code == code and result.stdout == "" and not (tmp_path / "out").exists()
    assert result.stderr.startswith(f"kvq-calibrate: error: --config: {config}: "), result.stderr
    assert all(word in result.stderr for word in words), result.stderr
    assert SECRET not in result.stderr
    return result


RECIPE = """\
# A recipe.
; also a comment
method = saw-int4   # behind a value
--bits-k = 3

center = "kv"
exact-layers = '1'
random-signs = true
collect = [
  "key",    # one
  value,
]
"""


def test_a_recipe_gives_the_flags(dump, tmp_path):
    config = tmp_path / "recipe.toml"
    config.write_text(RECIPE)
    flags = ("--method", "saw-int4", "--bits-k", 3, "--center", "kv", "--exact-layers", 1, "--random-signs")
    flags += ("--collect", "key", "--collect", "value")
    by_file = calibrate(dump, tmp_path / "a", "--config", config)
    assert by_file.read_bytes() == calibrate(dump, tmp_path / "b", *flags).read_bytes()


def test_a_recipe_may_name_the_files_and_switch_flags_off(dump, tmp_path):
    config = tmp_path / "recipe.toml"
    quoted = str(tmp_path / "a b.safetensors")
    config.write_text(f'model = ["{dump}"]\r\noutput = "{quoted}"\r\njson = false\r\nquiet=true')
    assert succeed("kvq-calibrate", "--config", config).stdout == ""
    assert os.path.exists(quoted)


MALFORMED = [
    (f"bits = 2\n{SECRET}\n", "line 2: expected name = value"),
    (f"root:$6${SECRET}:19000:0:99999:7:::\n", "line 1: expected name = value"),
    (f"[{SECRET}]\n", "line 1: sections are not supported"),
    (f"bits = 2 {SECRET}\n", "line 1: expected the end of the line behind the value"),
    (f'center = "{SECRET}\n', 'line 1: the text has no end, expected "'),
    (f"center = '{SECRET}\n", "line 1: the text has no end, expected '"),
    (f'center = "\\u{SECRET}"\n', "line 1: expected \\\\"),
    (f"\n\ncollect = [key,\n{SECRET}\n", "line 3: the list has no end, expected ]"),
    (f"collect = [key {SECRET}]\n", "line 1: expected , or ] behind a value of the list"),
    ("collect = []\n", "line 1: expected a list with values"),
    ("bits =\n", "line 1: expected a value"),
    ("bits = # 2\n", "line 1: expected a value"),
    (f"= {SECRET}\n", "line 1: expected name = value"),
    (f"center = k{{{SECRET}}}\n", "line 1: a value with such characters needs quotes"),
    ("bits = 2\ncenter = k\nbits = 3\n", "line 3: the flag stands already in line 1"),
    (f"{SECRET} \x00\n", "not a text in UTF-8"),
    (SECRET.encode() + b"\xff\n", "not a text in UTF-8"),
    (f"# {SECRET}\n" * 120_000, "expected at most 1048576 bytes, found more"),
]


@pytest.mark.parametrize("text, words", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_recipes_are_refused_by_line(dump, tmp_path, text, words):
    refused(dump, tmp_path, text, INPUT, words)


@pytest.mark.parametrize(
    "line, words",
    [
        (f"{SECRET} = 1", "there is no flag of this name"),
        (f"frobnicate = {SECRET}", "there is no flag of this name"),
        ("config = other.toml", "there is no flag of this name"),
        ("help = true", "there is no flag of this name"),
        (f"bits-k = {SECRET}", "--bits-k does not take this value"),
        (f"threads = [1, {SECRET}]", "--threads does not take this value"),
        ("threads = 010", "--threads does not take this value"),
        ("seed = 9223372036854775808", "--seed does not take this value"),
        (f"json = {SECRET}", "--json does not take this value"),
        ("json = [true, true]", "--json does not take this value"),
    ],
)
def test_flags_that_a_tool_does_not_take_are_refused_by_line(dump, tmp_path, line, words):
    refused(dump, tmp_path, f"\n{line}\n", USAGE, f"line 2: {words}", "hint: ")


def test_only_regular_files_are_read(dump, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, words in [
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path, "not a regular file"),
        ("/dev/zero", "not a regular file"),
        (tmp_path / "none\x1b", "none\\x1b: cannot open: No such file or directory"),
    ]:
        result = run("kvq-calibrate", "--model", dump, "--config", path)
        assert result.code == INPUT and words in result.stderr, result
