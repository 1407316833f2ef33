"""How the programs fail: one exception, one line, and the exit codes that every kvq program shares."""

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_USAGE = 2
EXIT_INPUT = 3
EXIT_NUMERICAL = 4
EXIT_UNSUPPORTED = 5
EXIT_CHECK_FAILED = 6
EXIT_INTERRUPTED = 130
EXIT_CODES = {
    EXIT_DONE: "done, every check passed",
    EXIT_BUG: "a bug in kvq",
    EXIT_USAGE: "wrong flags or arguments",
    EXIT_INPUT: "a file is unreadable, malformed, inconsistent or of another model, or the system refused "
    "(disk full, permission)",
    EXIT_NUMERICAL: "numerical failure: NaN in the data, not converged",
    EXIT_UNSUPPORTED: "unsupported: a version, feature, model or GPU that this build does not know",
    EXIT_CHECK_FAILED: "a check failed",
    EXIT_INTERRUPTED: "interrupted",
}


class KvqError(Exception):
    """A fault that the user can fix: an exit code, what was expected, found and where, and optionally a hint."""

    def __init__(self, exit_code: int, message: str, hint: str | None = None):
        super().__init__(message)
        self.exit_code = exit_code
        self.hint = hint


def bad_input(message: str, hint: str | None = None) -> KvqError:
    return KvqError(EXIT_INPUT, message, hint)


def unsupported(message: str, hint: str | None = None) -> KvqError:
    return KvqError(EXIT_UNSUPPORTED, message, hint)


def usage(message: str, hint: str | None = None) -> KvqError:
    return KvqError(EXIT_USAGE, message, hint)


def one_line(error: BaseException) -> str:
    """First line of a foreign exception's text, for the message of a KvqError."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
