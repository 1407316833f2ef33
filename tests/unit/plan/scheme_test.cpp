#include <kvq/plan/layer_plan.h>
#include <kvq/plan/rotation.h>
#include <kvq/plan/scheme.h>

#include <catch2/catch.hpp>

using namespace kvq;

TEST_CASE("A row takes its codes, padded to a byte, and its numbers", "[plan]") {
  for (int bits = 1; bits <= 8; ++bits)
    for (const int group : {1, 3, 7, 21})
      for (const ScaleType type : {ScaleType::fp16, ScaleType::bf16, ScaleType::fp32}) {
        constexpr int kDim = 21;
        UniformCoder coder{.bits = bits, .group_size = group, .scale_type = type};
        const int groups = kDim / group, bytes = type == ScaleType::fp32 ? 4 : 2, codes = (kDim * bits + 7) / 8;
        CHECK(scale_bytes(type) == bytes);
        CHECK(row_bytes(coder, kDim) == codes + groups * 2 * bytes);
        coder.levels = UniformLevels::symmetric;
        coder.rule = ScaleRule::norm;
        CHECK(row_bytes(coder, kDim) == codes + groups * bytes);
        CHECK(code_bits(coder) == bits);
      }
  CHECK(row_bytes(ExactCoder{}, 21) == 42);
  CHECK(code_bits(ExactCoder{}) == 16);
}

TEST_CASE("The Hadamard order is the largest power of two that divides head_dim", "[plan]") {
  for (int dim = 1; dim <= 1024; ++dim) {
    const int order = hadamard_order(dim);
    if (dim % order != 0 || (order & (order - 1)) != 0 || dim % (2 * order) == 0)
      FAIL("dim " << dim << ": order " << order);
  }
}

TEST_CASE("Effective bits count codes, numbers and the exact tokens of the windows", "[plan]") {
  const Coder coder = UniformCoder{.bits = 2, .group_size = 64};  // fp16 scale and minimum: half a bit
  CHECK(effective_bits(TensorPlan{.coder = coder}, 128, {}, 1000) == Approx(2.5));
  CHECK(effective_bits(TensorPlan{.coder = ExactCoder{}}, 128, {}, 1000) == Approx(16.0));
  CHECK(effective_bits(TensorPlan{.coder = coder}, 128, {.sink_tokens = 64, .recent_tokens = 36}, 1000) ==
        Approx(0.9 * 2.5 + 0.1 * 16.0));
  CHECK(effective_bits(TensorPlan{.coder = coder}, 128, {.sink_tokens = 64, .recent_tokens = 256}, 100) ==
        Approx(16.0));
  const Coder odd =
      UniformCoder{.bits = 3, .group_size = 5, .levels = UniformLevels::symmetric, .rule = ScaleRule::norm};
  CHECK(effective_bits(TensorPlan{.coder = odd}, 5, {}, 7) ==
        Approx(8.0 * 4 / 5));  // 15 bits of codes take 2 bytes, the scale 2 more
}
