#!/usr/bin/env python3
"""Searches the coefficients theta of linear trellis codes, and measures them.

The code. Channel j of a row has a code c_j of `bits` bits. The decoded value is linear in the bits of c_j and of the
`memory` codes before it:

  y_j = theta[0] * (bit 0 of c_j) + theta[1] * (bit 1 of c_j) + ... + theta[bits] * (bit 0 of c_(j-1)) + ...

where a set bit counts +1/2 and a clear one -1/2. Bits before the first channel do not exist: they add nothing. So a row
is Theta b, a fixed banded matrix times the row's own bits, and a decoder can fold Theta into the query. The encoder is
a Viterbi search over 2^(bits * memory) states, the last `memory` codes.

The measure. A row of independent Gaussians is divided by its root mean square, and coded; the error is the mean of
(x - y)^2. A code of `bits` bits cannot go below 4^-bits; the best scalar quantizer (Lloyd-Max) is printed beside.

The search. Coding with theta and then fitting theta to the codes by least squares never makes the error larger, but
ends in poor local minima. So: many random starts on few rows; the best of them, and the thetas known to this program,
are disturbed and fitted again on more rows, for the time given; the best three are fitted on many rows and the best on
other rows is measured on fresh ones, whose standard error is printed. Changing the signs of all coefficients of one
bit, or the order of the bits, gives the same code: such copies are dropped. Errors are only comparable for rows of one
length."""

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

from kvq.cli import Parser, run_script
from kvq.errors import usage

PROGRAM = "search_trellis.py"
EPILOG = """\
examples

  search_trellis.py --bits 2 --memory 3 --seconds 300        goes on from the best known theta, and measures
  search_trellis.py --bits 2 --memory 2 --from-scratch       finds it again from random starts
  search_trellis.py --bits 2 --memory 1 --evaluate known     only measures, at 8 to 128 channels
  search_trellis.py --bits 2 --memory 1 --evaluate "1.48 0.92 -0.79 0.99" --circular

--circular measures tail-biting as well: the codes before the first channel are the last ones of the row. Its encoder
runs twice: once over the row turned by half, which gives a state for the row's beginning, then from that state back to
it. That finds nearly the best codes in rows of 64 and more; in rows of 16 and less trying every first state does much
better. For tail-biting codes search with --row-channels 512 or more, where the beginning of a row hardly counts.

exit codes: 0 done, 2 wrong flags, 5 PyTorch is missing
"""

# The best known coefficients for rows of 128 channels: (bits, memory) -> theta.
KNOWN = {
    (1, 1): [1.59981456, -0.0255246349],
    (1, 2): [1.60028505, 0.0845768113, 0.0141025971],
    (1, 3): [1.59978881, -0.0367554251, 0.0460691107, -0.0794545417],
    (2, 1): [1.48225427, 0.918767927, -0.792501826, 0.993044327],
    (2, 2): [1.34449962, -0.886770233, 0.0397294397, 0.717407561, 0.814774881, 0.927222248],
    (2, 3): [1.06031926, 0.950219225, 0.47806004, -0.520081354, 0.433172217, 0.502149027, -0.896491428, 0.929685955],
    (2, 4): [
        1.1631031,
        1.01374151,
        -0.310731076,
        0.439608882,
        -0.495565864,
        0.27157849,
        -0.0924457508,
        -0.545413816,
        -0.804625101,
        0.826525686,
    ],
    (3, 1): [1.37657522, 1.09347555, 0.68231607, 0.947085401, -1.08014076, 0.488084484],
    (3, 2): [
        1.37180119,
        1.05852036,
        0.588796378,
        -0.0663205404,
        0.300466446,
        0.617144324,
        0.78532532,
        -0.899426978,
        -0.45147769,
    ],
    (4, 1): [1.2847827, 1.1339953, 0.911722797, 0.601804498, 0.910166869, -0.982628213, -0.266429482, 0.453091539],
}

MAX_INDEX_BITS = 14  # 2^14 branches for each channel
UNREACHABLE = 1e9
POOL, OVER_RELAXATION = 12, 1.6
LENGTHS = (8, 16, 32, 64, 128)
MEASURED_SETS, MEASURED_CHANNELS = 8, 1 << 17


# The array functions that numpy and PyTorch have in common.


class Backend:
    """Where the encoder's arrays live: numpy, or PyTorch on a device."""

    def __init__(self, device):
        self.device = device
        if device == "numpy":
            self.xp = np
        else:
            import torch

            self.xp = torch

    def array(self, values):
        """A float32 or int64 array from a numpy array."""
        values = values.astype(np.float32 if values.dtype.kind == "f" else np.int64)
        return values if self.xp is np else self.xp.from_numpy(values).to(self.device)

    def numpy(self, values):
        return values if self.xp is np else values.cpu().numpy()

    def lowest(self, values):
        """The minimum over the first axis."""
        return values.min(0) if self.xp is np else values.amin(0)


class Rows:
    """Gaussian rows with root mean square 1. `x`: [channels, rows]; `lifted`: [channels, 2, rows], each x above a 1."""

    def __init__(self, backend, x):
        self.host, (self.channels, self.rows) = x, x.shape
        self.x = backend.array(x)
        self.lifted = backend.array(np.stack([x, np.ones_like(x)], 1))

    @staticmethod
    def random(backend, channels, rows, seed):
        x = np.random.default_rng(seed).standard_normal((channels, rows))
        return Rows(backend, x / np.sqrt((x * x).mean(0)))


# The code: encoding, and fitting theta to codes.


class Trellis:
    """One shape of trellis code. The number of a branch has all codes, c_j in the lowest digits; the number of a state
    has the codes that the next channel sees.

    B = 2^bits codes, S = B^memory states, W = S * B branches, K = bits * (memory + 1) coefficients.
    """

    def __init__(self, bits, memory, backend):
        self.bits, self.memory, self.backend = bits, memory, backend
        self.codes, self.states = 1 << bits, 1 << bits * memory
        self.size = bits * (memory + 1)
        index = np.arange(self.codes * self.states)
        self.signs = (index[:, None] >> np.arange(self.size) & 1) - 0.5  # [W, K]
        self.older = backend.array(np.arange(self.codes))[:, None]  # [B, 1]: the code that leaves the state

    def tables(self, theta):
        """[memory + 1, W, 2]: -2y and y^2 of each branch, so that the cost of a branch is (-2y) x + y^2 = (x - y)^2 -
        x^2.

        Table p is for channel p, which sees p earlier codes; the last table is for all channels from `memory` on.
        """
        tables = []
        for seen in range(self.memory + 1):
            present = np.arange(self.size) < (seen + 1) * self.bits
            y = self.signs @ (theta * present)
            tables.append(np.stack([-2 * y, y * y], 1))
        return self.backend.array(np.stack(tables))

    def forward(self, rows, tables, start):
        """The least cost of each state before each channel and after the last channel: channels + 1 arrays [S, rows].

        start: [S, rows], the costs before the first channel.
        """
        costs = [start]
        for p in range(rows.channels):
            branch = (tables[min(p, self.memory)] @ rows.lifted[p]).reshape(self.codes, -1, self.codes, rows.rows)
            branch += costs[p].reshape(self.codes, -1, 1, rows.rows)
            costs.append(self.backend.lowest(branch).reshape(self.states, rows.rows))
        return costs

    def backward(self, rows, tables, costs, state):
        """Follows the best path back from the final `state` [rows]: codes [channels, rows]."""
        lanes = self.backend.array(np.arange(rows.rows))
        codes = [None] * rows.channels
        for p in reversed(range(rows.channels)):
            codes[p] = state % self.codes
            before = state // self.codes + self.older * (self.states // self.codes)  # [B, rows]
            branch = tables[min(p, self.memory)][state + self.older * self.states]  # [B, rows, 2]
            total = costs[p][before, lanes] + branch[..., 0] * rows.x[p] + branch[..., 1]
            state = before[total.argmin(0), lanes]
        return self.backend.xp.stack(codes)

    def first_state(self, rows):
        """Costs before the first channel: only state 0 exists. The tables of the first channels leave out the codes of
        state 0."""
        start = np.full((self.states, rows.rows), UNREACHABLE)
        start[0] = 0
        return self.backend.array(start)

    def encode(self, rows, theta):
        """The codes [channels, rows] of least error, and the error."""
        tables = self.tables(theta)
        costs = self.forward(rows, tables, self.first_state(rows))
        codes = self.backward(rows, tables, costs, costs[-1].argmin(0))
        return codes, self.error(costs[-1], rows)

    def error(self, final, rows):
        lowest = self.backend.numpy(self.backend.lowest(final)).astype(np.float64)
        return (lowest.sum() + (rows.host**2).sum()) / rows.host.size

    def measure(self, rows, theta):
        """The error alone, without codes."""
        return self.error(self.forward(rows, self.tables(theta), self.first_state(rows))[-1], rows)

    def measure_circular(self, rows, theta):
        """The error of tail-biting codes, by two passes (see --help); channels 0 to memory - 1 see the last codes of
        the row."""
        tables = [self.tables(theta)[-1]] * (self.memory + 1)
        half = rows.channels // 2
        turned = Rows(self.backend, np.roll(rows.host, half, 0))  # channel `half` of it is first
        costs = self.forward(turned, tables, self.backend.array(np.zeros((self.states, rows.rows))))
        codes = self.backward(turned, tables, costs, costs[-1].argmin(0))
        codes, lanes = self.backend.numpy(codes), np.arange(rows.rows)
        state = sum(codes[(half - 1 - age) % rows.channels] * self.codes**age for age in range(self.memory))
        start = np.full((self.states, rows.rows), UNREACHABLE)
        start[state, lanes] = 0
        final = self.forward(rows, tables, self.backend.array(start))[-1]
        return self.error(final[self.backend.array(state), self.backend.array(lanes)][None], rows)

    def fit(self, rows, codes):
        """The theta [K] of least squared error for given codes."""
        bits = (codes[..., None] >> self.backend.array(np.arange(self.bits)) & 1) - 0.5  # [channels, rows, bits]
        design = self.backend.array(np.zeros((rows.channels, rows.rows, self.size)))
        for age in range(self.memory + 1):
            design[age:, :, age * self.bits : (age + 1) * self.bits] = bits[: rows.channels - age]
        design = design.reshape(-1, self.size)
        gram = self.backend.numpy(design.T @ design).astype(np.float64)
        right = self.backend.numpy(design.T @ rows.x.reshape(-1)).astype(np.float64)
        return np.linalg.solve(gram + 1e-6 * rows.host.size * np.eye(self.size), right)


# The search.


def fitted(trellis, rows, theta, rounds, tolerance, give_up=math.inf):
    """Alternates encoding and fitting; returns the least (error, theta). Stops when gains are small, or when eight more
    such gains would not reach `give_up`."""
    best, before = (math.inf, theta), math.inf
    for done in range(rounds):
        codes, error = trellis.encode(rows, theta)
        best = min(best, (error, theta), key=lambda pair: pair[0])
        gain, before = before - error, error
        if gain < tolerance * error or (done > 1 and error - 8 * gain > give_up):
            break
        theta = theta + OVER_RELAXATION * (trellis.fit(rows, codes) - theta)
    return best


def canonical(theta, bits):
    """An equivalent theta: each bit's largest coefficient is positive, and bits are in the order of falling energy."""
    taps = theta.reshape(-1, bits).T  # [bits, memory + 1]
    taps = taps * np.sign(taps[np.arange(bits), np.abs(taps).argmax(1)])[:, None]
    return taps[np.argsort(-(taps**2).sum(1), kind="stable")].T.reshape(-1)


class Pool:
    """The best thetas that differ from each other, best first: a list of (error, theta)."""

    def __init__(self, bits):
        self.bits, self.members = bits, []

    def add(self, error, theta):
        theta = canonical(theta, self.bits)
        near = [i for i, (_, other) in enumerate(self.members) if ((theta - other) ** 2).sum() < 0.02]
        if near and self.members[near[0]][0] <= error:
            return
        self.members = [pair for i, pair in enumerate(self.members) if i not in near] + [(error, theta)]
        self.members = sorted(self.members, key=lambda pair: pair[0])[:POOL]

    @property
    def best(self):
        return self.members[0][0] if self.members else math.inf

    @property
    def worst(self):
        """The error that a new theta must beat."""
        return self.members[-1][0] if len(self.members) == POOL else math.inf


def disturbed(theta, bits, rng):
    """A theta near `theta`: small changes everywhere or at few places, exchanges, and shifts and reversals in time."""
    taps, scale = theta.reshape(-1, bits).copy(), 0.03 * 20 ** rng.random()
    lag, bit = rng.integers(taps.shape[0]), rng.integers(bits)
    kind = rng.choice(7, p=[0.35, 0.25, 0.1, 0.08, 0.08, 0.07, 0.07])
    if kind == 0:
        taps += scale * rng.standard_normal(taps.shape)
    elif kind == 1:
        taps[lag, bit] += 3 * scale * rng.standard_normal()
    elif kind == 2:
        taps[lag, bit] *= -1
    elif kind == 3:
        other = rng.integers(taps.shape[0]), rng.integers(bits)
        taps[lag, bit], taps[other] = taps[other], taps[lag, bit]
    elif kind == 4:
        taps[:, bit] = np.roll(taps[:, bit], rng.choice([-1, 1]))
    elif kind == 5:
        taps = taps[::-1].copy()
    else:
        taps[:, bit] += 3 * scale * rng.standard_normal(taps.shape[0])
    return taps.reshape(-1)


def random_theta(size, rng):
    """Random coefficients that give values of variance 1."""
    theta = rng.standard_normal(size)
    return theta * 2 / np.sqrt((theta**2).sum())


def given_thetas(args):
    """The thetas of --start and, unless --from-scratch, the known thetas of this width. A theta with shorter memory
    gets zeros at its end."""
    thetas = [] if args.start is None else [args.start]
    if not args.from_scratch:
        thetas += [theta for (bits, memory), theta in KNOWN.items() if bits == args.bits and memory <= args.memory]
    size = args.bits * (args.memory + 1)
    return [np.pad(np.asarray(theta, float), (0, size - len(theta))) for theta in thetas]


class Search:
    """The search: random starts, then disturbances of the pool, then the last fits. Reports on stderr."""

    def __init__(self, trellis, args, log):
        self.trellis, self.args, self.log = trellis, args, log
        self.rng, self.pool, self.began = np.random.default_rng(args.seed), Pool(args.bits), time.monotonic()
        self.few, self.rows, self.many, self.others = (
            Rows.random(trellis.backend, args.row_channels, count, [args.seed, k])
            for k, count in enumerate([max(args.rows // 8, 1), args.rows, 4 * args.rows, 4 * args.rows])
        )

    def elapsed(self):
        """Elapsed time as a fraction of --seconds."""
        return (time.monotonic() - self.began) / self.args.seconds

    def start(self):
        """Fills the pool: first given thetas, then random thetas until --starts are done or 40% of the time is over."""
        given, started = given_thetas(self.args), 0
        for theta in given:
            self.pool.add(*fitted(self.trellis, self.rows, theta, 30, 1e-4))
        while (started < self.args.starts and self.elapsed() < 0.4) or not self.pool.members:
            theta, started = random_theta(self.trellis.size, self.rng), started + 1
            error, theta = fitted(self.trellis, self.few, theta, 25, 1e-3, 1.02 * self.pool.worst)
            if error < 1.02 * self.pool.worst:
                self.pool.add(*fitted(self.trellis, self.rows, theta, 20, 3e-4))
        self.log(f"{len(given)} given and {started} random starts: {self.pool.best:.6f}")

    def improve(self):
        """Disturbs thetas of the pool, better ones more often, until 85% of the time is over."""
        tried = 0
        while self.elapsed() < 0.85:
            members, tried, best = self.pool.members, tried + 1, self.pool.best
            place = min(int(self.rng.exponential(3)), len(members) - 1)
            theta = disturbed(members[place][1], self.args.bits, self.rng)
            give_up = members[min(place + 4, len(members) - 1)][0]
            self.pool.add(*fitted(self.trellis, self.rows, theta, 14, 3e-4, give_up))
            if self.pool.best < best * (1 - 1e-4):
                self.log(f"{time.monotonic() - self.began:.0f} s: {self.pool.best:.6f} after {tried} disturbances")
        self.log(f"{tried} disturbances: {self.pool.best:.6f}")

    def finish(self):
        """Fits the best three thetas on many rows; returns the best of them on other rows."""
        thetas = [fitted(self.trellis, self.many, theta, 12, 2e-5)[1] for _, theta in self.pool.members[:3]]
        return min(thetas, key=lambda theta: self.trellis.measure(self.others, theta))

    def run(self):
        self.start()
        self.improve()
        return self.finish()


# Reports


def lloyd_max(bits):
    """The levels, ascending, of the scalar quantizer with least error for a unit Gaussian."""
    levels = np.linspace(-2, 2, 1 << bits)
    for _ in range(2000):
        edges = [-math.inf, *(levels[1:] + levels[:-1]) / 2, math.inf]
        mass = np.diff([math.erf(e / math.sqrt(2)) / 2 for e in edges])
        density = np.diff([math.exp(-e * e / 2) / math.sqrt(2 * math.pi) for e in edges])
        levels = -density / mass
    return levels


def scalar_error(rows, levels):
    nearest = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, rows.host)]
    return ((rows.host - nearest) ** 2).mean()


@dataclass
class Figure:
    """A mean over independent sets of rows, and its standard error."""

    mean: float
    deviation: float

    @staticmethod
    def of(values):
        return Figure(float(np.mean(values)), float(np.std(values, ddof=1) / math.sqrt(len(values))))

    def __str__(self):
        return f"{self.mean:.6f} +- {self.deviation:.6f}"


def measured(trellis, theta, channels, args):
    """Errors by name for rows of `channels`, on rows that no search has seen."""
    levels, errors = lloyd_max(args.bits), {"trellis": [], "circular": [], "lloyd_max": []}
    count = max(MEASURED_CHANNELS // channels, 1)
    for k in range(MEASURED_SETS):
        rows = Rows.random(trellis.backend, channels, count, [args.seed, 1000 + k])
        errors["trellis"].append(trellis.measure(rows, theta))
        errors["lloyd_max"].append(scalar_error(rows, levels))
        if args.circular and channels >= trellis.memory:
            errors["circular"].append(trellis.measure_circular(rows, theta))
    return {name: Figure.of(values) for name, values in errors.items() if values}


def report(args, theta, figures):
    """Prints the result as text, or with --json as one document."""
    if args.json:
        lengths = [
            {"channels": n, **{name: {"mse": f.mean, "standard_error": f.deviation} for name, f in by_name.items()}}
            for n, by_name in figures.items()
        ]
        print(json.dumps({"bits": args.bits, "memory": args.memory, "theta": theta.tolist(), "lengths": lengths}))
        return
    print(f"theta {' '.join(f'{value:.9g}' for value in theta)}")
    for channels, by_name in figures.items():
        print(
            f"rows of {channels:4}: "
            + ", ".join(f"{name.replace('_', '-')} {figure}" for name, figure in by_name.items())
        )


# The command line.


def numbers(text):
    """Coefficients separated by blanks or commas, or the word `known`, which check() looks up."""
    if text.strip() == "known":
        return "known"
    try:
        values = [float(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers, found '{text}'") from None
    if not values or not np.isfinite(values).all():
        raise argparse.ArgumentTypeError(f"expected finite numbers, found '{text}'")
    return values


def positive(kind):
    def parse(text):
        value = kind(text)
        if not 0 < value < math.inf:
            raise ValueError
        return value

    parse.__name__ = f"positive {kind.__name__}"
    return parse


def parse_arguments(argv=None):
    parser = Parser(PROGRAM, __doc__, EPILOG)
    whole, real = positive(int), positive(float)
    parser.add_argument("--bits", type=whole, default=2, metavar="N", help="bits of a code [2]")
    parser.add_argument(
        "--memory", type=whole, default=1, metavar="N", help="earlier codes that a value depends on [1]"
    )
    parser.add_argument(
        "--seconds",
        type=real,
        default=120,
        metavar="X",
        help="time of the search; the last fits and the measurement come on top [120]",
    )
    parser.add_argument(
        "--starts", type=whole, default=100000, metavar="N", help="at most so many random starts [100000]"
    )
    parser.add_argument("--row-channels", type=whole, default=128, metavar="N", help="channels of a row [128]")
    parser.add_argument(
        "--rows",
        type=whole,
        default=256,
        metavar="N",
        help="rows to search on; starts use an eighth, the last fits four times as many [256]",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of rows and starts [0]")
    parser.add_argument(
        "--device",
        choices=["numpy", "cpu", "cuda"],
        default="numpy",
        help="numpy, or PyTorch's cpu or cuda; cuda is worth it with many rows or states [numpy]",
    )
    parser.add_argument("--start", type=numbers, metavar="NUMBERS", help="a theta to start from; may have less memory")
    parser.add_argument("--from-scratch", action="store_true", help="do not start from the thetas this program knows")
    parser.add_argument("--evaluate", type=numbers, metavar="NUMBERS", help="measure this theta, or `known`; no search")
    parser.add_argument("--circular", action="store_true", help="measure tail-biting too")
    parser.add_argument("--json", action="store_true", help="one JSON document; progress stays on stderr")
    args = parser.parse_args(argv)
    check(args)
    return args


def check(args):
    """Replaces `known` by coefficients and refuses combinations that do not fit."""
    size, known = args.bits * (args.memory + 1), KNOWN.get((args.bits, args.memory))
    if size > MAX_INDEX_BITS:
        raise usage(f"--bits * (--memory + 1) is {size}, at most {MAX_INDEX_BITS} is feasible")
    if args.seed < 0:
        raise usage(f"--seed {args.seed}: expected 0 or more")
    if args.row_channels <= args.memory:
        raise usage(f"--row-channels {args.row_channels} must be more than --memory {args.memory}")
    for flag in ("evaluate", "start"):
        if getattr(args, flag) == "known":
            if known is None:
                raise usage(f"--{flag} known: none is known for {args.bits} bits, memory {args.memory}")
            setattr(args, flag, known)
    if args.evaluate is not None and len(args.evaluate) != size:
        raise usage(f"--evaluate: expected {size} numbers, found {len(args.evaluate)}")
    if args.start is not None and (len(args.start) > size or len(args.start) % args.bits):
        raise usage(f"--start: expected a multiple of {args.bits} up to {size} numbers, found {len(args.start)}")


def main():
    args = parse_arguments()
    trellis = Trellis(args.bits, args.memory, Backend(args.device))
    if args.evaluate is not None:
        theta, lengths = np.asarray(args.evaluate, float), sorted({*LENGTHS, args.row_channels})
        lengths = [channels for channels in lengths if channels > args.memory]
    else:
        theta, lengths = (
            Search(trellis, args, lambda text: print(text, file=sys.stderr, flush=True)).run(),
            [args.row_channels],
        )
    report(args, theta, {channels: measured(trellis, theta, channels, args) for channels in lengths})


if __name__ == "__main__":
    sys.exit(run_script(PROGRAM, main))
