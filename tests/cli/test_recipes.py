"""examples/recipes: one file for each method, which --config reads. All tools take --config."""

import json
import re

import pytest
from kvq_tools import ROOT, calibrate, run, succeed

USAGE = 2
RECIPES = sorted((ROOT / "examples/recipes").glob("*.toml"))


@pytest.fixture(scope="module")
def dump(make_dump):
    """Large enough for held-out tokens; heads of 128 channels, as the recipes expect."""
    return make_dump(head_dim=128, v_head_dim=128, layers=2, tokens=1200)


def methods() -> list[str]:
    text = succeed("kvq-calibrate", "--help").stdout
    return re.findall(r"^  (\S+) ", text.partition("\nMethods:\n")[2].partition("\n\n")[0], re.MULTILINE)


def test_every_method_has_a_recipe():
    assert sorted(methods()) == [path.stem for path in RECIPES]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_runs_with_its_method(dump, tmp_path, recipe):
    artifact = calibrate(dump, tmp_path / "a", "--config", recipe)
    manifest = json.loads(succeed("kvq-inspect", artifact, "--json").stdout)["manifest"]
    assert manifest["calibration"]["method"] == recipe.stem


def test_every_tool_reads_flags_from_a_file(dump, tmp_path):
    artifact = calibrate(dump, tmp_path / "a.safetensors")
    recipe = tmp_path / "flags.toml"

    def same(text: str, command: tuple, flags: tuple) -> None:
        recipe.write_text(text)
        assert succeed(*command, "--config", recipe).stdout == succeed(*command, *flags).stdout

    same("layer = 1\nhead = 0\n", ("kvq-inspect", artifact), ("--layer", 1, "--head", 0))
    same(
        f'scheme = ["bf16", "kivi-2"]\nmodel = "{dump}"\nno-windows = true\nseed = 3\n',
        ("kvq-eval", "--quiet"),
        ("--scheme", "bf16", "--scheme", "kivi-2", "--model", dump, "--no-windows", "--seed", 3),
    )
    same(
        'fail-on = ["clip<=0.5"]\nno-default-rules = true\n',
        ("kvq-diff", artifact, artifact),
        ("--fail-on", "clip<=0.5", "--no-default-rules"),
    )


def test_yaml_is_refused_by_name_and_toml_named(dump, tmp_path):
    for name in ("recipe.yaml", "recipe.yml"):
        (tmp_path / name).write_text("bits: 2\n")
        result = run("kvq-calibrate", dump, "--config", tmp_path / name)
        assert result.code == USAGE
        assert "expected TOML, found the name of a YAML file" in result.stderr
        assert "name = value in place of name: value" in result.stderr


def test_an_unknown_key_suggests_a_flag_but_no_text_of_the_file(dump, tmp_path):
    (tmp_path / "recipe.toml").write_text('method = "oscar"\nbit = 2\nbits-q = 3\n')
    result = run("kvq-calibrate", dump, "--config", tmp_path / "recipe.toml")
    assert result.code == USAGE
    assert "line 2: there is no flag of this name" in result.stderr
    assert "hint: did you mean bits?" in result.stderr
