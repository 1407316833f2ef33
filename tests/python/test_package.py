"""python/: the package installs, its public names are there, and the scripts run it without installation."""

import importlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest

import kvq

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python"
PROJECT = tomllib.loads((PACKAGE / "pyproject.toml").read_text())
FRONT_ENDS = sorted(path for path in (ROOT / "scripts").glob("*.py") if "from kvq" in path.read_text())


def run(*command: object, **options) -> subprocess.CompletedProcess:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, **options)


def can_build_wheels() -> bool:
    try:
        version = importlib.import_module("setuptools").__version__
    except ImportError:
        return False
    return tuple(map(int, version.split(".")[:2])) >= (70, 1)


def test_public_names_are_there():
    assert all(getattr(kvq, name).__name__ == name for name in kvq.__all__) and set(kvq.__all__) <= set(dir(kvq))
    with pytest.raises(AttributeError, match="'kvq' has no attribute 'frobnicate'"):
        kvq.frobnicate  # noqa: B018


def test_the_project_names_every_package_and_program():
    folders = [path.parent.relative_to(PACKAGE) for path in (PACKAGE / "kvq").rglob("__init__.py")]
    packages = {".".join(folder.parts) for folder in folders}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "kvq.__version__"}
    for target in PROJECT["project"]["scripts"].values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
    for name in PROJECT["tool"]["setuptools"]["package-data"]["kvq"]:
        assert (PACKAGE / "kvq" / name).read_bytes() == (ROOT / "formats" / name).read_bytes()


def test_the_page_of_the_package_names_what_is_there():
    text = (PACKAGE / "README.md").read_text()
    assert set(re.findall(r"`(kvq-[a-z-]+)`", text)) == set(PROJECT["project"]["scripts"])
    assert {ROOT / path for path in re.findall(r"`(scripts/\w+\.py)`", text)} == set(FRONT_ENDS)
    for module in re.findall(r"`python -m ([\w.]+)`", text):
        assert run(sys.executable, "-m", module, "--help", cwd=PACKAGE).stdout.startswith("usage: ")


def test_the_example_of_the_page_works(monkeypatch):
    [example] = re.findall(r"^```python\n(.*?)^```", (PACKAGE / "README.md").read_text(), re.M | re.S)
    artifact = sorted((ROOT / "formats/golden").glob("v*/oscar.safetensors"))[-1]
    example = example.replace("build/sample.kvq.safetensors", str(artifact)).replace("layers[3]", "layers[1]")
    dim = kvq.load_artifact(artifact).layers[1].sides["k"].dim
    names = {"rows": np.random.default_rng(1).standard_normal((5, dim), np.float32)}
    exec(example, names)
    assert names["packed"].shape == (5, names["plan"].row_bytes) and names["packed"].dtype == np.uint8
    assert np.abs(names["restored"] - names["rows"]).mean() < np.abs(names["rows"]).mean()


@pytest.mark.skipif(not can_build_wheels(), reason="needs setuptools 70.1")
def test_an_installed_package_needs_no_checkout(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "source", ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    built = run(*command, "--wheel-dir", tmp_path, tmp_path / "source")
    assert built.returncode == 0, built.stderr
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name == f"kvq-{kvq.__version__}-py3-none-any.whl"
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    artifact = sorted((ROOT / "formats/golden").glob("v*/oscar.safetensors"))[-1]
    read = run(sys.executable, "-m", "kvq.read_artifact", artifact, "--verify", cwd=tmp_path / "site")
    assert read.returncode == 0 and "schema, tensors, finite values: ok" in read.stdout, read.stdout + read.stderr
