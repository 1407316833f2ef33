"""Files of the scripts appear whole or not at all, and hostile neighbors in their folder change nothing."""

import os
import stat

import pytest

from kvq import files
from kvq.errors import KvqError
from kvq.files import atomic_files, atomic_path


def write(path, text="new"):
    with atomic_path(path) as temporary:
        temporary.write_text(text)


def test_a_file_appears_whole(tmp_path):
    with atomic_path(tmp_path / "out") as temporary:
        temporary.write_text("half")
        assert temporary.parent == tmp_path and not (tmp_path / "out").exists()
        assert stat.S_IMODE(temporary.stat().st_mode) & 0o111 == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and (tmp_path / "out").read_text() == "half"


def test_a_failure_leaves_what_was_there(tmp_path):
    (tmp_path / "out").write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_path(tmp_path / "out") as temporary:
        temporary.write_text("new")
        1 / 0  # noqa: B018
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and (tmp_path / "out").read_text() == "old"


def test_a_link_in_place_of_the_temporary_file_is_not_followed(tmp_path, monkeypatch):
    """Somebody who guesses the name cannot let the program write to another file."""
    (tmp_path / "secret").write_text("keep")
    monkeypatch.setattr(files, "_numbers", iter(range(10)))
    for number in range(3):
        (tmp_path / f".kvq-{os.getpid()}-{number}.tmp").symlink_to(tmp_path / "secret")
    write(tmp_path / "out")
    assert (tmp_path / "secret").read_text() == "keep" and (tmp_path / "out").read_text() == "new"
    assert not (tmp_path / "out").is_symlink()


def test_links_are_followed_and_modes_kept(tmp_path):
    (tmp_path / "folder").mkdir()
    target = tmp_path / "folder/target"
    target.write_text("old")
    target.chmod(0o640)
    (tmp_path / "link").symlink_to(target)
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["target"]


def test_devices_pipes_and_folders_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, "/dev/null"):
        with pytest.raises(KvqError, match="not a regular file"):
            write(path)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_long_names_and_odd_names_are_written(tmp_path):
    for name in ("n" * 255, "-dash", "line\nfeed", "\udcff"):
        write(tmp_path / name)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_missing_folder_is_an_error_in_one_line(tmp_path):
    with pytest.raises(KvqError) as error:
        write(tmp_path / "no\x1bfolder/out")
    assert str(error.value) == f"{tmp_path}/no\\x1bfolder/out: cannot write: No such file or directory"


@pytest.mark.parametrize(("atomic", "maker"), [(atomic_path, "open"), (atomic_files, "mkdir")])
def test_a_signal_just_after_the_temporary_is_made_leaves_nothing(atomic, maker, tmp_path, monkeypatch):
    make = getattr(os, maker)

    def make_and_stop(*arguments, **options):
        make(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, maker, make_and_stop)
    with pytest.raises(KeyboardInterrupt), atomic(tmp_path / "out"):
        pytest.fail("not reached")
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    calls = []
    flush, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("fsync") or flush(descriptor))
    monkeypatch.setattr(os, "replace", lambda a, b: calls.append("replace") or replace(a, b))
    write(tmp_path / "out")
    assert calls == ["fsync", "replace", "fsync"]


def test_a_folder_of_files_appears_after_the_block(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/other").write_text("stays")
    with atomic_files(tmp_path / "out") as temporary:
        (temporary / "a").write_text("1")
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["other"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a", "other"]
    with pytest.raises(ZeroDivisionError), atomic_files(tmp_path / "new") as temporary:
        (temporary / "a").write_text("1")
        1 / 0  # noqa: B018
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
