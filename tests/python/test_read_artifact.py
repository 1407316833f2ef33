"""scripts/read_artifact.py: reads what formats/artifact.md allows, refuses what it forbids, and codes rows as it
says."""

import copy
import json
import struct
from pathlib import Path

import artifact_builder as build
import numpy as np
import pytest
from artifact_edits import check_refused, edit, parse, run, tensor

from kvq import packing, read_artifact
from kvq.artifact import hadamard
from kvq.artifact_reader import artifact_schema
from kvq.errors import KvqError
from kvq.safetensors_file import SafetensorsFile

ROOT = Path(__file__).resolve().parents[2]

DIM, KV_HEADS, Q_HEADS = 8, 2, 4


def sample() -> tuple[dict, dict[str, np.ndarray]]:
    """Two layers with every kind of rotation, coder and tensor: (manifest, tensors)."""
    shape = build.geometry(Q_HEADS, KV_HEADS, DIM)
    rng = np.random.default_rng(1)
    dense = build.rotation(
        "dense", recipe="U*H", eigenbasis=True, signs=True, order=8, target="query", sign_choice=["canonical"] * 2
    )
    basis = build.orthogonal(3, KV_HEADS, DIM)
    shared = build.rotation("dense", "layer")
    blocks = build.rotation("block_hadamard", order=4, signs=True)
    tree = build.manifest(
        [
            build.layer(
                0,
                shape,
                build.affine_plan(2, 4, KV_HEADS, 0.9, rotation=dense, center=True),
                build.symmetric_plan(3, 8, rotation=shared),
            ),
            build.layer(2, shape, build.symmetric_plan(4, 8, "absmax", "bf16", rotation=blocks), build.exact_plan()),
        ],
        num_layers=4,
        sink=2,
        recent=5,
    )
    signs = rng.choice([-1, 1], (KV_HEADS, DIM)).astype(np.int8)
    return tree, {
        "layers.0.k.rotation": (basis.astype(np.float64) @ hadamard(DIM)).astype(np.float32),
        "layers.0.k.eigenbasis": basis,
        "layers.0.k.spectrum": np.sort(rng.random((KV_HEADS, DIM), np.float32))[:, ::-1].copy(),
        "layers.0.k.center": rng.standard_normal((KV_HEADS, DIM)).astype(np.float32),
        "layers.0.k.hadamard_signs": signs,
        "layers.0.v.rotation": build.orthogonal(4, 1, DIM),
        "layers.2.k.hadamard_signs": -signs,
    }


def write(tmp_path, content: bytes):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    return path


# What is allowed


def test_reads_what_the_safetensors_package_wrote():
    tree, tensors = sample()
    artifact = parse(build.to_bytes(tree, tensors))
    assert (artifact.sink_tokens, artifact.recent_tokens) == (2, 5)
    assert list(artifact.layers) == [0, 2]
    k = artifact.layers[0].sides["k"]
    assert k.scheme_of(1).clip_ratio == 0.9
    for name in ("rotation", "eigenbasis", "spectrum", "center", "hadamard_signs"):
        assert (k.tensors[name] == tensors[f"layers.0.k.{name}"]).all()
    assert artifact.layers[0].sides["v"].head_index(1) == 0
    assert artifact.layers[2].sides["v"].scheme.coder == "exact"


def test_order_of_tensors_and_alignment_do_not_matter():
    tree, tensors = sample()
    names = sorted(tensors, reverse=True)
    header, data = {"__metadata__": build.metadata(tree, tensors)}, b""
    for name in names:
        raw = tensors[name].tobytes()
        header[name] = {
            "dtype": build.DTYPE_NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header)
    artifact = parse(build.raw_bytes(text + " " * ((2 - len(text)) % 8 + 1), data))
    assert (artifact.layers[0].sides["k"].tensors["rotation"] == tensors["layers.0.k.rotation"]).all()


def test_higher_minor_and_unknown_keys_are_read():
    tree, tensors = sample()
    tree["version"], tree["later"] = "1.7", {"a": 1}
    tensors["layers.0.golden.q"] = np.zeros((1, 2), np.float32)
    assert len(parse(build.to_bytes(tree, tensors, version="1.7")).layers) == 2


# What is refused: manifest and tensors


def damaged(array, value):
    array = array.copy()
    array.flat[-1] = value
    return array


TENSORS = sample()[1]
LAYER, K = ("layers", 0), ("layers", 0, "k")
REFUSED = {
    "another format": edit("format", value="kvq-stats"),
    "version differs from metadata": edit("version", value="1.1"),
    "requires differs from metadata": edit("requires", value=["later"]),
    "no windows": edit("windows", value=...),
    "negative window": edit("windows", "sink_tokens", value=-1),
    "no layers": edit("layers", value=[]),
    "layer out of range": edit("layers", 1, "layer", value=4),
    "layers not ascending": edit("layers", 1, "layer", value=0),
    "no key plan": edit(*K, value=...),
    "q heads no multiple": edit(*LAYER, "geometry", "num_q_heads", value=3),
    "head_dim zero": edit(*LAYER, "geometry", "head_dim", value=0),
    "softmax scale zero": edit(*LAYER, "geometry", "softmax_scale", value=0),
    "unknown kind": edit(*LAYER, "geometry", "kind", value="mamba"),
    "odd rotary slice": edit(*LAYER, "geometry", "rope", "dim", value=7),
    "rotary slice outside": edit(*LAYER, "geometry", "rope", "offset", value=1),
    "missing frequency": edit(*LAYER, "geometry", "rope", "inv_freq", value=[1.0]),
    "unknown coder": edit(*K, "coder", value="lookup"),
    "bits as text": edit(*K, "bits", value="2"),
    "bits true": edit(*K, "bits", value=True),
    "bits 9": edit(*K, "bits", value=9),
    "exact with 8 bits": edit("layers", 1, "v", "bits", value=8),
    "group does not divide": edit(*K, "group_size", value=3),
    "group too large": edit(*K, "group_size", value=16),
    "rule of another coder": edit(*K, "scale_rule", value="norm"),
    "no zero": edit(*K, "zero", value=...),
    "unknown scale type": edit(*K, "scale_type", value="fp8"),
    "no clip ratio": edit(*K, "clip_ratio", value=...),
    "one clip ratio for two heads": edit(*K, "clip_ratio", value=[1.0]),
    "clip ratio zero": edit(*K, "clip_ratio", value=[0, 1]),
    "clip ratio above one": edit(*K, "clip_ratio", value=[1, 1.5]),
    "clip ratio for symmetric codes": edit("layers", 0, "v", "clip_ratio", value=[1.0]),
    "center as a number": edit(*K, "center", value=1),
    "unknown rotation": edit(*K, "rotation", "kind", value="givens"),
    "Hadamard order 3": edit("layers", 1, "k", "rotation", "order", value=3),
    "Hadamard order too large": edit("layers", 1, "k", "rotation", "order", value=16),
    "no Hadamard order": edit("layers", 1, "k", "rotation", "order", value=...),
    "rotation missing": tensor("layers.0.k.rotation"),
    "center missing": tensor("layers.0.k.center"),
    "spectrum missing": tensor("layers.0.k.spectrum"),
    "signs missing": tensor("layers.2.k.hadamard_signs"),
    "center not announced": edit(*K, "center", value=False),
    "superfluous tensor": tensor("layers.1.k.rotation", np.eye(8, dtype=np.float32)),
    "superfluous name": tensor("golden", np.eye(8, dtype=np.float32)),
    "rotation of one head": tensor("layers.0.k.rotation", TENSORS["layers.0.k.rotation"][:1]),
    "rotation in float64": tensor("layers.0.k.rotation", TENSORS["layers.0.k.rotation"].astype(np.float64)),
    "NaN in a rotation": tensor("layers.0.k.rotation", damaged(TENSORS["layers.0.k.rotation"], np.nan)),
    "Inf in a center": tensor("layers.0.k.center", damaged(TENSORS["layers.0.k.center"], np.inf)),
    "sign of zero": tensor("layers.0.k.hadamard_signs", damaged(TENSORS["layers.0.k.hadamard_signs"], 0)),
    "sign of -128": tensor("layers.0.k.hadamard_signs", damaged(TENSORS["layers.0.k.hadamard_signs"], -128)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_a_bad_manifest_or_tensor(name):
    check_refused(*sample(), REFUSED[name])


@pytest.mark.parametrize(
    "changes, code",
    [
        ({"format": "pt"}, 3),
        ({"version": "2.0"}, 5),
        ({"version": "0.9"}, 5),
        ({"version": "1"}, 3),
        ({"version": "1.x"}, 3),
        ({"version": "-1.0"}, 3),
        ({"requires": "later"}, 5),
        ({"requires": "trellis"}, 3),
        ({"requires": "a,b"}, 5),
        ({"kvq.manifest": "{"}, 3),
        ({"kvq.manifest": "[]"}, 3),
        ({"kvq.manifest": '{"a": NaN}'}, 3),
        ({"kvq.manifest": '{"a": 1, "a": 2}'}, 3),
        ({"kvq.manifest": "[" * 100_000}, 3),
        ({"kvq.manifest": '{"a":' * 70 + "0" + "}" * 70}, 3),
        ({"kvq.manifest": '{"a": "\\ud800"}'}, 3),
    ],
)
def test_refuses_bad_metadata(changes, code):
    with pytest.raises(KvqError) as error:
        parse(build.to_bytes(*sample(), **changes))
    assert error.value.exit_code == code, str(error.value)


def test_refuses_missing_metadata():
    for key in ("format", "version", "requires", "kvq.manifest"):
        metadata = build.metadata(*sample())
        del metadata[key]
        with pytest.raises(KvqError, match=key):
            parse(build.raw_bytes({"__metadata__": metadata}))


# What is refused: the container


def entry(begin, end, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


BAD_CONTAINERS = {
    "empty": b"",
    "seven bytes": bytes(7),
    "header longer than the file": struct.pack("<Q", 100) + b"{}",
    "huge header": struct.pack("<Q", 2**64 - 1) + b"{}",
    "not an object": build.raw_bytes("[]"),
    "space first": build.raw_bytes(" {}"),
    "not JSON": build.raw_bytes("{x}"),
    "not UTF-8": struct.pack("<Q", 9) + b'{"\xff": {}}',
    "two values": build.raw_bytes("{} {}"),
    "duplicate tensor": build.raw_bytes('{"a": %s, "a": %s}' % ((json.dumps(entry(0, 8)),) * 2), bytes(8)),
    "half a surrogate": build.raw_bytes('{"\\ud800": %s}' % json.dumps(entry(0, 8)), bytes(8)),
    "metadata of numbers": build.raw_bytes({"__metadata__": {"a": 1}}),
    "metadata as text": build.raw_bytes({"__metadata__": "a"}),
    "entry without dtype": build.raw_bytes({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
    "entry with more": build.raw_bytes({"a": entry(0, 8) | {"x": 1}}, bytes(8)),
    "negative extent": build.raw_bytes({"a": entry(0, 8, (-2,))}, bytes(8)),
    "extents overflow": build.raw_bytes({"a": entry(0, 0, (2**62, 4))}),
    "extent true": build.raw_bytes({"a": entry(0, 4, (True,))}, bytes(4)),
    "extent 1.0": build.raw_bytes({"a": entry(0, 4, (1.0,))}, bytes(4)),
    "size differs": build.raw_bytes({"a": entry(0, 12)}, bytes(12)),
    "offsets backwards": build.raw_bytes({"a": entry(8, 0)}, bytes(8)),
    "three offsets": build.raw_bytes({"a": entry(0, 8) | {"data_offsets": [0, 8, 8]}}, bytes(8)),
    "past the end": build.raw_bytes({"a": entry(0, 8)}, bytes(4)),
    "bytes left over": build.raw_bytes({"a": entry(0, 8)}, bytes(9)),
    "overlap": build.raw_bytes({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
    "hole": build.raw_bytes({"a": entry(0, 8), "b": entry(12, 20)}, bytes(20)),
}


@pytest.mark.parametrize("name", BAD_CONTAINERS)
def test_refuses_a_bad_container(name):
    with pytest.raises(KvqError) as error:
        SafetensorsFile(BAD_CONTAINERS[name], "test")
    assert error.value.exit_code == 3


@pytest.mark.parametrize("path", sorted((ROOT / "formats/malformed").glob("*.safetensors")), ids=lambda path: path.stem)
def test_refuses_the_malformed_files_of_the_formats_folder(path, capsys):
    code, out, err = run(capsys, path, "--verify")
    assert code in (3, 5) and out == ""
    assert err.startswith("read_artifact.py: error: ")


def test_unknown_dtype_is_unsupported():
    with pytest.raises(KvqError) as error:
        SafetensorsFile(build.raw_bytes({"a": entry(0, 8, (8,), "F8_E4M3")}, bytes(8)), "test")
    assert error.value.exit_code == 5
    assert "F32" in error.value.hint


def test_no_damaged_byte_leads_to_anything_but_an_error():
    """Each prefix, and each file with single damaged bytes, is an artifact or raises KvqError, never another
    exception."""
    content = build.to_bytes(*sample())
    rng = np.random.default_rng(12)
    damages = [content[:n] for n in range(0, len(content), 37)]
    for _ in range(400):
        copied = bytearray(content)
        copied[rng.integers(len(copied))] = rng.integers(256)
        damages.append(bytes(copied))
    for damage in damages:
        try:
            parse(damage)
        except KvqError:
            pass


# The one formula


def test_rotation_is_what_the_formula_says():
    tree, tensors = sample()
    artifact = parse(build.to_bytes(tree, tensors))
    x = np.random.default_rng(5).standard_normal((11, DIM)).astype(np.float32)
    k = artifact.layers[0].sides["k"]
    expected = (x - tensors["layers.0.k.center"][1]) @ tensors["layers.0.k.rotation"][1]
    np.testing.assert_allclose(k.rotate(x, 1), expected, atol=1e-5)
    np.testing.assert_allclose(k.unrotate(k.rotate(x, 1), 1), x, atol=1e-5)
    blocks = artifact.layers[2].sides["k"]
    h4 = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
    signed = x * tensors["layers.2.k.hadamard_signs"][0]
    np.testing.assert_allclose(
        blocks.rotate(x, 0), np.concatenate([signed[:, :4] @ h4, signed[:, 4:] @ h4], 1), atol=1e-6
    )
    np.testing.assert_allclose(blocks.unrotate(blocks.rotate(x, 0), 0), x, atol=1e-6)


def test_hadamard_is_orthogonal_and_symmetric():
    for order in (1, 2, 8, 64):
        h = hadamard(order)
        np.testing.assert_allclose(h @ h, np.eye(order), atol=1e-12)
        assert (h == h.T).all() and (h[0] > 0).all()


def test_reconstruction_is_as_close_as_the_codes_are():
    artifact = parse(build.to_bytes(*sample()))
    x = np.random.default_rng(6).standard_normal((200, DIM)).astype(np.float32)
    errors = {}
    for layer, side in ((0, "k"), (0, "v"), (2, "k"), (2, "v")):
        plan = artifact.layers[layer].sides[side]
        errors[plan.scheme.bits] = float(np.mean((plan.reconstruct(x, 0) - x) ** 2))
    assert errors[2] > errors[3] > errors[4] > errors[16] > 0
    assert errors[16] < 1e-5


# The program


def test_prints_a_summary(tmp_path, capsys):
    code, out, err = run(capsys, write(tmp_path, build.to_bytes(*sample())))
    assert (code, err) == (0, "")
    assert "sink 2, recent 5" in out
    assert "block_hadamard 4" in out and "0.9" in out and "affine float" in out
    assert len(out.splitlines()) == 5 + 1 + 1 + 4


def test_json_is_one_document(tmp_path, capsys):
    tree, tensors = sample()
    code, out, _ = run(capsys, write(tmp_path, build.to_bytes(tree, tensors)), "--json", "--verify")
    document = json.loads(out)
    assert code == 0
    assert document["manifest"] == tree
    assert document["layers"][0]["row_bytes"] == 2 + 4 * 2
    assert {c["name"]: c["passed"] for c in document["checks"]}["orthogonality"] is True


def test_verify_passes_and_names_its_checks(tmp_path, capsys):
    code, out, _ = run(capsys, write(tmp_path, build.to_bytes(*sample())), "--verify")
    assert code == 0
    assert "orthogonality: ok" in out
    for name in ("schema, tensors, finite values", "content hash", "version", "geometry", "spectra", "recipes"):
        assert f"{name}: ok" in out


def test_verify_notices_a_rotation_that_is_not_orthogonal(tmp_path, capsys):
    tree, tensors = sample()
    tensors["layers.0.v.rotation"] *= np.float32(1.0001)
    code, out, err = run(capsys, write(tmp_path, build.to_bytes(tree, tensors)), "--verify")
    assert code == 6
    assert "layer 0 v" in err and "orthogonality: FAILED" in out


def test_verify_notices_a_changed_byte(tmp_path, capsys):
    tree, tensors = sample()
    content = bytearray(build.to_bytes(tree, tensors))
    content[-1] ^= 0xFE if content[-1] in (1, 255) else 1  # the last byte is a sign: +1 becomes -1 and the reverse
    code, _out, err = run(capsys, write(tmp_path, bytes(content)), "--verify")
    assert code == 6 and "content hash" in err


def test_what_only_the_schema_says_is_refused(tmp_path, capsys):
    tree, tensors = sample()
    del tree["calibration"]["tool"]
    for flags in ([], ["--verify"]):
        code, out, err = run(capsys, write(tmp_path, build.to_bytes(tree, tensors)), *flags)
        assert code == 3 and out == "" and "calibration: 'tool' is missing" in err


def test_a_changed_byte_is_refused_where_nothing_asks_for_checks(tmp_path, capsys):
    content = bytearray(build.to_bytes(*sample()))
    content[-1] ^= 0xFE if content[-1] in (1, 255) else 1
    path = write(tmp_path, bytes(content))
    for flags in ([], ["--json"], ["--encode-rows", tmp_path / "x.npy", "--layer", 0, "--side", "k"]):
        code, out, err = run(capsys, path, *flags)
        assert code == 3 and out == "" and "content hash: expected xxh3-128:" in err and "hint: " in err


def test_encodes_rows(tmp_path, capsys):
    tree, tensors = sample()
    path = write(tmp_path, build.to_bytes(tree, tensors))
    x = np.random.default_rng(7).standard_normal((5, DIM)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    arguments = (path, "--encode-rows", tmp_path / "x.npy", "--layer", 0, "--side", "k", "--head", 1)
    code, out, _ = run(capsys, *arguments)
    plan = parse(path.read_bytes()).layers[0].sides["k"]
    expected = packing.pack(packing.encode(plan.rotate(x, 1), plan.scheme_of(1)), plan.scheme)
    assert code == 0
    assert out.split() == [row.tobytes().hex() for row in expected]
    assert run(capsys, *arguments, "--output", tmp_path / "out.npy")[0] == 0
    assert (np.load(tmp_path / "out.npy") == expected).all()


@pytest.mark.parametrize(
    "rows, arguments, code",
    [
        ("x.npy", ["--layer", "1", "--side", "k"], 2),
        ("x.npy", ["--layer", "0", "--side", "k", "--head", "2"], 2),
        ("missing.npy", ["--layer", "0", "--side", "k"], 3),
    ],
)
def test_wrong_rows_are_refused_in_one_line(tmp_path, capsys, rows, arguments, code):
    path = write(tmp_path, build.to_bytes(*sample()))
    np.save(tmp_path / "x.npy", np.zeros((2, DIM), np.float32))
    found, out, err = run(capsys, path, "--encode-rows", tmp_path / rows, *arguments)
    assert found == code and out == ""
    assert err.startswith("read_artifact.py: error: ")


def test_wrong_flags_exit_with_2(tmp_path, capsys):
    for arguments in (["a", "--encode-rows", "x.npy"], ["a", "--side", "q"], []):
        with pytest.raises(SystemExit) as error:
            read_artifact.main(arguments)
        assert error.value.code == 2


def test_missing_file_is_one_line(tmp_path, capsys):
    code, out, err = run(capsys, tmp_path / "missing")
    assert (code, out) == (3, "")
    assert err.count("\n") == 1 and err.startswith("read_artifact.py: error: ")


def test_the_sample_is_what_the_schema_allows():
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(copy.deepcopy(sample()[0]), artifact_schema())
