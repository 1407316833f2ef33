#!/usr/bin/env python3
"""The cost model of docs/cost-model.md: bytes, FLOP and time of a calibration, by layer and token.

Without flags: prints the tables of the page, all numbers from `kvq-calibrate --dry-run --geometry`. --core-gflops gives
the rate of a core, so that the tables are the same on every machine; 0 measures a core of this one.

With --check: calibrates one synthetic layer of 8192 tokens on this machine, and prints measured seconds beside what
--dry-run says of the same dump, medians of --runs alternating rounds. A machine that others use takes longer than
the processor time that all cores spend on a run, divided by their number: the last column compares with that.
"""

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOKENS = (8192, 32768, 131072)
MODELS = {
    "Qwen3-8B": dict(layers=36, q_heads=32, kv_heads=8, head_dim=128),
    "Qwen3-32B": dict(layers=64, q_heads=64, kv_heads=8, head_dim=128),
    "GLM-4.7": dict(layers=92, q_heads=96, kv_heads=8, head_dim=128),
}
METHODS = {"oscar": [], "saw-int4": [], "kvq": ["--budget-bits", "2"]}
MACHINES = {"2 cores": "cpu:2", "16 cores": "cpu:16", "1 GPU": "h200", "8 GPUs": "h200:8"}


def predict(program, *words):
    """The document of a dry run."""
    command = [program, "--dry-run", "--json", *map(str, words)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def geometry_words(geometry, tokens):
    text = ",".join(f"{name.replace('_', '-')}={value}" for name, value in geometry.items())
    return "--geometry", text, "--num-tokens", tokens


def two_digits(number):
    return f"{number:.1f}" if number < 9.95 else f"{number:.0f}"


def seconds_text(seconds):
    for below, unit, length in ((1e-3, "us", 1e-6), (1, "ms", 1e-3), (100, "s", 1), (6000, "min", 60)):
        if seconds < below:
            return f"{two_digits(seconds / length)} {unit}"
    return f"{two_digits(seconds / 3600)} h"


def row(*cells):
    print("| " + " | ".join(map(str, cells)) + " |")


def header(*cells):
    row(*cells)
    row(*["---"] * len(cells))


def print_sizes(program):
    """Bytes and FLOP do not depend on the machine."""
    print("Bytes and FLOP of OSCAR's statistics:\n")
    header("model", "tokens", "MB a layer", "GFLOP a layer", "kB a token and layer", "MFLOP a token and layer")
    for model, geometry in MODELS.items():
        for tokens in TOKENS:
            found = predict(program, *geometry_words(geometry, tokens), "--predict-for", "cpu:1:1")
            layer_bytes, flops = (found[name] / geometry["layers"] for name in ("read_bytes", "collect_flops"))
            size = f"{layer_bytes / 1e6:.0f}", f"{flops / 1e9:.0f}"
            row(model, f"{tokens // 1024}k", *size, f"{layer_bytes / tokens / 1e3:.1f}", f"{flops / tokens / 1e6:.1f}")


def print_times(program, method, machines):
    """Seconds of a run, shared among the layers; below, among their tokens."""
    print(
        f"\n`--method {' '.join([method, *METHODS[method]])}`: time of a layer; of a token and layer; of the model:\n"
    )
    header("model", "tokens", *MACHINES)
    for model, geometry in MODELS.items():
        for tokens in TOKENS:
            cells = []
            for machine in machines:
                words = *geometry_words(geometry, tokens), "--method", method, *METHODS[method]
                seconds = predict(program, *words, "--predict-for", machine)["seconds"]
                layer = seconds / geometry["layers"]
                cells.append("; ".join(map(seconds_text, (layer, layer / tokens, seconds))))
            row(model, f"{tokens // 1024}k", *cells)


def print_memory(program):
    print("\nMemory of `--method oscar`: of the host at the peak; of each GPU:\n")
    header("model", "tokens", "host, 16 cores", "host, 1 GPU", "1 GPU", "8 GPUs")
    for model, geometry in MODELS.items():
        for tokens in TOKENS:
            words = geometry_words(geometry, tokens)
            found = [predict(program, *words, "--predict-for", name) for name in ("cpu:16:1", "h200", "h200:8")]
            values = *(one["peak_bytes"] for one in found[:2]), *(one["device_bytes"] for one in found[1:])
            row(model, f"{tokens // 1024}k", *(f"{value / 1e9:.2g} GB" for value in values))


def timed(command):
    """Seconds of a process, and seconds of all processors together."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*map(str, command)], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - start, busy


def check(program, runs, q_heads):
    with tempfile.TemporaryDirectory() as folder:
        dump, output = (pathlib.Path(folder, name) for name in ("dump.h5", "out.safetensors"))
        make = [sys.executable, ROOT / "scripts/make_synthetic_dump.py", dump, "--layers", 1, "--tokens", 8192]
        shape = ["--sequences", 1, "--q-heads", q_heads, "--kv-heads", 8, "--head-dim", 128, "--dtype", "bfloat16"]
        subprocess.run([*map(str, make + shape)], check=True, stdout=subprocess.DEVNULL)
        header("method", "measured", "of all cores", "--dry-run", "to measured", "to processor time")
        for method, flags in METHODS.items():
            words = [dump, "--method", method, *flags, "--device", "cpu", "--output", output]
            measured, predicted = [], []
            for _ in range(runs):
                predicted.append(predict(program, *words)["seconds"])
                measured.append(timed([program, *words, "--quiet"]))
                output.unlink()
            medians = *map(statistics.median, zip(*measured, strict=True)), statistics.median(predicted)
            cores = os.cpu_count()
            ratios = (medians[2] / medians[0], medians[2] / (medians[1] / cores))
            row(method, *map(seconds_text, medians), *(f"{ratio:.2f}" for ratio in ratios))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvq-calibrate", default=ROOT / "build/release/tools/kvq-calibrate", metavar="PROGRAM")
    parser.add_argument("--core-gflops", type=float, default=100.0, metavar="X", help="GFLOP/s of a core [100]")
    parser.add_argument("--check", action="store_true", help="measure on this machine, and compare")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="rounds of --check [3]")
    parser.add_argument("--q-heads", type=int, default=32, metavar="N", help="query heads of --check's layer [32]")
    given = parser.parse_args()
    if given.check:
        check(given.kvq_calibrate, given.runs, given.q_heads)
        return
    rate = "" if given.core_gflops == 0 else f":{given.core_gflops}"
    machines = [name + (rate if name.startswith("cpu") else "") for name in MACHINES.values()]
    print_sizes(given.kvq_calibrate)
    for method in METHODS:
        print_times(given.kvq_calibrate, method, machines)
    print_memory(given.kvq_calibrate)


if __name__ == "__main__":
    main()
