"""The command line of perplexity.py. Imports nothing heavy: `--help` answers at once."""

import argparse
from pathlib import Path

from .cli import Parser

PROGRAM = "perplexity.py"
DESCRIPTION = """\
Perplexity of a Hugging Face model on a text, with keys and values as the codes of kvq artifacts give them back.

K and V are replaced after RoPE, in every layer that an artifact covers and at every position outside its windows, also
during prefill. The codec is the second implementation (torch_codec.py), the arithmetic float32.

Protocol: the text's tokens are cut into windows of --window-tokens - 1, the bos token stands before each; with W
windows wanted and N available every max(1, N // W)-th is taken, from the first; perplexity is over all their tokens.

All artifacts and schemes are measured on the same windows, after the exact model, and compared with it: change of
perplexity, and its 95% bootstrap interval over windows.
"""
EPILOG = """\
schemes without an artifact are exact and those of kvq-eval (formats/eval.md):

  bf16, fp8, fp8-head, fp8-unscaled, nvfp4, saw-int4, naive-int<b>,
  quarot-int<b>, symmetric-norm-<b>, tq-mse-<b>, turboquant-qjl-<b>,
  kivi-<b>, kivi-scale-only-<b>

<b> is 1 to 8 bits; -k behind a name codes keys only; -r32 behind kivi-<b> sets
its residual. Also affine, integer, absmax, least_squares and norm, followed by
the bits: hadamard- before such a name rotates heads, g64 behind it makes groups
of 64 channels, as in hadamard-norm2g64.

examples

  perplexity.py MODEL --text evaluation.txt --artifact out.safetensors
  perplexity.py MODEL --text evaluation.txt --artifact a.safetensors b.safetensors --scheme affine2 affine4
  perplexity.py Qwen/Qwen3-0.6B --text evaluation.txt
  perplexity.py MODEL --text evaluation.txt --scheme hadamard-affine2 --unrounded-metadata --windows 64,256

exit codes: 0 done, 2 wrong flags, 3 unreadable input or an artifact of another model, 5 unsupported
"""


class AddCandidates(argparse.Action):
    """Adds (kind, value) pairs to one list, so that candidates keep the order of the command line."""

    def __call__(self, parser, namespace, values, option_string=None):
        namespace.candidates = [*namespace.candidates, *((self.const, value) for value in values)]


def parse_windows(text: str) -> str | tuple[int, int]:
    if text in ("artifact", "none"):
        return text
    sink, comma, recent = text.partition(",")
    if not (comma and sink.isdigit() and recent.isdigit()):
        raise argparse.ArgumentTypeError(f"expected artifact, none or SINK,RECENT, found {text}")
    return int(sink), int(recent)


def build_parser() -> Parser:
    parser = Parser(PROGRAM, DESCRIPTION, EPILOG)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="model folder, or the id of a model on the hub")
    parser.add_argument("--text", metavar="FILE", type=Path, required=True, help="UTF-8 text to predict")
    _add_candidates(parser)
    _add_protocol(parser)
    _add_running(parser)
    return parser


def _add_candidates(parser: Parser) -> None:
    group = parser.add_argument_group("what is measured")
    parser.set_defaults(candidates=[])
    for flag, metavar, text in (
        ("artifact", "FILE", "artifacts; several files, or the flag several times"),
        ("scheme", "NAME", "schemes without an artifact, see below; several names, or the flag several times"),
    ):
        group.add_argument(
            f"--{flag}",
            metavar=metavar,
            dest="candidates",
            action=AddCandidates,
            const=flag,
            nargs="+",
            default=argparse.SUPPRESS,
            help=text,
        )
    group.add_argument(
        "--no-exact", action="store_true", help="leave out the exact model; the first candidate is the baseline"
    )
    group.add_argument("--only", choices=["k", "v"], help="code keys or values only")
    group.add_argument(
        "--unrounded-metadata",
        action="store_true",
        help="keep scales, minima and zero points in float32; for comparisons only",
    )
    group.add_argument(
        "--windows",
        metavar="artifact|none|SINK,RECENT",
        type=parse_windows,
        default="artifact",
        help="tokens that stay exact (default: those of each artifact; none for schemes)",
    )
    group.add_argument(
        "--ignore-fingerprint", action="store_true", help="use an artifact of another model all the same"
    )


def _add_protocol(parser: Parser) -> None:
    group = parser.add_argument_group("protocol")
    group.add_argument("--num-windows", metavar="W", type=int, default=6, help="default 6")
    group.add_argument("--window-tokens", metavar="N", type=int, default=4096, help="bos included (default 4096)")
    group.add_argument("--bos", metavar="ID", type=int, help="default: bos_token_id of the model's configuration")
    group.add_argument("--seed", metavar="S", type=int, default=0, help="of the bootstrap samples (default 0)")


def _add_running(parser: Parser) -> None:
    group = parser.add_argument_group("running")
    group.add_argument("--device", default="cpu", help="default cpu")
    group.add_argument("--threads", metavar="N", type=int, help="CPU threads (default: what PyTorch takes)")
    group.add_argument(
        "--codec",
        choices=["auto", "compiled", "pytorch"],
        default="auto",
        help="what searches trellis codes on a CPU: libkvq_codec of the built tools, or PyTorch, which gives the same "
        "codes and is slow (default auto: libkvq_codec if it is there)",
    )
    group.add_argument("--local-files-only", action="store_true", help="do not ask the hub; a folder never does")
    group.add_argument("--quiet", action="store_true", help="no progress")
    group.add_argument("--json", action="store_true", help="print one JSON document")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.model is None:
        parser.error("expected MODEL, before --artifact and --scheme, because these take all names that follow them")
    for name, least in (("num_windows", 1), ("window_tokens", 2), ("threads", 1), ("seed", 0)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')}: expected at least {least}, found {getattr(args, name)}")
    repeated = [each for index, each in enumerate(args.candidates) if each in args.candidates[:index]]
    if repeated:
        parser.error(f"--{repeated[0][0]}: {repeated[0][1]} is given twice")
    if not args.no_exact:
        args.candidates = [("scheme", "exact"), *(each for each in args.candidates if each != ("scheme", "exact"))]
    if not args.candidates:
        parser.error("expected --artifact or --scheme beside --no-exact")
    return args
