"""Hostile and damaged files: refused with one line, never a crash, and no damage goes unnoticed."""

import random
from pathlib import Path

import pytest
from kvq_tools import ROOT, Result, calibrate, run

INPUT, NUMERICAL, UNSUPPORTED, CHECK_FAILED = 3, 4, 5, 6
MALFORMED = sorted((ROOT / "formats/malformed").glob("*.safetensors"))
SEED = 20240607


def is_refusal(result: Result, path: Path) -> bool:
    lines = result.stderr.splitlines()
    return (
        result.stdout == "" and f"error: {path}: " in lines[0] and all(line.startswith("hint: ") for line in lines[1:])
    )


@pytest.mark.parametrize("path", MALFORMED, ids=lambda path: path.stem)
def test_hostile_containers_are_refused(tmp_path, path):
    for command in (
        ("kvq-inspect", path),
        ("kvq-inspect", path, "--verify"),
        ("kvq-calibrate", "--stats", path, "--output", tmp_path / "out"),
    ):
        result = run(*command)
        assert result.code == (UNSUPPORTED if path.stem == "dtype_unknown" else INPUT) and is_refusal(result, path), (
            result
        )
    assert not (tmp_path / "out").exists()


def flipped(content: bytes, position: int, bit: int) -> bytes:
    copy = bytearray(content)
    copy[position] ^= 1 << bit
    return bytes(copy)


def test_every_flipped_bit_of_an_artifact_is_noticed(make_dump, tmp_path):
    content = calibrate(make_dump(head_dim=32, tokens=61), tmp_path / "out").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    rng = random.Random(SEED)
    in_header = [rng.randrange(8, start) for _ in range(150)]
    in_data = [rng.randrange(start, len(content)) for _ in range(50)]
    path = tmp_path / "damaged"
    for position in [*range(8), *in_header, *in_data]:
        bit = rng.randrange(8)
        path.write_bytes(flipped(content, position, bit))
        result = run("kvq-inspect", path, "--verify")
        where = f"bit {bit} of byte {position}: {result}"
        assert result.code in (INPUT, UNSUPPORTED, CHECK_FAILED), where
        assert ("FAILED" in result.stdout) if result.code == CHECK_FAILED else is_refusal(result, path), where


def test_damaged_dumps_do_not_crash_the_tool(make_dump, tmp_path):
    """Some damage only changes numbers. No damage may let the HDF5 library crash the tool."""
    content = make_dump(head_dim=32, tokens=61, layers=1).read_bytes()
    rng = random.Random(SEED)
    path = tmp_path / "damaged.h5"
    for _ in range(120):
        position, bit = rng.choice([rng.randrange(len(content)), rng.randrange(4096)]), rng.randrange(8)
        path.write_bytes(flipped(content, position, bit))
        result = run("kvq-calibrate", "--quiet", "--model", path, "--output", tmp_path / "out")
        assert result.code in (0, INPUT, NUMERICAL, UNSUPPORTED), f"bit {bit} of byte {position}: {result}"
        assert result.code == 0 or "kvq-calibrate: error: " in result.stderr
