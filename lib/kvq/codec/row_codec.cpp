#include <kvq/codec/arithmetic.h>
#include <kvq/codec/codec.h>
#include <kvq/codec/poisoned.h>
#include <kvq/codec/row_codec.h>
#include <kvq/core/error.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace kvq {

namespace {

using arithmetic::kLargestGroup;

TensorPlan plan_of(const Coder& coder, double clip_ratio) {
  TensorPlan plan;
  plan.coder = coder;
  if (scale_rule(coder) == ScaleRule::minmax) plan.clip_ratio = {clip_ratio};
  plan.rotation.scope = Scope::layer;
  return plan;
}

/// The symmetric coder of a width without theta, or of a group too short for the trellis (packing.md, "Mixed widths").
UniformCoder symmetric_stand_in(const TrellisCoder& coder, int width, int count) {
  return {
      .bits = width,
      .group_size = count,
      .levels = UniformLevels::symmetric,
      .rule = coder.rule == ScaleRule::least_squares ? ScaleRule::least_squares : ScaleRule::norm,
      .scale_type = coder.scale_type,
  };
}

/// Quantizes one group; `number` holds its scale.
struct EncodeGroup {
  std::span<const float> x;
  std::span<std::uint8_t> codes;
  std::span<float> number;
  void operator()(const UniformCoder& group) const { encode_row(group, 1.0, x, codes, number); }
  void operator()(const CodebookGroup& group) const { number[0] = group.encode(x, codes); }
  void operator()(const TrellisGroup& group) const { number[0] = group.encode(x, codes); }
};

struct DecodeGroup {
  std::span<const std::uint8_t> codes;
  std::span<const float> number;
  std::span<float> out;
  void operator()(const UniformCoder& group) const { decode_row(group, codes, number, out); }
  void operator()(const CodebookGroup& group) const { group.decode(codes, number[0], out); }
  void operator()(const TrellisGroup& group) const { group.decode(codes, number[0], out); }
};

}  // namespace

/// Fills in the members that quantize rows of one entry.
struct RowCodec::Compile {
  RowCodec& codec;
  const TensorPlan& plan;
  int entry;

  void operator()(const ExactCoder&) const { codec.exact_ = true; }
  void operator()(const UniformCoder& coder) const {
    if (!plan.allocation) {
      codec.uniform_ = coder;
      return;
    }
    for_each_group([&](int width, int first, int count) {
      UniformCoder one = coder;
      one.bits = width;
      one.group_size = count;
      codec.groups_.push_back({first, count, one});
    });
  }
  void operator()(const CodebookCoder& coder) const {
    for_each_group([&](int width, int first, int count) {
      const std::vector<float>& table = coder.tables.at(width);
      const std::size_t size = std::size_t{1} << width,
                        offset = coder.per_head ? static_cast<std::size_t>(entry) * size : 0;
      codec.groups_.push_back(
          {first, count, CodebookGroup(std::span(table).subspan(offset, size), coder.rule, coder.scale_type)});
    });
  }
  void operator()(const TrellisCoder& coder) const {
    for_each_group([&](int width, int first, int count) {
      const TrellisTaps* taps = coder.find(width);
      if (taps && count >= TrellisGroup::kLeastChannels)
        codec.groups_.push_back({first, count, TrellisGroup(*taps, coder.rule, coder.scale_type)});
      else
        codec.groups_.push_back({first, count, symmetric_stand_in(coder, width, count)});
    });
  }

  /// Calls add(width, first channel, channels) for each group of channels.
  template <typename Add>
  void for_each_group(Add add) const {
    for (int s = 0; s < codec.layout_.num_segments; ++s) {
      const CodeSegment& segment = codec.layout_.segments[static_cast<std::size_t>(s)];
      const int count = plan.allocation ? segment.channels : group_size(plan.coder);
      for (int first = segment.first_channel; first < segment.first_channel + segment.channels; first += count)
        add(segment.bits, first, count);
    }
  }
};

RowCodec::RowCodec(const Coder& coder, double clip_ratio, int dim) : RowCodec(plan_of(coder, clip_ratio), 0, dim) {}

RowCodec::RowCodec(const TensorPlan& plan, int kv_head, int dim) : dim_(dim), layout_(row_layout(plan, kv_head, dim)) {
  KVQ_ASSERT(dim >= 1 && dim <= kLargestGroup);
  const int entry = plan.rotation.head_index(kv_head);
  num_numbers_ = layout_.num_numbers;
  type_ = scale_type(plan.coder);
  if (!plan.clip_ratio.empty()) clip_ratio_ = plan.clip_ratio[static_cast<std::size_t>(entry)];
  std::visit(Compile{*this, plan, entry}, plan.coder);
  if (plan.allocation && plan.allocation->has_row_scale()) {
    row_scale_ = RowScale{scale_rule(plan.coder), type_};
    for (int s = 0; s < layout_.num_segments; ++s)
      groups_[static_cast<std::size_t>(s)].gain =
          plan.allocation->gain(entry, layout_.segments[static_cast<std::size_t>(s)].bits);
  }
}

void RowCodec::encode(std::span<const float> row, std::span<std::uint8_t> codes, std::span<float> numbers) const {
  KVQ_ASSERT(!exact_ && row.size() == static_cast<std::size_t>(dim_) && codes.size() == row.size() &&
             numbers.size() == static_cast<std::size_t>(num_numbers_));
  if (uniform_) return encode_row(*uniform_, clip_ratio_, row, codes, numbers);
  if (!is_finite(row)) return poison(codes, numbers);
  std::fill(codes.begin(), codes.end(), std::uint8_t{0});  // channels of width 0
  if (row_scale_) {
    if (!groups_.empty()) numbers[0] = row_scale_->encode(groups_, row, codes);
    return;
  }
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
    const auto x = row.subspan(static_cast<std::size_t>(group.first), static_cast<std::size_t>(group.count));
    const auto c = codes.subspan(static_cast<std::size_t>(group.first), static_cast<std::size_t>(group.count));
    std::visit(EncodeGroup{x, c, numbers.subspan(g, 1)}, group.coder);
  }
}

void RowCodec::decode(std::span<const std::uint8_t> codes, std::span<const float> numbers, std::span<float> out) const {
  KVQ_ASSERT(!exact_ && out.size() == static_cast<std::size_t>(dim_) && codes.size() == out.size() &&
             numbers.size() == static_cast<std::size_t>(num_numbers_));
  if (uniform_) return decode_row(*uniform_, codes, numbers, out);
  std::fill(out.begin(), out.end(), is_poisoned(numbers) ? numbers[0] : 0.0f);  // channels of width 0
  if (row_scale_) {
    if (!groups_.empty()) RowScale::decode(groups_, codes, numbers[0], out);
    return;
  }
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
    const auto c = codes.subspan(static_cast<std::size_t>(group.first), static_cast<std::size_t>(group.count));
    const auto x = out.subspan(static_cast<std::size_t>(group.first), static_cast<std::size_t>(group.count));
    std::visit(DecodeGroup{c, numbers.subspan(g, 1), x}, group.coder);
  }
}

void RowCodec::pack(std::span<const std::uint8_t> codes, std::span<const float> numbers, int centroid,
                    std::span<std::byte> bytes) const {
  KVQ_ASSERT(!exact_ && bytes.size() >= static_cast<std::size_t>(layout_.row_bytes) &&
             numbers.size() == static_cast<std::size_t>(num_numbers_));
  std::fill(bytes.begin(), bytes.end(), std::byte{0});
  for (int s = 0; s < layout_.num_segments; ++s) {
    const CodeSegment& segment = layout_.segments[static_cast<std::size_t>(s)];
    const auto count = static_cast<std::size_t>(segment.channels);
    pack_codes(codes.subspan(static_cast<std::size_t>(segment.first_channel), count), segment.stored_bits,
               bytes.subspan(static_cast<std::size_t>(segment.byte_offset),
                             (count * static_cast<std::size_t>(segment.stored_bits) + 7) / 8));
  }
  store_numbers(type_, numbers, bytes.subspan(static_cast<std::size_t>(layout_.numbers_offset)));
  if (is_poisoned(numbers)) centroid = 0;
  const auto index = bytes.subspan(static_cast<std::size_t>(layout_.index_offset));
  for (int i = 0; i < layout_.index_bytes; ++i)
    index[static_cast<std::size_t>(i)] = static_cast<std::byte>((centroid >> (8 * i)) & 0xff);
}

int RowCodec::unpack(std::span<const std::byte> bytes, std::span<std::uint8_t> codes, std::span<float> numbers) const {
  KVQ_ASSERT(!exact_ && bytes.size() >= static_cast<std::size_t>(layout_.row_bytes) &&
             numbers.size() == static_cast<std::size_t>(num_numbers_));
  std::fill(codes.begin(), codes.end(), std::uint8_t{0});
  for (int s = 0; s < layout_.num_segments; ++s) {
    const CodeSegment& segment = layout_.segments[static_cast<std::size_t>(s)];
    const auto count = static_cast<std::size_t>(segment.channels);
    const auto target = codes.subspan(static_cast<std::size_t>(segment.first_channel), count);
    unpack_codes(bytes.subspan(static_cast<std::size_t>(segment.byte_offset),
                               (count * static_cast<std::size_t>(segment.stored_bits) + 7) / 8),
                 segment.stored_bits, target);
    // Codes of widths 5 to 7 are stored in bytes. The mask keeps every byte value inside the tables.
    for (std::uint8_t& code : target) code = static_cast<std::uint8_t>(code & ((1u << segment.bits) - 1));
  }
  load_numbers(type_, bytes.subspan(static_cast<std::size_t>(layout_.numbers_offset)), numbers);
  const auto index = bytes.subspan(static_cast<std::size_t>(layout_.index_offset));
  int centroid = 0;
  for (int i = 0; i < layout_.index_bytes; ++i)
    centroid |= std::to_integer<int>(index[static_cast<std::size_t>(i)]) << (8 * i);
  return centroid;
}

void RowCodec::quantize(std::span<float> row) const {
  if (exact_) return quantize_exact(row);
  std::array<std::uint8_t, kLargestGroup> codes;
  std::array<float, 2 * kLargestGroup> numbers;
  const auto count = static_cast<std::size_t>(num_numbers_);
  encode(row, std::span{codes.data(), row.size()}, std::span{numbers.data(), count});
  decode(std::span{codes.data(), row.size()}, std::span{numbers.data(), count}, row);
}

void quantize_row(const Coder& coder, double clip_ratio, std::span<float> row) {
  RowCodec(coder, clip_ratio, static_cast<int>(row.size())).quantize(row);
}

void add_centroid_distances(const Centroids& centroids, int entry, std::span<const float> x, std::span<float> sums) {
  const std::size_t d = x.size();
  std::array<float, kLargestGroup> difference;
  const float* table =
      centroids.values.data() + static_cast<std::size_t>(entry) * static_cast<std::size_t>(centroids.count) * d;
  for (std::size_t c = 0; c < sums.size(); ++c, table += d) {
    for (std::size_t j = 0; j < d; ++j) difference[j] = x[j] - table[j];
    sums[c] += arithmetic::energy({difference.data(), d});
  }
}

int nearest_centroid(const Centroids& centroids, int entry, std::span<const float> x) {
  std::vector<float> sums(static_cast<std::size_t>(centroids.count), 0.0f);
  add_centroid_distances(centroids, entry, x, sums);
  return static_cast<int>(std::min_element(sums.begin(), sums.end()) - sums.begin());
}

}  // namespace kvq
