"""Perplexity of a model with keys and values as codes give them back: from arguments to a table."""

import json
import math
import sys
import time
from pathlib import Path

from .cli import run_script
from .errors import EXIT_DONE, bad_input, one_line, unsupported, usage
from .perplexity_options import PROGRAM, parse_arguments

# Text


def cut_windows(tokens: list[int], length: int, wanted: int) -> list[list[int]]:
    """Whole windows of `length` tokens, evenly spaced, beginning with the first."""
    available = [tokens[i : i + length] for i in range(0, len(tokens) - length + 1, length)]
    return available[:: max(1, len(available) // wanted)][:wanted]


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise bad_input(f"{path}: cannot read as UTF-8 text: {error}") from error


def choose_windows(args, text: str, tokenizer) -> list[list[int]]:
    tokens = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    windows = cut_windows(tokens, args.window_tokens - 1, args.num_windows)
    if not windows:
        raise bad_input(
            f"{args.text}: expected at least {args.window_tokens - 1} tokens, found {len(tokens)}",
            "--window-tokens makes windows shorter",
        )
    return windows


# Model


def load_model(args, folder: Path):
    """(model in float32, tokenizer)"""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except Exception as error:  # each part of transformers raises its own types
        raise bad_input(f"{folder}: cannot load: {one_line(error)}") from error
    try:
        return model.to(args.device).eval(), tokenizer
    except (RuntimeError, AssertionError) as error:
        raise unsupported(f"--device {args.device}: {one_line(error)}") from error


def choose_bos(args, model) -> int:
    bos = model.config.bos_token_id if args.bos is None else args.bos
    if not isinstance(bos, int) or not 0 <= bos < model.config.vocab_size:
        raise usage(
            f"--bos: expected a token id below {model.config.vocab_size}, found {bos}",
            "the configuration has none: name the token that begins a text",
        )
    return bos


def probe_geometry(model, bos: int) -> dict[int, tuple[int, int, int]]:
    """(KV heads, D, Dv) of each layer, from a forward pass over one token."""
    from .coded_attention import GeometryProbe, use_attention

    probe = GeometryProbe()
    use_attention(model, probe)
    window_nll(model, bos, [bos])
    return probe.layers


# Codec


def choose_codec(args, candidates) -> None:
    """Lets libkvq_codec search trellis codes on a CPU, and says so if PyTorch has to."""
    from . import native_codec, torch_codec

    torch_codec.FASTER_SEARCH.clear()
    if args.codec == "pytorch" or not any(candidate.has_trellis for candidate in candidates):
        return
    library = native_codec.open_native_codec()
    if library is not None:
        torch_codec.FASTER_SEARCH["cpu"] = library.best_paths
        return
    places = ", ".join(map(str, native_codec.candidate_paths()))
    hint = "cmake --build --preset release builds it; KVQ_BIN names the folder of the tools"
    if args.codec == "compiled":
        raise unsupported(f"--codec compiled: no {native_codec.FILE}, expected one of {places}", hint)
    if args.device == "cpu":
        note(f"PyTorch searches the trellis codes, which is slow; {native_codec.FILE} is not at {places}; {hint}")


def note(text: str) -> None:
    print(f"{PROGRAM}: note: {text}", file=sys.stderr)


def warn_uncovered(candidates, layers) -> None:
    for candidate in candidates:
        if missing := candidate.uncovered(layers):
            print(
                f"{PROGRAM}: warning: {candidate.source} does not cover layers {', '.join(map(str, missing))}: "
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

    from .candidates import open_candidates
    from .dump.progress import Progress
    from .model_source import find_model

    if args.threads:
        torch.set_num_threads(args.threads)
    text, folder = read_text(args.text), find_model(args.model, args.local_files_only)
    candidates = open_candidates(args, folder)
    model, tokenizer = load_model(args, folder)
    bos, windows = choose_bos(args, model), choose_windows(args, text, tokenizer)
    layers = probe_geometry(model, bos)
    sizes = [candidate.bytes_per_token(layers) for candidate in candidates]
    warn_uncovered(candidates, layers)
    choose_codec(args, candidates)
    progress = Progress("perplexity", len(candidates) * len(windows) * len(layers), args.quiet, seconds_between=10)
    results = []
    for candidate, size in zip(candidates, sizes):
        results.append(measure_candidate(candidate, model, bos, windows, progress) | {"bytes_per_token": size})
    progress.close()
    compare(results, args.seed)
    return describe(args, windows, results)


def measure_candidate(candidate, model, bos: int, windows: list[list[int]], progress) -> dict:
    from .coded_attention import CodedAttention, use_attention

    use_attention(model, CodedAttention(candidate.plan_of, candidate.windows, lambda: progress.advance(1)))
    started = time.monotonic()
    sums = [window_nll(model, bos, window) for window in windows]
    nll = sum(sums) / sum(map(len, windows))
    return {
        "name": candidate.name,
        "kind": candidate.kind,
        "source": candidate.source,
        "windows": {
            "sink_tokens": candidate.windows.sink_tokens,
            "recent_tokens": candidate.windows.recent_tokens,
        },
        "nll": nll,
        "perplexity": math.exp(nll),
        "window_nll": [total / len(window) for total, window in zip(sums, windows)],
        "seconds": round(time.monotonic() - started, 3),
    }


def compare(results: list[dict], seed: int) -> None:
    """Adds `difference` to each result: from the first result, or None for the first itself."""
    from .bootstrap import paired_change

    for result in results:
        result["difference"] = None
        if result is not results[0]:
            change = paired_change(results[0]["window_nll"], result["window_nll"], seed)
            interval = None if change.low is None else [change.low, change.high]
            result["difference"] = {"change": change.change, "interval": interval}


def describe(args, windows: list[list[int]], results: list[dict]) -> dict:
    return {
        "format": "kvq-perplexity",
        "version": "2.0",
        "model": args.model,
        "text": str(args.text),
        "only": args.only,
        "unrounded_metadata": args.unrounded_metadata,
        "num_windows": len(windows),
        "window_tokens": args.window_tokens,
        "tokens": sum(map(len, windows)),
        "seed": args.seed,
        "baseline": results[0]["name"] if len(results) > 1 else None,
        "results": results,
    }


def run(args) -> int:
    from .perplexity_table import table

    document = measure(args)
    print(json.dumps(document, indent=2) if args.json else table(document))
    return EXIT_DONE


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    return run_script(PROGRAM, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
