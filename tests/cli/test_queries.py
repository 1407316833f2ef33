"""kvq-calibrate --queries: moments of the queries of generated tokens, or of prompts (SAW-INT4 A.3)."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from dumps import edited
from kvq_tools import calibrate, run, succeed

from kvq.safetensors_file import SafetensorsFile

USAGE, INPUT = 2, 3
SIZE = {"tokens": 150, "sequences": 3, "layers": 2, "head_dim": 32, "query_spectrum": 0.8, "generated": 12}


@pytest.fixture(scope="module")
def dump(make_dump) -> Path:
    return make_dump(**SIZE)


@pytest.fixture(scope="module")
def unmarked(dump, tmp_path_factory) -> Path:
    return edited(dump, tmp_path_factory.mktemp("unmarked") / "dump.h5", lambda file: file.pop("generated"))


def collected(dump: Path, folder: Path, *flags: object) -> tuple[dict, dict[str, np.ndarray]]:
    """Manifest and tensors of the statistics."""
    stats = folder / "stats.safetensors"
    calibrate(dump, folder / "out", "--stats", stats, *flags)
    file = SafetensorsFile.open(stats)
    return json.loads(file.metadata["kvq.manifest"]), {name: file.array(name) for name in file.tensors}


def options_of(artifact: Path) -> dict:
    return json.loads(SafetensorsFile.open(artifact).metadata["kvq.manifest"])["calibration"]["options"]


@pytest.mark.parametrize("queries", ["generated", "prompt"])
def test_query_moment_sums_the_queries_of_these_tokens(dump, tmp_path, queries):
    manifest, tensors = collected(dump, tmp_path, "--queries", queries)
    assert (manifest["version"], manifest["queries"], manifest["requires"]) == ("1.5", queries, ["queries"])
    with h5py.File(dump) as file:
        chosen = file["generated"][:] == (queries == "generated")
        for layer in (0, 1):
            q = file[f"layers/{layer}/q"][:].astype(np.float64)[chosen]
            heads = len(tensors[f"layers.{layer}.query.weight"])
            grouped = q.reshape(len(q), heads, -1, q.shape[2])
            np.testing.assert_allclose(
                tensors[f"layers.{layer}.query.sum"], np.einsum("thgi,thgj->hij", grouped, grouped), rtol=1e-9
            )
            assert tensors[f"layers.{layer}.query.weight"].tolist() == [len(q) * grouped.shape[2]] * heads
            assert len(tensors[f"layers.{layer}.sample.token"]) == 150, "the sample is of all tokens"


def test_moments_of_all_are_those_of_generated_and_prompt(dump, tmp_path):
    flags = ("--collect", "query", "--collect", "key", "--collect", "scored_value", "--collect", "scored_query")
    of = {}
    for queries in ("all", "generated", "prompt"):
        (folder := tmp_path / queries).mkdir()
        of[queries] = collected(dump, folder, "--queries", queries, *flags)[1]
    for name in of["all"]:
        if any(word in name for word in ("query.", "scored_value.")):
            both = of["generated"][name] + of["prompt"][name]
            scale = np.abs(of["all"][name]).max()
            np.testing.assert_allclose(both / scale, of["all"][name] / scale, atol=1e-6, err_msg=name)
        if "key." in name:
            np.testing.assert_array_equal(of["generated"][name], of["all"][name])


def test_all_is_what_it_was(dump, unmarked, tmp_path):
    """Without --queries, with --queries all, and without marks: the same artifact."""
    plain = calibrate(dump, tmp_path / "plain").read_bytes()
    assert plain == calibrate(dump, tmp_path / "all", "--queries", "all").read_bytes()
    assert plain == calibrate(unmarked, tmp_path / "unmarked").read_bytes()
    assert "queries" not in options_of(tmp_path / "plain")


def test_artifact_says_whose_queries_it_knows(dump, tmp_path):
    own = calibrate(dump, tmp_path / "own", "--queries", "generated", "--stats", tmp_path / "stats")
    assert options_of(own)["queries"] == "generated"
    later = tmp_path / "later"
    succeed("kvq-calibrate", "--quiet", "--stats", tmp_path / "stats", "--output", later)
    assert later.read_bytes() == own.read_bytes()
    other = calibrate(dump, tmp_path / "other")
    rotations = [SafetensorsFile.open(path).array("layers.0.k.rotation") for path in (own, other)]
    assert not np.array_equal(*rotations)


def refusal(*flags: object) -> tuple[int, str]:
    result = run("kvq-calibrate", "--quiet", *flags)
    lines = [line for line in result.stderr.splitlines() if not line.startswith("hint: ")]
    assert result.stdout == "" and len(lines) == 1, result
    return result.code, lines[0].removeprefix("kvq-calibrate: error: ")


@pytest.mark.parametrize("flags", [(), ("--dry-run",)])
def test_dump_without_marks_is_refused_by_name(unmarked, tmp_path, flags):
    code, message = refusal("--model", unmarked, "--queries", "generated", "--output", tmp_path / "out", *flags)
    assert code == USAGE and message.startswith(f"--queries generated: {unmarked} has no /generated")
    assert list(tmp_path.iterdir()) == []


def test_dump_without_such_queries_is_refused_by_name(dump, tmp_path):
    flags = ("--num-tokens", 20, "--queries", "generated", "--output", tmp_path / "out")
    code, message = refusal("--model", dump, *flags)
    assert code == USAGE and "layer 0: --queries generated: none of the 20 tokens" in message


def test_words_and_places_of_the_flag(dump, tmp_path):
    code, message = refusal("--model", dump, "--queries", "decode", "--output", tmp_path / "out")
    assert code == USAGE and "--queries" in message and "decode" in message
    calibrate(dump, tmp_path / "out", "--stats", tmp_path / "stats")
    code, message = refusal("--stats", tmp_path / "stats", "--queries", "all", "--output", tmp_path / "out2")
    assert code == USAGE and message.startswith("--queries chooses queries of a dump")


def test_statistics_of_other_queries_do_not_merge(dump, tmp_path):
    for layer, queries in ((0, "generated"), (1, "all")):
        calibrate(dump, tmp_path / "out", "--layers", layer, "--queries", queries, "--stats", tmp_path / queries)
    code, message = refusal("--merge-stats", tmp_path / "generated", tmp_path / "all", "--stats", tmp_path / "both")
    assert code == INPUT and "queries: expected generated" in message and message.endswith("found all")


def test_sweep_has_queries_as_an_axis(dump, unmarked, tmp_path):
    grid = tmp_path / "sweep.json"
    grid.write_text(json.dumps({"axes": [["--queries all", "--queries generated", "--queries prompt"]]}))
    flags = ("kvq-eval", "--quiet", "--json", "--model", dump, "--sweep", grid, "--keep", tmp_path / "kept")
    rows = json.loads(succeed(*flags, "--calibration", dump).stdout)["schemes"]
    assert [options_of(Path(row["path"])).get("queries") for row in rows] == [None, "generated", "prompt"]
    for row, queries in zip(rows, ("all", "generated", "prompt"), strict=True):
        alone = calibrate(dump, tmp_path / "alone", "--queries", queries)
        assert Path(row["path"]).read_bytes() == alone.read_bytes()
    result = run(*flags, "--calibration", unmarked)
    assert result.code == USAGE and "queries generated" in result.stderr and "/generated" in result.stderr
