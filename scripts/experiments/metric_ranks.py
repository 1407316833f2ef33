#!/usr/bin/env python3
"""Which metric of kvq-eval orders calibrations as perplexity does: Spearman's rank correlation over the rows of
fidelity.py.

Takes the perplexities that fidelity.py measured (sample_data/perplexity.json, or its --json output), calibrates the
same rows from --stats (or takes their artifacts from --artifacts), measures all of them with kvq-eval on a held-out
dump, and prints a row for each and the correlation of each metric, over all rows and over those of 2 bits. Minutes on a
CPU."""

import argparse
import json
import pathlib
import sys
import tempfile

import fidelity

ROOT = pathlib.Path(__file__).resolve().parents[2]
AT_ONCE = 16
SCHEMA = ROOT / "formats/eval.schema.json"
SHOWN = ("output_rel_mse", "attention_kl.mean", "attention_kl.p99", "output_nats")


def ranks(values):
    """Ranks from 1; equal values get the mean of their ranks."""
    order = sorted(range(len(values)), key=values.__getitem__)
    result = [0.0] * len(values)
    first = 0
    while first < len(order):
        end = first
        while end < len(order) and values[order[end]] == values[order[first]]:
            end += 1
        for place in order[first:end]:
            result[place] = (first + 1 + end) / 2
        first = end
    return result


def spearman(a, b):
    """Rank correlation over the places where both are numbers; None if fewer than two such places remain, or if one
    side is constant."""
    pairs = [(p, q) for p, q in zip(a, b) if p is not None and q is not None]
    if len(pairs) < 2:
        return None
    x, y = (ranks(list(values)) for values in zip(*pairs))
    mean = (len(x) + 1) / 2
    covariance = sum((p - mean) * (q - mean) for p, q in zip(x, y))
    spread = [sum((p - mean) ** 2 for p in z) for z in (x, y)]
    return covariance / (spread[0] * spread[1]) ** 0.5 if all(spread) else None


def flat(mean):
    """Means over layers by name; a distribution as one entry for each of its fields."""
    values = {}
    for name, value in mean.items():
        values |= {f"{name}.{part}": x for part, x in value.items()} if isinstance(value, dict) else {name: value}
    return values


def more_is_better():
    """Names of the metrics whose larger values are better, as the schema of kvq-eval's documents says."""
    values = json.loads(SCHEMA.read_text())["definitions"]["values"]["properties"]
    return {name for name, entry in values.items() if entry.get("better") == "more"}


def correlations(rows, groups):
    """Rank correlation with perplexity, in each group, for every metric that some row has. The sign changes where more
    of a metric is better."""
    found = {}
    reverse = more_is_better()
    for metric in dict.fromkeys(name for row in rows for name in row if name not in ("recipe", "perplexity", "bits")):
        own = {
            group: spearman([row.get(metric) for row in some], [row["perplexity"] for row in some])
            for group, some in groups.items()
        }
        found[metric] = {group: -x if metric in reverse and x is not None else x for group, x in own.items()}
    return found


def text_of(x, width, digits):
    return f"{'-':>{width}}" if x is None else f"{x:{width}.{digits}f}"


def measure(tool, heldout, artifacts):
    rows = []
    for first in range(0, len(artifacts), AT_ONCE):
        some = artifacts[first : first + AT_ONCE]
        text = fidelity.run([tool, "--model", heldout, "--json", "--quiet", *some])
        rows += [flat(scheme["mean"]) | {"bits": scheme["effective_bits"]} for scheme in json.loads(text)["schemes"]]
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heldout", required=True, help="dump of the evaluation text")
    parser.add_argument(
        "--perplexity",
        type=pathlib.Path,
        default=ROOT / "sample_data/perplexity.json",
        help="what fidelity.py measured",
    )
    parser.add_argument("--stats", type=pathlib.Path, help="statistics that fidelity.py --stats kept")
    parser.add_argument(
        "--artifacts",
        type=pathlib.Path,
        help="keep the artifacts in this folder, and take them from there if they exist",
    )
    parser.add_argument("--calibration-text", help="text to calibrate on, where artifacts have to be made")
    parser.add_argument("--model", default=ROOT / "sample_data/model", help="model folder [sample_data/model]")
    parser.add_argument("--bin", type=pathlib.Path, default=ROOT / "build/release/tools", help="folder of the tools")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    args = parser.parse_args()

    known = json.loads(args.perplexity.read_text())
    known = known["rows"] if isinstance(known, dict) else known
    perplexity = {row["recipe"]: row["perplexity"] for row in known}
    recipes = {
        label: flags
        for label, _, flags in fidelity.ROWS
        if label in perplexity and not label.startswith(("exact", "windows"))
    }
    with tempfile.TemporaryDirectory() as name:
        calibration = fidelity.Calibration(args, pathlib.Path(name))
        artifacts = [calibration.artifact(label, flags) for label, flags in recipes.items()]
        measured = measure(args.bin / "kvq-eval", args.heldout, artifacts)

    rows = [{"recipe": label, "perplexity": perplexity[label]} | values for label, values in zip(recipes, measured)]
    groups = {
        "all": rows,
        "2 bits": [row for row in rows if not row["recipe"].startswith(("2.5 bits", "3 bits", "4 bits"))],
    }
    correlation = correlations(rows, groups)
    shown = [name for name in SHOWN if name in correlation]
    if args.json:
        print(json.dumps({"rows": rows, "spearman": correlation}, indent=2))
        return 0
    print(f"{'recipe':<60} {'bits':>5} {'ppl':>6} " + " ".join(f"{name:>17}" for name in shown))
    for row in sorted(rows, key=lambda row: row["perplexity"]):
        print(
            f"{row['recipe']:<60} {row['bits']:5.2f} {row['perplexity']:6.2f} "
            + " ".join(text_of(row.get(name), 17, 4) for name in shown)
        )
    print(
        f"\n{'Spearman with perplexity':<24} {'all ' + str(len(rows)):>8} {'2 bits ' + str(len(groups['2 bits'])):>10}"
    )
    for metric, own in sorted(correlation.items(), key=lambda item: (item[1]["all"] is None, -(item[1]["all"] or 0))):
        print(f"{metric:<24} {text_of(own['all'], 8, 3)} {text_of(own['2 bits'], 10, 3)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
