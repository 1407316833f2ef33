"""The second reader reads every golden file of every released version (formats/golden).

Shapes: N rows, H KV heads, D channels.
"""

import json
import pathlib
from collections import Counter

import artifact_builder
import h5py
import jsonschema
import numpy as np
import pytest

from kvq import read_artifact
from kvq.artifact import Artifact, SidePlan
from kvq.artifact_reader import load_artifact as read
from kvq.packing import decode, from_bf16_bits, unpack
from kvq.safetensors_file import SafetensorsFile

FORMATS = pathlib.Path(__file__).resolve().parents[2] / "formats"
GOLDEN = FORMATS / "golden"
ARTIFACTS = sorted(path for path in GOLDEN.glob("v*/*.safetensors") if path.stem != "stats")
STATS = sorted(GOLDEN.glob("v*/stats.safetensors"))
V1_1 = GOLDEN / "v1.1"
NAMES = ("kvq", "block-gtq", "tq-mse", "saw-int4")  # of 1.1
WITH_ROWS = {  # artifacts of rows.json
    "v1.1": NAMES,
    "v1.2": ("kvq", "block-gtq", "oscar", "quarot", "plain"),
    "v1.3": ("kvq", "oscar", "quarot"),
    "v1.4": ("kvq", "block-gtq", "symmetric"),
}
STATS_OF = {"v1.4": "v1.3"}  # statistics that artifacts of another version were made from
ROWS = 3  # held-out tokens of rows.json


@pytest.fixture(scope="module")
def artifacts() -> dict[str, Artifact]:
    """Those of 1.1."""
    return {name: read(V1_1 / f"{name}.safetensors") for name in NAMES}


@pytest.fixture(scope="module")
def stats() -> SafetensorsFile:
    """Those of 1.1."""
    return SafetensorsFile.open(V1_1 / "stats.safetensors")


def test_there_are_golden_files():
    assert [path.parent.name for path in STATS] == ["v1.0", "v1.1", "v1.2", "v1.3"]
    assert Counter(path.parent.name for path in ARTIFACTS) == {"v1.0": 3, "v1.1": 4, "v1.2": 5, "v1.3": 3, "v1.4": 3}


@pytest.mark.parametrize("path", ARTIFACTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_golden_artifact_verifies(path, capsys):
    assert read_artifact.main([str(path), "--verify"]) == 0
    assert "orthogonality: ok" in capsys.readouterr().out


@pytest.mark.parametrize("path", STATS, ids=lambda path: path.parent.name)
def test_golden_statistics_are_refused_as_an_artifact(path, capsys):
    assert read_artifact.main([str(path)]) == 3
    assert "kvq-stats" in capsys.readouterr().err


@pytest.mark.parametrize("path", ARTIFACTS + STATS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_golden_manifests_are_canonical(path):
    text = SafetensorsFile.open(path).metadata["kvq.manifest"]
    assert json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), ensure_ascii=False) == text


# Files of 1.2

KINDS_1_2 = {
    "kvq": {"0k": "klt", "0v": "klt", "1k": "mixed", "1v": "klt"},
    "block-gtq": dict.fromkeys(("0k", "0v", "1k", "1v"), "klt"),
    "oscar": {"0k": "balanced", "1k": "balanced"},
    "quarot": dict.fromkeys(("0k", "0v", "1k", "1v"), "diagonal"),
    "plain": {"0v": "diagonal", "1v": "diagonal"},
}


@pytest.mark.parametrize("name", KINDS_1_2)
def test_transforms(name):
    artifact = read(GOLDEN / "v1.2" / f"{name}.safetensors")
    assert (artifact.manifest["version"], "transform" in artifact.manifest["requires"]) == ("1.2", True)
    kinds = {
        f"{layer['layer']}{letter}": layer[letter]["transform"]["kind"]
        for layer in artifact.manifest["layers"]
        for letter in "kv"
        if "transform" in layer[letter]
    }
    assert kinds == KINDS_1_2[name]


def test_statistics_and_dump_of_1_2_have_the_metric_of_o_proj():
    stats = SafetensorsFile.open(GOLDEN / "v1.2/stats.safetensors")
    assert stats.metadata["version"] == "1.4"
    with h5py.File(GOLDEN / "v1.2/dump.h5") as dump:
        assert dump.attrs["version"] == "1.1"
        for layer in (0, 1):
            stored = np.float64(dump[f"layers/{layer}/o_proj_metric"][()])
            np.testing.assert_array_equal(
                stats.array(f"layers.{layer}.o_proj_metric"), 0.5 * (stored + stored.transpose(0, 2, 1))
            )


# Files of 1.3

REQUIRES_1_3 = {
    "kvq": ["trellis", "mixed_widths", "transform", "logit_softcapping"],
    "oscar": ["logit_softcapping"],
    "quarot": [],
}


@pytest.mark.parametrize("name", REQUIRES_1_3)
def test_artifacts_of_1_3_have_baselines_and_the_error_on_held_out_tokens(name):
    manifest = read(GOLDEN / "v1.3" / f"{name}.safetensors").manifest
    assert (manifest["version"], manifest["requires"]) == ("1.3", REQUIRES_1_3[name])
    assert manifest["calibration"]["held_out"].keys() == {"tokens", "output_error", "baseline_error"}
    assert manifest["calibration"]["held_out"]["tokens"] == 24
    baselines = [layer[letter]["error"]["baseline"] for layer in manifest["layers"] for letter in "kv"]
    assert (
        baselines
        == {
            "kvq": [{"bits": 6, "group_size": 16}] * 4,
            "oscar": [{"bits": 4, "group_size": 16}] * 4,
            "quarot": [{"bits": 1, "group_size": 16}] * 4,
        }[name]
    )


@pytest.mark.parametrize("name", ["kvq", "oscar"])
def test_soft_cap_and_sinks_of_1_3_are_those_of_the_dump(name):
    manifest = read(GOLDEN / "v1.3" / f"{name}.safetensors").manifest
    stats = SafetensorsFile.open(GOLDEN / "v1.3/stats.safetensors")
    assert (stats.metadata["version"], stats.metadata["requires"]) == ("1.5", "logit_softcapping,sink_logits")
    with h5py.File(GOLDEN / "v1.3/dump.h5") as dump:
        assert (dump.attrs["version"], dump.attrs["requires"]) == ("1.2", "logit_softcapping,sink_logits")
        for layer in manifest["layers"]:
            sinks = dump[f"layers/{layer['layer']}/sink_logits"][:].tolist()
            assert len(set(sinks)) == 4 and layer["geometry"]["sink_logits"] == sinks
            assert layer["geometry"]["logit_softcapping"] == 8.0


@pytest.mark.parametrize("name", ["kvq", "oscar"])
def test_golden_rows_of_1_3_are_attention_with_the_cap(name, tmp_path):
    """With another cap the outputs are no longer those of the rows."""
    path = GOLDEN / "v1.3" / f"{name}.safetensors"
    assert read_artifact.main([str(path), "--verify"]) == 0
    file = SafetensorsFile.open(path)
    manifest = json.loads(file.metadata["kvq.manifest"])
    for layer in manifest["layers"]:
        layer["geometry"]["logit_softcapping"] = 0.5
    tensors = {tensor: file.array(tensor) for tensor in file.tensors}
    (tmp_path / "other.safetensors").write_bytes(artifact_builder.to_bytes(manifest, tensors, version="1.3"))
    assert read_artifact.main([str(tmp_path / "other.safetensors"), "--verify"]) == 6


# Files of 1.4


@pytest.mark.parametrize("name", WITH_ROWS["v1.4"])
def test_artifacts_of_1_4_have_one_scale_a_row(name):
    artifact = read(GOLDEN / "v1.4" / f"{name}.safetensors")
    assert artifact.manifest["version"] == "1.4" and "row_scale" in artifact.manifest["requires"]
    plans = [plan for layer in artifact.layers.values() for plan in layer.sides.values()]
    for plan in plans:
        assert plan.tensors["segment_gain"].shape[1] == 8
        assert all(scheme.scale_count(plan.dim) == 1 for scheme in plan.schemes)
    assert max(len(scheme.parts) for plan in plans for scheme in plan.schemes) > 2


# Statistics of 1.1


def test_golden_statistics_fit_their_schema(stats):
    manifest = json.loads(stats.metadata["kvq.manifest"])
    jsonschema.Draft7Validator(json.loads((FORMATS / "stats.schema.json").read_text())).validate(manifest)
    assert (manifest["version"], stats.metadata["version"], stats.metadata["requires"]) == ("1.1", "1.1", "")
    assert [(row["held_out_tokens"], row["curvature"]) for row in manifest["layers"]] == [(24, False)] * 2


@pytest.mark.parametrize("layer", [0, 1])
def test_golden_statistics_hold_out_the_first_tokens(stats, layer):
    prefix = f"layers.{layer}."
    assert stats.array(prefix + "held_out.token").tolist() == [0]
    assert stats.array(prefix + "held_out.query").tolist() == list(range(24))
    assert stats.array(prefix + "sample.token").min() >= 24
    assert stats.array(prefix + "key.weight").tolist() == [96 - 24] * 2
    with h5py.File(GOLDEN / "v1.0/dump.h5") as dump:
        for name in "qkv":
            rows = dump[f"layers/{layer}/{name}"][()].view(np.uint16)
            assert (stats.array(f"{prefix}held_out.{name}") == rows[:24]).all()
            assert (stats.array(f"{prefix}sample.{name}") == rows[stats.array(prefix + "sample.token")]).all()


# Artifacts of 1.1


def widths(plan: SidePlan) -> list[str]:
    """[H], a digit a channel"""
    return ["".join(map(str, row)) for row in plan.tensors["channel_bits"].tolist()]


def side(artifacts, name: str, key: str) -> tuple[SidePlan, dict]:
    """The plan of, for example, `0k`, and the plan's object in the manifest."""
    artifact, layer = artifacts[name], int(key[0])
    return artifact.layers[layer].sides[key[1]], artifact.manifest["layers"][layer][key[1]]


REQUIRES = {
    "kvq": ["trellis", "mixed_widths"],
    "block-gtq": ["codebook", "mixed_widths"],
    "tq-mse": ["codebook", "centroids"],
    "saw-int4": ["codebook", "trellis", "centroids"],
}


@pytest.mark.parametrize("name", NAMES)
def test_features(artifacts, name):
    manifest = artifacts[name].manifest
    assert (manifest["version"], manifest["requires"]) == ("1.1", REQUIRES[name])
    assert manifest["calibration"]["method"] == name


WIDTHS = {
    "kvq": {
        "0k": ["2222222222111100", "2222222211111111"],
        "0v": ["2222222222221111"] * 2,
        "1k": ["2222111111111111"] * 2,
        "1v": ["2222222211111111"] * 2,
    },
    "block-gtq": {
        "0k": ["5333332222221111", "5333322222222111"],
        "0v": ["4444333333333333"] * 2,
        "1k": ["5222222111111100"] * 2,
        "1v": ["6555555555555554", "5555555555555555"],
    },
}
ROW_BYTES = {
    "kvq": {"0k": 8, "0v": 8, "1k": 8, "1v": 8},
    "block-gtq": {"0k": 16, "0v": 12, "1k": 12, "1v": 24},
    "tq-mse": {"0k": 7, "0v": 4, "1k": 7, "1v": 4},
    "saw-int4": {"0k": 17, "0v": 15, "1k": 17, "1v": 15},
}


@pytest.mark.parametrize("name", WIDTHS)
def test_mixed_widths(artifacts, name):
    for key, expected in WIDTHS[name].items():
        plan, facts = side(artifacts, name, key)
        assert widths(plan) == expected
        assert facts["allocation"]["mean_bits"] == plan.tensors["channel_bits"].mean()


@pytest.mark.parametrize("name", NAMES)
def test_row_bytes(artifacts, name):
    for key, expected in ROW_BYTES[name].items():
        plan, facts = side(artifacts, name, key)
        assert plan.row_bytes == expected == facts.get("allocation", {"row_bytes": expected})["row_bytes"]


@pytest.mark.parametrize("name", WIDTHS)
def test_budgets_are_what_the_rows_spend(artifacts, name):
    budget = artifacts[name].manifest["calibration"]["budget"]
    plans = [side(artifacts, name, key)[0] for key in WIDTHS[name]]
    assert (budget["unit"], budget["metric"], budget["held_out_tokens"]) == ("bits", "relative_output", 24)
    assert budget["budget"] == budget["spent"] == {"kvq": 1.5, "block-gtq": 3}[name]
    assert budget["mean_bits"] == np.mean([plan.tensors["channel_bits"] for plan in plans])
    assert budget["mean_bytes"] == sum(2 * plan.row_bytes for plan in plans) / 2  # 2 heads, 2 layers


def test_rope_blocks(artifacts):
    plan, facts = side(artifacts, "kvq", "0k")
    assert facts["allocation"]["unit"] == "rope_block" and facts["allocation"]["score"] == "qk_energy_product"
    assert plan.tensors["block_bits"].tolist() == [[1, 2, 0, 2, 2, 2, 1, 2], [1] * 8]
    # Block i of the layout `half` is the channels i and i + 8; head 1 is rotated as a whole.
    assert plan.tensors["channel_order"][0].tolist() == [1, 9, 3, 11, 4, 12, 5, 13, 7, 15, 0, 8, 6, 14, 2, 10]
    assert (plan.tensors["block_energy"][0] > 0).all() and (plan.tensors["block_energy"][1] == 0).all()


# formats/packing.md, "Trellis tables"
THETA = {
    (2, 1): [1.48225427, 0.918767927, -0.792501826, 0.993044327],
    (2, 2): [-0.886770233, -1.34449962, 0.717407561, -0.0397294397, 0.927222248, -0.814774881],
    (4, 1): [1.2847827, 1.1339953, 0.911722797, 0.601804498, 0.910166869, -0.982628213, -0.266429482, 0.453091539],
}
TRELLISES = [
    ("kvq", "0k", (2, 1)),
    ("kvq", "0v", (2, 2)),
    ("kvq", "1k", (2, 2)),
    ("kvq", "1v", (2, 1)),
    ("saw-int4", "0k", (4, 1)),
    ("saw-int4", "1k", (4, 1)),
]


@pytest.mark.parametrize("name, key, shape", TRELLISES)
def test_trellises_are_the_published_ones(artifacts, name, key, shape):
    plan, facts = side(artifacts, name, key)
    assert facts["trellis"] == [dict(zip(("bits", "memory"), shape))]
    assert plan.tensors["trellis"].tolist() == np.float32(THETA[shape]).tolist()


CODEBOOKS = [
    ("block-gtq", "0k", "sphere", True, [1, 2, 3, 5]),
    ("block-gtq", "0v", "sphere", True, [3, 4]),
    ("block-gtq", "1k", "sphere", True, [1, 2, 5]),
    ("block-gtq", "1v", "sphere", True, [4, 5, 6]),
    ("tq-mse", "0k", "sphere", False, [2]),
    ("tq-mse", "0v", "sphere", False, [1]),
    ("saw-int4", "0v", "fitted", True, [3]),
    ("saw-int4", "1v", "fitted", True, [3]),
]


@pytest.mark.parametrize("name, key, source, per_head, widths", CODEBOOKS)
def test_codebooks(artifacts, name, key, source, per_head, widths):
    plan, facts = side(artifacts, name, key)
    assert facts["codebooks"] == {"bits": widths, "per_head": per_head, "source": source}
    tables = {bits: plan.tensors[f"codebook.{bits}"] for bits in widths}
    assert all(table.shape == ((2, 2**bits) if per_head else (2**bits,)) for bits, table in tables.items())
    mirrored = [np.allclose(table, -table[..., ::-1], atol=1e-6) for table in tables.values()]
    assert all(mirrored) if source == "sphere" else not any(mirrored)  # the sphere's marginal is even, data is not


def test_centroids(artifacts):
    plan, facts = side(artifacts, "tq-mse", "1k")
    assert facts["centroids"].items() >= {"count": 3, "scope": "kv_head", "order": "before"}.items()
    assert plan.tensors["centroids"].shape == (1, 3, 16) and 0 < facts["centroids"]["inertia"][0] < 1
    assert "centroids" not in side(artifacts, "tq-mse", "1v")[1]
    plan, facts = side(artifacts, "saw-int4", "0v")
    assert facts["centroids"].items() >= {"count": 3, "scope": "joint", "order": "after"}.items()
    assert plan.tensors["centroids"].shape == (2, 3, 16) and len(facts["centroids"]["inertia"]) == 2


SCALES = {
    "kvq": ("fp16", "norm"),
    "block-gtq": ("bf16", "least_squares"),
    "tq-mse": ("fp16", "rms"),
    "saw-int4": ("fp32", "norm"),
}


@pytest.mark.parametrize("name", NAMES)
def test_scales(artifacts, name):
    plans = [side(artifacts, name, key)[0] for key in ROW_BYTES[name]]
    assert {(plan.scheme.scale_type, plan.scheme.scale_rule) for plan in plans} == {SCALES[name]}


def test_windows(artifacts):
    assert (artifacts["kvq"].sink_tokens, artifacts["kvq"].recent_tokens) == (2, 4)


# Rows of 1.1 and later


def held_out_rows(stats: SafetensorsFile, layer: int, name: str) -> np.ndarray:
    """float32 [H, N, D], the first held-out tokens."""
    rows = from_bf16_bits(stats.array(f"layers.{layer}.held_out.{name}")[:ROWS])
    return np.ascontiguousarray(rows.transpose(1, 0, 2))


def hex_bits(row: np.ndarray) -> list[str]:
    """binary32 patterns, as formats/vectors.json writes them"""
    return [f"{bits:08x}" for bits in row.view(np.uint32).tolist()]


def coded_rows(version: str) -> list[dict]:
    """The contents of rows.json, computed by the second reader."""
    stats, rows = SafetensorsFile.open(GOLDEN / STATS_OF.get(version, version) / "stats.safetensors"), []
    for name in WITH_ROWS[version]:
        for layer, entry in read(GOLDEN / version / f"{name}.safetensors").layers.items():
            for letter, plan in entry.sides.items():
                x = held_out_rows(stats, layer, letter)
                packed, left = plan.pack_heads(x), plan.reconstruct_heads(x)
                rows += [
                    {
                        "artifact": name,
                        "layer": layer,
                        "side": letter,
                        "head": head,
                        "token": token,
                        "bytes": packed[head, token].tobytes().hex(),
                        "reconstructed_bits": hex_bits(left[head, token]),
                    }
                    for head in range(len(x))
                    for token in range(ROWS)
                ]
    return rows


def golden_rows(version: str = "v1.1") -> list[dict]:
    return json.loads((GOLDEN / version / "rows.json").read_text())


@pytest.mark.parametrize("version", WITH_ROWS)
def test_rows_are_coded_to_the_same_bytes_and_back_to_the_same_bits(version):
    found, expected = coded_rows(version), golden_rows(version)
    assert len(found) == len(expected) == len(WITH_ROWS[version]) * 2 * 2 * 2 * ROWS
    for row, own in zip(found, expected):
        assert row == own


@pytest.mark.parametrize("version", WITH_ROWS)
def test_golden_bytes_mean_the_golden_rows(version):
    artifacts = {name: read(GOLDEN / version / f"{name}.safetensors") for name in WITH_ROWS[version]}
    for row in golden_rows(version):
        plan, head = artifacts[row["artifact"]].layers[row["layer"]].sides[row["side"]], row["head"]
        coded = unpack(np.frombuffer(bytes.fromhex(row["bytes"]), np.uint8)[None], plan.scheme_of(head), plan.dim)
        found = plan.unrotate(decode(coded, plan.scheme_of(head)), head, coded.index)
        assert hex_bits(found[0]) == row["reconstructed_bits"]


def test_golden_rows_use_several_centroids(artifacts):
    """Also: heads that choose together have one centroid for each token."""
    index = {}
    for row in golden_rows():
        if (row["artifact"], row["side"]) in (("tq-mse", "k"), ("saw-int4", "k"), ("saw-int4", "v")):
            token = row["artifact"], row["layer"], row["side"], row["token"]
            index.setdefault(token, []).append(row["bytes"][-2:])  # the last byte: these rows have no padding
    assert {last for heads in index.values() for last in heads} == {"00", "01", "02"}
    assert all(len(set(heads)) == 1 for token, heads in index.items() if token[0] == "saw-int4")
