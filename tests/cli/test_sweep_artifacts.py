"""kvq-eval --sweep: its artifacts are those of kvq-calibrate, and are measured and compared as those are."""

import json
from pathlib import Path

import pytest
from kvq_tools import calibrate, succeed
from sweeps import HELD_OUT, SIZE, TINY, document, names, sweep, table, words

from kvq.safetensors_file import SafetensorsFile


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


def test_a_table_says_why_errors_are_zero(dump, held_out, tmp_path):
    """Also where the windows hold the longest sequence, so that the row takes 16 bits."""
    grid = {"rows": ["--method plain --recent-tokens 300"]}
    inside, outside = (
        "\n".join(table(tmp_path, grid, held_out, "--calibration", dump, *more)) for more in ((), ("--no-windows",))
    )
    assert " 16.00 " in inside and "0 means that exact windows hold whole sequences" in inside
    assert "0 means" not in outside


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
