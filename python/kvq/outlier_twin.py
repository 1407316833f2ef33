"""Writes the outlier twin of a model: the same function with channels of very different size, as large models have
them.

Attention computes the same if a rotary pair of keys is multiplied by s and that of the queries divided by s, or a
channel of the values multiplied by t and the columns of o_proj that read it divided by t. The twin has such factors in
channels drawn at random: of each layer's rotary pairs 2 get s = 32, 4 get 8, 10 get 2 (in the weights of QK-norm); of
each KV head's value channels 3 get t = 16, 7 get 4. Factors are powers of two, which 16-bit weights hold exactly, so
the twin has the model's perplexity. Where a coded KV cache costs the twin more than the model, the method depends on
how a model is scaled."""

import argparse
import shutil
import sys
from pathlib import Path

from .cli import Parser, run_script, seed
from .errors import bad_input, unsupported
from .files import atomic_files

PROGRAM = "outlier_twin.py"
EPILOG = """\
example

  outlier_twin.py sample_data/model --output build/twin

exit codes: 0 done, 2 wrong flags, 3 unreadable input, 5 another family than Qwen3
"""
FAMILIES = ("qwen3", "qwen3_moe")  # with QK-norm before RoPE; a rotary pair is channels i and i + D/2 of the whole head
KEY_FACTORS = ((2, 32.0), (4, 8.0), (10, 2.0))  # (rotary pairs, factor)
VALUE_FACTORS = ((3, 16.0), (7, 4.0))  # (channels, factor)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(PROGRAM, __doc__, EPILOG)
    parser.add_argument("model", metavar="MODEL", type=Path, help="model folder")
    parser.add_argument(
        "--output", metavar="FOLDER", type=Path, required=True, help="folder of the twin, made if it is not there"
    )
    parser.add_argument("--seed", type=seed, default=7, help="of the channels that are drawn (default 7)")
    return parser.parse_args(argv)


def factors(count: int, groups: tuple[tuple[int, float], ...], generator):
    """[count]: each group's factor at as many random places as the group has, 1 everywhere else."""
    import torch

    order, scale, first = torch.randperm(count, generator=generator), torch.ones(count), 0
    for number, factor in groups:
        scale[order[first : first + number]] = factor
        first += number
    return scale


def rescale(model, seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    config = model.config
    dim, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            pairs = factors(dim // 2, KEY_FACTORS, generator)
            of_keys = torch.cat([pairs, pairs]).to(attention.k_norm.weight.dtype)  # channels i and i + D/2 are a pair
            attention.k_norm.weight.mul_(of_keys)
            attention.q_norm.weight.div_(of_keys)
            for head in range(config.num_key_value_heads):
                of_values = factors(dim, VALUE_FACTORS, generator).to(attention.v_proj.weight.dtype)
                attention.v_proj.weight[head * dim : (head + 1) * dim].mul_(of_values[:, None])
                if attention.v_proj.bias is not None:
                    attention.v_proj.bias[head * dim : (head + 1) * dim].mul_(of_values)
                for query in range(head * group, (head + 1) * group):
                    attention.o_proj.weight[:, query * dim : (query + 1) * dim].div_(of_values)


def run(args: argparse.Namespace) -> int:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    if not (args.model / "config.json").is_file():
        raise bad_input(f"{args.model}: expected a model folder with config.json")
    if args.output.exists() and args.output.resolve() == args.model.resolve():
        raise bad_input(f"--output: {args.output} is the model itself", "choose another folder")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(args.model)
    if config.model_type not in FAMILIES:
        raise unsupported(
            f"{args.model}: expected a model of type {' or '.join(FAMILIES)}, found {config.model_type}",
            "norms of others scale channels otherwise, or RoPE pairs other channels",
        )
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    rescale(model, args.seed)
    with atomic_files(args.output) as temporary:
        model.save_pretrained(temporary)
        for name in TOKENIZER_FILES:
            if (args.model / name).exists():
                shutil.copy(args.model / name, temporary / name)
    print(f"wrote {args.output}")
    return 0


def main(argv: list[str] | None = None) -> int:
    return run_script(PROGRAM, lambda: run(parse_arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())
