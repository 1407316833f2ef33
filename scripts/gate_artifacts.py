#!/usr/bin/env python3
"""Compares every kvq artifact that a branch changes with its version where the branch began: see docs/ci.md."""

import argparse
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

DONE, USAGE, INPUT, SYSTEM_REFUSED, CHECK_FAILED, INTERRUPTED = 0, 2, 3, 3, 6, 130
TOOLS = ("kvq-diff", "kvq-inspect")
LARGEST_HEADER = 100_000_000  # bytes, as lib/kvq/container/safetensors.cpp
LFS_POINTER = b"version https://git-lfs.github.com/spec/"

HELP = """\
Runs kvq-diff for each kvq artifact (*.safetensors) of this git repository that differs from the commit where the branch
left BASE, and kvq-inspect --verify for each new one, tracked or not. Renamed artifacts are compared with their old
version, deleted ones are named. A file of another format is left alone. Works with Git LFS. All other flags go to
kvq-diff.

Leaves FOLDER/summary.md and FOLDER/<name>.xml (JUnit). Exit code: 0 all passed, 6 a rule or check failed, others as
kvq-diff's."""


class GateError(Exception):
    """A message for one line on stderr, with a hint and an exit code."""

    def __init__(self, message: str, hint: str = "", code: int = USAGE):
        super().__init__(message)
        self.hint, self.code = hint, code


def plain(text: str) -> str:
    """One line without control characters; characters that change the direction of text are also replaced, because both
    can forge a log."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\udc80-\udcff]", "?", text)


def log_line(text: str) -> str:
    """A line that a workflow runner does not take for a command: `::error::` and `##[error]` are such commands."""
    line = plain(text)
    return " " + line if re.match(r"\s*(::|##\[)", line) else line


def heading(text: str) -> str:
    """A file name for a Markdown heading."""
    return re.sub(r"([]\[\\`*_<>|#@&])", r"\\\1", plain(text))


def code_block(text: str) -> str:
    """Text as a Markdown code block, which the text cannot end."""
    return "\n" + "".join(f"    {plain(line)}\n" for line in text.splitlines())


# Git


def git(*words: str, check: bool = True) -> subprocess.CompletedProcess:
    done = subprocess.run(["git", *words], capture_output=True)
    if check and done.returncode != 0:
        raise GateError(f"git {words[0]}: {os.fsdecode(done.stderr).strip()}", code=SYSTEM_REFUSED)
    return done


def commit_of(revision: str) -> str:
    done = git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}", check=False)
    if done.returncode != 0:
        raise GateError(f"no revision {revision}", "in CI, fetch the whole history: fetch-depth 0")
    return done.stdout.decode().strip()


def branch_point(base: str) -> str:
    """The commit where the current branch left `base`: what changed on `base` since then is not this branch's."""
    commit = commit_of(base)
    done = git("merge-base", commit, "HEAD", check=False)
    if done.returncode != 0:
        raise GateError(
            f"HEAD and {base} have no commit in common",
            "in CI, fetch the whole history: fetch-depth 0; or --no-merge-base compares with BASE itself",
        )
    return done.stdout.decode().strip()


@dataclass(frozen=True)
class Change:
    """A *.safetensors file that differs. `before` is its path in the base commit, `after` its path now; None if there
    is none."""

    before: str | None
    after: str | None
    tracked: bool = True


def fields(output: bytes) -> list[str]:
    return [os.fsdecode(name) for name in output.split(b"\0")[:-1]]


def changes_since(base: str) -> list[Change]:
    rest = iter(fields(git("diff", "--name-status", "-z", "-M", base, "--", "*.safetensors").stdout))
    changes = []
    for status in rest:
        path = next(rest)
        if status == "A":
            changes.append(Change(None, path))
        elif status == "D":
            changes.append(Change(path, None))
        elif status[0] in "RC":
            changes.append(Change(path, next(rest)))
        else:
            changes.append(Change(path, path))
    untracked = fields(git("ls-files", "--others", "--exclude-standard", "-z", "--", "*.safetensors").stdout)
    return changes + [Change(None, path, tracked=False) for path in untracked]


def content_at(commit: str, path: str) -> bytes:
    """The file in a commit, behind a pointer of Git LFS too."""
    return git("cat-file", "--filters", f"{commit}:{path}").stdout


# Files


def metadata_of(start: bytes) -> dict | None:
    """The `__metadata__` of a safetensors file, {} if the file has none, None if `start` is no safetensors header."""
    size = int.from_bytes(start[:8], "little")
    if len(start) < 8 or size > LARGEST_HEADER or len(start) < 8 + size:
        return None
    try:
        header = json.loads(start[8 : 8 + size])
    except ValueError:
        return None
    if not isinstance(header, dict):
        return None
    metadata = header.get("__metadata__", {})
    return metadata if isinstance(metadata, dict) else {}


def is_foreign(content: bytes) -> bool:
    """True for a sound safetensors header that does not claim to be kvq's: model weights, adapters. A damaged header
    may be a damaged artifact, so it is not foreign."""
    metadata = metadata_of(content)
    return metadata is not None and metadata.get("format") != "kvq-artifact"


def read_start(path: str) -> bytes:
    """The file's header, or the whole of a file without one, up to a limit."""
    with open(path, "rb") as file:
        start = file.read(8)
        size = int.from_bytes(start, "little")
        return start + file.read(min(size, LARGEST_HEADER))


def fault_of(path: str) -> str:
    """Why no tool can read the file, or "" if the tools may say."""
    if os.path.islink(path) or not os.path.isfile(path):
        return "not a regular file"
    with open(path, "rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            return "a pointer of Git LFS in place of the file; run: git lfs pull"
    return ""


@contextmanager
def temporary_path(folder: Path, suffix: str) -> Iterator[Path]:
    """The path of a file that is not there yet, and is removed after the block if it is still there. The name is known
    before the file is made, so that a signal at any moment leaves nothing behind."""
    path = folder / f"kvq-gate-{secrets.token_hex(8)}{suffix}"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


# Tools


def find_tools() -> dict[str, str]:
    """Paths of the tools: in KVQ_BIN, else beside this script (an installation), else in this checkout's release build,
    else in PATH."""
    here = Path(__file__).resolve().parent
    named = os.environ.get("KVQ_BIN")
    folders = [Path(named)] if named else [here, here.parent / "build/release/tools"]
    for folder in folders:
        found = {name: folder / name for name in TOOLS}
        if all(os.access(path, os.X_OK) for path in found.values()):
            return {name: str(path.resolve()) for name, path in found.items()}
    found = {name: shutil.which(name) for name in TOOLS}
    if named or not all(found.values()):
        raise GateError(
            f"no {' and '.join(TOOLS)} in {', '.join(map(str, folders))}" + ("" if named else " or PATH"),
            "build them (scripts/quickstart.sh), or name their folder with KVQ_BIN=FOLDER",
            INPUT,
        )
    return found


@dataclass
class Verdict:
    code: int
    summary: str  # Markdown
    lines: list[str] = field(default_factory=list)  # of the console, below the file's own


def failing_rules(junit: Path) -> list[str]:
    """ "FAIL attention_kl.p99<=+5%: 0.1 -> 0.2 (+100%) at layer 3" for each failed rule."""
    try:
        cases = ElementTree.parse(junit).iter("testcase")
    except (OSError, ElementTree.ParseError):
        return []
    failed = [(case.get("name"), case.find("failure")) for case in cases]
    return [f"FAIL {name}: {failure.get('message')}" for name, failure in failed if failure is not None]


def run_tool(*command: str) -> tuple[int, str, str]:
    done = subprocess.run(command, capture_output=True)
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


class Gate:
    def __init__(self, tools: dict[str, str], base: str, out: Path, flags: list[str]):
        self.tools, self.base, self.out, self.flags = tools, base, out, flags
        self.code = DONE

    def compare(self, change: Change) -> Verdict:
        """kvq-diff of the version at the base commit and the file now."""
        junit = self.out / (change.after.replace("/", "__") + ".xml")
        junit.unlink(missing_ok=True)
        with temporary_path(Path(tempfile.gettempdir()), ".safetensors") as old:
            with open(old, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(content_at(self.base, change.before))
            names = [f"--old-name={change.before} at {self.base[:9]}", f"--new-name={change.after}"]
            code, said, error = run_tool(
                self.tools["kvq-diff"], "--markdown", "--quiet", "--junit", str(junit), *names, *self.flags,
                "--", str(old), change.after,
            )  # fmt: skip
        summary = f"## {heading(change.after)}\n\n{said}{code_block(error) if error else ''}"
        lines = failing_rules(junit) if code == CHECK_FAILED else []
        files_only = [line for line in said.splitlines() if line.startswith("Only the files were judged")]
        return Verdict(code, summary, lines + files_only + error.splitlines())

    def verify(self, change: Change) -> Verdict:
        code, said, error = run_tool(self.tools["kvq-inspect"], "--verify", "--", change.after)
        state = "new" if change.tracked else "new, not tracked by git"
        summary = f"## {heading(change.after)} ({state})\n{code_block(said + error)}"
        failed = [line for line in said.splitlines() if re.search(r"\bFAIL", line)]
        return Verdict(code, summary, failed + error.splitlines())

    def note(self, code: int) -> None:
        """The first failure that is no failed rule decides, because then an artifact could not be judged."""
        if code != DONE and self.code in (DONE, CHECK_FAILED):
            self.code = code

    def judge(self, change: Change) -> str:
        """Prints the verdict of one file, and returns its part of the summary."""
        if change.after is None:
            if is_foreign(content_at(self.base, change.before)):
                return ""
            print(f"{log_line(change.before)}: deleted")
            return f"{heading(change.before)}: deleted\n"
        fault = fault_of(change.after)
        known = change.before is not None and not is_foreign(content_at(self.base, change.before))
        if not known and not fault and is_foreign(read_start(change.after)):
            print(f"{log_line(change.after)}: not a kvq artifact, left alone")
            return ""
        if fault:
            verdict = Verdict(INPUT, f"## {heading(change.after)}\n{code_block(fault)}", [fault])
        else:
            verdict = self.compare(change) if known else self.verify(change)
        untracked = "" if change.tracked else " (not tracked by git)"
        outcome = "passed" if verdict.code == DONE else f"failed ({verdict.code})"
        print(f"{log_line(change.after)}: {outcome}{untracked}")
        for line in verdict.lines:
            print(f"  {plain(line)}")
        self.note(verdict.code)
        return verdict.summary + "\n"


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog=Path(sys.argv[0]).name, description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("base", metavar="BASE", help="branch or commit that the change will be merged into: main")
    parser.add_argument("--model", action="append", default=[], metavar="HELDOUT.h5",
                        help="held-out dump for kvq-diff; without it only the files are judged")  # fmt: skip
    parser.add_argument("--out", default="kvq-gate", metavar="FOLDER", help="summary and JUnit files [kvq-gate]")
    parser.add_argument("--no-merge-base", action="store_true", help="compare with BASE, not with where HEAD left it")
    return parser.parse_known_args(arguments)


def absolute_files(flags: list[str]) -> list[str]:
    """Flags of kvq-diff; those that name a file get its absolute path, because the working folder changes."""
    return [os.path.abspath(flag) if os.path.exists(flag) else flag for flag in flags]


def write_summary(path: Path, text: str) -> None:
    with temporary_path(path.parent, ".tmp") as temporary:
        with temporary.open("x", encoding="utf-8", errors="replace") as file:
            file.write(text)
        os.replace(temporary, path)


def main(arguments: list[str]) -> int:
    own, flags = parse_arguments(arguments)
    for dump in own.model:
        if not os.path.exists(dump):
            raise GateError(f"--model: {dump}: no such file", code=INPUT)
        flags += ["--model", dump]
    tools = find_tools()
    out = Path(own.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    flags = absolute_files(flags)
    os.chdir(os.fsdecode(git("rev-parse", "--show-toplevel").stdout).rstrip("\n"))
    base = commit_of(own.base) if own.no_merge_base else branch_point(own.base)
    if not (out / ".gitignore").exists() and out.name == "kvq-gate":
        (out / ".gitignore").write_text("*\n")
    gate = Gate(tools, base, out, flags)
    summary = "".join(gate.judge(change) for change in changes_since(base))
    if not summary:
        print("No artifact changed.")
        summary = "No artifact changed.\n"
    write_summary(out / "summary.md", summary)
    return gate.code


def end_by_signal(_number: int, _frame: object) -> None:
    """By default SIGTERM and SIGHUP end Python and leave temporary files behind."""
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    sys.exit(INTERRUPTED)


def repeat_lost_signal(lost) -> None:
    """Python drops what is raised in a destructor, also by a signal that arrives there, so the signal is sent again:
    by a thread, because what the signal raises in this function would be dropped, too."""
    if isinstance(lost.exc_value, KeyboardInterrupt | SystemExit):
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(lost)


if __name__ == "__main__":
    sys.unraisablehook = repeat_lost_signal
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # under nohup SIGHUP is ignored
            signal.signal(number, end_by_signal)
    try:
        sys.exit(main(sys.argv[1:]))
    except GateError as error:
        print(f"{Path(sys.argv[0]).name}: error: {plain(str(error))}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        sys.exit(error.code)
    except OSError as error:
        print(f"{Path(sys.argv[0]).name}: error: {plain(str(error))}", file=sys.stderr)
        sys.exit(SYSTEM_REFUSED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
