"""kvq-eval --sweep: which rows a grid has, several dumps, the front, the table, distances of widths. No run leaves
anything in the folder for temporary files."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
from kvq_tools import calibrate, run, succeed
from sweeps import HELD_OUT, INPUT, SIZE, TINY, document, names, refused, sweep, table, words


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
