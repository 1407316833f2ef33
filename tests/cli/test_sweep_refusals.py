"""kvq-eval --sweep: which files, rows, dumps and flags it refuses, and that an interrupted sweep leaves nothing."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from kvq_tools import BIN, calibrate, run
from sweeps import HELD_OUT, INPUT, SIZE, TINY, USAGE, document, names, refused, sweep


@pytest.fixture(scope="module")
def dump(make_dump) -> Path:
    return make_dump(**SIZE)


@pytest.fixture(scope="module")
def held_out(make_dump) -> Path:
    return make_dump(**HELD_OUT)


@pytest.fixture(scope="module")
def tiny(make_dump) -> Path:
    """A dump for tests in which the numbers do not matter."""
    return make_dump(**TINY)


GOOD = '{"rows": ["--method plain"]'
FILES = {
    "nothing": ("", "JSON"),
    "cut": ('{"rows": [', "JSON"),
    "a comma too many": ('{"rows": ["--method plain",]}', "JSON"),
    "a key twice": ('{"rows": ["--method plain"], "rows": ["--method plain"]}', "rows"),
    "a list": ('["--method plain"]', "object", "array"),
    "a text": ('"--method plain"', "object", "string"),
    "no rows": ("{}", "rows or axes"),
    "schemes alone": ('{"schemes": ["bf16"]}', "rows or axes"),
    "a key that is none": (GOOD + ', "row": []}', "row"),
    "rows that are no list": ('{"rows": "--method plain"}', "rows", "list", "string"),
    "a row that is a number": ('{"rows": ["--method plain", 3]}', "rows[1]", "number"),
    "a row that is a list": ('{"rows": [["--method plain"]]}', "rows[0]"),
    "a row without flags": ('{"rows": [{"label": "a"}]}', "rows[0]"),
    "a row without a label": ('{"rows": [{"flags": "--method plain"}]}', "rows[0]"),
    "a row with another key": ('{"rows": [{"label": "a", "flags": "", "name": "b"}]}', "rows[0]"),
    "a label that is a number": ('{"rows": [{"label": 2, "flags": ""}]}', "rows[0]"),
    "flags of a row that are a list": ('{"rows": [{"label": "a", "flags": ["--bits", "2"]}]}', "rows[0]"),
    "a title that is none": (GOOD + ', "title": 1}', "title", "string", "number"),
    "flags that are a list": (GOOD + ', "flags": ["--bits 2"]}', "flags", "string"),
    "schemes that are no list": (GOOD + ', "schemes": "bf16"}', "schemes", "list"),
    "a scheme that is a number": (GOOD + ', "schemes": [2]}', "schemes"),
    "axes that are no list": ('{"axes": "--method plain"}', "axes", "list"),
    "an axis that is no list": ('{"axes": ["--method plain"]}', "axes[0]", "list"),
    "an entry of an axis that is a number": ('{"axes": [["--method plain"], ["", 1]]}', "axes[1][1]", "number"),
    "a null": ('{"rows": null}', "rows"),
    "empty rows": ('{"rows": []}', "rows"),
    "an empty axis": ('{"axes": [["--method plain"], []]}', "axes[1]"),
    "too many rows": (json.dumps({"rows": ["--method plain"] * 4097}), "4096", "4097"),
    "too many combinations": (json.dumps({"axes": [["--method plain"] * 17, [""] * 241]}), "4096", "4097"),
    "far too many combinations": (json.dumps({"axes": [[""] * 4000] * 12}), "4096"),
    "too many of both": (
        json.dumps({"rows": ["--method plain"], "axes": [["--method plain"] * 64, [""] * 64]}),
        "4096",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_sweeps(tiny, tmp_path, name):
    text, *words = FILES[name]
    refused(sweep(tmp_path, text, tiny, "--calibration", tiny), INPUT, "sweep.json", *words)


def test_dumps_count_as_rows_too(tiny, tmp_path):
    """At most 4096 rows may be calibrated. The folder cannot be created, so a run that starts nevertheless ends."""
    grid = {"axes": [["--method plain"] * 64, ["--bits 2"] * 33]}
    result = sweep(
        tmp_path, grid, tiny, "--calibration", f"a={tiny}", "--calibration", f"b={tiny}", "--keep", "/dev/null/nowhere"
    )
    assert result.code != 0 and "4096" in result.stderr.splitlines()[0], result


def test_message_about_an_empty_list_does_not_ask_for_a_list(tiny, tmp_path):
    for text in ('{"rows": []}', '{"axes": [[]]}'):
        assert "expected a list, found array" not in sweep(tmp_path, text, tiny, "--calibration", tiny).stderr


ROWS = {
    "unknown flag": ("--no-such-flag 3", "--no-such-flag"),
    "a value that is none": ("--bits two", "--bits"),
    "a value out of range": ("--num-tokens 0", "--num-tokens"),
    "a missing value": ("--bits", "--bits"),
    "output": ("--output x.safetensors",),
    "output, short": ("-o x.safetensors",),
    "statistics": ("--stats x",),
    "merging": ("--merge-stats x",),
    "resume": ("--resume",),
    "dry run": ("--dry-run",),
    "memory of GPUs": ("--mem-limit 4GB",),
    "threads": ("--threads 1",),
    "json": ("--json",),
    "ablation": ("--report-ablation",),
    "rotations": ("--report-rotations",),
    "more tokens than there are": ("--num-tokens 41", "41", "40 tokens"),
    "tokens behind the end": ("--first-token 40", "40 tokens"),
    "more centroids than tokens": ("--kmeans 41", "--kmeans 41"),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_make_no_sense_are_named(tiny, tmp_path, name):
    flags, *words = ROWS[name]
    grid = {"rows": ["--method plain", {"label": "the bad one", "flags": flags}]}
    result = sweep(tmp_path, grid, tiny, "--calibration", tiny, "--keep", tmp_path / "kept")
    refused(result, USAGE, '"the bad one"', *words)
    assert not (tmp_path / "x.safetensors").exists()


CHOICES = [
    "--method none",
    "--coder none",
    "--method block-gtq --score none",
    "--clip none-such",
    "--bits 99",
    "--share head",
]


@pytest.mark.parametrize("flags", CHOICES)
def test_row_with_an_unknown_choice_is_named(tiny, tmp_path, flags):
    grid = {"rows": ["--method plain", {"label": "the bad one", "flags": flags}]}
    refused(sweep(tmp_path, grid, tiny, "--calibration", tiny), USAGE, '"the bad one"')


def test_message_about_help_and_version_in_a_row_is_one_for_people(tiny, tmp_path):
    for flag in ("--help", "--version"):
        result = sweep(tmp_path, {"rows": [{"label": "the bad one", "flags": flag}]}, tiny, "--calibration", tiny)
        refused(result, USAGE, '"the bad one"')
        assert "main function" not in result.stderr and "kvq-calibrate 0" not in result.stderr


def test_bad_row_is_found_before_anything_is_calibrated(dump, held_out, tmp_path):
    grid = {"rows": ["--method kvq", {"label": "the bad one", "flags": "--no-such-flag"}]}
    refused(sweep(tmp_path, grid, held_out, "--calibration", dump, "--keep", tmp_path / "kept"), USAGE, '"the bad one"')
    assert not (tmp_path / "kept").exists() or list((tmp_path / "kept").iterdir()) == []


@pytest.mark.parametrize(
    "flags, words",
    [("--layers 0", ("has no layer 1",)), ("--exact-layers 7", ("layer 7",)), ("--num-tokens 151", ("150 tokens",))],
)
def test_rows_that_cannot_be_measured_are_found_before_anything_is_calibrated(dump, held_out, tmp_path, flags, words):
    grid = {"rows": ["--method plain", {"label": "the bad one", "flags": f"--method plain {flags}"}]}
    result = sweep(tmp_path, grid, held_out, "--calibration", dump, "--keep", tmp_path / "kept")
    refused(result, result.code, '"the bad one"', *words)
    assert result.code in (USAGE, INPUT) and not (tmp_path / "kept").exists()
    if flags == "--layers 0":
        assert len(document(tmp_path, grid, held_out, "--calibration", dump, "--layers", 0)["schemes"]) == 2


@pytest.mark.parametrize("place", ["file", "flag"])
def test_schemes_are_found_before_anything_is_calibrated(dump, held_out, tmp_path, place):
    grid = {"rows": ["--method plain"]} | ({"schemes": ["bf17"]} if place == "file" else {})
    more = ("--scheme", "bf17") if place == "flag" else ()
    refused(sweep(tmp_path, grid, held_out, "--calibration", dump, "--keep", tmp_path / "kept", *more), USAGE, '"bf17"')
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_interrupted_sweeps_leave_nothing(dump, held_out, tmp_path, number):
    grid, scratch = tmp_path / "sweep.json", tmp_path / "scratch"
    grid.write_text(json.dumps({"axes": [["--method oscar"], [f"--seed {seed}" for seed in range(200)]]}))
    scratch.mkdir()
    for wanted in ("*/statistics/*", "*/artifacts/0002*"):
        process = subprocess.Popen(
            [BIN / "kvq-eval", "--quiet", "--model", held_out, "--calibration", dump, "--sweep", grid],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": str(scratch)},
        )
        while not list(scratch.glob(wanted)) and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 130 and said.strip() == "kvq-eval: interrupted"
        assert list(scratch.iterdir()) == []


def test_rows_need_a_dump(tiny, tmp_path):
    refused(sweep(tmp_path, {"rows": [{"label": "own", "flags": "--method plain"}]}, tiny), USAGE, '"own"', "no dump")
    refused(
        sweep(
            tmp_path, {"rows": [f"--method plain --model {tiny}", {"label": "own", "flags": "--method plain"}]}, tiny
        ),
        USAGE,
        '"own"',
        "no dump",
    )


def test_dumps_that_are_not_there(tiny, tmp_path):
    grid = {"rows": [{"label": "own", "flags": "--method plain"}]}
    refused(sweep(tmp_path, grid, tiny, "--calibration", tmp_path / "none.h5"), INPUT, "none.h5: cannot open")
    refused(sweep(tmp_path, grid, tiny, "--calibration", f"text={tmp_path / 'none.h5'}"), INPUT, "none.h5: cannot open")
    refused(sweep(tmp_path, grid, tmp_path / "none.h5", "--calibration", tiny), INPUT, "none.h5: cannot open")


def test_dump_of_another_geometry(tiny, dump, tmp_path):
    refused(sweep(tmp_path, {"rows": ["--method plain"]}, tiny, "--calibration", dump), INPUT)


def test_message_about_another_geometry_names_no_temporary_file(tiny, dump, tmp_path):
    result = sweep(tmp_path, {"rows": [{"label": "own", "flags": "--method plain"}]}, tiny, "--calibration", dump)
    assert str(tmp_path / "scratch") not in result.stderr and "own" in result.stderr, result.stderr


def test_schemes_that_are_none(tiny, tmp_path):
    refused(
        sweep(tmp_path, {"rows": ["--method plain"], "schemes": ["bf17"]}, tiny, "--calibration", tiny), USAGE, '"bf17"'
    )
    refused(
        sweep(tmp_path, {"rows": ["--method plain"]}, tiny, "--calibration", tiny, "--scheme", "bf17"), USAGE, '"bf17"'
    )


def test_sweeps_go_alone(tiny, tmp_path):
    artifact = calibrate(tiny, tmp_path / "artifact.safetensors", "--method", "plain")
    grid = {"rows": ["--method plain"]}
    for more in (
        (artifact,),
        ("--artifact", artifact),
        ("--metric", "k_rel_mse"),
        ("--metric", "rope_logit_mae", "--json"),
    ):
        refused(sweep(tmp_path, grid, tiny, "--calibration", tiny, *more), USAGE, "--sweep")


@pytest.mark.parametrize("flags", [("--keep", "kept"), ("--calibration", "dump.h5")], ids=str)
def test_flags_of_sweeps_need_one(tiny, tmp_path, flags):
    result = run("kvq-eval", "--model", tiny, "--scheme", "bf16", *flags, cwd=tmp_path)
    refused(result, USAGE, flags[0], "--sweep")
    assert list(tmp_path.iterdir()) == []


def test_sweeps_that_cannot_be_read(tiny, tmp_path):
    refused(sweep(tmp_path, tmp_path / "none.json", tiny, "--calibration", tiny), INPUT, "none.json: cannot read")
    refused(sweep(tmp_path, tmp_path, tiny, "--calibration", tiny), INPUT, "cannot read")


def test_folder_to_keep_that_cannot_be_made_is_named(tiny, tmp_path):
    blocked = tmp_path / "a_file"
    blocked.write_text("")
    for folder in (blocked, blocked / "below"):
        refused(
            sweep(tmp_path, {"rows": ["--method plain"]}, tiny, "--calibration", tiny, "--keep", folder),
            INPUT,
            str(blocked),
        )


def test_folder_of_temporary_files_that_is_not_there_is_named(tiny, tmp_path):
    grid = tmp_path / "sweep.json"
    grid.write_text(json.dumps({"rows": ["--method plain"]}))
    result = run(
        "kvq-eval",
        "--quiet",
        "--model",
        tiny,
        "--calibration",
        tiny,
        "--sweep",
        grid,
        env=os.environ | {"TMPDIR": str(tmp_path / "gone")},
    )
    refused(result, INPUT, str(tmp_path / "gone"))


def test_a_name_is_never_empty(tiny, tmp_path):
    """The schema of documents requires names, so an empty label is refused or replaced."""
    for grid in ({"rows": [{"label": "", "flags": "--method plain"}]}, {"rows": [""]}):
        result = sweep(tmp_path, grid, tiny, "--calibration", tiny, "--json")
        assert result.code == INPUT or all(names(json.loads(result.stdout))), grid
