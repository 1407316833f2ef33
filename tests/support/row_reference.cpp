#include "support/row_reference.h"

#include "support/packing_reference.h"
#include "support/trellis_reference.h"

#include <kvq/core/dtype.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace kvq::test {

namespace {

float f32(double value) { return static_cast<float>(value); }
double wide(float value) { return static_cast<double>(value); }

float tree(std::vector<float> numbers) {
  std::size_t size = 1;
  while (size < numbers.size()) size *= 2;
  numbers.resize(size, 0.0f);
  while (numbers.size() > 1) {
    std::vector<float> sums;
    for (std::size_t i = 0; i < numbers.size(); i += 2) sums.push_back(f32(wide(numbers[i]) + wide(numbers[i + 1])));
    numbers = sums;
  }
  return numbers[0];
}
float tree_product(std::span<const float> a, std::span<const float> b) {
  std::vector<float> products;
  for (std::size_t i = 0; i < a.size(); ++i) products.push_back(f32(wide(a[i]) * wide(b[i])));
  return tree(products);
}

/// The scale to store, from the codes' values.
float stored_scale(ScaleRule rule, ScaleType type, float d, std::span<const float> x, std::span<const float> v) {
  const float n = tree_product(v, v);
  if (rule == ScaleRule::rms || n == 0.0f) return d;
  if (rule == ScaleRule::norm)
    return f32(nearest_in(type, wide(f32(std::sqrt(wide(f32(wide(tree_product(x, x)) / wide(n))))))));
  return f32(nearest_in(type, wide(f32(wide(tree_product(x, v)) / wide(n)))));
}

ReferenceGroup finish(ScaleRule rule, ScaleType type, float d, std::span<const float> x,
                      std::vector<std::uint8_t> codes, const std::vector<float>& v) {
  ReferenceGroup group{.codes = std::move(codes), .scale = stored_scale(rule, type, d, x, v), .decoded = {}};
  for (const float value : v) group.decoded.push_back(f32(wide(group.scale) * wide(value)));
  return group;
}

/// Codes of a group with d = 0: the middle code for every channel.
std::vector<std::uint8_t> middle(int bits, std::size_t count) {
  return std::vector<std::uint8_t>(count, static_cast<std::uint8_t>(1 << (bits - 1)));
}

}  // namespace

Normalized normalized(ScaleType type, std::span<const float> x) {
  Normalized result;
  const float energy = tree_product(x, x);
  result.d = f32(nearest_in(type, wide(f32(std::sqrt(wide(f32(wide(energy) / static_cast<double>(x.size()))))))));
  if (energy == 0.0f) result.d = 0.0f;
  for (const float value : x) result.y.push_back(result.d == 0.0f ? 0.0f : f32(wide(value) / wide(result.d)));
  return result;
}

namespace {

std::uint8_t codebook_code(std::span<const float> table, float y) {
  int below = 0;
  for (std::size_t i = 1; i < table.size(); ++i)
    below += f32(wide(f32(wide(table[i - 1]) + wide(table[i]))) * 0.5) <= y ? 1 : 0;
  return static_cast<std::uint8_t>(below);
}

}  // namespace

ReferenceGroup reference_codebook(std::span<const float> table, ScaleRule rule, ScaleType type,
                                  std::span<const float> x) {
  const Normalized unit = normalized(type, x);
  const int bits = std::countr_zero(table.size());
  std::vector<std::uint8_t> codes = middle(bits, x.size());
  std::vector<float> v;
  for (std::size_t j = 0; j < x.size(); ++j) {
    if (unit.d != 0.0f) codes[j] = codebook_code(table, unit.y[j]);
    v.push_back(table[codes[j]]);
  }
  if (unit.d == 0.0f) {
    ReferenceGroup group{.codes = codes, .scale = 0.0f, .decoded = {}};
    for (const float value : v) group.decoded.push_back(0.0f * value);
    return group;
  }
  return finish(rule, type, unit.d, x, codes, v);
}

ReferenceGroup reference_trellis(const TrellisTaps& taps, ScaleRule rule, ScaleType type, std::span<const float> x) {
  const Normalized unit = normalized(type, x);
  std::vector<std::uint8_t> codes = middle(taps.bits, x.size());
  if (unit.d != 0.0f) codes = reference_codes(taps, unit.y);
  std::vector<float> v;
  for (std::size_t j = 0; j < x.size(); ++j) v.push_back(trellis_value(taps, history(codes, j, taps.memory)));
  if (unit.d != 0.0f) return finish(rule, type, unit.d, x, codes, v);
  ReferenceGroup group{.codes = codes, .scale = 0.0f, .decoded = {}};
  for (const float value : v) group.decoded.push_back(0.0f * value);
  return group;
}

ReferenceGroup reference_symmetric(int bits, ScaleRule rule, ScaleType type, std::span<const float> x) {
  const ReferenceRow row = reference_row(
      {
          .bits = bits,
          .group_size = static_cast<int>(x.size()),
          .levels = UniformLevels::symmetric,
          .rule = rule,
          .scale_type = type,
      },
      1.0, x);
  return {.codes = row.codes, .scale = row.numbers.at(0), .decoded = row.decoded};
}

namespace {

/// Quantizes one group by a coder at one width.
ReferenceGroup reference_group(const Coder& coder, int kv_head, int width, std::span<const float> x) {
  if (const auto* uniform = std::get_if<UniformCoder>(&coder))
    return reference_symmetric(width, uniform->rule, uniform->scale_type, x);
  if (const auto* book = std::get_if<CodebookCoder>(&coder)) {
    std::span<const float> table = book->tables.at(width);
    const std::size_t entries = std::size_t{1} << width;
    if (book->per_head) table = table.subspan(static_cast<std::size_t>(kv_head) * entries, entries);
    return reference_codebook(table, book->rule, book->scale_type, x);
  }
  const auto& trellis = std::get<TrellisCoder>(coder);
  const auto found = std::find_if(trellis.taps.begin(), trellis.taps.end(),
                                  [&](const TrellisTaps& taps) { return taps.bits == width; });
  if (found != trellis.taps.end() && x.size() >= 8)
    return reference_trellis(*found, trellis.rule, trellis.scale_type, x);
  const ScaleRule rule = trellis.rule == ScaleRule::least_squares ? ScaleRule::least_squares : ScaleRule::norm;
  return reference_symmetric(width, rule, trellis.scale_type, x);
}

void append_stream(std::vector<std::byte>& bytes, std::span<const std::uint8_t> codes, int bits) {
  for (const std::uint8_t byte : reference_stream(codes, bits)) bytes.push_back(static_cast<std::byte>(byte));
}

/// The taps of a segment, or null if its codes are symmetric.
const TrellisTaps* taps_of(const Coder& coder, int width, std::size_t channels) {
  const auto* trellis = std::get_if<TrellisCoder>(&coder);
  if (trellis == nullptr || channels < 8) return nullptr;
  for (const TrellisTaps& taps : trellis->taps)
    if (taps.bits == width) return &taps;
  return nullptr;
}

/// step[b] of packing.md (b).
float gaussian_step_of(int bits) {
  const std::vector<float> steps = {1.5957691f,  0.9956867f,  0.58601946f,  0.3352006f,
                                    0.18813878f, 0.10406301f, 0.056867674f, 0.030762387f};
  return steps[static_cast<std::size_t>(bits - 1)];
}

/// A segment of a row with one scale.
struct Segment {
  int width;
  std::size_t first, count;
  float gain;
  std::vector<std::uint8_t> codes = {};
  std::vector<float> values = {};  ///< unit values
};

void code_segment(Segment& segment, const Coder& coder, int kv_head, std::span<const float> x, float d) {
  const float t = f32(wide(segment.gain) * wide(d)), step = gaussian_step_of(segment.width);
  std::vector<float> y;
  for (const float value : x) y.push_back(f32(wide(value) / wide(t)));
  const TrellisTaps* taps = taps_of(coder, segment.width, x.size());
  std::span<const float> table;
  if (const auto* book = std::get_if<CodebookCoder>(&coder)) {
    const std::size_t entries = std::size_t{1} << segment.width;
    table = book->tables.at(segment.width);
    if (book->per_head) table = table.subspan(static_cast<std::size_t>(kv_head) * entries, entries);
  }
  segment.codes = middle(segment.width, x.size());
  if (d != 0.0f && taps != nullptr) segment.codes = reference_codes(*taps, y);
  const double half = std::ldexp(1.0, segment.width - 1);
  for (std::size_t j = 0; j < x.size(); ++j) {
    std::uint8_t& code = segment.codes[j];
    if (d != 0.0f && taps == nullptr)
      code = !table.empty() ? codebook_code(table, y[j])
                            : static_cast<std::uint8_t>(std::clamp(
                                  std::floor(wide(f32(wide(y[j]) / wide(step)))) + half, 0.0, 2.0 * half - 1.0));
    const float level = static_cast<float>((2.0 * code - 2.0 * half + 1.0) / 2.0);
    segment.values.push_back(taps != nullptr ? trellis_value(*taps, history(segment.codes, j, taps->memory))
                             : table.empty() ? f32(wide(step) * wide(level))
                                             : table[code]);
  }
}

/// packing.md, "One scale a row". Fills in the codes and values of the segments. @return the stored scale
float code_row_scale(const TensorPlan& plan, int kv_head, std::span<const float> row, std::vector<Segment>& segments) {
  const ScaleType type = scale_type(plan.coder);
  const ScaleRule rule = scale_rule(plan.coder);
  std::vector<float> energies, shares, squares, products;
  std::size_t channels = 0;
  const auto square = [](float gain) { return f32(wide(gain) * wide(gain)); };
  const auto in_order = [](const std::vector<float>& terms) {
    float sum = terms.front();
    for (std::size_t i = 1; i < terms.size(); ++i) sum = f32(wide(sum) + wide(terms[i]));
    return sum;
  };
  for (const Segment& s : segments) {
    const std::span<const float> x = row.subspan(s.first, s.count);
    energies.push_back(tree_product(x, x));
    shares.push_back(f32(wide(energies.back()) / wide(square(s.gain))));
    channels += s.count;
  }
  const float share = f32(wide(in_order(shares)) / static_cast<double>(channels));
  const float d = f32(nearest_in(type, wide(f32(std::sqrt(wide(share))))));
  for (Segment& s : segments) {
    const std::span<const float> x = row.subspan(s.first, s.count);
    code_segment(s, plan.coder, kv_head, x, d);
    squares.push_back(f32(wide(square(s.gain)) * wide(tree_product(s.values, s.values))));
    std::vector<float> u;
    for (const float v : s.values) u.push_back(f32(wide(s.gain) * wide(v)));
    products.push_back(tree_product(x, u));
  }
  if (d == 0.0f) return 0.0f;
  const float n = in_order(squares);
  if (rule == ScaleRule::rms || n == 0.0f) return d;
  const float s = rule == ScaleRule::norm ? f32(std::sqrt(wide(f32(wide(in_order(energies)) / wide(n)))))
                                          : f32(wide(in_order(products)) / wide(n));
  return std::isnan(s) ? d : f32(nearest_in(type, wide(s)));
}

/// Codes, numbers and decoded channels of a row with one scale.
void add_row_scale(const TensorPlan& plan, int kv_head, std::span<const float> row, ReferenceBytes& result) {
  const std::uint8_t* bits = plan.allocation->channel_bits.data() + static_cast<std::size_t>(kv_head) * row.size();
  std::vector<Segment> segments;
  for (std::size_t j = 0; j < row.size(); ++j) {
    if (bits[j] == 0) break;
    if (j == 0 || bits[j] != bits[j - 1]) segments.push_back({bits[j], j, 0, plan.allocation->gain(kv_head, bits[j])});
    ++segments.back().count;
  }
  result.codes.assign(row.size(), 0);
  result.decoded.assign(row.size(), 0.0f);
  if (segments.empty()) return;
  const bool poisoned = !all_finite(row);
  result.numbers = {poisoned ? kPoison : code_row_scale(plan, kv_head, row, segments)};
  for (Segment& s : segments) {
    if (poisoned) s.codes.assign(s.count, 0);
    for (std::size_t j = 0; j < s.count; ++j) {
      result.codes[s.first + j] = s.codes[j];
      if (!poisoned)
        result.decoded[s.first + j] = f32(wide(result.numbers[0]) * wide(f32(wide(s.gain) * wide(s.values[j]))));
    }
    append_stream(result.bytes, s.codes, s.width > 4 ? 8 : s.width);
  }
}

/// A group of a row that is not finite.
ReferenceGroup poisoned_group(std::size_t channels) {
  return {.codes = std::vector<std::uint8_t>(channels, 0),
          .scale = kPoison,
          .decoded = std::vector<float>(channels, kPoison)};
}

void append_numbers(std::vector<std::byte>& bytes, ScaleType type, std::span<const float> numbers) {
  for (const float number : numbers) {
    const std::uint32_t pattern = type == ScaleType::fp32   ? std::bit_cast<std::uint32_t>(number)
                                  : type == ScaleType::fp16 ? float_to_f16(number)
                                                            : float_to_bf16(number);
    for (int i = 0; i < (type == ScaleType::fp32 ? 4 : 2); ++i)
      bytes.push_back(static_cast<std::byte>((pattern >> (8 * i)) & 0xffu));
  }
}

}  // namespace

ReferenceBytes reference_plan_row(const TensorPlan& plan, int kv_head, int centroid, std::span<const float> row) {
  const ScaleType type = scale_type(plan.coder);
  const std::size_t scale = type == ScaleType::fp32 ? 4 : 2;
  const bool poisoned = !all_finite(row);
  ReferenceBytes result;
  const bool row_scale = plan.allocation && plan.allocation->has_row_scale();
  if (row_scale) add_row_scale(plan, kv_head, row, result);
  std::size_t j = row_scale ? row.size() : 0;
  while (j < row.size()) {
    std::size_t end = j, width = static_cast<std::size_t>(code_bits(plan.coder));
    if (plan.allocation) {
      const std::uint8_t* bits = plan.allocation->channel_bits.data() + static_cast<std::size_t>(kv_head) * row.size();
      width = bits[j];
      while (end < row.size() && bits[end] == width) ++end;
    } else {
      end = j + static_cast<std::size_t>(group_size(plan.coder));
    }
    if (width == 0) {
      result.codes.resize(row.size(), 0);
      result.decoded.resize(row.size(), 0.0f);
    } else {
      const ReferenceGroup group =
          poisoned ? poisoned_group(end - j)
                   : reference_group(plan.coder, kv_head, static_cast<int>(width), row.subspan(j, end - j));
      result.codes.insert(result.codes.end(), group.codes.begin(), group.codes.end());
      result.decoded.insert(result.decoded.end(), group.decoded.begin(), group.decoded.end());
      result.numbers.push_back(group.scale);
      if (plan.allocation) append_stream(result.bytes, group.codes, width > 4 ? 8 : static_cast<int>(width));
    }
    j = end;
  }
  if (poisoned && !result.numbers.empty()) {
    centroid = 0;
    result.decoded.assign(row.size(), kPoison);  // channels of width 0, too
  }
  if (plan.allocation) {
    while (result.bytes.size() % scale != 0) result.bytes.push_back(std::byte{0});
  } else {
    append_stream(result.bytes, result.codes, code_bits(plan.coder));
  }
  append_numbers(result.bytes, type, result.numbers);
  if (!plan.centroids) return result;
  if (plan.centroids->count > 256 && plan.allocation && result.bytes.size() % 2 != 0)
    result.bytes.push_back(std::byte{0});
  result.bytes.push_back(static_cast<std::byte>(centroid & 255));
  if (plan.centroids->count > 256) result.bytes.push_back(static_cast<std::byte>(centroid >> 8));
  return result;
}

}  // namespace kvq::test
