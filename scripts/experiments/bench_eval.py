#!/usr/bin/env python3
"""Speed and memory of kvq-eval beside numpy's float32 GEMM on the same cores: one layer of 8192 tokens, 32 query and 8
KV heads, head_dim 128.

Alternates both for some rounds and prints medians. The work counted is that of five causal products for each query
head, which an evaluation of one scheme cannot do without: Q K^T, P V, Q (K^ - K)^T, P (V^ - V) and (P^ - P) V^. Whole
processes: reading the dump, coding all rows and all other metrics are in the time, not in the work; with --o-proj also
two products with the output projection for each token, which itself counts as a part of the layer."""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import h5py
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOKENS, Q_HEADS, KV_HEADS, DIM = 8192, 32, 8, 128
WORK = 5 * 2 * DIM * Q_HEADS * TOKENS * (TOKENS + 1) / 2
LAYER_BYTES = 2 * TOKENS * DIM * (Q_HEADS + 2 * KV_HEADS)
HIDDEN = Q_HEADS * DIM
O_PROJ_BYTES = 4 * HIDDEN * Q_HEADS * DIM


def gemm_rate(seconds=1.0, n=2048):
    """GFLOP/s of numpy's float32 product on all cores."""
    a, b = (np.random.default_rng(seed).standard_normal((n, n), dtype=np.float32) for seed in (0, 1))
    a @ b
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        a @ b
        count += 1
    return 2 * n**3 * count / (time.perf_counter() - start) / 1e9


def add_projection(dump):
    """Adds a random output projection in float16 to the dump."""
    weights = np.random.default_rng(2).standard_normal((HIDDEN, Q_HEADS * DIM), dtype=np.float32) / HIDDEN**0.5
    with h5py.File(dump, "r+") as file:
        file["layers/0/o_proj"] = weights.astype(np.float16)


def evaluate(tool, dump, scheme):
    """Runs kvq-eval on one scheme; returns seconds and peak memory of the process."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [tool, "--model", dump, "--scheme", scheme, "--json", "--quiet"], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"bench_eval.py: error: {tool} failed")
    return time.perf_counter() - start, usage.ru_maxrss * 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="rounds [5]")
    parser.add_argument("--scheme", default="naive-int2", help="what to evaluate [naive-int2]")
    parser.add_argument("--o-proj", action="store_true", help="a dump with an output projection")
    parser.add_argument("--bin", type=pathlib.Path, default=ROOT / "build/release/tools", help="folder of the tools")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        dump = pathlib.Path(folder) / "dump.h5"
        subprocess.run(
            [
                sys.executable,
                ROOT / "scripts/make_synthetic_dump.py",
                dump,
                "--layers",
                "1",
                "--tokens",
                str(TOKENS),
                "--q-heads",
                str(Q_HEADS),
                "--kv-heads",
                str(KV_HEADS),
                "--head-dim",
                str(DIM),
                "--dtype",
                "float16",
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        if args.o_proj:
            add_projection(dump)
        rounds = [(gemm_rate(), *evaluate(args.bin / "kvq-eval", dump, args.scheme)) for _ in range(args.runs)]
    gemm = statistics.median(row[0] for row in rounds)
    seconds = statistics.median(row[1] for row in rounds)
    ratio = statistics.median(WORK / row[1] / 1e9 / row[0] for row in rounds)
    peak = max(row[2] for row in rounds)
    layer = LAYER_BYTES + (O_PROJ_BYTES if args.o_proj else 0)
    result = {
        "seconds": seconds,
        "gflops": WORK / seconds / 1e9,
        "gemm_gflops": gemm,
        "ratio": ratio,
        "peak_bytes": peak,
        "layer_bytes": layer,
    }
    if args.json:
        print(json.dumps(result, indent=2))
        return 0
    ratios = [WORK / row[1] / 1e9 / row[0] for row in rounds]
    print(
        f"kvq-eval --scheme {args.scheme}: {seconds:.2f} s, {result['gflops']:.0f} GFLOP/s; "
        f"numpy GEMM {gemm:.0f} GFLOP/s; ratio {ratio:.0%} "
        f"({min(ratios):.0%} to {max(ratios):.0%} in single rounds)"
    )
    print(f"peak memory {peak / 1e6:.0f} MB, {peak / layer:.2f} times the layer's {layer / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
