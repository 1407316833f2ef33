"""Runs of kvq-eval --sweep, their documents and refusals, and the sizes of the dumps they measure."""

import json
import os
import shlex
from pathlib import Path

import pytest
from kvq_tools import ROOT, Result, run

USAGE, INPUT = 2, 3
SIZE = {"tokens": 150, "sequences": 2, "layers": 2, "head_dim": 64, "query_spectrum": 0.8, "outlier_channels": 3}
HELD_OUT = SIZE | {"tokens": 90, "sequences": 1, "seed": 1}
TINY = {"tokens": 40, "sequences": 2, "layers": 1, "head_dim": 16, "q_heads": 2}


def sweep(folder: Path, grid: object, held_out: Path, *flags: object) -> Result:
    """Runs a sweep. `grid` is JSON text, an object that becomes JSON, or a file. Asserts that no temporary file
    remains, for any exit code."""
    path = grid if isinstance(grid, Path) else folder / "sweep.json"
    if not isinstance(grid, Path):
        path.write_text(grid if isinstance(grid, str) else json.dumps(grid))
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    result = run(
        "kvq-eval", "--quiet", "--model", held_out, "--sweep", path, *flags, env=os.environ | {"TMPDIR": str(scratch)}
    )
    assert list(scratch.iterdir()) == [], "temporary files stay behind"
    return result


def table(*args: object) -> list[str]:
    result = sweep(*args)
    assert (result.code, result.stderr) == (0, ""), result
    return result.stdout.splitlines()


def document(*args: object) -> dict:
    """The document of --json, checked against the schema."""
    result = sweep(*args, "--json")
    assert (result.code, result.stderr) == (0, ""), result
    said = json.loads(result.stdout)
    pytest.importorskip("jsonschema").validate(said, json.loads((ROOT / "formats/eval.schema.json").read_text()))
    return said


def names(said: dict) -> list[str]:
    return [scheme["name"] for scheme in said["schemes"]]


def words(scheme: dict) -> list[str]:
    return shlex.split(scheme["flags"])


def refused(result: Result, code: int, *words: str) -> None:
    """Asserts one line of error and hints."""
    lines = result.stderr.splitlines()
    assert (result.code, result.stdout) == (code, ""), result
    assert lines[0].startswith("kvq-eval: error: ") and all(line.startswith("hint: ") for line in lines[1:]), (
        result.stderr
    )
    for word in words:
        assert word in lines[0], lines[0]
