#!/usr/bin/env python3
"""Benchmark of kvq-calibrate on one large layer, as ratios within one run.

Makes a layer of 8192 tokens, 32 query and 8 KV heads, head_dim 128 (float16), then times whole processes:

  plain     a plain numpy program for the same statistics (C_Q, `sst`) and rotations U H P per KV head, in float64
  sst       kvq-calibrate for the same
  exact     kvq-calibrate with the exact score-weighted moment C_S

and prints the speed of the exact moment, exact less sst, beside numpy's single-precision GEMM on as many threads, round
by round. With --oscar-script FILE, a copy of OSCAR's compute_kv_rotation.py (it needs torch), its `qqt_sst` with the
composition `r_h_pbr` is timed on the same numbers in the same run.
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import h5py
import numpy as np

TOKENS, Q_HEADS, KV_HEADS, DIM = 8192, 32, 8, 128


def write_dump(path, seed=0):
    """One layer with a decaying channel spectrum; logits of moderate size."""
    rng = np.random.default_rng(seed)
    spectrum = np.exp(-np.arange(DIM) / 40).astype(np.float32) * 1.5
    with h5py.File(path, "w") as f:
        f.attrs.update(
            format="kvq-dump",
            version="1.0",
            model_name="bench",
            capture_point="post_rope",
            num_layers=1,
            producer="bench_calibrate.py",
        )
        f["cu_seqlens"] = np.array([0, TOKENS], np.int64)
        f["positions"] = np.arange(TOKENS, dtype=np.int64)
        g = f.create_group("layers/0")
        g.attrs.update(
            num_q_heads=Q_HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            v_head_dim=DIM,
            softmax_scale=DIM**-0.5,
            sliding_window=0,
            kind="gqa",
            rope_layout="half",
            rotary_dim=DIM,
            rotary_offset=0,
        )
        g["rope_inv_freq"] = 1e6 ** (-np.arange(0, DIM, 2) / DIM)
        for name, heads in (("q", Q_HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            rows = rng.standard_normal((TOKENS, heads, DIM), dtype=np.float32) * spectrum
            g.create_dataset(name, data=rows.astype(np.float16)).attrs["kvq_dtype"] = "float16"


def write_oscar_dump(dump, folder):
    """Writes the tensors of `dump` in the layout that OSCAR's script reads: layer_<i>/<tensor>/<chunk>.pt."""
    import torch  # only this function needs PyTorch, which not every environment has

    with h5py.File(dump) as f:
        tensors = {n: torch.from_numpy(f[f"layers/0/{n}"][()]) for n in "qkv"}
    for name, tensor in (tensors | {"seq_lens": torch.tensor([TOKENS])}).items():
        (folder / "layer_0" / name).mkdir(parents=True)
        torch.save(tensor, folder / "layer_0" / name / "1.pt")


def plain_numpy(path):
    """Computes the same statistics and rotations with plain numpy. Runs in its own process."""
    with h5py.File(path) as f:
        q, k, v = (f[f"layers/0/{n}"][()].astype(np.float64) for n in "qkv")
    hadamard = np.ones((1, 1))
    while len(hadamard) < DIM:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]]) / np.sqrt(2)
    places = [int(f"{i:07b}"[::-1], 2) for i in range(DIM)]
    group = Q_HEADS // KV_HEADS
    for h in range(KV_HEADS):
        rows = q[:, h * group : (h + 1) * group].reshape(-1, DIM)
        c_q = rows.T @ rows / len(rows)
        weights = np.einsum("td,td->t", k[:, h] @ c_q, k[:, h])
        weighted = v[:, h] * np.sqrt(weights / weights.sum())[:, None]
        for moment in (c_q, weighted.T @ weighted):
            basis = np.linalg.eigh(moment)[1][:, ::-1] @ hadamard
            rotation = np.empty_like(basis)
            rotation[:, places] = basis
            assert abs(rotation.T @ rotation - np.eye(DIM)).max() < 1e-9


def timed(command):
    """Wall seconds and peak bytes of one whole process."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"bench_calibrate.py: error: {' '.join(map(str, command))} ended with {process.returncode}")
    return time.perf_counter() - start, usage.ru_maxrss * 1024


def numpy_gemm():
    """Prints the GFLOP/s of float32 products of 2048 x 2048 matrices over one second. Runs in its own process."""
    a = np.full((2048, 2048), 0.5, np.float32)
    a @ a
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < 1.0:
        a @ a
        count += 1
    print(count * 2 * 2048**3 / (time.perf_counter() - start) * 1e-9)


def gemm_gflops(threads):
    environment = os.environ | {"OPENBLAS_NUM_THREADS": str(threads)}
    return float(
        subprocess.run(
            [sys.executable, __file__, "--numpy-gemm"], check=True, capture_output=True, env=environment
        ).stdout
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default="build/release/tools", help="folder of kvq-calibrate [%(default)s]")
    parser.add_argument("--runs", type=int, default=5, help="counted runs of each, after one warm-up [%(default)s]")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--oscar-script", metavar="FILE", help="OSCAR's compute_kv_rotation.py, to be timed beside ours"
    )
    parser.add_argument("--plain-numpy", metavar="DUMP", help=argparse.SUPPRESS)
    parser.add_argument("--numpy-gemm", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plain_numpy:
        return plain_numpy(args.plain_numpy)
    if args.numpy_gemm:
        return numpy_gemm()

    tool = pathlib.Path(args.bin) / "kvq-calibrate"
    with tempfile.TemporaryDirectory() as folder:
        dump, out = pathlib.Path(folder) / "layer.h5", pathlib.Path(folder) / "out.safetensors"
        write_dump(dump)
        common = [
            tool,
            "--model",
            dump,
            "--output",
            out,
            "--clip-k",
            "0.96",
            "--clip-v",
            "0.92",
            "--quiet",
            "--threads",
            str(args.threads),
        ]
        commands = {
            "plain": [sys.executable, __file__, "--plain-numpy", dump],
            "sst": common + ["--target-v", "sst"],
            "exact": common,
        }
        if args.oscar_script:
            write_oscar_dump(dump, pathlib.Path(folder) / "oscar")
            commands["oscar"] = [
                sys.executable,
                args.oscar_script,
                "--dump-path",
                pathlib.Path(folder) / "oscar",
                "--method",
                "qqt_sst",
                "--composition",
                "r_h_pbr",
                "--chunk-id",
                "1",
            ]
        seconds, peaks, gemm = {name: [] for name in commands}, {name: 0 for name in commands}, []
        for run in range(args.runs + 1):
            if run:
                gemm.append(gemm_gflops(args.threads))
            for name, command in commands.items():
                wall, peak = timed(command)
                peaks[name] = max(peaks[name], peak)
                if run:
                    seconds[name].append(wall)
        layer_bytes = 2 * TOKENS * (Q_HEADS + 2 * KV_HEADS) * DIM

    median = {name: statistics.median(values) for name, values in seconds.items()}
    flops = 4 * DIM * Q_HEADS * TOKENS * (TOKENS + 1) / 2
    attention = [flops * 1e-9 / (exact - sst) for exact, sst in zip(seconds["exact"], seconds["sst"])]
    shares = [ours / machine for ours, machine in zip(attention, gemm)]
    print(f"{args.threads} threads, {args.runs} runs of each in turn, whole processes, median (min .. max)")
    for name in commands:
        print(
            f"  {name:<6} {median[name]:6.2f} s ({min(seconds[name]):.2f} .. {max(seconds[name]):.2f})"
            f"  {median['plain'] / median[name]:5.2f}x plain  peak {peaks[name] / 1e6:.0f} MB"
        )
    print(
        f"exact C_S: {flops * 1e-9:.0f} GFLOP at {statistics.median(attention):.0f} GFLOP/s; numpy's float32 GEMM "
        f"{statistics.median(gemm):.0f} GFLOP/s; ratio {statistics.median(shares):.0%} "
        f"({min(shares):.0%} .. {max(shares):.0%})"
    )
    bound = 1.5 * layer_bytes + 256e6
    print(
        f"peak memory {peaks['exact'] / 1e6:.0f} MB; 1.5 x the layer's raw {layer_bytes / 1e6:.0f} MB + 256 MB = "
        f"{bound / 1e6:.0f} MB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
