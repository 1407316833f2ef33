"""scripts/dump_qkv.py against captures made another way (dump_reference.py), and how it fails."""

import hashlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
h5py = pytest.importorskip("h5py")
pytest.importorskip("transformers", minversion="5.0")

from dump_reference import Dump, DumpLayer, Reference, assert_close, assert_sequence_matches  # noqa: E402
from tiny_models import TINY_MODELS, save_tiny  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BloomConfig  # noqa: E402

import kvq.dump.anatomy  # noqa: E402
import kvq.dump.capture  # noqa: E402
import kvq.dump.families  # noqa: E402
from kvq.dump import program as dump_qkv  # noqa: E402
from kvq.dump.model import default_prefix  # noqa: E402
from kvq.dump.progress import Progress, format_seconds  # noqa: E402
from kvq.dump.prompts import cut_windows, within_budget  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SAMPLE_MODEL = ROOT / "sample_data" / "model"
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "
SEED = 11

torch.set_num_threads(2)


# --- running the program ---


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """Folders of saved tiny models by name; each is made once."""
    made = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = save_tiny(name, tmp_path_factory.mktemp(name) / "model")
        return made[name]

    return folder


def run_dump(model, output, *options) -> int:
    """Runs the program in this process; returns the exit code."""
    argv = [str(model), "--output", str(output), "--quiet", *map(str, options)]
    try:
        return dump_qkv.main(argv)
    except SystemExit as stop:  # argparse
        return stop.code


def make_dump(model, tmp_path, *options) -> Dump:
    if "--text" not in options:
        options = ("--synthetic-tokens", 60, "--seed", SEED, "--sequence-length", 23, *options)
    path = tmp_path / "dump.h5"
    assert run_dump(model, path, *options) == 0
    return Dump(path)


def synthetic_prompts(config) -> list[list[int]]:
    """The prompts that the options of make_dump give: 60 tokens in windows of 22 after token 3, the last window has
    16."""
    tokens = dump_qkv.synthetic_tokens(60, SEED, config.vocab_size)
    return [[3, *tokens[:22]], [3, *tokens[22:44]], [3, *tokens[44:]]]


# --- what is captured ---


@pytest.mark.parametrize("name", TINY_MODELS)
def test_capture_equals_hooks_with_rope_by_hand_and_gives_the_attention_output(name, tiny_folder, tmp_path):
    dump = make_dump(tiny_folder(name), tmp_path)
    config = Reference(tiny_folder(name), [3, 1]).model.config
    for rows, tokens in zip(dump.sequences(), synthetic_prompts(config), strict=True):
        assert_sequence_matches(dump, rows, Reference(tiny_folder(name), tokens), TINY_MODELS[name])


@pytest.mark.parametrize("name", TINY_MODELS)
def test_layer_attributes_state_the_geometry_of_the_model(name, tiny_folder, tmp_path):
    tiny, options = TINY_MODELS[name], TINY_MODELS[name].options
    dump = make_dump(tiny_folder(name), tmp_path)
    assert sorted(dump.layers) == [0, 1]
    for index, layer in dump.layers.items():
        expected = {
            "kind": "gqa",
            "num_q_heads": options["num_attention_heads"],
            "num_kv_heads": options["num_key_value_heads"],
            "head_dim": options.get("head_dim"),
            "v_head_dim": options.get("head_dim"),
            "rope_layout": tiny.layout,
            "rotary_dim": tiny.rotary_dim,
            "rotary_offset": 0,
            "sliding_window": tiny.windows[index],
        }
        if tiny.is_mla:
            expected |= {
                "kind": "mla_rope",
                "num_kv_heads": 1,
                "head_dim": options["qk_rope_head_dim"],
                "v_head_dim": options["v_head_dim"],
            }
        assert {key: layer.attrs[key] for key in expected} == expected
        assert layer.attrs["softmax_scale"] == pytest.approx(tiny.softmax_scale, rel=1e-6)
        assert_layer_is_well_formed(layer, len(dump.positions))


def assert_layer_is_well_formed(layer: DumpLayer, num_tokens: int) -> None:
    attrs = layer.attrs
    shapes = {
        "q": (num_tokens, attrs["num_q_heads"], attrs["head_dim"]),
        "k": (num_tokens, attrs["num_kv_heads"], attrs["head_dim"]),
        "v": (num_tokens, attrs["num_kv_heads"], attrs["v_head_dim"]),
    }
    if attrs["kind"] == "mla_rope":
        del shapes["v"]
    assert {name: layer.stored[name].shape for name in layer.dtypes} == shapes
    assert layer.stored["rope_inv_freq"].shape == (attrs["rotary_dim"] // 2,)
    assert layer.stored["rope_inv_freq"].dtype == np.float64
    assert layer.contiguous


def test_yarn_attention_factor_is_recorded(tiny_folder, tmp_path):
    dump = make_dump(tiny_folder("qwen3"), tmp_path)
    assert dump.layers[0].attrs["rope_attention_factor"] == pytest.approx(0.1 * np.log(4.0) + 1.0)


def test_gemma3_local_and_global_layers_have_their_own_frequencies(tiny_folder, tmp_path):
    dump = make_dump(tiny_folder("gemma3_text"), tmp_path)
    exponent = -np.arange(0, 20, 2) / 20
    assert dump.layers[0]["rope_inv_freq"] == pytest.approx(10_000.0**exponent, rel=1e-5)
    assert dump.layers[1]["rope_inv_freq"] == pytest.approx(1_000_000.0**exponent, rel=1e-5)


def test_root_attributes_and_token_datasets_follow_the_format(tiny_folder, tmp_path):
    folder = tiny_folder("llama")
    dump = make_dump(folder, tmp_path, "--model-name", "a/name")
    assert dump.attrs["format"] == "kvq-dump" and dump.attrs["version"] == "1.1"
    assert dump.attrs["capture_point"] == "post_rope" and dump.attrs["num_layers"] == 2
    assert dump.attrs["model_name"] == "a/name" and dump.attrs["producer"].startswith("dump_qkv.py ")
    assert json.loads(dump.attrs["model_config"])["model_type"] == "llama"
    assert dump.cu_seqlens.dtype == np.int64 and dump.positions.dtype == np.int64
    assert dump.cu_seqlens.tolist() == [0, 23, 46, 63] and dump.generated is None
    assert dump.positions.tolist() == [*range(23), *range(23), *range(17)]


def test_fingerprint_is_the_hash_of_the_hashes(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "model")
    (folder / "another.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "README.md").write_text("not part of it")
    names = ["another.safetensors", "config.json", "model.safetensors"]
    text = "".join(f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names)
    assert make_dump(folder, tmp_path).attrs["model_fingerprint"] == hashlib.sha256(text.encode()).hexdigest()


# --- options ---


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "glm", "deepseek_v2", "deepseek_v3"])
def test_generated_tokens_are_the_greedy_ones_and_marked(name, tiny_folder, tmp_path):
    dump = make_dump(tiny_folder(name), tmp_path, "--generate", 5)
    assert dump.cu_seqlens.tolist() == [0, 28, 56, 78]
    config = Reference(tiny_folder(name), [3]).model.config
    for rows, prompt in zip(dump.sequences(), synthetic_prompts(config), strict=True):
        tokens = prompt + greedy_tokens(tiny_folder(name), prompt, 5)
        assert dump.generated[rows].tolist() == [0] * len(prompt) + [1] * 5
        assert_sequence_matches(dump, rows, Reference(tiny_folder(name), tokens), TINY_MODELS[name])


def greedy_tokens(folder, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens without a cache; never token 4, the end of text."""
    tokens = list(prompt)
    for _ in range(count):
        logits = Reference(folder, tokens).logits[-1]
        logits[4] = -np.inf
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", ["qwen3", "mistral", "glm4", "gemma2"])
@pytest.mark.parametrize("generate", [0, 3])
def test_stride_stretches_positions_but_not_what_a_token_sees(name, generate, tiny_folder, tmp_path):
    dump = make_dump(tiny_folder(name), tmp_path, "--stride", 7, "--generate", generate)
    tokens = synthetic_prompts(Reference(tiny_folder(name), [3]).model.config)[0]
    rows = dump.sequences()[0]
    assert dump.positions[rows].tolist() == [7 * t for t in range(23 + generate)]
    prompt_rows = slice(0, 23)
    assert_sequence_matches(dump, prompt_rows, Reference(tiny_folder(name), tokens, stride=7), TINY_MODELS[name])


def test_chosen_layers_are_those_of_the_whole_dump(tiny_folder, tmp_path):
    whole = make_dump(tiny_folder("qwen2"), tmp_path)
    part = make_dump(tiny_folder("qwen2"), tmp_path, "--layers", "1")
    assert list(part.layers) == [1] and part.attrs["num_layers"] == 2
    assert part.layers[1].attrs == whole.layers[1].attrs
    for name in "qkv":
        assert np.array_equal(part.layers[1][name], whole.layers[1][name])


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_o_proj_is_the_weight_in_float16(name, tiny_folder, tmp_path):
    dump = make_dump(tiny_folder(name), tmp_path, "--o-proj")
    model = Reference(tiny_folder(name), [3]).model
    for index, layer in dump.layers.items():
        weight = model.model.layers[index].self_attn.o_proj.weight.detach().numpy().astype(np.float16)
        assert layer.stored["o_proj"].dtype == np.float16 and np.array_equal(layer.stored["o_proj"], weight)
        assert weight.shape[1] == layer.attrs["num_q_heads"] * layer.attrs["v_head_dim"]


@pytest.mark.parametrize("options", [(), ("--layers", "1", "--dtype", "bfloat16", "--o-proj")])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_metric_of_o_proj_is_always_there_but_for_mla(name, options, tiny_folder, tmp_path):
    dump = make_dump(tiny_folder(name), tmp_path, *options)
    model = Reference(tiny_folder(name), [3]).model
    assert dump.attrs["version"] == ("1.0" if TINY_MODELS[name].is_mla else "1.1")
    for index, layer in dump.layers.items():
        if TINY_MODELS[name].is_mla:
            assert "o_proj_metric" not in layer.stored
            continue
        metric = layer.stored["o_proj_metric"]
        weight = model.model.layers[index].self_attn.o_proj.weight.detach().double().numpy()
        q_heads, kv_heads, dim = (int(layer.attrs[key]) for key in ("num_q_heads", "num_kv_heads", "v_head_dim"))
        assert metric.dtype == np.float32 and metric.shape == (kv_heads, dim, dim)
        assert np.array_equal(metric, metric.transpose(0, 2, 1))
        rng = np.random.default_rng(index)
        for head in range(kv_heads):  # what an error costs, head by head as the model reads values
            for error in (*np.eye(dim), rng.standard_normal(dim)):
                readers = [h for h in range(q_heads) if h // (q_heads // kv_heads) == head]
                cost = sum(np.sum((weight[:, h * dim : (h + 1) * dim] @ error) ** 2) for h in readers)
                assert error @ metric[head].astype(np.float64) @ error == pytest.approx(cost, rel=1e-5)


def test_an_output_projection_of_zeros_ends_the_run(tiny_folder, tmp_path, capsys, out):
    model = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"))
    model.model.layers[1].self_attn.o_proj.weight.data[:] = 0.0
    model.save_pretrained(tmp_path / "model")
    expect_failed_check(tmp_path / "model", tmp_path, capsys, "layer 1 o_proj_metric", "only zeros")


@pytest.mark.parametrize("dtype, kind", [("bfloat16", np.uint16), ("float16", np.float16)])
def test_low_precision_dumps_are_the_float32_dump_rounded(dtype, kind, tiny_folder, tmp_path):
    exact = make_dump(tiny_folder("glm"), tmp_path)
    rounded = make_dump(tiny_folder("glm"), tmp_path, "--dtype", dtype)
    for index, layer in rounded.layers.items():
        for name in "qkv":
            assert layer.dtypes[name] == dtype and layer.stored[name].dtype == kind
            expected = torch.from_numpy(exact.layers[index].stored[name]).to(getattr(torch, dtype)).double().numpy()
            assert np.array_equal(layer[name], expected)


@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["qwen3", "glm4", "gemma3_text", "deepseek_v3"])
def test_low_precision_arithmetic_passes_the_checks(name, compute, tiny_folder, tmp_path):
    low = make_dump(tiny_folder(name), tmp_path, "--compute-dtype", compute, "--stride", 9)
    exact = make_dump(tiny_folder(name), tmp_path, "--stride", 9)
    assert_close(low.layers[0]["k"], exact.layers[0]["k"], "layer 0 k", 4e-2)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "deepseek_v2"])
def test_curvature_is_the_second_moment_of_the_nll_gradient(name, tiny_folder, tmp_path):
    dump = make_dump(tiny_folder(name), tmp_path, "--curvature")
    model = Reference(tiny_folder(name), [3]).model
    total = [0.0] * 2
    for tokens in synthetic_prompts(model.config):
        for index, gradient in enumerate(output_gradients(model, tokens)):
            heads = gradient.reshape(len(tokens), int(dump.layers[index].attrs["num_q_heads"]), -1)
            total[index] += np.einsum("thi,thj->hij", heads, heads)
    with h5py.File(tmp_path / "dump.h5") as file:
        for index, layer in dump.layers.items():
            assert file[f"layers/{index}/output_curvature"].attrs["source"] == "nll"
            assert layer.stored["output_curvature"].dtype == np.float32
            assert_close(layer["output_curvature"], total[index] / len(dump.positions), f"layer {index}", 1e-4)


def output_gradients(model, tokens: list[int]) -> list[np.ndarray]:
    """Gradient of the summed NLL with respect to each layer's attention output: [T, Hq * Dv] per layer."""
    zeros = [
        torch.zeros(1, len(tokens), layer.self_attn.o_proj.in_features, requires_grad=True)
        for layer in model.model.layers
    ]
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _m, inputs, zero=zero: (inputs[0] + zero,))
        for layer, zero in zip(model.model.layers, zeros)
    ]
    ids = torch.tensor([tokens])
    loss = model(ids, labels=ids).loss * (len(tokens) - 1)
    gradients = torch.autograd.grad(loss, zeros)
    for hook in hooks:
        hook.remove()
    return [gradient[0].double().numpy() for gradient in gradients]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma3_text", "deepseek_v3"])
def test_a_gpu_dumps_what_the_cpu_dumps(name, tiny_folder, tmp_path):
    options = ("--generate", 3, "--o-proj", "--curvature", "--compute-dtype", "float32")
    cpu = make_dump(tiny_folder(name), tmp_path, *options)
    gpu = make_dump(tiny_folder(name), tmp_path, *options, "--device", "cuda")
    for index, layer in cpu.layers.items():
        assert gpu.layers[index].attrs == layer.attrs
        for tensor in layer.stored:
            assert_close(gpu.layers[index][tensor], layer[tensor], f"layer {index} {tensor}", 1e-3)


def test_same_input_gives_the_same_bytes(tiny_folder, tmp_path):
    paths = [tmp_path / "one.h5", tmp_path / "two.h5"]
    for path in paths:
        assert run_dump(tiny_folder("qwen3"), path, "--synthetic-tokens", 40, "--generate", 2, "--o-proj") == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()


# --- texts and sequences ---


@pytest.fixture(scope="session")
def sample_model():
    if not (SAMPLE_MODEL / "model.safetensors").exists():
        pytest.skip("sample_data/model is not here")
    return SAMPLE_MODEL


def test_several_texts_take_turns_and_begin_with_the_bos_of_the_configuration(sample_model, tmp_path):
    texts = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path, word in zip(texts, ("chalk", "cheese")):
        path.write_text(f"{word}: {TEXT * 3}", encoding="utf-8")
    dump = make_dump(
        sample_model,
        tmp_path,
        "--text",
        texts[0],
        "--text",
        texts[1],
        "--sequence-length",
        31,
        "--tokens",
        100,
        "--layers",
        "0,2",
    )
    assert dump.cu_seqlens.tolist() == [0, 31, 62, 93]  # the last 7 are too few for a sequence
    firsts = {name: [dump.layers[0][name][rows.start] for rows in dump.sequences()] for name in "kv"}
    for name in (
        "kv"
    ):  # in layer 0, k and v depend only on the token, and all sequences begin with the same token at position 0
        assert all(np.array_equal(firsts[name][0], other) for other in firsts[name])
    second = [dump.layers[0]["v"][rows.start + 1] for rows in dump.sequences()]
    assert not np.array_equal(second[0], second[1])
    assert dump.layers[2].dtypes == {"q": "bfloat16", "k": "bfloat16", "v": "bfloat16"}


def test_prepend_replaces_the_bos_and_no_prepend_drops_it(tiny_folder, tmp_path):
    for prefix, length in {(): 21, ("--prepend", "7,8"): 22, ("--no-prepend",): 20}.items():
        assert run_dump(tiny_folder("llama"), tmp_path / "dump.h5", "--synthetic-tokens", 20, *prefix) == 0
        assert len(Dump(tmp_path / "dump.h5").positions) == length


def test_the_default_prefix_is_what_the_tokenizer_adds(sample_model):
    from tokenizers.processors import TemplateProcessing

    config, tokenizer = AutoConfig.from_pretrained(sample_model), AutoTokenizer.from_pretrained(sample_model)
    assert default_prefix(tokenizer, config) == default_prefix(None, config) == [0]
    names = {"<|pad|>": 1, "<|endoftext|>": 0}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|pad|> <|endoftext|> $A <|pad|>", special_tokens=list(names.items())
    )
    assert default_prefix(tokenizer, config) == [1, 0]


def test_windows_are_whole_and_spread_over_the_text():
    tokens = list(range(100))
    assert cut_windows(tokens, 10, 3, "text") == [tokens[0:10], tokens[30:40], tokens[60:70]]
    assert cut_windows(tokens, 10, 7, "text")[-1] == tokens[60:70]
    assert [len(piece) for piece in cut_windows(tokens, 42, None, "text")] == [42, 42, 16]
    assert [len(piece) for piece in cut_windows(tokens, 43, None, "text")] == [43, 43]


def test_budget_shortens_the_last_sequence():
    sequences = [[1] * 30, [2] * 30, [3] * 30]
    assert [len(sequence) for sequence in within_budget(sequences, 50)] == [30, 20]
    assert [len(sequence) for sequence in within_budget(sequences, 45)] == [30]
    assert [len(sequence) for sequence in within_budget(sequences, 5)] == [5]
    assert within_budget(sequences, None) == sequences


def test_skip_makes_disjoint_parts_of_one_text(tiny_folder, tmp_path):
    whole = make_dump(tiny_folder("llama"), tmp_path)
    skipped = make_dump(tiny_folder("llama"), tmp_path, "--skip", 22)
    assert np.array_equal(skipped.layers[1]["k"], whole.layers[1]["k"][23:])


# --- refusals ---


def expect_error(capsys, *parts: str) -> None:
    """Asserts one line of error, at most one hint and no traceback."""
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[0].startswith("dump_qkv.py: error: ") and len(lines) <= 2
    assert all(line.startswith("hint: ") for line in lines[1:])
    for part in parts:
        assert part in " ".join(lines)


def test_unsupported_model_is_refused_by_name_with_what_is_supported(tmp_path, capsys):
    torch.manual_seed(1)
    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    assert run_dump(tmp_path / "model", tmp_path / "dump.h5", "--synthetic-tokens", 20) == 5
    expect_error(capsys, "bloom", "no layer calls the attention interface", "llama", "qwen3_moe", "deepseek_v3")


def test_terms_only_the_interface_sees_are_refused(tiny_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(kvq.dump.capture.FOREIGN_TERMS, "scaling", "a made-up term")
    assert run_dump(tiny_folder("llama"), tmp_path / "dump.h5", "--synthetic-tokens", 20) == 5
    expect_error(capsys, "layer 0: a made-up term is not supported")


def test_rope_that_changes_with_the_length_is_refused(tmp_path, capsys):
    folder = save_tiny(
        "llama",
        tmp_path / "model",
        max_position_embeddings=25,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    )
    assert run_dump(folder, tmp_path / "dump.h5", "--synthetic-tokens", 40, "--sequence-length", 41) == 0
    options = ("--synthetic-tokens", 50, "--sequence-length", 24, "--generate", 8)
    assert run_dump(folder, tmp_path / "other.h5", *options) == 5
    expect_error(capsys, "rope_inv_freq changed")


def test_duplicate_sequences_are_refused_unless_allowed(sample_model, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    options = ("--text", text, "--text", text, "--layers", 0)
    assert run_dump(sample_model, tmp_path / "dump.h5", *options) == 3
    expect_error(capsys, "sequence 1 repeats 0", "--allow-duplicates")
    assert run_dump(sample_model, tmp_path / "dump.h5", *options, "--allow-duplicates") == 0


def test_unreadable_input_is_named(tiny_folder, sample_model, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (tmp_path / "short.txt").write_text("Hm.")
    for name, complaint in {
        "empty.txt": "empty",
        "latin.txt": "0xe9",
        "short.txt": "expected at least",
        "missing.txt": "No such file",
    }.items():
        assert run_dump(sample_model, tmp_path / "dump.h5", "--text", tmp_path / name) == 3
        expect_error(capsys, complaint)
    assert run_dump(tmp_path / "no_model", tmp_path / "dump.h5", "--synthetic-tokens", 9) == 3
    expect_error(capsys, "no such folder")
    assert run_dump("no-such/model", tmp_path / "dump.h5", "--synthetic-tokens", 9, "--local-files-only") == 3
    expect_error(capsys, "not to be had from the hub")
    assert run_dump(tiny_folder("llama"), tmp_path / "no_folder" / "dump.h5", "--synthetic-tokens", 9) == 3
    expect_error(capsys, "a folder that exists")
    options = ("--synthetic-tokens", 90, "--sequence-length", 31, "--windows", 4)
    assert run_dump(tiny_folder("llama"), tmp_path / "dump.h5", *options) == 3
    expect_error(capsys, "expected 4 windows of 30 tokens, found 3")


def test_wrong_flags_exit_with_two(tiny_folder, tmp_path, capsys):
    wrong = [
        [],
        ["--synthetic-tokens", "9", "--text", "x"],
        ["--synthetic-tokens", "0"],
        ["--dtype", "int8"],
        ["--synthetic-tokens", "9", "--layers", "x"],
        ["--synthetic-tokens", "9", "--layers", "1-2"],
        ["--synthetic-tokens", "9", "--prepend", "89"],
        ["--synthetic-tokens", "9", "--sequence-length", "1"],
    ]
    for options in wrong:
        assert run_dump(tiny_folder("llama"), tmp_path / "dump.h5", *options) == 2, options
        expect_error(capsys)


def test_missing_weights_are_refused_and_not_made_up(tiny_folder, tmp_path, capsys):
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 3}
    (folder / "config.json").write_text(json.dumps(config))
    assert run_dump(folder, tmp_path / "dump.h5", "--synthetic-tokens", 20) == 3
    expect_error(capsys, "tensors are missing", "layers.2")


def test_damaged_weights_are_refused(tiny_folder, tmp_path, capsys):
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert run_dump(folder, tmp_path / "dump.h5", "--synthetic-tokens", 20) == 3
    expect_error(capsys, "cannot load the model")


# --- validators: each must be able to fail, and leave no file behind ---


def expect_failed_check(folder, tmp_path, capsys, *parts: str) -> None:
    assert run_dump(folder, tmp_path / "out" / "dump.h5", "--synthetic-tokens", 60, "--sequence-length", 23) == 4
    expect_error(capsys, *parts)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()


@pytest.mark.parametrize("name", [name for name in TINY_MODELS if name != "deepseek_v3_half"])
def test_a_wrong_layout_is_noticed(name, tiny_folder, tmp_path, capsys, monkeypatch, out):
    family = kvq.dump.families.FAMILIES[name]
    other = {"half": "interleaved", "interleaved": "half"}[family.rope_layout]
    changed = {**vars(family), "rope_layout": other}
    monkeypatch.setitem(kvq.dump.families.FAMILIES, name, kvq.dump.families.Family(**changed))
    expect_failed_check(tiny_folder(name), tmp_path, capsys, "RoPE", f"recorded as '{other}'")


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_a_qk_norm_other_than_the_models_is_noticed(name, tiny_folder, tmp_path, capsys, monkeypatch, out):
    norm = kvq.dump.anatomy.Norm.__call__
    monkeypatch.setattr(kvq.dump.anatomy.Norm, "__call__", lambda self, x: 1.001 * norm(self, x))
    expect_failed_check(tiny_folder(name), tmp_path, capsys, "QK-norm", "captured without the norm?")


@pytest.mark.parametrize("fact, value", [("softmax_scale", 0.3), ("sliding_window", 5), ("sliding_window", 0)])
def test_a_wrong_scale_or_window_is_noticed(fact, value, tiny_folder, tmp_path, capsys, monkeypatch, out):
    original = kvq.dump.capture.LayerFacts
    monkeypatch.setattr(kvq.dump.capture, "LayerFacts", lambda **facts: original(**{**facts, fact: value}))
    expect_failed_check(tiny_folder("mistral"), tmp_path, capsys, "attention output", "softmax scale, window")


def test_wrong_frequencies_are_noticed(tiny_folder, tmp_path, capsys, monkeypatch, out):
    read = kvq.dump.capture.read_rope
    monkeypatch.setattr(kvq.dump.capture, "read_rope", lambda *a: (read(*a)[0] * 1.0001, read(*a)[1]))
    expect_failed_check(tiny_folder("llama"), tmp_path, capsys, "RoPE", "neither half nor interleaved pairs fit")


@pytest.mark.parametrize("value, complaint", [(float("nan"), "NaN or Inf"), (0.0, "only zeros")])
def test_nan_and_zero_tensors_end_the_run(value, complaint, tiny_folder, tmp_path, capsys, out):
    model = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"))
    model.model.layers[1].self_attn.v_proj.weight.data[:] = value
    model.save_pretrained(tmp_path / "model")
    expect_failed_check(tmp_path / "model", tmp_path, capsys, "layer 1 v", complaint)


def test_overflow_of_float16_is_noticed(tiny_folder, tmp_path, capsys):
    model = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"))
    model.model.layers[0].self_attn.k_proj.weight.data *= 1e5
    model.save_pretrained(tmp_path / "model")
    options = ("--synthetic-tokens", 20, "--dtype", "float16")
    assert run_dump(tmp_path / "model", tmp_path / "dump.h5", *options) == 4
    expect_error(capsys, "layer 0 k", "does not fit float16", "bfloat16")


# --- the program as people meet it ---


def test_help_needs_no_torch_and_shows_an_example():
    code = (
        "import sys; import dump_qkv\n"
        "try: dump_qkv.main(['--help'])\n"
        "except SystemExit: assert 'torch' not in sys.modules and 'h5py' not in sys.modules"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "scripts", capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "example:" in shown.stdout and "exit codes:" in shown.stdout and "gemma3_text" in shown.stdout


def test_a_run_reports_checks_on_stderr_and_a_table_on_stdout(tiny_folder, tmp_path):
    command = [
        sys.executable,
        ROOT / "scripts" / "dump_qkv.py",
        tiny_folder("gemma3_text"),
        "--synthetic-tokens",
        "40",
        "--output",
        tmp_path / "dump.h5",
        "--threads",
        "1",
    ]
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert [line.split(":")[1].strip() for line in ran.stderr.splitlines() if line.startswith("check: ")] == [
        "sequences",
        "values",
        "QK-norm",
        "RoPE",
        "attention output",
    ]
    assert "capture: 100%" in ran.stderr and "FAILED" not in ran.stderr
    table = ran.stdout.splitlines()
    assert table[0].startswith("wrote ") and len(table) == 4  # layers 0 and 1 differ in their window
    assert table[2].split()[:7] == ["0", "6", "2", "20", "20", "0.24254", "6"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_draws_a_bar_on_a_terminal_and_lines_elsewhere():
    terminal, log = Terminal(), io.StringIO()
    for stream in (terminal, log):
        progress = Progress("capture", 40, stream=stream)
        for _ in range(40):
            progress.advance(1)
        progress.close()
    assert "\rcapture [" in terminal.getvalue() and "100%  0s left" in terminal.getvalue()
    assert len(log.getvalue().splitlines()) == 10 and log.getvalue().endswith("capture: 100%  0s left\n")
    assert [format_seconds(s) for s in (0, 59.6, 3600, 7380)] == ["0s", "1m00s", "1h00m", "2h03m"]


@pytest.mark.parametrize("name", ["calibration.h5", "evaluation.h5"])
def test_sample_dumps_belong_to_the_sample_model(name, sample_model):
    path = ROOT / "sample_data" / name
    if not path.exists():
        pytest.skip(f"sample_data/{name} is not here")
    assert path.stat().st_size <= 8 * 2**20
    dump = Dump(path)
    lines = "".join(
        f"{hashlib.sha256((sample_model / part).read_bytes()).hexdigest()}  {part}\n"
        for part in ("config.json", "model.safetensors")
    )
    assert dump.attrs["model_fingerprint"] == hashlib.sha256(lines.encode()).hexdigest()
    assert sorted(dump.layers) == list(range(6)) and len(dump.sequences()) == 3
    for layer in dump.layers.values():
        assert set(layer.dtypes.values()) == {"bfloat16"}
        assert all(np.isfinite(layer[tensor]).all() for tensor in "qkv")
