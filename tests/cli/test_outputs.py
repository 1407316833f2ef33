"""What the tools do with an output that is a link, a device, in a missing folder or being written, and with streams
that take nothing."""

import json
import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest
from kvq_tools import BIN, Result, calibrate, run, succeed

USAGE, INPUT, CHECK_FAILED = 2, 3, 6


@pytest.fixture(scope="module")
def inputs(make_dump, tmp_path_factory) -> dict[str, Path]:
    """A dump, its statistics, and two artifacts that the default rules of kvq-diff do not take for equal."""
    folder, dump = tmp_path_factory.mktemp("inputs"), make_dump(tokens=60, layers=2, head_dim=32)
    artifact = calibrate(dump, folder / "artifact", "--stats", folder / "stats")
    return {
        "dump": dump,
        "stats": folder / "stats",
        "artifact": artifact,
        "worse": calibrate(dump, folder / "worse", "--bits", 1, "--method", "plain"),
    }


WRITERS = {
    "dump": ("kvq-calibrate", "--quiet", "--model", "{dump}", "--output", "{out}"),
    "dump to statistics": ("kvq-calibrate", "--quiet", "--model", "{dump}", "-o", "{other}", "--stats", "{out}"),
    "statistics": ("kvq-calibrate", "--quiet", "--stats", "{stats}", "--output", "{out}"),
    "merge": ("kvq-calibrate", "--quiet", "--merge-stats", "{stats}", "--stats", "{out}"),
    "html": ("kvq-inspect", "{artifact}", "--html", "{out}"),
    "junit": ("kvq-diff", "{artifact}", "{artifact}", "--junit", "{out}"),
}
BINARY = ("dump", "dump to statistics", "statistics", "merge")


def filled(command: tuple[str, ...], inputs: dict[str, Path], out: object) -> list[str]:
    return [word.format(**inputs, out=out, other=f"{inputs['stats']}.other") for word in command]


def write(writer: str, inputs: dict[str, Path], out: object, **options) -> Result:
    return run(*filled(WRITERS[writer], inputs, out), **options)


def expect_error(result: Result, code: int, *words: str, hint: str = "") -> None:
    error, *rest = result.stderr.splitlines()
    assert result.code == code and ": error: " in error and all(word in error for word in words), result
    assert len(rest) <= 1 and all(line.startswith("hint: ") for line in rest) and hint in "".join(rest), result


@pytest.fixture(scope="module")
def written(inputs, tmp_path_factory) -> dict[str, bytes]:
    """What each writer writes to a plain new file."""
    folder = tmp_path_factory.mktemp("written")
    for index, writer in enumerate(WRITERS):
        assert write(writer, inputs, folder / str(index)).code == 0
    return {writer: (folder / str(index)).read_bytes() for index, writer in enumerate(WRITERS)}


# Links and modes


@pytest.mark.parametrize("writer", WRITERS)
def test_file_behind_a_link_is_replaced_in_its_folder(inputs, written, tmp_path, writer):
    far, near = tmp_path / "far", tmp_path / "near"
    far.mkdir()
    near.mkdir()
    (far / "file").write_text("old")
    (far / "file").chmod(0o640)
    (near / "middle").symlink_to("../far/file")
    (near / "link").symlink_to("middle")
    assert write(writer, inputs, near / "link").code == 0
    assert (near / "link").is_symlink() and (far / "file").read_bytes() == written[writer]
    assert (far / "file").stat().st_mode & 0o7777 == 0o640
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["far", "file", "link", "middle", "near"]


def test_link_to_a_file_that_is_missing_makes_it(inputs, written, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert write("html", inputs, tmp_path / "link").code == 0
    assert (tmp_path / "file").read_bytes() == written["html"] and (tmp_path / "link").is_symlink()


def test_links_that_lead_nowhere_are_refused(inputs, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    expect_error(write("html", inputs, tmp_path / "loop"), INPUT, "loop")
    (tmp_path / "broken").symlink_to("missing/file")
    expect_error(write("html", inputs, tmp_path / "broken"), INPUT, "missing is missing", hint="mkdir -p")


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o666, 0o755])
def test_mode_of_a_replaced_file_is_kept(inputs, tmp_path, mode):
    out = tmp_path / "out"
    out.write_text("old")
    out.chmod(mode)
    assert write("statistics", inputs, out, umask=0o077).code == 0
    assert out.stat().st_mode & 0o7777 == mode


def test_mode_of_a_new_file_is_that_of_the_umask(inputs, tmp_path):
    for mask in (0o022, 0o077):
        out = tmp_path / f"{mask}"
        assert write("statistics", inputs, out, umask=mask).code == 0
        assert out.stat().st_mode & 0o7777 == 0o666 & ~mask


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_owner_of_a_replaced_file_is_kept(inputs, tmp_path):
    out = tmp_path / "out"
    out.write_text("old")
    os.chown(out, 1234, 4321)
    assert write("statistics", inputs, out).code == 0
    assert (out.stat().st_uid, out.stat().st_gid) == (1234, 4321)


# What is no file


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(
    "device", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "/dev/null", "/dev/full", "fifo", "."]
)
def test_devices_pipes_and_descriptors_are_refused(inputs, tmp_path, writer, device):
    """In place of /dev/stdout, which a machine may lack, a private link with the same target: a test must not endanger
    the machine's."""
    if device == "fifo":
        os.mkfifo(tmp_path / "fifo")
    if device == "/dev/stdout":
        (tmp_path / "stdout").symlink_to("/proc/self/fd/1")
    out = {"fifo": tmp_path / "fifo", "/dev/stdout": tmp_path / "stdout"}.get(device, device)
    with open(tmp_path / "redirected", "w") as file:
        result = write(writer, inputs, out, stdout=file)
    expect_error(result, INPUT, str(out), "cannot write: ")
    assert (tmp_path / "redirected").read_bytes() == b""
    assert device != "/dev/stdout" or os.readlink(out) == "/proc/self/fd/1"


@pytest.mark.parametrize("writer", BINARY)
def test_binary_outputs_have_no_standard_output(inputs, tmp_path, writer):
    expect_error(write(writer, inputs, "-", cwd=tmp_path), USAGE, "-: ", hint="./- names a file")
    assert list(tmp_path.iterdir()) == []
    assert write(writer, inputs, "./-", cwd=tmp_path).code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["-"]


@pytest.mark.parametrize("writer", ["html", "junit"])
def test_text_outputs_know_standard_output(inputs, written, tmp_path, writer):
    result = write(writer, inputs, "-", cwd=tmp_path)
    assert result == Result(0, written[writer].decode(), "") and list(tmp_path.iterdir()) == []


def test_junit_on_standard_output_is_alone_there(inputs):
    for flag in ("--json", "--markdown"):
        result = run("kvq-diff", inputs["artifact"], inputs["artifact"], "--junit", "-", flag)
        expect_error(result, USAGE, "--junit -", flag)
    failed = run("kvq-diff", inputs["artifact"], inputs["worse"], "--junit", "-")
    assert failed.code == CHECK_FAILED and failed.stdout.startswith("<?xml")


# Folders


@pytest.mark.parametrize("writer", WRITERS)
def test_missing_folders_are_not_made(inputs, tmp_path, writer):
    folder = tmp_path / "new folder"
    result = write(writer, inputs, folder / "out")
    expect_error(result, INPUT, f"{folder}/out: ", "is missing", hint=f"mkdir -p '{folder}'")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    expect_error(write(writer, inputs, tmp_path / "file/out"), INPUT, f"{tmp_path}/file: ")


def test_missing_folder_is_found_before_a_layer_is_collected(inputs, sample, tmp_path):
    for flags in ((), ("--dry-run",)):
        begin = time.monotonic()
        result = run("kvq-calibrate", "--model", sample, "--output", tmp_path / "none/out", *flags)
        expect_error(result, INPUT, "none is missing", hint="mkdir -p")
        assert time.monotonic() - begin < 5
    result = run("kvq-calibrate", "--model", sample, "-o", tmp_path / "out", "--stats", tmp_path / "none/stats")
    expect_error(result, INPUT, "none is missing")
    assert list(tmp_path.iterdir()) == []


def test_folder_to_keep_is_made_and_its_parents_are_not(inputs, tmp_path):
    grid = tmp_path / "grid.json"
    grid.write_text(json.dumps({"rows": ["--method plain"]}))
    sweep = ("--quiet", "--model", inputs["dump"], "--calibration", inputs["dump"], "--sweep", grid, "--keep")
    expect_error(run("kvq-eval", *sweep, tmp_path / "a/b"), INPUT, f"{tmp_path}/a is missing", hint="mkdir -p")
    expect_error(run("kvq-eval", *sweep, "-", cwd=tmp_path), USAGE, "-: ", hint="./-")
    succeed("kvq-eval", *sweep, f"{tmp_path}/kept/")
    assert [path.suffix for path in (tmp_path / "kept").iterdir()] == [".safetensors"]


def test_two_sweeps_in_one_folder_are_refused(inputs, tmp_path):
    grid = tmp_path / "grid.json"
    grid.write_text(json.dumps({"axes": [["--method oscar"], [f"--seed {seed}" for seed in range(99)]]}))
    command = [BIN / "kvq-eval", "--quiet", "--model", inputs["dump"], "--calibration", inputs["dump"]]
    command += ["--sweep", grid, "--keep", tmp_path / "kept"]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"TMPDIR": str(tmp_path)})
    while not list(tmp_path.glob("kept/0001*")):
        time.sleep(0.001)
    first.send_signal(signal.SIGSTOP)
    expect_error(run(*command), INPUT, f"{tmp_path}/kept: another run is writing it (process {first.pid}")
    first.send_signal(signal.SIGTERM)
    first.send_signal(signal.SIGCONT)
    assert first.wait() == 130
    assert {path.name for path in tmp_path.iterdir()} == {"grid.json", "kept"}
    assert all(path.name[:4].isdigit() for path in (tmp_path / "kept").iterdir()), "whole artifacts only"


def test_names_of_default_outputs_have_the_method(inputs, tmp_path):
    (tmp_path / "dump.h5").symlink_to(inputs["dump"])
    for method in ("oscar", "quarot"):
        succeed("kvq-calibrate", "--quiet", "--model", tmp_path / "dump.h5", "--method", method)
    assert {path.name for path in tmp_path.iterdir()} == {
        "dump.h5",
        "dump.oscar.safetensors",
        "dump.quarot.safetensors",
    }


# Disks


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 128 KiB; skips the test if mounting is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_disk_that_is_too_small_is_found_before_a_layer_is_collected(sample, tiny_disk, tmp_path):
    begin = time.monotonic()
    result = run("kvq-calibrate", "--model", sample, "--output", tiny_disk / "out")
    expect_error(result, INPUT, f"{tiny_disk}: disk too small", "are free", hint="another disk")
    result = run("kvq-calibrate", "--model", sample, "-o", tmp_path / "out", "--stats", tiny_disk / "stats")
    expect_error(result, INPUT, f"{tiny_disk}: disk too small: statistics need")
    assert time.monotonic() - begin < 5 and list(tiny_disk.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["disk"]


# Streams that take nothing

ENDS = {
    "done": (0, ("kvq-inspect", "{artifact}")),
    "quiet": (0, ("kvq-calibrate", "--quiet", "--model", "{dump}", "--output", "{out}")),
    "talking": (0, ("kvq-calibrate", "--model", "{dump}", "--output", "{out}")),
    "help": (0, ("kvq-eval", "--help")),
    "usage": (2, ("kvq-calibrate", "--treads", "1")),
    "input": (3, ("kvq-eval", "--model", "/nonexistent.h5", "{artifact}")),
    "check": (6, ("kvq-diff", "{artifact}", "{worse}")),
    "unsupported": (3, ("kvq-inspect", "{dump}")),
}


def shell(redirections: str, command: list[str], **options) -> subprocess.CompletedProcess:
    """Runs a tool under redirections of a shell."""
    return subprocess.run(
        ["bash", "-c", f'"$@" {redirections}', "bash", str(BIN / command[0]), *command[1:]],
        capture_output=True,
        timeout=60,
        **options,
    )


@pytest.mark.parametrize("errors", ["2>&-", "2>/dev/full", "2> >(exec true)"])
@pytest.mark.parametrize("end", ENDS)
def test_standard_error_that_takes_nothing_changes_no_exit_code(inputs, tmp_path, end, errors):
    code, command = ENDS[end]
    done = shell(errors, filled(command, inputs, tmp_path / "out"))
    assert done.returncode == code and done.stderr == b""


@pytest.mark.parametrize("streams", [">&-", ">/dev/full", "> >(exec true)", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("end", ENDS)
def test_standard_output_that_takes_nothing_is_exit_code_3(inputs, tmp_path, end, streams):
    code, command = ENDS[end]
    prints = end in ("done", "talking", "help", "check")
    done = shell(f"{streams}; exit $?", filled(command, inputs, tmp_path / "out"))
    if "true" in streams:  # the reader may end before or after the text is written
        assert done.returncode in {code, INPUT if prints else code}
    else:
        assert done.returncode == (INPUT if prints else code)
    if "out" in str(command) and code == 0:
        assert (tmp_path / "out").exists() and not Path(f"{tmp_path / 'out'}.parts").exists()
        succeed("kvq-inspect", tmp_path / "out", "--verify")


def test_reader_that_wants_no_more_is_no_error_message(inputs):
    reader, writer = os.pipe()
    os.close(reader)
    result = run("kvq-inspect", inputs["artifact"], "--json", stdout=writer)
    os.close(writer)
    assert (result.code, result.stderr) == (INPUT, "")


# Memory


def limited(megabytes: int):
    """For a child process: an address space of so many MB."""
    return lambda: resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))


@pytest.mark.skipif("SANITIZED" in os.environ, reason="sanitizers reserve terabytes of addresses")
@pytest.mark.parametrize("megabytes", [96, 160, 256, 400, 700])
def test_little_memory_is_one_line_and_never_an_endless_loop(inputs, tmp_path, megabytes):
    out = tmp_path / "out"
    result = run("kvq-calibrate", "--model", inputs["dump"], "-o", out, "--threads", 2, preexec_fn=limited(megabytes))
    assert result.code in (0, INPUT) and (result.code == 0) == out.exists(), result
    if result.code:
        expect_error(result, INPUT, "memory", hint="")
    assert run("kvq-calibrate", "--version", preexec_fn=limited(megabytes)).code == 0
