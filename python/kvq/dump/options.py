"""The command line of dump_qkv.py. Imports nothing heavy: `--help` answers at once."""

import argparse
import textwrap

from ..cli import Parser, decimal_integer, program_name
from . import __version__
from .families import supported_list

PROGRAM = "dump_qkv.py"
DESCRIPTION = """\
Runs a Hugging Face model over text and writes the queries, keys and values that enter attention to a kvq dump
(formats/dump.md): after QK-norm and RoPE, before the KV heads are repeated. Calibration and evaluation start from it.
"""

EPILOG = f"""\
example: 8 windows of 4096 tokens from all over a text to calibrate on, and as many of another to measure on

  dump_qkv.py Qwen/Qwen3-4B --text train.txt --sequence-length 4096 --windows 8 --output calibration.h5
  dump_qkv.py Qwen/Qwen3-4B --text held_out.txt --sequence-length 4096 --windows 8 --output evaluation.h5

  8 * 4096 tokens of 36 layers with 32 + 8 + 8 heads of 128 channels in bfloat16 are 14.5 GB. One text can serve both:
  dump disjoint parts with --skip. --generate adds decode-time tokens, --stride tests positions far apart.

example: chats, rendered with the model's own template

  dump_qkv.py Qwen/Qwen3-4B --text chat.jsonl --dry-run --output chat.h5
  zcat chat.jsonl.gz | dump_qkv.py Qwen/Qwen3-4B --text - --text-format jsonl --tokens 32768 --output chat.h5

  a line of JSONL: {{"messages": [{{"role": "user", "content": "Hi"}}, ...]}}, or {{"text": "..."}},
  or {{"prompt": "..."}}

Every dump is checked before it appears under its name: QK-norm, RoPE and attention are redone by hand on some tokens.

{textwrap.fill(f"supported: {supported_list()}", 118)}

exit codes: 0 done, 2 wrong flags, 3 unreadable input, 4 a numerical check failed, 5 unsupported model
"""


def positive(text: str) -> int:
    value = decimal_integer(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, found {text}")
    return value


def natural(text: str) -> int:
    value = decimal_integer(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, found {text}")
    return value


def token_list(text: str) -> list[int]:
    """ "151331,151333" -> token ids."""
    return [natural(part) for part in text.split(",")]


def layer_list(text: str) -> list[int]:
    """ "0,3,5-7" -> [0, 3, 5, 6, 7]"""
    layers = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        layers.update(range(natural(first), natural(last or first) + 1))
    if not layers:
        raise argparse.ArgumentTypeError(f"expected layers in rising order, as in 0,3,5-7, found {text}")
    return sorted(layers)


def build_parser() -> Parser:
    parser = Parser(PROGRAM, DESCRIPTION, EPILOG)
    parser.add_argument("model", metavar="MODEL", help="model folder, or the id of a model on the hub")
    parser.add_argument("--output", metavar="OUT.h5", required=True, help="the dump to write")
    parser.add_argument("--version", action="version", version=f"{program_name(PROGRAM)} {__version__}")
    add_text_options(parser)
    add_sequence_options(parser)
    content = parser.add_argument_group("what is stored")
    add_content_options(content)
    content.add_argument(
        "--o-proj", action="store_true", help="add each layer's output projection, float16 (its metric is there always)"
    )
    running = parser.add_argument_group("running")
    add_run_options(running)
    running.add_argument(
        "--dry-run", action="store_true", help="say how large the dump becomes, and the time and memory; write nothing"
    )
    return parser


def add_text_options(parser: Parser) -> None:
    group = parser.add_argument_group("text")
    group.add_argument(
        "--text",
        metavar="FILE",
        action="append",
        default=[],
        help="UTF-8 text to run the model over, or JSONL (.jsonl) with a chat or a text in each line; - is standard "
        "input; repeat for several",
    )
    group.add_argument(
        "--dataset",
        metavar="NAME",
        action="append",
        default=[],
        help="a data set of the hub, its records as in JSONL (needs the package datasets); repeat for several",
    )
    group.add_argument(
        "--synthetic-tokens",
        metavar="N",
        type=positive,
        help="N random token ids in place of a text: for tests, not for calibration",
    )
    group.add_argument("--seed", metavar="S", type=natural, default=0, help="of --synthetic-tokens (default 0)")
    group.add_argument("--skip", metavar="N", type=natural, default=0, help="leave out the first N tokens of each text")
    _add_record_options(parser)
    prefix = group.add_mutually_exclusive_group()
    prefix.add_argument(
        "--prepend",
        metavar="ID[,ID]",
        type=token_list,
        help="token ids that begin every sequence (default: what the tokenizer adds, "
        "else bos_token_id of the configuration)",
    )
    prefix.add_argument("--no-prepend", action="store_true", help="begin every sequence with the text itself")


def _add_record_options(parser: Parser) -> None:
    group = parser.add_argument_group("records of JSONL and data sets")
    group.add_argument(
        "--text-format",
        choices=["auto", "text", "jsonl"],
        default="auto",
        help="of --text (default auto: jsonl if the name ends in .jsonl or .ndjson, else text)",
    )
    group.add_argument(
        "--field",
        metavar="NAME",
        help="field with the text or the messages (default: the first of messages, conversations, text, prompt)",
    )
    group.add_argument(
        "--chat-template", metavar="FILE", help="for messages (default: the template of the model's tokenizer)"
    )
    group.add_argument(
        "--records",
        metavar="N",
        type=positive,
        help="take the first N records (default: all of a file, 1000 of a data set)",
    )
    group.add_argument(
        "--separate-records",
        action="store_true",
        help="begin a sequence with each record; by default records follow one another in one text, which is cut",
    )
    group.add_argument("--dataset-config", metavar="NAME", help="configuration of a data set that has several")
    group.add_argument("--split", metavar="NAME", default="train", help="split of a data set (default train)")


def add_sequence_options(parser: Parser) -> None:
    group = parser.add_argument_group("sequences")
    group.add_argument(
        "--sequence-length",
        metavar="L",
        type=positive,
        default=2048,
        help="tokens of a prompt, prepended ones included (default 2048)",
    )
    size = group.add_mutually_exclusive_group()
    size.add_argument(
        "--tokens",
        metavar="N",
        type=positive,
        help="stop after N prompt tokens in all, shared among the texts (default: all text)",
    )
    size.add_argument(
        "--windows",
        metavar="W",
        type=positive,
        help="W whole sequences of each text, evenly spread: every max(1, available / W)-th window",
    )
    group.add_argument(
        "--stride",
        metavar="K",
        type=positive,
        default=1,
        help="multiply positions by K: the distances of a long context at the cost of a short one (default 1)",
    )
    group.add_argument(
        "--generate",
        metavar="N",
        type=natural,
        default=0,
        help="let the model continue each prompt by N greedy tokens, marked in /generated",
    )
    group.add_argument("--allow-duplicates", action="store_true", help="accept sequences with the same tokens")


def add_content_options(group) -> None:
    group.add_argument(
        "--dtype",
        choices=["auto", "float32", "float16", "bfloat16"],
        default="auto",
        help="of q, k and v in the file (default auto: as the model's weights)",
    )
    group.add_argument("--layers", metavar="LIST", type=layer_list, help="only these, as in 0,3,5-7 (default: all)")
    group.add_argument(
        "--curvature",
        action="store_true",
        help="add output_curvature: one backward pass per prompt, needs its activations in memory",
    )
    group.add_argument("--model-name", metavar="NAME", help="name in the file (default: hub id or folder name)")


def add_run_options(group) -> None:
    group.add_argument(
        "--device",
        metavar="auto|balanced|cpu|cuda|cuda:N",
        default="cpu",
        help="where to run; auto and balanced spread a model over all GPUs, auto also over CPU memory if GPUs are too "
        "small (needs the package accelerate; default cpu)",
    )
    group.add_argument(
        "--compute-dtype",
        choices=["auto", "float32", "float16", "bfloat16"],
        default="auto",
        help="of the model's arithmetic (default auto: float32 on the CPU, else as the weights)",
    )
    group.add_argument("--threads", metavar="N", type=positive, help="CPU threads (default: what PyTorch takes)")
    group.add_argument("--local-files-only", action="store_true", help="do not ask the hub; a folder never does")
    group.add_argument("--quiet", action="store_true", help="print nothing but errors")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = build_parser()
    args = parser.parse_args(argv)
    refuse_contradictions(parser, args)
    return args


def refuse_contradictions(parser: Parser, args: argparse.Namespace) -> None:
    """Of the options of texts."""
    if bool(args.text or args.dataset) == (args.synthetic_tokens is not None):
        parser.error("expected either --text or --dataset, or --synthetic-tokens")
    if args.text.count("-") > 1:
        parser.error("--text: standard input can be read once, found - twice")
    if args.separate_records and (args.windows or args.skip):
        parser.error("--separate-records: each record is a text of its own, so --windows and --skip have no meaning")
