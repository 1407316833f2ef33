"""docs/journeys.md: its first journey with a model that kvq has never seen, what the journeys show, and the counts of
its last table. test_docs.py types all its commands."""

import inspect
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import test_damage
import test_diff
import test_mutations
import test_readers_agree
from faulty_dumps import FAULTS
from kvq_tools import BIN, ROOT, run
from test_docs import read_blocks

PAGE = ROOT / "docs/journeys.md"
TEXTS = [Path("/usr/share/common-licenses") / name for name in ("GPL-3", "Apache-2.0")]


def section(heading: str) -> str:
    return re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)[1]


def blocks_of(heading: str, folder: Path) -> list:
    page = folder / "section.md"
    page.write_text(section(heading))
    return read_blocks(page)


@pytest.mark.parametrize(
    ("heading", "lines"),
    [
        ("Own model to a verdict", ["size  ", "error  ", "serving  tuned", "serving      tuned kernels for w8n1"]),
        (
            "The gate in a toy repository",
            ["oscar.safetensors: passed", "oscar.safetensors: failed (6)", "  FAIL verif"],
        ),
        ("One paper's table", ["row  ", "K, BDR16  ", "K&V, BDR128  ", "naive-int4  ", "*: on the front"]),
    ],
)
def test_journeys_show_what_they_are_about(tmp_path, heading, lines):
    """test_docs.py compares the shown lines with the printed ones; so these lines are printed, too."""
    shown = [
        line for block in blocks_of(heading, tmp_path) if block.language == "text" for line in block.text.split("\n")
    ]
    assert [start for start in lines if not any(line.startswith(start) for line in shown)] == []


def save_random_llama(folder: Path) -> None:
    """A Llama of two layers with random weights, and a tokenizer that knows the words of the journey's texts."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = sorted(set(" ".join(path.read_text() for path in TEXTS).split()))
    tokenizer = Tokenizer(
        models.WordLevel({word: place for place, word in enumerate(["<s>", *words])}, unk_token="<s>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=len(words) + 1,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=1024,
        initializer_range=0.15,
        bos_token_id=0,
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


@pytest.mark.skipif(not all(path.is_file() for path in TEXTS), reason="no license texts of Debian")
def test_a_model_of_your_own_comes_to_a_verdict(tmp_path, monkeypatch, capsys):
    """The commands of the first journey; only the link to the model leads elsewhere. dump_qkv.py runs in this process,
    because loading torch takes most of its time."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers", minversion="5.0")
    from kvq.dump import program

    (tmp_path / "build/release").mkdir(parents=True)
    (tmp_path / "build/release/tools").symlink_to(BIN)
    save_random_llama(tmp_path / "build/my-model")
    monkeypatch.chdir(tmp_path)
    said = ""
    for block in blocks_of("Own model to a verdict", tmp_path):
        for command in block.commands() if block.is_run else ():
            if command.startswith(("scripts/setup.sh", "ln ")):
                continue
            if command.startswith(".venv/bin/python scripts/dump_qkv.py "):
                assert program.main(shlex.split(command)[2:]) == 0, command
                said += capsys.readouterr().out
            else:
                done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
                assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
                said += done.stdout
    assert "model: my-model (Llama), 2 of 2 layers" in said
    verdict = [line.split()[0] for line in said.splitlines() if re.match(r"(size|error|serving|next)  ", line)]
    assert verdict[:4] == ["size", "error", "serving", "next"]
    served = re.findall(r"^serving +(tuned kernels for \w+)", said, re.M)
    assert served == ["tuned kernels for u2g64", "tuned kernels for u2g128", "tuned kernels for w8n1"]
    assert re.search(r"^mine +[\d.]+ ", said, re.M) and re.search(r"^quarot-int2 +[\d.]+ ", said, re.M)
    assert (tmp_path / "build/tuned.html").read_text().startswith("<!doctype html>")
    assert run("kvq-inspect", tmp_path / "build/mine.safetensors", "--verify").code == 0


def counts() -> dict[str, tuple[int, int]]:
    """The table of the last section: the command of a row, and its count of how many."""
    rows = re.findall(
        r"^\|[^|]*\| (\d+) of (\d+) \| `?([^|`]*)`? \|$", section("What is refused, what is accepted"), re.M
    )
    return {command: (int(count), int(total)) for count, total, command in rows}


def cases_of(test) -> int:
    """How many cases parametrization makes of a test."""
    count = 1
    for mark in test.pytestmark:
        count *= len(mark.args[1]) if mark.name == "parametrize" else 1
    return count


def test_counts_of_the_table_are_those_of_the_tests():
    found = counts()
    faults = cases_of(test_readers_agree.test_both_readers_say_the_same_of_a_transform) - len(["sound"])
    source = inspect.getsource(test_damage.test_every_flipped_bit_of_an_artifact_is_noticed)
    bits = [int(count) for count in re.findall(r"(?<!rand)range\((\d+)\)", source)]
    sizes = {
        "tests/cli/test_mutations.py": len(test_mutations.MUTATIONS),
        "the same": sum(fits for *_, fits in test_mutations.MUTATIONS),
        "tests/cli/test_diff.py -k fails_by_its_rule": cases_of(test_diff.test_damage_fails_by_its_rule),
        "tests/cli/test_diff.py -k damaged_centroids": cases_of(
            test_diff.test_damaged_centroids_of_one_head_fail_by_what_they_do
        ),
        "tests/cli/test_readers_agree.py": faults
        + cases_of(test_readers_agree.test_both_readers_say_the_same_of_other_faults),
        "tests/cli/test_damage.py -k hostile": len(test_damage.MALFORMED),
        "tests/cli/test_damage.py -k flipped": sum(bits),
        "tests/cli/test_cli.py -k dry_run_finds": len(FAULTS),
    }
    assert {command: found.get(command) for command in sizes} == {name: (size, size) for name, size in sizes.items()}
    works, tried = re.search(r": (\d+) of (\d+) architectures", (ROOT / "docs/models.md").read_text()).groups()
    assert found["tests/python/test_architectures.py"] == (int(works), int(tried))


def test_commands_of_the_table_select_tests():
    for row in [row for row in counts() if row.startswith("tests/")]:
        path, _, word = row.partition(" -k ")
        assert re.search(rf"^def test_\w*{word}", (ROOT / path).read_text(), re.M), row
