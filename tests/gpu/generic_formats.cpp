#include "generic_formats.h"

#include <kvq/runtime/kernel_choice.h>

#include <random>

namespace kvq::test {

namespace {

TileSide affine(int head_dim, int bits, int group_size) { return {head_dim, bits, group_size, 2}; }
TileSide symmetric(int head_dim, int bits, int group_size) { return {head_dim, bits, group_size, 1}; }
TileSide exact(int head_dim) { return {head_dim, 16, head_dim, 0}; }

GenericFormat named(const CacheFormat& format, int heads, bool bf16) {
  const auto side = [&](bool value) {
    return std::to_string(format.side(value).head_dim) + side_name(format.side(value), format.bfloat(value));
  };
  return {"k " + side(false) + " v " + side(true) + " h" + std::to_string(heads) + (bf16 ? " bf16" : " fp16"), format,
          heads, bf16};
}

TileSide with_zeros(TileSide side) {
  side.integer_zero = true;
  return side;
}
/// With fp32 numbers.
TileSide wide(TileSide side) {
  side.number_size = 4;
  return side;
}

/// A random quantized side that pages can hold.
TileSide random_side(int head_dim, std::mt19937& random) {
  const int bits = head_dim % 64 == 0 && random() % 2 ? 2 : 4;
  std::vector<int> groups;
  for (int group = 32; group <= head_dim; group += 32)
    if (head_dim % group == 0) groups.push_back(group);
  return {head_dim, bits, groups[random() % groups.size()], static_cast<int>(random() % 2) + 1};
}

}  // namespace

std::vector<GenericFormat> generic_formats() {
  std::vector<GenericFormat> all = {
      named({affine(128, 2, 32), symmetric(128, 4, 64)}, 5, true),
      named({symmetric(64, 2, 32), affine(64, 4, 64), false, true}, 1, true),
      named({affine(256, 4, 32), symmetric(256, 2, 256), false, true}, 16, false),
      named({symmetric(96, 4, 96), affine(96, 4, 32)}, 7, false),
      named({affine(192, 2, 96), symmetric(192, 4, 192), true, true}, 3, true),
      named({affine(32, 4, 32), symmetric(32, 4, 32)}, 2, true),
      named({affine(160, 4, 160), symmetric(160, 4, 32)}, 11, true),
      named({symmetric(224, 4, 224), affine(224, 4, 32)}, 8, false),
      named({affine(128, 2, 128), affine(128, 2, 128)}, 20, true),
      // exact rows: on both sides, on one side, with a head_dim that quantized sides cannot have
      named({exact(80), exact(80)}, 4, true),
      named({exact(16), exact(16)}, 1, false),
      named({exact(256), exact(256)}, 12, true),
      named({exact(128), affine(128, 2, 128)}, 4, true),
      named({affine(64, 4, 64), exact(64), true, false}, 6, false),
      // keys and values of different head_dim
      named({affine(192, 4, 64), affine(128, 2, 128)}, 4, true),
      named({symmetric(64, 4, 32), exact(112)}, 9, true),
      named({exact(96), symmetric(256, 2, 64), false, true}, 2, false),
  };
  std::mt19937 random(1);
  for (int i = 0; i < 32; ++i) {
    const int head_dim = 32 + 32 * static_cast<int>(random() % 8), heads = 1 + static_cast<int>(random() % 16);
    const TileSide k = random_side(head_dim, random), v = random_side(head_dim, random);
    const bool k_bfloat = random() % 3 == 0, v_bfloat = random() % 3 == 0;
    all.push_back(named({k, v, k_bfloat, v_bfloat}, heads, random() % 2 == 0));
  }
  for (const GenericFormat& format : later_formats()) all.push_back(format);
  return all;
}

std::vector<GenericFormat> later_formats() {
  return {
      named({affine(128, 3, 128), symmetric(128, 3, 32)}, 4, true),
      named({symmetric(256, 3, 64), affine(256, 3, 256), true, false}, 9, false),
      named({affine(128, 3, 64), symmetric(64, 2, 64), false, true}, 2, true),
      named({with_zeros(affine(128, 4, 128)), with_zeros(affine(128, 2, 32)), false, true}, 3, true),
      named({wide(symmetric(96, 4, 32)), wide(affine(96, 4, 96))}, 5, false),
      named({wide(with_zeros(affine(128, 3, 64))), with_zeros(affine(128, 3, 128))}, 8, true),
      named({wide(affine(256, 4, 32)), wide(with_zeros(affine(256, 4, 32)))}, 6, true),
      named({exact(128), wide(symmetric(128, 3, 128))}, 4, true),
  };
}

}  // namespace kvq::test
