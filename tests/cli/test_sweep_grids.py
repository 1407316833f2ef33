"""The grids of scripts/sweeps: labels mean what they say, rows are those of the papers, and each grid runs."""

import itertools
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from dumps import edited
from faulty_dumps import drop
from kvq_tools import ROOT, calibrate
from sweeps import HELD_OUT, SIZE, TINY, USAGE, document, names, sweep, words


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
