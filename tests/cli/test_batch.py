"""Layers dealt to processes: examples/batch, and --stats-only, by which a process collects and decides nothing."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from kvq_tools import BIN, calibrate, run, succeed

ROOT = Path(__file__).resolve().parents[2]
XARGS, SLURM = ROOT / "examples/batch/layers_xargs.sh", ROOT / "examples/batch/layers_slurm.sh"
LAYERS = 3


@pytest.fixture(scope="module")
def dump(make_dump) -> Path:
    return make_dump(tokens=90, sequences=2, layers=LAYERS)


def script(path: Path, *words: object, **variables: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"KVQ_CALIBRATE": str(BIN / "kvq-calibrate"), "JOBS": "2"} | variables
    return subprocess.run([path, *map(str, words)], env=environment, capture_output=True, text=True, timeout=120)


def joint(dump: Path, artifact: Path, *flags: object) -> bytes:
    calibrate(dump, artifact, *flags)
    return artifact.read_bytes()


@pytest.mark.parametrize("flags", [("--method", "saw-int4"), ("--method", "kvq", "--held-out-tokens", "24")])
def test_xargs_gives_the_bytes_of_one_run(dump, tmp_path, flags):
    artifact = tmp_path / "of layers.safetensors"  # with a space
    result = script(XARGS, dump, LAYERS, artifact, *flags)
    assert result.returncode == 0, result.stderr
    assert artifact.read_bytes() == joint(dump, tmp_path / "joint", *flags)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["joint", "of layers.safetensors"]


def test_xargs_continues_an_interrupted_run(dump, tmp_path):
    artifact = tmp_path / "artifact"
    assert script(XARGS, dump, LAYERS + 1, artifact).returncode != 0  # there is no such layer
    assert not artifact.exists()
    folder = tmp_path / "artifact.layers"
    there = {path: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    assert len(there) == LAYERS
    assert script(XARGS, dump, LAYERS, artifact).returncode == 0
    assert artifact.read_bytes() == joint(dump, tmp_path / "joint")
    assert not folder.exists()


@pytest.mark.parametrize("words", [(), ("dump", "0", "out"), ("dump", "three", "out"), ("dump", "3")])
def test_xargs_refuses_wrong_arguments(words):
    result = script(XARGS, *words)
    assert result.returncode == 2 and result.stderr.startswith("usage: ")


def test_slurm_tasks_give_the_bytes_of_one_run(dump, tmp_path):
    folder = tmp_path / "statistics"
    for layer in range(LAYERS):
        task = {"SLURM_ARRAY_TASK_ID": str(layer), "SLURM_CPUS_PER_TASK": "1"}
        result = script(SLURM, dump, folder, "--method", "oscar", **task)
        assert result.returncode == 0, result.stderr
    succeed("kvq-calibrate", "--merge-stats", *sorted(folder.iterdir()), "--stats", tmp_path / "all", "--output",
            tmp_path / "artifact")  # fmt: skip
    assert (tmp_path / "artifact").read_bytes() == joint(dump, tmp_path / "joint")


def test_slurm_directives_stand_before_the_first_command():
    """sbatch stops to look for directives at the first line that is neither empty nor a comment."""
    lines = SLURM.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [line for line in lines if line.startswith("#SBATCH")]
    assert directives and all(re.fullmatch(r"#SBATCH --[a-z-]+=\S+", line) for line in directives)
    assert all(line in lines[:first] for line in directives)


def test_slurm_script_says_what_is_missing(tmp_path):
    assert script(SLURM).returncode == 2
    result = script(SLURM, "dump", tmp_path)
    assert result.returncode != 0 and "sbatch --array" in result.stderr


@pytest.mark.parametrize("path", [XARGS, SLURM])
def test_scripts_are_checked_by_bash(path):
    assert subprocess.run(["bash", "-n", path]).returncode == 0


# ---- --stats-only


def test_stats_only_writes_what_a_whole_run_writes(dump, tmp_path):
    flags = ("--method", "kvq", "--held-out-tokens", 24, "--collect", "scored_query")
    calibrate(dump, tmp_path / "artifact", "--stats", tmp_path / "of whole run", *flags)
    said = succeed("kvq-calibrate", "--model", dump, "--stats", tmp_path / "only", "--stats-only", *flags).stdout
    assert (tmp_path / "only").read_bytes() == (tmp_path / "of whole run").read_bytes()
    assert "statistics of 3 layers, 90 tokens" in said and "next: kvq-calibrate --stats" in said
    assert not list(tmp_path.glob("*.parts")) and not list(dump.parent.glob(f"{dump.stem}.*.safetensors"))


def test_stats_only_as_json(dump, tmp_path):
    said = succeed("kvq-calibrate", "--model", dump, "--stats", tmp_path / "s", "--stats-only", "--json", "--layers", 1)
    document = json.loads(said.stdout)
    assert (document["stats"], document["layers"], document["tokens"]) == (str(tmp_path / "s"), 1, 90)


def test_dry_run_of_stats_only_names_the_statistics(dump, tmp_path):
    said = succeed("kvq-calibrate", "--model", dump, "--stats", tmp_path / "s", "--stats-only", "--dry-run").stdout
    assert f"would write {tmp_path / 's'}" in said and "artifact" not in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--stats-only",), "--model and --stats FILE are needed"),
        (("--stats-only", "--stats", "s", "--output", "o"), "so --output has no meaning"),
        (("--stats-only", "--stats", "s", "--report-rotations"), "so --report-rotations has no meaning"),
    ],
)
def test_stats_only_contradicts_what_a_decision_writes(dump, tmp_path, flags, words):
    result = run("kvq-calibrate", "--model", dump, *flags)
    assert result.code == 2 and words in result.stderr
    assert result.stderr.count("\n") <= 2


def test_stats_only_needs_a_dump(dump, tmp_path):
    succeed("kvq-calibrate", "--model", dump, "--stats", tmp_path / "s", "--stats-only")
    result = run("kvq-calibrate", "--stats", tmp_path / "s", "--stats-only")
    assert result.code == 2 and "--model and --stats FILE are needed" in result.stderr
