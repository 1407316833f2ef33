"""kvq-eval --csv, read by Python's csv: the numbers of --json, for tables and sweeps."""

import csv
import io
import json
import subprocess
from pathlib import Path

import pytest
from kvq_tools import BIN, calibrate, run, succeed

USAGE = 2


@pytest.fixture(scope="module")
def dump(make_dump) -> Path:
    return make_dump(tokens=90, sequences=1, layers=2, head_dim=32, query_spectrum=0.8)


@pytest.fixture(scope="module")
def odd_names(dump, tmp_path_factory) -> list[Path]:
    """Artifacts whose names hold what CSV must quote."""
    folder = tmp_path_factory.mktemp("odd")
    first = calibrate(dump, folder / 'a, "b".safetensors', "--method", "plain")
    return [first, calibrate(dump, folder / "c=d ü.safetensors", "--method", "quarot")]


def table(*flags: object) -> list[dict[str, str]]:
    """Records of --csv. Checks what RFC 4180 demands of lines and fields."""
    text = csv_bytes(*flags).decode()
    rows = list(csv.reader(io.StringIO(text, newline="")))
    assert len({len(row) for row in rows}) == 1 and len(set(rows[0])) == len(rows[0])
    assert csv_text(rows) == text, "Python writes the same bytes"
    return [dict(zip(rows[0], row)) for row in rows[1:]]


def csv_bytes(*flags: object) -> bytes:
    """--csv without translated line ends."""
    return subprocess.run(
        [BIN / "kvq-eval", "--csv", *map(str, flags)], capture_output=True, check=True, timeout=120
    ).stdout


def csv_text(rows: list[list[str]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue()


def document(*flags: object) -> dict:
    return json.loads(succeed("kvq-eval", "--json", *flags).stdout)


def number(text: str) -> float | None:
    return float(text) if text else None


def test_summary_has_the_numbers_of_the_document(dump, odd_names):
    flags = ("--no-windows", "--model", dump, *odd_names, "--scheme", "fp8", "--scheme", "kivi-2-k")
    said, records = document(*flags), table(*flags)
    assert [record["scheme"] for record in records] == ['a, "b"', "c=d ü", "fp8", "kivi-2-k"]
    assert [record["method"] for record in records] == ["plain", "quarot", "", ""]
    assert [record["path"] for record in records] == [*map(str, odd_names), "", ""]
    for record, scheme in zip(records, said["schemes"], strict=True):
        assert number(record["effective_bits"]) == scheme["effective_bits"]
        for name, value in scheme["mean"].items():
            if isinstance(value, dict):
                for part, own in value.items():
                    assert number(record[name if part == "mean" else f"{name}_{part}"]) == own
            else:
                assert number(record[name]) == value


def test_lines_end_as_the_standard_says(dump):
    text = csv_bytes("--model", dump, "--scheme", "fp8")
    assert text.count(b"\r\n") == text.count(b"\n") == 2


def test_one_metric_by_layer(dump):
    flags = ("--model", dump, "--scheme", "fp8", "--scheme", "nvfp4", "--metric", "attention_kl")
    said, records = document(*flags), table(*flags)
    assert [(record["layer"], record["scheme"]) for record in records] == [
        ("0", "fp8"),
        ("0", "nvfp4"),
        ("1", "fp8"),
        ("1", "nvfp4"),
    ]
    for record in records:
        scheme = next(own for own in said["schemes"] if own["name"] == record["scheme"])
        layer = scheme["layers"][int(record["layer"])]
        assert number(record["attention_kl"]) == layer["attention_kl"]["mean"]
        assert number(record["attention_kl_p99"]) == layer["attention_kl"]["p99"]
        assert number(record["k_effective_bits"]) == layer["k_effective_bits"]


def test_contexts_and_rotations(dump, odd_names):
    records = table("--model", dump, "--scheme", "naive-int2", "--by-context")
    assert [(record["context"], record["scheme"]) for record in records] == [("0", "naive-int2"), ("64", "naive-int2")]
    assert all(number(record["attention_kl"]) > 0 for record in records)
    flags = ("--model", dump, odd_names[0], "--rotations")
    records = table(*flags)
    said = document(*flags)["schemes"][0]["layers"]
    assert [number(record["max_abs"]) for record in records] == [
        head["max_abs"] for layer in said for head in layer["rotations"]
    ]


def test_sweep(dump, tmp_path):
    grid = tmp_path / "sweep.json"
    rows = [{"label": "a, b", "flags": "--method block-gtq"}, {"label": 'c "d"', "flags": "--method plain --bits 3"}]
    grid.write_text(json.dumps({"rows": rows, "schemes": ["fp8"]}))
    flags = ("--quiet", "--model", dump, "--calibration", dump, "--sweep", grid)
    said, records = document(*flags), table(*flags)
    assert [record["scheme"] for record in records] == ["a, b", 'c "d"', "fp8"]
    for record, scheme in zip(records, said["schemes"], strict=True):
        assert record["flags"] == scheme.get("flags", "")
        assert record["path"] == "", "the artifacts are gone"
        for metric in ("output_rel_mse", "attention_kl"):
            assert record[f"pareto_{metric}"] == str(int(scheme["pareto"][metric]))
        for name in ("hamming", "high_bit_jaccard", "regret"):
            assert number(record[name]) == scheme.get("allocation", {}).get(name)


@pytest.mark.parametrize(
    "flags", [("--json",), ("--metric", "attention_kl", "--by-context"), ("--rotations", "--by-context")]
)
def test_one_table_at_a_time(dump, flags):
    result = run("kvq-eval", "--csv", "--model", dump, "--scheme", "fp8", *flags)
    assert (result.code, result.stdout) == (USAGE, "") and "--csv" in result.stderr
