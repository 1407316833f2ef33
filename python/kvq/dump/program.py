"""The program: from arguments to a dump that was checked."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..cli import interrupted, report, safe_output, stopping_signals
from ..errors import (
    EXIT_DONE,
    EXIT_INPUT,
    EXIT_NUMERICAL,
    EXIT_UNSUPPORTED,
    EXIT_USAGE,
    KvqError,
    one_line,
)
from ..files import atomic_path
from . import __version__
from .options import PROGRAM, parse_arguments
from .progress import Progress

# What reading the shapes of an unusual model may raise (estimate.outline_of).
UNKNOWN_SHAPES = (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError)


@dataclass
class Plan:
    """All decisions that are made before weights are loaded."""

    folder: object
    sequences: list[list[int]]
    layers: list[int]
    prefix: list[int]
    placement: object
    compute_dtype: str
    stored_dtype: str


@dataclass
class Job(Plan):
    """A plan and the model that is ready to run it."""

    model: object = None


def make_plan(args) -> Plan:
    """Makes all decisions, the cheap refusals first: configuration, then text, then the device."""
    from .model import open_model_folder, stored_dtype
    from .placement import choose_placement

    folder = open_model_folder(args.model, args.local_files_only, with_weights=not args.dry_run)
    layers = choose_layers(args.layers, folder.config.num_hidden_layers)
    prefix, sequences = choose_sequences(args, folder)
    placement = choose_placement(args.device)
    weights_dtype = stored_dtype(folder)
    compute_dtype = args.compute_dtype
    if compute_dtype == "auto":
        compute_dtype = "float32" if placement.device == "cpu" else weights_dtype
    return Plan(
        folder,
        sequences,
        layers,
        prefix,
        placement,
        compute_dtype,
        weights_dtype if args.dtype == "auto" else args.dtype,
    )


def announce(args, plan: Plan, output: Path) -> None:
    """Says what the run is and how large its dump becomes; refuses a dump that has no room."""
    tell = print if args.dry_run else lambda line: say(args, line)
    lengths = announce_work(args, plan, tell)
    try:
        announce_size(args, plan, output, lengths, tell)
    except UNKNOWN_SHAPES as error:
        # The shapes of an unusual model are not known before it runs. Its dump is possible all the same.
        if args.dry_run:
            raise KvqError(EXIT_UNSUPPORTED, f"{args.model}: cannot predict its size: {one_line(error)}") from error
        tell(f"note: the size is not known beforehand: {one_line(error)}")
    if args.dry_run and not plan.folder.family.is_known:
        tell(f"note: model type '{plan.folder.family.label}' is not in the table, so the run tries whether q and k fit")


def announce_work(args, plan: Plan, tell) -> list[int]:
    """Says what is run. @return  lengths of the sequences with generated tokens"""
    tell(
        f"model: {args.model_name or plan.folder.name} ({plan.folder.family.label}), {len(plan.layers)} of "
        f"{plan.folder.config.num_hidden_layers} layers, computing in {plan.compute_dtype} on {args.device}"
    )
    lengths = [len(sequence) + args.generate for sequence in plan.sequences]
    tell(f"sequences: {len(lengths)} of at most {max(lengths)} tokens, {sum(lengths)} tokens in all")
    return lengths


def announce_size(args, plan: Plan, output: Path, lengths: list[int], tell) -> None:
    """Tells the size, and for --dry-run time and memory. @param lengths  of the sequences with generated tokens"""
    from .disk import free_bytes, refuse_too_little_space
    from .estimate import Work, estimate, forecast_lines, measured_rate, outline_of, size_line

    work = Work(lengths, plan.layers, plan.stored_dtype, plan.compute_dtype, args.o_proj, args.curvature, args.generate)
    outline = outline_of(plan.folder)
    found = estimate(outline, work)
    tell(size_line(found, output, free_bytes(output.parent)))
    if args.dry_run:
        rate = measured_rate(outline.hidden, plan.compute_dtype, plan.placement.device)
        for line in forecast_lines(found, outline, rate, args.device):
            tell(line)
    refuse_too_little_space(output, found.file_bytes)


def load_job(plan: Plan, args) -> Job:
    from .model import load_model
    from .placement import describe_map

    model = load_model(plan.folder, plan.compute_dtype, plan.placement)
    if places := describe_map(model):
        say(args, places)
    return Job(**vars(plan), model=model)


def choose_layers(wanted: list[int] | None, num_layers: int) -> list[int]:
    if wanted is None:
        return list(range(num_layers))
    if wanted[-1] >= num_layers:
        raise KvqError(EXIT_USAGE, f"--layers: expected layers 0 to {num_layers - 1}, found {wanted[-1]}")
    return wanted


def choose_sequences(args, folder) -> tuple[list[int], list[list[int]]]:
    """(prepended tokens, prompts)"""
    from .model import default_prefix, load_tokenizer
    from .prompts import CutPlan, plan_sequences

    sources = read_sources(args)
    tokenizer = load_tokenizer(folder, args.chat_template) if sources else None
    prefix = [] if args.no_prepend else args.prepend
    if prefix is None:
        prefix = default_prefix(tokenizer, folder.config)
    refuse_unknown_tokens(prefix, folder.config.vocab_size)
    if args.sequence_length <= len(prefix):
        raise KvqError(
            EXIT_USAGE,
            f"--sequence-length: expected more than the {len(prefix)} prepended tokens, found {args.sequence_length}",
        )
    texts = encode_sources(args, sources, tokenizer, prefix)
    if not sources:
        texts = [("synthetic tokens", synthetic_tokens(args.synthetic_tokens, args.seed, folder.config.vocab_size))]
    sequences = plan_sequences(texts, prefix, CutPlan(args.sequence_length, args.skip, args.tokens, args.windows))
    report_duplicates(args, sequences)
    warn_beyond_context(args, sequences, folder.config)
    return prefix, sequences


def read_sources(args) -> list:
    """Every --text and --dataset, in this order."""
    from .records import read_dataset, read_source

    sources = [read_source(path, args.text_format, args.field, args.records) for path in args.text]
    for name in args.dataset:
        sources.append(read_dataset(name, args.dataset_config, args.split, args.field, args.records))
    return sources


def encode_sources(args, sources: list, tokenizer, prefix: list[int]) -> list[tuple[str, list[int]]]:
    from .records import describe, encode_source

    texts = []
    for source in sources:
        encoded = encode_source(source, tokenizer, prefix, args.separate_records)
        say(args, f"text: {describe(source, sum(len(tokens) for _, tokens in encoded))}")
        texts += encoded
    return texts


def synthetic_tokens(count: int, seed: int, vocab_size: int) -> list[int]:
    import numpy as np

    return np.random.default_rng(seed).integers(0, vocab_size, count).tolist()


def refuse_unknown_tokens(prefix: list[int], vocab_size: int) -> None:
    unknown = [token for token in prefix if token >= vocab_size]
    if unknown:
        raise KvqError(
            EXIT_USAGE,
            f"--prepend: expected token ids below {vocab_size}, found {unknown[0]}",
            "--no-prepend begins sequences with the text itself",
        )


def report_duplicates(args, sequences: list[list[int]]) -> None:
    """Warns if a sequence occurs twice, because a text was then probably given twice and would count double."""
    from .prompts import find_duplicates

    pairs = find_duplicates(sequences)
    if not pairs:
        return
    first, again = pairs[0]
    message = f"{len(pairs)} sequences repeat an earlier one, the first: sequence {again} repeats {first}"
    if not args.allow_duplicates:
        raise KvqError(EXIT_INPUT, message, "was a text given twice? --allow-duplicates accepts them")
    say(args, f"warning: {message}")


def warn_beyond_context(args, sequences: list[list[int]], config) -> None:
    limit = getattr(config, "max_position_embeddings", None)
    last = (max(map(len, sequences)) + args.generate - 1) * args.stride
    if limit and last >= limit:
        say(args, f"warning: positions reach {last}, but the model is made for {limit} positions")


def run(args, job: Job, temporary: Path) -> list:
    """Writes the dump to `temporary`; returns the checks, passed or failed."""
    import h5py

    from .disk import disk_errors
    from .validators import Check, Validator
    from .writer import DumpWriter

    num_tokens = sum(map(len, job.sequences)) + args.generate * len(job.sequences)
    with disk_errors(Path(args.output)), DumpWriter(temporary, num_tokens, job.stored_dtype) as writer:
        write_root(args, job, writer)
        recorder = capture_all(args, job, writer, num_tokens)
        peaks = writer.largest_magnitudes()
    with h5py.File(temporary, "r") as file:
        redone = Validator(file, recorder.witnesses, recorder.rows, job.compute_dtype).run()
    magnitudes = ", ".join(f"|{name}| {peak:.4g}" for name, peak in peaks.items())
    return [
        Check("sequences", True, describe_duplicates(job.sequences)),
        Check("values", True, f"all finite, no tensor of zeros; largest {magnitudes}"),
        *redone,
    ]


def describe_duplicates(sequences: list[list[int]]) -> str:
    from .prompts import find_duplicates

    repeated = len(find_duplicates(sequences))
    return f"{len(sequences)}, {f'{repeated} of them duplicates' if repeated else 'no duplicates'}"


def write_root(args, job: Job, writer) -> None:
    import numpy as np

    prompt_lengths = np.array([len(sequence) for sequence in job.sequences], dtype=np.int64)
    lengths = prompt_lengths + args.generate
    writer.write_root(
        {
            "model_name": args.model_name or job.folder.name,
            "capture_point": "post_rope",
            "num_layers": job.folder.config.num_hidden_layers,
            "producer": producer(PROGRAM, __version__),
            "model_fingerprint": fingerprint_of(args, job),
            "model_config": job.folder.config_json,
        }
    )
    in_sequence = [np.arange(length) for length in lengths]
    generated = np.concatenate([t >= prompt for t, prompt in zip(in_sequence, prompt_lengths)])
    writer.write_tokens(
        np.concatenate([[0], np.cumsum(lengths)]),
        np.concatenate(in_sequence) * args.stride,
        generated if args.generate else None,
    )


def producer(program: str, version: str) -> str:
    import torch
    import transformers

    return f"{program} {version} (transformers {transformers.__version__}, torch {torch.__version__})"


def fingerprint_of(args, job: Job) -> str | None:
    from .model import fingerprint

    digest = fingerprint(job.folder)
    if digest is None:
        say(args, "warning: no *.safetensors in the model folder, so the output carries no fingerprint of the model")
    return digest


def first_rows(args, job: Job) -> list[int]:
    """The row of each sequence's first token, and the number of rows."""
    rows = [0]
    for sequence in job.sequences:
        rows.append(rows[-1] + len(sequence) + args.generate)
    return rows


def capture_all(args, job: Job, writer, num_tokens: int):
    """Runs all sequences through the model and appends generated tokens. The returned recorder holds the witnesses."""
    import numpy as np

    from .capture import Recorder, choose_witness_rows

    rows = choose_witness_rows(np.array(first_rows(args, job)))
    return capture_with(Recorder, run_one_by_one, args, job, writer, num_tokens, rows)


def capture_with(kind, run: Callable, args, job: Job, writer, num_tokens: int, rows):
    """capture_all() with another kind of Recorder, and a function that runs the sequences.
    @param rows  WitnessRows"""
    from .forward import decoder_of

    progress = Progress("capture", num_tokens * job.folder.config.num_hidden_layers, args.quiet)
    with kind(decoder_of(job.model), job.folder.family, writer, job.layers, rows, progress) as recorder:
        run(args, job, recorder)
        progress.close()
    report_left_out(args, recorder)
    add_extras(args, job, writer, {layer: witness.anatomy for layer, witness in recorder.witnesses.items()})
    return recorder


def run_one_by_one(args, job: Job, recorder) -> None:
    from .forward import decoder_of, run_and_generate, run_prompt
    from .model import eos_tokens

    for index, (sequence, first_row) in enumerate(zip(job.sequences, first_rows(args, job))):
        if args.generate:
            chosen = run_and_generate(
                job.model, recorder, sequence, first_row, args.stride, args.generate, eos_tokens(job.folder.config)
            )
            job.sequences[index] = sequence + chosen
        else:
            run_prompt(decoder_of(job.model), recorder, sequence, first_row, args.stride)


def report_left_out(args, recorder) -> None:
    missing = recorder.layers_left_out
    if missing:
        listed = ", ".join(map(str, missing))
        say(args, f"left out: layers {listed}, which have no attention, or attention to the keys of another layer")


def add_extras(args, job: Job, writer, anatomies: dict) -> None:
    """Writes what lies behind attention: the output projection and its metric, and the curvature."""
    import torch

    from .anatomy import output_weight
    from .array_writer import output_metric
    from .curvature import OutputCurvature
    from .model import DTYPES

    plain = {layer: anatomy for layer, anatomy in anatomies.items() if anatomy.plain_output}
    if len(plain) < len(anatomies):
        say(args, "no o_proj_metric: a gate or a norm stands between attention and its output projection")
        refuse_behind_gate(args, job)
    for layer, anatomy in plain.items():
        facts = writer.layers[layer]
        has_metric = facts.kind != "mla_rope"  # mla_rope: a dump without values
        if not (has_metric or args.o_proj):
            continue
        weight = output_weight(anatomy.attention, DTYPES[job.compute_dtype])
        if has_metric:
            writer.write_metric(layer, output_metric(weight, facts.num_kv_heads, facts.v_head_dim))
        if args.o_proj:
            writer.write_extra(layer, "o_proj", torch.from_numpy(weight).to(torch.float16).numpy())
    if args.curvature:
        progress = Progress("curvature", sum(map(len, job.sequences)), args.quiet)
        heads = {layer: facts.num_q_heads for layer, facts in writer.layers.items()}
        modules = {layer: anatomy.attention for layer, anatomy in anatomies.items()}
        curvature = OutputCurvature(job.model, modules, heads, progress)
        for sequence in job.sequences:
            curvature.add(sequence, args.stride)
        progress.close()
        for layer, moment in curvature.result().items():
            writer.write_extra(layer, "output_curvature", moment, source="nll")


def refuse_behind_gate(args, job: Job) -> None:
    if args.curvature or args.o_proj:
        raise KvqError(
            EXIT_UNSUPPORTED,
            f"{job.folder.family.label}: a gate or a norm stands between attention and its output projection, so "
            "--curvature and --o-proj are not supported",
            "dump without them",
        )


def say(args, line: str) -> None:
    if not args.quiet:
        print(line, file=sys.stderr, flush=True)


def report_checks(args, checks: list, lost: str = "no dump was written") -> None:
    """Prints one line for each check; raises if one failed. @param lost  what a failure costs"""
    for check in checks:
        say(args, f"check: {check.name}: {'ok' if check.passed else 'FAILED'}, {check.detail}")
    failed = [check for check in checks if not check.passed]
    if failed:
        raise KvqError(
            EXIT_NUMERICAL,
            "; ".join(f"{check.name}: {check.detail}" for check in failed),
            f"{lost}; please report the model and this line",
        )


def print_table(args, job: Job, path: Path) -> None:
    """Prints the closing summary on stdout, with one row for each run of equal layers."""
    import h5py

    if args.quiet:
        return
    with h5py.File(path, "r") as file:
        bounds, last = file["cu_seqlens"][:], file["positions"][:].max()
        print(
            f"wrote {path}: {path.stat().st_size / 1e6:.1f} MB, {bounds[-1]} tokens in {len(bounds) - 1} sequences, "
            f"positions up to {last}, {job.stored_dtype}; prepended: {job.prefix or 'nothing'}"
        )
        print(
            f"{'layers':>9}  {'q heads':>7}  {'kv heads':>8}  {'head_dim':>8}  {'v_head_dim':>10}  {'scale':>8}  "
            f"{'window':>6}  rope"
        )
        for label, row in layer_rows(file):
            print(f"{label:>9}  {row}")


def layer_rows(file) -> list[tuple[str, str]]:
    """("0-3", columns) for each run of layers in the file with the same columns."""
    runs: list[tuple[int, int, str]] = []
    for layer in sorted(map(int, file["layers"])):
        attributes = file[f"layers/{layer}"].attrs
        row = (
            f"{attributes['num_q_heads']:>7}  {attributes['num_kv_heads']:>8}  {attributes['head_dim']:>8}  "
            f"{attributes['v_head_dim']:>10}  {attributes['softmax_scale']:>8.5f}  "
            f"{attributes['sliding_window']:>6}  {attributes['rope_layout']} {attributes['rotary_dim']}"
        )
        if runs and runs[-1][2] == row and runs[-1][1] == layer - 1:
            runs[-1] = (runs[-1][0], layer, row)
        else:
            runs.append((layer, layer, row))
    return [(f"{first}-{last}" if last > first else f"{first}", row) for first, last, row in runs]


def check_output(path: str) -> Path:
    """Refuses outputs that cannot be written, before anything is read."""
    output = Path(path)
    if path == "-":
        raise KvqError(EXIT_USAGE, "--output: expected a file, found -", "HDF5 cannot be written to a pipe")
    if output.is_dir():
        raise KvqError(EXIT_INPUT, f"{output}: expected a file in a folder that exists, found a folder")
    if not output.parent.is_dir():
        raise KvqError(
            EXIT_INPUT,
            f"{output}: expected a file in a folder that exists, found no {output.parent}",
            f"mkdir -p {output.parent}",
        )
    return output


def dump(args) -> None:
    output = check_output(args.output)
    # Imported here: --help and wrong flags need no PyTorch.
    import torch

    from .model import quiet_libraries

    quiet_libraries()
    if args.threads:
        torch.set_num_threads(args.threads)
    plan = make_plan(args)
    announce(args, plan, output)
    if args.dry_run:
        return
    with memory_errors(args):
        job = load_job(plan, args)
        with atomic_path(output) as temporary:
            report_checks(args, run(args, job, temporary))
    print_table(args, job, output)


@contextmanager
def memory_errors(args) -> Iterator[None]:
    """Turns PyTorch's error of a full device into one line."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise KvqError(
            EXIT_UNSUPPORTED,
            f"{args.device} has too little memory: {one_line(error)}",
            "try a smaller --sequence-length, --compute-dtype bfloat16, or --device auto, which spreads the model",
        ) from error


def main(argv: list[str] | None = None) -> int:
    return run_program(PROGRAM, dump, parse_arguments(argv), "no dump was written")


def run_program(program: str, work: Callable, args, lost: str) -> int:
    """work(args), and one line for what it raises. @param lost  what an interruption costs"""
    try:
        with stopping_signals(), safe_output():
            work(args)
    except KvqError as error:
        return report(program, error)
    except ImportError as error:
        message = f"Python package missing or too old: {one_line(error)}"
        hint = "pip install 'torch>=2.5' 'transformers>=5' h5py numpy safetensors"
        return report(program, KvqError(EXIT_UNSUPPORTED, message, hint))
    except OSError as error:
        message = f"{error.filename or args.output}: {error.strerror or one_line(error)}"
        return report(program, KvqError(EXIT_INPUT, message))
    except KeyboardInterrupt:
        return interrupted(program, f"; {lost}")
    return EXIT_DONE
