"""kvq-bench and gpu_check.sh as far as no GPU is needed: what would be measured, and what they say where there is
none."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_table import tuned_kernels
from kvq_tools import BIN, ROOT, run, succeed

USAGE, UNSUPPORTED, CHECK_FAILED = 2, 5, 6
SINKS, RECENT, KV_HEADS = 64, 256, 8
LEAST_BYTES, MOST_SETS = 300_000_000, 256
VARIANTS = tuned_kernels(few=True)  # builds with all kernels have these, too

needs_tool = pytest.mark.skipif(not (BIN / "kvq-bench").is_file(), reason="kvq-bench is built only where nvcc is")


def plan(*flags: object) -> dict:
    """The document of a dry run, checked against the schema."""
    document = json.loads(succeed("kvq-bench", *flags, "--dry-run", "--json").stdout)
    pytest.importorskip("jsonschema").validate(document, json.loads((ROOT / "formats/bench.schema.json").read_text()))
    assert "machine" not in document
    return document


def side_bytes(side: str, head_dim: int) -> int:
    """Bytes of a row by packing.md: codes and 16-bit numbers."""
    if side == "bf16":
        return 2 * head_dim
    if words := re.fullmatch("w([0-9]+)n([0-9])(c|t[34])?", side):
        return 4 * int(words[1]) + 2 * int(words[2])
    levels, bits, group, index = re.fullmatch("([us])([24])g([0-9]+)b?(i1)?", side).groups()
    numbers = head_dim // int(group) * (2 if levels == "u" else 1)
    return head_dim * int(bits) // 8 + numbers * 2 + (1 if index else 0)


def token_bytes(row: dict) -> int:
    return side_bytes(row["k"], row["head_dim"]) + side_bytes(row["v"], row["head_dim"])


def sizes(row: dict) -> list:
    return ["--k", row["k"], "--v", row["v"], "--head-dim", row["head_dim"], "--activation", row["activation"]]


def id_of(row: dict) -> str:
    return "-".join(str(value) for value in row.values())


def check_sets(row: dict):
    assert row["sets"] == max(1, min(MOST_SETS, -(-LEAST_BYTES // row["bytes"])))
    assert row["calls"] % row["sets"] == 0


@needs_tool
@pytest.mark.parametrize("row", VARIANTS["decode"], ids=id_of)
def test_decode_counts_the_bytes_of_pages_and_windows(row):
    found = plan(
        "decode", *sizes(row), "--q-heads", KV_HEADS * row["heads"], "--batch", "1,3", "--context", "100,32768"
    )["decode"]
    assert [(r["batch"], r["context"]) for r in found] == [(1, 100), (1, 32768), (3, 100), (3, 32768)]
    for r in found:
        exact = 0 if row["k"] == "bf16" else min(r["context"], SINKS + RECENT)
        assert r["bytes_per_token"] == token_bytes(row)
        assert r["coded_bytes"] == r["batch"] * KV_HEADS * (r["context"] - exact) * token_bytes(row)
        assert r["exact_bytes"] == r["batch"] * KV_HEADS * exact * 4 * row["head_dim"]
        assert r["bytes"] == r["coded_bytes"] + r["exact_bytes"]
        check_sets(r)


def explain(*flags: object) -> list:
    """The decode rows of --explain, checked against the schema."""
    document = json.loads(succeed("kvq-bench", "decode", *flags, "--explain", "--json").stdout)
    pytest.importorskip("jsonschema").validate(document, json.loads((ROOT / "formats/bench.schema.json").read_text()))
    assert document["schema_version"] in ("1.2", "1.4") and "machine" not in document
    return document["decode"]


@needs_tool
@pytest.mark.parametrize("row", VARIANTS["decode"], ids=id_of)
def test_explain_says_how_a_call_is_scheduled(row):
    flags = [*sizes(row), "--q-heads", KV_HEADS * row["heads"], "--batch", "1,3,200", "--context", "1,100,32768"]
    for multiprocessors in (1, 78, 132):
        for r in explain(*flags, "--multiprocessors", multiprocessors):
            assert "time" not in r
            policy, kernel, schedule, workspace = (
                r["explain"][k] for k in ("policy", "kernel", "schedule", "workspace")
            )
            blocks = policy["multiprocessor_blocks"] * multiprocessors
            assert r["explain"]["multiprocessors"] == multiprocessors
            assert schedule["decode_blocks"] == blocks
            assert schedule["work_tiles"] == r["batch"] * KV_HEADS
            exact = 0 if row["k"] == "bf16" else min(r["context"], SINKS + RECENT)
            size = kernel["exact_tokens"] if row["k"] == "bf16" else kernel["coded_tokens"]
            chunks = -(-(r["context"] - exact) // size) + -(-exact // kernel["exact_tokens"])
            assert schedule["chunks"] == schedule["work_tiles"] * chunks  # the windows are whole chunks
            rounds = schedule["rounds"]
            assert schedule["splits"] == sum(one["splits"] for one in rounds)
            assert schedule["idle_blocks"] == blocks - rounds[0]["splits"]
            assert sum(one["splits"] * one["chunks"] for one in rounds) >= schedule["chunks"]
            share = schedule["chunks"] // blocks
            assert len(rounds) == (1 if share < policy["long_queue"] else 3 if share < policy["very_long_queue"] else 4)
            assert schedule["work_tiles"] <= schedule["partials"] < schedule["work_tiles"] + schedule["splits"]
            offsets = [workspace[k] for k in ("work_counter", "completions", "partials", "operands", "total")]
            assert offsets == sorted(offsets) and offsets[0] == 0


@needs_tool
def test_explain_answers_a_call_that_is_too_long():
    flags = ["--k", "u2g128", "--batch", 65536, "--context", 1 << 24, "--kv-heads", 32]
    result = run("kvq-bench", "decode", *flags, "--explain")
    assert result.code == UNSUPPORTED and result.stdout == ""
    assert "expected fewer than 2^32" in result.stderr


@needs_tool
def test_int2_takes_72_bytes_a_token_and_head():
    assert plan("decode", "--k", "u2g128", "--batch", 1)["decode"][0]["bytes_per_token"] == 72


@needs_tool
@pytest.mark.parametrize("row", VARIANTS["quantize_write"], ids=id_of)
def test_write_counts_what_is_read_and_written(row):
    found = plan("write", *sizes(row), "--tokens", "1,8192", "--hadamard", "1,32")["write"]
    assert [(r["tokens"], r["hadamard_order"]) for r in found] == [(1, 1), (1, 32), (8192, 1), (8192, 32)]
    for r in found:
        rows = r["tokens"] * KV_HEADS * 4 * row["head_dim"]
        assert r["bytes_per_token"] == token_bytes(row)
        assert r["read_bytes"] == rows + 8 * r["tokens"]
        assert r["written_bytes"] == r["tokens"] * KV_HEADS * token_bytes(row)
        assert r["bytes"] == r["read_bytes"] + r["written_bytes"]
        assert r.get("unfused_bytes") == (r["bytes"] + 2 * rows if r["hadamard_order"] > 1 else None)
        assert (r["scale_rule_k"], r["scale_rule_v"]) == tuple(
            "minmax" if row[side][0] == "u" else "norm" for side in "kv"
        )
        check_sets(r)


@needs_tool
def test_dense_rotations_take_the_place_of_hadamard_ones():
    found = plan("write", "--k", "u2g128", "--tokens", "1,64", "--dense", "--clip", 0.96)["write"]
    assert [(r["tokens"], r["hadamard_order"], r["dense_rotation"], r["clip_ratio"]) for r in found] == [
        (1, 1, True, 0.96),
        (64, 1, True, 0.96),
    ]
    assert not any("unfused_bytes" in r for r in found)


@needs_tool
def test_transforms_are_measured_beside_the_same_cases_without():
    for more, orders in (["--hadamard", "64,128"], [64, 64, 128, 128]), (["--dense"], [1, 1]):
        found = plan("write", "--k", "u4g128", "--tokens", 8192, *more, "--transform")["write"]
        assert [r["hadamard_order"] for r in found] == orders
        assert [r["transform"] for r in found] == [False, True] * (len(orders) // 2)
        assert {r["bytes"] for r in found} == {found[0]["bytes"]}
    assert not any(r["transform"] for r in plan("write", "--k", "u4g128", "--tokens", 1)["write"])


def exact_tokens(step: str, tokens: int) -> int:
    """Tokens of a write with windows that are stored exactly by pages.md."""
    ring_rows = (RECENT + 1 + 15) // 16 * 16  # one token may be taken back
    return tokens if step == "decode" else min(tokens, SINKS) + min(max(0, tokens - SINKS), ring_rows)


@needs_tool
def test_writes_with_windows_also_store_exact_rows():
    found = plan("write", "--k", "u2g128", "--tokens", "1,256,257,8192", "--hadamard", 128, "--windows")
    assert found["schema_version"] == "1.3"
    rows = found["write"]
    assert [r.get("windows") for r in rows] == [None, "decode", None, "decode", None, "prompt", None, "prompt"]
    for coded, r in zip(rows[::2], rows[1::2], strict=True):
        exact = exact_tokens(r["windows"], r["tokens"])
        assert (r["sink_tokens"], r["recent_tokens"]) == (SINKS, RECENT) and "sink_tokens" not in coded
        assert r["read_bytes"] == coded["read_bytes"] + 8 * r["tokens"]
        assert r["written_bytes"] == coded["written_bytes"] + exact * KV_HEADS * 4 * 128
        assert "unfused_bytes" not in r
        check_sets(r)


@needs_tool
def test_several_new_tokens_stand_beside_one():
    found = plan("decode", "--k", "u2g128", "--batch", "1,2", "--context", 500, "--new-tokens", 4, "--append")
    assert found["schema_version"] == "1.4"
    rows = found["decode"]
    assert [(row["batch"], row.get("new_tokens")) for row in rows] == [(1, None), (1, 4), (2, None), (2, 4)]
    assert {row["variant"] for row in rows[::2]} == {"decode_d128_u2g128_u2g128_h4_bf16"}
    assert {row["variant"] for row in rows[1::2]} == {"decode_d128_u2g128_u2g128_h16_bf16"}
    assert rows[0]["bytes"] == rows[1]["bytes"]  # one pass over the cache
    text = succeed("kvq-bench", "decode", "--k", "u2g128", "--new-tokens", 4, "--dry-run").stdout
    assert "new: new tokens of each sequence" in text
    (more,) = explain("--k", "u2g128", "--batch", 3, "--context", 500, "--q-heads", 64, "--new-tokens", 4)[1:]
    assert more["explain"]["schedule"]["work_tiles"] == 2 * 3 * KV_HEADS  # eight heads: two passes of 16 rows
    result = run("kvq-bench", "decode", "--k", "u2g128", "--new-tokens", 4, "--context", 3, "--dry-run")
    assert result.code != 0 and "--new-tokens 4: more than --context 3" in result.stderr


@needs_tool
def test_documents_have_the_lowest_version_that_has_their_fields():
    versions = [
        plan("write", "--k", "u2g128", "--tokens", 1, *flags)["schema_version"]
        for flags in ([], ["--unchecked"], ["--windows", "--sinks", 0, "--recent", 0], ["--page-size", 128])
    ]
    versions.append(plan("decode", "--k", "u2g128", "--batch", 1, "--append")["schema_version"])
    assert versions == ["1.1", "1.3", "1.1", "1.3", "1.4"]


@needs_tool
@pytest.mark.parametrize("row", [row for row in VARIANTS["dequantize"] if row["head_dim"] == 128], ids=id_of)
def test_prefill_counts_the_keys_that_queries_see(row):
    found = plan("prefill", *sizes(row), "--q-heads", 32, "--batch", "1,8", "--prefix", 1000, "--chunk", 48)["prefill"]
    assert [(r["batch"], r["prefix"], r["chunk"]) for r in found] == [(1, 1000, 48), (8, 1000, 48)]
    for r in found:
        seen = sum(1000 + query + 1 for query in range(48))
        exact = 0 if row["k"] == "bf16" else SINKS + RECENT
        assert r["operations"] == 4 * 128 * 32 * r["batch"] * seen
        assert r["bytes"] == r["batch"] * KV_HEADS * ((1000 - exact) * token_bytes(row) + exact * 4 * 128)
        check_sets(r)


@needs_tool
def test_without_a_format_every_kernel_of_these_sizes_is_measured():
    found = plan("decode", "--batch", 1)["decode"]
    wanted = [row for row in VARIANTS["decode"] if row["head_dim"] == 128 and row["activation"] == "bf16"]
    # A variant for more heads is taken only if no variant is nearer to the wanted number.
    nearest = {(row["k"], row["v"]) for row in wanted if row["heads"] >= 4}
    assert len(found) == len(nearest)
    assert sum(row["cache"] == "bf16" for row in found) == 1


@needs_tool
@pytest.mark.parametrize(
    "kind, flags",
    [
        ("decode", ("decode", "--k", "s4g64")),
        ("quantize_write", ("write", "--k", "s4g64")),
        ("dequantize", ("prefill", "--k", "s4g64")),
    ],
    ids=str,
)
def test_what_is_not_built_is_answered_with_what_is(kind, flags):
    result = run("kvq-bench", *flags, "--dry-run")
    assert result.code == UNSUPPORTED and result.stdout == ""
    error, hint = result.stderr.splitlines()
    assert error.startswith(f"kvq-bench: error: no kernel is built for {flags[2]}, head_dim 128, bf16")
    caches = {
        row["k"] if row["k"] == row["v"] else f"{row['k']}/{row['v']}"
        for row in VARIANTS[kind]
        if row["head_dim"] == 128
    }
    assert hint.startswith("hint: built for head_dim 128: ") and caches <= set(re.findall(r"[\w/]+", hint))


@needs_tool
def test_a_head_dim_that_is_not_built_is_answered_with_those_that_are():
    result = run("kvq-bench", "write", "--k", "u2g32", "--head-dim", 32, "--hadamard", 1, "--dry-run")
    dims = sorted({row["head_dim"] for row in VARIANTS["quantize_write"]})
    assert result.code == UNSUPPORTED and result.stderr.endswith(
        f"hint: built are head_dim {', '.join(map(str, dims))}\n"
    )


@needs_tool
def test_a_write_of_trellis_codes_has_room_for_fewer_tokens_or_none():
    flags = ("write", "--k", "w8n1", "--tokens", 8192, "--hadamard", 128, "--memory", 2)
    for tokens in (0, 4096):
        text = succeed("kvq-bench", *flags, "--workspace-tokens", tokens, "--dry-run").stdout
        assert f"128, memory 2, room {tokens} " in text
    assert "room" not in succeed("kvq-bench", *flags, "--dry-run").stdout
    result = run("kvq-bench", *flags, "--workspace-tokens", -1, "--dry-run")
    assert result.code == USAGE and "--workspace-tokens" in result.stderr


@needs_tool
def test_targets_are_asked_for_and_none_is_met_unmeasured():
    document = plan("targets")
    assert len(document["targets"]) >= 24
    assert not any(target["met"] or "reached" in target for target in document["targets"])
    assert {row["cache"] for row in document["decode"]} == {"u2g128", "u2g64", "s2g128", "u4g128", "bf16"}


@needs_tool
def test_output_holds_the_document(tmp_path):
    path = tmp_path / "bench.json"
    said = succeed("kvq-bench", "targets", "--dry-run", "--json", "--output", path).stdout
    assert path.read_text() == said


@needs_tool
@pytest.mark.parametrize(
    "flags",
    [("decode",), ("prefill",), ("write",), ("write", "--windows", "--unchecked", "--transform"), ("targets",)],
    ids=" ".join,
)
def test_tables_fit_80_columns(flags):
    assert max(map(len, succeed("kvq-bench", *flags, "--dry-run").stdout.splitlines())) <= 80


@needs_tool
@pytest.mark.parametrize(
    "flags",
    [("decode",), ("prefill",), ("write",), ("targets", "--json"), ("decode", "--sdpa", "python3")],
    ids=" ".join,
)
def test_without_a_gpu_it_says_so(flags, tmp_path):
    result = run("kvq-bench", *flags, "--output", tmp_path / "none.json", env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert result.code == UNSUPPORTED and result.stdout == "" and list(tmp_path.iterdir()) == []
    error, hint = result.stderr.splitlines()
    assert error.startswith("kvq-bench: error: no CUDA device: ") and hint.startswith("hint: --dry-run")


def test_sdpa_baseline_needs_a_gpu():
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/experiments/sdpa_baseline.py", "[]"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (UNSUPPORTED, "")
    assert done.stderr.splitlines()[-1] == "sdpa_baseline.py: error: PyTorch sees no CUDA device"


def gpu_check(tmp_path: Path, programs: dict[str, str], *flags: object) -> subprocess.CompletedProcess:
    """Runs the script with stub programs in front of the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return subprocess.run(
        [ROOT / "scripts/gpu_check.sh", "--bin", folder, "--out", tmp_path / "out", *map(str, flags)],
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )


GPU, GOOD = (
    "echo 'Some GPU, 1.2.3'",
    {
        "kvq-test-gpu": "exit 0",
        "kvq-bench": "echo 3 of 3 targets met",
        "kvq-calibrate": "exit 0",
        "kvq-selftest": "exit 0",
        "compute-sanitizer": "exit 0",
    },
)


def test_gpu_check_without_a_gpu(tmp_path):
    done = gpu_check(tmp_path, {"nvidia-smi": "exit 9"})
    assert (done.returncode, done.stdout) == (UNSUPPORTED, "")
    assert done.stderr == "gpu_check.sh: error: no GPU here: nvidia-smi finds none\n"


def test_gpu_check_passes(tmp_path):
    done = gpu_check(tmp_path, GOOD | {"nvidia-smi": GPU})
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[:2] for line in lines[-7:]] == [
        [name, "pass"] for name in ("tests", "selftest", "memcheck", "racecheck", "initcheck", "synccheck", "bench")
    ]
    assert "3 of 3 targets met" in done.stdout


@pytest.mark.parametrize(
    "broken, failed",
    [
        ("kvq-test-gpu", {"tests"}),
        ("kvq-bench", {"bench"}),
        ("kvq-calibrate", {"selftest"}),
        ("kvq-selftest", {"selftest"}),
        ("compute-sanitizer", {"memcheck", "racecheck", "initcheck", "synccheck"}),
    ],
)
def test_gpu_check_shows_what_failed(tmp_path, broken, failed):
    done = gpu_check(tmp_path, GOOD | {"nvidia-smi": GPU, broken: "echo broken; exit 1"})
    assert done.returncode == CHECK_FAILED
    assert {line.split()[0] for line in done.stdout.splitlines() if " FAIL " in line} == failed
    assert "broken" in done.stderr
