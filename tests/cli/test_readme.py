"""Every command in README.md works, in order, in a copy of the checkout; and every file it points at is there.

Nothing is installed or built: the copy's build/ holds the tools under test, set-up and cmake are stand-ins. A section
whose heading says "Measured" is left alone, since its commands take hours or a GPU."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from expected_text import normalised
from kvq_tools import BIN, ROOT

README = ROOT / "README.md"
NEEDS_TORCH = ("dump_qkv.py", "perplexity.py", "convert_oscar_dump.py", "fidelity.py")
LIMIT_SECONDS = 120

pytestmark = pytest.mark.skipif(not README.exists(), reason="there is no README.md")


@dataclass(frozen=True)
class Block:
    section: str
    language: str
    text: str

    def commands(self) -> list[str]:
        """Lines of `sh`, or what follows "$ " in `console`, with continued lines joined."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        return [line for line in lines if line.strip() and not line.startswith(("#", "git clone"))]


def read_blocks() -> list[Block]:
    if not README.exists():
        return []
    section, blocks = "", []
    for heading, language, text in re.findall(r"^#+ ([^\n]*)|^```(\w*)\n(.*?)^```$", README.read_text(), re.M | re.S):
        section = heading or section
        if not heading and "Measured" not in section:
            blocks.append(Block(section, language, text))
    return blocks


BLOCKS = [block for block in read_blocks() if block.language in ("sh", "console")]


def write_stub(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """What a clone holds, with tools as if they were built."""
    copy = tmp_path_factory.mktemp("checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    (copy / "build/release").mkdir(parents=True)
    (copy / "build/release/tools").symlink_to(BIN)
    write_stub(copy / "stubs/cmake", "exit 0")
    write_stub(copy / "scripts/test.sh", "exit 0")  # these tests are part of it
    write_stub(copy / "scripts/setup.sh", f'"{ROOT}/scripts/setup.sh" "$@" --check; test $? -le 1')
    (copy / ".venv").mkdir()
    write_stub(copy / ".venv/bin/python", f'exec "{sys.executable}" "$@"')
    return copy


def test_there_are_commands():
    assert len(BLOCKS) >= 3


@pytest.mark.parametrize("index", range(len(BLOCKS)), ids=[f"{block.section}-{i}" for i, block in enumerate(BLOCKS)])
def test_commands_work(checkout, index):
    commands = BLOCKS[index].commands()
    if any(name in line for line in commands for name in NEEDS_TORCH) and not importlib.util.find_spec("torch"):
        pytest.skip("needs torch: scripts/setup.sh --with-dump")
    environment = os.environ | {"PATH": f"{checkout}/stubs:{os.environ['PATH']}"}
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
        )
        (checkout / "said.txt").open("a").write(done.stdout)
        assert done.returncode == 0, f"{command}\n{done.stderr}"


def test_shown_output_is_what_the_tools_say(checkout):
    """Lines of ```text blocks that look like a tool's, up to results of float arithmetic."""
    if not (checkout / "said.txt").exists():
        pytest.skip("no command has run")
    said = {line.strip() for line in normalised((checkout / "said.txt").read_text()).splitlines()}
    for block in read_blocks():
        if block.language == "text":
            shown = [line.strip() for line in normalised(block.text).splitlines() if line.strip() not in ("", "...")]
            assert [line for line in shown if line not in said] == []


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", README.read_text())
    names = re.findall(r"`((?:scripts|formats|lib|sample_data|tests|tools)/[\w./-]*)`", README.read_text())
    assert links and [name for name in links + names if not (ROOT / name).exists()] == []
