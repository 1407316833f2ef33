"""formats/packing.md in PyTorch, for running a model on what its codes give back. Equal to packing.py bit for bit.

Only elementwise operations are used, each of them one binary32 operation; sums go through `tree_sum`. No bytes are made
here: packing.py does that, and packing is exact.

Shapes: N rows of D channels, G groups of g channels, S states of a trellis, C centroids.
"""

from functools import reduce

import torch

from . import integer_search as integer
from .scheme import GAUSSIAN_STEP, LONGEST_SEAM, AnyScheme, MixedScheme, Scheme

LARGEST = torch.finfo(torch.float32).max
# Elements of the largest temporary tensor of the trellis search and of the centroid search: fits a CPU's cache, keeps a
# GPU busy.
CHUNK = {"cpu": 1 << 19, "cuda": 1 << 23}
# By type of device: a search that gives the same codes as best_paths() in less time, see native_codec.py.
FASTER_SEARCH: dict = {}
STORED_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def number(value: float, like: torch.Tensor) -> torch.Tensor:
    """A binary32 scalar on the device of `like`.

    Some CUDA kernels divide by a Python number as a product with its reciprocal, and treat the number as binary64. Both
    round differently from a division by a binary32 number.
    """
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def round_to(x: torch.Tensor, scale_type: str) -> torch.Tensor:
    """R(x), widened again to float32."""
    dtype = STORED_DTYPES[scale_type]
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype).float()


def exact_rows(x: torch.Tensor) -> torch.Tensor:
    """x as exact rows give it back: R(x), and NaN for what is not finite."""
    return torch.where(x.isfinite(), round_to(x, "bf16"), number(torch.nan, x))


def square_root(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded. torch.sqrt on float32 is not, because it may call a vector library with errors of one unit.

    The root of a binary32 number stays at least 2^-51 of itself away from a rounding edge, so a binary64 root that is
    off by one unit still rounds to the right binary32 number.
    """
    return x.double().sqrt().float()


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Sums the last axis in the order of packing.md: neighbors first, zeros pad to a power of two."""
    size = x.shape[-1]
    padding = (1 << (size - 1).bit_length()) - size
    if padding:
        x = torch.nn.functional.pad(x, (0, padding))
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def clip_rows(x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Clips each row of x [N, D] to the row's threshold."""
    index = scheme.clip_index(x.shape[1])
    if index is None:
        return x
    threshold = x.abs().kthvalue(index + 1, dim=1, keepdim=True).values
    return torch.minimum(torch.maximum(x, -threshold), threshold)


def divide(x: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """x / divisor; x in groups whose divisor is 0, whose codes the caller sets separately."""
    return x / torch.where(divisor == 0, torch.ones_like(divisor), divisor)


def affine(x: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """x [N, G, g] -> (codes float32 [N, G, g], [scale, minimum or zero point], each [N, G, 1])"""
    lowest, highest = x.amin(2, keepdim=True), x.amax(2, keepdim=True)
    extent = (highest - lowest).clamp(max=LARGEST) + 0.0  # -0 + 0 = +0, so signs of zero extremes do not matter
    scale = round_to(extent / number(scheme.top, x), scheme.scale_type)
    if scheme.zero == "float":
        second = round_to(lowest, scheme.scale_type) + 0.0
        codes = torch.floor(divide(x - second, scale) + 0.5)
    else:
        second = round_to(torch.floor(divide(-lowest, scale) + 0.5), scheme.scale_type)
        second = torch.where(scale == 0, torch.zeros_like(second), second)
        codes = torch.floor(divide(x, scale) + 0.5) + second
    return torch.where(scale == 0, torch.zeros_like(codes), codes.clamp(0, scheme.top)), [scale, second]


def symmetric(x: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """x [N, G, g] -> (codes float32 [N, G, g], [scale [N, G, 1]])"""
    if scheme.scale_rule == "absmax":
        first = round_to(2.0 * x.abs().amax(2, keepdim=True) / number(scheme.top, x), scheme.scale_type)
    else:
        energy = tree_sum(x * x).unsqueeze(2)
        deviation = square_root(energy / number(x.shape[2], x))
        first = round_to(number(GAUSSIAN_STEP[scheme.bits], x) * deviation, scheme.scale_type)
    codes = or_middle(symmetric_codes(divide(x, first), scheme), first, scheme)
    if scheme.scale_rule == "absmax":
        return codes, [first]
    scale = round_to(refit(x, codes, energy, scheme), scheme.scale_type)
    return codes, [torch.where(first == 0, torch.zeros_like(scale), scale)]


def symmetric_codes(y: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Codes of y = x / s, float32."""
    return (torch.floor(y) + 2 ** (scheme.bits - 1)).clamp(0, scheme.top)


def or_middle(codes: torch.Tensor, step: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """The codes, and the middle code where the step they were derived from is 0."""
    return torch.where(step == 0, torch.full_like(codes, 2 ** (scheme.bits - 1)), codes)


def refit(x: torch.Tensor, codes: torch.Tensor, energy: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """The stored scale of `least_squares` and `norm` before R, [N, G, 1]."""
    level = 2 * codes - scheme.top
    norm = level.long().square().sum(2, keepdim=True).float()
    if scheme.scale_rule == "least_squares":
        return 2.0 * tree_sum(x * level).unsqueeze(2) / norm
    return square_root(4.0 * energy / norm)


# Codebook and trellis codes


def binary32(values: tuple[float, ...], like: torch.Tensor) -> torch.Tensor:
    """Binary32 numbers [len] on the device of `like`."""
    return torch.tensor(values, dtype=torch.float32, device=like.device)


def table(x: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """x [N, G, g] -> (codes uint8 [N, G, g], [scale [N, G, 1]])"""
    energy = tree_sum(x * x).unsqueeze(2)
    deviation = round_to(square_root(energy / number(x.shape[2], x)), scheme.scale_type)
    codes = or_middle(table_codes(divide(x, deviation), scheme), deviation, scheme)
    if scheme.scale_rule == "rms":
        return codes, [deviation]
    value = table_values(codes, scheme)
    norm = tree_sum(value * value).unsqueeze(2)
    if scheme.scale_rule == "norm":
        refitted = square_root(divide(energy, norm))
    else:
        refitted = divide(tree_sum(x * value).unsqueeze(2), norm)
    scale = torch.where((norm == 0) | refitted.isnan(), deviation, round_to(refitted, scheme.scale_type))
    return codes, [torch.where(deviation == 0, torch.zeros_like(scale), scale)]


def table_codes(y: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Codes of y [N, G, g] in a codebook or a trellis, uint8."""
    search = nearest_entries if scheme.coder == "codebook" else FASTER_SEARCH.get(y.device.type, best_paths)
    return search(y, scheme)


def table_values(codes: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """The values of codes [N, G, g] of a codebook or a trellis at scale 1."""
    if scheme.coder == "codebook":
        return binary32(scheme.codebook, codes)[codes.long()]
    return trellis_values(codes, scheme)


def nearest_entries(y: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Codes of y, uint8: the number of thresholds that are at most y."""
    entries = binary32(scheme.codebook, y)
    thresholds = (entries[:-1] + entries[1:]) * 0.5
    return torch.bucketize(y, thresholds, right=True).to(torch.uint8)


def trellis_values(codes: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """v of the codes [..., g]: each window's place in the table of all windows."""
    place = codes.int()
    for k in range(1, scheme.memory + 1):
        place = place | codes.roll(k, -1).int() << k * scheme.bits
    return trellis_table(scheme, binary32((0.0,), codes))[place]


def trellis_table(scheme: Scheme, like: torch.Tensor) -> torch.Tensor:
    """v of a channel for all windows, [2^(b (m + 1))]. Index: c[0] + c[-1] 2^b + c[-2] 2^(2 b) + ..., where c[-k] is
    the code k channels before."""
    half = binary32(scheme.theta, like) * 0.5
    place = torch.arange(2 ** len(half), device=like.device)
    value = torch.where(place & 1 == 1, half[0], -half[0])
    for q in range(1, len(half)):
        value = value + torch.where(place >> q & 1 == 1, half[q], -half[q])
    return value


def chunk_of(like: torch.Tensor) -> int:
    return CHUNK.get(like.device.type, CHUNK["cpu"])


def best_paths(y: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Codes of y [N, G, g], uint8, by Viterbi."""
    targets = y.reshape(-1, y.shape[2])
    codes = torch.empty(targets.shape, dtype=torch.uint8, device=y.device)
    if scheme.search == "integer":
        search, rows = integer_viterbi, integer.rows_of_chunk(chunk_of(y), y.shape[2], scheme)
    else:
        search, rows = viterbi, max(1, chunk_of(y) >> (scheme.bits * (scheme.memory + 1)))
    for first in range(0, len(targets), rows):
        codes[first : first + rows] = search(targets[first : first + rows], scheme)
    return codes.reshape(y.shape)


# Search binary32


def viterbi(y: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Codes of y [N, g], uint8. The first search finds the state at the seam, the second search the codes from the seam
    around to the seam.

    Costs are [S, N], with rows along the last axis, so that operations run over rows.
    """
    y, values = y.T.contiguous(), trellis_table(scheme, y)
    size, count = y.shape
    length, states = min(size, LONGEST_SEAM), 1 << scheme.bits * scheme.memory
    oldest = torch.empty(size, states, count, dtype=torch.uint8, device=y.device)
    buffer = y.new_empty(len(values), count)  # shared, because new memory costs as much as arithmetic
    cost = walk(y[size - length :], y.new_zeros(states, count), values, buffer, oldest)  # next walk overwrites oldest
    cost = walk(y[:length], cost, values, buffer, oldest)
    seam, _ = trace_back(first_smallest(cost), oldest[:length], scheme)
    cost = y.new_full((states, count), torch.inf).scatter_(0, seam[None], 0.0)
    walk(y, cost, values, buffer, oldest)
    return trace_back(seam, oldest, scheme)[1]


def walk(
    y: torch.Tensor, cost: torch.Tensor, values: torch.Tensor, buffer: torch.Tensor, oldest: torch.Tensor
) -> torch.Tensor:
    """Steps over y [n, N] from the costs [S, N]; returns the costs at the end.

    buffer [len(values), N] is scratch memory. oldest [n or more, S, N] receives the code that the best path to each
    state dropped.
    """
    states, alphabet = len(cost), len(values) // len(cost)
    for channel, dropped in zip(y, oldest):
        error = torch.sub(channel, values[:, None], out=buffer)
        error.mul_(error)  # a separate call, so that no kernel fuses the product with the sum below
        paths = error.view(states, alphabet, -1).add_(cost[:, None])
        cost = smallest(paths.view(alphabet, states, -1), dropped)
    return cost


# Search integer


def integer_viterbi(y: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Codes of y [N, g], uint8. As in viterbi(), costs are [S, N], but integers."""
    size, count, states = y.shape[1], y.shape[0], 1 << scheme.bits * scheme.memory
    length = integer.first_run(size)
    dtype = torch.int32 if integer.SEAM + length <= integer.INT32_STEPS else torch.int64
    gains = bit_gains(y.T.contiguous(), scheme).to(dtype)
    windows, signs = (
        torch.from_numpy(table).to(y.device, dtype)
        for table in (integer.window_costs(scheme), integer.code_signs(scheme.bits))
    )
    oldest = torch.empty(max(length, size), states, count, dtype=torch.uint8, device=y.device)
    buffer = gains.new_empty(len(windows), count)

    def walk_on(channels: range, cost: torch.Tensor) -> torch.Tensor:
        return integer_walk(gains, channels, cost, windows, signs, buffer, oldest)

    cost = walk_on(range(-integer.SEAM, 0), gains.new_zeros(states, count))  # the next walk overwrites oldest
    cost = walk_on(range(length), cost)
    seam, _ = trace_back(first_smallest(cost), oldest[:length], scheme)
    if size < integer.ONE_RUN:
        others = integer.OTHER_STATES * integer.unit(scheme.bits)
        walk_on(range(size), gains.new_full((states, count), others).scatter_(0, seam[None], 0))
    return trace_back(seam, oldest[:size], scheme)[1]


def bit_gains(y: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """X of y [g, N], int32 [g, b, N]."""
    # Clamped first, so that nothing overflows; 256 * 4.5 is an integer, so t is the same.
    t = (y.clamp(-integer.LARGEST_TARGET, integer.LARGEST_TARGET) * integer.TARGET_UNIT).round().int()[:, None]
    taps = torch.from_numpy(integer.integer_taps(scheme)).to(y.device, torch.int32)
    total = sum(t.roll(-k, 0) * own[:, None] for k, own in enumerate(taps))
    return (total + (1 << integer.GAIN_SHIFT - 1)) >> integer.GAIN_SHIFT


def integer_walk(
    gains: torch.Tensor,
    channels: range,
    cost: torch.Tensor,
    windows: torch.Tensor,
    signs: torch.Tensor,
    buffer: torch.Tensor,
    oldest: torch.Tensor,
) -> torch.Tensor:
    """Steps over the channels, each modulo g, with the X of all g channels [g, b, N]; otherwise as walk()."""
    states, alphabet = len(cost), len(signs)
    for j, dropped in zip(channels, oldest):
        paths = torch.add(cost[:, None], windows.view(states, alphabet, 1), out=buffer.view(states, alphabet, -1))
        cost = smallest(paths.view(alphabet, states, -1), dropped)
        gain = (signs[:, :, None] * gains[j % len(gains)]).sum(1, dtype=cost.dtype)
        cost.view(-1, *gain.shape).sub_(gain)  # the same for all paths that reach a state
    return cost


# Both searches


def smallest(paths: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """The minimum of paths [K, S, N] over K; `place`, uint8 [S, N], receives the first index of the minimum."""
    torch.lt(paths[1], paths[0], out=place)
    best = torch.minimum(paths[0], paths[1])
    for k in range(2, len(paths)):
        place.masked_fill_(paths[k] < best, k)
        torch.minimum(best, paths[k], out=best)
    return best


def first_smallest(cost: torch.Tensor) -> torch.Tensor:
    """cost [S, N] -> index of the minimum, the first on a tie, int64 [N]; NaN is a tie of all. torch.argmin promises no
    order on ties."""
    place, least = torch.arange(len(cost), device=cost.device)[:, None], cost.amin(0)
    return torch.where((cost == least) | least.isnan(), place, len(cost)).amin(0)


def trace_back(state: torch.Tensor, oldest: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """For the paths that end in state [N]: (the state before the first step [N], codes [N, n])."""
    codes = torch.empty(len(oldest), len(state), dtype=torch.uint8, device=state.device)
    top_place = scheme.bits * (scheme.memory - 1)
    for j in reversed(range(len(oldest))):
        codes[j] = state & scheme.top
        state = (state >> scheme.bits) + (oldest[j].gather(0, state[None])[0].long() << top_place)
    return state, codes.T


# One scale a row. Sums of segments are added from the widest segment on.


def encode_one_scale(x: torch.Tensor, scheme: MixedScheme) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, D] -> (codes uint8 [N, D], scales [N, 1], or [N, 0] without channels of width 1 to 8)"""
    codes, parts = torch.zeros(x.shape, dtype=torch.uint8, device=x.device), scheme.segments(x.shape[1])
    if not parts:
        return codes, x.new_zeros(len(x), 0)
    gains = binary32(scheme.gains, x).unbind()
    segments = [x[:, part.begin : part.end] for part in parts]
    energies = [tree_sum(own * own) for own in segments]
    reduced = reduce(torch.add, [energy / (gain * gain) for energy, gain in zip(energies, gains)])
    deviation = round_to(square_root(reduced / number(parts[-1].end, x)), scheme.scale_type)
    for part, own, gain in zip(parts, segments, gains):
        codes[:, part.begin : part.end] = unit_codes(own, gain * deviation, part.scheme)
    if scheme.scale_rule == "rms":
        return codes, deviation[:, None]
    values = [unit_values(codes[:, part.begin : part.end], part.scheme) for part in parts]
    norm = reduce(torch.add, [gain * gain * tree_sum(v * v) for v, gain in zip(values, gains)])
    if scheme.scale_rule == "norm":
        refitted = square_root(divide(reduce(torch.add, energies), norm))
    else:
        products = [tree_sum(own * (gain * v)) for own, v, gain in zip(segments, values, gains)]
        refitted = divide(reduce(torch.add, products), norm)
    scale = torch.where((norm == 0) | refitted.isnan(), deviation, round_to(refitted, scheme.scale_type))
    return codes, torch.where(deviation == 0, torch.zeros_like(scale), scale)[:, None]


def unit_codes(x: torch.Tensor, step: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Codes of a segment x [N, g] in units of step [N], that is t of packing.md; uint8."""
    y = divide(x, step[:, None])
    if scheme.coder == "symmetric":
        codes = symmetric_codes(y / number(GAUSSIAN_STEP[scheme.bits], y), scheme)
    else:
        codes = table_codes(y[:, None], scheme)[:, 0]
    return or_middle(codes.to(torch.uint8), step[:, None], scheme)


def unit_values(codes: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """v of the codes [N, g] of a segment."""
    if scheme.coder == "symmetric":
        return number(GAUSSIAN_STEP[scheme.bits], codes) * ((2 * codes.float() - scheme.top) * 0.5)
    return table_values(codes, scheme)


def decode_one_scale(codes: torch.Tensor, scale: torch.Tensor, scheme: MixedScheme, x: torch.Tensor) -> None:
    """Writes x_hat of all channels that have bits into x [N, D]. codes: [N, D], scale: [N, 1]"""
    for part, gain in zip(scheme.segments(x.shape[1]), binary32(scheme.gains, x)):
        x[:, part.begin : part.end] = scale * (gain * unit_values(codes[:, part.begin : part.end], part.scheme))


# Centroids


def squared_distances(x: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """tree((x - M[c]) (x - M[c])) of rows x [N, D] and centroids [C, D], [C, N]."""
    found = x.new_empty(len(centroids), len(x))
    rows = max(1, chunk_of(x) // x.shape[1])
    step = max(1, rows // max(1, len(x)))
    for first in range(0, len(x), rows):
        block = x[first : first + rows].T.contiguous()[:, None]
        for c in range(0, len(centroids), step):
            difference = block - centroids[c : c + step].T.contiguous()[:, :, None]
            found[c : c + step, first : first + rows] = tree_sum(difference.mul_(difference).movedim(0, 2))
    return found


def nearest_centroids(x: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Index of the centroid of each token, int64 [N].

    x: [H, N, D], the heads that choose together, centroids: [H, C, D]
    """
    total = squared_distances(x[0], centroids[0])
    for rows, entries in zip(x[1:], centroids[1:]):
        total = total + squared_distances(rows, entries)
    return first_smallest(total)


# Rows

CODERS = {"affine": affine, "symmetric": symmetric, "codebook": table, "trellis": table}


def encode(x: torch.Tensor, scheme: AnyScheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes rows x [N, D] float32; not for exact rows. A row with NaN or infinity is poisoned: codes 0, NaN in all
    numbers.

    returns (codes uint8 [N, D], numbers float32 [N, G * (1 or 2)] in the order of the bytes)
    """
    poisoned = ~x.isfinite().all(1, keepdim=True)
    x = torch.where(poisoned, number(0.0, x), x)
    codes, numbers = (encode_one_scale if scheme.one_scale else encode_segments)(x, scheme)
    return codes.masked_fill_(poisoned, 0), numbers.masked_fill_(poisoned, torch.nan)


def encode_segments(x: torch.Tensor, scheme: AnyScheme) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, D] -> (codes uint8 [N, D], all numbers float32 [N, G * (1 or 2)])"""
    codes, found = torch.zeros(x.shape, dtype=torch.uint8, device=x.device), [x.new_zeros(len(x), 0)]
    for part in scheme.segments(x.shape[1]):
        channels, own = x[:, part.begin : part.end], part.scheme
        groups = clip_rows(channels, own).reshape(len(x), own.groups(channels.shape[1]), own.group_size)
        coded, more = CODERS[own.coder](groups, own)
        codes[:, part.begin : part.end] = coded.reshape(channels.shape).to(torch.uint8)
        found += [each.squeeze(2) for each in more]
    return codes, torch.cat(found, dim=1)


def decode(codes: torch.Tensor, numbers: torch.Tensor, scheme: AnyScheme) -> torch.Tensor:
    """x_hat, float32 [N, D]."""
    x, first = torch.zeros(codes.shape, dtype=torch.float32, device=codes.device), 0
    x.masked_fill_(numbers[:, :1].isnan().any(1, keepdim=True), torch.nan)  # channels of width 0 in poisoned rows
    if scheme.one_scale:
        decode_one_scale(codes, numbers, scheme, x)
        return x
    for part in scheme.segments(x.shape[1]):
        count = part.scheme.groups(part.end - part.begin) * part.scheme.numbers_per_group()
        own = numbers[:, first : first + count]
        x[:, part.begin : part.end] = decode_segment(codes[:, part.begin : part.end], own, part.scheme)
        first += count
    return x


def decode_segment(codes: torch.Tensor, numbers: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """codes [N, d], numbers [N, G * (1 or 2)] -> x_hat [N, d]"""
    count, dim = codes.shape
    groups = scheme.groups(dim)
    codes = codes.reshape(count, groups, scheme.group_size)
    scale, *second = numbers.reshape(count, scheme.numbers_per_group(), groups, 1).unbind(1)
    if scheme.coder == "symmetric":
        x = scale * ((2 * codes.float() - scheme.top) * 0.5)
    elif scheme.coder in ("codebook", "trellis"):
        x = scale * table_values(codes, scheme)
    elif scheme.zero == "integer":
        x = (codes.float() - second[0]) * scale
    else:
        x = codes.float() * scale + second[0]
    return x.reshape(count, dim)


def fake_quantize(x: torch.Tensor, scheme: AnyScheme) -> torch.Tensor:
    """x [N, D] after encoding and decoding."""
    if scheme.coder == "exact":
        return exact_rows(x)
    return decode(*encode(x, scheme), scheme)
