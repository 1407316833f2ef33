#include "support/featured_artifact.h"

#include "support/artifacts.h"
#include "support/random_data.h"
#include "support/row_plans.h"

#include <catch2/catch.hpp>

namespace kvq::test {

namespace {

BitAllocation allocation(std::vector<std::uint8_t> channel_bits, std::vector<std::uint16_t> channel_order) {
  return {
      .score = "energy",
      .channel_bits = std::move(channel_bits),
      .channel_order = std::move(channel_order),
      .objective = 0.75,
      .free_objective = 0.5,
  };
}

TrellisTaps taps(int bits, int memory, std::uint64_t seed) {
  return {.bits = bits, .memory = memory, .theta = gaussian(static_cast<std::size_t>(bits * (memory + 1)), seed)};
}

void check_equal_sides(const TensorPlan& a, const TensorPlan& b) {
  REQUIRE(a.allocation.has_value() == b.allocation.has_value());
  if (a.allocation) {
    CHECK(a.allocation->unit == b.allocation->unit);
    CHECK(a.allocation->score == b.allocation->score);
    CHECK(a.allocation->channel_bits == b.allocation->channel_bits);
    CHECK(a.allocation->channel_order == b.allocation->channel_order);
    CHECK(a.allocation->block_bits == b.allocation->block_bits);
    CHECK(a.allocation->block_energy == b.allocation->block_energy);
    CHECK(a.allocation->objective == b.allocation->objective);
    CHECK(a.allocation->free_objective == b.allocation->free_objective);
  }
  REQUIRE(a.centroids.has_value() == b.centroids.has_value());
  if (!a.centroids) return;
  CHECK(a.centroids->count == b.centroids->count);
  CHECK(a.centroids->joint == b.centroids->joint);
  CHECK(a.centroids->after_rotation == b.centroids->after_rotation);
  CHECK(a.centroids->values == b.centroids->values);
  CHECK(a.centroids->inertia == b.centroids->inertia);
}

}  // namespace

Artifact featured_artifact() {
  Artifact artifact = example_artifact();
  const LayerGeometry geometry{
      .num_q_heads = 4,
      .num_kv_heads = 2,
      .head_dim = 8,
      .v_head_dim = 6,
      .softmax_scale = 0.5,
  };
  artifact.model.num_layers = 3;
  artifact.calibration.method = "kvq";
  artifact.calibration.budget = {{"unit", "bits"},   {"budget", 3.0},      {"spent", 2.9},
                                 {"mean_bits", 2.9}, {"mean_bytes", 40.5}, {"metric", "nll"},
                                 {"cost", 0.01},     {"gap", 0.0625},      {"held_out_tokens", 128}};
  LayerPlan mixed{.layer = 0, .geometry = geometry, .k = {}, .v = TensorPlan{}};
  mixed.k.coder = TrellisCoder{
      .bits = 4,
      .group_size = 0,
      .rule = ScaleRule::rms,
      .scale_type = ScaleType::bf16,
      .taps = {taps(2, 2, 1), taps(4, 1, 2)},
  };
  mixed.k.allocation = allocation({4, 4, 4, 4, 2, 2, 0, 0, /**/ 4, 4, 2, 2, 2, 2, 2, 2},
                                  {0, 1, 4, 5, 2, 3, 6, 7, /**/ 2, 3, 0, 1, 4, 5, 6, 7});
  mixed.k.allocation->unit = "rope_block";
  mixed.k.allocation->block_bits = {4, 2, 4, 0, /**/ 2, 4, 2, 2};
  mixed.k.allocation->block_energy = {9.5f, 3, 8, 0, /**/ 2, 5, 2.5f, 2};
  mixed.k.centroids = Centroids{
      .count = 3,
      .joint = true,
      .after_rotation = true,
      .values = gaussian(2 * 3 * 8, 3),
      .inertia = {0.5, 0.25},
  };
  CodebookCoder book{
      .bits = 6,
      .group_size = 0,
      .rule = ScaleRule::norm,
      .scale_type = ScaleType::fp32,
      .per_head = true,
      .fitted = true,
  };
  for (const int width : {1, 3, 6})
    for (std::uint64_t head = 0; head < 2; ++head) {
      const std::vector<float> table = random_table(width, 7 * head + static_cast<std::uint64_t>(width));
      book.tables[width].insert(book.tables[width].end(), table.begin(), table.end());
    }
  mixed.v->coder = book;
  mixed.v->allocation =
      allocation({6, 6, 3, 3, 1, 0, /**/ 6, 3, 3, 3, 3, 1}, {2, 4, 0, 5, 1, 3, /**/ 3, 0, 1, 4, 5, 2});
  LayerPlan plain{.layer = 1, .geometry = geometry, .k = {}, .v = TensorPlan{}};
  plain.k.coder = codebook_coder(3, 4, ScaleRule::least_squares, ScaleType::fp16, 4);
  plain.v->coder = TrellisCoder{.bits = 2, .group_size = 6, .rule = ScaleRule::norm, .taps = {taps(2, 3, 5)}};
  plain.v->centroids = Centroids{.count = 2, .values = gaussian(2 * 2 * 6, 6), .inertia = {0.125, 1.0}};
  LayerPlan old{.layer = 2, .geometry = geometry, .k = {}, .v = TensorPlan{}};
  old.k.coder = UniformCoder{.bits = 2, .group_size = 8, .levels = UniformLevels::symmetric, .rule = ScaleRule::norm};
  artifact.layers = {mixed, plain, old};
  return artifact;
}

void check_equal_features(const Artifact& a, const Artifact& b) {
  CHECK(a.calibration.budget == b.calibration.budget);
  REQUIRE(a.layers.size() == b.layers.size());
  for (std::size_t i = 0; i < a.layers.size(); ++i) {
    INFO("layer " << a.layers[i].layer);
    check_equal_sides(a.layers[i].k, b.layers[i].k);
    REQUIRE(a.layers[i].v.has_value() == b.layers[i].v.has_value());
    if (a.layers[i].v) check_equal_sides(*a.layers[i].v, *b.layers[i].v);
  }
}

}  // namespace kvq::test
