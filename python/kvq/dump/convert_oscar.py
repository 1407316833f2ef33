"""Turns a dump of OSCAR's serving fork (layer_<i>/{q,k,v,seq_lens}/<chunk>.pt) into a kvq dump (formats/dump.md).

Such dumps do not say how RoPE was applied, so --config or --rope-layout must. They also lack what nobody can add later;
every such gap is printed and named in the attribute `producer`. To calibrate without these gaps, use dump_qkv.py.
"""

import argparse
import sys
from pathlib import Path

from .. import __version__
from ..cli import Parser, run_script
from ..errors import EXIT_DONE, bad_input, usage
from ..files import atomic_path

PROGRAM = "convert_oscar_dump.py"
WARM_UP_TOKENS = 6
EPILOG = """\
examples

  convert_oscar_dump.py qkv_dumps/gpqa out.h5 --config Qwen3-8B/config.json
  convert_oscar_dump.py qkv_dumps/gpqa out.h5 --rope-layout half --rope-theta 1000000 --model-name Qwen/Qwen3-8B

exit codes: 0 done, 2 wrong flags, 3 malformed dump, 4 NaN or zeros in it, 5 unsupported dtype or RoPE
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(PROGRAM, __doc__, EPILOG)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="holds layer_0, layer_1, ...")
    parser.add_argument("output", metavar="OUT.h5", type=Path)
    parser.add_argument("--keep-first-chunk", action="store_true", help="keep chunk 0, the server's warm-up")
    parser.add_argument(
        "--positions",
        metavar="FILE",
        type=Path,
        help=".npy of integers, one per kept token, as given to RoPE (default: 0.. in each sequence)",
    )
    model = parser.add_argument_group("what the dump does not say; single options override --config")
    model.add_argument("--config", metavar="config.json", type=Path, help="of the Hugging Face model")
    model.add_argument("--rope-layout", choices=["none", "half", "interleaved"])
    model.add_argument("--rope-theta", metavar="X", type=float, help="without scaling")
    model.add_argument("--rotary-dim", metavar="N", type=int, help="default: the head dimension")
    model.add_argument("--rotary-offset", metavar="N", type=int, default=0)
    model.add_argument("--softmax-scale", metavar="X", type=float, help="default: 1/sqrt(D)")
    model.add_argument("--sliding-window", metavar="N", type=int, help="default: as in --config, else none")
    model.add_argument(
        "--num-layers", metavar="N", type=int, help="of the model (default: as in --config, else the last one + 1)"
    )
    model.add_argument("--model-name", metavar="NAME", help="default: the folder's name")
    args = parser.parse_args(argv)
    if args.config is None and args.rope_layout is None:
        parser.error("expected --config or --rope-layout: the dump does not say how RoPE was applied")
    if args.config is None and args.rope_layout != "none" and args.rope_theta is None:
        parser.error("--rope-layout needs --rope-theta or --config")
    for name, least in (("softmax_scale", 0.0), ("rope_theta", 0.0), ("rotary_dim", 0), ("num_layers", 0)):
        if getattr(args, name) is not None and not getattr(args, name) > least:
            parser.error(f"--{name.replace('_', '-')}: expected more than 0, found {getattr(args, name)}")
    return args


# Facts that OSCAR's dump does not have


def choose_rope(args, config, head_dim: int):
    """RopeFacts from the flags, else from the configuration."""
    from .rope_config import RopeFacts, plain_frequencies

    layout = args.rope_layout or config.rope_layout
    if layout is None:
        raise usage(
            f"{args.config}: model type '{config.values.get('model_type')}' is not in the table of layouts",
            "name --rope-layout: half for pairs (i, i + n/2), interleaved for pairs (2i, 2i+1)",
        )
    if layout == "none":
        return RopeFacts()
    if args.rope_theta is not None or config is None:
        rotary_dim = args.rotary_dim or head_dim
        inv_freq, factor = plain_frequencies(args.rope_theta, rotary_dim), 1.0
    else:
        inv_freq, factor = config.frequencies()
        rotary_dim = args.rotary_dim or 2 * len(inv_freq)
    if rotary_dim != 2 * len(inv_freq) or not 0 <= args.rotary_offset <= head_dim - rotary_dim:
        raise usage(
            f"a rotary slice of {rotary_dim} channels from {args.rotary_offset} on, with {len(inv_freq)} "
            f"frequencies, does not fit heads of {head_dim}",
            "see --rotary-dim and --rope-theta",
        )
    return RopeFacts(layout, rotary_dim, args.rotary_offset, factor, tuple(map(float, inv_freq)))


def layer_facts(args, config, layer: int, tensors):
    from .array_writer import LayerFacts

    _, q_heads, head_dim = tensors["q"].shape
    window = args.sliding_window
    if window is None:
        window = config.sliding_window(layer) if config else 0
    rope = choose_rope(args, config, head_dim)
    return LayerFacts(
        num_q_heads=q_heads,
        num_kv_heads=tensors["k"].shape[1],
        head_dim=head_dim,
        v_head_dim=tensors["v"].shape[2],
        softmax_scale=args.softmax_scale or head_dim**-0.5,
        sliding_window=window,
        rope_layout=rope.layout,
        rotary_dim=rope.rotary_dim,
        rotary_offset=rope.offset,
        rope_attention_factor=rope.attention_factor,
        rope_inv_freq=rope.inv_freq,
    )


def load_positions(path: Path, lengths: tuple[int, ...]):
    """int64 [T], strictly increasing within each sequence."""
    import numpy as np

    try:
        positions = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise bad_input(f"{path}: cannot read as .npy: {str(error).splitlines()[0]}") from error
    if positions.ndim != 1 or positions.dtype.kind not in "iu" or len(positions) != sum(lengths):
        raise bad_input(f"{path}: expected {sum(lengths)} integers, found {positions.dtype} {list(positions.shape)}")
    for sequence, part in enumerate(np.split(positions.astype(np.int64), np.cumsum(lengths)[:-1])):
        if part[0] < 0 or (np.diff(part) <= 0).any():
            raise bad_input(f"{path}: positions of sequence {sequence} are negative or do not increase")
    return positions.astype(np.int64)


# Data that the dump lacks and nobody can add later


def gaps(args, dump, first_layer) -> list[str]:
    """Sentences about data that the dump lacks, for people; `producer` records them in short."""
    found = []
    if 0 in dump.dropped:
        found.append(f"chunk 0 left out: the warm-up (normally {WARM_UP_TOKENS} tokens); --keep-first-chunk keeps it")
    if not dump.has_lengths:
        found.append("no seq_lens: every chunk counts as one sequence, though it may hold several requests")
    if args.positions is None:
        found.append("no positions: every sequence counts from 0, wherever it really began")
    chunks = first_layer.chunk_lengths
    full = sum(length == max(chunks) for length in chunks) if len(chunks) > 1 else 0
    found.append(
        "no request ids: a prompt cut by chunked prefill appears as several sequences, the later ones without "
        f"the keys before them ({full} of {len(chunks)} chunks have the greatest length, {max(chunks)}: "
        "likely cut)"
    )
    found.append("prefix-cache hits are not in the dump: sequences may lack their first keys")
    found.append("the dump stops at a token limit: the last sequence may be cut")
    found.append("decode-time tokens were not dumped, and no model_fingerprint is known")
    return found


SHORT_GAPS = (
    "from an OSCAR dump: no request ids, {positions}, sequences may lack keys before them (chunked prefill, "
    "prefix cache) and may stop early, no decode tokens"
)


def producer(args) -> str:
    positions = "positions assumed from 0" if args.positions is None else "positions from a file"
    return f"{PROGRAM} {__version__} {SHORT_GAPS.format(positions=positions)}"


# Conversion


def convert(args) -> None:
    from .array_writer import ArrayWriter
    from .oscar import load_layer, open_oscar_dump
    from .rope_config import ModelConfig

    dump = open_oscar_dump(args.folder, args.keep_first_chunk)
    config = ModelConfig.read(args.config) if args.config else None
    num_layers = args.num_layers or (config and config.values.get("num_hidden_layers")) or dump.layers[-1] + 1
    if dump.layers[-1] >= num_layers:
        raise usage(f"the dump has layer {dump.layers[-1]}, but the model {num_layers} layers", "see --num-layers")
    first = load_layer(dump, dump.layers[0])
    with atomic_path(args.output) as temporary, ArrayWriter(temporary) as writer:
        writer.root(
            model_name=args.model_name or args.folder.resolve().name,
            capture_point="post_rope",
            num_layers=num_layers,
            producer=producer(args),
            model_config=config.text if config else None,
        )
        writer.tokens(first.lengths, choose_positions(args, first.lengths))
        for layer in dump.layers:
            loaded = first if layer == dump.layers[0] else load_layer(dump, layer)
            if (loaded.lengths, loaded.chunk_lengths) != (first.lengths, first.chunk_lengths):
                raise bad_input(f"{args.folder}: layers {dump.layers[0]} and {layer} hold other sequences")
            writer.layer(layer, layer_facts(args, config, layer, loaded.tensors), loaded.tensors, loaded.dtypes)
    report(args, dump, first)


def choose_positions(args, lengths: tuple[int, ...]):
    import numpy as np

    if args.positions:
        return load_positions(args.positions, lengths)
    return np.concatenate([np.arange(length) for length in lengths])


def report(args, dump, first) -> None:
    for gap in gaps(args, dump, first):
        print(f"{PROGRAM}: warning: {gap}", file=sys.stderr)
    print(
        f"wrote {args.output}: {len(dump.layers)} layers, {sum(first.lengths)} tokens in {len(first.lengths)} "
        f"sequences from {len(dump.chunks)} chunks"
    )


def run(args) -> int:
    convert(args)
    return EXIT_DONE


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    return run_script(PROGRAM, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
