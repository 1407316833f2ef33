"""Tests that would never run: tests/CMakeLists.txt lists sources by hand, and pytest knows a file by its name alone."""

import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
LISTS = [TESTS / "CMakeLists.txt", TESTS / "emulator/CMakeLists.txt", TESTS / "consumer/CMakeLists.txt"]


def named() -> set[Path]:
    """Sources that the lists name, and those of programs that a loop over the parsers names."""
    texts = {path.parent: path.read_text() for path in LISTS}
    found = {folder / name for folder, text in texts.items() for name in re.findall(r"[\w/]+\.(?:cpp|cu|c)\b", text)}
    [make, fuzz] = re.findall(r"foreach\(\s*parser\s+IN\s+ITEMS ([\w ]+?)\s*\)", texts[TESTS])
    found |= {TESTS / f"fuzz/make_{parser}_seeds.cpp" for parser in make.split()}
    return found | {TESTS / f"fuzz/fuzz_{parser}.cpp" for parser in fuzz.split()}


def test_every_source_is_in_a_list():
    sources = {path for path in TESTS.rglob("*") if path.suffix in (".cpp", ".cu", ".c")}
    assert len(sources) > 100 and sources - named() == set()


def test_no_two_files_of_pytest_have_one_name():
    """tests/python and tests/cli are collected in one run, which two modules of one name end."""
    names = Counter(path.name for folder in ("python", "cli") for path in (TESTS / folder).rglob("*.py"))
    assert len(names) > 80 and [name for name, count in names.items() if count > 1 and name != "conftest.py"] == []
