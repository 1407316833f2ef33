"""The inputs of formats/vectors.json, chosen by hand, each with the reason why it is there.

Numbers are decimals or C hexadecimal floats, separated by spaces; derive_vectors.py rounds them to binary32 first. A
channel may be nan, -nan, snan (signaling), inf or -inf, too.
"""

LARGEST = "3.4028234663852886e38"  # the largest finite binary32
QUANTUM_16 = "0x1p-24"  # the smallest fp16 subnormal
QUANTUM_32 = "0x1p-149"  # the smallest binary32 subnormal


def affine(name, why, x, bits, zero="float", group_size=None, scale_type="fp16", clip_ratio=1.0):
    channels = x.split()
    return {
        "name": name,
        "why": why,
        "coder": "affine",
        "scale_rule": "minmax",
        "zero": zero,
        "bits": bits,
        "group_size": group_size or len(channels),
        "scale_type": scale_type,
        "clip_ratio": clip_ratio,
        "x": channels,
    }


def symmetric(name, why, x, bits, rule="norm", group_size=None, scale_type="fp16"):
    channels = x.split()
    return {
        "name": name,
        "why": why,
        "coder": "symmetric",
        "scale_rule": rule,
        "bits": bits,
        "group_size": group_size or len(channels),
        "scale_type": scale_type,
        "x": channels,
    }


def codebook(name, why, x, bits, entries, rule="norm", group_size=None, scale_type="fp16"):
    return {
        **symmetric(name, why, x, bits, rule, group_size, scale_type),
        "coder": "codebook",
        "codebook": {bits: entries.split()},
    }


def theta(bits, memory, taps):
    return {"bits": bits, "memory": memory, "theta": taps.split()}


def trellis(name, why, x, bits, memory, taps, rule="norm", group_size=None, scale_type="fp16"):
    return {
        **symmetric(name, why, x, bits, rule, group_size, scale_type),
        "coder": "trellis",
        "trellis": [theta(bits, memory, taps)],
    }


def mixed(name, why, x, widths, row_bytes, rule="norm", scale_type="fp16", coder="symmetric", **tables):
    """`widths` is text: "4*3 2" means 4 4 4 2. `tables` are the tables of the coder: codebook or trellis."""
    runs = [(int(w), int(n or 1)) for w, _, n in (word.partition("*") for word in widths.split())]
    return {
        "name": name,
        "why": why,
        "coder": coder,
        "scale_rule": rule,
        "scale_type": scale_type,
        "channel_bits": [w for w, n in runs for _ in range(n)],
        "row_bytes": row_bytes,
        **tables,
        "x": x.split(),
    }


def one_scale(gains, *arguments, **more):
    """A mixed row with one scale; the arguments are those of mixed(). `gains` has one number for each segment of width
    1..8, widest first."""
    case = mixed(*arguments, **more)
    widths = sorted(set(case["channel_bits"]) - {0}, reverse=True)
    of_width = dict(zip(widths, gains.split(), strict=True))
    return {**case, "scale_scope": "row", "gains": [of_width.get(width, "1") for width in range(1, 9)]}


def residual(case, centroids):
    return {**case, "centroids": [centroid.split() for centroid in centroids]}


def exact(name, why, x):
    return {"name": name, "why": why, "coder": "exact", "bits": 16, "x": x.split()}


def lattice(size: int, salt: int) -> str:
    """`size` sixteenths between -50/16 and 50/16 that look random: exact in binary32, easy to compute by hand."""
    return " ".join(str(((37 * j + 11 * salt) % 101 - 50) / 16) for j in range(size))


def spread(size: int, salt: int) -> str:
    """Thousandths of both signs, not exact in binary32; a few channels are ten times larger."""
    return " ".join(
        f"{((997 * j + 131 * salt) % 4001 - 2000) * (10 if j % 29 == 7 else 1) / 1000}" for j in range(size)
    )


def every_width() -> list[dict]:
    """Each coder and rule at each width on 12 channels (not a power of two); scale types and group sizes alternate."""
    cases = []
    for bits in range(1, 9):
        for turn, rule in enumerate(("float", "integer", "absmax", "least_squares", "norm")):
            scale_type = ("fp16", "bf16", "fp32")[(bits + turn) % 3]
            group_size = (12, 6, 4)[(bits + 2 * turn) % 3]
            name = f"width {bits} {rule} {scale_type} group {group_size}"
            why = "every width with every rule"
            if rule in ("float", "integer"):
                cases.append(affine(name, why, lattice(12, bits), bits, rule, group_size, scale_type))
            else:
                cases.append(symmetric(name, why, lattice(12, bits + turn), bits, rule, group_size, scale_type))
    return cases


def bell(size: int, salt: int) -> str:
    """Hundredths, few of them large: each is the sum of four numbers between -0.5 and 0.5."""
    return " ".join(str(sum((step * j + 17 * salt) % 101 - 50 for step in (37, 53, 29, 71)) / 100) for j in range(size))


def drawn(size: int, seed: int) -> str:
    """As `bell`, but with a small random number generator, so that no two seeds give the same row."""
    state, numbers = seed, []
    for _ in range(size):
        total = 0
        for _ in range(4):
            state = (1103515245 * state + 12345) % 2**31
            total += (state >> 16) % 101 - 50
        numbers.append(str(total / 100))
    return " ".join(numbers)


def skewed(bits: int) -> str:
    """A codebook that is denser in the middle and not symmetric: no entry is the negative of another."""
    places = [(2 * i + 1) / 2**bits - 0.97 for i in range(2**bits)]
    return " ".join(f"{1.55 * u + 1.2 * u * u * u:.4f}" for u in places)


TAPS = {
    (1, 1): "1.31 0.52",
    (1, 2): "1.23 0.61 -0.34",
    (1, 3): "1.17 0.66 -0.41 0.23",
    (1, 6): "1.14 0.67 -0.43 0.27 0.18 -0.11 0.08",
    (2, 1): "0.83 1.62 0.29 -0.17",
    (2, 2): "0.79 1.57 0.34 -0.21 0.13 0.08",
    (2, 3): "0.77 1.51 0.37 -0.19 0.16 0.11 -0.07 0.05",
    (3, 1): "0.45 0.91 1.78 0.19 -0.12 0.07",
    (3, 2): "0.43 0.88 1.74 0.21 -0.14 0.09 0.06 -0.11 0.04",
    (4, 1): "0.24 0.49 0.97 1.93 0.11 -0.08 0.05 -0.03",
    (4, 2): "0.23 0.47 0.95 1.91 0.12 -0.09 0.06 -0.04 0.03 0.07 -0.05 0.02",
}


def long_rows() -> list[dict]:
    return [
        affine(
            "oscar 2 bit 64 of 128 clipped", "a row as OSCAR codes keys", spread(128, 1), 2, "float", 64, "bf16", 0.96
        ),
        affine("saw 4 bit 128 integer", "a row as SAW-INT4's paper codes keys", spread(128, 2), 4, "integer", 128),
        affine("3 bit 32 of 96", "codes straddle bytes, three groups", spread(96, 3), 3, "float", 32, "fp16", 0.92),
        affine("5 bit 96 of 96", "codes straddle bytes, one group of 96", spread(96, 4), 5, "float", 96, "fp32"),
        symmetric("norm 2 bit 128", "the row of 34 bytes", spread(128, 5), 2),
        symmetric("norm 7 bit 32 of 96", "codes straddle bytes, three groups", spread(96, 6), 7, "norm", 32, "bf16"),
        symmetric(
            "least squares 3 bit 96", "the tree is padded from 96 to 128", spread(96, 7), 3, "least_squares", 96, "fp32"
        ),
        symmetric("absmax 6 bit 24 of 96", "a byte holds parts of two codes", spread(96, 8), 6, "absmax", 24),
    ]


def rounding() -> list[dict]:
    return [
        affine("ties go up", "x.5 becomes x + 1: not to the even code, not toward zero", "0 0.5 1 1.5 2 2.5 3 7", 3),
        affine(
            "ties go up, integer zero",
            "floor, not truncation, also below zero",
            "-3.5 -2.5 -1.5 -0.5 0.5 1.5 2.5 3.5",
            3,
            "integer",
        ),
        affine(
            "clamp at the top",
            "m is rounded down by almost s, so the quotient of the largest channel passes n",
            "1000.24 1000.5 1000.75 1001",
            2,
        ),
        affine("clamp at the bottom", "m is rounded up above the smallest channel", "1000.26 1000.5 1000.75 1001", 2),
        affine("stored scale", "the unrounded scale gives 12, the stored one 11", "-3.57 3.38 7.21 -9.22", 4),
        affine("stored minimum", "the unrounded minimum gives 8, the stored one 7", "-4.77 -7.81 -4.03 -1.73", 4),
        affine(
            "stored scale, integer zero",
            "the unrounded scale gives code 1, the stored one 0",
            "-2.63 5.01 6.81 -6.81",
            3,
            "integer",
        ),
        affine(
            "division",
            "a reciprocal and a product give 7, the quotient 8",
            "-4.77 -7.81 -4.03 -1.73",
            4,
            scale_type="fp32",
        ),
        affine(
            "no fused multiply-add", "c * s is rounded before m is added", "-0.98 -8.16 -3.3 2", 4, scale_type="fp32"
        ),
        affine(
            "scale tie, fp16 down",
            "s = 1 + 2^-11 lies between two fp16 numbers, the even one is below",
            "0 0x1.002p0",
            1,
        ),
        affine("scale tie, fp16 up", "s = 1 + 3 * 2^-11: the even one is above", "0 0x1.006p0", 1),
        affine("scale tie, bf16 down", "s = 1 + 2^-8", "0 0x1.01p0", 1, scale_type="bf16"),
        affine("scale tie, bf16 up", "s = 1 + 3 * 2^-8", "0 0x1.03p0", 1, scale_type="bf16"),
        symmetric(
            "floor on both sides",
            "quotients that are integers: c counts from -infinity, zero goes up",
            "-1.75 -1.5 -1 -0.5 0 0.5 1 1.5 -0 1.75",
            3,
            "absmax",
        ),
        symmetric(
            "division, symmetric",
            "a reciprocal and a product give one code less",
            "0.867 2.1675 -0.289 0.4335",
            4,
            "absmax",
            scale_type="fp32",
        ),
        symmetric(
            "both ends clamp", "the Gaussian step leaves outliers outside", "9 -9 0.5 -0.25 0.125 1 -1 0.0625", 2
        ),
        symmetric(
            "rounded first step",
            "codes come from R(d), not from d",
            "3.77 -4.86 3.22 -0.24 -5.04 3.36",
            4,
            scale_type="bf16",
        ),
        symmetric(
            "not coded again",
            "codes come from the first step, not from the stored scale",
            "-4.05 -2.98 1.66 -8.51 0.4 -2.47",
            4,
            scale_type="bf16",
        ),
    ]


def sums() -> list[dict]:
    return [
        symmetric(
            "tree of 8",
            "left to right, halves (y0 + y4) and fused sums of squares give other scales",
            "-6.992 -9.981 5.838 -1.597 -2.965 2.628 1.28 8.698",
            4,
            scale_type="fp32",
        ),
        symmetric(
            "tree of 6",
            "zeros pad at the end: 6 is not split in 3 and 3",
            "9.726 -8.235 0.303 3.673 -9.832 -1.392",
            4,
            scale_type="fp32",
        ),
        symmetric(
            "tree of 12",
            "padded to 16; every other order gives another scale",
            "-2.989 -9.632 -6.798 -8.925 -8.044 -0.225 -5.308 -0.156 2.394 2.411 -9.538 -6.204",
            4,
            scale_type="fp32",
        ),
        symmetric(
            "small squares in order",
            "2^24 + 1 + 1 + ...: left to right the ones all vanish",
            "4096 1 1 1 1 1 1 1",
            8,
            "norm",
            scale_type="fp32",
        ),
        symmetric(
            "least squares tree",
            "the rounded products are summed in the same tree",
            "7.783 -3.271 -2.24 -4.434 5.671 2.486 4.13 -9.194 -1.968 2.907 8.518 -8.281",
            4,
            "least_squares",
            scale_type="fp32",
        ),
    ]


def degenerate() -> list[dict]:
    return [
        affine("constant group", "s = 0: codes 0, decoded to the stored minimum", "1.2345 1.2345 1.2345 1.2345", 4),
        affine(
            "constant group, integer zero", "s = 0: z = 0, decoded to zero", "1.2345 1.2345 1.2345 1.2345", 4, "integer"
        ),
        affine("range below fp16", "s rounds to 0, the minimum stays", "0.5 0.50000006 0.5 0.5", 4),
        affine(
            "zeros of both signs",
            "all-zero groups; a zero minimum is stored as +0",
            "-0 0 0 -0 0 -0 1 2 -0 -0 -0 -0",
            2,
            "float",
            4,
        ),
        affine(
            "zeros of both signs, integer zero",
            "a zero range is +0, whichever zeros hi and lo are",
            "0 -0 0 -0 -0 0 -0 0",
            2,
            "integer",
            4,
        ),
        affine("minimum rounds to zero", "R(-1e-9) would be -0; stored is +0", "-1e-9 1 2 3", 2),
        affine("zeros, integer zero", "all-zero group beside another", "0 0 0 0 -1 1 2 3", 2, "integer", 4),
        symmetric(
            "all-zero group, norm",
            "E = 0: codes 2^(b-1), scale 0; the other group is not touched",
            "0 -0 0 0 1 -2 3 -4",
            3,
            "norm",
            4,
        ),
        symmetric("all-zero group, least squares", "as for norm", "0 -0 0 0 1 -2 3 -4", 3, "least_squares", 4),
        symmetric("all-zero group, absmax", "as for norm", "0 -0 0 0 1 -2 3 -4", 3, "absmax", 4),
        symmetric("groups of one", "g = 1, D = 3", "1 -2.5 0", 2, "norm", 1, "fp32"),
        affine("one channel", "D = 1, three bits in one byte", "-7.25", 3),
        affine("groups of one, affine", "each group is constant", "1 -2 3", 5, "float", 1, "bf16"),
    ]


def range_ends() -> list[dict]:
    return [
        affine("subnormal fp16 scale", "s = 5 * 2^-24", f"0 0x1.4p-22 {QUANTUM_16} 0x1.ep-21", 2),
        affine("subnormal fp16 tie", "s = 2.5 * 2^-24 rounds to the even 2 * 2^-24", "0 0x1.4p-23", 1),
        affine(
            "subnormal binary32",
            "s, x - m and x / s live below the normal numbers; nothing is flushed",
            f"-0x1.8p-147 0 {QUANTUM_32} 0x1.8p-147",
            2,
            scale_type="fp32",
        ),
        affine(
            "subnormal bf16",
            "bf16 has the exponents of binary32, its subnormals too",
            "0 0x1p-133 0x1p-132 0x1.8p-132",
            2,
            scale_type="bf16",
        ),
        affine("saturating fp16", "scale and minimum stop at 65504", "-100000 0 40000 100000", 1),
        affine("saturating z", "-lo / s = -240000 is stored as -65504", "1000 1000.0625 1000.03125 1000", 4, "integer"),
        affine("z in bf16", "z = -1001 is stored as -1000", "1001 1002 1003 1004", 2, "integer", scale_type="bf16"),
        affine("z far below zero", "all channels negative, z > n", "-21 -20 -19 -18.4", 3, "integer"),
        affine(
            "range overflows, fp32",
            "hi - lo becomes the largest binary32; x - m overflows, the code is n",
            f"-3e38 3e38 0 {LARGEST}",
            2,
            scale_type="fp32",
        ),
        affine(
            "range overflows, bf16",
            "s rounds beyond the largest bf16 and stays there",
            f"-{LARGEST} {LARGEST}",
            1,
            scale_type="bf16",
        ),
        affine(
            "range overflows, integer zero", "the same with z", "-3e38 3e38 0 1e38", 3, "integer", scale_type="fp32"
        ),
        symmetric(
            "absmax subnormal",
            "s = R(2 * 0.75 * 2^-24) = 2 * 2^-24, a tie to even",
            f"0x1.8p-25 -0x1.8p-25 {QUANTUM_16} 0",
            1,
            "absmax",
        ),
        symmetric("absmax below fp16", "s rounds to 0: codes 2^(b-1)", "1e-7 -1e-7 0 5e-8", 8, "absmax"),
        symmetric("absmax saturating", "s = 65504", "1e6 -1e6 1e4 -1e4", 1, "absmax"),
        symmetric(
            "absmax overflows",
            "2 max|x| is infinite and saturates in R",
            f"{LARGEST} -1e38 1e37 -{LARGEST}",
            2,
            "absmax",
            scale_type="fp32",
        ),
        symmetric(
            "first step below fp16",
            "d rounds to 0: the stored scale is 0 too, nothing is refitted",
            "9e-7 -9e-7 9e-7 -9e-7",
            8,
        ),
        symmetric(
            "refit below fp16",
            "d = 2^-24 gives codes, the refitted scale rounds to 0; decoded zeros keep their signs",
            "-1e-7 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0",
            1,
            "least_squares",
        ),
        symmetric(
            "energy underflows",
            "x x = 0 for every channel, so E = 0 though x is not",
            "1e-30 -1e-30 2e-30 0",
            4,
            scale_type="fp32",
        ),
        symmetric("energy subnormal", "E is subnormal and kept", "1e-21 -2e-21 3e-22 -1e-22", 3, scale_type="fp32"),
        symmetric(
            "energy overflows",
            "E infinite: d and the stored scale saturate",
            "1e20 -1e20 3e19 1e18",
            3,
            scale_type="fp32",
        ),
        symmetric("energy overflows, bf16", "the same in bf16", "1e20 -1e20 3e19 1e18", 3, scale_type="bf16"),
        symmetric(
            "four times the energy overflows", "E is finite, 4 E is not", "1e19 -1e19 1e18 0", 2, scale_type="fp32"
        ),
        symmetric(
            "saturating first step",
            "d stops at 65504, codes clamp at both ends",
            "1e7 -1e7 3e6 -5e5",
            3,
            "least_squares",
        ),
    ]


def clipping() -> list[dict]:
    outliers = "1 -2 3 -100 4 5 -6 7 0.5 0.25 -0.125 8 9 -10 50 11 " + lattice(16, 9)
    few_zeros = "0 0 0 5 0 -7 0 0 0 2 0 0"
    return [
        affine(
            "row-wide threshold",
            "rho = 0.96 of 32: index 30, so -100 becomes -50, which stands in another group",
            outliers,
            2,
            "float",
            8,
            "fp16",
            0.96,
        ),
        affine(
            "row-wide threshold, integer zero", "the same with integer zero", outliers, 2, "integer", 8, "fp16", 0.96
        ),
        affine("threshold in one group", "rho = 0.92 of 32: index 29", outliers, 3, "float", 32, "bf16", 0.92),
        affine(
            "product in binary64",
            "0.96 * 25 is 24 in binary64, just below 24 without that rounding: nothing is clipped",
            lattice(24, 5) + " 40",
            4,
            "float",
            5,
            "fp16",
            0.96,
        ),
        affine(
            "the last index",
            "0.999 of 12 is index 11: nothing is clipped",
            lattice(12, 3),
            3,
            "float",
            12,
            "fp16",
            0.999,
        ),
        affine(
            "the first index",
            "rho = 0.05 of 12: index 0, all channels become +-tau",
            lattice(12, 3),
            3,
            "float",
            12,
            "fp16",
            0.05,
        ),
        affine("threshold zero", "most channels are zero, so all become zero", few_zeros, 2, "float", 6, "fp16", 0.5),
        affine("equal magnitudes", "ties in the sort do not matter", "1 -1 1 -1 2 -2 2 -2", 2, "float", 4, "fp32", 0.5),
    ]


def codebook_widths() -> list[dict]:
    """Each width once; rules, scale types and group sizes alternate."""
    cases = []
    for bits in range(1, 9):
        rule = ("norm", "rms", "least_squares")[bits % 3]
        scale_type = ("fp16", "bf16", "fp32")[bits // 3]
        group_size = (12, 6, 4)[(bits + bits // 3) % 3]
        cases.append(
            codebook(
                f"codebook {bits} {rule} {scale_type} group {group_size}",
                "every width; a codebook that is not symmetric shows mistaken signs and reversed codes",
                lattice(12, bits + 2),
                bits,
                skewed(bits),
                rule,
                group_size,
                scale_type,
            )
        )
    return cases


def codebook_edges() -> list[dict]:
    return [
        codebook(
            "on the thresholds",
            "d = 1 and the thresholds are -1, 0 and 1: a value on one takes the upper entry, -0 too",
            "1 -1 1 -1 2 0 -0 0",
            2,
            "-1.5 -0.5 0.5 1.5",
            "rms",
            scale_type="fp32",
        ),
        codebook(
            "threshold in binary32",
            "d = 1; 0.5 + 2^-24 and 1 have the threshold 0.75, though 0.5 + 2^-24 is nearer to 0.75",
            "0.75 -1.2 1 -1",
            2,
            "-0.9 0x1.000002p-1 1 1.7",
            "rms",
        ),
        codebook(
            "stored d, codebook",
            "y is the quotient by the stored d; d before rounding gives another code",
            "-1.57 -1.64 2.27 -0.22 2.26 -2.17",
            4,
            skewed(4),
        ),
        codebook(
            "division, codebook",
            "a reciprocal and a product give another code",
            "-2.747 0.878 0.522 -1.886",
            8,
            skewed(8),
            "rms",
            scale_type="fp32",
        ),
        codebook(
            "sums of the norm",
            "N in another order, a quotient of two roots and d * sqrt(g / N) give other scales",
            "1.895 -2.396 -2.122 1.186 -2.729 0.443 2.46 0.205 1.084 -2.84 0.81 0.638",
            4,
            skewed(4),
            scale_type="fp32",
        ),
        codebook(
            "sums of least squares",
            "the rounded products x v and v v are summed in the tree",
            "-1.309 1.535 0.71 -1.497 2.458 2.897 1.861 2.413 -1.139 1.379 2.393 1.104",
            4,
            skewed(4),
            "least_squares",
            scale_type="fp32",
        ),
        codebook(
            "zero groups, codebook",
            "E = 0, and a d that rounds to 0: codes 2^(b-1), scale 0; 0 * C is -0 where C < 0",
            "0 -0 0 0 1e-9 -1e-9 2e-9 0 1 -2 3 -4",
            2,
            "-2 -1 -0.25 1",
            "norm",
            4,
        ),
        codebook(
            "codebook with a zero",
            "all of the first group is coded to 0, so N = 0 and s = d",
            "1 2 3 0.5 -1 -2 0.25 -0.5",
            1,
            "-1.25 0",
            "norm",
            4,
            "bf16",
        ),
        codebook(
            "norm underflows, codebook",
            "v v = 0 for every channel, so N = 0 though v is not: s = d",
            "1 2 3 0.5 -1 -2 0.25 -0.5",
            1,
            "-1.25 1e-30",
            "least_squares",
            4,
            "fp32",
        ),
        codebook(
            "negative scale",
            "least squares of a group below a codebook above zero: s keeps its sign",
            "-1 -2 -1.5 -0.5 1 2 -1.5 0.5",
            1,
            "0.5 1.5",
            "least_squares",
            4,
        ),
        codebook(
            "energy overflows, codebook",
            "d saturates, so the codes are those around zero; the scale saturates in R",
            "1e20 -1e20 3e19 1e18",
            3,
            skewed(3),
            scale_type="fp32",
        ),
        codebook(
            "products overflow both ways, codebook",
            "the largest entry of either sign meets an inf - inf: s = d",
            "3e38 -3e38 3e38 3e38",
            1,
            "1.5 2.5",
            "least_squares",
            4,
        ),
        codebook(
            "subnormal fp16 d",
            "d and the refitted scale are subnormal and kept",
            "9e-7 -1.3e-6 4e-7 -2e-7",
            3,
            skewed(3),
        ),
        codebook(
            "saturating d",
            "d stops at 65504, y passes both ends of the codebook",
            "1e6 -2e6 3e5 -4e4",
            3,
            skewed(3),
            "rms",
        ),
        codebook(
            "codebook 3 bit 64 of 128",
            "a realistic row, two groups of different scale",
            bell(128, 1),
            3,
            skewed(3),
            "norm",
            64,
        ),
    ]


def trellis_widths() -> list[dict]:
    """Every width and memory; the three rules, scale types and group sizes alternate."""
    cases = []
    for turn, ((bits, memory), taps) in enumerate(TAPS.items()):
        rule = ("norm", "least_squares", "rms")[(turn // 3 + turn) % 3]
        scale_type = ("fp16", "bf16", "fp32")[turn % 3]
        group_size = 8 if bits * memory == 8 else (24, 12, 8)[(bits + memory) % 3]
        row = lattice(8 if bits * memory == 8 else 24, 20 + turn)
        cases.append(
            trellis(
                f"trellis {bits} memory {memory} {rule} {scale_type} group {group_size}",
                "each group bites its own tail; the cheapest path, not the nearest value of each channel",
                row,
                bits,
                memory,
                taps,
                rule,
                group_size,
                scale_type,
            )
        )
    return cases


def trellis_searches() -> list[dict]:
    """Cases for the seam, the closed path and their ties."""
    return [
        trellis(
            "greedy is not cheapest",
            "the nearest value channel by channel gives another path, also from the seam's state",
            "-0.1 2.2 -1.4 1.8 0.3 -0.7 1.1 -2",
            1,
            2,
            "1.2 1 -0.8",
        ),
        trellis(
            "the tail",
            "the first two values are mostly made of the last two codes",
            "1.5 -2 0.5 1 -0.5 2 -1 0.25",
            1,
            2,
            "0.3 0.4 1.1",
            "norm",
            scale_type="fp32",
        ),
        trellis(
            "the window wraps",
            "m = 7 and g = 8: every value sees every code",
            "-0.91 0.39 2.23 1.28 2.4 -1.43 1.88 0.3",
            1,
            7,
            "0.48 0.53 -0.19 -1.37 -0.62 -1.2 0.33 -0.28",
            "least_squares",
            scale_type="fp32",
        ),
        trellis(
            "memory of eight",
            "m = g = 8: the seam's state is all the codes; the second group has its own",
            lattice(16, 41),
            1,
            8,
            "1.13 0.67 -0.44 0.28 0.17 -0.12 0.09 -0.05 0.03",
            "norm",
            8,
        ),
        trellis(
            "groups in a row",
            "the codes before the second group are its own last ones, not those of the first",
            bell(16, 7),
            2,
            2,
            TAPS[2, 2],
            "least_squares",
            8,
            "bf16",
        ),
        trellis(
            "plain run ends elsewhere",
            "a run over the group ends in another state than the seam's, and so does the seam run itself; paths that "
            "are free at either end of the group have other codes",
            "0.69 2.05 1.79 -1.64 -2.41 0.32 0.32 -1.74",
            2,
            1,
            "-1.47 -1.31 -1.44 1.1",
        ),
        trellis(
            "not the cheapest closed path",
            "another seam state has a cheaper one; the text finds this one",
            "-1.75 2.16 2.38 2.19 -1.04 2.2 1.51 0.85 1.66",
            1,
            3,
            "-1.49 -0.15 1.14 -1.11",
        ),
        trellis(
            "seam of a group below 32",
            "L = g = 20: neither 8, 16 nor g / 2, nor 32 channels around and around",
            bell(20, 36),
            1,
            3,
            "-0.9 0.8 -1 0.9",
        ),
        trellis(
            "seam of a group of 32",
            "L = 32: shorter runs find another state",
            bell(32, 54),
            1,
            4,
            "1 1 -1 0.9 1",
            "rms",
            scale_type="fp32",
        ),
        trellis(
            "seam of a group of 40",
            "L = 32: 33 and 40 find another state",
            bell(40, 54),
            1,
            4,
            "1 1 -1 1 0.8",
            "least_squares",
            scale_type="bf16",
        ),
        trellis(
            "seam of a group of 64", "L = 32: 33, 48 and 64 find another state", bell(64, 48), 1, 4, "1 -1 0.9 -1 0.9"
        ),
        trellis(
            "ties between paths",
            "the smallest oldest code stays; `<=` keeps the largest",
            "1 0 2 2 0 0 0 0",
            2,
            1,
            "0 1 1 1",
            "rms",
            scale_type="fp32",
        ),
        trellis(
            "ties are not lexicographic",
            "only the dropped code decides, not the path before it",
            "0 0.5 1 0 0 1 2 0",
            1,
            2,
            "-1 -1 -1",
            "rms",
            scale_type="fp32",
        ),
        trellis(
            "ties at the end of the seam run",
            "the smallest z wins: its lowest bits are the newest code; not the largest, nor the path that "
            "starts smaller",
            "2 1 1.5 0 -2 0 1 0",
            2,
            2,
            "2 1 1 0 -1 2",
            "rms",
            scale_type="bf16",
        ),
    ]


def trellis_edges() -> list[dict]:
    return [
        trellis(
            "order of the sum",
            "oldest code first, highest bit first, code by code, a tree and an exact sum differ",
            "0.8 -0.85 0.31 0.4 0.77 0.58 -1.87 1.2",
            2,
            2,
            "0.25 -1.01 0.4 0.14 0.67 -0.62",
            "rms",
            scale_type="fp32",
        ),
        trellis(
            "cost in two roundings",
            "e * e is rounded before it is added: a fused cost or one in binary64 breaks ties otherwise",
            "0 0.6 0 0 0 0 0 0",
            2,
            1,
            "-0.7 -1.1 0.7 1.3",
            "rms",
            scale_type="fp32",
        ),
        trellis(
            "stored d, trellis",
            "y is the quotient by the stored d; d before rounding gives other codes",
            "-1.04 1.04 -1 2.35 0.45 1.55 0.87 1.29",
            2,
            2,
            "-0.52 -1.1 1.06 -1.2 0.29 -0.43",
            scale_type="bf16",
        ),
        trellis(
            "costs overflow",
            "every cost is infinite, so every comparison is a tie: all codes are 0",
            "1e30 -2e30 5e29 0 -1e30 3e30 0 1e30",
            2,
            2,
            TAPS[2, 2],
            "least_squares",
        ),
        trellis(
            "products overflow both ways",
            "y stays huge as d saturates, all codes are 0, and inf - inf gives no refit: s = d",
            "3e38 3e38 -3e38 3e38 3e38 -3e38 -3e38 3e38",
            1,
            1,
            "-1.5 -0.9",
            "least_squares",
            scale_type="fp16",
        ),
        trellis(
            "costs overflow in their sum",
            "paths are found by cost before the overflow and by ties after it",
            "60000 -90000 120000 100000 -50000 90000 -60000 9e23 60000 -9e23 -80000 70000",
            1,
            3,
            TAPS[1, 3],
        ),
        trellis(
            "theta of zeros",
            "all paths tie, v is -0 for all codes, not 0 - 0, as the sum starts with its first term; N = 0 and s = d",
            "1 -2 0.5 3 0 -1 2 -0.5",
            1,
            2,
            "0 0 0",
            "norm",
            scale_type="bf16",
        ),
        trellis(
            "zero groups, trellis",
            "E = 0, and a d that rounds to 0: codes 2^(b-1), decoded zeros have the signs of v, which sees the tail",
            "0 -0 0 0 0 -0 0 0 1e-9 -1e-9 2e-9 0 1e-9 1e-9 0 0 1 -2 3 -4 2 -1 0.5 -3",
            2,
            1,
            "0.9 -1.7 0.3 4.2",
            "norm",
            8,
        ),
        trellis(
            "groups of seven, norm", "fewer than 8 channels: symmetric", lattice(14, 42), 2, 1, TAPS[2, 1], "norm", 7
        ),
        trellis(
            "groups of seven, least squares",
            "symmetric with the trellis's rule",
            lattice(14, 43),
            3,
            2,
            TAPS[3, 2],
            "least_squares",
            7,
            "bf16",
        ),
        trellis(
            "groups of seven, rms", "symmetric with the rule norm", lattice(14, 44), 1, 6, TAPS[1, 6], "rms", 7, "fp32"
        ),
        trellis(
            "trellis of eight bits",
            "b = 8: 65536 windows; the seam's state is the last code",
            bell(8, 5),
            8,
            1,
            "0.02 0.04 0.07 0.15 0.3 0.6 1.2 2.3 0.05 -0.03 0.02 0.04 -0.06 0.08 -0.1 0.12",
            "norm",
        ),
        trellis("trellis 2 bit 64 of 128", "a realistic row of two groups", bell(128, 2), 2, 2, TAPS[2, 2], "norm", 64),
    ]


def mixed_rows() -> list[dict]:
    return [
        mixed("mixed 4 and 2", "two segments, two scales; g is the length of the segment", lattice(8, 1), "4*4 2*4", 8),
        mixed(
            "mixed 8 to 0",
            "widths 5, 6 and 7 take a byte a code; every segment starts at a byte; no scale for width 0",
            lattice(18, 2),
            LADDER,
            32,
        ),
        mixed(
            "mixed codebook 8 to 0",
            "each width has its own codebook",
            lattice(18, 3),
            LADDER,
            48,
            "rms",
            "fp32",
            **books(*range(1, 9)),
        ),
        mixed(
            "mixed trellis 8 to 0",
            "widths without a theta are symmetric with the rule norm, though the others follow rms",
            lattice(49, 4),
            "8*2 7*2 6*2 5*2 4*8 3*9 2*10 1*12 0*2",
            40,
            "rms",
            "bf16",
            **FOUR,
        ),
        mixed(
            "mixed trellis 8 to 0, least squares",
            "widths without a theta and segments below 8 follow least_squares",
            lattice(34, 4),
            "8*2 6*1 4*9 3*7 2*8 1*5 0*2",
            40,
            "least_squares",
            "fp32",
            **FOUR,
        ),
        mixed(
            "mixed trellis, rule rms",
            "six bits have no theta, and two segments of seven are too short: norm, and neither rms nor least_squares",
            bell(26, 6),
            "6*4 4*7 2*8 1*7",
            20,
            "rms",
            **thetas((1, 3), (2, 2), (4, 1)),
        ),
        mixed(
            "odd bytes before fp16",
            "3 bytes of codes, one of padding, two scales",
            lattice(6, 6),
            "4*3 2*3",
            8,
            "absmax",
        ),
        mixed(
            "odd bytes before fp32",
            "5 bytes of codes, three of padding; a segment of 6 bits is not dense",
            lattice(12, 7),
            "6*3 3*2 1*5 0*2",
            20,
            "norm",
            "fp32",
        ),
        mixed(
            "odd bytes before bf16",
            "codes of 5 bits in bytes, the codebooks of their widths",
            lattice(5, 8),
            "5*2 2*3",
            8,
            "least_squares",
            "bf16",
            **books(5, 2),
        ),
        mixed(
            "one channel of eight",
            "the rest has width 0 and decodes to +0, also where x is negative",
            lattice(8, 9),
            "8 0*7",
            4,
        ),
        mixed(
            "one width, mixed",
            "one segment: 5 bytes, one of padding, one scale; a row of one width has 7 bytes",
            lattice(12, 10),
            "3*12",
            8,
            "least_squares",
        ),
        mixed(
            "one width of six, mixed", "a byte a code, also when all channels have that width", lattice(5, 11), "6*5", 8
        ),
        mixed("larger row", "another head needs 16 bytes: zeros at the end", lattice(12, 12), "2*6 1*6", 16),
        mixed(
            "zero segment",
            "E = 0 in one segment only",
            "0 -0 0 0 0 0 -0 0 1 -2 3 -4 0.5 -1 2 -3",
            "4*8 2*8",
            12,
            "norm",
            "bf16",
            **thetas((2, 1), (4, 1)),
        ),
        mixed(
            "mixed 128",
            "a realistic row: 42 bytes of codes, five scales",
            bell(128, 3),
            "8*4 4*20 3*36 2*52 1*8 0*8",
            52,
            "least_squares",
        ),
        mixed(
            "mixed trellis 128",
            "a realistic row: 34 bytes of codes, four scales",
            bell(128, 4),
            "4*16 3*24 2*56 1*24 0*8",
            44,
            "norm",
            **FOUR,
        ),
    ]


def books(*widths: int) -> dict:
    return {"coder": "codebook", "codebook": {w: skewed(w).split() for w in widths}}


def thetas(*pairs: tuple[int, int]) -> dict:
    return {"coder": "trellis", "trellis": [theta(bits, memory, TAPS[bits, memory]) for bits, memory in pairs]}


LADDER = " ".join(f"{w}*2" for w in range(8, -1, -1))
FOUR = thetas((1, 3), (2, 2), (3, 1), (4, 1))


def one_scale_rows() -> list[dict]:
    falling = "7.3 4.1 2.6 1.9 1.1 0.7 0.45 0.21"
    return [
        one_scale("2 0.5", "one scale, 4 and 2", "gains are powers of two; one scale", lattice(8, 1), "4*4 2*4", 8),
        one_scale(
            falling,
            "one scale, 8 to 0",
            "each width has its gain and step; n counts no channel of width 0",
            lattice(18, 2),
            LADDER,
            16,
            "norm",
            "fp32",
        ),
        one_scale(
            falling,
            "one scale, 8 to 0, least squares",
            "x u is summed by segments, from the widest on",
            lattice(18, 4),
            LADDER,
            16,
            "least_squares",
            "bf16",
        ),
        *(
            one_scale(
                falling,
                f"one scale, codebook, {rule}, {scale_type}",
                "each width has its gain and codebook",
                lattice(18, salt),
                LADDER,
                16,
                rule,
                scale_type,
                **books(*range(1, 9)),
            )
            for salt, (rule, scale_type) in enumerate(
                (("norm", "fp16"), ("rms", "fp32"), ("least_squares", "bf16"), ("least_squares", "fp32"))
            )
        ),
        *(
            one_scale(
                "4.4 3.3 2.7 2.2 1.7 1.2 0.8 0.3",
                f"one scale, trellis, {rule}, {scale_type}",
                "widths without a theta are symmetric; one rule for the row, though symmetric rows know no rms",
                bell(49, salt),
                "8*2 7*2 6*2 5*2 4*8 3*9 2*10 1*12 0*2",
                28,
                rule,
                scale_type,
                **FOUR,
            )
            for salt, (rule, scale_type) in enumerate(
                (("norm", "fp32"), ("rms", "bf16"), ("least_squares", "fp16")), start=4
            )
        ),
        one_scale(
            "2.1 1.4 0.9 0.5",
            "one scale, short segments of a trellis",
            "two segments of seven are symmetric, one of eight is not",
            bell(26, 6),
            "6*4 4*7 2*8 1*7",
            16,
            "rms",
            **thetas((1, 3), (2, 2), (4, 1)),
        ),
        # Bytes
        one_scale(
            "1.5 0.75",
            "one scale behind odd bytes",
            "3 bytes of codes, one of padding, two of the scale, two to a multiple of 4",
            lattice(6, 6),
            "4*3 2*3",
            8,
        ),
        one_scale("1.5", "one scale, one channel", "the rest has width 0 and decodes to +0", lattice(8, 9), "8 0*7", 4),
        one_scale("", "no scale at all", "a row without channels of width 1..8", lattice(5, 3), "0*5", 4),
        one_scale("1.25 0.75", "one scale, larger row", "another head needs 12 bytes", lattice(12, 12), "2*6 1*6", 12),
        # Sums and roundings
        one_scale(
            "1 1 1 1 1 1",
            "one scale, segments from the widest on",
            "E and F are 1: each 2^-24 is lost, while the tree of the row or the other order keeps them",
            "1 0x1p-12 0x1p-12 0x1p-12 0x1p-12 0x1p-12",
            "8 7 6 5 4 3",
            12,
            "norm",
            "fp32",
            **books(*range(3, 9)),
        ),
        *(
            one_scale(
                "1.3 1.1 0.9 0.7",
                f"one scale, every rounding of {coder['coder']}, {rule}",
                "G G, F, t, y, q tree(v v) and G v are rounded to binary32 one by one",
                spread(40, salt),
                "4*9 3*10 2*11 1*10",
                24,
                rule,
                "fp32",
                **coder,
            )
            for salt, (coder, rule) in enumerate(
                (
                    ({"coder": "symmetric"}, "norm"),
                    ({"coder": "symmetric"}, "least_squares"),
                    (books(1, 2, 3, 4), "norm"),
                    (books(1, 2, 3, 4), "rms"),
                    (books(1, 2, 3, 4), "least_squares"),
                    (FOUR, "norm"),
                    (FOUR, "rms"),
                    (FOUR, "least_squares"),
                ),
                start=17,
            )
        ),
        one_scale(
            "1.7 0.6",
            "one scale, stored d",
            "codes come from d as stored in bf16, and t = G d is a binary32 number",
            spread(64, 22),
            "5*32 3*32",
            48,
            "norm",
            "bf16",
        ),
        one_scale(
            "1.3",
            "one scale, order of divisions",
            "x / t and y / step are rounded, with t = G d: neither x / (step t) nor (x / G) / d",
            "-0x1.7dc14ep+0 -0x1.8812a2p-1 0x1.3587f8p-1 0x1.ef3ff2p-1 0x1.b157f4p+0 0x1.260df8p+1 "
            "-0x1.f9914ap+0 0x1.4a2aa2p-2 0x1.691eap+0 0x1.da9d48p-1 1 0.7",
            "8*12",
            16,
            "norm",
            "bf16",
        ),
        # One segment: with the gain 1, a codebook and a trellis give what they give with a scale for each segment.
        *(
            case
            for coder, rule, salt in (
                (books(3), "norm", 5),
                (books(3), "rms", 6),
                (books(3), "least_squares", 7),
                (thetas((3, 2)), "norm", 8),
                (thetas((3, 2)), "rms", 9),
                (thetas((3, 2)), "least_squares", 10),
            )
            for case in (
                one_scale(
                    "1",
                    f"one scale, one segment, {coder['coder']}, {rule}",
                    "as the row of the same name and scope segment",
                    bell(12, salt),
                    "3*12",
                    8,
                    rule,
                    **coder,
                ),
                mixed(
                    f"one segment, {coder['coder']}, {rule}",
                    "as the row of the same name with one scale",
                    bell(12, salt),
                    "3*12",
                    8,
                    rule,
                    **coder,
                ),
            )
        ),
        one_scale(
            "1",
            "one scale, one segment, symmetric",
            "differs from scope segment: the first step is step d with d rounded, not R(step sqrt(E / g))",
            bell(12, 11),
            "3*12",
            8,
        ),
        # Ends of the ranges
        one_scale(
            "0x1p24 0x1p-24",
            "one scale, largest and smallest gain",
            "q = 2^48 and 2^-48; all of F is in the second segment, all of N in the first",
            lattice(8, 14),
            "4*4 2*4",
            8,
        ),
        one_scale("3 1", "one scale, zero row", "d = 0: codes 2^(w-1), s = 0", "0 -0 0 0 0 -0", "3*4 2 0", 8),
        one_scale(
            "3 1",
            "one scale, zero row of a codebook",
            "d = 0: s = 0, and decoded zeros have the signs of their v",
            "0 -0 0 0 0 -0",
            "3*4 2 0",
            8,
            "rms",
            **books(2, 3),
        ),
        one_scale(
            "3 1",
            "one scale, zero row of a trellis",
            "d = 0: no path is searched",
            " ".join(["0"] * 17),
            "3*8 2*8 0",
            12,
            "least_squares",
            **thetas((2, 1), (3, 1)),
        ),
        one_scale(
            "1.5 0.5",
            "one scale, zero segment",
            "only the first segment is 0: its y are 0, and its codes count in N",
            "0 -0 0 0 0 0 -0 0 1 -2 3 -4 0.5 -1 2 -3",
            "4*8 2*8",
            8,
            "norm",
            "bf16",
            **thetas((2, 1), (4, 1)),
        ),
        one_scale(
            "2 1",
            "one scale, d below fp16",
            "d rounds to 0: all codes are 2^(w-1) and s = 0, though x is not",
            "2e-8 -3e-8 1e-8 -1e-8",
            "4*2 2*2",
            8,
        ),
        one_scale(
            "2 1",
            "one scale, squares underflow",
            "E = F = 0, though x is not",
            "1e-30 -1e-30 2e-30 0",
            "4*2 2*2",
            8,
            "norm",
            "fp32",
        ),
        one_scale(
            "0x1p12 0x1p12",
            "one scale, F underflows",
            "E is subnormal, and E / q is 0",
            "1e-21 -2e-21 3e-22 -1e-22",
            "4*2 2*2",
            8,
            "norm",
            "fp32",
        ),
        one_scale(
            "0x1p-20 0x1p-21",
            "one scale, E subnormal",
            "kept, and F = E / q has few bits",
            "1e-21 -2e-21 3e-22 -1e-22",
            "4*2 2*2",
            8,
            "norm",
            "fp32",
        ),
        one_scale(
            "4 1",
            "one scale, s below fp16",
            "d = 2^-24 gives codes, and s rounds to 0; decoded zeros keep their signs",
            "0 0 0 0 -1e-7 0 0 0 0 0",
            "4*4 1*6",
            8,
            "least_squares",
        ),
        one_scale(
            "2 0.5",
            "one scale, saturating",
            "d and s stop at 65504",
            "1e7 -1e7 3e6 -5e5 4e5 -2e5",
            "4*4 2*2",
            8,
        ),
        one_scale(
            "0x1p20 0x1p-20",
            "one scale, only d saturates",
            "the second segment is far above its gain: y is large, s is not",
            "3e5 -8e5 1e6 -2e5 1 -2 3 0.01",
            "4*4 3*4",
            8,
            "norm",
            **books(3, 4),
        ),
        *(
            one_scale(
                "1.5 0.5",
                f"one scale, squares overflow, {scale_type}",
                "E and F are infinite: d and s saturate",
                "1e20 -1e20 3e19 1e18 1 2",
                "4*4 2*2",
                8,
                "norm",
                scale_type,
            )
            for scale_type in ("fp16", "bf16", "fp32")
        ),
        one_scale(
            "0x1p24 1",
            "one scale, t overflows",
            "F is infinite, d the largest binary32 and t = G d infinite: all y of the first segment are 0",
            "1e38 -1e38 3e37 -0 1e38 -3e38",
            "3*4 2*2",
            8,
            "norm",
            "fp32",
        ),
        *(
            one_scale(
                "0x1p-24 1",
                f"one scale, y overflows, {coder['coder']}",
                f"d stops at 65504 and t is 2^-8: y is infinite; {what}",
                f"{LARGEST} -{LARGEST} 1e38 -3 1e20 5 -7 2 1 -1",
                "4*8 2*2",
                12,
                "norm",
                **coder,
            )
            for coder, what in (
                ({"coder": "symmetric"}, "codes at both ends"),
                (books(2, 4), "the first and the last entry"),
                (thetas((4, 1)), "all costs become infinite, and ties keep the smallest old code"),
            )
        ),
        one_scale(
            "2 1",
            "one scale, N = 0",
            "all codes stand for 0: s = d",
            "1 -1 0.5 -0.75 0.3 -0.2",
            "2*4 1*2",
            8,
            "norm",
            coder="codebook",
            codebook={2: "-9 0 9 18".split(), 1: "0 9".split()},
        ),
        one_scale(
            "8 8",
            "one scale, inf - inf in a segment",
            "P is NaN: s = d",
            f"{LARGEST} -{LARGEST} 1 2 3 4",
            "2*4 1*2",
            8,
            "least_squares",
            "fp32",
            coder="codebook",
            codebook={2: "0.5 1 2 3".split(), 1: "1 2".split()},
        ),
        one_scale(
            "8 8",
            "one scale, inf - inf between segments",
            "one tree is infinite, the other -infinite: P is NaN, s = d",
            f"{LARGEST} 1 2 3 -{LARGEST} -4",
            "2*4 1*2",
            8,
            "least_squares",
            "bf16",
            coder="codebook",
            codebook={2: "0.5 1 2 3".split(), 1: "1 2".split()},
        ),
        one_scale(
            "8 4",
            "one scale, P overflows",
            "P is infinite and N is not: s saturates",
            f"{LARGEST} -{LARGEST} 1 2 3 -4",
            "2*4 1*2",
            8,
            "least_squares",
            "fp32",
        ),
        one_scale(
            "1 1",
            "one scale, P negative",
            "a codebook without negative entries: s is negative, too",
            "-3 -2 -3 1 -2 -1",
            "2*4 1*2",
            8,
            "least_squares",
            coder="codebook",
            codebook={2: "0.5 1 2 3".split(), 1: "1 2".split()},
        ),
        # Centroids and rows that are not finite
        residual(
            one_scale("1.3 0.4", "one scale, 3 centroids", "one byte behind the scale", lattice(8, 15), "4*3 2*4 0", 8),
            cloud(3, 8),
        ),
        residual(
            one_scale(
                "1.3 0.4",
                "one scale, 257 centroids",
                "two bytes at offset 4, behind the scale",
                "-2.9 -1.76 -0.6 0.56",
                "4*2 2 0",
                8,
            ),
            cloud(257, 4),
        ),
        one_scale("2 1 0.5", "one scale, NaN", "one NaN is stored", "1 2 nan 4 5 6 7 8 9", "6*2 4*4 2*3", 8),
        one_scale(
            "2 1",
            "one scale, infinity in a channel of width 0",
            "any channel of x_rot counts, stored or not; all decode to NaN",
            lattice(10, 5) + " inf",
            "4*8 2*2 0*1",
            12,
            "norm",
            "fp32",
            **thetas((2, 1), (4, 1)),
        ),
        residual(
            one_scale(
                "2 1",
                "one scale, infinity and 257 centroids",
                "index 0",
                "1 -inf 3 4",
                "4*2 2 0",
                8,
                "rms",
                "bf16",
                **books(2, 4),
            ),
            cloud(257, 4),
        ),
        # Real rows
        *(
            one_scale(
                "1.9 1.05 0.62 0.33",
                f"one scale, {coder['coder']} 128, {rule}",
                "a realistic row: 34 bytes of codes, one scale",
                bell(128, salt),
                "4*16 3*24 2*56 1*24 0*8",
                36,
                rule,
                **coder,
            )
            for coder, rule, salt in (
                ({"coder": "symmetric"}, "norm", 3),
                (books(1, 2, 3, 4), "rms", 4),
                (FOUR, "norm", 5),
            )
        ),
    ]


# "Trellis tables" of packing.md
SHIPPED = {
    (2, 1): "1.48225427 0.918767927 -0.792501826 0.993044327",
    (2, 2): "-0.886770233 -1.34449962 0.717407561 -0.0397294397 0.927222248 -0.814774881",
    (2, 3): "0.955407229 0.953921669 -0.519271679 0.508955923 0.482909586 0.52327051 0.956043081 -0.933100524",
    (3, 1): "1.37657522 -1.09347555 0.68231607 0.947085401 1.08014076 0.488084484",
    (3, 2): "1.26534994 1.00769529 0.546827156 -0.119927383 0.354457651 0.670707303 0.895332011 -0.94432942 "
    "-0.465584726",
    (4, 1): "1.2847827 1.1339953 0.911722797 0.601804498 0.910166869 -0.982628213 -0.266429482 0.453091539",
}


def integer(case: dict) -> dict:
    """The case, searched in integers."""
    return {**case, "trellis": [{**trellis, "search": "integer"} for trellis in case["trellis"]]}


def both_searches(name, *arguments, **more) -> list[dict]:
    """A trellis row, searched both ways."""
    why = "the same row: the searches find other codes"
    return [
        integer(trellis(f"integer, {name}", why, *arguments, **more)),
        trellis(f"binary32, {name}", why, *arguments, **more),
    ]


def shipped(*pairs: tuple[int, int]) -> dict:
    return {"coder": "trellis", "trellis": [theta(bits, memory, SHIPPED[bits, memory]) for bits, memory in pairs]}


def integer_searches() -> list[dict]:
    """Search `integer`. derive_vectors.py checks what many a `why` claims."""
    return [
        # Shipped tables
        *both_searches("2 bit memory 3, 128", drawn(128, 1), 2, 3, SHIPPED[2, 3]),
        *both_searches("2 bit memory 2, 64", drawn(64, 5), 2, 2, SHIPPED[2, 2], "rms", scale_type="fp32"),
        integer(
            trellis(
                "integer, 2 bit memory 1, 8 of 24",
                "the first run goes ten times around each group",
                drawn(24, 3),
                2,
                1,
                SHIPPED[2, 1],
                "least_squares",
                8,
                "bf16",
            )
        ),
        integer(
            trellis(
                "integer, 2 bit memory 2, 24 of 48",
                "the first run begins at channel 8 of each group and ends at channel 15",
                drawn(48, 2),
                2,
                2,
                SHIPPED[2, 2],
                "norm",
                24,
            )
        ),
        integer(
            trellis(
                "integer, 2 bit memory 3, 40",
                "the first run goes twice around the group",
                drawn(40, 4),
                2,
                3,
                SHIPPED[2, 3],
                "least_squares",
                scale_type="fp32",
            )
        ),
        integer(
            trellis(
                "integer, 3 bit memory 1, 16 of 32",
                "U = 320; each group has its own gains",
                drawn(32, 6),
                3,
                1,
                SHIPPED[3, 1],
                "rms",
                16,
            )
        ),
        integer(
            trellis(
                "integer, 95 channels",
                "two runs: the path of one run, as longer groups have it, would not begin in z*",
                drawn(95, 33),
                3,
                2,
                SHIPPED[3, 2],
            )
        ),
        integer(
            trellis(
                "integer, 96 channels",
                "one run: its path does not begin in z*, and no second run closes it",
                drawn(96, 425),
                3,
                2,
                SHIPPED[3, 2],
            )
        ),
        integer(trellis("integer, 4 bit memory 1, 64", "U = 1280", drawn(64, 7), 4, 1, SHIPPED[4, 1], "rms")),
        # Other trellises
        integer(
            trellis("integer, 1 bit memory 3, 20 of 40", "U = 20", drawn(40, 9), 1, 3, TAPS[1, 3], "norm", 20, "bf16")
        ),
        integer(
            trellis(
                "integer, memory of eight",
                "m = g = 8: v[j] and X[j] have two terms of one channel, the first and the last",
                drawn(16, 10),
                1,
                8,
                "1.13 0.67 -0.44 0.28 0.17 -0.12 0.09 -0.05 0.03",
                "norm",
                8,
            )
        ),
        integer(
            trellis(
                "integer, 8 bit",
                "U is that of 4 bits; squares of A take more than 32 bits; 65536 windows",
                drawn(8, 1),
                8,
                1,
                "0.02 0.04 0.07 0.15 0.3 0.6 1.2 2.3 0.05 -0.03 0.02 0.04 -0.06 0.08 -0.1 0.12",
                "norm",
            )
        ),
        # Numbers
        integer(
            trellis(
                "integer, theta beyond 2.5",
                "the search takes them as 2.5 and -2.5; the values have them as they are",
                drawn(16, 1),
                2,
                1,
                "5.5 -1.3 0.7 -4.6",
            )
        ),
        integer(
            trellis(
                "integer, y beyond 4.5",
                "an outlier of y = 7.9 counts as 4.5: neither as 4 nor as it is",
                f"{drawn(23, 1)} 30 {drawn(40, 1001)}",
                2,
                2,
                "2.4 1.7 -2.1 2.3 1.9 -2.2",
                "least_squares",
            )
        ),
        integer(
            trellis(
                "integer, y far beyond 4.5",
                "d saturates: y is 0 or beyond 1e24",
                "1e30 -2e30 5e29 0 -1e30 3e30 0 1e30",
                2,
                2,
                TAPS[2, 2],
                "least_squares",
            )
        ),
        integer(
            trellis(
                "integer, ties of 256 y",
                "d = 1 and all y are odd multiples of 1/512: t is even",
                "1.560546875 0.435546875 -1.486328125 0.259765625 -0.482421875 0.501953125 0.623046875 -0.740234375 "
                "-0.498046875 0.779296875 1.576171875 1.369140625 -1.072265625 1.056640625 0.173828125 1.455078125",
                4,
                1,
                SHIPPED[4, 1],
                "rms",
                scale_type="bf16",
            )
        ),
        integer(
            trellis(
                "integer, ties of 64 U theta",
                "1282.5, 642.5, -327.5 and 162.5: a is even",
                drawn(12, 714),
                1,
                3,
                "0x1.008p0 0x0.808p0 -0x0.418p0 0x0.208p0",
                "norm",
                scale_type="bf16",
            )
        ),
        integer(
            trellis(
                "integer, ties of F",
                "d = 1 and halves go up: neither to the even cost nor away from 0",
                "0.875 0.625 0.25 0.75 -1.75 3.125 0.875 0.5 -0.75 1.25 0.125 -0.75 -0.625 0.625 "
                "-1 1.125 -1 -0.125 0.25 1 0.375 -0.125 -0.25 -0.625",
                1,
                2,
                "1 0.75 -0.25",
                "rms",
                scale_type="bf16",
            )
        ),
        integer(
            trellis(
                "integer, ties of X",
                "d = 1 and halves go up: neither to the even cost nor away from 0",
                "1.25 0.75 0.75 0.125 0.625 1.625 0 -0.375 1.625 -1.25 0.25 1.25 0.125 1.625 "
                "-0.5 0.375 -0.25 1.375 -0.875 -0.5 -1 1.375 -1.375 -1.25",
                1,
                2,
                "1 0.25 -0.5",
                "rms",
                scale_type="bf16",
            )
        ),
        # Ties of paths
        integer(
            trellis(
                "integer, ties of paths",
                "the smallest dropped code stays, and the smallest z of the first run's end; another z* gives other "
                "codes",
                "1 2 2 0 1 1 2 1",
                2,
                2,
                "2 1 1 0 -1 2",
                "rms",
                scale_type="fp32",
            )
        ),
        integer(
            trellis(
                "integer, theta of zeros",
                "all paths tie in both runs: all codes are 0, also before the group",
                "1 -2 0.5 3 0 -1 2 -0.5",
                1,
                2,
                "0 0 0",
                "norm",
                scale_type="bf16",
            )
        ),
        # The runs
        integer(
            trellis(
                "integer, second run",
                "to close the path of the first group costs 32 to 33, so it does not begin in z*; to close that of the "
                "second costs 31 to 32",
                f"{drawn(18, 25)} {drawn(18, 260)}",
                1,
                6,
                "2.5 0.2 -0.2 0.1 0.1 -0.1 2.4",
                "norm",
                18,
            )
        ),
        *(
            integer(
                trellis(
                    f"integer, first run over {size} channels",
                    why,
                    drawn(size, seed),
                    1,
                    len(taps.split()) - 1,
                    taps,
                    "norm",
                )
            )
            for size, seed, taps, why in (
                (8, 213, "1 -1 0.9 -1 0.9", "it begins at -40, not at -8, -32 or -48, and ends at 39, not at 7 or 31"),
                (20, 61, "1 -1 0.9 -1 0.9", "it begins at -40, not at -20, -32 or -48"),
                (24, 244, "1 1 -1 0.9 1", "it begins at -40, not at -24, and ends at 39, not at 31 or 47"),
                (64, 4490, "0.8 1.1 -1 1 -0.9 -0.9", "it ends at 39, not at 31 or 63"),
            )
        ),
        # Mixed widths
        integer(
            mixed(
                "integer, mixed 128",
                "a realistic row: 34 bytes of codes, four scales",
                drawn(128, 11),
                "4*16 3*24 2*56 1*24 0*8",
                44,
                "norm",
                **shipped((2, 3), (3, 2), (4, 1)),
            )
        ),
        mixed(
            "integer and binary32",
            "each width has a search of its own; a segment of seven is symmetric",
            drawn(79, 13),
            "4*16 3*24 2*32 1*7",
            40,
            "rms",
            "bf16",
            coder="trellis",
            trellis=[
                theta(2, 3, SHIPPED[2, 3]),
                {**theta(3, 1, SHIPPED[3, 1]), "search": "integer"},
                theta(4, 1, SHIPPED[4, 1]),
            ],
        ),
        integer(
            one_scale(
                "1.9 1.05 0.62 0.33",
                "integer, one scale 128",
                "a realistic row: 34 bytes of codes, one scale",
                drawn(128, 12),
                "4*16 3*24 2*56 1*24 0*8",
                36,
                "norm",
                **shipped((2, 3), (3, 2), (4, 1)),
            )
        ),
        integer(
            one_scale(
                "0x1p-24 1",
                "integer, y overflows",
                "d stops at 65504 and t is 2^-8: y is infinite, and counts as 4.5 or -4.5",
                f"{LARGEST} -{LARGEST} 1e38 -3 1e20 5 -7 2 1 -1",
                "4*8 2*2",
                12,
                "norm",
                **thetas((4, 1)),
            )
        ),
    ]


def cloud(count: int, size: int) -> list[str]:
    """Centroids on a lattice, all different."""
    return [" ".join(str(((37 * j + 53 * k) % 307 - 153) / 32) for j in range(size)) for k in range(count)]


def centroid_rows() -> list[dict]:
    three = cloud(3, 8)
    return [
        residual(
            symmetric("centroid of 3", "the residual is coded; the index is the last byte", lattice(8, 5), 3), three
        ),
        residual(
            symmetric(
                "centroids as near as each other",
                "the smallest index of a tie, neither 0 nor the last",
                "1 0 -1 2",
                2,
                "absmax",
            ),
            ["9 9 9 9", "1.5 0 -1 2", "1 0.5 -1 2", "0.5 0 -1 2"],
        ),
        residual(
            symmetric(
                "sums of the distances",
                "another order, an exact sum and |M|^2 - 2 x M choose the other",
                "0.01 0 0 0 0 0 0 0",
                2,
            ),
            ["-0.94 -2.98 1.16 0.88 -1.17 -1.68 -2.77 -0.28", "-0.94 2.98 -1.68 0.88 -1.16 0.28 -2.77 1.17"],
        ),
        residual(symmetric("centroid on the row", "the residual is zero: codes 2^(b-1), scale 0", three[1], 3), three),
        residual(symmetric("256 centroids", "the index is one byte up to C = 256", "-4.57 -3.4", 4), cloud(256, 2)),
        residual(
            symmetric(
                "300 centroids",
                "two bytes, little-endian, at an odd offset: no padding in a row of one width",
                "1.09 2.26",
                2,
                "least_squares",
            ),
            cloud(300, 2),
        ),
        residual(
            mixed(
                "257 centroids, mixed", "two bytes at offset 6, behind the scales", "-2.9 -1.76 -0.6 0.56", "4*2 2 0", 8
            ),
            cloud(257, 4),
        ),
        residual(
            mixed(
                "3 centroids, mixed",
                "one byte behind the scales, then zeros up to the row size",
                lattice(12, 10),
                "3*3 2*8 0*1",
                12,
                "norm",
                coder="trellis",
                trellis=[theta(2, 2, TAPS[2, 2]), theta(3, 1, TAPS[3, 1])],
            ),
            cloud(3, 12),
        ),
        residual(
            affine(
                "centroid, affine",
                "the residual is clipped, not the row; the index stands behind the minima",
                lattice(8, 9),
                3,
                "float",
                4,
                "bf16",
                0.8,
            ),
            three,
        ),
    ]


def exact_rows() -> list[dict]:
    return [
        exact(
            "exact row",
            "bfloat16: ties to even, both directions; the stream is two bytes a channel",
            "1 -2.5 0x1.01p0 0x1.03p0 3.14159265 -1e-3 100000",
        ),
        exact(
            "exact ends",
            "subnormals, signed zeros, and R instead of an infinity",
            f"0 -0 0x1p-133 0x1.8p-133 {QUANTUM_32} {LARGEST} -{LARGEST}",
        ),
    ]


def poisoned_rows() -> list[dict]:
    """Rows that are not finite, in every coder. The other channels are ordinary ones."""
    book, trellises = (
        {"codebook": {w: skewed(w).split() for w in (2, 4)}},
        [theta(b, m, TAPS[b, m]) for b, m in ((2, 2), (4, 1))],
    )
    return [
        affine(
            "NaN, affine",
            "codes 0, s and m NaN in every group, not only in that of the channel",
            "1 -2 3 4 5 6 nan 8",
            2,
            group_size=4,
        ),
        affine("infinity, affine", "an infinite range is not the largest number", "1 -2 3 inf", 4, scale_type="bf16"),
        affine("-infinity, integer zero", "s and z are NaN", "1 -2 -inf 4 0.5 0.25 -0.125 3", 3, "integer", 2, "fp32"),
        affine(
            "NaN with a sign, integer zero",
            "whatever NaN it is, the stored ones are positive and quiet",
            "-nan -2 1 snan",
            8,
            "integer",
        ),
        affine(
            "infinity and clip",
            "the clip would bound the channel",
            "1 -2 3 4 5 6 7 -inf",
            2,
            clip_ratio=0.5,
            group_size=2,
        ),
        affine(
            "infinity and clip, integer zero", "the same with z", "1 inf 3 4 5 6 7 8", 4, "integer", 4, "bf16", 0.85
        ),
        affine(
            "NaN and clip", "whatever rank a NaN has", "nan 1 2 3 4 5 6 7 8 9 10 11", 5, group_size=6, clip_ratio=0.9
        ),
        affine("row of NaN", "all channels", "nan nan nan nan nan", 3),
        affine("row of infinities", "both signs: a range of NaN", "inf -inf inf -inf", 1, scale_type="fp32"),
        *(
            symmetric(
                f"NaN, {rule}",
                "the largest magnitude and the sum of squares ignore no NaN",
                "1 -2 nan 4 5 6 7 8",
                bits,
                rule,
                4,
                scale_type,
            )
            for bits, rule, scale_type in ((2, "absmax", "fp16"), (4, "least_squares", "bf16"), (3, "norm", "fp32"))
        ),
        *(
            symmetric(
                f"infinity, {rule}",
                "an infinite energy of finite channels saturates, this one does not",
                "1 -2 3 4 5 6 -inf 8",
                bits,
                rule,
                2,
                scale_type,
            )
            for bits, rule, scale_type in ((8, "absmax", "fp32"), (2, "least_squares", "fp16"), (2, "norm", "bf16"))
        ),
        *(
            codebook(
                f"{bad}, codebook, {rule}", "not code 2^(b-1)", f"1 -2 3 {bad} 5 6", 2, skewed(2), rule, 3, scale_type
            )
            for bad, rule, scale_type in (
                ("nan", "rms", "fp16"),
                ("inf", "norm", "bf16"),
                ("-inf", "least_squares", "fp32"),
            )
        ),
        *(
            trellis(
                f"{bad}, trellis, {rule}",
                "no path is searched",
                lattice(15, 3) + f" {bad}",
                2,
                2,
                TAPS[2, 2],
                rule,
                8,
                scale_type,
            )
            for bad, rule, scale_type in (
                ("-nan", "rms", "bf16"),
                ("-inf", "norm", "fp16"),
                ("inf", "least_squares", "fp32"),
            )
        ),
        trellis("NaN in groups of seven", "symmetric ones", "nan " + lattice(13, 4), 2, 1, TAPS[2, 1], "norm", 7),
        mixed("NaN, mixed", "in one of three segments", "1 2 nan 4 5 6 7 8 9", "6*2 4*4 2*3", 12),
        mixed(
            "infinity, mixed codebook",
            "channels of width 0 decode to NaN, too",
            "1 2 3 4 5 -inf 7 8",
            "4*2 2*4 0*2",
            8,
            "rms",
            coder="codebook",
            **book,
        ),
        mixed(
            "infinity in a channel of width 0",
            "any channel of x_rot counts, stored or not",
            lattice(10, 5) + " inf",
            "4*8 2*2 0*1",
            16,
            "norm",
            "fp32",
            coder="trellis",
            trellis=trellises,
        ),
        residual(symmetric("NaN and a centroid", "index 0", "1 2 nan 4 5 6 7 8", 3), cloud(3, 8)),
        residual(
            mixed("infinity and 257 centroids, mixed", "index 0 in two bytes", "1 inf 3 4", "4*2 2 0", 8), cloud(257, 4)
        ),
        residual(
            affine("residual overflows", "x is finite, x - M is not", f"{LARGEST} 1 2 3", 2, "float", 2, "bf16"),
            ["-3e38 0 0 0", "-2e38 0 0 0"],
        ),
        exact(
            "exact row that is not finite",
            "channel by channel: infinities become NaN, the largest number saturates",
            f"1 nan -nan snan inf -inf {LARGEST} -2",
        ),
    ]


CASES = [
    *every_width(),
    *long_rows(),
    *rounding(),
    *sums(),
    *degenerate(),
    *range_ends(),
    *clipping(),
    *codebook_widths(),
    *codebook_edges(),
    *trellis_widths(),
    *trellis_searches(),
    *trellis_edges(),
    *mixed_rows(),
    *centroid_rows(),
    *exact_rows(),
    *poisoned_rows(),
    *one_scale_rows(),
    *integer_searches(),
]
