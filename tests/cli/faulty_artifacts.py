"""Artifacts with one fault each, by name, made from the bytes of a sound one."""

import json
from collections.abc import Callable

import numpy as np
import xxhash  # noqa: F401, content_hash() does without; here it has to be there

from kvq.artifact import content_hash
from kvq.safetensors_file import SafetensorsFile

ROTATION = "layers.1.v.rotation"


def data_start(content: bytes) -> int:
    return 8 + int.from_bytes(content[:8], "little")


def with_metadata(content: bytes, **changes: str) -> bytes:
    """The file with changed words in `__metadata__`."""
    start = data_start(content)
    header = json.loads(content[8:start])
    header["__metadata__"] |= {key.replace("__", "."): value for key, value in changes.items()}
    text = json.dumps(header, separators=(",", ":"), sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[start:]


def edit_rotation(content: bytes, edit: Callable[[np.ndarray], None]) -> bytes:
    """Applies `edit` to one rotation [2, 32, 32]; the content hash stays as it was."""
    copy = bytearray(content)
    place = data_start(content) + SafetensorsFile(content, "artifact").tensors[ROTATION].begin
    edit(np.frombuffer(copy, "<f4", 2 * 32 * 32, place).reshape(2, 32, 32))
    return bytes(copy)


def flip_last_bit(rotation: np.ndarray) -> None:
    rotation.view(np.uint32)[1, 2, 3] ^= 1


def stretch(rotation: np.ndarray) -> None:
    rotation[1] *= np.float32(1.00001)


def put_nan(rotation: np.ndarray) -> None:
    rotation[1, 2, 3] = np.nan


def hashed(content: bytes) -> bytes:
    """The file with its right content hash, so that only other checks can find the fault."""
    return with_metadata(content, kvq__content_hash=content_hash(SafetensorsFile(content, "artifact")))


# An artifact of 1.3, made from an artifact of an orthogonal method, and faults of transforms

A, INVERSE, SCALE = "layers.1.v.rotation", "layers.1.v.inverse", "layers.0.v.channel_scale"
# All numbers are exact in binary32, so that no check depends on the machine. The condition of each block of 4 is from a
# hand calculation.
BLOCK = [[2, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0.5, 0], [0, 0, 0.25, 4]]
BLOCK_INVERSE = [[0.5, 0, 0, 0], [-0.5, 1, 0, 0], [0, 0, 2, 0], [0, 0, -0.125, 0.25]]
CONDITION = (6.0078125 / 4) ** 0.5

Tree = dict
Tensors = dict[str, np.ndarray]
Fault = Callable[[Tree, Tensors], None]


def with_transforms(content: bytes) -> tuple[Tree, Tensors]:
    """(manifest, tensors): the values of layer 1 have a dense map, the values of layer 0 channel scales; no golden
    rows."""
    file = SafetensorsFile(content, "artifact")
    tree = json.loads(file.metadata["kvq.manifest"])
    tensors = {
        name: file.array(name)
        for name in file.tensors
        if ".golden." not in name and not name.startswith(("layers.0.v.", "layers.1.v."))
    }
    for layer in tree["layers"]:
        layer.pop("golden", None)
    kinds = ({"kind": "identity", "channel_scale": True}, {"kind": "dense", "inverse": True})
    for layer, kind, condition in zip(tree["layers"], kinds, (1.0, CONDITION)):
        layer["v"] |= {
            "center": False,
            "rotation": kind | {"scope": "kv_head", "recipe": "B", "signs": False, "eigenbasis": False},
            "transform": {"kind": "balanced", "outlier_gain": [1.5, 2.0], "condition": [condition] * 2},
        }
    tensors[SCALE] = np.exp2(np.arange(64) % 5 - 2).astype(np.float32).reshape(2, 32)
    tensors[A], tensors[INVERSE] = (
        np.kron(np.eye(8), block).astype(np.float32)[None].repeat(2, axis=0) for block in (BLOCK, BLOCK_INVERSE)
    )
    tree |= {"version": "1.3", "requires": ["transform"]}
    return tree, tensors


def written(tree: Tree, tensors: Tensors) -> bytes:
    """The file, with the right content hash."""
    metadata = {
        "format": "kvq-artifact",
        "version": tree["version"],
        "requires": ",".join(tree["requires"]),
        "kvq.manifest": json.dumps(tree, sort_keys=True, separators=(",", ":")),
    }
    dtypes = {"float32": "F32", "float64": "F64", "int8": "I8"}
    header, data = {"__metadata__": metadata}, b""
    for name in sorted(tensors):
        raw = tensors[name].tobytes()
        header[name] = {
            "dtype": dtypes[tensors[name].dtype.name],
            "shape": list(tensors[name].shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return hashed(len(text).to_bytes(8, "little") + text + data)


def plan(tree: Tree, layer: int, side: str = "v") -> Tree:
    return tree["layers"][layer][side]


def put(name: str, value: float) -> Fault:
    """Changes one number of a tensor."""

    def apply(tree, tensors):
        tensors[name] = tensors[name].copy()
        tensors[name].flat[37] = value

    return apply


def change(name: str, function: Callable[[np.ndarray], np.ndarray]) -> Fault:
    def apply(tree, tensors):
        tensors[name] = np.ascontiguousarray(function(tensors[name]))

    return apply


def drop(name: str) -> Fault:
    return lambda tree, tensors: tensors.pop(name)


def claim(**values: object) -> Fault:
    return lambda tree, tensors: plan(tree, 1)["transform"].update(values)


def set_rotation(layer: int, **values: object) -> Fault:
    return lambda tree, tensors: plan(tree, layer)["rotation"].update(values)


def move(old: str, new: str) -> Fault:
    def apply(tree, tensors):
        tensors[new] = tensors.pop(old)

    return apply


def in_turn(*faults: Fault) -> Fault:
    def apply(tree, tensors):
        for fault in faults:
            fault(tree, tensors)

    return apply


def exact_values(tree: Tree, tensors: Tensors) -> None:
    own = plan(tree, 0)
    tree["layers"][0]["v"] = {
        "coder": "exact",
        "bits": 16,
        "center": False,
        "rotation": own["rotation"],
        "transform": own["transform"],
    }


def some_centroids(tree: Tree, tensors: Tensors) -> None:
    tree["requires"] = ["centroids", "transform"]
    plan(tree, 0)["centroids"] = {"count": 2, "scope": "kv_head", "order": "before", "inertia": [0.5, 0.5]}
    tensors["layers.0.v.centroids"] = np.zeros((2, 2, 32), np.float32)


def beyond_the_limit(tree: Tree, tensors: Tensors) -> None:
    """A true inverse with a condition of 4098.4. The manifest claims 4096, the largest allowed number, which is within
    its tolerance."""
    shear = 11592.0
    tensors[A][0, 1, 5] = shear
    tensors[INVERSE][0, 1, 4:6] = 0.5 * shear, -shear
    plan(tree, 1)["transform"]["condition"][0] = 4096


# Faults that a reader refuses.
TRANSFORM_FAULTS: dict[str, Fault] = {
    "no_inverse": drop(INVERSE),
    "inverse_unannounced": set_rotation(1, inverse=False),
    "inverse_shape": change(INVERSE, lambda x: x[:1]),
    "inverse_double": change(INVERSE, np.float64),
    "inverse_nan": put(INVERSE, np.nan),
    "inverse_inf": put(INVERSE, np.inf),
    "no_scale": drop(SCALE),
    "scale_shape": change(SCALE, lambda x: x[:, :31]),
    "scale_fine": put(SCALE, 1.0 + 2.0**-8),  # needs one bit more than bfloat16 has
    "scale_0": put(SCALE, 0.0),
    "scale_negative": put(SCALE, -2.0),
    "scale_large": put(SCALE, 2.0**25),
    "scale_small": put(SCALE, 2.0**-25),
    "scale_nan": put(SCALE, np.nan),
    "scale_of_dense": in_turn(
        set_rotation(1, channel_scale=True, inverse=False),
        drop(INVERSE),
        move(SCALE, "layers.1.v.channel_scale"),
        set_rotation(0, channel_scale=False),
        lambda tree, tensors: plan(tree, 0).pop("transform"),
    ),
    "inverse_of_identity": in_turn(
        set_rotation(0, inverse=True, channel_scale=False),
        drop(SCALE),
        lambda tree, tensors: tensors.update({"layers.0.v.inverse": tensors[INVERSE]}),
    ),
    "without_tensors": lambda tree, tensors: plan(tree, 0, "k").update(transform=plan(tree, 0)["transform"]),
    "no_claims": lambda tree, tensors: plan(tree, 1).pop("transform"),
    "unlisted": lambda tree, tensors: tree.update(requires=[]),
    "of_exact": exact_values,
    "with_centroids": some_centroids,
    "kind": claim(kind="whitening"),
    "gain_small": claim(outlier_gain=[1.5, 0.99]),
    "gain_one": claim(outlier_gain=[1.5]),
    "condition_one": claim(condition=[CONDITION]),
    "condition_small": claim(condition=[CONDITION, 0.5]),
    "condition_large": claim(condition=[CONDITION, 4097]),
}

# Faults that only --verify finds.
TRANSFORM_FAULTS_TO_VERIFY: dict[str, Fault] = {
    "inverse_off": put(INVERSE, 0.0001),
    "inverse_transposed": change(INVERSE, lambda x: x.transpose(0, 2, 1)),
    "condition_off": claim(condition=[CONDITION, 1.002 * CONDITION]),
    "condition_beyond": beyond_the_limit,
}


def transform_artifacts(content: bytes) -> dict[str, bytes]:
    files = {"sound": written(*with_transforms(content))}
    for name, fault in (TRANSFORM_FAULTS | TRANSFORM_FAULTS_TO_VERIFY).items():
        tree, tensors = with_transforms(content)
        fault(tree, tensors)
        files[name] = written(tree, tensors)
    return {f"transform_{name}": file for name, file in files.items()}


def faulty_artifacts(content: bytes) -> dict[str, bytes]:
    return {
        "cut_1": content[: len(content) // 100],
        "cut_50": content[: len(content) // 2],
        "cut_last": content[:-1],
        "flipped": edit_rotation(content, flip_last_bit),
        "stretched": hashed(edit_rotation(content, stretch)),
        "nan": hashed(edit_rotation(content, put_nan)),
        "version_2": with_metadata(content, version="2.0"),
        "requires": with_metadata(content, requires="telepathy"),
        "other_format": with_metadata(content, format="kvq-artefact"),
        "no_manifest": with_metadata(content, kvq__manifest="{}"),
        **transform_artifacts(content),
    }
