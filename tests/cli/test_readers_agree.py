"""The two readers, kvq-inspect and scripts/read_artifact.py, read and refuse the same artifacts."""

import pytest
from faulty_artifacts import TRANSFORM_FAULTS, TRANSFORM_FAULTS_TO_VERIFY, faulty_artifacts
from kvq_tools import calibrate, run

from kvq import read_artifact


@pytest.fixture(scope="module")
def files(make_dump, tmp_path_factory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("sound") / "artifact.safetensors"
    return faulty_artifacts(calibrate(make_dump(tokens=61, sequences=3, layers=2, head_dim=32), path).read_bytes())


@pytest.mark.parametrize(
    "name, code",
    [("sound", 0), *((name, 3) for name in TRANSFORM_FAULTS), *((name, 6) for name in TRANSFORM_FAULTS_TO_VERIFY)],
)
def test_both_readers_say_the_same_of_a_transform(files, name, code, tmp_path, capsys):
    path = tmp_path / "a.safetensors"
    path.write_bytes(files[f"transform_{name}"])
    for flags in ([], ["--verify"]):
        expected = code if flags or code == 3 else 0
        assert run("kvq-inspect", path, *flags).code == expected
        assert read_artifact.main([str(path), *flags]) == expected
    found = capsys.readouterr()
    assert (": FAILED" in found.out) == (code == 6)


@pytest.mark.parametrize(
    "name", ["cut_1", "cut_50", "cut_last", "stretched", "nan", "version_2", "requires", "other_format", "no_manifest"]
)
def test_both_readers_say_the_same_of_other_faults(files, name, tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(files[name])
    assert read_artifact.main([str(path), "--verify"]) == run("kvq-inspect", path, "--verify").code != 0
