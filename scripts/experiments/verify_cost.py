#!/usr/bin/env python3
"""What checking an artifact costs: makes a large artifact from a small one by repeating its heads and layers, then
times the content hash, opening and --verify in both readers, and kvq-diff of the file with itself.

Times are processor seconds, the least of --repeat runs. The tools use all cores, so they are done sooner.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests/cli")]

from artifact_file import ArtifactFile, Tensor  # noqa: E402

from kvq.artifact import content_hash  # noqa: E402
from kvq.safetensors_file import SafetensorsFile  # noqa: E402


def enlarged(path: Path, layers: int, heads: int) -> ArtifactFile:
    """The artifact with `layers` times its layers and `heads` times its heads."""
    small = ArtifactFile.read(path)
    large = ArtifactFile(dict(small.metadata), dict(small.tree), {})
    own = small.tree["layers"]
    large.tree["layers"] = []
    for copy in range(layers):
        for entry in own:
            entry = json.loads(json.dumps(entry))
            before, entry["layer"] = entry["layer"], entry["layer"] + copy * len(own)
            for key in ("num_q_heads", "num_kv_heads"):
                entry["geometry"][key] *= heads
            for side in (entry[name] for name in "kv" if name in entry):
                for part, key in ((side, "clip_ratio"), (side["rotation"], "sign_choice")):
                    if key in part:
                        part[key] *= heads
            large.tree["layers"].append(entry)
            prefix = f"layers.{before}."
            for name, tensor in small.tensors.items():
                if name.startswith(prefix):
                    axis = (
                        1
                        if tensor.values.ndim > 1 and name.endswith(("golden.k", "golden.v", "_bytes", "_firm"))
                        else 0
                    )
                    values = np.concatenate([tensor.values] * heads, axis=axis)
                    large.tensors[f"layers.{entry['layer']}.{name.removeprefix(prefix)}"] = Tensor(tensor.dtype, values)
    large.tree["model"]["num_layers"] = len(large.tree["layers"])
    return large


def least(repeat: int, run: Callable[[], float]) -> float:
    return min(run() for _ in range(repeat))


def processor_seconds(*command: object) -> float:
    """Of a program that has to succeed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def hash_seconds(path: Path) -> float:
    file = SafetensorsFile.open(path)
    start = time.process_time()
    content_hash(file)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path, help="an artifact of --method oscar")
    parser.add_argument("--layers", type=int, default=6, help="times the layers (default 6)")
    parser.add_argument("--heads", type=int, default=4, help="times the heads (default 4)")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("build/large.safetensors"), help="the large artifact")
    args = parser.parse_args()
    bin = Path(os.environ.get("KVQ_BIN", ROOT / "build/release/tools"))
    path = enlarged(args.artifact, args.layers, args.heads).write(args.output)
    size = path.stat().st_size / 1e6
    print(f"{path}: {size:.1f} MB")
    python = [sys.executable, ROOT / "scripts/read_artifact.py", path]
    for what, run in (
        ("content hash alone", lambda: hash_seconds(path)),
        ("kvq-inspect", lambda: processor_seconds(bin / "kvq-inspect", path)),
        ("kvq-inspect --verify", lambda: processor_seconds(bin / "kvq-inspect", path, "--verify")),
        ("kvq-diff with itself", lambda: processor_seconds(bin / "kvq-diff", path, path)),
        ("read_artifact.py", lambda: processor_seconds(*python)),
        ("read_artifact.py --verify", lambda: processor_seconds(*python, "--verify")),
    ):
        seconds = least(args.repeat, run)
        print(f"{what:<26} {seconds:8.3f} s  {size / seconds:8.0f} MB/s")


if __name__ == "__main__":
    main()
