"""The formats of kvq, written a second time in Python: a reader of artifacts, the codec of formats/packing.md in numpy
and in PyTorch, and writers of dumps. It shares no code with the C++ library, so that they can check each other.

    artifact = kvq.load_artifact("out.safetensors")
    packed = artifact.layers[3].sides["k"].pack_rows(rows, kv_head=0)

`__all__` is the public face; the modules behind it may change with any version. A name is imported when it is used
first, because --help of the programs needs no numpy.
"""

from importlib import import_module

__version__ = "0.2.0"

_HOME = {
    "Artifact": "artifact",
    "CodedRows": "packing",
    "GoldenRows": "artifact",
    "KvqError": "errors",
    "LayerPlan": "artifact",
    "MixedScheme": "scheme",
    "Scheme": "scheme",
    "SidePlan": "artifact",
    "content_hash": "artifact",
    "decode": "packing",
    "encode": "packing",
    "fake_quantize": "packing",
    "golden_fault": "golden_rows",
    "hadamard": "artifact",
    "load_artifact": "artifact_reader",
    "model_fingerprint": "fingerprint",
    "pack": "packing",
    "unpack": "packing",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'kvq' has no attribute '{name}'")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
