"""scripts/perplexity.py and its attention: windows against a query-by-query reference, coding against the numpy
codec."""

import json
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import artifact_builder as build  # noqa: E402
from tiny_models import save_tiny  # noqa: E402

from kvq import coded_attention, perplexity  # noqa: E402
from kvq.artifact_reader import parse_artifact  # noqa: E402
from kvq.builtin_schemes import BuiltinPlans  # noqa: E402
from kvq.coded_attention import KeysValues, Windows, attend, spans  # noqa: E402
from kvq.errors import KvqError  # noqa: E402
from kvq.fingerprint import model_fingerprint  # noqa: E402
from kvq.safetensors_file import SafetensorsFile  # noqa: E402

DIM, KV_HEADS, Q_HEADS = 20, 2, 6  # of tiny_models
WINDOW = 61


# Attention


def kv(seed: int, tokens: int, heads: int = 2, dim: int = 8) -> KeysValues:
    generator = torch.Generator().manual_seed(seed)
    return KeysValues(
        torch.randn(heads, tokens, dim, generator=generator), torch.randn(heads, tokens, dim - 2, generator=generator)
    )


def reference(q, exact, decoded, scale, windows, sliding_window=0):
    """Attention by its definition: one query and one head at a time, in float64."""
    heads, tokens, _ = q.shape
    out = torch.empty(tokens, heads, exact.v.shape[2], dtype=torch.float64)
    for h in range(heads):
        group = h * exact.k.shape[0] // heads
        for i in range(tokens):
            first = max(0, i - sliding_window + 1) if sliding_window else 0
            seen = range(first, i + 1)
            sources = [exact if j < windows.sink_tokens or j > i - windows.recent_tokens else decoded for j in seen]
            k = torch.stack([s.k[group, j] for s, j in zip(sources, seen)]).double()
            v = torch.stack([s.v[group, j] for s, j in zip(sources, seen)]).double()
            out[i, h] = torch.softmax(k @ q[h, i].double() * scale, 0) @ v
    return out


@pytest.mark.parametrize("tokens", [1, 7, 16, 29])
@pytest.mark.parametrize("windows", [(0, 0), (3, 0), (0, 5), (2, 9), (4, 64), (64, 1), (1, 1), (0, 29)])
@pytest.mark.parametrize("sliding_window", [0, 6])
def test_each_query_has_its_own_windows(monkeypatch, tokens, windows, sliding_window):
    monkeypatch.setattr(coded_attention, "QUERY_BLOCK", 8)
    q = torch.randn(4, tokens, 8, generator=torch.Generator().manual_seed(9))
    exact, decoded = kv(1, tokens), kv(2, tokens)
    found = attend(q, exact, decoded, 0.4, Windows(*windows), sliding_window)
    expected = reference(q, exact, decoded, 0.4, Windows(*windows), sliding_window)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_spans_cover_every_key_once():
    for sink in (0, 1, 5, 100):
        for recent in (0, 1, 7, 100):
            for first, last in ((0, 1), (0, 8), (8, 16), (40, 43)):
                found = spans(first, last, Windows(sink, recent))
                assert [s.begin for s in found] == [0, *(s.end for s in found[:-1])] and found[-1].end == last


def test_without_decoded_keys_everything_is_exact():
    q, exact = torch.randn(4, 30, 8), kv(1, 30)
    torch.testing.assert_close(
        attend(q, exact, None, 0.3, Windows()).double(),
        reference(q, exact, exact, 0.3, Windows()),
        atol=1e-5,
        rtol=1e-5,
    )


def test_reconstruction_is_the_numpy_codecs():
    shape = build.geometry(Q_HEADS, KV_HEADS, 8)
    blocks = build.rotation("block_hadamard", order=8, signs=True)
    tree = build.manifest(
        [
            build.layer(
                0,
                shape,
                build.affine_plan(3, 4, KV_HEADS, 0.9, center=True, rotation=build.rotation("dense")),
                build.symmetric_plan(2, 8, rotation=blocks),
            )
        ]
    )
    rng = np.random.default_rng(2)
    tensors = {
        "layers.0.k.rotation": build.orthogonal(1, KV_HEADS, 8),
        "layers.0.k.center": rng.standard_normal((KV_HEADS, 8)).astype(np.float32),
        "layers.0.v.hadamard_signs": rng.choice([-1, 1], (KV_HEADS, 8)).astype(np.int8),
    }
    layer = parse_artifact(SafetensorsFile(build.to_bytes(tree, tensors), "test")).layers[0]
    x = rng.standard_normal((KV_HEADS, 40, 8)).astype(np.float32)
    for plan in layer.sides.values():
        found = coded_attention.reconstruct(plan, torch.from_numpy(x)).numpy()
        for head in range(KV_HEADS):
            np.testing.assert_allclose(found[head], plan.reconstruct(x[head], head), atol=1e-6)


# The protocol


def test_windows_are_cut_as_the_protocol_says():
    tokens = list(range(100))
    assert perplexity.cut_windows(tokens, 9, 6) == [tokens[i : i + 9] for i in (0, 9, 18, 27, 36, 45)]  # 11 // 6 = 1
    assert perplexity.cut_windows(tokens, 9, 5) == [tokens[i : i + 9] for i in (0, 18, 36, 54, 72)]
    assert perplexity.cut_windows(tokens, 9, 50) == [tokens[i : i + 9] for i in range(0, 99, 9)]
    assert perplexity.cut_windows(tokens, 100, 6) == [tokens]
    assert perplexity.cut_windows(tokens, 101, 6) == []


# The program, on random models


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(f"w{i}" for i in np.random.default_rng(0).integers(0, 80, 400)))
    return path


def save_tokenizer(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(89)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folders = {}
    for name in ("qwen3", "mistral", "gemma2"):
        folders[name] = save_tiny(name, tmp_path_factory.mktemp(name))
        save_tokenizer(folders[name])
    return folders


def write_artifact(path, plan_k, plan_v, layers=2, tensors=None, **fields):
    shape = build.geometry(Q_HEADS, KV_HEADS, DIM)
    entries = [build.layer(i, shape, plan_k, plan_v) for i in range(layers)]
    path.write_bytes(build.to_bytes(build.manifest(entries, 2, **fields), tensors))
    return path


def measure(capsys, model, text, *arguments) -> dict:
    code = perplexity.main([str(a) for a in (model, "--text", text, "--window-tokens", WINDOW, "--json", *arguments)])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return json.loads(captured.out)


def fails(capsys, code, model, text, *arguments) -> str:
    found = perplexity.main([str(a) for a in (model, "--text", text, "--window-tokens", WINDOW, *arguments)])
    captured = capsys.readouterr()
    assert (found, captured.out) == (code, ""), captured.err
    assert captured.err.startswith("perplexity.py: error: ")
    return captured.err


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma2"])
def test_exact_is_what_transformers_computes(models, text, capsys, name):
    result = measure(capsys, models[name], text)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        models[name], dtype=torch.float32, attn_implementation="eager"
    )
    tokens = [int(word[1:]) for word in text.read_text().split()]
    losses = []
    for window in perplexity.cut_windows(tokens, WINDOW - 1, 6):
        ids = torch.tensor([[3, *window]])
        with torch.no_grad():
            losses.append(float(model(ids, labels=ids).loss))
    assert result["num_windows"] == 6 and result["tokens"] == 360
    np.testing.assert_allclose(result["window_nll"], losses, rtol=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)


def test_exact_artifact_leaves_the_perplexity_as_it_is(models, text, capsys, tmp_path):
    artifact = write_artifact(tmp_path / "a", build.exact_plan(), build.exact_plan())
    exact = measure(capsys, models["qwen3"], text)
    coded = measure(capsys, models["qwen3"], text, "--artifact", artifact)
    assert coded["nll"] == pytest.approx(exact["nll"], rel=1e-3)  # exact rows are bfloat16
    assert coded["nll"] != exact["nll"]


def test_fewer_bits_change_more(models, text, capsys, tmp_path):
    exact = measure(capsys, models["qwen3"], text)
    moved = []
    for bits in (8, 4, 2):
        plan = build.affine_plan(bits, 10, KV_HEADS)
        coded = measure(capsys, models["qwen3"], text, "--artifact", write_artifact(tmp_path / "a", plan, plan))
        moved.append(np.abs(np.subtract(coded["window_nll"], exact["window_nll"])).mean())
    assert moved[0] < 0.2 * moved[1] < 0.2 * moved[2]
    assert moved[0] < 1e-3 < moved[2]


def test_windows_of_the_artifact_are_the_default(models, text, capsys, tmp_path):
    plan = build.symmetric_plan(2, 20, rotation=build.rotation("block_hadamard", order=4))
    artifact = write_artifact(tmp_path / "a", plan, plan, sink=2, recent=8)
    run = lambda *extra: measure(capsys, models["mistral"], text, "--artifact", artifact, *extra)
    default, none, explicit = run(), run("--windows", "none"), run("--windows", "2,8")
    assert default["windows"] == {"sink_tokens": 2, "recent_tokens": 8}
    assert default["nll"] == explicit["nll"] != none["nll"]
    whole = run("--windows", f"0,{WINDOW}")
    assert whole["nll"] == pytest.approx(measure(capsys, models["mistral"], text)["nll"], rel=1e-6)


def test_an_artifact_equals_the_same_scheme_by_name(models, text, capsys, tmp_path):
    plan = build.affine_plan(3, 10, 1, rotation=build.rotation("block_hadamard", "layer", order=4))
    artifact = write_artifact(tmp_path / "a", plan, plan)
    coded = measure(capsys, models["qwen3"], text, "--artifact", artifact)
    named = measure(capsys, models["qwen3"], text, "--scheme", "hadamard-affine3g10")
    assert coded["window_nll"] == named["window_nll"]


def test_unrounded_metadata_is_fp32_metadata(models, text, capsys, tmp_path):
    fp16, fp32 = (
        write_artifact(tmp_path / t, *[build.affine_plan(2, 20, KV_HEADS, scale_type=t)] * 2) for t in ("fp16", "fp32")
    )
    unrounded = measure(capsys, models["qwen3"], text, "--artifact", fp16, "--unrounded-metadata")
    assert unrounded["window_nll"] == measure(capsys, models["qwen3"], text, "--artifact", fp32)["window_nll"]
    assert unrounded["window_nll"] != measure(capsys, models["qwen3"], text, "--artifact", fp16)["window_nll"]


def test_trellises_codebooks_and_centroids_run(models, text, capsys, tmp_path):
    """Mixed trellis keys and codebook values with joint centroids, in both layers."""
    widths = np.array([[4] * 6 + [1] * 10 + [0] * 4, [2] * 12 + [1] * 8], np.uint8)
    keys = build.mixed(
        build.trellis_plan(4, DIM, 3, trellis=[{"bits": 1, "memory": 3}]), widths, 12
    )  # 3 + 2 + 1 + 4 bytes
    values = build.codebook_plan(3, DIM, **build.centroids(4, KV_HEADS, "joint"))
    rng = np.random.default_rng(1)
    tensors = {}
    for layer in (0, 1):
        tensors |= {
            f"layers.{layer}.k.channel_bits": widths,
            f"layers.{layer}.k.trellis": np.float32([1.2, 0.5, -0.3, 0.2]),
            f"layers.{layer}.k.channel_order": np.tile(np.arange(DIM, dtype=np.uint16), (KV_HEADS, 1)),
            f"layers.{layer}.v.codebook.3": np.linspace(-2, 2, 8, dtype=np.float32),
            f"layers.{layer}.v.centroids": rng.standard_normal((KV_HEADS, 4, DIM)).astype(np.float32),
        }
    artifact = write_artifact(
        tmp_path / "a", keys, values, tensors=tensors, requires=("codebook", "trellis", "mixed_widths", "centroids")
    )
    exact = measure(capsys, models["qwen3"], text)
    nll = {
        only: measure(capsys, models["qwen3"], text, "--artifact", artifact, *(["--only", only] if only else []))["nll"]
        for only in ("", "k", "v")
    }
    assert len({exact["nll"], *nll.values()}) == 4


@pytest.mark.parametrize("kind", ["dense", "block_hadamard", "identity"])
def test_transforms_run(models, text, capsys, tmp_path, kind):
    """With 8 bits hardly anything changes, although A is not orthogonal; with 2 bits the result changes more."""
    a, inverse, condition = build.inverse_pair(1, KV_HEADS, DIM)
    scale = np.exp2(np.random.default_rng(2).integers(-1, 2, (KV_HEADS, DIM))).astype(np.float32)
    rotation = build.rotation(
        kind,
        **({"inverse": True} if kind == "dense" else {"channel_scale": True}),
        **({"order": 4} if kind == "block_hadamard" else {}),
    )
    claims = build.transform(KV_HEADS, condition=condition if kind == "dense" else 1.0)
    own = {"rotation": a, "inverse": inverse} if kind == "dense" else {"channel_scale": scale}
    tensors = {
        f"layers.{layer}.{side}.{name}": array for layer in (0, 1) for side in "kv" for name, array in own.items()
    }
    exact = measure(capsys, models["qwen3"], text)
    moved = []
    for bits in (8, 2):
        plan = build.affine_plan(bits, 10, KV_HEADS, rotation=rotation, **claims)
        artifact = write_artifact(tmp_path / "a", plan, plan, tensors=tensors, requires=("transform",))
        coded = measure(capsys, models["qwen3"], text, "--artifact", artifact)
        moved.append(np.abs(np.subtract(coded["window_nll"], exact["window_nll"])).mean())
    assert 0 < moved[0] < 1e-2 and moved[0] < 0.1 * moved[1]


def test_one_side_alone(models, text, capsys):
    nll = {
        only: measure(capsys, models["qwen3"], text, "--scheme", "norm2", *(["--only", only] if only else []))["nll"]
        for only in ("", "k", "v")
    }
    assert len(set(nll.values())) == 3


def test_uncovered_layers_stay_exact_and_are_named(models, text, capsys, tmp_path):
    plan = build.affine_plan(2, 20, KV_HEADS)
    artifact = write_artifact(tmp_path / "a", plan, plan, layers=1)
    arguments = [models["qwen3"], "--text", text, "--window-tokens", WINDOW, "--artifact", artifact]
    assert perplexity.main([str(a) for a in arguments]) == 0
    captured = capsys.readouterr()
    assert "does not cover layers 1: they stay exact" in captured.err
    assert captured.out.startswith("perplexity ")


def test_fingerprint_of_another_model_is_refused(models, text, capsys, tmp_path):
    plan = build.affine_plan(4, 20, KV_HEADS)
    other = write_artifact(tmp_path / "a", plan, plan, fingerprint="0" * 64)
    assert "--ignore-fingerprint" in fails(capsys, 3, models["qwen3"], text, "--artifact", other)
    measure(capsys, models["qwen3"], text, "--artifact", other, "--ignore-fingerprint")
    own = write_artifact(tmp_path / "b", plan, plan, fingerprint=model_fingerprint(models["qwen3"]))
    measure(capsys, models["qwen3"], text, "--artifact", own)


def test_what_does_not_fit_is_refused_in_one_line(models, text, capsys, tmp_path):
    shape = build.geometry(Q_HEADS, 3, DIM)
    wrong = tmp_path / "wrong"
    wrong.write_bytes(
        build.to_bytes(build.manifest([build.layer(i, shape, *[build.affine_plan(2, 20, 3)] * 2) for i in (0, 1)]))
    )
    assert "3 of 20" in fails(capsys, 3, models["qwen3"], text, "--artifact", wrong)
    fails(capsys, 2, models["qwen3"], text, "--scheme", "affine9")
    fails(capsys, 2, models["qwen3"], text, "--scheme", "affine2g7")
    fails(capsys, 2, models["qwen3"], text, "--bos", 89)
    fails(capsys, 3, models["qwen3"], text, "--window-tokens", 500)
    fails(capsys, 3, models["qwen3"], tmp_path / "missing.txt")
    fails(capsys, 3, tmp_path / "missing", text)
    fails(capsys, 3, models["qwen3"], text, "--artifact", tmp_path / "missing")


def test_softcap_and_learned_sinks_are_unsupported():
    attention = coded_attention.CodedAttention(BuiltinPlans("norm2"), Windows())
    module = type("Module", (), {"layer_idx": 3})()
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    for extra in ({"softcap": 50.0}, {"s_aux": torch.zeros(4)}):
        with pytest.raises(KvqError, match="layer 3"):
            attention(module, q, k, k, None, scaling=1.0, **extra)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--windows", "64"],
        ["--windows", "a,b"],
        ["--num-windows", "0"],
        ["--artifact", "a", "--scheme", "exact"],
        ["--only", "q"],
    ],
)
def test_wrong_flags_exit_with_2(arguments):
    with pytest.raises(SystemExit) as error:
        perplexity.main(["model", "--text", "text", *arguments])
    assert error.value.code == 2
