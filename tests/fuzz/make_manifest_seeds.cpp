// Writes artifacts, with and without tensors, as seeds for fuzz_manifest: make_manifest_seeds <folder>

#include <kvq/codec/golden_rows.h>

#include "container_input.h"
#include "support/artifacts.h"
#include "support/row_plans.h"
#include "support/temp_folder.h"

#include <filesystem>
#include <fstream>
#include <iostream>

using namespace kvq;

namespace {

/// Sets claims to 0; the fuzzer replaces them by fitting numbers.
std::string without_claims(const std::string& text) {
  const std::size_t end = text.find('\n');
  Json manifest = parse_json(text.substr(0, end), "seed");
  for (Json& layer : manifest.at("layers"))
    for (const char* side : {"k", "v"})
      if (layer.contains(side) && layer[side].contains("allocation"))
        layer[side]["allocation"]["mean_bits"] = layer[side]["allocation"]["row_bytes"] = 0;
  return canonical_json(manifest) + text.substr(end);
}

void write_seed(const Artifact& artifact, const std::filesystem::path& seed) {
  const test::TempFolder folder;
  save_artifact(artifact, folder / "artifact");
  std::ofstream(seed, std::ios::binary) << without_claims(fuzz::text_of(folder / "artifact"));
}

constexpr LayerGeometry kGeometry = {
    .num_q_heads = 4,
    .num_kv_heads = 2,
    .head_dim = 12,
    .v_head_dim = 6,
    .softmax_scale = 0.5,
};

BitAllocation allocation(std::vector<std::uint8_t> channel_bits, int dim) {
  BitAllocation bits{
      .score = "energy",
      .channel_bits = std::move(channel_bits),
      .objective = 0.75,
      .free_objective = 0.5,
  };
  for (std::size_t j = 0; j < bits.channel_bits.size(); ++j)
    bits.channel_order.push_back(static_cast<std::uint16_t>(j % static_cast<std::size_t>(dim)));
  return bits;
}

/// Groups of eight channels, which are long enough for a trellis, and one dropped channel.
TensorPlan mixed_trellis() {
  TensorPlan plan;
  plan.coder = test::trellis_coder({2}, 0, ScaleRule::rms, ScaleType::bf16, 1);
  plan.allocation = allocation({2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 0, /**/ 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1}, 12);
  plan.allocation->unit = "rope_block";
  plan.allocation->block_bits = {2, 2, 2, 2, 1, 0, /**/ 2, 2, 2, 2, 2, 1};
  plan.allocation->block_energy = {9.5f, 8, 7, 6, 2, 0, /**/ 5, 4, 3, 2, 1, 0.5f};
  test::add_centroids(plan, 12, 3, 2, 2);
  plan.centroids->joint = plan.centroids->after_rotation = true;
  return plan;
}

TensorPlan mixed_codebook() {
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
      const std::vector<float> table = test::random_table(width, head);
      book.tables[width].insert(book.tables[width].end(), table.begin(), table.end());
    }
  TensorPlan plan;
  plan.coder = book;
  plan.allocation = allocation({6, 6, 3, 3, 1, 0, /**/ 6, 3, 3, 3, 3, 1}, 6);
  return plan;
}

/// One scale a row, with gains for the widths of each head.
TensorPlan with_row_scale(TensorPlan plan, std::vector<float> gains) {
  plan.allocation->segment_gain = std::move(gains);
  return plan;
}

TensorPlan plain_codebook() {
  TensorPlan plan;
  plan.coder = test::codebook_coder(3, 4, ScaleRule::least_squares, ScaleType::fp16, 3);
  return plan;
}

TensorPlan plain_trellis() {
  TensorPlan plan;
  plan.coder = test::trellis_coder({2}, 12, ScaleRule::norm, ScaleType::fp16, 4);
  test::add_centroids(plan, 12, 2, 5, 2);
  return plan;
}

/// Features of 1.2: a matrix and its inverse for keys, channel scales for values.
LayerPlan transformed() {
  LayerPlan plan{.layer = 0, .geometry = kGeometry, .k = TensorPlan{}, .v = TensorPlan{}};
  plan.k.coder = UniformCoder{.bits = 2, .group_size = 12, .levels = UniformLevels::symmetric, .rule = ScaleRule::norm};
  plan.v->coder = UniformCoder{.bits = 4, .group_size = 6, .levels = UniformLevels::symmetric, .rule = ScaleRule::norm};
  plan.k.rotation.kind = RotationKind::dense;
  for (int h = 0; h < 2; ++h)
    for (int i = 0; i < 12; ++i)
      for (int j = 0; j < 12; ++j) {
        plan.k.rotation.matrix.push_back(i == j ? 2.0f : 0.0f);
        plan.k.rotation.inverse.push_back(i == j ? 0.5f : 0.0f);
      }
  plan.k.transform = MetricTransform{.kind = "balanced", .outlier_gain = {2.5, 1.0}, .condition = {1.0, 1.0}};
  plan.v->rotation = {.kind = RotationKind::block_hadamard, .order = 2, .channel_scale = std::vector<float>(12, 1.5f)};
  plan.v->transform = MetricTransform{.kind = "diagonal", .outlier_gain = {40.0, 2.0}, .condition = {1.0, 1.0}};
  return plan;
}

/// An artifact that uses every feature of 1.1, with these layers.
Artifact featured(std::vector<LayerPlan> layers) {
  Artifact artifact = test::example_artifact();
  artifact.calibration.budget = {{"unit", "bits"},   {"budget", 3.0},      {"spent", 2.9},
                                 {"mean_bits", 2.9}, {"mean_bytes", 40.5}, {"metric", "nll"},
                                 {"cost", 0.01},     {"gap", 0.0625},      {"held_out_tokens", 128}};
  artifact.layers = std::move(layers);
  return artifact;
}

Artifact with_golden_rows(Artifact artifact) {
  for (const LayerPlan& plan : artifact.layers) {
    const LayerGeometry& g = plan.geometry;
    GoldenTokens tokens{.first = 0, .count = 2};
    const auto bf16 = [](std::int64_t count) {
      return std::vector<std::uint16_t>(static_cast<std::size_t>(count), std::uint16_t{0x3f80});
    };
    tokens.q = bf16(std::int64_t{g.num_q_heads} * g.head_dim);
    tokens.k = bf16(tokens.count * g.num_kv_heads * g.head_dim);
    if (plan.v) tokens.v = bf16(tokens.count * g.num_kv_heads * g.v_head_dim);
    artifact.golden[plan.layer] = code_golden_rows(plan, tokens);
  }
  return artifact;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: make_manifest_seeds <folder>\n";
    return 2;
  }
  const std::filesystem::path folder = argv[1];
  std::filesystem::create_directories(folder);
  Artifact artifact = test::example_artifact();
  write_seed(artifact, folder / "everything_1_0");
  std::ofstream(folder / "no_tensors.json") << canonical_json(artifact_manifest(artifact));
  artifact.layers = {artifact.layers[1]};  // exact rows need no tensors, so this artifact loads
  std::ofstream(folder / "exact.json") << canonical_json(artifact_manifest(artifact));
  artifact.layers[0].k.coder = artifact.layers[0].v->coder = UniformCoder{.bits = 4, .group_size = 4};
  artifact.layers[0].k.clip_ratio = artifact.layers[0].v->clip_ratio = {1.0, 0.96};
  std::ofstream(folder / "plain.json") << canonical_json(artifact_manifest(artifact));

  const LayerPlan blocks{.layer = 0, .geometry = kGeometry, .k = mixed_trellis(), .v = std::nullopt};
  const LayerPlan channels{.layer = 0, .geometry = kGeometry, .k = TensorPlan{}, .v = mixed_codebook()};
  const LayerPlan mixed{.layer = 0, .geometry = kGeometry, .k = mixed_trellis(), .v = mixed_codebook()};
  const LayerPlan one_scale{
      .layer = 0,
      .geometry = kGeometry,
      .k = with_row_scale(mixed_trellis(), {0.5f, 2.0f, 1, 1, 1, 1, 1, 1, /**/ 0.25f, 3.5f, 1, 1, 1, 1, 1, 1}),
      .v = with_row_scale(mixed_codebook(), {0.5f, 1, 2.0f, 1, 1, 8.0f, 1, 1, /**/ 1.5f, 1, 2.5f, 1, 1, 4.0f, 1, 1}),
  };
  const LayerPlan plain{.layer = 1, .geometry = kGeometry, .k = plain_trellis(), .v = TensorPlan{}};
  const LayerPlan table{.layer = 2, .geometry = kGeometry, .k = plain_codebook(), .v = std::nullopt};
  write_seed(featured({mixed, plain, table}), folder / "everything_1_1");
  write_seed(featured({blocks}), folder / "mixed_trellis");
  write_seed(featured({channels}), folder / "mixed_codebook");
  write_seed(featured({plain}), folder / "trellis");
  write_seed(featured({table}), folder / "codebook");
  write_seed(featured({transformed()}), folder / "transforms");
  write_seed(featured({one_scale}), folder / "one_scale");
  for (const LayerPlan& layer : {mixed, plain, table, transformed()})
    write_seed(with_golden_rows(featured({layer})),
               folder / fmt::format("golden_{}{}", layer.layer, layer.k.transform ? "_transforms" : ""));
  write_seed(with_golden_rows(featured({one_scale})), folder / "golden_one_scale");
}
