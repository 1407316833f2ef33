#!/usr/bin/env python3
"""Mean and standard deviation of a sweep over its last axis, as Block-GTQ Table 3 has them over three calibration
texts.

Reads what `kvq-eval --sweep ... --json` printed, from a file or standard input. Rows whose labels differ only behind
the last comma are one cell. Prints a table: mean +- standard deviation (n - 1) of each metric, and its size beside the
mean. Built-in schemes stand alone."""

import argparse
import json
import math
import pathlib
import sys

METRICS = ("logit_rel_mse", "rope_logit_mae", "output_rel_mse", "attention_kl.mean", "attention_kl.p99")


def value_of(mean, metric):
    """The mean of a metric; None if the layers have no such number."""
    for part in metric.split("."):
        mean = mean.get(part) if isinstance(mean, dict) else None
    return mean


def cells(schemes):
    """Groups rows by the part of their names before the last comma; keeps the order."""
    groups = {}
    for scheme in schemes:
        name = scheme["name"].rpartition(", ")[0] if "flags" in scheme else ""
        groups.setdefault(name or scheme["name"], []).append(scheme["mean"])
    return groups


def spread(values):
    """(mean, standard deviation of the sample); the deviation is None for one value."""
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1)) if len(values) > 1 else None


def text_of(values):
    if any(value is None for value in values):
        return "-"
    mean, deviation = spread(values)
    return (
        f"{mean:.4g}"
        if deviation is None
        else f"{mean:.4g} +- {deviation:.2g} ({100 * deviation / mean if mean else 0:.1f}%)"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("document", nargs="?", default="-", help="JSON of kvq-eval --sweep [standard input]")
    parser.add_argument("--metric", action="append", help=f"may be given several times [{' '.join(METRICS)}]")
    args = parser.parse_args()
    text = sys.stdin.read() if args.document == "-" else pathlib.Path(args.document).read_text()
    metrics = args.metric or METRICS
    rows = [["", "n", *metrics]]
    for name, means in cells(json.loads(text)["schemes"]).items():
        rows.append(
            [name, str(len(means)), *(text_of([value_of(mean, metric) for mean in means]) for metric in metrics)]
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


if __name__ == "__main__":
    main()
