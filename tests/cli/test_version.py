"""One version everywhere, and what --version prints."""

import re
import shutil
import subprocess

import pytest
from kvq_tools import BIN, ROOT, succeed

TOOLS = ("kvq-bench", "kvq-calibrate", "kvq-diff", "kvq-eval", "kvq-inspect", "kvq-selftest")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def found(pattern: str, path: str) -> str:
    match = re.search(pattern, (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    assert match, f"{path} has no {pattern}"
    return match[1]


def project_version() -> str:
    return found(r"^project\(kvq VERSION (\d+\.\d+\.\d+) ", "CMakeLists.txt")


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_prints_its_name_the_version_and_perhaps_the_commit(tool):
    if not (BIN / tool).is_file():
        pytest.skip(f"{tool} is built only where nvcc is")
    printed = succeed(tool, "--version").stdout
    assert re.fullmatch(rf"{tool} {re.escape(project_version())}( \([0-9a-f]{{9,}}\))?\n", printed), printed


def test_every_file_that_names_the_version_names_the_same():
    assert {
        "change log": found(r"^## (\d+\.\d+\.\d+)", "CHANGELOG.md"),
        "C header": found(r'of the program, "(\d+\.\d+\.\d+)"', "lib/kvq/runtime.h"),
        "Python": found(r'^__version__ = "(\d+\.\d+\.\d+)"$', "python/kvq/__init__.py"),
    } == dict.fromkeys(("change log", "C header", "Python"), project_version())
    minor = project_version().rpartition(".")[0]
    assert found(r"^find_package\(kvq (\d+\.\d+) ", "tests/consumer/CMakeLists.txt") == minor


def commit_of(folder) -> str:
    """The commit that KvqCommit.cmake finds for sources at `folder`."""
    probe = folder / "probe.cmake"
    probe.write_text(
        f'set(PROJECT_SOURCE_DIR "{folder}")\ninclude("{ROOT}/scripts/cmake/KvqCommit.cmake")\n'
        'message("commit=${KVQ_COMMIT}.")\n'
    )
    done = subprocess.run(["cmake", "-P", probe], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return re.search(r"commit=(.*)\.", done.stderr)[1]


def git(folder, *command: str) -> str:
    author = ("-c", "user.name=kvq", "-c", "user.email=kvq@localhost", "-c", "core.hooksPath=/dev/null")
    done = subprocess.run(["git", *author, *command], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_commit_of_an_archive_is_what_git_filled_in(tmp_path):
    (tmp_path / ".git_archival.txt").write_text(f"commit: {COMMIT}\n")
    assert commit_of(tmp_path) == COMMIT[:9]


@pytest.mark.parametrize("text", ["commit: $Format:%H$\n", "", "commit: \n", None], ids=repr)
def test_without_git_and_a_filled_file_there_is_no_commit(tmp_path, text):
    if text is not None:
        (tmp_path / ".git_archival.txt").write_text(text)
    assert commit_of(tmp_path) == ""


def test_the_commit_of_a_checkout_is_gits_and_of_its_archive_too(tmp_path):
    checkout, unpacked = tmp_path / "checkout", tmp_path / "unpacked"
    checkout.mkdir()
    git(checkout, "init", "-q")
    assert commit_of(checkout) == "", "no commit yet"
    for name in (".git_archival.txt", ".gitattributes"):
        shutil.copy(ROOT / name, checkout)
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", "first")
    short = git(checkout, "rev-parse", "--short=9", "HEAD")
    assert commit_of(checkout) == short

    git(checkout, "archive", "--output", str(tmp_path / "kvq.tar"), "HEAD")
    shutil.unpack_archive(tmp_path / "kvq.tar", unpacked)
    assert commit_of(unpacked) == short
