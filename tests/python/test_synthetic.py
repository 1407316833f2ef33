"""scripts/make_synthetic_dump.py: what it says it planted can be found again with plain numpy."""

import itertools
import json

import h5py
import numpy as np
import pytest

from kvq.dump import make_synthetic
from kvq.dump.rope import rotate

TOLERANCE = {"float32": 1e-4, "float16": 0.02, "float16_bits": 0.02, "bfloat16": 0.1}


def make(tmp_path, *options: str, name: str = "dump.h5"):
    path = tmp_path / name
    assert make_synthetic.main([str(path), *options]) == 0
    return path


def load(file: h5py.File, layer: int, name: str) -> np.ndarray:
    """Stored tensor -> float64, as formats/dump.md says."""
    dataset = file[f"layers/{layer}/{name}"]
    raw, dtype = dataset[:], dataset.attrs["kvq_dtype"]
    if raw.dtype == np.uint16 and dtype == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return (raw.view(np.float16) if raw.dtype == np.uint16 else raw).astype(np.float64)


def truth(file: h5py.File, layer: int, name: str) -> np.ndarray:
    return file[f"truth/layers/{layer}/{name}"][:]


def first_tokens(file: h5py.File) -> np.ndarray:
    return file["cu_seqlens"][:-1]


def query_moments(file: h5py.File, layer: int) -> np.ndarray:
    """E q^T q per KV head, [H, D, D]."""
    q, heads = load(file, layer, "q"), int(file[f"layers/{layer}"].attrs["num_kv_heads"])
    tokens, q_heads, dim = q.shape
    grouped = q.reshape(tokens, heads, q_heads // heads, dim)
    return np.einsum("thgi,thgj->hij", grouped, grouped) / (tokens * q_heads // heads)


def attention(file: h5py.File, layer: int, sequence: int) -> np.ndarray:
    """Causal softmax of one sequence, [Hq, n, n]."""
    first, last = file["cu_seqlens"][sequence : sequence + 2]
    q, k = load(file, layer, "q")[first:last], load(file, layer, "k")[first:last]
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    logits = np.einsum("ihd,jhd->hij", q, k) * file[f"layers/{layer}"].attrs["softmax_scale"]
    logits[:, np.triu(np.ones(logits.shape[1:], bool), 1)] = -np.inf
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def test_file_has_everything_dump_md_asks_for(tmp_path):
    path = make(
        tmp_path,
        "--tokens",
        "101",
        "--sequences",
        "7",
        "--layers",
        "3",
        "--v-head-dim",
        "24",
        "--generated",
        "2",
        "--sliding-window",
        "50",
    )
    with h5py.File(path) as file:
        assert {k: file.attrs[k] for k in ("format", "version", "capture_point", "num_layers")} == {
            "format": "kvq-dump",
            "version": "1.0",
            "capture_point": "post_rope",
            "num_layers": 3,
        }
        bounds, positions = file["cu_seqlens"][:], file["positions"][:]
        assert bounds[0] == 0 and bounds[-1] == 101 and len(bounds) == 8 and (np.diff(bounds) > 0).all()
        for first, last in itertools.pairwise(bounds):
            assert (positions[first:last] == np.arange(last - first)).all()
            assert file["generated"][first:last].sum() == min(2, last - first)
        assert sorted(file["layers"]) == ["0", "1", "2"]
        attributes = dict(file["layers/0"].attrs)
        assert attributes["sliding_window"] == 50 and attributes["kind"] == "gqa"
        assert attributes["rotary_dim"] == 64 and file["layers/0/rope_inv_freq"].shape == (32,)
        assert [file[f"layers/0/{n}"].shape for n in "qkv"] == [(101, 4, 64), (101, 2, 64), (101, 2, 24)]
        for name in "qkv":
            assert np.isfinite(load(file, 0, name)).all() and load(file, 0, name).any()
            assert file[f"layers/0/{name}"].compression is None


def test_a_metric_of_the_output_projection_changes_nothing_else(tmp_path):
    options = ("--layers", "2", "--tokens", "40", "--v-head-dim", "24")
    with (
        h5py.File(make(tmp_path, *options)) as plain,
        h5py.File(make(tmp_path, *options, "--o-proj-metric", name="b.h5")) as file,
    ):
        assert (plain.attrs["version"], file.attrs["version"]) == ("1.0", "1.1")
        assert "o_proj_metric" not in plain["layers/0"]
        found = [file[f"layers/{layer}/o_proj_metric"][:] for layer in range(2)]
        for metric in found:
            assert metric.dtype == np.float32 and metric.shape == (2, 24, 24)
            assert (metric == metric.transpose(0, 2, 1)).all()
            values = np.linalg.eigvalsh(metric.astype(np.float64))
            assert values.min() > 0 and (values.max(axis=1) > 10 * values.min(axis=1)).all()
        assert not np.array_equal(found[0][0], found[0][1]) and not np.array_equal(found[0], found[1])
        for name in "qkv":
            assert np.array_equal(plain[f"layers/1/{name}"][:], file[f"layers/1/{name}"][:])


def test_a_soft_cap_and_sinks_change_nothing_else(tmp_path, capsys):
    options = ("--layers", "2", "--tokens", "40")
    with (
        h5py.File(make(tmp_path, *options)) as plain,
        h5py.File(make(tmp_path, *options, "--logit-softcapping", "8", "--learned-sinks", name="b.h5")) as file,
    ):
        assert (file.attrs["version"], file.attrs["requires"]) == ("1.2", "logit_softcapping,sink_logits")
        assert plain.attrs["version"] == "1.0" and "softcapping" not in plain["truth"].attrs["options"]
        found = [file[f"layers/{layer}/sink_logits"][:] for layer in range(2)]
        assert len({*found[0], *found[1]}) == 8 and file["layers/1"].attrs["logit_softcapping"] == 8.0
        for name in "qkv":
            assert np.array_equal(plain[f"layers/1/{name}"][:], file[f"layers/1/{name}"][:])
    assert make_synthetic.main([str(tmp_path / "c.h5"), "--logit-softcapping", "0"]) == 2
    assert "--logit-softcapping: expected more than 0" in capsys.readouterr().err


def test_rotary_keys_have_no_values_and_no_metric(tmp_path):
    with h5py.File(make(tmp_path, "--kind", "mla_rope", "--o-proj-metric", "--tokens", "20")) as file:
        assert file.attrs["version"] == "1.0" and "o_proj_metric" not in file["layers/0"]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_query_eigenbasis_is_found_again(tmp_path, dtype):
    path = make(tmp_path, "--query-spectrum", "0.8", "--head-dim", "16", "--tokens", "300", "--dtype", dtype)
    with h5py.File(path) as file:
        assert file["truth"].attrs["exact"] == 1
        for layer in range(2):
            moments = query_moments(file, layer)
            basis, spectrum = truth(file, layer, "query_basis"), truth(file, layer, "query_spectrum")
            assert (np.diff(spectrum) < 0).all()
            for h in range(2):
                rebuilt = basis[h] * spectrum[h] @ basis[h].T
                np.testing.assert_allclose(moments[h], rebuilt, atol=TOLERANCE[dtype])
                _values, vectors = np.linalg.eigh(moments[h])
                # An eigensolver may choose any signs; the planted signs are canonical.
                cosines = np.abs((vectors[:, ::-1] * basis[h]).sum(0))
                assert cosines.min() > 1 - TOLERANCE[dtype]
                largest = np.abs(basis[h]).argmax(0)
                assert (basis[h][largest, np.arange(16)] > 0).all()


def test_layers_and_heads_differ(tmp_path):
    with h5py.File(make(tmp_path)) as file:
        bases = np.concatenate([truth(file, layer, "query_basis") for layer in range(2)])
        assert all(np.abs(a - b).max() > 0.1 for i, a in enumerate(bases) for b in bases[:i])
        assert np.abs(load(file, 0, "k") - load(file, 1, "k")).max() > 0.1


def test_channel_means_are_found_again(tmp_path):
    with h5py.File(make(tmp_path, "--channel-means", "2")) as file:
        for side in "kv":
            mean = truth(file, 1, f"{side}_mean")
            assert 1 < mean.std() < 3
            np.testing.assert_allclose(load(file, 1, side).mean(0), mean, atol=1e-5)


def test_outlier_channels_are_found_again(tmp_path):
    with h5py.File(make(tmp_path, "--outlier-channels", "3", "--outlier-scale", "20", "--channel-means", "1")) as file:
        for side in "kv":
            deviation = load(file, 0, side).std(0)
            found = np.sort(np.argsort(deviation, axis=1)[:, -3:], axis=1)
            assert (found == truth(file, 0, f"{side}_outliers")).all()
            np.testing.assert_allclose(np.sort(deviation, axis=1)[:, -3:], 20, rtol=1e-4)


def test_sink_draws_attention_and_moves_one_eigenvalue(tmp_path):
    path = make(tmp_path, "--sink", "--query-spectrum", "0.9", "--tokens", "600")
    with h5py.File(path) as file:
        for sequence in range(3):
            weights = attention(file, 0, sequence)
            assert weights[:, 1:, 0].mean() > 0.5
        k = load(file, 0, "k")
        np.testing.assert_allclose(
            k[first_tokens(file)], np.broadcast_to(truth(file, 0, "sink_key"), (3, 2, 64)), rtol=1e-6
        )
        basis, spectrum = truth(file, 0, "query_basis"), truth(file, 0, "query_spectrum")
        np.testing.assert_allclose(truth(file, 0, "sink_direction"), basis[:, :, 0])
        rebuilt = np.einsum("hij,hj,hkj->hik", basis, spectrum, basis)
        np.testing.assert_allclose(query_moments(file, 0), rebuilt, atol=1e-3)


def test_without_sink_the_first_token_is_nothing_special(tmp_path):
    with h5py.File(make(tmp_path, "--tokens", "600")) as file:
        assert attention(file, 0, 1)[:, -20:, 0].mean() < 0.2


def test_orthogonal_heads_live_in_different_subspaces(tmp_path):
    with h5py.File(make(tmp_path, "--orthogonal-heads", "--kv-heads", "4")) as file:
        k = load(file, 0, "k")
        leading = []
        for h in range(4):
            values, vectors = np.linalg.eigh(k[:, h].T @ k[:, h] / len(k))
            assert values[-16] > 100 * values[-17]
            leading.append(vectors[:, -16:])
            planted = truth(file, 0, "key_basis")[h][:, :16]
            np.testing.assert_allclose(leading[h] @ leading[h].T, planted @ planted.T, atol=1e-4)
        for h in range(3):
            assert np.abs(leading[h].T @ leading[h + 1]).max() < 1e-3
        # A rotation shared by the layer sees an average without structure, which is the purpose of the option.
        shared = np.einsum("thi,thj->ij", k, k)
        values = np.linalg.eigvalsh(shared)
        assert values[-1] < 1.1 * values[0]


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_pre_rope_dump_becomes_the_post_rope_one_when_rotated(tmp_path, layout):
    options = ("--rope", layout, "--rotary-dim", "32", "--rotary-offset", "8", "--rope-attention-factor", "1.25")
    before = make(tmp_path, *options, "--capture", "pre_rope", name="before.h5")
    after = make(tmp_path, *options, name="after.h5")
    with h5py.File(before) as pre, h5py.File(after) as post:
        assert pre.attrs["capture_point"] == "pre_rope"
        frequencies = pre["layers/0/rope_inv_freq"][:]
        for name in "qk":
            x, y = load(pre, 0, name), load(post, 0, name)
            np.testing.assert_allclose(rotate(x, pre["positions"][:], frequencies, layout, 1.25, 8), y, atol=1e-5)
            assert (x[..., :8] == y[..., :8]).all() and (x[..., 40:] == y[..., 40:]).all()
            assert np.abs(x - y)[..., 8:40].max() > 0.1
        assert (load(pre, 0, "v") == load(post, 0, "v")).all()


def test_no_rope_has_no_frequencies(tmp_path):
    with h5py.File(make(tmp_path, "--rope", "none")) as file:
        assert file["layers/0"].attrs["rotary_dim"] == 0 and "rope_inv_freq" not in file["layers/0"]


def test_mla_rope_has_one_key_head_and_no_values(tmp_path):
    with h5py.File(make(tmp_path, "--kind", "mla_rope", "--head-dim", "32", "--rope", "interleaved")) as file:
        assert file["layers/0/k"].shape[1] == 1 and "v" not in file["layers/0"]
        assert file["layers/0"].attrs["kind"] == "mla_rope"


@pytest.mark.parametrize("split, key", [("--split-by-layer", "layer"), ("--split-by-sequence", "sequence")])
def test_split_dump_is_the_whole_one_in_pieces(tmp_path, split, key):
    options = ("--layers", "2", "--sequences", "3", "--sink", "--dtype", "bfloat16", "--generated", "3")
    whole = make(tmp_path, *options)
    make(tmp_path, *options, split, name="part.h5")
    parts = sorted(tmp_path.glob(f"part.{key}*.h5"))
    assert len(parts) == (2 if key == "layer" else 3) and not (tmp_path / "part.h5").exists()
    with h5py.File(whole) as file:
        pieces = [h5py.File(p) for p in parts]
        if key == "layer":
            assert [list(p["layers"]) for p in pieces] == [["0"], ["1"]]
            assert all((p["cu_seqlens"][:] == file["cu_seqlens"][:]).all() for p in pieces)
            assert all((p[f"layers/{i}/k"][:] == file[f"layers/{i}/k"][:]).all() for i, p in enumerate(pieces))
        else:
            for name in ("positions", "generated", "layers/1/q", "layers/1/v"):
                assert (np.concatenate([p[name][:] for p in pieces]) == file[name][:]).all()
            assert all(len(p["cu_seqlens"]) == 2 for p in pieces)


def test_same_seed_same_bytes_and_another_seed_other_bytes(tmp_path):
    options = ("--sink", "--query-spectrum", "0.9", "--channel-means", "1")
    first, again = make(tmp_path, *options, name="a.h5"), make(tmp_path, *options, name="b.h5")
    other = make(tmp_path, *options, "--seed", "1", name="c.h5")
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()
    with h5py.File(first) as file:
        assert json.loads(file["truth"].attrs["options"])["channel_means"] == 1


def test_few_tokens_are_written_but_not_called_exact(tmp_path):
    with h5py.File(make(tmp_path, "--tokens", "3", "--sequences", "3", "--sink")) as file:
        assert file["truth"].attrs["exact"] == 0
        assert np.isfinite(load(file, 0, "k")).all()


@pytest.mark.parametrize(
    "options",
    [
        ["--tokens", "2", "--sequences", "3"],
        ["--q-heads", "3", "--kv-heads", "2"],
        ["--head-dim", "1025"],
        ["--rotary-dim", "7"],
        ["--rotary-dim", "64", "--rotary-offset", "8"],
        ["--query-spectrum", "0"],
        ["--layers", "0"],
        ["--outlier-channels", "65"],
    ],
)
def test_impossible_options_are_refused_in_one_line(tmp_path, capsys, options):
    assert make_synthetic.main([str(tmp_path / "a.h5"), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("make_synthetic_dump.py: error: --") and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seed", ["-1", str(2**63), "010"])
def test_seeds_are_those_of_the_tools(tmp_path, capsys, seed):
    with pytest.raises(SystemExit, match="2"):
        make_synthetic.main([str(tmp_path / "a.h5"), "--seed", seed])
    assert "error: argument --seed: expected a " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_failed_writing_leaves_nothing_behind(tmp_path, capsys, monkeypatch):
    from kvq.dump import synthetic

    monkeypatch.setattr(
        synthetic, "plant_layer", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    assert make_synthetic.main([str(tmp_path / "a.h5")]) == 3
    assert "No space left" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert make_synthetic.main([str(tmp_path / "missing" / "a.h5")]) == 3
