"""scripts/outlier_twin.py: the twin computes the same function, with channels of other sizes."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny_models import save_tiny  # noqa: E402

from kvq import outlier_twin  # noqa: E402


def load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("twin")
    model = save_tiny("qwen3", folder / "model")
    # The twin's weights are bfloat16, so the model's are too.
    rounded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    rounded.save_pretrained(folder / "rounded")
    assert outlier_twin.main([str(folder / "rounded"), "--output", str(folder / "a")]) == 0
    assert outlier_twin.main([str(folder / "rounded"), "--output", str(folder / "b"), "--seed", "8"]) == 0
    return folder


def test_the_twin_computes_the_same(folders):
    tokens = torch.arange(40)[None] * 7 % 89
    with torch.no_grad():
        expected, found = (load(folders / name)(tokens).logits for name in ("rounded", "a"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_channels_differ_by_powers_of_two_in_pairs(folders):
    model, twin = load(folders / "rounded"), load(folders / "a")
    for before, after in zip(model.model.layers, twin.model.layers):
        keys = after.self_attn.k_norm.weight / before.self_attn.k_norm.weight
        assert sorted(keys.tolist(), reverse=True)[:4] == [32.0] * 4  # two pairs; the tiny head has but ten
        assert (keys[:10] == keys[10:]).all()
        torch.testing.assert_close(before.self_attn.q_norm.weight / after.self_attn.q_norm.weight, keys)
        values = (after.self_attn.v_proj.weight / before.self_attn.v_proj.weight)[:, 0].reshape(2, 20)
        assert [sorted(head.tolist(), reverse=True) for head in values] == [[16.0] * 3 + [4.0] * 7 + [1.0] * 10] * 2


def test_the_seed_draws_the_channels(folders):
    a, b = (load(folders / name).model.layers[0].self_attn.v_proj.weight for name in "ab")
    assert (a != b).any()


def test_other_families_and_folders_are_refused(tmp_path, capsys):
    save_tiny("llama", tmp_path / "llama")
    assert outlier_twin.main([str(tmp_path / "llama"), "--output", str(tmp_path / "twin")]) == 5
    assert "expected a model of type qwen3 or qwen3_moe, found llama" in capsys.readouterr().err
    assert outlier_twin.main([str(tmp_path), "--output", str(tmp_path / "twin")]) == 3
    assert "expected a model folder with config.json" in capsys.readouterr().err
    assert not (tmp_path / "twin").exists()
