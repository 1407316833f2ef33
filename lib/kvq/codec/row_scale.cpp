#include <kvq/codec/arithmetic.h>
#include <kvq/codec/codec.h>
#include <kvq/codec/row_scale.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <optional>

namespace kvq {

namespace {

using arithmetic::kLargestGroup;

int bits_of(const ChannelGroup& group) {
  struct Bits {
    int operator()(const UniformCoder& coder) const { return coder.bits; }
    int operator()(const CodebookGroup& coder) const { return std::countr_zero(coder.table().size()); }
    int operator()(const TrellisGroup& coder) const { return coder.bits(); }
  };
  return std::visit(Bits{}, group.coder);
}

/// Codes of a segment from y, the segment over its gain and the row's first scale.
struct SearchCodes {
  std::span<const float> y;
  std::span<std::uint8_t> codes;
  void operator()(const UniformCoder& coder) const { mid_rise_codes(y, gaussian_step(coder.bits), coder.bits, codes); }
  void operator()(const CodebookGroup& coder) const { coder.search(y, codes); }
  void operator()(const TrellisGroup& coder) const { coder.search(y, codes); }
};

/// The values that codes stand for, before gain and scale.
struct UnitValues {
  std::span<const std::uint8_t> codes;
  std::span<float> out;
  void operator()(const UniformCoder& coder) const {
    for (std::size_t j = 0; j < codes.size(); ++j)
      out[j] = gaussian_step(coder.bits) * (static_cast<float>(odd_level(codes[j], coder.bits)) * 0.5f);
  }
  void operator()(const CodebookGroup& coder) const { coder.values_of(codes, out); }
  void operator()(const TrellisGroup& coder) const { coder.values_of(codes, out); }
};

/// A sum from the first term on, in binary32.
class Sum {
 public:
  void add(float x) { value_ = value_ ? *value_ + x : x; }
  float value() const { return *value_; }

 private:
  std::optional<float> value_;
};

template <typename T>
std::span<T> part_of(std::span<T> row, const ChannelGroup& group) {
  return row.subspan(static_cast<std::size_t>(group.first), static_cast<std::size_t>(group.count));
}

}  // namespace

float RowScale::encode(std::span<const ChannelGroup> groups, std::span<const float> row,
                       std::span<std::uint8_t> codes) const {
  Sum length, normalized;  // E and F of packing.md
  int channels = 0;
  for (const ChannelGroup& group : groups) {
    const float energy = arithmetic::energy(part_of(row, group));
    length.add(energy);
    normalized.add(energy / (group.gain * group.gain));
    channels += group.count;
  }
  const float d = round_to(type, std::sqrt(normalized.value() / static_cast<float>(channels)));

  Sum n, p;
  std::array<float, kLargestGroup> buffer;
  for (const ChannelGroup& group : groups) {
    const std::span<const float> x = part_of(row, group);
    const std::span<std::uint8_t> c = part_of(codes, group);
    const std::span<float> y{buffer.data(), x.size()};
    const float t = group.gain * d;  // 0 only if d is 0: d is at least 2^-75, a gain 2^-24
    if (t == 0.0f) {
      std::fill(c.begin(), c.end(), static_cast<std::uint8_t>(1 << (bits_of(group) - 1)));
    } else {
      for (std::size_t j = 0; j < x.size(); ++j) y[j] = x[j] / t;
      std::visit(SearchCodes{y, c}, group.coder);
    }
    std::visit(UnitValues{c, y}, group.coder);
    n.add(group.gain * group.gain * arithmetic::energy(y));
    for (float& value : y) value = group.gain * value;
    p.add(arithmetic::tree_dot(x, y));
  }
  if (d == 0.0f) return 0.0f;
  if (rule == ScaleRule::rms || n.value() == 0.0f) return d;
  const float s = rule == ScaleRule::norm ? std::sqrt(length.value() / n.value()) : p.value() / n.value();
  return std::isnan(s) ? d : round_to(type, s);  // inf / inf, inf - inf: sums that overflow
}

void RowScale::decode(std::span<const ChannelGroup> groups, std::span<const std::uint8_t> codes, float scale,
                      std::span<float> out) {
  for (const ChannelGroup& group : groups) {
    const std::span<float> x = part_of(out, group);
    std::visit(UnitValues{part_of(codes, group), x}, group.coder);
    for (float& value : x) value = scale * (group.gain * value);
  }
}

}  // namespace kvq
