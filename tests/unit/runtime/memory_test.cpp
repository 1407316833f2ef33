#include <kvq/runtime/api/handles.h>
#include <kvq/runtime/memory_bound.h>
#include <kvq/runtime.hpp>

#include "support/served_artifact.h"
#include "support/temp_folder.h"

#include <catch2/catch.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

using namespace kvq;
using Catch::Matchers::Contains;

namespace {

using LayerWindows = std::array<int, 6>;

/// A served artifact with some windows, loaded.
struct Served {
  explicit Served(const Windows& windows, const LayerWindows& sliding_windows = {},
                  kvq_model_options options = runtime::init<kvq_model_options>()) {
    Artifact artifact = test::served_artifact(windows, 0);
    std::vector<kvq_layer_geometry> geometry(6, runtime::init<kvq_layer_geometry>());
    for (std::size_t layer = 0; layer < geometry.size(); ++layer) {
      kvq_layer_geometry& g = geometry[layer];
      g.num_q_heads = 16, g.num_kv_heads = 4, g.head_dim = 128;
      artifact.layers[layer].geometry.sliding_window = g.sliding_window = sliding_windows[layer];
    }
    const std::string path = (folder / "served.safetensors").string();
    save_artifact(artifact, path);
    options.num_layers = options.num_geometries = 6, options.geometry = geometry.data();
    model = std::make_unique<runtime::Model>(path, options);
  }
  test::TempFolder folder;
  std::unique_ptr<runtime::Model> model;
};

kvq_memory_options sequences(std::int32_t batch, std::int32_t length) {
  auto options = runtime::init<kvq_memory_options>();
  options.batch = batch, options.length = length;
  return options;
}

}  // namespace

TEST_CASE("Memory of a cache is that of its pools", "[runtime]") {
  const Served served({.sink_tokens = 20, .recent_tokens = 40});
  kvq_memory_options options = sequences(3, 1000);
  options.num_sink_slots = 2;
  const kvq_memory memory = served.model->memory(options);
  std::int64_t page = 0, sink = 0, ring = 0;
  for (int layer = 0; layer < 6; ++layer) {
    const kvq_layer_info info = served.model->layer(layer);
    page += info.page_bytes, sink += info.sink_slot_bytes, ring += info.ring_slot_bytes;
  }
  CHECK(memory.num_pages == 3 * 16);  // of 64 tokens
  CHECK(memory.num_sink_slots == 2);
  CHECK(memory.num_ring_slots == 3);
  CHECK(memory.page_bytes == 48 * page);
  CHECK(memory.sink_bytes == 2 * sink);
  CHECK(memory.ring_bytes == 3 * ring);
  CHECK(memory.device_model_bytes == static_cast<std::int64_t>(served.model->device_bytes()));
  CHECK(memory.sequence_page_bytes == 16 * page);
  CHECK(memory.sequence_window_bytes == sink + ring);
  CHECK(memory.decode_workspace_bytes + memory.prefill_workspace_bytes == 0);  // no calls were asked for
  CHECK(memory.total_bytes ==
        memory.page_bytes + memory.sink_bytes + memory.ring_bytes + memory.device_model_bytes + memory.cache_bytes);
}

TEST_CASE("Layers that keep the pages of some tokens, or none, are counted so", "[runtime]") {
  // Bytes of a page of 64 tokens and 4 heads: 16 tiles of each side.
  constexpr std::int64_t k2BitAffine = 16 * 2 * (512 + 64), k2BitSymmetric = 16 * 2 * (512 + 32),
                         k4And2Bit = 16 * ((1024 + 64) + (512 + 64)), kExact = 16 * 2 * 4096;
  SECTION("five layers with windows for each with full attention") {
    const Served served({.sink_tokens = 20, .recent_tokens = 40}, {100, 100, 100, 100, 40, 0});
    kvq_memory_options options = sequences(3, 1000);
    const kvq_memory all = served.model->memory(options);
    constexpr std::int64_t kAll = 3 * k2BitAffine + k2BitSymmetric + k4And2Bit + kExact;
    CHECK(all.page_bytes == 3 * 16 * kAll);
    // A window of 100 tokens and 16 new ones lie in 3 pages; one of 40 is in the ring.
    const std::array<std::int32_t, 6> tokens = {116, 116, 116, 116, 0, 1000};
    options.page_tokens = tokens.data();
    const kvq_memory some = served.model->memory(options);
    constexpr std::int64_t kSome = 3 * (k2BitAffine + k2BitSymmetric + k4And2Bit + kExact) + 16 * k2BitAffine;
    static_assert(3 * kSome == 2626560);
    CHECK(some.page_bytes == 3 * kSome);
    CHECK(some.sequence_page_bytes == kSome);
    CHECK(some.num_pages == 48);
    CHECK(some.total_bytes == all.total_bytes - 3 * (16 * kAll - kSome));
    CHECK(some.ring_bytes == all.ring_bytes);
    CHECK(some.cache_bytes == all.cache_bytes);
    CHECK(some.coded_bits == all.coded_bits);
    CHECK(some.effective_bits == Approx(8.0 * static_cast<double>(kSome + some.sequence_window_bytes) / (6144 * 1000)));
    // A short sequence has no more pages than tokens; its windows are not longer than it is.
    options.length = 65;
    const std::array<std::int32_t, 6> few = {65, 70, 116, 1000, 0, 65};
    options.page_tokens = few.data();
    CHECK(served.model->memory(options).page_bytes == 3 * 2 * (kAll - k2BitAffine));
    // A caller of the first header has no such field, whatever lies behind its structure.
    options = sequences(3, 1000);
    options.page_tokens = reinterpret_cast<const std::int32_t*>(std::uintptr_t{8});
    options.struct_size = offsetof(kvq_memory_options, page_tokens);
    CHECK(served.model->memory(options).page_bytes == all.page_bytes);
  }
  SECTION("one for one") {
    const Served served({.sink_tokens = 0, .recent_tokens = 40}, {0, 40, 0, 40, 0, 33});
    kvq_memory_options options = sequences(2, 640);
    const std::array<std::int32_t, 6> tokens = {640, 0, 640, 0, 640, 0};
    options.page_tokens = tokens.data();
    const kvq_memory memory = served.model->memory(options);
    CHECK(memory.page_bytes == 2 * 10 * (2 * k2BitAffine + k4And2Bit));
    CHECK(memory.num_pages == 20);
  }
  SECTION("all within the ring") {
    const Served served({.sink_tokens = 0, .recent_tokens = 40}, {40, 40, 40, 40, 40, 40});
    kvq_memory_options options = sequences(2, 640);
    const std::array<std::int32_t, 6> tokens = {};
    options.page_tokens = tokens.data();
    CHECK(served.model->memory(options).page_bytes == 0);
    CHECK(served.model->memory(options).num_pages == 0);
  }
}

TEST_CASE("Layers that could not attend with the tokens of their pages are refused", "[runtime]") {
  const Served served({.sink_tokens = 4, .recent_tokens = 40}, {0, 100, 40, 0, 0, 0});
  const auto refusal = [&](std::array<std::int32_t, 6> tokens) {
    kvq_memory_options options = sequences(2, 1000);
    options.page_tokens = tokens.data();
    auto memory = runtime::init<kvq_memory>();
    auto error = runtime::init<kvq_error>();
    const kvq_status status = kvq_memory_estimate(served.model->get(), &options, &memory, &error);
    CHECK(status == (error.message[0] ? KVQ_INVALID_ARGUMENT : KVQ_OK));
    return std::string(error.message);
  };
  constexpr std::int32_t kLength = 1000;
  CHECK(refusal({kLength, 100, 0, kLength, kLength, kLength}).empty());
  CHECK(refusal({999, 100, 0, kLength, kLength, kLength}) ==
        "memory: layer 0: page_tokens: expected 1000 or more, found 999");
  CHECK(refusal({0, 100, 0, kLength, kLength, kLength}) ==
        "memory: layer 0: page_tokens: expected 1000 or more, found 0");
  CHECK(refusal({kLength, 99, 0, kLength, kLength, kLength}) ==
        "memory: layer 1: page_tokens: expected 100 or more, found 99");
  CHECK(refusal({kLength, 0, 0, kLength, kLength, kLength}) ==
        "memory: layer 1: page_tokens: expected 100 or more, found 0");
  CHECK(refusal({kLength, 100, 39, kLength, kLength, kLength}) ==
        "memory: layer 2: page_tokens: expected 0, or 40 or more, found 39");
  CHECK(refusal({kLength, 100, -1, kLength, kLength, kLength}) ==
        "memory: layer 2: page_tokens: expected 0, or 40 or more, found -1");
}

TEST_CASE("Effective bits count the windows beside the codes", "[runtime]") {
  const Served served({.sink_tokens = 20, .recent_tokens = 40}), without({});
  double mean = 0.0;
  for (int layer = 0; layer < 6; ++layer) {
    const kvq_layer_info info = served.model->layer(layer);
    mean += (info.k_effective_bits + info.v_effective_bits) / 12.0;
  }
  // 32 rows of a sink slot and 48 of a ring, 16 bits each.
  const auto windows = [](int length) { return 16.0 * (32 + 48) / length; };
  for (const int length : {64, 640, 6400}) {
    CAPTURE(length);
    const kvq_memory memory = served.model->memory(sequences(7, length));
    CHECK(memory.coded_bits == Approx(mean));
    CHECK(memory.effective_bits == Approx(mean + windows(length)));
    CHECK(without.model->memory(sequences(7, length)).effective_bits == Approx(mean));
  }
  // The rest of the last page counts.
  const double of_one = served.model->memory(sequences(1, 1)).effective_bits;
  CHECK(of_one == Approx(64 * mean + windows(1)));
  CHECK(without.model->memory(sequences(1, 65)).effective_bits == Approx(mean * 128 / 65));
}

TEST_CASE("Without a device, workspaces have bounds that grow with the calls", "[runtime]") {
  const Served served({});
  const auto memory = [&](auto change) {
    auto calls = runtime::init<kvq_plan_options>();
    calls.max_batch = 4, calls.max_prefill_batch = 2, calls.max_prefill_queries = 100, calls.max_prefill_keys = 300;
    kvq_memory_options options = sequences(4, 300);
    options.plan_options = &calls;
    change(calls, options);
    return served.model->memory(options);
  };
  const kvq_memory base = memory([](auto&, auto&) {});
  CHECK(base.decode_workspace_bytes > 0);
  // Keys and values in 16 bits of 2 sequences and 4 heads, of 300 tokens in tiles of 128.
  CHECK(base.prefill_workspace_bytes == 2 * 4 * 384 * 2 * 128 * 2);
  CHECK(base.total_bytes == memory([](auto&, auto& o) { o.plan_options = nullptr; }).total_bytes +
                                std::max(base.decode_workspace_bytes, base.prefill_workspace_bytes));
  CHECK(memory([](auto& c, auto&) { c.max_batch = 8; }).decode_workspace_bytes > base.decode_workspace_bytes);
  CHECK(memory([](auto& c, auto&) { c.max_batch = 0; }).decode_workspace_bytes == 0);
  CHECK(memory([](auto&, auto& o) { o.multiprocessors = 132; }).decode_workspace_bytes < base.decode_workspace_bytes);
  CHECK(memory([](auto&, auto& o) { o.multiprocessors = 256; }).decode_workspace_bytes == base.decode_workspace_bytes);
  CHECK(memory([](auto& c, auto&) { c.prefill_workspace_bytes = 300000; }).prefill_workspace_bytes == 384 * 512);
  CHECK(memory([](auto& c, auto&) { c.prefill_workspace_bytes = 1; }).prefill_workspace_bytes == 384 * 512);
}

TEST_CASE("The bound of a decode workspace holds for the blocks that the policy plans", "[runtime]") {
  const auto check = [](const DecodeVariant& variant) {
    CAPTURE(variant.name);
    DecodeLaunch launch;
    const DecodeKernelShape& shape = variant.shape;
    launch.operand_bytes = shape.operand_bytes, launch.partial_bytes = shape.partial_bytes;
    for (const int multiprocessors : {1, 132, 256})
      for (const std::size_t work_tiles : {std::size_t{1}, std::size_t{512}}) {
        const int blocks = assumed_device(shape, multiprocessors).blocks;
        launch.cut_partials = variant.tuned ? static_cast<int>(decode::cut_partials(blocks)) : blocks;
        CHECK(most_decode_workspace_bytes(variant, multiprocessors, work_tiles) >=
              decode_workspace_bytes(launch, work_tiles));
      }
  };
  for (const DecodeVariant* variant : decode_variants()) check(*variant);
  check(generic_decode({{128, 2, 32, 2}, {256, 4, 32, 2}}, 17, true));
  CHECK(generic_decode({{128, 2, 32, 2}, {256, 4, 32, 2}}, 17, true).shape.partial_bytes == 17 * 258 * 4);
}

TEST_CASE("Sizes of memory that cannot be are refused", "[runtime]") {
  const Served served({.sink_tokens = 4, .recent_tokens = 0});
  const auto refusal = [&](auto change) {
    kvq_memory_options options = sequences(2, 100);
    change(options);
    auto memory = runtime::init<kvq_memory>();
    auto error = runtime::init<kvq_error>();
    CHECK(kvq_memory_estimate(served.model->get(), &options, &memory, &error) == KVQ_INVALID_ARGUMENT);
    CHECK(memory.total_bytes == 0);
    return std::string(error.message);
  };
  CHECK(refusal([](auto& o) { o.batch = 0; }) == "memory: batch: expected 1 or more, found 0");
  CHECK(refusal([](auto& o) { o.length = -1; }) == "memory: length: expected 1 or more, found -1");
  CHECK(refusal([](auto& o) { o.num_sink_slots = -1; }) == "memory: num_sink_slots: expected 0 or more, found -1");
  CHECK_THAT(refusal([](auto& o) { o.multiprocessors = 1025; }), Contains("multiprocessors: expected 0 to 1024"));
  CHECK(refusal([](auto& o) { o.batch = o.length = 1 << 30; }) ==
        "memory: 1073741824 sequences of 1073741824 tokens: expected at most 2147483647 pages, found " +
            std::to_string(std::int64_t{1} << 54));
  auto calls = runtime::init<kvq_plan_options>();
  calls.max_batch = -5;
  CHECK_THAT(refusal([&](auto& o) { o.plan_options = &calls; }), Contains("max_batch: expected 0 or more, found -5"));
  const kvq_plan plan;
  CHECK_THAT(refusal([&](auto& o) { o.plan = &plan; }), Contains("the plan is not for layer 0 of this model"));
  CHECK_THAT(refusal([&](auto& o) { o.plan = &plan, o.plan_options = &calls; }), Contains("found both"));
  CHECK_THAT(refusal([](auto& o) { o.struct_size = 3; }), Contains("use KVQ_INIT"));
  // A pool that the windows do not need has no slots, whatever was asked for.
  kvq_memory_options options = sequences(2, 100);
  CHECK(served.model->memory(options).num_ring_slots == 0);
  CHECK(served.model->memory(options).num_sink_slots == 2);
}
