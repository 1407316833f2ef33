"""kvq-diff as a gate: damaged artifacts fail by the rule that should see it, runs that differ in nothing that matters
pass."""

import json
import os
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from faulty_artifacts import data_start, hashed, with_metadata
from kvq_tools import BIN, ROOT, calibrate, on_terminal, run, succeed

from kvq.safetensors_file import SafetensorsFile

USAGE, INPUT, CHECK_FAILED = 2, 3, 6
NUMPY = {"F32": "<f4", "U8": "u1", "U16": "<u2"}
METHODS = {
    "u-p": ("--method", "oscar", "--composition", "up", "--sink-tokens", 0, "--recent-tokens", 0),
    "oscar": ("--method", "oscar", "--sink-tokens", 0, "--recent-tokens", 0),
    "block-gtq": ("--method", "block-gtq"),
    "kvq": ("--method", "kvq"),
    "saw-int4": ("--method", "saw-int4"),
    "4-means": ("--method", "saw-int4", "--kmeans", 4),
    "k-means": ("--method", "saw-int4", "--kmeans", 16),
    "fitted": ("--method", "quarot", "--codebook", "fitted"),
    # With one scale a row, two bases of a head are so close that the seed decides between them.
    "kvq-orthogonal": ("--method", "kvq", "--transform", "orthogonal", "--scales", "segment", "--weigh", "bits"),
    "orthogonal": ("--method", "quarot", "--coder", "symmetric", "--center", "kv"),
    "balanced": ("--method", "quarot", "--coder", "symmetric", "--center", "kv", "--transform", "balanced"),
    "diagonal": ("--method", "quarot", "--coder", "symmetric", "--center", "kv", "--transform", "diagonal"),
    "klt": ("--method", "block-gtq", "--transform", "klt", "--v-allocation", "channel"),
}


# For tests that change a rotation, and with it the bytes of golden rows, which kvq-diff verifies.
NO_GOLDEN = ("--golden-tokens", 0)


@pytest.fixture(scope="module")
def held_out() -> Path:
    return ROOT / "sample_data/evaluation.h5"


@pytest.fixture(scope="module")
def artifacts(sample, tmp_path_factory) -> Callable[..., Path]:
    folder, made = tmp_path_factory.mktemp("artifacts"), {}

    def make(method: str, *flags: object) -> Path:
        key = (method, *flags)
        if key not in made:
            made[key] = calibrate(sample, folder / f"{method}-{len(made)}.safetensors", *METHODS[method], *flags)
        return made[key]

    return make


def diff(*flags: object) -> tuple[int, dict]:
    """Exit code and the document, checked against the schema."""
    result = run("kvq-diff", "--json", *flags)
    assert result.code in (0, CHECK_FAILED), result
    document = json.loads(result.stdout)
    pytest.importorskip("jsonschema").validate(document, json.loads((ROOT / "formats/diff.schema.json").read_text()))
    assert document["passed"] == (result.code == 0) == all(check["outcome"] != "failed" for check in document["checks"])
    return result.code, document


def failed(document: dict) -> dict[str, str]:
    """Metrics of failed rules, with the place of the worst reading."""
    return {
        check["rule"].split("<")[0].split(">")[0]: check["worst"].get("where", "")
        for check in document["checks"]
        if check["outcome"] == "failed"
    }


# Damage


class Editor:
    """Changes tensors and manifest of an artifact, then writes the artifact with the right content hash."""

    def __init__(self, source: Path):
        self.content = bytearray(source.read_bytes())
        self.file = SafetensorsFile(bytes(self.content), "artifact")
        self.manifest = json.loads(self.file.metadata["kvq.manifest"])

    def tensor(self, name: str) -> np.ndarray:
        entry = self.file.tensors[name]
        count = int(np.prod(entry.shape))
        return np.frombuffer(self.content, NUMPY[entry.dtype], count, data_start(self.content) + entry.begin).reshape(
            entry.shape
        )

    def side(self, layer: int, side: str) -> dict:
        return self.manifest["layers"][layer][side]

    def save(self, path: Path) -> Path:
        text = json.dumps(self.manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        path.write_bytes(hashed(with_metadata(bytes(self.content), kvq__manifest=text)))
        return path


def swap_layers(editor: Editor) -> None:
    for name in [name for name in editor.file.tensors if name.startswith("layers.1.")]:
        one, other = editor.tensor(name), editor.tensor(name.replace("layers.1.", "layers.4."))
        kept = one.copy()
        one[:], other[:] = other, kept


def transpose_rotation(editor: Editor) -> None:
    rotation = editor.tensor("layers.3.k.rotation")
    rotation[1] = rotation[1].T.copy()


def clip_by_half(editor: Editor) -> None:
    editor.side(2, "v")["clip_ratio"][0] = 0.5


def reverse_bits(editor: Editor) -> None:
    bits = editor.tensor("layers.2.k.block_bits")
    bits[0] = bits[0, ::-1].copy()


def wrong_rope(editor: Editor) -> None:
    for layer in editor.manifest["layers"]:
        layer["geometry"]["rope"]["layout"] = "interleaved"


def centroids_of_head(editor: Editor) -> np.ndarray:
    """[C, D] of KV head 1, for in-place changes."""
    return editor.tensor("layers.3.k.centroids")[1]


def shuffle_centroids(editor: Editor) -> None:
    """Permutes all numbers."""
    values = centroids_of_head(editor)
    values[:] = np.random.default_rng(0).permutation(values.reshape(-1)).reshape(values.shape)


def shuffle_centroid_channels(editor: Editor) -> None:
    values = centroids_of_head(editor)
    values[:] = values[:, np.random.default_rng(0).permutation(values.shape[1])].copy()


def centroids_of_another_head(editor: Editor) -> None:
    centroids_of_head(editor)[:] = editor.tensor("layers.3.k.centroids")[0]


def half_centroids(editor: Editor) -> None:
    centroids_of_head(editor)[:] *= np.array(0.5, centroids_of_head(editor).dtype)


def twice_centroids(editor: Editor) -> None:
    centroids_of_head(editor)[:] *= np.array(2, centroids_of_head(editor).dtype)


def reverse_eigenbasis(editor: Editor) -> None:
    """Reverses the order of eigenvectors, and changes the rotation with them."""
    basis, rotation = (editor.tensor(f"layers.3.k.{name}")[1] for name in ("eigenbasis", "rotation"))
    u = basis.astype(np.float64)
    rotation[:] = u[:, ::-1] @ u.T @ rotation.astype(np.float64)
    basis[:] = u[:, ::-1]


def rebalance(editor: Editor) -> None:
    """Scales one channel of a head to a quarter; A and A^-1 stay inverse to each other."""
    rotation, inverse = (editor.tensor(f"layers.3.k.{name}")[1] for name in ("rotation", "inverse"))
    rotation[7] *= np.float32(0.25)
    inverse[:, 7] *= np.float32(4)


def rescale(editor: Editor) -> None:
    editor.tensor("layers.3.k.channel_scale")[1, 7] *= np.float32(0.25)


def other_outliers(editor: Editor) -> None:
    editor.side(3, "k")["transform"]["outlier_gain"][1] *= 4


def mix(editor: Editor, across_widths: bool) -> None:
    """Multiplies every transform by another orthogonal map, inside the channels of one width or across widths."""
    random = np.random.default_rng(3)
    for name in [name for name in editor.file.tensors if name.endswith(".inverse")]:
        inverse, rotation = editor.tensor(name), editor.tensor(name.replace("inverse", "rotation"))
        for head in range(len(inverse)):
            widths = np.zeros(rotation.shape[1])
            if not across_widths and name.replace("inverse", "channel_bits") in editor.file.tensors:
                widths = editor.tensor(name.replace("inverse", "channel_bits"))[head]
            q = np.linalg.qr(np.where(widths[:, None] == widths, random.standard_normal(rotation[head].shape), 0))[0]
            rotation[head], inverse[head] = (
                rotation[head].astype(np.float64) @ q,
                q.T @ inverse[head].astype(np.float64),
            )


CENTROIDS = [shuffle_centroids, shuffle_centroid_channels, centroids_of_another_head, half_centroids, twice_centroids]

DAMAGE = [
    ("k-means", shuffle_centroids, "centroids", "layer 3 k"),
    ("k-means", centroids_of_another_head, "centroids", "layer 3 k"),
    ("u-p", reverse_eigenbasis, "rotation.importance", "layer 3 k"),
    ("oscar", swap_layers, "rotation.covariance", "layer "),
    ("block-gtq", swap_layers, "layers.allocation.hamming", "layer "),
    ("oscar", transpose_rotation, "rotation.factor", "layer 3 k"),
    ("block-gtq", transpose_rotation, "rotation.factor", "layer 3 k"),
    ("kvq-orthogonal", transpose_rotation, "rotation.factor", "layer 3 k"),
    ("kvq", rebalance, "transform.gauge", "layer 3 k"),
    ("oscar", clip_by_half, "clip", "layer 2 v"),
    ("balanced", rebalance, "transform.gauge", "layer 3 k"),
    ("klt", rebalance, "transform.gauge", "layer 3 k"),
    ("diagonal", rescale, "transform.gauge", "layer 3 k"),
    ("klt", other_outliers, "transform.outlier_gain", "layer 3 k"),
    ("block-gtq", reverse_bits, "heads.allocation.hamming", "layer 2 k head 0"),
    ("oscar", wrong_rope, "geometry", ""),
    ("saw-int4", wrong_rope, "geometry", ""),
]


@pytest.mark.parametrize(
    "method, damage, rule, where", DAMAGE, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_damage_fails_by_its_rule(artifacts, tmp_path, method, damage, rule, where):
    """Without a dump: the two files show the damage, and the tool does not refuse them."""
    good = artifacts(method)
    editor = Editor(good)
    damage(editor)
    bad = editor.save(tmp_path / "bad.safetensors")
    code, document = diff(good, bad)
    assert code == CHECK_FAILED and failed(document).get(rule, "nowhere").startswith(where), failed(document)


@pytest.mark.parametrize(
    "method, damage, rule, where",
    [row for row in DAMAGE if row[1] in (swap_layers, transpose_rotation, clip_by_half)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_damage_shows_in_what_it_does(artifacts, held_out, tmp_path, method, damage, rule, where):
    """With a dump: the measured metrics show the damage, even if no other part of the files is compared."""
    good = artifacts(method)
    editor = Editor(good)
    damage(editor)
    rules = [
        word for metric in ("heads.logit_rel_mse<=+25%", "heads.v_rel_mse<=+25%") for word in ("--fail-on", metric)
    ]
    code, document = diff(
        good, editor.save(tmp_path / "bad.safetensors"), "--model", held_out, "--no-default-rules", *rules
    )
    assert code == CHECK_FAILED and failed(document)


def overflowing(tensor: str) -> Callable[[Editor], None]:
    """Makes the stored rows of a head overflow a float, so that measured metrics of the head are NaN or infinite."""

    def damage(editor: Editor) -> None:
        editor.tensor(tensor)[1] *= 3e33

    return damage


@pytest.mark.parametrize(
    "side, metrics",
    [
        ("k", ["logit_rel_mse", "attention_kl.mean", "attention_kl.max", "top10_overlap", "rope_logit_mae"]),
        ("v", ["v_rel_mse", "output_rel_mse"]),
    ],
)
def test_readings_that_are_no_numbers_fail(artifacts, held_out, tmp_path, side, metrics):
    """A rule fails if one layer's reading is NaN or infinite beside finite readings, also if the old reading was not
    finite."""
    good = artifacts("oscar")
    editor = Editor(good)
    overflowing(f"layers.3.{side}.rotation")(editor)
    bad = editor.save(tmp_path / "bad.safetensors")
    rules = [
        f"{prefix}{metric}{limit}"
        for prefix in ("", "layers.", "heads.")
        for metric in metrics
        for limit in (">=-1e30", ">=-99%")
        if not (prefix == "heads." and metric == "attention_kl.max")
    ]
    flags = [word for rule in rules for word in ("--fail-on", rule)]
    for old in (good, bad):
        code, document = diff(old, bad, "--model", held_out, "--no-default-rules", *flags)
        assert code == CHECK_FAILED
        for check in document["checks"]:
            if check["rule"] == "verification<=0":  # the damaged file does not pass kvq-inspect --verify either
                continue
            assert (
                check["outcome"] == "failed"
                and check["reason"] == "not a finite number"
                and check["worst"]["new"] is None
            ), check
            assert check["worst"].get("where", "layer 3").startswith("layer 3")
    text = run(
        "kvq-diff", bad, bad, "--model", held_out, "--no-default-rules", "--fail-on", f"layers.{metrics[0]}<=+5%"
    ).stdout
    assert f"FAIL  layers.{metrics[0]}<=+5%  not a finite number: " in text


def test_what_does_not_apply_is_no_fault(make_dump, tmp_path):
    """A layer without values has no output error, hence no reading; a rule about other layers passes."""
    dump = make_dump(tokens=64, head_dim=32, layers=1, kind="mla_rope", kv_heads=1)
    own = calibrate(dump, tmp_path / "own", "--method", "plain")
    code, document = diff(own, own, "--model", dump)
    assert code == 0 and all(reading["new"] is not None for reading in document["readings"])
    assert not any(
        "output_rel_mse" in reading["metric"] or "v_rel_mse" in reading["metric"] for reading in document["readings"]
    )


@pytest.mark.parametrize("damage", CENTROIDS, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("method", ["4-means", "k-means"])
def test_damaged_centroids_of_one_head_fail_by_what_they_do(artifacts, held_out, tmp_path, method, damage):
    """The distance of centroids cannot tell half of them from those of another seed (formats/diff.md); the default rule
    of logits can."""
    good = artifacts(method)
    editor = Editor(good)
    damage(editor)
    code, document = diff(good, editor.save(tmp_path / "bad.safetensors"), "--model", held_out)
    assert code == CHECK_FAILED and failed(document)["heads.logit_rel_mse"] == "layer 3 head 1"


# Changes that must pass


# kvq compares candidates with seeded random mixing, so another seed may choose other transforms and bytes.
@pytest.mark.parametrize("method", [method for method in METHODS if method != "kvq"])
def test_another_seed_passes(artifacts, held_out, method):
    code, document = diff(artifacts(method), artifacts(method, "--seed", 1), "--model", held_out)
    assert code == 0, failed(document)
    assert {"what": "seed", "old": "0", "new": "1"} in document["differences"]


def test_equal_artifacts_have_no_distance(artifacts, held_out):
    for method in METHODS:
        code, document = diff(artifacts(method), artifacts(method), "--model", held_out)
        assert code == 0 and document["differences"] == []
        for reading in document["readings"]:
            if "old" in reading:
                assert reading["old"] == reading["new"]
            elif reading["metric"] not in ("orthogonality", "allocation.high_bit_jaccard"):
                assert reading["new"] == pytest.approx(0, abs=1e-5), reading


@pytest.mark.parametrize("method", ["oscar", "kvq"])
def test_eigenvector_signs_pass(artifacts, held_out, tmp_path, method):
    """U becomes U S. If R is U times fixed factors, R changes with it: R' = U S U^T R."""
    good, random = artifacts(method, *NO_GOLDEN), np.random.default_rng(3)
    editor = Editor(good)
    for name in [name for name in editor.file.tensors if name.endswith(".eigenbasis")]:
        basis, rotation = editor.tensor(name), editor.tensor(name.replace("eigenbasis", "rotation"))
        for head in range(len(basis)):
            signs = random.choice([-1.0, 1.0], basis.shape[1]).astype(np.float32)
            if method == "oscar":  # in other methods the factors after the basis are random
                u = basis[head].astype(np.float64)
                rotation[head] = (u * signs) @ u.T @ rotation[head].astype(np.float64)
            basis[head] *= signs
    code, document = diff(good, editor.save(tmp_path / "signs.safetensors"), "--model", held_out)
    assert code == 0, failed(document)
    distances = {reading["metric"]: reading["new"] for reading in document["readings"] if "old" not in reading}
    assert (
        distances["rotation.covariance"] < 1e-6
        and distances["rotation.factor"] < 1e-5
        and distances["rotation.angle"] < 0.1
    )


def distances_of(document: dict, metric: str) -> list[float]:
    return [reading["new"] for reading in document["readings"] if reading["metric"] == metric]


@pytest.mark.parametrize("method", ["balanced", "klt"])
def test_orthogonal_maps_inside_a_width_pass(artifacts, held_out, tmp_path, method):
    """The transformed rows differ, but all results agree."""
    good = artifacts(method, *NO_GOLDEN)
    editor = Editor(good)
    mix(editor, across_widths=False)
    code, document = diff(good, editor.save(tmp_path / "mixed.safetensors"), "--model", held_out)
    assert code == 0, failed(document)
    gauges = distances_of(document, "transform.gauge")
    assert len(gauges) == 12 and max(gauges) < 1e-5
    if method == "klt":
        mix(editor, across_widths=True)
        _, document = diff(good, editor.save(tmp_path / "across.safetensors"))
        assert min(distances_of(document, "transform.gauge")) > 0.3


def test_a_transform_beside_none_is_another_way_of_coding(artifacts):
    for old, new in (("orthogonal", "balanced"), ("balanced", "orthogonal"), ("diagonal", "balanced")):
        code, document = diff(artifacts(old), artifacts(new))
        assert code == CHECK_FAILED and "codes" in failed(document)
        assert (
            len(distances_of(document, "transform.gauge")) == 12
            and min(distances_of(document, "transform.gauge")) > 1e-3
        )
        assert {"what": "layer 0 k transform", "old": old, "new": new} in document["differences"]
        assert not distances_of(document, "rotation.factor") and not distances_of(document, "transform.scale")
    _, document = diff(artifacts("orthogonal"), artifacts("balanced"))
    conditions = [reading for reading in document["readings"] if reading["metric"] == "transform.condition"]
    assert len(conditions) == 12 and all(reading["old"] == 1 < reading["new"] < 4096 for reading in conditions)
    _, document = diff(artifacts("orthogonal"), artifacts("fitted"))
    assert not any(reading["metric"].startswith("transform.") for reading in document["readings"])


def test_a_budget_may_choose_other_transforms(artifacts, tmp_path):
    """With a budget, heads may choose other transforms, as they choose widths: this is reported and is no other way of
    coding. Without a budget it is one."""
    for method, codes in (("kvq", 0), ("klt", 1)):
        editor = Editor(artifacts(method))
        kind = editor.side(3, "k")["transform"]["kind"]
        editor.side(3, "k")["transform"]["kind"] = "mixed"
        rotation = editor.side(3, "k")["rotation"]
        rotation["recipe"] = "B" + rotation["recipe"][1:]
        code, document = diff(artifacts(method), editor.save(tmp_path / f"{method}.safetensors"))
        assert {"what": "layer 3 k transform", "old": kind, "new": "mixed"} in document["differences"]
        assert distances_of(document, "codes") == [codes] and (code == 0) == (codes == 0)


def test_more_bits_cost_bytes(artifacts, held_out):
    code, document = diff(artifacts("oscar"), artifacts("oscar", "--bits", 3), "--model", held_out)
    assert code == CHECK_FAILED and {"codes", "bytes_per_token"} <= failed(document).keys()
    assert "output_rel_mse" not in failed(document)
    code, document = diff(
        artifacts("oscar"),
        artifacts("oscar", "--bits", 3),
        "--fail-on",
        "bytes_per_token<=+50%",
        "--fail-on",
        "codes<=99",
        "--fail-on",
        "clip<=1",
    )
    assert code == 0, failed(document)
    back, _ = diff(
        artifacts("oscar", "--bits", 3),
        artifacts("oscar"),
        "--model",
        held_out,
        "--no-default-rules",
        "--fail-on",
        "output_rel_mse<=+100%",
    )
    assert back == CHECK_FAILED


def test_lost_bits_and_other_windows_fail(artifacts):
    for flags, metric in ((("--sink-tokens", 64, "--recent-tokens", 256), "windows"), (("--bits", 3), "codes")):
        code, document = diff(artifacts("saw-int4"), artifacts("saw-int4", *flags))
        assert code == CHECK_FAILED and metric in failed(document)
    code, document = diff(artifacts("block-gtq", "--bits-k", 3), artifacts("block-gtq", "--bits-k", 2.75))
    assert code == CHECK_FAILED and "effective_bits" in failed(document)


def test_a_demanded_rule_without_readings_fails(artifacts, tmp_path):
    """A rule without readings fails: one file has no clip ratios, or geometries differ, so that nothing is measured."""
    code, document = diff(artifacts("oscar"), artifacts("fitted"), "--no-default-rules", "--fail-on", "clip<=0.05")
    assert code == CHECK_FAILED and document["checks"][0]["readings"] == 0
    editor = Editor(artifacts("oscar"))
    wrong_rope(editor)
    code, _ = diff(
        artifacts("oscar"),
        editor.save(tmp_path / "bad.safetensors"),
        "--model",
        ROOT / "sample_data/evaluation.h5",
        "--no-default-rules",
        "--fail-on",
        "attention_kl.p99<=+5%",
    )
    assert code == CHECK_FAILED


def test_windows_that_hold_the_whole_dump_do_not_pass(sample, held_out, tmp_path):
    """Sequences of 149 tokens with windows of 100 and 100: every metric is zero, for valid and for damaged
    artifacts."""
    own, windows = ("--method", "oscar"), ("--sink-tokens", 100, "--recent-tokens", 100)
    covered = calibrate(sample, tmp_path / "covered.safetensors", *own, *windows)
    plain = calibrate(sample, tmp_path / "plain.safetensors", *own, "--sink-tokens", 0, "--recent-tokens", 0)
    beyond = calibrate(sample, tmp_path / "beyond.safetensors", *own, "--sink-tokens", 48, "--recent-tokens", 100)
    junit = tmp_path / "diff.xml"
    for old, new in ((covered, covered), (plain, covered), (covered, plain)):
        code, document = diff(old, new, "--model", held_out, "--fail-on", "windows<=1", "--junit", junit)
        assert code == CHECK_FAILED
        measured = {check["rule"]: check for check in document["checks"] if check["outcome"] == "failed"}
        assert {
            "attention_kl.mean<=+5%",
            "heads.logit_rel_mse<=+25%",
            "top10_overlap>=-2%",
        } <= measured.keys() and "rope_logit_mae<=+5%" not in measured
        assert all(
            "--no-windows" in measured[rule]["reason"] and measured[rule]["readings"] == 0
            for rule in ("attention_kl.mean<=+5%", "heads.logit_rel_mse<=+25%", "top10_overlap>=-2%")
        )
        assert not any(reading["metric"].endswith(("rel_mse", "attention_kl.mean")) for reading in document["readings"])
        failure = next(
            case.find("failure")
            for case in ElementTree.parse(junit).iter("testcase")
            if case.get("name") == "attention_kl.mean<=+5%"
        )
        assert "--no-windows" in failure.get("message")
    text = run("kvq-diff", covered, covered, "--model", held_out)
    assert (
        text.code == CHECK_FAILED
        and "nothing to judge" in text.stdout
        and "--no-windows" in text.stdout.splitlines()[-2]
    )
    assert "--no-windows" in run("kvq-diff", covered, covered, "--model", held_out, "--markdown").stdout
    assert diff(covered, covered, "--model", held_out, "--no-windows")[0] == 0
    assert diff(beyond, beyond, "--model", held_out)[0] == 0, "one token of a sequence is read as codes"


def test_exact_codes_need_no_windows(sample, held_out, tmp_path):
    """An artifact with only exact layers has no codes, which is no fault of the dump."""
    own = calibrate(sample, tmp_path / "own.safetensors", "--method", "plain", "--bits", 16, "--sink-tokens", 200)
    assert diff(own, own, "--model", held_out)[0] == 0


def test_inputs_are_not_overwritten(artifacts, tmp_path):
    good = artifacts("oscar")
    content = good.read_bytes()
    assert run("kvq-diff", good, good, "--junit", good).code == USAGE and good.read_bytes() == content


def test_angles_alone_tell_nothing(artifacts, held_out, tmp_path):
    """Exchanging two eigenvectors with close eigenvalues gives an angle of 90 degrees but no other change, so no
    default rule is about angles."""
    good = artifacts("oscar", *NO_GOLDEN)
    editor = Editor(good)
    basis, rotation = (editor.tensor(f"layers.3.k.{name}")[1] for name in ("eigenbasis", "rotation"))
    u = basis.astype(np.float64)
    order = np.arange(len(u))
    order[[6, 9]] = order[[9, 6]]
    rotation[:] = u[:, order] @ u.T @ rotation.astype(np.float64)
    basis[:] = u[:, order]
    other = editor.save(tmp_path / "other.safetensors")
    code, document = diff(good, other, "--model", held_out)
    assert (
        code == 0
        and max(reading["new"] for reading in document["readings"] if reading["metric"] == "rotation.angle") > 89
    )
    assert diff(good, other, "--fail-on", "rotation.angle<=1")[0] == CHECK_FAILED


# Rules


def test_rules_hold_for_all_readings(artifacts, held_out):
    """A rule of layers.<metric> fails if one layer fails; limits are inclusive."""
    good, other = artifacts("block-gtq"), artifacts("block-gtq", "--seed", 1)
    _, document = diff(good, other, "--model", held_out)
    changes = [
        reading["new"] / reading["old"] - 1
        for reading in document["readings"]
        if reading["metric"] == "layers.output_rel_mse"
    ]
    assert len(changes) == 6
    for limit, passes in ((max(changes) + 1e-9, True), (max(changes) - 1e-6, False)):
        code, document = diff(
            good,
            other,
            "--model",
            held_out,
            "--no-default-rules",
            "--fail-on",
            f"layers.output_rel_mse<={100 * limit:.10f}%",
        )
        assert (code == 0) == passes
        (check,) = document["checks"]
        assert check["readings"] == 6 and check["worst"]["new"] / check["worst"]["old"] - 1 == pytest.approx(
            max(changes)
        )


@pytest.mark.parametrize(
    "rule",
    [
        "",
        "clip",
        "clip<0.1",
        "clip=0.1",
        "clip<=",
        "clip<=x",
        "clip<=1e",
        "clip<=nan",
        "clip<=5 %",
        "telepathy<=1",
        "<=1",
        "attention_kl<=+5%",
        "heads.attention_kl.p99<=+5%",
        "heads.o_proj_rel_mse<=1",
        "attention_kl.p99<=+5%",
    ],
)
def test_rules_that_are_none(artifacts, rule):
    result = run("kvq-diff", artifacts("oscar"), artifacts("oscar"), "--fail-on", rule)
    assert result.code == USAGE and result.stdout == ""
    assert result.stderr.splitlines()[0].startswith("kvq-diff: error: ") and len(result.stderr.splitlines()) <= 2


def test_heads_have_no_output_projection(artifacts, held_out):
    result = run(
        "kvq-diff", artifacts("oscar"), artifacts("oscar"), "--model", held_out, "--fail-on", "heads.o_proj_rel_mse<=1"
    )
    assert result.code == USAGE and 'there is no metric "heads.o_proj_rel_mse"' in result.stderr


def test_a_percentage_of_a_distance_is_refused(artifacts):
    """A distance has no old value. The message suggests a rule, and the suggested rule is accepted."""
    _, document = diff(artifacts("block-gtq"), artifacts("block-gtq"))
    distances = {reading["metric"] for reading in document["readings"] if "old" not in reading}
    assert {"geometry", "orthogonality", "codebook", "allocation.regret", "heads.allocation.hamming"} <= distances
    for metric in sorted(distances):
        result = run("kvq-diff", artifacts("oscar"), artifacts("oscar"), "--fail-on", f"{metric}<=+5%")
        assert result.code == USAGE and f"has no old value; write {metric}<=0.05" in result.stderr.splitlines()[0]
    assert (
        run("kvq-diff", artifacts("block-gtq"), artifacts("block-gtq"), "--fail-on", "allocation.hamming<=0.05").code
        == 0
    )


def test_refusals(artifacts, held_out, make_dump, tmp_path):
    good = artifacts("oscar")
    for flags, code in (
        ((good,), USAGE),
        ((good, "no.safetensors"), INPUT),
        ((good, held_out), INPUT),
        ((good, good, "--no-default-rules"), USAGE),
        ((good, good, "--json", "--markdown"), USAGE),
        ((good, good, "--model", "no.h5"), INPUT),
        ((good, good, "--junit", tmp_path / "no/file.xml"), INPUT),
        ((good, good, "--model", make_dump(layers=6)), INPUT),
    ):
        result = run("kvq-diff", *flags)
        assert (
            result.code == code
            and len([line for line in result.stderr.splitlines() if not line.startswith("hint: ")]) == 1
        ), result


def test_another_model_is_a_finding(artifacts, make_dump, tmp_path):
    other = calibrate(make_dump(layers=6), tmp_path / "other.safetensors", *METHODS["oscar"])
    code, document = diff(artifacts("oscar"), other, "--model", make_dump(layers=6))
    assert code == CHECK_FAILED and "geometry" in failed(document)


# Printed output


def test_text(artifacts, held_out):
    good, other = artifacts("oscar"), artifacts("oscar", "--clip", 0.7)
    result = run("kvq-diff", good, other, "--model", held_out)
    lines = result.stdout.splitlines()
    assert result.code == CHECK_FAILED and lines[-1] == "FAILED" and lines[:2] == [f"old  {good}", f"new  {other}"]
    assert any(line.startswith("FAIL  clip<=0.1") for line in lines) and any(
        line.startswith("options.k.clip") for line in lines
    )
    assert all(len(line) <= 100 for line in lines[2:])
    assert succeed("kvq-diff", good, good).stdout.splitlines()[-1] == "passed"


def test_markdown_and_junit(artifacts, held_out, tmp_path):
    good, bad = artifacts("oscar"), artifacts("oscar", "--clip", 0.7)
    junit = tmp_path / "diff.xml"
    result = run("kvq-diff", good, bad, "--model", held_out, "--markdown", "--junit", junit)
    assert result.code == CHECK_FAILED and result.stdout.startswith("### kvq-diff: failed\n")
    _, document = diff(good, bad, "--model", held_out)
    suite = ElementTree.parse(junit).getroot().find("testsuite")
    cases = suite.findall("testcase")
    assert [case.get("name") for case in cases] == [check["rule"] for check in document["checks"]]
    outcomes = [
        "failed" if case.find("failure") is not None else "skipped" if case.find("skipped") is not None else "passed"
        for case in cases
    ]
    assert outcomes == [check["outcome"] for check in document["checks"]]
    assert (int(suite.get("tests")), int(suite.get("failures"))) == (len(cases), outcomes.count("failed"))
    rows = [line for line in result.stdout.splitlines() if line.startswith("| **FAIL** ") or line.startswith("| pass ")]
    assert len(rows) == len(cases) - outcomes.count("skipped")
    assert all(line.replace("\\|", "").count("|") == 4 for line in rows)


NAMES = [
    b"a|b",
    b"a`b``c",
    b"\xff\xfe",
    b"cut\xe2\x82",
    "ünï".encode(),
    b"tab\tline\nbell\x07",
    b"<&\"'>",
    "\uffff\ufffe".encode(),
    b"\xed\xa0\x80",
]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_names_of_any_bytes(artifacts, tmp_path, name):
    """Linux allows any bytes in file names. JSON, JUnit and Markdown stay well-formed for all of them."""
    path = tmp_path / os.fsdecode(name)
    path.write_bytes(artifacts("fitted").read_bytes())
    junit = tmp_path / "diff.xml"
    result = subprocess.run([BIN / "kvq-diff", path, path, "--json", "--junit", junit], capture_output=True)
    assert result.returncode == 0, result.stderr
    expected = "".join("\ufffd" if "\udc80" <= c <= "\udcff" else c for c in os.fsdecode(name))
    assert json.loads(result.stdout.decode())["new"] == str(tmp_path / expected)
    assert (
        ElementTree.fromstring(junit.read_bytes().decode())
        .find("testsuite")
        .get("name")
        .startswith(f"kvq-diff {tmp_path}")
    )
    markdown = subprocess.run([BIN / "kvq-diff", path, path, "--markdown"], capture_output=True).stdout.decode()
    line = markdown.splitlines()[2]
    assert line.count("`") == 4 and line.startswith("`") and line.endswith("`") and "` against `" in line


def test_names_in_an_artifact_cannot_break_the_markdown(artifacts, tmp_path):
    editor = Editor(artifacts("fitted"))
    editor.manifest["model"]["name"] = "a|b`c`|<b>*d*\n| e |\\|"
    lines = run("kvq-diff", artifacts("fitted"), editor.save(tmp_path / "other"), "--markdown").stdout.splitlines()
    row = next(line for line in lines if line.startswith("| model name "))
    plain = row.replace("\\\\", "")
    assert (
        plain.replace("\\|", "").count("|") == 4
        and plain.count("`") == plain.count("\\`") == 2
        and "<" not in plain.replace("\\<", "")
    )


def test_threads_change_nothing(artifacts, held_out):
    flags = (artifacts("kvq"), artifacts("kvq", "--seed", 1), "--model", held_out, "--json")
    one, three = (run("kvq-diff", *flags, "--threads", threads).stdout for threads in (1, 3))
    assert one == three


def test_a_failure_is_red_on_a_terminal_only(artifacts, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    path, rule = artifacts("fitted"), ("--no-default-rules", "--fail-on", "bytes_per_token<=-1%")
    plain = run("kvq-diff", path, path, *rule)
    colored = on_terminal("kvq-diff", path, path, *rule)
    assert plain.code == colored.code == CHECK_FAILED
    assert "\x1b[31mFAIL\x1b[0m" in colored.stdout and colored.stdout.endswith("\x1b[31mFAILED\x1b[0m\n")
    assert colored.stdout.replace("\x1b[31m", "").replace("\x1b[0m", "") == plain.stdout
    assert on_terminal("kvq-diff", path, path, *rule, NO_COLOR="1").stdout == plain.stdout
    assert "\x1b" not in on_terminal("kvq-diff", path, path).stdout, "nothing fails"
