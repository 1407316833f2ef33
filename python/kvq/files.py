"""Files that appear whole or not at all."""

import itertools
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import KvqError, bad_input
from .text import safe_line

_numbers = itertools.count()


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields the path of a new, empty file in the same folder. After the block it is flushed to disk and renamed to
    `path`; if the block fails it is removed, and `path` stays as it was. An existing file keeps its mode, and a link
    stays a link to the new content."""
    target = _target_of(path)
    temporary = _new_file(path, target)
    try:
        try:
            yield temporary
        except OSError as error:
            raise _cannot_write(path, error) from error
        try:
            _flush(temporary)
            os.replace(temporary, target)
            _flush_folder(target.parent)
        except OSError as error:
            raise _cannot_write(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_files(folder: Path) -> Iterator[Path]:
    """Yields a new folder beside `folder`. After the block its files are moved into `folder`, which is made if it is
    missing; if the block fails they are removed."""
    folder = Path(os.path.realpath(folder))
    try:
        temporary = Path(tempfile.mkdtemp(prefix=".kvq-", suffix=".tmp", dir=folder.parent))
    except OSError as error:
        raise _cannot_write(folder, error) from error
    try:
        yield temporary
        try:
            folder.mkdir(exist_ok=True)
            for file in sorted(temporary.iterdir()):
                _flush(file)
                os.replace(file, folder / file.name)
            _flush_folder(folder)
        except OSError as error:
            raise _cannot_write(folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _target_of(path: Path) -> Path:
    """The file that a link leads to. A rename would replace a device or a pipe by a plain file."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise bad_input(f"{safe_line(path)}: cannot write: not a regular file")
    return target


def _new_file(path: Path, target: Path) -> Path:
    """O_EXCL: a file or a link that somebody has put there is not opened. The name does not grow with the target's,
    which may already be as long as a name can be."""
    while True:
        temporary = target.with_name(f".kvq-{os.getpid()}-{next(_numbers)}.tmp")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            continue  # a killed process left it behind
        except OSError as error:
            raise _cannot_write(path, error) from error
        try:
            if target.exists():
                os.fchmod(descriptor, stat.S_IMODE(target.stat().st_mode))
        finally:
            os.close(descriptor)
        return temporary


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush_folder(folder: Path) -> None:
    """A folder may be writable and not readable, or a file system may not flush one; the file itself is on disk."""
    try:
        _flush(folder)
    except OSError:
        pass


def _cannot_write(path: Path, error: OSError) -> KvqError:
    return bad_input(f"{safe_line(path)}: cannot write: {error.strerror or error}")
