#!/usr/bin/env python3
"""Does a matrix Theta that is refitted to data code linear rows better than the trellis that made the codes?

A decoder of linear rows, x_hat = s Theta b (b: bits of +1/2 and -1/2), takes any Theta [D, B]. For each head and side
of an artifact with one scale a row, this codes the rows of one dump, refits Theta by least squares with the codes as
they are and a penalty for every change (ridge), keeps each row's length, and prints the squared error on the rows of
another dump relative to their energy: with the artifact's own Theta, and the change with the refitted one. Of several
penalties it takes the best on the measured rows, so what it prints is no less than can be gained. Errors of keys are
weighed by the second moment of queries. The last column is the change on the rows of the fit."""

import argparse
import sys
from pathlib import Path

import h5py
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
from kvq.artifact_reader import load_artifact
from kvq.packing import decode, encode

PENALTIES = (0.01, 0.03, 0.1, 0.3, 1, 3, 10)  # times the mean diagonal of B^T B


def rows_of(path: Path, layer: int, side: str) -> np.ndarray:
    """float32 [T, H, D]"""
    with h5py.File(path) as file:
        raw = file[f"layers/{layer}/{side}"][()]
    return (raw.astype(np.uint32) << 16).view(np.float32) if raw.dtype == np.uint16 else raw.astype(np.float32)


def bits_of(codes: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """float64 [T, B] of +1/2 and -1/2."""
    columns = [(codes[:, j] >> i & 1) - 0.5 for j, width in enumerate(widths) for i in range(width)]
    return np.array(columns, np.float64).T


class Head:
    def __init__(self, plan, head: int, x: np.ndarray):
        self.scheme, self.x = plan.scheme_of(head), plan.rotate(x, head)
        coded = encode(self.x, self.scheme)
        self.kept = np.array(self.scheme.widths) > 0
        self.bits = bits_of(coded.codes, np.array(self.scheme.widths))
        self.own = decode(coded, self.scheme).astype(np.float64)
        self.length = np.linalg.norm(self.x[:, self.kept], axis=1, keepdims=True)

    def changed(self, change: np.ndarray) -> np.ndarray:
        """Rows with Theta changed, of the length that the coder keeps."""
        unit = self.own / np.maximum(self.length, 1e-30) + self.bits @ change
        return unit * self.length / np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), 1e-30)

    def error(self, decoded: np.ndarray, metric: np.ndarray) -> float:
        e = decoded - self.x
        return np.einsum("ti,ij,tj->", e, metric, e) / np.einsum("ti,ij,tj->", self.x, metric, self.x)


def changes(fit: Head) -> list[np.ndarray]:
    """What refits add to Theta^T [B, D], for each penalty: least squares of what rows over their lengths miss."""
    length = np.maximum(fit.length, 1e-30)
    gram, missing = fit.bits.T @ fit.bits, fit.bits.T @ ((fit.x - fit.own) / length)
    mean = np.trace(gram) / len(gram)
    return [np.linalg.solve(gram + penalty * mean * np.eye(len(gram)), missing) for penalty in PENALTIES]


def metric_of(plan, head: int, path: Path, layer: int, group: int) -> np.ndarray:
    q = rows_of(path, layer, "q")[:, head * group : (head + 1) * group]
    turned = q.reshape(-1, q.shape[2]).astype(np.float64) @ plan.inverse(head).T
    return turned.T @ turned / len(turned)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path, help="one scale a row, such as --method kvq makes")
    parser.add_argument("--fit", type=Path, required=True, help="dump of the rows that Theta is fitted to")
    parser.add_argument("--measure", type=Path, required=True, help="dump of the rows that errors are measured on")
    args = parser.parse_args()
    gains = []
    print("layer side head  bits   own error  refitted, measured  refitted, fitted to")
    for index, layer in load_artifact(args.artifact).layers.items():
        for side, plan in layer.sides.items():
            fit_rows, rows = (rows_of(path, index, side) for path in (args.fit, args.measure))
            for head in range(layer.num_kv_heads):
                fit, held = Head(plan, head, fit_rows[:, head]), Head(plan, head, rows[:, head])
                group = layer.num_q_heads // layer.num_kv_heads
                metric = metric_of(plan, head, args.measure, index, group) if side == "k" else np.eye(plan.dim)
                own = held.error(held.own, metric)
                best = min(changes(fit), key=lambda change: held.error(held.changed(change), metric))
                gain = held.error(held.changed(best), metric) / own - 1
                inside = fit.error(fit.changed(best), metric) / fit.error(fit.own, metric) - 1
                gains.append(1 + gain)
                bits = fit.bits.shape[1]
                print(f"{index:5} {side:>4} {head:4} {bits:5} {own:11.5f} {gain:+19.2%} {inside:+20.2%}", flush=True)
    print(f"geometric mean of the change: {np.exp(np.mean(np.log(gains))) - 1:+.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
