"""kvq-diff --html: one well-formed page whose verdict, rules and charts are those of the JSON document."""

import json
import re
from pathlib import Path

import pytest
from faulty_artifacts import hashed
from html_tree import Node, charts, parse
from kvq_tools import ROOT, calibrate, run, succeed

USAGE, CHECK_FAILED = 2, 6
HELD_OUT = ROOT / "sample_data/evaluation.h5"


@pytest.fixture(scope="module")
def files(sample, tmp_path_factory) -> tuple[Path, Path]:
    """Two artifacts that differ in every layer: 3 bits, then 2."""
    folder = tmp_path_factory.mktemp("diff")
    flags = ("--method", "oscar", "--sink-tokens", 0, "--recent-tokens", 0)
    return tuple(
        calibrate(sample, folder / f"{name}.safetensors", *flags, "--bits", bits)
        for name, bits in (("old", 3), ("new", 2))
    )


def page_and_json(files, folder: Path, *flags: object) -> tuple[str, dict]:
    page = folder / "diff.html"
    result = run("kvq-diff", *files, "--html", page, "--json", "-q", *flags)
    assert result.code in (0, CHECK_FAILED), result.stderr
    return page.read_text(), json.loads(result.stdout)


@pytest.fixture(scope="module")
def measured(files, tmp_path_factory) -> tuple[str, dict]:
    return page_and_json(files, tmp_path_factory.mktemp("page"), "--model", HELD_OUT)


def section(html: str, name: str) -> Node:
    return next(node for node in parse(html).all("section") if node.attributes["id"] == name)


def is_shown(text: str, value: float) -> bool:
    return float(text) == pytest.approx(value, rel=5.001e-4, abs=1e-300)


def test_the_page_stands_alone(measured):
    html, _ = measured
    root = parse(html)
    assert html.startswith("<!doctype html>") and len(root.all("h1")) == 1
    ids = [node.attributes["id"] for node in root.walk() if "id" in node.attributes]
    assert [link.attributes["href"] for link in root.all("a")] == [f"#{name}" for name in ids]
    assert not re.search(r"https?:|//|@import|url\(|<script|<link|<iframe|<img|\ssrc=|\son\w+=", html, re.IGNORECASE)
    for svg in charts(html):
        assert svg.get("role") == "img" and len(svg.get("aria-label")) > 20


def test_verdict_and_rules(measured):
    html, document = measured
    failed = [check for check in document["checks"] if check["outcome"] == "failed"]
    judged = [check for check in document["checks"] if check["outcome"] != "skipped"]
    assert failed and not document["passed"]
    said = section(html, "verdict").text()
    assert f"FAILED {len(failed)} of {len(judged)} rules." in said
    assert all(check["rule"] in said for check in failed[:5])
    rows = section(html, "rules").rows()[1:]
    assert sorted(row[1] for row in rows) == sorted(check["rule"] for check in judged)
    assert [row[0] for row in rows] == ["FAIL"] * len(failed) + ["pass"] * (len(judged) - len(failed))
    by_rule = {row[1]: row for row in rows}
    worst = next(check for check in failed if check["rule"] == "output_rel_mse<=+5%")["worst"]
    used = (worst["new"] - worst["old"]) / worst["old"] / 0.05
    assert by_rule["output_rel_mse<=+5%"][3] == f"{100 * used:.0f}%"


def test_numbers_by_layer_and_head(measured):
    html, document = measured
    shown = {figure.first("figcaption").text(): figure for figure in section(html, "places").all("figure")}
    readings = {(r["metric"], r.get("where")): r for r in document["readings"]}
    for metric in ("output_rel_mse", "attention_kl.p99", "k_rel_mse"):
        rows = shown[metric].rows()
        assert rows[0] == ["layer", "old", "new", "change"] and len(rows) == 7
        for layer, old, new, _ in rows[1:]:
            reading = readings[f"layers.{metric}", f"layer {layer}"]
            assert is_shown(old, reading["old"]) and is_shown(new, reading["new"])
    cells = [cell for cell in shown["output_rel_mse: new over old"].all("rect") if cell.all("title")]
    assert len(cells) == 12
    for cell in cells:
        layer, head, ratio = re.fullmatch(r"layer (\d+), KV head (\d+): (\S+)", cell.text()).groups()
        reading = readings["heads.output_rel_mse", f"layer {layer} head {head}"]
        assert is_shown(ratio, reading["new"] / reading["old"])
    over = {row[0]: row for row in section(html, "changes").rows()[1:]}
    for cell, name in ((1, "old"), (2, "new")):
        assert float(over["output_rel_mse"][cell]) == pytest.approx(readings["output_rel_mse", None][name], rel=0.01)


def test_without_a_dump(files, tmp_path):
    html, document = page_and_json(files, tmp_path)
    assert not document["measured"]
    assert "Only the files were judged" in section(html, "verdict").text()
    assert "--model HELDOUT.h5" in section(html, "places").text()
    shown = {(row[0], row[1], row[2]) for row in section(html, "differences").rows()[1:]}
    assert shown == {(own["what"], own["old"], own["new"]) for own in document["differences"]} and shown


def test_equal_files_pass(files, tmp_path):
    html, document = page_and_json((files[0], files[0]), tmp_path)
    assert document["passed"] and "Passed all" in section(html, "verdict").text()
    assert "The files are identical." in section(html, "verdict").text()
    assert "FAIL" not in parse(html).text().replace("default", "")


def test_same_bytes_twice(files, measured, tmp_path):
    assert page_and_json(files, tmp_path, "--model", HELD_OUT)[0] == measured[0]


def test_a_damaged_file_is_named(files, tmp_path):
    damaged = tmp_path / "damaged.safetensors"
    content = bytearray(files[1].read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    assert hashed(bytes(content)) != bytes(content), "the hash is wrong"
    html, document = page_and_json((files[0], damaged), tmp_path)
    assert not document["passed"] and "verification<=0" in section(html, "verdict").text()
    assert any(row[2].startswith("FAIL") for row in section(html, "verification").rows()[1:])


def test_names_are_only_text(files, tmp_path):
    hostile = "<script>alert(1)</script>\"'&\u202e"
    html, _ = page_and_json(files, tmp_path, "--old-name", hostile, "--new-name", "<img src=x onerror=alert(2)>")
    root = parse(html)
    assert not {"script", "img"} & {node.tag for node in root.walk()} and "\u202e" not in html
    assert "<script>alert(1)</script>\"'&" in root.first("header").text()


def test_standard_output_takes_one_of_them(files, tmp_path):
    alone = run("kvq-diff", *files, "--html", "-", "-q")
    assert alone.code == CHECK_FAILED and alone.stdout.startswith("<!doctype html>")
    assert alone.stdout.endswith("</html>\n"), "the page, without the text"
    for more in ("--json", "--markdown"):
        refused = run("kvq-diff", *files, "--html", "-", more)
        assert refused.code == USAGE and "standard output" in refused.stderr and refused.stdout == ""


@pytest.mark.parametrize("which", ["old", "new", "dump", "junit"])
def test_inputs_are_not_overwritten(files, tmp_path, which):
    target = {"old": files[0], "new": files[1], "dump": HELD_OUT, "junit": tmp_path / "x.xml"}[which]
    before = target.read_bytes() if target.exists() else None
    refused = run("kvq-diff", *files, "--model", HELD_OUT, "--junit", tmp_path / "x.xml", "--html", target)
    assert refused.code == USAGE and "choose another name" in refused.stderr
    assert (target.read_bytes() if target.exists() else None) == before


def test_page_fits_its_window(measured, files, tmp_path):
    from browser import Browser, find_browser

    program = find_browser()
    if program is None:
        pytest.skip("no Chromium: scripts/setup.sh --with-tests installs it")
    page = tmp_path / "diff.html"
    page.write_text(measured[0])
    with Browser(program, tmp_path / "profile") as browser:
        for width in (390, 1200):
            browser.open(page, width, False)
            assert browser.complaints() == []
            browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
            assert browser.evaluate("document.scrollingElement.scrollWidth <= innerWidth")


def test_help_names_it():
    assert "--html" in succeed("kvq-diff", "--help").stdout
