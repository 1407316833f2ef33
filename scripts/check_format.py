#!/usr/bin/env python3
"""Holds every tracked file against the style: clang-format, ruff, gersemi, 120 columns. Prints one line per finding."""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

COLUMNS = 120
EXIT_DIFFERENT, EXIT_UNSUPPORTED = 6, 5
ROOT = pathlib.Path(__file__).resolve().parent.parent
CPP = ("*.c", "*.cpp", "*.cu", "*.cuh", "*.h", "*.hpp")
CMAKE = ("*.cmake", "CMakeLists.txt", "*/CMakeLists.txt")
# Files whose line length no formatter checks, or not in comments. C++ and CUDA are listed for raw strings and comments.
COLUMN_CHECKED = (*CPP, *CMAKE, "*.md", "*.sh")
EXAMPLES = """\
examples

  check_format.py          says what differs, and the command that mends it
  check_format.py --fix    mends what formatters can mend, and says what is left

exit codes: 0 nothing differs, 2 wrong flags, 5 a formatter is missing, 6 something differs
"""


def tracked(*patterns: str) -> list[str]:
    """Files of the checkout, also untracked files that git does not ignore; all files if there is no checkout (an
    archive)."""
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *patterns]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        names = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    else:
        skipped = {"build", ".venv"}
        found = (path.relative_to(ROOT) for pattern in patterns for path in ROOT.rglob(pattern.removeprefix("*/")))
        names = {str(path) for path in found if path.parts[0] not in skipped}
    return sorted(names)


def formatter(name: str) -> str | None:
    """Path of a formatter: that of .venv (pinned by scripts/requirements.txt), else the one on PATH, else None."""
    beside = pathlib.Path(sys.executable).parent / name
    own = ROOT / ".venv/bin" / name
    return next((str(path) for path in (own, beside) if path.is_file()), None) or shutil.which(name)


def output_of(*command: str) -> tuple[int, str]:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def batches(files: list[str], count: int) -> list[list[str]]:
    return [part for part in (files[start::count] for start in range(count)) if part]


def clang_format(program: str, fix: bool) -> list[str]:
    """One line for each file that clang-format would change."""
    mode = ["-i"] if fix else ["--dry-run", "-Werror"]
    files, faults = tracked(*CPP), []
    workers = min(len(os.sched_getaffinity(0)), 8)
    with ThreadPoolExecutor(workers) as pool:
        for code, text in pool.map(lambda part: output_of(program, *mode, *part), batches(files, 4 * workers)):
            places = {}
            for name, line in re.findall(r"^(\S+?):(\d+):\d+: error: ", text, re.MULTILINE):
                places.setdefault(name, []).append(line)
            faults += [
                f"{name}:{lines[0]}: clang-format differs in {len(lines)} places" for name, lines in places.items()
            ]
            if code != 0 and not places:
                faults.append(f"clang-format: exit code {code}: {text.strip()}")
    return sorted(faults)


def ruff(program: str, fix: bool) -> list[str]:
    faults = []
    if fix:
        output_of(program, "check", "--quiet", "--fix", ".")
        output_of(program, "format", "--quiet", ".")
    code, text = output_of(program, "format", "--check", "--output-format", "concise", ".")
    places = re.findall(r"^(\S+?:\d+):\d+: unformatted", text, re.MULTILINE)
    faults += [f"{place}: ruff format differs" for place in places]
    if code != 0 and not places:
        faults.append(f"ruff format: exit code {code}: {text.strip()}")
    code, text = output_of(program, "check", "--quiet", "--output-format", "concise", ".")
    if code != 0:
        faults += text.strip().splitlines()
    return faults


def gersemi(program: str, fix: bool) -> list[str]:
    files = tracked(*CMAKE)
    if fix:
        output_of(program, "--in-place", "--quiet", *files)
    code, text = output_of(program, "--check", *files)
    names = re.findall(r"^(\S+) would be reformatted", text, re.MULTILINE)
    if code != 0 and not names:
        return [f"gersemi: exit code {code}: {text.strip()}"]
    return [f"{name.removeprefix(str(ROOT) + '/')}: gersemi differs" for name in names]


def columns() -> list[str]:
    faults = []
    for name in tracked(*COLUMN_CHECKED):
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1):
            if len(line) > COLUMNS:
                faults.append(f"{name}:{number}: {len(line)} columns, {COLUMNS} are allowed")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fix", action="store_true", help="let the formatters write")
    args = parser.parse_args()

    checks = {"clang-format": clang_format, "ruff": ruff, "gersemi": gersemi}
    programs = {name: formatter(name) for name in checks}
    missing = [name for name, program in programs.items() if program is None]
    if missing:
        print(f"check_format.py: error: missing {', '.join(missing)}; run scripts/setup.sh", file=sys.stderr)
        return EXIT_UNSUPPORTED

    mendable = [fault for name, check in checks.items() for fault in check(programs[name], args.fix)]
    by_hand = columns()
    for fault in mendable + by_hand:
        print(fault)
    if mendable and not args.fix:
        print("mend with: scripts/check_format.py --fix")
    if by_hand:
        print("break long lines by hand")
    if not mendable and not by_hand:
        print("format: every file has the style")
    return EXIT_DIFFERENT if mendable or by_hand else 0


if __name__ == "__main__":
    sys.exit(main())
