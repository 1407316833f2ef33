#include "write_compare.h"

#include <kvq/codec/codec.h>
#include <kvq/codec/page_codec.h>
#include <kvq/codec/row_codec.h>
#include <kvq/core/dtype.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <span>

namespace kvq::test {

namespace {

/// One row as the codec quantizes it, and its destination.
struct ExpectedRow {
  Side side;
  int head, token, page, slot;
  ScaleType type;
  std::vector<float> rotated, group_params;
  std::vector<std::uint8_t> codes;
  double size = 0.0;  ///< term_size(), to which rounding errors are relative
};

}  // namespace

double term_size(const Rotation& rotation, int head, const std::vector<float>& x, const std::vector<float>& rotated) {
  double largest = 0.0;
  for (const float y : rotated) largest = std::max(largest, static_cast<double>(std::abs(y)));
  if (rotation.inverse.empty()) return largest;
  const std::size_t d = x.size(), first = static_cast<std::size_t>(rotation.head_index(head)) * d * d;
  for (std::size_t j = 0; j < d; ++j) {
    double sum = 0.0;
    for (std::size_t i = 0; i < d; ++i)
      sum += std::abs(static_cast<double>(x[i]) * static_cast<double>(rotation.matrix[first + i * d + j]));
    largest = std::max(largest, sum);
  }
  return largest;
}

namespace {

void for_each_row(const WriteVariant& variant, const WriteCase& c,
                  const std::function<void(const ExpectedRow&)>& visit) {
  for (const Side each : kSides) {
    const bool value = each == Side::v;
    const TileSide& side = value ? variant.v : variant.k;
    const std::vector<std::uint16_t>& all = value ? c.v : c.k;
    const auto dim = static_cast<std::size_t>(side.head_dim);
    const TensorPlan plan = write_plan(variant, c, each);
    for (int head = 0; head < c.num_kv_heads; ++head) {
      const RowCodec codec(plan, head, side.head_dim);
      for (int token = 0; token < c.num_tokens; ++token) {
        const std::int64_t slot = c.slot_mapping[static_cast<std::size_t>(token)];
        if (slot < 0) continue;
        ExpectedRow row{each,
                        head,
                        token,
                        static_cast<int>(slot / c.page_size),
                        static_cast<int>(slot % c.page_size),
                        scale_type(plan.coder),
                        std::vector<float>(dim),
                        std::vector<float>(static_cast<std::size_t>(codec.num_numbers())),
                        std::vector<std::uint8_t>(dim)};
        std::vector<float> x(dim);
        const std::size_t first = static_cast<std::size_t>(token * c.num_kv_heads + head) * dim;
        for (std::size_t i = 0; i < dim; ++i) x[i] = from_16_bits(all[first + i], variant.bf16);
        rotate_row(plan, head, x, row.rotated);
        row.size = term_size(plan.rotation, head, x, row.rotated);
        if (side.exact())
          quantize_exact(row.rotated);
        else
          codec.encode(row.rotated, row.codes, row.group_params);
        visit(row);
      }
    }
  }
}

/// Distance of an affine channel from the nearest edge between codes, in x_rot.
double distance_to_edge(const ExpectedRow& row, const TileSide& side, std::size_t channel) {
  const std::size_t group = channel / static_cast<std::size_t>(side.group_size);
  const double scale = row.group_params[group],
               minimum = side.integer_zero ? 0.0 : row.group_params[static_cast<std::size_t>(side.groups()) + group];
  const double quotient = (row.rotated[channel] - minimum) / scale + 0.5;
  return std::abs(quotient - std::round(quotient)) * scale;
}

}  // namespace

Difference compare_bytes(const WriteVariant& variant, const WriteCase& c) {
  const PageLayout layout{variant.k, variant.v, c.num_kv_heads, c.page_size};
  const auto page_bytes = static_cast<std::size_t>(layout.page_bytes());
  const std::vector<std::byte> before(page_bytes * static_cast<std::size_t>(c.num_pages), std::byte{0xA5});
  std::vector<std::byte> expected = before;
  const std::vector<std::byte> found = run_write_case(variant, c, before);
  for_each_row(variant, c, [&](const ExpectedRow& row) {
    const auto page = std::span(expected).subspan(static_cast<std::size_t>(row.page) * page_bytes, page_bytes);
    if ((row.side == Side::k ? variant.k : variant.v).exact())
      store_page_row(layout, row.side, row.head, row.slot, row.rotated, page);
    else
      store_page_row(layout, row.side, row.type, row.head, row.slot, row.codes, row.group_params, page);
  });
  Difference difference;
  const auto at = std::mismatch(expected.begin(), expected.end(), found.begin()).first;
  if (at != expected.end())
    difference.where = "byte " + std::to_string(at - expected.begin()) + " of pages of " + std::to_string(page_bytes);
  return difference;
}

Difference compare_codes(const WriteVariant& variant, const WriteCase& c, double error) {
  const PageLayout layout{variant.k, variant.v, c.num_kv_heads, c.page_size};
  const auto page_bytes = static_cast<std::size_t>(layout.page_bytes());
  const std::vector<std::byte> found = run_write_case(
      variant, c, std::vector<std::byte>(page_bytes * static_cast<std::size_t>(c.num_pages), std::byte{0xA5}));
  Difference difference;
  for_each_row(variant, c, [&](const ExpectedRow& row) {
    const auto page = std::span(found).subspan(static_cast<std::size_t>(row.page) * page_bytes, page_bytes);
    const std::string name = (row.side == Side::k ? "key of token " : "value of token ") + std::to_string(row.token) +
                             " head " + std::to_string(row.head);
    ++difference.rows;
    const TileSide& side = row.side == Side::k ? variant.k : variant.v;
    // One rounding step of the scale type. For symmetric codes more, because a code that differs changes the refitted
    // scale.
    const float tolerance = side.numbers == 1 ? 0.06f : row.type == ScaleType::bf16 ? 0.008f : 0.001f;
    float most = 0.0f;
    for (const float x : row.rotated) most = std::max(most, std::abs(x));
    if (most > 0.0f) difference.canceled = std::max(difference.canceled, row.size / static_cast<double>(most));
    const bool poisoned =
        !std::all_of(row.rotated.begin(), row.rotated.end(), [](float x) { return std::isfinite(x); });
    if ((row.side == Side::k ? variant.k : variant.v).exact()) {
      std::vector<float> exact(row.rotated.size());
      load_page_row(layout, row.side, row.head, row.slot, page, exact);
      for (std::size_t i = 0; i < exact.size(); ++i)  // at most the other neighboring bfloat16 number
        if (!(poisoned && std::isnan(exact[i])) &&    // a rotation may spread NaN further than the codec's does
            !(std::abs(exact[i] - row.rotated[i]) <= std::abs(row.rotated[i]) / 128.0f + error * row.size) &&
            difference.where.empty())
          difference.where = name + " channel " + std::to_string(i) + ": " + std::to_string(exact[i]) + ", expected " +
                             std::to_string(row.rotated[i]);
      return;
    }
    std::vector<std::uint8_t> codes(row.codes.size());
    std::vector<float> group_params(row.group_params.size());
    load_page_row(layout, row.side, row.type, row.head, row.slot, page, codes, group_params);
    if (poisoned) {
      const auto nan = [](float x) { return std::isnan(x); };
      if ((codes != row.codes || !std::all_of(group_params.begin(), group_params.end(), nan)) &&
          difference.where.empty())
        difference.where = name + " is not poisoned";
      return;
    }
    for (std::size_t i = 0; i < group_params.size(); ++i) {
      const bool zero_point = side.integer_zero && i >= static_cast<std::size_t>(side.groups());
      const double allowed = zero_point ? 1.0 : tolerance * std::abs(row.group_params[i]) + 1e-3f * most;
      if (!(std::abs(group_params[i] - row.group_params[i]) <= allowed + error * row.size) && difference.where.empty())
        difference.where = name + " scale or minimum " + std::to_string(i) + ": " + std::to_string(group_params[i]) +
                           ", expected " + std::to_string(row.group_params[i]);
    }
    // Numbers of 32 bits differ by the rounding of the rotation, which moves the edges between codes as far.
    const bool wide = side.number_size == 4;
    const double moved = wide ? 4.0 * error * row.size : 0.0;
    bool equal = true;
    for (std::size_t i = 0; i < group_params.size(); ++i)
      equal = equal && std::abs(group_params[i] - row.group_params[i]) <= moved;
    difference.other_group_params += !equal;
    for (std::size_t i = 0; i < codes.size(); ++i) {
      ++difference.codes;
      difference.far += std::abs(codes[i] - row.codes[i]) > 1;
      if (codes[i] == row.codes[i]) continue;
      difference.differing += equal;
      difference.inside += equal && side.numbers == 2 && distance_to_edge(row, side, i) > error * row.size + moved;
    }
  });
  return difference;
}

ScaleRule rule_of(const TileSide& side, ScaleRule symmetric) {
  return side.numbers == 2 ? ScaleRule::minmax : symmetric;
}

WriteCase random_case(const WriteVariant& variant, int num_tokens, int num_kv_heads, int page_size, unsigned seed,
                      bool hard) {
  WriteCase c;
  c.num_tokens = num_tokens, c.num_kv_heads = num_kv_heads, c.page_size = page_size;
  c.num_pages = (num_tokens + page_size - 1) / page_size + 2;
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const float huge = variant.bf16 ? 1e37f : 1e4f, tiny = variant.bf16 ? 1e-39f : 1e-7f;
  const auto rows = [&](int dim) {
    std::vector<std::uint16_t> all;
    for (int r = 0; r < num_tokens * num_kv_heads; ++r) {
      const int kind = hard ? r % 13 : 12;
      const float size = kind == 3 ? 1e4f : kind == 4 ? 1e-6f : kind == 7 ? huge : kind == 8 ? tiny : 1.0f;
      for (int i = 0; i < dim; ++i) {
        float x = normal(random) * size;
        if (kind == 0) x = 0.0f;
        if (kind == 1) x = -0.3f;
        if (kind == 2) x = i == 5 ? 100.0f : 0.0f;
        if (kind == 5) x = static_cast<float>(i % 4) - 1.5f;  // on the edges between codes
        if (kind == 6) x = i % 2 ? -0.0f : 0.0f;
        if (kind == 9) x = std::round(x);                               // few magnitudes, many of each
        if (kind == 10) x = 1.0f + static_cast<float>(i % 3) / 128.0f;  // neighbors in bfloat16
        if (kind == 11) x = i % 2 ? 2.0f : -2.0f;
        all.push_back(to_16_bits(x, variant.bf16));
      }
    }
    return all;
  };
  c.k = rows(variant.k.head_dim), c.v = rows(variant.v.head_dim);
  for (int i = 0; i < num_tokens; ++i) c.slot_mapping.push_back(page_size + i);
  c.rule_k = rule_of(variant.k, ScaleRule::norm), c.rule_v = rule_of(variant.v, ScaleRule::norm);
  return c;
}

}  // namespace kvq::test
