"""The program: from arguments to a statistics file that was checked."""

import json
from contextlib import ExitStack
from pathlib import Path

from ..dump.program import (
    UNKNOWN_SHAPES,
    Job,
    Plan,
    announce_work,
    capture_with,
    check_output,
    describe_duplicates,
    fingerprint_of,
    first_rows,
    load_job,
    make_plan,
    memory_errors,
    producer,
    report_checks,
    run_one_by_one,
    run_program,
    say,
)
from ..errors import EXIT_USAGE, KvqError, bad_input
from ..files import atomic_path
from . import __version__
from .options import PROGRAM, parse_arguments

LOST = "no statistics were written"


def collect(args) -> None:
    if args.output == "-":
        raise KvqError(EXIT_USAGE, "--output: expected a file, found -", "./- names a file")
    output = check_output(args.output)
    # Imported here: --help and wrong flags need no PyTorch.
    import torch

    from ..dump.model import quiet_libraries
    from .token_plan import TokenPlan

    quiet_libraries()
    if args.threads:
        torch.set_num_threads(args.threads)
    plan = make_plan(args)
    lengths = announce_work(args, plan, lambda line: say(args, line))
    tokens = TokenPlan(lengths, args.generate, args.stride, args.queries, args.held_out_tokens, args.golden_tokens)
    needs_spool = len(lengths) > 1 and not args.no_ranges
    if needs_spool:
        announce_spool(args, plan, output, tokens.tokens)
    with memory_errors(args), ExitStack() as stack:
        job = load_job(plan, args)
        temporary = stack.enter_context(atomic_path(output))
        spool = stack.enter_context(open_spool(output)) if needs_spool else None
        run(args, job, tokens, spool, temporary)
    print_summary(args, job, tokens, output)


def announce_spool(args, plan: Plan, output: Path, tokens: int) -> None:
    """Says how large the file of waiting keys and values becomes; refuses one that has no room."""
    from ..dump.disk import format_bytes, free_bytes
    from ..dump.estimate import ITEM_BYTES, outline_of

    try:
        shapes = outline_of(plan.folder).layers
    except UNKNOWN_SHAPES:
        return
    channels = sum(
        shapes[layer].num_kv_heads * (shapes[layer].head_dim + shapes[layer].v_head_dim)
        for layer in plan.layers
        if layer in shapes
    )
    needed, free = tokens * channels * ITEM_BYTES[plan.stored_dtype], free_bytes(output.parent)
    say(args, f"temporary file: {format_bytes(needed)} of keys and values beside the output, for hashes of a dump")
    if needed > free:
        raise bad_input(
            f"{output}: the temporary file takes {format_bytes(needed)}, {format_bytes(free)} are free in its folder",
            "--no-ranges needs none; or collect fewer tokens (--tokens, --windows), or write to another disk",
        )


def open_spool(output: Path):
    from .content import RowSpool

    return RowSpool(output.parent)


def run(args, job: Job, tokens, spool, temporary: Path) -> None:
    """Collects, checks and writes to `temporary`."""
    from ..dump.capture import choose_witness_rows
    from ..dump.disk import disk_errors
    from .batch import BatchRecorder
    from .checks import check_statistics
    from .content import DumpHash, JoinedHash
    from .layer import StatsRequest
    from .statistics import Statistics

    def content_of(layer: int):
        return JoinedHash(tokens) if args.no_ranges else DumpHash(tokens, layer, spool)

    request = StatsRequest(args.collect, args.sample_tokens, args.sample_seed)
    rows = choose_witness_rows(tokens.starts)
    statistics = Statistics(tokens, request, job.stored_dtype, rows, content_of)
    with disk_errors(Path(args.output), LOST):
        recorder = capture_with(BatchRecorder, run_in_batches, args, job, statistics, tokens.tokens, rows)
        report_checks(
            args, [*checks_of_rows(job, statistics), *check_statistics(recorder, statistics, job.compute_dtype)], LOST
        )
        write(args, job, statistics, temporary)


def checks_of_rows(job: Job, statistics) -> list:
    from ..dump.validators import Check

    magnitudes = ", ".join(f"|{name}| {peak:.4g}" for name, peak in statistics.largest_magnitudes().items())
    return [
        Check("sequences", True, describe_duplicates(job.sequences)),
        Check("values", True, f"all finite, no tensor of zeros; largest {magnitudes}"),
    ]


def run_in_batches(args, job: Job, recorder) -> None:
    from ..dump.forward import decoder_of
    from .batch import run_batch

    if args.batch == 1:
        run_one_by_one(args, job, recorder)
        return
    rows = first_rows(args, job)
    for first in range(0, len(job.sequences), args.batch):
        chosen = slice(first, min(first + args.batch, len(job.sequences)))
        run_batch(decoder_of(job.model), recorder, job.sequences[chosen], rows[chosen], args.stride)


def write(args, job: Job, statistics, temporary: Path) -> None:
    from .stats_writer import layer_tensors, make_manifest, write_stats

    layers = [statistics.statistics[layer] for layer in sorted(statistics.statistics)]
    model = {
        "name": args.model_name or job.folder.name,
        "fingerprint": fingerprint_of(args, job) or "",
        "num_layers": job.folder.config.num_hidden_layers,
        "config": json.loads(job.folder.config_json),
    }
    manifest = make_manifest(model, producer(PROGRAM, __version__), layers, not args.no_ranges)
    tensors = {}
    for layer in layers:
        tensors |= layer_tensors(layer, job.stored_dtype)
    write_stats(temporary, manifest, tensors)


def print_summary(args, job: Job, tokens, path: Path) -> None:
    if args.quiet:
        return
    print(
        f"wrote {path}: {path.stat().st_size / 1e6:.1f} MB, {tokens.tokens} tokens in {len(tokens.lengths)} sequences, "
        f"{tokens.held_out.count} of them held out; rows in {job.stored_dtype}; moments {', '.join(args.collect)}; "
        f"prepended: {job.prefix or 'nothing'}"
    )
    print(f"next: kvq-calibrate --stats {path} --output OUT.safetensors")


def main(argv: list[str] | None = None) -> int:
    return run_program(PROGRAM, collect, parse_arguments(argv), LOST)
