#include <kvq/plan/kernel_limits.h>
#include <kvq/plan/serving.h>

#include <catch2/catch.hpp>

#include <array>
#include <string>
#include <vector>

using namespace kvq;

namespace {

TensorPlan affine(int bits, int group, ScaleType type = ScaleType::fp16) {
  TensorPlan plan;
  plan.coder = UniformCoder{.bits = bits, .group_size = group, .scale_type = type};
  return plan;
}

LayerPlan layer(const TensorPlan& k, const TensorPlan& v, int dim = 128, int heads_of_each = 4) {
  return {
      .layer = 1,
      .geometry = {.num_q_heads = 2 * heads_of_each,
                   .num_kv_heads = 2,
                   .head_dim = dim,
                   .v_head_dim = dim,
                   .softmax_scale = 1.0},
      .k = k,
      .v = v,
  };
}

/// Kinds of all verbs in the order of kKernelVerbs: 't'uned, 'g'eneric, '-' none.
std::string kinds(const LayerPlan& plan, Activation activation = Activation::bf16) {
  std::string text;
  for (const KernelVerb verb : kKernelVerbs) {
    const KernelKind kind = served_by(plan, activation).by(verb);
    text += kind == KernelKind::tuned ? 't' : kind == KernelKind::generic ? 'g' : '-';
  }
  if (served_by(plan, activation).is_served()) {
    const LayerGeometry& g = plan.geometry;
    CHECK(has_tuned_decode(g, side_format(plan.k, g.num_kv_heads, g.head_dim),
                           side_format(*plan.v, g.num_kv_heads, g.v_head_dim), activation) == (text[0] == 't'));
  }
  return text;
}

}  // namespace

TEST_CASE("The build knows rows of each verb", "[plan]") {
  for (const KernelVerb verb : kKernelVerbs) {
    int rows = 0;
    for (const KernelRow& row : kernel_rows()) {
      rows += row.verb == verb ? 1 : 0;
      CHECK(row.head_dim > 0);
      CHECK(row.k.empty() == (row.verb == KernelVerb::prefill));
      CHECK((row.heads > 0) == (row.verb == KernelVerb::decode));
      CHECK_FALSE(row.activation.empty());
    }
    INFO(to_string(verb));
    CHECK(rows > 0);
  }
}

TEST_CASE("A format with rows is tuned, another one generic", "[plan]") {
  CHECK(kinds(layer(affine(2, 128), affine(2, 128))) == "tttt");
  CHECK(kinds(layer(affine(2, 64), affine(2, 64))) == "tttt");
  CHECK(kinds(layer(affine(2, 32), affine(2, 32))) == "gggt");
  CHECK(cache_format_name(layer(affine(2, 128), affine(2, 128))) == "u2g128");
  CHECK(cache_format_name(layer(affine(4, 128), affine(2, 64, ScaleType::bf16))) == "u4g128/u2g64b");
  CHECK(kinds(layer(affine(2, 64), affine(2, 64, ScaleType::bf16), 128, 8)) == "tttt");
  CHECK(kinds(layer(affine(4, 32), affine(4, 96), 96)) == "tttg");
}

TEST_CASE("Verbs and activations are told apart, heads are several passes", "[plan]") {
  for (const int heads : {1, 8, 16})  // decode has a kernel for 8 rows
    CHECK(kinds(layer(affine(2, 64), affine(2, 64, ScaleType::bf16), 128, heads)) == "tttt");
  CHECK(kinds(layer(affine(2, 128), affine(2, 128), 128, 4), Activation::fp16) == "tttt");
  CHECK(kinds(layer(affine(4, 128), affine(4, 128), 128, 4), Activation::fp16) == "tttt");
  CHECK(kinds(layer(affine(2, 64), affine(2, 64, ScaleType::bf16), 128, 8), Activation::fp16) == "gggt");
  LayerPlan wide = layer(affine(2, 128), affine(2, 128), 128, kMostPrefillHeads + 1);
  CHECK(kinds(wide) == "ttt-");
  CHECK(served_by(wide, Activation::bf16).is_served());
}

TEST_CASE("Sides of different head_dim have generic kernels", "[plan]") {
  LayerPlan plan = layer(affine(2, 128), affine(2, 128));
  plan.geometry.v_head_dim = 256;
  CHECK(kinds(plan) == "gggg");
}

TEST_CASE("Three bits, zero points and fp32 numbers have generic kernels", "[plan]") {
  const auto tuned = [](const TensorPlan& side) { return kinds(layer(side, side)) != "gggt"; };
  CHECK(tuned(affine(2, 128)));
  TensorPlan side = affine(3, 128);
  CHECK_FALSE(tuned(side));
  CHECK(cache_format_name(layer(side, side)) == "u3g128");
  side = affine(4, 128, ScaleType::fp32);
  CHECK_FALSE(tuned(side));
  CHECK(cache_format_name(layer(side, side)) == "u4g128f");
  side = affine(2, 128);
  std::get<UniformCoder>(side.coder).zero = ZeroKind::integer;
  CHECK_FALSE(tuned(side));
  CHECK(cache_format_name(layer(side, side)) == "u2g128z");
}

TEST_CASE("A layer that pages do not hold says why", "[plan]") {
  LayerPlan plan = layer(TensorPlan{}, affine(2, 72), 72);
  const ServedBy served = served_by(plan, Activation::bf16);
  CHECK_FALSE(served.is_served());
  CHECK(kinds(plan) == "----");
  CHECK(served.refused == std::vector{PageFault{Side::k, "head_dim of exact rows", "multiples of 16", "72"}});
  CHECK(served.refused[0].text() == "head_dim of exact rows: supported multiples of 16, found 72");
  plan.v.reset();
  CHECK(served_by(plan, Activation::bf16).refused.size() == 2);
}

TEST_CASE("A layer that pages hold and no kernel takes says why", "[plan]") {
  const ServedBy large = served_by(layer(affine(2, 64), affine(2, 64), 512), Activation::bf16);
  CHECK_FALSE(large.is_served());
  CHECK(large.refused.empty());
  CHECK(large.no_kernel == "head_dim: supported multiples of 8 up to 256, found 512");
}

TEST_CASE("Codes of four bits with indices of one byte have tuned kernels", "[plan]") {
  LayerPlan plan = layer(affine(4, 128), affine(4, 128));
  plan.k.centroids = plan.v->centroids = Centroids{.count = 256};
  CHECK(cache_format_name(plan) == "u4g128i1");
  CHECK(kinds(plan) == "tttt");
  plan.v->centroids.reset();
  CHECK(kinds(plan) == "gggt");
  plan.v->centroids = Centroids{.count = 257};
  CHECK(kinds(plan) == "gggt");
}

TEST_CASE("Bit tiles have generic kernels, linear rows tuned ones that read", "[plan]") {
  const auto trellis = [](int bits) {
    TensorPlan side;
    side.coder = TrellisCoder{.bits = bits,
                              .group_size = 128,
                              .taps = {{.bits = bits, .memory = 1, .theta = std::vector<float>(2 * bits, 1.0f)}}};
    return side;
  };
  LayerPlan plan = layer(affine(5, 128), affine(2, 128));
  CHECK(kinds(plan) == "gggt");
  CHECK(cache_format_name(plan) == "w20n2/u2g128");
  plan.v->centroids = Centroids{.count = 9};
  CHECK(kinds(plan) == "gggt");
  CHECK(cache_format_name(plan) == "w20n2/u2g128i1");

  plan = layer(trellis(2), trellis(2));
  CHECK(kinds(plan) == "tgtt");
  CHECK(cache_format_name(plan) == "w8n1");
  CHECK(kinds(layer(trellis(2), trellis(2), 128, 8)) == "tgtt");
  CHECK(kinds(layer(trellis(3), trellis(1))) == "ggtt");  // no row of decode has its sizes
  CHECK(kinds(layer(trellis(8), trellis(2))) == "gggt");
  plan.v->centroids = Centroids{.count = 9};
  CHECK(kinds(plan) == "gggt");
  // As many words and numbers, but the entries are no sum of bits.
  plan = layer(trellis(2), trellis(2));
  plan.v->coder = CodebookCoder{.bits = 2, .group_size = 128, .tables = {{2, {-3.0f, 0.5f, 1.0f, 4.0f}}}};
  CHECK(cache_format_name(plan) == "w8n1");
  CHECK(kinds(plan) == "ggtt");
  // The write takes any codebook, of both sides.
  plan.k = *plan.v;
  CHECK(kinds(plan) == "gttt");
  std::get<CodebookCoder>(plan.k.coder).rule = ScaleRule::least_squares;
  CHECK(kinds(plan) == "ggtt");
}

TEST_CASE("Codebook and symmetric codes in bit tiles have a tuned dequantize", "[plan]") {
  TensorPlan book, uniform;
  const auto set = [&](int bits, int group_size) {
    std::vector<float> table;
    for (int i = 0; i < 1 << bits; ++i) table.push_back(static_cast<float>(i * i + 1));
    book.coder = CodebookCoder{.bits = bits, .group_size = group_size, .tables = {{bits, table}}};
    uniform.coder = UniformCoder{.bits = bits, .group_size = group_size, .levels = UniformLevels::symmetric};
  };
  set(3, 16);
  CHECK(kinds(layer(book, uniform)) == "ggtt");
  set(3, 8);  // 16 scales
  CHECK(kinds(layer(book, book)) == "gggt");
  set(1, 16);
  CHECK(kinds(layer(uniform, book)) == "ggtt");
  set(5, 128);  // 20 words
  CHECK(kinds(layer(book, book)) == "gggt");
  set(3, 16);
  CHECK(kinds(layer(book, book, 64)) == "gggt");
  CHECK(kinds(layer(book, affine(3, 16))) == "gggt");
  CHECK(kinds(layer(affine(4, 128), book)) == "gggt");
}
