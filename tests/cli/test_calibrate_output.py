"""Disks that are full and folders that cannot be written: nothing half-written is ever left behind, and no layer that
was collected is lost."""

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
    assert result.code == INPUT and result.stdout == "", result
    error, *rest = result.stderr.splitlines()
    assert error.startswith("kvq-calibrate: error: ") and reason in error
    assert {path.name for path in folder.iterdir()} == survivors
    parts = [path for path in survivors if path.endswith(".parts")]
    assert [line.split()[1] for line in rest if "--resume" in line] == [str(folder / path) for path in parts]
    assert all(path.name.startswith(("layer-", "kvq-parts")) for part in parts for path in (folder / part).iterdir())


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


@pytest.mark.parametrize(
    "what, fraction, named, survivors",
    [
        ("layer", 0.0, "kvq-parts.txt", set()),
        ("layer", 0.5, "layer-0000", set()),
        ("out", 0.999, "out:", {"out.parts"}),
    ],
)
def test_full_disk_leaves_whole_parts_only(dump, sizes, tmp_path, what, fraction, named, survivors):
    result = run("kvq-calibrate", "--model", dump, "--output", tmp_path / "out", **limited(int(sizes[what] * fraction)))
    expect_failure(result, tmp_path, survivors, "cannot write: File too large")
    assert named in result.stderr


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
    expect_failure(result, tmp_path, {"out.parts"}, "cannot write: File too large")


def test_full_disk_leaves_the_artifact_that_was_there(dump, sizes, tmp_path):
    old = calibrate(dump, tmp_path / "out", "--bits", 3).read_bytes()
    result = run("kvq-calibrate", "--model", dump, "--output", tmp_path / "out", **limited(sizes["out"] - 1))
    expect_failure(result, tmp_path, {"out", "out.parts"}, "cannot write")
    assert (tmp_path / "out").read_bytes() == old


@pytest.fixture
def tiny_disk(sizes, tmp_path):
    """A file system that holds the parts of all layers and half of the artifact; skips the test if mounting is not
    allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    size = 8 * sizes["layer"] + sizes["out"] // 2
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_real_full_disk_leaves_whole_parts_only(dump, tiny_disk):
    result = run("kvq-calibrate", "--model", dump, "--output", tiny_disk / "out")
    expect_failure(result, tiny_disk, {"out.parts"}, "No space left on device")
    assert len(list((tiny_disk / "out.parts").glob("layer-*"))) == 8


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
    *warnings, error = result.stderr.splitlines()
    assert (result.code, error) == (INPUT, f"{tool}: error: cannot write to standard output")
    assert all(line.startswith(f"{tool}: warning: calibrated on 100 tokens") for line in warnings)
