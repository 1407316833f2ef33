"""What dump_qkv.py takes in and what it says before it starts: JSONL, chats, standard input, data sets, sizes, disks,
devices, quantized checkpoints, adapters."""

import io
import json
import os
import resource
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("h5py")
transformers = pytest.importorskip("transformers", minversion="5.0")

from architectures import ARCHITECTURES, make_model  # noqa: E402
from dump_reference import Dump  # noqa: E402
from tiny_models import COMMON, GQA, TINY_MODELS, save_tiny  # noqa: E402

from kvq import model_source  # noqa: E402
from kvq.dump import anatomy, disk, estimate, placement, records  # noqa: E402
from kvq.dump import program as dump_qkv  # noqa: E402
from kvq.dump.model import open_model_folder  # noqa: E402
from kvq.errors import KvqError  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
CHAT = [{"role": "user", "content": "w7 w8"}, {"role": "assistant", "content": "w9"}]


def save_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Path:
    """Words w0 to w88 are tokens 0 to 88, `user` is 20 and `assistant` 21."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(89) if i not in (20, 21)} | {"user": 20, "assistant": 21}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tokenizer(save_tiny("llama", tmp_path_factory.mktemp("llama") / "model"))


def run_dump(model, output, *options) -> int:
    try:
        return dump_qkv.main([str(model), "--output", str(output), *map(str, options)])
    except SystemExit as stop:  # argparse
        return stop.code


def refused(capsys, code: int, model, output, *options) -> str:
    """The one line of error and its hint."""
    assert run_dump(model, output, "--quiet", *options) == code
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert lines[0].startswith("dump_qkv.py: error: ") and len(lines) <= 2 and captured.out == "", captured
    assert not Path(output).exists() or Path(output).is_dir() or str(output) == "/dev/full"
    return captured.err


def tokens_of(monkeypatch, model, tmp_path, *options) -> list[list[int]]:
    """The prompts that a run would send through the model."""
    seen = []
    monkeypatch.setattr(dump_qkv, "announce", lambda args, plan, output: seen.extend(plan.sequences))
    assert run_dump(model, tmp_path / "x.h5", "--dry-run", "--quiet", *options) == 0
    return seen


# --- records ---


def write_lines(path: Path, *values) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def test_chats_get_the_template_and_texts_follow_one_another(monkeypatch, model, tmp_path):
    long = " ".join(f"w{i}" for i in range(30, 50))
    path = write_lines(
        tmp_path / "chat.jsonl",
        {"messages": CHAT},
        {"conversations": [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}]},
        {"text": long},
        {"prompt": "w3 w4"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "w5 "}, {"type": "text", "text": "w6"}]}]},
    )
    [sequence] = tokens_of(monkeypatch, model, tmp_path, "--text", path)
    assert sequence == [3, 20, 7, 8, 21, 9, 20, 1, 21, 2, *range(30, 50), 3, 4, 20, 5, 6]
    [first] = tokens_of(monkeypatch, model, tmp_path, "--text", path, "--records", 3, "--prepend", "20,7")
    assert first == [20, 7, 8, 21, 9, 20, 1, 21, 2, *range(30, 50)]  # the first chat begins with the prepended tokens


def test_each_record_begins_a_sequence_if_asked(monkeypatch, model, tmp_path):
    words = [" ".join(f"w{i}" for i in range(a, a + 18)) for a in (30, 50)]
    path = write_lines(tmp_path / "a.ndjson", *({"text": text} for text in (*words, "w1")))
    sequences = tokens_of(monkeypatch, model, tmp_path, "--text", path, "--separate-records")
    assert sequences == [[3, *range(30, 48)], [3, *range(50, 68)]]  # one token is too short for a sequence


def test_standard_input_holds_text_or_jsonl(monkeypatch, model, tmp_path):
    for data, options in (
        (b"w7 w8 w9 " * 9, ()),
        (b'{"text": "' + b"w7 w8 w9 " * 9 + b'"}\n', ("--text-format", "jsonl")),
    ):
        monkeypatch.setattr(records.sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(data)))
        [sequence] = tokens_of(monkeypatch, model, tmp_path, "--text", "-", *options)
        assert sequence == [3, *[7, 8, 9] * 9]


def test_another_chat_template_and_field_can_be_given(monkeypatch, model, tmp_path):
    (tmp_path / "t.jinja").write_text("w0 {% for m in messages %}{{ m.content }} {% endfor %}")
    path = write_lines(tmp_path / "a.jsonl", *[{"text": "w1", "dialog": CHAT}] * 5)
    options = ("--text", path, "--field", "dialog", "--chat-template", tmp_path / "t.jinja")
    assert tokens_of(monkeypatch, model, tmp_path, *options) == [[3, *[0, 7, 8, 9] * 5]]


@pytest.mark.parametrize(
    "line, said",
    [
        ('{"messages": [}', ":2: not valid JSON"),
        ("[1, 2]", ":2: expected a JSON object, found a list"),
        ('{"body": "w1"}', ":2: expected one of the fields messages, conversations, text, prompt, found 'body'"),
        ('{"text": 3}', ":2: text: expected a text or a list of messages, found a number"),
        ('{"messages": []}', ":2: messages: expected a text or a list of messages, found an empty list"),
        ('{"messages": [3]}', ":2: messages[0]: expected a message, found a number"),
        ('{"messages": [{"content": "w1"}]}', ":2: messages[0].role: expected a text, found nothing"),
        ('{"messages": [{"role": "user"}]}', ":2: messages[0].content: expected a text, found nothing"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
            ":2: messages[0].content[0]: expected a part of type 'text', found type 'image'",
        ),
    ],
)
def test_faults_of_records_name_line_and_field(line, said, model, tmp_path, capsys):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n" + line + "\n")
    assert f"{path}{said}" in refused(capsys, 3, model, tmp_path / "x.h5", "--text", path)


def test_messages_need_a_template_that_takes_them(model, tmp_path, capsys):
    path = write_lines(tmp_path / "chat.jsonl", {"messages": CHAT})
    bare = save_tokenizer(shutil.copytree(model, tmp_path / "bare"), template=None)
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    said = refused(capsys, 3, bare, tmp_path / "x.h5", "--text", path)
    assert f"{path}:1: messages need a chat template" in said and "--chat-template" in said
    (tmp_path / "t.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    said = refused(capsys, 3, model, tmp_path / "x.h5", "--text", path, "--chat-template", tmp_path / "t.jinja")
    assert f"{path}:1: the chat template refuses the messages: roles must alternate" in said


def test_text_that_is_json_is_refused_unless_asked_for(monkeypatch, model, tmp_path, capsys):
    chat = write_lines(tmp_path / "chat.txt", *[{"messages": CHAT}] * 4)
    assert "--text-format jsonl reads" in refused(capsys, 3, model, tmp_path / "x.h5", "--text", chat)
    document = tmp_path / "chat.json"
    document.write_text(json.dumps([{"messages": CHAT}] * 4, indent=2))
    said = refused(capsys, 3, model, tmp_path / "x.h5", "--text", document)
    assert "found a JSON document" in said and "jq -c" in said
    prose = tmp_path / "prose.txt"
    prose.write_text("[w1] " + "w7 " * 30)
    assert tokens_of(monkeypatch, model, tmp_path, "--text", prose)
    assert tokens_of(monkeypatch, model, tmp_path, "--text", document, "--text-format", "text", "--records", 1)


def test_a_data_set_of_the_hub_is_streamed(monkeypatch, model, tmp_path, capsys):
    asked = []

    def load_dataset(name, config, split, streaming):
        asked.append((name, config, split, streaming))
        if name == "no/such":
            raise ValueError("Dataset 'no/such' doesn't exist\nmore")
        return iter([{"messages": CHAT}] * 5000)

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    options = ("--dataset", "some/chats", "--split", "test", "--dataset-config", "en", "--sequence-length", 5001)
    [sequence] = tokens_of(monkeypatch, model, tmp_path, *options)
    assert len(sequence) == 5001 and asked == [("some/chats", "en", "test", True)]  # 1000 records of 5 tokens
    said = refused(capsys, 3, model, tmp_path / "x.h5", "--dataset", "no/such")
    assert "no/such: cannot read the data set: Dataset 'no/such' doesn't exist" in said
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install datasets" in refused(capsys, 5, model, tmp_path / "x.h5", "--dataset", "some/chats")
    assert "--dataset some/chats" in refused(capsys, 3, model, tmp_path / "x.h5", "--text", "some/chats")


# --- sizes and disks ---


ALL_EXTRAS = ("--generate", 2, "--o-proj", "--curvature")


@pytest.mark.parametrize(
    ("name", "extras"),
    [
        *((name, ALL_EXTRAS) for name in ("llama", "glm4", "gemma2", "qwen2", "deepseek_v3")),
        *((name, ("--o-proj",)) for name in ("gpt2", "gpt_neox", "llama4_text")),
        ("minimax", ()),
    ],
)
def test_the_size_is_known_before_the_run(name, extras, tmp_path):
    folder = tmp_path / "model"
    if name in TINY_MODELS:
        save_tiny(name, folder)
    else:
        make_model(ARCHITECTURES[name].config()).save_pretrained(folder)
    options = ("--synthetic-tokens", 300, "--sequence-length", 100, *extras)
    plan_sizes = []
    original = estimate.estimate

    def noted(outline, work):
        plan_sizes.append(original(outline, work).file_bytes)
        return original(outline, work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "estimate", noted)
        assert run_dump(folder, tmp_path / "x.h5", "--quiet", *options) == 0
    size = (tmp_path / "x.h5").stat().st_size
    assert size <= plan_sizes[0] <= size + 60_000


@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
def test_a_dry_run_knows_the_size_of_a_multimodal_model(name, tmp_path, capsys):
    """Memory holds the whole model, a token meets the text half alone."""
    model = make_model(ARCHITECTURES[name].config())
    model.save_pretrained(tmp_path / "model")
    outline = estimate.outline_of(open_model_folder(str(tmp_path / "model"), local_files_only=True))
    counts = [sum(each.numel() for each in part.parameters()) for part in (model, model.get_decoder())]
    assert [outline.parameters, outline.active + outline.embedding] == counts and counts[0] > counts[1]
    assert run_dump(tmp_path / "model", tmp_path / "x.h5", "--synthetic-tokens", 90, "--dry-run") == 0
    assert "size: " in capsys.readouterr().out


FALCON = dict(vocab_size=64, hidden_size=96, num_hidden_layers=3, num_attention_heads=6)


@pytest.mark.parametrize(
    ("config", "layers", "kv_heads", "head_dim"),
    [
        (transformers.GPT2Config(vocab_size=64, bos_token_id=3, n_embd=96, n_layer=3, n_head=6), 3, 6, 16),
        (
            transformers.GPTNeoXConfig(
                vocab_size=64, hidden_size=96, num_hidden_layers=3, num_attention_heads=6, intermediate_size=32
            ),
            *(3, 6, 16),
        ),
        (transformers.FalconConfig(**FALCON, multi_query=True), 3, 1, 16),
        (transformers.FalconConfig(**FALCON, multi_query=False), 3, 6, 16),
        (transformers.FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2), 3, 2, 16),
        (ARCHITECTURES["llama4_text"].config(), 2, 2, 16),
        (
            transformers.Llama4Config(text_config=ARCHITECTURES["llama4_text"].config().to_dict()),
            *(2, 2, 16),
        ),
    ],
    ids=["gpt2", "gpt_neox", "falcon, one KV head", "falcon", "falcon, KV heads", "llama4_text", "llama4"],
)
def test_a_dry_run_knows_models_that_name_their_parts_otherwise(config, layers, kv_heads, head_dim, tmp_path, capsys):
    config.save_pretrained(tmp_path / "model")  # without weights, which it does not read
    outline = estimate.outline_of(open_model_folder(str(tmp_path / "model"), local_files_only=True))
    assert sorted(outline.layers) == list(range(layers))
    assert {(shape.num_kv_heads, shape.head_dim, shape.v_head_dim) for shape in outline.layers.values()} == {
        (kv_heads, head_dim, head_dim)
    }
    assert {shape.num_q_heads for shape in outline.layers.values()} == {config.get_text_config().num_attention_heads}
    assert run_dump(tmp_path / "model", tmp_path / "x.h5", "--synthetic-tokens", 90, "--dry-run") == 0
    said = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    known = config.model_type != "falcon"
    assert said == ["model", "sequences", "size", "time", "memory", *([] if known else ["note"])]


def test_a_dry_run_says_bytes_seconds_and_memory_and_writes_nothing(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("kvq.dump.model.load_model", lambda *_: pytest.fail("weights are loaded"))
    assert run_dump(model, tmp_path / "x.h5", "--synthetic-tokens", 90, "--dry-run") == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == ["model", "sequences", "size", "time", "memory"]
    assert "kB; " in said[2] and "estimated from" in said[3] and "timed here" in said[3]
    assert list(tmp_path.iterdir()) == []


def test_the_size_is_said_before_the_weights_are_loaded(model, tmp_path, capsys, monkeypatch):
    def load_model(*_):
        assert "size: " in capsys.readouterr().err
        raise KvqError(5, "far enough")

    monkeypatch.setattr("kvq.dump.model.load_model", load_model)
    assert run_dump(model, tmp_path / "x.h5", "--synthetic-tokens", 90) == 5


def test_a_dump_without_room_is_refused_before_weights_are_loaded(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("kvq.dump.model.load_model", lambda *_: pytest.fail("weights are loaded"))
    usage = types.SimpleNamespace(free=50_000)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: usage)
    for extra in ((), ("--dry-run",)):
        code = run_dump(model, tmp_path / "x.h5", "--synthetic-tokens", 900, *extra)
        said = capsys.readouterr().err
        assert code == 3 and "50.0 kB are free in its folder" in said and "--tokens" in said


def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing(model, tmp_path):
    """The limit on the size of a file stands in for a full disk; the check beforehand is switched off."""
    code = (
        "import sys; import kvq.dump.disk as disk; disk.free_bytes = lambda _: 1 << 60\n"
        "from kvq.dump import program; sys.exit(program.main())"
    )
    command = [sys.executable, "-c", code, model, "--synthetic-tokens", 900, "--output", tmp_path / "x.h5", "--quiet"]

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, preexec_fn=limit)
    assert ran.returncode == 3, ran.stderr
    assert ran.stderr.splitlines()[0].endswith("x.h5: cannot write: File too large") and ran.stderr.count("\n") == 2
    assert list(tmp_path.iterdir()) == []


def test_outputs_that_cannot_be_written_are_refused_first(tmp_path, capsys):
    said = refused(capsys, 2, "no/model", "-", "--synthetic-tokens", 9)
    assert "expected a file, found -" in said and not Path("-").exists()
    said = refused(capsys, 3, "no/model", tmp_path / "a" / "b" / "x.h5", "--synthetic-tokens", 9)
    assert f"hint: mkdir -p {tmp_path / 'a' / 'b'}" in said
    assert "found a folder" in refused(capsys, 3, "no/model", tmp_path, "--synthetic-tokens", 9)


def test_a_flag_that_takes_one_value_is_refused_twice(model, tmp_path, capsys):
    options = ("--synthetic-tokens", 9, "--dtype", "float16", "--dtype", "bfloat16")
    assert "--dtype: given twice" in refused(capsys, 2, model, tmp_path / "x.h5", *options)
    assert "standard input" in refused(capsys, 2, model, tmp_path / "x.h5", "--text", "-", "--text", "-")


# --- devices, quantized checkpoints, adapters ---


def test_devices_are_named_with_what_they_need(model, tmp_path, capsys, monkeypatch):
    options = ("--synthetic-tokens", 20, "--device")
    assert "auto, balanced, cpu" in refused(capsys, 5, model, tmp_path / "x.h5", *options, "gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "found none" in refused(capsys, 5, model, tmp_path / "x.h5", *options, "balanced")
    assert placement.choose_placement("auto").device == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(placement, "has_package", lambda name: False)
    for device in ("auto", "balanced"):
        assert "pip install accelerate" in refused(capsys, 5, model, tmp_path / "x.h5", *options, device)
    monkeypatch.setattr(placement, "has_package", lambda name: True)
    assert placement.choose_placement("balanced") == placement.Placement("cuda", "balanced")


def test_layers_on_several_devices_give_the_same_dump(model, tmp_path, monkeypatch):
    """accelerate moves what lies on disk for each call, as it does between GPUs and CPU memory."""
    pytest.importorskip("accelerate")
    options = ("--quiet", "--synthetic-tokens", 60, "--sequence-length", 23, "--o-proj", "--generate", 2)
    assert run_dump(model, tmp_path / "one.h5", *options) == 0
    spread = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu", "model.norm": "disk"}
    spread |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    monkeypatch.setattr(placement, "choose_placement", lambda _: placement.Placement("cpu", spread))
    assert run_dump(model, tmp_path / "two.h5", *options) == 0
    one, two = Dump(tmp_path / "one.h5"), Dump(tmp_path / "two.h5")
    for index, layer in one.layers.items():
        for name, stored in layer.stored.items():
            np.testing.assert_allclose(two.layers[index].stored[name], stored, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("offload", [False, True], ids=["on another device", "offloaded"])
def test_a_norm_is_copied_without_the_hook_that_spreads_a_model(offload):
    """The meta device stands for a GPU: what the hook moves there has no numbers any more."""
    hooks = pytest.importorskip("accelerate.hooks")
    norm = torch.nn.RMSNorm(8)
    torch.nn.init.uniform_(norm.weight)
    weights = {"weight": norm.weight.detach().clone()}
    x = np.random.default_rng(0).standard_normal((3, 2, 8))
    expected = anatomy.Norm(norm, (1, 3, 2, 8), 3)(x)
    device = "cpu" if offload else "meta"
    hooks.add_hook_to_module(
        norm, hooks.AlignDevicesHook(execution_device=device, offload=offload, weights_map=weights)
    )
    if not offload:  # a weight on the meta device would have no numbers either
        norm.weight = torch.nn.Parameter(weights["weight"])
    np.testing.assert_array_equal(anatomy.Norm(norm, (1, 3, 2, 8), 3)(x), expected)
    assert norm.weight.device.type == ("meta" if offload else "cpu"), "the model is as it was"


def test_weights_that_are_no_plain_numbers_are_read_through_the_module():
    class Quantized(torch.nn.Linear):
        """Holds half the weight, as a quantized module holds codes."""

        def forward(self, x):
            return torch.nn.functional.linear(x, 2 * self.weight, self.bias)

    module = Quantized(5, 7)
    found = placement.linear_weight(module, torch.float32)
    torch.testing.assert_close(found, 2 * module.weight.detach())
    plain = torch.nn.Linear(5, 7)
    assert torch.equal(placement.linear_weight(plain, torch.float32), plain.weight)


@pytest.mark.parametrize(
    "method, packages",
    [
        ({"quant_method": "fp8"}, "accelerate"),
        ({"quant_method": "compressed-tensors"}, "accelerate compressed-tensors"),
        ({"quant_method": "gptq"}, "accelerate optimum gptqmodel"),
        ({"quant_method": "awq"}, "accelerate gptqmodel"),
        ({"load_in_4bit": True}, "accelerate bitsandbytes"),
    ],
)
def test_quantized_checkpoints_are_named_with_what_to_install(method, packages, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(placement, "has_package", lambda name: False)
    transformers.LlamaConfig(**{**COMMON, **GQA}).save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text()) | {"quantization_config": method}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    said = refused(capsys, 5, tmp_path / "model", tmp_path / "x.h5", "--synthetic-tokens", 9)
    name = method.get("quant_method", "bitsandbytes")
    assert f"({name})" in said and f"pip install {packages};" in said


def test_an_unknown_quantization_lists_the_known_ones():
    with pytest.raises(KvqError, match=r"quantized weights \(modelopt\) are not supported") as error:
        placement.refuse_missing_packages({"quantization_config": {"quant_method": "modelopt"}}, "model")
    assert "fp8" in error.value.hint
    placement.refuse_missing_packages({}, "model")


def test_an_adapter_is_named_with_the_next_step(tmp_path, capsys):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/base"}))
    said = refused(capsys, 5, folder, tmp_path / "x.h5", "--synthetic-tokens", 9)
    assert "a LoRA adapter of some/base" in said and "merge_and_unload" in said


def test_a_typo_of_a_folder_is_told_from_a_hub_id(model, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(model.parent)
    for typo in (model.with_name("modle"), "./modle", "../" + model.parent.name + "/modle"):
        said = refused(capsys, 3, typo, tmp_path / "x.h5", "--synthetic-tokens", 9)
        assert "no such folder" in said and "did you mean" in said and "hub" not in said
    assert "found a file" in refused(capsys, 3, model / "config.json", tmp_path / "x.h5", "--synthetic-tokens", 9)


@pytest.mark.parametrize(
    "kind, said",
    [
        ("RepositoryNotFoundError", "the hub has no such model, or a private one"),
        ("GatedRepoError", "the hub asks for permission"),
        ("ConnectError", "not to be had from the hub: no route"),
    ],
)
def test_failures_of_the_hub_are_told_apart(kind, said):
    error = model_source.explain("some/model", type(kind, (Exception,), {})("no route"), False)
    assert error.exit_code == 3 and said in str(error) and error.hint
