"""One scale a row of mixed widths, or one for each segment (`--scales`), and budgets that weigh bytes (`--weigh`)."""

import json

import numpy as np
import pytest
from calibrations import GTQ, KVQ, read, refused, rows_of, verified
from kvq_tools import calibrate, run, succeed

from kvq.artifact_reader import load_artifact
from kvq.packing import decode, encode

LAYER = ("--layers", 1)


def allocations(artifact) -> list[dict]:
    return [layer[side]["allocation"] for layer in artifact.manifest["layers"] for side in "kv"]


@pytest.mark.parametrize(
    ("flags", "scope"),
    [
        ((*KVQ,), "row"),
        ((*KVQ, "--scales", "segment"), None),
        ((*GTQ, "--v-allocation", "channel"), None),
        ((*GTQ, "--v-allocation", "channel", "--scales", "row"), "row"),
        ((*GTQ, "--v-allocation", "channel", "--scales", "row", "--coder", "symmetric"), "row"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_scope_of_scales(short, tmp_path, flags, scope):
    artifact = verified(short, tmp_path / "out", *LAYER, *flags)
    assert [a.get("scale_scope") for a in allocations(artifact)] == [scope, scope]
    assert ("row_scale" in artifact.manifest["requires"]) == (scope == "row")
    version = artifact.manifest["version"]
    if "integer_search" in artifact.manifest["requires"]:
        assert version == "1.5"
    else:
        assert (version == "1.4") == (scope == "row")
    assert artifact.manifest["calibration"]["options"].get("scales") == scope
    for layer in artifact.layers.values():
        for plan in layer.sides.values():
            for head in range(2):
                scheme = plan.scheme_of(head)
                assert scheme.scale_count(plan.dim) == (1 if scope == "row" else len(scheme.parts))


def test_gains_are_the_root_mean_squares_of_segments(short, tmp_path):
    """Of the rows that the coder sees, over all tokens of the calibration."""
    flags = (*GTQ, "--v-allocation", "channel", "--scales", "row", "--center", "kv", "--bits", 2.5)
    artifact, layer = verified(short, tmp_path / "out", *LAYER, *flags), read(short, 1)
    for side, plan in artifact.layers[1].sides.items():
        x = rows_of(layer, side)
        for head in range(2):
            energy = (plan.rotate(x[head], head).astype(np.float64) ** 2).mean(axis=0)
            widths, gains = plan.tensors["channel_bits"][head], plan.tensors["segment_gain"][head]
            for width in range(1, 9):
                channels = energy[widths == width]
                assert gains[width - 1] == pytest.approx(np.sqrt(channels.mean()) if len(channels) else 1, rel=1e-4)


def test_rows_keep_their_length(short, tmp_path):
    artifact, layer = verified(short, tmp_path / "out", *LAYER, *KVQ), read(short, 1)
    for side, plan in artifact.layers[1].sides.items():
        x = rows_of(layer, side)
        for head in range(2):
            x_rot = plan.rotate(x[head], head)
            scheme = plan.scheme_of(head)
            kept = np.array(scheme.widths) > 0
            decoded = decode(encode(x_rot, scheme), scheme)
            lengths = [np.linalg.norm(rows[:, kept].astype(np.float64), axis=1) for rows in (x_rot, decoded)]
            np.testing.assert_allclose(lengths[1], lengths[0], rtol=2**-10)


def test_a_budget_in_bits_weighs_bytes(short, tmp_path):
    """Two bits allow 34 bytes a row of 128 channels, whatever the scope of the scales."""
    for scope in ("row", "segment"):
        path = calibrate(short, tmp_path / scope, "--layers", "0,1", *KVQ, "--scales", scope)
        artifact = load_artifact(path)
        rows = [plan.page_row_bytes for layer in artifact.layers.values() for plan in layer.sides.values()]
        assert np.mean(rows) <= 34
        budget = artifact.manifest["calibration"]["budget"]
        assert budget["mean_bytes"] == pytest.approx(2 * 2 * np.mean(rows)) and budget["spent"] <= 2
    bits = load_artifact(
        calibrate(short, tmp_path / "bits", "--layers", "0,1", *KVQ, "--scales", "segment", "--weigh", "bits")
    )
    assert np.mean([plan.page_row_bytes for layer in bits.layers.values() for plan in layer.sides.values()]) > 36


def test_uniform_rows_are_whole_words_and_a_scale(short, tmp_path):
    artifact = load_artifact(calibrate(short, tmp_path / "out", "--layers", "0,1", *KVQ, "--uniform-layout"))
    for side in "kv":
        sizes = {layer.sides[side].page_row_bytes for layer in artifact.layers.values()}
        assert len(sizes) == 1 and sizes.pop() % 4 == 2


def test_refusals(short):
    symmetric = (*GTQ, "--coder", "symmetric", "--scale-rule", "absmax")
    refused((*symmetric, "--scales", "row"), "--model", short)
    refused((*KVQ, "--scales", "rows"), "--model", short)
    refused((*KVQ, "--budget-bytes", 100, "--weigh", "bits"), "--model", short)
    refused(("--method", "tq-mse", "--scales", "row"), "--model", short)


def test_tools_say_the_scope(short, tmp_path):
    paths = [calibrate(short, tmp_path / scope, *LAYER, *KVQ, "--scales", scope) for scope in ("row", "segment")]
    shown = [succeed("kvq-inspect", path, "--layer", 1).stdout for path in paths]
    assert "one scale," in shown[0] and "a scale for each width," in shown[1]
    details = json.loads(succeed("kvq-inspect", paths[0], "--layer", 1, "--json").stdout)
    assert "segment_gain" in json.dumps(details)
    assert "/row" in run("kvq-diff", *paths, "--json").stdout
