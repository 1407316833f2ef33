"""Golden rows: kvq-calibrate keeps real rows with their codes, and both readers find the same codes anew."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from kvq_tools import ROOT, calibrate, run, shards, succeed
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from kvq import read_artifact
from kvq.artifact import content_hash
from kvq.artifact_reader import load_artifact as read
from kvq.packing import from_bf16_bits, to_bf16_bits
from kvq.safetensors_file import SafetensorsFile

TOKENS, SEQUENCES, LAYERS, CHECK_FAILED = 301, 3, 2, 6
OLD_STATS = ROOT / "formats/golden/v1.1/stats.safetensors"

CODES = {
    "oscar": (),
    "centered": ("--center", "kv", "--coder", "symmetric"),
    "shared": ("--share", "layer"),
    "integer zero": ("--method", "saw-int4", "--zero", "integer", "--random-signs", "--scale-type", "bf16"),
    "exact layer": ("--exact-layers", 1, "--scale-type", "fp32"),
    "kvq": ("--method", "kvq", "--budget-bits", 2, "--min-bits", 0),
    "block-gtq": ("--method", "block-gtq", "--v-allocation", "channel", "--bits", 3),
    "fitted": ("--codebook", "fitted", "--bits", 3),
    "trellis": ("--method", "saw-int4", "--coder", "trellis", "--memory", 1),
    "centroids": ("--kmeans", 5),
    "joint centroids": ("--method", "tq-mse", "--kmeans", 3, "--kmeans-scope", "joint"),
}


@pytest.fixture(scope="module")
def dump(make_dump) -> Path:
    return make_dump(
        tokens=TOKENS, sequences=SEQUENCES, layers=LAYERS, query_spectrum=0.95, channel_means=0.5, head_dim=32
    )


@pytest.fixture(scope="module")
def made(dump, tmp_path_factory) -> Path:
    """An artifact made with default options, and its statistics."""
    folder = tmp_path_factory.mktemp("golden")
    return calibrate(dump, folder / "out", "--stats", folder / "stats")


def manifest(path: Path) -> dict:
    with safe_open(path, framework="np") as file:
        return json.loads(file.metadata()["kvq.manifest"])


def golden(path: Path) -> dict:
    return {name: array for name, array in load_file(path).items() if ".golden." in name}


def longest(dump: Path) -> tuple[int, int]:
    """First token and end of the longest sequence."""
    with h5py.File(dump) as file:
        borders = file["cu_seqlens"][:]
    index = int(np.argmax(np.diff(borders)))
    return int(borders[index]), int(borders[index + 1])


@pytest.mark.parametrize("flags", CODES.values(), ids=CODES)
def test_both_readers_code_golden_rows_alike(dump, tmp_path, capsys, flags):
    path = calibrate(dump, tmp_path / "out", *flags)
    said = succeed("kvq-inspect", path, "--verify").stdout.splitlines()[-1]
    assert said.startswith("ok      golden rows: ") and f"rows in {LAYERS} layers coded alike" in said
    assert read_artifact.main([str(path), "--verify"]) == 0
    # Both readers find the same rows firm.
    assert capsys.readouterr().out.splitlines()[-1] == "golden rows: ok: " + said.split(": ", 1)[1]
    rows, firm = int(said.split()[3]), int(said.split()[-4])
    assert firm > (0.4 if "fp32" in flags else 0.7) * rows  # fp32 shows every step, so only the exact layer is firm


def test_golden_rows_are_the_last_ones_of_the_longest_sequence(dump, made):
    end = longest(dump)[1]
    layer = manifest(made)["layers"][1]
    assert layer["golden"] == {"first": end - 32, "count": 32}
    tensors = golden(made)
    with h5py.File(dump) as file:
        group = file["layers/1"] if "layers/1" in file else file["layers"][sorted(file["layers"])[1]]
        for side in "kv":
            assert (
                tensors[f"layers.1.golden.{side}"] == to_bf16_bits(group[side][end - 32 : end].astype(np.float32))
            ).all()
        assert (tensors["layers.1.golden.q"] == to_bf16_bits(group["q"][end - 1].astype(np.float32))).all()


def test_the_golden_output_is_what_the_bytes_give(made):
    """Decodes the bytes in the file with the second reader and computes the output."""
    from kvq.packing import decode, unpack

    layer = read(made).layers[0]
    geometry, rows = manifest(made)["layers"][0]["geometry"], layer.golden
    x_hat = {
        side: np.stack(
            [
                plan.unrotate(
                    decode(
                        unpack(np.ascontiguousarray(rows.packed[side][:, head]), plan.scheme_of(head), plan.dim),
                        plan.scheme_of(head),
                    ),
                    head,
                )
                for head in range(layer.num_kv_heads)
            ]
        )
        for side, plan in layer.sides.items()
    }
    for head in range(layer.num_q_heads):
        own = head * layer.num_kv_heads // layer.num_q_heads
        scores = geometry["softmax_scale"] * x_hat["k"][own].astype(np.float64) @ rows.q[head].astype(np.float64)
        weights = np.exp(scores - scores.max())
        np.testing.assert_allclose(rows.out[head], weights @ x_hat["v"][own] / weights.sum(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [1, 7, 33, 4096])
def test_fewer_and_more_golden_tokens(dump, tmp_path, count):
    first, end = longest(dump)
    path = calibrate(dump, tmp_path / "out", "--golden-tokens", count)
    expected = min(count, end - first)
    assert [layer["golden"] for layer in manifest(path)["layers"]] == [
        {"first": end - expected, "count": expected}
    ] * LAYERS
    succeed("kvq-inspect", path, "--verify")


def test_no_golden_token_is_held_out(make_dump, tmp_path):
    dump = make_dump(tokens=40, sequences=1, layers=1, head_dim=32)
    path = calibrate(dump, tmp_path / "out", "--held-out-tokens", 13)
    assert manifest(path)["layers"][0]["golden"] == {"first": 13, "count": 27}


def test_an_artifact_without_golden_rows_differs_in_them_alone(dump, made, tmp_path):
    path = calibrate(dump, tmp_path / "out", "--golden-tokens", 0)
    assert manifest(path)["version"] == manifest(made)["version"] == "1.3"  # errors beside their baseline
    assert manifest(path)["requires"] == manifest(made)["requires"] == []
    plain, full = load_file(path), load_file(made)
    assert plain.keys() == {name for name in full if ".golden." not in name}
    assert all((plain[name] == full[name]).all() for name in plain)
    bare = manifest(made)
    for layer in bare["layers"]:
        del layer["golden"]
    assert bare == manifest(path)
    assert "golden" not in succeed("kvq-inspect", path, "--verify").stdout


@pytest.mark.parametrize("flags", CODES.values(), ids=CODES)
def test_statistics_give_the_golden_rows_of_the_direct_run(dump, tmp_path, flags):
    direct = calibrate(
        dump, tmp_path / "direct", "--collect", "all", "--stats", tmp_path / "stats", "--threads", 1, *flags
    )
    succeed(
        "kvq-calibrate",
        "--quiet",
        "--stats",
        tmp_path / "stats",
        "--threads",
        3,
        "--output",
        tmp_path / "later",
        *flags,
    )
    assert (tmp_path / "later").read_bytes() == direct.read_bytes()


def test_statistics_give_fewer_golden_rows_when_asked(dump, made, tmp_path):
    """Collecting chose the rows of the statistics, so no further rows are available."""
    for count, expected in ((5, 5), (32, 32), (100, 32), (0, 0)):
        succeed(
            "kvq-calibrate",
            "--quiet",
            "--stats",
            made.parent / "stats",
            "--golden-tokens",
            count,
            "--output",
            tmp_path / "out",
        )
        direct = calibrate(dump, tmp_path / "direct", "--golden-tokens", expected)
        assert (tmp_path / "out").read_bytes() == direct.read_bytes()


def test_older_statistics_give_artifacts_without_golden_rows(tmp_path):
    succeed("kvq-calibrate", "--quiet", "--stats", OLD_STATS, "--output", tmp_path / "out")
    assert golden(tmp_path / "out") == {} and manifest(tmp_path / "out")["version"] == "1.3"


def test_merged_shards_keep_one_run(dump, make_dump, tmp_path):
    """Merging keeps the golden rows of the first file."""
    shards = []
    for name, span in (("a", (0, 100)), ("b", (100, 150))):
        calibrate(dump, tmp_path / "out", "--first-token", span[0], "--num-tokens", span[1], "--stats", tmp_path / name)
        shards.append(tmp_path / name)
    succeed("kvq-calibrate", "--merge-stats", *shards, "--stats", tmp_path / "merged")
    first, merged = golden(shards[0]), golden(tmp_path / "merged")
    assert merged.keys() == first.keys() and all((merged[name] == first[name]).all() for name in first)
    succeed("kvq-calibrate", "--quiet", "--stats", tmp_path / "merged", "--output", tmp_path / "out")
    succeed("kvq-inspect", tmp_path / "out", "--verify")


def test_resuming_takes_no_shard_with_other_golden_tokens(dump, tmp_path):
    """A run that fails leaves the layers that it collected; a run with other golden tokens collects its own."""
    flags = ("--model", dump, "--output", tmp_path / "out", "--method", "saw-int4")
    more_than_rows = ("--kmeans", 4096)  # refused when all layers are collected
    assert run("kvq-calibrate", *flags, "--golden-tokens", 8, *more_than_rows).code == 2
    assert shards(tmp_path / "out"), "collected layers stay"
    own = ("--method", "saw-int4", "--golden-tokens", 9)
    calibrate(dump, tmp_path / "out", "--resume", *own)
    calibrate(dump, tmp_path / "fresh", *own)
    assert (tmp_path / "out").read_bytes() == (tmp_path / "fresh").read_bytes()


def test_artifacts_with_fewer_golden_rows_fail_by_that_alone(dump, made, tmp_path):
    for count in (5, 0):
        other = calibrate(dump, tmp_path / f"other{count}", "--golden-tokens", count)
        for flags in ((), ("--model", dump, "--no-windows", "--quiet")):
            result = run("kvq-diff", "--json", *flags, made, other)
            failed = [check["rule"] for check in json.loads(result.stdout)["checks"] if check["outcome"] == "failed"]
            assert (result.code, failed) == (6, ["golden_rows.lost<=0"])
            assert run("kvq-diff", *flags, other, made).code == 0, "more golden rows are no loss"


@pytest.mark.parametrize("count", ["-1", "4097", "many"])
def test_golden_tokens_out_of_range_are_refused(dump, tmp_path, count):
    assert run("kvq-calibrate", "--model", dump, "--output", tmp_path / "out", "--golden-tokens", count).code == 2


# Damage


def rewritten(made: Path, path: Path, name: str, change) -> Path:
    """Writes the artifact with one tensor changed and with the right content hash."""
    with safe_open(made, framework="np") as file:
        metadata = dict(file.metadata())
    tensors = load_file(made)
    tensors[name] = change(tensors[name].copy())
    save_file(tensors, path, metadata)
    metadata["kvq.content_hash"] = content_hash(SafetensorsFile.open(path))
    save_file(tensors, path, metadata)
    return path


def set_last(value):
    def change(array):
        array.reshape(-1)[-1] = value
        return array

    return change


DAMAGE = {
    "k": lambda a: a ^ 0x8000,
    "v": lambda a: a ^ 0x8000,
    "q": lambda a: a ^ 0x8000,
    "k_bytes": lambda a: a ^ 1,
    "v_bytes": lambda a: a ^ 0x80,
    "k_firm": lambda a: 1 - a,
    "v_firm": lambda a: 1 - a,
    "out": set_last(np.float32(1.5)),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_both_readers_notice_golden_rows_that_are_wrong_although_the_hash_fits(made, tmp_path, capsys, name):
    path = rewritten(made, tmp_path / "bad", f"layers.1.golden.{name}", DAMAGE[name])
    result = run("kvq-inspect", path, "--verify")
    assert (
        result.code == CHECK_FAILED
        and result.stdout.count("FAILED") == 1
        and "FAILED  golden rows: layer 1: " in result.stdout
    )
    assert read_artifact.main([str(path), "--verify"]) == CHECK_FAILED
    captured = capsys.readouterr().out
    assert captured.count("FAILED") == 1 and "golden rows: FAILED: layer 1: " in captured


@pytest.mark.parametrize("name", ["k", "v", "q"])
def test_golden_rows_of_huge_numbers_fail_the_check_and_do_nothing_worse(made, tmp_path, capsys, name):
    path = rewritten(made, tmp_path / "bad", f"layers.1.golden.{name}", lambda a: np.full_like(a, 0x7F7F))
    assert run("kvq-inspect", path, "--verify").code == CHECK_FAILED
    assert read_artifact.main([str(path), "--verify"]) == CHECK_FAILED
    captured = capsys.readouterr()
    assert "golden rows: FAILED: layer 1: " in captured.out and "Warning" not in captured.err


@pytest.mark.parametrize(
    "name, change",
    [
        ("k", set_last(0x7F80)),
        ("v", set_last(0xFFFF)),
        ("q", set_last(0xFF80)),
        ("out", set_last(np.nan)),
        ("k_firm", set_last(2)),
        ("k", lambda a: a[1:]),
        ("q", lambda a: a[:, 1:]),
        ("v_bytes", lambda a: a[:, :, 1:]),
        ("k_bytes", lambda a: a[:1]),
        ("out", lambda a: a[1:]),
        ("out", lambda a: a.astype(np.float64)),
        ("k", from_bf16_bits),
        ("v_firm", lambda a: a.astype(np.int8)),
    ],
)
def test_both_readers_refuse_golden_tensors_that_do_not_fit(made, tmp_path, capsys, name, change):
    path = rewritten(made, tmp_path / "bad", f"layers.0.golden.{name}", lambda a: np.ascontiguousarray(change(a)))
    for result in (run("kvq-inspect", path), run("kvq-inspect", path, "--verify")):
        assert result.code == 3 and "golden" in result.stderr, result
    assert read_artifact.main([str(path)]) == 3
    assert "golden" in capsys.readouterr().err
