"""Artifacts with trellises that are searched in integers: reading them, refusing what does not fit, and the checks of
--verify."""

import json

import artifact_builder as build
import numpy as np
import pytest
from artifact_edits import both, check_refused, edit, edit_layers, parse, run
from code_samples import gaussian

from kvq import packing
from kvq.artifact_reader import artifact_schema
from kvq.errors import KvqError
from kvq.golden_rows import attend_last, code_side
from kvq.verify import verify_artifact

DIM, KV_HEADS, Q_HEADS, GOLDEN = 40, 2, 4, 9
FEATURES = ("trellis", "mixed_widths", "row_scale", "integer_search")
OLD_FEATURES = FEATURES[:-1]
WIDTHS = np.array([[4] * 4 + [2] * 16 + [1] * 16 + [0] * 4, [2] * 20 + [1] * 20], np.uint8)
ROW_BYTES = 12  # head 0: 2 + 4 + 2 bytes of codes; head 1: 5 + 3 bytes of codes; one scale, 2 zeros
INTEGER = {"search": "integer"}


def sample() -> tuple[dict, dict[str, np.ndarray]]:
    """(manifest, tensors)

    0 k: mixed, one scale, width 2 is searched in integers    0 v: groups, searched in integers
    1 k: groups, not searched in integers                     1 v: exact
    """
    shape = build.geometry(Q_HEADS, KV_HEADS, DIM)
    widths = [{"bits": 1, "memory": 3}, {"bits": 2, "memory": 2} | INTEGER]
    keys = build.mixed(build.trellis_plan(4, DIM, 1, "rms", trellis=widths), WIDTHS, ROW_BYTES)
    values = build.trellis_plan(1, 20, 2, trellis=[{"bits": 1, "memory": 2} | INTEGER])
    tree = build.manifest(
        [
            build.layer(0, shape, build.one_scale(keys), values),
            build.layer(1, shape, build.trellis_plan(2, 8, 1), build.exact_plan()),
        ],
        requires=FEATURES,
    )
    return tree, {
        "layers.0.k.channel_bits": WIDTHS.copy(),
        "layers.0.k.channel_order": build.sources(1, WIDTHS),
        "layers.0.k.segment_gain": build.gains(2, WIDTHS),
        "layers.0.k.trellis": gaussian(3, 1 * 4 + 2 * 3),
        "layers.0.v.trellis": gaussian(4, 3),
        "layers.1.k.trellis": gaussian(5, 4),
    }


def without_search(tree: dict) -> None:
    """Removes all searches; the features stay."""
    for side, place in (("k", 1), ("v", 0)):
        tree["layers"][0][side]["trellis"][place].pop("search", None)


def with_golden_rows(tree: dict, tensors: dict[str, np.ndarray]) -> None:
    """Adds golden rows of layer 0, made by the reader."""
    plans = parse(build.to_bytes(tree, tensors)).layers[0].sides
    x = {side: gaussian(seed, GOLDEN, KV_HEADS, DIM) for seed, side in enumerate("kv", start=20)}
    x = {side: packing.from_bf16_bits(packing.to_bf16_bits(own)) for side, own in x.items()}
    coded = {side: code_side(plans[side], own) for side, own in x.items()}
    tree["layers"][0]["golden"] = {"first": 0, "count": GOLDEN}
    for side, own in x.items():
        tensors[f"layers.0.golden.{side}"] = packing.to_bf16_bits(own)
        tensors[f"layers.0.golden.{side}_bytes"] = coded[side].packed
        tensors[f"layers.0.golden.{side}_firm"] = coded[side].firm
    tensors["layers.0.golden.q"] = packing.to_bf16_bits(gaussian(22, Q_HEADS, DIM))
    tensors["layers.0.golden.out"] = np.zeros((Q_HEADS, DIM), np.float32)
    rows = parse(build.to_bytes(tree, tensors)).layers[0].golden
    tensors["layers.0.golden.out"] = attend_last(rows, coded["k"].decoded, coded["v"].decoded)


def checks(tree: dict, tensors: dict[str, np.ndarray], **metadata: str) -> dict:
    return {check.name: check for check in verify_artifact(parse(build.to_bytes(tree, tensors, **metadata)))}


# Reading


def test_reads_the_search_of_each_width():
    layers = parse(build.to_bytes(*sample())).layers
    keys, values, plain = layers[0].sides["k"], layers[0].sides["v"], layers[1].sides["k"]
    for head in range(KV_HEADS):
        found = [(part.scheme.bits, part.scheme.coder, part.scheme.search) for part in keys.scheme_of(head).parts]
        narrow = [(2, "trellis", "integer"), (1, "trellis", "binary32")]
        assert found == ([(4, "symmetric", "binary32")] if head == 0 else []) + narrow
    assert (values.scheme.search, plain.scheme.search) == ("integer", "binary32")
    assert keys.features == FEATURES and values.features == ("trellis", "integer_search")
    assert plain.features == ("trellis",)


def test_files_without_a_search_are_what_they_were():
    tree, tensors = sample()
    without_search(tree)
    tree["requires"], tree["version"] = list(OLD_FEATURES), "1.4"
    plans = parse(build.to_bytes(tree, tensors)).layers[0].sides
    assert plans["v"].scheme.search == "binary32" and plans["v"].features == ("trellis",)
    assert {part.scheme.search for part in plans["k"].scheme.parts} == {"binary32"}
    assert all(check.passed for check in checks(tree, tensors).values())


def test_a_table_that_no_group_uses_needs_the_feature():
    tree, tensors = sample()
    without_search(tree)
    tree["layers"][0]["k"]["trellis"].append({"bits": 3, "memory": 1} | INTEGER)
    tensors["layers.0.k.trellis"] = gaussian(3, 1 * 4 + 2 * 3 + 3 * 2)
    assert all(check.passed for check in checks(tree, tensors).values())
    check_refused(tree, tensors, both(edit("requires", value=list(OLD_FEATURES)), edit("version", value="1.4")))


def test_the_sample_is_what_the_schema_allows():
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(sample()[0], artifact_schema())


# What is refused

REFUSED = {
    "not in requires": both(edit("requires", value=list(OLD_FEATURES)), edit("version", value="1.4")),
    "binary32 by name": edit_layers(1, "k", "trellis", 0, "search", value="binary32"),
    "another search": edit_layers(0, "v", "trellis", 0, "search", value="float"),
    "search as a number": edit_layers(0, "v", "trellis", 0, "search", value=1),
    "no search by name": edit_layers(0, "k", "trellis", 0, "search", value=None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name):
    check_refused(*sample(), REFUSED[name])


def test_the_message_names_the_feature_and_the_search():
    for name, text in (
        ("not in requires", "'integer_search', which requires does not list"),
        ("another search", "search"),
    ):
        tree, tensors = sample()
        REFUSED[name](tree, tensors)
        with pytest.raises(KvqError) as error:
            parse(build.to_bytes(tree, tensors))
        assert text in str(error.value), name


# Coding rows


def test_rows_have_the_codes_of_their_search():
    tree, tensors = sample()
    x, packed = gaussian(10, KV_HEADS, 40, DIM), {}
    for name in ("integer", "binary32"):
        plans = parse(build.to_bytes(tree, tensors)).layers[0].sides
        for side, plan in plans.items():
            packed[side, name] = plan.pack_heads(x)
            for head in range(KV_HEADS):
                own = packing.pack(
                    packing.encode(plan.rotate(x[head], head), plan.scheme_of(head)), plan.scheme_of(head)
                )
                assert (packed[side, name][head] == own).all()
        without_search(tree)
    for side in "kv":
        differ = (packed[side, "integer"] != packed[side, "binary32"]).any(axis=2)
        assert differ.any(), side


def test_torch_reconstructs_what_numpy_does():
    torch = pytest.importorskip("torch")
    from kvq.coded_attention import reconstruct, unrounded

    x = gaussian(11, KV_HEADS, 70, DIM)
    for side, plan in parse(build.to_bytes(*sample())).layers[0].sides.items():
        for own in (plan, unrounded(plan)):
            found = reconstruct(own, torch.from_numpy(x)).numpy()
            assert np.mean(np.abs(found - own.reconstruct_heads(x)) > 1e-5) < 0.01, side


# Checks


def test_the_sample_verifies():
    tree, tensors = sample()
    with_golden_rows(tree, tensors)
    found = checks(tree, tensors)
    assert all(check.passed for check in found.values()), found
    assert found["version"].detail == "1.5" and "golden rows" in found


def test_golden_rows_notice_the_other_search():
    tree, tensors = sample()
    with_golden_rows(tree, tensors)
    without_search(tree)
    tree["requires"], tree["version"] = list(OLD_FEATURES), "1.4"
    failed = [check for check in checks(tree, tensors).values() if not check.passed]
    assert [check.name for check in failed] == ["golden rows"] and "bytes" in failed[0].detail


@pytest.mark.parametrize("version, passes", [("1.1", False), ("1.4", False), ("1.5", True), ("1.6", True)])
def test_the_lowest_version_is_1_5(version, passes):
    tree, tensors = sample()
    tree["version"] = version
    check = checks(tree, tensors, version=version)["version"]
    assert check.passed == passes
    assert passes or check.detail == f"version: expected 1.5 or higher for these features, found {version}"


def test_a_feature_without_use_is_a_failed_check():
    tree, tensors = sample()
    without_search(tree)
    check = checks(tree, tensors)["version"]
    assert not check.passed and "the features of the plans" in check.detail


# The program


def test_json_says_which_trellises_are_searched_in_integers(tmp_path, capsys):
    path = tmp_path / "a.safetensors"
    path.write_bytes(build.to_bytes(*sample()))
    code, out, err = run(capsys, path, "--verify", "--json")
    assert (code, err) == (0, "")
    rows = {(row["layer"], row["side"]): row.get("trellis") for row in json.loads(out)["layers"]}
    assert rows[0, "k"] == [{"bits": 1, "memory": 3}, {"bits": 2, "memory": 2, "search": "integer"}]
    assert rows[0, "v"] == [{"bits": 1, "memory": 2, "search": "integer"}]
    assert rows[1, "k"] == [{"bits": 2, "memory": 1}] and rows[1, "v"] is None
