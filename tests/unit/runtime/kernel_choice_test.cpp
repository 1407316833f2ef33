#include <kvq/plan/serving.h>
#include <kvq/runtime/kernel_choice.h>

#include <fmt/format.h>
#include <catch2/catch.hpp>

#include <vector>

using namespace kvq;

namespace {

TensorPlan side_of(const TileSide& side, bool bfloat) {
  TensorPlan plan;
  if (side.exact()) return plan;
  plan.coder = UniformCoder{
      .bits = side.bits,
      .group_size = side.group_size,
      .levels = side.numbers == 2 ? UniformLevels::affine : UniformLevels::symmetric,
      .rule = side.numbers == 2 ? ScaleRule::minmax : ScaleRule::norm,
      .scale_type = number_type_of(side, bfloat),
      .zero = side.integer_zero ? ZeroKind::integer : ZeroKind::floating,
  };
  return plan;
}

LayerPlan plan_of(const TileSide& k, bool k_bfloat, const TileSide& v, bool v_bfloat, int heads) {
  return {
      .layer = 0,
      .geometry = {.num_q_heads = heads,
                   .num_kv_heads = 1,
                   .head_dim = k.head_dim,
                   .v_head_dim = v.head_dim,
                   .softmax_scale = 1.0},
      .k = side_of(k, k_bfloat),
      .v = side_of(v, v_bfloat),
  };
}

KernelKind kind_of(bool tuned) { return tuned ? KernelKind::tuned : KernelKind::generic; }

/// The tuned kernels of this build.
std::span<const KernelRow> built_rows() {
  static const std::vector<KernelRow> rows = [] {
    std::vector<KernelRow> built;
    for (const KernelRow& row : kernel_rows())
      if (row.set <= KernelSet::KVQ_KERNELS) built.push_back(row);
    return built;
  }();
  return rows;
}

/// The runtime's choice and served_by() must say the same of each verb.
void expect_agreement(const LayerPlan& plan, bool bf16) {
  const ServedBy said = served_by(plan, bf16 ? Activation::bf16 : Activation::fp16, built_rows());
  const KernelKey key = kernel_key(plan, page_layout_of(plan, 64), bf16);
  INFO(cache_format_name(plan) << " head_dim " << plan.geometry.head_dim << " and " << plan.geometry.v_head_dim << ", "
                               << key.heads << " heads, " << (bf16 ? "bf16" : "fp16"));
  REQUIRE(said.is_served());
  CHECK(said.by(KernelVerb::decode) == kind_of(choose_decode(key).tuned));
  CHECK(said.by(KernelVerb::quantize_write) == kind_of(choose_write(key).tuned));
  const DequantizeVariant rows = choose_dequantize(key);
  CHECK(said.by(KernelVerb::dequantize) == kind_of(rows.tuned));
  if (key.heads <= 16) CHECK(said.by(KernelVerb::prefill) == kind_of(choose_prefill(rows).tuned));
}

}  // namespace

TEST_CASE("A build has the tuned kernels of its option", "[runtime]") {
  std::array<std::size_t, kKernelVerbs.size()> listed = {};
  for (const KernelRow& row : built_rows()) ++listed[index(row.verb)];
  CHECK(listed[index(KernelVerb::decode)] == decode_variants().size());
  CHECK(listed[index(KernelVerb::quantize_write)] == write_variants().size());
  CHECK(listed[index(KernelVerb::dequantize)] == dequantize_variants().size());
  CHECK(listed[index(KernelVerb::prefill)] == prefill_variants().size());
}

TEST_CASE("Tools without CUDA say of each variant what the runtime chooses", "[runtime]") {
  for (const bool bf16 : {true, false})
    for (const int heads : {1, 4, 5, 8, 9, 16, 17}) {
      for (const DecodeVariant* row : decode_variants())
        if (!row->k.is_bits())  // no plan has linear rows yet
          expect_agreement(plan_of(row->k, row->k_bfloat, row->v, row->v_bfloat, heads), bf16);
      for (const WriteVariant* row : write_variants())
        expect_agreement(plan_of(row->k, row->k_bfloat, row->v, row->v_bfloat, heads), bf16);
      for (const DequantizeVariant* row : dequantize_variants())
        expect_agreement(plan_of(row->k, row->k_bfloat, row->v, row->v_bfloat, heads), bf16);
    }
}

TEST_CASE("Tools without CUDA say of every format of pages what the runtime chooses", "[runtime]") {
  std::vector<TileSide> sides;
  for (const int dim : {64, 96, 128, 192, 256})
    for (const int bits : {2, 4, 16}) {
      if (bits == 16) sides.push_back({dim, 16, dim, 0});
      for (int group = 32; group <= dim && bits != 16 && dim * bits % 128 == 0; group += 32)
        if (dim % group == 0)
          for (const int numbers : {1, 2}) sides.push_back({dim, bits, group, numbers});
    }
  // Formats that differ from those of tuned kernels only in what 2.1 added.
  for (const int bits : {2, 3, 4})
    for (const int numbers : {1, 2})
      for (const int size : {2, 4})
        for (const bool zero : {false, true})
          if (numbers == 2 || !zero) sides.push_back({128, bits, 128, numbers, size, zero});

  for (const TileSide& k : sides)
    for (const TileSide& v : sides)
      for (const bool bf16 : {true, false}) {
        if (k.head_dim != v.head_dim && (k.bits != 2 || v.bits != 2)) continue;  // a few pairs of different dimensions
        expect_agreement(plan_of(k, false, v, !v.exact() && v.number_size == 2 && v.bits == 2, 4), bf16);
      }
}

TEST_CASE("No tuned kernel takes three bits, zero points or fp32 numbers", "[runtime]") {
  for (const TileSide& of : {TileSide{128, 2, 128, 2}, TileSide{128, 2, 128, 1}, TileSide{128, 4, 128, 2}}) {
    const auto tuned = [](const TileSide& k, const TileSide& v) {
      const KernelKey key{.k = k, .v = v, .heads = 4};
      return choose_decode(key).tuned || choose_write(key).tuned || choose_dequantize(key).tuned;
    };
    REQUIRE(tuned(of, of));
    TileSide three = of, wide = of, zero = of;
    three.bits = 3, wide.number_size = 4, zero.integer_zero = true;
    for (const TileSide& other : {three, wide, zero})
      CHECK((!tuned(other, other) && !tuned(of, other) && !tuned(other, of)));
  }
}

TEST_CASE("A tuned kernel for bit tiles takes linear rows with one number, no others", "[runtime]") {
  TensorPlan trellis, symmetric, skewed, affine;
  trellis.coder = TrellisCoder{
      .taps = {{.bits = 2, .memory = 1, .search = TrellisSearch::integer, .theta = {1.5f, 0.9f, -0.8f, 1.0f}}}};
  CodebookCoder book;
  book.tables[2] = {-1.5f, -0.45f, 0.45f, 1.5f};
  symmetric.coder = book;
  book.tables[2] = {-1.5f, -0.45f, 0.45f, 1.6f};
  skewed.coder = book;
  TensorPlan mixed = trellis;  // 32 channels of 3 bits, 64 of 2, 32 of 1
  BitAllocation widths{.channel_bits = std::vector<std::uint8_t>(32, 3)};
  widths.channel_bits.resize(96, 2), widths.channel_bits.resize(128, 1);
  mixed.allocation = widths;
  TensorPlan one_scale = mixed;
  one_scale.allocation->segment_gain.assign(kGainWidths, 1.0f);

  const auto check = [](const TensorPlan& k, const TensorPlan& v, const char* format, bool linear, bool dequantized) {
    const LayerPlan plan{
        .layer = 0,
        .geometry = {.num_q_heads = 4, .num_kv_heads = 1, .head_dim = 128, .v_head_dim = 128, .softmax_scale = 1.0},
        .k = k,
        .v = v,
    };
    INFO(format << ", linear " << linear);
    const PageLayout pages = page_layout_of(plan, 64);
    CHECK(cache_format_name(plan) == format);
    const KernelKey key = kernel_key(plan, pages, true);
    CHECK((key.k_rows == TunedRows::linear && key.v_rows == TunedRows::linear) == linear);
    CHECK((find_tuned_decode(key) != nullptr) == linear);
    CHECK(decodes_linear_rows(key) == linear);
    CHECK(dequantizes_bits(key) == dequantized);
    CHECK(choose_dequantize(key).tuned == dequantized);
    expect_agreement(plan, true);
  };
  for (const TensorPlan& good : {trellis, symmetric, one_scale}) {
    check(good, good, "w8n1", true, true);
    check(trellis, good, "w8n1", true, true);
    // Rows that are not linear are decoded.
    check(skewed, good, "w8n1", false, true);
    check(good, skewed, "w8n1", false, true);
  }
  check(mixed, mixed, "w8n3", false, false);  // trellis codes with several scales
}
