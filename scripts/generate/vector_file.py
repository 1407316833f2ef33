"""What programs that derive a file of test vectors share: they write the file, or with --check compare it."""

import argparse
import os
import sys
from pathlib import Path

EXIT_DONE, EXIT_CHECK_FAILED = 0, 6


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("x") as file:  # not through a link that somebody has put there
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def run(description: str, path: Path, derive_text, source: str) -> int:
    """Runs the program.

    derive_text: returns the text of the file, with one vector in each line between a first and a last
    source: what the text follows from, for the message of --check
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; compare with the file that is there")
    args = parser.parse_args()
    text = derive_text()
    if not args.check:
        write_atomically(path, text)
        print(f"wrote {path}: {text.count(chr(10)) - 2} vectors", file=sys.stderr)
    elif text != path.read_text():
        print(f"{parser.prog}: error: {path} differs from what {source} give", file=sys.stderr)
        return EXIT_CHECK_FAILED
    return EXIT_DONE
