"""kvq-calibrate as a whole: the same bytes every time, where it writes, what it prints, what it predicts."""

import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest
from calibrations import GTQ, KVQ, SAW, TQ
from dumps import synthetic
from kvq_tools import BIN, calibrate, start, succeed, wait_for_layers

METHODS = ("oscar", "saw-int4", "quarot", "random", "plain")


@pytest.mark.parametrize(
    "flags",
    [("--method", method) for method in METHODS] + [("--collect", "all", "--sign-search", 2, "--center", "kv")],
    ids=str,
)
def test_threads_and_repetition_do_not_change_a_byte(sample, tmp_path, flags):
    runs = [
        calibrate(sample, tmp_path / f"{i}", "--threads", threads, *flags).read_bytes()
        for i, threads in enumerate((1, 2, 2, 5))
    ]
    assert len(set(runs)) == 1


def test_long_sequences_do_not_depend_on_threads(make_dump, tmp_path):
    """The sequence has more rows than one task of the attention pass takes, so threads share the sequence."""
    dump = make_dump(tokens=5001, sequences=2, layers=1, sink=True)
    one, two = (tmp_path / f"stats{threads}" for threads in (1, 2))
    calibrate(dump, tmp_path / "one", "--threads", 1, "--collect", "all", "--stats", one)
    calibrate(dump, tmp_path / "two", "--threads", 2, "--collect", "all", "--stats", two)
    assert one.read_bytes() == two.read_bytes()


def test_seed_decides_random_rotations(make_dump, tmp_path):
    dump = make_dump(layers=1)
    zero, again, one = (
        calibrate(dump, tmp_path / f"{i}", "--method", "random", "--seed", seed).read_bytes()
        for i, seed in enumerate((0, 0, 1))
    )
    assert zero == again != one


# Output files


def test_artifact_appears_beside_the_dump(tmp_path):
    dump = synthetic(tmp_path / "some.dump.h5", layers=1)
    succeed("kvq-calibrate", "--model", dump)
    assert {path.name for path in tmp_path.iterdir()} == {"some.dump.h5", "some.dump.oscar.safetensors"}


def test_dry_run_writes_nothing(tmp_path):
    dump = synthetic(tmp_path / "dump.h5", layers=1)
    succeed("kvq-calibrate", "--model", dump, "--dry-run", "--output", tmp_path / "out")
    succeed("kvq-calibrate", "--model", dump, "--dry-run", "--stats", tmp_path / "stats")
    assert [path.name for path in tmp_path.iterdir()] == ["dump.h5"]


def test_config_file_equals_flags(make_dump, tmp_path):
    config = tmp_path / "options.ini"
    config.write_text('bits-k=3\ncenter="kv"\nexact-layers="1"\nsink-tokens=4\nrandom-signs=true\nmethod=saw-int4\n')
    flags = (
        "--bits-k",
        3,
        "--center",
        "kv",
        "--exact-layers",
        1,
        "--sink-tokens",
        4,
        "--random-signs",
        "--method",
        "saw-int4",
    )
    by_file = calibrate(make_dump(), tmp_path / "a", "--config", config)
    by_flags = calibrate(make_dump(), tmp_path / "b", *flags)
    assert by_file.read_bytes() == by_flags.read_bytes()
    both = calibrate(make_dump(), tmp_path / "c", "--config", config, "--bits-k", 5)
    assert both.read_bytes() == calibrate(make_dump(), tmp_path / "d", *flags[2:], "--bits-k", 5).read_bytes(), (
        "a flag wins"
    )


# Printed output


def test_json_is_one_document(make_dump, tmp_path):
    result = succeed(
        "kvq-calibrate", "--model", make_dump(), "--output", tmp_path / "out", "--json", "--report-rotations"
    )
    document = json.loads(result.stdout)
    assert document.keys() == {
        "schema_version",
        "tool",
        "output",
        "method",
        "dump_hash",
        "tokens",
        "context",
        "device",
        "device_bytes",
        "windows",
        "layers",
        "missing_layers",
        "serving",
        "verdict",
        "warnings",
        "rotations",
    }
    assert result.stderr == "" and document["output"] == str(tmp_path / "out") and document["tokens"] == 512
    for layer in document["layers"]:
        for side in "kv":
            assert {"bits", "coder", "clip_ratio", "rotation", "effective_bits", "error"} <= layer[side].keys()
    assert [layer["layer"] for layer in document["rotations"]] == [0, 1]


def test_inspect_json_is_the_manifest_and_what_was_asked_for(make_dump, tmp_path):
    artifact = calibrate(make_dump(), tmp_path / "out")
    plain = json.loads(succeed("kvq-inspect", artifact, "--json").stdout)
    full = json.loads(succeed("kvq-inspect", artifact, "--json", "--verify", "--layout", "--layer", 1).stdout)
    assert plain.keys() == {"schema_version", "tool", "artifact", "manifest", "serving", "missing_layers"}
    assert full.keys() == plain.keys() | {"verify", "layout", "layer"} and full["manifest"] == plain["manifest"]
    assert all(check["passed"] for check in full["verify"]) and full["layer"]["layer"] == 1
    # 2 KV heads, 64 channels of 2 bits with scale and minimum in fp16, keys and values
    assert full["layout"]["layers"][0]["bytes_per_token"] == 2 * 2 * (16 + 4)


def test_effective_bits_follow_the_context(make_dump, tmp_path):
    """Tokens outside the windows cost codes and numbers, tokens inside cost 16 bits: 64 + 256 of 4096 tokens."""
    result = succeed("kvq-calibrate", "--model", make_dump(), "--output", tmp_path / "out", "--json", "--context", 4096)
    coded, exact = 2 + 32 / 64, 320 / 4096
    assert json.loads(result.stdout)["layers"][0]["k"]["effective_bits"] == pytest.approx(
        16 * exact + coded * (1 - exact)
    )


def test_quiet_says_nothing(make_dump, tmp_path):
    result = succeed("kvq-calibrate", "--quiet", "--model", make_dump(), "--output", tmp_path / "out")
    assert (result.stdout, result.stderr) == ("", "")


def run_on_terminal(*arguments) -> str:
    """stderr of the tool when stderr is a terminal."""
    mine, its = pty.openpty()
    process = start(*arguments, stderr=its)
    os.close(its)
    text = b""
    try:
        while chunk := os.read(mine, 4096):
            text += chunk
    except OSError:  # the tool has closed the terminal
        pass
    os.close(mine)
    assert process.wait() == 0
    return text.decode()


def test_progress_rewrites_one_line_on_a_terminal(make_dump, tmp_path):
    arguments = (make_dump(tokens=4000, sequences=1, layers=4), tmp_path / "out")
    text = run_on_terminal(*arguments)
    assert "tokens/s" in text and "\n" not in text
    assert text.endswith("\r\x1b[K"), "the line is removed at the end"
    assert run_on_terminal(*arguments, "--quiet") == ""


def test_progress_is_plain_lines_elsewhere(make_dump, tmp_path):
    """Elsewhere a line appears every ten seconds. The clock runs while the process is stopped, so one pause gives one
    line."""
    dump = make_dump(tokens=2000, layers=12)
    begin = time.monotonic()
    process = start(dump, tmp_path / "out")
    wait_for_layers(process, tmp_path / "out", 1)
    process.send_signal(signal.SIGSTOP)
    time.sleep(10.1)
    process.send_signal(signal.SIGCONT)
    lines = process.communicate()[1].splitlines()
    assert (
        process.returncode == 0 and 1 <= len(lines) <= (time.monotonic() - begin) // 10
    )  # one line, unless the machine is busy
    assert "\r" not in lines[0] and "\x1b" not in lines[0]
    assert "% " in lines[0] and "/12)" in lines[0] and "tokens/s" in lines[0]


# Predictions

# Before exec, a child counts its parent's memory as its own. The launcher's is small enough not to matter.
LAUNCHER = """
import os, sys
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
print(os.wait4(pid, 0)[2].ru_maxrss)
"""


def measured_peak(*arguments) -> int:
    """Peak resident size of a run, in bytes."""
    command = [sys.executable, "-c", LAUNCHER, BIN / "kvq-calibrate", "--quiet", *arguments]
    return 1024 * int(subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, check=True).stdout)


PREDICTED = [
    ("--method", "oscar"),
    ("--method", "saw-int4"),
    ("--method", "random"),
    ("--composition", "h"),
    ("--composition", "residual"),
    ("--coder", "symmetric", "--center", "kv"),
    ("--share", "layer"),
    ("--bits-v", 16),
    ("--exact-layers", "0-3"),
]


@pytest.mark.parametrize("flags", PREDICTED, ids=str)
def test_dry_run_predicts_size_and_memory(sample, tmp_path, flags):
    arguments = ("--model", sample, "--output", tmp_path / "out", "--threads", 2, *flags)
    prediction = json.loads(succeed("kvq-calibrate", "--dry-run", "--json", *arguments).stdout)
    peak = measured_peak(*arguments)
    assert prediction["artifact_bytes"] == pytest.approx((tmp_path / "out").stat().st_size, rel=0.2)
    assert peak / 2 <= prediction["peak_bytes"] <= 2 * peak


def test_dry_run_predicts_memory_of_a_larger_dump(make_dump, tmp_path):
    arguments = (
        "--model",
        make_dump(tokens=12000, sequences=2, q_heads=8, kv_heads=1, head_dim=128, layers=1),
        "--output",
        tmp_path / "out",
        "--threads",
        2,
    )
    predicted = json.loads(succeed("kvq-calibrate", "--dry-run", "--json", *arguments).stdout)["peak_bytes"]
    peak = measured_peak(*arguments)
    assert peak > 100e6, "large enough to show"
    assert peak / 2 <= predicted <= 2 * peak


@pytest.mark.parametrize(
    "flags",
    [GTQ, TQ, (*KVQ, "--transform", "klt"), (*KVQ, "--transform", "orthogonal"), (*SAW, "--hessian", "paper")],
    ids=str,
)
def test_dry_run_predicts_the_size(short, tmp_path, flags):
    arguments = ("--model", short, "--output", tmp_path / "out", "--layers", 0, *flags)
    prediction = json.loads(succeed("kvq-calibrate", "--dry-run", "--json", *arguments).stdout)
    succeed("kvq-calibrate", "--quiet", *arguments)
    assert prediction["artifact_bytes"] == pytest.approx((tmp_path / "out").stat().st_size, rel=0.2)


def test_dry_run_takes_the_larger_size_where_transforms_are_chosen(short, tmp_path):
    def predicted(*flags) -> int:
        return json.loads(
            succeed(
                "kvq-calibrate", "--dry-run", "--json", "--model", short, "--output", tmp_path / "out", *KVQ, *flags
            ).stdout
        )["artifact_bytes"]

    assert predicted() == pytest.approx(predicted("--transform", "klt"), rel=0.01)
    assert predicted() > predicted("--transform", "orthogonal")
