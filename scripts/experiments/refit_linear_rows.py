#!/usr/bin/env python3
"""Does a matrix Theta that is refitted to data code linear rows better than the trellis that made the codes?

A decoder of linear rows, x_hat = s Theta b (b: bits of +1/2 and -1/2), takes any Theta [D, B]. For each head and side
of an artifact with one scale a row, this codes the rows of one dump (--fit), refits Theta to them by least squares, and
prints squared errors on the rows of another dump (--measure) relative to their energy, before and after:

  dense     every channel may use every bit of the row; codes stay
  band      every channel has taps of its own for the bits that it already uses; codes stay
  metric    the same, fitted in the side's metric
  tied      all channels of a segment share their taps; codes stay
  round N   band, then rows are coded again with these taps (Viterbi with a table for each channel), N times

Rows keep their length: s is |x| / |Theta b| over channels that have bits, not rounded here. All refits but `tied` are
drawn towards the artifact's Theta by a penalty (ridge), which cross-validation within the fit's rows chooses (blocks of
neighbouring tokens, without coding again; rounds take that of `band`). `plain` errors are of keys and values
themselves, `weighted` ones of keys by the second moment of queries and of values by o_proj's metric, if the dump has
it, both of the measured dump. A metric changes no dense fit, because each channel has its own parameters, and matters
to a band only where channels are fitted together (`metric`); a trellis search minimizes the unweighted error.

With --text, perplexity with the artifact's Theta and with the refits of --perplexity.

The compiled codec makes this faster: KVQ_BIN names the folder of the tools."""

import argparse
import math
import sys
from pathlib import Path

import h5py
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
from channel_trellis import Shape, search

from kvq.artifact_reader import load_artifact
from kvq.scheme import GAUSSIAN_STEP

PENALTIES = (0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)  # times the mean diagonal of the normal equations
FOLDS = 4
TINY = 1e-30


# Data


def rows_of(path: Path, layer: int, side: str) -> np.ndarray:
    """float32 [T, H, D]"""
    with h5py.File(path) as file:
        raw = file[f"layers/{layer}/{side}"][()]
    return (raw.astype(np.uint32) << 16).view(np.float32) if raw.dtype == np.uint16 else raw.astype(np.float32)


def metric_of(path: Path, layer: int, side: str, head: int, kv_heads: int, dim: int) -> np.ndarray:
    """What errors of rows cost, float64 [D, D]."""
    if side == "k":
        q = rows_of(path, layer, "q").astype(np.float64)
        own = q.reshape(len(q), kv_heads, -1, dim)[:, head].reshape(-1, dim)
        return own.T @ own / len(own)
    with h5py.File(path) as file:
        found = file.get(f"layers/{layer}/o_proj_metric")
        return np.eye(dim) if found is None else found[head].astype(np.float64)


# Linear rows of one head


class Coder:
    """The artifact's codes of a head, and its Theta [D, B] with the gains in it."""

    def __init__(self, plan, head: int):
        self.plan, self.head, self.scheme = plan, head, plan.scheme_of(head)
        self.parts = self.scheme.segments(plan.dim)  # Segment: begin, end, scheme
        one_group = all(part.scheme.group_size == part.end - part.begin for part in self.parts)
        one_scale = one_group and (len(self.parts) == 1 or self.scheme.one_scale)
        if not one_scale or self.scheme.coder not in ("trellis", "symmetric") or plan.centroid_scope:
            sys.exit("expected rows of one scale, trellis or symmetric, without centroids")
        self.gains = getattr(self.scheme, "gains", None) or (1.0,) * len(self.parts)
        widths = [part.scheme.bits for part in self.parts for _ in range(part.begin, part.end)]
        self.kept, self.width = len(widths), sum(widths)
        firsts = np.cumsum([0, *widths])
        self.bit = [(j, i) for j, width in enumerate(widths) for i in range(width)]
        self.shapes, self.places, self.theta = [], [], np.zeros((plan.dim, self.width))
        for part, gain in zip(self.parts, self.gains):
            own, size = part.scheme, part.end - part.begin
            taps = own.theta if own.memory else GAUSSIAN_STEP[own.bits] * 2.0 ** np.arange(own.bits)
            index = np.arange(size)[:, None, None] - np.arange(own.memory + 1)[:, None]
            place = firsts[part.begin] + index % size * own.bits + np.arange(own.bits)
            self.shapes.append(Shape(own.bits, own.memory))
            self.places.append(place.reshape(size, -1))  # [g, K]: the bits that each channel uses
            self.theta[np.arange(part.begin, part.end)[:, None], self.places[-1]] = gain * np.array(taps)

    def bits_of(self, codes: np.ndarray) -> np.ndarray:
        """float64 [T, B] of +1/2 and -1/2."""
        return np.stack([codes[:, j] >> i & 1 for j, i in self.bit], 1) - 0.5

    def own_bits(self, x: np.ndarray) -> np.ndarray:
        import torch

        from kvq import torch_codec

        return self.bits_of(torch_codec.encode(torch.from_numpy(x), self.scheme)[0].numpy())

    def searched_bits(self, x: np.ndarray, theta: np.ndarray) -> np.ndarray:
        """Bits of rows x with the band of Theta, each segment alone; the unit is d of packing.md, not rounded."""
        reduced = sum((x[:, p.begin : p.end] ** 2).sum(1) / g**2 for p, g in zip(self.parts, self.gains))
        y, codes = x / np.maximum(np.sqrt(reduced / self.kept), TINY)[:, None], np.zeros(x.shape, np.uint8)
        for part, shape, place in zip(self.parts, self.shapes, self.places):
            own = slice(part.begin, part.end)
            taps = theta[own][np.arange(len(place))[:, None], place]
            codes[:, own] = search(y[:, own], shape.tables(taps), shape)
        return self.bits_of(codes)

    def decode(self, x: np.ndarray, bits: np.ndarray, theta: np.ndarray) -> np.ndarray:
        """Rows of the length of x."""
        v = bits @ theta.T
        length, own = (np.linalg.norm(rows[:, : self.kept], axis=1, keepdims=True) for rows in (x, v))
        return v * length / np.maximum(own, TINY)


class Equations:
    """Normal equations of a change of Theta [D, B], given bits: least squares of x - s Theta b, s the best of each row
    with the Theta that rows were coded with."""

    def __init__(self, coder: Coder, x: np.ndarray, bits: np.ndarray, theta: np.ndarray):
        v, kept = bits @ theta.T, slice(0, coder.kept)
        s = (x[:, kept] * v[:, kept]).sum(1) / np.maximum((v[:, kept] ** 2).sum(1), TINY)
        self.coder, design = coder, s[:, None] * bits
        self.folds = np.array_split(np.arange(len(x)), FOLDS)
        missing = x - design @ coder.theta.T
        self.grams = [design[rows].T @ design[rows] for rows in self.folds]  # [B, B]
        self.rights = [design[rows].T @ missing[rows] for rows in self.folds]  # [B, D]

    def solve(self, kind: str, penalty: float, metric=None, without=None) -> np.ndarray:
        """Theta of a refit, without one of the folds."""
        gram, right = (sum(m for k, m in enumerate(own) if k != without) for own in (self.grams, self.rights))
        ridge = penalty * np.trace(gram) / len(gram)
        if kind == "dense":
            return self.coder.theta + np.linalg.solve(gram + ridge * np.eye(len(gram)), right).T
        theta, parts = self.coder.theta.copy(), list(zip(self.coder.parts, self.coder.places))
        if kind == "metric":
            channel = np.concatenate([np.repeat(np.arange(p.begin, p.end), place.shape[1]) for p, place in parts])
            place = np.concatenate([place.ravel() for _, place in parts])
            matrix = gram[np.ix_(place, place)] * metric[np.ix_(channel, channel)]
            matrix += ridge * np.trace(metric) / len(metric) * np.eye(len(place))
            theta[channel, place] += np.linalg.solve(matrix, (right @ metric)[place, channel])
            return theta
        for part, place in parts:
            channel = np.arange(part.begin, part.end)[:, None]
            matrix, own = gram[place[:, :, None], place[:, None, :]], right[place, channel]  # [g, K, K], [g, K]
            if kind == "tied":
                theta[channel, place] += np.linalg.solve(matrix.sum(0), own.sum(0))
            else:
                matrix = matrix + ridge * np.eye(place.shape[1])
                theta[channel, place] += np.linalg.solve(matrix, own[..., None])[..., 0]
        return theta

    def parameters(self, kind: str) -> int:
        if kind == "dense":
            return self.coder.theta.size
        return sum(place.shape[1] if kind == "tied" else place.size for place in self.coder.places)


def error(x, decoded, metric) -> tuple[float, float]:
    """Squared errors of rows and their energy in a metric of rotated rows."""
    e = decoded - x
    return tuple(float(np.einsum("ti,ti->", rows @ metric, rows)) for rows in (e, x.astype(np.float64)))


def ratio(pair: tuple[float, float]) -> float:
    return pair[0] / pair[1]


def best_penalty(equations: Equations, kind: str, x, bits, metric) -> float:
    def left_out(penalty):
        total = 0.0
        for k, rows in enumerate(equations.folds):
            theta = equations.solve(kind, penalty, metric, k)
            total += error(x[rows], equations.coder.decode(x[rows], bits[rows], theta), metric)[0]
        return total

    return min(PENALTIES, key=left_out)


class Study:
    """All refits of one head. `thetas`: by name, with whether rows are coded again with it."""

    def __init__(self, coder: Coder, fit: np.ndarray, fit_metric: np.ndarray, rounds: int):
        bits = coder.own_bits(fit)
        equations = Equations(coder, fit, bits, coder.theta)
        self.coder, self.thetas, self.inside = coder, {"own": (coder.theta, False)}, {}
        self.penalties, self.parameters = {"tied": 0}, {}
        for kind in ("dense", "band", "metric", "tied"):
            if kind not in self.penalties:
                self.penalties[kind] = best_penalty(equations, kind, fit, bits, fit_metric)
            self.thetas[kind] = equations.solve(kind, self.penalties[kind], fit_metric), False
        for name, (theta, _) in self.thetas.items():
            self.inside[name] = ratio(error(fit, coder.decode(fit, bits, theta), fit_metric))
            self.parameters[name] = equations.parameters(name) if name != "own" else 0
        theta = coder.theta
        for turn in range(1, rounds + 1):
            theta = Equations(coder, fit, bits, theta).solve("band", self.penalties["band"])
            bits, name = coder.searched_bits(fit, theta), f"round {turn}"
            self.thetas[name], self.parameters[name] = (theta, True), self.parameters["band"]
            self.inside[name] = ratio(error(fit, coder.decode(fit, bits, theta), fit_metric))

    def decoded(self, x: np.ndarray, name: str, own_bits=None) -> np.ndarray:
        theta, again = self.thetas[name]
        if again:
            return self.coder.decode(x, self.coder.searched_bits(x, theta), theta)
        return self.coder.decode(x, self.coder.own_bits(x) if own_bits is None else own_bits, theta)

    def errors(self, x: np.ndarray, metrics: list[np.ndarray]) -> dict[str, list[float]]:
        """By refit, the error in each metric."""
        bits = self.coder.own_bits(x)
        found = {name: self.decoded(x, name, bits) for name in self.thetas}
        return {name: [ratio(error(x, own, m)) for m in metrics] for name, own in found.items()}


class RefitRows:
    """Reads rows back through a refit, for kvq.coded_attention."""

    def __init__(self, plan, studies: list[Study], name: str):
        self.plan, self.studies, self.name = plan, studies, name

    def reconstruct(self, x):
        import torch

        turned = [self.plan.rotate(own, head) for head, own in enumerate(x.numpy())]
        back = [study.decoded(own, self.name) for study, own in zip(self.studies, turned)]
        return torch.from_numpy(np.stack([self.plan.unrotate(own, head) for head, own in enumerate(back)]))


def refit(args) -> None:
    from kvq import native_codec, torch_codec

    if library := native_codec.open_native_codec():
        torch_codec.FASTER_SEARCH["cpu"] = library.best_paths
    plans, studies, errors = {}, {}, {"k": [], "v": []}
    for index, layer in load_artifact(args.artifact).layers.items():
        for side, plan in layer.sides.items():
            plans[index, side], studies[index, side] = plan, []
            fit_rows, rows = (rows_of(path, index, side) for path in (args.fit, args.measure))
            for head in range(layer.num_kv_heads):
                back = plan.inverse(head)
                of = (index, side, head, layer.num_kv_heads, plan.dim)
                fit_metric, metric = (back @ metric_of(path, *of) @ back.T for path in (args.fit, args.measure))
                study = Study(Coder(plan, head), plan.rotate(fit_rows[:, head], head), fit_metric, args.rounds)
                found = study.errors(plan.rotate(rows[:, head], head), [back @ back.T, metric])
                studies[index, side].append(study)
                errors[side].append(found)
                changes = " ".join(f"{name} {own[1] / found['own'][1] - 1:+.1%}" for name, own in found.items())
                penalties = " ".join(f"{value:g}" for value in study.penalties.values())
                print(f"layer {index} {side} {head}: weighted {found['own'][1]:.4f}, {changes}, penalties {penalties}")
        sys.stdout.flush()
    for side, of_heads in errors.items():
        own_studies = [study for (_, s), group in studies.items() if s == side for study in group]
        print_summary(side, of_heads, own_studies, len(fit_rows), len(rows))
    if args.text:
        print_perplexity(args, plans, studies)


def print_summary(side, of_heads, studies, fit_rows: int, rows: int) -> None:
    """Means over layers and heads."""
    print(f"\n{side}: {fit_rows} rows a head fitted, {rows} measured, {len(of_heads)} heads")
    print("refit      plain   change  weighted  change  on the fit's rows  equations a parameter")
    base = np.mean([found["own"] for found in of_heads], 0)
    inside = np.mean([study.inside["own"] for study in studies])
    for name in of_heads[0]:
        plain, weighted = np.mean([found[name] for found in of_heads], 0)
        fitted = np.mean([study.inside[name] for study in studies]) / inside - 1
        each = [fit_rows * s.coder.plan.dim / s.parameters[name] for s in studies if s.parameters[name]]
        print(
            f"{name:8} {plain:8.5f} {plain / base[0] - 1:+7.2%} {weighted:9.5f} {weighted / base[1] - 1:+7.2%} "
            f"{fitted:+14.2%} {np.mean(each) if each else math.inf:18.1f}"
        )


def print_perplexity(args, plans, studies) -> None:
    import torch

    from kvq.bootstrap import paired_change
    from kvq.coded_attention import CodedAttention, Windows, use_attention
    from kvq.perplexity import choose_bos, cut_windows, load_model, window_nll

    torch.set_num_threads(1)
    args.device, args.bos = "cpu", None
    model, tokenizer = load_model(args, args.model)
    tokens = tokenizer(args.text.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False).input_ids
    windows, bos, before = cut_windows(tokens, args.window - 1, args.windows), choose_bos(args, model), None
    print(f"\nperplexity, {len(windows)} windows of {args.window} tokens, every position coded; changes from own")
    for name in ("exact", "own", *args.perplexity):

        def plan_of(layer, side, kv_heads, dim, name=name):
            return None if name == "exact" else RefitRows(plans[layer, side], studies[layer, side], name)

        use_attention(model, CodedAttention(plan_of, Windows()))
        each = [window_nll(model, bos, window) / len(window) for window in windows]
        before = before or (each if name == "own" else None)
        change = paired_change(before or each, each, 0)
        interval = "" if change.low is None else f" [{change.low:+.2%}, {change.high:+.2%}]"
        against = f"{change.change:+.2%}{interval}" if name in args.perplexity else ""
        print(f"{name:8} {math.exp(np.mean(each)):8.3f} {against}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path, help="one scale a row, such as --method kvq makes")
    parser.add_argument("--fit", type=Path, required=True, help="dump of the rows that Theta is fitted to")
    parser.add_argument("--measure", type=Path, required=True, help="dump of the rows that errors are measured on")
    parser.add_argument("--rounds", type=int, default=3, help="of fitting and coding again [3]")
    parser.add_argument("--model", type=Path, default=Path("sample_data/model"), help="with --text [sample_data/model]")
    parser.add_argument("--text", type=Path, help="measure perplexity on this text")
    parser.add_argument("--perplexity", nargs="+", default=["dense"], help="refits to measure [dense]")
    parser.add_argument("--windows", type=int, default=4, help="windows of the text [4]")
    parser.add_argument("--window", type=int, default=1024, help="tokens of a window [1024]")
    refit(parser.parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(main())
