#!/usr/bin/env python3
"""Perplexity of the sample model under many recipes: calibrates each with kvq-calibrate, measures with perplexity.py.

Dumps the model on one text (three windows of 4096 tokens), collects statistics once, lets kvq-calibrate decide every
recipe from them, and measures each artifact on another text (six windows). K and V are coded at every position, unless
the row says windows. With --artifacts FOLDER the artifacts are kept there and found there again: calibrate on one
machine, measure on another that has a GPU. `reference` is an independent PyTorch implementation's figure (affine scales
and minima unrounded), where there is one. Each recipe is calibrated and measured on the model's outlier twin too
(outlier_twin.py), which computes the same function with channels of very different size: what a recipe loses there it
loses to how a model is scaled. Needs torch; minutes on a CPU."""

import argparse
import concurrent.futures
import json
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
UH128 = ["--composition", "uh", "--group-size", "128"]
NO_CLIP = ["--clip", "none"]
OSCAR_CLIP = ["--clip-k", "0.96", "--clip-v", "0.92"]
SYMMETRIC = ["--coder", "symmetric"]
CENTERED = [*SYMMETRIC, "--center", "kv"]
TQ = ["--method", "tq-mse"]
GTQ = ["--method", "block-gtq", "--target", "free"]
HADAMARD = ["--mixing", "hadamard"]
PRODUCT = ["--center", "kv", "--score", "qk_energy_product", *HADAMARD]
GTQ_TRELLIS = [*GTQ, *PRODUCT, "--coder", "trellis"]
EIGENBASIS = ["--v-allocation", "channel"]
TRELLIS = ["--method", "quarot", "--coder", "trellis", "--center", "kv"]
KVQ = ["--method", "kvq", "--target", "free", "--budget-bits"]
TUNED = ["--method", "kvq", "--budget-bits"]
SEGMENTS = ["--scales", "segment", "--weigh", "bits"]
WINDOWS = ["--sink-tokens", "64", "--recent-tokens", "256"]
BALANCED = ["--transform", "balanced"]
DIAGONAL = ["--transform", "diagonal"]
SAW = ["--method", "saw-int4"]

# Rows: name, reference perplexity or None, flags of kvq-calibrate (no windows unless the flags have them)
ROWS = [
    ("exact", 22.38, ["--method", "plain", "--bits", "16"]),
    ("affine min-max, group 128", 40.69, ["--method", "plain"]),
    ("Hadamard, group 128", None, ["--method", "quarot"]),
    ("Hadamard, group 128, fp32 scales", 33.88, ["--method", "quarot", "--scale-type", "fp32"]),
    ("Hadamard, group 64", 30.56, ["--method", "quarot", "--group-size", "64"]),
    ("Hadamard, group 32", 28.15, ["--method", "quarot", "--group-size", "32"]),
    ("OSCAR U H, group 128", 32.56, [*UH128, *NO_CLIP]),
    ("OSCAR U H P, group 64, exact C_S", 29.63, NO_CLIP),
    ("OSCAR U H P, group 64, sst", 29.67, [*NO_CLIP, "--target-v", "sst"]),
    ("OSCAR U H P, group 64, K^T K and V^T V", 29.07, [*NO_CLIP, "--target-k", "key", "--target-v", "value"]),
    ("OSCAR U H P, group 64, C_SQ", None, [*NO_CLIP, "--target-k", "scored_query"]),
    ("OSCAR U H P, group 64, shared by heads", 29.58, [*NO_CLIP, "--share", "layer"]),
    ("OSCAR U H P, group 64, sign search 32", None, [*NO_CLIP, "--sign-search", "32"]),
    ("OSCAR U H, group 128, clip 0.96/0.92", 27.97, [*UH128, *OSCAR_CLIP]),
    ("OSCAR U H, group 128, clip searched", None, UH128),
    ("OSCAR U H P, group 64, clip 0.96/0.92", 26.96, OSCAR_CLIP),
    ("OSCAR U H P, group 64, clip searched", None, []),
    ("Hadamard, symmetric, norm kept", None, ["--method", "quarot", *SYMMETRIC]),
    ("the same, centred", 25.39, ["--method", "quarot", *CENTERED]),
    ("the same with U H", 25.35, [*UH128, *CENTERED]),
    ("3 bits: Hadamard, affine", 23.75, ["--method", "quarot", "--bits", "3"]),
    ("3 bits: Hadamard, symmetric, centred", 23.1, ["--method", "quarot", *CENTERED, "--bits", "3"]),
    ("4 bits: Hadamard, affine", 22.67, ["--method", "quarot", "--bits", "4"]),
    ("4 bits: Hadamard, symmetric, centred", 22.58, ["--method", "quarot", *CENTERED, "--bits", "4"]),
    ("windows: Hadamard, group 128", 23.06, ["--method", "quarot", *WINDOWS]),
    ("windows: OSCAR group 128, clip 0.96/0.92", 22.62, [*UH128, *OSCAR_CLIP, *WINDOWS]),
    ("windows: OSCAR group 128, clip searched", None, [*UH128, *WINDOWS]),
    ("windows: OSCAR group 64, clip 0.96/0.92", 22.57, [*OSCAR_CLIP, *WINDOWS]),
    ("windows: OSCAR group 64, clip searched", None, WINDOWS),
    ("windows: Hadamard, symmetric, centred", 22.63, ["--method", "quarot", *CENTERED, *WINDOWS]),
    ("OSCAR U H, group 128, Lloyd-Max", None, [*UH128, "--codebook", "lloyd-max"]),
    ("OSCAR U H, group 128, fitted codebook", None, [*UH128, "--codebook", "fitted"]),
    ("SAW-INT4 at 2 bits", None, ["--method", "saw-int4", "--bits", "2"]),
    ("SAW-INT4 at 2 bits, k-means 16", None, ["--method", "saw-int4", "--bits", "2", "--kmeans", "16"]),
    ("SAW-INT4 at 2 bits, Hessian as written", None, ["--method", "saw-int4", "--bits", "2", "--hessian", "paper"]),
    (
        "SAW-INT4 at 2 bits, Hessian consistent",
        None,
        ["--method", "saw-int4", "--bits", "2", "--hessian", "consistent"],
    ),
    ("TurboQuant-MSE", None, TQ),
    ("TurboQuant-MSE, Hadamard", 25.67, [*TQ, *HADAMARD]),
    ("TurboQuant-MSE, Hadamard, centred", 25.35, [*TQ, *HADAMARD, "--center", "kv"]),
    ("Block-GTQ", 25.10, GTQ),
    ("Block-GTQ, one scale a row", None, [*GTQ, "--scales", "row"]),
    ("Block-GTQ, centred, V symmetric", 24.94, [*GTQ, *HADAMARD, "--center", "kv", "--coder-v", "symmetric"]),
    ("Block-GTQ, energy product, centred, V symmetric", 24.45, [*GTQ, *PRODUCT, "--coder-v", "symmetric"]),
    ("Hadamard, trellis memory 1, centred", 24.45, [*TRELLIS, "--memory", "1"]),
    ("Hadamard, trellis memory 2, centred", 24.38, [*TRELLIS, "--memory", "2"]),
    ("Hadamard, trellis memory 3, centred", 24.01, TRELLIS),
    ("Block-GTQ, energy product, trellis", 23.68, GTQ_TRELLIS),
    ("Block-GTQ, energy product, trellis, V eigenbasis", None, [*GTQ_TRELLIS, *EIGENBASIS]),
    ("OSCAR U H, group 128, clip searched, balanced", None, [*UH128, *BALANCED]),
    ("OSCAR U H P, group 64, clip searched, balanced", None, BALANCED),
    ("Hadamard, symmetric, centred, diagonal", 25.30, ["--method", "quarot", *CENTERED, *DIAGONAL]),
    ("Hadamard, symmetric, centred, balanced", 25.10, ["--method", "quarot", *CENTERED, *BALANCED]),
    ("TurboQuant-MSE, Hadamard, centred, balanced", None, [*TQ, *HADAMARD, "--center", "kv", *BALANCED]),
    ("Hadamard, trellis memory 3, centred, diagonal", 24.04, [*TRELLIS, *DIAGONAL]),
    ("Hadamard, trellis memory 3, centred, balanced", 23.95, [*TRELLIS, *BALANCED]),
    ("Block-GTQ, energy product, trellis, diagonal", None, [*GTQ_TRELLIS, *DIAGONAL]),
    (
        "Block-GTQ, trellis, widths by eigenvalue (klt)",
        23.41,
        [*GTQ, *HADAMARD, "--center", "kv", "--coder", "trellis", "--transform", "klt"],
    ),
    ("kvq, 2 bits, orthogonal", None, [*KVQ, "2", "--transform", "orthogonal"]),
    ("kvq, 2 bits", 23.69, [*KVQ, "2"]),
    ("kvq, 2 bits, uniform layout", 23.92, [*KVQ, "2", "--uniform-layout"]),
    ("kvq, 2.25 bits", 23.23, [*KVQ, "2.25"]),
    ("sizes of tuned kernels: kvq, 2 bits", None, [*TUNED, "2"]),
    ("sizes of tuned kernels: kvq, 2.25 bits", None, [*TUNED, "2.25"]),
    ("sizes of tuned kernels: kvq, 2.5 bits", None, [*TUNED, "2.5"]),
    ("segment scales: kvq, 2 bits, orthogonal", None, [*KVQ, "2", "--transform", "orthogonal", *SEGMENTS]),
    ("segment scales: kvq, 2 bits", 23.39, [*KVQ, "2", *SEGMENTS]),
    ("segment scales: kvq, 2 bits, uniform layout", 23.78, [*KVQ, "2", "--uniform-layout", *SEGMENTS]),
    ("segment scales: kvq, 2.25 bits", 23.04, [*KVQ, "2.25", *SEGMENTS]),
    ("segment scales: kvq, 2.5 bits", 22.84, [*KVQ, "2.5", *SEGMENTS]),
    ("segment scales: kvq, 3 bits", 22.77, [*KVQ, "3", *SEGMENTS]),
    ("2.5 bits: Block-GTQ, energy product, trellis, V eigenbasis", None, [*GTQ_TRELLIS, *EIGENBASIS, "--bits", "2.5"]),
    ("2.5 bits: kvq", 23.03, [*KVQ, "2.5"]),
    ("3 bits: TurboQuant-MSE", None, [*TQ, "--bits", "3"]),
    ("3 bits: Block-GTQ", None, [*GTQ, "--bits", "3"]),
    ("3 bits: Block-GTQ, one scale a row", None, [*GTQ, "--bits", "3", "--scales", "row"]),
    ("3 bits: Block-GTQ, energy product, trellis, V eigenbasis", None, [*GTQ_TRELLIS, *EIGENBASIS, "--bits", "3"]),
    ("3 bits: kvq", None, [*KVQ, "3"]),
    ("4 bits: SAW-INT4", None, SAW),
    ("4 bits: SAW-INT4, diagonal", None, [*SAW, *DIAGONAL]),
    ("4 bits: SAW-INT4, balanced", None, [*SAW, *BALANCED]),
    (
        "4 bits: Hadamard, symmetric, centred, diagonal",
        22.59,
        ["--method", "quarot", *CENTERED, *DIAGONAL, "--bits", "4"],
    ),
    (
        "4 bits: Hadamard, symmetric, centred, balanced",
        22.55,
        ["--method", "quarot", *CENTERED, *BALANCED, "--bits", "4"],
    ),
    ("4 bits: Block-GTQ", None, [*GTQ, "--bits", "4"]),
    ("4 bits: Block-GTQ, energy product, trellis, V eigenbasis", None, [*GTQ_TRELLIS, *EIGENBASIS, "--bits", "4"]),
    ("4 bits: kvq", None, [*KVQ, "4"]),
]


def run(command):
    process = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if process.returncode:
        sys.exit(f"fidelity.py: error: {command[0]} ended with {process.returncode}: {process.stderr.strip()}")
    return process.stdout


class Calibration:
    """Makes artifacts of one model. Dump and statistics are made once, when the first artifact needs them."""

    def __init__(self, args, model, scratch, name=""):
        """`name` is set for a second model and becomes part of the paths of that model's files."""
        self.args, self.model, self.scratch = args, model, scratch / name
        self.scratch.mkdir(exist_ok=True)
        self.stats = (
            args.stats.with_suffix(f".{name}.safetensors" if name else args.stats.suffix)
            if args.stats
            else self.scratch / "stats.safetensors"
        )
        # Methods that compare plans hold out tokens, so they have statistics of their own; other methods use statistics
        # of the whole text.
        self.held_out_stats = self.stats.with_suffix(".held-out.safetensors")
        self.folder = (args.artifacts or scratch) / name
        self.folder.mkdir(parents=True, exist_ok=True)

    def artifact(self, label, flags):
        path = self.folder / (re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-") + ".safetensors")
        if not path.exists():
            self.collect()
            windows = [] if "--sink-tokens" in flags else ["--sink-tokens", "0", "--recent-tokens", "0"]
            stats = self.held_out_stats if "kvq" in flags else self.stats
            run([self.args.bin / "kvq-calibrate", "--stats", stats, "--output", path, "--quiet", *windows, *flags])
        return path

    def collect(self):
        if self.stats.exists() and self.held_out_stats.exists():
            return
        if not self.args.calibration_text:
            sys.exit("fidelity.py: error: --calibration-text is needed to make artifacts")
        dump = self.scratch / "dump.h5"
        run(
            [
                sys.executable,
                SCRIPTS / "dump_qkv.py",
                self.model,
                "--text",
                self.args.calibration_text,
                "--windows",
                "3",
                "--sequence-length",
                "4096",
                "--dtype",
                "float32",
                "--curvature",
                "--output",
                dump,
                "--quiet",
            ]
        )
        for stats, more in ((self.stats, []), (self.held_out_stats, ["--held-out-tokens", "1024"])):
            run(
                [
                    self.args.bin / "kvq-calibrate",
                    "--model",
                    dump,
                    "--collect",
                    "all",
                    "--stats",
                    stats,
                    "--output",
                    self.scratch / "unused.safetensors",
                    "--quiet",
                    *more,
                ]
            )


def rows_of_token(model):
    """Rows that a token has: keys and values of all KV heads and layers."""
    config = json.loads((pathlib.Path(model) / "config.json").read_text())
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"]


def perplexity(args, model, artifact):
    """Perplexity over windows of the evaluation text, and the mean bytes of a row in pages."""
    text = run(
        [
            sys.executable,
            SCRIPTS / "perplexity.py",
            model,
            "--text",
            args.evaluation_text,
            "--num-windows",
            args.num_windows,
            "--device",
            args.device,
            "--artifact",
            artifact,
            "--no-exact",
            "--json",
        ]
    )
    result = json.loads(text)["results"][0]
    return result["perplexity"], result["bytes_per_token"] / rows_of_token(model)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=ROOT / "sample_data/model", help="model folder [sample_data/model]")
    parser.add_argument("--calibration-text", help="text to calibrate on, where artifacts have to be made")
    parser.add_argument("--evaluation-text", help="text to measure on")
    parser.add_argument("--bin", type=pathlib.Path, default=ROOT / "build/release/tools", help="folder of the tools")
    parser.add_argument(
        "--stats", type=pathlib.Path, help="keep the collected statistics here, or read them if they exist"
    )
    parser.add_argument(
        "--artifacts",
        type=pathlib.Path,
        help="keep the artifacts in this folder, and take them from there if they exist",
    )
    parser.add_argument("--no-measure", action="store_true", help="only calibrate (with --artifacts)")
    parser.add_argument("--num-windows", default="6", help="windows of the evaluation text [6]")
    parser.add_argument("--device", default="cpu", help="PyTorch device of the measurement [cpu]")
    parser.add_argument("--jobs", type=int, default=1, help="measurements at the same time [1]")
    parser.add_argument("--no-twin", action="store_true", help="leave the outlier twin out")
    parser.add_argument("--only", metavar="REGEX", help="only rows whose name matches")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    args = parser.parse_args()
    if (args.no_measure and not args.artifacts) or (not args.no_measure and not args.evaluation_text):
        parser.error(
            "--evaluation-text is needed to measure, or --no-measure with --artifacts FOLDER to calibrate only"
        )

    rows = [row for row in ROWS if re.search(args.only or "", row[0])]
    results = []
    with tempfile.TemporaryDirectory() as name, concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        scratch = pathlib.Path(name)
        models = [(args.model, Calibration(args, args.model, scratch))]
        if not args.no_twin:
            twin = scratch / "twin-model"
            run([sys.executable, SCRIPTS / "outlier_twin.py", args.model, "--output", twin])
            models.append((twin, Calibration(args, twin, scratch, "twin")))
        measured = []  # one artifact is measured while the next one is calibrated
        for label, _, flags in rows:
            for model, calibration in models:
                artifact = calibration.artifact(label, flags)
                if not args.no_measure:
                    measured.append(pool.submit(perplexity, args, model, artifact))
        if args.no_measure:
            return 0
        for row, (label, reference, flags) in enumerate(rows):
            found = [job.result() for job in measured[row * len(models) : (row + 1) * len(models)]]
            values, row_bytes = [value for value, _ in found], found[0][1]
            results.append(
                {
                    "recipe": label,
                    "flags": flags,
                    "row_bytes": row_bytes,
                    "reference": reference,
                    "perplexity": values[0],
                }
            )
            if not args.no_twin:
                results[-1]["twin_perplexity"] = values[1]
            if not args.json:
                note = "" if reference is None else f"   reference {reference:5.2f} ({values[0] / reference - 1:+.1%})"
                numbers = " ".join(f"{value:8.2f}" for value in values)
                print(f"{label:<58} {row_bytes:6.1f} B {numbers}{note}", flush=True)
    if args.json:
        print(json.dumps(results, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
