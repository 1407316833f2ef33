"""Artifacts with codebooks, trellises, mixed widths and centroids: reading them, refusing what does not fit, and coding
rows through a whole plan."""

import json

import artifact_builder as build
import numpy as np
import pytest
from artifact_edits import both, check_refused, edit_layers, parse, run, tensor

from kvq import packing
from kvq.artifact_reader import artifact_schema
from kvq.errors import KvqError
from kvq.scheme import MixedScheme, Scheme, Tables

DIM, KV_HEADS, Q_HEADS = 20, 2, 4
FEATURES = ("codebook", "trellis", "mixed_widths", "centroids")
WIDTHS = np.array([[4] * 2 + [2] * 8 + [1] * 8 + [0] * 2, [2] * 10 + [1] * 10], np.uint8)
ROW_BYTES = 12  # head 0: 1 + 2 + 1 bytes of codes, 3 scales; head 1: 3 + 2 bytes of codes, 1 of padding, 2 scales


def gaussian(seed: int, *shape) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def sample() -> tuple[dict, dict[str, np.ndarray]]:
    """Every feature: (manifest, tensors).

    0 k: trellis, mixed by RoPE block, per head    0 v: codebook per head, centroids per head
    1 k: codebook, mixed, shared, centroids joint  1 v: trellis in groups of 10
    2 k: symmetric, mixed, center                  2 v: affine, 300 centroids, joint
    """
    shape = build.geometry(Q_HEADS, KV_HEADS, DIM)
    dense, shared = build.rotation("dense"), build.rotation("dense", "layer")
    both = build.trellis_plan(
        4, DIM, 1, "rms", rotation=dense, trellis=[{"bits": 1, "memory": 3}, {"bits": 2, "memory": 2}]
    )
    books = {"bits": [1, 2, 4], "per_head": False, "source": "sphere"}
    tree = build.manifest(
        [
            build.layer(
                0,
                shape,
                build.mixed(both, WIDTHS, ROW_BYTES, "rope_block"),
                build.codebook_plan(2, 10, "norm", True, **build.centroids(3, KV_HEADS)),
            ),
            build.layer(
                1,
                shape,
                build.mixed(
                    build.codebook_plan(4, DIM, rotation=shared, codebooks=books, **build.centroids(5, 1, "joint")),
                    WIDTHS[:1],
                    ROW_BYTES,
                ),
                build.trellis_plan(1, 10, 2, "least_squares", scale_type="bf16"),
            ),
            build.layer(
                2,
                shape,
                build.mixed(build.symmetric_plan(4, DIM, "absmax", center=True), WIDTHS, ROW_BYTES),
                build.affine_plan(3, DIM, KV_HEADS, **build.centroids(300, KV_HEADS, "joint")),
            ),
        ],
        requires=FEATURES,
    )
    return tree, {
        "layers.0.k.rotation": build.orthogonal(1, KV_HEADS, DIM),
        "layers.0.k.channel_bits": WIDTHS,
        "layers.0.k.channel_order": np.tile(np.arange(DIM, dtype=np.uint16).reshape(2, -1).T.ravel(), (KV_HEADS, 1)),
        "layers.0.k.block_bits": np.ascontiguousarray(WIDTHS[:, ::2]),
        "layers.0.k.block_energy": np.abs(gaussian(3, KV_HEADS, DIM // 2)),
        "layers.0.k.trellis": gaussian(4, 1 * 4 + 2 * 3),
        "layers.0.v.codebook.2": np.sort(gaussian(5, KV_HEADS, 4)),
        "layers.0.v.centroids": gaussian(6, KV_HEADS, 3, DIM),
        "layers.1.k.rotation": build.orthogonal(7, 1, DIM),
        "layers.1.k.channel_bits": WIDTHS[:1].copy(),
        "layers.1.k.channel_order": build.sources(8, WIDTHS[:1]),
        "layers.1.k.centroids": gaussian(9, 1, 5, DIM),
        **{f"layers.1.k.codebook.{bits}": np.sort(gaussian(bits, 2**bits)) for bits in (1, 2, 4)},
        "layers.1.v.trellis": gaussian(10, 3),
        "layers.2.k.channel_bits": WIDTHS.copy(),
        "layers.2.k.channel_order": build.sources(11, WIDTHS),
        "layers.2.k.center": gaussian(12, KV_HEADS, DIM),
        "layers.2.v.centroids": gaussian(13, KV_HEADS, 300, DIM),
    }


def sample_plans() -> dict:
    artifact = parse(build.to_bytes(*sample()))
    return {(layer, side): plan for layer, entry in artifact.layers.items() for side, plan in entry.sides.items()}


def write(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(build.to_bytes(*sample()))
    return path


# Reading


def test_reads_every_feature():
    plans, tensors = sample_plans(), sample()[1]
    k = plans[0, "k"]
    assert [scheme.widths for scheme in k.schemes] == [tuple(row) for row in WIDTHS.tolist()]
    assert k.row_bytes == ROW_BYTES and k.scheme_of(1).row_bytes(DIM) == ROW_BYTES
    theta = tensors["layers.0.k.trellis"].tolist()
    assert [(p.scheme.coder, p.scheme.memory, p.scheme.theta) for p in k.scheme_of(0).parts] == [
        ("symmetric", 0, ()),
        ("trellis", 2, tuple(theta[4:])),
        ("trellis", 3, tuple(theta[:4])),
    ]
    for head in range(KV_HEADS):
        assert plans[0, "v"].scheme_of(head).codebook == tuple(tensors["layers.0.v.codebook.2"][head].tolist())
        assert plans[1, "k"].scheme_of(head) is plans[1, "k"].schemes[0]
    assert [p.scheme.codebook for p in plans[1, "k"].scheme.parts] == [
        tuple(tensors[f"layers.1.k.codebook.{bits}"].tolist()) for bits in (4, 2, 1)
    ]
    assert plans[1, "v"].scheme.theta == tuple(tensors["layers.1.v.trellis"].tolist())
    assert {place: plan.centroid_scope for place, plan in plans.items() if plan.centroid_scope} == {
        (0, "v"): "kv_head",
        (1, "k"): "joint",
        (2, "v"): "joint",
    }
    assert plans[0, "v"].row_bytes == 5 + 2 * 2 + 1
    assert plans[2, "v"].row_bytes == 8 + 2 * 2 + 2


def test_a_feature_may_be_listed_without_use():
    shape = build.geometry(Q_HEADS, KV_HEADS, DIM)
    tree = build.manifest([build.layer(0, shape, build.exact_plan(), build.exact_plan())], requires=FEATURES)
    assert parse(build.to_bytes(tree)).layers


def test_a_soft_cap_is_read_only_if_it_is_listed():
    shape = {**build.geometry(Q_HEADS, KV_HEADS, DIM), "logit_softcapping": 30.0, "sink_logits": [0.5] * Q_HEADS}
    layer = build.layer(0, shape, build.exact_plan(), build.exact_plan())
    assert parse(build.to_bytes(build.manifest([layer], requires=["logit_softcapping"]))).layers
    with pytest.raises(KvqError, match="'logit_softcapping', which requires does not list"):
        parse(build.to_bytes(build.manifest([layer], requires=[])))
    for name, value in {"logit_softcapping": 0, "sink_logits": [0.5]}.items():
        wrong = build.layer(0, {**shape, name: value}, build.exact_plan(), build.exact_plan())
        with pytest.raises(KvqError, match=name):
            parse(build.to_bytes(build.manifest([wrong], requires=["logit_softcapping"])))


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_that_is_not_listed_is_refused(feature):
    tree, tensors = sample()
    tree["requires"] = [word for word in FEATURES if word != feature]
    with pytest.raises(KvqError, match=f"'{feature}', which requires does not list") as error:
        parse(build.to_bytes(tree, tensors))
    assert error.value.exit_code == 3


def test_the_sample_is_what_the_schema_allows():
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(sample()[0], artifact_schema())


# What is refused


def damaged(name, value, place=-1):
    array = TENSORS[name].copy()
    array.flat[place] = value
    return tensor(name, array)


TENSORS = sample()[1]


def mixed_values(unit, *more):
    """Layer 2 with mixed values, whose tensors are those of the keys of layer 0."""
    names = ("channel_bits", "channel_order", *more)
    return both(
        edit_layers(2, "v", value=build.mixed(build.symmetric_plan(4, DIM), WIDTHS, ROW_BYTES, unit)),
        tensor("layers.2.v.centroids"),
        *(tensor(f"layers.2.v.{name}", TENSORS[f"layers.0.k.{name}"]) for name in names),
    )


K0, V0, K1, V1, K2, V2 = ((layer, side) for layer in range(3) for side in "kv")
MIXED_AFFINE = build.mixed(build.affine_plan(4, DIM, KV_HEADS), WIDTHS, ROW_BYTES)
REFUSED = {
    # mixed widths
    "width of 9": damaged("layers.0.k.channel_bits", 9, 0),
    "widths ascend": damaged("layers.0.k.channel_bits", 2),
    "widths in int8": tensor("layers.0.k.channel_bits", WIDTHS.astype(np.int8)),
    "widths of one head": tensor("layers.0.k.channel_bits", WIDTHS[:1].copy()),
    "no widths": tensor("layers.0.k.channel_bits"),
    "widths without allocation": tensor("layers.1.v.channel_bits", WIDTHS),
    "no channel order": tensor("layers.0.k.channel_order"),
    "channel order twice the same": damaged("layers.0.k.channel_order", TENSORS["layers.0.k.channel_order"][1, 0]),
    "channel order out of range": damaged("layers.0.k.channel_order", DIM),
    "channel order in uint8": tensor("layers.0.k.channel_order", TENSORS["layers.0.k.channel_order"].astype(np.uint8)),
    "bits above the widths": edit_layers(*K0, "bits", value=5),
    "bits below the widths": edit_layers(*K0, "bits", value=3),
    "group size of mixed rows": edit_layers(*K0, "group_size", value=DIM),
    "no group size and no allocation": edit_layers(*V1, "group_size", value=...),
    "no allocation": edit_layers(*K0, "allocation", value=...),
    "mixed affine": edit_layers(*K0, value=MIXED_AFFINE),
    "mixed exact": edit_layers(*V1, value=build.exact_plan() | {"allocation": MIXED_AFFINE["allocation"]}),
    "group size of exact": edit_layers(*V1, value=build.exact_plan() | {"group_size": DIM}),
    "minmax of mixed rows": edit_layers(*K2, "scale_rule", value="minmax"),
    "clip ratio of mixed rows": edit_layers(*K2, "clip_ratio", value=[1.0, 1.0]),
    "rows too small": edit_layers(*K0, "allocation", "row_bytes", value=8),
    "rows too large": edit_layers(*K0, "allocation", "row_bytes", value=16),
    "no row size": edit_layers(*K0, "allocation", "row_bytes", value=...),
    "unknown unit": edit_layers(*K0, "allocation", "unit", value="block"),
    "score as a number": edit_layers(*K0, "allocation", "score", value=1),
    "mean bits above 8": edit_layers(*K0, "allocation", "mean_bits", value=9),
    "no objective": edit_layers(*K0, "allocation", "objective", value=...),
    "block bits of 9": damaged("layers.0.k.block_bits", 9),
    "no block bits": tensor("layers.0.k.block_bits"),
    "block bits of channels": tensor("layers.0.k.block_bits", WIDTHS),
    "block bits without blocks": edit_layers(*K0, "allocation", "unit", value="channel"),
    "negative block energy": damaged("layers.0.k.block_energy", -1),
    "infinite block energy": damaged("layers.0.k.block_energy", np.inf),
    "no block energy": tensor("layers.0.k.block_energy"),
    "blocks of values": mixed_values("rope_block", "block_bits", "block_energy"),
    "blocks of values without tensors": mixed_values("rope_block"),
    # codebooks
    "no codebooks": edit_layers(*V0, "codebooks", value=...),
    "codebooks of another coder": edit_layers(
        *V1, "codebooks", value={"bits": [1], "per_head": False, "source": "sphere"}
    ),
    "codebook missing": tensor("layers.0.v.codebook.2"),
    "codebook of a width without one": both(
        edit_layers(*K1, "codebooks", "bits", value=[1, 4]), tensor("layers.1.k.codebook.2")
    ),
    "codebook of no uniform width": both(
        edit_layers(*V0, "codebooks", "bits", value=[1]),
        tensor("layers.0.v.codebook.2"),
        tensor("layers.0.v.codebook.1", np.sort(gaussian(1, KV_HEADS, 2))),
    ),
    "codebook not announced": tensor("layers.0.v.codebook.3", np.sort(gaussian(1, KV_HEADS, 8))),
    "codebook width twice": edit_layers(*K1, "codebooks", "bits", value=[1, 2, 4, 4]),
    "codebook width 9": edit_layers(*K1, "codebooks", "bits", value=[1, 2, 9]),
    "codebooks of no width": edit_layers(*V0, "codebooks", "bits", value=[]),
    "codebook of all heads per head": edit_layers(*V0, "codebooks", "per_head", value=False),
    "codebook per head of all heads": edit_layers(*K1, "codebooks", "per_head", value=True),
    "unknown source": edit_layers(*V0, "codebooks", "source", value="guessed"),
    "codebook with equal entries": damaged("layers.0.v.codebook.2", TENSORS["layers.0.v.codebook.2"][1, 2]),
    "codebook descends": tensor("layers.0.v.codebook.2", TENSORS["layers.0.v.codebook.2"][:, ::-1].copy()),
    "codebook with NaN": damaged("layers.0.v.codebook.2", np.nan),
    "codebook in float64": tensor("layers.0.v.codebook.2", TENSORS["layers.0.v.codebook.2"].astype(np.float64)),
    "absmax of a codebook": edit_layers(*V0, "scale_rule", value="absmax"),
    "zero scale rule": edit_layers(*V0, "scale_rule", value=...),
    # trellises
    "no trellis": edit_layers(*V1, "trellis", value=...),
    "trellis of another coder": edit_layers(*V0, "trellis", value=[{"bits": 1, "memory": 2}]),
    "no theta": tensor("layers.1.v.trellis"),
    "theta too long": tensor("layers.1.v.trellis", gaussian(1, 4)),
    "theta by rows": tensor("layers.1.v.trellis", gaussian(1, 1, 3)),
    "theta infinite": damaged("layers.1.v.trellis", np.inf),
    "trellis without memory": edit_layers(*V1, "trellis", 0, "memory", value=0),
    "trellis with 9 bits of state": both(
        edit_layers(*V1, "trellis", 0, value={"bits": 3, "memory": 3}),
        edit_layers(*V1, "bits", value=3),
        tensor("layers.1.v.trellis", gaussian(1, 12)),
    ),
    "trellis of memory 9": both(
        edit_layers(*V1, "trellis", 0, "memory", value=9), tensor("layers.1.v.trellis", gaussian(1, 10))
    ),
    "trellis of another width": both(
        edit_layers(*V1, "trellis", 0, "bits", value=2), tensor("layers.1.v.trellis", gaussian(1, 6))
    ),
    "trellis twice": both(
        edit_layers(*V1, "trellis", value=[{"bits": 1, "memory": 2}] * 2), tensor("layers.1.v.trellis", gaussian(1, 6))
    ),
    "empty trellis": both(edit_layers(*V1, "trellis", value=[]), tensor("layers.1.v.trellis", gaussian(1, 0))),
    "rms of symmetric codes": edit_layers(*K2, "scale_rule", value="rms"),
    # centroids
    "center and centroids": both(
        edit_layers(*V0, "center", value=True), tensor("layers.0.v.center", gaussian(1, KV_HEADS, DIM))
    ),
    "one centroid": both(
        edit_layers(*V0, "centroids", "count", value=1), tensor("layers.0.v.centroids", gaussian(1, KV_HEADS, 1, DIM))
    ),
    "4097 centroids": both(
        edit_layers(*V0, "centroids", "count", value=4097),
        tensor("layers.0.v.centroids", gaussian(1, KV_HEADS, 4097, DIM)),
    ),
    "another count": edit_layers(*V0, "centroids", "count", value=4),
    "no centroids": tensor("layers.0.v.centroids"),
    "centroids not announced": edit_layers(*V0, "centroids", value=...),
    "centroids infinite": damaged("layers.0.v.centroids", np.inf),
    "unknown centroid scope": edit_layers(*V0, "centroids", "scope", value="layer"),
    "unknown centroid order": edit_layers(*V0, "centroids", "order", value="during"),
    "inertia of another number of heads": edit_layers(*V0, "centroids", "inertia", value=[0.5]),
    "negative inertia": edit_layers(*V0, "centroids", "inertia", value=[0.5, -0.5]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name):
    check_refused(*sample(), REFUSED[name])


def test_values_are_mixed_by_channel_only():
    tree, tensors = sample()
    mixed_values("channel")(tree, tensors)
    assert parse(build.to_bytes(tree, tensors)).layers[2].sides["v"].row_bytes == ROW_BYTES
    tree, tensors = sample()
    mixed_values("rope_block", "block_bits", "block_energy")(tree, tensors)
    with pytest.raises(KvqError, match="unit"):
        parse(build.to_bytes(tree, tensors))


def test_no_damaged_byte_leads_to_anything_but_an_error():
    content, rng = build.to_bytes(*sample()), np.random.default_rng(12)
    for _ in range(300):
        copied = bytearray(content)
        copied[rng.integers(len(copied))] = rng.integers(256)
        try:
            parse(bytes(copied))
        except KvqError:
            pass


# Coding rows


def test_rows_are_coded_as_the_formula_says():
    plans, tensors = sample_plans(), sample()[1]
    x = gaussian(20, KV_HEADS, 11, DIM)
    theta = tensors["layers.0.k.trellis"].tolist()
    tables = Tables(trellises={2: (2, tuple(theta[4:])), 1: (3, tuple(theta[:4]))})
    for head in range(KV_HEADS):
        own = MixedScheme.make("trellis", tuple(WIDTHS[head].tolist()), "fp16", "rms", tables)
        rotation = tensors["layers.0.k.rotation"][head].astype(np.float64)
        coded = packing.encode((x[head].astype(np.float64) @ rotation).astype(np.float32), own)
        packed = plans[0, "k"].pack_rows(x[head], head)
        assert packed.shape == (11, ROW_BYTES)
        assert (packed[:, : own.needed_bytes()] == packing.pack(coded, own)[:, : own.needed_bytes()]).all()
        assert not packed[:, own.needed_bytes() :].any()


def test_short_groups_of_a_trellis_are_symmetric():
    tree, tensors = sample()
    edit_layers(*V1, "group_size", value=5)(tree, tensors)
    plan, x = parse(build.to_bytes(tree, tensors)).layers[1].sides["v"], gaussian(27, 11, DIM)
    symmetric = Scheme("symmetric", 1, 5, "bf16", "least_squares")
    assert (plan.scheme.coder, plan.scheme.group_size) == ("trellis", 5)
    assert (plan.pack_rows(x, 0) == packing.pack(packing.encode(x, symmetric), symmetric)).all()
    assert (plan.reconstruct(x, 0) == packing.fake_quantize(x, symmetric)).all()


def test_residuals_come_back_with_their_centroid():
    plan, tensors = sample_plans()[0, "v"], sample()[1]
    x = gaussian(21, KV_HEADS, 40, DIM)
    for head, centroids in enumerate(tensors["layers.0.v.centroids"]):
        coded = plan.encode_rows(x[head], head)
        expected = ((x[head][:, None].astype(np.float64) - centroids) ** 2).sum(2).argmin(1)
        assert (coded.index == expected).all()
        residual = x[head] - centroids[expected]
        restored = packing.fake_quantize(residual, plan.scheme_of(head)).astype(np.float64) + centroids[expected]
        assert (plan.reconstruct(x[head], head) == restored.astype(np.float32)).all()
        assert (plan.pack_rows(x[head], head)[:, -1] == expected).all()


@pytest.mark.parametrize("place", [(1, "k"), (2, "v")])
def test_joint_centroids_are_those_of_the_token(place):
    plan = sample_plans()[place]
    x = gaussian(22, KV_HEADS, 30, DIM)
    entries = np.stack([plan.centroids(head) for head in range(KV_HEADS)])
    expected = ((x[:, :, None].astype(np.float64) - entries[:, None]) ** 2).sum((0, 3)).argmin(1)
    assert len(set(expected)) > 3
    for coded in plan.encode_heads(x):
        assert (coded.index == expected).all()
    packed = plan.pack_heads(x)
    if place == (2, "v"):
        assert (np.ascontiguousarray(packed[:, :, -2:]).view("<u2")[..., 0] == expected).all()
    assert packed.shape == (KV_HEADS, 30, plan.row_bytes)
    for alone in (plan.encode_rows, plan.pack_rows, plan.reconstruct):
        with pytest.raises(KvqError, match="joint"):
            alone(x[0], 0)


@pytest.mark.parametrize("place", [(0, "k"), (0, "v"), (1, "v"), (2, "k")])
def test_all_heads_at_once_are_each_head(place):
    plan, x = sample_plans()[place], gaussian(23, KV_HEADS, 9, DIM)
    assert (plan.pack_heads(x) == np.stack([plan.pack_rows(rows, head) for head, rows in enumerate(x)])).all()
    assert (plan.reconstruct_heads(x) == np.stack([plan.reconstruct(rows, head) for head, rows in enumerate(x)])).all()


def test_torch_reconstructs_what_numpy_does():
    torch = pytest.importorskip("torch")
    from kvq.coded_attention import reconstruct, unrounded

    x = gaussian(24, KV_HEADS, 70, DIM)
    for place, plan in sample_plans().items():
        for own in (plan, unrounded(plan)):
            found = reconstruct(own, torch.from_numpy(x)).numpy()
            # Products with the rotation may be summed in another order, in binary64, so nearly all roundings agree.
            assert np.mean(np.abs(found - own.reconstruct_heads(x)) > 1e-5) < 0.01, place


# The program


def test_prints_mixed_plans(tmp_path, capsys):
    code, out, err = run(capsys, write(tmp_path), "--verify")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["0", "k", "trellis", "1m3", "2m2", "1.55", "mixed", "fp16", "rms", "12", "-", "no"] in [
        line[:12] for line in lines
    ]
    assert ["1", "k", "codebook", "1.60", "mixed", "fp16", "norm", "12", "-", "5", "joint"] in [
        line[:11] for line in lines
    ]
    assert "0 k by rope_block  4: 5.0%, 2: 45.0%, 1: 45.0%, 0: 5.0%" in out
    assert "2 k by channel  " in out


def test_json_has_the_same(tmp_path, capsys):
    code, out, _ = run(capsys, write(tmp_path), "--json")
    rows = {(row["layer"], row["side"]): row for row in json.loads(out)["layers"]}
    assert code == 0
    assert rows[0, "k"]["widths"] == {"4": 2, "2": 18, "1": 18, "0": 2}
    assert (rows[0, "k"]["mean_bits"], rows[0, "k"]["row_bytes"]) == (62 / 40, ROW_BYTES)
    assert (rows[0, "k"]["unit"], rows[0, "k"]["bits"]) == ("rope_block", 4)
    assert "group_size" not in rows[0, "k"] and rows[1, "v"]["group_size"] == 10
    assert rows[1, "v"]["trellis"] == [{"bits": 1, "memory": 2}]
    assert rows[2, "v"]["centroids"] == {"count": 300, "scope": "joint"}
    assert rows[0, "v"]["codebooks"]["bits"] == [2]


def test_encodes_rows_of_all_heads(tmp_path, capsys):
    path, x = write(tmp_path), gaussian(25, KV_HEADS, 6, DIM)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "one.npy", x[1])
    arguments = (path, "--layer", 1, "--side", "k", "--head", 1, "--encode-rows")
    code, out, _ = run(capsys, *arguments, tmp_path / "x.npy")
    assert code == 0
    assert out.split() == [row.tobytes().hex() for row in sample_plans()[1, "k"].pack_heads(x)[1]]
    code, out, err = run(capsys, *arguments, tmp_path / "one.npy")
    assert (code, out) == (2, "") and "joint" in err
    np.save(tmp_path / "three.npy", gaussian(26, 3, 6, DIM))
    assert run(capsys, *arguments, tmp_path / "three.npy")[0] == 3
