"""What the command lines share: wrong flags and errors end in one line and a fixed exit code."""

import argparse
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from .errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USAGE, KvqError, unsupported
from .help_text import HelpFormatter
from .suggestion import nearest_name
from .text import safe_line, safe_text


def program_name(script: str) -> str:
    """The name of the installed command (`kvq-...`) if the user started that, else `script`."""
    started = Path(sys.argv[0]).name
    return started if started.startswith("kvq-") else script


def decimal_integer(text: str) -> int:
    """Decimal digits without leading zeros, so that 010 is neither 8 nor 10 by accident."""
    if not re.fullmatch(r"-?(0|[1-9][0-9]*)", text):
        reason = ", which could mean octal" if re.fullmatch(r"-?0[0-9]+", text) else ""
        raise argparse.ArgumentTypeError(
            f"expected a decimal integer without leading zeros{reason}, found {safe_line(text)}"
        )
    return int(text)


def seed(text: str) -> int:
    """0 to 2^63 - 1, as in the C++ tools."""
    value = decimal_integer(text)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"expected a seed from 0 to 2^63 - 1, found {value}")
    return value


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
            formatter_class=HelpFormatter,
        )
        self.register("type", int, decimal_integer)  # of every `type=int`
        self.given: set[str] = set()  # destinations of StoreOnce that have their value
        for name in (None, "store"):
            self.register("action", name, StoreOnce)

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

    def parse_known_args(self, *arguments, **options):
        self.given = set()
        return super().parse_known_args(*arguments, **options)

    def error(self, message: str, hint: str | None = None):
        lines = [f"{self.prog}: error: {safe_line(message)}", f"hint: {safe_line(hint or f'see {self.prog} --help')}"]
        self.exit(EXIT_USAGE, "".join(f"{line}\n" for line in lines))


class SafeStream:
    """A text stream whose text passes safe_text(): no control character of any file reaches a terminal or a log.
    Progress on a terminal may rewrite its line."""

    def __init__(self, stream):
        self._stream = stream

    def write(self, text: str) -> int:
        start, line, end = "", text, ""
        if self._stream.isatty() and (
            rewriting := re.fullmatch(r"(\r(?:\x1b\[K)?)(.*?)((?:\x1b\[K)?)", text, re.DOTALL)
        ):
            start, line, end = rewriting.groups()
        self._stream.write(start + safe_text(line) + end)
        return len(text)

    def writelines(self, lines) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str):
        return getattr(self._stream, name)


@contextmanager
def safe_output() -> Iterator[None]:
    """Standard output and standard error are SafeStreams in the block."""
    with redirect_stdout(SafeStream(sys.stdout)), redirect_stderr(SafeStream(sys.stderr)):
        yield


class Stopped(KeyboardInterrupt):
    """A signal other than SIGINT that asks the program to end. Everything that cleans up after SIGINT does so here."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)


@contextmanager
def stopping_signals() -> Iterator[None]:
    """In the block SIGTERM and SIGHUP raise Stopped, because by default they end Python without a cleanup. A signal
    that is ignored, as SIGHUP is under nohup, stays ignored; so does what follows the first signal."""
    if threading.current_thread() is not threading.main_thread():  # signals can only be handled there
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    handled = [number for number, handler in before.items() if handler == signal.SIG_DFL]

    def stop(number, _frame):
        for each in handled:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    try:
        for number in handled:
            signal.signal(number, stop)
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])


def interrupted(program: str, left_out: str = "") -> int:
    """Says so in one line on stderr; returns the exit code of all kvq programs for SIGINT, SIGTERM and SIGHUP.
    @param left_out  what the run lacks"""
    print(f"\n{program_name(program)}: interrupted{left_out}", file=sys.stderr)
    return EXIT_INTERRUPTED


def run_script(program: str, main: Callable[[], int | None]) -> int:
    """Runs `main`. Prints what it raises as one line on stderr and returns an exit code; a bug keeps its traceback."""
    try:
        with stopping_signals(), safe_output():
            return main() or EXIT_DONE
    except KvqError as error:
        return report(program, error)
    except ModuleNotFoundError as error:
        return report(program, unsupported(f"Python package '{error.name}' is missing", f"pip install {error.name}"))
    except BrokenPipeError:
        sys.stderr.close()  # the pipe has no reader; otherwise Python would report an error at exit
        return EXIT_DONE
    except KeyboardInterrupt:
        return interrupted(program)


def report(program: str, error: KvqError) -> int:
    """Prints the error, and its hint if there is one, on stderr; returns the exit code."""
    print(f"{program_name(program)}: error: {safe_line(error)}", file=sys.stderr)
    if error.hint:
        print(f"hint: {safe_line(error.hint)}", file=sys.stderr)
    return error.exit_code
