#include "reference.h"

#include "device.h"

#include <kvq/codec/codec.h>

namespace kvq::bench {

UniformCoder coder_of(const TileSide& side, bool bfloat, ScaleRule symmetric_rule) {
  const bool affine = side.numbers == 2;
  return {.bits = side.bits,
          .group_size = side.group_size,
          .levels = affine ? UniformLevels::affine : UniformLevels::symmetric,
          .rule = affine ? ScaleRule::minmax : symmetric_rule,
          .scale_type = number_type(bfloat)};
}

std::vector<float> floats_at(const std::uint16_t* from, std::size_t count, bool bf16) {
  const std::vector<std::byte> bytes = get(reinterpret_cast<const std::byte*>(from), 2 * count);
  std::vector<float> values(count);
  load_numbers(number_type(bf16), bytes, values);
  return values;
}

}  // namespace kvq::bench
