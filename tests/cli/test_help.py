"""Help texts: -h fits a screen, --help fits 80 columns, and manual pages and completions have the same flags."""

import re
import shutil
import subprocess
import sys

import pytest
from kvq_tools import BIN, ROOT, run, succeed

COLUMNS, SCREEN_LINES = 80, 40
TOOLS = [name for name in sorted(path.name for path in BIN.glob("kvq-*")) if "." not in name and "-pages" not in name]
COMMANDS = {"kvq-bench": ("decode", "write", "prefill", "targets")}
SCRIPTS = sorted(path.name for path in (ROOT / "scripts").glob("*.py") if "from kvq" in path.read_text())
# What CLI11's own texts look like.
FOREIGN = re.compile(r"\b(INT|UINT|FLOAT|TEXT|BOOLEAN):|in \[|Excludes:|Needs:|REQUIRED|OPTIONS|\./kvq|\.\.\.$")


def helps(tool: str) -> list[tuple[str, ...]]:
    return [("--help",), ("-h",), *((command, "--help") for command in COMMANDS.get(tool, ()))]


ALL_HELPS = [(tool, *arguments) for tool in TOOLS for arguments in helps(tool)]


@pytest.mark.parametrize("command", ALL_HELPS, ids=" ".join)
def test_help_has_lines_of_at_most_80_columns_in_one_style(command):
    text = succeed(*command).stdout
    assert [line for line in text.splitlines() if len(line) > COLUMNS] == []
    assert [line for line in text.splitlines() if FOREIGN.search(line)] == []
    assert "\n\n\n" not in text and not re.search(r" +$", text, re.MULTILINE)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_of_scripts_has_lines_of_at_most_80_columns(script):
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / script, "--help"],
        capture_output=True,
        text=True,
        env={"COLUMNS": "200", "PATH": "/usr/bin:/bin"},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if len(line) > COLUMNS] == []


@pytest.mark.parametrize("tool", TOOLS)
def test_short_help_is_one_screen_and_says_where_the_rest_is(tool):
    lines = succeed(tool, "-h").stdout.splitlines()
    assert len(lines) <= SCREEN_LINES
    assert lines[0].startswith(f"{tool}: ")
    assert any(line.startswith(f"Usage:  {tool} ") for line in lines)
    assert f"{tool} --help" in " ".join(lines)
    assert len([line for line in lines if re.match(r"  (-\w, )?--\w", line)]) <= 10


@pytest.mark.parametrize("tool", TOOLS)
def test_the_two_helps_and_the_two_versions(tool):
    assert len(succeed(tool, "--help").stdout) > len(succeed(tool, "-h").stdout)
    assert succeed(tool, "-V").stdout == succeed(tool, "--version").stdout


def test_beginners_see_what_a_run_needs():
    text = succeed("kvq-calibrate", "-h").stdout
    for flag in ("--output", "--method", "--bits", "--threads", "--dry-run", "--resume"):
        assert flag in text
    assert "--kmeans" not in text and "--mixing" not in text
    assert "Usage:  kvq-calibrate [FLAGS] [DUMP...]" in text
    assert len(succeed("kvq-calibrate", "--help").stdout.split("--kmeans-restarts")) == 2


def test_defaults_stand_in_brackets():
    text = succeed("kvq-inspect", "--help").stdout
    assert re.search(r"--page-size N +tokens of a page, for --layout \[64\]", text)


# The pages that the build makes


def page(tool: str, kind: str) -> str:
    return succeed(tool, "--print-page", kind).stdout


def flags_of(tool: str) -> set[str]:
    return {
        flag
        for arguments in helps(tool)
        for line in succeed(tool, *arguments).stdout.splitlines()
        if (found := re.match(r"  ((?:-\w, )*(?:-\w|--[\w-]+)(?:, --[\w-]+)*)", line))
        for flag in found[1].split(", ")
    }


@pytest.mark.parametrize("tool", TOOLS)
def test_every_flag_is_in_the_manual_and_in_the_completions(tool):
    flags = flags_of(tool)
    assert {"--help", "--version", "--config"} <= flags
    manual, bash, zsh, fish = (page(tool, kind) for kind in ("man", "bash", "zsh", "fish"))
    for flag in flags:
        assert flag.replace("-", "\\-") in manual
        assert re.search(rf"(?<![\w-]){flag}(?![\w-])", bash)
        assert f"*{flag}[" in zsh
        assert f" {'-l' if flag.startswith('--') else '-s'} {flag.lstrip('-')} " in fish
    assert "--print-page" not in manual + bash + zsh + fish
    assert page(tool, "man") == manual, "the same text each time"


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
@pytest.mark.parametrize("tool", TOOLS)
def test_groff_formats_the_manual_without_a_warning(tool, tmp_path):
    path = tmp_path / f"{tool}.1"
    path.write_text(page(tool, "man"))
    done = subprocess.run(["groff", "-man", "-ww", "-Tascii", "-rLL=78n", path], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    plain = re.sub(r"\x1b\[[\d;]*m|.\x08", "", done.stdout)
    for heading in ("NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXAMPLES", "EXIT STATUS"):
        assert re.search(rf"^{heading}$", plain, re.MULTILINE)


def test_an_unknown_page_is_refused():
    result = run("kvq-calibrate", "--print-page", "html")
    assert result.code == 2 and "expected man, bash, zsh or fish" in result.stderr


COMPLETE = """\
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_FUNCTION
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """complete("kvq-eval", "--scheme", "kiv"): the words that bash offers in place of the last one."""
    folder = tmp_path_factory.mktemp("completions")
    for name in ("dump one.h5", "dump_two.h5"):
        (folder / name).touch()
    (folder / "folder").mkdir()

    def offered(tool: str, *words: str) -> set[str]:
        script = folder / f"{tool}.bash"
        script.write_text(page(tool, "bash"))
        program = COMPLETE.replace("_FUNCTION", "_" + tool.replace("-", "_"))
        done = subprocess.run(
            ["bash", "-euc", program, "bash", script, tool, *words], cwd=folder, capture_output=True, text=True
        )
        assert done.returncode == 0 and done.stderr == "", done.stderr
        return set(done.stdout.splitlines()) - {""}

    return offered


def test_bash_completes_flags_names_and_files(complete):
    assert complete("kvq-calibrate", "--thr") == {"--threads"}
    assert complete("kvq-calibrate", "--method", "sa") == {"saw-int4"}
    assert {"oscar", "kvq", "plain"} < complete("kvq-calibrate", "--method", "")
    assert complete("kvq-calibrate", "--coder", "s") == {"symmetric"}
    assert complete("kvq-calibrate", "--center", "k") == {"k", "kv"}
    assert complete("kvq-calibrate", "--method", "=", "sa") == {"saw-int4"}
    assert complete("kvq-calibrate", "--method", "=") >= {"saw-int4", "oscar"}
    assert complete("kvq-calibrate", "dump") == {"dump one.h5", "dump_two.h5"}
    assert complete("kvq-calibrate", "--model", "dump_") == {"dump_two.h5"}
    assert complete("kvq-calibrate", "--threads", "") == set(), "a number has no completion"
    assert complete("kvq-eval", "--scheme", "kivi-2") == {"kivi-2"}
    assert complete("kvq-eval", "--metric", "attention") == {"attention_kl", "attention_kl_b4"}
    assert complete("kvq-eval", "--keep", "f") == {"folder"}
    assert complete("kvq-inspect", "--page") == {"--page-size"}
    assert complete("kvq-diff", "--no-") == {"--no-default-rules", "--no-windows"}


@pytest.mark.skipif("kvq-bench" not in TOOLS, reason="kvq-bench is built only where nvcc is")
def test_bash_completes_commands(complete):
    assert complete("kvq-bench", "") == {"decode", "write", "prefill", "targets"}
    assert complete("kvq-bench", "decode", "--expl") == {"--explain"}
    assert complete("kvq-bench", "write", "--rule", "n") == {"norm"}


def test_install_puts_the_pages_where_shells_and_man_look(tmp_path):
    build = BIN.parent
    if not (build / "cmake_install.cmake").is_file() or not (BIN / "pages/kvq-inspect.1").is_file():
        pytest.skip("the tools are not in the folder of a whole build")
    subprocess.run(
        ["cmake", "--install", build, "--prefix", tmp_path, "--component", "tools"], check=True, capture_output=True
    )
    for path in (
        "share/man/man1/kvq-inspect.1",
        "share/bash-completion/completions/kvq-inspect",
        "share/zsh/site-functions/_kvq-inspect",
        "share/fish/vendor_completions.d/kvq-inspect.fish",
    ):
        assert (tmp_path / path).read_text() == page("kvq-inspect", kind_of(path))


def kind_of(path: str) -> str:
    return next(kind for kind in ("man", "bash", "zsh", "fish") if f"/{kind}" in path)
