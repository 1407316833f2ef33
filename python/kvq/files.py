"""Files that appear whole or not at all."""

import itertools
import os
import shutil
import stat
from collections.abc import Callable, Iterator
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
    with _temporary(path, target.parent, _make_file) as temporary:
        try:
            _take_mode(temporary, target)
            yield temporary
        except OSError as error:
            raise _cannot_write(path, error) from error
        try:
            _flush(temporary)
            os.replace(temporary, target)
            _flush_folder(target.parent)
        except OSError as error:
            raise _cannot_write(path, error) from error


@contextmanager
def atomic_files(folder: Path) -> Iterator[Path]:
    """Yields a new folder beside `folder`. After the block its files are moved into `folder`, which is made if it is
    missing; if the block fails they are removed."""
    folder = Path(os.path.realpath(folder))
    with _temporary(folder, folder.parent, _make_folder) as temporary:
        yield temporary
        try:
            folder.mkdir(exist_ok=True)
            for file in sorted(temporary.iterdir()):
                _flush(file)
                os.replace(file, folder / file.name)
            _flush_folder(folder)
        except OSError as error:
            raise _cannot_write(folder, error) from error


def _target_of(path: Path) -> Path:
    """The file that a link leads to. A rename would replace a device or a pipe by a plain file."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise bad_input(f"{safe_line(path)}: cannot write: not a regular file")
    return target


@contextmanager
def _temporary(wanted: Path, folder: Path, make: Callable[[Path], None]) -> Iterator[Path]:
    """Makes a file or folder in `folder` by a new name, and removes it after the block if it is still there. The name
    does not grow with that of `wanted`, which may already be as long as a name can be.

    The name is noted before `make` is called, because a signal may raise an exception at any moment after that."""
    temporary = None
    try:
        while temporary is None:
            temporary = folder / f".kvq-{os.getpid()}-{next(_numbers)}.tmp"
            try:
                make(temporary)
            except FileExistsError:
                temporary = None  # a killed process left it behind
            except OSError as error:
                temporary = None
                raise _cannot_write(wanted, error) from error
        yield temporary
    finally:
        if temporary is not None:
            _remove(temporary)


def _make_file(path: Path) -> None:
    """O_EXCL: a file or a link that somebody has put there is not opened."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))


def _make_folder(path: Path) -> None:
    path.mkdir(mode=0o700)


def _take_mode(temporary: Path, target: Path) -> None:
    if target.exists():
        temporary.chmod(stat.S_IMODE(target.stat().st_mode))


def _remove(temporary: Path) -> None:
    if temporary.is_dir():
        shutil.rmtree(temporary, ignore_errors=True)
    else:
        temporary.unlink(missing_ok=True)


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
