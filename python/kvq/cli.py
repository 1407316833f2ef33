"""What the command lines share: wrong flags and errors end in one line and a fixed exit code."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from .errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USAGE, KvqError, unsupported


def program_name(script: str) -> str:
    """The name of the installed command (`kvq-...`) if the user started that, else `script`."""
    started = Path(sys.argv[0]).name
    return started if started.startswith("kvq-") else script


class StoreOnce(argparse.Action):
    """Stores one value and refuses a second, which argparse would let replace the first without a word."""

    def __call__(self, parser, namespace, values, option_string=None):
        if option_string and self.dest in parser.given:
            raise argparse.ArgumentError(self, "given twice, but it takes one value")
        parser.given.add(self.dest)
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    def __init__(self, program: str, description: str, epilog: str):
        super().__init__(
            prog=program_name(program),
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.given: set[str] = set()  # destinations of StoreOnce that have their value
        for name in (None, "store"):
            self.register("action", name, StoreOnce)

    def parse_known_args(self, *arguments, **options):
        self.given = set()
        return super().parse_known_args(*arguments, **options)

    def error(self, message: str):
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message}\nhint: see {self.prog} --help\n")


def run_script(program: str, main: Callable[[], int | None]) -> int:
    """Runs `main`. Prints what it raises as one line on stderr and returns an exit code; a bug keeps its traceback."""
    try:
        return main() or EXIT_DONE
    except KvqError as error:
        return report(program, error)
    except ModuleNotFoundError as error:
        return report(program, unsupported(f"Python package '{error.name}' is missing", f"pip install {error.name}"))
    except BrokenPipeError:
        sys.stderr.close()  # the pipe has no reader; otherwise Python would report an error at exit
        return EXIT_DONE
    except KeyboardInterrupt:
        print(f"\n{program_name(program)}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def report(program: str, error: KvqError) -> int:
    """Prints the error, and its hint if there is one, on stderr; returns the exit code."""
    print(f"{program_name(program)}: error: {error}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    return error.exit_code
