"""scripts/perplexity.py and its attention: windows against a query-by-query reference, coding against the numpy
codec."""

import io
import json
import math
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import artifact_builder as build  # noqa: E402
from tiny_models import save_tiny  # noqa: E402

from kvq import coded_attention, model_source, native_codec, perplexity, torch_codec  # noqa: E402
from kvq.artifact_reader import parse_artifact  # noqa: E402
from kvq.bootstrap import Change, paired_change  # noqa: E402
from kvq.builtin_schemes import BuiltinPlans  # noqa: E402
from kvq.coded_attention import KeysValues, Windows, attend, spans  # noqa: E402
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


def reference(q, exact, decoded, scale, windows, sliding_window=0, extras=coded_attention.Extras()):
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
            logits = k @ q[h, i].double() * scale
            if extras.softcap is not None:
                logits = extras.softcap * torch.tanh(logits / extras.softcap)
            if extras.sinks is not None:
                logits = torch.cat([logits, extras.sinks[h : h + 1].double()])
            out[i, h] = torch.softmax(logits, 0)[: len(v)] @ v
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
    """The document's last candidate, with the document's own fields."""
    document = measure_all(capsys, model, text, *arguments)
    return document | document["results"][-1]


def measure_all(capsys, model, text, *arguments) -> dict:
    code = perplexity.main([str(a) for a in (model, "--text", text, "--window-tokens", WINDOW, "--json", *arguments)])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return json.loads(captured.out)


def fails(capsys, code, model, text, *arguments) -> str:
    if "--window-tokens" not in arguments:
        arguments = ("--window-tokens", WINDOW, *arguments)
    found = perplexity.main([str(a) for a in (model, "--text", text, *arguments)])
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


def test_rows_with_one_scale_run(models, text, capsys, tmp_path):
    """Mixed trellis keys and codebook values; gains matter, and a common power of two in the gains does not."""
    widths = np.array([[4] * 6 + [1] * 10 + [0] * 4, [2] * 12 + [1] * 8], np.uint8)
    trellis = build.trellis_plan(4, DIM, 3, trellis=[{"bits": 1, "memory": 3}])
    books = {"bits": [1, 2, 4], "per_head": False, "source": "fitted"}
    keys, values = (
        build.one_scale(build.mixed(plan, widths, 8))  # 3 + 2 + 1 + 2 bytes
        for plan in (trellis, build.codebook_plan(4, DIM, "rms", codebooks=books))
    )
    there = build.gains(1, widths) != 1
    nll = {}
    for name, gains in (
        ("own", build.gains(1, widths)),
        ("twice", build.gains(1, widths) * np.where(there, np.float32(2), np.float32(1))),
        ("ones", np.ones((KV_HEADS, 8), np.float32)),
    ):
        tensors = {}
        for layer in (0, 1):
            tensors[f"layers.{layer}.k.trellis"] = np.float32([1.2, 0.5, -0.3, 0.2])
            for bits in (1, 2, 4):
                tensors[f"layers.{layer}.v.codebook.{bits}"] = np.linspace(-2, 2, 2**bits, dtype=np.float32)
            for side in "kv":
                tensors |= {
                    f"layers.{layer}.{side}.channel_bits": widths,
                    f"layers.{layer}.{side}.channel_order": np.tile(np.arange(DIM, dtype=np.uint16), (KV_HEADS, 1)),
                    f"layers.{layer}.{side}.segment_gain": gains,
                }
        artifact = write_artifact(
            tmp_path / name,
            keys,
            values,
            tensors=tensors,
            requires=("codebook", "trellis", "mixed_widths", "row_scale"),
        )
        nll[name] = measure(capsys, models["qwen3"], text, "--artifact", artifact)["nll"]
    exact = measure(capsys, models["qwen3"], text)["nll"]
    assert nll["own"] == nll["twice"] and len({exact, nll["own"], nll["ones"]}) == 3


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
    assert captured.out.startswith("360 tokens in 6 windows of 61")


def test_fingerprint_of_another_model_is_refused(models, text, capsys, tmp_path):
    plan = build.affine_plan(4, 20, KV_HEADS)
    other = write_artifact(tmp_path / "a", plan, plan, fingerprint="0" * 64)
    assert "--ignore-fingerprint" in fails(capsys, 3, models["qwen3"], text, "--artifact", other)
    measure(capsys, models["qwen3"], text, "--artifact", other, "--ignore-fingerprint")
    own = write_artifact(tmp_path / "b", plan, plan, fingerprint=model_fingerprint(models["qwen3"]))
    measure(capsys, models["qwen3"], text, "--artifact", own)


def test_candidates_are_measured_in_one_run_and_compared_with_exact(models, text, capsys, tmp_path):
    names = []
    for bits in (4, 2):
        plan = build.affine_plan(bits, 10, KV_HEADS)
        names.append(write_artifact(tmp_path / f"bits{bits}.safetensors", plan, plan))
    chosen = ("--artifact", *names, "--scheme", "norm2", "--scheme", "affine8")
    document = measure_all(capsys, models["qwen3"], text, *chosen)
    results = document["results"]
    assert [r["name"] for r in results] == ["exact", "bits4", "bits2", "norm2", "affine8"]
    assert document["baseline"] == "exact" and results[0]["difference"] is None
    alone = [measure(capsys, models["qwen3"], text, *extra) for extra in ((), *(("--artifact", n) for n in names))]
    assert [r["window_nll"] for r in results[:3]] == [r["window_nll"] for r in alone]
    for result in results[1:]:
        change, (low, high) = result["difference"]["change"], result["difference"]["interval"]
        assert low < change < high
        assert change == pytest.approx(result["perplexity"] / results[0]["perplexity"] - 1)
    layer_bytes = 2 * KV_HEADS * 2  # rows of both sides and layers
    assert [r["bytes_per_token"] for r in results] == [
        layer_bytes * b for b in (40, 20, 16, 10, 24)
    ]  # whole words of codes
    again = measure_all(capsys, models["qwen3"], text, *chosen)
    other = measure_all(capsys, models["qwen3"], text, *chosen, "--seed", 5)
    intervals = [[r["difference"]["interval"] for r in d["results"][1:]] for d in (document, again, other)]
    assert intervals[0] == intervals[1] != intervals[2]


def test_without_exact_the_first_candidate_is_the_baseline(models, text, capsys):
    chosen = ("--no-exact", "--scheme", "affine4", "norm2")
    document = measure_all(capsys, models["qwen3"], text, *chosen)
    assert [r["name"] for r in document["results"]] == ["affine4", "norm2"] and document["baseline"] == "affine4"
    one = measure_all(capsys, models["qwen3"], text, "--no-exact", "--scheme", "norm2")
    assert one["baseline"] is None and one["results"][0]["difference"] is None


def test_a_hub_id_is_a_model(models, text, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(model_source, "download", lambda *arguments: asked.append(arguments) or models["qwen3"])
    document = measure_all(capsys, "some/model", text, "--num-windows", 1, "--local-files-only")
    assert document["model"] == "some/model" and asked == [("some/model", model_source.ALL_FILES, True)]


def test_intervals_are_those_of_paired_windows():
    rng = np.random.default_rng(3)
    baseline = rng.normal(3, 1, 400)  # windows differ far more than candidates do
    own = baseline + rng.normal(0.01, 0.002, 400)
    change = paired_change(baseline.tolist(), own.tolist(), 0)
    assert change.low < np.expm1(0.01) < change.high
    half = (change.high - change.low) / 2
    assert half == pytest.approx(1.96 * 0.002 / np.sqrt(400), rel=0.15)
    assert paired_change([3.0], [3.1], 0) == Change(math.expm1(3.1 - 3.0), None, None)


@pytest.mark.parametrize("windows", [1, 6])
def test_the_table_fits_80_columns_and_says_what_it_cannot(models, text, capsys, tmp_path, windows):
    plan = build.affine_plan(8, 10, KV_HEADS)
    artifact = write_artifact(tmp_path / f"{'long_name' * 9}.safetensors", plan, plan, sink=2, recent=8)
    arguments = (models["qwen3"], "--text", text, "--window-tokens", WINDOW, "--num-windows", windows)
    arguments += ("--artifact", artifact, "--scheme", "affine1")
    assert perplexity.main([str(a) for a in arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and lines[0].startswith(f"{60 * windows} tokens in {windows} windows")
    [row] = [line for line in lines if line.startswith("long_namelo…")]
    assert ("[" in row) == (windows > 1)
    said = "\n".join(lines)
    assert ("no interval can be given" in said) == (windows == 1)
    assert "first 2 and last 8" in said and "affine1: none" in said


def test_windows_that_hide_all_codes_are_named(models, text, capsys):
    arguments = (models["qwen3"], "--text", text, "--window-tokens", WINDOW, "--scheme", "affine1", "--windows", "1,60")
    assert perplexity.main([str(a) for a in arguments]) == 0
    assert "affine1: no token is ever coded" in capsys.readouterr().out


def test_a_model_after_the_candidates_is_told_where_to_stand(capsys):
    with pytest.raises(SystemExit) as error:
        perplexity.main(["--text", "text", "--artifact", "a", "model"])
    assert error.value.code == 2 and "expected MODEL, before --artifact" in capsys.readouterr().err


def test_progress_moves_within_a_window(models, text, capsys, monkeypatch):
    from kvq.dump import progress

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(progress.sys, "stderr", terminal)
    monkeypatch.setattr(progress.Progress, "REDRAW_SECONDS", 0)
    measure(capsys, models["qwen3"], text, "--num-windows", 1, "--scheme", "norm2")
    drawn = re.findall(r"\] +(\d+)%", terminal.getvalue())
    assert drawn == ["25", "50", "75", "100"]  # 2 candidates, 1 window, 2 layers


def test_trellis_codes_of_the_library_are_pytorchs(models, text, capsys, tmp_path, monkeypatch):
    plan = build.trellis_plan(1, DIM, 3)
    tensors = {f"layers.{i}.{side}.trellis": np.float32([1.2, 0.5, -0.3, 0.2]) for i in (0, 1) for side in "kv"}
    artifact = write_artifact(tmp_path / "a", plan, plan, tensors=tensors, requires=("trellis",))
    arguments = ("--artifact", artifact, "--no-exact", "--num-windows", 2)
    slow = measure(capsys, models["qwen3"], text, *arguments, "--codec", "pytorch")
    if native_codec.open_native_codec():
        fast = measure(capsys, models["qwen3"], text, *arguments, "--codec", "compiled")
        assert fast["window_nll"] == slow["window_nll"] and "cpu" in torch_codec.FASTER_SEARCH
    monkeypatch.setattr(native_codec, "candidate_paths", lambda: [tmp_path / "nowhere.so"])
    fails(capsys, 5, models["qwen3"], text, *arguments, "--codec", "compiled")
    assert perplexity.main([str(a) for a in (models["qwen3"], "--text", text, "--window-tokens", 61, *arguments)]) == 0
    assert "PyTorch searches the trellis codes, which is slow" in capsys.readouterr().err


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


@pytest.mark.parametrize("softcap, has_sinks", [(2.0, False), (None, True), (1.5, True)])
@pytest.mark.parametrize("windows", [(0, 0), (2, 9)])
def test_soft_caps_and_learned_sinks_are_those_of_the_definition(monkeypatch, softcap, has_sinks, windows):
    monkeypatch.setattr(coded_attention, "QUERY_BLOCK", 8)
    q, exact, decoded = 3 * torch.randn(4, 21, 8, generator=torch.Generator().manual_seed(9)), kv(1, 21), kv(2, 21)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if has_sinks else None
    extras = coded_attention.Extras(softcap, sinks)
    found = attend(q, exact, decoded, 0.7, Windows(*windows), 6, extras=extras)
    expected = reference(q, exact, decoded, 0.7, Windows(*windows), 6, extras)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_the_attention_function_passes_soft_caps_and_sinks_on():
    attention = coded_attention.CodedAttention(BuiltinPlans("exact"), Windows())
    module = type("Module", (), {"layer_idx": 3})()
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    outputs = [
        attention(module, q, k, k, None, scaling=1.0, **extra)[0]
        for extra in ({}, {"softcap": 1.0}, {"s_aux": torch.zeros(4)})
    ]
    assert len({output.sum().item() for output in outputs}) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ["--windows", "64"],
        ["--windows", "a,b"],
        ["--num-windows", "0"],
        ["--artifact", "a", "--artifact", "a"],
        ["--scheme", "norm2", "norm2"],
        ["--no-exact"],
        ["--text", "other"],
        ["--seed", "-1"],
        ["--only", "q"],
    ],
)
def test_wrong_flags_exit_with_2(arguments):
    with pytest.raises(SystemExit) as error:
        perplexity.main(["model", "--text", "text", *arguments])
    assert error.value.code == 2
