#!/usr/bin/env python3
"""What longer memories of trellis codes would buy: squared error beside the work of a search.

Rows are Gaussian, or centred keys and values of a dump after a Hadamard rotation, all of root mean square 1, coded with
tail-biting codes as in formats/packing.md (d). States and branches are those that the search visits for each code; the
time of a write follows the branches, `work` has them over those of 2 bits, memory 3. The last column is the error on
Gaussian rows over 4^-bits, which no code of long rows can go below. Memory 0 is the scalar code of symmetric rows. The
taps: packing.md and search_trellis.py, whose --row-channels 512 --rows 64 found those of LONGER."""

import argparse
import math
import sys
from pathlib import Path

import h5py
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
from channel_trellis import Shape, search
from refit_linear_rows import TINY, rows_of
from search_trellis import KNOWN

from kvq.artifact import hadamard
from kvq.scheme import GAUSSIAN_STEP

SHIPPED = {
    (1, 0): [GAUSSIAN_STEP[1]],
    (2, 0): [GAUSSIAN_STEP[2], 2 * GAUSSIAN_STEP[2]],
    (2, 1): KNOWN[2, 1],
    (2, 2): KNOWN[2, 2],
    (2, 3): [0.955407229, 0.953921669, -0.519271679, 0.508955923, 0.482909586, 0.52327051, 0.956043081, -0.933100524],
}
LONGER = {
    (1, 4): [1.59944077, 0.111201523, 0.072292051, 0.114185431, 0.0651921008],
    (1, 6): [0.901825947, -0.947761286, -0.0944902103, 0.364178926, 0.612355842, 0.548525175, 0.320429211],
    (1, 8): [
        1.59907422,
        0.049603294,
        0.0857275691,
        0.109369216,
        -0.0233110548,
        0.101665022,
        0.0311197011,
        -0.023366148,
        -0.0884961415,
    ],
    (2, 4): [
        0.912967306,
        -0.948701211,
        0.637997976,
        0.256456286,
        0.147599652,
        -0.535638905,
        -0.458660309,
        0.443810701,
        0.929405633,
        0.951082523,
    ],
    (2, 5): [
        1.03386659,
        0.825579786,
        -0.620442468,
        0.701475139,
        0.190965698,
        -0.247333984,
        0.376870693,
        -0.554017921,
        0.633381675,
        0.274057106,
        0.582159726,
        -0.808413678,
    ],
}


def unit_rows(x: np.ndarray) -> np.ndarray:
    return (x / np.maximum(np.sqrt((x * x).mean(1, keepdims=True)), TINY)).astype(np.float32)


def sources(args) -> dict[str, np.ndarray]:
    """Rows [N, D] of root mean square 1."""
    rng, found = np.random.default_rng(args.seed), {}
    with h5py.File(args.dump) as file:
        layers = sorted(map(int, file["layers"]))
    for side in "kv":
        x = np.stack([rows_of(args.dump, layer, side) for layer in layers]).astype(np.float64)  # [layers, T, H, D]
        x = (x - x.mean(1, keepdims=True)).reshape(-1, x.shape[3])
        x = x[rng.permutation(len(x))[: args.rows]] @ hadamard(x.shape[1])
        found["keys" if side == "k" else "values"] = unit_rows(x)
    return {"Gaussian": unit_rows(rng.standard_normal((args.rows, x.shape[1])))} | found


def memories(args) -> None:
    rows = sources(args)
    print(f"squared error, {args.rows} rows; kept: with the length of the row kept, else at its root mean square")
    print("bits memory  states branches  work " + "".join(f"{name:>11}     kept" for name in rows) + "  over 4^-bits")
    for (bits, memory), theta in sorted((SHIPPED | LONGER).items()):
        if bits not in args.bits:
            continue
        shape, figures = Shape(bits, memory), []
        for x in rows.values():
            taps = np.tile(np.array(theta, np.float64), (x.shape[1], 1))
            place = search(x, shape.tables(taps), shape).astype(np.int64)
            window = sum(np.roll(place, k, 1) << k * bits for k in range(memory + 1))
            v = shape.tables(taps[:1])[0, :, 0][window] / -2
            kept = v * np.sqrt(x.shape[1] / np.maximum((v * v).sum(1, keepdims=True), TINY))
            figures += [np.square(x - v).mean(), np.square(x - kept).mean()]
        work = shape.branches / Shape(2, 3).branches
        print(
            f"{bits:4} {memory:6} {shape.states:7} {shape.branches:8} {work:5g} "
            + "".join(f"{a:11.5f} {b:8.5f}" for a, b in zip(figures[::2], figures[1::2]))
            + f" {10 * math.log10(figures[0] * 4**bits):9.2f} dB",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dump", type=Path)
    parser.add_argument("--rows", type=int, default=4096, help="of each source [4096]")
    parser.add_argument("--bits", type=int, nargs="+", default=[1, 2], help="[1 2]")
    parser.add_argument("--seed", type=int, default=0, help="of Gaussian rows and of the choice of rows [0]")
    memories(parser.parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(main())
