"""--first-token and --num-tokens: a part of a dump calibrates as a dump of this part alone."""

import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from dumps import edited, replace, synthetic
from kvq_tools import calibrate, run, shards, start, succeed, wait_for_layers

from kvq.safetensors_file import SafetensorsFile

USAGE = 2
TOKENS, LAYERS = 301, 2
SIZE = {
    "tokens": TOKENS,
    "sequences": 3,
    "layers": LAYERS,
    "head_dim": 32,
    "query_spectrum": 0.9,
    "channel_means": 0.5,
    "outlier_channels": 2,
    "generated": 20,
}


def cut(source: Path, target: Path, first: int, count: int) -> Path:
    """A dump with only tokens [first, first + count); a sequence that is cut begins or ends there."""
    kept = slice(first, first + count)

    def edit(file: h5py.File) -> None:
        borders = np.clip(file["cu_seqlens"][()], first, first + count) - first
        replace(file, "cu_seqlens", np.unique(borders))
        names = ["positions", *(["generated"] if "generated" in file else [])]
        names += [
            f"layers/{layer}/{name}" for layer in file["layers"] for name in "qkv" if name in file["layers"][layer]
        ]
        for name in names:
            replace(file, name, file[name][()][kept])

    return edited(source, target, edit)


def span(first: int, count: int) -> tuple[object, ...]:
    return ("--first-token", first, "--num-tokens", count)


def manifest(path: Path) -> dict:
    return json.loads(SafetensorsFile.open(path).metadata["kvq.manifest"])


def tensors(path: Path) -> dict[str, bytes]:
    file = SafetensorsFile.open(path)
    return {name: bytes(file.raw(name)) for name in file.tensors}


def without_origin(path: Path) -> dict:
    """The manifest without the fields that name the dump and the range that was read."""
    said = manifest(path)
    del said["calibration"]["dump"]["hash"]
    said["calibration"]["options"].pop("tokens", None)
    return said


@pytest.fixture(scope="module")
def dump(make_dump) -> Path:
    """A pre_rope dump, so that a reader must rotate each token by its own position, also after a cut."""
    return make_dump(capture="pre_rope", **SIZE)


# What is calibrated

METHODS = {
    "oscar": ("--method", "oscar", "--center", "kv", "--sign-search", 2, "--sink-tokens", 4, "--recent-tokens", 8),
    "scored": ("--target-k", "scored_query", "--target-v", "sst"),
    "block-gtq": ("--method", "block-gtq", "--v-allocation", "channel"),
    "kvq": ("--method", "kvq", "--held-out-tokens", 40),
    "saw-int4": ("--method", "saw-int4", "--kmeans", 4, "--hessian", "consistent"),
    "fitted": ("--method", "tq-mse", "--codebook", "fitted", "--sample-tokens", 50),
}
RANGES = {"head": (0, 120), "inside": (110, 60), "across": (70, 200), "tail": (201, 100), "all but the ends": (1, 299)}


@pytest.mark.parametrize("where", RANGES)
def test_part_of_a_dump_calibrates_as_a_dump_of_its_own(dump, tmp_path, where):
    first, count = RANGES[where]
    part = cut(dump, tmp_path / "part.h5", first, count)
    own = calibrate(dump, tmp_path / "own", *span(first, count), "--center", "kv")
    other = calibrate(part, tmp_path / "other", "--center", "kv")
    assert tensors(own) == tensors(other) and without_origin(own) == without_origin(other)
    with h5py.File(part) as file:
        assert manifest(own)["calibration"]["sequences"] == len(file["cu_seqlens"]) - 1
    assert manifest(own)["calibration"]["tokens"] == count


@pytest.mark.parametrize("method", METHODS)
def test_so_does_every_method(dump, tmp_path, method):
    first, count = RANGES["across"]
    part = cut(dump, tmp_path / "part.h5", first, count)
    own = calibrate(dump, tmp_path / "own", *span(first, count), *METHODS[method])
    other = calibrate(part, tmp_path / "other", *METHODS[method])
    assert tensors(own) == tensors(other) and without_origin(own) == without_origin(other)
    assert tensors(own) != tensors(calibrate(dump, tmp_path / "whole", *METHODS[method])), "the part matters"


OTHER_DUMPS = [{"sliding_window": 9}, {"kind": "mla_rope", "kv_heads": 1}, {"dtype": "float16_bits"}]


@pytest.mark.parametrize("options", OTHER_DUMPS, ids=str)
def test_so_does_every_kind_of_dump(make_dump, tmp_path, options):
    dump = make_dump(tokens=90, sequences=2, layers=2, head_dim=32, **options)
    own = calibrate(dump, tmp_path / "own", *span(30, 31))
    assert tensors(own) == tensors(calibrate(cut(dump, tmp_path / "part.h5", 30, 31), tmp_path / "other"))


def test_so_does_a_real_model(sample, tmp_path):
    own = calibrate(sample, tmp_path / "own", *span(100, 199), "--layers", "1,4")
    other = calibrate(cut(sample, tmp_path / "part.h5", 100, 199), tmp_path / "other", "--layers", "1,4")
    assert tensors(own) == tensors(other) and without_origin(own) == without_origin(other)


def test_sixteen_tokens_are_enough_for_plain_codes(dump, tmp_path):
    plain = ("--method", "plain", "--center", "kv")
    own = calibrate(dump, tmp_path / "own", *span(150, 16), *plain)
    assert tensors(own) == tensors(calibrate(cut(dump, tmp_path / "part.h5", 150, 16), tmp_path / "other", *plain))
    few = run("kvq-calibrate", "--model", dump, "--output", tmp_path / "few", *span(150, 15), *plain)
    assert few.code == 2 and "expected at least 16 tokens, found 15" in few.stderr and not (tmp_path / "few").exists()


def test_statistics_of_a_part_are_those_of_its_dump(dump, tmp_path):
    collected = {}
    for name, source, flags in (("own", dump, span(70, 200)), ("other", cut(dump, tmp_path / "part.h5", 70, 200), ())):
        calibrate(source, tmp_path / "out", "--collect", "all", "--stats", tmp_path / name, *flags)
        collected[name] = tensors(tmp_path / name)
    assert collected["own"] == collected["other"]


def test_tokens_are_counted_over_all_files(tmp_path):
    """A dump of three files: the range begins in the first and ends in the last."""
    synthetic(tmp_path / "whole.h5", **SIZE)
    synthetic(tmp_path / "split.h5", split_by_sequence=True, **SIZE)
    parts = sorted(tmp_path.glob("split.*"))
    assert len(parts) == 3
    joined = ("--model", parts[1], "--model", parts[2])
    own = calibrate(parts[0], tmp_path / "own", *joined, *span(80, 180))
    assert tensors(own) == tensors(calibrate(tmp_path / "whole.h5", tmp_path / "other", *span(80, 180)))


def test_a_flag_alone(dump, tmp_path):
    """--first-token alone takes all later tokens, --num-tokens alone the first tokens."""
    assert (
        calibrate(dump, tmp_path / "a", "--first-token", 120).read_bytes()
        == calibrate(dump, tmp_path / "b", *span(120, TOKENS - 120)).read_bytes()
    )
    assert (
        calibrate(dump, tmp_path / "c", "--num-tokens", 120).read_bytes()
        == calibrate(dump, tmp_path / "d", *span(0, 120)).read_bytes()
    )


def test_whole_range_is_the_whole_dump(dump, tmp_path):
    whole = calibrate(dump, tmp_path / "whole")
    assert calibrate(dump, tmp_path / "zero", "--first-token", 0).read_bytes() == whole.read_bytes()
    ranged = calibrate(dump, tmp_path / "ranged", *span(0, TOKENS))
    assert tensors(ranged) == tensors(whole) and without_origin(ranged) == without_origin(whole)
    assert manifest(ranged)["calibration"]["dump"] == manifest(whole)["calibration"]["dump"], "the same hash"


def test_threads_change_nothing(dump, tmp_path):
    one, three = (
        calibrate(dump, tmp_path / f"{threads}", *span(33, 200), "--threads", threads).read_bytes()
        for threads in (1, 3)
    )
    assert one == three


# What the artifact says of it


def test_range_is_on_record(dump, tmp_path):
    for flags, first, count in (
        ((*span(70, 200),), 70, 200),
        (("--first-token", 120), 120, 181),
        (("--num-tokens", 50), 0, 50),
    ):
        said = manifest(calibrate(dump, tmp_path / "out", *flags))["calibration"]
        assert said["options"]["tokens"] == {"first": first, "count": count}
        assert said["tokens"] == count
    assert "tokens" not in manifest(calibrate(dump, tmp_path / "out"))["calibration"]["options"], "as files of 1.0 are"


def test_every_range_has_its_own_hash(dump, tmp_path):
    hashes = [
        manifest(calibrate(dump, tmp_path / "out", *span(first, count)))["calibration"]["dump"]["hash"]
        for first, count in ((0, TOKENS), (0, 200), (1, 200), (0, 201), (1, 200))
    ]
    assert len(set(hashes)) == 4 and hashes[2] == hashes[4]


def test_artifacts_of_a_part_verify(dump, tmp_path):
    assert run("kvq-inspect", calibrate(dump, tmp_path / "out", *span(70, 200)), "--verify").code == 0


@pytest.mark.parametrize(
    "flags", [span(70, 200), ("--first-token", 120), ("--num-tokens", 50), span(0, TOKENS), ()], ids=str
)
def test_deciding_from_statistics_of_a_part_gives_the_artifact_of_the_direct_run(dump, tmp_path, flags):
    direct = calibrate(dump, tmp_path / "direct", *flags, "--stats", tmp_path / "stats")
    succeed("kvq-calibrate", "--quiet", "--stats", tmp_path / "stats", "--output", tmp_path / "later")
    assert (tmp_path / "later").read_bytes() == direct.read_bytes()
    stats = manifest(tmp_path / "stats")
    assert stats.get("token_range") == manifest(direct)["calibration"]["options"].get("tokens")
    assert stats["version"] == "1.5"  # ranges


@pytest.mark.parametrize("flags", [span(70, 200), span(0, TOKENS), ()], ids=str)
def test_statistics_of_a_part_without_golden_tokens_are_no_newer_than_they_need(dump, tmp_path, flags):
    direct = calibrate(dump, tmp_path / "direct", *flags, "--golden-tokens", 0, "--stats", tmp_path / "stats")
    succeed("kvq-calibrate", "--quiet", "--stats", tmp_path / "stats", "--output", tmp_path / "later")
    assert (tmp_path / "later").read_bytes() == direct.read_bytes()
    stats = manifest(tmp_path / "stats")
    assert stats["version"] == "1.5"


def test_merged_statistics_say_the_range_of_all_of_them(dump, tmp_path):
    """Merged shards by layer have one range. Shards by sequence, or of different ranges, have no common range."""

    def collected(name: str, *flags: object) -> Path:
        calibrate(dump, tmp_path / "out", "--stats", tmp_path / name, *flags)
        return tmp_path / name

    def merged(*shards: Path) -> dict:
        succeed(
            "kvq-calibrate",
            "--stats",
            tmp_path / "merged",
            *(word for shard in shards for word in ("--merge-stats", shard)),
        )
        return manifest(tmp_path / "merged")

    low, high = (collected(name, *span(70, 200), "--layers", layer) for name, layer in (("low", 0), ("high", 1)))
    assert merged(low, high)["token_range"] == {"first": 70, "count": 200}
    assert (tmp_path / "merged").read_bytes() == collected("joint", *span(70, 200), "--layers", "0,1").read_bytes()
    other = collected("other", *span(71, 200), "--layers", 1)
    assert "token_range" not in merged(low, other)
    assert "token_range" not in merged(low, collected("rest", *span(0, 70), "--layers", 0))


# --dry-run


def predicted(dump: Path, output: Path, *flags: object) -> dict:
    return json.loads(
        succeed("kvq-calibrate", "--model", dump, "--output", output, "--dry-run", "--json", *flags).stdout
    )


def test_dry_run_counts_the_tokens_of_the_range(dump, tmp_path):
    whole, part = predicted(dump, tmp_path / "out"), predicted(dump, tmp_path / "out", *span(101, 50))
    assert (whole["tokens"], part["tokens"]) == (TOKENS, 50)
    assert predicted(dump, tmp_path / "out", "--first-token", 101)["tokens"] == TOKENS - 101
    assert part["peak_bytes"] <= whole["peak_bytes"] and part["artifact_bytes"] == whole["artifact_bytes"]
    assert list(tmp_path.iterdir()) == []


def test_dry_run_says_the_tokens_of_the_range(dump, tmp_path):
    text = succeed("kvq-calibrate", "--model", dump, "--output", tmp_path / "out", "--dry-run", *span(101, 50)).stdout
    assert "50 tokens" in text, text.splitlines()[0]


# What is refused

REFUSALS = {
    "one too many": (("--num-tokens", TOKENS + 1), f"--num-tokens {TOKENS + 1}", f"{TOKENS} tokens"),
    "one too far": (span(1, TOKENS), "--first-token 1", f"{TOKENS} tokens"),
    "behind the end": (("--first-token", TOKENS), f"--first-token {TOKENS}", f"{TOKENS} tokens"),
    "far behind": (("--first-token", 1099511627776), "--first-token", f"{TOKENS} tokens"),
    "both far": (span(1099511627776, 1099511627776), "--first-token", f"{TOKENS} tokens"),
    "none": (("--num-tokens", 0), "--num-tokens", "0"),
    "negative": (("--first-token", -1), "--first-token", "-1"),
    "no number": (("--num-tokens", "all"), "--num-tokens", "all"),
    "a fraction": (("--first-token", "0.5"), "--first-token", "0.5"),
    "too large": (("--num-tokens", 2**63), "--num-tokens", str(2**63)),
}


@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=["run", "dry-run"])
@pytest.mark.parametrize("name", REFUSALS)
def test_ranges_that_are_not_there_are_refused(dump, tmp_path, name, more):
    flags, *words = REFUSALS[name]
    result = run(
        "kvq-calibrate", "--model", dump, "--output", tmp_path / "out", "--stats", tmp_path / "stats", *flags, *more
    )
    assert result.code == USAGE and result.stdout == ""
    first, *rest = result.stderr.splitlines()
    assert first.startswith("kvq-calibrate: error: ") and all(line.startswith("hint: ") for line in rest)
    assert all(word in first for word in words), first
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", [("--num-tokens", 10), ("--first-token", 5), span(5, 10)], ids=str)
def test_ranges_need_a_dump(dump, tmp_path, flags):
    calibrate(dump, tmp_path / "first", "--stats", tmp_path / "stats")
    for inputs in (
        ("--stats", tmp_path / "stats", "--output", tmp_path / "out"),
        ("--merge-stats", tmp_path / "stats", "--stats", tmp_path / "merged"),
    ):
        result = run("kvq-calibrate", *inputs, *flags)
        assert result.code == USAGE and "--model" in result.stderr.splitlines()[0], result
    assert {path.name for path in tmp_path.iterdir()} == {"first", "stats"}


# --resume


@pytest.fixture(scope="module")
def long_dump(make_dump) -> Path:
    return make_dump(tokens=400, sequences=3, layers=6)


def interrupted(dump: Path, output: Path, *flags: object) -> Path:
    """The shards of a run that was killed after some layers."""
    for _ in range(50):
        process = start(dump, output, *flags)
        wait_for_layers(process, output, 2)
        process.kill()
        process.wait()
        if shards(output):
            return Path(f"{output}.parts")
        output.unlink()  # the run ended before the test could kill it
    raise AssertionError("no run could be interrupted")


OLD_RANGES = {"another": span(11, 300), "longer": span(10, 301), "none": ()}


@pytest.mark.parametrize("old", OLD_RANGES)
def test_resume_takes_nothing_over_from_another_range(long_dump, tmp_path, old):
    parts = interrupted(long_dump, tmp_path / "old", *OLD_RANGES[old])
    shutil.copytree(parts, tmp_path / "out.parts")
    fresh = calibrate(long_dump, tmp_path / "fresh", *span(10, 300)).read_bytes()
    assert calibrate(long_dump, tmp_path / "out", "--resume", *span(10, 300)).read_bytes() == fresh


def test_nor_does_a_run_of_all_tokens_from_a_range(long_dump, tmp_path):
    parts = interrupted(long_dump, tmp_path / "old", *span(0, 399))
    shutil.copytree(parts, tmp_path / "out.parts")
    assert (
        calibrate(long_dump, tmp_path / "out", "--resume").read_bytes()
        == calibrate(long_dump, tmp_path / "fresh").read_bytes()
    )


def test_resume_continues_the_same_range(long_dump, tmp_path):
    output = tmp_path / "out"
    interrupted(long_dump, output, *span(10, 300))
    kept = {path.name: path.stat().st_ino for path in shards(output)}
    process = start(long_dump, output, "--resume", *span(10, 300))
    wait_for_layers(process, output, len(kept) + 1)
    process.kill()
    process.wait()
    if not output.exists():
        assert kept.items() <= {path.name: path.stat().st_ino for path in shards(output)}.items(), (
            "they are not collected again"
        )
    assert (
        calibrate(long_dump, output, "--resume", *span(10, 300)).read_bytes()
        == calibrate(long_dump, tmp_path / "fresh", *span(10, 300)).read_bytes()
    )
