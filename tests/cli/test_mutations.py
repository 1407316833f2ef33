"""No changed artifact passes kvq-diff: wrong hashes, flipped bits, changed words, lost and zeroed golden rows, and
facts that the file says twice and no longer alike."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from artifact_file import ArtifactFile
from kvq_tools import ROOT, calibrate, run
from test_gate import gate, git

from kvq import read_artifact
from kvq.artifact_reader import load_artifact
from kvq.errors import KvqError

INPUT, CHECK_FAILED = 3, 6
SEED = 20260
MADE = {
    "oscar": ("--method", "oscar", "--center", "kv", "--golden-tokens", 3),
    "blocks": ("--method", "block-gtq", "--bits-k", 2.5, "--golden-tokens", 3),
    "klt": ("--method", "block-gtq", "--transform", "klt", "--v-allocation", "channel", "--golden-tokens", 3),
}
Change = Callable[[ArtifactFile], None]


def manifest(*path, value) -> Change:
    def change(file: ArtifactFile) -> None:
        owner = file.tree
        for key in path[:-1]:
            owner = owner[key]
        owner[path[-1]] = value(owner[path[-1]]) if callable(value) else value

    return change


def words(version: str, *requires: str) -> Change:
    def change(file: ArtifactFile) -> None:
        file.tree |= {"version": version, "requires": list(requires)}
        file.fit_words()

    return change


def metadata(key: str, value: str | None) -> Change:
    def change(file: ArtifactFile) -> None:
        file.metadata.pop(key)
        if value is not None:
            file.metadata[key] = value

    return change


def tensor(name: str, edit: Callable[[np.ndarray], np.ndarray]) -> Change:
    def change(file: ArtifactFile) -> None:
        file.tensors[name].values = np.ascontiguousarray(edit(file.array(name).copy()))

    return change


def first_head(edit: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    def apply(values: np.ndarray) -> np.ndarray:
        values[0] = edit(values[0])
        return values

    return apply


def flip(place: int) -> Change:
    """Flips a random bit of a random tensor."""

    def change(file: ArtifactFile) -> None:
        own = random.Random(SEED + place)
        name = own.choice(sorted(file.tensors))
        raw = file.array(name).reshape(-1).view(np.uint8)
        raw[own.randrange(len(raw))] ^= np.uint8(1 << own.randrange(8))

    return change


def drop_golden(*layers: int) -> Change:
    def change(file: ArtifactFile) -> None:
        for layer in layers:
            del file.tree["layers"][layer]["golden"]
            for name in [name for name in file.tensors if name.startswith(f"layers.{layer}.golden.")]:
                del file.tensors[name]

    return change


def hide_golden(file: ArtifactFile) -> None:
    """The manifest no longer announces the rows of layer 0; their tensors stay."""
    del file.tree["layers"][0]["golden"]


def fewer_golden(file: ArtifactFile) -> None:
    """One token in place of three, with the output that belongs to it missing."""
    file.tree["layers"][1]["golden"]["count"] = 1
    for name in [name for name in file.tensors if name.startswith("layers.1.golden.")]:
        if not name.endswith((".q", ".out")):
            file.tensors[name].values = file.array(name)[:1].copy()


def swap_golden(file: ArtifactFile) -> None:
    """The rows of layer 0 in layer 1, and the reverse."""
    for name in [name for name in file.tensors if name.startswith("layers.0.golden.")]:
        other = name.replace("layers.0", "layers.1")
        file.tensors[name], file.tensors[other] = file.tensors[other], file.tensors[name]


def swap_sources(file: ArtifactFile) -> None:
    """Two channels of different widths change places in channel_order."""
    widths, order = file.array("layers.0.k.channel_bits")[0], file.array("layers.0.k.channel_order")[0]
    last = int(np.flatnonzero(widths < widths[0])[0])
    order[[0, last]] = order[[last, 0]]


def half(values: np.ndarray) -> np.ndarray:
    return values * values.dtype.type(0.5)


K, V, ROPE = ("layers", 0, "k"), ("layers", 0, "v"), ("layers", 0, "geometry", "rope")
GOLDEN = ("k", "v", "q", "k_bytes", "v_bytes", "k_firm", "v_firm", "out")
# (file, what, change, whether the content hash is made to fit)
MUTATIONS: list[tuple[str, str, Change, bool]] = [
    ("oscar", "hash of zeros", metadata("kvq.content_hash", "xxh3-128:" + "0" * 32), False),
    ("oscar", "no hash", metadata("kvq.content_hash", None), False),
    ("oscar", "empty hash", metadata("kvq.content_hash", ""), False),
    ("oscar", "hash of another kind", metadata("kvq.content_hash", "sha256:" + "0" * 64), False),
    *((name, f"bit {place}", flip(place), False) for place in range(8) for name in MADE),
    ("oscar", "seed", manifest("calibration", "seed", value=7), False),
    ("oscar", "tokens", manifest("calibration", "tokens", value=9), False),
    ("oscar", "clip, old hash", manifest(*K, "clip_ratio", 0, value=0.5), False),
    ("oscar", "windows, old hash", manifest("windows", "sink_tokens", value=1), False),
    ("oscar", "model name", manifest("model", "name", value="other"), False),
    ("oscar", "error", manifest(*K, "error", "after", value=1e-9), False),
    *(
        (name, f"golden {part} of zeros", tensor(f"layers.0.golden.{part}", np.zeros_like), True)
        for part in GOLDEN
        for name in ("oscar", "blocks")
    ),
    ("oscar", "no golden rows", drop_golden(0, 1), True),
    ("oscar", "no golden rows of a layer", drop_golden(1), True),
    ("oscar", "fewer golden tokens", fewer_golden, True),
    ("oscar", "golden rows of another layer", swap_golden, True),
    ("oscar", "hidden golden rows", hide_golden, True),
    ("klt", "no golden rows", drop_golden(0, 1), True),
    ("oscar", "rotation transposed", tensor("layers.0.k.rotation", lambda r: r.transpose(0, 2, 1)), True),
    ("oscar", "rotation of another head", tensor("layers.0.k.rotation", lambda r: r[::-1]), True),
    ("oscar", "rotation by half", tensor("layers.0.v.rotation", first_head(half)), True),
    ("oscar", "eigenbasis reversed", tensor("layers.0.k.eigenbasis", first_head(lambda u: u[:, ::-1])), True),
    ("oscar", "eigenbasis by half", tensor("layers.0.v.eigenbasis", first_head(half)), True),
    ("oscar", "spectrum reversed", tensor("layers.0.k.spectrum", lambda s: s[:, ::-1]), True),
    ("oscar", "spectrum rolled", tensor("layers.0.v.spectrum", first_head(lambda s: np.roll(s, 1))), True),
    ("oscar", "spectrum negative", tensor("layers.0.k.spectrum", lambda s: -s[:, ::-1]), True),
    ("oscar", "recipe", manifest(*K, "rotation", "recipe", value="U*P"), True),
    ("oscar", "order", manifest(*K, "rotation", "order", value=2), True),
    ("oscar", "clip", manifest(*K, "clip_ratio", 0, value=0.3), True),
    ("oscar", "center by half", tensor("layers.0.k.center", half), True),
    ("oscar", "feature without use", words("1.1", "trellis"), True),
    ("oscar", "version", words("1.0"), True),
    ("oscar", "frequencies", manifest(*ROPE, "inv_freq", value=lambda own: own[::-1]), True),
    ("oscar", "negative frequency", manifest(*ROPE, "inv_freq", 0, value=-1.0), True),
    ("oscar", "layout none", manifest(*ROPE, "layout", value="none"), True),
    ("oscar", "softmax scale", manifest("layers", 0, "geometry", "softmax_scale", value=lambda own: 2 * own), True),
    ("oscar", "windows", manifest("windows", "recent_tokens", value=1), True),
    ("blocks", "block_bits reversed", tensor("layers.0.k.block_bits", first_head(lambda b: b[::-1])), True),
    ("blocks", "block_bits of zeros", tensor("layers.0.k.block_bits", np.zeros_like), True),
    ("blocks", "channel_order reversed", tensor("layers.0.k.channel_order", lambda o: o[:, ::-1]), True),
    ("blocks", "sources swapped", swap_sources, True),
    ("blocks", "layout", manifest(*ROPE, "layout", value="interleaved"), True),
    ("blocks", "recipe", manifest(*K, "rotation", "recipe", value="U*G*Haar"), True),
    ("blocks", "version", words("1.0", "codebook", "mixed_widths"), True),
    ("klt", "inverse transposed", tensor("layers.0.k.inverse", lambda a: a.transpose(0, 2, 1)), True),
    ("klt", "letter", manifest(*V, "rotation", "recipe", value=lambda own: "D" + own[1:]), True),
    ("klt", "condition", manifest(*K, "transform", "condition", 0, value=lambda own: 1.01 * own), True),
]


@pytest.fixture(scope="module")
def made(make_dump, tmp_path_factory) -> dict[str, Path]:
    shape = {"tokens": 60, "sequences": 2, "layers": 2, "head_dim": 16}
    dump = make_dump(**shape, outlier_channels=1, query_spectrum=0.8, channel_means=0.5)
    folder = tmp_path_factory.mktemp("made")
    return {name: calibrate(dump, folder / f"{name}.safetensors", *flags) for name, flags in MADE.items()}


def diff(*arguments: object) -> tuple[int, list[str]]:
    """(exit code, failed rules with the worst place)"""
    result = run("kvq-diff", "--json", *arguments)
    if result.code not in (0, CHECK_FAILED):
        assert result.stdout == "" and "kvq-diff: error: " in result.stderr
        return result.code, [result.stderr]
    checks = [check for check in json.loads(result.stdout)["checks"] if check["outcome"] == "failed"]
    assert (result.code == 0) == (not checks)
    return result.code, [f"{check['rule']} {check['worst'].get('where', '')}" for check in checks]


def test_there_are_as_many_as_attackers_tried():
    assert len(MUTATIONS) >= 80 and len({row[:2] for row in MUTATIONS}) == len(MUTATIONS)


def test_unchanged_files_pass(made):
    for path in made.values():
        assert diff(path, path) == (0, [])


def test_no_changed_file_passes(made, tmp_path):
    path, passed = tmp_path / "changed.safetensors", []
    for name, what, change, fits in MUTATIONS:
        file = ArtifactFile.read(made[name])
        change(file)
        file.write(path, fits)
        code, findings = diff(made[name], path)
        named = any(finding.split("<")[0] in FINDINGS for finding in findings)
        if code not in (INPUT, CHECK_FAILED) or (code == CHECK_FAILED and not named):
            passed.append((name, what, code, findings))
        if not fits and code == CHECK_FAILED:
            assert any(finding.startswith("verification<=0 new: ") for finding in findings), (name, what, findings)
            assert diff(path, made[name])[1][0].startswith("verification<=0 old: ")
    assert not passed


FINDINGS = ("verification", "golden_rows.lost", "geometry", "windows")


def test_no_choice_of_rules_passes_a_damaged_file(made, tmp_path):
    file = ArtifactFile.read(made["oscar"])
    file.array("layers.0.k.spectrum")[0, :2] = file.array("layers.0.k.spectrum")[0, 1::-1]
    path = file.write(tmp_path / "changed.safetensors")
    code, findings = diff(made["oscar"], path, "--no-default-rules", "--fail-on", "windows<=0")
    assert code == CHECK_FAILED and findings == [f for f in findings if "new: spectra: layer 0 k: head 0" in f]


def test_every_tool_refuses_a_changed_file(made, tmp_path):
    """Only --verify opens the file, to say what is wrong."""
    file = ArtifactFile.read(made["oscar"])
    file.array("layers.0.k.center")[0, 0] += np.float32(1e-3)
    path = file.write(tmp_path / "changed.safetensors", fit_hash=False)
    dump = ROOT / "sample_data/evaluation.h5"
    for command in (
        ("kvq-inspect", path),
        ("kvq-inspect", path, "--json"),
        ("kvq-inspect", path, "--html", tmp_path / "report.html"),
        ("kvq-inspect", made["oscar"], "--compare", path),
        ("kvq-eval", "--model", dump, path),
    ):
        result = run(*command)
        assert result.code == INPUT and result.stdout == "", result
        assert f"error: {path}: content hash: expected xxh3-128:" in result.stderr and "hint: " in result.stderr
    result = run("kvq-inspect", path, "--verify")
    assert result.code == CHECK_FAILED and "FAILED  content hash: expected xxh3-128:" in result.stdout
    assert "ok      orthogonality" in result.stdout


def test_the_second_reader_refuses_a_changed_file(made, tmp_path, capsys):
    file = ArtifactFile.read(made["blocks"])
    file.array("layers.0.k.block_energy")[0, 0] *= 2
    path = file.write(tmp_path / "changed.safetensors", fit_hash=False)
    assert read_artifact.main([str(path)]) == INPUT
    found = capsys.readouterr()
    assert found.out == "" and "content hash: expected" in found.err
    with pytest.raises(KvqError, match="content hash: expected"):
        load_artifact(path)
    assert read_artifact.main([str(path), "--verify"]) == CHECK_FAILED
    assert "content hash: FAILED" in capsys.readouterr().out


def test_the_gate_names_what_is_damaged(made, tmp_path):
    """A flipped bit, and golden rows that are gone, in a repository of artifacts."""
    repository = tmp_path / "repository"
    repository.mkdir()
    for name in ("flipped", "lost"):
        shutil.copy(made["oscar"], repository / f"{name}.safetensors")
    git(repository, "init", "--initial-branch", "main")
    git(repository, "add", ".")
    git(repository, "commit", "-m", "base")
    for name, change, fits in (("flipped", flip(1), False), ("lost", drop_golden(0), True)):
        file = ArtifactFile.read(made["oscar"])
        change(file)
        file.write(repository / f"{name}.safetensors", fits)
    assert gate(repository, "main").returncode == CHECK_FAILED
    summary = (repository / "kvq-gate/summary.md").read_text()
    assert "new: content hash: expected xxh3-128:" in summary and "golden\\_rows.lost" in summary
