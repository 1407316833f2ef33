#include "bench/cache.h"
#include "bench/faults.h"
#include "bench/kernels.h"
#include "bench/measure.h"
#include "bench/rotations.h"

#include <kvq/codec/codec.h>
#include <kvq/core/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>

namespace kvq::bench {

namespace {

constexpr double kMostError = 1e-2;  // keys, values and weights are rounded to 16 bits, as in any bfloat16 kernel

/// The chunks of all sequences: queries, keys and values from the model.
struct Chunk {
  Chunk(const Device& device, const PrefillCase& c, unsigned seed) : tokens(c.batch * c.chunk) {
    const auto count = [&](int heads) { return static_cast<std::size_t>(tokens) * elements(c, heads); };
    const auto rows = [&](int heads, unsigned key) {
      auto* x = memory.take<std::uint16_t>(count(heads));
      check(fill_rows(device.stream(), x, static_cast<std::int64_t>(count(heads)), c.rows->bf16, key));
      return x;
    };
    q = rows(c.num_q_heads, seed), k = rows(c.num_kv_heads, seed + 1), v = rows(c.num_kv_heads, seed + 2);
    out = memory.poisoned<std::uint16_t>(count(c.num_q_heads));
    std::vector<std::int32_t> first;
    for (int b = 0; b <= c.batch; ++b) first.push_back(b * c.chunk);
    indptr = memory.put(first);
  }
  static std::size_t elements(const PrefillCase& c, int heads) {
    return static_cast<std::size_t>(heads) * static_cast<std::size_t>(c.rows->k.head_dim);
  }

  Memory memory;
  int tokens;
  std::uint16_t *q = nullptr, *k = nullptr, *v = nullptr, *out = nullptr;
  std::int32_t* indptr = nullptr;
};

/// Rows of one side that the last query of the last sequence attends to, in the last KV head: rows in the cache, then
/// rows of the chunk.
RowAt rows_of(const PrefillCase& c, StoredRows& stored, const TensorPlan& rotation, const std::uint16_t* chunk) {
  const auto dim = static_cast<std::size_t>(c.rows->k.head_dim), row = dim * static_cast<std::size_t>(c.num_kv_heads),
             first = static_cast<std::size_t>(c.batch - 1) * static_cast<std::size_t>(c.chunk);
  return [&c, &stored, &rotation, row, dim,
          all = floats_at(chunk + first * row, static_cast<std::size_t>(c.chunk) * row, c.rows->bf16),
          rotated = std::vector<float>(dim)](int t) mutable -> std::span<const float> {
    if (t < c.prefix) return stored.at(t);
    const std::size_t end = static_cast<std::size_t>(t - c.prefix + 1) * row;
    rotate_row(rotation, 0, std::span(all).subspan(end - dim, dim), rotated);
    return rotated;
  };
}

/// Relative error against attention over the codec's rows; infinite if any result is not finite (results start as NaN).
double error_of(const PrefillCase& c, const Cache& cache, const Chunk& chunk, const HeadRotations& k,
                const HeadRotations& v, float softmax_scale) {
  const int dim = c.rows->k.head_dim, head = c.num_kv_heads - 1;
  const auto all = static_cast<std::size_t>(chunk.tokens) * Chunk::elements(c, c.num_q_heads);
  const int group_elements = c.num_q_heads / c.num_kv_heads * dim;
  const auto elements = static_cast<std::size_t>(group_elements);
  const std::vector<float> found = floats_at(chunk.out, all, c.rows->bf16);
  if (!std::all_of(found.begin(), found.end(), [](float x) { return std::isfinite(x); })) return INFINITY;
  const CacheShape shape = cache_of(c);
  const HostSequence sequence = cache.sequence(c.batch - 1);
  StoredRows keys(shape, sequence, Side::k, head), values(shape, sequence, Side::v, head);
  const std::vector<double> expected = plain_attention(
      c.prefix + c.chunk, rows_of(c, keys, k.plans.back(), chunk.k), rows_of(c, values, v.plans.back(), chunk.v),
      k.plans.back(), v.plans.back(), floats_at(chunk.q + all - elements, elements, c.rows->bf16), dim,
      static_cast<double>(softmax_scale));
  return relative_error(std::span(found).last(elements), expected);
}

}  // namespace

PrefillResult measure_prefill(const Device& device, const PrefillCase& c) {
  const int dim = c.rows->k.head_dim;
  PrefillLaunch launch;
  launch.shape.batch = c.batch, launch.shape.num_q_heads = c.num_q_heads, launch.shape.num_kv_heads = c.num_kv_heads;
  launch.shape.max_queries = c.chunk, launch.shape.max_keys = c.prefix + c.chunk;
  check(check_prefill_shape(*c.attention, *c.rows, launch.shape));
  check(c.attention->plan(*c.rows, launch));

  const int sets = num_sets(bytes_of(cache_of(c)).total());
  std::vector<std::unique_ptr<Cache>> caches;
  std::vector<std::unique_ptr<Chunk>> chunks;
  for (int i = 0; i < sets; ++i) {
    caches.push_back(std::make_unique<Cache>(device, cache_of(c), static_cast<unsigned>(2 * i + 1)));
    chunks.push_back(std::make_unique<Chunk>(device, c, static_cast<unsigned>(3 * i + 1)));
  }
  Memory memory;
  std::mt19937 random(1);
  const HeadRotations k = random_rotations(c.rotation, c.num_kv_heads, dim, random),
                      v = random_rotations(c.rotation, c.num_kv_heads, dim, random);
  PrefillParams p;
  p.num_q_heads = c.num_q_heads, p.softmax_scale = 1.0f / std::sqrt(static_cast<float>(dim));
  const Faults faults;
  p.cache.faults = faults.record();
  p.num_tokens = c.batch * c.chunk, p.max_queries = c.chunk, p.max_keys = c.prefix + c.chunk;
  if (c.rows->k.is_bits()) {
    p.cache.rotation_k = bits_rotation(memory, k, cache_of(c), Side::k),
    p.cache.rotation_v = bits_rotation(memory, v, cache_of(c), Side::v);
    p.cache.code_k = bits_code(memory, cache_of(c), Side::k), p.cache.code_v = bits_code(memory, cache_of(c), Side::v);
  } else {
    p.cache.rotation_k = key_rotation(memory, k), p.cache.rotation_v = value_rotation(memory, v);
  }
  if (c.rows->k.index_bytes > 0) p.cache.code_k = centroid_code(memory, k, c.rows->k, Side::k);
  if (c.rows->v.index_bytes > 0) p.cache.code_v = centroid_code(memory, v, c.rows->v, Side::v);
  p.q_stride = p.out_stride = std::int64_t{c.num_q_heads} * dim;
  p.k_stride = p.v_stride = std::int64_t{c.num_kv_heads} * dim;
  p.workspace = memory.take<std::byte>(static_cast<std::size_t>(launch.workspace_bytes));
  const auto enter = [&](int i) {
    const auto set = static_cast<std::size_t>(i % sets);
    caches[set]->enter(p.cache);
    const Chunk& chunk = *chunks[set];
    p.q_indptr = chunk.indptr, p.q = chunk.q, p.k = chunk.k, p.v = chunk.v, p.out = chunk.out;
  };
  const auto run = [&](int i) {
    enter(i);
    check(c.attention->run(*c.rows, launch, p, device.stream()));
  };
  enter(0);
  check(check_prefill(*c.attention, *c.rows, launch, p));

  PrefillResult result;
  result.workspace_bytes = launch.workspace_bytes;
  device.synchronize();
  run(0);
  result.error = error_of(c, *caches[0], *chunks[0], k, v, p.softmax_scale);
  if (!(result.error <= kMostError))
    throw Error{ErrorKind::check_failed,
                fmt::format("{}: batch {}, {} tokens over {}: error {:.2e} against the codec's attention, expected at "
                            "most {:.0e}",
                            c.attention->name, c.batch, c.chunk, c.prefix, result.error, kMostError)};
  result.time = device.time(sets, run);
  faults.expect_none(fmt::format("{}: batch {}, {} tokens over {}", c.attention->name, c.batch, c.chunk, c.prefix));
  return result;
}

}  // namespace kvq::bench
