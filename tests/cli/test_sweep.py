"""kvq-eval --sweep: which rows a grid has, artifacts as kvq-calibrate writes them, the front, distances of widths,
refusals. No run leaves anything in the folder for temporary files."""

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dumps import edited
from faulty_dumps import drop
from kvq_tools import BIN, ROOT, Result, calibrate, run, succeed

from kvq.safetensors_file import SafetensorsFile

USAGE, INPUT = 2, 3
SIZE = {"tokens": 150, "sequences": 2, "layers": 2, "head_dim": 64, "query_spectrum": 0.8, "outlier_channels": 3}


@pytest.fixture(scope="module")
def dump(make_dump) -> Path:
    return make_dump(**SIZE)


@pytest.fixture(scope="module")
def held_out(make_dump) -> Path:
    return make_dump(**SIZE | {"tokens": 90, "sequences": 1}, seed=1)


@pytest.fixture(scope="module")
def tiny(make_dump) -> Path:
    """A dump for tests in which the numbers do not matter."""
    return make_dump(tokens=40, sequences=2, layers=1, head_dim=16, q_heads=2)


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


# Rows

GRID = {
    "title": "some rows",
    "flags": "--sink-tokens 0 --recent-tokens 0",
    "rows": [{"label": "first", "flags": "--method oscar"}, "--method plain --bits 3"],
    "axes": [
        [{"label": "A", "flags": "--bits 2"}, {"label": "B", "flags": "--bits 4"}],
        [
            {"label": "x", "flags": "--method plain"},
            {"label": "y", "flags": "--method quarot"},
            {"label": "z", "flags": ""},
        ],
    ],
    "schemes": ["bf16", "kivi-2"],
}


def test_rows_then_every_combination_then_schemes(tiny, tmp_path):
    said = document(tmp_path, GRID, tiny, "--calibration", tiny)
    assert said["title"] == "some rows"
    products = [", ".join(labels) for labels in itertools.product("AB", "xyz")]
    first, plain, *rest = names(said)
    assert (first, *rest) == ("first", *products, "bf16", "kivi-2")
    assert plain.split() == ["method", "plain", "bits", "3"], "a row without a label is named by its flags"


def test_flags_are_those_of_the_file_then_those_of_the_entries(tiny, tmp_path):
    rows = document(tmp_path, GRID, tiny, "--calibration", tiny)["schemes"][:-2]
    axes = [
        f"{bits} {method}".split()
        for bits, method in itertools.product(("--bits 2", "--bits 4"), ("--method plain", "--method quarot", ""))
    ]
    expected = [["--method", "oscar"], ["--method", "plain", "--bits", "3"], *axes]
    assert [words(row) for row in rows] == [
        [*GRID["flags"].split(), *flags, "--model", str(tiny)] for flags in expected
    ]
    assert [row["method"] for row in rows] == ["oscar", "plain", *["plain", "quarot", "oscar"] * 2]


def test_schemes_have_no_flags(tiny, tmp_path):
    for scheme in document(tmp_path, GRID, tiny, "--calibration", tiny)["schemes"][-2:]:
        assert not scheme.keys() & {"flags", "path", "method", "allocation"} and "pareto" in scheme


def test_schemes_of_the_command_line_stand_beside(tiny, tmp_path):
    grid = {"rows": ["--method plain"], "schemes": ["bf16"]}
    assert sorted(names(document(tmp_path, grid, tiny, "--calibration", tiny, "--scheme", "tq-mse-2"))[1:]) == [
        "bf16",
        "tq-mse-2",
    ]


def test_one_axis_and_one_entry_are_enough(tiny, tmp_path):
    for grid in ({"rows": ["--method plain"]}, {"axes": [["--method plain"]]}):
        assert len(document(tmp_path, grid, tiny, "--calibration", tiny)["schemes"]) == 1


def test_title_is_optional(tiny, tmp_path):
    assert not document(tmp_path, {"rows": ["--method plain"]}, tiny, "--calibration", tiny).get("title")
    for title, first in (({}, "row "), ({"title": "T"}, "T\n")):
        result = sweep(tmp_path, title | {"rows": ["--method plain"]}, tiny, "--calibration", tiny)
        assert result.code == 0 and result.stdout.startswith(first)
        assert result.stderr.startswith("kvq-eval: warning: method plain was calibrated on this dump")


def test_a_stray_word_of_a_row_is_taken_for_a_dump(tiny, tmp_path):
    result = sweep(tmp_path, {"rows": [{"label": "own", "flags": "plain"}]}, tiny, "--calibration", tiny)
    assert result.code == INPUT and 'row "own": plain: cannot open' in result.stderr


# Several dumps


def test_dumps_are_one_more_axis(dump, held_out, tmp_path):
    grid = {
        "flags": "--method plain",
        "rows": [{"label": "own", "flags": "--center kv"}],
        "axes": [[{"label": "A", "flags": "--bits 2"}, {"label": "B", "flags": "--bits 3"}]],
    }
    said = document(
        tmp_path,
        grid,
        held_out,
        "--calibration",
        f"one={dump}",
        "--calibration",
        f"two={held_out}",
        "--keep",
        tmp_path / "kept",
    )
    assert names(said) == [f"{row}, {text}" for row, text in itertools.product(["own", "A", "B"], ["one", "two"])]
    assert [words(row)[-2:] for row in said["schemes"]] == [["--model", str(dump)], ["--model", str(held_out)]] * 3
    found = [Path(row["path"]).read_bytes() for row in said["schemes"] if row["name"].startswith("own")]
    assert found == [
        calibrate(source, tmp_path / "out", "--method", "plain", "--center", "kv").read_bytes()
        for source in (dump, held_out)
    ]


def test_dumps_without_a_name_are_named_by_their_file(tiny, tmp_path):
    for name in ("prose.h5", "code.h5"):
        shutil.copy(tiny, tmp_path / name)
    said = document(
        tmp_path,
        {"rows": [{"label": "own", "flags": "--method plain"}]},
        tiny,
        "--calibration",
        tmp_path / "prose.h5",
        "--calibration",
        tmp_path / "code.h5",
    )
    assert names(said) == ["own, prose", "own, code"]


def test_one_dump_is_no_axis(tiny, tmp_path):
    grid = {"rows": [{"label": "own", "flags": "--method plain"}]}
    for calibration in (tiny, f"some={tiny}"):
        assert names(document(tmp_path, grid, tiny, "--calibration", calibration)) == ["own"]


def test_row_with_a_dump_of_its_own(tiny, dump, held_out, tmp_path):
    grid = {"rows": [f"--method plain --center kv --model {dump}", f"--method plain --center kv --model {held_out}"]}
    said = document(tmp_path, grid, held_out, "--keep", tmp_path / "kept")
    for row, source in zip(said["schemes"], (dump, held_out), strict=True):
        assert (
            Path(row["path"]).read_bytes()
            == calibrate(source, tmp_path / "out", "--method", "plain", "--center", "kv").read_bytes()
        )


@pytest.mark.parametrize("name", ["with space.h5", "with'quote.h5", "with\\backslash.h5", "a=b.h5", "ünïcode.h5"])
def test_names_of_dumps_may_hold_what_file_names_may(tiny, tmp_path, name):
    shutil.copy(tiny, tmp_path / name)
    (row,) = document(tmp_path, {"rows": ["--method plain"]}, tiny, "--calibration", f"text={tmp_path / name}")[
        "schemes"
    ]
    assert words(row)[-1] == str(tmp_path / name)


def test_files_may_have_what_ends_a_name(tiny, tmp_path):
    """A text that names a file, or has a slash before its first =, is not NAME=FILE."""
    folder = tmp_path / "a=b"
    folder.mkdir()
    for place, (calibration, cwd) in enumerate([(folder / "c=d.h5", None), ("c=d.h5", folder), ("./c=d.h5", folder)]):
        shutil.copy(tiny, folder / "c=d.h5")
        grid = tmp_path / "sweep.json"
        grid.write_text(json.dumps({"rows": ["--method plain"]}))
        result = succeed(
            "kvq-eval", "--quiet", "--json", "--model", tiny, "--sweep", grid, "--calibration", calibration, cwd=cwd
        )
        assert words(json.loads(result.stdout)["schemes"][0])[-1] == str(calibration), place
    refused(
        sweep(tmp_path, {"rows": ["--method plain"]}, tiny, "--calibration", folder / "none=1.h5"),
        INPUT,
        f"{folder}/none=1.h5: cannot open",
    )


def test_name_of_a_dump_with_a_double_quote_is_one_name(tiny, tmp_path):
    """A double quote in the name must not split the row's flags."""
    path = tmp_path / 'with"quote.h5'
    shutil.copy(tiny, path)
    result = sweep(tmp_path, {"rows": ["--method plain"]}, tiny, "--calibration", path)
    assert result.code == 0, result.stderr


# What is calibrated

METHODS = [
    "--method oscar",
    "--method oscar --sign-search 2 --seed 3",
    "--method oscar --sink-tokens 4 --recent-tokens 16 --share layer",
    "--target-k scored_query --target-v sst --clip 0.95",
    "--method block-gtq --score qk_max",
    "--method block-gtq --v-allocation channel",
    "--method kvq --held-out-tokens 30",
    "--method kvq --held-out-tokens 50 --budget-bits 3",
    "--method saw-int4 --kmeans 4 --center none",
    "--method saw-int4 --hessian consistent",
    "--method tq-mse --codebook fitted --sample-tokens 40",
    "--method plain --num-tokens 80 --center kv",
    "--method plain --first-token 20 --center kv",
    "--method oscar --num-tokens 80 --first-token 3",
    "--method quarot --coder trellis",
    "--method random --seed 7",
    "--method plain --center k --exact-layers 0",
]


@pytest.fixture(scope="module")
def kept(dump, held_out, tmp_path_factory) -> tuple[dict, Path]:
    """All methods as one sweep, whose rows share statistics where possible, and its artifacts."""
    folder = tmp_path_factory.mktemp("kept")
    return document(
        folder, {"rows": METHODS}, held_out, "--calibration", dump, "--keep", folder / "artifacts"
    ), folder / "artifacts"


@pytest.fixture(scope="module")
def direct(dump, tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("direct")
    return [calibrate(dump, folder / str(place), *flags.split()) for place, flags in enumerate(METHODS)]


def contents(path: Path) -> tuple[dict, dict[str, bytes]]:
    file = SafetensorsFile.open(path)
    return json.loads(file.metadata["kvq.manifest"]), {name: bytes(file.raw(name)) for name in file.tensors}


def without_errors(manifest: dict) -> dict:
    for layer in manifest["layers"]:
        for side in "kv":
            layer[side].pop("error", None)
    return manifest


def test_kept_artifacts_decide_what_those_of_kvq_calibrate_do(kept, direct):
    for row, own, flags in zip(kept[0]["schemes"], direct, METHODS, strict=True):
        (manifest, tensors), (other_manifest, other_tensors) = contents(row["path"]), contents(own)
        assert tensors == other_tensors and without_errors(manifest) == without_errors(other_manifest), flags


def test_kept_artifacts_are_those_of_kvq_calibrate_byte_for_byte_whatever_the_other_rows_collect(kept, direct):
    differing = [
        row["flags"]
        for row, own in zip(kept[0]["schemes"], direct, strict=True)
        if Path(row["path"]).read_bytes() != own.read_bytes()
    ]
    assert differing == []


@pytest.mark.parametrize("place", range(0, len(METHODS), 3), ids=lambda place: METHODS[place])
def test_artifact_of_a_row_alone_is_that_of_kvq_calibrate(dump, held_out, direct, tmp_path, place):
    (row,) = document(
        tmp_path, {"rows": [METHODS[place]]}, held_out, "--calibration", dump, "--keep", tmp_path / "kept"
    )["schemes"]
    assert Path(row["path"]).read_bytes() == direct[place].read_bytes()


def test_flags_of_the_document_make_the_artifact_again(kept, direct, tmp_path):
    for row, own in list(zip(kept[0]["schemes"], direct, strict=True))[::4]:
        succeed("kvq-calibrate", "--quiet", *words(row), "--output", tmp_path / "out")
        assert own.read_bytes() == (tmp_path / "out").read_bytes(), row["flags"]


def test_every_row_has_one_file_in_order(kept):
    said, folder = kept
    paths = [Path(row["path"]) for row in said["schemes"]]
    assert sorted(folder.iterdir()) == sorted(paths) and len(set(paths)) == len(METHODS)
    assert paths == sorted(paths), "a listing has the order of the rows"


@pytest.fixture(scope="module")
def alone(kept, held_out) -> dict:
    """What kvq-eval says of the artifacts that the sweep kept."""
    paths = [row["path"] for row in kept[0]["schemes"]]
    return json.loads(succeed("kvq-eval", "--quiet", "--json", "--model", held_out, "--context", 90, *paths).stdout)


def test_rows_are_measured_as_their_artifacts_are(kept, alone):
    said, _ = kept
    assert said["dump"] == alone["dump"] and said["settings"] == alone["settings"]
    for own, other in zip(said["schemes"], alone["schemes"], strict=True):
        assert {key: own[key] for key in ("effective_bits", "k_code_bits", "mean", "layers", "method")} == {
            key: other[key] for key in ("effective_bits", "k_code_bits", "mean", "layers", "method")
        }


def without_names(comparisons: list[dict]) -> list[dict]:
    return [{key: value for key, value in one.items() if key not in ("scheme", "against")} for one in comparisons]


def test_rows_are_compared_with_the_first_as_artifacts_are(kept, alone):
    said, _ = kept
    assert without_names(said["comparisons"]) == without_names(alone["comparisons"])
    assert {one["against"] for one in said["comparisons"]} == {said["schemes"][0]["name"]}


def test_without_keep_no_path_is_named_that_is_gone(tiny, tmp_path):
    """A path in the output would also differ from run to run."""
    (row,) = document(tmp_path, {"rows": ["--method plain"]}, tiny, "--calibration", tiny)["schemes"]
    assert "path" not in row or Path(row["path"]).exists()
    assert {path.name for path in tmp_path.iterdir()} == {"sweep.json", "scratch"}


def test_keep_makes_its_folder_and_writes_over_what_was_there(tiny, tmp_path):
    folder = tmp_path / "where"
    for bits in (2, 3):
        (row,) = document(
            tmp_path,
            {"rows": [{"label": "own", "flags": f"--method plain --bits {bits}"}]},
            tiny,
            "--calibration",
            tiny,
            "--keep",
            folder,
        )["schemes"]
        assert (
            Path(row["path"]).read_bytes()
            == calibrate(tiny, tmp_path / "out", "--method", "plain", "--bits", bits).read_bytes()
        )
    assert len(list(folder.iterdir())) == 1


def test_labels_that_are_no_file_names_and_not_unique(tiny, tmp_path):
    labels = ("a/../b", "a/../b", "C = 1", "..", "K&V; ü")
    grid = {
        "rows": [
            {"label": label, "flags": f"--method plain --bits {bits}"} for bits, label in enumerate(labels, start=1)
        ]
    }
    said = document(tmp_path, grid, tiny, "--calibration", tiny, "--keep", tmp_path / "kept")
    assert names(said) == ["a/../b", "a/../b (2)", *labels[2:]]
    assert sorted((tmp_path / "kept").iterdir()) == sorted(Path(row["path"]) for row in said["schemes"])
    assert {path.name for path in tmp_path.iterdir()} == {"sweep.json", "scratch", "kept"}


def test_threads_change_nothing(dump, held_out, tmp_path):
    grid = {"rows": ["--method oscar", "--method kvq --held-out-tokens 30"], "schemes": ["tq-mse-2"]}
    one, three = (
        sweep(
            tmp_path, grid, held_out, "--calibration", dump, "--json", "--threads", threads, "--keep", tmp_path / "kept"
        ).stdout
        for threads in (1, 3)
    )
    assert one == three and one.startswith("{")


def test_layers_and_windows_of_the_measurement(dump, held_out, tmp_path):
    grid = {"rows": ["--method plain --recent-tokens 300"]}
    inside, outside = (
        document(tmp_path, grid, held_out, "--calibration", dump, "--layers", 1, *more)["schemes"][0]
        for more in ((), ("--no-windows",))
    )
    assert [layer["index"] for layer in inside["layers"]] == [1]
    assert inside["mean"]["output_rel_mse"] == 0 < outside["mean"]["output_rel_mse"]


def test_bits_are_counted_at_the_longest_sequence(dump, held_out, tmp_path):
    """Effective bits are at the length at which errors are measured: 90 tokens here, 127 of the other dump's 150.
    --context overrides it."""
    grid = {"rows": ["--method plain"], "schemes": ["kivi-2"]}
    for model, flags, context in ((held_out, (), 90), (dump, (), 127), (dump, ("--context", 32768), 32768)):
        said = document(tmp_path, grid, model, "--calibration", dump, *flags)
        alone = json.loads(
            succeed("kvq-eval", "--json", "--model", model, "--scheme", "kivi-2", "--context", context).stdout
        )
        assert said["settings"]["context"] == context
        assert said["schemes"][1]["effective_bits"] == alone["schemes"][0]["effective_bits"]


# The front

SPREAD = {
    "flags": "--sink-tokens 0 --recent-tokens 0",
    "axes": [
        [f"--method {name}" for name in ("plain", "quarot", "oscar", "block-gtq", "tq-mse")],
        ["--bits 2", "--bits 3", "--bits 4"],
    ],
    "schemes": ["kivi-2-r32", "kivi-3-r32", "turboquant-qjl-3", "bf16"],
}


def on_front(points: list[tuple[float, float]]) -> list[bool]:
    """A point is on the front unless another is at least as good in both and better in one."""
    return [not any(other != own and other[0] <= own[0] and other[1] <= own[1] for other in points) for own in points]


@pytest.fixture(scope="module")
def spread(dump, held_out, tmp_path_factory) -> tuple[dict, list[str]]:
    folder = tmp_path_factory.mktemp("spread")
    arguments = (folder, SPREAD, held_out, "--calibration", dump)
    return document(*arguments), table(*arguments)


def points_of(said: dict, metric: str) -> list[tuple[float, float]]:
    value = {
        "output_rel_mse": lambda mean: mean["output_rel_mse"],
        "attention_kl": lambda mean: mean["attention_kl"]["mean"],
    }[metric]
    return [(scheme["effective_bits"], value(scheme["mean"])) for scheme in said["schemes"]]


@pytest.mark.parametrize("metric", ["output_rel_mse", "attention_kl"])
def test_front_is_what_nothing_else_beats(spread, metric):
    said, _ = spread
    points = points_of(said, metric)
    assert len(set(points)) == len(points) == 19, "no two are equal here"
    expected = on_front(points)
    assert [scheme["pareto"][metric] for scheme in said["schemes"]] == expected
    assert 3 <= sum(expected) < 19


def test_equal_rows_are_on_the_front_together(tiny, tmp_path):
    """ "Nothing else has both fewer bits and less output error" holds for both."""
    grid = {
        "rows": [{"label": name, "flags": "--method plain --bits 3"} for name in "ab"]
        + [{"label": "c", "flags": "--method plain --bits 2"}]
    }
    said = document(tmp_path, grid, tiny, "--calibration", tiny)
    for metric in ("output_rel_mse", "attention_kl"):
        assert [scheme["pareto"][metric] for scheme in said["schemes"]] == on_front(points_of(said, metric))


def test_layers_without_values_have_no_front_of_outputs(make_dump, tmp_path):
    dump = make_dump(tokens=64, head_dim=32, layers=1, kind="mla_rope", kv_heads=1)
    said = document(
        tmp_path,
        {"rows": ["--method plain", "--method plain --bits 3", "--method quarot --bits 3"]},
        dump,
        "--calibration",
        dump,
    )
    assert not any(scheme["pareto"]["output_rel_mse"] for scheme in said["schemes"])
    points = [(scheme["effective_bits"], scheme["mean"]["attention_kl"]["mean"]) for scheme in said["schemes"]]
    assert [scheme["pareto"]["attention_kl"] for scheme in said["schemes"]] == on_front(points)


# The table


def shown(x: float) -> str:
    return f"{x:.4f}" if x >= 0.001 else f"{x:.1e}" if x else "0"


def cells(line: str, name: str) -> list[str]:
    assert line.startswith(name)
    return line.removeprefix(name).split()


def test_table_says_what_the_document_says(spread):
    said, lines = spread
    at = next(place for place, line in enumerate(lines) if line.startswith("row "))
    assert lines[at].split()[:7] == ["row", "bits", "QK", "output", "KL", "KL", "p99"]
    for line, scheme in zip(lines[at + 1 :], said["schemes"]):
        mean = scheme["mean"]
        kl = mean["attention_kl"]
        expected = [
            f"{scheme['effective_bits']:.2f}",
            *map(shown, (mean["logit_rel_mse"], mean["output_rel_mse"], kl["mean"], kl["p99"])),
        ]
        found = cells(line, scheme["name"])
        assert found[:5] == expected
        assert ("*" in found) == scheme["pareto"]["output_rel_mse"]
    assert any(line.startswith("*: on the front") for line in lines[at + 1 + len(said["schemes"]) :])


def test_progress_does_not_disturb_results(tiny, tmp_path):
    grid = tmp_path / "sweep.json"
    grid.write_text(json.dumps({"rows": ["--method plain"]}))
    flags = ("--model", tiny, "--calibration", tiny, "--sweep", grid, "--json", "--keep", tmp_path / "kept")
    assert succeed("kvq-eval", *flags).stdout == succeed("kvq-eval", *flags, "--quiet").stdout


# Distances of widths

WIDTHS = {
    "rows": [
        "--method block-gtq --bits 2",
        "--method block-gtq --bits 2 --score qk_max",
        "--method block-gtq --bits 2 --num-tokens 60",
        "--method block-gtq --bits 3",
        "--method oscar --bits 2",
        "--method block-gtq --bits 2 --k-allocation channel",
        "--method kvq --held-out-tokens 30",
    ],
    "schemes": ["tq-mse-2"],
}


@pytest.fixture(scope="module")
def widths(dump, held_out, tmp_path_factory) -> tuple[dict, list[str]]:
    folder = tmp_path_factory.mktemp("widths")
    arguments = (folder, WIDTHS, held_out, "--calibration", dump, "--keep", folder / "kept")
    return document(*arguments), table(*arguments)


def compared(own: str, reference: str) -> dict | None:
    """The distance by kvq-inspect; None if one artifact has no widths by RoPE block."""
    result = run("kvq-inspect", own, "--compare", reference, "--json")
    if result.code != 0:
        return None
    total = json.loads(result.stdout)["compare"]["total"]
    return {key: total[key] for key in ("hamming", "high_bit_jaccard", "regret")}


def test_distance_of_widths_is_that_of_kvq_inspect(widths):
    said, _ = widths
    *rows, scheme = said["schemes"]
    found = [row.get("allocation") for row in rows]
    assert "allocation" not in scheme
    assert found == [compared(row["path"], rows[0]["path"]) for row in rows]
    assert found[0] == {"hamming": 0, "high_bit_jaccard": 1, "regret": 0}
    assert [one is None for one in found[:6]] == [False, False, False, False, True, True]
    assert found[3]["hamming"] > 0 > found[3]["regret"], "more bits are another allocation, and cheaper"


def test_table_shows_distances_of_widths(widths):
    said, lines = widths
    at = next(place for place, line in enumerate(lines) if line.startswith("row "))
    assert lines[at].split()[7:] == ["Hamming", "HB@4", "regret"]
    for line, scheme in zip(lines[at + 1 :], said["schemes"]):
        found = [cell for cell in cells(line, scheme["name"]) if cell != "*"][5:]
        own = scheme.get("allocation")
        assert found == (
            ["-"] * 3
            if own is None
            else [f"{own['hamming']:.3f}", f"{own['high_bit_jaccard']:.3f}", f"{100 * own['regret']:+.2f}%"]
        )


def test_widths_that_cannot_be_compared_do_not_end_the_sweep(dump, held_out, tmp_path):
    """Widths for each head and for the whole layer have no distance, like rows without widths; both rows are
    measured."""
    grid = {"rows": ["--method block-gtq", "--method block-gtq --share layer"]}
    result = sweep(tmp_path, grid, held_out, "--calibration", dump, "--json")
    assert result.code == 0, result.stderr
    assert ["allocation" in scheme for scheme in json.loads(result.stdout)["schemes"]] == [True, False]


def test_first_row_without_widths_is_no_reference(dump, held_out, tmp_path):
    said = document(tmp_path, {"rows": ["--method plain", "--method block-gtq"]}, held_out, "--calibration", dump)
    assert all("allocation" not in scheme for scheme in said["schemes"])
    assert "Hamming" not in "".join(table(tmp_path, {"rows": ["--method plain"]}, held_out, "--calibration", dump))


# The grids of the papers

SCRIPTS = sorted((ROOT / "scripts/sweeps").glob("*.json"))
LONG = {
    "block-gtq-table2",
    "block-gtq-table3",
    "block-gtq-table17",
    "oscar-table7",
}  # these calibrate on more tokens than the sample has
MANY_CENTROIDS = {"saw-int4-table2", "saw-int4-table9"}  # these need 2048 tokens


def rows_of(grid: dict) -> list[tuple[str, list[str]]]:
    """Labels and flags of all rows, by formats/eval.md."""
    rows = [(entry["label"], entry["flags"]) for entry in grid.get("rows", [])]
    if "axes" in grid:
        rows += [
            (", ".join(entry["label"] for entry in entries), " ".join(entry["flags"] for entry in entries))
            for entries in itertools.product(*grid["axes"])
        ]
    return [(label, f"{grid.get('flags', '')} {flags}".split()) for label, flags in rows]


def check_script(path: Path, folder: Path, dump: Path, held_out: Path) -> None:
    grid = json.loads(path.read_text())
    said = document(folder, path, held_out, "--calibration", dump)
    expected = rows_of(grid)
    assert said["title"] == grid["title"]
    assert names(said) == [label for label, _ in expected] + grid.get("schemes", [])
    assert [words(row)[:-2] for row in said["schemes"][: len(expected)]] == [flags for _, flags in expected]
    assert all(scheme["mean"]["attention_kl"]["mean"] >= 0 for scheme in said["schemes"])


@pytest.fixture(scope="module")
def sample_layer(sample, tmp_path_factory) -> tuple[Path, Path]:
    """One layer of each sample dump: to calibrate on, and to measure with."""
    folder = tmp_path_factory.mktemp("sample")

    def one_layer(file):
        for layer in (0, 1, 2, 4, 5):
            drop(f"layers/{layer}")(file)

    return edited(sample, folder / "calibration.h5", one_layer), edited(
        ROOT / "sample_data/evaluation.h5", folder / "evaluation.h5", one_layer
    )


def test_there_are_grids():
    assert {path.stem for path in SCRIPTS} >= LONG | MANY_CENTROIDS | {"methods", "transforms"} and len(SCRIPTS) == 17


# What the labels of the grids mean. A part of a label between commas or plus signs gives the row exactly these flags.
MEANINGS = {
    "block-gtq": {
        r"K([23])V\1": r"--bits \1",
        r"Block-GTQ": "",
        r"([234]) bits": r"--bits-k \1",
        r"(\d+) tokens": r"--num-tokens \1",
        r"text 0": "--first-token 0",
        r"text 1": "--first-token 4096",
        r"text 2": "--first-token 8192",
        r"from (\d+)": r"--first-token \1",
        r"(qk_avg|qk_max|qk_product|k_only|q_only|qk_energy_product)": r"--score \1",
        r"centred": "--center kv",
    },
    "saw-int4": {
        r"INT4": "--hadamard none",
        r"K|(BDR\d+) \(K\)": "--hadamard k",
        r"K&V|(BDR\d+) \(K&V\)": "--hadamard kv",
        r"BDR(\d+)( \(.*\))?": r"--hadamard-order \1",
        r"C = (\d+)": r"--kmeans \1",
        r"Hessian": "--hessian paper",
        r"consistent Hessian": "--hessian consistent",
    },
    "oscar": {
        r"group (\d+)": r"--group-size \1",
        r"\((\d+); (\d+)\)": r"--sink-tokens \1 --recent-tokens \2",
        r"searched": "--clip search",
        r"([KV]) ([01]\.\d\d)": lambda found: f"--clip-{found[1].lower()} {found[2]}",
        r"(\d+) tokens": r"--num-tokens \1",
    },
}
# Flags of all rows of a grid.
COMMON = {
    "block-gtq-table1": "--method block-gtq --bits-v 16 --sink-tokens 0 --recent-tokens 0",
    "block-gtq-table12": "--method block-gtq --bits-v 16 --sink-tokens 0 --recent-tokens 0",
    "block-gtq-table15": "--method block-gtq --bits 2",
    "block-gtq-table17": "--method block-gtq --bits 3",
    "block-gtq-table2": "--method block-gtq",
    "block-gtq-table3": "--method block-gtq",
    "oscar-table12": "--method oscar --bits 2 --clip search --sink-tokens 64 --recent-tokens 256",
    "oscar-table5": "--method oscar --bits 2",
    "oscar-table6": "--method oscar --bits 2",
    "oscar-table7": "--method oscar --bits 2",
    "saw-int4-table2": "--method saw-int4 --sample-tokens 20000",
    "saw-int4-table5": "--method saw-int4",
    "saw-int4-table8": "--method saw-int4",
    "saw-int4-table9": "--method saw-int4 --sample-tokens 20000",
}
# Grids whose labels are words: each flag of a row by its label, without those of all rows.
BY_WORDS = {
    "oscar-table4": {
        "U H P": "--method oscar --composition uhp",
        "U H P of K^T K, V^T V": "--method oscar --composition uhp --target-k key --target-v value",
        "U H P of C_SQ, C_S": "--method oscar --composition uhp --target-k scored_query",
        "without P: U H": "--method oscar --composition uh",
        "without H: U P": "--method oscar --composition up",
        "without U: H P": "--method oscar --composition hp",
        "random Hadamard": "--method quarot --random-signs",
        "random orthogonal": "--method random",
        "no rotation": "--method oscar --composition i",
    },
}


def pairs(flags: list[str]) -> list[tuple[str, ...]]:
    """Flags with their values, sorted."""
    found: list[tuple[str, ...]] = []
    for word in flags:
        found = [*found, (word,)] if word.startswith("--") else [*found[:-1], (*found[-1], word)]
    return sorted(found)


def meaning(family: str, label: str) -> list[tuple[str, ...]]:
    """The flags that a label stands for."""
    flags: list[str] = []
    for part in re.split(r", | \+ ", re.sub(r"\((\d+), (\d+)\)", r"(\1; \2)", label)):
        known = [
            (re.fullmatch(pattern, part), template)
            for pattern, template in MEANINGS[family].items()
            if re.fullmatch(pattern, part)
        ]
        assert known, f"nothing says what '{part}' of '{label}' means"
        for found, template in known:
            flags += (template(found) if callable(template) else found.expand(template)).split()
    if family == "saw-int4" and "BDR" not in label and "--hadamard" not in flags:
        flags += ["--hadamard", "none"]  # centroids alone
    return pairs(flags)


@pytest.mark.parametrize("name", [path.stem for path in SCRIPTS if path.stem not in ("methods", "transforms")])
def test_labels_of_the_papers_grids_mean_what_they_say(name):
    """A row whose flags say anything else than its label, or nothing, fails: "C = 1" is one centroid."""
    grid = json.loads((ROOT / f"scripts/sweeps/{name}.json").read_text())
    family = next(family for family in MEANINGS if name.startswith(family))
    common = pairs(grid["flags"].split())
    if name in COMMON:
        assert common == pairs(COMMON[name].split())
    for label, flags in rows_of(grid):
        own = sorted(set(pairs(flags)) - set(common))
        if name in BY_WORDS:
            assert own == pairs(BY_WORDS[name][label].split()), label
        else:
            assert own == meaning(family, label), label
    assert name in COMMON or name in BY_WORDS


def test_grids_have_the_rows_of_the_papers():
    rows = {path.stem: rows_of(json.loads(path.read_text())) for path in SCRIPTS}
    labels = {name: [label for label, _ in own] for name, own in rows.items()}
    lengths = [2048, 1024, 512, 256, 128, 64]
    assert labels["block-gtq-table2"] == [
        f"{budget}, {count} tokens" for budget in ("K3V3", "K2V2") for count in lengths
    ]
    places = [", ".join(label.split(", ")[:2]) for label in labels["block-gtq-table3"]]
    assert places == [
        f"{budget}, {count} tokens" for budget in ("K3V3", "K2V2") for count in (2048, 512, 128) for _ in range(3)
    ]
    flags = {label: words for label, words in rows["oscar-table4"]}
    assert flags["U H P of C_SQ, C_S"][-2:] == ["--target-k", "scored_query"]
    assert "--random-signs" in flags["random Hadamard"] and flags["random orthogonal"][-2:] == ["--method", "random"]


def test_transforms_stand_beside_orthogonal_rotations():
    rows = {path.stem: rows_of(json.loads(path.read_text())) for path in SCRIPTS}
    kinds: dict[str, list[str]] = {}
    for label, flags in rows["transforms"]:
        method, kind = label.split(", ")
        kinds.setdefault(method, []).append(kind)
        assert kind == "chosen" or flags[flags.index("--transform") + 1] == kind
    assert kinds["SAW-INT4 4"] == ["orthogonal", "diagonal", "balanced"] and kinds["OSCAR 2"] == [
        "orthogonal",
        "balanced",
    ]
    labels = [label for label, _ in rows["methods"]]
    assert {"saw-int4 4", "saw-int4 diagonal 4", "saw-int4 balanced 4", "oscar 2", "oscar balanced 2"} <= set(labels)


def test_transforms_are_an_axis(dump, held_out, tmp_path):
    """Each row equals the artifact that kvq-calibrate makes from the same flags."""
    transforms = ("orthogonal", "diagonal", "balanced")
    grid = {
        "flags": "--method saw-int4 --hadamard kv",
        "axes": [[{"label": kind, "flags": f"--transform {kind}"} for kind in transforms]],
    }
    folder = tmp_path / "kept"
    said = document(tmp_path, grid, held_out, "--calibration", dump, "--keep", folder)
    assert names(said) == list(transforms)
    for kind, path in zip(transforms, sorted(folder.iterdir()), strict=True):
        alone = calibrate(dump, tmp_path / kind, "--method", "saw-int4", "--hadamard", "kv", "--transform", kind)
        assert path.read_bytes() == alone.read_bytes()


def test_noise_of_a_sweep_is_the_spread_over_its_last_axis(make_dump, tiny, tmp_path):
    grid = {
        "flags": "--method plain --center k",
        "rows": [{"label": "alone", "flags": "--bits 3"}],
        "schemes": ["bf16"],
        "axes": [
            [{"label": "A", "flags": "--bits 2"}, {"label": "B", "flags": "--bits 4"}],
            [{"label": f"from {first}", "flags": f"--num-tokens 20 --first-token {first}"} for first in (0, 20, 40)],
        ],
    }
    said = document(
        tmp_path,
        grid,
        make_dump(tokens=64, layers=1, head_dim=16, q_heads=2),
        "--calibration",
        make_dump(tokens=64, layers=1, head_dim=16, q_heads=2),
    )
    path = tmp_path / "said.json"
    path.write_text(json.dumps(said))
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "scripts/experiments/sweep_noise.py",
            path,
            "--metric",
            "output_rel_mse",
            "--metric",
            "attention_kl.p99",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    header, *lines = done.stdout.splitlines()
    assert header.split() == ["n", "output_rel_mse", "attention_kl.p99"]
    assert [line.split()[:2] for line in lines] == [["alone", "1"], ["A", "3"], ["B", "3"], ["bf16", "1"]]
    values = [scheme["mean"]["output_rel_mse"] for scheme in said["schemes"][1:4]]
    mean, _, deviation, part = lines[1].split()[2:6]
    assert float(mean) == pytest.approx(statistics.mean(values), rel=1e-3) and float(deviation) == pytest.approx(
        statistics.stdev(values), rel=0.1
    )
    assert float(part.strip("(%)")) == pytest.approx(100 * statistics.stdev(values) / statistics.mean(values), abs=0.1)


@pytest.mark.parametrize(
    "path", [path for path in SCRIPTS if path.stem not in LONG | MANY_CENTROIDS], ids=lambda path: path.stem
)
def test_grids_of_the_papers_run_on_the_sample(sample_layer, tmp_path, path):
    check_script(path, tmp_path, *sample_layer)


@pytest.mark.parametrize("path", [path for path in SCRIPTS if path.stem in LONG], ids=lambda path: path.stem)
def test_grids_for_long_texts_run_on_one(make_dump, tmp_path, path):
    shape = {"layers": 1, "q_heads": 1, "kv_heads": 1, "head_dim": 16, "query_spectrum": 0.8, "outlier_channels": 2}
    check_script(
        path,
        tmp_path,
        make_dump(tokens=32768, sequences=128, **shape),
        make_dump(tokens=64, sequences=1, seed=1, **shape),
    )


@pytest.mark.parametrize("path", [path for path in SCRIPTS if path.stem in LONG], ids=lambda path: path.stem)
def test_grids_for_long_texts_name_the_row_that_the_sample_is_too_short_for(sample, tmp_path, path):
    result = sweep(tmp_path, path, ROOT / "sample_data/evaluation.h5", "--calibration", sample)
    assert result.code == USAGE and result.stdout == ""
    label, flags = next(row for row in rows_of(json.loads(path.read_text())) if "--num-tokens" in row[1])
    assert (
        f'"{label}"' in result.stderr
        and "447 tokens" in result.stderr
        and flags[flags.index("--num-tokens") + 1] in result.stderr
    )


@pytest.mark.parametrize("name, row", [("saw-int4-table2", "C = 2048"), ("saw-int4-table9", "BDR16, C = 2048")])
def test_grids_of_centroids_need_as_many_tokens(sample_layer, tmp_path, name, row):
    """2048 centroids need as many tokens; the error comes after other rows are calibrated."""
    path = ROOT / f"scripts/sweeps/{name}.json"
    result = sweep(tmp_path, path, sample_layer[1], "--calibration", sample_layer[0])
    assert result.code == USAGE and result.stdout == "" and f'"{row}"' in result.stderr and "447" in result.stderr


@pytest.mark.parametrize("name", sorted(MANY_CENTROIDS))
def test_grids_of_centroids_run_on_enough_tokens(make_dump, tmp_path, name):
    shape = {"layers": 1, "q_heads": 1, "kv_heads": 1, "head_dim": 128}
    check_script(
        ROOT / f"scripts/sweeps/{name}.json",
        tmp_path,
        make_dump(tokens=2060, sequences=20, **shape),
        make_dump(tokens=64, sequences=1, seed=1, **shape),
    )


# What it refuses


def refused(result: Result, code: int, *words: str) -> None:
    """Asserts one line of error and hints."""
    lines = result.stderr.splitlines()
    assert (result.code, result.stdout) == (code, ""), result
    assert lines[0].startswith("kvq-eval: error: ") and all(line.startswith("hint: ") for line in lines[1:]), (
        result.stderr
    )
    for word in words:
        assert word in lines[0], lines[0]


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
