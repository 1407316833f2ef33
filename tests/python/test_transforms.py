"""What formats/artifact.md 1.2 adds: maps before coding that are not orthogonal, read, refused, checked and applied."""

import json

import artifact_builder as build
import derive_transform_vectors as derived
import numpy as np
import pytest
from artifact_edits import both, check_refused, edit_layers, parse, run, tensor

from kvq.artifact import hadamard, inverse_error, orthogonality_error, transform_condition
from kvq.artifact_reader import artifact_schema
from kvq.errors import KvqError
from kvq.packing import decode

DIM, KV_HEADS, Q_HEADS = 12, 2, 6
ORDER = 4

WIDTHS = np.uint8([[4] * 4 + [2] * 6 + [0] * 2])


def scales(seed: int, heads: int) -> np.ndarray:
    """float32 [heads, DIM], positive bfloat16 numbers"""
    numbers = np.exp2(np.random.default_rng(seed).uniform(-3, 4, (heads, DIM))).astype(np.float32)
    return (numbers.view(np.uint32) & 0xFFFF0000).view(np.float32)


def sample() -> tuple[dict, dict[str, np.ndarray]]:
    """Every way to store a transform, beside plans without one: (manifest, tensors).

    0 k: dense with inverse, center      0 v: block_hadamard with signs and channel_scale, codebook
    1 k: identity with channel_scale     1 v: dense with inverse, shared, mixed widths, its signs and order explain it
    2 k: orthogonal and dense            2 v: block_hadamard with channel_scale, without signs, shared
    """
    shape = build.geometry(Q_HEADS, KV_HEADS, DIM)
    per_head, shared = build.inverse_pair(1, KV_HEADS, DIM), build.inverse_pair(2, 1, DIM)
    dense = build.rotation("dense", inverse=True)
    shared_dense = build.rotation("dense", "layer", inverse=True, signs=True, order=ORDER)
    blocks = build.rotation("block_hadamard", order=ORDER, signs=True, channel_scale=True)
    shared_blocks = build.rotation("block_hadamard", "layer", order=ORDER, channel_scale=True)
    scaled = build.rotation("identity", channel_scale=True)
    mixed = build.mixed(build.symmetric_plan(4, DIM, rotation=shared_dense), WIDTHS, 8)
    rng = np.random.default_rng(3)
    tree = build.manifest(
        [
            build.layer(
                0,
                shape,
                build.affine_plan(
                    3,
                    6,
                    KV_HEADS,
                    rotation=dense,
                    center=True,
                    **build.transform(KV_HEADS, "klt", condition=per_head[2]),
                ),
                build.codebook_plan(2, 6, rotation=blocks, **build.transform(KV_HEADS, "diagonal")),
            ),
            build.layer(
                1,
                shape,
                build.symmetric_plan(4, 6, rotation=scaled, **build.transform(KV_HEADS, "mixed", 1)),
                mixed | build.transform(1, "balanced", condition=shared[2]),
            ),
            build.layer(
                2,
                shape,
                build.symmetric_plan(2, DIM, rotation=build.rotation("dense")),
                build.symmetric_plan(2, DIM, rotation=shared_blocks, **build.transform(1, "diagonal")),
            ),
        ],
        requires=("codebook", "mixed_widths", "transform"),
    )
    return tree, {
        "layers.0.k.rotation": per_head[0],
        "layers.0.k.inverse": per_head[1],
        "layers.0.k.center": rng.standard_normal((KV_HEADS, DIM)).astype(np.float32),
        "layers.0.v.hadamard_signs": rng.choice([-1, 1], (KV_HEADS, DIM)).astype(np.int8),
        "layers.0.v.channel_scale": scales(4, KV_HEADS),
        "layers.0.v.codebook.2": np.float32([-1.5, -0.5, 0.5, 1.5]),
        "layers.1.k.channel_scale": scales(5, KV_HEADS),
        "layers.1.v.rotation": shared[0],
        "layers.1.v.inverse": shared[1],
        "layers.1.v.hadamard_signs": rng.choice([-1, 1], (1, DIM)).astype(np.int8),
        "layers.1.v.channel_bits": WIDTHS,
        "layers.1.v.channel_order": np.arange(DIM, dtype=np.uint16)[None],
        "layers.2.k.rotation": build.orthogonal(6, KV_HEADS, DIM),
        "layers.2.v.channel_scale": scales(7, 1),
    }


TENSORS = sample()[1]


def patterns(texts: list[str]) -> np.ndarray:
    """float32 of binary32 patterns in hex"""
    return np.array([int(text, 16) for text in texts], np.uint32).view(np.float32)


def sample_plans() -> dict:
    artifact = parse(build.to_bytes(*sample()))
    return {(layer, side): plan for layer, entry in artifact.layers.items() for side, plan in entry.sides.items()}


def verify(tmp_path, capsys, tree, tensors) -> tuple[int, dict[str, dict], str]:
    """(exit code, checks by name, stderr)"""
    (tmp_path / "a.safetensors").write_bytes(build.to_bytes(tree, tensors))
    code, out, err = run(capsys, tmp_path / "a.safetensors", "--verify", "--json")
    return code, {item["name"]: item for item in json.loads(out)["checks"]} if out else {}, err


# The map


def expected_map(place: tuple[int, str], head: int, x: np.ndarray) -> np.ndarray:
    """x_rot without a center, step by step by the table of artifact.md; float64."""
    scale, signs = (TENSORS.get(f"layers.{place[0]}.{place[1]}.{name}") for name in ("channel_scale", "hadamard_signs"))
    matrix = TENSORS.get(f"layers.{place[0]}.{place[1]}.rotation")
    if matrix is not None:
        return x @ np.float64(matrix[min(head, len(matrix) - 1)])
    entry = min(head, len(scale) - 1)
    x = x * np.float64(scale[entry])
    if place == (1, "k"):
        return x
    if signs is not None:
        x = x * signs[entry]
    return (x.reshape(-1, DIM // ORDER, ORDER) @ hadamard(ORDER)).reshape(-1, DIM)


@pytest.mark.parametrize("place", sample_plans(), ids=str)
@pytest.mark.parametrize("head", range(KV_HEADS))
def test_rows_go_through_a_and_back_through_its_inverse(place, head):
    plan = sample_plans()[place]
    x = np.random.default_rng(8).standard_normal((50, DIM)).astype(np.float32)
    centered = x - plan.tensors["center"][head] if "center" in plan.tensors else x
    x_rot = plan.rotate(x, head)
    assert x_rot.dtype == np.float32
    np.testing.assert_allclose(x_rot, expected_map(place, head, np.float64(centered)), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(plan.unrotate(x_rot, head), x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("place", sample_plans(), ids=str)
def test_queries_take_the_transpose_of_the_inverse_and_keep_the_logits(place):
    plan = sample_plans()[place]
    q, x = np.random.default_rng(9).standard_normal((2, 50, DIM))
    for head in range(KV_HEADS):
        turned = q @ plan.inverse(head).T
        np.testing.assert_allclose(np.sum(turned * (x @ plan.matrix(head)), axis=1), np.sum(q * x, axis=1), atol=1e-5)
        np.testing.assert_allclose(plan.inverse(head) @ plan.matrix(head), np.eye(DIM), atol=1e-5)


def test_errors_come_back_through_the_inverse():
    """With eight bits for x_rot, the error of x is the error of x_rot times A^-1, which is not A^T."""
    plan = sample_plans()[0, "k"]
    x = np.random.default_rng(10).standard_normal((20, DIM)).astype(np.float32)
    coded = plan.encode_rows(x, 1)
    error = np.float64(decode(coded, plan.scheme_of(1))) - plan.rotate(x, 1)
    np.testing.assert_allclose(
        plan.reconstruct(x, 1) - x, error @ np.float64(TENSORS["layers.0.k.inverse"][1]), atol=1e-5
    )


def test_scaled_channels_are_products_rounded_once():
    plan = sample_plans()[1, "k"]
    x = np.random.default_rng(11).standard_normal((20, DIM)).astype(np.float32)
    assert (plan.rotate(x, 1) == x * TENSORS["layers.1.k.channel_scale"][1]).all()
    np.testing.assert_allclose(plan.unrotate(plan.rotate(x, 1), 1), x, rtol=2e-7)


def test_torch_reconstructs_what_numpy_does():
    torch = pytest.importorskip("torch")
    from kvq import coded_attention

    x = np.random.default_rng(12).standard_normal((KV_HEADS, 40, DIM)).astype(np.float32)
    for plan in sample_plans().values():
        found = coded_attention.reconstruct(plan, torch.from_numpy(x)).numpy()
        for head in range(KV_HEADS):
            np.testing.assert_allclose(found[head], plan.reconstruct(x[head], head), atol=1e-5)


# The written vectors

VECTORS = json.loads(derived.VECTORS.read_text())["vectors"]


def plan_of(vector: dict):
    """The vector's plan, read from an artifact with the same numbers."""
    facts, dim = vector["rotation"], len(vector["x_bits"])
    flags = {name: f"{name}_bits" in facts for name in ("inverse", "channel_scale")}
    rotation = build.rotation(
        facts["kind"], signs="signs" in facts, **flags, **{key: facts[key] for key in ("order",) if key in facts}
    )
    coder = {
        key: vector[key] for key in ("coder", "bits", "group_size", "scale_type", "scale_rule", "zero") if key in vector
    }
    plan = (
        coder
        | {"center": "center_bits" in vector, "rotation": rotation}
        | build.transform(1, condition=vector["condition"])
    )
    if "clip_ratio" in vector:
        plan["clip_ratio"] = [vector["clip_ratio"]]
    tensors = {
        "layers.0.k.rotation": ("matrix_bits", (1, dim, dim)),
        "layers.0.k.inverse": ("inverse_bits", (1, dim, dim)),
        "layers.0.k.channel_scale": ("channel_scale_bits", (1, dim)),
    }
    arrays = {name: patterns(facts[key]).reshape(shape) for name, (key, shape) in tensors.items() if key in facts}
    if "signs" in facts:
        arrays["layers.0.k.hadamard_signs"] = np.int8([facts["signs"]])
    if "center_bits" in vector:
        arrays["layers.0.k.center"] = patterns(vector["center_bits"])[None]
    tree = build.manifest([build.layer(0, build.geometry(1, 1, dim), plan)], requires=("transform",))
    return parse(build.to_bytes(tree, arrays)).layers[0].sides["k"]


def same_bits(found: np.ndarray, expected: list[str]) -> bool:
    return found.dtype == np.float32 and (found.ravel().view(np.uint32) == patterns(expected).view(np.uint32)).all()


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_the_reader_gives_every_written_vector_bit_for_bit(vector):
    plan, x = plan_of(vector), patterns(vector["x_bits"])[None]
    assert same_bits(plan.rotate(x, 0), vector["x_rot_bits"])
    coded, scheme = plan.encode_rows(x, 0), plan.scheme_of(0)
    assert coded.codes.ravel().tolist() == vector["codes"]
    assert plan.pack_rows(x, 0).tobytes().hex() == vector["bytes"]
    assert same_bits(decode(coded, scheme), vector["decoded_bits"])
    assert same_bits(plan.reconstruct(x, 0), vector["x_hat_bits"])
    assert same_bits(plan.unrotate(plan.rotate(x, 0), 0), vector["x_bits"])


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_queries_of_the_written_vectors_keep_their_products(vector):
    plan, x, q = plan_of(vector), patterns(vector["x_bits"])[None], patterns(vector["q_bits"]).astype(np.float64)
    q_rot = q @ plan.inverse(0).T
    assert (q_rot == patterns(vector["q_rot_bits"])).all()
    assert np.sum(q_rot * plan.rotate(x, 0)[0]) == vector["dot"]
    assert inverse_error(plan).tolist() == [0.0]
    assert transform_condition(plan)[0] == pytest.approx(vector["condition"], rel=1e-12)


def test_torch_gives_the_written_vectors():
    torch = pytest.importorskip("torch")
    from kvq import coded_attention

    for vector in VECTORS:
        x = torch.from_numpy(patterns(vector["x_bits"]))[None, None]
        assert same_bits(coded_attention.reconstruct(plan_of(vector), x).numpy(), vector["x_hat_bits"]), vector["name"]


def test_vectors_file_is_what_the_text_gives():
    assert derived.vectors_text() == derived.VECTORS.read_text()


def test_the_first_vector_by_hand():
    """(3, -2, 4, 1) through ((2 0 0 0) (1 1 0 0) (0 0 1/2 0) (0 0 1/4 4)) is (6 - 2, -2, 2 + 1/4, 4)."""
    assert patterns(VECTORS[0]["x_rot_bits"]).tolist() == [4, -2, 2.25, 4]
    # products of row and column: 4 (1/4 + 1/4), 2 1, 1/4 (4 + 1/64), (1/16 + 16) / 16
    assert VECTORS[0]["condition"] == pytest.approx(np.sqrt((2 + 2 + 1.00390625 + 1.00390625) / 4), rel=1e-15)


# Reading


def test_reads_what_the_manifest_says():
    plans = sample_plans()
    assert {place: plan.transform and plan.transform.kind for place, plan in plans.items()} == {
        (0, "k"): "klt",
        (0, "v"): "diagonal",
        (1, "k"): "mixed",
        (1, "v"): "balanced",
        (2, "k"): None,
        (2, "v"): "diagonal",
    }
    assert plans[1, "k"].transform.outlier_gain == (1.0, 1.0) and plans[1, "k"].transform.condition == (1.0, 1.0)
    assert (plans[0, "k"].tensors["inverse"] == TENSORS["layers.0.k.inverse"]).all()


def test_the_sample_is_what_the_schema_allows():
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(sample()[0], artifact_schema())


def test_the_largest_and_the_smallest_scale_are_read():
    tree, tensors = sample()
    tensors["layers.1.k.channel_scale"][0, :2] = 2.0**-24, 2.0**24
    plan = parse(build.to_bytes(tree, tensors)).layers[1].sides["k"]
    assert plan.inverse(0)[0, 0] == 2.0**24 and plan.matrix(0)[1, 1] == 2.0**24


# What is refused


def damaged(name, value, place=-1):
    array = TENSORS[name].copy()
    array.flat[place] = value
    return tensor(name, array)


def with_rotation(layer, side, rotation, *changes):
    return both(edit_layers(layer, side, "rotation", value=rotation), *changes)


EYE = np.tile(np.eye(DIM, dtype=np.float32), (KV_HEADS, 1, 1))
SCALE, INVERSE = "layers.1.k.channel_scale", "layers.0.k.inverse"
REFUSED = {
    # tensors
    "inverse missing": tensor(INVERSE),
    "inverse not announced": edit_layers(0, "k", "rotation", "inverse", value=False),
    "inverse of one head": tensor(INVERSE, TENSORS[INVERSE][:1].copy()),
    "inverse flat": tensor(INVERSE, TENSORS[INVERSE][:, 0].copy()),
    "inverse in float64": tensor(INVERSE, TENSORS[INVERSE].astype(np.float64)),
    "NaN in an inverse": damaged(INVERSE, np.nan),
    "Inf in an inverse": damaged(INVERSE, -np.inf, 0),
    "NaN in A": damaged("layers.0.k.rotation", np.nan),
    "inverse as a number": edit_layers(0, "k", "rotation", "inverse", value=1),
    "A missing": tensor("layers.0.k.rotation"),
    "scale missing": tensor(SCALE),
    "scale not announced": edit_layers(1, "k", "rotation", "channel_scale", value=...),
    "scale of one head": tensor(SCALE, TENSORS[SCALE][:1].copy()),
    "scale in float64": tensor(SCALE, TENSORS[SCALE].astype(np.float64)),
    "scale in int8": tensor(SCALE, TENSORS[SCALE].astype(np.int8)),
    "scale of nine bits": damaged(SCALE, 1.0 + 2.0**-8),
    "scale next to 2": damaged(SCALE, np.nextafter(np.float32(2), np.float32(3))),
    "scale of 0": damaged(SCALE, 0.0),
    "scale of -0": damaged(SCALE, -0.0),
    "scale of -2": damaged(SCALE, -2.0),
    "scale too large": damaged(SCALE, 2.0**25),
    "scale too small": damaged(SCALE, 2.0**-25),
    "scale subnormal": damaged(SCALE, 2.0**-149),
    "scale infinite": damaged(SCALE, np.inf),
    "scale NaN": damaged(SCALE, np.nan, 0),
    # what goes with what
    "scale of a dense A": with_rotation(
        0,
        "k",
        build.rotation("dense", channel_scale=True),
        tensor(INVERSE),
        tensor("layers.0.k.channel_scale", TENSORS[SCALE]),
    ),
    "scale and inverse of a dense A": with_rotation(
        0,
        "k",
        build.rotation("dense", inverse=True, channel_scale=True),
        tensor("layers.0.k.channel_scale", TENSORS[SCALE]),
    ),
    "inverse of an identity": with_rotation(
        1, "k", build.rotation("identity", inverse=True), tensor(SCALE), tensor("layers.1.k.inverse", EYE)
    ),
    "inverse of blocks": with_rotation(
        0,
        "v",
        build.rotation("block_hadamard", order=ORDER, inverse=True, signs=True, channel_scale=True),
        tensor("layers.0.v.inverse", EYE),
    ),
    "transform without tensors": edit_layers(2, "k", "transform", value=build.transform(KV_HEADS)["transform"]),
    "inverse without transform": edit_layers(0, "k", "transform", value=...),
    "scale without transform": edit_layers(1, "k", "transform", value=...),
    "transform of exact values": edit_layers(
        2,
        "v",
        value=build.exact_plan()
        | build.transform(1, "diagonal")
        | {"rotation": build.rotation("identity", "layer", channel_scale=True)},
    ),
    "transform with centroids": both(
        lambda tree, tensors: tree["requires"].append("centroids"),
        edit_layers(1, "k", "centroids", value=build.centroids(2, KV_HEADS)["centroids"]),
        tensor("layers.1.k.centroids", np.zeros((KV_HEADS, 2, DIM), np.float32)),
    ),
    # claims
    "transform as a word": edit_layers(0, "k", "transform", value="klt"),
    "transform null": edit_layers(0, "k", "transform", value=None),
    "unknown kind": edit_layers(0, "k", "transform", "kind", value="whitening"),
    "no kind": edit_layers(0, "k", "transform", "kind", value=...),
    "no gain": edit_layers(0, "k", "transform", "outlier_gain", value=...),
    "gain of one head": edit_layers(0, "k", "transform", "outlier_gain", value=[1.5]),
    "gain of three heads": edit_layers(0, "k", "transform", "outlier_gain", value=[1.5] * 3),
    "gain below 1": edit_layers(0, "k", "transform", "outlier_gain", value=[1.5, 0.999]),
    "gain as text": edit_layers(0, "k", "transform", "outlier_gain", value=[1.5, "2"]),
    "no condition": edit_layers(0, "k", "transform", "condition", value=...),
    "condition as a number": edit_layers(0, "k", "transform", "condition", value=2.0),
    "condition of one head": edit_layers(0, "k", "transform", "condition", value=[2.0]),
    "condition below 1": edit_layers(0, "k", "transform", "condition", value=[2.0, 0.5]),
    "condition above 4096": edit_layers(0, "k", "transform", "condition", value=[2.0, 4096.5]),
    "feature not listed": lambda tree, tensors: tree["requires"].remove("transform"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name):
    check_refused(*sample(), REFUSED[name])


@pytest.mark.parametrize("number", ["1e999", "NaN", "-Infinity"])
def test_refuses_a_gain_that_is_no_finite_number(number):
    tree, tensors = sample()
    tree["layers"][0]["k"]["transform"]["outlier_gain"] = [1.5, 77]
    text = build.canonical(tree).replace("[1.5,77]", f"[1.5,{number}]")
    with pytest.raises(KvqError) as error:
        parse(build.to_bytes(tree, tensors, **{"kvq.manifest": text}))
    assert error.value.exit_code == 3


def test_a_plan_without_transform_may_say_so_and_a_listed_feature_need_not_be_used():
    tree, tensors = sample()
    tree["layers"][2]["k"]["rotation"] |= {"inverse": False, "channel_scale": False}
    tree["layers"] = tree["layers"][2:]
    del tree["layers"][0]["v"]
    tensors = {name: array for name, array in tensors.items() if name.startswith("layers.2.k.")}
    tree["model"]["num_layers"] = 3
    assert parse(build.to_bytes(tree, tensors)).layers[2].sides["k"].transform is None


# What only --verify finds


def test_verify_passes(tmp_path, capsys):
    code, checks, _ = verify(tmp_path, capsys, *sample())
    assert code == 0
    assert all(checks[name]["passed"] for name in ("orthogonality", "inverses", "condition"))
    for plan in (plan for plan in sample_plans().values() if plan.transform):
        assert orthogonality_error(plan) == 0 and (inverse_error(plan) < 1e-6 * transform_condition(plan)).all()
        assert transform_condition(plan) == pytest.approx(plan.transform.condition, rel=1e-4)
        assert (transform_condition(plan) > 1.2).all() == ("inverse" in plan.tensors)


def test_orthogonal_artifacts_have_no_such_checks(tmp_path, capsys):
    tree = build.manifest([build.layer(0, build.geometry(Q_HEADS, KV_HEADS, DIM), *[build.exact_plan()] * 2)])
    code, checks, _ = verify(tmp_path, capsys, tree, {})
    assert code == 0 and not {"inverses", "condition"} & set(checks)


def test_verify_allows_a_larger_error_where_the_condition_is_larger(tmp_path, capsys):
    tree, tensors = sample()
    pairs = build.inverse_pair(5, KV_HEADS, DIM, 64.0)
    tensors |= {"layers.0.k.rotation": pairs[0], "layers.0.k.inverse": pairs[1]}
    tree["layers"][0]["k"]["transform"]["condition"] = pairs[2]
    code, _checks, _ = verify(tmp_path, capsys, tree, tensors)
    assert code == 0 and max(pairs[2]) > 100
    assert inverse_error(parse(build.to_bytes(tree, tensors)).layers[0].sides["k"]).max() > 1e-6


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a * np.float32(1.00001),
        lambda a: a.transpose(0, 2, 1).copy(),
        lambda a: a[::-1].copy(),
        lambda a: np.concatenate([a[:1], np.eye(DIM, dtype=np.float32)[None]]),
    ],
)
def test_verify_notices_a_wrong_inverse(tmp_path, capsys, change):
    tree, tensors = sample()
    tensors[INVERSE] = change(tensors[INVERSE])
    code, checks, err = verify(tmp_path, capsys, tree, tensors)
    assert code == 6 and checks["inverses"]["passed"] is False and "inverses" in err


def test_verify_notices_a_transpose_in_place_of_an_inverse(tmp_path, capsys):
    tree, tensors = sample()
    tensors["layers.1.v.inverse"] = tensors["layers.1.v.rotation"].transpose(0, 2, 1).copy()
    assert verify(tmp_path, capsys, tree, tensors)[1]["inverses"]["passed"] is False


@pytest.mark.parametrize("factor, passes", [(1.0005, True), (0.9995, True), (1.002, False), (0.998, False)])
def test_verify_notices_a_wrong_condition(tmp_path, capsys, factor, passes):
    tree, tensors = sample()
    tree["layers"][0]["k"]["transform"]["condition"][1] *= factor
    code, checks, err = verify(tmp_path, capsys, tree, tensors)
    assert (code, checks["condition"]["passed"]) == (0 if passes else 6, passes)
    assert passes or "layer 0 k head 1: expected" in err


def test_verify_notices_a_condition_of_a_diagonal_that_is_not_one(tmp_path, capsys):
    tree, tensors = sample()
    tree["layers"][1]["k"]["transform"]["condition"] = [1.0, 2.0]
    code, _, err = verify(tmp_path, capsys, tree, tensors)
    assert code == 6 and "layer 1 k head 1: expected 1, found 2" in err


def test_verify_notices_a_condition_beyond_the_limit(tmp_path, capsys):
    """A manifest may claim at most 4096: the claim is within its tolerance, but the condition itself is above 4096."""
    tree, tensors = sample()
    a, inverse = np.diag(np.ones(DIM)), np.diag(np.ones(DIM))
    gap = 4098.0 * np.sqrt(DIM)  # of one channel: |row 0 of A| = |column 1 of A^-1| = sqrt(1 + t^2)
    t = np.sqrt((gap**2 - DIM) / 2)
    a[0, 1], inverse[0, 1] = t, -t
    tensors |= {"layers.1.v.rotation": np.float32(a)[None], "layers.1.v.inverse": np.float32(inverse)[None]}
    tree["layers"][1]["v"]["transform"]["condition"] = [4096.0]
    code, checks, _ = verify(tmp_path, capsys, tree, tensors)
    assert code == 6 and checks["inverses"]["passed"] is True and checks["condition"]["passed"] is False
    assert "allowed 4096" in checks["condition"]["detail"]


# The program


def test_the_table_names_the_transform(tmp_path, capsys):
    (tmp_path / "a.safetensors").write_bytes(build.to_bytes(*sample()))
    code, out, _ = run(capsys, tmp_path / "a.safetensors")
    assert code == 0
    for words in ("dense klt", "block_hadamard 4 diagonal", "identity mixed", "dense balanced"):
        assert words in out
    document = json.loads(run(capsys, tmp_path / "a.safetensors", "--json")[1])
    assert document["layers"][0]["transform"] == sample()[0]["layers"][0]["k"]["transform"]
    assert "transform" not in document["layers"][4]


def test_encodes_rows_through_the_transform(tmp_path, capsys):
    (tmp_path / "a.safetensors").write_bytes(build.to_bytes(*sample()))
    x = np.random.default_rng(7).standard_normal((5, DIM)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    code, out, _ = run(
        capsys,
        tmp_path / "a.safetensors",
        "--encode-rows",
        tmp_path / "x.npy",
        "--layer",
        0,
        "--side",
        "k",
        "--head",
        1,
    )
    assert code == 0
    assert out.split() == [row.tobytes().hex() for row in sample_plans()[0, "k"].pack_rows(x, 1)]


def test_no_damaged_byte_leads_to_anything_but_an_error():
    content = build.to_bytes(*sample())
    rng = np.random.default_rng(12)
    for _ in range(400):
        copied = bytearray(content)
        copied[rng.integers(len(copied))] = rng.integers(256)
        try:
            parse(bytes(copied))
        except KvqError:
            pass
