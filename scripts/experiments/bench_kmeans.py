#!/usr/bin/env python3
"""Benchmark of k-means against scikit-learn: same rows, same cores, in turn within one run.

Makes 20000 Gaussian rows of 256 channels with a decaying spectrum (float32) and clusters them into 256, 25 iterations
from one greedy k-means++ seeding; neither side stops early. Prints wall and processor seconds of seeding and of Lloyd
(medians over the rounds; processor seconds tell more on a busy machine), their ratios and the ratio of the inertias.

scikit-learn is not among kvq's requirements: give --python an environment that has it, for example

  python3 -m venv sklearn-venv && sklearn-venv/bin/pip install scikit-learn
  scripts/experiments/bench_kmeans.py --python sklearn-venv/bin/python
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROWS, DIM, CLUSTERS, ITERATIONS = 20000, 256, 256, 25
NAME = "bench_kmeans.py"


def fail(message):
    sys.exit(f"{NAME}: error: {message}")


def write_rows(path, seed):
    import numpy as np

    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((ROWS, DIM), dtype=np.float32) * np.exp(-np.arange(DIM) / 64).astype(np.float32)
    rows.tofile(path)


def run_sklearn(path, seed):
    """Prints the same fields as bench_kmeans. Runs in its own process."""
    try:
        import numpy as np
        import sklearn.cluster
    except ImportError as error:
        fail(f"{sys.executable} lacks {error.name}: pip install scikit-learn there, or name another with --python")
    rows = np.fromfile(path, np.float32).reshape(-1, DIM)
    sklearn.cluster.KMeans(2, init=rows[:2], n_init=1, max_iter=1).fit(rows)  # warm-up: starts threads

    def timed(action):
        wall, cpu = time.perf_counter(), time.process_time()
        result = action()
        return result, time.perf_counter() - wall, time.process_time() - cpu

    (seeds, _), seeding, seeding_cpu = timed(lambda: sklearn.cluster.kmeans_plusplus(rows, CLUSTERS, random_state=seed))
    lloyd_of = sklearn.cluster.KMeans(CLUSTERS, init=seeds, n_init=1, max_iter=ITERATIONS, tol=0, algorithm="lloyd")
    fitted, lloyd, lloyd_cpu = timed(lambda: lloyd_of.fit(rows))
    print(
        json.dumps(
            {
                "seeding": seeding,
                "seeding_cpu": seeding_cpu,
                "lloyd": lloyd,
                "lloyd_cpu": lloyd_cpu,
                "iterations": fitted.n_iter_,
                "inertia": float(fitted.inertia_),
                "version": sklearn.__version__,
            }
        )
    )


def output_of(command, threads):
    limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    done = subprocess.run(command, stdout=subprocess.PIPE, env=os.environ | limits)
    if done.returncode:
        sys.exit(done.returncode)  # the child has already printed the error
    return json.loads(done.stdout)


def print_table(ours, theirs):
    for part in ("seeding", "lloyd"):
        for key, unit in ((part, "s"), (f"{part}_cpu", "s cpu")):
            mine, other = ([run[key] for run in runs] for runs in (ours, theirs))
            ratios = [b / a for a, b in zip(mine, other)]
            print(
                f"  {part:<8} kvq {statistics.median(mine):7.3f}"
                f"  scikit-learn {statistics.median(other):7.3f} {unit:<6}"
                f" {statistics.median(ratios):6.2f}x ({min(ratios):.2f} .. {max(ratios):.2f})"
            )
    ratios = [a["inertia"] / b["inertia"] for a, b in zip(ours, theirs)]
    print(
        f"  inertia  kvq / scikit-learn {statistics.median(ratios):.5f} ({min(ratios):.5f} .. {max(ratios):.5f}),"
        f" iterations {ours[0]['iterations']} and {theirs[0]['iterations']}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default="build/release/tests/bench_kmeans", help="our program [%(default)s]")
    parser.add_argument("--python", default=sys.executable, help="a Python that has scikit-learn [this one]")
    parser.add_argument("--runs", type=int, default=3, help="rounds, each with its own seed [%(default)s]")
    parser.add_argument(
        "--threads", type=int, default=min(2, len(os.sched_getaffinity(0))), help="and cores [%(default)s]"
    )
    parser.add_argument("--sklearn", nargs=2, metavar=("FILE", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sklearn:
        return run_sklearn(args.sklearn[0], int(args.sklearn[1]))
    if not pathlib.Path(args.bin).is_file():
        fail(f"{args.bin}: expected our program; build the target bench_kmeans or name it with --bin")

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])  # child processes inherit the affinity
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = str(pathlib.Path(folder) / "rows.f32")
        write_rows(path, seed=0)
        for seed in range(args.runs):
            theirs.append(output_of([args.python, __file__, "--sklearn", path, str(seed)], args.threads))
            ours.append(
                output_of([args.bin, path, *map(str, (DIM, CLUSTERS, ITERATIONS, seed, args.threads))], args.threads)
            )
    print(
        f"{ROWS} x {DIM}, {CLUSTERS} clusters, {args.threads} threads, {args.runs} rounds, "
        f"scikit-learn {theirs[0]['version']}"
    )
    print_table(ours, theirs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
