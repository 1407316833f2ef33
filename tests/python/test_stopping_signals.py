"""SIGINT, SIGTERM and SIGHUP end the programs with exit code 130, and no temporary file stays."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvq.cli import stopping_signals

ROOT = Path(__file__).resolve().parents[2]
INTERRUPTED = 130
NUMBERS = pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name
)
SCRIPT = """
import sys, time
from pathlib import Path
from kvq import files
from kvq.cli import run_script

def main():
    with getattr(files, sys.argv[1])(Path(sys.argv[2])) as temporary:
        time.sleep(float(sys.argv[3]))

sys.exit(run_script("program.py", main))
"""


def start(*command: object, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "python")} | options.pop("env", {}),
        **options,
    )


def wait_for(process: subprocess.Popen, folder: Path, pattern: str) -> None:
    deadline = time.monotonic() + 120
    while not list(folder.glob(pattern)):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)


@NUMBERS
@pytest.mark.parametrize("writer", ["atomic_path", "atomic_files"])
def test_a_script_that_writes_leaves_nothing(writer, number, tmp_path):
    process = start("-c", SCRIPT, writer, tmp_path / "out", 60)
    wait_for(process, tmp_path, ".kvq-*.tmp")
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert (process.returncode, said) == (INTERRUPTED, "\nprogram.py: interrupted\n")
    assert list(tmp_path.iterdir()) == []


@NUMBERS
def test_a_dump_that_is_written_leaves_nothing(number, tmp_path):
    pytest.importorskip("h5py")
    pytest.importorskip("transformers", minversion="5.0")
    from tiny_models import save_tiny

    model = save_tiny("llama", tmp_path / "model")
    folder = tmp_path / "out"
    folder.mkdir()
    options = ("--synthetic-tokens", 10**6, "--sequence-length", 100, "--quiet", "--threads", 1)
    process = start(ROOT / "scripts/dump_qkv.py", model, "--output", folder / "x.h5", *options)
    wait_for(process, folder, ".kvq-*.tmp")
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert (process.returncode, said) == (INTERRUPTED, "\ndump_qkv.py: interrupted; no dump was written\n")
    assert list(folder.iterdir()) == []


@NUMBERS
def test_the_gate_leaves_nothing(number, tmp_path):
    """The old version of an artifact is in a temporary file while kvq-diff reads it."""
    tools, repository, scratch = (tmp_path / name for name in ("tools", "repository", "scratch"))
    for folder in (tools, repository, scratch):
        folder.mkdir()
    for name in ("kvq-diff", "kvq-inspect"):
        (tools / name).write_text("#!/bin/sh\nexec sleep 60\n")
        (tools / name).chmod(0o755)
    artifact = repository / "a.safetensors"
    git = ["git", "-C", repository, "-c", "user.name=a", "-c", "user.email=a@b"]
    artifact.write_bytes(b"old")
    for words in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-q", "-m", "base"]):
        subprocess.run([*git, *words], check=True)
    artifact.write_bytes(b"new")
    process = start(
        ROOT / "scripts/gate_artifacts.py", "main", cwd=repository, env={"KVQ_BIN": str(tools), "TMPDIR": str(scratch)}
    )
    wait_for(process, scratch, "*.safetensors")
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert (process.returncode, said) == (INTERRUPTED, "")
    assert list(scratch.iterdir()) == []


LOST = """
import os, signal, sys, time
import gate_artifacts
sys.unraisablehook = gate_artifacts.repeat_lost_signal
class Thing:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
try:
    Thing()
    time.sleep(30)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_a_signal_in_a_destructor_is_not_lost():
    done = subprocess.run(
        [sys.executable, "-c", LOST], cwd=ROOT / "scripts", capture_output=True, text=True, timeout=20
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_a_hangup_that_is_ignored_stays_ignored(tmp_path):
    """As under nohup."""
    process = start(
        *("-c", SCRIPT, "atomic_path", tmp_path / "out", 2),
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        restore_signals=False,
    )
    wait_for(process, tmp_path, ".kvq-*.tmp")
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=60) == 0 and (tmp_path / "out").exists(), process.communicate()


def test_a_second_signal_does_not_stop_the_cleanup():
    cleaned = False
    with pytest.raises(KeyboardInterrupt), stopping_signals():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
            cleaned = True
    assert cleaned and signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
