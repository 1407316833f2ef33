"""Files that appear whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import bad_input


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder. The file is renamed to `path` after the block, and removed if the
    block fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise bad_input(f"{path}: cannot write: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
