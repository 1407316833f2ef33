"""dump_qkv.py on tiny random models of every architecture, and what the tools make of the unusual ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
h5py = pytest.importorskip("h5py")
transformers = pytest.importorskip("transformers", minversion="5.0")

import numpy as np  # noqa: E402
from architectures import ARCHITECTURES, REFUSALS, dump_architecture, make_model, table  # noqa: E402

from kvq.dump import program  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
TOOLS = ROOT / os.environ.get("KVQ_BIN", "build/release/tools")
GOAL = 40


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are too small for more
    yield {name: dump_architecture(name, tmp_path_factory.mktemp(name)) for name in ARCHITECTURES}
    torch.set_num_threads(threads)


def test_each_architecture_is_dumped_with_its_checks_or_refused_for_the_reason_that_the_table_gives(rows):
    faults = []
    for name, row in rows.items():
        reason = REFUSALS.get(name)
        if row.code is not None and (reason is None) != row.works:
            faults.append(f"{name}: exit code {row.code}: {row.errors}")
        if reason is not None and reason not in row.errors:
            faults.append(f"{name}: expected '{reason}', found '{row.errors}'")
    assert not faults, "\n".join(faults)
    assert sum(row.works for row in rows.values()) >= GOAL


def test_the_page_has_the_table_of_these_runs(rows):
    if f"Made with transformers {transformers.__version__}:" not in PAGE:
        pytest.skip("the table is of another version of transformers")
    assert table(list(rows.values())) in PAGE, "run scripts/generate/architectures.py"


# --- what the tables say is in the files, and the tools read it ---


def dumped(name: str, folder: Path) -> Path:
    """A dump with enough tokens to calibrate on."""
    assert dump_architecture(name, folder, tokens=1300, length=130).works
    return folder / "dump.h5"


def run(tool: str, *arguments) -> subprocess.CompletedProcess:
    return subprocess.run([TOOLS / tool, *map(str, arguments)], capture_output=True, text=True, check=True)


def test_a_soft_cap_reaches_the_artifact_and_both_readers(tmp_path):
    dump, artifact = dumped("gemma2", tmp_path), tmp_path / "a.safetensors"
    with h5py.File(dump) as file:
        assert (file.attrs["version"], file.attrs["requires"]) == ("1.2", "logit_softcapping")
        assert all(file[f"layers/{i}"].attrs["logit_softcapping"] == 5.0 for i in (0, 1))
    run("kvq-calibrate", "--model", dump, "--output", artifact, "--method", "oscar")
    from kvq.artifact_reader import load_artifact

    manifest = load_artifact(artifact).manifest
    assert manifest["version"] == "1.3" and manifest["requires"] == ["logit_softcapping"]
    assert [layer["geometry"]["logit_softcapping"] for layer in manifest["layers"]] == [5.0, 5.0]
    run("kvq-inspect", artifact, "--verify")
    read = [sys.executable, ROOT / "scripts" / "read_artifact.py", artifact, "--verify"]
    assert subprocess.run(read, capture_output=True).returncode == 0
    run("kvq-eval", "--model", dump, artifact)


def test_learned_sinks_are_those_of_the_model(tmp_path):
    dump, artifact = dumped("gpt_oss", tmp_path), tmp_path / "a.safetensors"
    model = make_model(ARCHITECTURES["gpt_oss"].config())
    with h5py.File(dump) as file:
        assert file.attrs["requires"] == "sink_logits"
        for index, layer in enumerate(model.model.layers):
            sinks = layer.self_attn.sinks.detach().double().numpy()
            assert np.array_equal(file[f"layers/{index}/sink_logits"][:], sinks)
    run("kvq-calibrate", "--model", dump, "--output", artifact, "--method", "oscar")
    run("kvq-inspect", artifact, "--verify")
    run("kvq-eval", "--model", dump, artifact)


def test_blocks_of_layers_without_rope_are_warned_of(tmp_path):
    options = ("--output", tmp_path / "a.safetensors", "--method", "block-gtq")
    said = run("kvq-calibrate", "--model", dumped("smollm3", tmp_path), *options).stderr
    assert "warning: a layer without RoPE (1): the blocks that share a width are neighboring channels" in said


# --- refusals ---


def test_a_model_that_nothing_fits_is_refused_with_what_was_tried(tmp_path, capsys, monkeypatch):
    """Its RoPE turns by twice the angle that its frequencies say."""
    from transformers.models.arcee import modeling_arcee

    from kvq.dump.families import FAMILIES

    rotate = modeling_arcee.apply_rotary_pos_emb
    monkeypatch.delitem(FAMILIES, "arcee")
    monkeypatch.setattr(modeling_arcee, "apply_rotary_pos_emb", lambda q, k, c, s: rotate(*rotate(q, k, c, s), c, s))
    make_model(ARCHITECTURES["arcee"].config()).save_pretrained(tmp_path / "model")
    argv = [str(tmp_path / "model"), "--output", str(tmp_path / "d.h5"), "--synthetic-tokens", "60", "--quiet"]
    assert program.main(argv) == 5
    said = capsys.readouterr().err
    assert "model type 'arcee' is not known" in said and "layer 0" in said and "times the allowed rounding" in said
    assert not (tmp_path / "d.h5").exists()


def test_a_model_that_the_table_does_not_know_is_dumped_if_its_checks_pass(tmp_path, monkeypatch):
    from kvq.dump.families import FAMILIES

    monkeypatch.delitem(FAMILIES, "cohere")
    assert dump_architecture("cohere", tmp_path).rope == "interleaved"


def test_curvature_behind_a_norm_is_refused(tmp_path, capsys):
    make_model(ARCHITECTURES["bitnet"].config()).save_pretrained(tmp_path / "model")
    argv = [str(tmp_path / "model"), "--output", str(tmp_path / "d.h5"), "--synthetic-tokens", "60", "--curvature"]
    assert program.main(argv) == 5
    assert "between attention and its output projection" in capsys.readouterr().err
