"""Runs the tools as a user does: as programs. KVQ_BIN names their folder, `build/release/tools` if it is not set."""

import os
import pty
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(os.environ.get("KVQ_BIN", ROOT / "build/release/tools")).resolve()
LIMIT_SECONDS = 300  # a guard against a hang, also on a busy machine


@dataclass(frozen=True)
class Result:
    code: int
    stdout: str
    stderr: str


def run(tool: str, *args: object, **options) -> Result:
    """Runs a tool; any exit code is allowed. `options` go to subprocess.run."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    done = subprocess.run(
        [BIN / tool, *map(str, args)], **(streams | options), stdin=subprocess.DEVNULL, text=True, timeout=LIMIT_SECONDS
    )
    return Result(done.returncode, done.stdout, done.stderr)


def succeed(tool: str, *args: object, **options) -> Result:
    """Runs a tool and asserts exit code 0."""
    result = run(tool, *args, **options)
    assert result.code == 0, f"{tool} {' '.join(map(str, args))}: exit {result.code}\n{result.stderr}"
    return result


def on_terminal(tool: str, *args: object, **environment: str) -> Result:
    """Runs a tool whose standard output is a terminal. `environment` is added to the variables."""
    mine, its = pty.openpty()
    result = run(tool, *args, stdout=its, env=os.environ | environment)
    os.close(its)
    text = b""
    try:
        while chunk := os.read(mine, 65536):
            text += chunk
    except OSError:  # the tool has closed the terminal
        pass
    os.close(mine)
    return Result(result.code, text.decode().replace("\r\n", "\n"), result.stderr)


def calibrate(dump: Path, output: Path, *flags: object) -> Path:
    """Calibrates quietly; returns the artifact."""
    succeed("kvq-calibrate", "--quiet", "--model", dump, "--output", output, *flags)
    return output


def start(dump: Path, output: Path, *flags: object, **options) -> subprocess.Popen:
    """Starts a calibration that the test interrupts; `options` go to Popen. With one thread the run is slow enough."""
    command = [BIN / "kvq-calibrate", "--threads", "1", "--model", dump, "--output", output, *map(str, flags)]
    return subprocess.Popen(
        command, **({"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True} | options)
    )


def shards(output: Path) -> list[Path]:
    """The shards that a running or interrupted calibration has collected."""
    parts = Path(f"{output}.parts")
    return sorted(parts.glob("layer-*")) if parts.exists() else []


def wait_for_layers(process: subprocess.Popen, output: Path, count: int) -> None:
    """Returns when `count` layers are collected, or when the process has ended."""
    while len(shards(output)) < count and process.poll() is None:
        time.sleep(0.001)
