#!/usr/bin/env python3
"""Do the default rules of kvq-diff pass a calibration on other text, and fail damage?

Calibrates each method on dump A and, with several seeds, on dump B: two parts of one text. Compares every artifact of B
with that of A on a held-out dump, and prints for each default rule the largest change and the false alarms."""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

METHODS = {
    "oscar": ["--method", "oscar"],
    "oscar up": ["--method", "oscar", "--composition", "up"],
    "saw-int4": ["--method", "saw-int4"],
    "4-means": ["--method", "saw-int4", "--kmeans", "4"],
    "16-means": ["--method", "saw-int4", "--kmeans", "16"],
    "block-gtq": ["--method", "block-gtq"],
    "klt": ["--method", "block-gtq", "--transform", "klt", "--v-allocation", "channel"],
    "fitted": ["--method", "quarot", "--codebook", "fitted"],
    "centered": ["--method", "quarot", "--coder", "symmetric", "--center", "kv"],
    "balanced": ["--method", "quarot", "--coder", "symmetric", "--center", "kv", "--transform", "balanced"],
    "diagonal": ["--method", "quarot", "--coder", "symmetric", "--center", "kv", "--transform", "diagonal"],
    "kvq": ["--method", "kvq"],
    "kvq orthogonal": ["--method", "kvq", "--transform", "orthogonal"],
}
NO_FAILURE = (0, 6)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path, metavar="A.h5", help="dump of the old artifacts")
    parser.add_argument("second", type=Path, metavar="B.h5", help="dump of the new artifacts, of the same text")
    parser.add_argument("--model", type=Path, required=True, metavar="HELDOUT.h5")
    parser.add_argument("--seeds", type=int, default=2, help="seeds of each new artifact [2]")
    parser.add_argument("--folder", type=Path, required=True, help="artifacts and documents stay here")
    parser.add_argument("--bin", type=Path, default=Path("build/release/tools"), help="[build/release/tools]")
    parser.add_argument("--jobs", type=int, default=2, help="programs at once [2]")
    return parser.parse_args()


def run(*command: object) -> subprocess.CompletedProcess:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True)


def calibrate(args, method: str, dump: Path, seed: int) -> Path:
    artifact = args.folder / f"{method.replace(' ', '-')}-{dump.stem}-{seed}.safetensors"
    if not artifact.exists():
        done = run(args.bin / "kvq-calibrate", dump, "--quiet", "--threads", 1, "--seed", seed,
                   "--output", artifact, *METHODS[method])  # fmt: skip
        if done.returncode:
            sys.exit(f"{method}: {done.stderr}")
    return artifact


def compare(args, method: str, seed: int) -> dict:
    old, new = calibrate(args, method, args.first, 0), calibrate(args, method, args.second, seed)
    done = run(args.bin / "kvq-diff", old, new, "--json", "--threads", 1, "--model", args.model, "--no-windows")
    if done.returncode not in NO_FAILURE:
        sys.exit(f"{method}: {done.stderr}")
    (args.folder / f"{new.stem}.json").write_text(done.stdout)
    return json.loads(done.stdout)


def change_of(check: dict) -> float:
    worst = check["worst"]
    relative = "%" in check["rule"] and worst.get("old")
    return (worst["new"] - worst["old"]) / abs(worst["old"]) if relative else worst["new"]


def main() -> int:
    args = parse_arguments()
    args.folder.mkdir(exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda method: calibrate(args, method, args.first, 0), METHODS))
    cases = [(method, seed) for method in METHODS for seed in range(args.seeds)]
    with ThreadPoolExecutor(args.jobs) as pool:
        documents = list(pool.map(lambda case: compare(args, *case), cases))
    checks: dict[str, list] = {}
    for (method, seed), document in zip(cases, documents):
        for check in document["checks"]:
            if check["readings"]:
                checks.setdefault(check["rule"], []).append((change_of(check), method, seed, check["outcome"]))
    alarms = 0
    for rule, found in checks.items():
        change, method, _, _ = max(found) if "<=" in rule else min(found)
        failed = [f"{name} seed {seed}" for _, name, seed, outcome in found if outcome == "failed"]
        alarms += len(failed)
        print(f"{rule:34} {change:+8.4f} {method:15} {len(failed)} of {len(found)} {', '.join(failed)}")
    print(f"{alarms} false alarms in {len(cases)} comparisons")
    return 0


if __name__ == "__main__":
    sys.exit(main())
