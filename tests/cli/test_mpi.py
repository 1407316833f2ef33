"""kvq-calibrate-mpi: the bytes of kvq-calibrate for any number of processes, and what is left when one of them dies."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from kvq_tools import BIN, calibrate, succeed

TOOL = BIN / "kvq-calibrate-mpi"
LAYERS = 3
# Open MPI refuses root, and more processes than cores, unless it is told to.
ENVIRONMENT = os.environ | {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


@pytest.fixture(scope="module", autouse=True)
def is_built():
    """With an MPI on this machine the tool must be there."""
    if shutil.which("mpicxx") is None:
        pytest.skip("no MPI here")
    assert TOOL.exists()


@pytest.fixture(scope="module")
def dump(make_dump) -> Path:
    return make_dump(tokens=120, sequences=2, layers=LAYERS, generated=40)


@pytest.fixture(scope="module")
def long_dump(make_dump) -> Path:
    """Takes some seconds, so that a run can be disturbed."""
    return make_dump(tokens=6000, layers=4)


def command(processes: int, *words: object) -> list[str]:
    return ["mpirun", "-n", str(processes), str(TOOL), "--quiet", *map(str, words)]


def mpi(processes: int, *words: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(processes, *words),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )


CASES = {
    "oscar": ("--method", "oscar", "--collect", "all"),
    "queries": ("--method", "oscar", "--queries", "generated", "--target-k", "scored_query"),
    "kvq": ("--method", "kvq", "--held-out-tokens", "24"),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def whole(request, dump, tmp_path_factory) -> tuple[tuple[str, ...], Path]:
    """Flags, and the folder of what kvq-calibrate writes with them."""
    folder = tmp_path_factory.mktemp("whole")
    calibrate(dump, folder / "artifact", "--stats", folder / "stats", *request.param)
    return request.param, folder


# With 8 processes, three groups collect the three layers, and processes compute some KV heads or none.
@pytest.mark.parametrize("processes", [1, 2, 3, 4, 8])
def test_bytes_are_those_of_one_process(dump, tmp_path, whole, processes):
    flags, expected = whole
    dealt = tmp_path / "artifact"
    result = mpi(processes, "--model", dump, "--output", dealt, "--stats", tmp_path / "stats", *flags)
    assert result.returncode == 0, result.stderr
    assert dealt.read_bytes() == (expected / "artifact").read_bytes()
    assert (tmp_path / "stats").read_bytes() == (expected / "stats").read_bytes()
    assert len(list(tmp_path.iterdir())) == 2  # no parts are left


def test_part_of_a_dump(dump, tmp_path):
    flags = ("--layers", "0,2", "--first-token", 7, "--num-tokens", 80, "--stats-only")
    succeed("kvq-calibrate", "--quiet", "--model", dump, "--stats", tmp_path / "whole", *flags)
    assert mpi(5, "--model", dump, "--stats", tmp_path / "dealt", *flags).returncode == 0
    assert (tmp_path / "dealt").read_bytes() == (tmp_path / "whole").read_bytes()


def test_statistics_need_no_other_process(dump, tmp_path):
    calibrate(dump, tmp_path / "whole", "--stats", tmp_path / "stats")
    assert mpi(3, "--stats", tmp_path / "stats", "--output", tmp_path / "dealt").returncode == 0
    assert (tmp_path / "dealt").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--model", "missing.h5", "--output", "x"), 3, "missing.h5: cannot open"),
        (("--mode", "missing.h5"), 2, "--mode"),
        ((), 2, "--model DUMP.h5 is needed"),
    ],
)
def test_one_process_says_what_is_wrong(words, code, said):
    result = mpi(3, *words)
    errors = [line for line in result.stderr.splitlines() if line.startswith("kvq-calibrate-mpi: error: ")]
    assert result.returncode == code
    assert len(errors) == 1 and said in errors[0]


def ranks_of(run: subprocess.Popen) -> list[int]:
    """Processes of the run, from /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError):
            continue
        if parent == run.pid and words[0].endswith(b"kvq-calibrate-mpi"):
            found.append(int(folder.name))
    return sorted(found)


def start(processes: int, *words: object) -> tuple[subprocess.Popen, list[int]]:
    run = subprocess.Popen(
        command(processes, *words), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 30
    while len(ranks := ranks_of(run)) < processes:
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    return run, ranks


def killed_run(processes: int, dump: Path, output: Path, chance: random.Random) -> str:
    """Kills a process of a run; sooner, if the run had ended before. Returns what the run said."""
    wait = chance.uniform(0.0, 1.0)
    for _ in range(8):
        run, ranks = start(processes, "--model", dump, "--output", output, "--resume", "--threads", 1)
        time.sleep(wait)
        with contextlib.suppress(ProcessLookupError):
            os.kill(chance.choice(ranks), signal.SIGKILL)
        _, errors = run.communicate(timeout=60)
        if run.returncode != 0:
            return errors
        output.unlink()
        wait /= 2
    raise AssertionError("each run ended before a process was killed")


@pytest.mark.parametrize("processes", [2, 6])
def test_a_killed_process_ends_the_run_and_resume_continues(long_dump, tmp_path, processes):
    whole, dealt = tmp_path / "whole", tmp_path / "dealt"
    calibrate(long_dump, whole)
    chance = random.Random(processes)
    for _ in range(2):
        errors = killed_run(processes, long_dump, dealt, chance)
        assert "signal 9" in errors
        if dealt.exists():  # the process was killed when all was done
            assert dealt.read_bytes() == whole.read_bytes()
            dealt.unlink()
    result = mpi(processes, "--model", long_dump, "--output", dealt, "--resume")
    assert result.returncode == 0, result.stderr
    assert dealt.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dealt", "whole"]


def test_a_process_that_stands_still_for_a_while_changes_nothing(long_dump, tmp_path):
    whole, dealt = tmp_path / "whole", tmp_path / "dealt"
    calibrate(long_dump, whole)
    run, ranks = start(6, "--model", long_dump, "--output", dealt, "--threads", 1)
    for rank in (ranks[1], ranks[-1]):
        os.kill(rank, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(rank, signal.SIGCONT)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 0, errors
    assert dealt.read_bytes() == whole.read_bytes()


@pytest.fixture
def two_networks(tmp_path):
    """Two network namespaces, linked, and a program that starts a command in the second one, as ssh would."""

    def ip(*words: str) -> bool:
        return subprocess.run(["ip", *words], capture_output=True).returncode == 0

    first, second = f"kvq-{os.getpid()}-a", f"kvq-{os.getpid()}-b"
    if shutil.which("ip") is None or not ip("netns", "add", first):
        pytest.skip("this user makes no network namespaces")
    try:
        assert ip("netns", "add", second)
        assert ip("link", "add", "va", "netns", first, "type", "veth", "peer", "name", "vb", "netns", second)
        for name, link, address in ((first, "va", "10.209.0.1/24"), (second, "vb", "10.209.0.2/24")):
            assert ip("-n", name, "address", "add", address, "dev", link)
            assert ip("-n", name, "link", "set", "lo", "up") and ip("-n", name, "link", "set", link, "up")
        agent = tmp_path / "agent"
        agent.write_text(f'#!/bin/sh\nshift\nexec ip netns exec {second} sh -c "$*"\n')
        agent.chmod(0o755)
        yield first, agent
    finally:
        ip("netns", "delete", first)
        ip("netns", "delete", second)


def test_processes_in_two_networks(dump, tmp_path, two_networks):
    calibrate(dump, tmp_path / "one")
    namespace, agent = two_networks
    network = "10.209.0.0/24"
    parameters = {
        "plm_rsh_agent": str(agent),
        "btl": "tcp,self",  # no memory in common
        "btl_tcp_if_include": network,
        "oob_tcp_if_include": network,
    }
    run = subprocess.run(
        ["ip", "netns", "exec", namespace, "mpirun", "-n", "2", "--host", "10.209.0.1,10.209.0.2"]
        + [word for name, value in parameters.items() for word in ("--mca", name, value)]
        + [str(TOOL.resolve()), "--quiet", str(dump), "--output", str(tmp_path / "two")],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes()
