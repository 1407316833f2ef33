"""The scripts around the tools: set-up, shell syntax, --help."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kvq_tools import ROOT

SCRIPTS = ROOT / "scripts"
SHELL = sorted(SCRIPTS.glob("*.sh"))
PYTHON = sorted(path for path in SCRIPTS.rglob("*.py") if "__main__" in path.read_text())


def run(*command: object) -> subprocess.CompletedProcess:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60)


def name_of(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("path", SHELL, ids=name_of)
def test_shell_scripts_are_well_formed(path):
    assert run("bash", "-n", path).returncode == 0
    assert os.access(path, os.X_OK)
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash" and "set -euo pipefail" in lines


@pytest.mark.parametrize("path", SHELL, ids=name_of)
def test_shell_scripts_explain_themselves_and_start_nothing(path):
    result = run(path, "--help")
    assert result.returncode == 0 and result.stdout.startswith(f"usage: scripts/{path.name}") and result.stderr == ""
    wrong = run(path, "--frobnicate")
    assert wrong.returncode == 2 and wrong.stderr.startswith(f"{path.name}: error: ") and wrong.stdout == ""


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_python_scripts_explain_themselves(path):
    result = run(sys.executable, path, "--help")
    assert result.returncode == 0 and result.stdout.startswith("usage: ") and result.stderr == ""
    assert os.access(path, os.X_OK) and path.read_text().startswith("#!/usr/bin/env python3\n")


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_python_scripts_refuse_unknown_flags(path):
    result = run(sys.executable, path, "--frobnicate")
    assert result.returncode == 2 and f"{path.name}: error: " in result.stderr and result.stdout == ""


@pytest.mark.parametrize("flags", [(), ("--with-tests",), ("--with-dump",), ("--with-tests", "--with-dump")], ids=str)
def test_setup_check_lists_what_is_missing(flags):
    result = run(SCRIPTS / "setup.sh", "--check", *flags)
    if result.returncode == 0:
        assert result.stdout == "everything is there\n"
    else:
        assert result.returncode == 1 and all(line.startswith("missing") for line in result.stdout.splitlines())
    assert result.stderr == ""


def test_setup_check_misses_the_environment_of_a_fresh_checkout(tmp_path):
    shutil.copytree(SCRIPTS, tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    result = run(tmp_path / "scripts/setup.sh", "--check", "--with-dump")
    assert result.returncode == 1 and result.stderr == ""
    assert result.stdout.endswith("missing or outdated: .venv\nmissing or outdated: torch and transformers in .venv\n")
    assert not (tmp_path / ".venv").exists(), "it only looks"


def test_setup_without_apt_says_what_to_install(tmp_path):
    shutil.copytree(SCRIPTS, tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("bash", "env", "dirname", "cat", "basename", "awk", "cmp", "id", "sed", "python3"):
        os.symlink(shutil.which(name), commands / name)
    result = subprocess.run(
        [tmp_path / "scripts/setup.sh"], env={"PATH": str(commands)}, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 5 and result.stdout == ""
    error, hint = result.stderr.splitlines()
    assert error.startswith("setup.sh: error: no apt-get here") and "libhdf5-dev" in error
    assert hint.endswith("then run: scripts/setup.sh --no-packages")


def test_setup_help_and_unknown_flag():
    help_text = run(SCRIPTS / "setup.sh", "--help")
    assert help_text.returncode == 0 and help_text.stdout.startswith("usage: scripts/setup.sh")
    wrong = run(SCRIPTS / "setup.sh", "--check", "--without-tests")
    assert wrong.returncode == 2 and wrong.stdout == ""
    assert wrong.stderr.startswith("setup.sh: error: unknown flag --without-tests\n")
