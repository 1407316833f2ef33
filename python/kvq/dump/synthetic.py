"""Activations with a planted structure, as a dump: what make_synthetic_dump.py writes.

`options` is the namespace of its flags. Everything is planted after RoPE, so the truths hold for what a reader sees
after it has redone the rotation. Noise is whitened over the whole dump before it is colored: with more rows than
channels the planted moments then hold exactly, not only on average.

Shapes: T tokens, S sequences, Hq query heads, H KV heads, D channels of q and k, Dv of v.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .. import __version__
from ..files import atomic_path
from .array_writer import ArrayWriter, LayerFacts
from .rope import rotate

PRODUCER = f"make_synthetic_dump.py {__version__}"
# Named in a dump only if given, so that options of old dumps are made again as they were.
LATER_OPTIONS = ("o_proj_metric", "logit_softcapping", "learned_sinks")
OUTSIDE_ENERGY = 1e-3  # of a channel outside the head's own subspace


@dataclass
class Planted:
    """One layer after RoPE: float64 tensors q [T, Hq, D], k [T, H, D], v [T, H, Dv], and the known structure
    (`truth`)."""

    tensors: dict[str, np.ndarray]
    truth: dict[str, np.ndarray]


def whitened(rng: np.random.Generator, rows: int, dim: int) -> np.ndarray:
    """Noise [rows, dim] with mean 0 and the identity as second moment; both are exact if there are enough rows."""
    noise = rng.standard_normal((rows, dim))
    if rows <= dim:
        return noise
    noise -= noise.mean(axis=0)
    # Any square root of the inverse moment would do; Cholesky's is the cheapest. The second pass removes the 1e-13 that
    # the first pass leaves.
    for _ in range(2):
        factor = np.linalg.cholesky(noise.T @ noise / rows)
        noise = np.linalg.solve(factor, noise.T).T
    return noise


def canonical_basis(rng: np.random.Generator, dim: int) -> np.ndarray:
    """A random orthogonal matrix whose columns have a positive largest component."""
    basis, _ = np.linalg.qr(rng.standard_normal((dim, dim)))
    largest = np.abs(basis).argmax(axis=0)
    return basis * np.sign(basis[largest, np.arange(dim)])


def decaying(dim: int, decay: float) -> np.ndarray:
    """Eigenvalues with mean 1; each is smaller than the previous one by the factor `decay`."""
    values = decay ** np.arange(dim)
    return values * dim / values.sum()


def head_bases(rng: np.random.Generator, options, dim: int) -> np.ndarray:
    """[H, D, D]: a random basis for each KV head, or one basis rolled for each head, so that leading columns are
    orthogonal."""
    if not options.orthogonal_heads:
        return np.stack([canonical_basis(rng, dim) for _ in range(options.kv_heads)])
    shared = canonical_basis(rng, dim)
    return np.stack([np.roll(shared, -h * (dim // options.kv_heads), axis=1) for h in range(options.kv_heads)])


def subspace_spectrum(options, dim: int) -> np.ndarray:
    """Energy 1 in the head's own subspace and almost 0 outside; without --orthogonal-heads 1 everywhere."""
    if not options.orthogonal_heads:
        return np.ones(dim)
    return np.where(np.arange(dim) < max(1, dim // options.kv_heads), 1.0, OUTSIDE_ENERGY)


def plant_rows(
    rng: np.random.Generator, options, bases: np.ndarray, spectrum: np.ndarray, rows: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(x [rows, H, dim], outlier channels [H, N], means [H, dim]): colored noise, with outliers, plus means."""
    dim = len(spectrum)
    heads = options.kv_heads
    outliers = np.sort([rng.choice(dim, options.outlier_channels, replace=False) for _ in range(heads)], axis=1)
    mean = rng.standard_normal((heads, dim)) * options.channel_means
    x = np.stack([whitened(rng, rows, dim) @ (bases[h] * np.sqrt(spectrum)).T for h in range(heads)], axis=1)
    for h in range(heads):
        x[:, h, outliers[h]] *= options.outlier_scale
    return x + mean, outliers, mean


def plant_queries(
    rng: np.random.Generator, options, bases: np.ndarray, spectrum: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(q [T, Hq, D], spectrum [D] including the sink): the query heads of one KV head have the same second moment."""
    group = options.q_heads // options.kv_heads
    q = np.empty((options.tokens, options.q_heads, options.head_dim))
    for h in range(options.kv_heads):
        noise = whitened(rng, options.tokens * group, options.head_dim) * np.sqrt(spectrum)
        if options.sink:  # the noise has mean 0, so the moment gains offset^2 in this direction and nothing elsewhere
            noise[:, 0] += sink_offset(spectrum)
        q[:, h * group : (h + 1) * group] = (noise @ bases[h].T).reshape(options.tokens, group, options.head_dim)
    total = spectrum.copy()
    total[0] += sink_offset(spectrum) ** 2 if options.sink else 0.0
    return q, total


def sink_offset(spectrum: np.ndarray) -> float:
    """The component that all queries share: three standard deviations, so that hardly any query points away from the
    sink."""
    return 3.0 * float(spectrum[0]) ** 0.5


def sink_length(options, spectrum: np.ndarray, longest: int) -> float:
    """Length of a sink key, from logit = scale * offset * length, such that the sink outweighs `longest` ordinary
    keys."""
    scale = options.head_dim**-0.5
    ordinary = np.log(longest) + 0.5 * scale**2 * (spectrum.sum() + sink_offset(spectrum) ** 2)
    return float((ordinary + 2.0) / (scale * sink_offset(spectrum)))


def plant_layer(options, layer: int, lengths: np.ndarray) -> Planted:
    """Plants one layer. The result depends only on the options and the layer, so each file of a split dump can plant it
    again."""
    rng = np.random.default_rng([options.seed, 1 + layer])
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    ordinary = np.setdiff1d(np.arange(options.tokens), starts if options.sink else [])
    bases = head_bases(rng, options, options.head_dim)
    spectrum = decaying(options.head_dim, options.query_spectrum) * subspace_spectrum(options, options.head_dim)
    q, query_spectrum = plant_queries(rng, options, bases, spectrum)

    key_spectrum = subspace_spectrum(options, options.head_dim)
    k = np.empty((options.tokens, options.kv_heads, options.head_dim))
    k[ordinary], k_outliers, k_mean = plant_rows(rng, options, bases, key_spectrum, len(ordinary))
    truth = {
        "query_basis": bases,
        "query_spectrum": np.tile(query_spectrum, (options.kv_heads, 1)),
        "k_outliers": k_outliers,
        "k_mean": k_mean,
    }
    if options.sink:
        direction = bases[:, :, 0]
        k[starts] = direction * sink_length(options, spectrum, max(lengths))
        truth |= {"sink_direction": direction, "sink_key": k[starts[0]]}
    tensors = {"q": q, "k": k}
    if options.orthogonal_heads:
        truth |= {"key_basis": bases, "key_spectrum": np.tile(key_spectrum, (options.kv_heads, 1))}
    if options.kind == "gqa":
        tensors["v"], value_truth = plant_values(rng, options)
        truth |= value_truth
    return Planted(tensors, truth)


def plant_values(rng: np.random.Generator, options) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(v [T, H, Dv], truth)"""
    bases, spectrum = head_bases(rng, options, options.v_head_dim), subspace_spectrum(options, options.v_head_dim)
    v, outliers, mean = plant_rows(rng, options, bases, spectrum, options.tokens)
    truth = {"v_outliers": outliers, "v_mean": mean}
    if options.orthogonal_heads:
        truth |= {"value_basis": bases, "value_spectrum": np.tile(spectrum, (options.kv_heads, 1))}
    return v, truth


def random_metric(options, layer: int) -> np.ndarray:
    """float64 [H, Dv, Dv], symmetric and positive definite: the metric of a made-up output projection.

    Columns of the projection differ in size, so that the metric is far from a multiple of the identity. The metric has
    its own seed, so tensors are the same with and without it."""
    rng = np.random.default_rng([options.seed, 1 + layer, 1])
    rows = 2 * options.v_head_dim * (options.q_heads // options.kv_heads)
    weights = rng.standard_normal((options.kv_heads, rows, options.v_head_dim))
    sizes = np.exp(rng.standard_normal((options.kv_heads, 1, options.v_head_dim)))
    mixing = np.stack([canonical_basis(rng, options.v_head_dim) for _ in range(options.kv_heads)])
    weights = (weights * sizes) @ mixing / np.sqrt(rows)
    metric = weights.transpose(0, 2, 1) @ weights
    return (metric + metric.transpose(0, 2, 1)) / 2


def random_sinks(options, layer: int) -> tuple[float, ...]:
    """[Hq] learned sinks, with a seed of their own."""
    rng = np.random.default_rng([options.seed, 1 + layer, 2])
    return tuple(rng.standard_normal(options.q_heads).tolist())


# Writing


@dataclass
class DumpFile:
    """One file of the dump: its layers and its sequences [first, last)."""

    path: Path
    layers: range
    sequences: range


def sequence_lengths(options) -> np.ndarray:
    """[S]: uneven lengths of at least 1."""
    rng = np.random.default_rng([options.seed, 0])
    cuts = rng.choice(options.tokens - 1, options.sequences - 1, replace=False) + 1 if options.sequences > 1 else []
    return np.diff(np.sort(np.concatenate([[0], cuts, [options.tokens]]).astype(np.int64)))


def plan_files(options) -> list[DumpFile]:
    layers, sequences = range(options.layers), range(options.sequences)
    stem, suffix = options.output.with_suffix(""), options.output.suffix or ".h5"
    if options.split_by_layer:
        return [DumpFile(Path(f"{stem}.layer{i}{suffix}"), range(i, i + 1), sequences) for i in layers]
    if options.split_by_sequence:
        return [DumpFile(Path(f"{stem}.sequence{i}{suffix}"), layers, range(i, i + 1)) for i in sequences]
    return [DumpFile(options.output, layers, sequences)]


def layer_facts(options, layer: int) -> LayerFacts:
    half = options.rotary_dim // 2
    return LayerFacts(
        num_q_heads=options.q_heads,
        num_kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        v_head_dim=options.v_head_dim,
        softmax_scale=options.head_dim**-0.5,
        sliding_window=options.sliding_window,
        kind=options.kind,
        rope_layout=options.rope,
        rotary_dim=options.rotary_dim,
        rotary_offset=options.rotary_offset,
        rope_attention_factor=options.rope_attention_factor,
        rope_inv_freq=tuple(options.rope_theta ** (-j / half) for j in range(half)),
        logit_softcapping=options.logit_softcapping,
        sink_logits=random_sinks(options, layer) if options.learned_sinks else (),
    )


def captured(options, facts: LayerFacts, planted: Planted, positions: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors at the dump's capture point, float32."""
    tensors = dict(planted.tensors)
    if options.capture == "pre_rope" and options.rope != "none":
        for name in ("q", "k"):
            tensors[name] = rotate(
                tensors[name],
                positions,
                np.array(facts.rope_inv_freq),
                options.rope,
                options.rope_attention_factor,
                options.rotary_offset,
                inverse=True,
            )
    return {name: x.astype(np.float32) for name, x in tensors.items()}


def write_file(options, file: DumpFile) -> None:
    lengths = sequence_lengths(options)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    rows = slice(bounds[file.sequences.start], bounds[file.sequences.stop])
    in_sequence = [np.arange(length) for length in lengths]
    positions = np.concatenate(in_sequence)
    generated = np.concatenate([t >= len(t) - options.generated for t in in_sequence]) if options.generated else None
    with atomic_path(file.path) as temporary, ArrayWriter(temporary) as writer:
        writer.root(model_name="synthetic", capture_point=options.capture, num_layers=options.layers, producer=PRODUCER)
        writer.tokens(
            lengths[file.sequences.start : file.sequences.stop],
            positions[rows],
            None if generated is None else generated[rows],
        )
        write_truth_attributes(writer, options)
        for index in file.layers:
            facts = layer_facts(options, index)
            planted = plant_layer(options, index, lengths)
            tensors = captured(options, facts, planted, positions)
            writer.layer(
                index, facts, {name: x[rows] for name, x in tensors.items()}, dict.fromkeys(tensors, options.dtype)
            )
            if options.o_proj_metric and options.kind == "gqa":
                writer.metric(index, random_metric(options, index))
            for name, value in planted.truth.items():
                writer.file[f"truth/layers/{index}/{name}"] = value


def write_truth_attributes(writer: ArrayWriter, options) -> None:
    attributes = writer.file.create_group("truth").attrs
    attributes["options"] = json.dumps(
        {k: v for k, v in vars(options).items() if k != "output" and (v or k not in LATER_OPTIONS)}, sort_keys=True
    )
    rows = options.tokens - (options.sequences if options.sink else 0)
    attributes["exact"] = int(rows > max(options.head_dim, options.v_head_dim))
