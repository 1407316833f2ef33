"""How large a dump becomes, how long it takes and what memory it needs, before weights are loaded.

Sizes follow from the shapes of a model without weights (on torch's `meta` device). Seconds are estimated from the
number of parameters and from a matrix product that is timed on this machine.
"""

import time
from dataclasses import dataclass

import torch

from .anatomy import FUSED_PROJECTIONS, find_projections, part_of
from .disk import format_bytes
from .forward import decoder_of
from .model import DTYPES, ModelFolder, model_class
from .progress import format_seconds

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# Of the file beside its arrays: HDF5's own structures, attributes and frequencies, and the configuration.
FILE_BYTES, LAYER_BYTES = 16_000, 9_000
# The program without a model: Python, PyTorch, transformers and HDF5.
PROGRAM_BYTES = 500e6
PROBE_SECONDS, PROBE_SIZE = 0.3, 1024
# Layers of a model are slower than one large product: elementwise steps, small heads, writing.
EFFICIENCY = 0.5


@dataclass(frozen=True)
class LayerShape:
    """Heads and channels of what a dump stores of a layer; v_head_dim is 0 for MLA, whose dumps have no values."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int

    def token_elements(self) -> int:
        """Elements of q, k and v of one token."""
        return (self.num_q_heads + self.num_kv_heads) * self.head_dim + self.num_kv_heads * self.v_head_dim


@dataclass(frozen=True)
class Outline:
    """A model without its weights. `parameters` counts the whole model; `active` those of the text half that one token
    meets: without the token embeddings, which are looked up, and of experts only the chosen ones."""

    parameters: int
    embedding: int
    active: int
    hidden: int
    intermediate: int
    layers: dict[int, LayerShape]


@dataclass(frozen=True)
class Estimate:
    file_bytes: int
    memory_bytes: int
    weight_bytes: int
    operations: float


def outline_of(folder: ModelFolder) -> Outline:
    """The shapes of a model, from an instance on the `meta` device, which takes no memory."""
    text = folder.config
    with torch.device("meta"):
        model = model_class(folder.whole_config).from_config(folder.whole_config)
    decoder = decoder_of(model)
    sizes = {name: parameter.numel() for name, parameter in decoder.named_parameters()}
    embedding = model.get_input_embeddings().weight.numel()
    expert_share = share_of_experts(text)
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    active = sum(sizes.values()) - embedding - round(experts * (1 - expert_share))
    layers = {
        layer: layer_shape(text, part, folder.family.kind) for layer, part in attention_parts(decoder, text).items()
    }
    if not layers:
        raise ValueError("no layer has projections to queries and keys by a known name")
    intermediate = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    if isinstance(intermediate, list):
        intermediate = max(intermediate)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Outline(parameters, embedding, active, text.hidden_size, intermediate, layers)


def attention_parts(decoder: torch.nn.Module, config) -> dict[int, torch.nn.Module]:
    """{layer: attention} of the parts that a survey would watch (survey.py), without linear attention, which it would
    see to have no keys."""
    types = getattr(config, "layer_types", None) or []
    found = {}
    for part in decoder.modules():
        layer = getattr(part, "layer_idx", None)
        if isinstance(layer, int) and find_projections(part) and types[layer : layer + 1] != ["linear_attention"]:
            found[layer] = part
    return found


def share_of_experts(config) -> float:
    """The part of a layer's experts that one token meets."""
    counts = [getattr(config, name, None) for name in ("num_experts", "n_routed_experts", "num_local_experts")]
    total = next((count for count in counts if count), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    return min(1.0, chosen / total) if total and chosen else 1.0


def layer_shape(config, attention: torch.nn.Module, kind: str) -> LayerShape:
    """From the projections where they say it, else from the configuration."""
    heads = config.num_attention_heads
    if kind == "mla_rope":
        return LayerShape(heads, 1, config.qk_rope_head_dim, 0)
    dim = getattr(attention, "head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    keys, values = (getattr(attention, name, None) for name in ("k_proj", "v_proj"))
    if keys is not None:
        kv_heads = keys.out_features // dim
        heads = kv_heads * getattr(attention, "num_key_value_groups", heads // kv_heads)
    elif (fused := part_of(attention, FUSED_PROJECTIONS)) is not None:
        # GPT-2 and Falcon have fields of their own for KV heads, and GPT-NeoX has none.
        kv_heads = fused_kv_heads(fused, heads, dim) or kv_heads
    return LayerShape(heads, kv_heads, dim, values.out_features // kv_heads if values is not None else dim)


def fused_kv_heads(projection: torch.nn.Module, heads: int, dim: int) -> int | None:
    """From the channels of q, k and v together; None if they are not those of whole heads."""
    channels = projection.nf if type(projection).__name__ == "Conv1D" else projection.out_features
    kv_heads, rest = divmod(channels - heads * dim, 2 * dim)
    return kv_heads if kv_heads > 0 and rest == 0 and heads % kv_heads == 0 else None


@dataclass(frozen=True)
class Work:
    """What a run is asked to do: lengths of the sequences with their generated tokens, and what it stores."""

    lengths: list[int]
    layers: list[int]
    stored_dtype: str
    compute_dtype: str
    o_proj: bool = False
    curvature: bool = False
    generate: int = 0

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def estimate(outline: Outline, work: Work) -> Estimate:
    weight_bytes = outline.parameters * ITEM_BYTES[work.compute_dtype]
    return Estimate(
        file_bytes=file_bytes(outline, work),
        memory_bytes=round(PROGRAM_BYTES + weight_bytes + activation_bytes(outline, work)),
        weight_bytes=weight_bytes,
        operations=operations(outline, work),
    )


def file_bytes(outline: Outline, work: Work) -> int:
    total = FILE_BYTES + work.tokens * (8 + (1 if work.generate else 0)) + 8 * len(work.lengths)
    for layer in work.layers:
        if layer not in outline.layers:
            continue
        shape = outline.layers[layer]
        total += LAYER_BYTES + work.tokens * shape.token_elements() * ITEM_BYTES[work.stored_dtype]
        v_head_dim = shape.v_head_dim or shape.head_dim
        total += 4 * shape.num_kv_heads * shape.v_head_dim**2
        total += 2 * outline.hidden * shape.num_q_heads * v_head_dim if work.o_proj else 0
        total += 4 * shape.num_q_heads * v_head_dim**2 if work.curvature else 0
    return total


def activation_bytes(outline: Outline, work: Work) -> float:
    """Of the longest sequence: a few tensors of one layer, the mask; for curvature the tensors of every layer."""
    longest, item = max(work.lengths), ITEM_BYTES[work.compute_dtype]
    shape = max(outline.layers.values(), key=LayerShape.token_elements)
    layer = longest * item * (6 * outline.hidden + 3 * outline.intermediate + 4 * shape.token_elements())
    total = layer + longest**2
    if work.curvature:
        total += layer * len(outline.layers) + 256 * 3 * 4 * outline.embedding / outline.hidden
    if work.generate:
        total += longest * item * sum(2 * each.num_kv_heads * each.head_dim for each in outline.layers.values())
    return total


def operations(outline: Outline, work: Work) -> float:
    """Multiplications and additions of all forward passes, and of the backward passes for curvature."""
    squares = sum(length**2 for length in work.lengths)
    attention = sum(4 * squares * each.num_q_heads * each.head_dim for each in outline.layers.values())
    once = 2 * outline.active * work.tokens + attention
    head = 2 * outline.embedding
    curvature = 3 * once + 3 * head * work.tokens if work.curvature else 0
    return once + curvature + (head * (work.generate + 1) * len(work.lengths) if work.generate else 0)


def measured_rate(hidden: int, dtype: str, device: str) -> float:
    """Operations a second of a matrix product of the model's width."""
    x = torch.ones(PROBE_SIZE, hidden, dtype=DTYPES[dtype], device=device)
    weight = torch.ones(hidden, hidden, dtype=DTYPES[dtype], device=device)
    (x @ weight)[0, 0].item()
    count, started = 0, time.monotonic()
    while (elapsed := time.monotonic() - started) < PROBE_SECONDS or not count:
        (x @ weight)[0, 0].item()
        count += 1
    return count * 2 * PROBE_SIZE * hidden**2 / elapsed


def size_line(found: Estimate, output, free: int) -> str:
    return f"size: {output} takes {format_bytes(found.file_bytes)}; {format_bytes(free)} are free in its folder"


def forecast_lines(found: Estimate, outline: Outline, rate: float, device: str) -> list[str]:
    """Time and memory, for --dry-run."""
    seconds = found.operations / (EFFICIENCY * rate)
    return [
        f"time: about {format_seconds(seconds)} of computing, estimated from {outline.active / 1e6:.1f} M parameters a "
        f"token and a matrix product timed here ({rate / 1e9:.0f} billion operations a second); loading "
        f"{format_bytes(found.weight_bytes)} of weights comes on top",
        f"memory: about {format_bytes(found.memory_bytes)} on {device}, "
        f"{format_bytes(found.weight_bytes)} of them weights",
    ]
