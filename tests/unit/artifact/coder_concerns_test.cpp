#include <kvq/artifact/artifact.h>
#include <kvq/artifact/manifest.h>
#include <kvq/artifact/verify.h>
#include <kvq/codec/row_codec.h>
#include <kvq/container/safetensors.h>
#include <kvq/methods/make_coder.h>
#include <kvq/plan/layer_pages.h>

#include "support/artifacts.h"
#include "support/error_of.h"
#include "support/random_data.h"
#include "support/row_plans.h"
#include "support/same_artifact.h"
#include "support/temp_folder.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <variant>

// Passes every alternative of Coder to every function that depends on the coder. samples() and expected() have one
// overload for each alternative and no default, so a new alternative does not compile until the tests cover it.

using namespace kvq;

namespace {

constexpr int kDim = 32, kHeads = 2;

std::vector<Coder> samples(const ExactCoder& coder) { return {coder}; }

std::vector<Coder> samples(const UniformCoder&) {
  return {UniformCoder{.bits = 2, .group_size = 32},
          UniformCoder{.bits = 3, .group_size = 8, .scale_type = ScaleType::fp32, .zero = ZeroKind::integer},
          UniformCoder{
              .bits = 4,
              .group_size = 32,
              .levels = UniformLevels::symmetric,
              .rule = ScaleRule::least_squares,
              .scale_type = ScaleType::bf16,
          }};
}

std::vector<Coder> samples(const CodebookCoder&) {
  CodebookCoder shared = test::codebook_coder(3, 16, ScaleRule::rms, ScaleType::bf16, 1), own = shared;
  own.per_head = own.fitted = true;
  std::vector<float>& table = own.tables.at(3);
  const std::vector<float> second = test::random_table(3, 2);
  table.insert(table.end(), second.begin(), second.end());
  return {shared, own};
}

std::vector<Coder> samples(const TrellisCoder&) {
  return {test::trellis_coder({2}, 16, ScaleRule::norm, ScaleType::fp16, 3),
          test::trellis_coder({1, 2, 3}, 32, ScaleRule::least_squares, ScaleType::bf16, 4)};
}

/// What an artifact with one of the samples must have.
struct Expected {
  std::vector<std::string> features;  ///< words of `requires`
  std::vector<std::string> tensors;   ///< of a side
};

Expected expected(const ExactCoder&) { return {{}, {}}; }
Expected expected(const UniformCoder&) { return {{}, {}}; }
Expected expected(const CodebookCoder& coder) {
  Expected all{{"codebook"}, {}};
  for (const auto& [bits, table] : coder.tables) all.tensors.push_back("codebook." + std::to_string(bits));
  return all;
}
Expected expected(const TrellisCoder& coder) {
  Expected all{{"trellis"}, {"trellis"}};
  if (coder.searches_integers()) all.features.push_back("integer_search");
  return all;
}

Expected expected_of(const Coder& coder) {
  return std::visit([](const auto& alternative) { return expected(alternative); }, coder);
}

template <std::size_t... kIndex>
std::vector<Coder> all_samples(std::index_sequence<kIndex...>) {
  std::vector<Coder> all;
  const auto append = [&](const std::vector<Coder>& some) { all.insert(all.end(), some.begin(), some.end()); };
  (append(samples(std::variant_alternative_t<kIndex, Coder>{})), ...);
  return all;
}
std::vector<Coder> all_samples() { return all_samples(std::make_index_sequence<std::variant_size_v<Coder>>{}); }

TensorPlan plan_with(const Coder& coder) {
  TensorPlan plan;
  plan.coder = coder;
  if (takes_clip(coder)) plan.clip_ratio = {0.95, 1.0};
  return plan;
}

LayerPlan layer_with(const Coder& coder) {
  return {
      .layer = 0,
      .geometry =
          {.num_q_heads = 4, .num_kv_heads = kHeads, .head_dim = kDim, .v_head_dim = kDim, .softmax_scale = 0.2},
      .k = plan_with(coder),
      .v = plan_with(coder),
  };
}

Artifact artifact_with(const Coder& coder) {
  Artifact artifact = test::example_artifact();
  artifact.layers = {layer_with(coder)};
  return artifact;
}

}  // namespace

TEST_CASE("Samples of all alternatives have all kinds, and a kind makes its alternative", "[artifact][coder]") {
  std::set<std::size_t> alternatives;
  std::set<CoderKind> kinds;
  for (const Coder& coder : all_samples()) {
    INFO(coder_name(coder));
    alternatives.insert(coder.index());
    kinds.insert(kind_of(coder));
    CHECK(default_coder(kind_of(coder)).index() == coder.index());
    CHECK(std::string(coder_name(coder)) == to_string(kind_of(coder)));
    CHECK(is_exact(coder) == std::holds_alternative<ExactCoder>(coder));
  }
  CHECK(alternatives.size() == std::variant_size_v<Coder>);
  CHECK(kinds == std::set<CoderKind>(kCoderKinds.begin(), kCoderKinds.end()));
  std::set<std::string> names;
  for (const CoderKind kind : kCoderKinds) {
    CHECK(kind_of(default_coder(kind)) == kind);
    names.insert(to_string(kind));
  }
  CHECK(names.size() == kCoderKinds.size());
}

TEST_CASE("A file with any coder holds its tensors, asks for its feature and comes back whole", "[artifact][coder]") {
  const test::TempFolder folder;
  for (const Coder& coder : all_samples()) {
    INFO(coder_name(coder) << ", " << code_bits(coder) << " bits");
    const Artifact artifact = artifact_with(coder);
    REQUIRE_NOTHROW(validate(artifact.layers[0]));
    save_artifact(artifact, folder / "a");

    std::set<std::string> names;
    for (const Side side : kSides)
      for (const std::string& tensor : expected_of(coder).tensors)
        names.insert(std::string("layers.0.") + name(side) + "." + tensor);
    const SafetensorsFile file = SafetensorsFile::open(folder / "a");
    std::set<std::string> found;
    for (const auto& [tensor, info] : file.tensors()) found.insert(tensor);
    CHECK(found == names);
    CHECK(artifact_manifest(artifact).at("requires") == Json(expected_of(coder).features));

    const Artifact loaded = load_artifact(file);
    test::check_equal(loaded, artifact);
    for (const Side side : kSides) CHECK(loaded.layers[0].side(side)->coder == coder);
    for (const Check& check : verify_artifact(folder / "a")) {
      INFO(check.name << ": " << check.detail);
      CHECK(check.passed);
    }
  }
}

TEST_CASE("The manifest's fields of any coder make the same fields again", "[artifact][coder]") {
  for (const Coder& coder : all_samples()) {
    INFO(coder_name(coder));
    const TensorPlan plan = plan_with(coder);
    const Json json = plan_to_json(plan, kDim);
    const TensorPlan again = plan_from_json(json);
    CHECK(json.at("coder") == coder_name(coder));
    CHECK(again.coder.index() == coder.index());
    CHECK(plan_to_json(again, kDim) == json);
    CHECK(features(again) == expected_of(coder).features);
  }
}

TEST_CASE("A coder of no known name is refused, whatever else the manifest says of it", "[artifact][coder]") {
  for (const Coder& coder : all_samples()) {
    Json json = plan_to_json(plan_with(coder), kDim);
    json["coder"] = "zigzag";
    CHECK_THAT(test::error_text([&] { plan_from_json(json); }), Catch::Matchers::Contains("zigzag"));
  }
}

TEST_CASE("Rows of any coder keep their bytes when they are coded again", "[artifact][coder]") {
  for (const Coder& coder : all_samples())
    for (int head = 0; head < kHeads; ++head) {
      INFO(coder_name(coder) << ", head " << head);
      const TensorPlan plan = plan_with(coder);
      const RowCodec codec(plan, head, kDim);
      const std::vector<float> row = test::gaussian(kDim, 7 + static_cast<std::uint64_t>(head));
      std::vector<float> quantized = row;
      codec.quantize(quantized);
      double error = 0.0, energy = 0.0;
      for (std::size_t j = 0; j < row.size(); ++j) {
        error += (row[j] - quantized[j]) * (row[j] - quantized[j]);
        energy += row[j] * row[j];
      }
      CHECK(error < energy);
      if (is_exact(coder)) continue;
      std::vector<std::uint8_t> codes(row.size()), unpacked(row.size());
      std::vector<float> numbers(static_cast<std::size_t>(codec.num_numbers())), stored(numbers), decoded(row.size());
      std::vector<std::byte> bytes(static_cast<std::size_t>(row_bytes(plan, kDim)));
      codec.encode(row, codes, numbers);
      codec.pack(codes, numbers, 0, bytes);
      codec.unpack(bytes, unpacked, stored);
      codec.decode(unpacked, stored, decoded);
      CHECK(unpacked == codes);
      CHECK(stored == numbers);
      CHECK(decoded == quantized);
    }
}

TEST_CASE("Pages hold rows of every coder", "[artifact][coder]") {
  for (const Coder& coder : all_samples()) {
    INFO(coder_name(coder));
    CHECK(test::error_text([&] { page_layout_of(layer_with(coder), 16); }) == "no error");
  }
}

TEST_CASE("Options make a coder of the kind they name", "[artifact][coder]") {
  for (const CoderKind kind : kCoderKinds) {
    Options options;
    options.k.coder = kind;
    if (kind != CoderKind::exact) options.k.rule = scale_rule(default_coder(kind));
    CHECK(kind_of(make_coder(options, Side::k, kDim)) == kind);
  }
}
