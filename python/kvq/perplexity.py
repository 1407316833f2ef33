"""Perplexity of a Hugging Face model on a text, with keys and values as the codes of a kvq artifact give them back.

K and V are replaced after RoPE, in every layer that the artifact covers and at every position outside its windows, also
during prefill. The codec is the second implementation (torch_codec.py), the arithmetic float32.

Protocol: the text's tokens are cut into windows of --window-tokens - 1, the bos token stands before each; with W
windows wanted and N available every max(1, N // W)-th is taken, from the first; perplexity is over all their tokens.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

from .cli import Parser, run_script
from .errors import EXIT_DONE, bad_input, one_line, usage

PROGRAM = "perplexity.py"
EPILOG = """\
schemes without an artifact: exact; affine, integer, absmax, least_squares, norm with 1 to 8 bits;
hadamard- before it rotates heads, g64 behind it makes groups of 64 channels (default: the head),
as in hadamard-norm2g64

examples

  perplexity.py MODEL --text evaluation.txt --artifact out.safetensors
  perplexity.py MODEL --text evaluation.txt --scheme exact
  perplexity.py MODEL --text evaluation.txt --scheme hadamard-affine2 --unrounded-metadata --windows 64,256

exit codes: 0 done, 2 wrong flags, 3 unreadable input or an artifact of another model, 5 unsupported
"""


def parse_windows(text: str) -> str | tuple[int, int]:
    if text in ("artifact", "none"):
        return text
    sink, comma, recent = text.partition(",")
    if not (comma and sink.isdigit() and recent.isdigit()):
        raise argparse.ArgumentTypeError(f"expected artifact, none or SINK,RECENT, found {text}")
    return int(sink), int(recent)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(PROGRAM, __doc__, EPILOG)
    parser.add_argument("model", metavar="MODEL", type=Path, help="model folder")
    parser.add_argument("--text", metavar="FILE", type=Path, required=True, help="UTF-8 text to predict")
    coding = parser.add_mutually_exclusive_group()
    coding.add_argument("--artifact", metavar="FILE", type=Path)
    coding.add_argument("--scheme", metavar="NAME", help="see below (default: exact)")
    parser.add_argument(
        "--windows",
        metavar="artifact|none|SINK,RECENT",
        type=parse_windows,
        default="artifact",
        help="tokens that stay exact (default: those of the artifact; none without one)",
    )
    parser.add_argument("--only", choices=["k", "v"], help="code keys or values only")
    parser.add_argument(
        "--unrounded-metadata",
        action="store_true",
        help="keep scales, minima and zero points in float32; for comparisons only",
    )
    parser.add_argument("--num-windows", metavar="W", type=int, default=6, help="default 6")
    parser.add_argument("--window-tokens", metavar="N", type=int, default=4096, help="bos included (default 4096)")
    parser.add_argument("--bos", metavar="ID", type=int, help="default: bos_token_id of the model's configuration")
    parser.add_argument(
        "--ignore-fingerprint", action="store_true", help="use an artifact of another model all the same"
    )
    parser.add_argument("--device", default="cpu", help="default cpu")
    parser.add_argument("--threads", metavar="N", type=int, help="CPU threads (default: what PyTorch takes)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    if not args.artifact:  # set here, because a default of argparse would hide a clash with --artifact
        args.scheme = args.scheme or "exact"
    for name, least in (("num_windows", 1), ("window_tokens", 2), ("threads", 1)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')}: expected at least {least}, found {getattr(args, name)}")
    return args


# Text


def cut_windows(tokens: list[int], length: int, wanted: int) -> list[list[int]]:
    """Whole windows of `length` tokens, evenly spaced, beginning with the first."""
    available = [tokens[i : i + length] for i in range(0, len(tokens) - length + 1, length)]
    return available[:: max(1, len(available) // wanted)][:wanted]


def read_windows(args, tokenizer) -> list[list[int]]:
    try:
        text = args.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise bad_input(f"{args.text}: cannot read as UTF-8 text: {error}") from error
    tokens = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    windows = cut_windows(tokens, args.window_tokens - 1, args.num_windows)
    if not windows:
        raise bad_input(
            f"{args.text}: expected at least {args.window_tokens - 1} tokens, found {len(tokens)}",
            "--window-tokens makes windows shorter",
        )
    return windows


# Model and codes


def load_model(args):
    """(model in float32, tokenizer)"""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if not args.model.is_dir():
        raise bad_input(f"{args.model}: no such model folder")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, local_files_only=True)
    except Exception as error:  # each part of transformers raises its own types
        raise bad_input(f"{args.model}: cannot load: {one_line(error)}") from error
    return model.to(args.device).eval(), tokenizer


def choose_bos(args, model) -> int:
    bos = model.config.bos_token_id if args.bos is None else args.bos
    if not isinstance(bos, int) or not 0 <= bos < model.config.vocab_size:
        raise usage(
            f"--bos: expected a token id below {model.config.vocab_size}, found {bos}",
            "the configuration has none: name the token that begins a text",
        )
    return bos


def choose_coding(args):
    """(plan_of, Windows, manifest or None)"""
    from .artifact_reader import load_artifact
    from .builtin_schemes import BuiltinPlans
    from .coded_attention import ArtifactPlans, Windows

    sides = args.only or "kv"
    if args.artifact is None:
        windows = args.windows if isinstance(args.windows, tuple) else (0, 0)
        plans = BuiltinPlans(args.scheme, sides, args.unrounded_metadata, with_windows=args.windows == "artifact")
        return plans, Windows(*windows), None
    artifact = load_artifact(args.artifact)
    check_fingerprint(args, artifact.manifest)
    own = (artifact.sink_tokens, artifact.recent_tokens)
    windows = {"artifact": own, "none": (0, 0)}.get(args.windows, args.windows)
    return ArtifactPlans(artifact, sides, args.unrounded_metadata), Windows(*windows), artifact.manifest


def check_fingerprint(args, manifest: dict) -> None:
    from .fingerprint import model_fingerprint

    claimed = manifest["model"].get("fingerprint", "")
    if claimed and not args.ignore_fingerprint and claimed != (found := model_fingerprint(args.model)):
        raise bad_input(
            f"{args.artifact}: expected model {claimed[:16]}, {args.model} is {found[:16]}",
            "--ignore-fingerprint uses it all the same",
        )


def report_uncovered(args, model, manifest: dict | None) -> None:
    if manifest is None:
        return
    covered = {entry["layer"] for entry in manifest["layers"]}
    missing = [i for i in range(model.config.num_hidden_layers) if i not in covered]
    if missing:
        print(
            f"{PROGRAM}: warning: {args.artifact} does not cover layers {', '.join(map(str, missing))}: "
            "they stay exact",
            file=sys.stderr,
        )


# Measuring


def window_nll(model, bos: int, window: list[int]) -> float:
    """Sum of -ln p over the window's tokens, in nats."""
    import torch

    ids = torch.tensor([[bos, *window]], device=model.device)
    with torch.inference_mode():
        logits = model(ids, use_cache=False).logits[0, :-1].float()
        return float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").double().sum())


def measure(args) -> dict:
    import torch

    from .coded_attention import CodedAttention

    if args.threads:
        torch.set_num_threads(args.threads)
    plan_of, windows, manifest = choose_coding(args)
    model, tokenizer = load_model(args)
    bos, texts = choose_bos(args, model), read_windows(args, tokenizer)
    report_uncovered(args, model, manifest)
    model.set_attn_implementation(CodedAttention(plan_of, windows).register())
    started, sums = time.monotonic(), []
    for text in texts:
        sums.append(window_nll(model, bos, text))
        progress(len(sums), len(texts), time.monotonic() - started)
    tokens = sum(map(len, texts))
    nll = sum(sums) / tokens
    return {
        "format": "kvq-perplexity",
        "version": "1.0",
        "model": str(args.model),
        "text": str(args.text),
        "artifact": str(args.artifact) if args.artifact else None,
        "scheme": args.scheme,
        "only": args.only,
        "unrounded_metadata": args.unrounded_metadata,
        "windows": {"sink_tokens": windows.sink_tokens, "recent_tokens": windows.recent_tokens},
        "num_windows": len(texts),
        "window_tokens": args.window_tokens,
        "tokens": tokens,
        "nll": nll,
        "perplexity": math.exp(nll),
        "window_nll": [s / len(t) for s, t in zip(sums, texts)],
    }


def progress(done: int, total: int, seconds: float) -> None:
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\rwindow {done} of {total}, {seconds:.0f} s", end=end, file=sys.stderr, flush=True)


def run(args) -> int:
    result = measure(args)
    if args.json:
        print(json.dumps(result, indent=2))
        return EXIT_DONE
    windows = result["windows"]
    print(
        f"perplexity {result['perplexity']:.4f} ({result['nll']:.6f} nats a token) over {result['tokens']} tokens in "
        f"{result['num_windows']} windows of {args.window_tokens}; {args.artifact or args.scheme}, exact: sink "
        f"{windows['sink_tokens']}, recent {windows['recent_tokens']}"
    )
    return EXIT_DONE


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    return run_script(PROGRAM, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
