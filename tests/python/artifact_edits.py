"""Reads artifacts from bytes, runs the reader as a program, and edits that spoil an artifact before it is written.

An edit is a function of the manifest and the tensors."""

from collections.abc import Callable

import artifact_builder as build
import numpy as np
import pytest

from kvq import read_artifact
from kvq.artifact import Artifact
from kvq.artifact_reader import parse_artifact
from kvq.errors import EXIT_INPUT, KvqError
from kvq.safetensors_file import SafetensorsFile

Edit = Callable[[dict, dict[str, np.ndarray]], None]


def parse(content: bytes) -> Artifact:
    return parse_artifact(SafetensorsFile(content, "test"))


def run(capsys, *arguments) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)"""
    code = read_artifact.main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def edit(*path, value) -> Edit:
    """Changes the manifest at a path; the value `...` deletes."""

    def apply(tree, tensors):
        for key in path[:-1]:
            tree = tree[key]
        if value is ...:
            del tree[path[-1]]
        else:
            tree[path[-1]] = value

    return apply


def edit_layers(*path, value) -> Edit:
    """Changes the layers of the manifest, as `edit` does."""
    return edit("layers", *path, value=value)


def tensor(name: str, value: np.ndarray | None = None) -> Edit:
    """Replaces a tensor, or deletes it."""

    def apply(tree, tensors):
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value

    return apply


def both(*changes: Edit) -> Edit:
    def apply(tree, tensors):
        for change in changes:
            change(tree, tensors)

    return apply


def check_refused(tree: dict, tensors: dict[str, np.ndarray], spoil: Edit) -> None:
    """Asserts that the reader refuses what the edit makes, in one line."""
    spoil(tree, tensors)
    with pytest.raises(KvqError) as error:
        parse(build.to_bytes(tree, tensors))
    assert error.value.exit_code == EXIT_INPUT, str(error.value)
    assert "\n" not in str(error.value)
