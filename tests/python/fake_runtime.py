"""A stand-in for libkvq_runtime on the CPU: the calls of runtime_binding.py by the text of runtime.h, over the caller's
memory. Pages, sinks and rings hold float32 rows: those of pages as the codec gives them back."""

import ctypes
from types import SimpleNamespace

import numpy as np
import torch

from kvq.artifact_reader import load_artifact
from kvq.coded_attention import reconstruct
from kvq.torch_codec import exact_rows

SINK_ROW = 1 << 40
TYPES = {np.int32: ctypes.c_int32, np.int64: ctypes.c_int64, np.uint16: ctypes.c_uint16, np.float32: ctypes.c_float}


def at(address: int, *shape: int, dtype=np.int32) -> np.ndarray:
    """The caller's memory as an array."""
    count = int(np.prod(shape))
    return np.ctypeslib.as_array((TYPES[dtype] * count).from_address(address)).reshape(shape)


class FakeRuntime:
    def __init__(self):
        self.version = SimpleNamespace(abi_version=300, text=b"fake")
        self.steps: list[int] = []  # tokens of each step
        self.destroyed: list[str] = []
        self.fault = 0

    def made(self, name, *arguments):
        return getattr(self, name, lambda *_: SimpleNamespace(value=16))(*arguments)

    def call(self, name, *arguments):
        getattr(self, name)(*arguments)

    def destroy(self, name, handle):
        self.destroyed.append(name)

    def fault_name(self, code):
        return f"number {code}"

    # Model

    def kvq_model_load(self, path, options):
        self.artifact = load_artifact(path.decode())
        self.shapes = [options.geometry[i] for i in range(options.num_geometries)]
        self.page_size, self.dtype = options.page_size, (torch.bfloat16, torch.float16)[options.activation]
        exact = (0, 0) if options.flags else (self.artifact.sink_tokens, self.artifact.recent_tokens)
        self.sink_tokens, self.recent_tokens = exact
        self.ring_rows = self.recent_tokens and self.recent_tokens + 1
        return "model"

    def kvq_model_query(self, model, info):
        info.sink_tokens, info.recent_tokens = self.sink_tokens, self.recent_tokens

    def kvq_model_query_layer(self, model, layer, info):
        shape = self.shapes[layer]
        row = 4 * shape.num_kv_heads * (shape.head_dim + shape.v_head_dim)
        info.page_bytes, info.sink_slot_bytes = self.page_size * row, self.sink_tokens * row
        info.ring_slot_bytes = self.ring_rows * row

    def kvq_model_upload(self, *_):
        return "device model"

    def kvq_plan_create(self, model, options):
        self.plan = options
        return "plan"

    def kvq_plan_kernel(self, plan, layer, kernel, info):
        info.tuned = layer == 0

    def kvq_cache_create(self, model, options, pools, count, *_):
        self.pools, self.extents = [pools[i] for i in range(count)], options
        return "cache"

    def kvq_fault_query(self, cache, fault, stream):
        fault.code = self.fault

    # Runs

    def lengths(self, s):
        return at(s.seq_lens, s.batch)

    def kvq_step_run(self, cache, args, stream):
        s, mapped = args.sequences[0], []
        indptr = at(args.token_indptr, s.batch + 1)
        self.steps.append(args.num_tokens)
        assert indptr[-1] == args.num_tokens and (args.window_mapping is None) == (self.sink_tokens == 0)
        for b, length in enumerate(self.lengths(s)):
            table = at(s.page_table, s.batch, s.page_table_stride)[b]
            for p in range(length - indptr[b + 1] + indptr[b], length):
                slot, window = int(table[p // self.page_size]) * self.page_size + p % self.page_size, -1
                if p < self.sink_tokens:
                    window = SINK_ROW + int(at(s.sink_slots, s.batch)[b]) * self.sink_tokens + p
                elif self.ring_rows and p >= length - self.ring_rows:
                    window = int(at(s.ring_slots, s.batch)[b]) * self.ring_rows + p % self.ring_rows
                mapped.append((slot, window))
        at(args.slot_mapping, args.num_tokens, dtype=np.int64)[:] = [slot for slot, _ in mapped]
        if args.window_mapping:
            at(args.window_mapping, args.num_tokens, dtype=np.int64)[:] = [window for _, window in mapped]

    def rows(self, address, count, heads, dim) -> torch.Tensor:
        """[T, H, D] float32"""
        bits = at(address, count, heads, dim, dtype=np.uint16).copy()
        return torch.from_numpy(bits.view(np.int16)).view(self.dtype).float()

    def sides(self, layer):
        """Of keys and values: name, channels, and where they begin in a row of a pool."""
        shape = self.shapes[layer]
        return (("k", shape.head_dim, 0), ("v", shape.v_head_dim, shape.head_dim))

    def pool(self, layer, name, rows) -> np.ndarray:
        shape = self.shapes[layer]
        width = shape.head_dim + shape.v_head_dim
        return at(getattr(self.pools[layer], name), rows, shape.num_kv_heads, width, dtype=np.float32)

    def kvq_write_run(self, plan, cache, layer, args, stream):
        slots = at(args.slot_mapping, args.num_tokens, dtype=np.int64)
        pages = self.pool(layer, "pages", self.extents.num_pages * self.page_size)
        for side, dim, first in self.sides(layer):
            x = self.rows(getattr(args, side), args.num_tokens, self.shapes[layer].num_kv_heads, dim)
            coded = reconstruct(self.artifact.layers[layer].sides[side], x.transpose(0, 1)).transpose(0, 1)
            pages[slots, :, first : first + dim] = coded.numpy()
            if not args.window_mapping:
                continue
            for row, place in zip(exact_rows(x).numpy(), at(args.window_mapping, args.num_tokens, dtype=np.int64)):
                if place >= SINK_ROW:
                    sinks = self.pool(layer, "sinks", self.extents.num_sink_slots * self.sink_tokens)
                    sinks[place - SINK_ROW, :, first : first + dim] = row
                elif place >= 0:
                    rings = self.pool(layer, "rings", self.extents.num_ring_slots * self.ring_rows)
                    rings[place, :, first : first + dim] = row

    def cached(self, layer, s, b, length) -> np.ndarray:
        """[length, Hkv, D + Dv] of one sequence, as attention over the cache sees it."""
        positions = np.arange(length)
        table = at(s.page_table, s.batch, s.page_table_stride)[b].astype(np.int64)
        slots = table[positions // self.page_size] * self.page_size + positions % self.page_size
        found = self.pool(layer, "pages", self.extents.num_pages * self.page_size)[slots]
        for p in positions:
            if p < self.sink_tokens:
                sinks = self.pool(layer, "sinks", self.extents.num_sink_slots * self.sink_tokens)
                found[p] = sinks[at(s.sink_slots, s.batch)[b] * self.sink_tokens + p]
            elif p >= length - self.recent_tokens:
                rings = self.pool(layer, "rings", self.extents.num_ring_slots * self.ring_rows)
                found[p] = rings[at(s.ring_slots, s.batch)[b] * self.ring_rows + p % self.ring_rows]
        return found

    def attend(self, layer, args, q, kv) -> torch.Tensor:
        """q [n, Hq, D], the last of the tokens kv [T, Hkv, D + Dv] -> [n, Hq, Dv]"""
        shape = self.shapes[layer]
        kv = torch.from_numpy(kv).double().repeat_interleave(shape.num_q_heads // shape.num_kv_heads, 1)
        logits = torch.einsum("nhd,thd->hnt", q.double(), kv[..., : shape.head_dim]) * args.softmax_scale
        query = torch.arange(len(kv) - len(q), len(kv))[:, None]
        hidden = torch.arange(len(kv)) > query
        if args.sliding_window > 0:
            hidden |= torch.arange(len(kv)) <= query - args.sliding_window
        weights = logits.masked_fill(hidden, -torch.inf).softmax(2)
        return torch.einsum("hnt,thd->nhd", weights, kv[..., shape.head_dim :])

    def put(self, layer, args, out, first):
        shape = self.shapes[layer]
        bits = out.to(self.dtype).view(torch.int16).numpy().view(np.uint16)
        at(args.out, first + len(out), shape.num_q_heads, shape.v_head_dim, dtype=np.uint16)[first:] = bits

    def kvq_decode_run(self, plan, cache, layer, args, stream):
        s, shape = args.sequences[0], self.shapes[layer]
        assert s.batch <= self.plan.max_batch and args.workspace
        q = self.rows(args.q, s.batch, shape.num_q_heads, shape.head_dim)
        for b, length in enumerate(self.lengths(s)):
            self.put(layer, args, self.attend(layer, args, q[b : b + 1], self.cached(layer, s, b, int(length))), b)

    def kvq_prefill_run(self, plan, cache, layer, args, stream):
        s, shape = args.sequences[0], self.shapes[layer]
        assert s.batch <= self.plan.max_prefill_batch and args.prefix_lens is None
        indptr = at(args.q_indptr, s.batch + 1)
        q = self.rows(args.q, args.num_tokens, shape.num_q_heads, shape.head_dim)
        own = [
            self.rows(getattr(args, side), args.num_tokens, shape.num_kv_heads, dim)
            for side, dim, _ in self.sides(layer)
        ]
        own = torch.cat(own, dim=2).numpy()
        for b, length in enumerate(self.lengths(s)):
            first, last = indptr[b], indptr[b + 1]
            assert last - first <= self.plan.max_prefill_queries
            assert last - first + length <= self.plan.max_prefill_keys
            kv = np.concatenate([self.cached(layer, s, b, int(length)), own[first:last]])
            self.put(layer, args, self.attend(layer, args, q[first:last], kv), first)
