#include <kvq/plan/table_rows.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <variant>

namespace kvq {

namespace {

/// +1 if x of an odd set is +1/2 for a code, else -1.
double sign_of(std::size_t code, int set) {
  return std::popcount(code & static_cast<unsigned>(set)) % 2 != 0 ? 1.0 : -1.0;
}

int bits_of(std::span<const float> table) { return std::countr_zero(table.size()); }

}  // namespace

std::span<const float> codebook_of(const CodebookCoder& coder, int width, int entry) {
  const std::size_t size = std::size_t{1} << width, first = coder.per_head ? static_cast<std::size_t>(entry) * size : 0;
  const auto tables = coder.tables.find(width);
  if (tables == coder.tables.end() || tables->second.size() < first + size) return {};
  return std::span(tables->second).subspan(first, size);
}

std::vector<double> odd_weights(std::span<const float> table) {
  const int bits = bits_of(table);
  std::vector<double> weights(static_cast<std::size_t>(odd_sets(bits)));
  for (int i = 0; i < odd_sets(bits); ++i) {
    double& weight = weights[static_cast<std::size_t>(i)];
    for (std::size_t c = 0; c < table.size(); ++c)
      weight += sign_of(c, odd_set(bits, i)) * static_cast<double>(table[c]);
    weight *= 2.0 / static_cast<double>(table.size());
  }
  return weights;
}

bool is_odd_table(std::span<const float> table) {
  constexpr double kTolerance = 0x1p-21;  // of the largest entry: a few roundings
  const std::vector<double> weights = odd_weights(table);
  double largest = 0.0, error = 0.0;
  for (std::size_t c = 0; c < table.size(); ++c) {
    double value = 0.0;
    for (std::size_t i = 0; i < weights.size(); ++i)
      value += 0.5 * sign_of(c, odd_set(bits_of(table), static_cast<int>(i))) * weights[i];
    const auto entry = static_cast<double>(table[c]);
    largest = std::max(largest, std::abs(entry)), error = std::max(error, std::abs(entry - value));
  }
  return error <= kTolerance * largest;
}

std::optional<LevelTable> level_table(std::span<const float> table) {
  constexpr double kTolerance = 0x1p-21;  // of the largest entry, as above
  double largest = 0.0;
  for (const float entry : table) {
    if (!std::isfinite(entry)) return std::nullopt;
    largest = std::max(largest, std::abs(static_cast<double>(entry)));
  }
  if (table.size() > std::size_t{1} << kMostLevelBits || !(largest > 0.0)) return std::nullopt;
  // The largest levels, because queries, times the step, become integers with one unit for all widths.
  for (int most = kMostLevel; most >= 1; --most) {
    const double step = largest / most;
    LevelTable levels = {};
    levels.step = static_cast<float>(step);
    double error = 0.0;
    for (std::size_t c = 0; c < table.size(); ++c) {
      const double level = std::round(static_cast<double>(table[c]) / step);
      error = std::max(error, std::abs(static_cast<double>(table[c]) - level * step));
      const auto byte = static_cast<std::uint32_t>(static_cast<std::uint8_t>(static_cast<std::int8_t>(level)));
      levels.levels[c / 4] |= byte << 8 * (c % 4);
    }
    if (error <= kTolerance * largest) return levels;
  }
  return std::nullopt;
}

std::vector<float> level_grid(std::span<const double> entries) {
  std::vector<float> table(entries.begin(), entries.end());
  double largest = 0.0;
  for (const double entry : entries) largest = std::max(largest, std::abs(entry));
  if (entries.size() > std::size_t{1} << kMostLevelBits || !(largest > 0.0)) return table;
  double least = std::numeric_limits<double>::infinity();
  for (int most = kMostLevel / 2 + 1; most <= kMostLevel; ++most) {
    const auto level = [&](double entry) { return std::round(entry * most / largest); };
    double products = 0.0, squares = 0.0, error = 0.0;
    for (const double entry : entries) products += level(entry) * entry, squares += level(entry) * level(entry);
    const double step = products / squares;
    for (const double entry : entries) error += (entry - step * level(entry)) * (entry - step * level(entry));
    if (error > least) continue;
    least = error;
    for (std::size_t c = 0; c < entries.size(); ++c) table[c] = static_cast<float>(step * level(entries[c]));
  }
  return table;
}

std::vector<LevelTable> level_tables(const TensorPlan& plan, int num_kv_heads, int dim) {
  std::vector<LevelTable> all;
  if (table_bits(plan, dim) == 0) return all;
  const auto& coder = std::get<CodebookCoder>(plan.coder);
  for (int head = 0; head < num_kv_heads; ++head)
    all.push_back(level_table(codebook_of(coder, coder.bits, plan.rotation.head_index(head))).value());
  return all;
}

int table_bits(const TensorPlan& plan, int dim) {
  const auto* coder = std::get_if<CodebookCoder>(&plan.coder);
  if (!coder || plan.allocation || plan.centroids || dim != kTableHeadDim || coder->group_size != dim ||
      !has_table_kernels(coder->bits) || scale_bytes(coder->scale_type) != 2)
    return 0;
  const auto tables = coder->tables.find(coder->bits);
  if (tables == coder->tables.end()) return 0;
  const int entries = static_cast<int>(tables->second.size() >> coder->bits);
  for (int entry = 0; entry < entries; ++entry)
    if (const auto table = codebook_of(*coder, coder->bits, entry); !is_odd_table(table) || !level_table(table))
      return 0;
  return entries > 0 ? coder->bits : 0;
}

int codebook_row_bits(const TensorPlan& plan, int dim, Side side) {
  const auto* coder = std::get_if<CodebookCoder>(&plan.coder);
  if (!coder || plan.centroids || dim != kTableHeadDim || coder->scale_type != ScaleType::fp16 ||
      coder->rule == ScaleRule::least_squares)
    return 0;
  if (plan.allocation) {
    const auto is_narrow = [](std::uint8_t width) { return width <= kMostLevelBits; };
    return side == Side::k && std::ranges::all_of(plan.allocation->channel_bits, is_narrow) ? kMixedBits : 0;
  }
  return coder->group_size == dim && coder->bits >= 2 && coder->bits <= 4 ? coder->bits : 0;
}

std::vector<float> table_weights(const TensorPlan& plan, int num_kv_heads, int dim) {
  std::vector<float> all;
  if (table_bits(plan, dim) == 0) return all;
  const auto& coder = std::get<CodebookCoder>(plan.coder);
  for (int head = 0; head < num_kv_heads; ++head) {
    const std::vector<double> weights = odd_weights(codebook_of(coder, coder.bits, plan.rotation.head_index(head)));
    all.insert(all.end(), weights.begin(), weights.end());
  }
  return all;
}

}  // namespace kvq
