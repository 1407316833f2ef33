"""Disks that are full and folders that cannot be written: nothing half-written is ever left behind."""

import os
import resource
import signal
import subprocess
from pathlib import Path

import pytest
from kvq_tools import calibrate, run

INPUT = 3  # exit code for all faults that the operating system reports


def limited(size: int):
    """For a child process: no file may grow beyond `size` bytes. SIGXFSZ is ignored, because it would kill the
    process."""

    def prepare():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return {"preexec_fn": prepare, "restore_signals": False}


def expect_failure(result, folder: Path, survivors: set[str], reason: str) -> None:
    assert result.code == INPUT, result
    assert result.stdout == "" and result.stderr.count("\n") == 1 and result.stderr.startswith("kvq-calibrate: error: ")
    assert reason in result.stderr
    assert {path.name for path in folder.iterdir()} == survivors


@pytest.fixture(scope="module")
def dump(make_dump) -> Path:
    return make_dump(tokens=100, layers=8, head_dim=64)


@pytest.fixture(scope="module")
def sizes(dump, tmp_path_factory) -> dict[str, int]:
    """Bytes of the files that a run writes: a layer's shard, all statistics, the artifact."""
    folder = tmp_path_factory.mktemp("sizes")
    calibrate(dump, folder / "shard", "--layers", 0, "--stats", folder / "layer")
    calibrate(dump, folder / "out", "--stats", folder / "stats")
    sizes = {name: (folder / name).stat().st_size for name in ("layer", "stats", "out")}
    assert sizes["layer"] < sizes["out"] < sizes["stats"]
    return sizes


@pytest.mark.parametrize("what, fraction", [("layer", 0.0), ("layer", 0.5), ("out", 0.999)])
def test_full_disk_leaves_nothing(dump, sizes, tmp_path, what, fraction):
    result = run("kvq-calibrate", "--model", dump, "--output", tmp_path / "out", **limited(int(sizes[what] * fraction)))
    expect_failure(result, tmp_path, set(), "cannot write: File too large")
    assert ("out:" if what == "out" else "layer-0000") in result.stderr, "it names the file"


def test_full_disk_leaves_no_statistics(dump, sizes, tmp_path):
    result = run(
        "kvq-calibrate",
        "--model",
        dump,
        "--output",
        tmp_path / "out",
        "--stats",
        tmp_path / "stats",
        **limited(sizes["stats"] - 1),
    )
    expect_failure(result, tmp_path, set(), "cannot write: File too large")


def test_full_disk_leaves_the_artifact_that_was_there(dump, sizes, tmp_path):
    old = calibrate(dump, tmp_path / "out", "--bits", 3).read_bytes()
    result = run("kvq-calibrate", "--model", dump, "--output", tmp_path / "out", **limited(sizes["out"] - 1))
    expect_failure(result, tmp_path, {"out"}, "cannot write")
    assert (tmp_path / "out").read_bytes() == old


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 256 KiB; skips the test if mounting is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_real_full_disk_leaves_nothing(dump, tiny_disk):
    result = run("kvq-calibrate", "--model", dump, "--output", tiny_disk / "out")
    expect_failure(result, tiny_disk, set(), "No space left on device")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_without_permission(dump, tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    expect_failure(
        run("kvq-calibrate", "--model", dump, "--output", folder / "out"), folder, set(), "Permission denied"
    )


COMMANDS = [
    ("kvq-calibrate", "--help"),
    ("kvq-calibrate", "--dry-run"),
    ("kvq-calibrate",),
    ("kvq-calibrate", "--json", "--report-rotations"),
    ("kvq-inspect",),
    ("kvq-inspect", "--json"),
    ("kvq-inspect", "--verify"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_results_that_cannot_be_printed_are_an_error(dump, tmp_path, command):
    artifact = calibrate(dump, tmp_path / "artifact")
    tool, *flags = command
    inputs = (artifact,) if tool == "kvq-inspect" else ("--model", dump, "--output", tmp_path / "out")
    with open("/dev/full", "w") as full:
        result = run(tool, *flags, *inputs, stdout=full)
    assert (result.code, result.stderr) == (INPUT, f"{tool}: error: cannot write to standard output\n")
