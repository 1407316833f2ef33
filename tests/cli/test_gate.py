"""scripts/gate_artifacts.py: changed artifacts of a git repository against their revision, as the worked GitHub Actions
example runs it."""

import json
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from kvq_tools import BIN, ROOT, calibrate
from test_diff import Editor

PASSED, USAGE, INPUT, CHECK_FAILED = 0, 2, 3, 6


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=folder, check=True, capture_output=True
    )
    return done.stdout.decode().strip()


def verdicts(result: subprocess.CompletedProcess) -> list[str]:
    """The lines of files, without those below them that say why."""
    return [line for line in result.stdout.splitlines() if not line.startswith("  ")]


def gate(folder: Path, *flags: object) -> subprocess.CompletedProcess:
    command = [ROOT / "scripts/gate_artifacts.py", *flags]
    return subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=os.environ | {"KVQ_BIN": str(BIN.resolve())},
        capture_output=True,
        text=True,
        errors="replace",
    )


@pytest.fixture(scope="module")
def artifacts(sample, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("artifacts")
    flags = {"good": (), "seed": ("--seed", 1), "bad": ("--clip", 0.6), "new": ("--method", "saw-int4")}
    return {name: calibrate(sample, folder / name, *own) for name, own in flags.items()}


@pytest.fixture
def repository(artifacts, tmp_path) -> Path:
    folder = tmp_path / "repository"
    (folder / "models/a").mkdir(parents=True)
    for place in ("models/a/one.safetensors", "two.safetensors"):
        shutil.copy(artifacts["good"], folder / place)
    git(folder, "init", "--initial-branch", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "base")
    return folder


def test_nothing_changed(repository):
    result = gate(repository, "main")
    assert result.returncode == PASSED and result.stdout == "No artifact changed.\n"


def test_each_changed_artifact_is_judged(repository, artifacts):
    shutil.copy(artifacts["bad"], repository / "models/a/one.safetensors")
    shutil.copy(artifacts["seed"], repository / "two.safetensors")
    shutil.copy(artifacts["new"], repository / "three.safetensors")
    git(repository, "add", ".")
    git(repository, "commit", "-m", "change")
    result = gate(repository, "main~1", "--model", ROOT / "sample_data/evaluation.h5", "--no-windows", "--out", "gate")
    assert result.returncode == CHECK_FAILED, result
    assert verdicts(result) == [
        "models/a/one.safetensors: failed (6)",
        "three.safetensors: passed",
        "two.safetensors: passed",
    ]
    below = [line for line in result.stdout.splitlines() if line.startswith("  ")]
    assert below and all(line.startswith("  FAIL ") for line in below), "the console names the rules that failed"
    assert any(line.startswith("  FAIL clip<=0.1: ") for line in below)
    summary = (repository / "gate/summary.md").read_text()
    base = git(repository, "rev-parse", "main~1")[:9]
    assert f"`two.safetensors` against `two.safetensors at {base}`" in summary and "/tmp" not in summary
    assert [line for line in summary.splitlines() if line.startswith("## ")] == [
        "## models/a/one.safetensors",
        "## three.safetensors (new)",
        "## two.safetensors",
    ]
    assert summary.count("### kvq-diff: failed") == summary.count("### kvq-diff: passed") == 1
    suites = {
        path.name: ElementTree.parse(path).getroot().find("testsuite") for path in (repository / "gate").glob("*.xml")
    }
    assert (
        int(suites["models__a__one.safetensors.xml"].get("failures")) > 0
        and suites["two.safetensors.xml"].get("failures") == "0"
    )


def test_flags_reach_kvq_diff(repository, artifacts):
    shutil.copy(artifacts["bad"], repository / "two.safetensors")
    assert gate(repository, "main").returncode == CHECK_FAILED
    assert (
        gate(repository, "main", "--fail-on", "clip<=1", "--fail-on", "layers.calibration_error<=+9900%").returncode
        == PASSED
    )
    assert gate(repository, "main", "--fail-on", "nonsense").returncode == USAGE


def test_broken_artifacts_count_more_than_failed_rules(repository, artifacts):
    shutil.copy(artifacts["bad"], repository / "models/a/one.safetensors")
    (repository / "two.safetensors").write_bytes(b"no artifact")
    assert gate(repository, "main").returncode == INPUT


def test_renamed_deleted_and_elsewhere(repository, artifacts):
    """A renamed artifact is compared with its old version, a deleted one is named, and the working folder does not
    matter."""
    git(repository, "mv", "two.safetensors", "models/three.safetensors")
    editor = Editor(artifacts["good"])
    editor.side(2, "v")["clip_ratio"][0] = 0.5
    editor.save(repository / "models/three.safetensors")
    git(repository, "rm", "models/a/one.safetensors")
    git(repository, "add", ".")
    result = gate(repository / "models", "main")
    # Both artifacts had the same content, so git may report either of them as renamed.
    judged, deleted = sorted(verdicts(result), key=lambda line: "deleted" in line)
    assert result.returncode == CHECK_FAILED and judged == "models/three.safetensors: failed (6)"
    assert deleted in ("models/a/one.safetensors: deleted", "two.safetensors: deleted")


@pytest.mark.parametrize(
    "name", [b"a`b|c", b"a\n## b", b"\xff", b"<img src=x> [a](b)", b"a&b @c #1", "ü".encode()], ids=repr
)
def test_names_cannot_break_the_summary(repository, artifacts, name):
    """Changed, new and broken artifacts: each heading is one line, and the rest equals that for other names."""
    path = repository / os.fsdecode(name + b".safetensors")
    for source, code in (("new", PASSED), (None, INPUT)):
        shutil.copy(artifacts[source], path) if source else path.write_bytes(b"```\n# none")
        git(repository, "add", ".")
        result = gate(repository, "main", "--out", "gate")
        assert result.returncode == code, result
        lines = (repository / "gate/summary.md").read_bytes().decode().splitlines()
        assert len([line for line in lines if line.startswith("#")]) == 1 and not any(
            line.startswith("```") for line in lines
        )
        plain = lines[0].replace("\\\\", "")
        assert all(plain.count(c) == plain.count(f"\\{c}") for c in "`|<[&@") and plain.endswith("(new)")


def test_what_changed_on_the_base_branch_is_not_judged(repository, artifacts):
    git(repository, "checkout", "-q", "-b", "change")
    (repository / "README").write_text("text")
    git(repository, "add", ".")
    git(repository, "commit", "-m", "change")
    git(repository, "checkout", "-q", "main")
    shutil.copy(artifacts["bad"], repository / "two.safetensors")
    git(repository, "commit", "-qam", "main moves on")
    git(repository, "checkout", "-q", "change")
    assert gate(repository, "main").stdout == "No artifact changed.\n"
    result = gate(repository, "main", "--no-merge-base")
    assert result.returncode == CHECK_FAILED and verdicts(result) == ["two.safetensors: failed (6)"]


def test_branches_without_a_common_commit_are_refused(repository):
    git(repository, "checkout", "-q", "--orphan", "other")
    git(repository, "commit", "-qm", "unrelated")
    result = gate(repository, "main")
    assert result.returncode == USAGE and "fetch-depth 0" in result.stderr and len(result.stderr.splitlines()) == 2


def test_files_of_other_formats_are_left_alone(repository):
    """Model weights and adapters; a damaged header may be an artifact's, so it is judged."""
    weights = repository / "model.safetensors"
    weights.write_bytes((200).to_bytes(8, "little") + b'{"__metadata__":{"format":"pt"}}'.ljust(200))
    (repository / "bare.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    git(repository, "add", ".")
    result = gate(repository, "main")
    assert result.returncode == PASSED
    assert verdicts(result) == [
        "bare.safetensors: not a kvq artifact, left alone",
        "model.safetensors: not a kvq artifact, left alone",
        "No artifact changed.",
    ]
    weights.write_bytes(b"\xff" * 20)
    assert gate(repository, "main").returncode == INPUT


def test_an_artifact_that_becomes_another_file_fails(repository):
    (repository / "two.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert gate(repository, "main").returncode == INPUT


def test_untracked_artifacts_are_judged_and_named(repository, artifacts):
    shutil.copy(artifacts["new"], repository / "three.safetensors")
    result = gate(repository, "main", "--out", "gate")
    assert result.returncode == PASSED
    assert result.stdout == "three.safetensors: passed (not tracked by git)\n"
    assert "## three.safetensors (new, not tracked by git)" in (repository / "gate/summary.md").read_text()


def test_links_and_pointers_are_named(repository):
    os.remove(repository / "two.safetensors")
    os.symlink("/dev/zero", repository / "two.safetensors")
    (repository / "big.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    git(repository, "add", ".")
    result = gate(repository, "main")
    assert result.returncode == INPUT and "  not a regular file" in result.stdout and "git lfs pull" in result.stdout


@pytest.mark.parametrize(
    "name", ["-rf.safetensors", "--help.safetensors", "::error::x.safetensors", "a\n::b.safetensors"]
)
def test_names_are_no_flags_and_no_commands(repository, artifacts, name):
    """A runner of workflows takes a line that starts with two colons for a command."""
    for source, state in (("new", "new"), ("bad", "changed")):
        shutil.copy(artifacts[source], repository / name)
        git(repository, "add", "--", ".")
        result = gate(repository, "main" if state == "new" else "HEAD")
        assert result.returncode == (PASSED if state == "new" else CHECK_FAILED), result
        assert not any(line.startswith("::") for line in result.stdout.splitlines())
        git(repository, "commit", "-qm", state)


def test_the_console_says_when_only_files_were_judged(repository, artifacts):
    shutil.copy(artifacts["seed"], repository / "two.safetensors")
    result = gate(repository, "main")
    assert result.returncode == PASSED and "  Only the files were judged" in result.stdout
    assert re.search(r"Only the files were judged.*add --model HELDOUT\.h5", result.stdout), "the whole advice"
    result = gate(repository, "main", "--model", ROOT / "sample_data/evaluation.h5", "--no-windows")
    assert result.stdout == "two.safetensors: passed\n"


def test_the_default_folder_stays_out_of_git(repository, artifacts):
    shutil.copy(artifacts["seed"], repository / "two.safetensors")
    gate(repository, "main")
    assert (repository / "kvq-gate/summary.md").exists()
    assert "kvq-gate" not in git(repository, "status", "--short")


def test_tools_of_an_installation(repository, artifacts, tmp_path):
    """The script finds the tools beside it, in KVQ_BIN, or nowhere, and then says what to do."""
    shutil.copy(artifacts["seed"], repository / "two.safetensors")
    prefix = tmp_path / "prefix/bin"
    prefix.mkdir(parents=True)
    shutil.copy(ROOT / "scripts/gate_artifacts.py", prefix / "kvq-gate")
    environment = {name: value for name, value in os.environ.items() if name != "KVQ_BIN"}

    def installed(**more: str) -> subprocess.CompletedProcess:
        command = [prefix / "kvq-gate", "main"]
        return subprocess.run(command, cwd=repository, env=environment | more, capture_output=True, text=True)

    missing = installed()
    assert missing.returncode == INPUT and missing.stderr.splitlines()[0].startswith("kvq-gate: error: no kvq-diff")
    assert "KVQ_BIN=FOLDER" in missing.stderr
    for tool in ("kvq-diff", "kvq-inspect"):
        os.symlink(BIN / tool, prefix / tool)
    assert installed().returncode == PASSED
    assert installed(KVQ_BIN="/nonexistent").returncode == INPUT


def test_usage(repository):
    assert gate(repository).returncode == USAGE and gate(repository, "no-such-branch").returncode == USAGE
    assert gate(repository, "--help").returncode == 0


@pytest.fixture(scope="module")
def workflow() -> dict:
    text = (ROOT / "scripts/github_actions.yml").read_text()
    assert "\t" not in text
    return pytest.importorskip("yaml").safe_load(text)


def test_the_example_runs_what_is_tested(workflow):
    gates = [
        step["run"] for step in workflow["jobs"]["kvq-diff"]["steps"] if "gate_artifacts.py" in step.get("run", "")
    ]
    assert len(gates) == 1 and "GITHUB_STEP_SUMMARY" in gates[0]
    assert not any("${{" in step.get("run", "") for step in workflow["jobs"]["kvq-diff"]["steps"]), (
        "names of others are no shell code"
    )


def test_only_the_comment_may_write_and_not_for_forks(workflow):
    assert "pull_request_target" not in workflow[True] and workflow["permissions"] == {}, "YAML reads `on` as true"
    permissions = {name: job["permissions"] for name, job in workflow["jobs"].items()}
    assert permissions == {"kvq-diff": {"contents": "read"}, "comment": {"pull-requests": "write"}}
    comment = workflow["jobs"]["comment"]
    assert (
        "github.event.pull_request.head.repo.full_name == github.repository" in comment["if"]
        and comment["needs"] == "kvq-diff"
    )
    assert not any("run" in step or "checkout" in step["uses"] for step in comment["steps"])


NODE = """
const [script, folder, existing] = process.argv.slice(2).map((x, i) => i === 1 ? x : JSON.parse(x));
process.chdir(folder);
const said = [], call = name => async request => { said.push({name, ...request}); };
const issues = {listComments: null, updateComment: call('update'), createComment: call('create')};
const github = {paginate: async () => existing, rest: {issues}};
const context = {repo: {owner: 'o', repo: 'r'}, issue: {number: 7}, serverUrl: 'https://host', runId: 9};
const body = Object.getPrototypeOf(async function () {}).constructor;
new body('github', 'context', 'require', script)(github, context, require)
  .then(() => console.log(JSON.stringify(said)));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_comment_is_made_once_and_then_written_anew(workflow, tmp_path):
    script = workflow["jobs"]["comment"]["steps"][-1]["with"]["script"]

    def said(*comments: dict) -> dict:
        done = subprocess.run(
            ["node", "-e", NODE, "x", json.dumps(script), tmp_path, json.dumps(comments)],
            capture_output=True,
            text=True,
            check=True,
        )
        (request,) = json.loads(done.stdout)
        assert len(request["body"]) < 65536 and request["body"].startswith("<!-- kvq-gate -->\n")
        return request

    assert "Nothing was compared" in said()["body"]
    (tmp_path / "kvq-gate").mkdir()
    (tmp_path / "kvq-gate/summary.md").write_text("## a.safetensors\n")
    others = (
        {"id": 1, "user": {"type": "User"}, "body": "<!-- kvq-gate -->"},
        {"id": 2, "user": {"type": "Bot"}, "body": "hello"},
    )
    assert (said(*others)["name"], said(*others)["issue_number"]) == ("create", 7) and "## a.safetensors" in said(
        *others
    )["body"]
    again = said(*others, {"id": 3, "user": {"type": "Bot"}, "body": "<!-- kvq-gate -->\nold"})
    assert (again["name"], again["comment_id"]) == ("update", 3)
    (tmp_path / "kvq-gate/summary.md").write_text("| row |\n" * 20000)
    assert "summary of the run" in said()["body"]
