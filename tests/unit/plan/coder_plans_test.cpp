#include <kvq/plan/layer_plan.h>

#include "support/error_of.h"
#include "support/random_data.h"
#include "support/row_plans.h"

#include <catch2/catch.hpp>

#include <cmath>
#include <functional>
#include <limits>

using namespace kvq;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;
using test::error_text;

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();

LayerGeometry geometry() {
  return {.num_q_heads = 4, .num_kv_heads = 2, .head_dim = 10, .v_head_dim = 8, .softmax_scale = 0.5};
}

BitAllocation allocation(std::vector<std::uint8_t> one_head) {
  BitAllocation bits{.score = "energy"};
  for (int head = 0; head < 2; ++head)
    for (std::size_t j = 0; j < one_head.size(); ++j) {
      bits.channel_bits.push_back(one_head[j]);
      bits.channel_order.push_back(static_cast<std::uint16_t>(one_head.size() - 1 - j));
    }
  return bits;
}

/// Mixed trellis keys by RoPE block with centroids; mixed codebook values by channel.
LayerPlan mixed() {
  LayerPlan plan{.layer = 3, .geometry = geometry(), .k = {}, .v = TensorPlan{}};
  plan.k.coder = test::trellis_coder({2, 4}, 0, ScaleRule::rms, ScaleType::fp16, 1);
  plan.k.allocation = allocation({4, 4, 4, 4, 2, 2, 1, 1, 0, 0});
  plan.k.allocation->unit = "rope_block";
  plan.k.allocation->block_bits = {4, 4, 2, 1, 0, 0, 1, 2, 4, 4};
  plan.k.allocation->block_energy = {9, 8, 3, 1, 0, 0, 1, 3, 8, 9};
  plan.k.allocation->objective = 2.0;
  plan.k.allocation->free_objective = 1.0;
  plan.k.centroids =
      Centroids{.count = 3, .joint = true, .values = test::gaussian(2 * 3 * 10, 1), .inertia = {0.5, 0.25}};
  CodebookCoder book{
      .bits = 5,
      .group_size = 0,
      .rule = ScaleRule::norm,
      .scale_type = ScaleType::bf16,
      .per_head = true,
      .fitted = true,
  };
  for (const int width : {1, 3, 5})
    for (int head = 0; head < 2; ++head) {
      const std::vector<float> table = test::random_table(width, static_cast<std::uint64_t>(width + head));
      book.tables[width].insert(book.tables[width].end(), table.begin(), table.end());
    }
  plan.v->coder = book;
  plan.v->allocation = allocation({5, 5, 3, 3, 3, 3, 1, 0});
  return plan;
}

/// Codebook keys and trellis values of one width.
LayerPlan plain() {
  LayerPlan plan{.layer = 3, .geometry = geometry(), .k = {}, .v = TensorPlan{}};
  plan.k.coder = test::codebook_coder(3, 5, ScaleRule::least_squares, ScaleType::fp32, 1);
  plan.v->coder = test::trellis_coder({2}, 8, ScaleRule::norm, ScaleType::fp16, 1);
  return plan;
}

CodebookCoder& book(TensorPlan& plan) { return std::get<CodebookCoder>(plan.coder); }
TrellisCoder& trellis(TensorPlan& plan) { return std::get<TrellisCoder>(plan.coder); }
UniformCoder symmetric(int bits, int group, ScaleRule rule) {
  return {.bits = bits, .group_size = group, .levels = UniformLevels::symmetric, .rule = rule};
}

struct Fault {
  const char* name;
  Side side;
  const char* word;  ///< in the message
  std::function<void(LayerPlan&)> make;
};

const Fault kPlainFaults[] = {
    {"a codebook with a rule of ranges", Side::k, "codebook", [](LayerPlan& p) { book(p.k).rule = ScaleRule::minmax; }},
    {"a codebook with absmax", Side::k, "absmax", [](LayerPlan& p) { book(p.k).rule = ScaleRule::absmax; }},
    {"a trellis with minmax", Side::v, "minmax", [](LayerPlan& p) { trellis(*p.v).rule = ScaleRule::minmax; }},
    {"a trellis with absmax", Side::v, "absmax", [](LayerPlan& p) { trellis(*p.v).rule = ScaleRule::absmax; }},
    {"symmetric with rms", Side::v, "rms", [](LayerPlan& p) { p.v->coder = symmetric(2, 8, ScaleRule::rms); }},
    {"affine with rms", Side::v, "rms",
     [](LayerPlan& p) {
       p.v->coder = UniformCoder{.bits = 2, .group_size = 8, .rule = ScaleRule::rms};
       p.v->clip_ratio = {1.0, 1.0};
     }},
    {"no bits of a codebook", Side::k, "bits", [](LayerPlan& p) { book(p.k).bits = 0; }},
    {"nine bits of a codebook", Side::k, "bits", [](LayerPlan& p) { book(p.k).bits = 9; }},
    {"no bits of a trellis", Side::v, "bits", [](LayerPlan& p) { trellis(*p.v).bits = 0; }},
    {"nine bits of a trellis", Side::v, "bits", [](LayerPlan& p) { trellis(*p.v).bits = 9; }},
    {"a codebook's groups that do not divide", Side::k, "group", [](LayerPlan& p) { book(p.k).group_size = 4; }},
    {"a codebook's group of nothing", Side::k, "group", [](LayerPlan& p) { book(p.k).group_size = 0; }},
    {"a trellis's groups that do not divide", Side::v, "group", [](LayerPlan& p) { trellis(*p.v).group_size = 3; }},
    {"a trellis's group of nothing", Side::v, "group", [](LayerPlan& p) { trellis(*p.v).group_size = 0; }},
    {"a clip of a codebook", Side::k, "clip", [](LayerPlan& p) { p.k.clip_ratio = {1.0, 1.0}; }},
    {"a clip of a trellis", Side::v, "clip", [](LayerPlan& p) { p.v->clip_ratio = {0.9, 0.9}; }},
    {"no table", Side::k, "codebook", [](LayerPlan& p) { book(p.k).tables.clear(); }},
    {"a table of another width", Side::k, "3",
     [](LayerPlan& p) { book(p.k).tables = {{2, test::random_table(2, 1)}}; }},
    {"a table too short", Side::k, "codebook", [](LayerPlan& p) { book(p.k).tables[3].pop_back(); }},
    {"a table for one head where each has one", Side::k, "codebook", [](LayerPlan& p) { book(p.k).per_head = true; }},
    {"equal entries", Side::k, "not above", [](LayerPlan& p) { book(p.k).tables[3][4] = book(p.k).tables[3][3]; }},
    {"falling entries", Side::k, "not above",
     [](LayerPlan& p) { std::swap(book(p.k).tables[3][0], book(p.k).tables[3][7]); }},
    {"NaN in a table", Side::k, "codebook", [](LayerPlan& p) { book(p.k).tables[3][2] = kNan; }},
    {"infinity at a table's end", Side::k, "codebook", [](LayerPlan& p) { book(p.k).tables[3][7] = kInfinity; }},
    {"no theta", Side::v, "trellis", [](LayerPlan& p) { trellis(*p.v).taps.clear(); }},
    {"theta of another width", Side::v, "trellis",
     [](LayerPlan& p) { trellis(*p.v).taps = test::trellis_coder({3}, 8, ScaleRule::norm, ScaleType::fp16, 1).taps; }},
    {"theta too short", Side::v, "trellis", [](LayerPlan& p) { trellis(*p.v).taps[0].theta.pop_back(); }},
    {"NaN in theta", Side::v, "trellis", [](LayerPlan& p) { trellis(*p.v).taps[0].theta[1] = kNan; }},
    {"infinity in theta", Side::v, "trellis", [](LayerPlan& p) { trellis(*p.v).taps[0].theta[1] = -kInfinity; }},
    {"no memory", Side::v, "memory",
     [](LayerPlan& p) { trellis(*p.v).taps[0] = {.bits = 2, .memory = 0, .theta = {1, 2}}; }},
    {"a memory of nine", Side::v, "memory",
     [](LayerPlan& p) {
       trellis(*p.v) = test::trellis_coder({1}, 8, ScaleRule::norm, ScaleType::fp16, 1);
       trellis(*p.v).taps[0] = {.bits = 1, .memory = 9, .theta = std::vector<float>(10, 1.0f)};
     }},
    {"more than 256 states", Side::v, "memory",
     [](LayerPlan& p) { trellis(*p.v).taps[0] = {.bits = 2, .memory = 5, .theta = std::vector<float>(12, 1.0f)}; }},
    {"three codes of six bits", Side::v, "memory",
     [](LayerPlan& p) {
       trellis(*p.v).bits = 6;
       trellis(*p.v).taps[0] = {.bits = 6, .memory = 2, .theta = std::vector<float>(18, 1.0f)};
     }},
    {"two thetas of a width", Side::v, "trellis",
     [](LayerPlan& p) { trellis(*p.v).taps.push_back(trellis(*p.v).taps[0]); }},
    {"a width of theta that is none", Side::v, "trellis",
     [](LayerPlan& p) { trellis(*p.v).taps.push_back({.bits = 0, .memory = 1, .theta = {}}); }},
    {"centroids and a center", Side::k, "cent",
     [](LayerPlan& p) {
       p.k.center.assign(20, 0.5f);
       p.k.centroids = Centroids{.count = 2, .values = std::vector<float>(40, 1.0f), .inertia = {1, 1}};
     }},
};

const Fault kMixedFaults[] = {
    {"widths of one head", Side::k, "channel_bits", [](LayerPlan& p) { p.k.allocation->channel_bits.resize(10); }},
    {"no widths", Side::k, "channel_bits", [](LayerPlan& p) { p.k.allocation->channel_bits.clear(); }},
    {"a width of nine", Side::k, "channel_bits", [](LayerPlan& p) { p.k.allocation->channel_bits[10] = 9; }},
    {"widths that ascend", Side::k, "descending",
     [](LayerPlan& p) { std::swap(p.k.allocation->channel_bits[13], p.k.allocation->channel_bits[14]); }},
    {"widths above the coder's", Side::k, "largest width", [](LayerPlan& p) { p.k.allocation->channel_bits[0] = 6; }},
    {"the coder's bits above all widths", Side::k, "bits", [](LayerPlan& p) { trellis(p.k).bits = 5; }},
    {"no order", Side::k, "channel_order", [](LayerPlan& p) { p.k.allocation->channel_order.clear(); }},
    {"an order of one head", Side::k, "channel_order", [](LayerPlan& p) { p.k.allocation->channel_order.resize(10); }},
    {"a channel twice in the order", Side::k, "channel_order",
     [](LayerPlan& p) { p.k.allocation->channel_order[3] = p.k.allocation->channel_order[4]; }},
    {"a channel beyond the head", Side::k, "channel_order",
     [](LayerPlan& p) { p.k.allocation->channel_order[12] = 10; }},
    {"an unknown unit", Side::v, "unit", [](LayerPlan& p) { p.v->allocation->unit = "head"; }},
    {"an unknown unit with bits of blocks", Side::k, "", [](LayerPlan& p) { p.k.allocation->unit = "head"; }},
    {"RoPE blocks without their bits", Side::k, "block_bits", [](LayerPlan& p) { p.k.allocation->block_bits.clear(); }},
    {"bits of RoPE blocks of one head", Side::k, "block_bits",
     [](LayerPlan& p) { p.k.allocation->block_bits.resize(5); }},
    {"a block of nine bits", Side::k, "block_bits", [](LayerPlan& p) { p.k.allocation->block_bits[2] = 9; }},
    {"scores of too few blocks", Side::k, "block_energy",
     [](LayerPlan& p) { p.k.allocation->block_energy.pop_back(); }},
    {"a score that is NaN", Side::k, "block_energy", [](LayerPlan& p) { p.k.allocation->block_energy[1] = kNan; }},
    {"bits of RoPE blocks at unit channel", Side::v, "block_bits",
     [](LayerPlan& p) { p.v->allocation->block_bits.assign(8, 2); }},
    {"a group size of mixed rows", Side::v, "group", [](LayerPlan& p) { book(*p.v).group_size = 8; }},
    {"a group size of mixed trellis rows", Side::k, "group", [](LayerPlan& p) { trellis(p.k).group_size = 10; }},
    {"mixed exact rows", Side::v, "exact", [](LayerPlan& p) { p.v->coder = ExactCoder{}; }},
    {"mixed affine rows", Side::v, "affine",
     [](LayerPlan& p) {
       p.v->coder = UniformCoder{.bits = 5, .group_size = 0};
       p.v->clip_ratio = {1.0, 1.0};
     }},
    {"mixed rows with a rule of ranges", Side::v, "minmax",
     [](LayerPlan& p) { p.v->coder = symmetric(5, 0, ScaleRule::minmax); }},
    {"a width without a table", Side::v, "3", [](LayerPlan& p) { book(*p.v).tables.erase(3); }},
    {"the second head's table descending", Side::v, "not above",
     [](LayerPlan& p) { std::swap(book(*p.v).tables[3][9], book(*p.v).tables[3][10]); }},
    {"a table of one head", Side::v, "codebook", [](LayerPlan& p) { book(*p.v).tables[1].resize(2); }},
    {"an objective that is NaN", Side::v, "objective", [](LayerPlan& p) { p.v->allocation->objective = std::nan(""); }},
    {"one centroid", Side::k, "centroids",
     [](LayerPlan& p) { p.k.centroids = Centroids{.count = 1, .values = std::vector<float>(20), .inertia = {1, 1}}; }},
    {"too many centroids", Side::k, "centroids",
     [](LayerPlan& p) {
       p.k.centroids = Centroids{.count = 4097, .values = std::vector<float>(2 * 10 * 4097), .inertia = {1, 1}};
     }},
    {"centroids of exact rows", Side::k, "exact",
     [](LayerPlan& p) {
       p.k.coder = ExactCoder{};
       p.k.allocation.reset();
     }},
    {"centroids of one head", Side::k, "centroids", [](LayerPlan& p) { p.k.centroids->values.resize(30); }},
    {"NaN in a centroid", Side::k, "centroids", [](LayerPlan& p) { p.k.centroids->values[31] = kNan; }},
    {"an inertia for one head", Side::k, "inertia", [](LayerPlan& p) { p.k.centroids->inertia.pop_back(); }},
    {"an inertia that is NaN", Side::k, "inertia", [](LayerPlan& p) { p.k.centroids->inertia[0] = std::nan(""); }},
    {"a negative inertia", Side::k, "inertia", [](LayerPlan& p) { p.k.centroids->inertia[0] = -0.1; }},
};

}  // namespace

TEST_CASE("Plans with tables, mixed widths and centroids are valid", "[plan]") {
  CHECK(error_text([] { validate(plain()); }) == "no error");
  CHECK(error_text([] { validate(mixed()); }) == "no error");
  LayerPlan plan = mixed();
  plan.k.coder = symmetric(4, 0, ScaleRule::norm);
  CHECK(error_text([&] { validate(plan); }) == "no error");
  plan.k.coder = symmetric(4, 0, ScaleRule::least_squares);
  CHECK(error_text([&] { validate(plan); }) == "no error");
  // Every head has a valid row layout.
  for (int head = 0; head < 2; ++head) CHECK(row_layout(plan.k, head, 10).row_bytes <= row_bytes(plan.k, 10));
}

TEST_CASE("A faulty plan with tables, mixed widths or centroids is refused with layer, side and reason", "[plan]") {
  const auto check = [](const Fault& fault, LayerPlan plan) {
    INFO(fault.name);
    fault.make(plan);
    CHECK_THAT(error_text([&] { validate(plan); }),
               StartsWith("bad_input: ") && Contains("layer 3") && Contains(name(fault.side)) && Contains(fault.word));
  };
  for (const Fault& fault : kPlainFaults) check(fault, plain());
  for (const Fault& fault : kMixedFaults) check(fault, mixed());
}

TEST_CASE("Heads that share a rotation share widths, tables and centroids", "[plan]") {
  LayerPlan plan = mixed();
  plan.k.rotation.scope = plan.v->rotation.scope = Scope::layer;
  CHECK_THAT(error_text([&] { validate(plan); }), StartsWith("bad_input: "));
  plan.k.allocation->channel_bits.resize(10);
  plan.k.allocation->channel_order.resize(10);
  plan.k.allocation->block_bits.resize(5);
  plan.k.allocation->block_energy.resize(5);
  plan.k.centroids->values.resize(30);
  plan.k.centroids->inertia.resize(1);
  plan.v->allocation->channel_bits.resize(8);
  plan.v->allocation->channel_order.resize(8);
  for (auto& [width, table] : book(*plan.v).tables) table.resize(std::size_t{1} << width);
  CHECK(error_text([&] { validate(plan); }) == "no error");
  CHECK(row_bytes(plan.k, 10) > 0);
  CHECK(row_layout(plan.k, 1, 10).row_bytes == row_layout(plan.k, 0, 10).row_bytes);
}

TEST_CASE("Names, sizes and bits of codebook and trellis coders", "[plan]") {
  const LayerPlan one = plain(), two = mixed();
  CHECK(std::string(coder_name(one.k.coder)) == "codebook");
  CHECK(std::string(coder_name(one.v->coder)) == "trellis");
  CHECK(std::string(to_string(ScaleRule::rms)) == "rms");
  CHECK(code_bits(one.k.coder) == 3);
  CHECK(code_bits(two.k.coder) == 4);
  CHECK(group_size(one.k.coder) == 5);
  CHECK(group_size(two.k.coder) == 0);
  CHECK(scale_rule(one.k.coder) == ScaleRule::least_squares);
  CHECK(scale_type(one.k.coder) == ScaleType::fp32);
  CHECK(numbers_per_group(one.k.coder) == 1);
  CHECK(numbers_per_group(one.v->coder) == 1);
  // ceil(10 * 3 / 8) codes and two fp32 scales; 16 bits of codes and one fp16.
  CHECK(row_bytes(one.k.coder, 10) == 4 + 8);
  CHECK(row_bytes(one.v->coder, 8) == 2 + 2);
  // Keys: 2 + 1 + 1 bytes (4, 2, 2 channels), 3 scales, index: 11. Values: 2 + 2 + 1 bytes, one of padding, 3
  // scales: 12.
  CHECK(row_layout(two.k, 0, 10).row_bytes == 11);
  CHECK(row_bytes(two.k, 10) == 12);
  CHECK(row_bytes(*two.v, 8) == 12);
  const CacheLayout layout = cache_layout(two);
  CHECK(layout.num_kv_heads == 2);
  CHECK(layout.k_row_bytes == 12);
  CHECK(layout.v_row_bytes == 12);
  CHECK(layout.token_bytes() == 48);
  CHECK(layout.page_bytes(64) == 64 * 48);
  CHECK(two.k.allocation->mean_bits() == Approx((4 * 4 + 2 * 2 + 2 * 1) / 10.0));
  CHECK(mean_code_bits(two.k) == Approx(2.2));
  CHECK(mean_code_bits(one.k) == 3.0);
  CHECK(mean_code_bits(TensorPlan{}) == 16.0);
  CHECK(effective_bits(two.k, 10, {}, 1000) == Approx(12 * 8 / 10.0));
  CHECK(effective_bits(two.k, 10, {.sink_tokens = 100, .recent_tokens = 150}, 1000) ==
        Approx(0.75 * 12 * 8 / 10.0 + 0.25 * 16));
  CHECK(trellis(const_cast<TensorPlan&>(two.k)).find(2)->bits == 2);
  CHECK(trellis(const_cast<TensorPlan&>(two.k)).find(3) == nullptr);
  CHECK(num_blocks(10) == 5);
  CHECK(num_blocks(11) == 6);
}
