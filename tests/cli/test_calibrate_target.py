"""Sizes of rows that tuned kernels decode (`--target runtime`), or all sizes (`--target free`)."""

import json
from pathlib import Path

import numpy as np
import pytest
from calibrations import GTQ, KVQ, SMALL, refused, verified
from kernel_table import tuned_kernels
from kvq_tools import calibrate, run, succeed

from kvq.artifact import Artifact
from kvq.artifact_reader import load_artifact

LAYERS = ("--layers", "0,1,4")
FREE, RUNTIME = ("--target", "free"), ("--target", "runtime")
ROW_KEYS = {"row_bytes", "layers", "tuned_layers", "held_out", "cost", "mean_bytes", "budget"}


def budget_of(artifact: Artifact) -> dict:
    return artifact.manifest["calibration"]["budget"]


def target_of(artifact: Artifact) -> str | None:
    return artifact.manifest["calibration"]["options"].get("target")


def words(artifact: Artifact) -> dict[int, tuple[int, int]]:
    """32-bit words of a row of keys and of values in each layer, if rows have one fp16 scale."""
    return {
        index: tuple((layer.sides[side].page_row_bytes - 2) // 4 for side in "kv")
        for index, layer in artifact.layers.items()
    }


def tuned_words() -> set[tuple[int, int]]:
    """Pairs of words for which variants.json has a decode kernel, with bfloat16 activations and 128 channels."""
    return {
        (int(row["k"][1:-2]), int(row["v"][1:-2]))
        for row in tuned_kernels()["decode"]
        if row["k"].endswith("n1") and row["head_dim"] == 128 and row["activation"] == "bf16"
    }


def decided(artifact: Artifact) -> dict:
    """The manifest without the target."""
    manifest = json.loads(json.dumps(artifact.manifest))
    manifest.pop("content_hash", None)
    manifest["calibration"]["options"].pop("target", None)
    for key in ("target", "free_cost"):
        manifest["calibration"].get("budget", {}).pop(key, None)
    return manifest


def same_plans(a: Artifact, b: Artifact) -> bool:
    return decided(a) == decided(b) and all(
        np.array_equal(plan.tensors[name], b.layers[index].sides[side].tensors[name])
        for index, layer in a.layers.items()
        for side, plan in layer.sides.items()
        for name in plan.tensors
    )


@pytest.fixture(scope="module")
def stats(short, tmp_path_factory) -> Path:
    """Statistics of three layers of a real model: 8 query heads, 2 KV heads, 128 channels."""
    folder = tmp_path_factory.mktemp("stats")
    calibrate(short, folder / "out", *KVQ, *LAYERS, "--stats", folder / "stats")
    return folder / "stats"


@pytest.fixture(scope="module")
def decide(stats, tmp_path_factory):
    """Decides from the statistics by these flags, each set of flags once."""
    folder, made = tmp_path_factory.mktemp("decided"), {}

    def artifact(*flags: object) -> Artifact:
        if flags not in made:
            path = folder / str(len(made))
            succeed("kvq-calibrate", "--quiet", "--stats", stats, *KVQ, *flags, "--output", path)
            made[flags] = load_artifact(path)
        return made[flags]

    return artifact


@pytest.fixture(scope="module")
def outliers(make_dump) -> Path:
    """Outliers of 40 times the other channels: Block-GTQ gives them 5 bits and more, which no tuned kernel takes."""
    return make_dump(**SMALL | {"layers": 2, "tokens": 60, "outlier_channels": 6}, head_dim=128, q_heads=4, kv_heads=2)


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--budget-bits", 2.25),
        ("--budget-bits", 2.5),
        ("--budget-bytes", 140),
        ("--uniform-layout",),
        ("--budget-per-layer",),
    ],
    ids=lambda flags: " ".join(map(str, flags)) or "defaults",
)
def test_rows_have_tuned_kernels(decide, flags):
    runtime, free = decide(*flags), decide(*flags, *FREE)
    assert (target_of(runtime), target_of(free)) == ("runtime", None)
    assert set(words(runtime).values()) <= tuned_words()
    allowed = (
        budget_of(runtime)["budget"]
        if "--budget-bytes" in flags
        else 4 * (budget_of(runtime)["budget"] * 128 / 8 + 2)  # two heads, keys and values
    )
    for artifact in (runtime, free):
        rows = [2 * (4 * sum(pair) + 2 * 2) for pair in words(artifact).values()]
        assert budget_of(artifact)["mean_bytes"] == pytest.approx(np.mean(rows))
        assert 0.95 * allowed < np.mean(rows) <= allowed
    assert budget_of(runtime)["target"] == "kept" and "target" not in budget_of(free)
    assert budget_of(runtime)["free_cost"] == budget_of(free)["cost"]
    assert budget_of(runtime)["cost"] >= budget_of(free)["cost"] * (1 - budget_of(free)["gap"]) * (1 - 1e-9)


def test_a_free_target_takes_rows_that_no_tuned_kernel_decodes(decide):
    """So the tests of this file compare two targets that decide differently."""
    budget = ("--budget-bits", 2.5)
    free = decide(*budget, *FREE)
    assert not set(words(free).values()) <= tuned_words()
    assert words(free) != words(decide(*budget))


def test_runtime_is_the_default_and_the_bytes_are_the_same_again(stats, tmp_path):
    paths = []
    for number, flags in enumerate(((), RUNTIME, ("--threads", 1))):
        paths.append(tmp_path / str(number))
        succeed("kvq-calibrate", "--quiet", "--stats", stats, *KVQ, *flags, "--output", paths[-1])
    assert len({path.read_bytes() for path in paths}) == 1


def test_tools_say_what_the_target_came_to(stats, tmp_path):
    def said(*flags: object) -> str:
        flags = ("--stats", stats, *KVQ, *flags, "--output", tmp_path / "out")
        text = succeed("kvq-calibrate", *flags).stdout
        assert max(len(line) for line in text.splitlines() if str(tmp_path) not in line) <= 80
        return " ".join(text.split())

    kept = said()
    assert "target: rows have sizes that tuned kernels decode; with --target free the cost is" in kept
    assert "tuned kernels for w" in kept and "generic, slower" not in kept
    assert "target:" not in said(*FREE)
    assert "target: nothing is restricted: no tuned kernel decodes such rows." in said("--scales", "segment")
    assert "generic, slower" in said("--budget-bits", 2.5, *FREE)
    document = json.loads(succeed("kvq-inspect", tmp_path / "out", "--json").stdout)
    assert document["serving"]["word"] == "tuned and generic"


@pytest.mark.parametrize("bits, result", [(1.25, "budget_too_low"), (3, "budget_too_high")])
def test_budgets_outside_of_the_kernels_are_spent_freely(decide, bits, result):
    runtime, free = decide("--budget-bits", bits), decide("--budget-bits", bits, *FREE)
    assert same_plans(runtime, free)
    assert budget_of(runtime)["target"] == result and "free_cost" not in budget_of(runtime)
    assert budget_of(runtime)["spent"] > 0.95 * bits


@pytest.mark.parametrize(
    "shape, flags",
    [
        ({"head_dim": 64}, KVQ),
        ({"head_dim": 128, "q_heads": 4, "kv_heads": 1}, (*KVQ, "--scales", "segment")),
        ({"head_dim": 128, "q_heads": 4, "kv_heads": 1}, (*GTQ, "--joint")),
    ],
    ids=["head_dim 64", "scales of segments", "block-gtq"],
)
def test_rows_without_kernels_are_not_restricted(make_dump, tmp_path, shape, flags):
    dump = make_dump(**SMALL | {"layers": 2, "tokens": 60}, **shape)
    runtime, free = (verified(dump, tmp_path / target, *flags, "--target", target) for target in ("runtime", "free"))
    assert same_plans(runtime, free)
    assert budget_of(runtime)["target"] == "no_kernels" and target_of(runtime) == "runtime"
    text = succeed("kvq-calibrate", dump, *flags, "--output", tmp_path / "again").stdout
    assert text.count("target: nothing is restricted: no tuned kernel decodes such rows.\n") == 1


@pytest.mark.parametrize("q_heads", [1, 8, 17])
def test_kernels_take_any_number_of_query_heads(make_dump, tmp_path, q_heads):
    dump = make_dump(**SMALL | {"layers": 2, "tokens": 60}, head_dim=128, q_heads=q_heads, kv_heads=1)
    artifact = verified(dump, tmp_path / "out", *KVQ)
    assert budget_of(artifact)["target"] == "kept" and set(words(artifact).values()) <= tuned_words()


def test_block_gtq_with_linear_rows_is_restricted(make_dump, tmp_path):
    flags = (*GTQ, "--joint", "--coder", "trellis", "--scales", "row", "--v-allocation", "channel")
    dump = make_dump(**SMALL | {"layers": 2, "tokens": 60}, head_dim=128, q_heads=4, kv_heads=1)
    artifact = verified(dump, tmp_path / "out", *flags)
    assert budget_of(artifact)["target"] == "kept" and set(words(artifact).values()) <= tuned_words()


def test_block_gtq_leaves_out_widths_without_kernels(outliers, tmp_path):
    runtime, free = (
        verified(outliers, tmp_path / target, *GTQ, "--bits", 3, "--target", target) for target in ("runtime", "free")
    )
    decoded = [
        [layer["kernels"]["bf16"]["decode"] for layer in said["serving"]["layers"]]
        for said in (
            json.loads(succeed("kvq-inspect", tmp_path / target, "--json").stdout) for target in ("runtime", "free")
        )
    ]
    assert decoded == [["tuned"] * 2, ["generic"] * 2]
    assert target_of(runtime) == "runtime" and target_of(free) is None
    for index, layer in runtime.layers.items():
        narrow, wide = layer.sides["k"].tensors["channel_bits"], free.layers[index].sides["k"].tensors["channel_bits"]
        assert narrow.max() == 4 < wide.max() and narrow.sum() == wide.sum()
    # Nothing changes where a kernel takes the widths, or none does whatever they are.
    for flags in ((*GTQ, "--bits", 3, "--max-bits", 4), (*GTQ, "--bits-k", 2.5)):
        both = (
            verified(outliers, tmp_path / f"{flags[-1]}{target}", *flags, "--target", target)
            for target in ("runtime", "free")
        )
        assert same_plans(*both)


def test_exact_layers_are_left_alone(decide):
    artifact = decide("--exact-layers", 1)
    assert artifact.layers[1].sides["k"].scheme.coder == "exact"
    assert {words(artifact)[index] for index in (0, 4)} <= tuned_words()


def test_wrong_words(short):
    refused((*KVQ, "--target", "fast"), "--model", short)
    refused(("--target", "runtime"), "--model", short, hint="block-gtq and kvq")
    error = run("kvq-calibrate", *KVQ, "--target", "fast", short).stderr
    assert error == 'kvq-calibrate: error: --target: unknown "fast"\nhint: choose one of runtime, free\n'
    assert "did you mean --target?" in run("kvq-calibrate", *KVQ, "--taget", "free", short).stderr


@pytest.mark.parametrize("target", ["runtime", "free"])
def test_ablation_compares_both_targets(decide, stats, tmp_path, target):
    flags = ("--stats", stats, *KVQ, "--target", target, "--budget-bits", 2.5, "--layers", "0,4", "--report-ablation")
    document = json.loads(succeed("kvq-calibrate", *flags, "--json", "--output", tmp_path / "out").stdout)
    written, targets = load_artifact(tmp_path / "out"), document["targets"]
    assert set(targets) == {"runtime", "free", "change_percent"}
    assert target_of(written) == (target if target == "runtime" else None)
    own = targets[target]
    assert own["cost"] == budget_of(written)["cost"] == document["ablation"][-1]["cost"]
    assert own["held_out"] == written.manifest["calibration"]["held_out"]
    assert own["row_bytes"] == pytest.approx(
        np.mean([4 * word + 2 for pair in words(written).values() for word in pair])
    )
    assert own["tuned_layers"] == sum(pair in tuned_words() for pair in words(written).values())
    assert targets["runtime"]["tuned_layers"] == 2 > targets["free"]["tuned_layers"]
    for row in ("runtime", "free"):
        assert targets[row].keys() >= ROW_KEYS and targets[row]["layers"] == 2
    assert targets["runtime"]["free_cost"] == targets["free"]["cost"]
    for name, of in (
        ("cost", lambda row: row["cost"]),
        ("row_bytes", lambda row: row["row_bytes"]),
        ("output_error", lambda row: row["held_out"]["output_error"]),
    ):
        change = 100 * (of(targets["runtime"]) / of(targets["free"]) - 1)
        assert targets["change_percent"][name] == pytest.approx(change)


def test_ablation_as_a_table(stats, tmp_path):
    flags = ("--stats", stats, *KVQ, "--layers", "0,4", "--report-ablation", "--output", tmp_path / "out")
    lines = succeed("kvq-calibrate", "--quiet", *flags).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    head = next(number for number, line in enumerate(lines) if line.startswith("target "))
    assert lines[head].split() == ["target", "bytes", "a", "row", "cost", "error", "decode"]
    free, runtime = (line.split() for line in lines[head + 1 : head + 3])
    assert free[0] == "free" and "%" not in " ".join(free) and free[-1] in ("generic", "tuned")
    assert (
        runtime[0] == "runtime"
        and runtime[-1] == "tuned"
        and [word[-1] for word in (runtime[3], runtime[5])] == ["%", "%"]
    )


def test_ablation_of_block_gtq(outliers, tmp_path):
    flags = (outliers, *GTQ, "--bits", 3, "--output", tmp_path / "out", "--report-ablation")
    document = json.loads(succeed("kvq-calibrate", *flags, "--held-out-tokens", 20, "--json").stdout)
    assert document["ablation"] == []
    runtime, free = (document["targets"][name] for name in ("runtime", "free"))
    assert (runtime["tuned_layers"], free["tuned_layers"]) == (2, 0)
    assert runtime["held_out"] == load_artifact(tmp_path / "out").manifest["calibration"]["held_out"]
    change = document["targets"]["change_percent"]
    assert change["output_error"] == pytest.approx(
        100 * (runtime["held_out"]["output_error"] / free["held_out"]["output_error"] - 1)
    )
    assert change["output_error"] > 0 and "cost" not in change


def test_ablation_of_block_gtq_as_a_table(outliers, tmp_path):
    flags = (outliers, *GTQ, "--bits", 3, "--output", tmp_path / "out", "--report-ablation", "--quiet")
    lines = succeed("kvq-calibrate", *flags).stdout.splitlines()
    assert lines[1].split() == ["target", "bytes", "a", "row", "cost", "error", "decode"]
    assert [line.split()[2:] for line in lines[2:4]] == [["-", "-", "generic"], ["-", "-", "tuned"]]
    legend = " ".join(lines[4:])
    assert legend.startswith("cost: only decisions with a budget have one.") and "--held-out-tokens" in legend
    joint = succeed("kvq-calibrate", *flags, "--joint", "--held-out-tokens", 20).stdout
    assert "cost: relative output error" in joint and "-" not in joint.split("\n")[2].split()[2:]
    assert max(map(len, lines + joint.splitlines())) <= 80
