#include "bench/choose.h"

#include "common/side_format.h"

#include <kvq/core/error.h>
#include <kvq/plan/table_layout.h>
#include <kvq/runtime/checks.h>

#include <fmt/format.h>

#include <deque>
#include <set>

namespace kvq::bench {

namespace {

/// Lists the built variants of a head_dim for an error message; if there is none, the head_dims that have variants.
template <typename Row>
std::string built(std::span<const Row* const> rows, int head_dim) {
  std::vector<std::string> caches;
  std::set<int> dims;
  for (const Row* row : rows) {
    dims.insert(row->k.head_dim);
    if (row->k.head_dim == head_dim) caches.push_back(cache_name(*row) + (row->bf16 ? "" : " with fp16"));
  }
  return caches.empty() ? fmt::format("built are head_dim {}", fmt::join(dims, ", "))
                        : fmt::format("built for head_dim {}: {}", head_dim, fmt::join(caches, ", "));
}

Error not_built(const std::string& k, const std::string& v, const std::string& sizes, const std::string& hint) {
  return {ErrorKind::unsupported, fmt::format("no kernel is built for {}{}, {}", k, k == v ? "" : "/" + v, sizes),
          hint};
}

struct Sides {
  SideFormat key, value;
};

Sides parse_sides(const std::string& k, const std::string& v, int head_dim) {
  return {parse_side(k, head_dim, "--k"), parse_side(v, head_dim, "--v")};
}

const char* name_of(bool bf16) { return bf16 ? "bf16" : "fp16"; }

}  // namespace

const DecodeVariant& choose_decode(const std::string& k, const std::string& v, int head_dim, int heads, bool bf16,
                                   int new_tokens) {
  const auto [key, value] = parse_sides(k, v, head_dim);
  const DecodeVariant* row = find_decode_variant({
      .k = key.side,
      .v = value.side,
      .k_bfloat = key.bfloat,
      .v_bfloat = value.bfloat,
      .heads = heads,
      .bf16 = bf16,
      .new_tokens = new_tokens,
  });
  if (!row)
    throw not_built(k, v, fmt::format("head_dim {}, {}", head_dim, name_of(bf16)), built(decode_variants(), head_dim));
  return *row;
}

const DecodeVariant& choose_generic_decode(const std::string& k, const std::string& v, int head_dim, int heads,
                                           bool bf16) {
  const auto [key, value] = parse_sides(k, v, head_dim);
  const CacheFormat format{key.side, value.side, key.bfloat, value.bfloat};
  if (!generic_supports(format))
    throw Error{ErrorKind::unsupported,
                fmt::format("--head-dim {}: generic kernels take multiples of 8 up to {}", head_dim, kGenericHeadDim)};
  static std::deque<DecodeVariant> made;  // references stay valid
  return made.emplace_back(generic_decode(format, heads, bf16));
}

const WriteVariant& choose_write(const std::string& k, const std::string& v, int head_dim, bool bf16, int memory,
                                 ScaleRule rule) {
  const auto [key, value] = parse_sides(k, v, head_dim);
  for (const WriteVariant* row : write_variants())
    if (same_format(row->k, key.side) && same_format(row->v, value.side) && row->k_bfloat == key.bfloat &&
        row->v_bfloat == value.bfloat && row->bf16 == bf16)
      return *row;
  static std::deque<WriteVariant> made;  // references stay valid
  const auto has_centroids = [](const TileSide& side) { return !side.is_bits() && side.index_bytes > 0; };
  if (has_centroids(key.side) && has_centroids(value.side))
    return made.emplace_back(generic_write({key.side, value.side, key.bfloat, value.bfloat}, bf16));
  if (key.side.is_bits() && value.side.is_bits()) {
    const CacheFormat format{key.side, value.side, key.bfloat, value.bfloat};
    const auto coded_rows = [&](const SideFormat& of) -> CodedRows {
      if (of.bfloat || of.side.number_size != 2 || head_dim != kTableHeadDim) return {};
      if (of.side.segments) return {.codebook_bits = kMixedBits};
      if (of.side.numbers != 1 || 32 * of.side.row_words != 2 * head_dim) return {.codebook_bits = of.side.table_bits};
      return memory == 0               ? CodedRows{.codebook_bits = 2}
             : rule == ScaleRule::norm ? CodedRows{.pair_memory = memory}
                                       : CodedRows{};
    };
    const CodedRows k_rows = coded_rows(key), v_rows = coded_rows(value);
    if (memory == 0 && !(k_rows.any() && v_rows.any()))
      throw Error{ErrorKind::usage,
                  fmt::format("--memory 0: expected sides of w8n1, w12n1t3, w16n1t4, found {}",
                              cache_name(key.side, key.bfloat, value.side, value.bfloat)),
                  "rows of other sizes have trellises of memory 1 to 3"};
    return made.emplace_back(k_rows.any() || v_rows.any() ? coded_write(format, k_rows, v_rows, bf16)
                                                          : generic_write(format, bf16));
  }
  throw not_built(k, v, fmt::format("head_dim {}, {}", head_dim, name_of(bf16)), built(write_variants(), head_dim));
}

const DequantizeVariant& choose_prefill(const std::string& k, const std::string& v, int head_dim, bool bf16) {
  const auto [key, value] = parse_sides(k, v, head_dim);
  const DequantizeVariant* row = find_dequantize_variant(
      {.k = key.side, .v = value.side, .k_bfloat = key.bfloat, .v_bfloat = value.bfloat, .bf16 = bf16});
  if (!row && dequantizes_coded(key.side) && dequantizes_coded(value.side)) {
    static DequantizeVariant bits;  // a run has one
    bits = bits_dequantize({key.side, value.side, key.bfloat, value.bfloat},
                           {!is_linear_format(key.side), !is_linear_format(value.side)}, bf16);
    row = &bits;
  }
  if (!row || !find_prefill_variant(*row))
    throw not_built(k, v, fmt::format("head_dim {}, {}", head_dim, name_of(bf16)),
                    built(dequantize_variants(), head_dim));
  return *row;
}

std::vector<const DecodeVariant*> all_decode(int head_dim, int heads, bool bf16) {
  std::vector<const DecodeVariant*> rows;
  for (const DecodeVariant* row : decode_variants())
    if (row->k.head_dim == head_dim &&
        find_decode_variant({row->k, row->v, row->k_bfloat, row->v_bfloat, heads, bf16}) == row)
      rows.push_back(row);
  return rows;
}

std::vector<const WriteVariant*> all_write(int head_dim, bool bf16) {
  std::vector<const WriteVariant*> rows;
  for (const WriteVariant* row : write_variants())
    if (row->k.head_dim == head_dim && row->bf16 == bf16 && row->k.bits < 16) rows.push_back(row);
  return rows;
}

std::vector<const DequantizeVariant*> all_prefill(int head_dim, bool bf16) {
  std::vector<const DequantizeVariant*> rows;
  for (const DequantizeVariant* row : dequantize_variants())
    if (row->k.head_dim == head_dim && row->bf16 == bf16 && find_prefill_variant(*row)) rows.push_back(row);
  return rows;
}

}  // namespace kvq::bench
