"""Methods and their flags on dumps of every geometry: the errors that an artifact states are those that numpy measures
with the second reader."""

from pathlib import Path

import pytest
import reference
from calibrations import GEOMETRIES, GTQ, JOINT, KVQ, SAW, SMALL, TQ, kept_tokens, measured_error, read, verified
from kvq_tools import calibrate

VARIANTS = {
    "block-gtq": GTQ,
    "channels": (*GTQ, "--bits", 2.5, "--k-allocation", "channel", "--v-allocation", "channel"),
    "dropped channels": (*GTQ, "--min-bits", 0, "--max-bits", 4, "--v-allocation", "channel", "--center", "kv"),
    "shared": (*GTQ, "--share", "layer", "--v-allocation", "channel"),
    "whole head": (*GTQ, "--k-allocation", "none", "--bits-v", 3),
    "trellis": (*GTQ, "--coder", "trellis", "--mixing", "hadamard"),
    "symmetric": (*GTQ, "--coder", "symmetric", "--scale-rule", "least_squares", "--scale-type", "bf16"),
    "fitted": (*GTQ, "--codebook", "fitted", "--bits", 3),
    "tq-mse": TQ,
    "tq-mse rms": (*TQ, "--mixing", "hadamard", "--scale-rule", "rms", "--bits", 4),
    "plain trellis": ("--method", "plain", "--coder", "trellis", "--memory", 2, "--bits", 3),
    "oscar lloyd-max": ("--codebook", "lloyd-max", "--center", "kv"),
    "random fitted": ("--method", "random", "--codebook", "fitted", "--share", "layer"),
    "kmeans": ("--kmeans", 5),
    "kmeans joint after": (*SAW, "--kmeans", 4, "--kmeans-scope", "joint", "--kmeans-order", "after"),
    "kmeans trellis": ("--method", "quarot", "--coder", "trellis", "--kmeans-k", 3),
    "hessian paper": (*SAW, "--hessian", "paper", "--hadamard", "kv", "--random-signs"),
    "hessian consistent": (*SAW, "--hessian", "consistent"),
    "kvq": KVQ,
    "kvq uniform": (*KVQ, "--uniform-layout", "--budget-bits", 3),
    "kvq shared": (*KVQ, "--share", "layer"),
    "joint": (*JOINT, "--budget-bytes", 160),
    "joint uniform": (*JOINT, "--uniform-layout", "--budget-bits", 2.5),
}

HOLD_OUT = {name for name, flags in VARIANTS.items() if "kvq" in flags or "--joint" in flags}


def check_variant(dump: Path, layers: dict[int, reference.Layer], folder: Path, name: str, *more: object):
    flags = (*VARIANTS[name], *more)
    artifact = verified(dump, folder / "one", *flags)
    two = calibrate(dump, folder / "two", "--threads", 2, *flags)
    assert two.read_bytes() == (folder / "one").read_bytes()
    assert list(artifact.layers) == list(layers)
    for entry in artifact.manifest["layers"]:
        layer = layers[entry["layer"]]
        for side, plan in artifact.layers[entry["layer"]].sides.items():
            error = entry[side]["error"]
            assert 0 < error["after"] < 0.6 and error["before"] > 0
            found = measured_error(layer, side, plan, error["metric"], kept_tokens(layer, name in HOLD_OUT))
            assert error["after"] == pytest.approx(found, rel=5e-3), side  # codes near an edge may differ


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_on_every_geometry(make_dump, tmp_path, name, geometry):
    options = SMALL | GEOMETRIES[geometry]
    after_rope = make_dump(**options | {"capture": "post_rope"})  # the same activations as the tool rotates them
    check_variant(make_dump(**options), {0: read(after_rope)}, tmp_path, name)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_on_a_real_model(short, tmp_path, name):
    check_variant(short, {4: read(short, 4)}, tmp_path, name, "--layers", 4)
