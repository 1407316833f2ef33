#include <kvq/dump/dump_file.h>

#include "support/dump_writer.h"
#include "support/error_of.h"
#include "support/temp_folder.h"

#include <catch2/catch.hpp>

#include <xxhash.h>

#include <cmath>
#include <cstring>

using namespace kvq;
using namespace kvq::test;

namespace {

/// A tensor [T, H, D] as floats, read head by head.
std::vector<float> all_of(const ActivationTensor& tensor) {
  const auto dim = static_cast<std::size_t>(tensor.dim), heads = static_cast<std::size_t>(tensor.heads);
  std::vector<float> values(static_cast<std::size_t>(tensor.tokens) * heads * dim),
      head(static_cast<std::size_t>(tensor.tokens) * dim);
  for (std::size_t h = 0; h < heads; ++h) {
    tensor.load_head(static_cast<int>(h), 0, tensor.tokens, head.data());
    for (std::size_t t = 0; t < static_cast<std::size_t>(tensor.tokens); ++t)
      std::memcpy(&values[(t * heads + h) * dim], &head[t * dim], dim * sizeof(float));
  }
  return values;
}

std::vector<float> rounded(std::vector<float> values, DType dtype) {
  for (float& value : values) {
    if (dtype == DType::f16) value = f16_to_float(float_to_f16(value));
    if (dtype == DType::bf16) value = bf16_to_float(float_to_bf16(value));
  }
  return values;
}

std::string xxh3_text(const std::string& bytes) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes.data(), bytes.size()));
  std::string text = "xxh3-128:";
  for (const unsigned char byte : canonical.digest) text += fmt::format("{:02x}", byte);
  return text;
}

template <typename T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

}  // namespace

TEST_CASE("Activations read back in every type and storage that the format allows", "[dump]") {
  const TempFolder folder;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const bool bits : {false, true}) {
      for (const std::int64_t chunk : {0, 1, 7, 100}) {
        INFO(activation_name(dtype) << " bits " << bits << " chunk " << chunk);
        DumpContent content = random_dump({.dtype = dtype});
        content.half_as_bits = bits;
        content.chunk_tokens = std::min<std::int64_t>(chunk, 18);
        content.fixed_strings = content.small_integers = bits;
        write_dump(folder / "a.h5", content);
        const auto layer = Dump::open({folder / "a.h5"}).load_layer(0);
        const DumpLayer& expected = content.layers[0];
        CHECK(layer.q.dtype == dtype);
        CHECK(layer.v->dtype == dtype);
        CHECK(all_of(layer.q) == rounded(expected.q, dtype));
        CHECK(all_of(layer.k) == rounded(expected.k, dtype));
        CHECK(all_of(*layer.v) == rounded(expected.v, dtype));
      }
    }
  }
}

TEST_CASE("A dump may use the newest structures of HDF5, or stand behind a user block", "[dump]") {
  const TempFolder folder;
  for (const bool newest : {false, true}) {
    for (const std::int64_t chunk : {0, 5}) {
      for (const std::int64_t user_block : {0, 2048}) {
        INFO("newest " << newest << " chunk " << chunk << " user block " << user_block);
        DumpContent content = random_dump({});
        content.newest_structures = newest;
        content.chunk_tokens = chunk;
        content.user_block_bytes = user_block;
        write_dump(folder / "a.h5", content);
        const auto layer = Dump::open({folder / "a.h5"}).load_layer(0);
        CHECK(all_of(layer.q) == content.layers[0].q);
        CHECK(all_of(*layer.v) == content.layers[0].v);
        CHECK(layer.positions == content.positions);
      }
    }
  }
}

TEST_CASE("The facts of a dump are read", "[dump]") {
  const TempFolder folder;
  DumpContent content = random_dump({.layers = {1, 3, 10}, .num_layers = 12, .sliding_window = 9});
  content.model_name = "m\xc3\xa9l";
  content.model_fingerprint = std::string(64, 'a');
  content.model_config = "{\"x\": 1}";
  content.generated = std::vector<std::uint8_t>(18, 0);
  content.generated[17] = 1;
  content.layers[1].geometry.rope = {
      .layout = RopeLayout::interleaved,
      .dim = 4,
      .offset = 2,
      .attention_factor = 1.25,
      .inv_freq = {0.5, 0.0},
  };
  content.layers[2].geometry.rope = {};
  content.layers[1].geometry.logit_softcap = 30.0;
  content.layers[2].geometry.sink_logits = {0.5, -2.0, 0.0, 7.0};
  content.required = "logit_softcapping,sink_logits";
  write_dump(folder / "a.h5", content);

  const auto dump = Dump::open({folder / "a.h5"});
  CHECK(dump.model().name == "m\xc3\xa9l");
  CHECK(dump.model().fingerprint == content.model_fingerprint);
  CHECK(dump.model().config_json == content.model_config);
  CHECK(dump.model().num_layers == 12);
  CHECK(dump.capture_point() == CapturePoint::post_rope);
  CHECK(dump.producer() == "kvq tests");
  CHECK(dump.num_tokens() == 18);
  CHECK(dump.num_sequences() == 2);
  CHECK(dump.layer_bytes(3) == 18 * (4 * 8 + 2 * 8 + 2 * 6) * 4);
  REQUIRE(dump.model().layers.size() == 3);
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(dump.model().layers[i].layer == content.layers[i].layer);
    CHECK(dump.model().layers[i].geometry == content.layers[i].geometry);
    CHECK(dump.model().layers[i].has_values);
  }
  const auto layer = dump.load_layer(10);
  CHECK(layer.layer == 10);
  CHECK(layer.geometry == content.layers[2].geometry);
  CHECK(layer.cu_seqlens == content.cu_seqlens);
  CHECK(layer.positions == content.positions);
  CHECK(layer.generated == content.generated);
  CHECK(layer.o_proj.empty());
  CHECK(layer.o_proj_metric.empty());
  CHECK(layer.output_curvature.empty());
}

TEST_CASE("Optional tensors are read: no v for mla_rope, o_proj, output_curvature", "[dump]") {
  const TempFolder folder;
  DumpContent content = random_dump({.num_q_heads = 3, .num_kv_heads = 1, .kind = AttentionKind::mla_rope});
  for (int i = 0; i < 5 * 3 * 6; ++i) content.layers[0].o_proj.push_back(static_cast<float>(i) / 8);
  for (int head = 0; head < 3; ++head)
    for (int i = 0; i < 6; ++i)
      for (int j = 0; j < 6; ++j)
        content.layers[0].output_curvature.push_back(i == j ? static_cast<float>(3 + head + i)
                                                            : 0.5f / static_cast<float>(1 + i + j));
  write_dump(folder / "a.h5", content);
  const auto dump = Dump::open({folder / "a.h5"});
  CHECK_FALSE(dump.model().layers[0].has_values);
  CHECK(dump.layer_bytes(0) == 18 * (3 * 8 + 8) * 4);
  const auto layer = dump.load_layer(0);
  CHECK_FALSE(layer.v);
  CHECK(layer.o_proj == content.layers[0].o_proj);
  CHECK(layer.o_proj_rows == 5);
  CHECK(layer.output_curvature == content.layers[0].output_curvature);
}

TEST_CASE("The metric of the output projection is read, one matrix a KV head", "[dump]") {
  const TempFolder folder;
  DumpContent content = random_dump({.layers = {0, 1}});
  for (int head = 0; head < 2; ++head)
    for (int i = 0; i < 6; ++i)
      for (int j = 0; j < 6; ++j)
        content.layers[1].o_proj_metric.push_back(i == j ? static_cast<float>(7 + head + i)
                                                         : 0.25f / static_cast<float>(1 + i + j));
  content.layers[1].o_proj_metric[1] *= 1.0f + 0x1p-20f;  // within the rounding of a float32 sum, so still symmetric
  write_dump(folder / "a.h5", content);
  const auto dump = Dump::open({folder / "a.h5"});
  CHECK(dump.load_layer(0).o_proj_metric.empty());
  CHECK(dump.load_layer(1).o_proj_metric == content.layers[1].o_proj_metric);
}

TEST_CASE("A part of one head is widened", "[dump]") {
  const TempFolder folder;
  const DumpContent content = random_dump({.dtype = DType::bf16});
  write_dump(folder / "a.h5", content);
  const auto layer = Dump::open({folder / "a.h5"}).load_layer(0);
  std::vector<float> part(3 * 8);
  layer.q.load_head(2, 11, 3, part.data());
  for (std::size_t t = 0; t < 3; ++t)
    for (std::size_t d = 0; d < 8; ++d)
      CHECK(part[t * 8 + d] == bf16_to_float(float_to_bf16(content.layers[0].q[((11 + t) * 4 + 2) * 8 + d])));
  CHECK_THAT(error_text([&] { layer.q.load_head(4, 0, 1, part.data()); }), Catch::Matchers::Contains("internal:"));
  CHECK_THAT(error_text([&] { layer.q.load_head(0, 16, 3, part.data()); }), Catch::Matchers::Contains("internal:"));
}

TEST_CASE("The content hash covers sequences, positions and the stored bytes", "[dump]") {
  const TempFolder folder;
  DumpContent content = random_dump({});
  write_dump(folder / "a.h5", content);
  const DumpLayer& layer = content.layers[0];
  const std::string hashed = bytes_of(content.cu_seqlens) + bytes_of(content.positions) + bytes_of(layer.q) +
                             bytes_of(layer.k) + bytes_of(layer.v);
  CHECK(Dump::open({folder / "a.h5"}).load_layer(0).content_hash == xxh3_text(hashed));
}

TEST_CASE("Keys and queries of a pre_rope dump are rotated as formats/dump.md says", "[dump]") {
  const TempFolder folder;
  const std::vector<double> frequencies = {1.0, 0.25, 0.01};
  for (const RopeLayout layout : {RopeLayout::half, RopeLayout::interleaved, RopeLayout::none}) {
    INFO(to_string(layout));
    RopeStyle rope{.layout = layout, .dim = 6, .offset = 1, .attention_factor = 1.5, .inv_freq = frequencies};
    if (layout == RopeLayout::none) rope = {};
    DumpContent content = random_dump({.dtype = DType::bf16, .rope = rope, .capture_point = CapturePoint::pre_rope});
    for (std::int64_t& position : content.positions) position = 3 * position + 1000;
    write_dump(folder / "a.h5", content);
    const auto layer = Dump::open({folder / "a.h5"}).load_layer(0);

    std::vector<float> expected = rounded(content.layers[0].q, DType::bf16);
    for (std::size_t row = 0; row < expected.size() / 8 && layout != RopeLayout::none; ++row) {
      for (std::size_t j = 0; j < 3; ++j) {
        const double t = static_cast<double>(content.positions[row / 4]) * frequencies[j];
        float& a = expected[row * 8 + 1 + (layout == RopeLayout::half ? j : 2 * j)];
        float& b = expected[row * 8 + 1 + (layout == RopeLayout::half ? j + 3 : 2 * j + 1)];
        const double x = a, y = b;
        a = static_cast<float>((x * std::cos(t) - y * std::sin(t)) * 1.5);
        b = static_cast<float>((y * std::cos(t) + x * std::sin(t)) * 1.5);
      }
    }
    CHECK(layer.q.dtype == (layout == RopeLayout::none ? DType::bf16 : DType::f32));
    CHECK(all_of(layer.q) == expected);
    CHECK(all_of(*layer.v) == rounded(content.layers[0].v, DType::bf16));
  }
}

TEST_CASE("A post_rope dump is not rotated", "[dump]") {
  const TempFolder folder;
  const DumpContent content = random_dump({});
  write_dump(folder / "a.h5", content);
  CHECK(all_of(Dump::open({folder / "a.h5"}).load_layer(0).k) == content.layers[0].k);
}

TEST_CASE("The sample dump of the repository reads", "[dump]") {
  const auto folder = std::filesystem::path(KVQ_SOURCE_DIR) / "sample_data";
  const auto dump = Dump::open({folder / "calibration.h5", folder / "evaluation.h5"});
  for (const LayerEntry& entry : dump.model().layers) CHECK(dump.load_layer(entry.layer).q.tokens == dump.num_tokens());
}
