"""Every option that decides how rows are stored: each value calibrates, verifies, and is what the artifact then
says."""

import itertools
import json
import re
from pathlib import Path

import pytest
from kvq_tools import ROOT, calibrate, run, succeed

from kvq.artifact_reader import load_artifact

USAGE = 2
METHODS = ("oscar", "saw-int4", "quarot", "random", "plain")
HEAD_DIMS = (64, 80, 96, 128, 256)
ROPES = {
    "half": {"rope": "half"},
    "partial": {"rope": "interleaved", "rotary_dim": 32, "rotary_offset": 16},
    "none": {"rope": "none"},
}
COMPOSITIONS = {
    "uhp": "r_h_pbr",
    "uh": "r_h",
    "u": "plain",
    "up": "br",
    "uph": "br_h128",
    "h": None,
    "hp": "h_pbr",
    "p": "pbr",
    "hup": "h_r_pbr",
    "hpu": "h_pbr_r",
    "i": None,
    "residual": None,
    "residual-published": "uresidual",
}


def verified(dump: Path, folder: Path, *flags: object) -> dict:
    """Calibrates, verifies with kvq-inspect and the second reader; returns the layers of --json."""
    artifact = folder / "out"
    report = succeed("kvq-calibrate", "--json", "--model", dump, "--output", artifact, *flags)
    checks = json.loads(succeed("kvq-inspect", artifact, "--verify", "--json").stdout)["verify"]
    assert all(check["passed"] for check in checks) and len(checks) >= 3
    load_artifact(artifact)
    return json.loads(report.stdout)["layers"]


@pytest.mark.parametrize("kind", ["gqa", "mla_rope"])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_on_every_geometry(make_dump, tmp_path, method, head_dim, rope, kind):
    dump = make_dump(head_dim=head_dim, kind=kind, layers=1, tokens=61, q_heads=2, kv_heads=1, **ROPES[rope])
    (layer,) = verified(dump, tmp_path, "--method", method)
    assert layer.keys() == {"layer", "k", "v"} - ({"v"} if kind == "mla_rope" else set())


@pytest.fixture
def dump(make_dump) -> Path:
    """A dump with keys and values of different head_dim, with means and outliers."""
    return make_dump(head_dim=64, v_head_dim=96, tokens=150, layers=2, outlier_channels=3, channel_means=0.5)


@pytest.mark.parametrize("coder", ["affine", "symmetric"])
def test_more_bits_have_smaller_errors(dump, tmp_path, coder):
    errors = []
    for bits in range(1, 9):
        layer = verified(dump, tmp_path, "--bits", bits, "--coder", coder)[0]
        assert layer["k"]["bits"] == layer["v"]["bits"] == bits
        errors.append([layer[side]["error"]["after"] for side in "kv"])
    for fewer, more in itertools.pairwise(errors):
        assert all(b < 0.6 * a for a, b in zip(fewer, more)), errors


def test_sides_have_their_own_bits(dump, tmp_path):
    layer = verified(dump, tmp_path, "--bits", 5, "--bits-k", 3, "--bits-v", 16)[0]
    assert layer["k"]["bits"] == 3
    assert (layer["v"]["bits"], layer["v"]["coder"], layer["v"]["effective_bits"]) == (16, "exact", 16)


def test_exact_layers(dump, tmp_path):
    first, second = verified(dump, tmp_path, "--exact-layers", 1)
    assert [first[side]["coder"] for side in "kv"] == ["affine", "affine"]
    assert [second[side]["coder"] for side in "kv"] == ["exact", "exact"] and "error" not in second["k"]


@pytest.mark.parametrize("method", METHODS)
def test_shared_layers_have_one_rotation(dump, tmp_path, method):
    layers = verified(dump, tmp_path, "--method", method, "--share", "layer", "--center", "kv")
    assert all(layer[side]["rotation"]["scope"] == "layer" for layer in layers for side in "kv")
    plan = load_artifact(tmp_path / "out").layers[0].sides["v"]
    assert plan.tensors["center"].shape == (1, 96) and len(plan.clip_ratio) == 1


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_compositions_and_their_official_names(dump, tmp_path, composition):
    layer = verified(dump, tmp_path, "--composition", composition)[0]
    official = COMPOSITIONS[composition]
    if official:
        again = calibrate(dump, tmp_path / "again", "--composition", official)
        assert again.read_bytes() == (tmp_path / "out").read_bytes()
    assert layer["k"]["rotation"]["eigenbasis"] == ("u" in composition)


@pytest.mark.parametrize("target_v", ["scored_value", "sst", "value"])
@pytest.mark.parametrize("target_k", ["query", "scored_query", "key"])
@pytest.mark.parametrize("center", ["none", "kv"])
def test_targets(dump, tmp_path, target_k, target_v, center):
    layer = verified(dump, tmp_path, "--target-k", target_k, "--target-v", target_v, "--center", center)[0]
    assert (layer["k"]["rotation"]["target"], layer["v"]["rotation"]["target"]) == (target_k, target_v)


AFFINE = [("affine", "minmax", zero) for zero in ("float", "integer")]
SYMMETRIC = [("symmetric", rule, None) for rule in ("norm", "least_squares", "absmax")]


@pytest.mark.parametrize("scale_type", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("coder, rule, zero", AFFINE + SYMMETRIC)
def test_coders(dump, tmp_path, coder, rule, zero, scale_type):
    flags = ("--coder", coder, "--scale-rule", rule, "--scale-type", scale_type, "--group-size", 16, "--bits", 3)
    layer = verified(dump, tmp_path, *flags, *(("--zero", zero) if zero else ()))[0]
    for side in "kv":
        plan = layer[side]
        assert (plan["coder"], plan["scale_rule"], plan["scale_type"], plan.get("zero")) == (
            coder,
            rule,
            scale_type,
            zero,
        )
        assert plan["group_size"] == 16 and 0 < plan["error"]["after"] < 0.1


def test_a_group_that_does_not_divide_is_refused_before_the_work(make_dump, tmp_path):
    output = tmp_path / "a.safetensors"
    dump = make_dump(tokens=64, head_dim=32)
    for more in ((), ("--dry-run",)):
        result = run("kvq-calibrate", dump, "--group-size", 24, "--output", output, *more)
        assert result.code == USAGE and "--group-size 24 does not divide head_dim 32" in result.stderr
        assert list(tmp_path.iterdir()) == [], "nothing was collected"


def test_default_group_is_64_where_it_divides(make_dump, tmp_path):
    for head_dim, group in ((64, 64), (128, 64), (96, 96), (80, 80)):
        (layer,) = verified(make_dump(head_dim=head_dim, layers=1, tokens=61), tmp_path)
        assert layer["k"]["group_size"] == layer["v"]["group_size"] == group
    (layer,) = verified(make_dump(head_dim=128, layers=1, tokens=61), tmp_path, "--method", "plain")
    assert layer["k"]["group_size"] == 128


@pytest.mark.parametrize(
    "flags", [("--clip", "none"), ("--coder", "symmetric"), ("--coder", "symmetric", "--share", "layer")], ids=str
)
def test_sign_search_is_at_least_as_good(sample, tmp_path, flags):
    """Candidates are compared without clipping, so a clip search may reverse the order of the final errors."""
    plain = verified(sample, tmp_path, "--layers", "0-2", *flags)
    searched = verified(sample, tmp_path, "--layers", "0-2", "--sign-search", 4, *flags)
    choices = []
    for before, after in zip(plain, searched):
        for side in "kv":
            assert after[side]["error"]["after"] <= before[side]["error"]["after"]
            assert set(before[side]["rotation"]["sign_choice"]) == {"canonical"}
            choices += after[side]["rotation"]["sign_choice"]
    assert any(choice.startswith("random") for choice in choices)


def test_hadamard_of_each_side(dump, tmp_path):
    for sides in ("none", "k", "v", "kv"):
        layer = verified(dump, tmp_path, "--method", "saw-int4", "--hadamard", sides, "--hadamard-order", 16)[0]
        assert {side for side in "kv" if layer[side]["rotation"]["kind"] == "block_hadamard"} == set(sides) & set("kv")


def test_random_signs_are_stored(dump, tmp_path):
    layer = verified(dump, tmp_path, "--method", "quarot", "--random-signs")[0]
    assert layer["v"]["rotation"] | {"signs": True, "order": 32, "recipe": "S*H"} == layer["v"]["rotation"]
    signs = load_artifact(tmp_path / "out").layers[0].sides["v"].tensors["hadamard_signs"]
    assert signs.shape == (2, 96) and {-1, 1} == set(signs.flatten())


def test_windows_are_what_was_asked_for(dump, tmp_path):
    artifact = load_artifact(calibrate(dump, tmp_path / "out", "--sink-tokens", 3, "--recent-tokens", 17))
    assert (artifact.sink_tokens, artifact.recent_tokens) == (3, 17)
    artifact = load_artifact(calibrate(dump, tmp_path / "out", "--method", "saw-int4"))
    assert (artifact.sink_tokens, artifact.recent_tokens) == (0, 0)


@pytest.mark.parametrize("dtype", ["float16", "float16_bits", "bfloat16"])
def test_stored_types_give_nearly_the_same_numbers(make_dump, tmp_path, dtype):
    """The same activations, stored in four types."""
    options = {"layers": 1, "tokens": 200, "query_spectrum": 0.95}
    exact, rounded = (verified(make_dump(**options, dtype=d), tmp_path)[0] for d in ("float32", dtype))
    for side in "kv":
        assert rounded[side]["error"]["after"] == pytest.approx(exact[side]["error"]["after"], rel=0.1)


def test_flags_of_methods_exist():
    """Each flag that the library names as a whole string is a flag of kvq-calibrate: a misspelled flag in a settle()
    would never be found among those that a user typed."""
    sources = "\n".join(path.read_text() for path in (ROOT / "lib/kvq/methods").glob("*.cpp"))
    named = set(re.findall(r'"(--[a-z-]+)"', sources))
    assert len(named) > 50
    text = run("kvq-calibrate", "--help").stdout
    assert not [flag for flag in sorted(named) if not re.search(rf"{flag}\b", text)]
