#include "api_rig.h"

#include "support/served_artifact.h"

#include <kvq/runtime/api/handles.h>
#include <kvq/solve/trellis_tables.h>

#include <catch2/catch.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

using namespace kvq;
using namespace kvq::test;
using Catch::Matchers::Contains;

namespace {

constexpr Windows kWindows = {.sink_tokens = 4, .recent_tokens = 16};
constexpr runtime::PagedCacheOptions kRoom = {.num_pages = 8, .max_sequences = 2, .max_tokens = 200};

kvq_plan_options decode_and_prefill() { return plan_options(2, 10, 200); }

/// The arguments of an append with the rows of a decode step.
kvq_append_args append_args(const kvq_write_args& w, const kvq_decode_args& d) {
  auto a = runtime::init<kvq_append_args>();
  a.sequences = d.sequences, a.q = d.q, a.k = w.k, a.v = w.v, a.out = d.out;
  a.slot_mapping = w.slot_mapping, a.window_mapping = w.window_mapping, a.lse_natural = d.lse_natural;
  a.workspace = d.workspace, a.workspace_bytes = d.workspace_bytes;
  return a;
}

std::vector<std::byte> bytes_at(const void* device, std::int64_t count) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(count));
  check_cuda(cudaMemcpy(bytes.data(), device, bytes.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return bytes;
}

}  // namespace

TEST_CASE("A plan has one set of kernels for each format of its model", "[runtime][gpu][api][emulated]") {
  const Engine engine(served_artifact(kWindows, 0));
  const runtime::Plan plan(*engine.model, decode_and_prefill());
  CHECK(plan.get()->of_layer == std::vector<std::size_t>{0, 1, 2, 3, 0, 0});  // all three are u2g128
  for (int layer = 0; layer < 6; ++layer) {
    CAPTURE(layer);
    const KernelKey key = abi::layer_of(engine.model->get(), layer).key;
    CHECK(std::string(plan.kernel(layer, KVQ_KERNEL_WRITE).name) == choose_write(key).name);
    CHECK(std::string(plan.kernel(layer, KVQ_KERNEL_DECODE).name) == choose_decode(key).name);
    CHECK(std::string(plan.kernel(layer, KVQ_KERNEL_DEQUANTIZE).name) == choose_dequantize(key).name);
    CHECK(std::string(plan.kernel(layer, KVQ_KERNEL_PREFILL).name) == choose_prefill(choose_dequantize(key)).name);
  }
  CHECK_THROWS_WITH(plan.kernel(6, KVQ_KERNEL_WRITE), Contains("layer: expected 0 to 5, found 6"));

  // The workspace of the plan suffices for each layer's kernels.
  std::size_t decode = 0, prefill = 0;
  for (const kvq_plan::Kernels& kernels : plan.get()->kernels) {
    decode = std::max(decode, decode_workspace_bytes(kernels.decode_launch, 2 * 4));
    prefill = std::max(prefill, static_cast<std::size_t>(kernels.prefill_launch.workspace_bytes));
  }
  CHECK(plan.workspace_bytes(KVQ_KERNEL_DECODE) == decode);
  CHECK(plan.workspace_bytes(KVQ_KERNEL_PREFILL) == prefill);
  CHECK(plan.workspace_bytes(KVQ_KERNEL_WRITE) + plan.workspace_bytes(KVQ_KERNEL_DEQUANTIZE) == 0);
  CHECK(prefill > 0);
}

TEST_CASE("A plan refuses layers of other models and calls that it was not made for", "[runtime][gpu][api][emulated]") {
  const Engine engine(served_artifact(kWindows, 0));
  runtime::PagedCache cache(*engine.model, *engine.device_model, kRoom, nullptr);
  cache.create();
  REQUIRE(cache.step(std::vector<Growth>{{0, 1}}, nullptr));
  auto error = runtime::init<kvq_error>();
  const auto refused = [&](kvq_status status, const char* message) {
    CHECK(status == KVQ_INVALID_ARGUMENT);
    CHECK_THAT(error.message, Contains(message));
  };
  const runtime::Cache& handle = cache.handle();

  const runtime::Plan writes(*engine.model, runtime::init<kvq_plan_options>());
  refused(writes.decode(handle, 0, cache.decode_args(), nullptr, &error), "decode: the plan has no decode kernels");
  refused(writes.prefill(handle, 0, cache.prefill_args(), nullptr, &error), "prefill: the plan has no prefill kernels");
  kvq_plan* defaults = nullptr;
  expect_ok(kvq_plan_create(engine.model->get(), nullptr, &defaults, &error), error);
  refused(kvq_write_run(defaults, handle.get(), 6, nullptr, nullptr, &error), "args must not be null");
  kvq_plan_destroy(defaults);

  // A model with other layers, or with the same layers at another place.
  Artifact artifact = served_artifact(kWindows, 0);
  std::get<UniformCoder>(artifact.layers[1].k.coder).group_size = 64;
  const Engine other(artifact);
  const runtime::Plan of_other(*other.model, plan_options(2));
  refused(of_other.write(handle, 1, cache.write_args(), nullptr, &error), "write: layer 1 has another format");
  auto options = runtime::init<kvq_model_options>();
  options.tp_size = 2;
  const Engine half(served_artifact(kWindows, 0), options);
  const runtime::Plan of_half(*half.model, plan_options(2));
  refused(of_half.decode(handle, 0, cache.decode_args(), nullptr, &error),
          "decode: layer 0 has 4 KV heads, in the plan 2");
  options = runtime::init<kvq_model_options>();
  options.first_layer = 2, options.layer_count = 3;
  const Engine part(served_artifact(kWindows, 0), options);
  const runtime::Plan of_part(*part.model, plan_options(2));
  refused(of_part.write(handle, 1, cache.write_args(), nullptr, &error),
          "write: layer: expected 2 to 4 (of the plan), found 1");
  refused(of_part.write(handle, 5, cache.write_args(), nullptr, &error), "(of the plan), found 5");
  refused(of_part.write(handle, -1, cache.write_args(), nullptr, &error), "(of the cache), found -1");

  // What a plan of other layers has for a layer of equal format and heads serves this cache, too.
  LayerRunner runner(engine, 4, kRoom, nullptr);
  runner.rows = {{runner.cache.create(), 3}};
  const std::vector<std::uint16_t> expected = runner.step(std::vector<Growth>{{0, 50}});
  const DeviceMemory workspace(of_part.workspace_bytes(KVQ_KERNEL_DECODE)), out(expected.size() * 2),
      queries = to_device<std::uint16_t>(runner.query(3, 50), nullptr);
  kvq_decode_args d = runner.cache.decode_args();
  d.q = queries.get(), d.out = out.get(), d.workspace = workspace.get(), d.workspace_bytes = workspace.bytes();
  expect_ok(of_part.decode(runner.cache.handle(), 4, d, nullptr, &error), error);
  std::vector<std::uint16_t> found(expected.size());
  to_host<std::uint16_t>(out, found, nullptr);
  CHECK(found == expected);
}

TEST_CASE("Handles may be destroyed in every order", "[runtime][gpu][api][emulated]") {
  const Engine engine(served_artifact(kWindows, 0));
  const std::size_t model_bytes = engine.model->device_bytes();
  auto extents = runtime::init<kvq_cache_options>();
  extents.num_pages = extents.num_sink_slots = extents.num_ring_slots = 1;
  // Memory of the caller outlives all handles.
  const DeviceMemory model_memory(model_bytes), cache_memory(engine.device_model->cache_bytes(extents));
  std::vector<DeviceMemory> memory;
  const auto take = [&](std::int64_t bytes) {
    memory.emplace_back(static_cast<std::size_t>(bytes));
    check_cuda(cudaMemset(memory.back().get(), 0, memory.back().bytes()), "cudaMemset");
    return memory.back().get();
  };
  std::vector<kvq_layer_pools> pools;
  for (int layer = 0; layer < 6; ++layer) {
    const kvq_layer_info info = engine.model->layer(layer);
    auto p = runtime::init<kvq_layer_pools>();
    p.pages = take(info.page_bytes), p.sinks = take(info.sink_slot_bytes), p.rings = take(info.ring_slot_bytes);
    pools.push_back(p);
  }
  const DeviceMemory row = to_device<std::uint16_t>(std::vector<std::uint16_t>(16 * 128, 0x3C00), nullptr),
                     out(16 * 128 * 2), one = to_device<std::int32_t>(std::vector<std::int32_t>{1}, nullptr),
                     zero = to_device<std::int32_t>(std::vector<std::int32_t>{0, 1}, nullptr), mapping(8), window(8);

  std::array<int, 4> order = {0, 1, 2, 3};
  do {
    CAPTURE(order[0], order[1], order[2], order[3]);
    auto error = runtime::init<kvq_error>();
    kvq_model* model = nullptr;
    kvq_device_model* device_model = nullptr;
    kvq_cache* cache = nullptr;
    kvq_plan* plan = nullptr;
    auto geometry = runtime::init<kvq_layer_geometry>();
    geometry.num_q_heads = 16, geometry.num_kv_heads = 4, geometry.head_dim = 128;
    std::vector<kvq_layer_geometry> layers(6, geometry);
    layers[5].sliding_window = 33;
    auto options = runtime::init<kvq_model_options>();
    options.num_layers = options.num_geometries = 6, options.geometry = layers.data();
    const kvq_plan_options calls = plan_options(1);
    expect_ok(kvq_model_load(engine.path.c_str(), &options, &model, &error), error);
    expect_ok(kvq_model_upload(model, model_memory.get(), model_memory.bytes(), nullptr, &device_model, &error), error);
    expect_ok(kvq_cache_create(device_model, &extents, pools.data(), 6, cache_memory.get(), cache_memory.bytes(),
                               nullptr, &cache, &error),
              error);
    expect_ok(kvq_plan_create(model, &calls, &plan, &error), error);
    std::size_t bytes = 0;
    expect_ok(kvq_plan_workspace_bytes(plan, KVQ_KERNEL_DECODE, &bytes, &error), error);
    const DeviceMemory workspace(bytes);

    const auto step = [&] {
      auto s = runtime::init<kvq_sequences>();
      s.batch = 1, s.seq_lens = one.get<std::int32_t>(), s.page_table = zero.get<std::int32_t>();
      s.page_table_stride = 1, s.sink_slots = s.ring_slots = zero.get<std::int32_t>();
      auto a = runtime::init<kvq_step_args>();
      a.sequences = &s, a.num_tokens = 1, a.token_indptr = zero.get<std::int32_t>();
      a.slot_mapping = mapping.get<std::int64_t>(), a.window_mapping = window.get<std::int64_t>();
      expect_ok(kvq_step_run(cache, &a, nullptr, &error), error);
      auto w = runtime::init<kvq_write_args>();
      w.num_tokens = 1, w.k = w.v = row.get(), w.slot_mapping = a.slot_mapping, w.window_mapping = a.window_mapping;
      auto d = runtime::init<kvq_decode_args>();
      d.sequences = &s, d.q = row.get(), d.out = out.get();
      d.workspace = workspace.get(), d.workspace_bytes = workspace.bytes();
      for (const int layer : {0, 4}) {
        expect_ok(kvq_write_run(plan, cache, layer, &w, nullptr, &error), error);
        expect_ok(kvq_decode_run(plan, cache, layer, &d, nullptr, &error), error);
      }
      auto fault = runtime::init<kvq_fault>();
      expect_ok(kvq_fault_query(cache, &fault, nullptr, &error), error);
      CHECK(fault.code == KVQ_FAULT_NONE);
    };
    const std::array<std::function<void()>, 4> destroy = {
        [&] { kvq_model_destroy(model); },
        [&] { kvq_device_model_destroy(device_model); },
        [&] { kvq_cache_destroy(cache), cache = nullptr; },
        [&] { kvq_plan_destroy(plan), plan = nullptr; },
    };
    step();
    for (const int handle : order) {
      destroy[static_cast<std::size_t>(handle)]();
      if (cache && plan) step();  // needs neither the model nor the device model
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_CASE("A write with a workspace of any size stores what one without stores", "[runtime][gpu][api][emulated]") {
  constexpr int kTokens = 2700, kWidth = 4 * 128;  // rows enough for two rounds of the search in pairs
  Artifact artifact = served_artifact({}, 0);
  for (TensorPlan* side : {&artifact.layers[0].k, &*artifact.layers[0].v}) {
    *side = TensorPlan{};
    side->coder = TrellisCoder{.bits = 2, .group_size = 128, .taps = trellis_taps(2, 1, 128)};
  }
  auto model_options = runtime::init<kvq_model_options>();
  model_options.page_size = 16, model_options.max_step_tokens = kTokens;
  const Engine engine(artifact, model_options);
  auto options = plan_options(1);
  options.max_write_tokens = kTokens;
  const runtime::Plan plan(*engine.model, options);
  const std::size_t suffices = plan.workspace_bytes(KVQ_KERNEL_WRITE);
  auto want = runtime::init<kvq_memory_options>();
  want.batch = 1, want.length = kTokens, want.plan_options = &options;
  const kvq_memory bound = engine.model->memory(want);
  want.plan = plan.get(), want.plan_options = nullptr;
  const kvq_memory exact = engine.model->memory(want);
  CHECK(exact.write_workspace_bytes == static_cast<std::int64_t>(suffices));
  CHECK(bound.write_workspace_bytes == exact.write_workspace_bytes);
  CHECK(exact.write_workspace_bytes > exact.decode_workspace_bytes);
  CHECK(exact.total_bytes ==
        exact.page_bytes + exact.device_model_bytes + exact.cache_bytes + exact.write_workspace_bytes);

  const DeviceMemory workspace(suffices), k = to_device<std::uint16_t>(random_rows(kTokens, kWidth, 1), nullptr),
                                          v = to_device<std::uint16_t>(random_rows(kTokens, kWidth, 2), nullptr);
  auto error = runtime::init<kvq_error>();
  const auto written = [&](int tokens, void* memory, std::size_t bytes) {
    runtime::PagedCache cache(*engine.model, *engine.device_model,
                              {.num_pages = 180, .max_sequences = 1, .max_tokens = kTokens}, nullptr);
    const std::int64_t page_bytes = engine.model->layer(0).page_bytes;
    check_cuda(cudaMemset(cache.pages(0), 0xA5, static_cast<std::size_t>(180 * page_bytes)), "cudaMemset");
    cache.create();
    REQUIRE(cache.step(std::vector<Growth>{{0, tokens}}, nullptr));
    kvq_write_args a = cache.write_args();
    a.k = k.get(), a.v = v.get(), a.workspace = memory, a.workspace_bytes = bytes;
    expect_ok(plan.write(cache.handle(), 0, a, nullptr, &error), error);
    return bytes_at(cache.pages(0), tokens / 16 * page_bytes);
  };
  const std::vector<std::byte> all = written(kTokens, workspace.get(), suffices);
  CHECK((written(kTokens, workspace.get(), suffices * 11 / 20) == all));
  // A workspace that is too small is not used, and few tokens need none.
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1024}, suffices}) {
    const std::vector<std::byte> some = written(48, bytes ? workspace.get() : nullptr, bytes);
    CHECK(std::equal(some.begin(), some.end(), all.begin()));
  }
  const auto refused = [&](void* memory, std::size_t bytes) {
    runtime::PagedCache cache(*engine.model, *engine.device_model,
                              {.num_pages = 2, .max_sequences = 1, .max_tokens = 16}, nullptr);
    cache.create();
    REQUIRE(cache.step(std::vector<Growth>{{0, 1}}, nullptr));
    kvq_write_args a = cache.write_args();
    a.k = k.get(), a.v = v.get(), a.workspace = memory, a.workspace_bytes = bytes;
    CHECK(plan.write(cache.handle(), 0, a, nullptr, &error) == KVQ_INVALID_ARGUMENT);
    CHECK_THAT(std::string(error.message), Contains("write: expected a workspace of 4096 bytes, aligned to 256, or"));
  };
  refused(nullptr, 4096), refused(workspace.get<std::byte>() + 128, 4096);
  options.max_write_tokens = -1;
  CHECK_THROWS_WITH(runtime::Plan(*engine.model, options), Contains("max_write_tokens: expected 0 or more, found -1"));
}

TEST_CASE("Append stores and attends as a write and a decode", "[runtime][gpu][api][emulated]") {
  const Engine engine(served_artifact(kWindows, 0));
  const runtime::Plan plan(*engine.model, plan_options(2));
  const DeviceMemory workspace(plan.workspace_bytes(KVQ_KERNEL_DECODE));
  auto error = runtime::init<kvq_error>();
  for (const int layer : {0, 2, 3, 4}) {
    CAPTURE(layer);
    LayerRunner apart(engine, layer, kRoom, nullptr), together(engine, layer, kRoom, nullptr);
    for (LayerRunner* runner : {&apart, &together}) {
      runner->rows = {{runner->cache.create(), 1}, {runner->cache.create(), 2}};
      const auto mark = [](void* pool, std::int64_t bytes) {
        check_cuda(cudaMemset(pool, 0xA5, static_cast<std::size_t>(bytes)), "cudaMemset");
      };
      mark(runner->cache.pages(layer), kRoom.num_pages * runner->info.page_bytes);
      mark(runner->cache.sinks(layer), 2 * runner->info.sink_slot_bytes);
      mark(runner->cache.rings(layer), 2 * runner->info.ring_slot_bytes);
      runner->step(std::vector<Growth>{{0, 90}, {1, 5}});
    }
    const std::vector<Growth> batch = {{0, 1}, {1, 1}};
    for (int i = 0; i < 3; ++i) {
      const std::vector<std::uint16_t> expected = apart.step(batch);
      std::vector<std::uint16_t> q, k, v;
      for (const auto& [seed, length] : {std::pair{1, 90 + i}, std::pair{2, 5 + i}}) {
        const auto s = static_cast<std::uint64_t>(seed);
        const auto key = together.key(s, length), value = together.value(s, length),
                   query = together.query(s, length + 1);
        k.insert(k.end(), key.begin(), key.end()), v.insert(v.end(), value.begin(), value.end());
        q.insert(q.end(), query.begin(), query.end());
      }
      REQUIRE(together.cache.step(batch, nullptr));
      const DeviceMemory d_q = to_device<std::uint16_t>(q, nullptr), d_k = to_device<std::uint16_t>(k, nullptr),
                         d_v = to_device<std::uint16_t>(v, nullptr), out(expected.size() * 2), lse(2 * 16 * 4);
      kvq_write_args w = together.cache.write_args();
      kvq_decode_args d = together.cache.decode_args();
      w.k = d_k.get(), w.v = d_v.get(), d.q = d_q.get(), d.out = out.get(), d.lse_natural = lse.get<float>();
      d.workspace = workspace.get(), d.workspace_bytes = workspace.bytes();
      const kvq_append_args a = append_args(w, d);
      expect_ok(plan.append(together.cache.handle(), layer, a, nullptr, &error), error);
      std::vector<std::uint16_t> found(expected.size());
      std::vector<float> found_lse(2 * 16);
      to_host<std::uint16_t>(out, found, nullptr), to_host<float>(lse, found_lse, nullptr);
      CHECK(found == expected);
      CHECK(found_lse == apart.lse());
    }
    const auto stored = [&](LayerRunner& r) {
      std::vector<std::byte> all = bytes_at(r.cache.pages(layer), kRoom.num_pages * r.info.page_bytes);
      for (const std::vector<std::byte>& more : {bytes_at(r.cache.sinks(layer), 2 * r.info.sink_slot_bytes),
                                                 bytes_at(r.cache.rings(layer), 2 * r.info.ring_slot_bytes)})
        all.insert(all.end(), more.begin(), more.end());
      return all;
    };
    CHECK((stored(together) == stored(apart)));
  }
}

TEST_CASE("An append that one of its parts refuses enqueues nothing", "[runtime][gpu][api][emulated]") {
  const Engine engine(served_artifact(kWindows, 0));
  const runtime::Plan plan(*engine.model, plan_options(2));
  const DeviceMemory workspace(plan.workspace_bytes(KVQ_KERNEL_DECODE)), rows(1 << 16);
  runtime::PagedCache cache(*engine.model, *engine.device_model, kRoom, nullptr);
  cache.create();
  REQUIRE(cache.step(std::vector<Growth>{{0, 1}}, nullptr));
  const std::int64_t bytes = kRoom.num_pages * engine.model->layer(0).page_bytes;
  check_cuda(cudaMemset(cache.pages(0), 0xA5, static_cast<std::size_t>(bytes)), "cudaMemset");
  const std::vector<std::byte> before = bytes_at(cache.pages(0), bytes);
  const auto refusal = [&](auto change) {
    struct : kvq_append_args, kvq_sequences {
    } a{append_args(cache.write_args(), cache.decode_args()), cache.sequences()};
    a.kvq_append_args::sequences = &a;
    a.q = a.k = a.v = a.out = rows.get(), a.workspace = workspace.get(), a.workspace_bytes = workspace.bytes();
    change(a);
    auto error = runtime::init<kvq_error>();
    CHECK(plan.append(cache.handle(), 0, a, nullptr, &error) == KVQ_INVALID_ARGUMENT);
    CHECK((bytes_at(cache.pages(0), bytes) == before));
    return std::string(error.message);
  };
  CHECK_THAT(refusal([](auto& a) { a.window_mapping = nullptr; }), Contains("need a window_mapping"));
  CHECK_THAT(refusal([](auto& a) { a.slot_mapping = nullptr; }), Contains("quantize_write: "));
  CHECK_THAT(refusal([](auto& a) { a.k = nullptr; }), Contains("k: "));
  CHECK_THAT(refusal([](auto& a) { a.v_stride = 7; }), Contains("v: "));
  CHECK_THAT(refusal([](auto& a) { a.q = nullptr; }), Contains("must not be null"));
  CHECK_THAT(refusal([](auto& a) { --a.workspace_bytes; }), Contains("expected a workspace of"));
  CHECK_THAT(refusal([](auto& a) { a.batch = 3; }), Contains("batch is 3, the plan's max_batch 2"));
  CHECK_THAT(refusal([](auto& a) { a.batch = -1; }), Contains("batch is -1"));
  CHECK_THAT(refusal([](auto& a) { a.kvq_append_args::sequences = nullptr; }), Contains("sequences must not be null"));

  // No sequences: nothing is done, and nothing but the number is read.
  auto none = runtime::init<kvq_sequences>();
  auto a = runtime::init<kvq_append_args>();
  a.sequences = &none;
  auto error = runtime::init<kvq_error>();
  expect_ok(plan.append(cache.handle(), 0, a, nullptr, &error), error);
  CHECK((bytes_at(cache.pages(0), bytes) == before));
}

TEST_CASE("Memory is estimated as caches and plans then demand it", "[runtime][gpu][api][emulated]") {
  auto model_options = runtime::init<kvq_model_options>();
  model_options.page_size = GENERATE(16, 64), model_options.max_step_tokens = 5;
  const bool generic = GENERATE(false, true);
  Artifact artifact = served_artifact(kWindows, 0);
  if (generic)
    for (LayerPlan& layer : artifact.layers)
      if (auto* k = std::get_if<UniformCoder>(&layer.k.coder)) k->group_size = 32;
  const Engine engine(artifact, model_options);
  const kvq_plan_options calls = decode_and_prefill();
  const runtime::Plan plan(*engine.model, calls);
  auto options = runtime::init<kvq_memory_options>();
  options.batch = 3, options.length = 130, options.plan = plan.get();
  const kvq_memory exact = engine.model->memory(options);
  options.plan = nullptr, options.plan_options = &calls;
  const kvq_memory most = engine.model->memory(options);
  int multiprocessors = 0;
  check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0), "cudaDeviceGetAttribute");
  options.multiprocessors = multiprocessors;
  const kvq_memory near = engine.model->memory(options);

  auto extents = runtime::init<kvq_cache_options>();
  extents.num_pages = exact.num_pages, extents.num_sink_slots = exact.num_sink_slots;
  extents.num_ring_slots = exact.num_ring_slots;
  CHECK(exact.num_pages == 3 * (model_options.page_size == 16 ? 9 : 3));
  const auto size = [](std::int64_t bytes) { return static_cast<std::size_t>(bytes); };
  for (const kvq_memory* memory : {&exact, &most, &near}) {
    CHECK(size(memory->cache_bytes) == engine.device_model->cache_bytes(extents));
    CHECK(size(memory->device_model_bytes) == engine.memory.bytes());
    CHECK(size(memory->prefill_workspace_bytes) == plan.workspace_bytes(KVQ_KERNEL_PREFILL));
    CHECK(size(memory->decode_workspace_bytes) >= plan.workspace_bytes(KVQ_KERNEL_DECODE));
  }
  CHECK(size(exact.decode_workspace_bytes) == plan.workspace_bytes(KVQ_KERNEL_DECODE));
  CHECK(near.decode_workspace_bytes <= most.decode_workspace_bytes);
  CHECK(near.decode_workspace_bytes <= 4 * exact.decode_workspace_bytes);

  // A cache in exactly this memory holds the sequences.
  std::vector<DeviceMemory> memory;
  std::vector<kvq_layer_pools> pools;
  std::int64_t taken = 0;
  const auto take = [&](std::int64_t bytes) {
    memory.emplace_back(size(bytes)), taken += bytes;
    return memory.back().get();
  };
  for (int layer = 0; layer < 6; ++layer) {
    const kvq_layer_info info = engine.model->layer(layer);
    auto p = runtime::init<kvq_layer_pools>();
    p.pages = take(info.page_bytes * extents.num_pages), p.sinks = take(info.sink_slot_bytes * extents.num_sink_slots);
    p.rings = take(info.ring_slot_bytes * extents.num_ring_slots);
    pools.push_back(p);
  }
  CHECK(taken == exact.page_bytes + exact.sink_bytes + exact.ring_bytes);
  void* own = take(exact.cache_bytes);
  CHECK_NOTHROW(runtime::Cache(*engine.device_model, extents, pools, own, size(exact.cache_bytes), nullptr));
  CHECK_THROWS(runtime::Cache(*engine.device_model, extents, pools, own, size(exact.cache_bytes) - 1, nullptr));
}
