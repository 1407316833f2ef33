#include "page_vectors_schema_text.h"
#include "write_case.h"

#include "support/page_vectors.h"

#include <kvq/codec/codec.h>
#include <kvq/core/dtype.h>
#include <kvq/runtime/checks.h>
#include <kvq/runtime/device_memory.h>
#include <kvq/runtime/kernels/decode/variant.h>
#include <kvq/runtime/kernels/dequantize/variant.h>

#include <catch2/catch.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

/// Kernels against the first level of truth, pages that were derived by hand: the write kernel produces them from their
/// rows, and the other kernels read them.
using namespace kvq;
using namespace kvq::test;

namespace {

/// Which sides of a kernel have the format of the vector's side.
struct Fit {
  bool k = false, v = false;
  bool any() const { return k || v; }
  bool of(Side side) const { return side == Side::v ? v : k; }
};

template <typename Variant>
Fit fit_of(const Variant& variant, const PageVector& vector) {
  const auto fits = [&](const TileSide& side, bool bfloat, const TileSide& wanted, Side which) {
    return same_format(side, wanted) &&
           (side.exact() || number_type_of(side, bfloat) == scale_type(vector.side(which).coder));
  };
  return {fits(variant.k, variant.k_bfloat, vector.pages.k, Side::k),
          fits(variant.v, variant.v_bfloat, vector.pages.v, Side::v)};
}

template <typename Variant>
PageLayout layout_of(const Variant& variant, const PageVector& vector) {
  return {variant.k, variant.v, vector.pages.num_kv_heads, vector.pages.page_size};
}

const TileSide& tile_of(const PageLayout& layout, Side side) { return side == Side::v ? layout.v : layout.k; }

using Bytes = std::vector<std::byte>;

/// Calls `take(tile in `from`, tile in `to`, bytes)` for all tiles of one side.
template <typename Take>
void for_each_tile(Side side, const PageLayout& from, const PageLayout& to, Take take) {
  for (int head = 0; head < from.num_kv_heads; ++head)
    for (int slot = 0; slot < from.page_size; slot += kTileTokens)
      take(static_cast<std::size_t>(side == Side::v ? from.value_tile(head, slot) : from.key_tile(head, slot)),
           static_cast<std::size_t>(side == Side::v ? to.value_tile(head, slot) : to.key_tile(head, slot)));
}

/// A page of a kernel's format with the tiles of sides that fit; all other bytes are zero.
template <typename Variant>
Bytes page_for(const Variant& variant, const PageVector& vector, const Fit& fit) {
  const PageLayout layout = layout_of(variant, vector);
  Bytes page(static_cast<std::size_t>(layout.page_bytes()), std::byte{0});
  for (const Side side : kSides)
    if (fit.of(side))
      for_each_tile(side, vector.pages, layout, [&](std::size_t from, std::size_t to) {
        std::copy_n(vector.bytes.begin() + static_cast<std::ptrdiff_t>(from), tile_of(layout, side).bytes(),
                    page.begin() + static_cast<std::ptrdiff_t>(to));
      });
  return page;
}

std::vector<float> row_values(const PageVector& vector, const PageVector::Row& row) {
  const TensorPlan& plan = vector.side(row.side);
  std::vector<float> x(row.codes.size());
  decode_row(std::get<UniformCoder>(plan.coder), row.codes, row.numbers, x);
  return x;
}

/// Does quantizing the row's values give the row? Not if a group lacks its outermost codes.
bool codable(const PageVector& vector, const PageVector::Row& row) {
  if (row.codes.empty()) return false;
  std::vector<std::uint8_t> codes(row.codes.size());
  std::vector<float> numbers(row.numbers.size());
  encode_row(std::get<UniformCoder>(vector.side(row.side).coder), 1.0, row_values(vector, row), codes, numbers);
  return codes == row.codes && numbers == row.numbers;
}

struct WriteCall {
  PageLayout layout;
  std::vector<std::uint16_t> k, v;        ///< [T, Hkv, D]
  std::vector<float> center_k, center_v;  ///< [Hkv, D] or empty
  std::vector<std::int64_t> slots;        ///< [T]
  WindowLayout windows = {};              ///< of the rings, with window_rows; empty: no windows
  std::vector<std::int64_t> window_rows;  ///< [T]
};

/// @param page, window  before and after
void write(const WriteVariant& variant, const WriteCall& call, Bytes& page, Bytes& window) {
  const DeviceMemory k = to_device<std::uint16_t>(call.k, nullptr), v = to_device<std::uint16_t>(call.v, nullptr),
                     center_k = to_device<float>(call.center_k, nullptr),
                     center_v = to_device<float>(call.center_v, nullptr),
                     slots = to_device<std::int64_t>(call.slots, nullptr),
                     rows = to_device<std::int64_t>(call.window_rows, nullptr),
                     pages = to_device<std::byte>(page, nullptr), windows = to_device<std::byte>(window, nullptr);
  WriteParams p;
  p.num_tokens = static_cast<int>(call.slots.size()), p.num_kv_heads = call.layout.num_kv_heads;
  p.k.x = k.get(), p.v.x = v.get();
  p.k.token_stride = std::int64_t{p.num_kv_heads} * variant.k.head_dim;
  p.v.token_stride = std::int64_t{p.num_kv_heads} * variant.v.head_dim;
  p.k.center = center_k.get<float>(), p.v.center = center_v.get<float>();
  const auto rule = [](const TileSide& side) { return side.numbers == 1 ? ScaleRule::absmax : ScaleRule::minmax; };
  p.k.rule = rule(variant.k), p.v.rule = rule(variant.v);
  p.slot_mapping = slots.get<std::int64_t>();
  p.pages = pages.get(), p.page_stride = call.layout.page_bytes();
  p.page_shift = std::countr_zero(static_cast<unsigned>(call.layout.page_size));
  if (!call.window_rows.empty())
    p.window_mapping = rows.get<std::int64_t>(), p.rings = windows.get(), p.ring_layout = call.windows;
  p.sink_layout = call.windows, p.sink_layout.rows = 0;
  REQUIRE(std::string(check_write(variant, p).message()) == "");
  WriteLaunch launch;
  REQUIRE(variant.plan(launch).ok());
  REQUIRE(variant.run(launch, p, nullptr).ok());
  to_host<std::byte>(pages, page, nullptr);
  to_host<std::byte>(windows, window, nullptr);
}

/// The vector's rows of the sides that fit, by token.
std::map<int, std::vector<const PageVector::Row*>> tokens_of(const PageVector& vector, const Fit& fit) {
  std::map<int, std::vector<const PageVector::Row*>> tokens;
  for (const PageVector::Row& row : vector.rows)
    if (fit.of(row.side)) tokens[row.place].push_back(&row);
  return tokens;
}

void check_tiles(const PageVector& vector, const Fit& fit, const PageLayout& layout, const Bytes& found,
                 const Bytes& expected, bool numbers) {
  for (const Side side : kSides) {
    if (!fit.of(side)) continue;
    const TileSide& tile = tile_of(layout, side);
    bool equal = true;
    for_each_tile(side, layout, layout, [&](std::size_t at, std::size_t) {
      const auto bytes = static_cast<std::size_t>(numbers ? tile.bytes() : tile.code_bytes());
      equal = equal && std::equal(found.begin() + static_cast<std::ptrdiff_t>(at),
                                  found.begin() + static_cast<std::ptrdiff_t>(at + bytes),
                                  expected.begin() + static_cast<std::ptrdiff_t>(at));
    });
    INFO(plural(side) << " of " << vector.rows.size() << " rows");
    CHECK(equal);
  }
}

/// Writes the vector's rows and compares pages. Rows that are not codable() are in the page before.
/// @return  number of rows that were written
int check_write_pages(const WriteVariant& variant, const PageVector& vector, const Fit& fit) {
  const PageLayout layout = layout_of(variant, vector);
  const auto page_bytes = static_cast<std::size_t>(layout.page_bytes()),
             heads = static_cast<std::size_t>(layout.num_kv_heads), dim = static_cast<std::size_t>(variant.k.head_dim);
  const Bytes expected = page_for(variant, vector, fit);
  Bytes rest(page_bytes, std::byte{0}), no_windows;
  std::vector<std::pair<int, std::vector<const PageVector::Row*>>> written;
  int rows = 0;
  for (const auto& [slot, token] : tokens_of(vector, fit)) {
    if (std::all_of(token.begin(), token.end(), [&](const auto* row) { return codable(vector, *row); })) {
      written.emplace_back(slot, token), rows += static_cast<int>(token.size());
      continue;
    }
    for (const PageVector::Row* row : token)
      store_page_row(layout, row->side, scale_type(vector.side(row->side).coder), row->head, slot, row->codes,
                     row->numbers, rest);
  }

  // One by one. Rows are zero and the center is minus the vector's row, because centers have all digits of float.
  Bytes page = rest;
  for (const auto& [slot, token] : written) {
    WriteCall call{
        .layout = layout,
        .k = {},
        .v = {},
        .center_k = {},
        .center_v = {},
        .slots = {slot},
        .window_rows = {},
    };
    call.k.assign(heads * dim, 0), call.v.assign(heads * dim, 0);
    call.center_k.assign(heads * dim, 0.0f), call.center_v.assign(heads * dim, 0.0f);
    for (const PageVector::Row* row : token) {
      const std::vector<float> x = row_values(vector, *row);
      float* center = (row->side == Side::v ? call.center_v : call.center_k).data();
      for (std::size_t i = 0; i < dim; ++i) center[static_cast<std::size_t>(row->head) * dim + i] = -x[i];
    }
    write(variant, call, page, no_windows);
  }
  check_tiles(vector, fit, layout, page, expected, true);

  // All at once, as small integers with the same codes, but other scales.
  WriteCall call{.layout = layout, .k = {}, .v = {}, .center_k = {}, .center_v = {}, .slots = {}, .window_rows = {}};
  call.k.assign(written.size() * heads * dim, 0), call.v = call.k;
  for (std::size_t t = 0; t < written.size(); ++t) {
    call.slots.push_back(written[t].first);
    for (const PageVector::Row* row : written[t].second) {
      const TileSide& side = tile_of(layout, row->side);
      std::uint16_t* to =
          (row->side == Side::v ? call.v : call.k).data() + (t * heads + static_cast<std::size_t>(row->head)) * dim;
      for (std::size_t i = 0; i < dim; ++i) {
        const int code = row->codes[i], levels = (1 << side.bits) - 1;
        to[i] = to_16_bits(static_cast<float>(side.numbers == 1 ? 2 * code - levels : code), variant.bf16);
      }
    }
  }
  if (written.empty()) return 0;
  page.assign(page_bytes, std::byte{0});
  write(variant, call, page, no_windows);
  Bytes without_rest = expected;
  std::transform(expected.begin(), expected.end(), rest.begin(), without_rest.begin(), std::bit_xor<>());
  check_tiles(vector, fit, layout, page, without_rest, false);
  return rows;
}

/// Device memory of a cache with one sequence in one page, or in windows and an empty page.
struct Reading {
  Reading(const PageLayout& page_layout, const Bytes& page, const Bytes& window, int tokens)
      : layout(page_layout),
        pages(to_device<std::byte>(page, nullptr)),
        windows(to_device<std::byte>(window, nullptr)),
        lengths(to_device<std::int32_t>(std::vector<std::int32_t>{tokens}, nullptr)),
        starts(to_device<std::int32_t>(std::vector<std::int32_t>{0, tokens}, nullptr)),
        zeros(to_device<std::int32_t>(
            std::vector<std::int32_t>(static_cast<std::size_t>(std::max(tokens, layout.num_kv_heads)), 0), nullptr)) {}

  PagedCacheView cache() const {
    PagedCacheView c;
    c.batch = 1, c.num_kv_heads = layout.num_kv_heads;
    c.seq_lens = lengths.get<std::int32_t>();
    c.pages = pages.get(), c.page_table = zeros.get<std::int32_t>(), c.page_table_stride = 1;
    c.page_shift = std::countr_zero(static_cast<unsigned>(layout.page_size)), c.page_stride = layout.page_bytes();
    return c;
  }

  PageLayout layout;
  DeviceMemory pages, windows, lengths, starts, zeros;
};

/// [T, Hkv, D] of both sides as they are stored.
struct Dequantized {
  Dequantized(const DequantizeVariant& variant, const Reading& reading, const PagedCacheView& cache, int tokens)
      : bf16(variant.bf16), heads(cache.num_kv_heads), dim(variant.k.head_dim) {
    const std::size_t count = static_cast<std::size_t>(tokens * heads * dim);
    k.assign(count, 0xFFFF), v.assign(count, 0xFFFF);
    const DeviceMemory out_k = to_device<std::uint16_t>(k, nullptr), out_v = to_device<std::uint16_t>(v, nullptr);
    DequantizeParams p;
    p.cache = cache;
    p.out_indptr = reading.starts.get<std::int32_t>(), p.num_rows = tokens;
    p.k = out_k.get(), p.v = out_v.get(), p.k_stride = p.v_stride = heads * dim;
    DequantizeLaunch launch;
    REQUIRE(variant.plan(launch).ok());
    REQUIRE(std::string(check_dequantize(variant, p).message()) == "");
    REQUIRE(variant.run(launch, p, nullptr).ok());
    to_host<std::uint16_t>(out_k, k, nullptr), to_host<std::uint16_t>(out_v, v, nullptr);
  }
  float at(Side side, int token, int head, int channel) const {
    return from_16_bits((side == Side::v ? v : k)[static_cast<std::size_t>((token * heads + head) * dim + channel)],
                        bf16);
  }
  bool bf16;
  int heads, dim;
  std::vector<std::uint16_t> k, v;
};

void check_dequantize_pages(const DequantizeVariant& variant, const PageVector& vector, const Fit& fit) {
  const PageLayout layout = layout_of(variant, vector);
  const Reading reading(layout, page_for(variant, vector, fit), {}, layout.page_size);
  const Dequantized found(variant, reading, reading.cache(), layout.page_size);
  for (const PageVector::Row& row : vector.rows) {
    if (!fit.of(row.side)) continue;
    const std::vector<float> x = row_values(vector, row);
    // Errors: one rounding to 16 bits, and one of the sum in float.
    const float largest =
        *std::max_element(x.begin(), x.end(), [](float a, float b) { return std::abs(a) < std::abs(b); });
    for (int c = 0; c < found.dim; ++c) {
      const float expected = x[static_cast<std::size_t>(c)], value = found.at(row.side, row.place, row.head, c);
      const float bound = std::abs(expected) * (variant.bf16 ? 0x1p-8f : 0x1p-11f) + std::abs(largest) * 0x1p-20f;
      CAPTURE(row.place, row.head, c, expected, value);
      if (!(std::abs(value - expected) <= bound)) CHECK(value == expected);
    }
  }
}

/// Attention of one query a head over the page; keys or values that do not fit are zeros.
void check_decode_pages(const DecodeVariant& variant, const PageVector& vector, const Fit& fit) {
  const PageLayout layout = layout_of(variant, vector);
  const int heads = layout.num_kv_heads, dim = variant.k.head_dim, length = layout.page_size;
  const Reading reading(layout, page_for(variant, vector, fit), {}, length);
  const auto count = static_cast<std::size_t>(heads * dim);
  std::vector<std::uint16_t> q;
  for (std::size_t i = 0; i < count; ++i)
    q.push_back(to_16_bits(static_cast<float>(static_cast<int>(i * 7 % 11) - 5) / 8.0f, variant.bf16));
  const DeviceMemory d_q = to_device<std::uint16_t>(q, nullptr), d_out(count * 2),
                     d_lse(static_cast<std::size_t>(heads) * 4);
  DecodeLaunch launch;
  REQUIRE(variant.plan(launch).ok());
  const DeviceMemory workspace = to_device<std::byte>(
      std::vector<std::byte>(decode_workspace_bytes(launch, static_cast<std::size_t>(heads))), nullptr);
  DecodeParams p;
  p.cache = reading.cache();
  p.num_q_heads = heads, p.softmax_scale = 1.0f / std::sqrt(static_cast<float>(dim));
  p.q = d_q.get(), p.out = d_out.get(), p.lse = d_lse.get<float>(), p.q_stride = p.out_stride = heads * dim;
  p.workspace = workspace.get();
  REQUIRE(std::string(check_decode(variant, p).message()) == "");
  REQUIRE(variant.run(launch, p, nullptr).ok());
  std::vector<std::uint16_t> out(count);
  std::vector<float> lse(static_cast<std::size_t>(heads));
  to_host<std::uint16_t>(d_out, out, nullptr), to_host<float>(d_lse, lse, nullptr);

  double error = 0.0, size = 0.0;
  for (int head = 0; head < heads; ++head) {
    std::vector<double> scores(static_cast<std::size_t>(length), 0.0), sum(static_cast<std::size_t>(dim), 0.0);
    const auto place = [&](int c) { return static_cast<std::size_t>(head * dim + c); };
    for (const PageVector::Row& row : vector.rows)
      if (row.head == head && row.side == Side::k && fit.k) {
        const std::vector<float> x = row_values(vector, row);
        for (int c = 0; c < dim; ++c)
          scores[static_cast<std::size_t>(row.place)] += static_cast<double>(x[static_cast<std::size_t>(c)]) *
                                                         static_cast<double>(from_16_bits(q[place(c)], variant.bf16)) /
                                                         std::sqrt(static_cast<double>(dim));
      }
    double total = 0.0;
    for (const double score : scores) total += std::exp(score);
    for (const PageVector::Row& row : vector.rows)
      if (row.head == head && row.side == Side::v && fit.v) {
        const std::vector<float> x = row_values(vector, row);
        const double weight = std::exp(scores[static_cast<std::size_t>(row.place)]) / total;
        for (int c = 0; c < dim; ++c)
          sum[static_cast<std::size_t>(c)] += weight * static_cast<double>(x[static_cast<std::size_t>(c)]);
      }
    CAPTURE(head);
    CHECK(std::abs(static_cast<double>(lse[static_cast<std::size_t>(head)]) - std::log(total)) < 1e-4);
    for (int c = 0; c < dim; ++c) {
      const double expected = sum[static_cast<std::size_t>(c)];
      error += std::pow(static_cast<double>(from_16_bits(out[place(c)], variant.bf16)) - expected, 2);
      size += expected * expected;
    }
  }
  CHECK(std::sqrt(error) <= 0x1p-8 * std::sqrt(size));
}

/// The channel order of windows depends on the code bits of values only, not on groups and coders.
template <typename Variant>
bool windows_fit(const Variant& variant, const PageVector& vector) {
  const TileSide &k = vector.pages.k, &v = vector.pages.v;
  return variant.bf16 && variant.k.head_dim == k.head_dim && variant.v.head_dim == v.head_dim &&
         variant.v.bits == v.bits;
}

void check_windows(const WriteVariant& write_variant, const DequantizeVariant& read_variant, const PageVector& vector) {
  WindowLayout windows = vector.windows;
  windows.coded_v = write_variant.v;
  const PageLayout layout{write_variant.k, write_variant.v, windows.num_kv_heads, 16};
  const auto heads = static_cast<std::size_t>(windows.num_kv_heads),
             dim = static_cast<std::size_t>(write_variant.k.head_dim);
  const auto tokens = tokens_of(vector, {true, true});
  WriteCall call{
      .layout = layout,
      .k = std::vector<std::uint16_t>(tokens.size() * heads * dim, 0),
      .v = {},
      .center_k = {},
      .center_v = {},
      .slots = std::vector<std::int64_t>(tokens.size(), -1),
      .windows = windows,
      .window_rows = {},
  };
  call.v = call.k;
  const int length = tokens.rbegin()->first + 1;
  std::size_t t = 0;
  for (const auto& [position, rows] : tokens) {
    call.window_rows.push_back(windows.row(position));
    for (const PageVector::Row* row : rows)
      std::copy(row->exact.begin(), row->exact.end(),
                (row->side == Side::v ? call.v : call.k).begin() +
                    static_cast<std::ptrdiff_t>((t * heads + static_cast<std::size_t>(row->head)) * dim));
    ++t;
  }
  Bytes page(static_cast<std::size_t>(layout.page_bytes()), std::byte{0}), window(vector.bytes.size(), std::byte{0});
  const Bytes no_codes = page;
  write(write_variant, call, page, window);
  CHECK((window == vector.bytes));
  CHECK((page == no_codes));

  const Reading reading(layout, page, vector.bytes, length);
  PagedCacheView cache = reading.cache();
  cache.windows = {0, std::min(length, windows.rows)};  // so that all rows it holds are read from the ring
  cache.page_table_stride = length;                     // all entries are the one page, which holds none of them
  cache.rings = reading.windows.get(), cache.ring_slots = reading.zeros.get<std::int32_t>();
  cache.ring_layout = cache.sink_layout = windows;
  const Dequantized found(read_variant, reading, cache, length);
  for (const PageVector::Row& row : vector.rows) {
    if (row.place < length - windows.rows) continue;  // the ring has a later token's row in its place
    std::vector<float> values;
    for (int c = 0; c < found.dim; ++c) values.push_back(found.at(row.side, row.place, row.head, c));
    std::vector<float> expected(row.exact.size());
    std::transform(row.exact.begin(), row.exact.end(), expected.begin(), bf16_to_float);
    CAPTURE(row.place, row.head);
    CHECK((values == expected));
  }
}

}  // namespace

TEST_CASE("Hand-written pages and windows are what kernels write and read", "[runtime][gpu][golden]") {
  std::set<std::string> taken;
  std::string skipped;
  int written = 0;
  for (const PageVector& vector : parse_page_vectors(schema::page_vectors)) {
    INFO(vector.name << ": " << vector.why);
    const auto with_each = [&](const auto& variants, const auto& check_pages) {
      for (const auto* variant : variants) {
        const Fit fit = fit_of(*variant, vector);
        // Linear rows need a basis, rows with indices centroids, which vectors do not have.
        const bool alone = !variant->k.is_bits() && variant->k.index_bytes == 0 && variant->v.index_bytes == 0;
        if (!fit.any() || !alone) continue;
        CAPTURE(variant->name);
        taken.insert(vector.name);
        check_pages(*variant, vector, fit);
      }
    };
    if (vector.in_pages) {
      with_each(write_variants(), [&](const auto&... a) { written += check_write_pages(a...); });
      with_each(dequantize_variants(), check_dequantize_pages);
      with_each(decode_variants(), check_decode_pages);
    } else {
      for (const WriteVariant* variant : plain_write_variants())
        for (const DequantizeVariant* reader : dequantize_variants()) {
          if (!windows_fit(*variant, vector) || !same_format(variant->k, reader->k) ||
              !same_format(variant->v, reader->v) || !reader->bf16)
            continue;
          CAPTURE(variant->name, reader->name);
          taken.insert(vector.name);
          check_windows(*variant, *reader, vector);
        }
    }
    if (!taken.count(vector.name)) skipped += (skipped.empty() ? "" : ", ") + vector.name;
  }
  WARN("page_vectors.json: no row of variants.json for the formats of: " << skipped);
  CHECK(taken.size() >= 8);
  CHECK(written >= 32 + 16);
}

TEST_CASE("Hand-written pages and windows are what generic kernels write and read",
          "[runtime][gpu][golden][emulated]") {
  int written = 0, vectors = 0;
  for (const PageVector& vector : parse_page_vectors(schema::page_vectors)) {
    INFO(vector.name << ": " << vector.why);
    const TileSide &k = vector.pages.k, &v = vector.pages.v;
    if (k.head_dim != v.head_dim || k.exact() || v.exact()) continue;  // the checks are for one head_dim, and for codes
    const CacheFormat format{k, v, has_bfloat_scales(vector.plan.k), has_bfloat_scales(*vector.plan.v)};
    // Rows of bit tiles and with indices: coded_rows_test.cpp and coded_write_test.cpp, against the codec of pages.
    if (k.is_bits() || v.is_bits() || k.index_bytes > 0 || v.index_bytes > 0) continue;
    ++vectors;
    const Fit both{true, true};
    if (vector.in_pages) {
      written += check_write_pages(generic_write(format, true), vector, both);
      check_dequantize_pages(generic_dequantize(format, true), vector, both);
      check_decode_pages(generic_decode(format, 1, true), vector, both);
    } else {
      check_windows(generic_write(format, true), generic_dequantize(format, true), vector);
    }
  }
  CHECK(vectors >= 25);
  CHECK(written >= 100);
}
