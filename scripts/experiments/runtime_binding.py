"""libkvq_runtime through ctypes: the structures and calls of lib/kvq/runtime.h that packed_perplexity.py needs.

Structures have the names and fields of the header; tests/python/test_packed_perplexity.py compares their layout with
it. Device memory is the caller's: calls take addresses.
"""

import ctypes
import os
import sys
from ctypes import POINTER, c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

from kvq.errors import EXIT_BUG, EXIT_INPUT, EXIT_UNSUPPORTED, KvqError, one_line, unsupported  # noqa: E402

FILE, MAJOR = "libkvq_runtime.so", 3
OK, UNSUPPORTED, MISMATCH, IO = 0, 2, 3, 4  # kvq_status
DECODE, WRITE, PREFILL = 0, 1, 3  # kvq_kernel
ACTIVATIONS = {"bf16": 0, "fp16": 1}  # kvq_activation
WITHOUT_WINDOWS = 1  # kvq_model_flags


class Structure(ctypes.Structure):
    """Begins with struct_size, as every structure that the caller fills."""

    def __init__(self, **fields):
        super().__init__(struct_size=ctypes.sizeof(self), **fields)


def structure(name: str, /, **fields) -> type[Structure]:
    return type(name, (Structure,), {"_fields_": [("struct_size", c_size_t), *fields.items()]})


class kvq_version_info(ctypes.Structure):
    _fields_ = [("abi_version", c_int32), ("text", c_char_p)]


kvq_error = structure("kvq_error", message=c_char * 1024)
kvq_kernel_info = structure("kvq_kernel_info", name=c_char_p, tuned=c_int32)
kvq_layer_geometry = structure(
    "kvq_layer_geometry",
    num_q_heads=c_int32,
    num_kv_heads=c_int32,
    head_dim=c_int32,
    v_head_dim=c_int32,
    sliding_window=c_int32,
    rope=c_int32,
    rotary_dim=c_int32,
    fold=c_uint32,
    softmax_scale=c_double,
    logit_softcap=c_double,
)
kvq_model_options = structure(
    "kvq_model_options",
    num_layers=c_int32,
    num_geometries=c_int32,
    geometry=POINTER(kvq_layer_geometry),
    fingerprint=c_char_p,
    first_layer=c_int32,
    layer_count=c_int32,
    tp_rank=c_int32,
    tp_size=c_int32,
    activation=c_int32,
    page_size=c_int32,
    max_step_tokens=c_int32,
    flags=c_uint32,
)
kvq_model_info = structure(
    "kvq_model_info",
    num_layers=c_int32,
    first_layer=c_int32,
    layer_count=c_int32,
    tp_rank=c_int32,
    tp_size=c_int32,
    activation=c_int32,
    page_size=c_int32,
    max_step_tokens=c_int32,
    sink_tokens=c_int32,
    recent_tokens=c_int32,
    golden_layers=c_int32,
    name=c_char_p,
    method=c_char_p,
    content_hash=c_char_p,
    layout_id=ctypes.c_uint64,
)
kvq_layer_info = structure(
    "kvq_layer_info",
    layer=c_int32,
    num_q_heads=c_int32,
    num_kv_heads=c_int32,
    first_q_head=c_int32,
    first_kv_head=c_int32,
    head_dim=c_int32,
    v_head_dim=c_int32,
    k_bits=c_int32,
    v_bits=c_int32,
    k_group_size=c_int32,
    v_group_size=c_int32,
    k_numbers=c_int32,
    v_numbers=c_int32,
    k_rotation=c_int32,
    v_rotation=c_int32,
    fold=c_uint32,
    sliding_window=c_int32,
    sink_rows=c_int32,
    ring_rows=c_int32,
    page_bytes=c_int64,
    sink_slot_bytes=c_int64,
    ring_slot_bytes=c_int64,
    softmax_scale=c_double,
    k_effective_bits=c_double,
    v_effective_bits=c_double,
    k_scales=c_int32,
    v_scales=c_int32,
    logit_softcap=c_double,
)
kvq_layer_pools = structure(
    "kvq_layer_pools",
    pages=c_void_p,
    page_stride=c_int64,
    sinks=c_void_p,
    rings=c_void_p,
    group=c_int32,
    num_pages=c_int32,
)
kvq_cache_options = structure(
    "kvq_cache_options", num_pages=c_int32, num_sink_slots=c_int32, num_ring_slots=c_int32, flags=c_uint32
)
kvq_sequences = structure(
    "kvq_sequences",
    batch=c_int32,
    seq_lens=c_void_p,
    page_table=c_void_p,
    page_indptr=c_void_p,
    page_table_stride=c_int64,
    sink_slots=c_void_p,
    ring_slots=c_void_p,
    exact_from=c_void_p,
    sequence_ids=c_void_p,
)
kvq_step_args = structure(
    "kvq_step_args",
    sequences=POINTER(kvq_sequences),
    num_tokens=c_int32,
    token_indptr=c_void_p,
    slot_mapping=c_void_p,
    window_mapping=c_void_p,
)
kvq_fault = structure("kvq_fault", code=c_int32, sequence=c_int32, layer=c_int32, value=c_int64)
kvq_plan_options = structure(
    "kvq_plan_options",
    flags=c_uint32,
    max_batch=c_int32,
    max_prefill_batch=c_int32,
    max_prefill_queries=c_int32,
    max_prefill_keys=c_int32,
    prefill_workspace_bytes=c_size_t,
    max_new_tokens=c_int32,
    max_write_tokens=c_int32,
)
kvq_write_args = structure(
    "kvq_write_args",
    num_tokens=c_int32,
    k=c_void_p,
    v=c_void_p,
    k_token_stride=c_int64,
    v_token_stride=c_int64,
    slot_mapping=c_void_p,
    window_mapping=c_void_p,
    workspace=c_void_p,
    workspace_bytes=c_size_t,
)
kvq_decode_args = structure(
    "kvq_decode_args",
    sequences=POINTER(kvq_sequences),
    q=c_void_p,
    out=c_void_p,
    q_stride=c_int64,
    out_stride=c_int64,
    lse_natural=c_void_p,
    sink_logits=c_void_p,
    softmax_scale=c_float,
    sliding_window=c_int32,
    workspace=c_void_p,
    workspace_bytes=c_size_t,
    q_indptr=c_void_p,
    num_tokens=c_int32,
    logit_softcap=c_float,
    token_masks=c_void_p,
    first=c_void_p,
    last=c_void_p,
)
kvq_prefill_args = structure(
    "kvq_prefill_args",
    sequences=POINTER(kvq_sequences),
    prefix_lens=c_void_p,
    num_tokens=c_int32,
    q_indptr=c_void_p,
    q=c_void_p,
    k=c_void_p,
    v=c_void_p,
    out=c_void_p,
    q_stride=c_int64,
    k_stride=c_int64,
    v_stride=c_int64,
    out_stride=c_int64,
    lse_natural=c_void_p,
    sink_logits=c_void_p,
    softmax_scale=c_float,
    sliding_window=c_int32,
    workspace=c_void_p,
    workspace_bytes=c_size_t,
    logit_softcap=c_float,
)
STRUCTURES = (
    kvq_version_info,
    kvq_error,
    kvq_kernel_info,
    kvq_layer_geometry,
    kvq_model_options,
    kvq_model_info,
    kvq_layer_info,
    kvq_layer_pools,
    kvq_cache_options,
    kvq_sequences,
    kvq_step_args,
    kvq_fault,
    kvq_plan_options,
    kvq_write_args,
    kvq_decode_args,
    kvq_prefill_args,
)

# Parameters of each call, without the last one, kvq_error*.
HANDLE = c_void_p
CALLS = {
    "kvq_model_load": (c_char_p, POINTER(kvq_model_options), POINTER(HANDLE)),
    "kvq_model_query": (HANDLE, POINTER(kvq_model_info)),
    "kvq_model_query_layer": (HANDLE, c_int32, POINTER(kvq_layer_info)),
    "kvq_model_device_bytes": (HANDLE, POINTER(c_size_t)),
    "kvq_model_upload": (HANDLE, c_void_p, c_size_t, c_void_p, POINTER(HANDLE)),
    "kvq_cache_device_bytes": (HANDLE, POINTER(kvq_cache_options), POINTER(c_size_t)),
    "kvq_cache_create": (
        HANDLE,
        POINTER(kvq_cache_options),
        POINTER(kvq_layer_pools),
        c_int32,
        c_void_p,
        c_size_t,
        c_void_p,
        POINTER(HANDLE),
    ),
    "kvq_plan_create": (HANDLE, POINTER(kvq_plan_options), POINTER(HANDLE)),
    "kvq_plan_kernel": (HANDLE, c_int32, c_int32, POINTER(kvq_kernel_info)),
    "kvq_plan_workspace_bytes": (HANDLE, c_int32, POINTER(c_size_t)),
    "kvq_step_run": (HANDLE, POINTER(kvq_step_args), c_void_p),
    "kvq_write_run": (HANDLE, HANDLE, c_int32, POINTER(kvq_write_args), c_void_p),
    "kvq_decode_run": (HANDLE, HANDLE, c_int32, POINTER(kvq_decode_args), c_void_p),
    "kvq_prefill_run": (HANDLE, HANDLE, c_int32, POINTER(kvq_prefill_args), c_void_p),
    "kvq_fault_query": (HANDLE, POINTER(kvq_fault), c_void_p),
}
EXIT_CODES = {UNSUPPORTED: EXIT_UNSUPPORTED, MISMATCH: EXIT_INPUT, IO: EXIT_INPUT}
HINT = "cmake --build --preset release builds it; KVQ_RUNTIME names another place"


def candidate_paths() -> list[Path]:
    """Where the library may lie, the first choice first."""
    named = os.environ.get("KVQ_RUNTIME")
    folders = [ROOT / "build" / preset / "lib/kvq/runtime/deploy" for preset in ("release", "cuda")]
    return [Path(named)] if named else [*(folder / FILE for folder in folders), ROOT / "build/kvq/lib" / FILE]


def find_library(path: Path | None) -> Path:
    if path is None:
        paths = candidate_paths()
        path = next((each for each in paths if each.is_file()), None)
        if path is None:
            raise unsupported(f"no {FILE}, expected one of {', '.join(map(str, paths))}", f"{HINT}, as does --library")
    elif not path.is_file():
        raise unsupported(f"{path}: no such library", HINT)
    return path


class Runtime:
    """An open library. Every call raises what it fails with."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._library = ctypes.CDLL(str(path))
            self._library.kvq_version.restype = POINTER(kvq_version_info)
            self.version = self._library.kvq_version()[0]
            for name, parameters in CALLS.items():
                getattr(self._library, name).argtypes = (*parameters, POINTER(kvq_error))
            self._library.kvq_status_string.restype = c_char_p
            self._library.kvq_fault_string.restype = c_char_p
        except (OSError, AttributeError) as error:
            raise unsupported(f"{path}: cannot load: {one_line(error)}") from error
        if self.version.abi_version // 100 != MAJOR:
            raise unsupported(
                f"{path}: expected interface {MAJOR}.x, found {self.version.abi_version / 100:.2f}",
                "build the library again",
            )

    def call(self, name: str, *arguments) -> None:
        error = kvq_error()
        status = getattr(self._library, name)(*arguments, ctypes.byref(error))
        if status != OK:
            kind = self._library.kvq_status_string(status).decode()
            code = EXIT_CODES.get(status, EXIT_BUG)
            raise KvqError(code, f"{name}: {kind}: {error.message.decode(errors='replace')}")

    def made(self, name: str, *arguments) -> c_void_p:
        """The handle or the number of bytes that a call gives."""
        result = CALLS[name][-1]._type_()
        self.call(name, *arguments, ctypes.byref(result))
        return result

    def destroy(self, name: str, handle: c_void_p) -> None:
        getattr(self._library, name)(handle)

    def fault_name(self, code: int) -> str:
        return self._library.kvq_fault_string(code).decode()
