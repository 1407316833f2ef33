"""A progress bar with the time left on a terminal; one plain line every tenth elsewhere."""

import sys
import time


def format_seconds(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


class Progress:
    """Progress bar over `total` units of work under one `label`; writes to stderr unless `quiet`.

    Elsewhere than on a terminal, lines are at least `seconds_between` apart.
    """

    BAR_WIDTH = 30
    REDRAW_SECONDS = 0.2

    def __init__(self, label: str, total: int, quiet: bool = False, stream=None, seconds_between: float = 0.0):
        self.label, self.total, self.quiet = label, max(1, total), quiet
        self.stream, self.seconds_between = stream or sys.stderr, seconds_between
        self.is_terminal = self.stream.isatty()
        self.done = 0
        self.start = time.monotonic()
        self.last_draw = self.start if seconds_between else 0.0
        self.last_tenth = 0

    def advance(self, units: int) -> None:
        self.done += units
        if self.quiet:
            return
        if self.is_terminal:
            self._draw_bar()
        else:
            self._print_tenth()

    def close(self) -> None:
        if not self.quiet and self.is_terminal:
            self.stream.write("\r\x1b[K")
            self.stream.flush()

    def _status(self) -> str:
        elapsed = time.monotonic() - self.start
        left = elapsed * (self.total - self.done) / max(1, self.done)
        return f"{100 * self.done // self.total:3d}%  {format_seconds(left)} left"

    def _draw_bar(self) -> None:
        now = time.monotonic()
        if now - self.last_draw < self.REDRAW_SECONDS and self.done < self.total:
            return
        self.last_draw = now
        filled = self.BAR_WIDTH * self.done // self.total
        bar = "#" * filled + "." * (self.BAR_WIDTH - filled)
        self.stream.write(f"\r{self.label} [{bar}] {self._status()}\x1b[K")
        self.stream.flush()

    def _print_tenth(self) -> None:
        tenth = 10 * self.done // self.total
        now = time.monotonic()
        if tenth > self.last_tenth and now - self.last_draw >= self.seconds_between:
            self.last_tenth, self.last_draw = tenth, now
            print(f"{self.label}: {self._status().strip()}", file=self.stream, flush=True)
