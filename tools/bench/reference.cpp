#include "bench/reference.h"

#include "bench/device.h"

#include <kvq/codec/codec.h>
#include <kvq/codec/rotation_matrix.h>
#include <kvq/core/error.h>
#include <kvq/plan/kernel_limits.h>
#include <kvq/plan/table_rows.h>

#include <algorithm>
#include <cmath>
#include <random>

namespace kvq::bench {

UniformCoder coder_of(const TileSide& side, bool bfloat, ScaleRule symmetric_rule) {
  const bool affine = side.numbers == 2;
  return {
      .bits = side.bits,
      .group_size = side.group_size,
      .levels = affine ? UniformLevels::affine : UniformLevels::symmetric,
      .rule = affine ? ScaleRule::minmax : symmetric_rule,
      .scale_type = number_type_of(side, bfloat),
      .zero = side.integer_zero ? ZeroKind::integer : ZeroKind::floating,
  };
}

namespace {

/// Codebook codes with the entries that Lloyd and Max found for a normal number (Max, Quantizing for minimum
/// distortion, table I).
TensorPlan table_plan(const TileSide& side, bool bfloat, ScaleRule rule) {
  const int bits = 32 * side.row_words / side.head_dim;
  const std::vector<double> upper = bits == 2 ? std::vector{0.4528, 1.510}
                                    : bits == 3
                                        ? std::vector{0.2451, 0.7560, 1.344, 2.152}
                                        : std::vector{0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733};
  std::vector<double> table(upper.rbegin(), upper.rend());
  for (double& x : table) x = -x;
  table.insert(table.end(), upper.begin(), upper.end());
  TensorPlan plan;
  plan.coder = CodebookCoder{
      .bits = bits,
      .group_size = side.head_dim,
      .rule = rule,
      .scale_type = number_type_of(side, bfloat),
      .tables = {{bits, level_grid(table)}},
  };
  return plan;
}

/// Segments of codebook codes of neighboring widths, about as long as Block-GTQ chooses them.
TensorPlan segment_plan(const TileSide& side, bool bfloat, ScaleRule rule) {
  const int dim = side.head_dim, bits = 32 * side.row_words / dim;
  struct Segment {
    int width, channels;
  };
  // The widths above and below the mean take as many bits from each other.
  const int rare = dim / 16, few = dim / 8;
  std::vector<Segment> segments;
  if (side.numbers == 2) segments = {{bits + 1, dim / 2}, {bits - 1, dim / 2}};
  if (side.numbers == 3 || side.numbers == 1) segments = {{bits + 1, few}, {bits, dim - 2 * few}, {bits - 1, few}};
  if (side.numbers == 4 && bits == 2) segments = {{4, rare}, {3, few}, {2, dim - rare - 3 * few}, {1, 2 * few}};
  if (side.numbers == 4 && bits > 2)
    segments = {{bits + 1, 2 * few}, {bits, dim - 3 * few - rare}, {bits - 1, few}, {bits - 2, rare}};
  if (segments.empty() || bits * dim != 32 * side.row_words || bits < 2 || bits > 6)
    throw Error{ErrorKind::usage, fmt::format("w{}n{}: expected rows of 2 to 6 bits a channel, and up to 4 scales",
                                              side.row_words, side.numbers)};
  CodebookCoder coder{
      .bits = segments[0].width, .group_size = 0, .rule = rule, .scale_type = number_type_of(side, bfloat)};
  BitAllocation widths;
  if (side.numbers == 1) widths.segment_gain.assign(kGainWidths, 1.0f);
  for (const auto& [width, channels] : segments) {
    widths.channel_bits.insert(widths.channel_bits.end(), static_cast<std::size_t>(channels),
                               static_cast<std::uint8_t>(width));
    std::vector<double> table;
    for (int c = 0; c < 1 << width; ++c) {
      const double level = c + 0.5 - std::ldexp(1.0, width - 1);
      table.push_back(static_cast<double>(gaussian_step(width)) * level * (1.0 + 0.01 * std::abs(level)));
    }
    coder.tables[width] = level_grid(table);
  }
  TensorPlan plan;
  plan.coder = coder, plan.allocation = widths;
  return plan;
}

}  // namespace

TensorPlan for_heads(TensorPlan plan, int num_kv_heads) {
  if (!plan.allocation) return plan;
  const BitAllocation one = *plan.allocation;
  for (int head = 1; head < num_kv_heads; ++head) {
    BitAllocation& all = *plan.allocation;
    all.channel_bits.insert(all.channel_bits.end(), one.channel_bits.begin(), one.channel_bits.end());
    all.segment_gain.insert(all.segment_gain.end(), one.segment_gain.begin(), one.segment_gain.end());
  }
  return plan;
}

TensorPlan bit_plan(const TileSide& side, bool bfloat, int memory, ScaleRule rule) {
  if (side.numbers > 1 || side.segments) return segment_plan(side, bfloat, rule);
  if (side.table_bits > 0 || (memory == 0 && 32 * side.row_words == 2 * side.head_dim))
    return table_plan(side, bfloat, rule);
  // Widths up to 4 have thetas, those of packing.md; others have symmetric codes.
  TrellisCoder coder{.group_size = 0, .rule = rule, .scale_type = number_type_of(side, bfloat)};
  const auto taps = [](int bits, int window, std::vector<float> theta) {
    return TrellisTaps{.bits = bits, .memory = window, .search = TrellisSearch::integer, .theta = std::move(theta)};
  };
  const TrellisTaps two[] = {
      taps(2, 1, {1.48225427f, 0.918767927f, -0.792501826f, 0.993044327f}),
      taps(2, 2, {-0.886770233f, -1.34449962f, 0.717407561f, -0.0397294397f, 0.927222248f, -0.814774881f}),
      taps(2, 3,
           {0.955407229f, 0.953921669f, -0.519271679f, 0.508955923f, 0.482909586f, 0.52327051f, 0.956043081f,
            -0.933100524f}),
  };
  const TrellisTaps three[] = {
      taps(3, 1, {1.37657522f, -1.09347555f, 0.68231607f, 0.947085401f, 1.08014076f, 0.488084484f}),
      taps(3, 2,
           {1.26534994f, 1.00769529f, 0.546827156f, -0.119927383f, 0.354457651f, 0.670707303f, 0.895332011f,
            -0.94432942f, -0.465584726f}),
  };
  coder.taps = {two[std::max(memory, 1) - 1], three[std::clamp(memory, 1, 2) - 1]};
  const int bits = 32 * side.row_words, least = bits / side.head_dim, wider = bits % side.head_dim;
  BitAllocation widths;
  for (int c = 0; c < side.head_dim; ++c)
    widths.channel_bits.push_back(static_cast<std::uint8_t>(c < wider ? least + 1 : least));
  widths.segment_gain.assign(kGainWidths, 1.0f);
  coder.bits = widths.channel_bits[0];
  TensorPlan plan;
  plan.coder = coder, plan.allocation = widths;
  return plan;
}

TensorPlan bit_plan(const CacheShape& shape, Side side) {
  const bool is_v = side == Side::v;
  return bit_plan(is_v ? shape.v : shape.k, is_v ? shape.v_bfloat : shape.k_bfloat, shape.memory, ScaleRule::norm);
}

std::vector<float> centroids_of(const TileSide& tiles, Side side, int kv_head) {
  std::mt19937 random(static_cast<unsigned>(2 * kv_head + (side == Side::v)));
  std::normal_distribution<float> normal;
  std::vector<float> all(static_cast<std::size_t>(kMostTunedCentroids * tiles.head_dim));
  std::generate(all.begin(), all.end(), [&] { return normal(random); });
  return all;
}

std::vector<float> floats_at(const std::uint16_t* from, std::size_t count, bool bf16) {
  const std::vector<std::byte> bytes = get(reinterpret_cast<const std::byte*>(from), 2 * count);
  std::vector<float> values(count);
  load_numbers(number_type(bf16), bytes, values);
  return values;
}

StoredRows::StoredRows(const CacheShape& shape, const HostSequence& sequence, Side side, int kv_head)
    : shape_(shape),
      windows_(shape.windows()),
      sequence_(sequence),
      which_(side),
      head_(kv_head),
      side_(side == Side::k ? shape.k : shape.v),
      bfloat_(side == Side::k ? shape.k_bfloat : shape.v_bfloat),
      row_(static_cast<std::size_t>(side_.head_dim)),
      numbers_(static_cast<std::size_t>(side_.groups() * side_.numbers)),
      codes_(row_.size()) {
  if (side_.index_bytes > 0) centroids_ = centroids_of(side_, side, kv_head);
  if (!side_.is_bits()) return;
  const TensorPlan plan = bit_plan(shape, side);
  codec_.emplace(plan, 0, side_.head_dim), segments_ = bit_segments(plan, 0, side_.head_dim);
}

std::span<const float> StoredRows::at(int position) {
  const bool is_sink = position < shape_.exact.sink_tokens;
  if (is_sink || position >= shape_.context - shape_.exact.recent_tokens) {
    const WindowLayout& layout = is_sink ? windows_.sinks : windows_.rings;
    load_window_row(layout, which_, head_, layout.row(position), is_sink ? sequence_.sinks : sequence_.ring, row_);
    return row_;
  }
  const PageLayout layout = shape_.pages();
  const auto bytes = static_cast<std::size_t>(layout.page_bytes());
  const auto page =
      std::span(sequence_.pages).subspan(static_cast<std::size_t>(position / shape_.page_size) * bytes, bytes);
  const int slot = position % shape_.page_size;
  if (side_.exact()) {
    load_page_row(layout, which_, head_, slot, page, row_);
  } else if (codec_) {
    load_page_row(layout, which_, number_type_of(side_, bfloat_), head_, slot, segments_, page, codes_, numbers_);
    codec_->decode(codes_, numbers_, row_);
  } else {
    load_page_row(layout, which_, number_type_of(side_, bfloat_), head_, slot, page, codes_, numbers_);
    decode_row(coder_of(side_, bfloat_), codes_, numbers_, row_);
  }
  if (!centroids_.empty()) {
    const auto index = static_cast<std::size_t>(load_page_index(layout, which_, head_, slot, page));
    for (std::size_t i = 0; i < row_.size(); ++i) row_[i] += centroids_[index * row_.size() + i];
  }
  return row_;
}

std::vector<double> plain_attention(int tokens, const RowAt& keys, const RowAt& values, const TensorPlan& rotation_k,
                                    const TensorPlan& rotation_v, std::span<const float> q, int head_dim,
                                    double softmax_scale) {
  const auto dim = static_cast<std::size_t>(head_dim), heads = q.size() / dim, count = static_cast<std::size_t>(tokens);
  std::vector<float> rotated(q.size());
  // Queries are multiplied by A^-T; for an orthogonal A that is A.
  const std::vector<double> inverse =
      rotation_k.rotation.is_orthogonal() ? std::vector<double>{} : inverse_matrix(rotation_k.rotation, 0, head_dim);
  for (std::size_t h = 0; h < heads; ++h) {
    const auto own = q.subspan(h * dim, dim);
    const auto to = std::span(rotated).subspan(h * dim, dim);
    if (inverse.empty()) rotate_row(rotation_k, 0, own, to);
    for (std::size_t j = 0; j < inverse.size() / dim; ++j) {
      double sum = 0.0;
      for (std::size_t i = 0; i < dim; ++i) sum += static_cast<double>(own[i]) * inverse[j * dim + i];
      to[j] = static_cast<float>(sum);
    }
  }
  std::vector<double> weights(heads * count);
  for (std::size_t t = 0; t < count; ++t) {
    const std::span<const float> k = keys(static_cast<int>(t));
    for (std::size_t h = 0; h < heads; ++h) {
      double dot = 0.0;
      for (std::size_t i = 0; i < dim; ++i)
        dot += static_cast<double>(rotated[h * dim + i]) * static_cast<double>(k[i]);
      weights[h * count + t] = softmax_scale * dot;
    }
  }
  std::vector<double> sums(heads, 0.0), sum_of_values(heads * dim, 0.0);
  for (std::size_t h = 0; h < heads; ++h) {
    const auto row = std::span(weights).subspan(h * count, count);
    const double most = *std::max_element(row.begin(), row.end());
    for (double& w : row) sums[h] += w = std::exp(w - most);
  }
  for (std::size_t t = 0; t < count; ++t) {
    const std::span<const float> v = values(static_cast<int>(t));
    for (std::size_t h = 0; h < heads; ++h)
      for (std::size_t i = 0; i < dim; ++i)
        sum_of_values[h * dim + i] += weights[h * count + t] / sums[h] * static_cast<double>(v[i]);
  }
  std::vector<double> result;
  std::vector<float> unrotated(dim);
  for (std::size_t h = 0; h < heads; ++h) {
    const auto row = std::span(sum_of_values).subspan(h * dim, dim);
    unrotate_row(rotation_v, 0, std::vector<float>(row.begin(), row.end()), unrotated);
    result.insert(result.end(), unrotated.begin(), unrotated.end());
  }
  return result;
}

double relative_error(std::span<const float> found, std::span<const double> expected) {
  double error = 0.0, size = 0.0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double difference = static_cast<double>(found[i]) - expected[i];
    error += difference * difference, size += expected[i] * expected[i];
  }
  return std::sqrt(error / size);
}

}  // namespace kvq::bench
