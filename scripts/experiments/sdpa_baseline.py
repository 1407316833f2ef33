#!/usr/bin/env python3
"""Times PyTorch's scaled_dot_product_attention, cuDNN backend, on contiguous bfloat16 K and V: what kvq-bench --sdpa
compares with.

  sdpa_baseline.py '[{"batch": 8, "context": 32768, "q_len": 1, "q_heads": 32, "kv_heads": 8, "head_dim": 128}]'

Reads a list of shapes as JSON, prints one JSON document. `context` counts all keys, the q_len newest ones included.
q_len 1 is decode; more is a chunk behind a prefix, of which every query sees the prefix and, causally, its own chunk.
Each way of asking for the same result is timed, and the fastest one reported, so that the baseline is as good as the
library can be."""

import argparse
import json
import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

LEAST_BYTES = 300_000_000  # the inputs of all calls together, so that no call finds its input in the L2 cache
GRAPH_BYTES = 3_000_000_000
REPLAYS = 15


def time_us(call, sets: int, set_bytes: int) -> list[float]:
    """Microseconds of one call, ascending, from graph replays. call(i) reads data set i."""
    calls = sets * max(1, GRAPH_BYTES // (sets * set_bytes))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(2):
            call(i % sets)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i % sets)
    times = []
    for replay in range(REPLAYS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if replay >= 3:
            times.append(begin.elapsed_time(end) * 1000 / calls)
    return sorted(times)


def ways(q: torch.Tensor, k: list, v: list) -> dict:
    """Equivalent calls by name; each takes the number of a data set. q is [B, Hq, q_len, D], k and v are [B, Hkv,
    context, D]."""
    whole = lambda i: sdpa(q, k[i], v[i], enable_gqa=True)
    if q.shape[2] == 1:
        return {"whole": whole}
    prefix = k[0].shape[2] - q.shape[2]

    def parts(i):  # leaves out the merge of the two results, which would only add time
        sdpa(q, k[i][:, :, :prefix], v[i][:, :, :prefix], enable_gqa=True)
        sdpa(q, k[i][:, :, prefix:], v[i][:, :, prefix:], enable_gqa=True, is_causal=True)

    return {"prefix, then causal chunk": parts, "whole, without a mask": whole}


def measure(shape: dict) -> dict:
    batch, kv_heads, dim = shape["batch"], shape["kv_heads"], shape["head_dim"]
    set_bytes = 4 * batch * kv_heads * shape["context"] * dim
    sets = max(1, -(-LEAST_BYTES // set_bytes))
    tensor = lambda heads, tokens: torch.randn(batch, heads, tokens, dim, device="cuda", dtype=torch.bfloat16)
    q = tensor(shape["q_heads"], shape["q_len"])
    k, v = ([tensor(kv_heads, shape["context"]) for _ in range(sets)] for _ in range(2))
    timed, refused = {}, {}
    for name, call in ways(q, k, v).items():
        try:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                timed[name] = time_us(call, sets, set_bytes)
        except RuntimeError as error:
            refused[name] = str(error).splitlines()[0]
    if not timed:
        return shape | {"refused": refused}
    best = min(timed, key=lambda name: statistics.median(timed[name]))
    times = timed[best]
    return shape | {
        "way": best,
        "median_us": statistics.median(times),
        "min_us": times[0],
        "max_us": times[-1],
        "all_us": {name: statistics.median(t) for name, t in timed.items()},
        "refused": refused,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", help="JSON list of shapes")
    shapes = json.loads(parser.parse_args().shapes)
    if not torch.cuda.is_available():
        print("sdpa_baseline.py: error: PyTorch sees no CUDA device", file=sys.stderr)
        return 5
    rows = []
    for shape in shapes:
        rows.append(measure(shape))
        torch.cuda.empty_cache()
    print(
        json.dumps(
            {
                "torch": torch.__version__,
                "cudnn": torch.backends.cudnn.version(),
                "device": torch.cuda.get_device_name(),
                "rows": rows,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
