"""scripts/test.sh, scripts/nightly.sh and scripts/check_format.py: what they say, without starting a step."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
STEPS = ["setup", "format", "layers", "build", "ctest", "python", "sanitizers"]
DIFFERENT, UNSUPPORTED, USAGE = 6, 5, 2


def run(*command: object, **options) -> subprocess.CompletedProcess:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, **options)


def test_steps_are_listed():
    result = run(SCRIPTS / "test.sh", "--list")
    assert (result.returncode, result.stdout.split(), result.stderr) == (0, STEPS, "")


def test_help_names_every_step():
    result = run(SCRIPTS / "test.sh", "--help")
    assert result.returncode == 0 and result.stdout.startswith("usage: scripts/test.sh") and result.stderr == ""
    named = [line.split()[0] for line in result.stdout.splitlines() if line.startswith("  ") and line.strip()]
    assert [name for name in named if name in STEPS] == STEPS


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--only", "everything"], 'unknown step "everything"; expected one of: ' + " ".join(STEPS)),
        (["--only", "layers,"], None),
        (["--only", "layers,,format"], 'unknown step ""'),
        (["--only", "layers format"], 'unknown step "layers format"'),
        (["--only"], "--only needs a step"),
        (["--only", ""], "--only needs a step"),
        (["--frobnicate"], "unknown argument --frobnicate"),
        (["layers"], "unknown argument layers"),
    ],
    ids=str,
)
def test_wrong_steps_start_nothing(flags, said):
    result = run(SCRIPTS / "test.sh", *flags)
    if said is None:
        assert result.returncode == 0
    else:
        assert result.returncode == USAGE and result.stdout == "" and f"test.sh: error: {said}" in result.stderr


@pytest.mark.parametrize("flags", [["--only", "layers"], ["--only=layers"], ["--only", "layers", "--only", "layers"]])
def test_one_step_runs_alone(flags):
    result = run(SCRIPTS / "test.sh", *flags)
    assert result.returncode == 0, result.stderr
    assert re.sub(r"== \d+:\d\d ", "== ", result.stdout) == (
        "\n== layers: who includes whom\nlayers: every include follows the picture\n\n== all steps passed\n"
    )


def test_continuous_integration_runs_every_step():
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "exec scripts/test.sh"


def ctests(build: Path) -> dict[str, bool]:
    """The tests that ctest knows in a build folder: is each run, or disabled?"""
    listed = run("ctest", "--test-dir", build, "--show-only=json-v1")
    assert listed.returncode == 0, listed.stderr
    return {
        test["name"]: not any(entry == {"name": "DISABLED", "value": True} for entry in test["properties"])
        for test in json.loads(listed.stdout)["tests"]
    }


def test_what_the_release_build_leaves_out_runs_under_the_sanitizers(tmp_path):
    """The release build of CI, if it is there, and one without CUDA."""
    if not (shutil.which("cmake") and shutil.which("clang++-19")):
        pytest.skip("needs cmake and clang++-19: scripts/setup.sh --with-tests")
    flags = {"release": ("-DKVQ_SHARED_TESTS=OFF", "-DKVQ_CUDA=OFF"), "asan": ()}
    for preset, words in flags.items():
        made = run("cmake", "--preset", preset, "-B", tmp_path / preset, *words, cwd=ROOT)
        assert made.returncode == 0, made.stderr
    releases = [ctests(tmp_path / "release")]
    built = Path(os.environ.get("KVQ_BIN", ROOT / "build/release/tools")).resolve().parent
    if (built / "CTestTestfile.cmake").is_file():
        releases.append(ctests(built))
    left_out = {name for tests in releases for name, is_run in tests.items() if not is_run}
    sanitized = {name for name, is_run in ctests(tmp_path / "asan").items() if is_run}
    assert len(left_out) > 10 and left_out - sanitized == set()


def test_ctest_runs_every_test_at_night():
    words = "scripts/test.sh --only build,ctest --full"
    assert words in (SCRIPTS / "nightly.sh").read_text() and words in run(SCRIPTS / "nightly.sh", "--help").stdout


SLEEP = "echo $$ > {folder}/sleeper; exec sleep 300"


def start_jobs(folder: Path, **commands: str) -> subprocess.Popen:
    """scripts/test.sh with the steps python and sanitizers, whose programs are stand-ins."""
    command = {"python": "echo 2 passed", "cli": "echo 3 passed", "ctest": "echo Test project; echo 4 passed"}
    command["documents"] = "echo 1 passed"
    command |= {name: text.format(folder=folder) for name, text in commands.items()}
    stubs = {
        "stubs/cmake": "echo built",
        "stubs/ctest": command["ctest"],
        ".venv/bin/python": f'case "$*" in *tests/python) {command["python"]} ;; *tests/cli) {command["cli"]} ;; '
        f"*) {command['documents']} ;; esac",
    }
    for name, text in stubs.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    (folder / "scripts").mkdir()
    shutil.copy(SCRIPTS / "test.sh", folder / "scripts")
    (folder / "logs").mkdir()
    environment = os.environ | {"PATH": f"{folder}/stubs:{os.environ['PATH']}", "TMPDIR": str(folder / "logs")}
    return subprocess.Popen(
        [folder / "scripts/test.sh", "--only", "python,sanitizers"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def expect_nothing_left(folder: Path) -> None:
    process = Path("/proc") / (folder / "sleeper").read_text().strip() / "cmdline"
    deadline = time.monotonic() + 60
    while process.exists() and process.read_bytes():  # a process that ended has no command line
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert list((folder / "logs").iterdir()) == []


def test_jobs_print_their_logs(tmp_path):
    process = start_jobs(tmp_path, cli="sleep 0.1; echo 3 passed")
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 0, said
    for name, line in {
        "python": "2 passed\n1 passed",
        "cli": "3 passed",
        "sanitizers": "Test project\n4 passed",
    }.items():
        assert re.search(rf"== \d+:\d\d {name}: passed\n{line}\n", said), said
    assert "built" not in said and said.endswith("all steps passed\n") and not any((tmp_path / "logs").iterdir())


@pytest.mark.parametrize(
    ("name", "other", "job"),
    [
        ("python", "cli", "python"),
        ("documents", "cli", "python"),
        ("cli", "ctest", "cli"),
        ("ctest", "cli", "sanitizers"),
    ],
)
def test_a_job_that_fails_is_printed_and_ends_the_others(tmp_path, name, other, job):
    failing = "while [ ! -s {folder}/sleeper ]; do sleep 0.01; done; echo it failed; exit 7"
    process = start_jobs(tmp_path, **{name: failing, other: SLEEP})
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 7 and f"{job}: failed, exit code 7\n" in said and said.endswith("it failed\n"), said
    assert ("built" in said) == (job == "sanitizers")
    expect_nothing_left(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupt_ends_the_jobs(tmp_path, number):
    process = start_jobs(tmp_path, cli=SLEEP)
    deadline = time.monotonic() + 60
    while not (tmp_path / "sleeper").exists() or not (tmp_path / "sleeper").read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    expect_nothing_left(tmp_path)


def test_nightly_explains_itself():
    result = run(SCRIPTS / "nightly.sh", "--help")
    assert result.returncode == 0 and result.stdout.startswith("usage: scripts/nightly.sh")
    wrong = run(SCRIPTS / "nightly.sh", "--frobnicate")
    assert wrong.returncode == USAGE and wrong.stderr.startswith("nightly.sh: error: unknown flag --frobnicate")


@pytest.fixture
def checkout(tmp_path):
    """A repository with a few files and the script under test."""
    for name in (".clang-format", ".ruff.toml", ".gersemirc"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "scripts/cmake").mkdir(parents=True)
    shutil.copy(SCRIPTS / "check_format.py", tmp_path / "scripts")
    (tmp_path / "code.cpp").write_text("int one() { return 1; }\n")
    (tmp_path / "kernel.cu").write_text("__global__ void nothing() {}\n")
    (tmp_path / "tool.py").write_text("VALUE = 1\n")
    (tmp_path / "CMakeLists.txt").write_text("project(one)\n")
    (tmp_path / "TEXT.md").write_text("é" * 120 + "\n")
    (tmp_path / ".gitignore").write_text("/build/\n__pycache__/\n.ruff_cache/\n")
    (tmp_path / "build").mkdir()
    (tmp_path / "build/generated.cpp").write_text("int   one();\n")
    for name in ("lib/kvq", "tools", "tests"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "CMakeLists.txt").write_text("project(one)\n")
    assert run("git", "init", "-q", cwd=tmp_path).returncode == 0
    return tmp_path


def check(checkout: Path, *flags: str) -> subprocess.CompletedProcess:
    return run(sys.executable, checkout / "scripts/check_format.py", *flags)


def test_files_of_the_style_pass(checkout):
    result = check(checkout)
    assert (result.returncode, result.stdout) == (0, "format: every file has the style\n"), result.stderr


FAULTS = {
    "code.cpp": ("int   one() { return 1; }\n", "code.cpp:1: clang-format differs in 1 places"),
    "kernel.cu": ("__global__ void nothing() { }\n", "kernel.cu:1: clang-format differs in 1 places"),
    "tool.py": ("VALUE  = 1\n", "tool.py:1: ruff format differs"),
    "CMakeLists.txt": ("project(   one)\n", "CMakeLists.txt: gersemi differs"),
}


def test_a_difference_is_one_line_and_can_be_mended(checkout):
    for name, (text, _) in FAULTS.items():
        (checkout / name).write_text(text)
    (checkout / "tool.py").write_text("VALUE  = 1\nimport os\n")
    found = check(checkout)
    assert found.returncode == DIFFERENT
    lines = found.stdout.splitlines()
    assert lines[-1] == "mend with: scripts/check_format.py --fix"
    assert {line for _, line in FAULTS.values()} <= set(lines)
    assert any(line.startswith("tool.py:2:") and "F401" in line for line in lines)

    assert check(checkout, "--fix").returncode == 0
    assert check(checkout).returncode == 0
    assert (checkout / "code.cpp").read_text() == "int one() { return 1; }\n"
    assert (checkout / "tool.py").read_text() == "VALUE = 1\n"


@pytest.mark.parametrize("name", ["TEXT.md", "code.cpp", "scripts/run.sh"])
def test_long_lines_are_found(checkout, name):
    text = {
        "TEXT.md": "é" * 121,
        "code.cpp": 'const char* kText = R"(' + "x" * 120 + ')";',
        "scripts/run.sh": "x" * 121,
    }
    (checkout / name).write_text(text[name] + "\n")
    result = check(checkout)
    assert result.returncode == DIFFERENT
    assert f"{name}:1: {len(text[name])} columns, 120 are allowed" in result.stdout.splitlines()
    assert result.stdout.splitlines()[-1] == "break long lines by hand"


def test_missing_formatters_name_the_set_up(checkout):
    base = Path(sys._base_executable)
    if (base.parent / "clang-format").exists():
        pytest.skip("the interpreter beneath the environment has formatters")
    result = run(base, checkout / "scripts/check_format.py", env={"PATH": "/nonexistent"})
    assert result.returncode == UNSUPPORTED and result.stdout == ""
    assert result.stderr.startswith("check_format.py: error: missing clang-format")
    assert result.stderr.endswith("run scripts/setup.sh\n")
