"""What the tools say of an artifact: its size, error and kernels, what it was calibrated on, and what its letters mean.

All lines of tables and legends fit 80 columns.
"""

import json
import re
from pathlib import Path

import h5py
import pytest
from calibrations import GEOMETRIES, SMALL, USAGE
from dumps import edited, synthetic
from kernel_table import tuned_kernels
from kvq_tools import ROOT, calibrate, run, succeed

METHODS = {
    "oscar": (),
    "tuned": ("--composition", "uh", "--group-size", 128),
    "symmetric": ("--method", "quarot", "--coder", "symmetric", "--center", "kv"),
    "residual": ("--composition", "residual"),
    "saw-int4": ("--method", "saw-int4"),
    "balanced": ("--method", "saw-int4", "--transform", "balanced"),
    "diagonal": ("--method", "saw-int4", "--transform", "diagonal", "--random-signs"),
    "block-gtq": ("--method", "block-gtq"),
    "tq-mse": ("--method", "tq-mse"),
    "kvq": ("--method", "kvq", "--budget-bits", 2),
    "kmeans": ("--method", "saw-int4", "--kmeans", 4),
    "random": ("--method", "random", "--bits-k", 5),
    "three": ("--method", "plain", "--bits", 3, "--zero", "integer", "--scale-type", "fp32"),
    "plain": ("--method", "plain", "--share", "layer"),
    "exact": ("--bits-v", 16),
}
MIXED = {"block-gtq", "kvq"}  # rows of packing.md are padded otherwise than those of pages
TUNED = {
    *("oscar", "residual", "tuned", "symmetric", "saw-int4", "kmeans", "balanced", "diagonal", "plain"),
    *("block-gtq", "tq-mse"),
}
SEVERAL = {"kvq"}  # layers have formats of their own; tuned kernels decode them
VERBS = ("decode", "quantize_write", "dequantize", "prefill")


def wide_lines(text: str) -> list[str]:
    return [line for line in re.sub("\x1b\\[[0-9;]*m", "", text).splitlines() if len(line) > 80]


@pytest.fixture(scope="module")
def said(sample, tmp_path_factory) -> dict[str, tuple[str, Path]]:
    """What kvq-calibrate prints by method, and its artifact."""
    folder = tmp_path_factory.mktemp("says")
    results = {}
    for name, flags in METHODS.items():
        done = succeed(
            "kvq-calibrate", "--model", sample, "--output", f"{name}.st", "--layers", "1,5", *flags, cwd=folder
        )
        results[name] = done.stdout, folder / f"{name}.st"
    return results


def inspect(path: Path, *flags: object) -> str:
    return succeed("kvq-inspect", path, *flags).stdout


def inspected(path: Path, *flags: object) -> dict:
    return json.loads(inspect(path, "--json", *flags))


# Tables


@pytest.mark.parametrize("name", METHODS)
def test_tables_fit_the_page(said, name):
    text, path = said[name]
    views = [("--layer", 5), ("--layout",), ("--layer", 5, "--head", 1), ("--layer", 5, "--layout")]
    for view in [(), *views]:
        text += inspect(path, *view)
    assert wide_lines(text) == []


@pytest.mark.parametrize("name", METHODS)
def test_errors_have_arrows_and_are_marked(said, name):
    text, path = said[name]
    for own in (text, inspect(path), inspect(path, "--layer", 5)):
        assert re.search(r"\d\.\d+ -> \d\.\d+", own) and "in sample" in " ".join(own.split())
        assert not re.search(r"\d > \d", own)


LETTERS = {
    "oscar": "UHP",
    "tuned": "UH",
    "symmetric": "cH",
    "saw-int4": "HI",
    "diagonal": "HSD",
    "tq-mse": "",
    "kvq": "cGSH",
}


@pytest.mark.parametrize("name", LETTERS)
def test_letters_are_explained(said, name):
    text, path = said[name]
    recipes = {layer[side]["rotation"]["recipe"] for layer in inspected(path)["manifest"]["layers"] for side in "kv"}
    for own in (text, inspect(path)):
        (legend,) = re.findall(r"^rotation: ((?:.|\n)*?)\.$", own, re.MULTILINE)
        letters = {entry.split()[0] for entry in legend.split(",")}
        wanted = set(re.findall("[A-Z][a-z]*", " ".join(recipes)))
        assert letters - {"c"} == wanted
        assert ("c" in letters) == ("c" in LETTERS[name])
        assert set(LETTERS[name]) <= letters | wanted


@pytest.mark.parametrize("tool", ["kvq-calibrate", "kvq-inspect"])
def test_help_explains_letters(tool):
    text = succeed(tool, "--help").stdout
    for letter, meaning in [("U", "eigenbasis"), ("G", "channels sorted by width"), ("S", "random signs")]:
        assert re.search(rf"^ +{letter} +{meaning}", text, re.MULTILINE), letter


def test_mixed_rows_show_mean_bits(said):
    text, path = said["kvq"]
    shown = [float(bits) for bits in re.findall(r" - +(\d\.\d\d) +\d+\.\d\d  \d\.\d{4} -> ", text)]
    means = [layer[side]["allocation"]["mean_bits"] for layer in inspected(path)["manifest"]["layers"] for side in "kv"]
    assert shown == pytest.approx(means, abs=0.006)


def test_reports_fit_the_page(sample, tmp_path):
    flags = ("--layers", "1,5", "--report-rotations", "--report-outliers")
    text = succeed("kvq-calibrate", "--model", sample, "--output", "out", *flags, cwd=tmp_path).stdout
    assert "Lemma 1" in text and wide_lines(text) == []


def test_evaluations_fit_the_page(said):
    paths = [said[name][1] for name in ("oscar", "symmetric", "kvq")]
    flags = ("--model", ROOT / "sample_data/evaluation.h5", "--layers", 5, "--no-windows", "--scheme", "kivi-2")
    text = succeed("kvq-eval", *flags, "--by-context", "--rotations", *paths).stdout
    text += succeed("kvq-eval", *flags, "--metric", "attention_kl", *paths).stdout
    assert wide_lines(text) == []


# Verdict


@pytest.mark.parametrize("name", METHODS)
def test_verdict(said, name):
    text, path = said[name]
    layout = inspected(path, "--layout")["layout"]
    size = re.search(r"^size +(\d+) bytes a token and layer in place of (\d+);((?:.|\n)*?)\(([0-9.]+)x\)", text, re.M)
    bytes_of = [layer["bytes_per_token"] for layer in layout["layers"]]
    assert int(size[1]) == round(sum(bytes_of) / 2) and int(size[2]) == 2 * 2 * 256
    assert float(size[4]) == pytest.approx(layout["bf16_bytes"] / layout["cache_bytes"], abs=0.06)
    assert "MB in place of" in " ".join(size[3].split()) and "32k tokens" in " ".join(size[3].split())
    error = re.search(r"^error    ((?:.|\n)*?)^serving", text, re.M)[1]
    assert ("held-out tokens" in error) == (name == "kvq") and ("in sample" in error) == (name != "kvq")
    assert text.splitlines()[-1] == f"next     kvq-eval --model HELDOUT.h5 --no-windows {name}.st"


def test_verdict_in_json(sample, tmp_path):
    flags = ("--held-out-tokens", 100, "--layers", 3, "--json", "--context", 1000, "--output", tmp_path / "a b")
    document = json.loads(succeed("kvq-calibrate", "--model", sample, *flags).stdout)
    verdict = document["verdict"]
    assert verdict["error_of"] == "held_out" and verdict["held_out"]["tokens"] == 100
    assert 0 < verdict["held_out"]["output_error"] < verdict["held_out"]["baseline_error"] < 2
    assert verdict["context"] == 1000 and verdict["times_smaller"] == pytest.approx(
        verdict["bf16_bytes"] / verdict["cache_bytes"]
    )
    error = document["layers"][0]["k"]["error"]
    assert verdict["in_sample"]["k"] == {"baseline": error["before"], "plan": error["after"]}
    assert verdict["next"].endswith(f"'{tmp_path}/a b'")
    assert document["missing_layers"] == [0, 1, 2, 4, 5]
    assert inspected(tmp_path / "a b")["manifest"]["calibration"]["held_out"] == verdict["held_out"]
    assert "held out" in inspect(tmp_path / "a b")


# Serving


@pytest.mark.parametrize("name", METHODS)
def test_serving_is_said(said, name):
    text, path = said[name]
    document = inspected(path, "--layout")
    serving, layers = document["serving"], document["layout"]["layers"]
    overview = inspect(path)
    layout = inspect(path, "--layout")
    for own in (text, overview):
        line = re.search(r"^serving +(.*)$", own, re.M)[1]
        assert line.startswith("tuned kernels for ") == (name in TUNED)
        assert line.startswith("layers 1: tuned kernels for ") == (name in SEVERAL)
        assert line.startswith("generic, slower kernels for ") == (name not in TUNED | SEVERAL)
    assert [layer["served"] for layer in serving["layers"]] == [True] * 2
    assert serving["word"] == ("tuned" if name in TUNED | SEVERAL else "generic")
    assert "not served" not in layout
    assert "bytes/page" in layout and "page: " in layout
    assert all(layer["bytes_per_page"] > 0 and layer["alignment"] >= 16 for layer in layers)
    if name not in MIXED:
        assert all(layer["bytes_per_page"] == 64 * layer["bytes_per_token"] for layer in layers)


def side_name(plan: dict) -> str:
    """The format of a side as variants.json writes it."""
    if plan["coder"] == "exact":
        return "bf16"
    letter = {"affine": "u", "symmetric": "s"}[plan["coder"]]
    zero = "z" if plan["coder"] == "affine" and plan["zero"] == "integer" else ""
    index = "" if "centroids" not in plan else "i1" if plan["centroids"]["count"] <= 256 else "i2"
    number = {"bf16": "b", "fp32": "f"}.get(plan["scale_type"], "")
    return f"{letter}{plan['bits']}g{plan['group_size']}{zero}{number}{index}"


def expected_kernel(variants: dict, verb: str, k: str, v: str, activation: str) -> str:
    for row in variants[verb]:
        if (
            row["head_dim"] == 128
            and row.get("k", k) == k
            and row.get("v", v) == v
            and row.get("activation", activation) == activation
        ):
            return "tuned"
    return "generic"


FORMATS = [
    ("--group-size", 128),
    ("--group-size", 64, "--scale-type", "bf16"),
    ("--coder", "symmetric", "--group-size", 128),
    ("--bits-k", 4, "--group-size", 128),
    ("--bits", 4, "--group-size", 128),
    ("--bits-k", 16, "--bits-v", 16),
    ("--bits-k", 16, "--group-size", 128),
    ("--bits-v", 4, "--group-size", 32),
    ("--bits", 3, "--group-size", 128),
    ("--bits", 2, "--group-size", 128, "--zero", "integer"),
    ("--bits", 4, "--group-size", 128, "--scale-type", "fp32"),
    ("--bits", 3, "--group-size", 64, "--zero", "integer", "--scale-type", "fp32"),
    ("--coder", "symmetric", "--bits", 3, "--group-size", 128, "--scale-type", "bf16"),
    ("--bits", 4, "--group-size", 128, "--kmeans", 4),
    ("--bits", 4, "--group-size", 128, "--kmeans-v", 4),
]


@pytest.mark.parametrize("flags", FORMATS, ids=str)
def test_kernels_are_those_of_the_table(short, tmp_path, flags):
    """A second reading of variants.json. tests/unit/runtime/kernel_choice_test.cpp asks the runtime itself."""
    variants = tuned_kernels()
    artifact = calibrate(short, tmp_path / "out", "--method", "plain", "--layers", 0, "--golden-tokens", 0, *flags)
    document = inspected(artifact)
    (plans,), (said_of,) = document["manifest"]["layers"], document["serving"]["layers"]
    k, v = (side_name(plans[side]) for side in "kv")
    assert said_of["format"] == (k if k == v else f"{k}/{v}")
    for activation in ("bf16", "fp16"):
        assert said_of["kernels"][activation] == {
            verb: expected_kernel(variants, verb, k, v, activation) for verb in VERBS
        }


def test_layers_are_served_differently(short, tmp_path):
    artifact = calibrate(short, tmp_path / "out", "--method", "saw-int4", "--layers", "0-2", "--exact-layers", 1)
    overview = inspect(artifact)
    assert "layers 0, 2: tuned kernels for u4g128" in overview and "layers 1: tuned kernels for bf16" in overview


@pytest.mark.parametrize(("head_dim", "group"), [(320, 64), (20, 20)])
def test_heads_beyond_all_kernels_are_not_served(tmp_path, head_dim, group):
    dump = synthetic(tmp_path / "dump.h5", head_dim=head_dim, tokens=48, sequences=1, layers=1, q_heads=2, kv_heads=1)
    artifact = calibrate(dump, tmp_path / "out", "--method", "plain", "--group-size", group)
    assert inspected(artifact)["serving"]["word"] == "not served"
    for text in (inspect(artifact), inspect(artifact, "--layout")):
        assert f"not served: head_dim: supported multiples of 8 up to 256, found {head_dim}" in " ".join(text.split())


def test_page_sizes_that_pages_lack(said):
    layout = inspect(said["tuned"][1], "--layout", "--page-size", 48)
    assert "page_size: supported 16, 32, 64, 128, found 48" in layout
    assert all(
        layer["bytes_per_page"] is None
        for layer in inspected(said["tuned"][1], "--layout", "--page-size", 48)["layout"]["layers"]
    )


def test_report_says_how_it_is_served(said, tmp_path):
    for name, word in [("kvq", "tuned"), ("random", "generic"), ("tuned", "tuned")]:
        succeed("kvq-inspect", said[name][1], "--html", tmp_path / "report.html")
        html = (tmp_path / "report.html").read_text()
        assert 'id="serving"' in html and f'<dd class="big">{word}</dd>' in html


def test_report_lists_what_the_method_uses(said, tmp_path):
    def listed(name: str) -> str:
        succeed("kvq-inspect", said[name][1], "--html", tmp_path / "report.html")
        html = (tmp_path / "report.html").read_text()
        return re.sub("<[^>]*>", " ", html[html.index('id="provenance"') :])

    kvq, oscar, saw = listed("kvq"), listed("oscar"), listed("saw-int4")
    for option in ("composition", "k.group_size", "k.clip", "k.zero", "sign_search", "k.hadamard", "k.target"):
        assert option not in kvq, option
    assert "composition" in oscar and "k.target" in oscar and "k.hadamard" not in oscar and "random_signs" not in oscar
    assert "k.hadamard" in saw and "composition" not in saw
    assert not re.search(r"\d\.\d{7,}|\de-1\d", kvq), "budget numbers are rounded"


# Data


def test_too_few_tokens_are_refused(sample, tmp_path):
    for count in (1, 15):
        result = run("kvq-calibrate", "--model", sample, "--output", tmp_path / "out", "--num-tokens", count)
        assert result.code == USAGE and f"expected at least 16 tokens, found {count}" in result.stderr
        assert "hint: " in result.stderr and list(tmp_path.iterdir()) == []


def test_few_tokens_are_warned_of(make_dump, tmp_path):
    def warnings(tokens: int) -> tuple[str, list[str]]:
        dump = make_dump(**SMALL | {"tokens": tokens, "head_dim": 16, "v_head_dim": 8})
        flags = ("--model", dump, "--output", tmp_path / "out", "--method", "plain")
        json_said = json.loads(succeed("kvq-calibrate", *flags, "--json").stdout)["warnings"]
        return succeed("kvq-calibrate", *flags).stderr, json_said

    text, listed = warnings(63)
    assert "kvq-calibrate: warning: calibrated on 63 tokens: with fewer than 64 (4 for each channel" in text
    assert len(listed) == 1 and listed[0] in text
    text, listed = warnings(64)
    assert "warning" not in text and listed == []


def test_eval_on_the_calibration_dump_is_warned_of(sample, said, tmp_path):
    def evaluated(artifact: Path, dump: Path, *flags: object) -> tuple[str, dict]:
        base = ("--model", dump, artifact, "--no-windows", "--metric", "rope_logit_mae", "--pairs", 8, *flags)
        document = json.loads(succeed("kvq-eval", *base, "--json").stdout)
        return succeed("kvq-eval", *base).stderr, document

    own = said["plain"][1]
    text, document = evaluated(own, sample, "--layers", "1,5")
    assert "kvq-eval: warning: plain was calibrated on this dump: its errors are in sample" in text
    assert document["schemes"][0]["calibration_dump"] == "same"
    assert document["notes"][0]["kind"] == "calibration_dump" and document["notes"][0]["text"] in text
    text, document = evaluated(own, sample, "--layers", "1")
    assert "whether plain was calibrated on this dump is unknown" in text
    assert document["schemes"][0]["calibration_dump"] == "unknown"
    text, document = evaluated(own, ROOT / "sample_data/evaluation.h5", "--layers", "1,5")
    assert "warning" not in text and document["schemes"][0]["calibration_dump"] == "another"
    part = calibrate(sample, tmp_path / "part", "--method", "plain", "--layers", 2, "--num-tokens", 100)
    text, document = evaluated(part, sample, "--layers", "2")
    assert document["schemes"][0]["calibration_dump"] == "same" and "in sample" in text


def test_missing_layers_are_named(sample, said, tmp_path):
    def without(file: h5py.File) -> None:
        for layer in (0, 3, 4):
            del file[f"layers/{layer}"]

    dump = edited(sample, tmp_path / "dump.h5", without)
    text, path = said["plain"]
    assert re.search(r"^layers +2 layers of 6, without 0, 2-4", text, re.M)
    assert inspect(path).splitlines()[0].endswith("2 layers of 6, without 0, 2-4")
    assert inspected(path)["missing_layers"] == [0, 2, 3, 4]
    flags = ("--model", dump, path, "--layers", 1, "--metric", "rope_logit_mae", "--pairs", 8)
    notes = succeed("kvq-eval", *flags).stderr
    assert "the dump has 3 layers of the model's 6, without 0, 3-4" in notes
    assert "plain has 2 layers of 6, without 0, 2-4" in notes
    whole = calibrate(sample, tmp_path / "whole", "--method", "plain", "--golden-tokens", 0)
    assert "without" not in inspect(whole).splitlines()[0] and inspected(whole)["missing_layers"] == []


def test_rotary_keys_alone(make_dump, tmp_path):
    dump = make_dump(**SMALL | GEOMETRIES["mla"])
    artifact = calibrate(dump, tmp_path / "out")
    flags = ("--model", dump, artifact, "--no-windows")
    note = succeed("kvq-eval", *flags).stderr
    assert "rotary keys alone (MLA)" in note and "partial scores" in note
    kinds = [entry["kind"] for entry in json.loads(succeed("kvq-eval", *flags, "--json").stdout)["notes"]]
    assert "rotary_keys" in kinds
    assert "v: values: supported layers that have them, found none" in " ".join(inspect(artifact).split())
