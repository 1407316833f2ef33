"""docs/extending.md lists all files of an addition: each exists, the counts of its first table are right, and no source
file beside those of a section names the section's representative."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/extending.md"
FILE = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.(?:cpp|h|py|json|md|txt|cmake|cu|cuh))`")
SOURCES = ("*.cpp", "*.h", "*.cu", "*.cuh", "*.cmake", "CMakeLists.txt")

# What the sources call one addition that is there already. A user of the addition is none of its files: the pattern
# must not match a method that chooses a coder.
REPRESENTATIVES = {
    "A method": r"\bsaw_int4_method\b|\bsaw_int4\.cpp\b|\bkHessian\b|\"--hessian\"",
    "A coder": r"\bTrellisCoder\b",
    "A metric": r"\btop_hits\b|\"top10_overlap\"",
}


def sections() -> dict[str, str]:
    """Text below each heading of second order."""
    parts = re.split(r"^## (.*)$", PAGE.read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2]))


def listed(text: str) -> list[Path]:
    """Files that the tables and sentences name; a name without a folder lies beside the file named before."""
    files: list[Path] = []
    for name in FILE.findall(text):
        beside = files[-1].parent / name if files and "/" not in name else None
        files.append(beside if beside and beside.exists() else ROOT / name)
    return files


def steps(text: str) -> str:
    """The rows of a section's table that name steps."""
    return "\n".join(line for line in text.splitlines() if re.match(r"\| \d+\. ", line))


@pytest.mark.parametrize("section", [name for name, text in sections().items() if steps(text)])
def test_listed_files_exist(section):
    files = listed(steps(sections()[section]))
    assert files and not [str(path) for path in files if not path.exists()]


def test_counts_are_those_of_the_sections():
    rows = re.findall(r"^\| (an? [^|,]*)[^|]*\| (\d+):", sections()["What it costs"], re.M)
    assert len(rows) >= 4
    counted = 0
    for name, count in rows:
        text = sections().get(name.strip().capitalize(), "")
        if steps(text):
            assert int(count) == len(set(listed(steps(text)))), name
            counted += 1
    assert counted >= 2


@pytest.mark.parametrize("section", REPRESENTATIVES)
def test_no_other_source_names_the_representative(section):
    pattern = re.compile(REPRESENTATIVES[section])
    files = {path for folder in ("lib", "tools") for glob in SOURCES for path in (ROOT / folder).rglob(glob)}
    naming = {path for path in files if pattern.search(path.read_text(encoding="utf-8"))}
    assert naming, "nothing names the representative any more: choose another one"
    assert sorted(map(str, naming - set(listed(sections()[section])))) == []
