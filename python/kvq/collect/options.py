"""The command line of collect_stats.py. Imports nothing heavy: `--help` answers at once."""

import argparse
import textwrap

from ..cli import Parser, program_name
from ..cli import seed as seed_number
from ..dump.families import supported_list
from ..dump.options import (
    add_content_options,
    add_run_options,
    add_sequence_options,
    add_text_options,
    natural,
    positive,
    refuse_contradictions,
)
from . import __version__

PROGRAM = "collect_stats.py"
DESCRIPTION = """\
Runs a Hugging Face model over text and writes the statistics that kvq-calibrate decides from (formats/stats.md). It
writes no dump: queries, keys and values are added up on the device of their layer while the model runs.
"""

EPILOG = f"""\
example: statistics of 64 windows of 4096 tokens, then an artifact

  collect_stats.py Qwen/Qwen3-4B --text train.txt --sequence-length 4096 --windows 64 --device auto \\
    --output train.stats.safetensors
  kvq-calibrate --stats train.stats.safetensors --output train.oscar.safetensors

example: statistics of two runs, or of a run and a dump, added

  kvq-calibrate --merge-stats first.safetensors second.safetensors --stats both.safetensors

  Files merge if they have the same moments (--collect), seed (--sample-seed), --sample-tokens and --queries.

With the same texts and flags, sample, held-out tokens, golden tokens and hashes are those of a dump; sums differ by
rounding. A dump is what kvq-eval measures on, and what further moments can be collected from.

{textwrap.fill(f"supported: {supported_list()}", 118)}

exit codes: 0 done, 2 wrong flags, 3 unreadable input, 4 a numerical check failed, 5 unsupported model
"""

# In the order of formats/stats.md, without `sst`: its weights need the C_Q of all tokens, which is not known before the
# last sequence.
MOMENTS = ("query", "key", "value", "scored_value", "scored_query")
MOST_SAMPLED, MOST_GOLDEN = 1 << 30, 4096  # formats/stats.schema.json


def moment(text: str) -> str:
    if text == "sst":
        raise argparse.ArgumentTypeError(
            "sst weighs values by the query moment of all tokens, which is not known while the model runs; "
            "kvq-calibrate collects it from a dump"
        )
    return text


def build_parser() -> Parser:
    parser = Parser(PROGRAM, DESCRIPTION, EPILOG)
    parser.add_argument("model", metavar="MODEL", help="model folder, or the id of a model on the hub")
    parser.add_argument("--output", metavar="OUT.safetensors", required=True, help="the statistics to write")
    parser.add_argument("--version", action="version", version=f"{program_name(PROGRAM)} {__version__}")
    add_text_options(parser)
    add_sequence_options(parser)
    content = parser.add_argument_group("rows")
    add_content_options(content)
    _add_statistics_options(parser)
    running = parser.add_argument_group("running")
    add_run_options(running)
    running.add_argument(
        "--batch",
        metavar="N",
        type=positive,
        default=1,
        help="sequences in one forward pass; more than 1 rounds otherwise than a dump does, so that rows, sample and "
        "hashes are not those of a dump (default 1)",
    )
    parser.set_defaults(dry_run=False, o_proj=False)  # of dumps
    return parser


def _add_statistics_options(parser: Parser) -> None:
    group = parser.add_argument_group("statistics")
    group.add_argument(
        "--collect",
        metavar="NAME",
        nargs="+",
        type=moment,
        choices=[*MOMENTS, "all"],
        default=["all"],
        help=f"moments: {', '.join(MOMENTS)}, or all of these (default all); scored_query brings scored_value",
    )
    group.add_argument(
        "--queries",
        choices=["all", "generated", "prompt"],
        default="all",
        help="whose queries count; generated and prompt need --generate (default all)",
    )
    group.add_argument(
        "--sample-tokens", metavar="N", type=positive, default=2048, help="tokens a layer kept as rows (default 2048)"
    )
    group.add_argument(
        "--sample-seed",
        metavar="S",
        type=seed_number,
        default=0,
        help="of the sample; kvq-calibrate calls it --seed (default 0)",
    )
    group.add_argument(
        "--held-out-tokens",
        metavar="N",
        type=natural,
        default=1024,
        help="first tokens of the longest sequence that are kept out of all sums, to compare plans on; 0 = none "
        "(default 1024)",
    )
    group.add_argument(
        "--golden-tokens",
        metavar="N",
        type=natural,
        default=32,
        help="tokens a layer kept for self-tests of runtimes; 0 = none (default 32)",
    )
    group.add_argument(
        "--no-ranges",
        action="store_true",
        help="do not say whose tokens these are: several sequences then need no temporary file for their keys and "
        "values, and merging finds tokens that are in two files by the samples alone",
    )


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = build_parser()
    args = parser.parse_args(argv)
    refuse_contradictions(parser, args)
    if args.sample_tokens > MOST_SAMPLED:
        parser.error(f"--sample-tokens: expected at most {MOST_SAMPLED}, found {args.sample_tokens}")
    if args.golden_tokens > MOST_GOLDEN:
        parser.error(f"--golden-tokens: expected at most {MOST_GOLDEN}, found {args.golden_tokens}")
    if args.queries != "all" and not args.generate:
        parser.error(f"--queries {args.queries}: expected --generate, which makes generated tokens")
    if args.generate and args.batch > 1:
        parser.error(f"--batch: --generate runs one sequence at a time, found {args.batch}")
    args.collect = chosen_moments(args.collect)
    return args


def chosen_moments(words: list[str]) -> tuple[str, ...]:
    """In the order of MOMENTS. kvq-calibrate collects scored_value wherever it collects scored_query."""
    if "all" in words:
        return MOMENTS
    return tuple(name for name in MOMENTS if name in words or (name == "scored_value" and "scored_query" in words))
