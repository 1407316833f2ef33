#include <kvq/core/error.h>
#include <kvq/plan/linear_rows.h>
#include <kvq/plan/table_rows.h>
#include <kvq/runtime/checks.h>
#include <kvq/runtime/kernel_choice.h>
#include <kvq/runtime/pair_bound.h>

#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

namespace kvq {

namespace {

/// Distance of a tuned variant from a key: weighted number of properties that differ. Properties that no plan can
/// change have the largest weights.
template <typename Variant>
int distance(const Variant& row, const KernelKey& key) {
  int far = 8 * (row.k.head_dim != key.k.head_dim);
  if constexpr (requires { row.bf16; }) far += 4 * (row.bf16 != key.bf16);
  const auto add = [&](const TileSide& a, bool a_bfloat, const TileSide& b, bool b_bfloat) {
    far += 2 * (a.bits != b.bits) + (a.numbers != b.numbers) + (a.group_size != b.group_size) +
           (a.integer_zero != b.integer_zero) + (number_type_of(a, a_bfloat) != number_type_of(b, b_bfloat));
  };
  add(row.k, row.k_bfloat, key.k, key.k_bfloat);
  add(row.v, row.v_bfloat, key.v, key.v_bfloat);
  return far;
}

template <typename Variant>
std::string nearest(std::span<const Variant* const> rows, const KernelKey& key) {
  std::vector<const Variant*> sorted(rows.begin(), rows.end());
  std::stable_sort(sorted.begin(), sorted.end(),
                   [&](const Variant* a, const Variant* b) { return distance(*a, key) < distance(*b, key); });
  std::vector<std::string> names;
  for (const Variant* row : sorted)
    if (names.size() < 4) names.push_back(row->name);
  return fmt::format("nearest of {} that are built: {} (rows of variants.json)", rows.size(), fmt::join(names, ", "));
}

std::string description(const KernelKey& key) {
  const std::string dim = key.k.head_dim == key.v.head_dim
                              ? fmt::format("head_dim {}", key.k.head_dim)
                              : fmt::format("head_dim {} of k and {} of v", key.k.head_dim, key.v.head_dim);
  return fmt::format("{}, k {}, v {}, {} activations", dim, side_name(key.k, key.k_bfloat),
                     side_name(key.v, key.v_bfloat), key.bf16 ? "bf16" : "fp16");
}

/// The format for the generic kernels; throws if they do not support it.
template <typename Variant>
CacheFormat generic_format(const char* verb, std::span<const Variant* const> rows, const KernelKey& key) {
  const CacheFormat format{key.k, key.v, key.k_bfloat, key.v_bfloat};
  if (!generic_supports(format))
    throw Error{ErrorKind::unsupported,
                fmt::format("{}: no kernel for {}; generic kernels take head_dim of multiples of 8 up to {}; {}", verb,
                            description(key), kGenericHeadDim, nearest(rows, key))};
  return format;
}

CodedRows coded_rows(const TensorPlan& plan, int num_kv_heads, int dim, Side side) {
  return {codebook_row_bits(plan, dim, side), pair_search_memory(plan, num_kv_heads, dim)};
}

}  // namespace

bool KernelKey::operator==(const KernelKey& other) const {
  return same_format(k, other.k) && same_format(v, other.v) && k_bfloat == other.k_bfloat &&
         v_bfloat == other.v_bfloat && heads == other.heads && bf16 == other.bf16 && k_rows == other.k_rows &&
         v_rows == other.v_rows && k_linear == other.k_linear && v_linear == other.v_linear &&
         k_coded == other.k_coded && v_coded == other.v_coded;
}

KernelKey kernel_key(const LayerPlan& plan, const PageLayout& pages, bool bf16) {
  return {
      .k = pages.k,
      .v = pages.v,
      .k_bfloat = has_bfloat_scales(plan.k),
      .v_bfloat = has_bfloat_scales(*plan.v),
      .heads = plan.geometry.queries_per_kv_head(),
      .bf16 = bf16,
      .k_rows = tuned_rows(plan.k, pages.k, plan.geometry.num_kv_heads),
      .v_rows = tuned_rows(*plan.v, pages.v, plan.geometry.num_kv_heads),
      .k_linear = pages.k.is_bits() && has_linear_rows(plan.k, plan.geometry.num_kv_heads, pages.k.head_dim),
      .v_linear = pages.v.is_bits() && has_linear_rows(*plan.v, plan.geometry.num_kv_heads, pages.v.head_dim),
      .k_coded = coded_rows(plan.k, plan.geometry.num_kv_heads, pages.k.head_dim, Side::k),
      .v_coded = coded_rows(*plan.v, plan.geometry.num_kv_heads, pages.v.head_dim, Side::v),
  };
}

const DecodeVariant* find_tuned_decode(const KernelKey& key, int new_tokens) {
  if ((is_linear_format(key.k) && !key.k_linear) || (is_linear_format(key.v) && !key.v_linear)) return nullptr;
  return find_decode_variant({key.k, key.v, key.k_bfloat, key.v_bfloat, key.heads, key.bf16, new_tokens});
}

bool decodes_linear_rows(const KernelKey& key) {
  const DecodeVariant* row = find_tuned_decode(key);
  return row && (is_linear_format(row->k) || is_linear_format(row->v));
}

bool dequantizes_bits(const KernelKey& key) { return key.k_rows != TunedRows::none && key.v_rows != TunedRows::none; }

DecodeVariant choose_decode(const KernelKey& key, int new_tokens) {
  if (const DecodeVariant* row = find_tuned_decode(key, new_tokens)) return *row;
  return generic_decode(generic_format("decode", decode_variants(), key), key.heads, key.bf16);
}

WriteVariant choose_write(const KernelKey& key) {
  if (key.k_coded.any() || key.v_coded.any())
    return coded_write(generic_format("write", write_variants(), key), key.k_coded, key.v_coded, key.bf16);
  for (const WriteVariant* row : write_variants())
    if (KernelKey{row->k, row->v, row->k_bfloat, row->v_bfloat, key.heads, row->bf16} == key) return *row;
  return generic_write(generic_format("write", write_variants(), key), key.bf16);
}

DequantizeVariant choose_dequantize(const KernelKey& key) {
  if (const DequantizeVariant* row = find_dequantize_variant({key.k, key.v, key.k_bfloat, key.v_bfloat, key.bf16}))
    return *row;
  if (dequantizes_bits(key))
    return bits_dequantize({key.k, key.v, key.k_bfloat, key.v_bfloat},
                           {key.k_rows == TunedRows::coded, key.v_rows == TunedRows::coded}, key.bf16);
  return generic_dequantize(generic_format("dequantize", dequantize_variants(), key), key.bf16);
}

PrefillVariant choose_prefill(const DequantizeVariant& rows) {
  const PrefillVariant* row = find_prefill_variant(rows);
  return row ? *row : generic_prefill(rows);
}

}  // namespace kvq
