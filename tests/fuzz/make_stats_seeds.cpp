// Writes small statistics as seeds for fuzz_stats: make_stats_seeds <folder>

#include "container_input.h"
#include "support/layers.h"
#include "support/temp_folder.h"

#include <kvq/stats/collect.h>
#include <kvq/stats/stats_file.h>

#include <filesystem>
#include <fstream>
#include <iostream>

using namespace kvq;

namespace {

test::LayerSpec spec(bool has_values) {
  return {
      .num_q_heads = 2,
      .num_kv_heads = 1,
      .head_dim = 4,
      .v_head_dim = 2,
      .lengths = {24, 2},
      .has_values = has_values,
      .dtype = DType::bf16,
  };
}

LayerStats stats_of(const LayerActivations& layer, std::int64_t held_out_tokens) {
  return collect(layer, {
                            .moments = test::all_moments(layer.v.has_value()),
                            .sample_tokens = 3,
                            .seed = 1,
                            .held_out_tokens = held_out_tokens,
                        });
}

void write_seed(const std::vector<LayerStats>& layers, const std::filesystem::path& seed) {
  const StatsHeader header{
      .model =
          {
              .name = "tiny",
              .fingerprint = std::string(64, 'a'),
              .config_json = R"({"hidden_size":8})",
              .num_layers = 2,
              .layers = {},
          },
      .producer = "kvq tests",
      .capture_point = "post_rope",
      .seed = 1,
      .sample_tokens = 3,
  };
  const test::TempFolder folder;
  save_stats(header, layers, folder / "stats");
  std::ofstream(seed, std::ios::binary) << fuzz::text_of(folder / "stats");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: make_stats_seeds <folder>\n";
    return 2;
  }
  const std::filesystem::path folder = argv[1];
  std::filesystem::create_directories(folder);
  LayerActivations layer = test::make_layer(spec(true));
  LayerStats old = stats_of(layer, 0);
  old.ranges.clear();
  write_seed({old}, folder / "version_1_0");
  layer.ranges = {{std::string("xxh3-128:") + std::string(32, 'a'), 3, 20},
                  {std::string("xxh3-128:") + std::string(32, 'b'), 0, 6}};  // of two files
  write_seed({stats_of(layer, 8)}, folder / "held_out");
  layer.output_curvature = std::vector<float>(2 * 2 * 2, 0.5f);
  layer.o_proj_metric = {1.0f, 0.5f, 0.5f, 1.0f};
  LayerActivations keys = test::make_layer(spec(false));
  keys.layer = 1;
  write_seed({stats_of(layer, 8), stats_of(keys, 8)}, folder / "curvature_and_keys_alone");
}
