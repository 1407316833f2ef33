"""A packed cache of libkvq_runtime, driven as an engine drives it, for measurements: sequences that grow together."""

from dataclasses import dataclass

import runtime_binding as rt
import torch

from kvq.errors import EXIT_NUMERICAL, KvqError


@dataclass(frozen=True)
class LayerShape:
    """What the attention of a layer is. sliding_window: 0 for none"""

    q_heads: int
    kv_heads: int
    dim: int
    v_dim: int
    sliding_window: int
    scale: float


@dataclass(frozen=True)
class Sizes:
    """Of a cache: `batch` sequences of up to `tokens` tokens, which grow together by up to `step` tokens."""

    batch: int
    tokens: int
    step: int
    page_size: int = 64


class PackedCache:
    """A cache of the runtime, and what an engine keeps for it: pools, page tables, lengths, slots and mappings.

    `begin(n)` begins a step of n new tokens of each sequence; then each layer attends once, by `decode` or `prefill`.
    Rows of a step are [B n, heads, D], those of a sequence side by side.
    """

    def __init__(self, runtime, artifact: str, layers: dict[int, LayerShape], sizes: Sizes, mode: str, **options):
        """options: `activation`, bf16 or fp16; `without_windows`; `device`"""
        self.runtime, self.layers, self.sizes, self.mode = runtime, layers, sizes, mode
        self.device = torch.device(options.get("device", "cuda"))
        self.activation = options.get("activation", "bf16")
        self._handles: list = []
        self._memory: list = []  # everything that structures point to
        self._load(artifact, rt.WITHOUT_WINDOWS if options.get("without_windows") else 0)
        self._make_plan()
        self._make_tables()
        self._make_cache()

    # Making

    def _bytes(self, count: int):
        """Memory of the device, all bits set: NaN to whoever reads it before it was written."""
        self._memory.append(torch.full((max(1, count),), 255, dtype=torch.uint8, device=self.device))
        return self._memory[-1]

    def _numbers(self, values, dtype):
        self._memory.append(torch.as_tensor(values, dtype=dtype).to(self.device).contiguous())
        return self._memory[-1]

    def _made(self, destroy: str, name: str, *arguments):
        handle = self.runtime.made(name, *arguments)
        self._handles.append((destroy, handle))
        return handle

    def _load(self, artifact: str, flags: int) -> None:
        geometries = (rt.kvq_layer_geometry * len(self.layers))()
        for index, layer in enumerate(self.layers.values()):
            geometries[index] = rt.kvq_layer_geometry(
                num_q_heads=layer.q_heads,
                num_kv_heads=layer.kv_heads,
                head_dim=layer.dim,
                v_head_dim=layer.v_dim,
                sliding_window=layer.sliding_window,
                softmax_scale=layer.scale,
            )
        options = rt.kvq_model_options(
            num_layers=len(self.layers),
            num_geometries=len(self.layers),
            geometry=geometries,
            activation=rt.ACTIVATIONS[self.activation],
            page_size=self.sizes.page_size,
            flags=flags,
        )
        self.model = self._made("kvq_model_destroy", "kvq_model_load", str(artifact).encode(), options)
        self.info = rt.kvq_model_info()
        self.runtime.call("kvq_model_query", self.model, self.info)
        count = self.runtime.made("kvq_model_device_bytes", self.model).value
        self.device_model = self._made(
            "kvq_device_model_destroy",
            "kvq_model_upload",
            self.model,
            self._bytes(count).data_ptr(),
            count,
            self.stream,
        )

    def _make_plan(self) -> None:
        s, prefill = self.sizes, self.mode == "prefill"
        options = rt.kvq_plan_options(
            max_batch=0 if prefill else s.batch,
            max_prefill_batch=s.batch if prefill else 0,
            max_prefill_queries=s.step if prefill else 0,
            max_prefill_keys=s.tokens if prefill else 0,
            max_write_tokens=s.batch * s.step,
        )
        self.plan = self._made("kvq_plan_destroy", "kvq_plan_create", self.model, options)
        kernel = rt.PREFILL if prefill else rt.DECODE
        # Writes and attention follow each other, so they share a workspace.
        count = max(self.runtime.made("kvq_plan_workspace_bytes", self.plan, each).value for each in (kernel, rt.WRITE))
        self.workspace, self.workspace_bytes = self._bytes(count), count
        kinds = set()
        for layer in self.layers:
            info = rt.kvq_kernel_info()
            self.runtime.call("kvq_plan_kernel", self.plan, layer, kernel, info)
            kinds.add("tuned" if info.tuned else "generic")
        self.kernels = kinds.pop() if len(kinds) == 1 else "mixed"

    def _make_tables(self) -> None:
        s, int32 = self.sizes, torch.int32
        pages_each = -(-s.tokens // s.page_size)
        self.num_pages = s.batch * pages_each
        order = torch.randperm(self.num_pages, generator=torch.Generator().manual_seed(1))
        self.page_table = self._numbers(order.view(s.batch, pages_each), int32)
        self.lengths, self.lengths_before = (self._numbers([0] * s.batch, int32) for _ in range(2))
        self.length, self.new_tokens = 0, 0
        slots, ids = range(s.batch), [b + 1 for b in range(s.batch)]
        common = dict(
            batch=s.batch,
            page_table=self.page_table.data_ptr(),
            page_table_stride=pages_each,
            sink_slots=self._numbers(list(slots), int32).data_ptr() if self.info.sink_tokens else None,
            ring_slots=self._numbers(list(slots)[::-1], int32).data_ptr() if self.info.recent_tokens else None,
            sequence_ids=self._numbers(ids, torch.int64).data_ptr(),
        )
        self.sequences = rt.kvq_sequences(seq_lens=self.lengths.data_ptr(), **common)
        self.sequences_before = rt.kvq_sequences(seq_lens=self.lengths_before.data_ptr(), **common)
        self.slot_mapping = self._numbers([-1] * (s.batch * s.step), torch.int64)
        self.window_mapping = self._numbers([-1] * (s.batch * s.step), torch.int64) if self.has_windows else None
        self.indptr: dict = {}  # by new tokens of a sequence

    def _make_cache(self) -> None:
        s = self.sizes
        options = rt.kvq_cache_options(
            num_pages=self.num_pages,
            num_sink_slots=s.batch if self.info.sink_tokens else 0,
            num_ring_slots=s.batch if self.info.recent_tokens else 0,
        )
        pools = (rt.kvq_layer_pools * len(self.layers))()
        for index, layer in enumerate(self.layers):
            info = rt.kvq_layer_info()
            self.runtime.call("kvq_model_query_layer", self.model, layer, info)

            def pool(entries: int, size: int):
                return self._bytes(entries * size).data_ptr() if entries and size else None

            pools[index] = rt.kvq_layer_pools(
                pages=pool(self.num_pages, info.page_bytes),
                sinks=pool(options.num_sink_slots, info.sink_slot_bytes),
                rings=pool(options.num_ring_slots, info.ring_slot_bytes),
            )
        count = self.runtime.made("kvq_cache_device_bytes", self.device_model, options).value
        self.cache = self._made(
            "kvq_cache_destroy",
            "kvq_cache_create",
            self.device_model,
            options,
            pools,
            len(self.layers),
            self._bytes(count).data_ptr(),
            count,
            self.stream,
        )

    def close(self) -> None:
        while self._handles:
            self.runtime.destroy(*self._handles.pop())
        self._memory.clear()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # Steps

    @property
    def has_windows(self) -> bool:
        return self.info.sink_tokens + self.info.recent_tokens > 0

    @property
    def stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0

    def begin(self, new_tokens: int) -> None:
        """The next `new_tokens` tokens of each sequence: lengths, and where their rows go."""
        s = self.sizes
        if not 1 <= new_tokens <= s.step or self.length + new_tokens > s.tokens:
            raise ValueError(f"{new_tokens} tokens behind {self.length}: the cache is for {s}")
        self.length, self.new_tokens = self.length + new_tokens, new_tokens
        self.lengths_before.copy_(self.lengths)
        self.lengths.add_(new_tokens)
        if new_tokens not in self.indptr:
            self.indptr[new_tokens] = self._numbers([b * new_tokens for b in range(s.batch + 1)], torch.int32)
        args = rt.kvq_step_args(
            sequences=rt.ctypes.pointer(self.sequences),
            num_tokens=s.batch * new_tokens,
            token_indptr=self.indptr[new_tokens].data_ptr(),
            slot_mapping=self.slot_mapping.data_ptr(),
            window_mapping=address(self.window_mapping),
        )
        self.runtime.call("kvq_step_run", self.cache, args, self.stream)

    def attend(self, layer: int, q, k, v):
        """q [B n, Hq, D], k and v [B n, Hkv, D] -> [B n, Hq, Dv], after or before the write of k and v."""
        shape = self.layers[layer]
        out = q.new_empty(q.shape[0], shape.q_heads, shape.v_dim)
        common = dict(
            q=q.data_ptr(),
            out=out.data_ptr(),
            softmax_scale=shape.scale,
            sliding_window=shape.sliding_window or -1,
            workspace=self.workspace.data_ptr(),
            workspace_bytes=self.workspace_bytes,
        )
        if self.mode == "decode":
            self._write(layer, k, v)
            args = rt.kvq_decode_args(sequences=rt.ctypes.pointer(self.sequences), **common)
            self.runtime.call("kvq_decode_run", self.plan, self.cache, layer, args, self.stream)
            return out
        args = rt.kvq_prefill_args(
            sequences=rt.ctypes.pointer(self.sequences_before),
            num_tokens=q.shape[0],
            q_indptr=self.indptr[self.new_tokens].data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            **common,
        )
        self.runtime.call("kvq_prefill_run", self.plan, self.cache, layer, args, self.stream)
        self._write(layer, k, v)
        return out

    def _write(self, layer: int, k, v) -> None:
        args = rt.kvq_write_args(
            num_tokens=k.shape[0],
            k=k.data_ptr(),
            v=v.data_ptr(),
            slot_mapping=self.slot_mapping.data_ptr(),
            window_mapping=address(self.window_mapping),
            workspace=self.workspace.data_ptr(),
            workspace_bytes=self.workspace_bytes,
        )
        self.runtime.call("kvq_write_run", self.plan, self.cache, layer, args, self.stream)

    def check_faults(self) -> None:
        fault = rt.kvq_fault()
        self.runtime.call("kvq_fault_query", self.cache, fault, self.stream)
        if fault.code:
            name = self.runtime.fault_name(fault.code)
            raise KvqError(
                EXIT_NUMERICAL, f"fault {name}: sequence {fault.sequence}, layer {fault.layer}, value {fault.value}"
            )


def address(tensor) -> int | None:
    return None if tensor is None else tensor.data_ptr()
