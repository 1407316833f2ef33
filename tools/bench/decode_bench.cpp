#include "bench/cache.h"
#include "bench/faults.h"
#include "bench/kernels.h"
#include "bench/measure.h"
#include "bench/rotations.h"

#include <kvq/core/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>

namespace kvq::bench {

namespace {

constexpr double kMostError = 5e-3;  // rounding the result to bfloat16 alone gives 1.7e-3

/// Relative error of the last KV head of the last sequence against attention over the codec's rows; infinite if any
/// result is not finite (results start as NaN).
double error_of(const DecodeCase& c, const Cache& cache, const HeadRotations& k, const HeadRotations& v,
                const std::uint16_t* q, const std::uint16_t* out, float softmax_scale) {
  const int dim = c.variant->k.head_dim, head = c.num_kv_heads - 1;
  const int group_elements = c.num_q_heads / c.num_kv_heads * dim;
  const auto elements = static_cast<std::size_t>(group_elements);
  const auto all = static_cast<std::size_t>(c.batch * c.num_q_heads) * static_cast<std::size_t>(dim);
  const std::vector<float> found = floats_at(out, all, c.variant->bf16);
  if (!std::all_of(found.begin(), found.end(), [](float x) { return std::isfinite(x); })) return INFINITY;
  const CacheShape shape = cache_of(c);
  const HostSequence sequence = cache.sequence(c.batch - 1);
  StoredRows keys(shape, sequence, Side::k, head), values(shape, sequence, Side::v, head);
  const std::vector<double> expected = plain_attention(
      c.context, [&](int t) { return keys.at(t); }, [&](int t) { return values.at(t); }, k.plans.back(), v.plans.back(),
      floats_at(q + all - elements, elements, c.variant->bf16), dim, static_cast<double>(softmax_scale));
  return relative_error(std::span(found).last(elements), expected);
}

}  // namespace

DecodeResult measure_decode(const Device& device, const DecodeCase& c) {
  const DecodeVariant& variant = *c.variant;
  const CacheBytes bytes = bytes_of(c);
  DecodeLaunch launch;
  check(variant.plan(launch));

  std::vector<std::unique_ptr<Cache>> sets;
  sets.reserve(static_cast<std::size_t>(num_sets(bytes.total())));
  for (int i = 0; i < num_sets(bytes.total()); ++i)
    sets.push_back(std::make_unique<Cache>(device, cache_of(c), static_cast<unsigned>(2 * i + 1)));
  Memory memory;
  std::mt19937 random(1);
  const HeadRotations k = random_rotations(c.rotation, c.num_kv_heads, variant.k.head_dim, random),
                      v = random_rotations(c.rotation, c.num_kv_heads, variant.v.head_dim, random);
  const auto rows = static_cast<std::size_t>(c.batch) * static_cast<std::size_t>(c.num_q_heads);
  const std::size_t elements = rows * static_cast<std::size_t>(variant.k.head_dim);
  auto* q = memory.take<std::uint16_t>(elements);
  auto* out = memory.poisoned<std::uint16_t>(elements);
  check(fill_rows(device.stream(), q, static_cast<std::int64_t>(elements), variant.bf16, 3));

  DecodeParams p;
  const Faults faults;
  p.cache.faults = faults.record();
  p.num_q_heads = c.num_q_heads;
  p.softmax_scale = 1.0f / std::sqrt(static_cast<float>(variant.k.head_dim));
  p.q = q, p.out = out, p.q_stride = p.out_stride = std::int64_t{c.num_q_heads} * variant.k.head_dim;
  p.cache.rotation_k = key_rotation(memory, k), p.cache.rotation_v = value_rotation(memory, v);
  p.workspace = memory.zeros<std::byte>(
      decode_workspace_bytes(launch, static_cast<std::size_t>(c.batch) * static_cast<std::size_t>(c.num_kv_heads)));
  bool checked = true;
  const auto run = [&](int i) {
    sets[static_cast<std::size_t>(i) % sets.size()]->enter(p.cache, checked);
    check(variant.run(launch, p, device.stream()));
  };
  sets[0]->enter(p.cache);
  check(check_decode(variant, p));

  DecodeResult result;
  device.synchronize();
  run(0);
  result.error = error_of(c, *sets[0], k, v, q, out, p.softmax_scale);
  if (!(result.error <= kMostError))
    throw Error{
        ErrorKind::check_failed,
        fmt::format("{}: batch {}, context {}: error {:.2e} against the codec's attention, expected at most {:.0e}",
                    variant.name, c.batch, c.context, result.error, kMostError)};
  const int calls = num_calls(bytes.total());
  result.time = device.time(calls, run);
  if (c.unchecked) {
    checked = false;
    result.unchecked = device.time(calls, run);
  }
  faults.expect_none(fmt::format("{}: batch {}, context {}", variant.name, c.batch, c.context));
  auto* sink = memory.take<unsigned>(1);
  result.floor =
      device.time(calls, [&](int i) { sets[static_cast<std::size_t>(i) % sets.size()]->read(device, sink); });
  return result;
}

}  // namespace kvq::bench
