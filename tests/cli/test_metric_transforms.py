"""Transforms: every method with each of them writes what the loader accepts, the same on any number of threads; what
does not go together is refused in one line; what they are for is said by kvq-calibrate, kvq-inspect and its report."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from dumps import edited
from faulty_artifacts import data_start
from html_tree import Node, charts, parse
from kvq_tools import calibrate, run, succeed

from kvq.safetensors_file import SafetensorsFile

USAGE, PAGE = 2, 80
GAIN = "outlier gain"
FACTORS = np.array([16.0, 64.0])  # for each KV head
MIXED = ("--v-allocation", "channel", "--center", "kv")
ACCEPTED = [
    *(
        (method, kind, ())
        for method in ("oscar", "saw-int4", "tq-mse", "quarot", "random", "plain", "kvq")
        for kind in ("diagonal", "balanced")
    ),
    ("block-gtq", "diagonal", ()),
    ("block-gtq", "balanced", ("--k-allocation", "channel", *MIXED)),
    ("block-gtq", "klt", MIXED),
    ("kvq", "klt", ()),
]
REFUSED = {
    "kmeans": (
        ("--method", "saw-int4", "--kmeans", 4, "--transform", "balanced"),
        "--kmeans",
        "--center goes with transforms",
    ),
    "klt of one width": (
        ("--method", "quarot", "--transform", "klt"),
        "klt gives channels widths of their own",
        "use --transform balanced",
    ),
    "balanced RoPE blocks": (
        ("--method", "block-gtq", "--transform-k", "balanced"),
        "mixes channels",
        "use --transform diagonal",
    ),
    "a word": (
        ("--transform", "sideways"),
        '--transform: unknown "sideways"',
        "choose one of orthogonal, diagonal, balanced, klt",
    ),
    "a word for keys": (
        ("--transform-k", "none"),
        '--transform-k: unknown "none"',
        "choose one of orthogonal, diagonal, balanced, klt",
    ),
}


def scaled(file) -> None:
    """Multiplies key channels 3 and 5 by 16 in head 0 and by 64 in head 1, and divides their queries; does the same
    with value channel 7 and divides the columns of o_proj."""
    random = np.random.default_rng(1)
    for group in file["layers"].values():
        k, q, v = (np.asarray(group[name]) for name in "kqv")
        of_queries = np.repeat(FACTORS, q.shape[1] // k.shape[1])
        for channel in (3, 5):
            k[:, :, channel] *= FACTORS
            q[:, :, channel] /= of_queries
        v[:, :, 7] *= FACTORS
        for name, rows in (("k", k), ("q", q), ("v", v)):
            group[name][...] = rows
        o_proj = random.standard_normal((40, q.shape[1], v.shape[2]))
        o_proj[:, :, 7] /= of_queries
        group.create_dataset("o_proj", data=o_proj.reshape(40, -1).astype(np.float16))


def without_o_proj(file) -> None:
    for group in file["layers"].values():
        del group["o_proj"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("transforms")


@pytest.fixture(scope="module")
def plain(make_dump, folder) -> Path:
    """Many tokens, so that covariances need little regularization, and heads without outliers."""
    return make_dump(head_dim=32, v_head_dim=48, tokens=600, layers=2, q_heads=4, kv_heads=2)


@pytest.fixture(scope="module")
def dump(plain, folder) -> Path:
    return edited(plain, folder / "scaled.h5", scaled)


@pytest.fixture(scope="module")
def artifact(dump, folder):
    """Makes artifacts by their flags; each is made once."""
    made: dict[tuple, Path] = {}

    def make(*flags: object) -> Path:
        if flags not in made:
            made[flags] = calibrate(dump, folder / f"artifact{len(made)}.safetensors", *flags)
        return made[flags]

    return make


def manifest_of(path: Path) -> dict:
    return json.loads(SafetensorsFile(path.read_bytes(), "artifact").metadata["kvq.manifest"])


def tensor(path: Path, name: str) -> np.ndarray:
    content = path.read_bytes()
    entry = SafetensorsFile(content, "artifact").tensors[name]
    assert entry.dtype == "F32"
    return (
        np.frombuffer(content, "<f4", int(np.prod(entry.shape)), data_start(content) + entry.begin)
        .reshape(entry.shape)
        .astype(float)
    )


def transforms(path: Path) -> dict[tuple[int, str], dict]:
    """The manifest's transform of each layer and side."""
    return {
        (layer["layer"], side): layer[side].get("transform") for layer in manifest_of(path)["layers"] for side in "kv"
    }


# What is written


@pytest.mark.parametrize("method, kind, flags", ACCEPTED, ids=lambda value: value if isinstance(value, str) else "")
def test_every_method_with_each_transform_is_accepted(dump, artifact, tmp_path, method, kind, flags):
    path = artifact("--method", method, "--transform", kind, *flags)
    checks = json.loads(succeed("kvq-inspect", path, "--verify", "--json").stdout)["verify"]
    assert all(check["passed"] for check in checks) and len(checks) >= 3
    manifest = manifest_of(path)
    for side in "kv":
        assert manifest["calibration"]["options"][side]["transform"] == kind
    for (layer, side), said in transforms(path).items():
        assert said["kind"] == kind and len(said["outlier_gain"]) == len(said["condition"]) == 2
        assert all(gain > 2 for gain in said["outlier_gain"]) and all(
            1 <= condition <= 4096 for condition in said["condition"]
        )
        rotation = manifest["layers"][layer][side]["rotation"]
        if rotation["kind"] == "dense":
            a, inverse = (tensor(path, f"layers.{layer}.{side}.{name}") for name in ("rotation", "inverse"))
            assert np.abs(inverse @ a - np.eye(a.shape[-1])).max() < 1e-4
        else:
            scale = tensor(path, f"layers.{layer}.{side}.channel_scale")
            assert (
                kind == "diagonal"
                and not (scale.astype("<f4").view("<u4") & 0xFFFF).any()
                and scale.max() >= 4 * scale.min()
            )
    again = [
        calibrate(dump, tmp_path / str(threads), "--method", method, "--transform", kind, *flags, "--threads", threads)
        for threads in (1, 2)
    ]
    assert again[0].read_bytes() == again[1].read_bytes() == path.read_bytes()


def test_orthogonal_is_what_there_is_without_the_flag(artifact):
    for method in ("oscar", "saw-int4", "block-gtq"):
        assert (
            artifact("--method", method, "--transform", "orthogonal").read_bytes()
            == artifact("--method", method).read_bytes()
        )
        assert set(transforms(artifact("--method", method)).values()) == {None}


def test_sides_have_their_own_transforms(artifact):
    path = artifact("--method", "quarot", "--transform", "diagonal", "--transform-v", "balanced")
    assert [transforms(path)[0, side]["kind"] for side in "kv"] == ["diagonal", "balanced"]
    path = artifact("--method", "quarot", "--transform-k", "balanced")
    assert transforms(path)[0, "k"]["kind"] == "balanced" and transforms(path)[0, "v"] is None


def test_balanced_rows_have_smaller_errors(artifact):
    errors = [
        manifest_of(artifact("--method", "quarot", "--coder", "symmetric", "--center", "kv", "--transform", kind))[
            "layers"
        ][0]
        for kind in ("diagonal", "balanced")
    ]
    orthogonal = manifest_of(artifact("--method", "quarot", "--coder", "symmetric", "--center", "kv"))["layers"][0]
    assert all(own["k"]["error"]["after"] < 0.5 * orthogonal["k"]["error"]["after"] for own in errors)


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_is_refused(dump, tmp_path, name):
    flags, what, hint = REFUSED[name]
    result = run("kvq-calibrate", "--model", dump, "--output", tmp_path / "out", *flags)
    error, *hints = result.stderr.splitlines()
    assert result.code == USAGE and result.stdout == "" and not list(tmp_path.iterdir())
    assert (
        error.startswith("kvq-calibrate: error: ")
        and what in error
        and len(hints) == 1
        and hints[0].startswith("hint: ")
        and hint in hints[0]
    )


# What kvq-calibrate says


def hints(*flags: object) -> list[str]:
    return succeed("kvq-calibrate", *flags).stderr.splitlines()


def test_a_head_that_lacks_a_transform_is_named(dump, artifact, tmp_path):
    gains = transforms(artifact("--method", "quarot", "--transform", "balanced"))
    (layer, side), worst = max(gains.items(), key=lambda item: max(item[1]["outlier_gain"]))
    head = int(np.argmax(worst["outlier_gain"]))
    (line,) = hints("--model", dump, "--output", tmp_path / "out", "--method", "quarot")
    name = {"k": "keys", "v": "values"}[side]
    found = re.fullmatch(
        rf"hint: layer {layer} {name}, head {head}: outlier gain (\S+) that an orthogonal rotation leaves; "
        r"try --transform balanced",
        line,
    )
    assert found and float(found[1]) == pytest.approx(worst["outlier_gain"][head], rel=0.006)
    said = hints("--model", dump, "--output", tmp_path / "out", "--method", "block-gtq", "--bits-v", 16)
    assert len(said) == 1 and said[0].endswith("; try --transform-k diagonal")
    for quiet in (("--quiet",), ("--bits", 16), ("--transform", "balanced"), ("--kmeans", 4)):
        assert hints("--model", dump, "--output", tmp_path / "out", "--method", "quarot", *quiet) == [], quiet


def test_heads_without_outliers_get_no_hint(plain, tmp_path):
    assert hints("--model", plain, "--output", tmp_path / "out", "--method", "quarot") == []


def test_values_without_o_proj_get_the_identity_and_say_so(dump, tmp_path):
    bare = edited(dump, tmp_path / "bare.h5", without_o_proj)
    said = hints(
        "--model",
        bare,
        "--output",
        tmp_path / "out",
        "--method",
        "quarot",
        "--transform",
        "balanced",
        "--stats",
        tmp_path / "stats",
    )
    assert (
        len(said) == 1
        and "no o_proj metric" in said[0]
        and "the identity stood in for it" in said[0]
        and said[0].endswith("dump again with dump_qkv.py")
    )
    assert all(
        check["passed"]
        for check in json.loads(succeed("kvq-inspect", tmp_path / "out", "--verify", "--json").stdout)["verify"]
    )
    assert (
        hints(
            "--stats",
            tmp_path / "stats",
            "--output",
            tmp_path / "again",
            "--method",
            "quarot",
            "--transform",
            "balanced",
        )
        == said
    )
    assert (tmp_path / "again").read_bytes() == (tmp_path / "out").read_bytes()
    assert (
        hints(
            "--stats",
            tmp_path / "stats",
            "--output",
            tmp_path / "keys",
            "--method",
            "quarot",
            "--transform-k",
            "balanced",
            "--bits-v",
            16,
        )
        == []
    )
    assert hints("--model", dump, "--output", tmp_path / "out", "--method", "quarot", "--transform", "balanced") == []


def test_table_and_json_have_the_gains(dump, tmp_path):
    flags = ("--model", dump, "--output", tmp_path / "out", "--method", "quarot", "--transform-k", "balanced")
    lines = succeed("kvq-calibrate", *flags).stdout.splitlines()
    gains = transforms(tmp_path / "out")
    assert (
        lines[0].split()[-1] == "gain"
        and max(len(line) for line in lines if str(tmp_path) not in line) <= PAGE
        and any("outlier gain" in line for line in lines)
    )
    assert (
        float(lines[1].split()[-1]) == pytest.approx(max(gains[0, "k"]["outlier_gain"]), rel=0.006)
        and lines[2].split()[-1] == "-"
    )
    said = json.loads(succeed("kvq-calibrate", *flags, "--json").stdout)["layers"]
    assert said[1]["k"]["transform"] == gains[1, "k"] and "transform" not in said[1]["v"]
    assert (
        "gain"
        not in succeed("kvq-calibrate", "--model", dump, "--output", tmp_path / "out", "--method", "quarot").stdout
    )


def test_report_of_outliers_does_not_depend_on_the_transform(dump, tmp_path):
    flags = ("--model", dump, "--output", tmp_path / "out", "--method", "quarot", "--report-outliers")
    tables, documents = [], []
    for kind in ("orthogonal", "balanced"):
        blocks = succeed("kvq-calibrate", *flags, "--transform", kind).stdout.split("\n\n")
        tables += [block for block in blocks if block.startswith("Outlier gain")]
        documents.append(json.loads(succeed("kvq-calibrate", *flags, "--transform", kind, "--json").stdout)["outliers"])
    assert tables[0] == tables[1]
    gains = transforms(tmp_path / "out")
    title, _, header, *lines = tables[0].splitlines()  # the title has two lines
    assert (
        title.startswith("Outlier gain")
        and header.split() == ["layer", "side", "head", "0", "head", "1"]
        and len(lines) == 4
    )
    for document in documents:
        for layer in document:
            for side in "kv":
                assert layer[side] == pytest.approx(gains[layer["layer"], side]["outlier_gain"], rel=1e-9)
    assert [float(word) for word in lines[1].split()[1:]] == pytest.approx(documents[0][0]["v"], rel=0.006)


@pytest.mark.parametrize(
    "flags",
    [
        ("--method", "quarot", "--transform", "diagonal"),
        ("--method", "quarot", "--transform", "balanced"),
        ("--method", "oscar", "--transform", "diagonal"),
        ("--method", "block-gtq", "--transform", "klt"),
        ("--method", "kvq", "--transform", "klt"),
        ("--method", "saw-int4", "--random-signs", "--transform-k", "diagonal"),
    ],
    ids=lambda flags: " ".join(flags[1:]),
)
def test_predicted_size_is_near_what_is_written(sample, tmp_path, flags):
    written = calibrate(sample, tmp_path / "out", *flags).stat().st_size
    said = json.loads(
        succeed("kvq-calibrate", "--model", sample, "--output", tmp_path / "out", "--dry-run", "--json", *flags).stdout
    )
    assert said["artifact_bytes"] == pytest.approx(written, rel=0.1)


def test_predicted_size_has_room_for_every_transform_that_may_be_chosen(sample, tmp_path):
    flags = ("--method", "kvq")
    written = calibrate(sample, tmp_path / "out", *flags).stat().st_size
    said = json.loads(
        succeed("kvq-calibrate", "--model", sample, "--output", tmp_path / "out", "--dry-run", "--json", *flags).stdout
    )
    assert written < said["artifact_bytes"] < 1.25 * written


# What kvq-inspect says

TOLD = {
    "balanced": ("--method", "quarot", "--transform", "balanced"),
    "klt": ("--method", "kvq", "--transform", "klt"),
    "clipped": ("--method", "oscar", "--bits", 3, "--transform", "diagonal"),
    "keys": ("--method", "quarot", "--codebook", "fitted", "--transform-k", "diagonal"),
}


@pytest.mark.parametrize("name", TOLD)
def test_overview_shows_transforms_and_gains(artifact, name):
    path = artifact(*TOLD[name])
    lines = succeed("kvq-inspect", path).stdout.splitlines()
    assert max(map(len, lines)) <= PAGE and sum(GAIN in line for line in lines) >= 1
    header = next(line for line in lines if line.startswith("layer  side"))
    assert "transform" in header and ("clip" in header) == (name in ("balanced", "clipped"))
    table = iter(lines[lines.index(header) + 1 :])
    for said in transforms(path).values():
        line = next(table)
        if said is None:
            assert header.index("transform") == line.index(" - ", header.index("rotation")) + 1
            continue
        found = re.search(rf"  {said['kind']} (?:(\S+)-)?(\S+)  ", line)
        assert float(found[2]) == pytest.approx(max(said["outlier_gain"]), rel=0.06)
        assert bool(found[1]) == all("largest outlier gain" not in line for line in lines)
        if found[1]:
            assert float(found[1]) == pytest.approx(min(said["outlier_gain"]), rel=0.06)


def test_without_transforms_nothing_is_said_of_them(artifact, tmp_path):
    path = artifact("--method", "quarot")
    for flags in ((), ("--layer", 0), ("--layer", 0, "--head", 1), ("--json",)):
        assert (
            "transform" not in succeed("kvq-inspect", path, *flags).stdout.replace(str(path), "")
            and GAIN not in succeed("kvq-inspect", path, *flags).stdout
        )
    succeed("kvq-inspect", path, "--html", tmp_path / "report.html")
    assert "ransform" not in re.sub(r'transform="[^"]*"', "", (tmp_path / "report.html").read_text())


@pytest.mark.parametrize("name", TOLD)
def test_layers_and_heads_have_gain_and_condition(artifact, name):
    path = artifact(*TOLD[name])
    for (layer, side), said in transforms(path).items():
        text = succeed("kvq-inspect", path, "--layer", layer).stdout
        assert max(map(len, text.splitlines())) <= PAGE + 40 and text.count("outlier gain:") == 1
        own = json.loads(succeed("kvq-inspect", path, "--layer", layer, "--head", 1, "--json").stdout)["head"][side]
        page = succeed("kvq-inspect", path, "--layer", layer, "--head", 1).stdout
        if said is None:
            assert own is None
            continue
        assert own["transform"] == {
            "kind": said["kind"],
            "outlier_gain": said["outlier_gain"][1],
            "condition": said["condition"][1],
        }
        gain, condition = said["outlier_gain"][1], said["condition"][1]
        assert f"transform {said['kind']}, outlier gain {gain:.4g}, condition {condition:.4g}" in page
        part = text.split("\nkeys  " if side == "k" else "\nvalues")[1]
        for head in range(2):
            assert re.search(
                rf"^ *{head} .* {said['outlier_gain'][head]:.4g} +{said['condition'][head]:.4g}( |$)",
                part,
                re.MULTILINE,
            )


def test_json_has_channel_scales(artifact):
    path = artifact(*TOLD["clipped"])
    layer = json.loads(succeed("kvq-inspect", path, "--json").stdout)["layers"][1]
    for side in "kv":
        said = layer[side]["transform"]
        assert {key: said[key] for key in ("kind", "outlier_gain", "condition")} == transforms(path)[1, side]
        if manifest_of(path)["layers"][1][side]["rotation"]["kind"] != "dense":
            assert np.array_equal(said["channel_scale"], tensor(path, f"layers.1.{side}.channel_scale"))
    scaled_side = json.loads(succeed("kvq-inspect", artifact(*TOLD["keys"]), "--json").stdout)["layers"][0]["k"][
        "transform"
    ]
    assert np.array_equal(scaled_side["channel_scale"], tensor(artifact(*TOLD["keys"]), "layers.0.k.channel_scale"))


def section_of(html: str) -> Node | None:
    return next((node for node in parse(html).all("section") if node.attributes["id"] == "transforms"), None)


@pytest.mark.parametrize("name", TOLD)
def test_report_draws_every_head(artifact, tmp_path, name):
    path, report = artifact(*TOLD[name]), tmp_path / "report.html"
    succeed("kvq-inspect", path, "--html", report)
    html = report.read_text()
    (figure,) = section_of(html).all("figure")
    titles = [node.text() for node in figure.all("title")]
    expected = {
        f"layer {layer} {'keys' if side == 'k' else 'values'} head {head}": gain
        for (layer, side), said in transforms(path).items()
        if said
        for head, gain in enumerate(said["outlier_gain"])
    }
    drawn = {title.rsplit(": ", 1)[0]: float(title.rsplit(": ", 1)[1]) for title in titles}
    assert drawn.keys() == expected.keys() and all(
        drawn[place] == pytest.approx(gain, rel=5.1e-4) for place, gain in expected.items()
    )
    rows = figure.first("table").rows()
    assert len(rows) == 1 + sum(1 for layer, side in transforms(path) if name != "keys" or side == "k")
    assert rows[1][1] == transforms(path)[0, "k"]["kind"]
    assert any(link.attributes["href"] == "#transforms" for link in parse(html).all("a")) and charts(html)
