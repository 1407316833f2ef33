"""What the tools say: a table of commands, each with its exit code; stdout and stderr stand in expected/<name>.stdout
and .stderr, and a missing file means nothing was said. `pytest tests/cli --update-expected` writes them anew.

Commands run in the folder of workspace.py.
"""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import workspace
from expected_text import normalized
from faulty_artifacts import TRANSFORM_FAULTS, TRANSFORM_FAULTS_TO_VERIFY
from kvq_tools import BIN, Result, run

EXPECTED = Path(__file__).parent / "expected"
USAGE, INPUT, NUMERICAL, UNSUPPORTED, CHECK_FAILED = 2, 3, 4, 5, 6
C, M = "kvq-calibrate", "kvq-calibrate --model dump.h5"

HELP = [
    ("help", f"{C} --help", 0),
    ("version", f"{C} --version", 0),
    ("no_arguments", C, USAGE),
    ("inspect_help", "kvq-inspect --help", 0),
    ("inspect_version", "kvq-inspect --version", 0),
    ("inspect_no_arguments", "kvq-inspect", USAGE),
    ("eval_help", "kvq-eval --help", 0),
    ("eval_version", "kvq-eval --version", 0),
    ("eval_no_arguments", "kvq-eval", USAGE),
    ("diff_help", "kvq-diff --help", 0),
    ("diff_no_arguments", "kvq-diff", USAGE),
    ("bench_help", "kvq-bench --help", 0),
    ("bench_decode_help", "kvq-bench decode --help", 0),
    ("bench_prefill_help", "kvq-bench prefill --help", 0),
    ("bench_write_help", "kvq-bench write --help", 0),
    ("bench_no_arguments", "kvq-bench", USAGE),
    ("selftest_help", "kvq-selftest --help", 0),
    ("selftest_no_arguments", "kvq-selftest", USAGE),
]

RESULTS = [
    ("table", f"{C} --model sample.h5 --clip 0.96", 0),
    ("table_symmetric", f"{C} --model sample.h5 --coder symmetric --center kv --layers 2,4-5 --exact-layers 4", 0),
    ("table_saw_int4", f"{C} --model sample.h5 --method saw-int4 --layers 0", 0),
    ("dry_run", f"{C} --model sample.h5 --dry-run --threads 2", 0),
    ("inspect", "kvq-inspect artifact.safetensors", 0),
    ("inspect_layer", "kvq-inspect artifact.safetensors --layer 1", 0),
    ("inspect_layout", "kvq-inspect artifact.safetensors --layout --page-size 16 --context 1000", 0),
    ("inspect_verify", "kvq-inspect artifact.safetensors --verify", 0),
]

WORDS = [
    ("unknown_flag", f"{C} --frobnicate", USAGE),
    ("flag_without_value", f"{C} --model", USAGE),
    ("unknown_method", f"{M} --method oskar", USAGE),
    ("unknown_composition", f"{M} --composition hu", USAGE),
    ("unknown_target_k", f"{M} --target-k value", USAGE),
    ("unknown_target_v", f"{M} --target-v query", USAGE),
    ("unknown_coder", f"{M} --coder uniform", USAGE),
    ("unknown_scale_rule", f"{M} --scale-rule max", USAGE),
    ("unknown_scale_type", f"{M} --scale-type fp8", USAGE),
    ("unknown_zero", f"{M} --zero none", USAGE),
    ("unknown_share", f"{M} --share model", USAGE),
    ("unknown_center", f"{M} --center q", USAGE),
    ("unknown_hadamard", f"{M} --method saw-int4 --hadamard q", USAGE),
    ("unknown_clip", f"{M} --clip maybe", USAGE),
    ("unknown_moment", f"{M} --collect output", USAGE),
]

NUMBERS = [
    ("bits_0", f"{M} --bits 0", USAGE),
    ("bits_9", f"{M} --bits-v 9", USAGE),
    ("bits_text", f"{M} --bits two", USAGE),
    ("clip_0", f"{M} --clip-k 0", USAGE),
    ("clip_2", f"{M} --clip-v 2", USAGE),
    ("clip_nan", f"{M} --clip-k nan", USAGE),
    ("layers_text", f"{M} --layers all", USAGE),
    ("layers_backwards", f"{M} --layers 1-0", USAGE),
    ("layers_out_of_range", f"{M} --layers 0-2", USAGE),
    ("exact_layers_out_of_range", f"{M} --exact-layers 2", USAGE),
    ("group_size", f"{M} --group-size 24", USAGE),
    ("group_size_negative", f"{M} --group-size -8", USAGE),
    ("hadamard_order", f"{M} --method saw-int4 --hadamard-order 64", USAGE),
    ("sign_search", f"{M} --sign-search -1", USAGE),
    ("sink_tokens", f"{M} --sink-tokens -1", USAGE),
    ("recent_tokens", f"{M} --recent-tokens 2000000000", USAGE),
    ("sample_tokens", f"{M} --sample-tokens 3", USAGE),
    ("threads", f"{M} --threads -1", USAGE),
    ("seed", f"{M} --seed -1", USAGE),
    ("seed_large", f"{M} --seed 9223372036854775808", USAGE),
    ("seed_octal", f"{M} --seed 010", USAGE),
    ("threads_hexadecimal", f"{M} --threads 0x10", USAGE),
    ("eval_seed_octal", "kvq-eval --model dump.h5 --scheme kivi --seed 010", USAGE),
    ("context", f"{M} --context 0", USAGE),
    ("inspect_layer_negative", "kvq-inspect artifact.safetensors --layer -1", USAGE),
    ("inspect_layer_out_of_range", "kvq-inspect artifact.safetensors --layer 2", USAGE),
    ("inspect_page_size", "kvq-inspect artifact.safetensors --page-size 0", USAGE),
    ("eval_nothing", "kvq-eval --model dump.h5", USAGE),
    ("eval_unknown_scheme", "kvq-eval --model dump.h5 --scheme kivi-9", USAGE),
    ("eval_unknown_metric", "kvq-eval --model dump.h5 --scheme kivi --metric kl", USAGE),
]

CONTRADICTIONS = [
    ("symmetric_clip", f"{M} --coder symmetric --clip 0.9", USAGE),
    ("symmetric_clip_search", f"{M} --coder symmetric --clip-v search", USAGE),
    ("symmetric_minmax", f"{M} --coder symmetric --scale-rule minmax", USAGE),
    ("affine_norm", f"{M} --scale-rule norm", USAGE),
    ("flag_of_another_method", f"{M} --method saw-int4 --composition uh", USAGE),
    ("merge_without_stats", f"{C} --merge-stats stats.safetensors", USAGE),
    ("merge_with_model", f"{M} --merge-stats stats.safetensors --stats new.safetensors", USAGE),
    ("stats_without_output", f"{C} --stats stats.safetensors", USAGE),
    ("dry_run_without_model", f"{C} --dry-run --stats stats.safetensors --output new.safetensors", USAGE),
    ("moment_not_collected", f"{C} --stats stats.safetensors --target-v sst --output new.safetensors", USAGE),
    ("output_is_dump", f"{C} --model precious_1.h5 --output precious_1.h5", USAGE),
    ("stats_is_dump", f"{C} --model precious_2.h5 --stats precious_2.h5", USAGE),
    ("output_is_stats", f"{C} --stats precious.safetensors --output precious.safetensors", USAGE),
    ("unknown_flag_in_config", f"{M} --config bad.ini", USAGE),
    ("missing_config", f"{M} --config no.ini", INPUT),
]

FILES = [
    ("missing_dump", f"{C} --model no.h5", INPUT),
    ("folder_as_dump", f"{C} --model .", INPUT),
    ("same_dump_twice", f"{M} --model dump.h5", INPUT),
    ("missing_stats", f"{C} --stats no.safetensors --output new.safetensors", INPUT),
    ("artifact_as_stats", f"{C} --stats artifact.safetensors --output new.safetensors", INPUT),
    ("dump_as_stats", f"{C} --stats dump.h5 --output new.safetensors", INPUT),
    ("merge_missing", f"{C} --merge-stats no.safetensors --stats new.safetensors", INPUT),
    ("output_below_a_file", f"{M} --output dump.h5/new.safetensors", INPUT),
    ("output_is_folder", f"{M} --output .", INPUT),
    ("output_is_device", f"{M} --output /dev/null", INPUT),
    ("empty", f"{C} --model empty.h5", INPUT),
    ("text", f"{C} --model text.h5", INPUT),
    ("foreign", f"{C} --model foreign.h5", INPUT),
    ("cut_1", f"{C} --model cut_1.h5", INPUT),
    ("cut_50", f"{C} --model cut_50.h5", INPUT),
    ("cut_last", f"{C} --model cut_last.h5", INPUT),
]

UNSUPPORTED_DUMPS = ("version_2", "requires", "capture_point", "kind", "rope_layout", "dtype", "compressed")


def exit_code_of(fault: str) -> int:
    if fault.startswith(("nan", "inf", "huge", "zero")):
        return NUMERICAL
    return UNSUPPORTED if fault in UNSUPPORTED_DUMPS else INPUT


DUMPS = [(f"dump_{name}", f"{C} --model {name}.h5", exit_code_of(name)) for name in workspace.FAULTS]

BENCH = [
    ("bench_decode_dry_run", "kvq-bench decode --k u2g128 --batch 1,32 --context 32768,131072 --dry-run", 0),
    ("bench_decode_explain", "kvq-bench decode --k u2g128 --batch 8 --context 32768 --explain", 0),
    (
        "bench_decode_explain_rounds",
        "kvq-bench decode --k bf16 --batch 64 --context 131072 --explain --multiprocessors 78",
        0,
    ),
    ("bench_multiprocessors", "kvq-bench decode --multiprocessors 78", USAGE),
    ("bench_prefill_dry_run", "kvq-bench prefill --k u4g128 --batch 1,8 --dry-run", 0),
    ("bench_write_dry_run", "kvq-bench write --k s2g128 --tokens 1,8192 --hadamard 1,128 --dry-run", 0),
    ("bench_targets_dry_run", "kvq-bench targets --dry-run", 0),
    ("bench_two_commands", "kvq-bench decode write", USAGE),
    ("bench_unknown_side", "kvq-bench decode --k u5g128", USAGE),
    ("bench_unknown_value_side", "kvq-bench write --v s3g128z", USAGE),
    ("bench_batch_0", "kvq-bench decode --batch 1,0", USAGE),
    ("bench_page_size", "kvq-bench decode --page-size 48", USAGE),
    ("bench_heads", "kvq-bench decode --q-heads 30", USAGE),
    ("bench_order", "kvq-bench write --hadamard 3", USAGE),
]

SELFTEST = [
    ("selftest_device_negative", "kvq-selftest artifact.safetensors --device -1", USAGE),
    ("selftest_page_size", "kvq-selftest artifact.safetensors --page-size 48", USAGE),
    ("selftest_missing", "kvq-selftest no.safetensors", INPUT),
    ("selftest_dump", "kvq-selftest dump.h5", INPUT),
    ("selftest_version_2", "kvq-selftest version_2.safetensors", UNSUPPORTED),
]

SECOND_FILES = [
    (f"second_{name}", f"{M} --model {name}.h5", INPUT)
    for name in ("wide", "one_layer", "other_model", "other_window", "other_metric", "other_type")
]

ARTIFACTS = [
    ("inspect_missing", "kvq-inspect no.safetensors", INPUT),
    ("inspect_dump", "kvq-inspect dump.h5", INPUT),
    ("inspect_stats", "kvq-inspect stats.safetensors", INPUT),
    ("inspect_two", "kvq-inspect artifact.safetensors stats.safetensors", USAGE),
    ("artifact_empty", "kvq-inspect empty.h5", INPUT),
    ("artifact_cut_1", "kvq-inspect cut_1.safetensors", INPUT),
    ("artifact_cut_50", "kvq-inspect cut_50.safetensors", INPUT),
    ("artifact_cut_last", "kvq-inspect cut_last.safetensors --verify", INPUT),
    ("artifact_flipped", "kvq-inspect flipped.safetensors --verify", CHECK_FAILED),
    ("artifact_stretched", "kvq-inspect stretched.safetensors --verify", CHECK_FAILED),
    ("artifact_nan", "kvq-inspect nan.safetensors --verify", INPUT),
    ("artifact_version_2", "kvq-inspect version_2.safetensors", UNSUPPORTED),
    ("artifact_requires", "kvq-inspect requires.safetensors", UNSUPPORTED),
    ("artifact_other_format", "kvq-inspect other_format.safetensors", INPUT),
    ("artifact_no_manifest", "kvq-inspect no_manifest.safetensors", INPUT),
]

TRANSFORMS = [
    ("artifact_transform_sound", "kvq-inspect transform_sound.safetensors --verify", 0),
    *[(f"artifact_transform_{name}", f"kvq-inspect transform_{name}.safetensors", INPUT) for name in TRANSFORM_FAULTS],
    *[
        (f"artifact_transform_{name}", f"kvq-inspect transform_{name}.safetensors --verify", CHECK_FAILED)
        for name in TRANSFORM_FAULTS_TO_VERIFY
    ],
]

CASES = (
    HELP
    + RESULTS
    + WORDS
    + NUMBERS
    + CONTRADICTIONS
    + FILES
    + DUMPS
    + SECOND_FILES
    + ARTIFACTS
    + TRANSFORMS
    + BENCH
    + SELFTEST
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("workspace")
    workspace.fill(folder)
    return folder


def update_expected(name: str, said: dict[str, str]) -> None:
    for stream, text in said.items():
        path = EXPECTED / f"{name}.{stream}"
        path.unlink(missing_ok=True)
        if text:
            path.write_text(text)


def expected(name: str, stream: str) -> str:
    path = EXPECTED / f"{name}.{stream}"
    return path.read_text() if path.exists() else ""


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.iterdir()}


PARTS_HINT = re.compile(r"(; |hint: )(?P<parts>\S+\.parts) has what was collected; with --resume [^\n]+\n")


def parts_of(result: Result, folder: Path) -> dict[str, tuple[int, int]]:
    """The folder of collected layers that the hint of an error names."""
    named = PARTS_HINT.search(result.stderr)
    return {} if named is None else {named["parts"]: snapshot(folder)[named["parts"]]}


def is_well_formed(error: Result, tool: str) -> bool:
    """Whether all lines are `<tool>: error: ...`, one for each fault, with at most one hint at the end, and all lines
    are shorter than 200 characters."""
    lines = error.stderr.splitlines()
    hints = [line for line in lines if line.startswith("hint: ")]
    return (
        error.stdout == ""
        and lines != hints
        and hints in ([], lines[-1:])
        and max(map(len, lines)) < 200
        and all(re.match(f"{tool}: error: .", line) for line in lines if line not in hints)
    )


@pytest.mark.parametrize("name, command, code", CASES, ids=[case[0] for case in CASES])
def test_tool_says(folder, request, name, command, code):
    before = snapshot(folder)
    tool, *arguments = shlex.split(command)
    if not (BIN / tool).is_file():
        pytest.skip(f"{tool} is built only where nvcc is")  # conftest.py has checked that the other tools exist
    result = run(tool, *arguments, cwd=folder)
    said = {"stdout": normalized(result.stdout), "stderr": normalized(result.stderr)}
    if request.config.getoption("--update-expected", False):
        update_expected(name, said)
    assert said == {stream: expected(name, stream) for stream in said}, "if this is what you want: --update-expected"
    assert result.code == code
    if code not in (0, CHECK_FAILED):
        assert is_well_formed(result, tool)
        left = parts_of(result, folder)
        assert snapshot(folder) == before | left, "a run that fails leaves only the layers that its hint names"
        for name in left:
            shutil.rmtree(folder / name)


@pytest.mark.parametrize("name", workspace.FAULTS)
def test_a_dry_run_finds_what_a_run_would_refuse(folder, name):
    before = snapshot(folder)
    dry = run(C, "--model", f"{name}.h5", "--dry-run", cwd=folder)
    assert snapshot(folder) == before
    real = run(C, "--model", f"{name}.h5", cwd=folder)
    for parts in parts_of(real, folder):
        shutil.rmtree(folder / parts)
    assert (dry.code, dry.stderr) == (real.code, PARTS_HINT.sub("", real.stderr)) and dry.code == exit_code_of(name)


def test_every_expected_file_belongs_to_a_case():
    assert {path.stem for path in EXPECTED.iterdir()} <= {case[0] for case in CASES}


@pytest.mark.parametrize("tool", ["kvq-calibrate", "kvq-inspect"])
def test_help_fits_a_terminal_and_shows_commands(tool):
    lines = run(tool, "--help").stdout.splitlines()
    assert max(map(len, lines)) <= 120
    assert len([line for line in lines if line.startswith(f"  {tool} ")]) >= 3, "examples stand at the top"
