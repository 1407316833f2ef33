"""How the program fails: one exception, and the exit codes every kvq program shares."""

EXIT_DONE = 0
EXIT_USAGE = 2
EXIT_INPUT = 3
EXIT_NUMERICAL = 4
EXIT_UNSUPPORTED = 5


class DumpError(Exception):
    """A fault that the user can fix: an exit code, a line that says what is wrong, and optionally a line that says what
    to do."""

    def __init__(self, exit_code: int, message: str, hint: str | None = None):
        super().__init__(message)
        self.exit_code = exit_code
        self.hint = hint


def one_line(error: BaseException) -> str:
    """First line of a foreign exception's text, for a DumpError message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
