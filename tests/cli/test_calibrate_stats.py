"""Statistics files: decide again without the dump, and shards by layer or by sequence in place of one run."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from dumps import synthetic
from faulty_artifacts import hashed, with_metadata
from kvq_tools import calibrate, run, succeed
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from kvq.artifact import content_hash
from kvq.safetensors_file import SafetensorsFile

LAYERS, SEQUENCES = 4, 3
ALL = ("--collect", "all")
MERGEABLE = ("--collect", "scored_query", "--center", "kv")  # sst cannot be merged over sequences


@pytest.fixture(scope="module")
def dump(make_dump) -> Path:
    return make_dump(tokens=301, sequences=SEQUENCES, layers=LAYERS, query_spectrum=0.95, channel_means=0.5)


@pytest.fixture(scope="module")
def by_sequence(tmp_path_factory) -> list[Path]:
    """The same dump with one file for each sequence."""
    folder = tmp_path_factory.mktemp("split")
    synthetic(
        folder / "part.h5",
        tokens=301,
        sequences=SEQUENCES,
        layers=LAYERS,
        query_spectrum=0.95,
        channel_means=0.5,
        split_by_sequence=True,
    )
    return sorted(folder.iterdir())


def collect(dumps: list[Path], stats: Path, *flags: object) -> Path:
    models = [word for dump in dumps for word in ("--model", dump)]
    succeed("kvq-calibrate", "--quiet", *models, "--stats", stats, "--output", f"{stats}.artifact", *flags)
    return stats


def decide(stats: Path, output: Path, *flags: object) -> bytes:
    succeed("kvq-calibrate", "--quiet", "--stats", stats, "--output", output, *flags)
    return output.read_bytes()


def merge(shards: list[Path], stats: Path) -> Path:
    succeed("kvq-calibrate", "--quiet", "--merge-stats", *shards, "--stats", stats)
    return stats


DECISIONS = [
    (),
    ("--bits", 3, "--center", "kv"),
    ("--method", "saw-int4"),
    ("--coder", "symmetric", "--share", "layer"),
    ("--target-k", "scored_query", "--target-v", "sst"),
    ("--target-k", "key", "--target-v", "value", "--clip", "none"),
    ("--sign-search", 2, "--seed", 0),
    ("--layers", "1-2"),
]


@pytest.mark.parametrize("flags", DECISIONS, ids=str)
def test_deciding_from_statistics_gives_the_bytes_of_the_direct_run(dump, tmp_path, flags):
    stats = collect([dump], tmp_path / "stats", *ALL)
    direct = calibrate(dump, tmp_path / "direct", *ALL, *flags).read_bytes()
    assert decide(stats, tmp_path / "later", *flags) == direct


@pytest.mark.parametrize("borders", [["0-1", "2-3"], ["3", "0,2", "1"]], ids=str)
def test_shards_by_layer_give_the_bytes_of_the_joint_run(dump, tmp_path, borders):
    joint = collect([dump], tmp_path / "joint", *ALL)
    shards = [collect([dump], tmp_path / f"shard{i}", *ALL, "--layers", layers) for i, layers in enumerate(borders)]
    merged = merge(shards, tmp_path / "merged")
    assert merged.read_bytes() == joint.read_bytes()
    assert decide(merged, tmp_path / "out", *ALL) == Path(f"{joint}.artifact").read_bytes()


def test_layers_split_over_files_give_the_bytes_of_one_file(dump, tmp_path):
    synthetic(
        tmp_path / "part.h5",
        tokens=301,
        sequences=SEQUENCES,
        layers=LAYERS,
        query_spectrum=0.95,
        channel_means=0.5,
        split_by_layer=True,
    )
    parts = sorted(tmp_path.glob("part.*"), reverse=True)
    assert len(parts) == LAYERS
    assert collect(parts, tmp_path / "split", *ALL).read_bytes() == collect([dump], tmp_path / "one", *ALL).read_bytes()


def test_sequences_split_over_files_give_the_numbers_of_one_file(dump, by_sequence, tmp_path):
    """Only the content hash depends on how the files were cut."""
    assert len(by_sequence) == SEQUENCES
    split, one = collect(by_sequence, tmp_path / "split", *ALL), collect([dump], tmp_path / "one", *ALL)
    expect_same_statistics(split, one, tolerance=0, same_files=False)
    with h5py.File(dump) as file:
        lengths = np.diff(file["cu_seqlens"][:]).tolist()
    assert [row["count"] for row in manifest(split)["layers"][0]["ranges"]] == lengths
    assert [row["count"] for row in manifest(one)["layers"][0]["ranges"]] == [sum(lengths)]


def expect_same_statistics(found: Path, expected: Path, tolerance: float = 1e-9, same_files: bool = True) -> None:
    """Compares sums to `tolerance` of the tensor's largest number, samples exactly, and the manifest without hashes:
    without ranges, too, if the dumps are cut into other files."""
    a, b = load_file(found), load_file(expected)
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        if ".sample." in name:
            assert np.array_equal(tensor, b[name]), name
        else:
            assert np.abs(tensor - b[name]).max() <= tolerance * np.abs(b[name]).max(), name
    documents = manifest(found), manifest(expected)
    for document in () if same_files else documents:
        for layer in document["layers"]:
            del layer["ranges"]
    assert documents[0] == documents[1]


def manifest(path: Path) -> dict:
    with safe_open(path, "numpy") as file:
        document = json.loads(file.metadata()["kvq.manifest"])
    for layer in document["layers"]:
        del layer["content_hash"]
    return document


def test_shards_by_sequence_equal_the_joint_run(by_sequence, tmp_path):
    joint = collect(by_sequence, tmp_path / "joint", *MERGEABLE)
    shards = [collect([part], tmp_path / f"shard{i}", *MERGEABLE) for i, part in enumerate(by_sequence)]
    merged = merge(shards, tmp_path / "merged")
    expect_same_statistics(merged, joint)
    nested = merge([merge(shards[:2], tmp_path / "two"), shards[2]], tmp_path / "nested")
    expect_same_statistics(nested, joint)


def test_shards_by_sequence_keep_the_smallest_sampling_keys(by_sequence, tmp_path):
    flags = (*MERGEABLE, "--sample-tokens", 37)
    shards = [collect([part], tmp_path / f"shard{i}", *flags) for i, part in enumerate(by_sequence)]
    expect_same_statistics(merge(shards, tmp_path / "merged"), collect(by_sequence, tmp_path / "joint", *flags))
    keys = load_file(tmp_path / "merged")["layers.0.sample.key"]
    assert len(keys) == 37 and (np.diff(keys) > 0).all()


def test_merging_statistics_and_deciding_is_one_command(by_sequence, tmp_path):
    shards = [collect([part], tmp_path / f"shard{i}", *MERGEABLE) for i, part in enumerate(by_sequence)]
    merged = tmp_path / "merged"
    succeed("kvq-calibrate", "--quiet", "--merge-stats", *shards, "--stats", merged, "--output", tmp_path / "out")
    assert decide(merged, tmp_path / "again") == (tmp_path / "out").read_bytes()


# Files that cannot be joined


def expect_refusal(code: int, words: list[str], *arguments: object) -> None:
    result = run("kvq-calibrate", *arguments)
    assert result.code == code and result.stderr.startswith("kvq-calibrate: error: "), result
    assert all(word in result.stderr for word in words), result.stderr


def test_sst_is_not_merged_by_sequence(by_sequence, tmp_path):
    shards = [collect([part], tmp_path / f"shard{i}", *ALL) for i, part in enumerate(by_sequence[:2])]
    expect_refusal(5, ["layer 0", "sst", "hint: "], "--merge-stats", *shards, "--stats", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--seed", 1), ["seed", "expected 0", "found 1"]),
        (("--sample-tokens", 99), ["sample_tokens", "expected 2048", "found 99"]),
        (("--collect", "sst"), ["layer 0", "moments"]),
    ],
    ids=str,
)
def test_shards_of_other_options_are_refused(by_sequence, tmp_path, flags, words):
    one = collect([by_sequence[0]], tmp_path / "one")
    other = collect([by_sequence[1]], tmp_path / "other", *flags)
    expect_refusal(3, words, "--merge-stats", one, other, "--stats", tmp_path / "merged")


def test_shards_of_another_model_are_refused(dump, make_dump, tmp_path):
    one = collect([dump], tmp_path / "one", "--layers", "0")
    other = collect([make_dump(layers=2, head_dim=32)], tmp_path / "other")
    expect_refusal(3, ["num_layers", str(one), str(other)], "--merge-stats", one, other, "--stats", tmp_path / "merged")


def test_layers_of_different_sequences_are_refused(by_sequence, tmp_path):
    one = collect([by_sequence[0]], tmp_path / "one", "--layers", "0-1")
    other = collect([by_sequence[1]], tmp_path / "other", "--layers", "2-3")
    expect_refusal(3, ["layer 2", "tokens"], "--merge-stats", one, other, "--stats", tmp_path / "merged")


def test_the_same_shard_twice_is_refused(by_sequence, tmp_path):
    """Otherwise its tokens would count double."""
    one = collect([by_sequence[0]], tmp_path / "one")
    expect_refusal(3, [str(one)], "--merge-stats", one, one, "--stats", tmp_path / "merged")


def expect_overlap(first: Path, second: Path, words: str, tmp_path: Path) -> None:
    for files in ((first, second), (second, first)):
        expect_refusal(3, ["layer 0: ", words, *map(str, files)], "--merge-stats", *files, "--stats", tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_a_merged_file_with_its_own_part_is_refused(by_sequence, tmp_path):
    shards = [collect([part], tmp_path / f"shard{i}", *MERGEABLE) for i, part in enumerate(by_sequence)]
    merged = merge(shards[:2], tmp_path / "merged")
    nested = merge([merged, shards[2]], tmp_path / "nested")
    for part in shards[:2]:
        expect_overlap(merged, part, "tokens 0 to ", tmp_path)
    for part in (*shards, merged):
        expect_overlap(nested, part, "tokens 0 to ", tmp_path)
    joint = collect(by_sequence[:2], tmp_path / "joint", *MERGEABLE)
    (whole,) = manifest(shards[1])["layers"][0]["ranges"]
    expect_overlap(joint, shards[1], f"tokens 0 to {whole['count'] - 1} of dump xxh3-128:", tmp_path)


def test_ranges_that_share_tokens_are_refused(dump, tmp_path):
    def part(first: int, count: int) -> Path:
        flags = ("--layers", 0, "--first-token", first, "--num-tokens", count)
        return collect([dump], tmp_path / f"{first}-{count}", *MERGEABLE, *flags)

    low, high, middle = part(0, 150), part(150, 151), part(100, 60)
    whole = merge([low, high], tmp_path / "whole")
    ranges = manifest(whole)["layers"][0]["ranges"]
    assert [(row["first"], row["count"]) for row in ranges] == [(0, 301)]
    for other, words in ((low, "tokens 100 to 149 "), (high, "tokens 150 to 159 "), (whole, "tokens 100 to 159 ")):
        expect_overlap(middle, other, words, tmp_path)


def test_statistics_of_older_versions_merge_with_a_warning(by_sequence, tmp_path):
    """They do not say which tokens they hold, but tokens that both have sampled are found."""
    shards = [collect([part], tmp_path / f"shard{i}", *MERGEABLE) for i, part in enumerate(by_sequence)]
    old = [edited_stats(shard, tmp_path / f"old{i}", drop_ranges) for i, shard in enumerate(shards)]
    result = succeed("kvq-calibrate", "--merge-stats", *old[:2], "--stats", tmp_path / "merged")
    assert result.stderr.startswith(f"kvq-calibrate: warning: {old[1]}: statistics before version 1.5 "), result.stderr
    assert "ranges" not in manifest(tmp_path / "merged")["layers"][0]
    expect_overlap(tmp_path / "merged", old[0], "sampled tokens are also in", tmp_path)
    expect_overlap(tmp_path / "merged", shards[1], "sampled tokens are also in", tmp_path)


def drop_ranges(document: dict) -> None:
    document["version"] = "1.4"
    for layer in document["layers"]:
        del layer["ranges"]


def edited_stats(source: Path, target: Path, edit) -> Path:
    """Copies statistics with an edited manifest and the content hash that fits it."""
    with safe_open(source, "numpy") as file:
        document = json.loads(file.metadata()["kvq.manifest"])
    edit(document)
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    target.write_bytes(hashed(with_metadata(source.read_bytes(), kvq__manifest=text, version=document["version"])))
    return target


def test_damaged_statistics_are_refused(dump, tmp_path):
    """One byte of C_Q changes, so only the content hash can find the damage."""
    stats = collect([dump], tmp_path / "stats")
    content = bytearray(stats.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    content[start + SafetensorsFile(bytes(content), "stats").tensors["layers.1.query.sum"].begin + 6] ^= 64
    stats.write_bytes(content)
    expect_refusal(3, [str(stats)], "--stats", stats, "--output", tmp_path / "out")


def with_number(stats: Path, target: Path, tensor: str, value: float) -> Path:
    """A copy with another number in a tensor, and with the hash of the copy."""
    with safe_open(stats, "numpy") as file:
        metadata = file.metadata()
    tensors = load_file(stats)
    tensors[tensor].reshape(-1)[5] = value
    for _ in range(2):  # the hash needs the file, and the file the hash
        save_file(tensors, target, metadata)
        metadata["kvq.content_hash"] = content_hash(SafetensorsFile(target.read_bytes(), "stats"))
    return target


@pytest.mark.parametrize("tensor", ["sample.q", "sample.k", "sample.v"])
@pytest.mark.parametrize("value", [1e20, -3e38])
def test_numbers_too_large_to_calculate_with_are_named(make_dump, tmp_path, tensor, value):
    dump = make_dump(tokens=40, layers=2, head_dim=32, dtype="float32")
    stats = collect([dump], tmp_path / "stats")
    bad = with_number(stats, tmp_path / "bad", f"layers.1.{tensor}", value)
    words = [f"{bad}: tensor layers.1.{tensor}: {value:g} at [0, 0, 5]: expected magnitudes below 1.5e+09"]
    expect_refusal(4, words, "--stats", bad, "--output", tmp_path / "out")


def test_results_that_overflow_are_no_bug(make_dump, tmp_path):
    """The mean of keys is used where no check of a single number can know that it is too large."""
    dump = make_dump(tokens=40, layers=2, head_dim=32)
    stats = collect([dump], tmp_path / "stats", "--method", "kvq")
    bad = with_number(stats, tmp_path / "bad", "layers.1.key.first", 1e38)
    result = run("kvq-calibrate", "--stats", bad, "--method", "kvq", "--output", tmp_path / "out")
    assert result.code in (0, 3, 4) and "bug" not in result.stderr, result
