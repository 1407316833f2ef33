"""Every command in README.md and docs/*.md works, and every file and heading that a page points at is there.

A page's commands run in order, in a copy of the checkout that belongs to this page alone, so a page has to make what
it uses. Nothing is installed or built: the copy's build/ holds the tools under test; set-up and cmake are stand-ins.
The words behind a fence say what becomes of its block:

    sh              every line runs (but `git clone`)
    console         lines after "$ " run
    text            output: the block of commands above it must have printed these lines, in this order, up to results
                    of float arithmetic; `...` stands for others
    sh gpu, sh long not run, because a GPU, or hours, or files of the reader's are needed
    any other       not looked at

Nor does anything run in a section whose heading, or a heading above it, says "Measured". Of commands that do not run,
programs and flags must exist."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import check_layers
import pytest
from expected_text import normalized
from kvq_tools import BIN, ROOT

README = ROOT / "README.md"
PAGES = [path for path in [README, *sorted((ROOT / "docs").glob("*.md"))] if path.exists()]
LINKED = [*PAGES, *sorted((ROOT / "formats").glob("*.md")), ROOT / "lib/kvq/README.md"]
LINKED += [
    ROOT / f"{folder}/README.md" for folder in ("examples", "python", "sample_data", "scripts", "tests/emulator")
]
NEEDS_TORCH = ("dump_qkv.py", "perplexity.py", "convert_oscar_dump.py", "fidelity.py", "outlier_twin.py")
PROGRAM = re.compile(r"(^|/)(kvq-[a-z-]+|scripts/[\w/]+\.(py|sh))$")
SHELLS = ("sh", "console")
LIMIT_SECONDS = 300  # a guard against a hang, also on a busy machine
LARGE_BYTES = 1 << 20
COLUMNS, README_LINES = 120, 130
ENGINE_HAS = (
    "kvq_stream stream, void* memory, void* cache_memory, void* buffer, int32_t num_layers, int32_t num_pages, "
    "const kvq_layer_pools* pools, kvq_cache* cache, const kvq_sequences* sequences, const int32_t* page_numbers, "
    "kvq_step_args step, kvq_append_args append"
)

pytestmark = pytest.mark.skipif(not README.exists(), reason="there is no README.md")


@dataclass(frozen=True)
class Block:
    language: str
    is_run: bool
    text: str

    def commands(self) -> list[str]:
        """Lines of a `sh` block, or the text after "$ " in a `console` block, with continued lines joined."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        return [line for line in lines if line.strip() and not line.startswith(("#", "git clone"))]


def read_blocks(page: Path) -> list[Block]:
    headings: list[str] = []
    blocks = []
    found = re.findall(r"^(#+) ([^\n]*)|^```([^\n]*)\n(.*?)^```$", page.read_text(), re.M | re.S)
    for level, heading, info, text in found:
        if level:
            headings[len(level) - 1 :] = [heading]
        else:
            language, *note = info.split() or [""]
            measured = any("Measured" in name for name in headings)
            blocks.append(Block(language, language in SHELLS and not note and not measured, text))
    return blocks


def commands_of(page: Path, are_run: bool) -> list[str]:
    shown = [block for block in read_blocks(page) if block.language in SHELLS and block.is_run == are_run]
    return [command for block in shown for command in block.commands()]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def each(pages: list[Path]):
    return pytest.mark.parametrize("page", pages, ids=name_of)


def write_stub(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path) -> Path:
    """The files of a clone, with stubs in place of built tools."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, listed):
        source, target = ROOT / name, tmp_path / name
        if not source.is_file():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.stat().st_size > LARGE_BYTES:
            target.symlink_to(source)
        else:
            shutil.copy(source, target)
    (tmp_path / "build/release").mkdir(parents=True)
    (tmp_path / "build/release/tools").symlink_to(BIN)
    write_stub(tmp_path / "stubs/cmake", "exit 0")
    write_stub(tmp_path / "scripts/test.sh", "exit 0")  # scripts/test.sh runs these tests, so a stub replaces it
    write_stub(tmp_path / "scripts/setup.sh", f'"{ROOT}/scripts/setup.sh" "$@" --check; test $? -le 1')
    (tmp_path / ".venv").mkdir()
    write_stub(tmp_path / ".venv/bin/python", f'exec "{sys.executable}" "$@"')
    return tmp_path


def test_there_are_commands():
    assert len(commands_of(README, True)) >= 3


@each([page for page in PAGES if commands_of(page, True)])
def test_commands_work_and_say_what_the_page_shows(checkout, page):
    commands = commands_of(page, True)
    if any(name in line for line in commands for name in NEEDS_TORCH) and not importlib.util.find_spec("torch"):
        pytest.skip("needs torch: scripts/setup.sh --with-dump")
    environment = {name: value for name, value in os.environ.items() if name != "KVQ_BIN"}
    environment["PATH"] = f"{checkout}/stubs:{environment['PATH']}"
    said = ""
    for block in read_blocks(page):
        if block.is_run:
            said = "".join(output_of(command, checkout, environment) for command in block.commands())
        elif block.language == "text":
            assert first_line_not_printed(block.text, said) is None, said


def output_of(command: str, folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


def first_line_not_printed(shown: str, said: str) -> str | None:
    """The first shown line that is not in the output, below the lines shown before it."""
    printed = iter([line.strip() for line in without_results(said).splitlines()])
    wanted = [line.strip() for line in without_results(shown).splitlines()]
    return next((line for line in wanted if line not in ("", "...") and line not in printed), None)


def without_results(text: str) -> str:
    """`normalized` text; changes in percent also differ between machines."""
    return re.sub(r"[-+]\d+\.\d%", "+N%", normalized(text))


@pytest.mark.parametrize(
    ("shown", "lost"),
    [
        ("b 0.123\n...\nd +7.1%", None),
        ("a\nc", None),
        ("c\na", "a"),  # another order
        ("a\na", "a"),  # printed once
        ("b 0.12", "b 0.12"),
        ("e\n", "e"),
    ],
)
def test_shown_lines_must_be_printed_in_order(shown, lost):
    assert first_line_not_printed(shown, "a\nb 0.456\nc\nd -12.3%\n") == lost


@each([page for page in PAGES if commands_of(page, False)])
def test_commands_that_do_not_run_name_programs_and_flags_that_exist(page):
    unknown = []
    for command in commands_of(page, False):
        words = command.split()
        program = next(
            (word for word in words if re.search(r"(^|/)(kvq-[a-z-]+|scripts/[\w/]+\.(py|sh))$", word)), None
        )
        if program is None:
            continue
        help_text = what_is_known_of(program, words)
        unknown += [
            f"{program} {word}" for word in words if word.startswith("--") and word.split("=")[0] not in help_text
        ]
    assert unknown == []


def what_is_known_of(program: str, words: list[str]) -> str:
    """The help text that lists a program's flags; if the program was not built, all words of the command."""
    if "kvq-" not in program:
        script = ROOT / program[program.index("scripts/") :]
        if script.suffix == ".sh":
            return script.read_text()
        command = [sys.executable, script, "--help"]
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS).stdout
    tool = BIN / Path(program).name
    if not tool.is_file():
        return " ".join(words)
    following = words[words.index(program) + 1 : words.index(program) + 2]
    command = [tool, *(word for word in following if re.fullmatch("[a-z]+", word)), "--help"]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS).stdout


def anchors_of(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    anchors: set[str] = set()
    for heading in re.findall(r"^#+ ([^\n]*)", text, re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        copies = sum(
            other == anchor or re.fullmatch(re.escape(anchor) + r"-\d+", other) is not None for other in anchors
        )
        anchors.add(f"{anchor}-{copies}" if copies else anchor)
    return anchors


@each(LINKED)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    lost = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            lost.append(link)
    names = re.findall(r"`((?:scripts|formats|lib|sample_data|tests|tools|docs|examples|python)/[\w./-]*)`", text)
    assert [name for name in names if not (ROOT / name).exists()] + lost == []


@each(PAGES)
def test_lines_are_short(page):
    assert [line for line in page.read_text().splitlines() if len(line) > COLUMNS] == []


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= README_LINES


def test_numbers_of_the_readme_are_measured_ones():
    """The first screen of README.md quotes docs/measurements.md."""
    rows = re.findall(
        r"^\| `(?:saw-int4|oscar|quarot|kvq)\b[^|]*\| ([^|]*) \| ([^|]*) \| ([^|]*) \|", README.read_text(), re.M
    )
    measured = (ROOT / "docs/measurements.md").read_text()
    numbers = [number for row in rows for number in re.findall(r"~?[\d.]+", " ".join(row))]
    assert len(rows) == 4 and [number for number in numbers if not re.search(rf"[|* ]{number}[|* ]", measured)] == []


@pytest.mark.skipif(not (shutil.which("cc") and shutil.which("c++")), reason="needs a C and a C++ compiler")
@each([page for page in PAGES if any(block.language in ("c", "cpp") for block in read_blocks(page))])
def test_code_blocks_compile(page, tmp_path):
    """All C blocks of a page form one function of an engine; each C++ block forms a function."""
    blocks = read_blocks(page)
    c = "".join(block.text for block in blocks if block.language == "c")
    sources = {"page.c": f"#include <kvq/runtime.h>\n#include <stdio.h>\nvoid engine({ENGINE_HAS}) {{\n{c}}}\n"}
    for i, block in enumerate(block for block in blocks if block.language == "cpp"):
        body = re.sub(r"^#include [^\n]*", "", block.text, flags=re.M)
        sources[f"page{i}.cpp"] = (
            f"#include <kvq/runtime.hpp>\n#include <cstdio>\nvoid engine(kvq_stream stream) {{\n{body}}}\n"
        )
    for name, text in sources.items():
        (tmp_path / name).write_text(text)
        compiler = ["cc", "-std=c99"] if name.endswith(".c") else ["c++", "-std=c++20"]
        command = [*compiler, "-fsyntax-only", f"-I{ROOT}/lib", name]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_SECONDS)
        assert done.returncode == 0, done.stderr


def test_every_page_is_in_the_index():
    index = (ROOT / "docs/README.md").read_text()
    pages = [page.name for page in PAGES if page.parent.name == "docs" and page.name != "README.md"]
    assert [name for name in pages if f"]({name})" not in index] == []


def test_the_table_of_folders_is_what_is_checked():
    """lib/kvq/README.md states for each folder the same allowed includes as scripts/check_layers.py."""
    rows = re.findall(r"^\| `(\w+)/` \| [^|]* \| ([^|]*) \|", (ROOT / "lib/kvq/README.md").read_text(), re.M)
    assert {folder: re.findall(r"\w+", needs.replace("nothing", "")) for folder, needs in rows} == check_layers.NEEDS
