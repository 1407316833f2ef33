"""scripts/convert_oscar_dump.py on dumps made as OSCAR's serving fork makes them."""

import json

import h5py
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvq.dump import convert_oscar  # noqa: E402

Q_HEADS, KV_HEADS, DIM, V_DIM = 4, 2, 8, 6
CHUNKS = {0: [6], 1: [5, 3], 2: [8], 10: [1, 0, 4]}  # chunk 10 comes after 2; the prefix cache held one of its requests
ROPE = ("--rope-layout", "half", "--rope-theta", "10000")


def fabricate(folder, chunks=CHUNKS, layers=(0, 1), flat=False, dtype=torch.bfloat16, seq_lens=True):
    """Writes a dump; returns {(layer, name, chunk): tensor [t, heads, dim]}."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for layer in layers:
        for chunk, lengths in chunks.items():
            for name, heads, dim in (("q", Q_HEADS, DIM), ("k", KV_HEADS, DIM), ("v", KV_HEADS, V_DIM)):
                x = torch.randn(sum(lengths), heads, dim, generator=generator).to(dtype)
                tensors[layer, name, chunk] = x
                save(folder, layer, name, chunk, x.flatten(1) if flat and name != "q" else x)
            if seq_lens:
                save(folder, layer, "seq_lens", chunk, torch.tensor(lengths, dtype=torch.int32))
    return tensors


def save(folder, layer, name, chunk, value):
    path = folder / f"layer_{layer}" / name / f"{chunk}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)


def run(capsys, *arguments):
    code = convert_oscar.main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def bits(x) -> np.ndarray:
    return x.view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("flat", [False, True])
def test_tensors_arrive_bit_for_bit_without_the_warm_up(tmp_path, capsys, flat):
    tensors = fabricate(tmp_path / "dump", flat=flat)
    code, out, err = run(capsys, tmp_path / "dump", tmp_path / "out.h5", *ROPE)
    assert code == 0, err
    with h5py.File(tmp_path / "out.h5") as file:
        for layer in (0, 1):
            for name in "qkv":
                dataset = file[f"layers/{layer}/{name}"]
                assert dataset.attrs["kvq_dtype"] == "bfloat16"
                expected = torch.cat([tensors[layer, name, chunk] for chunk in (1, 2, 10)])
                assert (dataset[:] == bits(expected)).all()
        assert file["cu_seqlens"][:].tolist() == [0, 5, 8, 16, 17, 21]
        assert file["positions"][:].tolist() == [*range(5), *range(3), *range(8), 0, *range(4)]
        attributes = dict(file["layers/1"].attrs)
        assert attributes["softmax_scale"] == DIM**-0.5
        assert (attributes["rope_layout"], attributes["rotary_dim"], attributes["v_head_dim"]) == ("half", DIM, V_DIM)
        np.testing.assert_allclose(file["layers/0/rope_inv_freq"][:], 10000.0 ** (-np.arange(4) / 4))
        assert file.attrs["capture_point"] == "post_rope" and file.attrs["num_layers"] == 2
        assert "2 layers, 21 tokens in 5 sequences from 3 chunks" in out


def test_says_what_is_missing(tmp_path, capsys):
    fabricate(tmp_path / "dump")
    _, _, err = run(capsys, tmp_path / "dump", tmp_path / "out.h5", *ROPE)
    for word in ("warm-up", "positions", "request ids", "prefix-cache", "token limit", "decode-time"):
        assert word in err
    assert "2 of 3 chunks have the greatest length, 8" in err
    assert all(line.startswith("convert_oscar_dump.py: warning: ") for line in err.splitlines())
    with h5py.File(tmp_path / "out.h5") as file:
        producer = file.attrs["producer"]
        assert "positions assumed from 0" in producer and "no decode tokens" in producer and "request ids" in producer


def test_first_chunk_can_be_kept(tmp_path, capsys):
    fabricate(tmp_path / "dump")
    _, _, err = run(capsys, tmp_path / "dump", tmp_path / "out.h5", *ROPE, "--keep-first-chunk")
    assert "warm-up" not in err
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["cu_seqlens"][:3].tolist() == [0, 6, 11]


def test_positions_of_a_file_are_taken(tmp_path, capsys):
    fabricate(tmp_path / "dump")
    positions = np.concatenate([np.arange(100, 105), np.arange(3), np.arange(5, 21, 2), [7], np.arange(4)])
    np.save(tmp_path / "p.npy", positions)
    code, _, err = run(capsys, tmp_path / "dump", tmp_path / "out.h5", *ROPE, "--positions", tmp_path / "p.npy")
    assert code == 0 and "no positions" not in err
    with h5py.File(tmp_path / "out.h5") as file:
        assert (file["positions"][:] == positions).all()
        assert "positions from a file" in file.attrs["producer"]


@pytest.mark.parametrize(
    "positions", [np.arange(20), np.zeros(21, int), np.arange(21) - 1, np.arange(21.0), np.arange(21)[:, None]]
)
def test_positions_that_do_not_fit_are_refused(tmp_path, capsys, positions):
    fabricate(tmp_path / "dump")
    np.save(tmp_path / "p.npy", positions)
    code, _, err = run(capsys, tmp_path / "dump", tmp_path / "out.h5", *ROPE, "--positions", tmp_path / "p.npy")
    assert code == 3 and "p.npy" in err and not (tmp_path / "out.h5").exists()


def test_without_seq_lens_a_chunk_is_a_sequence(tmp_path, capsys):
    fabricate(tmp_path / "dump", seq_lens=False)
    code, _, err = run(capsys, tmp_path / "dump", tmp_path / "out.h5", *ROPE)
    assert code == 0 and "no seq_lens" in err
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["cu_seqlens"][:].tolist() == [0, 8, 16, 21]


@pytest.mark.parametrize("dtype, name", [(torch.float16, "float16"), (torch.float32, "float32")])
def test_other_dtypes_stay_what_they_are(tmp_path, capsys, dtype, name):
    tensors = fabricate(tmp_path / "dump", dtype=dtype)
    assert run(capsys, tmp_path / "dump", tmp_path / "out.h5", *ROPE)[0] == 0
    with h5py.File(tmp_path / "out.h5") as file:
        dataset = file["layers/0/q"]
        assert dataset.attrs["kvq_dtype"] == name and dataset.dtype == name
        assert (dataset[:5] == tensors[0, "q", 1][:5].numpy()).all()


def write_config(tmp_path, **changes):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "model_type": "qwen3",
                "hidden_size": 32,
                "num_attention_heads": Q_HEADS,
                "head_dim": DIM,
                "num_key_value_heads": KV_HEADS,
                "num_hidden_layers": 5,
                "rope_theta": 1e6,
            }
            | changes
        )
    )
    return path


def test_config_says_what_the_dump_does_not(tmp_path, capsys):
    fabricate(tmp_path / "dump")
    config = write_config(tmp_path, sliding_window=9, layer_types=["sliding_attention", *["full_attention"] * 4])
    code, _, err = run(capsys, tmp_path / "dump", tmp_path / "out.h5", "--config", config, "--model-name", "m")
    assert code == 0, err
    with h5py.File(tmp_path / "out.h5") as file:
        assert file.attrs["num_layers"] == 5 and file.attrs["model_name"] == "m"
        assert json.loads(file.attrs["model_config"])["hidden_size"] == 32
        assert [file[f"layers/{i}"].attrs["sliding_window"] for i in (0, 1)] == [9, 0]
        assert file["layers/0"].attrs["rope_layout"] == "half"
        np.testing.assert_allclose(file["layers/0/rope_inv_freq"][:], 1e6 ** (-np.arange(4) / 4))


def test_interleaved_and_partial_rope_come_from_the_configuration(tmp_path, capsys):
    fabricate(tmp_path / "dump")
    config = write_config(tmp_path, model_type="glm4", partial_rotary_factor=0.5)
    assert run(capsys, tmp_path / "dump", tmp_path / "out.h5", "--config", config)[0] == 0
    with h5py.File(tmp_path / "out.h5") as file:
        attributes = file["layers/0"].attrs
        assert (attributes["rope_layout"], attributes["rotary_dim"]) == ("interleaved", 4)


def test_scaled_rope_is_what_transformers_computes(tmp_path, capsys):
    pytest.importorskip("transformers")
    fabricate(tmp_path / "dump")
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = write_config(tmp_path, model_type="llama", rope_scaling=scaling, max_position_embeddings=512)
    code, _, err = run(capsys, tmp_path / "dump", tmp_path / "out.h5", "--config", config)
    assert code == 0, err
    with h5py.File(tmp_path / "out.h5") as file:
        found = file["layers/0/rope_inv_freq"][:]
    plain = 1e6 ** (-np.arange(4) / 4)
    assert found[0] == pytest.approx(1.0) and found[-1] == pytest.approx(plain[-1] / 8)


def test_yarn_brings_its_attention_factor(tmp_path, capsys):
    pytest.importorskip("transformers")
    fabricate(tmp_path / "dump")
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = write_config(tmp_path, rope_scaling=scaling, max_position_embeddings=256)
    code, _, err = run(capsys, tmp_path / "dump", tmp_path / "out.h5", "--config", config)
    assert code == 0, err
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["layers/0"].attrs["rope_attention_factor"] == pytest.approx(0.1 * np.log(4) + 1)


@pytest.mark.parametrize(
    "changes, code",
    [
        ({"model_type": "unheard_of"}, 2),
        ({"model_type": "deepseek_v3"}, 2),
        ({"rope_theta": None}, 3),
        ({"num_hidden_layers": 1}, 2),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 5),
        ({"head_dim": 16}, 2),
    ],
)
def test_configurations_that_do_not_decide_are_refused(tmp_path, capsys, changes, code):
    fabricate(tmp_path / "dump")
    found, out, err = run(capsys, tmp_path / "dump", tmp_path / "out.h5", "--config", write_config(tmp_path, **changes))
    assert (found, out) == (code, ""), err
    assert err.startswith("convert_oscar_dump.py: error: ") and not (tmp_path / "out.h5").exists()


def damage(kind):
    """A fault in chunk 2 of layer 1."""

    def apply(folder):
        if kind == "missing chunk":
            (folder / "layer_1/v/2.pt").unlink()
        elif kind == "not a pickle":
            (folder / "layer_1/q/2.pt").write_bytes(b"nonsense")
        elif kind == "empty file":
            (folder / "layer_1/q/2.pt").write_bytes(b"")
        elif kind == "a dictionary":
            save(folder, 1, "q", 2, {"q": torch.zeros(8, 4, 8)})
        elif kind == "other code":
            save(folder, 1, "q", 2, torch.nn.Linear(2, 2))
        elif kind == "lengths":
            save(folder, 1, "seq_lens", 2, torch.tensor([7]))
        elif kind == "negative length":
            save(folder, 1, "seq_lens", 2, torch.tensor([9, -1]))
        elif kind == "other sequences":
            save(folder, 1, "seq_lens", 2, torch.tensor([4, 4]))
        elif kind == "fewer keys":
            save(folder, 1, "k", 2, torch.ones(7, KV_HEADS, DIM, dtype=torch.bfloat16))
        elif kind == "flat queries":
            save(folder, 1, "q", 2, torch.ones(8, Q_HEADS * DIM, dtype=torch.bfloat16))
        elif kind == "key width":
            save(folder, 1, "k", 2, torch.ones(8, 13, dtype=torch.bfloat16))
        elif kind == "other heads":
            save(folder, 1, "k", 2, torch.ones(8, 1, DIM, dtype=torch.bfloat16))
        elif kind == "other dtype":
            save(folder, 1, "k", 2, torch.ones(8, KV_HEADS, DIM))

    return apply


@pytest.mark.parametrize(
    "kind",
    [
        "missing chunk",
        "not a pickle",
        "empty file",
        "a dictionary",
        "other code",
        "lengths",
        "negative length",
        "other sequences",
        "fewer keys",
        "flat queries",
        "key width",
        "other heads",
        "other dtype",
    ],
)
def test_damaged_dumps_are_refused_and_named(tmp_path, capsys, kind):
    fabricate(tmp_path / "dump")
    damage(kind)(tmp_path / "dump")
    code, out, err = run(capsys, tmp_path / "dump", tmp_path / "out.h5", *ROPE)
    assert (code, out) == (3, ""), err
    assert err.startswith("convert_oscar_dump.py: error: ")
    assert "layer_1" in err or "layers 0 and 1" in err
    assert [p.name for p in tmp_path.iterdir()] == ["dump"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_numbers_that_cannot_be_are_refused(tmp_path, capsys, value):
    tensors = fabricate(tmp_path / "dump")
    for chunk in CHUNKS:
        x = tensors[0, "v", chunk]
        save(
            tmp_path / "dump",
            0,
            "v",
            chunk,
            torch.zeros_like(x) if value == 0 else x.index_fill(0, torch.tensor([0]), value),
        )
    code, _, err = run(capsys, tmp_path / "dump", tmp_path / "out.h5", *ROPE)
    assert code == 4 and "layer_0/v" in err


def test_eight_bit_floats_are_unsupported(tmp_path, capsys):
    fabricate(tmp_path / "dump", dtype=torch.float8_e4m3fn)
    code, _, err = run(capsys, tmp_path / "dump", tmp_path / "out.h5", *ROPE)
    assert code == 5 and "hint: supported: bfloat16" in err


def test_empty_folders_and_a_lone_warm_up_are_refused(tmp_path, capsys):
    (tmp_path / "dump").mkdir()
    assert run(capsys, tmp_path / "dump", tmp_path / "out.h5", *ROPE)[0] == 3
    assert run(capsys, tmp_path / "missing", tmp_path / "out.h5", *ROPE)[0] == 3
    fabricate(tmp_path / "dump", chunks={0: [6]})
    code, _, err = run(capsys, tmp_path / "dump", tmp_path / "out.h5", *ROPE)
    assert code == 3 and "--keep-first-chunk" in err


@pytest.mark.parametrize(
    "arguments", [[], ["--rope-layout", "half"], ["--rope-layout", "spiral"], [*ROPE, "--softmax-scale", "0"]]
)
def test_rope_is_never_guessed(tmp_path, arguments):
    with pytest.raises(SystemExit) as error:
        convert_oscar.main(["dump", "out.h5", *arguments])
    assert error.value.code == 2
