"""One table of exit codes: docs/cli.md, lib/kvq/core and python/kvq say the same, and programs end with them."""

import re
import signal
import subprocess
import sys

import pytest
from dumps import edited
from faulty_artifacts import edit_rotation, flip_last_bit, with_metadata
from kvq_tools import BIN, ROOT, calibrate, run, start, succeed, wait_for_layers

from kvq import errors

WORDS = {
    "done": errors.EXIT_DONE,
    "bug": errors.EXIT_BUG,
    "usage": errors.EXIT_USAGE,
    "input": errors.EXIT_INPUT,
    "numerical": errors.EXIT_NUMERICAL,
    "unsupported": errors.EXIT_UNSUPPORTED,
    "check_failed": errors.EXIT_CHECK_FAILED,
    "interrupted": errors.EXIT_INTERRUPTED,
}


def documented() -> dict[int, str]:
    text = (ROOT / "docs/cli.md").read_text().partition("| exit code |")[2].partition("\n\n")[0]
    return {int(code): meaning for code, meaning in re.findall(r"^\| (\d+) \| (.*) \|$", text, re.MULTILINE)}


def shown(tool: str) -> dict[int, str]:
    text = succeed(tool, "--help").stdout.partition("\nExit codes:\n")[2]
    rows = re.sub(r"\n {7}", " ", text)
    return {int(code): meaning for code, meaning in re.findall(r"^  (\d+) +(.*)$", rows, re.MULTILINE)}


def test_the_tables_agree():
    header = (ROOT / "lib/kvq/core/exit_code.h").read_text()
    enum = dict(re.findall(r"^  (\w+) = (\d+),$", header, re.MULTILINE))
    assert {word: int(code) for word, code in enum.items()} == WORDS
    assert shown("kvq-calibrate") == errors.EXIT_CODES == shown("kvq-diff")
    # The page may say more of a code, behind a colon or a semicolon.
    assert documented().keys() == errors.EXIT_CODES.keys()
    for code, meaning in errors.EXIT_CODES.items():
        assert documented()[code].startswith(meaning)


@pytest.mark.parametrize("path", sorted((ROOT / "python/kvq").rglob("*.py")), ids=lambda path: path.name)
def test_programs_name_codes_that_are_in_the_table(path):
    text = re.sub(r'"\s*\n\s*"', "", path.read_text())
    for line in re.findall(r"^exit codes: .*(?:\n\S.*)*", text, re.MULTILINE):
        codes = re.findall(r"(?:^exit codes: |, )(\d+) ", line)
        assert codes and {int(code) for code in codes} <= errors.EXIT_CODES.keys()


def script(*words: object) -> int:
    command = [sys.executable, ROOT / "scripts" / words[0], *map(str, words[1:])]
    return subprocess.run(command, capture_output=True, timeout=120).returncode


def test_programs_end_with_the_codes(make_dump, tmp_path):
    dump = make_dump()
    artifact = calibrate(dump, tmp_path / "a.safetensors")
    flipped, newer = tmp_path / "flipped.safetensors", tmp_path / "newer.safetensors"
    flipped.write_bytes(edit_rotation(artifact.read_bytes(), flip_last_bit))
    newer.write_bytes(with_metadata(artifact.read_bytes(), version="2.0"))

    def nan(file) -> None:
        file["layers/0/k"][0, 0, 0] = float("nan")

    assert run("kvq-inspect", artifact, "--verify").code == script("read_artifact.py", artifact) == errors.EXIT_DONE
    assert run("kvq-inspect").code == script("read_artifact.py") == errors.EXIT_USAGE
    assert run("kvq-inspect", dump).code == script("read_artifact.py", dump) == errors.EXIT_INPUT
    assert run("kvq-calibrate", edited(dump, tmp_path / "nan.h5", nan)).code == errors.EXIT_NUMERICAL
    assert script("read_artifact.py", flipped, "--verify") == errors.EXIT_CHECK_FAILED
    assert run("kvq-inspect", flipped, "--verify").code in (errors.EXIT_CHECK_FAILED, errors.EXIT_INPUT)
    rule = ("--no-default-rules", "--fail-on", "bytes_per_token<=-1%")
    assert run("kvq-diff", artifact, artifact, *rule).code == errors.EXIT_CHECK_FAILED
    assert run("kvq-inspect", newer).code == script("read_artifact.py", newer) == errors.EXIT_UNSUPPORTED


def test_an_interrupted_run_ends_with_130(make_dump, tmp_path):
    process = start(make_dump(layers=6, tokens=3000, head_dim=64), tmp_path / "a.safetensors")
    wait_for_layers(process, tmp_path / "a.safetensors", 1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == errors.EXIT_INTERRUPTED, BIN
