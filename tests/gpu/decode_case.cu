#include "decode_case.h"
#include "device_memory.h"
#include "plain_attention.cuh"

#include "support/transforms.h"

#include <kvq/plan/segment_rows.h>
#include <kvq/plan/table_rows.h>
#include <kvq/runtime/prepare.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>
#include <set>
#include <stdexcept>
#include <utility>

namespace kvq::test {

namespace {

__device__ unsigned hash(unsigned long long x) {
  x ^= x >> 31, x *= 0x7fb5d329728ea185ull, x ^= x >> 27, x *= 0x81dadef4bc2dd44dull;
  return static_cast<unsigned>(x >> 33);
}
__device__ float uniform(unsigned long long key) { return static_cast<float>(hash(key) & 0xFFFFFF) / 16777216.0f; }

__device__ void put_number(std::byte* at, float x, bool bfloat) {
  *reinterpret_cast<unsigned short*>(at) =
      bfloat ? __bfloat16_as_ushort(__float2bfloat16(x)) : __half_as_ushort(__float2half(x));
}

/// Writes one token of one head and side, quantized or exact; all other bytes keep their values.
__global__ void fill_token(DecodeParams p, PageLayout layout, bool k_bfloat, bool v_bfloat, std::byte* pages,
                           CaseWindows windows, int value_spread, unsigned seed) {
  const int position = static_cast<int>(blockIdx.x), b = static_cast<int>(blockIdx.y);
  const int head = static_cast<int>(blockIdx.z) / 2;
  const bool value = blockIdx.z % 2, bfloat = value ? v_bfloat : k_bfloat;
  const int length = p.cache.seq_lens[b];
  if (position >= length || !plain::plain_range(p, b).contains(position)) return;
  const TileSide& side = value ? layout.v : layout.k;
  // The random numbers depend on the page, not on the sequence, because sequences that share pages must write the same.
  const std::int64_t base = p.cache.page_indptr ? p.cache.page_indptr[b] : b * p.cache.page_table_stride;
  const std::int64_t page = p.cache.page_table[base + position / layout.page_size];
  const int slot = position % layout.page_size;
  const unsigned long long key =
      ((static_cast<unsigned long long>(page) * 128 + slot) * 512 + head * 2 + value) * 4096 + seed;
  // The codes of exact tokens stay NaN: no kernel may read them.
  const SequenceTokens tokens = case_tokens(p.cache, b);
  if (tokens.is_exact(position)) {
    std::byte* pool = position < tokens.sink_end ? windows.sinks : windows.rings;
    for (int c = static_cast<int>(threadIdx.x); c < side.head_dim; c += static_cast<int>(blockDim.x))
      put_number(pool + case_window_offset(p.cache, tokens, b, head, position, c, value),
                 2.0f * uniform(key + c) - 1.0f, true);
    return;
  }
  std::byte* tile =
      pages + page * p.cache.page_stride + (value ? layout.value_tile(head, slot) : layout.key_tile(head, slot));
  const int token = slot % kTileTokens;
  if (side.exact()) {
    for (int c = static_cast<int>(threadIdx.x); c < side.head_dim; c += static_cast<int>(blockDim.x))
      put_number(tile + exact_offset(side.head_dim, token, c), 2.0f * uniform(key + c) - 1.0f, true);
    return;
  }
  if (side.is_bits()) {
    for (int i = static_cast<int>(threadIdx.x); i < side.row_words * (value ? 4 : 1);
         i += static_cast<int>(blockDim.x)) {
      if (value)
        tile[value_byte_offset(side, token, i)] = static_cast<std::byte>(hash(key + i));
      else
        *reinterpret_cast<unsigned*>(tile + key_word_offset(side, token, i)) = hash(key + 2 * i) ^ hash(key + 2 * i + 1)
                                                                                                       << 8;
    }
  } else {
    for (int i = static_cast<int>(threadIdx.x); i < 4 * side.piece_bytes(); i += static_cast<int>(blockDim.x)) {
      const int lane = i / side.piece_bytes(), byte = i % side.piece_bytes();
      tile[value ? value_code_offset(side, token, lane, byte) : key_code_offset(side, token, lane, byte)] =
          static_cast<std::byte>(hash(key + i));
    }
  }
  for (int g = static_cast<int>(threadIdx.x); g < side.groups(); g += static_cast<int>(blockDim.x)) {
    const float levels = side.is_bits() ? 3.0f : static_cast<float>((1 << side.bits) - 1);
    const int spread = value ? value_spread : 0;
    const auto token_hash = static_cast<unsigned>(hash(key + 4000));
    const float factor = ldexpf(1.0f, spread ? static_cast<int>(token_hash % (2 * spread + 1)) - spread : 0);
    const bool constant = spread && token_hash / 1024 % 8 == 0;
    const float scale = constant ? 0.0f : (0.3f + uniform(key + 2000 + g)) * 2.0f / levels * factor,
                other = uniform(key + 3000 + g);
    put_group_number(tile + number_offset(side, token, g, 0), scale, side, bfloat);
    for (int i = 1; side.is_bits() && i < side.numbers; ++i)  // scales of segments
      put_group_number(tile + number_offset(side, token, g, i), scale * (0.5f + uniform(key + 2100 + i)), side, bfloat);
    if (!side.is_bits() && side.numbers == 2)
      put_group_number(tile + number_offset(side, token, g, 1),
                       side.integer_zero ? rintf(0.5f * levels + 6.0f * other - 3.0f)
                                         : -0.5f * levels * scale + factor * (0.2f * other - 0.1f),
                       side, bfloat);
  }
  // Some indices are too large, and count as the last one.
  if (side.index_bytes == 1 && threadIdx.x == 0)
    tile[index_offset(side, token)] = static_cast<std::byte>(hash(key + 4100));
}

/// Centroids of the sides that have indices.
void put_centroids(Arena& arena, const DecodeVariant& variant, PagedCacheView& cache, std::mt19937& random) {
  std::normal_distribution<float> normal;
  for (const bool value : {false, true}) {
    const TileSide& side = value ? variant.v : variant.k;
    if (side.index_bytes == 0) continue;
    RowCode& code = value ? cache.code_v : cache.code_k;
    code.num_centroids = value ? 200 : 256, code.per_head = !value;
    std::vector<float> centroids(
        static_cast<std::size_t>((code.per_head ? cache.num_kv_heads : 1) * code.num_centroids * side.head_dim));
    for (float& x : centroids) x = 0.5f * normal(random);
    code.rotated_centroids = arena.put(centroids);
  }
}

std::vector<float> random_rotations(int heads, int dim, bool transposed, std::mt19937& random) {
  std::normal_distribution<double> normal;
  std::vector<float> all;
  for (int h = 0; h < heads; ++h) {
    std::vector<std::vector<double>> rows(static_cast<std::size_t>(dim),
                                          std::vector<double>(static_cast<std::size_t>(dim)));
    for (std::size_t i = 0; i < rows.size(); ++i) {
      for (double& x : rows[i]) x = normal(random);
      for (std::size_t k = 0; k < i; ++k) {
        double dot = 0.0;
        for (std::size_t c = 0; c < rows.size(); ++c) dot += rows[i][c] * rows[k][c];
        for (std::size_t c = 0; c < rows.size(); ++c) rows[i][c] -= dot * rows[k][c];
      }
      double norm = 0.0;
      for (const double x : rows[i]) norm += x * x;
      for (double& x : rows[i]) x /= std::sqrt(norm);
    }
    for (std::size_t i = 0; i < rows.size(); ++i)
      for (std::size_t c = 0; c < rows.size(); ++c)
        all.push_back(static_cast<float>(transposed ? rows[c][i] : rows[i][c]));
  }
  return all;
}

/// Linear rows: Theta of each head, or one for all heads as the rotation is. Each channel is a random sum of `taps`
/// bits, such that channels are about the size of the row's scale; bits have different numbers of channels, some none.
/// @return  Theta of all KV heads
const float* make_linear(Arena& arena, const DecodeCase& c, const TileSide& side, DeviceRotation& rotation, int taps,
                         bool value, std::mt19937& random) {
  const int heads = rotation.per_head ? c.num_kv_heads : 1, bits = 32 * side.row_words;
  std::normal_distribution<float> normal(0.0f, 2.0f / std::sqrt(static_cast<float>(taps)));
  std::vector<float> bases(static_cast<std::size_t>(heads * side.head_dim * bits));
  for (int row = 0; row < heads * side.head_dim; ++row)
    for (int i = 0; i < taps; ++i)
      bases[static_cast<std::size_t>(row) * static_cast<std::size_t>(bits) + random() % static_cast<unsigned>(bits)] =
          normal(random);
  const HostTaps made = linear_taps(bases, side.head_dim, bits, value);
  rotation.taps = {arena.put(made.weights), arena.put(made.sources), made.count};
  std::vector<float> all;
  for (int head = 0; head < c.num_kv_heads; ++head) {
    const auto first = bases.begin() + (heads > 1 ? std::ptrdiff_t{head} * side.head_dim * bits : 0);
    all.insert(all.end(), first, first + std::ptrdiff_t{side.head_dim} * bits);
  }
  return arena.put(all);
}

/// A codebook of random numbers that is symmetric about 0.
std::vector<float> odd_table(int bits, std::mt19937& random) {
  const int half = 1 << (bits - 1);
  // Different levels, of all signs of their lowest bits, times a step that is no power of two.
  std::set<int> levels;
  while (static_cast<int>(levels.size()) < half) levels.insert(1 + static_cast<int>(random() % kMostLevel));
  const float step = 0.01f + 1e-4f * static_cast<float>(random() % 100);
  std::vector<float> upper, table;
  for (const int level : levels) upper.push_back(step * static_cast<float>(level));
  for (auto x = upper.rbegin(); x != upper.rend(); ++x) table.push_back(-*x);
  table.insert(table.end(), upper.begin(), upper.end());
  return table;
}

/// Keys of mixed widths with codebook codes: other widths and codebooks for each head; with one scale, gains.
const float* make_segments(Arena& arena, const DecodeCase& c, const TileSide& side, RowCode& code,
                           plain::PlainBases& bases, std::mt19937& random) {
  const auto dim = static_cast<std::size_t>(side.head_dim);
  TensorPlan plan;
  plan.rotation.scope = Scope::kv_head;
  CodebookCoder coder{.bits = 4, .group_size = 0, .per_head = true};
  BitAllocation widths;
  for (int head = 0; head < c.num_kv_heads; ++head) {
    // The mean is 3 bits, or 2: as many channels are wider by one bit as are narrower, and of rows with all widths
    // twice as many are as are narrower, or wider, by two.
    const int mean = side.row_words / 4, few = side.numbers == 2 ? 64 : 5 + static_cast<int>(random() % 20),
              rare = side.numbers == 4 || side.numbers == 1 ? 2 + static_cast<int>(random() % (mean == 3 ? 10 : 5)) : 0;
    std::vector<std::pair<int, int>> runs = {{4, few + 2 * rare}, {3, 128 - 2 * few - 3 * rare}, {2, few}, {1, rare}};
    if (mean == 2) runs = {{4, rare}, {3, few}, {2, 128 - 2 * few - 3 * rare}, {1, few + 2 * rare}};
    for (const auto& [width, count] : runs)
      widths.channel_bits.insert(widths.channel_bits.end(), static_cast<std::size_t>(count),
                                 static_cast<std::uint8_t>(width));
    for (const int width : {1, 2, 3, 4}) {
      const std::vector<float> table = odd_table(width, random);
      coder.tables[width].insert(coder.tables[width].end(), table.begin(), table.end());
    }
    for (int width = 0; side.numbers == 1 && width < kGainWidths; ++width)
      widths.segment_gain.push_back(std::exp2(static_cast<float>(random() % 5) - 2.0f));
  }
  plan.coder = coder, plan.allocation = widths;
  const SegmentRows rows = segment_rows(plan, c.num_kv_heads, side.head_dim);
  if (rows.programs.empty()) throw std::logic_error("the plan has no rows of segments");
  code.programs = bases.programs = arena.put(rows.programs);
  code.program_taps = {arena.put(rows.weights), arena.put(rows.sources), 1};
  const auto bits = static_cast<std::size_t>(kMostUnitChannels);
  std::vector<float> all(static_cast<std::size_t>(c.num_kv_heads) * dim * bits);
  for (std::size_t i = 0; i < rows.weights.size(); ++i)
    all[(i / bits * dim + rows.sources[i]) * bits + i % bits] += rows.weights[i];
  return arena.put(all);
}

/// Codebook codes: a codebook of random numbers for each head, symmetric about 0, and its odd sets as a basis.
const float* make_tables(Arena& arena, const DecodeCase& c, const TileSide& side, RowCode& code, std::mt19937& random) {
  const int bits = side.table_bits, words = plain::linear_bits(side) / 32;
  std::vector<LevelTable> levels;
  std::vector<float> weights, bases(static_cast<std::size_t>(c.num_kv_heads * side.head_dim * 32 * words));
  for (int head = 0; head < c.num_kv_heads; ++head) {
    const std::vector<float> table = odd_table(bits, random);
    levels.push_back(level_table(table).value());
    for (const double weight : odd_weights(table)) weights.push_back(static_cast<float>(weight));
    for (int w = 0; w < words; ++w)
      for (int i = 0; i < 32; ++i) {
        const TableWord word = table_word(bits, w);
        const int row = head * side.head_dim + 32 * word.unit + i;
        bases[static_cast<std::size_t>((row * words + w) * 32 + i)] =
            weights[static_cast<std::size_t>(head * odd_sets(bits) + word.set)];
      }
  }
  code.weights = arena.put(weights), code.levels = arena.put(levels);
  return arena.put(bases);
}

/// What rows in bit tiles are multiplied by, on both sides.
plain::PlainBases make_bases(Arena& arena, const DecodeCase& c, const DecodeVariant& variant, PagedCacheView& cache,
                             std::mt19937& random) {
  plain::PlainBases all;
  all.k = variant.k.segments         ? make_segments(arena, c, variant.k, cache.code_k, all, random)
          : variant.k.table_bits > 0 ? make_tables(arena, c, variant.k, cache.code_k, random)
                                     : make_linear(arena, c, variant.k, cache.rotation_k, 5, false, random);
  all.v = variant.v.table_bits > 0 ? make_tables(arena, c, variant.v, cache.code_v, random)
                                   : make_linear(arena, c, variant.v, cache.rotation_v, 11, true, random);
  return all;
}

/// The result rounded to what the kernel writes.
double rounded(double x, bool bf16) {
  return bf16 ? static_cast<double>(__bfloat162float(__float2bfloat16(static_cast<float>(x))))
              : static_cast<double>(__half2float(__float2half(static_cast<float>(x))));
}

template <typename Activation>
void plain(const DecodeParams& p, const PageLayout& layout, const plain::PlainBases& bases, bool bfloat_k,
           bool bfloat_v, int longest, Arena& arena, std::vector<double>& out, std::vector<double>& lse,
           std::vector<double>& out32, std::vector<double>& lse32) {
  const int tokens = p.tokens();
  const auto rows = static_cast<std::size_t>(tokens) * static_cast<std::size_t>(p.num_q_heads),
             elements = rows * static_cast<std::size_t>(layout.v.head_dim);
  const dim3 grid(static_cast<unsigned>(tokens), static_cast<unsigned>(p.num_q_heads));
  const auto go = [&](auto zero, std::vector<double>& o, std::vector<double>& l) {
    using Float = decltype(zero);
    Float* scores = arena.take<Float>(rows * static_cast<std::size_t>(longest), 0);
    Float* result = arena.take<Float>(elements, 0xFF);
    Float* sums = arena.take<Float>(rows, 0xFF);
    run_kernel("plain_decode", plain::plain_decode<Float, Activation>, grid, kPlainThreads, p, layout, bases, bfloat_k,
               bfloat_v, scores, longest, result, sums);
    const std::vector<Float> a = get(result, elements), b = get(sums, rows);
    o.assign(a.begin(), a.end());
    l.assign(b.begin(), b.end());
  };
  go(0.0, out, lse);
  go(0.0f, out32, lse32);
}

}  // namespace

bool have_device() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

DecodeOutcome run_decode_case(const DecodeVariant& variant, const DecodeCase& c) {
  Arena arena;
  std::mt19937 random(c.seed);
  const int dim = variant.k.head_dim, v_dim = variant.v.head_dim, batch = static_cast<int>(c.lengths.size());
  const PageLayout layout{variant.k, variant.v, c.num_kv_heads, c.page_size};
  const int longest = std::max(1, c.lengths.empty() ? 0 : *std::max_element(c.lengths.begin(), c.lengths.end()));
  const int max_pages = (longest + c.page_size - 1) / c.page_size;

  // Page tables in random order; entries behind a sequence's end must never be read as pages.
  constexpr int kNoPage = 0x3FFFFFFF;
  std::vector<int> order;
  std::vector<std::vector<int>> tables(c.lengths.size());
  int pages = 0;
  for (std::size_t b = 0; b < c.lengths.size(); ++b)
    for (int i = 0; i < (c.lengths[b] + c.page_size - 1) / c.page_size; ++i) {
      // A sequence does not share its last page, because the other sequence may be longer there.
      const bool shared = c.shared_prefix && b > 0 && i + 1 < static_cast<int>(tables[0].size()) &&
                          (i + 1) * c.page_size <= c.lengths[b];
      tables[b].push_back(shared ? tables[0][static_cast<std::size_t>(i)] : pages++);
    }
  for (int i = 0; i < pages; ++i) order.push_back(i);
  std::shuffle(order.begin(), order.end(), random);
  // No kernel may look up a page whose tokens lie before the sliding window.
  const auto hide = [&](std::vector<int>& row, std::size_t b) {
    if (c.sliding_window == 0) return;
    const int length = c.replay.empty() ? c.lengths[b] : std::min(c.lengths[b], c.replay[b]);
    const int n = c.new_tokens.empty() ? 1 : c.new_tokens[b];
    const int hidden = std::max(0, length - n + 1 - c.sliding_window) / c.page_size;
    std::fill_n(row.begin(), hidden, kNoPage);
  };
  std::vector<int> table, indptr = {0};
  std::size_t b = 0;
  for (auto& row : tables) {
    for (int& page : row) page = order[static_cast<std::size_t>(page)];
    hide(row, b++);
    if (!c.indptr) row.resize(static_cast<std::size_t>(std::max(1, max_pages)), kNoPage);
    table.insert(table.end(), row.begin(), row.end());
    indptr.push_back(static_cast<int>(table.size()));
  }
  table.push_back(kNoPage);

  DecodeParams p;
  p.cache.batch = batch, p.cache.num_kv_heads = c.num_kv_heads, p.num_q_heads = c.num_kv_heads * c.heads;
  p.softmax_scale = c.sharpness / std::sqrt(static_cast<float>(dim));
  int* lengths = arena.put(c.lengths);
  p.cache.seq_lens = lengths;
  p.cache.windows = {c.sink_tokens, c.recent_tokens}, p.sliding_window = c.sliding_window;
  p.cache.page_table = arena.put(table), p.cache.page_table_stride = std::max(1, max_pages);
  if (c.indptr) p.cache.page_indptr = arena.put(indptr), p.cache.page_table_stride = indptr.back() + 1;
  p.cache.page_shift = std::countr_zero(static_cast<unsigned>(c.page_size));
  p.cache.page_stride = layout.page_bytes() + 16;
  std::byte* pool = arena.take<std::byte>(static_cast<std::size_t>(pages * p.cache.page_stride), 0xFF);
  p.cache.pages = pool;
  const CaseWindows windows = put_windows(arena, p.cache, variant.k, variant.v, c.lengths, pages, c.seed);

  int tokens = batch;
  if (!c.new_tokens.empty()) {
    std::vector<int> q_indptr = {0};
    for (const int n : c.new_tokens) q_indptr.push_back(q_indptr.back() + n);
    tokens = q_indptr.back();
    p.q_indptr = arena.put(q_indptr), p.num_tokens = tokens;
    p.max_new_tokens = std::max(1, *std::max_element(c.new_tokens.begin(), c.new_tokens.end()));
    if (c.masks) {
      std::vector<std::uint32_t> masks;
      for (int i = 0; i < tokens; ++i) masks.push_back(static_cast<std::uint32_t>(random()));
      p.token_masks = arena.put(masks);
    }
  }
  if (!c.first.empty()) p.first = arena.put(c.first);
  if (!c.last.empty()) p.last = arena.put(c.last);
  p.logit_softcap = c.softcap;
  const auto rows = static_cast<std::size_t>(tokens) * static_cast<std::size_t>(p.num_q_heads),
             elements = rows * static_cast<std::size_t>(v_dim);
  std::normal_distribution<float> normal;
  std::vector<unsigned short> q(rows * static_cast<std::size_t>(dim));
  for (auto& x : q)
    x = variant.bf16 ? __bfloat16_as_ushort(__float2bfloat16(normal(random)))
                     : __half_as_ushort(__float2half(normal(random)));
  p.q = arena.put(q), p.q_stride = static_cast<std::int64_t>(p.num_q_heads) * dim;
  auto* out = arena.take<unsigned short>(elements, 0xFF);
  p.out = out, p.out_stride = static_cast<std::int64_t>(p.num_q_heads) * v_dim;
  p.lse = arena.take<float>(rows, 0xFF);
  if (c.rotation == CaseRotation::scaled) {
    // Queries and results with channels of very different size.
    const std::vector<float> factors = random_scales(c.num_kv_heads, std::max(dim, v_dim), 6, c.seed);
    p.cache.rotation_k = {.order = dim & -dim, .per_head = true, .factors = arena.put(factors)};
    p.cache.rotation_v = {.order = (v_dim & -v_dim) / 2, .per_head = true, .factors = p.cache.rotation_k.factors};
  } else if (c.rotation == CaseRotation::transform) {
    // Keys: A^-T is as good a transform as any.
    const Transform of_keys = random_transforms(c.num_kv_heads, dim, kCaseCondition, c.seed),
                    of_values = random_transform(v_dim, kCaseCondition, c.seed + 100, 3);
    p.cache.rotation_k = {
        .per_head = true,
        .matrix = arena.put(of_keys.matrix),
        .fragments = arena.put(rotation_fragments(of_keys.matrix, dim)),
    };
    p.cache.rotation_v = {
        .matrix = arena.put(of_values.inverse),
        .fragments = arena.put(rotation_fragments(of_values.inverse, v_dim)),
    };
  } else if (c.rotation == CaseRotation::hadamard) {
    std::vector<std::int8_t> signs(static_cast<std::size_t>(c.num_kv_heads * std::max(dim, v_dim)));
    for (auto& s : signs) s = random() & 1 ? 1 : -1;
    p.cache.rotation_k = {dim & -dim, true, arena.put(signs)};
    p.cache.rotation_v = {(v_dim & -v_dim) / 2, true, p.cache.rotation_k.signs};
  } else if (c.rotation == CaseRotation::dense) {
    const std::vector<float> of_keys = random_rotations(c.num_kv_heads, dim, false, random),
                             of_values = random_rotations(1, v_dim, true, random);
    p.cache.rotation_k = {0, true, nullptr, arena.put(of_keys), arena.put(rotation_fragments(of_keys, dim))};
    p.cache.rotation_v = {0, false, nullptr, arena.put(of_values), arena.put(rotation_fragments(of_values, v_dim))};
  }
  plain::PlainBases bases;
  if (variant.k.is_bits()) bases = make_bases(arena, c, variant, p.cache, random);
  put_centroids(arena, variant, p.cache, random);
  if (c.centers) {
    std::vector<float> center(static_cast<std::size_t>(c.num_kv_heads * std::max(dim, v_dim))),
        logits(static_cast<std::size_t>(p.num_q_heads));
    for (float& x : center) x = normal(random);
    for (float& x : logits) x = c.sink_level + 3.0f * normal(random);
    p.cache.center_k = arena.put(center), p.cache.center_v = arena.put(center), p.sink_logits = arena.put(logits);
  }

  DecodeOutcome outcome;
  DecodeLaunch launch;
  Status status = variant.plan(launch);
  if (status.ok()) {
    p.workspace = arena.take<std::byte>(
        decode_workspace_bytes(launch, decode_work_tiles(variant, batch, c.num_kv_heads, c.heads, p.max_new_tokens)),
        0xFF);
    status = check_decode(variant, p);
  }
  if (!status.ok()) return {status.message(), 0, 0, 0, 0};

  const auto compare = [&] {
    if (tokens == 0) return;
    std::vector<double> truth, lse, plain32, lse32;
    if (variant.bf16)
      plain<__nv_bfloat16>(p, layout, bases, variant.k_bfloat, variant.v_bfloat, longest, arena, truth, lse, plain32,
                           lse32);
    else
      plain<__half>(p, layout, bases, variant.k_bfloat, variant.v_bfloat, longest, arena, truth, lse, plain32, lse32);
    const std::vector<unsigned short> found = get(out, elements);
    const std::vector<float> found_lse = get(p.lse, rows);
    double error = 0.0, error32 = 0.0, size = 0.0;
    for (std::size_t i = 0; i < elements; ++i) {
      const double x = variant.bf16 ? static_cast<double>(__bfloat162float(__ushort_as_bfloat16(found[i])))
                                    : static_cast<double>(__half2float(__ushort_as_half(found[i])));
      if (!std::isfinite(x) && outcome.failure.empty())
        outcome.failure = "element " + std::to_string(i) + " is not finite";
      error += (x - truth[i]) * (x - truth[i]);
      const double y = rounded(plain32[i], variant.bf16);
      error32 += (y - truth[i]) * (y - truth[i]);
      size += truth[i] * truth[i];
    }
    outcome.error = std::max(outcome.error, std::sqrt(error / std::max(size, 1e-30)));
    outcome.plain_error = std::max(outcome.plain_error, std::sqrt(error32 / std::max(size, 1e-30)));
    for (std::size_t i = 0; i < rows; ++i) {
      if (std::isinf(lse[i]) && static_cast<double>(found_lse[i]) == lse[i]) continue;
      if (!std::isfinite(found_lse[i]) && outcome.failure.empty())
        outcome.failure = "lse " + std::to_string(i) + " is not finite";
      outcome.lse_error = std::max(outcome.lse_error, std::abs(static_cast<double>(found_lse[i]) - lse[i]));
      outcome.lse_plain_error = std::max(outcome.lse_plain_error, std::abs(lse32[i] - lse[i]));
    }
  };

  const auto fill = [&] {
    if (batch == 0) return;
    const dim3 grid(static_cast<unsigned>(longest), static_cast<unsigned>(batch),
                    static_cast<unsigned>(2 * c.num_kv_heads));
    run_kernel("fill_token", fill_token, grid, kPlainThreads, p, layout, variant.k_bfloat, variant.v_bfloat, pool,
               windows, c.value_spread, c.seed * 7919);
  };
  fill();
  // Twice, because a call must not depend on the contents of the workspace.
  cudaStream_t stream = nullptr;
  check(cudaStreamCreate(&stream), "cudaStreamCreate");
  for (int i = 0; i < 2 && status.ok(); ++i) {
    check(cudaMemset(out, 0xFF, elements * 2), "cudaMemset");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    status = variant.run(launch, p, stream);
    check(cudaStreamSynchronize(stream), "decode");
  }
  if (status.ok()) compare();
  if (status.ok() && !c.replay.empty()) {
    const RecordedGraph graph(stream, [&] { status = variant.run(launch, p, stream); });
    check(cudaMemcpy(lengths, c.replay.data(), c.replay.size() * sizeof(int), cudaMemcpyHostToDevice), "cudaMemcpy");
    fill();
    for (int i = 0; i < 3; ++i) {
      check(cudaMemset(out, 0xFF, elements * 2), "cudaMemset");
      graph.launch();
    }
    compare();
  }
  cudaStreamDestroy(stream);
  if (!status.ok()) outcome.failure = status.message();
  if (outcome.failure.empty()) outcome.failure = windows.fault();
  return outcome;
}

}  // namespace kvq::test
