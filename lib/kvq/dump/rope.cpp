#include <kvq/dump/rope.h>

#include <kvq/dump/dump_file.h>

#include <cmath>

namespace kvq {

Rotator::Rotator(const RopeStyle& rope) : rope_(rope), cos_(rope.inv_freq.size()), sin_(rope.inv_freq.size()) {}

void Rotator::set_position(std::int64_t position) {
  for (std::size_t j = 0; j < cos_.size(); ++j) {
    const double angle = static_cast<double>(position) * rope_.inv_freq[j];
    cos_[j] = std::cos(angle);
    sin_[j] = std::sin(angle);
  }
}

void Rotator::apply(float* row) const {
  if (rope_.layout == RopeLayout::none) return;
  const auto pairs = cos_.size();
  const bool is_half = rope_.layout == RopeLayout::half;
  const std::size_t step = is_half ? 1 : 2;          // from one pair to the next
  const std::size_t distance = is_half ? pairs : 1;  // between the two of a pair
  float* slice = row + rope_.offset;
  for (std::size_t j = 0; j < pairs; ++j) {
    const double a = slice[step * j], b = slice[step * j + distance];
    slice[step * j] = static_cast<float>((a * cos_[j] - b * sin_[j]) * rope_.attention_factor);
    slice[step * j + distance] = static_cast<float>((b * cos_[j] + a * sin_[j]) * rope_.attention_factor);
  }
}

void apply_rope(const RopeStyle& rope, std::int64_t position, float* row) {
  Rotator rotator(rope);
  rotator.set_position(position);
  rotator.apply(row);
}

}  // namespace kvq
