"""Text of files and names of files: no control character reaches the output of a tool, and odd names work."""

import json

import pytest
from dumps import edited
from faulty_dumps import set_attribute
from kvq_tools import Result, calibrate, run, succeed

INPUT = 3
# A title and a color for terminals (C0 and C1), text turned around, commands for GitHub's runner, a second line.
NAME = "\x1b]0;title\x07\x1b[31m\x9b2J\u202eevil\u2066\n::error::line\n##[error]"
FORBIDDEN = [*map(chr, [*range(10), *range(11, 32), *range(127, 160)]), "\u202e", "\u2066", "\u2028"]


def expect_safe(result: Result, code: int = 0) -> Result:
    assert result.code == code, result
    for stream in (result.stdout, result.stderr):
        assert not [c for c in FORBIDDEN if c in stream], ascii(stream)
        assert not [line for line in stream.splitlines() if line.lstrip().startswith("::") or "##[" in line], stream
    return result


@pytest.fixture(scope="module")
def dump(make_dump, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    sound = make_dump(head_dim=32, tokens=61, layers=2)
    return edited(sound, folder / "dump.h5", set_attribute("/", "model_name", NAME))


@pytest.fixture(scope="module")
def artifact(dump, tmp_path_factory):
    return calibrate(dump, tmp_path_factory.mktemp("hostile") / "a", "--stats", dump.parent / "stats")


COMMANDS = [
    ("kvq-calibrate", "--model", "DUMP", "--output", "OUT"),
    ("kvq-calibrate", "--model", "DUMP", "--dry-run"),
    ("kvq-inspect", "ARTIFACT"),
    ("kvq-inspect", "ARTIFACT", "--layer", 0),
    ("kvq-inspect", "ARTIFACT", "--layer", 0, "--head", 0),
    ("kvq-inspect", "ARTIFACT", "--layout"),
    ("kvq-inspect", "ARTIFACT", "--verify"),
    ("kvq-eval", "--model", "DUMP", "--no-windows", "ARTIFACT"),
    ("kvq-diff", "ARTIFACT", "ARTIFACT"),
    ("kvq-diff", "ARTIFACT", "ARTIFACT", "--markdown"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(map(str, command)))
def test_names_inside_files_are_shown_safely(dump, artifact, tmp_path, command):
    words = {"DUMP": dump, "ARTIFACT": artifact, "OUT": tmp_path / "out"}
    expect_safe(run(*(words.get(word, word) for word in command)))


@pytest.mark.parametrize(
    "command",
    [("kvq-inspect", "ARTIFACT", "--json"), ("kvq-eval", "--model", "DUMP", "--no-windows", "ARTIFACT", "--json")],
    ids=lambda command: command[0],
)
def test_documents_are_safe_to_show_and_keep_the_name(dump, artifact, command):
    words = {"DUMP": dump, "ARTIFACT": artifact}
    result = expect_safe(run(*(words.get(word, word) for word in command)))
    assert NAME in json.dumps(json.loads(result.stdout), ensure_ascii=False) or NAME in texts(json.loads(result.stdout))


def texts(value) -> list[str]:
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for part in parts for text in texts(part)]


@pytest.mark.parametrize("name", ["-dash", "--model", "line\nfeed", "::error::x", "\x1b[2J\u202e", "a b'\"$(x)"])
def test_odd_file_names_work_and_are_shown_safely(make_dump, tmp_path, name):
    dump = tmp_path / f"{name}.h5"
    dump.write_bytes(make_dump(head_dim=32, tokens=61, layers=2).read_bytes())
    output = f"{name}.safetensors"
    expect_safe(run("kvq-calibrate", f"--model={name}.h5", f"--output={output}", "--stats=stats", cwd=tmp_path))
    assert (tmp_path / output).is_file()
    expect_safe(run("kvq-inspect", "--verify", "--", output, cwd=tmp_path))
    expect_safe(run("kvq-eval", f"--model={name}.h5", "--no-windows", f"--artifact={output}", cwd=tmp_path))
    expect_safe(run("kvq-diff", "--", output, output, cwd=tmp_path))
    for missing in (f"no{name}.h5", f"no{name}"):
        for command in (("kvq-calibrate", f"--model={missing}"), ("kvq-inspect", "--", missing)):
            result = expect_safe(run(*command, cwd=tmp_path), INPUT)
            assert len(result.stderr.splitlines()) == 1, "a name stays in its line"


def test_a_name_that_is_not_utf8_is_shown_by_its_bytes(make_dump, tmp_path):
    dump = tmp_path / "\udcff.h5"
    dump.write_bytes(make_dump(head_dim=32, tokens=61, layers=2).read_bytes())
    result = expect_safe(run("kvq-calibrate", "--model", dump, "--output", tmp_path / "\udcff.out"))
    assert "\\xff.out" in result.stdout
    succeed("kvq-calibrate", "--model", dump, "--dry-run", "--json")
