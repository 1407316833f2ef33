"""The inputs of formats/vectors.json, chosen by hand, each with the reason why it is there.

Numbers are decimals or C hexadecimal floats, separated by spaces; derive_vectors.py rounds them to binary32 first.
"""

LARGEST = "3.4028234663852886e38"  # the largest finite binary32
QUANTUM_16 = "0x1p-24"  # the smallest fp16 subnormal
QUANTUM_32 = "0x1p-149"  # the smallest binary32 subnormal


def affine(name, why, x, bits, zero="float", group_size=None, scale_type="fp16", clip_ratio=1.0):
    channels = x.split()
    return {"name": name, "why": why, "coder": "affine", "scale_rule": "minmax", "zero": zero, "bits": bits,
            "group_size": group_size or len(channels), "scale_type": scale_type, "clip_ratio": clip_ratio, "x": channels}


def symmetric(name, why, x, bits, rule="norm", group_size=None, scale_type="fp16"):
    channels = x.split()
    return {"name": name, "why": why, "coder": "symmetric", "scale_rule": rule, "bits": bits,
            "group_size": group_size or len(channels), "scale_type": scale_type, "x": channels}


def exact(name, why, x):
    return {"name": name, "why": why, "coder": "exact", "bits": 16, "x": x.split()}


def lattice(size: int, salt: int) -> str:
    """`size` sixteenths between -50/16 and 50/16 without visible order: exact in binary32, easy to redo by hand."""
    return " ".join(str(((37 * j + 11 * salt) % 101 - 50) / 16) for j in range(size))


def spread(size: int, salt: int) -> str:
    """Thousandths of both signs; not exact in binary32, a few channels ten times larger."""
    return " ".join(f"{((997 * j + 131 * salt) % 4001 - 2000) * (10 if j % 29 == 7 else 1) / 1000}" for j in range(size))


def every_width() -> list[dict]:
    """Each coder and rule at each width on 12 channels (not a power of two), with scale types and groups in turn."""
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


def long_rows() -> list[dict]:
    return [
        affine("oscar 2 bit 64 of 128 clipped", "a row as OSCAR codes keys", spread(128, 1), 2, "float", 64, "bf16", 0.96),
        affine("saw 4 bit 128 integer", "a row as SAW-INT4's paper codes keys", spread(128, 2), 4, "integer", 128),
        affine("3 bit 32 of 96", "codes straddle bytes, three groups", spread(96, 3), 3, "float", 32, "fp16", 0.92),
        affine("5 bit 96 of 96", "codes straddle bytes, one group of 96", spread(96, 4), 5, "float", 96, "fp32"),
        symmetric("norm 2 bit 128", "the row of 34 bytes", spread(128, 5), 2),
        symmetric("norm 7 bit 32 of 96", "codes straddle bytes, three groups", spread(96, 6), 7, "norm", 32, "bf16"),
        symmetric("least squares 3 bit 96", "the tree is padded from 96 to 128", spread(96, 7), 3, "least_squares", 96, "fp32"),
        symmetric("absmax 6 bit 24 of 96", "a byte holds parts of two codes", spread(96, 8), 6, "absmax", 24),
    ]


def rounding() -> list[dict]:
    return [
        affine("ties go up", "x.5 becomes x + 1: not to the even code, not toward zero", "0 0.5 1 1.5 2 2.5 3 7", 3),
        affine("ties go up, integer zero", "floor, not truncation, also below zero", "-3.5 -2.5 -1.5 -0.5 0.5 1.5 2.5 3.5",
               3, "integer"),
        affine("clamp at the top", "m is rounded down by almost s, so the quotient of the largest channel passes n",
               "1000.24 1000.5 1000.75 1001", 2),
        affine("clamp at the bottom", "m is rounded up above the smallest channel", "1000.26 1000.5 1000.75 1001", 2),
        affine("stored scale", "the unrounded scale gives 12, the stored one 11", "-3.57 3.38 7.21 -9.22", 4),
        affine("stored minimum", "the unrounded minimum gives 8, the stored one 7", "-4.77 -7.81 -4.03 -1.73", 4),
        affine("stored scale, integer zero", "the unrounded scale gives code 1, the stored one 0", "-2.63 5.01 6.81 -6.81", 3,
               "integer"),
        affine("division", "a reciprocal and a product give 7, the quotient 8", "-4.77 -7.81 -4.03 -1.73", 4,
               scale_type="fp32"),
        affine("no fused multiply-add", "c * s is rounded before m is added", "-0.98 -8.16 -3.3 2", 4, scale_type="fp32"),
        affine("scale tie, fp16 down", "s = 1 + 2^-11 lies between two fp16 numbers, the even one is below", "0 0x1.002p0", 1),
        affine("scale tie, fp16 up", "s = 1 + 3 * 2^-11: the even one is above", "0 0x1.006p0", 1),
        affine("scale tie, bf16 down", "s = 1 + 2^-8", "0 0x1.01p0", 1, scale_type="bf16"),
        affine("scale tie, bf16 up", "s = 1 + 3 * 2^-8", "0 0x1.03p0", 1, scale_type="bf16"),
        symmetric("floor on both sides", "quotients that are integers: c counts from -infinity, zero goes up",
                  "-1.75 -1.5 -1 -0.5 0 0.5 1 1.5 -0 1.75", 3, "absmax"),
        symmetric("division, symmetric", "a reciprocal and a product give one code less", "0.867 2.1675 -0.289 0.4335", 4,
                  "absmax", scale_type="fp32"),
        symmetric("both ends clamp", "the Gaussian step leaves outliers outside", "9 -9 0.5 -0.25 0.125 1 -1 0.0625", 2),
        symmetric("rounded first step", "codes come from R(d), not from d", "3.77 -4.86 3.22 -0.24 -5.04 3.36", 4,
                  scale_type="bf16"),
        symmetric("not coded again", "codes come from the first step, not from the stored scale",
                  "-4.05 -2.98 1.66 -8.51 0.4 -2.47", 4, scale_type="bf16"),
    ]


def sums() -> list[dict]:
    return [
        symmetric("tree of 8", "left to right, halves (y0 + y4) and fused sums of squares give other scales",
                  "-6.992 -9.981 5.838 -1.597 -2.965 2.628 1.28 8.698", 4, scale_type="fp32"),
        symmetric("tree of 6", "zeros pad at the end: 6 is not split in 3 and 3",
                  "9.726 -8.235 0.303 3.673 -9.832 -1.392", 4, scale_type="fp32"),
        symmetric("tree of 12", "padded to 16; every other order gives another scale",
                  "-2.989 -9.632 -6.798 -8.925 -8.044 -0.225 -5.308 -0.156 2.394 2.411 -9.538 -6.204", 4, scale_type="fp32"),
        symmetric("small squares in order", "2^24 + 1 + 1 + ...: left to right the ones all vanish",
                  "4096 1 1 1 1 1 1 1", 8, "norm", scale_type="fp32"),
        symmetric("least squares tree", "the rounded products are summed in the same tree",
                  "7.783 -3.271 -2.24 -4.434 5.671 2.486 4.13 -9.194 -1.968 2.907 8.518 -8.281", 4, "least_squares",
                  scale_type="fp32"),
    ]


def degenerate() -> list[dict]:
    return [
        affine("constant group", "s = 0: codes 0, decoded to the stored minimum", "1.2345 1.2345 1.2345 1.2345", 4),
        affine("constant group, integer zero", "s = 0: z = 0, decoded to zero", "1.2345 1.2345 1.2345 1.2345", 4, "integer"),
        affine("range below fp16", "s rounds to 0, the minimum stays", "0.5 0.50000006 0.5 0.5", 4),
        affine("zeros of both signs", "all-zero groups; a zero minimum is stored as +0", "-0 0 0 -0 0 -0 1 2 -0 -0 -0 -0", 2,
               "float", 4),
        affine("zeros of both signs, integer zero", "a zero range is +0, whichever zeros hi and lo are",
               "0 -0 0 -0 -0 0 -0 0", 2, "integer", 4),
        affine("minimum rounds to zero", "R(-1e-9) would be -0; stored is +0", "-1e-9 1 2 3", 2),
        affine("zeros, integer zero", "all-zero group beside another", "0 0 0 0 -1 1 2 3", 2, "integer", 4),
        symmetric("all-zero group, norm", "E = 0: codes 2^(b-1), scale 0; the other group is not touched",
                  "0 -0 0 0 1 -2 3 -4", 3, "norm", 4),
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
        affine("subnormal binary32", "s, x - m and x / s live below the normal numbers; nothing is flushed",
               f"-0x1.8p-147 0 {QUANTUM_32} 0x1.8p-147", 2, scale_type="fp32"),
        affine("subnormal bf16", "bf16 has the exponents of binary32, its subnormals too",
               "0 0x1p-133 0x1p-132 0x1.8p-132", 2, scale_type="bf16"),
        affine("saturating fp16", "scale and minimum stop at 65504", "-100000 0 40000 100000", 1),
        affine("saturating z", "-lo / s = -240000 is stored as -65504", "1000 1000.0625 1000.03125 1000", 4, "integer"),
        affine("z in bf16", "z = -1001 is stored as -1000", "1001 1002 1003 1004", 2, "integer", scale_type="bf16"),
        affine("z far below zero", "all channels negative, z > n", "-21 -20 -19 -18.4", 3, "integer"),
        affine("range overflows, fp32", "hi - lo becomes the largest binary32; x - m overflows, the code is n",
               f"-3e38 3e38 0 {LARGEST}", 2, scale_type="fp32"),
        affine("range overflows, bf16", "s rounds beyond the largest bf16 and stays there", f"-{LARGEST} {LARGEST}", 1,
               scale_type="bf16"),
        affine("range overflows, integer zero", "the same with z", "-3e38 3e38 0 1e38", 3, "integer", scale_type="fp32"),
        symmetric("absmax subnormal", "s = R(2 * 0.75 * 2^-24) = 2 * 2^-24, a tie to even", 
                  f"0x1.8p-25 -0x1.8p-25 {QUANTUM_16} 0", 1, "absmax"),
        symmetric("absmax below fp16", "s rounds to 0: codes 2^(b-1)", "1e-7 -1e-7 0 5e-8", 8, "absmax"),
        symmetric("absmax saturating", "s = 65504", "1e6 -1e6 1e4 -1e4", 1, "absmax"),
        symmetric("absmax overflows", "2 max|x| is infinite and saturates in R", f"{LARGEST} -1e38 1e37 -{LARGEST}", 2,
                  "absmax", scale_type="fp32"),
        symmetric("first step below fp16", "d rounds to 0: the stored scale is 0 too, nothing is refitted",
                  "9e-7 -9e-7 9e-7 -9e-7", 8),
        symmetric("refit below fp16", "d = 2^-24 gives codes, the refitted scale rounds to 0; decoded zeros keep their signs",
                  "-1e-7 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0", 1, "least_squares"),
        symmetric("energy underflows", "x x = 0 for every channel, so E = 0 though x is not", "1e-30 -1e-30 2e-30 0", 4,
                  scale_type="fp32"),
        symmetric("energy subnormal", "E is subnormal and kept", "1e-21 -2e-21 3e-22 -1e-22", 3, scale_type="fp32"),
        symmetric("energy overflows", "E infinite: d and the stored scale saturate", "1e20 -1e20 3e19 1e18", 3,
                  scale_type="fp32"),
        symmetric("energy overflows, bf16", "the same in bf16", "1e20 -1e20 3e19 1e18", 3, scale_type="bf16"),
        symmetric("four times the energy overflows", "E is finite, 4 E is not", "1e19 -1e19 1e18 0", 2, scale_type="fp32"),
        symmetric("saturating first step", "d stops at 65504, codes clamp at both ends", "1e7 -1e7 3e6 -5e5", 3,
                  "least_squares"),
    ]


def clipping() -> list[dict]:
    outliers = "1 -2 3 -100 4 5 -6 7 0.5 0.25 -0.125 8 9 -10 50 11 " + lattice(16, 9)
    few_zeros = "0 0 0 5 0 -7 0 0 0 2 0 0"
    return [
        affine("row-wide threshold", "rho = 0.96 of 32: index 30, so -100 becomes -50, which stands in another group",
               outliers, 2, "float", 8, "fp16", 0.96),
        affine("row-wide threshold, integer zero", "the same with integer zero", outliers, 2, "integer", 8, "fp16", 0.96),
        affine("threshold in one group", "rho = 0.92 of 32: index 29", outliers, 3, "float", 32, "bf16", 0.92),
        affine("product in binary64", "0.96 * 25 is 24 in binary64, just below 24 without that rounding: nothing is clipped",
               lattice(24, 5) + " 40", 4, "float", 5, "fp16", 0.96),
        affine("the last index", "0.999 of 12 is index 11: nothing is clipped", lattice(12, 3), 3, "float", 12, "fp16", 0.999),
        affine("the first index", "rho = 0.05 of 12: index 0, all channels become +-tau", lattice(12, 3), 3, "float", 12,
               "fp16", 0.05),
        affine("threshold zero", "most channels are zero, so all become zero", few_zeros, 2, "float", 6, "fp16", 0.5),
        affine("equal magnitudes", "ties in the sort do not matter", "1 -1 1 -1 2 -2 2 -2", 2, "float", 4, "fp32", 0.5),
    ]


def exact_rows() -> list[dict]:
    return [
        exact("exact row", "bfloat16: ties to even, both directions; the stream is two bytes a channel",
              "1 -2.5 0x1.01p0 0x1.03p0 3.14159265 -1e-3 100000"),
        exact("exact ends", "subnormals, signed zeros, and R instead of an infinity",
              f"0 -0 0x1p-133 0x1.8p-133 {QUANTUM_32} {LARGEST} -{LARGEST}"),
    ]


CASES = [*every_width(), *long_rows(), *rounding(), *sums(), *degenerate(), *range_ends(), *clipping(), *exact_rows()]
