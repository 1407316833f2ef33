"""What the command lines share: wrong flags and errors end in one line and a fixed exit code."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from .errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USAGE, KvqError, unsupported
from .help_text import HelpFormatter
from .suggestion import nearest_name


def program_name(script: str) -> str:
    """The name of the installed command (`kvq-...`) if the user started that, else `script`."""
    started = Path(sys.argv[0]).name
    return started if started.startswith("kvq-") else script


class Parser(argparse.ArgumentParser):
    def __init__(self, program: str, description: str, epilog: str):
        super().__init__(
            prog=program_name(program),
            description=description,
            epilog=epilog,
            formatter_class=HelpFormatter,
        )

    def parse_args(self, args=None, namespace=None) -> argparse.Namespace:
        words = sys.argv[1:] if args is None else [str(word) for word in args]
        self.refuse_unknown_flags(words)  # first, because other errors often follow from an unknown flag
        found, unknown = self.parse_known_args(words, namespace)
        if unknown:
            self.error(f"unexpected argument {unknown[0]}")
        return found

    def refuse_unknown_flags(self, words: list[str]) -> None:
        flags = [name for action in self._actions for name in action.option_strings]
        for word in words:
            if word == "--":
                return
            flag = word.partition("=")[0]
            if flag.startswith("--") and not any(name.startswith(flag) for name in flags):
                self.refuse_flag(flag)

    def refuse_flag(self, flag: str):
        known = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
        names = {name.lstrip("-"): name for name in known}
        nearest = nearest_name(flag.lstrip("-"), names)
        self.error(f"unknown flag {flag}", f"did you mean {names[nearest]}?" if nearest else None)

    def _check_value(self, action: argparse.Action, value: object):
        """Adds the choice that was meant to argparse's message."""
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        nearest = nearest_name(str(value), choices)
        raise argparse.ArgumentError(
            action,
            f"expected {', '.join(choices)}, found {value}" + (f" (did you mean {nearest}?)" if nearest else ""),
        )

    def error(self, message: str, hint: str | None = None):
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message}\nhint: {hint or f'see {self.prog} --help'}\n")


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
