"""A count of one stands before a singular: "1 layer of 6"."""

import re

import pytest
from dumps import edited
from kvq_tools import calibrate, run, succeed

PLURAL = re.compile(r"(?<![\d.])1 (\w+-?\w* )?(layers|tokens|sequences|heads|kinds)\b")


@pytest.fixture(scope="module")
def one(make_dump):
    """A dump of one layer, one sequence and one KV head."""
    return make_dump(tokens=40, sequences=1, layers=1, head_dim=16, kv_heads=1, q_heads=2)


@pytest.fixture(scope="module")
def part(one, tmp_path_factory):
    """The same layer of a model that has six."""

    def of_six(file) -> None:
        file.attrs["num_layers"] = 6

    return edited(one, tmp_path_factory.mktemp("part") / "dump.h5", of_six)


def said(result) -> str:
    text = " ".join((result.stdout + result.stderr).split())
    assert not PLURAL.search(text), text
    return text


def test_what_is_calibrated(one, part, tmp_path):
    assert said(run("kvq-calibrate", "--model", one, "--dry-run")).startswith("1 layer, 40 tokens in 1 sequence; ")
    method = ("--method", "block-gtq", "--min-bits", 2, "--max-bits", 2)
    text = said(succeed("kvq-calibrate", "--model", part, "-o", tmp_path / "a", "--context", 1, *method))
    assert " at 1 token (" in text
    text = said(succeed("kvq-inspect", tmp_path / "a"))
    assert " 1 layer of 6, without " in text and " 40 tokens in 1 sequence, " in text
    assert " 1 kind, entropy 0.00 bits " in said(succeed("kvq-inspect", tmp_path / "a", "--layer", 0))
    assert " 1 token, windows included: " in said(succeed("kvq-inspect", tmp_path / "a", "--layout", "--context", 1))


def test_what_is_not_there(one, tmp_path):
    artifact = calibrate(one, tmp_path / "a")
    for command, expected in {
        ("kvq-calibrate", "--model", one, "--exact-layers", 3): "(the file has 1 layer, 0 to 0)",
        ("kvq-eval", "--model", one, "--scheme", "bf16", "--layers", 3): "(the dump has 1 layer, 0 to 0)",
        ("kvq-inspect", artifact, "--layer", 3): "the artifact has 1 layer, 0 to 0",
        ("kvq-inspect", artifact, "--layer", 0, "--head", 3): "layer 0 has 1 key/value head, 0 to 0",
    }.items():
        result = run(*command)
        assert result.code == 2 and expected in said(result)


def test_what_is_measured(part):
    text = said(
        succeed("kvq-eval", "--model", part, "--scheme", "kivi-4", "--scheme", "kivi-2", "--metric", "k_rel_mse")
    )
    assert "the dump has 1 layer of the model's 6, without 1-5" in text
    assert "kivi-2 wins 0/1 layer against kivi-4" in text
