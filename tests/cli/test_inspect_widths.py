"""kvq-inspect on mixed widths, codebooks, trellis codes and centroids: text that fits a page, JSON that says what the
tensors hold, and distances between two allocations, worked out here once more."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from kvq_tools import calibrate, on_terminal, run, succeed

from kvq.artifact_reader import load_artifact

PAGE, BAR = 80, 32
USAGE, INPUT = 2, 3
SIZE = {"tokens": 150, "layers": 2, "query_spectrum": 0.5, "outlier_channels": 3}
METHODS = {
    "blocks": ("--method", "block-gtq", "--bits-k", 2.5),
    "dropped": ("--method", "block-gtq", "--bits", 1, "--min-bits", 0, "--coder", "symmetric"),
    "both": ("--method", "block-gtq", "--bits", 3, "--v-allocation", "channel", "--center", "kv"),
    "shared": ("--method", "block-gtq", "--bits", 2, "--share", "layer"),
    "channels": ("--method", "block-gtq", "--bits", 2.25, "--k-allocation", "channel", "--v-allocation", "channel"),
    "trellis": ("--method", "block-gtq", "--bits", 2.25, "--coder", "trellis", "--v-allocation", "channel"),
    "fitted": ("--method", "tq-mse", "--codebook", "fitted", "--kmeans", 16),
    "joint": ("--method", "saw-int4", "--kmeans", 8, "--kmeans-scope", "joint"),
}
MIXED = ("blocks", "dropped", "both", "shared", "channels", "trellis")


@pytest.fixture(scope="module")
def dump(make_dump) -> Path:
    return make_dump(head_dim=64, v_head_dim=96, **SIZE)


@pytest.fixture(scope="module")
def artifact(dump, tmp_path_factory):
    """Makes artifacts by the name of their method; each is made once."""
    folder = tmp_path_factory.mktemp("artifacts")

    def make(name: str) -> Path:
        path = folder / f"{name}.safetensors"
        return path if path.exists() else calibrate(dump, path, *METHODS[name])

    return make


def tensors(path: Path, layer: int, side: str) -> dict[str, np.ndarray]:
    file = load_artifact(path).file
    prefix = f"layers.{layer}.{side}."
    return {name.removeprefix(prefix): file.array(name) for name in file.tensors if name.startswith(prefix)}


def inspected(path: Path, *flags: object) -> dict:
    return json.loads(succeed("kvq-inspect", path, "--json", *flags).stdout)


def mixed_sides(path: Path) -> list[tuple[int, str, dict, dict]]:
    """Layer, side, the allocation of --json, and the tensors."""
    return [
        (layer["layer"], side, layer[side]["allocation"], tensors(path, layer["layer"], side))
        for layer in inspected(path)["layers"]
        for side in "kv"
        if "allocation" in layer.get(side, {})
    ]


def entropy(widths: np.ndarray) -> float:
    shares = np.unique(widths, return_counts=True)[1] / widths.size
    return float(-(shares * np.log2(shares)).sum())


# Text


@pytest.mark.parametrize(
    "name, codes",
    [
        ("blocks", "mixed codebook 2.50b"),
        ("dropped", "mixed norm 1.00b"),
        ("trellis", "mixed trellis m3 2.25b"),
        ("fitted", "2-bit codebook g64 fitted km16"),
        ("joint", "4-bit affine g64 km8 joint"),
    ],
)
def test_codes_have_a_name(artifact, name, codes):
    lines = succeed("kvq-inspect", artifact(name)).stdout.splitlines()
    assert any(re.match(rf" +0  k     {re.escape(codes)}  ", line) for line in lines), lines
    assert f"keys    {codes}, rotation" in succeed("kvq-inspect", artifact(name), "--layer", 0).stdout


@pytest.mark.parametrize("name", METHODS)
def test_tables_fit_a_page(artifact, name):
    for flags in ((), ("--layer", 0), ("--layer", 1, "--head", 1), ("--layout", "--layer", 1)):
        lines = succeed("kvq-inspect", artifact(name), *flags).stdout.splitlines()
        # Sentences that name a rotation, its target and a metric may be longer, and so may the two oldest legends.
        tables = [line for line in lines if not line.startswith(("row:", "error:", "keys", "values"))]
        assert max(map(len, tables)) <= PAGE, max(tables, key=len)


def bars(text: str) -> dict[tuple[int, str], list[str]]:
    """Lines of the overview's table of widths: bar, kinds, entropy, bytes, over free."""
    found = re.findall(rf"^ +(\d+)  ([kv]) {{5}}(\d{{{BAR}}}) +(.*)$", text, re.MULTILINE)
    return {(int(layer), side): [bar, *rest.split()] for layer, side, bar, rest in found}


@pytest.mark.parametrize("name", MIXED)
def test_overview_draws_the_widths(artifact, name):
    lines = bars(succeed("kvq-inspect", artifact(name)).stdout)
    sides = mixed_sides(artifact(name))
    assert lines.keys() == {(layer, side) for layer, side, *_ in sides}
    for layer, side, said, held in sides:
        widths = np.sort(held["channel_bits"].ravel())[::-1]
        cells = widths[(2 * np.arange(BAR) + 1) * widths.size // (2 * BAR)]
        bar, kinds, bits, row, excess = lines[layer, side]
        assert bar == "".join(map(str, cells))
        assert (int(kinds), int(row)) == (said["distinct_widths"], said["row_bytes"])
        assert float(bits) == pytest.approx(said["entropy"], abs=0.005 + 1e-9)
        assert float(excess.rstrip("%")) == pytest.approx(
            100 * (said["objective"] / said["free_objective"] - 1), abs=0.05 + 1e-9
        )


@pytest.mark.parametrize("name", MIXED)
def test_overview_counts_the_widths(artifact, name):
    text = succeed("kvq-inspect", artifact(name)).stdout
    header, *rows = text[text.index("layer  side  of width") :].split("\n\n")[0].splitlines()
    columns = [int(word) for word in header.split()[4:]]
    assert columns == sorted(columns, reverse=True)
    for row, (layer, side, said, _) in zip(rows, mixed_sides(artifact(name)), strict=True):
        words = row.split()
        assert words[:3] == [str(layer), side, said["histogram_of"]]
        counts = dict(zip(columns, map(int, words[3:]), strict=True))
        assert [counts.get(width, 0) for width in range(9)] == said["histogram"]


def widths_of_model(path: Path, side: str) -> list[tuple[int, np.ndarray]] | None:
    """Layer, and the widths that Block-GTQ's tables count; None if the side is not mixed."""
    held = [(layer, own) for layer, which, _, own in mixed_sides(path) if which == side]
    key = "block_bits" if all("block_bits" in own for _, own in held) else "channel_bits"
    return [(layer, own[key].ravel()) for layer, own in held] or None


@pytest.mark.parametrize("name", MIXED)
def test_widths_of_all_layers_together(artifact, name):
    """Block-GTQ Tables 8 to 10, in numbers and in text."""
    said = inspected(artifact(name))["widths"]
    text = succeed("kvq-inspect", artifact(name)).stdout
    shares = text[text.index("widths of all layers together") :].splitlines()[1:]
    entropies = shares[shares.index("") + 1 :]
    columns = [int(word) for word in shares[0].split()[3:]]
    for side in "kv":
        known = widths_of_model(artifact(name), side)
        assert (side in said) == (known is not None)
        if known is None:
            continue
        own, everything = said[side], np.concatenate([widths for _, widths in known])
        counts = np.bincount(everything, minlength=9)
        assert own["histogram"] == counts.tolist() and own["layers"] == len(known)
        assert own["shares"] == pytest.approx((counts / counts.sum()).tolist())
        by_layer = [entropy(widths) for _, widths in known]
        assert own["entropy"] == pytest.approx(np.mean(by_layer))
        assert own["entropy_deviation"] == pytest.approx(np.std(by_layer), abs=1e-12)
        assert own["distinct_widths"] == np.mean([len(np.unique(widths)) for _, widths in known])
        for key, of in (("highest", max), ("lowest", min)):
            assert own[key]["entropy"] == pytest.approx(of(by_layer))
            assert own[key]["layer"] == known[by_layer.index(of(by_layer))][0]
        words = next(line.split() for line in shares[1:] if line.startswith(side))
        assert words[1] == own["histogram_of"]
        found = dict(zip(columns, map(float, words[2:]), strict=True))
        assert [found.get(width, 0.0) for width in range(9)] == pytest.approx(
            [100 * share for share in own["shares"]], abs=0.051
        )
        words = next(line.split() for line in entropies[1:] if line.startswith(side))
        assert float(words[3]) == pytest.approx(own["entropy"], abs=0.0051)
        assert words[6] == f"({own['highest']['layer']})" and words[8] == f"({own['lowest']['layer']})"


def test_overview_of_one_width_has_no_bars(artifact):
    text = succeed("kvq-inspect", artifact("fitted")).stdout
    assert bars(text) == {} and "of width" not in text and "all layers together" not in text
    assert "widths" not in inspected(artifact("fitted"))


def test_color_adds_nothing_but_color(artifact, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    path = artifact("dropped")
    plain, colored = succeed("kvq-inspect", path).stdout, on_terminal("kvq-inspect", path).stdout
    assert re.search(r"\x1b\[[0-9;]+m[0-8]+\x1b\[0m", colored)
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == plain
    assert on_terminal("kvq-inspect", path, NO_COLOR="1").stdout == plain


@pytest.mark.parametrize("name", MIXED)
def test_head_shows_widths_beside_what_they_are_worth(artifact, name):
    text = succeed("kvq-inspect", artifact(name), "--layer", 1, "--head", 1).stdout
    held = tensors(artifact(name), 1, "k")
    entry = 1 if len(held["channel_bits"]) > 1 else 0
    if "block_bits" not in held:
        rows = re.findall(r"^ +(\d+) +(\d+) +\S+ +█* +(\d)(?:  (\d+))?$", text, re.MULTILINE)
        places = [(int(place), int(source), int(bits)) for place, source, bits, _ in rows]
        assert places[:64] == [(j, held["channel_order"][entry, j], held["channel_bits"][entry, j]) for j in range(64)]
        return
    rows = re.findall(r"^ +(\d+)  (\d+), (\d+) +(\S+) +(\S+)  (█*) +(\d)(?:  (\d+))?$", text, re.MULTILINE)
    energy, bits = held["block_energy"][entry], held["block_bits"][entry]
    assert [int(row[0]) for row in rows] == list(range(32))
    for i, (_, first, second, frequency, score, bar, width, digits) in enumerate(rows):
        assert (int(first), int(second)) == (i, i + 32)
        assert float(frequency) == pytest.approx(10000 ** (-i / 32), rel=0.006)
        assert float(score) == pytest.approx(energy[i], rel=0.006)
        assert len(bar) == pytest.approx(max(0, 24 + np.log2(energy[i] / energy.max())), abs=0.5001)
        assert int(width) == bits[i] and (digits or "") == width * int(width)


def test_head_knows_channels_that_do_not_rotate(make_dump, tmp_path):
    """Blocks are the rotary pairs by frequency, then the other channels in neighboring pairs, which have no
    frequency."""
    dump = make_dump(
        head_dim=16, rope="interleaved", rotary_dim=6, rotary_offset=4, layers=1, tokens=61, kind="mla_rope", kv_heads=1
    )
    path = calibrate(dump, tmp_path / "out", *METHODS["blocks"])
    head = inspected(path, "--layer", 0, "--head", 0)["head"]
    assert [block["channels"] for block in head["k"]["blocks"]] == [
        [4, 5],
        [6, 7],
        [8, 9],
        [0, 1],
        [2, 3],
        [10, 11],
        [12, 13],
        [14, 15],
    ]
    assert [block["inv_freq"] is None for block in head["k"]["blocks"]] == [False] * 3 + [True] * 5
    assert "v" not in head
    assert re.search(r"^ +3  0, 1 +- ", succeed("kvq-inspect", path, "--layer", 0, "--head", 0).stdout, re.MULTILINE)


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--head", 0), "--head requires --layer"),
        (("--layer", 1, "--head", 2), "--head 2: layer 1 has 2 key/value heads, 0 to 1"),
        (("--layer", 1, "--compare", "b"), "--compare does not go with --layer, --layout or --verify"),
    ],
)
def test_flags_that_do_not_go_together(artifact, flags, message):
    result = run("kvq-inspect", artifact("blocks"), *flags)
    assert (result.code, result.stdout) == (USAGE, "") and f"kvq-inspect: error: {message}\n" in result.stderr


# JSON


@pytest.mark.parametrize("name", MIXED)
def test_json_holds_the_allocation(artifact, name):
    manifest = inspected(artifact(name))["manifest"]
    for layer, side, said, held in mixed_sides(artifact(name)):
        assert said.items() >= manifest["layers"][layer][side]["allocation"].items()
        for key in ("channel_bits", "channel_order", "block_bits", "block_energy"):
            np.testing.assert_array_equal(
                np.array(said[key], held[key].dtype) if key in held else [], held.get(key, said[key])
            )
        counted = held.get("block_bits", held["channel_bits"])
        assert said["histogram_of"] == ("blocks" if "block_bits" in held else "channels")
        assert said["histogram"] == np.bincount(counted.ravel(), minlength=9).tolist()
        assert said["distinct_widths"] == len(np.unique(counted))
        assert said["entropy"] == pytest.approx(entropy(counted), abs=1e-12)


@pytest.mark.parametrize("name", ["blocks", "fitted", "trellis", "joint"])
def test_json_holds_tables_taps_and_centroids(artifact, name):
    document = inspected(artifact(name))
    for layer, known in zip(document["layers"], document["manifest"]["layers"], strict=True):
        for side in "kv":
            held = tensors(artifact(name), layer["layer"], side)
            codebooks = layer[side].get("codebooks", {"tables": {}})
            assert {f"codebook.{bits}" for bits in codebooks["tables"]} == {
                key for key in held if key.startswith("codebook")
            }
            for bits, table in codebooks["tables"].items():
                np.testing.assert_array_equal(np.float32(table), held[f"codebook.{bits}"])
            thetas = [theta for taps in layer[side].get("trellis", []) for theta in taps["theta"]]
            np.testing.assert_array_equal(np.float32(thetas), held.get("trellis", []))
            searches = [taps["search"] for taps in layer[side].get("trellis", [])]
            assert searches == [taps.get("search", "binary32") for taps in known[side].get("trellis", [])]
            if "centroids" in held:
                assert layer[side]["centroids"] == known[side]["centroids"] | {"index_bytes": 1}
            assert ("centroids" in held) == ("centroids" in layer[side])


def test_json_of_one_layer_has_its_details_only(artifact):
    document = inspected(artifact("both"), "--layer", 1, "--head", 0)
    assert [layer["layer"] for layer in document["layers"]] == [1]
    assert (document["head"]["layer"], document["head"]["head"]) == (1, 0)
    held = tensors(artifact("both"), 1, "v")
    channels = document["head"]["v"]["channels"]
    assert [channel["bits"] for channel in channels] == held["channel_bits"][0].tolist()
    assert [channel["source"] for channel in channels] == held["channel_order"][0].tolist()
    np.testing.assert_array_equal(
        np.float32([channel["eigenvalue"] for channel in channels]), held["spectrum"][0][held["channel_order"][0]]
    )


def test_json_of_one_width_without_more_has_no_details(dump, tmp_path):
    assert "layers" not in inspected(calibrate(dump, tmp_path / "out"))


# Rows


@pytest.mark.parametrize("head", [0, 1])
@pytest.mark.parametrize("name", METHODS)
def test_row_parts_cover_the_row(artifact, name, head):
    layout = inspected(artifact(name), "--layout", "--layer", 1, "--head", head)["layout"]
    assert (layout["row"]["layer"], layout["row"]["head"]) == (1, head)
    for side, dim in (("k", 64), ("v", 96)):
        parts = layout["row"][side]
        ends = np.cumsum([part["bytes"] for part in parts])
        assert [part["byte_offset"] for part in parts] == [0, *ends[:-1]]
        assert ends[-1] == layout["layers"][1][f"{side}_row_bytes"]
        assert sum(part.get("channels", 0) for part in parts) == dim
        held = tensors(artifact(name), 1, side)
        if "channel_bits" in held:
            widths = np.repeat(
                [part["bits"] for part in parts if "bits" in part],
                [part["channels"] for part in parts if "bits" in part],
            )
            assert widths.tolist() == held["channel_bits"][min(head, len(held["channel_bits"]) - 1)].tolist()


def test_row_parts_are_head_0_by_default(artifact):
    text = succeed("kvq-inspect", artifact("both"), "--layout", "--layer", 1).stdout
    assert "layer 1, head 0: " in text and re.search(
        r"^k     codes +\d( in 8)?  0\.\.\d+ +0\.\.\d+$", text, re.MULTILINE
    )
    assert text == succeed("kvq-inspect", artifact("both"), "--layout", "--layer", 1, "--head", 0).stdout
    assert "head 0" not in succeed("kvq-inspect", artifact("both"), "--layout").stdout


# Distances


@pytest.fixture(scope="module")
def pair(artifact, dump, tmp_path_factory) -> tuple[Path, Path]:
    """An allocation by other scores, and the reference allocation."""
    other = tmp_path_factory.mktemp("pair") / "other.safetensors"
    return calibrate(dump, other, "--method", "block-gtq", "--bits-k", 3.25, "--score", "k_only"), artifact("blocks")


def distances(pairs: list[tuple[dict, dict]]) -> dict[str, float]:
    """Distances of Block-GTQ Eq. 5 to 7 over the slots of some layers."""
    bits, wanted = (np.concatenate([held["block_bits"].ravel() for held in side]).astype(int) for side in zip(*pairs))
    scores = np.concatenate([reference["block_energy"].ravel() for _, reference in pairs]).astype(float)
    high = (bits >= 4, wanted >= 4)
    either = (high[0] | high[1]).sum()
    return {
        "slots": bits.size,
        "changed": int((bits != wanted).sum()),
        "hamming": (bits != wanted).mean(),
        "high_bit_jaccard": (high[0] & high[1]).sum() / either if either else 1.0,
        "regret": (scores * (0.25**bits - 0.25**wanted)).sum() / (scores * 0.25**wanted).sum(),
    }


def test_comparison_follows_the_paper(pair):
    compared = inspected(pair[0], "--compare", pair[1])["compare"]
    held = [(tensors(pair[0], layer, "k"), tensors(pair[1], layer, "k")) for layer in range(2)]
    assert compared["reference"] == str(pair[1]) and [layer["layer"] for layer in compared["layers"]] == [0, 1]
    for said, pairs in zip([*compared["layers"], compared["total"]], [held[:1], held[1:], held], strict=True):
        for key, value in distances(pairs).items():
            assert said[key] == pytest.approx(value, rel=1e-12), key
    assert compared["total"]["changed"] > 0 and compared["total"]["high_in_any"] > 0


def test_comparison_as_a_table(pair):
    compared = inspected(pair[0], "--compare", pair[1])["compare"]
    lines = succeed("kvq-inspect", pair[0], "--compare", pair[1]).stdout.splitlines()
    assert max(map(len, lines)) <= PAGE
    assert lines[0].split() == ["layer", "slots", "changed", "hamming", "jaccard@4", "regret"]
    for line, name, said in zip(lines[1:4], ("0", "1", "all"), [*compared["layers"], compared["total"]], strict=True):
        assert line.split() == [
            name,
            str(said["slots"]),
            str(said["changed"]),
            f"{said['hamming']:.3f}",
            f"{said['high_bit_jaccard']:.3f}",
            f"{100 * said['regret']:+.2f}%",
        ]


@pytest.mark.parametrize("name", ["blocks", "shared"])
def test_an_artifact_has_no_distance_from_itself(artifact, name):
    total = inspected(artifact(name), "--compare", artifact(name))["compare"]["total"]
    assert (total["changed"], total["hamming"], total["high_bit_jaccard"], total["regret"]) == (0, 0, 1, 0)


def refused(own: Path, reference: Path) -> str:
    """The line of the error, without the tool's name."""
    for flags in ((), ("--json",)):
        result = run("kvq-inspect", own, "--compare", reference, *flags)
        assert (result.code, result.stdout) == (INPUT, "")
        first, *rest = result.stderr.splitlines()
        assert all(line.startswith("hint: ") for line in rest) and first.startswith("kvq-inspect: error: ")
    return first.removeprefix("kvq-inspect: error: ")


def test_comparison_needs_blocks_on_both_sides(artifact):
    blocks, channels, fitted, shared = map(artifact, ("blocks", "channels", "fitted", "shared"))
    wanted = "layer 0 k: expected widths by RoPE block, found"
    assert refused(channels, blocks) == f"{channels}: {wanted} mixed codebook 2.25b by channel"
    assert refused(blocks, fitted) == f"{fitted}: {wanted} 2-bit codebook g64 fitted km16"
    assert (
        refused(shared, blocks)
        == f"{shared}: layer 0 k: expected widths for each KV head as in {blocks}, found widths for each layer"
    )


def test_comparison_needs_the_same_layers(artifact, dump, tmp_path):
    both, one = artifact("blocks"), calibrate(dump, tmp_path / "one", *METHODS["blocks"], "--layers", 1)
    assert refused(one, both) == f"{one}: expected layer 0 as in {both}, found layer 1"
    first = calibrate(dump, tmp_path / "first", *METHODS["blocks"], "--layers", 0)
    assert refused(first, both) == f"{first}: expected layer 1 as in {both}, found no further layer"
    assert refused(both, first) == f"{both}: expected no further layer as in {first}, found layer 1"


@pytest.mark.parametrize(
    "options, expected, found",
    [
        ({"kv_heads": 1}, "num_kv_heads 2", "1"),
        ({"head_dim": 32}, "head_dim 64", "32"),
        ({"rope": "interleaved"}, "rope layout half", "interleaved"),
        ({"sliding_window": 9}, "sliding_window 0", "9"),
        ({"rope_theta": 100.0}, "rope inv_freq[1] ", ""),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_comparison_needs_the_same_geometry(artifact, make_dump, tmp_path, options, expected, found):
    own = calibrate(
        make_dump(**({"head_dim": 64, "v_head_dim": 96} | SIZE | options)), tmp_path / "own", *METHODS["blocks"]
    )
    message = refused(own, artifact("blocks"))
    assert (
        message.startswith(f"{own}: layer 0: expected {expected}")
        and f" as in {artifact('blocks')}, found {found}" in message
    )
