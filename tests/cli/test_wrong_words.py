"""What newcomers type by mistake: errors name the word, and hints have the word or the command that was meant."""

import json
import struct
import subprocess
import sys

import pytest
from kvq_tools import ROOT, calibrate, run, succeed

USAGE, INPUT = 2, 3


def said(code: int, *command: object, **options) -> tuple[str, str]:
    """(error, hint) of a command that fails with one line."""
    result = run(*map(str, command), **options)
    assert result.code == code, result
    lines = result.stderr.splitlines()
    assert len(lines) <= 2 and lines[0].startswith(f"{command[0]}: error: "), result.stderr
    hint = lines[1].removeprefix("hint: ") if len(lines) == 2 else ""
    return lines[0].removeprefix(f"{command[0]}: error: "), hint


@pytest.mark.parametrize(
    "command, error, hint",
    [
        ("kvq-calibrate --treads 1", "unknown flag --treads", "did you mean --threads?"),
        ("kvq-calibrate x.h5 --treads=1 --bits 2", "unknown flag --treads", "did you mean --threads?"),
        ("kvq-calibrate --models x.h5", "unknown flag --models", "did you mean --model?"),
        ("kvq-calibrate -O x", "unknown flag -O", "did you mean -o?"),
        ("kvq-calibrate --frobnicate", "unknown flag --frobnicate", "see kvq-calibrate --help"),
        ("kvq-inspect --verfy", "unknown flag --verfy", "did you mean --verify?"),
        ("kvq-eval --schema bf16", "unknown flag --schema", "did you mean --scheme?"),
        ("kvq-diff a b --mark", "unknown flag --mark", "did you mean --markdown?"),
        ("kvq-inspect a b", "unexpected argument b", "see kvq-inspect --help"),
        ("kvq-calibrate --output a --output b", "--output: expected once, found 2 values", "see kvq-calibrate --help"),
        ("kvq-calibrate --model", "--model: the value is missing", "see kvq-calibrate --help"),
        ("kvq-calibrate --bits two", "--bits: expected a number, found two", "see kvq-calibrate --help"),
        ("kvq-calibrate --kmeans 1.5", "--kmeans: expected a whole number, found 1.5", "see kvq-calibrate --help"),
        *(
            (
                f"{tool} --{flag} 010",
                f"--{flag}: expected a decimal integer without leading zeros, which could mean octal, found 010",
                f"see {tool} --help",
            )
            for tool, flag in (
                ("kvq-calibrate", "seed"),
                ("kvq-calibrate", "threads"),
                ("kvq-eval", "seed"),
                ("kvq-diff", "seed"),
                ("kvq-inspect", "page-size"),
            )
        ),
        (
            "kvq-eval --seed -1",
            "--seed: expected a whole number from 0 to 2^63 - 1, found -1",
            "see kvq-eval --help",
        ),
        (
            "kvq-calibrate --threads -1",
            "--threads: expected a whole number from 0 to 4096, found -1",
            "see kvq-calibrate --help",
        ),
    ],
    ids=lambda text: text if text.startswith("kvq-") else "",
)
def test_flags(tmp_path, command, error, hint):
    assert said(USAGE, *command.split(), cwd=tmp_path) == (error, hint)


@pytest.mark.parametrize(
    "flags, nearest",
    [
        ("--method OSCAR", "oscar"),
        ("--method saw_int4", "saw-int4"),
        ("--method blockgtq", "block-gtq"),
        ("--coder Symmetric", "symmetric"),
        ("--coder-k trelis", "trellis"),
        ("--center KV", "kv"),
        ("--transform-v ktl", "klt"),
        ("--scale-rule least-squares", "least_squares"),
        ("--composition UHP", "uhp"),
    ],
)
def test_names_of_calibration(make_dump, flags, nearest):
    error, hint = said(USAGE, "kvq-calibrate", make_dump(), *flags.split())
    flag, word = flags.split()
    assert error == f'{flag}: unknown "{word}"'
    assert hint.startswith(f"did you mean {nearest}? choose one of ")


def test_names_of_evaluation(make_dump):
    model = ("kvq-eval", "--model", make_dump())
    assert said(USAGE, *model, "--scheme", "kvi-2")[1].startswith("did you mean kivi-2? ")
    assert said(USAGE, *model, "--scheme", "naive-int44-k")[1].startswith("did you mean naive-int4? ")
    _, hint = said(USAGE, *model, "--scheme", "bf16", "--metric", "attention_lk")
    assert hint.startswith("did you mean attention_kl? ")
    error, _ = said(USAGE, "kvq-diff", "a", "b", "--fail-on", "clp<=1")
    assert 'there is no metric "clp", did you mean clip?' in error


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--bits 0", "--bits: expected 1 to 8, or 16 for exact, found 0"),
        ("--bits-v 9", "--bits-v: expected 1 to 8, or 16 for exact, found 9"),
        ("--bits 0 --bits-k 2", "--bits: expected"),
        ("--bits 2.5", "--bits: 2.5 is no whole number"),
        ("--bits 3 --bits-k 2.5", "--bits-k: 2.5 is no whole number"),
        ("--clip 0", "--clip: expected a ratio in (0, 1], found 0"),
        ("--clip-v 2", "--clip-v: expected a ratio in (0, 1], found 2"),
        ("--coder symmetric --clip 0.9", "--clip has no meaning for --coder symmetric"),
        ("--coder-v symmetric --clip-v 0.9", "--clip-v has no meaning for --coder-v symmetric"),
        ("--transform klt", "--transform klt gives channels widths of their own"),
        ("--coder trellis --bits 8", "--bits: trellis codes have 1 to"),
    ],
)
def test_errors_blame_the_flag_that_was_typed(make_dump, flags, words):
    assert said(USAGE, "kvq-calibrate", make_dump(), *flags.split())[0].startswith(words)


# Files of another kind


@pytest.fixture(scope="module")
def files(make_dump, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "Qwen3 4B").mkdir()
    for name in ("model", "Qwen3 4B"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model/model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    (folder / "chat.txt").write_text("Some text to calibrate on.\n" * 40)
    (folder / "model.gguf").write_bytes(b"GGUF" + bytes(64))
    (folder / "dump.h5").write_bytes(make_dump().read_bytes())
    calibrate(folder / "dump.h5", folder / "artifact.safetensors", "--stats", folder / "stats.safetensors")
    return folder


DUMP_HINTS = [
    ("Qwen/Qwen3-4B", "scripts/dump_qkv.py Qwen/Qwen3-4B --text TEXT.txt --output Qwen3-4B.h5"),
    ("model", "scripts/dump_qkv.py model --text TEXT.txt --output model.h5"),
    ("model/", "scripts/dump_qkv.py model/ --text TEXT.txt --output model.h5"),
    ("Qwen3 4B", "scripts/dump_qkv.py 'Qwen3 4B' --text TEXT.txt --output 'Qwen3 4B.h5'"),
    ("model/model.safetensors", "scripts/dump_qkv.py model --text TEXT.txt --output model.h5"),
    ("chat.txt", "scripts/dump_qkv.py MODEL --text chat.txt --output DUMP.h5"),
    ("model.gguf", "scripts/dump_qkv.py --help"),
    ("artifact.safetensors", "kvq-inspect artifact.safetensors"),
    ("stats.safetensors", "kvq-calibrate --stats stats.safetensors"),
]


@pytest.mark.parametrize("argument, command", DUMP_HINTS)
def test_what_is_no_dump_gets_the_command_to_type(files, argument, command):
    for tool in (("kvq-calibrate",), ("kvq-calibrate", "--model"), ("kvq-eval", "--scheme", "bf16", "--model")):
        error, hint = said(INPUT, *tool, argument, cwd=files)
        assert argument in error
        assert command in hint


def test_a_missing_dump_or_a_damaged_one_gets_no_such_hint(files):
    (files / "cut.h5").write_bytes((files / "dump.h5").read_bytes()[:5000])
    for argument in ("no.h5", "folder/no.h5", "cut.h5"):
        assert "dump_qkv" not in said(INPUT, "kvq-calibrate", argument, cwd=files)[1]


@pytest.mark.parametrize(
    "argument, words",
    [
        ("dump.h5", "kvq-calibrate dump.h5"),
        ("stats.safetensors", "kvq-calibrate --stats stats.safetensors"),
        ("model", "scripts/dump_qkv.py model"),
        ("model/model.safetensors", "weights of a model"),
        ("chat.txt", "an artifact is a file of kvq-calibrate"),
    ],
)
def test_what_is_no_artifact_gets_the_next_step(files, argument, words):
    dump = ("--model", "dump.h5")
    for command in (("kvq-inspect",), ("kvq-eval", *dump), ("kvq-diff", "artifact.safetensors")):
        assert words in said(INPUT, *command, argument, cwd=files)[1]


def test_a_text_is_not_a_safetensors_file(files):
    assert said(INPUT, "kvq-inspect", "chat.txt", cwd=files)[0] == "chat.txt: not a safetensors file"


def test_a_dump_may_be_named_without_a_flag(files, tmp_path):
    succeed("kvq-calibrate", files / "dump.h5", "--output", tmp_path / "a", "--quiet")
    succeed("kvq-calibrate", "--quiet", "--model", files / "dump.h5", "--output", tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


# Scripts


@pytest.mark.parametrize(
    "command, error, hint",
    [
        ("read_artifact.py a --verfy", "unknown flag --verfy", "did you mean --verify?"),
        ("read_artifact.py a b", "unexpected argument b", "see read_artifact.py --help"),
        ("dump_qkv.py m --outptu x", "unknown flag --outptu", "did you mean --output?"),
        ("dump_qkv.py m --output x --dtype floot16", "(did you mean float16?)", ""),
        ("perplexity.py m --txt x", "unknown flag --txt", "did you mean --text?"),
        ("make_synthetic_dump.py x --frobnicate", "unknown flag --frobnicate", "see make_synthetic_dump.py --help"),
    ],
    ids=lambda text: text if ".py " in text else "",
)
def test_scripts_suggest_too(command, error, hint):
    script, *arguments = command.split()
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / script, *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == USAGE
    first, second = done.stderr.splitlines()
    assert first.startswith(f"{script}: error: ") and error in first
    assert hint in second
