#include <kvq/artifact/artifact.h>
#include <kvq/codec/linear_basis.h>
#include <kvq/codec/rotation_matrix.h>
#include <kvq/container/safetensors.h>
#include <kvq/plan/layer_pages.h>
#include <kvq/runtime/api/handles.h>
#include <kvq/runtime/layout_id.h>
#include <kvq/runtime/prepare.h>
#include <kvq/runtime.hpp>

#include "support/container_edit.h"
#include "support/error_of.h"
#include "support/row_plans.h"
#include "support/served_artifact.h"
#include "support/temp_folder.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <vector>

using namespace kvq;
using Catch::Matchers::Contains;

namespace {

/// An artifact in a file, with an engine's options and geometry that fit it.
struct Served {
  explicit Served(const Artifact& artifact = test::served_artifact({}, 0))
      : path((folder / "served.safetensors").string()) {
    save_artifact(artifact, path);
    for (int layer = 0; layer < 6; ++layer) {
      auto g = runtime::init<kvq_layer_geometry>();
      g.num_q_heads = 16, g.num_kv_heads = 4, g.head_dim = 128;
      g.sliding_window = layer == 5 ? 33 : 0;
      g.rope = KVQ_ROPE_HALF, g.rotary_dim = 128, g.softmax_scale = 0.0883883;
      geometry.push_back(g);
    }
    options = runtime::init<kvq_model_options>();
    options.num_layers = options.num_geometries = 6;
    options.geometry = geometry.data();
  }

  runtime::Model load() const { return runtime::Model(path, options); }
  /// Status and message of loading; "loaded" on success.
  std::string refusal() const {
    try {
      load();
    } catch (const runtime::Error& error) {
      return std::string(kvq_status_string(error.status())) + ": " + error.what();
    }
    return "loaded";
  }

  test::TempFolder folder;
  std::string path;
  std::vector<kvq_layer_geometry> geometry;
  kvq_model_options options;
};

}  // namespace

TEST_CASE("An artifact that fits is loaded, and tells what it holds", "[runtime]") {
  Served served(test::served_artifact({.sink_tokens = 20, .recent_tokens = 40}, 3));
  served.options.max_step_tokens = 8;
  served.options.fingerprint = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
  const runtime::Model model = served.load();
  const kvq_model_info info = model.info();
  CHECK(info.layer_count == 6);
  CHECK(info.golden_layers == 6);
  CHECK(info.sink_tokens == 20);
  CHECK(info.recent_tokens == 40);
  CHECK(info.page_size == 64);
  CHECK(std::string(info.name) == "served");
  CHECK(std::string(info.method) == "saw-int4");
  const kvq_layer_info layer = model.layer(2);
  CHECK(layer.num_q_heads == 16);
  CHECK(layer.k_bits == 4);
  CHECK(layer.v_bits == 2);
  CHECK(layer.k_effective_bits == 4.25);
  CHECK(layer.v_effective_bits == 2.25);
  CHECK(layer.k_rotation == KVQ_ROTATION_IDENTITY);
  CHECK(layer.v_rotation == KVQ_ROTATION_HADAMARD);
  CHECK(layer.page_bytes == 64 * 4 * (68 + 36));
  CHECK(layer.sink_rows == 32);
  CHECK(layer.ring_rows == 48);
  CHECK(layer.sink_slot_bytes == 32 * 4 * 512);
  CHECK(layer.ring_slot_bytes == 48 * 4 * 512);
  CHECK(model.layer(4).k_rotation == KVQ_ROTATION_DENSE);
  CHECK(model.layer(3).k_bits == 16);
  CHECK(model.layer(5).sliding_window == 33);
  CHECK(model.device_bytes() % 256 == 0);
  CHECK_THROWS_WITH(model.layer(6), Contains("layer: expected 0 to 5, found 6"));
}

TEST_CASE("A model tells the content hash of its artifact", "[runtime]") {
  const Served served;
  const runtime::Model model = served.load();
  const std::string hash = model.info().content_hash;
  CHECK(hash == stated_hash(SafetensorsFile::open(served.path)));
  CHECK(hash.size() == std::string("xxh3-128:").size() + 32);

  // A caller of the first header has no room for it.
  auto first = runtime::init<kvq_model_info>();
  first.struct_size = offsetof(kvq_model_info, content_hash), first.layout_id = 77;
  REQUIRE(kvq_model_query(model.get(), &first, nullptr) == KVQ_OK);
  CHECK(first.layer_count == 6);
  CHECK(first.content_hash == nullptr);
  CHECK(first.layout_id == 77);
}

TEST_CASE("Models that store the same bytes have one layout_id", "[runtime]") {
  Artifact artifact = test::served_artifact({.sink_tokens = 20, .recent_tokens = 40}, 0);
  artifact.layers[0].geometry.rope = {};
  Served served(artifact);
  served.geometry[0].rope = KVQ_ROPE_NONE, served.geometry[0].rotary_dim = 0;
  const auto id_with = [&](auto change) {
    const std::vector<kvq_layer_geometry> geometry = served.geometry;
    const kvq_model_options options = served.options;
    change(served);
    const std::uint64_t id = served.load().info().layout_id;
    std::copy(geometry.begin(), geometry.end(), served.geometry.begin());
    served.options = options;
    return id;
  };
  const auto as_it_is = [](Served&) {};
  const std::uint64_t id = id_with(as_it_is);
  CHECK(id == layout_id(served.load().get()->model));
  CHECK(id_with(as_it_is) == id);
  const Served copy(artifact);
  CHECK(SafetensorsFile::open(copy.path).metadata() == SafetensorsFile::open(served.path).metadata());
  // What readers and writers do, but not what is stored.
  CHECK(id_with([](Served& s) { s.options.activation = KVQ_FP16; }) == id);
  CHECK(id_with([](Served& s) { s.options.max_step_tokens = 8; }) == id);  // 41 and 48 tokens take 48 rows
  CHECK(id_with([](Served& s) { s.geometry[0].fold = KVQ_FOLD_K | KVQ_FOLD_V; }) == id);
  const auto rank = [](int of, int size) {
    return [=](Served& s) { s.options.tp_rank = of, s.options.tp_size = size; };
  };
  CHECK(id_with(rank(5, 8)) == id_with(rank(4, 8)));  // two ranks hold each of 4 KV heads
  CHECK(id_with(rank(4, 8)) == id_with(rank(2, 4)));

  // Every other option is an ingredient.
  std::set<std::uint64_t> ids = {id};
  const auto differs = [&](const char* what, std::uint64_t other) {
    INFO(what);
    CHECK(ids.insert(other).second);
  };
  differs("page_size", id_with([](Served& s) { s.options.page_size = 16; }));
  differs("ring rows", id_with([](Served& s) { s.options.max_step_tokens = 9; }));
  differs("without windows", id_with([](Served& s) { s.options.flags = KVQ_MODEL_WITHOUT_WINDOWS; }));
  differs("first rank of 2", id_with(rank(0, 2)));
  differs("second rank of 2", id_with(rank(1, 2)));
  differs("first rank of 4", id_with(rank(0, 4)));
  differs("first layer", id_with([](Served& s) { s.options.first_layer = 1; }));
  differs("fewer layers", id_with([](Served& s) { s.options.layer_count = 5; }));
  differs("a layer", id_with([](Served& s) { s.options.layer_count = 1; }));
  differs("another layer", id_with([](Served& s) { s.options.first_layer = 5; }));

  // Artifacts that differ in a rotation, a format or a window.
  const auto of_artifact = [&](auto change) {
    Artifact other = artifact;
    change(other);
    Served with(other);
    std::copy(served.geometry.begin(), served.geometry.end(), with.geometry.begin());
    return with.load().info().layout_id;
  };
  differs("a sign", of_artifact([](Artifact& a) { a.layers[0].k.rotation.signs[5] *= -1; }));
  differs("a format", of_artifact([](Artifact& a) { std::get<UniformCoder>(a.layers[0].k.coder).group_size = 64; }));
  differs("sinks", of_artifact([](Artifact& a) { a.windows.sink_tokens = 21; }));
  differs("recent", of_artifact([](Artifact& a) { a.windows.recent_tokens = 41; }));
}

TEST_CASE("Each field of a layout is in its text", "[runtime]") {
  const Served served(test::served_artifact({.sink_tokens = 20, .recent_tokens = 40}, 0));
  const runtime::Model loaded = served.load();
  const LoadedModel& model = loaded.get()->model;
  const std::string text = layout_text(model);
  CHECK(text.rfind("pages 2\nartifact " + model.content_hash +
                       "\npage_size 64\nsink_tokens 20\nrecent_tokens 40\n"
                       "layer 0: KV heads 4 from 0, k 128 u2g128, v 128 u2g128, sink rows 32, ring rows 48\n",
                   0) == 0);
  std::set<std::string> texts = {text};
  const auto differs = [&](auto change) {
    LoadedModel other = model;
    change(other);
    CHECK(texts.insert(layout_text(other)).second);
    CHECK(layout_id(other) != layout_id(model));
  };
  differs([](LoadedModel& m) { m.content_hash.back() ^= 1; });
  differs([](LoadedModel& m) { m.claim.page_size = 32; });
  differs([](LoadedModel& m) { m.windows.sink_tokens = 19; });
  differs([](LoadedModel& m) { m.windows.recent_tokens = 39; });
  differs([](LoadedModel& m) { m.layers.pop_back(); });
  differs([](LoadedModel& m) { m.layers[5].plan.layer = 6; });
  differs([](LoadedModel& m) { m.layers[5].heads.first_kv = 4; });
  differs([](LoadedModel& m) { m.layers[5].pages.num_kv_heads = 2; });
  differs([](LoadedModel& m) { m.layers[5].pages.k.bits = 4; });
  differs([](LoadedModel& m) { m.layers[5].pages.v.group_size = 32; });
  differs([](LoadedModel& m) { m.layers[5].pages.v.numbers = 1; });
  differs([](LoadedModel& m) { m.layers[5].pages.k.head_dim = 64; });
  differs([](LoadedModel& m) { m.layers[5].key.k_bfloat = true; });
  differs([](LoadedModel& m) { m.layers[5].key.v_bfloat = true; });
  differs([](LoadedModel& m) { m.layers[5].windows.sinks.rows = 16; });
  differs([](LoadedModel& m) { m.layers[5].windows.rings.rows = 64; });
  CHECK_THAT(test::file_bytes(std::string(KVQ_SOURCE_DIR) + "/formats/pages.md"),
             Catch::Matchers::StartsWith("# Pages of coded rows, version " + std::to_string(kPagesMajor) + "."));
}

TEST_CASE("Pages may have 128 tokens", "[runtime]") {
  Served served;
  served.options.page_size = 128;
  const runtime::Model model = served.load();
  CHECK(model.info().page_size == 128);
  CHECK(model.layer(2).page_bytes == 128 * 4 * (68 + 36));
}

TEST_CASE("Slots of a pool that is not needed have no bytes", "[runtime]") {
  const auto layer_with = [](const Windows& windows, std::uint32_t flags) {
    Served served(test::served_artifact(windows, 0));
    served.options.flags = flags;
    return served.load().layer(0);
  };
  const kvq_layer_info sinks = layer_with({.sink_tokens = 20, .recent_tokens = 0}, 0);
  CHECK(sinks.sink_slot_bytes == 32 * 4 * 512);
  CHECK((sinks.ring_rows == 0 && sinks.ring_slot_bytes == 0));
  const kvq_layer_info recent = layer_with({.sink_tokens = 0, .recent_tokens = 31}, 0);
  CHECK((recent.sink_rows == 0 && recent.sink_slot_bytes == 0));
  CHECK(recent.ring_slot_bytes == 32 * 4 * 512);  // max_step_tokens is 1
  const kvq_layer_info none = layer_with({.sink_tokens = 20, .recent_tokens = 40}, KVQ_MODEL_WITHOUT_WINDOWS);
  CHECK((none.sink_slot_bytes == 0 && none.ring_slot_bytes == 0));
}

TEST_CASE("One geometry stands for all layers, also of a newer caller's size", "[runtime]") {
  Artifact artifact = test::served_artifact({}, 0);
  artifact.layers[5].geometry.sliding_window = 0;
  Served served(artifact);
  served.options.num_geometries = 1;
  CHECK(served.load().info().layer_count == 6);

  struct Newer {
    kvq_layer_geometry known;
    std::int64_t unknown;
  };
  std::vector<Newer> newer;
  for (const kvq_layer_geometry& g : served.geometry) newer.push_back({g, 0});
  for (Newer& g : newer) g.known.struct_size = sizeof(Newer), g.known.sliding_window = 0;
  served.options.num_geometries = 6, served.options.geometry = &newer[0].known;
  CHECK(served.refusal() == "loaded");
  newer[3].known.head_dim = 64;
  CHECK_THAT(served.refusal(), Contains("layer 3: head_dim: expected 64, found 128"));
  newer[3].known.head_dim = 128, newer[4].unknown = 1;
  CHECK_THAT(served.refusal(), Contains("unsupported: geometry: fields behind byte 56"));
}

TEST_CASE("An artifact of another model is refused, naming each difference", "[runtime]") {
  const auto refusal = [](const std::function<void(Served&)>& change) {
    Served served;
    change(served);
    return served.refusal();
  };
  CHECK(refusal([](Served&) {}) == "loaded");
  CHECK_THAT(refusal([](Served& s) { s.geometry[1].num_q_heads = 32; }),
             Contains("mismatch: ") && Contains("layer 1: num_q_heads: expected 32, found 16"));
  CHECK_THAT(refusal([](Served& s) { s.geometry[1].num_kv_heads = 8; }),
             Contains("layer 1: num_kv_heads: expected 8, found 4"));
  CHECK_THAT(refusal([](Served& s) { s.geometry[2].head_dim = 64; }),
             Contains("layer 2: head_dim: expected 64, found 128") && Contains("v_head_dim: expected 64"));
  CHECK_THAT(refusal([](Served& s) { s.geometry[2].v_head_dim = 96; }),
             Contains("layer 2: v_head_dim: expected 96, found 128"));
  CHECK_THAT(refusal([](Served& s) { s.geometry[5].sliding_window = 0; }),
             Contains("layer 5: sliding_window: expected 0, found 33"));
  CHECK_THAT(refusal([](Served& s) { s.geometry[0].rope = KVQ_ROPE_INTERLEAVED; }),
             Contains("layer 0: rope layout: expected interleaved, found half"));
  CHECK_THAT(refusal([](Served& s) { s.geometry[0].rotary_dim = 64; }),
             Contains("layer 0: rotary_dim: expected 64, found 128"));
  CHECK_THAT(refusal([](Served& s) { s.geometry[0].softmax_scale = 0.1; }),
             Contains("layer 0: softmax_scale: expected 0.1, found 0.088"));
  CHECK_THAT(refusal([](Served& s) { s.geometry[0].fold = KVQ_FOLD_K; }),
             Contains("layer 0: folded k: expected a layer without RoPE, found half"));
  CHECK_THAT(refusal([](Served& s) { s.options.fingerprint = "bb"; }),
             Contains("fingerprint: expected bb, found aaaa"));
  CHECK_THAT(refusal([](Served& s) {
               s.options.num_layers = 7, s.options.num_geometries = 1, s.geometry[0].sliding_window = 33;
             }),
             Contains("num_layers: expected 7, found 6") && Contains("layers without a plan: 6") &&
                 Contains("layer 4: sliding_window"));
  // A geometry field that is 0 or ANY is not compared.
  CHECK(refusal([](Served& s) {
          s.geometry[0].rope = KVQ_ROPE_ANY, s.geometry[0].rotary_dim = 0, s.geometry[0].softmax_scale = 0;
        }) == "loaded");
}

TEST_CASE("Options that cannot be are refused by name", "[runtime]") {
  const auto refusal = [](const std::function<void(Served&)>& change) {
    Served served;
    change(served);
    const std::string text = served.refusal();
    CHECK_THAT(text, Catch::StartsWith("invalid argument: "));
    return text;
  };
  CHECK_THAT(refusal([](Served& s) { s.options.num_layers = 0; }), Contains("num_layers"));
  CHECK_THAT(refusal([](Served& s) { s.options.num_geometries = 2; }),
             Contains("expected 1 or num_layers (6), found 2"));
  CHECK_THAT(refusal([](Served& s) { s.options.first_layer = 4, s.options.layer_count = 3; }),
             Contains("layers [4, 7) are not within the model's 6"));
  CHECK_THAT(refusal([](Served& s) { s.options.tp_rank = 2, s.options.tp_size = 2; }),
             Contains("tp_rank 2 of tp_size 2"));
  CHECK_THAT(refusal([](Served& s) { s.options.max_step_tokens = -1; }), Contains("max_step_tokens"));
  CHECK_THAT(refusal([](Served& s) { s.options.activation = 2; }),
             Contains("activation: expected KVQ_BF16 (0) or KVQ_FP16 (1), found 2"));
  CHECK_THAT(refusal([](Served& s) { s.options.flags = 6; }), Contains("unknown bits in 0x6"));
  CHECK_THAT(refusal([](Served& s) { s.geometry[3].rope = 9; }), Contains("expected a kvq_rope, found 9"));
  CHECK_THAT(refusal([](Served& s) { s.geometry[3].fold = 8; }), Contains("unknown bits in 0x8"));
  CHECK_THAT(refusal([](Served& s) { s.geometry[3].head_dim = 0; }), Contains("head_dim 0"));
  CHECK_THAT(refusal([](Served& s) { s.options.struct_size = 8; }), Contains("struct_size is 8"));
  CHECK_THAT(refusal([](Served& s) { s.geometry[3].struct_size = 1; }), Contains("struct_size is 1"));
}

TEST_CASE("What pages or ranks cannot hold or no kernel takes is refused, all faults at once", "[runtime]") {
  Artifact artifact = test::served_artifact({}, 0);
  test::add_centroids(artifact.layers[1].k, 128, 3, 1, artifact.layers[1].geometry.num_kv_heads);
  artifact.layers[1].k.center.clear();
  artifact.layers[1].k.centroids->joint = true;
  Served served(artifact);
  served.options.tp_size = 3;
  CHECK_THAT(served.refusal(), Contains("unsupported: ") && Contains("layer 0: 16 query heads on 3 ranks") &&
                                   Contains("layer 1: 16 query heads on 3 ranks"));
  served.options.tp_size = 2;
  CHECK_THAT(served.refusal(), Contains("layer 1 k: joint centroids on 2 ranks: expected 1"));
  served.options.tp_size = 1, served.options.page_size = 48;
  CHECK_THAT(served.refusal(), Contains("layer 0: page_size: supported 16, 32, 64, 128, found 48"));
  // Layers that this rank does not serve are not checked.
  served.options.page_size = 0, served.options.first_layer = 3;
  CHECK(served.load().info().layer_count == 3);
}

TEST_CASE("Files that are missing, damaged or of an unknown version are refused", "[runtime]") {
  Served served;
  const std::string path = served.path;
  served.path = path + ".gone";
  CHECK_THAT(served.refusal(), Contains("io: ") && Contains(".gone"));
  served.path = path;
  {
    test::EditableFile file = test::EditableFile::read(path);
    file.manifest["calibration"]["seed"] = 77;
    file.write(path + ".changed", /*fit_hash=*/false);
    served.path = path + ".changed";
    CHECK_THAT(served.refusal(), Contains("io: ") && Contains("content hash: expected xxh3-128:"));
    served.path = path;
    file.metadata["version"] = file.manifest["version"] = "2.0";
    file.write(path);
  }
  CHECK_THAT(served.refusal(), Contains("unsupported: ") && Contains("2.0"));
}

TEST_CASE("A rank's layers tell its heads, and its image holds their rotations and centers", "[runtime]") {
  Served served;
  const Artifact artifact = test::served_artifact({}, 0);
  served.options.tp_size = 8, served.options.tp_rank = 5;  // KV head 2, query heads 10 and 11
  const runtime::Model model = served.load();
  const kvq_layer_info info = model.layer(0);
  CHECK(info.num_kv_heads == 1);
  CHECK(info.first_kv_head == 2);
  CHECK(info.num_q_heads == 2);
  CHECK(info.first_q_head == 10);
  CHECK(info.page_bytes == 64 * 72);

  const DeviceImage& image = model.get()->model.image;
  const std::byte* base = image.bytes().data();
  const LayerPointers layer0 = image.pointers(0, base);
  REQUIRE(layer0.rotation_k.signs != nullptr);
  CHECK(layer0.rotation_k.order == 128);
  CHECK(std::memcmp(layer0.rotation_k.signs, artifact.layers[0].k.rotation.signs.data() + 2 * 128, 128) == 0);
  CHECK(layer0.write_k.signs == layer0.rotation_k.signs);
  CHECK(layer0.write_k.order == 128);
  CHECK(layer0.rotation_v.signs == nullptr);
  CHECK(std::memcmp(layer0.center_k, artifact.layers[0].k.center.data() + 2 * 128, 512) == 0);
  // The center is subtracted after the rotation.
  double sum = 0.0;
  for (std::size_t i = 2 * 128; i < 3 * 128; ++i)
    sum +=
        static_cast<double>(artifact.layers[0].k.center[i]) * artifact.layers[0].k.rotation.signs[i] / std::sqrt(128.0);
  CHECK(layer0.write_k.center[0] == Approx(sum).margin(1e-5));
  CHECK(layer0.write_k.clip_ranks == nullptr);
  const LayerPointers layer2 = image.pointers(2, base);
  CHECK(layer2.write_k.order == 1);
  CHECK(layer2.rotation_k.order == 0);
  CHECK_FALSE(layer2.write_v.per_head);
  CHECK(image.pointers(1, base).write_k.rule == ScaleRule::norm);
  const LayerPointers layer4 = image.pointers(4, base);
  CHECK(std::memcmp(layer4.rotation_k.matrix, artifact.layers[4].k.rotation.matrix.data() + 2 * 128 * 128, 65536) == 0);
  const std::vector<std::byte> fragments =
      rotation_fragments(std::span(artifact.layers[4].k.rotation.matrix).subspan(2 * 16384, 16384), 128);
  CHECK(std::memcmp(layer4.rotation_k.fragments, fragments.data(), fragments.size()) == 0);
  const std::vector<std::byte> of_values = rotation_fragments(std::span(layer4.rotation_v.matrix, 16384), 128);
  CHECK(std::memcmp(layer4.rotation_v.fragments, of_values.data(), of_values.size()) == 0);
  for (const int i : {0, 1, 77, 127})
    for (const int j : {0, 5, 127})  // values use the inverse direction, and one matrix for all heads
      CHECK(layer4.rotation_v.matrix[i * 128 + j] ==
            artifact.layers[4].v->rotation.matrix[static_cast<std::size_t>(j * 128 + i)]);
  CHECK_FALSE(layer4.rotation_v.per_head);
  REQUIRE(layer4.write_k.clip_ranks != nullptr);
  CHECK(*layer4.write_k.clip_ranks == 128 - 122);  // 0.96 * 128
  CHECK(layer4.write_k.order == 1);
  CHECK(layer4.write_k.rotation != nullptr);
  CHECK(layer4.write_k.rotation_stride == packed_rotation_bytes(128));
  CHECK(layer4.write_v.rotation_stride == 0);
  std::vector<std::byte> packed(static_cast<std::size_t>(packed_rotation_bytes(128)));
  REQUIRE(pack_rotations(std::span(artifact.layers[4].k.rotation.matrix).subspan(2 * 16384, 16384), 128, true, packed)
              .ok());
  CHECK(std::memcmp(layer4.write_k.rotation, packed.data(), packed.size()) == 0);
  // Every pointer lies inside the model's memory, aligned for the widest loads.
  for (const void* pointer :
       {static_cast<const void*>(layer0.rotation_k.signs), static_cast<const void*>(layer4.rotation_v.matrix),
        static_cast<const void*>(layer4.rotation_v.fragments), static_cast<const void*>(layer4.center_v)}) {
    const std::ptrdiff_t offset = static_cast<const std::byte*>(pointer) - base;
    CHECK(offset >= 0);
    CHECK(offset < static_cast<std::ptrdiff_t>(image.bytes().size()));
    CHECK(offset % 256 == 0);
  }
}

TEST_CASE("The image of transforms holds A for writing and A^-1 for reading, keys' turned", "[runtime]") {
  const Artifact artifact = test::transformed_artifact({}, 0);
  const bool bf16 = GENERATE(true, false);
  DeviceImage image;
  for (const LayerPlan& plan : artifact.layers) image.add(plan, {}, bf16);
  const std::byte* base = image.bytes().data();
  const auto at = [&](int i) { return image.pointers(static_cast<std::size_t>(i), base); };
  const auto narrowed = [&](std::uint16_t bits) { return bf16 ? bf16_to_float(bits) : f16_to_float(bits); };
  {  // channel scales: the factors contain the signs
    const Rotation &k = artifact.layers[0].k.rotation, &v = artifact.layers[0].v->rotation;
    const LayerPointers layer = at(0);
    CHECK(layer.write_k.signs == nullptr);
    CHECK(layer.rotation_k.signs == nullptr);
    CHECK(layer.rotation_k.order == 128);
    CHECK(layer.rotation_v.order == 64);
    for (std::size_t i = 0; i < 512; ++i) {
      CHECK(narrowed(layer.write_k.factors[i]) * layer.write_k.row_scales[i / 128] == k.channel_scale[i] * k.signs[i]);
      CHECK(layer.rotation_k.factors[i] == k.signs[i] / k.channel_scale[i]);
      CHECK(narrowed(layer.write_v.factors[i]) * layer.write_v.row_scales[i / 128] == v.channel_scale[i] * v.signs[i]);
      CHECK(layer.rotation_v.factors[i] == v.signs[i] / v.channel_scale[i]);
    }
  }
  CHECK(at(2).rotation_k.order == 1);  // only channel scales: blocks of one channel
  CHECK(at(2).write_k.order == 1);
  CHECK(at(2).write_k.factors != nullptr);
  const Rotation &k = artifact.layers[1].k.rotation, &v = artifact.layers[1].v->rotation;
  const LayerPointers layer = at(1);
  for (const std::size_t i : {0u, 1u, 77u, 127u})
    for (const std::size_t j : {0u, 5u, 127u}) {
      for (const std::size_t head : {0u, 3u})
        CHECK(layer.rotation_k.matrix[(head * 128 + i) * 128 + j] == k.inverse[(head * 128 + j) * 128 + i]);
      CHECK(layer.rotation_v.matrix[i * 128 + j] == v.inverse[i * 128 + j]);
    }
  CHECK(layer.rotation_k.per_head);
  CHECK_FALSE(layer.rotation_v.per_head);
  const std::vector<float> sizes = column_sizes(k.inverse, 128), row_scales = fp16_row_scales(k.matrix, 128);
  CHECK(std::equal(sizes.begin(), sizes.end(), layer.rotation_k.sizes));
  CHECK((layer.write_k.row_scales == nullptr) == bf16);
  if (!bf16) CHECK(std::equal(row_scales.begin(), row_scales.end(), layer.write_k.row_scales));
  if (!bf16) CHECK(layer.write_v.row_scales[3] == layer.write_v.row_scales[0]);  // one set for all heads
  std::vector<std::byte> packed(static_cast<std::size_t>(4 * packed_rotation_bytes(128)));
  REQUIRE(pack_rotations(k.matrix, 128, bf16, packed, bf16 ? std::vector<float>() : row_scales).ok());
  CHECK(std::memcmp(layer.write_k.rotation, packed.data(), packed.size()) == 0);
}

TEST_CASE("The image of linear rows holds their matrices, of all kinds of rotations", "[runtime]") {
  const Artifact artifact = test::transformed_artifact({}, 0);
  for (std::size_t i = 0; i < artifact.layers.size(); ++i) {
    LayerPlan plan = artifact.layers[i];
    const int dim = plan.geometry.head_dim;
    if (plan.geometry.v_head_dim != dim) continue;
    INFO("layer " << i);
    for (TensorPlan* side : {&plan.k, &*plan.v}) {
      side->coder = TrellisCoder{
          .group_size = dim,
          .taps = {{.bits = 2, .memory = 1, .search = TrellisSearch::integer, .theta = {1.5f, 0.9f, -0.8f, 1}}}};
      side->clip_ratio.clear(), side->allocation.reset(), side->centroids.reset();
    }
    const PageLayout pages = page_layout_of(plan, 64);
    REQUIRE(pages.k.is_bits());
    const int bits = 32 * pages.k.row_words;
    DeviceImage image, folded;
    constexpr BitKernels kBoth{.decode = true, .dequantize = true};
    image.add(plan, {}, true, pages, kBoth), folded.add(plan, {.k = true, .v = true}, true, pages, kBoth);
    const LayerPointers p = image.pointers(0, image.bytes().data()), f = folded.pointers(0, folded.bytes().data());
    for (const Side which : kSides) {
      const TensorPlan& side = *plan.side(which);
      const DeviceRotation& rotation = which == Side::k ? p.rotation_k : p.rotation_v;
      const std::vector<double> inverse = inverse_matrix(side.rotation, 0, dim),
                                theta = linear_basis(side, 0, dim, which, bits);
      const std::vector<float> basis(theta.begin(), theta.end());
      const DeviceRotation& of_folded = which == Side::k ? f.rotation_k : f.rotation_v;
      const HostTaps taps = linear_taps(basis, dim, bits, which == Side::v);
      for (const DeviceRotation* of : {&rotation, &of_folded}) {
        REQUIRE(of->taps.count == taps.count);
        CHECK(std::equal(taps.weights.begin(), taps.weights.end(), of->taps.weights));
        CHECK(std::equal(taps.sources.begin(), taps.sources.end(), of->taps.sources));
      }
      const auto rows = [&](const std::vector<float>& matrix) {
        return row_matrices(1, matrix, basis, dim, bits / 32, which == Side::v);
      };
      const std::vector<std::byte> rows_whole = rows({inverse.begin(), inverse.end()}), rows_alone = rows({});
      if (rows_whole.empty()) continue;
      CHECK(std::memcmp(rotation.row_matrices, rows_whole.data(), rows_whole.size()) == 0);
      CHECK(std::memcmp(of_folded.row_matrices, rows_alone.data(), rows_alone.size()) == 0);
    }
  }
}

TEST_CASE("Keys whose scales are folded have signs and a scaled center left", "[runtime]") {
  const LayerPlan plan = test::transformed_artifact({}, 0).layers[0];
  DeviceImage image, folded;
  image.add(plan, {}, true), folded.add(plan, {.k_scales = true}, true);
  const LayerPointers whole = image.pointers(0, image.bytes().data()), left = folded.pointers(0, folded.bytes().data());
  CHECK(left.write_k.factors == nullptr);
  CHECK(left.rotation_k.factors == nullptr);
  CHECK(left.write_k.order == 128);
  REQUIRE(left.write_k.signs != nullptr);
  CHECK(std::equal(plan.k.rotation.signs.begin(), plan.k.rotation.signs.end(), left.write_k.signs));
  for (std::size_t i = 0; i < 512; ++i) {
    CHECK(left.center_k[i] == plan.k.center[i] * plan.k.rotation.channel_scale[i]);
    CHECK(left.write_k.center[i] == whole.write_k.center[i]);  // x_rot is the same
  }
  CHECK(left.write_v.factors != nullptr);
}

TEST_CASE("A center that heads share is there for each of them", "[runtime]") {
  DeviceImage whole;
  for (const LayerPlan& plan : test::served_artifact({}, 0).layers) whole.add(plan, {}, true);
  const float* center = whole.pointers(4, whole.bytes().data()).center_v;
  REQUIRE(whole.bytes().size() > 0);
  const std::vector<float> given = test::served_artifact({}, 0).layers[4].v->center;
  REQUIRE(given.size() == 128);
  for (int head = 0; head < 4; ++head) CHECK(std::memcmp(given.data(), center + head * 128, 512) == 0);
}

TEST_CASE("Folded rotations are not applied again", "[runtime]") {
  Artifact artifact = test::served_artifact({}, 0);
  for (LayerPlan& plan : artifact.layers) plan.geometry.rope = {};
  Served served(artifact);
  for (kvq_layer_geometry& g : served.geometry)
    g.rope = KVQ_ROPE_NONE, g.rotary_dim = 0, g.fold = KVQ_FOLD_K | KVQ_FOLD_V;
  const runtime::Model model = served.load();
  CHECK(model.layer(0).fold == (KVQ_FOLD_K | KVQ_FOLD_V));
  CHECK(model.layer(0).k_rotation == KVQ_ROTATION_IDENTITY);
  CHECK(model.layer(4).v_rotation == KVQ_ROTATION_IDENTITY);
  const DeviceImage& image = model.get()->model.image;
  const LayerPointers p = image.pointers(0, image.bytes().data());
  CHECK(p.write_k.order == 1);
  CHECK(p.write_k.center == nullptr);
  CHECK(image.pointers(4, image.bytes().data()).write_k.rotation == nullptr);
  CHECK(image.pointers(4, image.bytes().data()).write_k.clip_ranks[0] == 128 - 115);
  CHECK(p.write_v.center == nullptr);
  CHECK(p.center_v == nullptr);
  CHECK(p.rotation_k.order == 0);
  CHECK(p.rotation_v.matrix == nullptr);
  // Queries are rotated already, so LSE needs q . center with the rotated center.
  const TensorPlan& k = artifact.layers[0].k;
  double sum = 0.0;
  for (std::size_t i = 0; i < 128; ++i)
    sum += static_cast<double>(k.center[i]) * k.rotation.signs[i] / std::sqrt(128.0);
  CHECK(p.center_k[0] == Approx(sum).margin(1e-5));
}

TEST_CASE("Formats of variants.json get tuned kernels, others generic ones", "[runtime]") {
  Served served;
  const runtime::Model model = served.load();
  const auto write_kernel = [](const runtime::Model& of, int layer) {
    return choose_write(abi::layer_of(of.get(), layer).key);
  };
  CHECK(std::string(write_kernel(model, 0).name) == "quantize_write_d128_u2g128_u2g128_bf16");
  CHECK(write_kernel(model, 3).tuned);
  served.options.activation = KVQ_FP16;
  const runtime::Model fp16 = served.load();
  CHECK(fp16.info().activation == KVQ_FP16);
  CHECK(write_kernel(fp16, 0).tuned);
}

TEST_CASE("A plan that no kernel serves names the layer, without a device", "[runtime]") {
  Artifact artifact = test::served_artifact({}, 0);
  for (LayerPlan& plan : artifact.layers) plan.geometry.num_q_heads = 17 * plan.geometry.num_kv_heads;
  Served served(artifact);
  for (kvq_layer_geometry& g : served.geometry) g.num_q_heads = 17 * g.num_kv_heads;
  served.options.first_layer = 2;
  auto options = runtime::init<kvq_plan_options>();
  options.max_prefill_batch = options.max_prefill_queries = options.max_prefill_keys = 1;
  CHECK_THROWS_WITH(runtime::Plan(served.load(), options),
                    Contains("plan: layer 2: prefill: 17 query heads for each KV head, supported are at most 16"));
  options.max_prefill_keys = 0;
  CHECK_THROWS_WITH(runtime::Plan(served.load(), options), Contains("max_prefill_queries 1, max_prefill_keys 0"));
}

TEST_CASE("Each kernel is chosen by itself: a row if there is one, else the generic one", "[runtime]") {
  const TileSide kInt2{128, 2, 128, 2}, kOdd{128, 2, 32, 1}, kNarrow{96, 4, 32, 2};
  CHECK(choose_decode({.k = kInt2, .v = kInt2, .heads = 4}).tuned);
  CHECK(choose_decode({.k = kInt2, .v = kInt2, .heads = 17}).tuned);  // in two passes
  const DecodeVariant many = choose_decode({.k = kOdd, .v = kInt2, .heads = 17});
  CHECK_FALSE(many.tuned);
  CHECK(many.max_rows == 17);
  const DecodeVariant generic = choose_decode({.k = kOdd, .v = kInt2, .v_bfloat = true, .heads = 3, .bf16 = false});
  CHECK(std::string(generic.name) == "decode_generic_fp16");
  CHECK(generic.k.group_size == 32);
  CHECK(generic.v_bfloat);
  CHECK(choose_write({.k = kInt2, .v = kInt2}).tuned);
  CHECK(std::string(choose_write({.k = kOdd, .v = kInt2, .bf16 = false}).name) == "quantize_write_generic_fp16");
  CHECK(choose_dequantize({.k = kInt2, .v = kInt2}).tuned);
  // Attention over dequantized rows is tuned if variants.json has an entry; with another head_dim it is not, whatever
  // kernel made the rows.
  const DequantizeVariant rows = choose_dequantize({.k = kOdd, .v = kInt2});
  CHECK_FALSE(rows.tuned);
  CHECK(choose_prefill(rows).tuned);
  const DequantizeVariant tuned_rows = choose_dequantize({.k = kNarrow, .v = {96, 4, 96, 2}});
  CHECK(tuned_rows.tuned);
  CHECK(std::string(choose_prefill(tuned_rows).name) == "prefill_generic_bf16");
  CHECK_FALSE(choose_prefill(choose_dequantize({.k = kInt2, .v = {64, 2, 64, 2}})).tuned);
}

TEST_CASE("A library tells without a device which kernels serve an artifact", "[runtime]") {
  Artifact artifact = test::served_artifact({}, 0);
  std::get<UniformCoder>(artifact.layers[1].k.coder).group_size = 32;
  std::get<UniformCoder>(artifact.layers[4].v->coder).bits = 5;
  const Served served(artifact);
  std::vector<kvq_layer_serving> layers(6, runtime::init<kvq_layer_serving>());
  std::int32_t count = 0;
  auto error = runtime::init<kvq_error>();
  REQUIRE(kvq_artifact_serving(served.path.c_str(), KVQ_BF16, layers.data(), 4, &count, &error) == KVQ_OK);
  CHECK(count == 6);
  CHECK(layers[4].layer == 0);  // beyond the capacity: untouched
  REQUIRE(kvq_artifact_serving(served.path.c_str(), KVQ_BF16, layers.data(), 6, &count, &error) == KVQ_OK);
  for (int i = 0; i < 6; ++i) {
    const kvq_layer_serving& layer = layers[static_cast<std::size_t>(i)];
    CAPTURE(i, layer.format, layer.message);
    CHECK(layer.layer == i);
    CHECK(layer.served == (i == 4 || i == 1 ? KVQ_SERVED_GENERIC : KVQ_SERVED_TUNED));
    CHECK(layer.kernels[KVQ_KERNEL_WRITE] == layer.served);
    CHECK(layer.kernels[KVQ_KERNEL_DEQUANTIZE] == layer.served);
    CHECK(layer.kernels[KVQ_KERNEL_PREFILL] == KVQ_SERVED_TUNED);
    CHECK(std::string(layer.message).empty());
  }
  CHECK(std::string(layers[0].format) == "u2g128");
  CHECK(std::string(layers[1].format) == "s2g32/s2g128");
  CHECK(std::string(layers[3].format) == "bf16");
  CHECK_THAT(layers[4].format, Contains("/w20n"));
  CHECK(kvq_artifact_serving(served.path.c_str(), 7, nullptr, 0, &count, &error) == KVQ_INVALID_ARGUMENT);
  CHECK(kvq_artifact_serving(served.path.c_str(), KVQ_BF16, nullptr, 1, &count, &error) == KVQ_INVALID_ARGUMENT);
  CHECK(kvq_artifact_serving(nullptr, KVQ_BF16, nullptr, 0, &count, &error) == KVQ_INVALID_ARGUMENT);
  CHECK(kvq_artifact_serving("/nowhere", KVQ_BF16, nullptr, 0, nullptr, &error) == KVQ_IO);
}

TEST_CASE("What no kernel takes is refused with what they do and the nearest rows", "[runtime]") {
  const KernelKey wide{.k = {512, 4, 128, 2}, .v = {512, 2, 128, 1}, .heads = 8};
  const auto expected = Contains(
      "no kernel for head_dim 512, k u4g128, v s2g128, bf16 activations; generic kernels take "
      "head_dim of multiples of 8 up to 256; nearest of");
  CHECK_THROWS_WITH(choose_decode(wide), Contains("decode: ") && expected);
  CHECK_THROWS_WITH(choose_write(wide), Contains("write: ") && expected);
  CHECK_THROWS_WITH(choose_dequantize(wide), Contains("dequantize: ") && expected);
  CHECK_THROWS_WITH(choose_decode({.k = {128, 2, 128, 2}, .v = {320, 4, 32, 2}}),
                    Contains("head_dim 128 of k and 320 of v"));
}
