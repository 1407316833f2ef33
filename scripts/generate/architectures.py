#!/usr/bin/env python3
"""Writes the table of docs/models.md: dumps a tiny random model of every architecture of tests/python/architectures.py
with dump_qkv.py. `--check` writes nothing and exits with 6 if the table differs."""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests" / "python")]
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- table: scripts/generate/architectures.py -->\n", "<!-- end of table -->\n"


def with_table(page: str, table: str, version: str, works: int, tried: int) -> str:
    """The page with another table, and the version of transformers that it was made with."""
    before, rest = page.split(BEGIN)
    made = f"Made with transformers {version}: {works} of {tried} architectures are dumped."
    return f"{before}{BEGIN}\n{made}\n\n{table}\n{END}{rest.split(END)[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare")
    args = parser.parse_args()
    import torch
    import transformers
    from architectures import ARCHITECTURES, dump_architecture, table

    torch.set_num_threads(1)
    rows = []
    for name in ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(dump_architecture(name, Path(folder)))
        print(f"{name}: {'yes' if rows[-1].works else rows[-1].errors.strip() or 'not there'}", file=sys.stderr)
    page = PAGE.read_text(encoding="utf-8")
    works = sum(row.works for row in rows)
    made = with_table(page, table(rows), transformers.__version__, works, len(rows))
    if args.check:
        return 0 if made == page else 6
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
