// Writes small dumps as seeds for fuzz_dump: make_dump_seeds <folder>

#include "support/dump_writer.h"

#include <filesystem>
#include <iostream>

using namespace kvq;

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: make_dump_seeds <folder>\n";
    return 2;
  }
  const std::filesystem::path folder = argv[1];
  std::filesystem::create_directories(folder);
  const test::RandomDumpSpec small{
      .num_q_heads = 2,
      .num_kv_heads = 1,
      .head_dim = 4,
      .v_head_dim = 2,
      .lengths = {2, 1},
      .rope = {.layout = RopeLayout::half, .dim = 4, .inv_freq = {1.0, 0.1}},
  };
  auto plain = test::random_dump(small);
  test::write_dump(folder / "plain.h5", plain);
  plain.model_config = R"({"hidden_size": 8, "rope_scaling": [null, 1e3]})";
  plain.generated = {0, 1, 0};
  plain.layers[0].o_proj = std::vector<float>(3 * 4, 0.5f);
  plain.layers[0].o_proj_metric = {2.0f, 0.5f, 0.5f, 1.0f};
  plain.layers[0].output_curvature = std::vector<float>(2 * 2 * 2, 1.0f);
  plain.fixed_strings = true;
  plain.chunk_tokens = 2;
  test::write_dump(folder / "chunked.h5", plain);
  plain.newest_structures = true;
  test::write_dump(folder / "newest.h5", plain);
  auto half = small;
  half.dtype = DType::f16;
  half.kind = AttentionKind::mla_rope;
  half.capture_point = CapturePoint::pre_rope;
  test::write_dump(folder / "half.h5", test::random_dump(half));
}
