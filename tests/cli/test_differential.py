"""The C++ reader and the Python reader decide alike about changed artifacts: each accepts what the other accepts, and
both refuse a file for the same reason (exit code, failed checks of --verify)."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from artifact_file import ArtifactFile
from artifact_fuzzer import Fuzzer
from kvq_tools import BIN, ROOT, calibrate

from kvq.artifact_reader import load_artifact
from kvq.errors import KvqError
from kvq.verify import verify_artifact

PROGRAM = BIN.parent / "tests/verify_files"
SEED = int(os.environ.get("KVQ_FUZZ_SEED", "23"))
SECONDS = float(os.environ.get("KVQ_FUZZ_SECONDS", "20"))
MOST_FILES = 2000  # of the default time: what a fast machine reaches
MADE = {
    "budget": ("--method", "kvq", "--budget-bits", 2.25, "--golden-tokens", 2),
    "blocks": ("--method", "block-gtq", "--bits-k", 2.5, "--golden-tokens", 2),
    "means": ("--method", "saw-int4", "--kmeans", 3, "--random-signs", "--golden-tokens", 2),
    "basis": ("--method", "oscar", "--composition", "up", "--center", "kv", "--golden-tokens", 2),
    "scaled": ("--method", "quarot", "--transform", "diagonal", "--golden-tokens", 2),
    "hessian": ("--method", "saw-int4", "--hessian", "consistent", "--hadamard-order", 16, "--golden-tokens", 2),
}


class CppReader:
    """The program verify_files: one process for all files."""

    def __enter__(self):
        self.process = subprocess.Popen([PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *error):
        self.process.stdin.close()
        self.process.wait(timeout=60)

    def verdict(self, path: Path) -> dict:
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"code": "the program ended"}


def python_verdict(path: Path) -> dict:
    try:
        failed = [check.name for check in verify_artifact(load_artifact(path, check_hash=False)) if not check.passed]
    except KvqError as error:
        return {"code": error.exit_code, "error": str(error)}
    return {"code": 6 if failed else 0, "failed": failed}


def differ(a: dict, b: dict) -> bool:
    return (a["code"], a.get("failed")) != (b["code"], b.get("failed"))


@pytest.fixture(scope="module")
def seeds(make_dump, tmp_path_factory) -> dict[str, ArtifactFile]:
    """Golden files of every version, and small artifacts of this build."""
    golden = sorted((ROOT / "formats/golden").glob("v*/*.safetensors"))
    files = {f"{path.parent.name}/{path.stem}": path for path in golden if path.stem != "stats"}
    dump = make_dump(tokens=40, sequences=2, layers=2, head_dim=16, outlier_channels=1, query_spectrum=0.8)
    folder = tmp_path_factory.mktemp("seeds")
    files |= {name: calibrate(dump, folder / name, "--threads", 1, *flags) for name, flags in MADE.items()}
    return {name: ArtifactFile.read(path) for name, path in files.items()}


def test_both_readers_accept_the_seeds(seeds, tmp_path):
    assert PROGRAM.is_file(), f"{PROGRAM}: build the target verify_files"
    with CppReader() as cpp:
        for name, file in seeds.items():
            path = file.copy().write(tmp_path / "a")
            assert cpp.verdict(path) == python_verdict(path) == {"code": 0, "failed": []}, name


def test_both_readers_decide_alike_about_changed_files(seeds, tmp_path):
    fuzzer, path = Fuzzer(seeds, SEED), tmp_path / "a"
    disagreements, codes, failed = [], {}, set()
    end = time.monotonic() + SECONDS
    with CppReader() as cpp:
        for index in range(MOST_FILES if SECONDS <= 20 else 10**9):
            if time.monotonic() > end or len(disagreements) >= 40:
                break
            what, content = fuzzer.make()
            path.write_bytes(content)
            ours, theirs = cpp.verdict(path), python_verdict(path)
            codes[ours["code"]] = codes.get(ours["code"], 0) + 1
            failed |= set(ours.get("failed", ()))
            if differ(ours, theirs):
                disagreements.append(f"seed {SEED}, file {index}: {what}\n  C++    {ours}\n  Python {theirs}")
                if folder := os.environ.get("KVQ_FUZZ_KEEP"):
                    (Path(folder) / f"{SEED}-{index}.safetensors").write_bytes(content)
    print(codes, sorted(failed))
    assert not disagreements, "\n".join(disagreements)
    # The files reach the deeper checks, too.
    assert {0, 3, 5, 6} <= codes.keys()
    deep = {"content hash", "version", "orthogonality", "spectra", "recipes", "widths", "inverses", "golden rows"}
    assert sum(codes.values()) < 500 or deep <= failed
