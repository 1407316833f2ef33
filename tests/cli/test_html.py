"""kvq-inspect --html: one well-formed file that needs nothing else, whose numbers are those of artifact and
evaluations, whatever the names in them; what does not belong together is refused. In a browser: no complaints, no
sideways scrolling."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from browser import Browser, find_browser
from dumps import edited
from faulty_dumps import set_attribute
from html_tree import Node, charts, parse
from kvq_tools import ROOT, calibrate, run, succeed

from kvq.artifact_reader import load_artifact

USAGE, INPUT, UNSUPPORTED = 2, 3, 5
METHODS = ("kvq", "oscar", "block-gtq", "saw-int4")
SIDES = {"keys": "k", "values": "v"}
METRICS = {
    "output_rel_mse: error of attention's output": "output_rel_mse",
    "logit_rel_mse: error of the logits": "logit_rel_mse",
    "attention_kl: mean KL of the weights, nats": "attention_kl/mean",
    "attention_kl: 99th percentile over queries, nats": "attention_kl/p99",
    "k_rel_mse: error of the keys": "k_rel_mse",
    "v_rel_mse: error of the values": "v_rel_mse",
}
HOSTILE = """<script>alert(1)</script>"'&\u202e\x01<img src=x onerror=alert(2)>"""


@pytest.fixture(scope="module")
def folder(sample, tmp_path_factory) -> Path:
    """Artifacts by method, and evaluation.json with all of them and two schemes."""
    folder = tmp_path_factory.mktemp("report")
    artifacts = [calibrate(sample, folder / f"{method}.safetensors", "--method", method) for method in METHODS]
    said = succeed(
        "kvq-eval",
        "--model",
        ROOT / "sample_data/evaluation.h5",
        "--no-windows",
        *artifacts,
        "--scheme",
        "tq-mse-2",
        "--scheme",
        "kivi",
        "--json",
    ).stdout
    (folder / "evaluation.json").write_text(said)
    return folder


@pytest.fixture(scope="module")
def document(folder) -> dict:
    return json.loads((folder / "evaluation.json").read_text())


def write_report(artifact: Path, output: Path, *evaluations: Path, flags: tuple = ()) -> str:
    words = [word for path in evaluations for word in ("--eval", path)]
    result = succeed("kvq-inspect", artifact, "--html", output, *words, *flags)
    assert result.stdout == result.stderr == ""
    return output.read_text()


@pytest.fixture(scope="module")
def reports(folder) -> dict[str, str]:
    """HTML by method, with the evaluation."""
    return {
        method: write_report(folder / f"{method}.safetensors", folder / f"{method}.html", folder / "evaluation.json")
        for method in METHODS
    }


@pytest.fixture(scope="module")
def bare(folder) -> dict[str, str]:
    """HTML by method, without the evaluation."""
    return {
        method: write_report(folder / f"{method}.safetensors", folder / f"{method}-bare.html") for method in METHODS
    }


def section(html: str, name: str) -> Node:
    return next(node for node in parse(html).all("section") if node.attributes["id"] == name)


def str_of(html: str, name: str) -> str:
    """The section's HTML."""
    return re.search(rf'<section id="{name}">.*?</section>', html, re.DOTALL)[0]


def figures(html: str, name: str) -> dict[str, Node]:
    return {figure.first("figcaption").text(): figure for figure in section(html, name).all("figure")}


def is_shown(text: str, value: float) -> bool:
    """Whether the text shows the value with four significant digits."""
    return float(text) == pytest.approx(value, rel=5.001e-4, abs=1e-300)


def expect_numbers(rows: list[list[str]], expected: list[list[float | None]]) -> None:
    """Compares the cells after a table's first columns; None is a dash."""
    for row, values in zip(rows[1:], expected, strict=True):
        for text, value in zip(row[len(row) - len(values) :], values, strict=True):
            assert text == "–" if value is None else is_shown(text, value), (row, values)


def metric_of(part: dict, name: str) -> float | None:
    for step in name.split("/"):
        part = (part or {}).get(step)
    return part


# Form


def test_reports_are_well_formed(reports, bare):
    for html in [*reports.values(), *bare.values()]:
        root = parse(html)
        assert html.startswith("<!doctype html>") and root.first("html").attributes == {"lang": "en"}
        assert root.first("title").text() and len(root.all("h1")) == 1
        ids = [node.attributes["id"] for node in root.walk() if "id" in node.attributes]
        assert len(ids) == len(set(ids)) and [link.attributes["href"] for link in root.all("a")] == [
            f"#{name}" for name in ids
        ]
        assert all(row.all("th") for table in root.all("table") for row in table.all("tr")), "a line says what it is of"
        for svg in charts(html):
            assert svg.get("role") == "img" and svg.get("viewBox") and len(svg.get("aria-label")) > 20


def test_reports_stand_alone(reports, bare):
    for html in [*reports.values(), *bare.values()]:
        assert not re.search(
            r"https?:|//|@import|url\(|<script|<link|<iframe|<img|<base|\ssrc=|\son\w+=|javascript:|xlink",
            html,
            re.IGNORECASE,
        )


def test_same_bytes_twice(folder, tmp_path, reports):
    again = write_report(folder / "kvq.safetensors", tmp_path / "again.html", folder / "evaluation.json")
    assert again == reports["kvq"]


# Colors that people without one kind of cones see (Machado et al. 2009, severity 1), as matrices on red, green and
# blue.
COLOR_BLIND = {
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(color: str) -> np.ndarray:
    parts = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(a: str, b: str) -> float:
    low, high = sorted(float(linear(color) @ (0.2126, 0.7152, 0.0722)) for color in (a, b))
    return (high + 0.05) / (low + 0.05)


def lab(light: np.ndarray) -> np.ndarray:
    xyz = (
        np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
        @ light.clip(0, 1)
        / (0.9505, 1, 1.089)
    )
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def both_palettes(html: str) -> list[dict[str, str]]:
    light, dark = (
        dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", html, re.DOTALL)
    )
    assert light.keys() - dark.keys() == {"t9"}
    return [light, light | dark]


def test_colors_of_series_stay_apart_for_all_readers(reports):
    for colors in both_palettes(reports["kvq"]):
        for name, seen in ({"all": np.eye(3)} | COLOR_BLIND).items():
            places = [lab(np.array(seen) @ linear(colors[f"s{i}"])) for i in range(8)]
            least = min(np.linalg.norm(a - b) for i, a in enumerate(places) for b in places[:i])
            assert least > 15, f"{name}: {least:.1f}; 2.3 is just noticeable"


def test_colors_stand_out_in_light_and_dark(reports):
    """WCAG 2.2: a contrast of 4.5 for text and 3 for graphics."""
    for colors in both_palettes(reports["kvq"]):
        assert all(
            contrast(colors[name], colors[ground]) >= 4.5 for name in ("ink", "soft") for ground in ("page", "card")
        )
        assert all(contrast(colors[f"s{i}"], colors["page"]) >= 3 for i in range(8))
        assert all(contrast(colors[name], colors["page"]) >= 3 for name in "kvb") and colors["k"] != colors["v"]
        assert contrast(colors["bad"], colors["page"]) >= 4.5
        shades = [contrast(colors[f"h{i}"], colors["page"]) for i in range(9)]
        assert shades == sorted(shades) and len(set(shades)) == 9, "larger numbers stand out more"
        assert all(contrast(colors[f"t{i}"], colors[f"w{i}"]) >= 4.5 for i in range(10))


def test_a_color_means_one_thing(reports):
    """Colors of series are those of schemes, the same for a scheme in all charts; sides have none."""
    styles: dict[str, set[str]] = {}
    for name in ("verdict", "errors", "context", "front"):
        for figure in figures(reports["kvq"], name).values():
            for mark in figure.all("path"):
                scheme = re.match(r"(.*?)(?:, \S+)?: ", mark.first("title").text()) if mark.all("title") else None
                if scheme:
                    styles.setdefault(scheme[1], set()).update(re.findall(r"\bs\w\b", mark.attributes["class"]))
    assert {name: styles[name] for name in METHODS} == {name: {f"s{i}"} for i, name in enumerate(METHODS)}, (
        "each scheme has its own color, and one"
    )
    assert styles["plain codes"] == {"sb"} and styles["this plan"] == {"sk", "sv"}
    for name in ("allocation", "spectra", "bytes"):
        for svg in charts(str_of(reports["kvq"], name)):
            assert not re.search(r"\bs\d\b", ElementTree.tostring(svg, encoding="unicode")), name


# Numbers


def test_headline(reports, bare, document):
    tiles = {
        tile.first("dt").text(): [line.text() for line in tile.all("dd")]
        for tile in parse(reports["kvq"]).first("dl").all("div")
    }
    mean = document["schemes"][0]["mean"]
    assert tiles["Model"][0] == "kvq-tiny" and tiles["Method"][0] == "kvq"
    assert tiles["Code bits"][0] == "2.00" and tiles["Windows"][0] == "none"
    assert is_shown(tiles["Error of the output, held out"][0], mean["output_rel_mse"])
    kl, tail = re.findall(r"\d\.\d+", tiles["Error of the output, held out"][1])[:2]
    assert is_shown(kl, mean["attention_kl"]["mean"]) and is_shown(tail, mean["attention_kl"]["p99"])
    assert float(tiles["Effective bits"][0]) == pytest.approx(document["schemes"][0]["effective_bits"], abs=0.0051)
    assert "64 + 256" in parse(bare["oscar"]).text() and "Error of the keys, calibration" in parse(bare["oscar"]).text()


@pytest.fixture(scope="module")
def yardsticks(folder) -> dict:
    """An evaluation beside the caches that people serve."""
    said = succeed(
        *("kvq-eval", "--model", ROOT / "sample_data/evaluation.h5", "--no-windows", folder / "kvq.safetensors"),
        *("--scheme", "naive-int4", "--scheme", "fp8", "--scheme", "kivi-2", "--json"),
    ).stdout
    (folder / "yardsticks.json").write_text(said)
    return json.loads(said)


def test_verdict(folder, yardsticks):
    """Times smaller, the error beside a 4-bit and an fp8 cache, and how it is served, before anything else."""
    path = folder / "kvq.safetensors"
    html = write_report(path, folder / "verdict.html", folder / "yardsticks.json")
    said = json.loads(succeed("kvq-inspect", path, "--json", "--layout").stdout)
    assert parse(html).first("section").attributes["id"] == "verdict"
    size, error, serving = (node.text() for node in section(html, "verdict").all("p")[:3])
    cache, exact = said["layout"]["cache_bytes"], said["layout"]["bf16_bytes"]
    assert size.startswith(f"{exact / cache:.1f} times smaller than bfloat16: {cache / 1e6:.1f} MB in place of")
    means = {scheme["name"]: scheme["mean"]["output_rel_mse"] for scheme in yardsticks["schemes"]}
    shown = re.fullmatch(
        r"Error (\S+) of attention's output on held-out data; naive-int4 has (\S+), fp8 (\S+)\.", error
    )
    assert all(is_shown(text, means[name]) for text, name in zip(shown.groups(), ("kvq", "naive-int4", "fp8")))
    assert said["serving"]["word"] == "tuned" and serving == "Served layers differ, see Serving."
    (figure,) = figures(html, "verdict").values()
    assert [row[0] for row in figure.rows()[1:]] == ["fp8", "naive-int4", "kvq"], (
        "most bits first; kivi-2 is no yardstick"
    )
    bits = {scheme["name"]: scheme["effective_bits"] for scheme in yardsticks["schemes"]}
    for name, text, times, own, _ in figure.rows()[1:]:
        assert float(text) == pytest.approx(bits[name], abs=0.0051) and is_shown(own, means[name])
        assert float(times) == pytest.approx(16 / bits[name], abs=0.051)
    value_at = axis_of(figure, "xtick", log=True)
    marks = [node for node in figure.all("path") if node.all("title")]
    assert len(marks) == 3
    for mark in marks:
        name = mark.first("title").text().split(":")[0]
        assert value_at(place(mark)[0]) == pytest.approx(means[name], rel=0.02)


@pytest.mark.parametrize(
    "left, missing",
    [
        (("kvq",), "--scheme naive-int4 --scheme fp8"),
        (("kvq", "fp8"), "--scheme naive-int4"),
        (("kvq", "naive-int4"), "--scheme fp8"),
    ],
    ids=["neither", "fp8", "4-bit"],
)
def test_missing_yardsticks_are_named(folder, yardsticks, tmp_path, left, missing):
    def only(d):
        d["schemes"] = [scheme for scheme in d["schemes"] if scheme["name"] in left]

    html = write_report(
        folder / "kvq.safetensors", tmp_path / "out.html", changed(yardsticks, tmp_path / "few.json", only)
    )
    assert f"kvq-eval {missing} --json adds" in section(html, "verdict").text()


def test_verdict_without_evaluation(folder, bare):
    for method, html in bare.items():
        said = section(html, "verdict").text()
        measured = "held-out tokens, no exact windows" if method == "kvq" else "in sample, which flatters: keys"
        assert "times smaller" in said and measured in said, method
        assert "No evaluation of this artifact was given" in said and not charts(str_of(html, "verdict"))


def test_heads(folder, document, reports):
    """A heat map by layer and head: darker is larger."""
    own = document["schemes"][0]
    shown = figures(reports["kvq"], "errors")
    for name in ("output_rel_mse", "attention_kl"):
        figure = shown[f"{name} of this artifact by layer and KV head"]
        values = [[head[name] for head in layer["heads"]] for layer in own["layers"]]
        expect_numbers(figure.numbers(), values)
        cells = [cell for cell in figure.all("rect") if cell.all("title")]
        assert len(cells) == 12
        shades = {}
        for cell in cells:
            layer, head = map(int, re.match(r"layer (\d+), KV head (\d+): ", cell.text()).groups())
            assert is_shown(cell.text().split(": ")[1], values[layer][head])
            shades[values[layer][head]] = cell.attributes["class"]
        ordered = [shades[value] for value in sorted(shades)]
        assert ordered == sorted(ordered) and ordered[0] == "h0" and ordered[-1] == "h8"


def test_more_than_32_layers(make_dump, tmp_path):
    """Lines of schemes become a heat map by layer and scheme, and narrow columns have no numbers."""
    dump = make_dump(tokens=64, head_dim=32, layers=40)
    artifact = calibrate(dump, tmp_path / "a.safetensors", "--method", "block-gtq")
    evaluation = tmp_path / "eval.json"
    said = succeed("kvq-eval", "--model", dump, artifact, "--scheme", "naive-int4", "--no-windows", "--json").stdout
    evaluation.write_text(said)
    html = write_report(artifact, tmp_path / "out.html", evaluation)
    expect_finite(html)
    figure = figures(html, "errors")["output_rel_mse: error of attention's output"]
    assert not figure.all("polyline")
    cells = [cell for cell in figure.all("rect") if cell.all("title")]
    assert len(cells) == 2 * 40
    for scheme in json.loads(said)["schemes"]:
        for layer in scheme["layers"]:
            (cell,) = (c for c in cells if c.text().startswith(f"layer {layer['index']}, scheme {scheme['name']}: "))
            assert is_shown(cell.text().split(": ")[1], layer["output_rel_mse"])
    names = [node.text() for node in figure.all("text") if node.has_class("mid")]
    assert "0" in names and "39" in names and len(names) < 42, "as many layer numbers as have room"
    widths = figures(html, "allocation")["Keys: share of channels at each width, %"]
    assert not any(node.has_class("on") for node in widths.all("text")), "columns are narrower than a digit"


@pytest.mark.parametrize("method", METHODS)
def test_widths(folder, reports, method):
    """Tables show the shares of channels, and rectangles are proportional to them."""
    artifact = load_artifact(folder / f"{method}.safetensors")
    shown = figures(reports[method], "allocation")
    for side, short in SIDES.items():
        title = f"{side.title()}: share of channels at each width, %"
        if "channel_bits" not in artifact.layers[0].sides[short].tensors:
            assert title not in shown
            rows = section(reports[method], "allocation").all("table")[-1].rows()
            assert [row[3] for row in rows if row[0] == side] == ["0-5"], "one width: a line of a table"
            continue
        counts = [
            np.bincount(layer.sides[short].tensors["channel_bits"].ravel(), minlength=9)
            for layer in artifact.layers.values()
        ]
        header, *rows = shown[title].numbers()
        widths = [int(name.split()[0]) for name in header[4:]]
        assert widths == list(np.flatnonzero(np.sum(counts, axis=0)))
        bars = [rect for rect in shown[title].all("rect")]
        for row, own in zip(rows, counts, strict=True):
            assert [int(cell) for cell in row[4:]] == [own[width] for width in widths] and is_shown(
                row[1], own @ np.arange(9) / own.sum()
            )
            for width in np.flatnonzero(own):
                said = f"layer {row[0]}: {width} bits for "
                (rect,) = (bar for bar in bars if bar.text().startswith(said) and bar.has_class(f"w{width}"))
                assert float(rect.attributes["height"]) == pytest.approx(190 * own[width] / own.sum(), abs=0.02)


def test_errors_by_layer(reports, document):
    for method, html in reports.items():
        shown = figures(html, "errors")
        own = METHODS.index(method)
        schemes = [document["schemes"][own], *(scheme for i, scheme in enumerate(document["schemes"]) if i != own)]
        for title, metric in METRICS.items():
            rows = shown[title].numbers()
            assert rows[0] == ["layer", *(scheme["name"] for scheme in schemes)], "the artifact itself comes first"
            expect_numbers(
                rows, [[metric_of(scheme["layers"][layer], metric) for scheme in schemes] for layer in range(6)]
            )


def test_scheme_table(reports, document):
    rows = section(reports["kvq"], "errors").rows()
    for row, scheme in zip(rows[1:], document["schemes"], strict=True):
        mean = scheme["mean"]
        assert row[0].removesuffix(" (this artifact)") == scheme["name"]
        metrics = ("output_rel_mse", "attention_kl/mean", "attention_kl/p99", "top10_overlap", "k_rel_mse", "v_rel_mse")
        assert all(
            is_shown(text, metric_of(mean, metric)) for text, metric in zip([row[2], *row[4:]], metrics, strict=True)
        )
        change = next(
            (c for c in document["comparisons"] if (c["scheme"], c["metric"]) == (scheme["name"], "output_rel_mse")),
            None,
        )
        assert row[3] == (
            f"{change['change']:+.1%} [{100 * change['interval'][0]:+.1f}, {100 * change['interval'][1]:+.1f}]"
            if change
            else "–"
        )
    assert [row[0] for row in rows if "(this artifact)" in row[0]] == ["kvq (this artifact)"]


def place(node: Node) -> tuple[float, float]:
    return tuple(map(float, re.match(r"translate\((\S+) (\S+)\)", node.attributes["transform"]).groups()))


def axis_of(figure: Node, name: str, log: bool):
    """A function from units of the drawing to values: a straight line through the axis's numbers, exact up to
    rounding."""
    ticks = [node for node in figure.all("text") if node.has_class(name)]
    where = [
        float(node.attributes["x" if name == "xtick" else "y"]) - (0 if name == "xtick" else 3.5) for node in ticks
    ]
    values = [float(node.text()) for node in ticks]
    slope, start = np.polyfit(where, np.log10(values) if log else values, 1)
    return lambda at: 10 ** (start + slope * at) if log else start + slope * at


def test_lines_and_points_stand_where_their_numbers_say(reports):
    for title, figure in (figures(reports["kvq"], "errors") | figures(reports["kvq"], "front")).items():
        if not figure.all("path"):
            continue  # a heat map
        value_at = axis_of(figure, "ytick", log=True)
        marks = [node for node in figure.all("path") if node.all("title")]
        assert len(marks) >= 6, title
        for mark in marks:
            said = re.fullmatch(r".*: (\S+?)(?: at (\S+) bits)?", mark.first("title").text())
            x, y = place(mark)
            assert value_at(y) == pytest.approx(float(said[1]), rel=0.02)
            if said[2]:
                assert axis_of(figure, "xtick", log=False)(x) == pytest.approx(float(said[2]), abs=0.02)


def test_logarithmic_axes_say_so(reports, bare):
    """They name a power of ten in bold, and cover a decade at least."""
    seen = 0
    for html in [*reports.values(), *bare.values()]:
        for name in ("errors", "context", "front"):
            for figure in figures(html, name).values():
                if not figure.all("path"):
                    continue
                ticks = [node for node in figure.all("text") if node.has_class("ytick")]
                decades = [float(node.text()) for node in ticks if node.has_class("decade")]
                assert decades and all(
                    math.log10(value) == pytest.approx(round(math.log10(value))) for value in decades
                )
                values = [float(node.text()) for node in ticks]
                assert max(values) / min(values) >= 10 * (1 - 1e-9) and "log scale" in figure.text()
                seen += 1
    assert seen > 40


def test_errors_by_context(reports, document):
    shown = figures(reports["kvq"], "context")
    for title, metric in (
        ("attention_kl: mean KL of the weights, nats", "attention_kl"),
        ("output_rel_mse: error of attention's output", "output_rel_mse"),
    ):
        rows = shown[title].numbers()
        assert [row[0] for row in rows[1:]] == ["0+", "64+"]
        expect_numbers(
            rows,
            [
                [np.mean([layer["buckets"][b][metric] for layer in scheme["layers"]]) for scheme in document["schemes"]]
                for b in range(2)
            ],
        )


def test_front(reports, document):
    for title, figure in figures(reports["kvq"], "front").items():
        points = [
            (scheme["effective_bits"], metric_of(scheme["mean"], METRICS[title])) for scheme in document["schemes"]
        ]
        for row, own in zip(figure.rows()[1:], points, strict=True):
            dominated = any(other[0] <= own[0] and other[1] <= own[1] and other != own for other in points)
            assert is_shown(row[1], own[0]) and is_shown(row[2], own[1]) and row[3] == ("no" if dominated else "yes")
        front = next(line for line in figure.all("polyline") if line.has_class("front"))
        assert len(front.attributes["points"].split()) == sum(row[3] == "yes" for row in figure.rows())


@pytest.mark.parametrize("method", METHODS)
def test_calibration_error(folder, bare, method):
    manifest = json.loads(succeed("kvq-inspect", folder / f"{method}.safetensors", "--json").stdout)["manifest"]
    shown = figures(bare[method], "errors")
    for side, short in SIDES.items():
        rows = shown[f"{side.title()}: relative error that calibration saw"].numbers()
        errors = [layer[short]["error"] for layer in manifest["layers"]]
        expect_numbers(rows, [[error["before"], error["after"]] for error in errors])
        assert [row[1] for row in rows[1:]] == [error["metric"] for error in errors]


@pytest.mark.parametrize("method", METHODS)
def test_spectra(folder, reports, method):
    artifact = load_artifact(folder / f"{method}.safetensors")
    shown = section(reports[method], "spectra")
    blocks = iter(node for node in shown.children if isinstance(node, Node) and node.tag == "details")
    any_spectrum = False
    for short in SIDES.values():
        spectra = {
            index: layer.sides[short].tensors["spectrum"]
            for index, layer in artifact.layers.items()
            if "spectrum" in layer.sides[short].tensors
        }
        if not spectra:
            continue
        any_spectrum = True
        header, *rows = next(blocks).numbers()
        places = [int(name.removeprefix("no. ")) - 1 for name in header[2:]]
        assert places[0] == 0 and places[-1] == 127 and len(places) >= 10
        assert [row[0] for row in rows[::3]] == list(map(str, spectra))
        for i, (layer, spectrum) in enumerate(spectra.items()):
            ratio = (spectrum.astype(float) / spectrum.mean(axis=1, keepdims=True, dtype=float))[:, places]
            for row, name, values in zip(
                rows[3 * i :], ("least", "mean", "most"), (ratio.min(0), ratio.mean(0), ratio.max(0))
            ):
                assert row[:2] == [str(layer), name] and all(
                    is_shown(text, value) for text, value in zip(row[2:], values, strict=True)
                )
    assert not list(blocks)
    assert ("keeps no spectra" in shown.text()) == (not any_spectrum)


def test_layers_without_spectrum_say_why(folder, reports):
    for method, html in reports.items():
        artifact = load_artifact(folder / f"{method}.safetensors")
        notes = [node.text() for node in section(html, "spectra").all("p") if node.text().startswith("No spectrum")]
        for side, short in SIDES.items():
            without = {
                index for index, layer in artifact.layers.items() if "spectrum" not in layer.sides[short].tensors
            }
            named = set()
            for note in notes:
                found = re.fullmatch(rf"No spectrum of the {side} in layers? (\S+): (.*)\.", note)
                for part in found[1].split(",") if found else ():
                    first, last = part.split("-") if "-" in part else (part, part)
                    named |= set(range(int(first), int(last) + 1))
                assert not found or re.search("uses no eigenbasis|are exact|some heads rotate", found[2])
            assert named == without, (method, side)


def test_clip_ratios(folder, reports):
    artifact = load_artifact(folder / "oscar.safetensors")
    shown = figures(reports["oscar"], "spectra")
    for side, short in SIDES.items():
        clips = [np.array(layer.sides[short].clip_ratio) for layer in artifact.layers.values()]
        rows = shown[f"Clip ratio of the {side}: mean and range over heads"].numbers()
        expect_numbers(rows, [[clip.min(), clip.mean(), clip.max()] for clip in clips])
    assert all("Nothing is clipped" in section(reports[method], "spectra").text() for method in ("kvq", "saw-int4"))


@pytest.mark.parametrize("method", METHODS)
def test_bytes_and_bits(folder, tmp_path, method):
    """The same numbers as --layout and kvq-eval, here with windows."""
    path = folder / f"{method}.safetensors"
    layout = json.loads(succeed("kvq-inspect", path, "--json", "--layout", "--context", 5000).stdout)["layout"]
    evaluated = json.loads(
        succeed(
            "kvq-eval",
            "--model",
            ROOT / "sample_data/evaluation.h5",
            path,
            "--context",
            5000,
            "--metric",
            "rope_logit_mae",
            "--json",
        ).stdout
    )["schemes"][0]
    html = write_report(path, tmp_path / "out.html", flags=("--context", 5000))
    shown = figures(html, "bytes")
    rows = shown["Bytes of a token, all KV heads"].numbers()
    exact = 2 * 2 * 2 * 128
    expect_numbers(
        [row[:5] for row in rows],
        [
            [2 * layer["k_row_bytes"], 2 * layer["v_row_bytes"], layer["bytes_per_token"], exact]
            for layer in layout["layers"]
        ],
    )
    rows = shown["Effective bits of an element, 5000 tokens"].numbers()
    expect_numbers(
        [row[:1] + row[2::2] for row in rows],
        [[layer[f"{side}_effective_bits"] for side in "kv"] for layer in evaluated["layers"]],
    )
    assert np.mean([float(row[1]) for row in rows[1:]]) == pytest.approx(evaluated["k_code_bits"], rel=1e-3)
    tiles = {tile.first("dt").text(): tile.first("dd").text() for tile in parse(html).first("dl").all("div")}
    assert float(tiles["Effective bits"]) == pytest.approx(evaluated["effective_bits"], abs=0.0051)
    assert tiles["Cache of 5000 tokens"] == f"{layout['cache_bytes'] / 1e6:.1f} MB"


def test_provenance(folder, reports, document):
    manifest = json.loads(succeed("kvq-inspect", folder / "kvq.safetensors", "--json").stdout)["manifest"]
    facts = [
        tuple(row)
        for table in section(reports["kvq"], "provenance").all("div")[1:]
        if table.all("table")
        for row in table.rows()
    ]
    for fact in (
        ("dump", manifest["calibration"]["dump"]["hash"]),
        ("fingerprint", manifest["model"]["fingerprint"]),
        ("tokens", "447"),
        ("tool", manifest["calibration"]["tool"]),
        ("tool", document["tool"]),
        ("seed", "0"),
        ("file", "evaluation.json"),
        ("windows", "false"),
    ):
        assert fact in facts, fact
    every = manifest["calibration"]["options"]
    options = {name: value for name, value in every.items() if not isinstance(value, (dict, list))}

    def says(text: str, value: object) -> bool:
        return text == (
            str(value).lower() if isinstance(value, bool) else value if isinstance(value, str) else f"{value:g}"
        )

    shown = [fact for fact in facts if fact[0] in options]
    assert shown and [fact for fact in shown if not says(fact[1], options[fact[0]])] == []
    assert "composition" in options and not any(name == "composition" for name, _ in shown), "kvq does not use it"


def test_without_evaluations_it_says_what_is_missing(bare):
    for name in ("errors", "context", "front"):
        assert (
            "No evaluation was given" in section(bare["kvq"], name).text()
            and "kvq-eval" in section(bare["kvq"], name).text()
        )
    assert not figures(bare["kvq"], "context") and not figures(bare["kvq"], "front")
    assert "block-gtq" in section(bare["oscar"], "allocation").text()


# Unusual documents


def changed(document: dict, path: Path, edit) -> Path:
    copy = json.loads(json.dumps(document))
    edit(copy)
    path.write_text(json.dumps(copy))
    return path


def test_documents_with_the_same_names_are_kept_apart(folder, document, tmp_path):
    paths = [changed(document, tmp_path / name, lambda d: None) for name in ("one.json", "two.json")]
    (tmp_path / "sub").mkdir()
    paths.append(changed(document, tmp_path / "sub/two.json", lambda d: d["settings"].update(windows=True)))
    html = write_report(folder / "kvq.safetensors", tmp_path / "out.html", *paths)
    names = figures(html, "errors")["k_rel_mse: error of the keys"].numbers()[0][1:]
    assert sorted(names) == sorted(
        f"{stem}: {scheme['name']}" for stem in ("one", "two", "two (2)") for scheme in document["schemes"]
    )
    assert all("kvq" in name for name in names[:3]), "the artifact's own come first"
    assert "do not compare one to one" in section(html, "errors").text()


def test_many_schemes(folder, document, tmp_path):
    def add(d):
        d["schemes"] += [json.loads(json.dumps(d["schemes"][4])) | {"name": f"more {i}"} for i in range(30)]

    html = write_report(
        folder / "kvq.safetensors", tmp_path / "out.html", changed(document, tmp_path / "many.json", add)
    )
    figure = figures(html, "errors")["output_rel_mse: error of attention's output"]
    styles = [(line.attributes["class"]) for line in figure.all("polyline")]
    assert len(styles) == len(set(styles)) == 24, "no two lines look the same"
    assert len(figure.numbers()[0]) == 1 + 36 and "first 24 of 36 schemes" in section(html, "errors").text()
    assert len(figures(html, "front")["attention_kl: mean KL of the weights, nats"].rows()) == 1 + 36


def test_numbers_that_are_missing_or_zero(folder, document, tmp_path):
    def edit(d):
        for layer in d["schemes"][1]["layers"]:
            layer["output_rel_mse"] = None
            del layer["logit_rel_mse"]
        for scheme in d["schemes"]:
            for layer in scheme["layers"]:
                layer["k_rel_mse"] = 0
                del layer["v_rel_mse"]

    html = write_report(
        folder / "kvq.safetensors", tmp_path / "out.html", changed(document, tmp_path / "gaps.json", edit)
    )
    shown = figures(html, "errors")
    for title in list(METRICS)[:2]:
        assert {row[2] for row in shown[title].numbers()[1:]} == {"–"}
        assert len(shown[title].all("polyline")) == 5
    assert (
        not shown["k_rel_mse: error of the keys"].all("svg")
        and "0 everywhere" in shown["k_rel_mse: error of the keys"].text()
    )
    assert "v_rel_mse: error of the values" not in shown


def test_rope_error_alone(folder, tmp_path):
    path = folder / "oscar.safetensors"
    said = succeed(
        "kvq-eval", "--model", ROOT / "sample_data/evaluation.h5", path, "--metric", "rope_logit_mae", "--json"
    ).stdout
    (tmp_path / "rope.json").write_text(said)
    html = write_report(path, tmp_path / "out.html", tmp_path / "rope.json")
    assert "none of these metrics" in section(html, "errors").text()
    assert (
        not charts(str(section(html, "front"))) and "kvq-eval --json without --metric" in section(html, "front").text()
    )


def expect_finite(html: str) -> None:
    assert charts(html)
    for svg in charts(html):
        for node in svg.iter():
            for name in ("x", "y", "width", "height", "points", "transform", "x1", "y1", "x2", "y2"):
                numbers = re.sub(r"translate\(|\)|,", " ", node.get(name, "")).split()
                assert all(math.isfinite(float(number)) for number in numbers), (name, numbers)


@pytest.mark.parametrize(
    "options",
    [{"layers": 1, "kind": "mla_rope", "kv_heads": 1}, {"layers": 2, "v_head_dim": 96, "kv_heads": 4}],
    ids=str,
)
def test_other_geometries(make_dump, tmp_path, options):
    dump = make_dump(tokens=96, head_dim=32, **options)
    for method in ("oscar", "block-gtq"):
        artifact = calibrate(
            dump,
            tmp_path / f"{method}.safetensors",
            "--method",
            method,
            *(("--group-size", 0) if method == "oscar" else ()),
        )
        (tmp_path / "eval.json").write_text(
            succeed("kvq-eval", "--model", dump, artifact, "--no-windows", "--json").stdout
        )
        html = write_report(artifact, tmp_path / "out.html", tmp_path / "eval.json")
        parse(html)
        expect_finite(html)


def test_extreme_numbers(folder, document, tmp_path):
    def edit(d):
        for scheme, value in zip(d["schemes"], (5e-324, 1.7e308, 1e-300, 0, 1, 1e300), strict=True):
            scheme["mean"]["output_rel_mse"] = value
            scheme["layers"][0]["output_rel_mse"] = value
            scheme["layers"][1]["output_rel_mse"] = -value

    html = write_report(
        folder / "kvq.safetensors", tmp_path / "out.html", changed(document, tmp_path / "extreme.json", edit)
    )
    expect_finite(html)


# Hostile names


def test_names_are_only_text(make_dump, tmp_path):
    dump = edited(
        make_dump(tokens=61, head_dim=32),
        tmp_path / "dump.h5",
        set_attribute("/", "model_name", HOSTILE.replace("\x01", "\x7f")),
    )
    artifact = calibrate(dump, tmp_path / """<b onclick="x">'&.safetensors""", "--method", "oscar", "--group-size", 32)
    document = json.loads(
        succeed("kvq-eval", "--model", dump, artifact, "--scheme", "kivi", "--no-windows", "--json").stdout
    )
    document["schemes"][0]["name"] = HOSTILE
    document["schemes"][1]["name"] = "x" * 100_000
    document["tool"] = document["dump"]["files"][0] = document["title"] = HOSTILE
    document["settings"][HOSTILE] = {HOSTILE: HOSTILE}
    path = tmp_path / """<i>"'&.json"""
    path.write_text(json.dumps(document))
    html = write_report(artifact, tmp_path / "out.html", path)
    root = parse(html)
    assert not {"script", "img", "b", "i"} & {node.tag for node in root.walk()}
    assert not any(name.startswith("on") for node in root.walk() for name in node.attributes)
    assert charts(html) and not re.search("[\u202e\x01\x7f]", html)
    assert "<script>alert(1)</script>\"'&��<img src=x onerror=alert(2)>" in section(html, "errors").text()
    assert "x" * 200 + "…" in html and "x" * 201 not in html
    assert '<b onclick="x">\'&.safetensors' in root.first("header").text()


def test_a_file_name_that_is_no_text(folder, tmp_path):
    path = Path(str(tmp_path / "a\udcff.safetensors"))
    path.write_bytes((folder / "oscar.safetensors").read_bytes())
    assert "a\\xff.safetensors" in parse(write_report(path, tmp_path / "out.html")).first("header").text()


# Refusals


def put(*keys_and_value):
    *keys, last, value = keys_and_value

    def edit(d):
        for key in keys:
            d = d[key]
        d[last] = value

    return edit


def drop(*keys):
    def edit(d):
        for key in keys[:-1]:
            d = d[key]
        del d[keys[-1]]

    return edit


REFUSALS = {
    "fingerprint": (
        put("dump", "fingerprint", "0" * 64),
        INPUT,
        "expected an evaluation of kvq-tiny (948642df26e0...) as in kvq.safetensors, found kvq-tiny (000000000000...)",
    ),
    "no_fingerprint": (
        lambda d: d["dump"].update(fingerprint="", model="other"),
        INPUT,
        "as in kvq.safetensors, found other (no fingerprint)",
    ),
    "fewer_layers": (
        drop("schemes", 1, "layers", 5),
        INPUT,
        "schemes/1: expected 6 layers as in kvq.safetensors, found 5",
    ),
    "other_layer": (
        put("schemes", 2, "layers", 3, "index", 7),
        INPUT,
        "schemes/2: expected layer 3 as in kvq.safetensors, found 7",
    ),
    "heads": (
        drop("schemes", 0, "layers", 0, "heads", 1),
        INPUT,
        "schemes/0: layer 0: expected 2 KV heads as in kvq.safetensors, found 1",
    ),
    "version_2": (put("schema_version", "2.0"), UNSUPPORTED, "expected kvq-eval version 1.x, found 2.0"),
    "version_text": (put("schema_version", "new"), INPUT, 'schema_version, found "new"'),
    "no_schemes": (drop("schemes"), INPUT, "schemes"),
    "name_type": (put("schemes", 0, "name", 3), INPUT, "schemes/0/name, found 3"),
    "negative_bits": (put("schemes", 0, "effective_bits", -1), INPUT, "effective_bits"),
    "empty": (lambda d: d.clear(), INPUT, "the document: Missing required property"),
    "too_many_schemes": (
        lambda d: d["schemes"].extend([d["schemes"][0]] * 1013),
        INPUT,
        "expected at most 1024 schemes in all documents, found 1025",
    ),
}


def refused(folder: Path, *words: object) -> tuple[int, str]:
    """Exit code and message; asserts that no file remains."""
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    result = run("kvq-inspect", *words, cwd=folder)
    lines = [line for line in result.stderr.splitlines() if not line.startswith("hint: ")]
    assert result.stdout == "" and len(lines) == 1 and len(lines[0]) < 300, result
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    return result.code, lines[0].removeprefix("kvq-inspect: error: ")


@pytest.fixture
def place_of_refusals(folder, tmp_path) -> Path:
    (tmp_path / "kvq.safetensors").write_bytes((folder / "kvq.safetensors").read_bytes())
    (tmp_path / "good.json").write_text((folder / "evaluation.json").read_text())
    (tmp_path / "report.html").write_text("of yesterday")
    return tmp_path


@pytest.mark.parametrize("name", REFUSALS)
def test_documents_that_do_not_belong_are_refused(place_of_refusals, document, name):
    edit, code, message = REFUSALS[name]
    changed(document, place_of_refusals / "bad.json", edit)
    found = refused(
        place_of_refusals, "kvq.safetensors", "--html", "report.html", "--eval", "good.json", "--eval", "bad.json"
    )
    assert found[0] == code and found[1].startswith("bad.json: ") and message in found[1], found


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff{}", "not valid JSON"),
        (b"[" * 100_000, "nested deeper than 64 levels"),
        (b'{"a": 1, "a": 2}', "appears twice"),
        (b"3", "the document"),
        (b" " * (64 << 20) + b"{}", "expected at most 67108864 bytes of JSON, found 67108866"),
    ],
    ids=range(7),
)
def test_what_is_no_document_is_refused(place_of_refusals, content, message):
    (place_of_refusals / "bad.json").write_bytes(content)
    code, said = refused(place_of_refusals, "kvq.safetensors", "--html", "report.html", "--eval", "bad.json")
    assert code == INPUT and said.startswith("bad.json: ") and message in said


@pytest.mark.parametrize(
    "words, code, message",
    [
        (("--html", "report.html", "--eval", "no.json"), INPUT, "no.json: cannot open: No such file"),
        (("--html", "report.html", "--eval", "."), INPUT, ".: cannot open: not a regular file"),
        (("--html", "no/report.html"), INPUT, "no/report.html: cannot write: the folder no is missing"),
        (("--html", "."), INPUT, ".: cannot write: not a regular file"),
        (("--html", "/dev/null"), INPUT, "/dev/null: cannot write: not a regular file"),
        (("--html", "kvq.safetensors"), USAGE, "--html: kvq.safetensors is one of the files to read"),
        (("--html", "./good.json", "--eval", "good.json"), USAGE, "--html: ./good.json is one of the files to read"),
        (("--eval", "good.json"), USAGE, "--html"),
        (("--html", "report.html", "--json"), USAGE, "--json"),
        (("--html", "report.html", "--verify"), USAGE, "--verify"),
        (("--html", "report.html", "--layer", 0), USAGE, "--layer"),
        (("--html", "report.html", "--compare", "kvq.safetensors"), USAGE, "--compare"),
    ],
    ids=str,
)
def test_wrong_words_are_refused(place_of_refusals, words, code, message):
    found = refused(place_of_refusals, "kvq.safetensors", *words)
    assert found[0] == code and message in found[1], found


def test_a_damaged_artifact_leaves_the_old_report(place_of_refusals):
    path = place_of_refusals / "kvq.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert refused(place_of_refusals, "kvq.safetensors", "--html", "report.html")[0] == INPUT


# In a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium: scripts/setup.sh --with-tests installs it")
    with Browser(program, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(folder, reports, document) -> list[Path]:
    """One page for each way of drawing: mixed and single widths, with and without evaluation, long names, and points so
    near to the front that the usual places of their labels lie on it."""

    def lengthen(d):
        d["schemes"] = [scheme | {"name": f"{scheme['name']}-{'averylongname' * 20}"} for scheme in d["schemes"]] * 5

    def flatten(d):
        places = [(2.0, 0.1), (8.0, 0.09), (3.0, 0.101), (4.0, 0.1), (5.0, 0.098), (6.5, 0.096)]
        for scheme, (bits, error) in zip(d["schemes"], places, strict=True):
            scheme["effective_bits"], scheme["mean"]["output_rel_mse"] = bits, error

    long_names = changed(document, folder / "long.json", lengthen)
    write_report(folder / "oscar.safetensors", folder / "long.html", long_names)
    write_report(folder / "kvq.safetensors", folder / "flat.html", changed(document, folder / "flat.json", flatten))
    return [folder / f"{name}.html" for name in ("kvq", "oscar", "long", "flat")]


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page_fits_its_window(browser, pages, width, dark):
    for page in pages:
        browser.open(page, width, dark)
        assert browser.complaints() == []
        assert browser.evaluate("document.scrollingElement.scrollWidth <= innerWidth"), page
        browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert browser.evaluate("document.scrollingElement.scrollWidth <= innerWidth"), f"{page} with all numbers"
        ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(20, 24, 28)" if dark else "rgb(255, 255, 255)")
        png = browser.screenshot()
        size = int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")
        assert png.startswith(b"\x89PNG") and size[0] == width and size[1] > 3000 and len(png) > 50_000


TEXT_FAULTS = """(() => {
  const faults = [];
  for (const svg of document.querySelectorAll('svg')) {
    const frame = svg.getBoundingClientRect();
    const boxes = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
    boxes.forEach(([text, a], i) => {
      if (a.left < frame.left - 1 || a.right > frame.right + 1 || a.top < frame.top - 1 || a.bottom > frame.bottom + 1)
        faults.push(text);
      for (const [other, b] of boxes.slice(i + 1))
        if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2 &&
            Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4)
          faults.push(text + '/' + other);
    });
  }
  return faults;
})()"""


# Texts that a mark or the line of the front covers.
MARK_FAULTS = """(() => {
  const faults = [];
  for (const svg of document.querySelectorAll('svg')) {
    const marks = [...svg.querySelectorAll('.mark, .hollow')].map(m => m.getBoundingClientRect());
    const front = svg.querySelector('polyline.front');
    if (front) {
      const toScreen = front.getScreenCTM();
      for (let i = 0, all = front.getTotalLength(); i <= 200; ++i) {
        const p = front.getPointAtLength(all * i / 200).matrixTransform(toScreen);
        marks.push({left: p.x - 1, right: p.x + 1, top: p.y - 2, bottom: p.y + 2});
      }
    }
    for (const text of svg.querySelectorAll('text')) {
      const a = text.getBoundingClientRect();
      for (const b of marks)
        if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > -0.5 &&
            Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2)
          faults.push(text.textContent);
    }
  }
  return faults;
})()"""


def test_text_of_charts_stays_inside_and_apart(browser, pages):
    """Labels of a chart stay inside the chart, do not cover each other, and lie neither on marks nor on the front."""
    for page in pages:
        browser.open(page, 1200, dark=False)
        assert browser.evaluate(TEXT_FAULTS) == [], page
        assert browser.evaluate(MARK_FAULTS) == [], page


def test_paper_shows_the_numbers_in_light_colors(browser, pages):
    browser.open(pages[0], 1200, dark=True)
    browser.media("print", dark=True)
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.evaluate(
        "[...document.querySelectorAll('details table')].every(t => t.checkVisibility() && t.offsetHeight > 20)"
    )
    assert browser.pdf().startswith(b"%PDF-")
