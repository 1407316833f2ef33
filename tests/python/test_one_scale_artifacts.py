"""Artifacts whose mixed rows have one scale: reading them, refusing what does not fit, coding rows through a whole
plan, and the checks of --verify."""

import json

import artifact_builder as build
import numpy as np
import pytest
from artifact_edits import both, check_refused, edit, edit_layers, parse, run, tensor
from code_samples import gaussian

from kvq import packing
from kvq.artifact_reader import artifact_schema
from kvq.errors import KvqError
from kvq.golden_rows import attend_last, code_side
from kvq.scheme import MixedScheme, Tables
from kvq.verify import verify_artifact

DIM, KV_HEADS, Q_HEADS, GOLDEN = 20, 2, 4, 5
FEATURES = ("codebook", "trellis", "mixed_widths", "centroids", "row_scale")
WIDTHS = np.array([[4] * 2 + [2] * 8 + [1] * 8 + [0] * 2, [2] * 10 + [1] * 10], np.uint8)
ROW_BYTES = 8  # head 0: 1 + 2 + 1 bytes of codes; head 1: 3 + 2 bytes of codes, 1 of padding; one scale
FIRST, LAST = 2.0**-24, 2.0**24
SIDES = ((0, "k"), (0, "v"), (1, "k"))  # those with one scale


def sample() -> tuple[dict, dict[str, np.ndarray]]:
    """(manifest, tensors)

    0 k: trellis, rms    0 v: codebook, norm, centroids
    1 k: symmetric, least_squares, shared, center    1 v: symmetric, mixed, a scale for each segment
    """
    shape = build.geometry(Q_HEADS, KV_HEADS, DIM)
    both_widths = [{"bits": 1, "memory": 3}, {"bits": 2, "memory": 2}]
    trellis = build.trellis_plan(4, DIM, 1, "rms", rotation=build.rotation("dense"), trellis=both_widths)
    books = {"bits": [1, 2, 4], "per_head": False, "source": "fitted"}
    codebook = build.codebook_plan(4, DIM, codebooks=books, **build.centroids(3, KV_HEADS))
    shared = build.symmetric_plan(4, DIM, "least_squares", rotation=build.rotation("identity", "layer"), center=True)
    tree = build.manifest(
        [
            build.layer(
                0,
                shape,
                build.one_scale(build.mixed(trellis, WIDTHS, ROW_BYTES)),
                build.one_scale(build.mixed(codebook, WIDTHS, 12)),
            ),
            build.layer(
                1,
                shape,
                build.one_scale(build.mixed(shared, WIDTHS[:1], ROW_BYTES)),
                build.mixed(build.symmetric_plan(4, DIM, "absmax"), WIDTHS, 12),
            ),
        ],
        requires=FEATURES,
    )
    tensors = {
        "layers.0.k.rotation": build.orthogonal(1, KV_HEADS, DIM),
        "layers.0.k.trellis": gaussian(2, 1 * 4 + 2 * 3),
        "layers.0.v.centroids": gaussian(3, KV_HEADS, 3, DIM),
        **{f"layers.0.v.codebook.{bits}": np.sort(gaussian(bits, 2**bits)) for bits in (1, 2, 4)},
        "layers.1.k.center": gaussian(4, 1, DIM),
    }
    for layer, side in (*SIDES, (1, "v")):
        widths = WIDTHS[:1].copy() if (layer, side) == (1, "k") else WIDTHS.copy()
        tensors[f"layers.{layer}.{side}.channel_bits"] = widths
        tensors[f"layers.{layer}.{side}.channel_order"] = build.sources(layer, widths)
        if (layer, side) in SIDES:
            tensors[f"layers.{layer}.{side}.segment_gain"] = build.gains(5 + layer, widths)
    return tree, tensors


def sample_plans() -> dict:
    artifact = parse(build.to_bytes(*sample()))
    return {(layer, side): plan for layer, entry in artifact.layers.items() for side, plan in entry.sides.items()}


def with_golden_rows(tree: dict, tensors: dict[str, np.ndarray]) -> None:
    """Adds golden rows of layer 0, made by the reader."""
    plans = sample_plans()
    x = {side: gaussian(seed, GOLDEN, KV_HEADS, DIM) for seed, side in enumerate("kv", start=20)}
    x = {side: packing.from_bf16_bits(packing.to_bf16_bits(own)) for side, own in x.items()}
    q = packing.to_bf16_bits(gaussian(22, Q_HEADS, DIM))
    coded = {side: code_side(plans[0, side], own) for side, own in x.items()}
    tree["layers"][0]["golden"] = {"first": 0, "count": GOLDEN}
    for side, own in x.items():
        tensors[f"layers.0.golden.{side}"] = packing.to_bf16_bits(own)
        tensors[f"layers.0.golden.{side}_bytes"] = coded[side].packed
        tensors[f"layers.0.golden.{side}_firm"] = coded[side].firm
    tensors |= {"layers.0.golden.q": q, "layers.0.golden.out": np.zeros((Q_HEADS, DIM), np.float32)}
    rows = parse(build.to_bytes(tree, tensors)).layers[0].golden
    tensors["layers.0.golden.out"] = attend_last(rows, coded["k"].decoded, coded["v"].decoded)


def checks(tree: dict, tensors: dict[str, np.ndarray], **metadata: str) -> dict:
    return {check.name: check for check in verify_artifact(parse(build.to_bytes(tree, tensors, **metadata)))}


# Reading


def test_reads_gains_of_each_head():
    plans, tensors = sample_plans(), sample()[1]
    for place in SIDES:
        found = tensors["layers.{}.{}.segment_gain".format(*place)]
        for head, scheme in enumerate(plans[place].schemes):
            assert scheme.one_scale
            assert scheme.gains == tuple(float(found[head, part.scheme.bits - 1]) for part in scheme.parts)
    assert [plan.row_bytes for plan in plans.values()] == [ROW_BYTES, 12, ROW_BYTES, 12]
    assert not plans[1, "v"].scheme.one_scale and plans[1, "v"].scheme.gains is None
    assert plans[0, "k"].schemes[0].gains != plans[0, "k"].schemes[1].gains
    assert plans[0, "k"].features == ("trellis", "mixed_widths", "row_scale")


def test_the_sample_is_what_the_schema_allows():
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(sample()[0], artifact_schema())


@pytest.mark.parametrize("gain", [FIRST, LAST])
def test_the_bounds_of_gains_are_gains(gain):
    tree, tensors = sample()
    tensors["layers.0.k.segment_gain"][1, 0] = gain
    assert parse(build.to_bytes(tree, tensors)).layers[0].sides["k"].schemes[1].gains[-1] == gain


# What is refused

TENSORS = sample()[1]
K0, V0, K1, V1 = (0, "k"), (0, "v"), (1, "k"), (1, "v")


def gain_of(head: int, width: int, value: float):
    array = TENSORS["layers.0.k.segment_gain"].copy()
    array[head, width - 1] = value
    return tensor("layers.0.k.segment_gain", array)


REFUSED = {
    "no gains": tensor("layers.0.k.segment_gain"),
    "gains of one head": tensor("layers.0.k.segment_gain", TENSORS["layers.0.k.segment_gain"][:1].copy()),
    "gains of all heads": tensor("layers.1.k.segment_gain", TENSORS["layers.0.k.segment_gain"]),
    "seven gains": tensor("layers.0.k.segment_gain", TENSORS["layers.0.k.segment_gain"][:, :7].copy()),
    "gains in float64": tensor("layers.0.k.segment_gain", TENSORS["layers.0.k.segment_gain"].astype(np.float64)),
    "gains that are not announced": tensor("layers.1.v.segment_gain", TENSORS["layers.0.k.segment_gain"]),
    "gains without scale scope": both(
        edit_layers(*K0, "allocation", "scale_scope", value=...), edit_layers(*K0, "allocation", "row_bytes", value=12)
    ),
    "scale scope without gains": edit_layers(*V1, "allocation", "scale_scope", value="row"),
    "scope segment by name": edit_layers(*K0, "allocation", "scale_scope", value="segment"),
    "scope as a number": edit_layers(*K0, "allocation", "scale_scope", value=1),
    "gain of 0": gain_of(0, 2, 0),
    "negative gain": gain_of(0, 2, -1),
    "gain below 2^-24": gain_of(0, 2, np.nextafter(np.float32(FIRST), np.float32(0))),
    "gain above 2^24": gain_of(1, 1, np.nextafter(np.float32(LAST), np.float32(np.inf))),
    "gain of NaN": gain_of(0, 2, np.nan),
    "infinite gain": gain_of(0, 2, np.inf),
    "gain of a width that no head has": gain_of(0, 3, 2),
    "gain of a width that another head has": gain_of(1, 4, 2),
    "NaN of a width that no head has": gain_of(0, 8, np.nan),
    "absmax": edit_layers(*K1, "scale_rule", value="absmax"),
    "rms of symmetric codes": edit_layers(*K1, "scale_rule", value="rms"),
    "bytes of a scale for each segment": edit_layers(*K0, "allocation", "row_bytes", value=12),
    "not in requires": both(
        edit("requires", value=[word for word in FEATURES if word != "row_scale"]), edit("version", value="1.1")
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name):
    check_refused(*sample(), REFUSED[name])


def test_the_message_names_the_feature_and_the_width():
    for name, text in (
        ("not in requires", "'row_scale', which requires does not list"),
        ("gain above 2^24", "segment_gain of width 1: expected 2^-24 to 2^24, found 16777218"),
        ("gain of a width that another head has", "width 4, which the row does not have: expected 1, found 2"),
        ("absmax", "expected norm or least_squares or rms, found 'absmax'"),
        ("no gains", "segment_gain is missing"),
        ("gains without scale scope", "segment_gain is not announced"),
    ):
        tree, tensors = sample()
        REFUSED[name](tree, tensors)
        with pytest.raises(KvqError) as error:
            parse(build.to_bytes(tree, tensors))
        assert text in str(error.value), name


# Coding rows


def test_rows_are_coded_as_the_formula_says():
    plans, tensors = sample_plans(), sample()[1]
    x, theta = gaussian(10, KV_HEADS, 11, DIM), tensors["layers.0.k.trellis"].tolist()
    tables = Tables(trellises={2: (2, tuple(theta[4:])), 1: (3, tuple(theta[:4]))})
    for head in range(KV_HEADS):
        gains = tuple(tensors["layers.0.k.segment_gain"][head].tolist())
        own = MixedScheme.make("trellis", tuple(WIDTHS[head].tolist()), "fp16", "rms", tables, gains=gains)
        rotation = tensors["layers.0.k.rotation"][head].astype(np.float64)
        coded = packing.encode((x[head].astype(np.float64) @ rotation).astype(np.float32), own)
        assert coded.numbers.shape == (11, 1)
        assert (plans[0, "k"].pack_rows(x[head], head) == packing.pack(coded, own)).all()
        restored = (packing.decode(coded, own).astype(np.float64) @ rotation.T).astype(np.float32)
        assert (plans[0, "k"].reconstruct(x[head], head) == restored).all()


def test_torch_reconstructs_what_numpy_does():
    torch = pytest.importorskip("torch")
    from kvq.coded_attention import reconstruct, unrounded

    x = gaussian(11, KV_HEADS, 70, DIM)
    for place, plan in sample_plans().items():
        for own in (plan, unrounded(plan)):
            found = reconstruct(own, torch.from_numpy(x)).numpy()
            # Products with the rotation may be summed in another order, in binary64, so nearly all roundings agree.
            assert np.mean(np.abs(found - own.reconstruct_heads(x)) > 1e-5) < 0.01, place


# Checks


def test_the_sample_verifies():
    tree, tensors = sample()
    with_golden_rows(tree, tensors)
    found = checks(tree, tensors)
    assert all(check.passed for check in found.values()), found
    assert found["version"].detail == "1.4" and "golden rows" in found
    firm = np.stack([tensors[f"layers.0.golden.{side}_firm"] for side in "kv"])
    assert 0 < firm.sum() <= firm.size


@pytest.mark.parametrize("side", "kv")
def test_golden_rows_notice_other_gains(side):
    tree, tensors = sample()
    with_golden_rows(tree, tensors)
    gains = tensors[f"layers.0.{side}.segment_gain"].copy()
    gains[1, 1] *= 2
    tensors[f"layers.0.{side}.segment_gain"] = gains
    failed = [check for check in checks(tree, tensors).values() if not check.passed]
    assert [check.name for check in failed] == ["golden rows"] and f"{side} of token" in failed[0].detail


@pytest.mark.parametrize("version, passes", [("1.1", False), ("1.3", False), ("1.4", True), ("1.5", True)])
def test_the_lowest_version_is_1_4(version, passes):
    tree, tensors = sample()
    tree["version"] = version
    check = checks(tree, tensors, version=version)["version"]
    assert check.passed == passes
    assert passes or check.detail == f"version: expected 1.4 or higher for these features, found {version}"


def test_a_feature_without_use_is_a_failed_check():
    tree, tensors = sample()
    for place in SIDES:
        edit_layers(*place, "allocation", "scale_scope", value=...)(tree, tensors)
        edit_layers(*place, "allocation", "row_bytes", value=12)(tree, tensors)
        del tensors["layers.{}.{}.segment_gain".format(*place)]
    check = checks(tree, tensors)["version"]
    assert not check.passed and "the features of the plans" in check.detail
    words = [word for word in FEATURES if word != "row_scale"]
    tree["requires"], tree["version"] = words, "1.1"
    assert checks(tree, tensors)["version"].passed


# The program


def test_the_program_shows_which_rows_have_one_scale(tmp_path, capsys):
    path = tmp_path / "a.safetensors"
    path.write_bytes(build.to_bytes(*sample()))
    code, out, err = run(capsys, path, "--verify")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines() if " mixed " in line]
    types = {(line[0], line[1]): line[line.index("mixed") + 1] for line in lines}
    assert types == {("0", "k"): "fp16/row", ("0", "v"): "fp16/row", ("1", "k"): "fp16/row", ("1", "v"): "fp16"}
    code, out, _ = run(capsys, path, "--json")
    found = {(row["layer"], row["side"]): row.get("scale_scope") for row in json.loads(out)["layers"]}
    assert found == {K0: "row", V0: "row", K1: "row", V1: None}
