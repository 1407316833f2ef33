"""scripts/test.sh, scripts/nightly.sh and scripts/check_format.py: what they say, without starting a step."""

import re
import shutil
import subprocess
import sys
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
