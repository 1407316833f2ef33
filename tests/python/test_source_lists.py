"""tests/CMakeLists.txt lists sources by hand: a source that it lacks would be a test that never runs."""

import re
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
