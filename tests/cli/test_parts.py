"""The folder of collected layers, `<output>.parts`: one run at a time, no files of others, nothing lost by errors."""

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from dumps import edited
from faulty_dumps import change
from kvq_tools import BIN, Result, calibrate, run, shards, start, succeed, wait_for_layers

INPUT, USAGE, NUMERICAL, INTERRUPTED = 3, 2, 4, 130
MARKER = "kvq-parts.txt"
FLAGS = ("--center", "k")


@pytest.fixture(scope="module")
def dump(make_dump) -> Path:
    return make_dump(tokens=200, sequences=2, layers=5)


@pytest.fixture(scope="module")
def other_dump(make_dump) -> Path:
    """Another dump of the same shape."""
    return make_dump(tokens=200, sequences=2, layers=5, seed=7)


@pytest.fixture(scope="module")
def fresh(dump, other_dump, tmp_path_factory) -> dict[Path, bytes]:
    folder = tmp_path_factory.mktemp("fresh")
    return {path: calibrate(path, folder / path.name, *FLAGS).read_bytes() for path in (dump, other_dump)}


def killed(dump: Path, output: Path, *flags: object, with_signal=signal.SIGKILL) -> Path:
    """The parts of a run that was stopped after it had collected a layer or a few."""
    while True:
        process = start(dump, output, *flags)
        wait_for_layers(process, output, 1)
        process.send_signal(with_signal)
        process.communicate()
        if shards(output) and not output.exists():
            return Path(f"{output}.parts")
        output.unlink()


def stopped(dump: Path, output: Path, *flags: object) -> subprocess.Popen:
    """A run that lives and does nothing. The test ends it."""
    while True:
        process = start(dump, output, *flags)
        wait_for_layers(process, output, 1)
        process.send_signal(signal.SIGSTOP)
        if process.poll() is None and shards(output):
            return process
        process.kill()
        process.communicate()
        output.unlink(missing_ok=True)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def expect_error(result: Result, code: int, *words: str, hint: str = "") -> None:
    error, *rest = result.stderr.splitlines()
    assert result.code == code and error.startswith("kvq-calibrate: error: "), result
    assert all(word in error for word in words), error
    assert len(rest) <= 1 and all(line.startswith("hint: ") for line in rest) and hint in "".join(rest), result


# Two runs at once


def test_overlapping_runs_of_two_dumps_never_mix(dump, other_dump, fresh, tmp_path):
    """The artifact is always that of one dump, by a run that exits with 0; each other run names the one at work."""
    random_moment, output, refused = random.Random(20240607), tmp_path / "out", 0
    for trial in range(32):
        resume = ("--resume",) if trial % 2 else ()
        first = start(dump, output, "--quiet", *resume, *FLAGS)
        time.sleep(random_moment.uniform(0, 0.1))
        second = start(other_dump, output, "--quiet", *resume, *FLAGS)
        said = {path: process.communicate()[1] for path, process in ((dump, first), (other_dump, second))}
        codes = {dump: first.returncode, other_dump: second.returncode}
        finished = [path for path, code in codes.items() if code == 0]
        assert finished and output.read_bytes() in [fresh[path] for path in finished]
        for path, code in codes.items():
            if code:
                refused += 1
                expect_error(Result(code, "", said[path]), INPUT, f"{output}: another run is writing it")
        assert names(tmp_path) == {"out"}
        output.unlink()
    assert refused >= 16, "the runs did overlap"


def test_second_run_says_who_is_at_work_and_changes_nothing(dump, other_dump, fresh, tmp_path):
    output = tmp_path / "out"
    first = stopped(dump, output, *FLAGS)
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    for flags in ((), ("--resume",)):
        expect_error(
            run("kvq-calibrate", "--model", other_dump, "--output", output, *flags),
            INPUT,
            f"{output}: another run is writing it (process {first.pid}, since 20",
            " UTC)",
            hint="choose another name",
        )
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before
    first.send_signal(signal.SIGCONT)
    first.communicate()
    assert first.returncode == 0 and output.read_bytes() == fresh[dump] and names(tmp_path) == {"out"}


def test_runs_with_other_outputs_go_on_side_by_side(dump, fresh, tmp_path):
    first = stopped(dump, tmp_path / "a", *FLAGS)
    assert calibrate(dump, tmp_path / "b", *FLAGS).read_bytes() == fresh[dump]
    first.kill()
    first.communicate()


def test_lock_of_a_killed_run_holds_nobody_up(dump, fresh, tmp_path):
    output = tmp_path / "out"
    killed(dump, output, *FLAGS)
    assert calibrate(dump, output, "--resume", *FLAGS).read_bytes() == fresh[dump]
    assert names(tmp_path) == {"out"}


def test_links_to_one_output_are_one_output(dump, tmp_path):
    output = tmp_path / "out"
    (tmp_path / "link").symlink_to("out")
    (tmp_path / "folder").symlink_to(".")
    first = stopped(dump, output)
    for name in ("link", "folder/out"):
        expect_error(run("kvq-calibrate", "--model", dump, "-o", tmp_path / name), INPUT, "another run is writing it")
    first.kill()
    first.communicate()


def test_other_outputs_have_one_writer_as_well(dump, tmp_path):
    """--stats of two runs, --merge-stats, and decisions from statistics."""
    stats, output = tmp_path / "stats", tmp_path / "out"
    calibrate(dump, tmp_path / "old", "--stats", tmp_path / "old_stats", *FLAGS)
    first = stopped(dump, output, "--stats", stats, *FLAGS)
    for command in (
        ("--model", dump, "--output", tmp_path / "another", "--stats", stats),
        ("--merge-stats", tmp_path / "old_stats", "--stats", stats),
    ):
        expect_error(run("kvq-calibrate", *command), INPUT, f"{stats}: another run is writing it (process {first.pid}")
    decision = ("--stats", tmp_path / "old_stats", "--output", output)
    expect_error(run("kvq-calibrate", *decision), INPUT, f"{output}: another run is writing it")
    first.kill()
    first.communicate()
    assert not Path(f"{tmp_path / 'another'}.parts").exists()
    succeed("kvq-calibrate", "--quiet", *decision)


def test_lock_that_is_no_plain_file_is_refused(dump, tmp_path):
    process = stopped(dump, tmp_path / "out")
    (lock,) = tmp_path.glob(".kvq-*.lock")
    process.kill()
    process.communicate()
    lock.unlink()
    precious = tmp_path / "precious"
    precious.write_text("precious")
    for make in (lock.symlink_to, lock.hardlink_to):
        make(precious)
        expect_error(run("kvq-calibrate", "--model", dump, "-o", tmp_path / "out"), INPUT, "cannot lock", lock.name)
        lock.unlink()
    assert precious.read_text() == "precious"


# Parts of other runs


def test_parts_of_another_dump_stay_apart(dump, other_dump, fresh, tmp_path):
    output = tmp_path / "out"
    parts = killed(dump, output, *FLAGS)
    before = {path: path.read_bytes() for path in shards(output)}
    while True:
        process = start(other_dump, output, "--resume", *FLAGS)
        wait_for_layers(process, output, len(before) + 1)
        process.kill()
        process.communicate()
        if not output.exists():
            break
        output.unlink()
        shutil.rmtree(parts, ignore_errors=True)
        killed(dump, output, *FLAGS)
        before = {path: path.read_bytes() for path in shards(output)}
    assert before.items() <= {path: path.read_bytes() for path in shards(output)}.items()
    assert calibrate(other_dump, output, "--resume", *FLAGS).read_bytes() == fresh[other_dump]
    assert names(tmp_path) == {"out"}


def test_part_that_changes_during_a_run_is_found(dump, other_dump, tmp_path):
    """Each part is read again when plans are decided; it must be what the run has collected."""
    output = tmp_path / "out"
    parts = killed(other_dump, output, *FLAGS)
    foreign = sorted(parts.glob("layer-0000.*"))[0].read_bytes()
    shutil.rmtree(parts)
    process = stopped(dump, output, *FLAGS)
    part = sorted(parts.glob("layer-0000.*"))[0]
    part.write_bytes(foreign)
    process.send_signal(signal.SIGCONT)
    said = process.communicate()[1]
    expect_error(Result(process.returncode, "", said), INPUT, part.name, "content hash: expected", hint="--resume")
    assert not output.exists()


def test_flipped_byte_in_a_part_is_collected_again(dump, fresh, tmp_path):
    output = tmp_path / "out"
    killed(dump, output, *FLAGS)
    content = bytearray(shards(output)[0].read_bytes())
    content[-9] ^= 1
    shards(output)[0].write_bytes(content)
    assert calibrate(dump, output, "--resume", *FLAGS).read_bytes() == fresh[dump]


# Folders of others


def user_folder(path: Path) -> dict[Path, bytes]:
    path.mkdir()
    for name in ("notes.txt", "layer-0000.safetensors", ".kvq-1-0.tmp"):
        (path / name).write_text(f"precious {name}")
    return content_of(path)


def content_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("flags", [(), ("--resume",), ("--method", "nonsense"), ("--bits", 99), ("--layers", 77)])
def test_folder_of_a_user_is_refused_by_name_and_kept(dump, tmp_path, flags):
    parts = tmp_path / "out.parts"
    before = user_folder(parts)
    result = run("kvq-calibrate", "--model", dump, "--output", tmp_path / "out", *flags)
    assert result.code in (USAGE, INPUT) and content_of(parts) == before and names(tmp_path) == {"out.parts"}
    if flags in ((), ("--resume",)):
        expect_error(result, INPUT, str(parts), MARKER, hint="choose another --output")


def test_file_and_empty_folder_of_that_name_are_refused(dump, tmp_path):
    parts = tmp_path / "out.parts"
    parts.mkdir()
    expect_error(run("kvq-calibrate", "--model", dump, "--output", tmp_path / "out"), INPUT, str(parts))
    parts.rmdir()
    parts.write_text("precious")
    expect_error(run("kvq-calibrate", "--model", dump, "--output", tmp_path / "out"), INPUT, str(parts), "a file")
    assert parts.read_text() == "precious" and names(tmp_path) == {"out.parts"}


def test_files_of_a_user_among_the_parts_stay(dump, fresh, tmp_path):
    output = tmp_path / "out"
    parts = killed(dump, output, *FLAGS)
    (parts / "notes.txt").write_text("precious")
    (parts / "more").mkdir()
    result = succeed("kvq-calibrate", "--model", dump, "--output", output, "--resume", *FLAGS)
    assert output.read_bytes() == fresh[dump] and f"note: {parts} stays" in result.stderr
    assert names(parts) == {"notes.txt", "more", MARKER} and (parts / "notes.txt").read_text() == "precious"
    calibrate(dump, output, *FLAGS)  # the next run knows the folder


# Errors leave what was collected


TYPOS = {
    "unknown flag": ("--treads", 1),
    "unknown method": ("--method", "oskar"),
    "range": ("--bits", 99),
    "layer": ("--layers", "0-77"),
    "tokens": ("--num-tokens", 10**6),
    "exact layer": ("--exact-layers", 77),
    "folder of --stats": ("--stats", "/nonexistent/stats"),
}


@pytest.mark.parametrize("name", TYPOS)
def test_typo_under_resume_loses_nothing(dump, fresh, tmp_path, name):
    output = tmp_path / "out"
    parts = killed(dump, output, *FLAGS)
    before = content_of(parts)
    result = run("kvq-calibrate", "--model", dump, "--output", output, "--resume", *FLAGS, *TYPOS[name])
    assert result.code in (USAGE, INPUT) and content_of(parts) == before


def test_error_in_a_later_layer_leaves_the_earlier_ones_and_says_how_to_go_on(dump, fresh, tmp_path):
    def spoil(values):
        values.reshape(-1)[0] = float("nan")
        return values

    bad, output = edited(dump, tmp_path / "bad.h5", change("layers/3/k", spoil)), tmp_path / "out"
    result = run("kvq-calibrate", "--quiet", "--model", bad, "--output", output, *FLAGS)
    if result.code == 0 or not shards(output):
        pytest.skip("the dump is refused when it is opened")
    assert len(shards(output)) == 3
    expect_error(result, NUMERICAL, "layer 3", hint=f"{output}.parts has what was collected")
    kept = {path.name: path.stat().st_ino for path in shards(output)}
    process = start(dump, output, "--resume", *FLAGS)
    wait_for_layers(process, output, 4)
    process.kill()
    process.communicate()
    if not output.exists():
        assert kept.items() <= {path.name: path.stat().st_ino for path in shards(output)}.items()
    assert calibrate(dump, output, "--resume", *FLAGS).read_bytes() == fresh[dump]


def test_run_without_resume_says_what_it_collects_again(dump, fresh, tmp_path):
    output = tmp_path / "out"
    parts = killed(dump, output, *FLAGS)
    result = succeed("kvq-calibrate", "--model", dump, "--output", output, *FLAGS)
    assert f"note: {parts} has " in result.stderr and "--resume" in result.stderr
    assert output.read_bytes() == fresh[dump] and not parts.exists()


# Interruptions


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_interrupted_run_leaves_whole_parts_only(dump, fresh, tmp_path, number):
    for trial in range(3):
        output = tmp_path / f"{trial}" / "out"
        output.parent.mkdir()
        parts = killed(dump, output, *FLAGS, with_signal=number)
        assert names(output.parent) == {"out.parts"}, "neither a lock nor a temporary file"
        assert names(parts) - {path.name for path in shards(output)} == {MARKER}
    output = tmp_path / "out"
    process = stopped(dump, output, *FLAGS)
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    said = process.communicate()[1]
    assert process.returncode == INTERRUPTED
    assert said.endswith("\nkvq-calibrate: interrupted; the same command with --resume continues\n")
    assert calibrate(dump, output, "--resume", *FLAGS).read_bytes() == fresh[dump]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_interrupted_merge_leaves_nothing(make_dump, tmp_path, number):
    """Sums of layers wait in a folder beside the output while a merge is at work."""
    for seed in (1, 2):
        calibrate(
            make_dump(tokens=60, layers=24, head_dim=64, seed=seed),
            tmp_path / f"artifact{seed}",
            "--stats",
            tmp_path / f"stats{seed}",
        )
    folder = tmp_path / "merged"
    folder.mkdir()
    command = ["--merge-stats", tmp_path / "stats1", tmp_path / "stats2", "--stats", folder / "all"]
    for _ in range(20):
        process = subprocess.Popen([BIN / "kvq-calibrate", *map(str, command)], stderr=subprocess.PIPE, text=True)
        while not list(folder.glob(".kvq-merge-*/*")) and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(number)
        said = process.communicate()[1]
        if process.returncode == INTERRUPTED:
            assert said.strip() == "kvq-calibrate: interrupted" and names(folder) == set()
            return
        (folder / "all").unlink()
    pytest.fail("every merge ended before it could be interrupted")


def test_hangup_that_is_ignored_stays_ignored(dump, tmp_path):
    """As under nohup."""
    process = start(
        dump, tmp_path / "out", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN), restore_signals=False
    )
    wait_for_layers(process, tmp_path / "out", 1)
    process.send_signal(signal.SIGHUP)
    process.communicate()
    assert process.returncode == 0 and os.path.exists(tmp_path / "out")
