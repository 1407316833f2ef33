"""How the program fails: one exception, and the exit codes every kvq program shares."""

EXIT_DONE = 0
EXIT_USAGE = 2
EXIT_INPUT = 3
EXIT_NUMERICAL = 4
EXIT_UNSUPPORTED = 5


class DumpError(Exception):
    """A fault the user can act on: an exit code, one line that says what is wrong, perhaps one that says what to do."""

    def __init__(self, exit_code: int, message: str, hint: str | None = None):
        super().__init__(message)
        self.exit_code = exit_code
        self.hint = hint


def one_line(error: BaseException) -> str:
    """The first line of a foreign exception's text, for use inside a DumpError message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
