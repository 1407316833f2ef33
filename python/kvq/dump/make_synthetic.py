"""Writes a kvq dump (formats/dump.md) of made-up activations whose structure is known: for tests, without any model.

Everything is planted after RoPE; `--capture pre_rope` undoes the rotation, so that a reader has to redo it. The known
answers stand under /truth. With enough tokens (more rows than channels) the planted moments hold exactly, not only on
average: noise is whitened over the dump before it is colored. Truths are about the numbers before they are rounded to
--dtype.
"""

import argparse
import sys
from pathlib import Path

from ..cli import Parser, run_script, seed
from ..errors import EXIT_DONE, usage

PROGRAM = "make_synthetic_dump.py"
EPILOG = """\
under /truth, per layer in /truth/layers/<i>; D channels, H KV heads, every array with one entry per KV head

  query_basis [H, D, D], query_spectrum [H, D]   E q^T q = basis diag(spectrum) basis^T over a KV head's query heads
  key_basis [H, D, D], key_spectrum [H, D]       covariance of the keys before outliers and means; only with
                                                 --orthogonal-heads, whose value_basis and value_spectrum are alike
  k_outliers, v_outliers [H, N]                  channels that are --outlier-scale times larger
  k_mean, v_mean [H, D]                          means that were added last
  sink_direction [H, D], sink_key [H, D]         what all queries have in common, and the first key of each sequence;
                                                 that key follows none of the rules for keys above

  attributes of /truth: options (JSON), exact (1 if moments hold exactly, 0 if only on average)

examples

  make_synthetic_dump.py a.h5 --tokens 500 --sequences 7 --channel-means 2 --outlier-channels 3 --sink
  make_synthetic_dump.py b.h5 --rope interleaved --rotary-dim 32 --rotary-offset 8 --capture pre_rope --dtype float16
  make_synthetic_dump.py c.h5 --kv-heads 4 --orthogonal-heads --query-spectrum 0.9 --split-by-layer
"""


SIZES = {"layers": 2, "tokens": 512, "sequences": 3, "q-heads": 4, "kv-heads": 2, "head-dim": 64}


def build_parser() -> Parser:
    parser = Parser(PROGRAM, __doc__, EPILOG)
    parser.add_argument("output", metavar="OUT.h5", type=Path)
    size = parser.add_argument_group("size")
    for name, default in SIZES.items():
        size.add_argument(f"--{name}", metavar="N", type=int, default=default, help=f"default {default}")
    size.add_argument("--v-head-dim", metavar="N", type=int, help="default: --head-dim")
    size.add_argument(
        "--dtype",
        choices=["float32", "float16", "float16_bits", "bfloat16"],
        default="float32",
        help="float16_bits: float16 as uint16 patterns (default float32)",
    )
    size.add_argument("--seed", metavar="S", type=seed, default=0)
    kind = parser.add_argument_group("geometry")
    kind.add_argument("--kind", choices=["gqa", "mla_rope"], default="gqa", help="mla_rope: one key head, no values")
    kind.add_argument("--rope", choices=["none", "half", "interleaved"], default="half")
    kind.add_argument("--rotary-dim", metavar="N", type=int, help="default: the rest of the head")
    kind.add_argument("--rotary-offset", metavar="N", type=int, default=0)
    kind.add_argument("--rope-theta", metavar="X", type=float, default=10000.0)
    kind.add_argument("--rope-attention-factor", metavar="X", type=float, default=1.0)
    kind.add_argument("--capture", choices=["pre_rope", "post_rope"], default="post_rope")
    kind.add_argument("--sliding-window", metavar="N", type=int, default=0)
    kind.add_argument("--logit-softcapping", metavar="X", type=float, help="the softmax takes X tanh(logit / X)")
    kind.add_argument("--learned-sinks", action="store_true", help="random sink_logits, one for each query head")
    planted = parser.add_argument_group("what is planted")
    planted.add_argument(
        "--query-spectrum",
        metavar="DECAY",
        type=float,
        default=1.0,
        help="eigenvalues of the query moment fall by this factor (default 1: all equal)",
    )
    planted.add_argument(
        "--orthogonal-heads",
        action="store_true",
        help="KV heads live in nearly orthogonal subspaces of D / kv-heads dimensions",
    )
    planted.add_argument(
        "--outlier-channels", metavar="N", type=int, default=0, help="per KV head, of keys and of values"
    )
    planted.add_argument("--outlier-scale", metavar="X", type=float, default=10.0)
    planted.add_argument(
        "--channel-means", metavar="X", type=float, default=0.0, help="deviation of the channels' means"
    )
    planted.add_argument("--sink", action="store_true", help="the first token of a sequence draws much attention")
    planted.add_argument(
        "--generated", metavar="N", type=int, default=0, help="the last N tokens of each sequence count as generated"
    )
    planted.add_argument(
        "--o-proj-metric",
        action="store_true",
        help="write a random positive definite o_proj_metric for each KV head (not for mla_rope)",
    )
    split = parser.add_mutually_exclusive_group()
    split.add_argument("--split-by-layer", action="store_true", help="OUT.layer<i>.h5, one file per layer")
    split.add_argument("--split-by-sequence", action="store_true", help="OUT.sequence<i>.h5, one file per sequence")
    return parser


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    args = build_parser().parse_args(argv)
    if args.kind == "mla_rope":
        args.kv_heads = 1
    args.v_head_dim = args.v_head_dim or args.head_dim
    if args.rope == "none":
        args.rotary_dim = 0
    elif args.rotary_dim is None:
        args.rotary_dim = (args.head_dim - args.rotary_offset) // 2 * 2
    return args


def check_options(args) -> None:
    for name in ("layers", "tokens", "sequences", "q_heads", "kv_heads", "head_dim", "v_head_dim"):
        if getattr(args, name) < 1:
            raise usage(f"--{name.replace('_', '-')}: expected at least 1, found {getattr(args, name)}")
    for name in ("sliding_window", "generated", "rotary_offset"):
        if getattr(args, name) < 0:
            raise usage(f"--{name.replace('_', '-')}: expected 0 or more, found {getattr(args, name)}")
    has_rope = args.rope != "none"
    rules = [
        (args.tokens >= args.sequences, f"--tokens: expected at least one for each of {args.sequences} sequences"),
        (args.q_heads % args.kv_heads == 0, f"--q-heads: expected a multiple of {args.kv_heads} KV heads"),
        (max(args.head_dim, args.v_head_dim) <= 1024, "--head-dim, --v-head-dim: expected at most 1024"),
        (not has_rope or (args.rotary_dim >= 2 and args.rotary_dim % 2 == 0), "--rotary-dim: expected an even number"),
        (args.rotary_offset + args.rotary_dim <= args.head_dim, "--rotary-dim: the slice leaves the head"),
        (args.rope_attention_factor > 0, "--rope-attention-factor: expected more than 0"),
        (args.rope_theta > 0, "--rope-theta: expected more than 0"),
        (
            args.logit_softcapping is None or 0 < args.logit_softcapping <= 1e6,
            "--logit-softcapping: expected more than 0, at most 1e6",
        ),
        (0 < args.query_spectrum <= 1, "--query-spectrum: expected more than 0, at most 1"),
        (0 <= args.outlier_channels <= min(args.head_dim, args.v_head_dim), "--outlier-channels: expected at most all"),
    ]
    for holds, message in rules:
        if not holds:
            raise usage(message)


def run(args) -> int:
    check_options(args)
    from .synthetic import plan_files, write_file

    for file in plan_files(args):
        write_file(args, file)
        print(f"wrote {file.path}", file=sys.stderr)
    return EXIT_DONE


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    return run_script(PROGRAM, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
