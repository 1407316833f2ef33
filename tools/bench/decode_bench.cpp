#include "bench/cache.h"
#include "bench/choose.h"
#include "bench/faults.h"
#include "bench/kernels.h"
#include "bench/measure.h"
#include "bench/reference.h"
#include "bench/rotations.h"
#include "common/side_format.h"

#include <kvq/core/error.h>
#include <kvq/runtime/checks.h>
#include <kvq/runtime/prepare.h>
#include <kvq/runtime/row_code_data.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>

namespace kvq::bench {

namespace {

constexpr double kMostError = 5e-3;  // rounding the result to bfloat16 alone gives 1.7e-3

/// Relative error of the last KV head of the last sequence's last token against attention over the codec's rows;
/// infinite if any result is not finite (results start as NaN).
double error_of(const DecodeCase& c, const Cache& cache, const HeadRotations& k, const HeadRotations& v,
                const std::uint16_t* q, const std::uint16_t* out, float softmax_scale) {
  const int dim = c.variant->k.head_dim, head = c.num_kv_heads - 1;
  const int group_elements = c.num_q_heads / c.num_kv_heads * dim;
  const auto elements = static_cast<std::size_t>(group_elements);
  const auto all = static_cast<std::size_t>(c.batch * c.new_tokens * c.num_q_heads) * static_cast<std::size_t>(dim);
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

/// The write of a case's new tokens, with the rotations of its cache. Affine sides with dense rotations are clipped, as
/// method oscar does.
class Append {
 public:
  Append(const Device& device, const DecodeCase& c, const HeadRotations& k, const HeadRotations& v)
      : variant_(&write_of(c)) {
    check(variant_->plan(launch_));
    p_.k = side_of(c, c.variant->k, c.variant->k_bfloat, k), p_.v = side_of(c, c.variant->v, c.variant->v_bfloat, v);
    if (c.variant->k.is_bits()) put_code(cache_of(c), Side::k, p_.k);
    if (c.variant->v.is_bits()) put_code(cache_of(c), Side::v, p_.v);
    if (c.variant->k.index_bytes > 0) p_.k.code = centroid_code(memory_, k, c.variant->k, Side::k);
    if (c.variant->v.index_bytes > 0) p_.v.code = centroid_code(memory_, v, c.variant->v, Side::v);
    const std::int64_t k_elements = std::int64_t{c.batch} * c.new_tokens * p_.k.token_stride,
                       v_elements = std::int64_t{c.batch} * c.new_tokens * p_.v.token_stride;
    auto* keys = memory_.take<std::uint16_t>(static_cast<std::size_t>(k_elements));
    auto* values = memory_.take<std::uint16_t>(static_cast<std::size_t>(v_elements));
    check(fill_rows(device.stream(), keys, k_elements, c.variant->bf16, 5));
    check(fill_rows(device.stream(), values, v_elements, c.variant->bf16, 6));
    p_.k.x = keys, p_.v.x = values;
    p_.holds_next = prepares_beside_write(c.batch);
  }
  void run(const Device& device, const Cache& cache, FaultRecord* faults) {
    cache.enter(p_);
    p_.faults = faults;
    check(check_write(*variant_, p_));
    check(variant_->run(launch_, p_, device.stream()));
  }

 private:
  /// The write of a format: rows of bits by the kernels that artifacts of such rows get.
  static const WriteVariant& write_of(const DecodeCase& c) {
    const DecodeVariant& decode = *c.variant;
    if (decode.k.is_bits() && decode.v.is_bits())
      return choose_write(side_name(decode.k, decode.k_bfloat), side_name(decode.v, decode.v_bfloat), decode.k.head_dim,
                          decode.bf16, cache_of(c).memory);
    for (const WriteVariant* row : write_variants())
      if (row->bf16 == decode.bf16 && cache_name(*row) == cache_name(decode) && row->k.head_dim == decode.k.head_dim)
        return *row;
    throw Error{ErrorKind::unsupported, fmt::format("{}: no tuned write has its format", decode.name)};
  }
  /// The codes of a side in bit tiles, those of `kvq-bench write`.
  void put_code(const CacheShape& shape, Side side, WriteSide& w) {
    const TensorPlan plan = for_heads(bit_plan(shape, side), shape.num_kv_heads);
    const RowCodeData code = row_code_data(plan, shape.num_kv_heads, (side == Side::v ? shape.v : shape.k).head_dim);
    w.code = code.values;
    w.code.heads = memory_.put(code.heads), w.code.tables = memory_.put(code.tables);
  }
  WriteSide side_of(const DecodeCase& c, const TileSide& side, bool bfloat, const HeadRotations& rotations) {
    constexpr double kClip = 0.96;
    WriteSide w;
    w.token_stride = std::int64_t{c.num_kv_heads} * side.head_dim;
    w.rule = side.numbers == 2 ? ScaleRule::minmax : ScaleRule::norm;
    if (c.rotation == CaseRotation::hadamard) {
      w.order = rotations.order, w.per_head = true;
      w.signs = memory_.put(rotations.signs);
      return w;
    }
    if (c.rotation != CaseRotation::dense) return w;
    w.rotation_stride = packed_rotation_bytes(side.head_dim);
    std::vector<std::byte> packed(static_cast<std::size_t>(c.num_kv_heads * w.rotation_stride));
    check(pack_rotations(rotations.matrices, side.head_dim, c.variant->bf16, packed, {}));
    w.rotation = memory_.put(packed);
    if (side.is_bits()) return w;
    TensorPlan plan;
    plan.coder = coder_of(side, bfloat, ScaleRule::norm);
    if (side.numbers == 2) plan.clip_ratio.assign(static_cast<std::size_t>(c.num_kv_heads), kClip);
    if (const std::vector<std::int32_t> ranks = clip_ranks(plan, c.num_kv_heads, side.head_dim); !ranks.empty())
      w.clip_ranks = memory_.put(ranks);
    return w;
  }

  Memory memory_;
  const WriteVariant* variant_;
  WriteLaunch launch_;
  WriteParams p_;
};

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
  const auto rows = static_cast<std::size_t>(c.batch * c.new_tokens) * static_cast<std::size_t>(c.num_q_heads);
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
  if (variant.k.is_bits()) p.cache.code_k = bits_code(memory, cache_of(c), Side::k);
  if (variant.v.is_bits()) p.cache.code_v = bits_code(memory, cache_of(c), Side::v);
  if (variant.k.index_bytes > 0) p.cache.code_k = centroid_code(memory, k, variant.k, Side::k);
  if (variant.v.index_bytes > 0) p.cache.code_v = centroid_code(memory, v, variant.v, Side::v);
  p.cache.rotation_k = variant.tuned && is_linear_format(variant.k) ? bits_rotation(memory, k, cache_of(c), Side::k)
                                                                    : key_rotation(memory, k);
  p.cache.rotation_v = variant.tuned && is_linear_format(variant.v) ? bits_rotation(memory, v, cache_of(c), Side::v)
                                                                    : value_rotation(memory, v);
  if (c.new_tokens > 1) {
    std::vector<std::int32_t> q_indptr;
    for (int b = 0; b <= c.batch; ++b) q_indptr.push_back(b * c.new_tokens);
    p.q_indptr = memory.put(q_indptr), p.num_tokens = q_indptr.back(), p.max_new_tokens = c.new_tokens;
  }
  p.workspace = memory.zeros<std::byte>(decode_workspace_bytes(
      launch, decode_work_tiles(variant, c.batch, c.num_kv_heads, c.num_q_heads / c.num_kv_heads, p.max_new_tokens)));
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
  if (c.append) {
    Append append(device, c, k, v);
    checked = true;
    p.inputs_final = prepares_beside_write(c.batch);
    result.append = device.time(calls, [&](int i) {
      append.run(device, *sets[static_cast<std::size_t>(i) % sets.size()], faults.record());
      run(i);
    });
    p.inputs_final = false;
  }
  faults.expect_none(fmt::format("{}: batch {}, context {}", variant.name, c.batch, c.context));
  auto* sink = memory.take<unsigned>(1);
  result.floor =
      device.time(calls, [&](int i) { sets[static_cast<std::size_t>(i) % sets.size()]->read(device, sink); });
  return result;
}

}  // namespace kvq::bench
