"""Room on the disk: asked for before the model runs, and one line if it runs out all the same."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import EXIT_INPUT, KvqError

ERRNO = re.compile(r"errno = (\d+)")  # in the text of HDF5's errors
# Of an OSError without such a text: what only writing raises.
OF_WRITING = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def format_bytes(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"


def free_bytes(folder: Path) -> int:
    """What a file in `folder` may take: free space, or the limit on the size of a file if that is less."""
    free = shutil.disk_usage(folder).free
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return free if limit == resource.RLIM_INFINITY else min(free, limit)
    except ImportError:  # no such limits on this system
        return free


def refuse_too_little_space(output: Path, needed: int) -> None:
    free = free_bytes(output.parent)
    if needed > free:
        raise KvqError(
            EXIT_INPUT,
            f"{output}: the dump takes {format_bytes(needed)}, {format_bytes(free)} are free in its folder",
            "dump fewer tokens (--tokens, --windows) or layers (--layers), or write to another disk",
        )


@contextmanager
def disk_errors(output: Path, lost: str = "no dump was written") -> Iterator[None]:
    """Turns HDF5's errors of the system, such as a full disk, into one line that names `output`.
    @param lost  what the error costs"""
    try:
        yield
    except (OSError, RuntimeError) as error:
        found = ERRNO.search(str(error))
        number = int(found[1]) if found else getattr(error, "errno", None)
        if not found and number not in OF_WRITING:
            raise
        raise KvqError(EXIT_INPUT, f"{output}: cannot write: {os.strerror(number)}", lost) from error
