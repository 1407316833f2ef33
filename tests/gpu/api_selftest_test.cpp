#include "api_rig.h"
#include "coded_write_case.h"

#include "support/random_data.h"
#include "support/served_artifact.h"

#include <kvq/codec/golden_rows.h>
#include <kvq/core/dtype.h>

#include <catch2/catch.hpp>

#include <string>

using namespace kvq;
using namespace kvq::test;
using Catch::Matchers::Contains;

namespace {

/// Layers [0, count) of a served artifact.
Artifact first_layers(int count, std::int64_t golden_tokens = 50) {
  Artifact artifact = served_artifact({.sink_tokens = 4, .recent_tokens = 16}, golden_tokens);
  artifact.model.num_layers = count;
  artifact.layers.resize(static_cast<std::size_t>(count));
  artifact.golden.erase(artifact.golden.lower_bound(count), artifact.golden.end());
  return artifact;
}

struct Outcome {
  kvq_status status;
  std::string message;
  std::vector<kvq_selftest_layer> layers;
};

Outcome selftest(const Artifact& artifact, kvq_model_options options = runtime::init<kvq_model_options>()) {
  const Engine engine(artifact, options);
  Outcome outcome{KVQ_OK, "",
                  std::vector<kvq_selftest_layer>(artifact.layers.size(), runtime::init<kvq_selftest_layer>())};
  auto error = runtime::init<kvq_error>();
  std::int32_t count = 0;
  outcome.status = kvq_selftest(engine.model->get(), outcome.layers.data(),
                                static_cast<std::int32_t>(outcome.layers.size()), &count, nullptr, &error);
  outcome.message = error.message;
  CHECK(count == static_cast<std::int32_t>(artifact.layers.size()));
  return outcome;
}

/// Widths of four heads that differ, from `widest` down; heads have 32 channels of the widest, and no two the same
/// rest.
BitAllocation widths_from(int widest, bool row_scale) {
  BitAllocation a;
  for (int head = 0; head < 4; ++head) {
    for (int i = 0; i < 128; ++i)
      a.channel_bits.push_back(static_cast<std::uint8_t>(widest - (i >= 32) - (i >= 64 + 8 * head)));
    for (int i = 0; i < 128; ++i) a.channel_order.push_back(static_cast<std::uint16_t>(i));
    for (int width = 1; row_scale && width <= kGainWidths; ++width)
      a.segment_gain.push_back(width > widest || width < widest - 2 ? 1.0f : 0.5f + 0.25f * static_cast<float>(width));
  }
  return a;
}

/// A layer for each method's codes: trellis codes of 2 bits; of mixed widths with one scale; Block-GTQ's codebooks with
/// a scale for each segment, beside TurboQuant's of 3 bits; OSCAR's Lloyd-Max codebook of 2 bits; codebooks of 4 bits
/// behind dense rotations; residuals of k-means. Rotations and centers are those of a served artifact.
Artifact coded_artifact(std::int64_t golden_tokens) {
  Artifact artifact = first_layers(6, 0);
  const auto set = [&](int layer, const TensorPlan& k, const TensorPlan& v) {
    LayerPlan& plan = artifact.layers[static_cast<std::size_t>(layer)];
    plan.k.coder = k.coder, plan.k.allocation = k.allocation;
    plan.v->coder = v.coder, plan.v->allocation = v.allocation;
    if (layer < 5) plan.k.clip_ratio.clear(), plan.v->clip_ratio.clear();  // only affine codes are clipped
  };
  const auto book = [](int bits, int group) {
    return coded::codebooks(bits, group, false, ScaleRule::norm, ScaleType::fp16);
  };
  const TensorPlan trellis = coded::trellis({coded::taps(2, 3)}, 2, 128, ScaleRule::norm, ScaleType::fp16);
  TensorPlan rates =
      coded::trellis({coded::taps(1, 3), coded::taps(2, 3), coded::taps(3, 2)}, 3, 0, ScaleRule::norm, ScaleType::fp16);
  TensorPlan segments = book(4, 0), lloyd_max = book(2, 128);
  rates.allocation = widths_from(3, true), segments.allocation = widths_from(4, false);
  std::get<CodebookCoder>(lloyd_max.coder).tables[2] = {-1.5104f, -0.4528f, 0.4528f, 1.5104f};
  set(0, trellis, trellis), set(1, rates, rates), set(2, segments, book(3, 128)), set(3, lloyd_max, lloyd_max);
  set(4, book(4, 128), book(4, 128));
  const TensorPlan affine = coded::uniform(4, 128, UniformLevels::affine, ScaleRule::minmax, ScaleType::fp16);
  set(5, affine, affine);
  LayerPlan& residuals = artifact.layers[5];
  for (TensorPlan* side : {&residuals.k, &*residuals.v}) {
    side->center.clear();
    side->centroids = Centroids{
        .count = 16,
        .values = gaussian(4 * 16 * 128, side == &residuals.k ? 5 : 6),
        .inertia = std::vector<double>(4, 0.5),
    };
  }
  const Artifact rows = served_artifact({}, golden_tokens);
  for (int layer = 0; layer < 6; ++layer)
    artifact.golden[layer] =
        code_golden_rows(artifact.layers[static_cast<std::size_t>(layer)], GoldenTokens(rows.golden.at(layer).tokens));
  return artifact;
}

std::size_t firm_row(const GoldenSide& side) {
  for (std::size_t row = 3; row < side.firm.size(); ++row)
    if (side.firm[row]) return row;
  FAIL("no firm row");
  return 0;
}

/// @param rows  that each layer has; at least one in `least_firm` of them is firm
void check_passed(const Outcome& outcome, std::int64_t rows, std::int64_t least_firm) {
  CAPTURE(outcome.message);
  CHECK(outcome.status == KVQ_OK);
  CHECK(outcome.message.empty());
  for (const kvq_selftest_layer& layer : outcome.layers) {
    CAPTURE(layer.layer, layer.message);
    CHECK(layer.status == KVQ_OK);
    CHECK(layer.rows == rows);
    CHECK(layer.firm_rows > rows / least_firm);
    CHECK(layer.firm_faults + layer.soft_faults == 0);
    CHECK(layer.output_error > 0.0);
    CHECK(layer.output_error < 0x1p-7);
  }
}

}  // namespace

TEST_CASE("Golden rows come out right on this device, for every page size and rank", "[runtime][gpu][api][emulated]") {
  const Artifact artifact = first_layers(6);
  const int page_size = GENERATE(16, 64), tp_size = GENERATE(1, 8);
  auto options = runtime::init<kvq_model_options>();
  options.page_size = page_size, options.tp_size = tp_size, options.tp_rank = tp_size - 1;
  CAPTURE(page_size, tp_size);
  check_passed(selftest(artifact, options), 2 * 50 * 4 / std::min(tp_size, 4), 4);
}

TEST_CASE("Golden rows in the codes of every method come out right, for every rank",
          "[runtime][gpu][api][generic][emulated]") {
  const int tp_size = GENERATE(1, 8);
  const bool bf16 = tp_size == 1;
  auto options = runtime::init<kvq_model_options>();
  options.activation = bf16 ? KVQ_BF16 : KVQ_FP16, options.tp_size = tp_size, options.tp_rank = tp_size - 1;
  CAPTURE(tp_size);
  check_passed(selftest(coded_artifact(40), options), 2 * 40 * 4 / std::min(tp_size, 4), 8);
}

TEST_CASE("A damaged golden byte or output fails in the codes of every method",
          "[runtime][gpu][api][generic][emulated]") {
  Artifact artifact = coded_artifact(24);
  for (const int layer : {0, 1, 2, 3, 4, 5}) {
    GoldenSide& side = layer % 2 ? artifact.golden[layer].v : artifact.golden[layer].k;
    side.bytes[firm_row(side) * (side.bytes.size() / side.firm.size()) + 5] ^= 0x40;
    std::vector<float>& out = artifact.golden[layer].out;
    float largest = 0.0f;
    for (std::size_t i = 0; i < 128; ++i) largest = std::max(largest, std::abs(out[i]));
    out[9] += 0.05f * largest;
  }
  const Outcome outcome = selftest(artifact);
  CHECK(outcome.status == KVQ_MISMATCH);
  for (const kvq_selftest_layer& layer : outcome.layers) {
    CAPTURE(layer.layer, layer.message);
    CHECK(layer.firm_faults == 1);
    CHECK(layer.write_status == KVQ_MISMATCH);
    CHECK(layer.decode_status == KVQ_MISMATCH);
  }
}

TEST_CASE("Golden rows come out right for a model that computes in fp16", "[runtime][gpu][api][emulated]") {
  // Layers with tuned kernels for fp16: Hadamard blocks with signs and centers, and dense rotations with clips.
  Artifact artifact = first_layers(6);
  auto options = runtime::init<kvq_model_options>();
  options.activation = KVQ_FP16;
  Outcome outcome = selftest(artifact, options);
  for (const int layer : {0, 4, 5}) {
    const kvq_selftest_layer& result = outcome.layers[static_cast<std::size_t>(layer)];
    CAPTURE(layer, result.message);
    CHECK(result.status == KVQ_OK);
    CHECK(result.rows == 2 * 50 * 4);
    CHECK(result.firm_rows > result.rows / 4);
    CHECK(result.output_error > 0.0);
    CHECK(result.output_error < 0x1p-9);  // less than the rounding error of bfloat16 results
  }
  CHECK(outcome.message == "");
  CHECK(outcome.status == KVQ_OK);  // the other layers run on generic kernels

  // A number that bfloat16 can represent, but not fp16.
  artifact.golden[4].tokens.v[0] = float_to_bf16(1e5f);
  outcome = selftest(artifact, options);
  CHECK(outcome.layers[4].status == KVQ_UNSUPPORTED);
  CHECK_THAT(std::string(outcome.layers[4].message), Contains("beyond the largest number of fp16"));
}

TEST_CASE("Golden rows of transforms come out right, up to the bound of the condition",
          "[runtime][gpu][api][emulated]") {
  const bool bf16 = GENERATE(true, false);
  const int tp_size = GENERATE(1, 8);
  const Artifact artifact = transformed_artifact({.sink_tokens = 4, .recent_tokens = 16});
  auto options = runtime::init<kvq_model_options>();
  options.activation = bf16 ? KVQ_BF16 : KVQ_FP16, options.tp_size = tp_size, options.tp_rank = tp_size - 1;
  const Outcome outcome = selftest(artifact, options);
  CAPTURE(bf16, tp_size, outcome.message);
  CHECK(outcome.status == KVQ_OK);
  for (const kvq_selftest_layer& layer : outcome.layers) {
    CAPTURE(layer.layer, layer.message);
    CHECK(layer.status == KVQ_OK);
    CHECK(layer.rows == 2 * 50 * 4 / std::min(tp_size, 4));
    if (layer.layer != 4) CHECK(layer.firm_rows > layer.rows / 8);
    CHECK(layer.output_error > 0.0);
    // At the bound of the condition, rounding errors of 16-bit rows and queries exceed the rows, and the two-part A
    // adds to them.
    CHECK(layer.output_error < (layer.layer == 4 ? 0.2 : 0x1p-7));
  }
}

TEST_CASE("A damaged golden byte or output of a transform fails", "[runtime][gpu][api][emulated]") {
  for (const int layer : {0, 1}) {
    Artifact artifact = transformed_artifact();
    GoldenSide& side = artifact.golden[layer].k;
    side.bytes[firm_row(side) * (side.bytes.size() / side.firm.size()) + 5] ^=
        0x80;  // changes a code by two steps, a fault for soft rows, too
    std::vector<float>& out = artifact.golden[3].out;
    float largest = 0.0f;
    for (std::size_t i = 0; i < 128; ++i) largest = std::max(largest, std::abs(out[i]));
    out[7] += 0.05f * largest;
    const Outcome outcome = selftest(artifact);
    CAPTURE(layer, outcome.message);
    CHECK(outcome.status == KVQ_MISMATCH);
    CHECK(outcome.layers[static_cast<std::size_t>(layer)].write_status == KVQ_MISMATCH);
    CHECK(outcome.layers[3].decode_status == KVQ_MISMATCH);
  }
}

TEST_CASE("A damaged golden byte fails in fp16 too", "[runtime][gpu][api][emulated]") {
  Artifact artifact = first_layers(1);
  artifact.golden[0].k.bytes[firm_row(artifact.golden[0].k) * 36 + 5] ^= 0x40;
  auto options = runtime::init<kvq_model_options>();
  options.activation = KVQ_FP16;
  const Outcome outcome = selftest(artifact, options);
  CHECK(outcome.status == KVQ_MISMATCH);
  CHECK(outcome.layers[0].firm_faults == 1);
}

TEST_CASE("One damaged golden byte of a firm row fails, and says where", "[runtime][gpu][api][emulated]") {
  for (const int layer : {0, 1, 2, 3, 4, 5})
    for (const Side which : kSides) {
      Artifact artifact = first_layers(6);
      GoldenSide& side = which == Side::v ? artifact.golden[layer].v : artifact.golden[layer].k;
      const std::size_t row = firm_row(side), row_size = side.bytes.size() / side.firm.size();
      side.bytes[row * row_size + 5] ^= 0x40;
      const Outcome outcome = selftest(artifact);
      CAPTURE(layer, name(which), outcome.message);
      CHECK(outcome.status == KVQ_MISMATCH);
      CHECK_THAT(outcome.message, Contains("layer " + std::to_string(layer)) &&
                                      Contains(std::string(name(which)) + " of token " + std::to_string(row / 4) +
                                               " head " + std::to_string(row % 4)));
      for (const kvq_selftest_layer& result : outcome.layers) {
        CHECK((result.status == KVQ_MISMATCH) == (result.layer == layer));
        CHECK(result.firm_faults == (result.layer == layer));
      }
    }
}

TEST_CASE("A damaged golden output fails, and says where", "[runtime][gpu][api][emulated]") {
  Artifact artifact = first_layers(2);
  float largest = 0.0f;
  std::vector<float>& out = artifact.golden[1].out;
  for (std::size_t i = 5 * 128; i < 6 * 128; ++i) largest = std::max(largest, std::abs(out[i]));
  out[5 * 128 + 17] += 0.02f * largest;
  const Outcome outcome = selftest(artifact);
  CHECK(outcome.status == KVQ_MISMATCH);
  CHECK_THAT(outcome.message, Contains("layer 1: output of query head 5 channel 17"));
  CHECK(outcome.layers[1].write_status == KVQ_OK);
  CHECK(outcome.layers[1].decode_status == KVQ_MISMATCH);
  CHECK(outcome.layers[0].status == KVQ_OK);
}

TEST_CASE("What was not run does not count as passed", "[runtime][gpu][api][emulated]") {
  const Outcome none = selftest(first_layers(2, 0));
  CHECK(none.status == KVQ_UNSUPPORTED);
  CHECK_THAT(none.message, Contains("no golden rows") && Contains("1 more of 2 layers"));
}

TEST_CASE("A format that has no row in variants.json passes on generic kernels",
          "[runtime][gpu][api][generic][emulated]") {
  Artifact unbuilt = first_layers(2, 0);
  std::get<UniformCoder>(unbuilt.layers[1].k.coder).group_size = 32;
  GoldenTokens tokens = served_artifact({}, 5).golden.at(1).tokens;
  unbuilt.golden[0] = served_artifact({}, 5).golden.at(0);
  unbuilt.golden[1] = code_golden_rows(unbuilt.layers[1], std::move(tokens));
  auto options = runtime::init<kvq_model_options>();
  options.flags = KVQ_MODEL_WITHOUT_WINDOWS;
  const Outcome outcome = selftest(unbuilt, options);
  CHECK(outcome.status == KVQ_OK);
  CHECK(outcome.layers[1].write_status == KVQ_OK);
  CHECK(outcome.layers[1].decode_status == KVQ_OK);
  CHECK(outcome.layers[1].rows > 0);
  CHECK(outcome.layers[0].status == KVQ_OK);
}

TEST_CASE("Three bits, zero points and fp32 numbers pass on generic kernels",
          "[runtime][gpu][api][generic][emulated]") {
  Artifact later = first_layers(2, 0);
  const auto coder = [](TensorPlan& plan) -> UniformCoder& { return std::get<UniformCoder>(plan.coder); };
  LayerPlan &affine = later.layers[0], &symmetric = later.layers[1];
  coder(affine.k).bits = 3, coder(affine.k).zero = ZeroKind::integer;
  coder(*affine.v).bits = 4, coder(*affine.v).scale_type = ScaleType::fp32;
  coder(symmetric.k).bits = 3, coder(symmetric.k).scale_type = ScaleType::fp32, coder(symmetric.k).group_size = 64;
  coder(*symmetric.v).bits = 3;
  for (const int layer : {0, 1}) {
    GoldenTokens tokens = served_artifact({}, 5).golden.at(layer).tokens;
    later.golden[layer] = code_golden_rows(later.layers[static_cast<std::size_t>(layer)], std::move(tokens));
  }
  auto options = runtime::init<kvq_model_options>();
  options.flags = KVQ_MODEL_WITHOUT_WINDOWS;
  const Outcome outcome = selftest(later, options);
  CHECK(outcome.status == KVQ_OK);
  for (const int layer : {0, 1}) {
    CAPTURE(layer);
    CHECK(outcome.layers[static_cast<std::size_t>(layer)].write_status == KVQ_OK);
    CHECK(outcome.layers[static_cast<std::size_t>(layer)].decode_status == KVQ_OK);
    CHECK(outcome.layers[static_cast<std::size_t>(layer)].rows > 0);
  }
}

TEST_CASE("Results fit the room that a caller has", "[runtime][gpu][api][emulated]") {
  const Engine engine(first_layers(3, 4));
  std::vector<kvq_selftest_layer> two(2, runtime::init<kvq_selftest_layer>());
  std::int32_t count = 0;
  CHECK(kvq_selftest(engine.model->get(), two.data(), 2, &count, nullptr, nullptr) == KVQ_OK);
  CHECK(count == 3);
  CHECK(two[1].layer == 1);
  CHECK(kvq_selftest(engine.model->get(), nullptr, 0, nullptr, nullptr, nullptr) == KVQ_OK);
  CHECK(kvq_selftest(engine.model->get(), nullptr, 1, nullptr, nullptr, nullptr) == KVQ_INVALID_ARGUMENT);
  CHECK(engine.model->selftest(nullptr).size() == 3);
}
