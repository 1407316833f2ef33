#!/usr/bin/env python3
"""Perplexity of a model through kvq's packed cache on a GPU, against the same computation by the PyTorch codec.

  decode   token by token, all windows as one batch: a token is written, then
           its query attends to the cache, the token itself included.
  prefill  in chunks: a chunk attends to the packed prefix and to its own exact
           keys and values, then it is written.

The codec's figures have the same tokens coded and the same tokens exact. The model computes in float32; queries, keys,
values and attention results are rounded to --activations in both, and in the exact model.

Codes amplify differences of rounding: of two rows that are nearly equal, one may take another code, and all later
layers see it. So the codec measures twice: on its own keys and values, where chance differences of 0.1% are common (see
the interval over windows), and on those that the packed run wrote ("same rows"), where nothing is left to chance.
"""

import json
import math
import sys
import time
from pathlib import Path

import runtime_binding as rt

from kvq.cli import Parser, run_script
from kvq.errors import EXIT_DONE, EXIT_NUMERICAL, KvqError, unsupported

PROGRAM = "packed_perplexity.py"
EXIT_DIFFERENT = 1
MODES = ("decode", "prefill")
EPILOG = """\
example

  packed_perplexity.py sample_data/model --text evaluation.txt \\
    --library build/kvq/lib/libkvq_runtime.so --artifact model.kvq.safetensors

exit codes: 0 done, 1 on the same rows the difference exceeds the tolerance, or
on own rows the whole interval does, or a bug, 2 wrong flags,
3 unreadable input or an artifact of another model, 4 NaN,
5 no GPU, no library, or unsupported
"""


def parse_arguments(argv: list[str] | None):
    parser = Parser(PROGRAM, __doc__, EPILOG)
    parser.add_argument("model", metavar="MODEL", help="model folder")
    parser.add_argument("--text", metavar="FILE", type=Path, required=True, help="UTF-8 text to predict")
    parser.add_argument("--artifact", metavar="FILE", nargs="+", required=True, help="artifacts of the model")
    parser.add_argument(
        "--library", metavar="FILE", type=Path, help=f"{rt.FILE} (default: KVQ_RUNTIME, else that of build/)"
    )
    parser.add_argument("--mode", choices=MODES, nargs="+", default=list(MODES), help="default: both")
    parser.add_argument("--num-windows", metavar="W", type=int, default=6, help="default 6")
    parser.add_argument(
        "--window", metavar="N", dest="window_tokens", type=int, default=4096, help="bos included (default 4096)"
    )
    parser.add_argument("--chunk", metavar="N", type=int, default=512, help="tokens of a chunk (default 512)")
    parser.add_argument("--page-size", type=int, choices=[16, 32, 64, 128], default=64, help="default 64")
    parser.add_argument("--activations", choices=rt.ACTIVATIONS, default="bf16", help="default bf16")
    parser.add_argument(
        "--windows", choices=["artifact", "none"], default="artifact", help="exact windows (default: the artifact's)"
    )
    parser.add_argument(
        "--tolerance", metavar="PERCENT", type=float, default=0.1, help="largest difference (default 0.1)"
    )
    parser.add_argument("--bos", metavar="ID", type=int, help="default: bos_token_id of the model's configuration")
    parser.add_argument("--device", default="cuda", help="default cuda")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(only=None, unrounded_metadata=False, ignore_fingerprint=False)  # of open_artifact
    args = parser.parse_args(argv)
    for name, least in (("num_windows", 1), ("window_tokens", 2), ("chunk", 1)):
        if getattr(args, name) < least:
            flag = "window" if name == "window_tokens" else name.replace("_", "-")
            parser.error(f"--{flag}: expected at least {least}, found {getattr(args, name)}")
    if not args.tolerance >= 0:
        parser.error(f"--tolerance: expected 0 or more, found {args.tolerance}")
    if not args.device.startswith("cuda"):
        parser.error(f"--device: expected cuda or cuda:N, found {args.device}")
    return args


def require_gpu(device: str) -> None:
    import torch

    if not torch.cuda.is_available():
        raise unsupported(
            "no CUDA device that PyTorch can use: packed caches need one",
            "run this on a machine with an NVIDIA GPU and a PyTorch that is built for CUDA",
        )
    try:
        torch.cuda.set_device(torch.device(device).index or 0)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise unsupported(f"--device {device}: {rt.one_line(error)}") from error


# Measuring


def nll_sums(model, ids, first: int, last: int):
    """Sums of -ln p of the tokens behind the positions [first, last) of ids [B, T], float64 [B]. These positions alone
    go into the model."""
    import torch

    positions = torch.arange(first, last, device=ids.device)[None]
    logits = model(ids[:, first:last], position_ids=positions, use_cache=False).logits.float()
    targets = ids[:, first + 1 : last + 1]
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return each.view(targets.shape).double().sum(1)


def layer_shapes(model, ids) -> dict:
    """The LayerShape of each layer."""
    import torch
    from packed_attention import ShapeProbe

    from kvq.coded_attention import use_attention

    probe = ShapeProbe()
    use_attention(model, probe)
    with torch.inference_mode():
        nll_sums(model, ids, 0, 1)
    return dict(sorted(probe.layers.items()))


def codec_sums(model, attention, ids):
    """[B], one window after the other."""
    import torch

    from kvq.coded_attention import use_attention

    use_attention(model, attention)
    sums = []
    with torch.inference_mode():
        for attention.window, window in enumerate(ids):
            sums.append(nll_sums(model, window[None], 0, len(window) - 1))
    return torch.cat(sums)


def packed_sums(model, cache, ids, note=lambda done: None):
    """[B], all windows as one batch, and the keys and values that were written."""
    import torch
    from packed_attention import PackedAttention

    from kvq.coded_attention import use_attention

    attention = PackedAttention(cache)
    use_attention(model, attention)
    total = torch.zeros(len(ids), dtype=torch.float64, device=ids.device)
    with torch.inference_mode():
        for first in range(0, ids.shape[1] - 1, cache.sizes.step):
            last = min(first + cache.sizes.step, ids.shape[1] - 1)
            cache.begin(last - first)
            total += nll_sums(model, ids, first, last)
            note(last)
    cache.check_faults()
    return total, attention.rows()


def figures(sums, tokens: int) -> dict:
    """Of windows of `tokens` predicted tokens."""
    each = (sums / tokens).tolist()
    nll = sum(each) / len(each)
    if not math.isfinite(nll):
        raise KvqError(EXIT_NUMERICAL, f"the mean of -ln p is {nll}: NaN or infinity in the attention or the model")
    return {"perplexity": math.exp(nll), "nll": nll, "window_nll": each}


def measure(args, runtime) -> dict:
    import torch
    from packed_attention import CodecAttention

    from kvq.candidates import Fingerprint, distinct_names, open_artifact
    from kvq.model_source import find_model
    from kvq.perplexity import choose_bos, choose_windows, load_model, read_text

    text, folder = read_text(args.text), find_model(args.model, local_files_only=True)
    own = Fingerprint(folder)
    names = distinct_names(args.artifact)
    candidates = [open_artifact(args, path, name, own) for path, name in zip(args.artifact, names)]
    model, tokenizer = load_model(args, folder)
    bos, windows = choose_bos(args, model), choose_windows(args, text, tokenizer)
    ids = torch.tensor([[bos, *window] for window in windows], device=args.device)
    layers = layer_shapes(model, ids)
    tokens = ids.shape[1] - 1
    note(args, f"exact: {len(ids)} windows")
    exact = figures(codec_sums(model, CodecAttention(layers, args.activations), ids), tokens)
    results = []
    for candidate in candidates:
        for mode in args.mode:
            results.append(measure_mode(args, runtime, model, candidate, mode, layers, ids))
    return {
        "format": "kvq-packed-perplexity",
        "version": "1.0",
        "model": args.model,
        "text": str(args.text),
        "library": runtime.version.text.decode(),
        "device": torch.cuda.get_device_name(ids.device) if ids.is_cuda else "cpu",
        "activations": args.activations,
        "page_size": args.page_size,
        "chunk": args.chunk,
        "num_windows": len(ids),
        "window_tokens": args.window_tokens,
        "tokens": len(ids) * tokens,
        "tolerance": args.tolerance / 100,
        "exact": exact,
        "results": results,
        "passed": all(agrees(each, args.tolerance / 100) for each in results),
    }


def measure_mode(args, runtime, model, candidate, mode: str, layers: dict, ids) -> dict:
    from packed_attention import CodecAttention
    from packed_cache import PackedCache, Sizes

    from kvq.bootstrap import paired_change

    tokens = ids.shape[1] - 1
    sizes = Sizes(len(ids), tokens, min(args.chunk, tokens) if mode == "prefill" else 1, args.page_size)
    options = dict(activation=args.activations, without_windows=args.windows == "none", device=ids.device)
    started = time.monotonic()
    with PackedCache(runtime, candidate.source, layers, sizes, mode, **options) as cache:
        kernels = cache.kernels
        progress = lambda done: done % 512 == 0 and note(args, f"{candidate.name}: {mode}, {done} of {tokens} tokens")
        sums, rows = packed_sums(model, cache, ids, progress)
    packed = figures(sums, tokens)
    packed["seconds"] = round(time.monotonic() - started, 3)
    note(args, f"{candidate.name}: {mode} by the codec")
    chunk = args.chunk if mode == "prefill" else 0
    codec, same = (
        figures(codec_sums(model, CodecAttention(layers, args.activations, candidate, chunk, own), ids), tokens)
        for own in (None, rows)
    )
    change = paired_change(codec["window_nll"], packed["window_nll"], 0)
    return {
        "name": candidate.name,
        "source": candidate.source,
        "mode": mode,
        "kernels": kernels,
        "windows": {
            "sink_tokens": candidate.windows.sink_tokens,
            "recent_tokens": candidate.windows.recent_tokens,
        },
        "packed": packed,
        "codec": codec,
        "codec_same_rows": same,
        "difference": change.change,
        "interval": None if change.low is None else [change.low, change.high],
        "difference_same_rows": packed["perplexity"] / same["perplexity"] - 1,
    }


def agrees(result: dict, tolerance: float) -> bool:
    """On the same rows, and, if there is no interval or it lies beyond the tolerance, on own rows."""
    low, high = result["interval"] or (result["difference"], result["difference"])
    return abs(result["difference_same_rows"]) <= tolerance and low <= tolerance and high >= -tolerance


def note(args, text: str) -> None:
    if not args.quiet:
        print(f"{PROGRAM}: {text}", file=sys.stderr, flush=True)


# Table


def table(document: dict) -> str:
    """Lines of at most 80 columns."""
    from kvq.perplexity_table import shortened

    tolerance = f"{100 * document['tolerance']:g}%"
    lines = [
        f"{document['tokens']} tokens in {document['num_windows']} windows of {document['window_tokens']}, "
        f"{document['activations']} rows, pages of {document['page_size']}",
        f"{document['device']}, kvq {document['library']}, chunks of {document['chunk']}",
        "",
        f"{'':<23} {'':<7} {'kernels':<7} {'packed':>8} {'codec':>8} {'own rows':>9} {'same rows':>9}",
        f"{'exact':<23} {'':<7} {'':<7} {'':>8} {document['exact']['perplexity']:>8.4f}",
    ]
    intervals = []
    for each in document["results"]:
        lines.append(
            f"{shortened(each['name']):<23} {each['mode']:<7} {each['kernels']:<7} "
            f"{each['packed']['perplexity']:>8.4f} {each['codec']['perplexity']:>8.4f} "
            f"{percent(each['difference']):>9} {percent(each['difference_same_rows']):>9}"
        )
        if each["interval"]:
            low, high = map(percent, each["interval"])
            intervals.append(f"{shortened(each['name'])}, {each['mode']}: {low} to {high}")
    if intervals:
        lines += ["", "95% intervals over windows of the difference on own rows:", *intervals]
    verdict = "no difference exceeds" if document["passed"] else "a difference exceeds"
    return "\n".join([*lines, "", f"{verdict} the tolerance of {tolerance}"])


def percent(value: float) -> str:
    return f"{100 * value:+.4f}%"


def run(args) -> int:
    runtime = rt.Runtime(rt.find_library(args.library))
    require_gpu(args.device)
    document = measure(args, runtime)
    print(json.dumps(document, indent=2) if args.json else table(document))
    return EXIT_DONE if document["passed"] else EXIT_DIFFERENT


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    return run_script(PROGRAM, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
