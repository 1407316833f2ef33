"""Interrupted runs: what is left behind, what --resume takes over, and what it must not take over."""

import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from calibrations import GTQ, KVQ
from dumps import edited
from faulty_dumps import change, set_attribute
from kvq_tools import calibrate, shards, start, wait_for_layers

from kvq.safetensors_file import SafetensorsFile

LAYERS = 6
FLAGS = ("--center", "k", "--collect", "scored_query")
INTERRUPTED = 130


def interrupt_after(
    count: int, dump: Path, output: Path, *flags: object, with_signal=signal.SIGKILL
) -> subprocess.Popen:
    """A run that was stopped after it had collected `count` layers or a few more. If a run ends too early, another run
    starts."""
    while True:
        process = start(dump, output, *flags)
        wait_for_layers(process, output, count)
        process.send_signal(with_signal)
        process.wait()
        if shards(output):
            return process
        output.unlink()


@pytest.fixture(scope="module")
def dump(make_dump) -> Path:
    return make_dump(tokens=400, sequences=3, layers=LAYERS)


@pytest.fixture(scope="module")
def fresh(dump, tmp_path_factory) -> bytes:
    return calibrate(dump, tmp_path_factory.mktemp("fresh") / "out", *FLAGS).read_bytes()


@pytest.fixture(scope="module")
def old_parts(dump, tmp_path_factory) -> Path:
    """Shards that a killed run left behind: at least two of six layers."""
    output = tmp_path_factory.mktemp("old") / "out"
    interrupt_after(2, dump, output, *FLAGS)
    return Path(f"{output}.parts")


def part_of(parts: Path, layer: int) -> Path:
    (part,) = parts.glob(f"layer-{layer:04d}.*")
    return part


def resume(dump: Path, output: Path, old_parts: Path, *flags: object) -> bytes:
    """Runs with --resume on a copy of `old_parts`; returns the artifact."""
    shutil.copytree(old_parts, f"{output}.parts")
    calibrate(dump, output, "--resume", *flags)
    assert not Path(f"{output}.parts").exists()
    return output.read_bytes()


@pytest.mark.parametrize("with_signal", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
@pytest.mark.parametrize("count", [1, 3, LAYERS - 1])
def test_resumed_run_equals_a_whole_one(dump, fresh, tmp_path, with_signal, count):
    output = tmp_path / "out"
    interrupt_after(count, dump, output, *FLAGS, with_signal=with_signal)
    assert not output.exists()
    assert calibrate(dump, output, "--resume", *FLAGS).read_bytes() == fresh
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_resumed_run_equals_a_whole_one_after_kills_at_random_moments(dump, fresh, tmp_path):
    random_moment = random.Random(20240607)
    output = tmp_path / "out"
    begin = time.monotonic()
    calibrate(dump, output, *FLAGS)
    seconds = time.monotonic() - begin
    for _ in range(8):
        process = start(dump, output, "--resume", "--quiet", *FLAGS)
        time.sleep(random_moment.uniform(0, seconds))
        process.send_signal(random_moment.choice([signal.SIGKILL, signal.SIGINT]))
        process.wait()
        assert not output.exists() or output.read_bytes() == fresh, "an artifact is whole or not there"
    assert calibrate(dump, output, "--resume", *FLAGS).read_bytes() == fresh
    assert not Path(f"{output}.parts").exists()


def test_interrupted_run_says_how_to_continue(dump, tmp_path):
    process = interrupt_after(1, dump, tmp_path / "out", with_signal=signal.SIGINT)
    assert process.returncode == INTERRUPTED
    assert process.stderr.read() == "\nkvq-calibrate: interrupted; the same command with --resume continues\n"


def test_resume_keeps_what_was_collected(dump, old_parts, tmp_path):
    output = tmp_path / "out"
    shutil.copytree(old_parts, f"{output}.parts")
    before = {path.name: path.stat().st_ino for path in shards(output)}
    interrupt_after(len(before) + 1, dump, output, "--resume", *FLAGS)
    assert len(before) >= 2 and before.items() <= {path.name: path.stat().st_ino for path in shards(output)}.items()


def test_without_resume_nothing_is_taken_over(dump, old_parts, fresh, tmp_path):
    parts = Path(f"{tmp_path}/out.parts")
    shutil.copytree(old_parts, parts)
    part_of(parts, 0).write_bytes(part_of(parts, 1).read_bytes())
    assert calibrate(dump, tmp_path / "out", *FLAGS).read_bytes() == fresh
    assert not parts.exists()


def test_resume_without_parts_is_a_whole_run(dump, fresh, tmp_path):
    assert calibrate(dump, tmp_path / "out", "--resume", *FLAGS).read_bytes() == fresh


CHANGES = {
    "queries": change("layers/0/q", lambda x: x * np.float32(1.5)),
    "values": change("layers/1/v", lambda x: x[::-1].copy()),
    "one_number": change("layers/0/k", lambda x: np.where(x == x.max(), -x, x)),
    "borders": change("cu_seqlens", lambda x: np.insert(x, 1, x[1] // 2)),
    "softmax_scale": set_attribute("layers/0", "softmax_scale", 0.5),
    "sliding_window": set_attribute("layers/1", "sliding_window", 5),
    "capture_point": set_attribute("/", "capture_point", "pre_rope"),
    "model_name": set_attribute("/", "model_name", "another"),
    "fingerprint": set_attribute("/", "model_fingerprint", "0" * 64),
    "model_config": set_attribute("/", "model_config", "{}"),
    "producer": set_attribute("/", "producer", "somebody else"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_parts_of_another_dump_are_not_taken_over(dump, old_parts, fresh, tmp_path, name):
    other = edited(dump, tmp_path / "other.h5", CHANGES[name])
    expected = calibrate(other, tmp_path / "whole", *FLAGS).read_bytes()
    assert expected != fresh, "the change matters"
    assert resume(other, tmp_path / "out", old_parts, *FLAGS) == expected


@pytest.mark.parametrize(
    "flags",
    [
        (*FLAGS, "--seed", 1),
        (*FLAGS, "--sample-tokens", 100),
        ("--target-k", "scored_query"),
        ("--method", "saw-int4"),
        ("--collect", "all"),
        ("--layers", "1-2"),
    ],
    ids=str,
)
def test_parts_of_other_options_are_not_taken_over(dump, old_parts, tmp_path, flags):
    stats = ("--stats", tmp_path / "stats")
    expected = calibrate(dump, tmp_path / "whole", *stats, *flags).read_bytes()
    expected_stats = (tmp_path / "stats").read_bytes()
    assert resume(dump, tmp_path / "out", old_parts, *stats, *flags) == expected
    assert (tmp_path / "stats").read_bytes() == expected_stats


def swap_layers(first: Path, second: Path) -> None:
    first.write_bytes(second.read_bytes())


def cut(first: Path, _) -> None:
    first.write_bytes(first.read_bytes()[:-8])


def spoil_text(first: Path, _) -> None:
    first.write_text("this is no shard\n")


def spoil_sum(first: Path, _) -> None:
    """Changes one byte of C_Q; structure and names stay valid."""
    content = bytearray(first.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    content[start + SafetensorsFile(bytes(content), "shard").tensors["layers.0.query.sum"].begin + 6] ^= 64
    first.write_bytes(content)


@pytest.mark.parametrize("spoil", [swap_layers, cut, spoil_text, spoil_sum], ids=lambda f: f.__name__)
def test_spoiled_parts_are_collected_anew(dump, old_parts, fresh, tmp_path, spoil):
    parts = Path(shutil.copytree(old_parts, tmp_path / "out.parts"))
    spoil(part_of(parts, 0), part_of(parts, 1))
    assert calibrate(dump, tmp_path / "out", "--resume", *FLAGS).read_bytes() == fresh


def test_files_of_a_killed_run_are_removed_after_success(dump, old_parts, fresh, tmp_path):
    parts = Path(shutil.copytree(old_parts, tmp_path / "out.parts"))
    (parts / f"layer-0099.{'0' * 16}.safetensors").write_text("of other options")
    (parts / ".kvq-1-0.tmp").write_text("a file that was being written")
    assert calibrate(dump, tmp_path / "out", "--resume", *FLAGS).read_bytes() == fresh
    assert not parts.exists()


@pytest.mark.parametrize("first, second", [(GTQ, KVQ), (KVQ, GTQ), (KVQ, (*KVQ, "--held-out-tokens", 32))], ids=str)
def test_resumed_runs_hold_out_what_whole_ones_do(make_dump, tmp_path, first, second):
    dump, output = make_dump(tokens=150, layers=4), tmp_path / "out"
    while not shards(output):
        process = start(dump, output, *first)
        wait_for_layers(process, output, 1)
        process.send_signal(signal.SIGKILL)
        process.wait()
    fresh = calibrate(dump, tmp_path / "fresh", *second)
    assert calibrate(dump, output, "--resume", *second).read_bytes() == fresh.read_bytes()
