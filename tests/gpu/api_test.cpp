#include "api_expected.h"
#include "api_rig.h"

#include "support/served_artifact.h"

#include <kvq/codec/codec.h>
#include <kvq/core/dtype.h>
#include <kvq/runtime/api/handles.h>

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

using namespace kvq;
using namespace kvq::test;
using Catch::Matchers::Contains;

namespace {

/// Sequences with their expected contents; the results of every step are compared with them.
class Checked {
 public:
  Checked(const Engine& engine, const Artifact& artifact, int layer, const Windows& windows, cudaStream_t stream)
      : plan_(artifact.layers[static_cast<std::size_t>(layer)]),
        windows_(windows),
        runner(engine, layer, {.num_pages = 64, .max_sequences = 4, .max_tokens = 400}, stream) {}

  int create(std::uint64_t seed) {
    const int made = runner.cache.create();
    runner.rows[made] = seed;
    sequences_[made] = {};
    return made;
  }
  int fork(int from, cudaStream_t stream) {
    const int made = runner.cache.fork(from, stream);
    runner.rows[made] = runner.rows[from] + 100;  // other tokens from here on
    sequences_[made] = sequences_[from];
    return made;
  }
  void rollback(int sequence, int tokens) {
    runner.cache.rollback(sequence, tokens);
    Expected& s = sequences_[sequence];
    s.k.erase(s.k.end() - tokens, s.k.end()), s.v.erase(s.v.end() - tokens, s.v.end());
  }
  void step(const std::vector<Growth>& batch) {
    for (const Growth& g : batch) {
      Expected& s = sequences_[g.sequence];
      const std::int64_t before = static_cast<std::int64_t>(s.k.size()), length = before + g.tokens;
      for (std::int64_t t = before; t < length; ++t)
        s.grow(plan_, floats(runner.key(runner.rows[g.sequence], t)), floats(runner.value(runner.rows[g.sequence], t)));
    }
    const std::vector<float> out = floats(runner.step(batch));
    REQUIRE_FALSE(out.empty());
    const std::size_t each = static_cast<std::size_t>(plan_.geometry.num_q_heads) * kDim;
    for (std::size_t b = 0; b < batch.size(); ++b) {
      const Expected& s = sequences_[batch[b].sequence];
      if (s.k.empty()) continue;
      const std::vector<float> q =
          floats(runner.query(runner.rows[batch[b].sequence], static_cast<std::int64_t>(s.k.size())));
      CAPTURE(plan_.layer, batch[b].sequence, s.k.size());
      const Comparison found = compare(std::span(out).subspan(b * each, each), attend_expected(plan_, windows_, s, q));
      CHECK(found.error <= found.allowed);
    }
  }

 private:
  const LayerPlan& plan_;
  Windows windows_;
  std::map<int, Expected> sequences_ = {};

 public:
  LayerRunner runner;
};

struct Stream {
  Stream() { check_cuda(cudaStreamCreate(&stream), "cudaStreamCreate"); }
  ~Stream() { cudaStreamDestroy(stream); }
  Stream(const Stream&) = delete;
  cudaStream_t stream = nullptr;
};

}  // namespace

TEST_CASE("Write and decode through the interface are the kernels' own results", "[runtime][gpu][api][emulated]") {
  const Artifact artifact = served_artifact({}, 0);
  const Engine engine(artifact);
  for (const int layer : {0, 1, 2, 3, 4, 5}) {
    CAPTURE(layer);
    const kvq_layer_info info = engine.model->layer(layer);
    LayerRunner runner(engine, layer, {.num_pages = 8, .max_sequences = 2, .max_tokens = 300}, nullptr);
    runner.cache.create(), runner.cache.create();
    runner.rows = {{0, 1}, {1, 2}};
    check_cuda(cudaMemset(runner.cache.pages(layer), 0xA5, static_cast<std::size_t>(8 * info.page_bytes)),
               "cudaMemset");
    const std::vector<Growth> batch = {{0, 130}, {1, 77}};
    const std::vector<std::uint16_t> out = runner.step(batch);
    REQUIRE(out.size() == 2 * 16 * kDim);

    // The same, by direct calls of the kernels.
    const LoadedLayer& loaded = engine.model->get()->model.layers[static_cast<std::size_t>(layer)];
    const KernelKey key = kernel_key(loaded.plan, loaded.pages, true);
    const LayerPointers pointers =
        engine.model->get()->model.image.pointers(static_cast<std::size_t>(layer), engine.memory.get());
    std::vector<std::uint16_t> k, v, q;
    std::vector<std::int64_t> slots;
    std::vector<std::int32_t> table(16, 7);
    for (int s = 0; s < 2; ++s) {
      const auto pages = runner.cache.allocator().pages(s);
      std::copy(pages.begin(), pages.end(), table.begin() + 8 * s);
      for (int t = 0; t < batch[static_cast<std::size_t>(s)].tokens; ++t) {
        const auto one_k = runner.key(runner.rows[s], t), one_v = runner.value(runner.rows[s], t);
        k.insert(k.end(), one_k.begin(), one_k.end()), v.insert(v.end(), one_v.begin(), one_v.end());
        slots.push_back(std::int64_t{pages[static_cast<std::size_t>(t / 64)]} * 64 + t % 64);
      }
      const auto one_q = runner.query(runner.rows[s], batch[static_cast<std::size_t>(s)].tokens);
      q.insert(q.end(), one_q.begin(), one_q.end());
    }
    const DeviceMemory d_k = to_device<std::uint16_t>(k, nullptr), d_v = to_device<std::uint16_t>(v, nullptr),
                       d_q = to_device<std::uint16_t>(q, nullptr);
    const DeviceMemory d_slots = to_device<std::int64_t>(slots, nullptr),
                       d_table = to_device<std::int32_t>(table, nullptr);
    const DeviceMemory lengths = to_device<std::int32_t>(std::vector<std::int32_t>{130, 77}, nullptr);
    std::vector<std::byte> pages(static_cast<std::size_t>(8 * info.page_bytes), std::byte{0xA5});
    const DeviceMemory pool = to_device<std::byte>(pages, nullptr), d_out(out.size() * 2), d_lse(2 * 16 * 4);
    WriteParams w;
    w.num_tokens = 207, w.num_kv_heads = 4;
    w.k = pointers.write_k, w.v = pointers.write_v;
    w.k.x = d_k.get(), w.v.x = d_v.get(), w.k.token_stride = w.v.token_stride = 512;
    w.slot_mapping = d_slots.get<std::int64_t>(), w.pages = pool.get(), w.page_stride = info.page_bytes,
    w.extents.num_pages = 8;
    WriteLaunch write_launch;
    REQUIRE(choose_write(key).plan(write_launch).ok());
    REQUIRE(choose_write(key).run(write_launch, w, nullptr).ok());
    DecodeLaunch launch;
    const DecodeVariant& variant = choose_decode(key);
    REQUIRE(variant.plan(launch).ok());
    const DeviceMemory workspace =
        to_device<std::byte>(std::vector<std::byte>(decode_workspace_bytes(launch, 8)), nullptr);
    DecodeParams d;
    d.cache.batch = 2, d.num_q_heads = 16, d.cache.num_kv_heads = 4,
    d.softmax_scale = static_cast<float>(info.softmax_scale);
    d.q = d_q.get(), d.out = d_out.get(), d.q_stride = d.out_stride = 2048,
    d.cache.seq_lens = lengths.get<std::int32_t>();
    d.lse = d_lse.get<float>();
    d.sliding_window = info.sliding_window;
    d.cache.pages = pool.get(), d.cache.page_stride = info.page_bytes, d.cache.page_table = d_table.get<std::int32_t>(),
    d.cache.page_table_stride = 8;
    d.cache.rotation_k = pointers.rotation_k, d.cache.rotation_v = pointers.rotation_v,
    d.cache.center_k = pointers.center_k, d.cache.center_v = pointers.center_v;
    d.workspace = workspace.get();
    REQUIRE(std::string(check_decode(variant, d).message()) == "");
    REQUIRE(variant.run(launch, d, nullptr).ok());
    std::vector<std::uint16_t> direct(out.size());
    to_host<std::uint16_t>(d_out, direct, nullptr);
    CHECK(direct == out);
    std::vector<float> direct_lse(2 * 16);
    to_host<float>(d_lse, direct_lse, nullptr);
    CHECK(direct_lse == runner.lse());
    to_host<std::byte>(pool, pages, nullptr);
    std::vector<std::byte> theirs(pages.size());
    check_cuda(cudaMemcpy(theirs.data(), runner.cache.pages(layer), theirs.size(), cudaMemcpyDeviceToHost),
               "cudaMemcpy");
    CHECK(theirs == pages);
  }
}

/// A layer's sequences grow, take draft tokens back, fork and grow again.
void check_growth(const Engine& engine, const Artifact& artifact, int layer, const Windows& windows) {
  CAPTURE(windows.sink_tokens, windows.recent_tokens);
  Stream s;
  Checked checked(engine, artifact, layer, windows, s.stream);
  const int a = checked.create(1), b = checked.create(2);
  checked.step({{a, 150}, {b, 3}});
  for (int i = 0; i < 4; ++i) checked.step({{b, 1}, {a, 1}});
  checked.step({{a, 6}, {b, 5}});  // draft tokens
  checked.rollback(a, 5), checked.rollback(b, 5);
  checked.step({{a, 2}, {b, 30}});
  const int c = checked.fork(a, s.stream);
  for (int i = 0; i < 6; ++i) checked.step({{a, 1}, {c, 2}, {b, 17}});
  checked.runner.cache.destroy(a);
  checked.step({{c, 70}, {b, 0}});
}

TEST_CASE("Sequences grow, take drafts back, fork and go on, with exact windows and without", "[runtime][gpu][api]") {
  for (const Windows& windows :
       {Windows{}, Windows{.sink_tokens = 20, .recent_tokens = 40}, Windows{.sink_tokens = 5, .recent_tokens = 0}}) {
    const Artifact artifact = served_artifact(windows, 0);
    auto options = runtime::init<kvq_model_options>();
    options.page_size = 16, options.max_step_tokens = 6;
    const Engine engine(artifact, options);
    for (const int layer : {0, 1, 2, 3, 4, 5}) check_growth(engine, artifact, layer, windows);
  }
}

void check_growth_under_transforms(const Windows& windows, const std::vector<int>& layers) {
  const Artifact artifact = transformed_artifact(windows, 0);
  auto options = runtime::init<kvq_model_options>();
  options.page_size = 16, options.max_step_tokens = 6;
  const Engine engine(artifact, options);
  for (const int layer : layers) check_growth(engine, artifact, layer, windows);
}

TEST_CASE("The same under transforms", "[runtime][gpu][api]") {
  for (const Windows& windows : {Windows{}, Windows{.sink_tokens = 20, .recent_tokens = 40}})
    check_growth_under_transforms(windows, {0, 1, 2, 3});
}

TEST_CASE("The same under transforms, each layer once", "[runtime][gpu][api][emulated]") {
  check_growth_under_transforms({}, {0, 3});
  check_growth_under_transforms({.sink_tokens = 20, .recent_tokens = 40}, {1, 2});
}

TEST_CASE("Keys whose scales are folded are stored as those that are scaled by the runtime",
          "[runtime][gpu][api][emulated]") {
  const Windows windows{.sink_tokens = 6, .recent_tokens = 20};
  const Artifact artifact = transformed_artifact(windows, 0);
  const Engine engine(artifact), folded(artifact, runtime::init<kvq_model_options>(), KVQ_FOLD_K_SCALES);
  for (const int layer : {0, 2}) {
    CAPTURE(layer);
    const runtime::PagedCacheOptions room{.num_pages = 8, .max_sequences = 1, .max_tokens = 200};
    LayerRunner plain(engine, layer, room, nullptr), served(folded, layer, room, nullptr);
    CHECK(plain.info.k_scales == 1);
    CHECK(served.info.k_scales == 0);
    CHECK(served.info.fold == KVQ_FOLD_K_SCALES);
    served.scale_keys();
    for (LayerRunner* runner : {&plain, &served}) {
      runner->rows[runner->cache.create()] = 3;
      const auto bytes = static_cast<std::size_t>(8 * runner->info.page_bytes);
      check_cuda(cudaMemset(runner->cache.pages(layer), 0xA5, bytes), "cudaMemset");
    }
    for (const int tokens : {90, 1, 17}) {
      const std::vector<Growth> batch = {{0, tokens}};
      CHECK(served.step(batch) == plain.step(batch));
      CHECK(served.lse() == plain.lse());
    }
    const auto pages_of = [&](LayerRunner& runner) {
      std::vector<std::byte> bytes(static_cast<std::size_t>(8 * runner.info.page_bytes));
      check_cuda(cudaMemcpy(bytes.data(), runner.cache.pages(layer), bytes.size(), cudaMemcpyDeviceToHost),
                 "cudaMemcpy");
      return bytes;
    };
    CHECK((pages_of(served) == pages_of(plain)));
  }
}

TEST_CASE("The same in formats that have no row in variants.json", "[runtime][gpu][api][generic]") {
  const Windows windows{.sink_tokens = 20, .recent_tokens = 40};
  Artifact artifact = served_artifact(windows, 0);
  for (LayerPlan& layer : artifact.layers) {
    if (auto* k = std::get_if<UniformCoder>(&layer.k.coder)) k->group_size = 32;
    if (auto* v = std::get_if<UniformCoder>(&layer.v->coder)) v->group_size = 64;
  }
  auto options = runtime::init<kvq_model_options>();
  options.page_size = 16, options.max_step_tokens = 6;
  const Engine engine(artifact, options);
  const runtime::Plan plan(*engine.model, plan_options(4));
  for (const int layer : {0, 1, 2, 4, 5}) {
    CHECK(std::string(plan.kernel(layer, KVQ_KERNEL_WRITE).name) == "quantize_write_generic_bf16");
    const kvq_kernel_info decode = plan.kernel(layer, KVQ_KERNEL_DECODE);
    CHECK(std::string(decode.name) == "decode_generic_bf16");
    CHECK(decode.tuned == 0);
    CHECK(plan.kernel(layer, KVQ_KERNEL_DEQUANTIZE).tuned == 0);
    check_growth(engine, artifact, layer, windows);
  }
}

TEST_CASE("A step or fork that throws leaves sequences as they were", "[runtime][gpu][api][emulated]") {
  const Windows windows{.sink_tokens = 4, .recent_tokens = 16};
  const Artifact artifact = served_artifact(windows, 0);
  const Engine engine(artifact);
  Stream s;
  Checked checked(engine, artifact, 0, windows, s.stream);
  const int a = checked.create(1);
  checked.step({{a, 100}});
  const int b = checked.fork(a, s.stream), c = checked.fork(a, s.stream);
  checked.step({{a, 1}});  // the other sequences still share their last page
  runtime::PagedCache& cache = checked.runner.cache;
  const auto state = [&] {
    return std::vector<std::int64_t>{cache.allocator().length(a), cache.allocator().length(b),
                                     cache.allocator().uncommitted(a), cache.allocator().free_pages(),
                                     cache.allocator().pages(b).back()};
  };
  const std::vector<std::int64_t> before = state();
  // A wait for a stream that is being captured fails, and invalidates the capture.
  check_cuda(cudaStreamBeginCapture(s.stream, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
  CHECK_THROWS(cache.step(std::vector<Growth>{{a, 70}, {b, 1}}, s.stream));
  CHECK(state() == before);
  CHECK_THROWS(cache.fork(a, s.stream));
  CHECK(state() == before);
  cudaGraph_t graph = nullptr;
  CHECK(cudaStreamEndCapture(s.stream, &graph) != cudaSuccess);
  cudaGetLastError();
  checked.step({{a, 70}, {b, 1}});
  CHECK(checked.fork(a, s.stream) == 3);
  checked.step({{c, 2}});
}

TEST_CASE("A rank of a tensor parallel group attends with its heads", "[runtime][gpu][api][emulated]") {
  const bool transformed = GENERATE(false, true);
  const Windows windows{.sink_tokens = 4, .recent_tokens = 16};
  const Artifact artifact = transformed ? transformed_artifact(windows, 0) : served_artifact(windows, 0);
  const Engine whole(artifact);
  const int layer = transformed ? GENERATE(0, 1) : 0;
  LayerRunner all(whole, layer, {.num_pages = 8, .max_sequences = 1, .max_tokens = 200}, nullptr);
  all.rows[all.cache.create()] = 9;
  const std::vector<std::uint16_t> expected = all.step(std::vector<Growth>{{0, 111}});
  for (const int size : {2, 8})
    for (int rank = 0; rank < size; ++rank) {
      CAPTURE(size, rank);
      auto options = runtime::init<kvq_model_options>();
      options.tp_rank = rank, options.tp_size = size;
      const Engine part(artifact, options);
      LayerRunner runner(part, layer, {.num_pages = 8, .max_sequences = 1, .max_tokens = 200}, nullptr);
      REQUIRE(runner.info.num_q_heads == 16 / size);
      const int sequence = runner.cache.create();
      // The rank's part of the same rows.
      std::vector<std::uint16_t> k, v;
      const auto cut = [](const std::vector<std::uint16_t>& x, int first, int count) {
        return std::vector<std::uint16_t>(x.begin() + first * 128, x.begin() + (first + count) * 128);
      };
      for (int t = 0; t < 111; ++t) {
        const auto one_k = cut(all.key(9, t), runner.info.first_kv_head, runner.info.num_kv_heads);
        const auto one_v = cut(all.value(9, t), runner.info.first_kv_head, runner.info.num_kv_heads);
        k.insert(k.end(), one_k.begin(), one_k.end()), v.insert(v.end(), one_v.begin(), one_v.end());
      }
      const DeviceMemory d_k = to_device<std::uint16_t>(k, nullptr), d_v = to_device<std::uint16_t>(v, nullptr);
      const DeviceMemory q =
          to_device<std::uint16_t>(cut(all.query(9, 111), runner.info.first_q_head, runner.info.num_q_heads), nullptr);
      REQUIRE(runner.cache.step(std::vector<Growth>{{sequence, 111}}, nullptr));
      const runtime::Plan plan(*part.model, plan_options(1));
      const DeviceMemory workspace(plan.workspace_bytes(KVQ_KERNEL_DECODE)),
          out(static_cast<std::size_t>(16 / size) * 256);
      auto error = runtime::init<kvq_error>();
      kvq_write_args w = runner.cache.write_args();
      w.k = d_k.get(), w.v = d_v.get();
      expect_ok(plan.write(runner.cache.handle(), layer, w, nullptr, &error), error);
      kvq_decode_args d = runner.cache.decode_args();
      d.q = q.get(), d.out = out.get(), d.workspace = workspace.get(), d.workspace_bytes = workspace.bytes();
      expect_ok(plan.decode(runner.cache.handle(), layer, d, nullptr, &error), error);
      std::vector<std::uint16_t> found(static_cast<std::size_t>(16 / size) * 128);
      to_host<std::uint16_t>(out, found, nullptr);
      const std::vector<float> mine = floats(found),
                               theirs = floats(cut(expected, runner.info.first_q_head, runner.info.num_q_heads));
      CHECK(relative_error(mine, std::vector<double>(theirs.begin(), theirs.end())) <
            4e-3);  // not equal, because the work is split elsewhere
    }
}

TEST_CASE("Two streams and two caches at once do not meet", "[runtime][gpu][api]") {
  const Artifact artifact = served_artifact({.sink_tokens = 4, .recent_tokens = 32}, 0);
  const Engine engine(artifact);
  const auto fresh = [&](int layer, std::uint64_t seed, cudaStream_t stream) {
    auto runner = std::make_unique<LayerRunner>(
        engine, layer, runtime::PagedCacheOptions{.num_pages = 200, .max_sequences = 3, .max_tokens = 4000}, stream);
    for (int i = 0; i < 3; ++i) runner->rows[runner->cache.create()] = seed + static_cast<std::uint64_t>(i);
    return runner;
  };
  const std::vector<Growth> batch = {{0, 2000}, {1, 7}, {2, 900}};
  Stream a, b;
  const auto first = fresh(0, 1, a.stream), second = fresh(2, 50, b.stream);
  const auto alone_first = fresh(0, 1, nullptr)->step(batch), alone_second = fresh(2, 50, nullptr)->step(batch);
  REQUIRE(first->begin(batch));
  REQUIRE(second->begin(batch));
  for (int i = 0; i < 20; ++i) first->run(), second->run();
  CHECK(first->results() == alone_first);
  CHECK(second->results() == alone_second);
}

TEST_CASE("A whole step can be captured and replayed with other lengths", "[runtime][gpu][api][emulated]") {
  const Windows windows{.sink_tokens = 4, .recent_tokens = 24};
  const Artifact artifact = served_artifact(windows, 0);
  const Engine engine(artifact);
  Stream s;
  // Two caches take the same steps: one by direct calls, one by replaying a graph of a step of one token.
  LayerRunner eager(engine, 0, {.num_pages = 8, .max_sequences = 1, .max_tokens = 100}, s.stream);
  LayerRunner replayed(engine, 0, {.num_pages = 8, .max_sequences = 1, .max_tokens = 100}, s.stream);
  for (LayerRunner* runner : {&eager, &replayed}) {
    runner->rows[runner->cache.create()] = 3;
    runner->step(std::vector<Growth>{{0, 60}});
  }

  const runtime::Plan plan(*engine.model, plan_options(1));
  const DeviceMemory workspace(plan.workspace_bytes(KVQ_KERNEL_DECODE));
  const DeviceMemory k(4 * 256), v(4 * 256), q(16 * 256), out(16 * 256), slot(8), window(8);
  const DeviceMemory length = to_device<std::int32_t>(std::vector<std::int32_t>{61}, s.stream),
                     indptr = to_device<std::int32_t>(std::vector<std::int32_t>{0, 1}, s.stream);
  // Pages for all further tokens.
  std::vector<std::int32_t> pages(8);
  std::iota(pages.begin(), pages.end(), 0);
  const DeviceMemory table = to_device<std::int32_t>(pages, s.stream),
                     slots = to_device<std::int32_t>(std::vector<std::int32_t>{0}, s.stream),
                     ids = to_device<std::uint64_t>(std::vector<std::uint64_t>{1}, s.stream);
  REQUIRE(replayed.cache.allocator().pages(0)[0] == 0);
  auto error = runtime::init<kvq_error>();
  auto sequences = runtime::init<kvq_sequences>();
  sequences.batch = 1, sequences.seq_lens = length.get<std::int32_t>();
  sequences.page_table = table.get<std::int32_t>(), sequences.page_table_stride = 8;
  sequences.sink_slots = sequences.ring_slots = slots.get<std::int32_t>();
  sequences.sequence_ids = ids.get<std::uint64_t>();
  const auto enqueue = [&] {
    auto a = runtime::init<kvq_step_args>();
    a.sequences = &sequences, a.num_tokens = 1, a.token_indptr = indptr.get<std::int32_t>();
    a.slot_mapping = slot.get<std::int64_t>(), a.window_mapping = window.get<std::int64_t>();
    expect_ok(replayed.cache.handle().step(a, s.stream, &error), error);
    auto w = runtime::init<kvq_write_args>();
    w.num_tokens = 1, w.k = k.get(), w.v = v.get(), w.slot_mapping = a.slot_mapping,
    w.window_mapping = a.window_mapping;
    expect_ok(plan.write(replayed.cache.handle(), 0, w, s.stream, &error), error);
    auto d = runtime::init<kvq_decode_args>();
    d.sequences = &sequences, d.q = q.get(), d.out = out.get();
    d.workspace = workspace.get(), d.workspace_bytes = workspace.bytes();
    expect_ok(plan.decode(replayed.cache.handle(), 0, d, s.stream, &error), error);
  };
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  check_cuda(cudaStreamBeginCapture(s.stream, cudaStreamCaptureModeGlobal), "capture");
  enqueue();
  check_cuda(cudaStreamEndCapture(s.stream, &graph), "capture");
  check_cuda(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  const auto put = [&](const DeviceMemory& to, const auto& values) {
    check_cuda(cudaMemcpy(to.get(), values.data(), values.size() * sizeof values[0], cudaMemcpyHostToDevice),
               "cudaMemcpy");
  };
  for (int position = 60; position < 100; ++position) {
    put(k, eager.key(3, position)), put(v, eager.value(3, position)), put(q, eager.query(3, position + 1));
    put(length, std::vector<std::int32_t>{position + 1});
    check_cuda(cudaGraphLaunch(exec, s.stream), "launch");
    std::vector<std::uint16_t> found(16 * kDim);
    to_host<std::uint16_t>(out, found, s.stream);
    CAPTURE(position);
    CHECK(found == eager.step(std::vector<Growth>{{0, 1}}));
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
}

TEST_CASE("Cached rows come back as the model gave them, and chunks attend over them",
          "[runtime][gpu][api][emulated]") {
  const Windows windows{.sink_tokens = 6, .recent_tokens = 40};
  const bool transformed = GENERATE(false, true);
  const Artifact artifact = transformed ? transformed_artifact(windows, 0) : served_artifact(windows, 0);
  const Engine engine(artifact);
  constexpr int kPrefix = 170, kChunk = 19;
  for (const int layer : transformed ? std::vector{0, 1, 2, 3} : std::vector{0, 1, 2, 3, 4, 5}) {
    CAPTURE(transformed, layer);
    const LayerPlan& plan = artifact.layers[static_cast<std::size_t>(layer)];
    LayerRunner runner(engine, layer, {.num_pages = 8, .max_sequences = 1, .max_tokens = 200}, nullptr);
    runner.rows[runner.cache.create()] = 5;
    runner.step(std::vector<Growth>{{0, kPrefix}});
    Expected expected;
    for (int t = 0; t < kPrefix; ++t) expected.grow(plan, floats(runner.key(5, t)), floats(runner.value(5, t)));
    auto error = runtime::init<kvq_error>();

    const runtime::Plan kernels(*engine.model, plan_options(1, kChunk, kPrefix + kChunk));
    const DeviceMemory k(kPrefix * 1024), v(kPrefix * 1024),
        rows_indptr = to_device<std::int32_t>(std::vector<std::int32_t>{0, kPrefix}, nullptr);
    auto d = runtime::init<kvq_dequantize_args>();
    d.sequences = &runner.cache.sequences(), d.num_rows = kPrefix, d.out_indptr = rows_indptr.get<std::int32_t>();
    d.k = k.get(), d.v = v.get();
    expect_ok(kernels.dequantize(runner.cache.handle(), layer, d, nullptr, &error), error);
    std::vector<std::uint16_t> rows(kPrefix * 512);
    for (const Side side : kSides) {
      to_host<std::uint16_t>(side == Side::v ? v : k, rows, nullptr);
      std::vector<double> wanted;
      for (int t = 0; t < kPrefix; ++t) {
        const ExpectedRow& row = (side == Side::v ? expected.v : expected.k)[static_cast<std::size_t>(t)];
        const bool exact = t < windows.sink_tokens || t >= kPrefix - windows.recent_tokens;
        wanted.insert(wanted.end(), (exact ? row.exact : row.coded).begin(), (exact ? row.exact : row.coded).end());
      }
      CHECK(relative_error(floats(rows), wanted) < 8e-3);
    }

    std::vector<std::uint16_t> new_q, new_k, new_v;
    for (int t = kPrefix; t < kPrefix + kChunk; ++t) {
      const auto one_q = runner.query(5, t), one_k = runner.key(5, t), one_v = runner.value(5, t);
      new_q.insert(new_q.end(), one_q.begin(), one_q.end());
      new_k.insert(new_k.end(), one_k.begin(), one_k.end()), new_v.insert(new_v.end(), one_v.begin(), one_v.end());
    }
    const DeviceMemory d_q = to_device<std::uint16_t>(new_q, nullptr), d_k = to_device<std::uint16_t>(new_k, nullptr),
                       d_v = to_device<std::uint16_t>(new_v, nullptr);
    const DeviceMemory indptr = to_device<std::int32_t>(std::vector<std::int32_t>{0, kChunk}, nullptr);
    const DeviceMemory workspace(kernels.workspace_bytes(KVQ_KERNEL_PREFILL)), out(kChunk * 4096);
    auto p = runtime::init<kvq_prefill_args>();
    p.sequences = &runner.cache.sequences(), p.num_tokens = kChunk, p.q_indptr = indptr.get<std::int32_t>();
    p.q = d_q.get(), p.k = d_k.get(), p.v = d_v.get(), p.out = out.get();
    p.workspace = workspace.get(), p.workspace_bytes = workspace.bytes();
    expect_ok(kernels.prefill(runner.cache.handle(), layer, p, nullptr, &error), error);
    std::vector<std::uint16_t> found(kChunk * 2048);
    to_host<std::uint16_t>(out, found, nullptr);
    for (int i = 0; i < kChunk; ++i) {
      CAPTURE(i);
      expected.k.emplace_back(floats(runner.key(5, kPrefix + i))),
          expected.v.emplace_back(floats(runner.value(5, kPrefix + i)));
      const std::vector<float> mine = floats(std::span(found).subspan(static_cast<std::size_t>(i) * 2048, 2048));
      CHECK(relative_error(mine,
                           attend_expected(plan, windows, expected, floats(runner.query(5, kPrefix + i)), kPrefix)) <
            (transformed ? 2e-2 : 1e-2));  // transforms: larger scores, of 16-bit keys
    }
    --p.workspace_bytes;
    CHECK(kernels.prefill(runner.cache.handle(), layer, p, nullptr, &error) == KVQ_INVALID_ARGUMENT);
    CHECK_THAT(error.message, Contains("expected a workspace of"));
    d.flags = 4;
    CHECK(kernels.dequantize(runner.cache.handle(), layer, d, nullptr, &error) == KVQ_INVALID_ARGUMENT);
    CHECK_THAT(error.message, Contains("unknown bits in 0x4"));
  }
}

TEST_CASE("Calls that cannot be are refused before anything is launched", "[runtime][gpu][api][emulated]") {
  const Engine engine(served_artifact({.sink_tokens = 4, .recent_tokens = 16}, 0));
  LayerRunner runner(engine, 0, {.num_pages = 8, .max_sequences = 2, .max_tokens = 100}, nullptr);
  runner.cache.create();
  REQUIRE(runner.begin(std::vector<Growth>{{0, 30}}));
  const runtime::Plan plan(*engine.model, plan_options(2)), without(*engine.model, runtime::init<kvq_plan_options>());
  const DeviceMemory workspace(plan.workspace_bytes(KVQ_KERNEL_DECODE)), rows(1 << 20);
  auto error = runtime::init<kvq_error>();
  const auto decode_refusal = [&](int layer, auto change) {
    struct : kvq_decode_args, kvq_sequences {
    } d{runner.cache.decode_args(), runner.cache.sequences()};
    d.kvq_decode_args::sequences = &d;
    d.q = d.out = rows.get(), d.workspace = workspace.get(), d.workspace_bytes = workspace.bytes();
    change(d);
    CHECK(plan.decode(runner.cache.handle(), layer, d, nullptr, &error) == KVQ_INVALID_ARGUMENT);
    return std::string(error.message);
  };
  CHECK_THAT(decode_refusal(0, [](auto& d) { d.batch = 3; }), Contains("batch is 3, the plan's max_batch 2"));
  CHECK_THAT(decode_refusal(0, [](auto& d) { d.batch = -1; }), Contains("batch is -1"));
  CHECK_THAT(decode_refusal(0, [](auto& d) { --d.workspace_bytes; }), Contains("expected a workspace of"));
  CHECK_THAT(decode_refusal(0, [](auto& d) { d.sink_slots = nullptr; }), Contains("4 sink tokens need sink_slots"));
  CHECK_THAT(decode_refusal(0, [](auto& d) { d.ring_slots = nullptr; }), Contains("16 recent tokens need ring_slots"));
  CHECK_THAT(decode_refusal(0, [](auto& d) { d.softmax_scale = -1.0f; }), Contains("softmax_scale is -1"));
  CHECK_THAT(decode_refusal(0, [](auto& d) { d.sliding_window = -2; }), Contains("sliding_window is -2"));
  CHECK_THAT(decode_refusal(0, [](auto& d) { d.sequences = nullptr; }), Contains("sequences must not be null"));
  CHECK_THAT(decode_refusal(0, [](auto& d) { d.q = nullptr; }), Contains("must not be null"));
  CHECK_THAT(decode_refusal(0, [](auto& d) { d.page_table_stride = 0; }), Contains("page_table_stride is 0"));
  CHECK_THAT(decode_refusal(6, [](auto&) {}), Contains("layer: expected 0 to 5 (of the cache), found 6"));
  const auto write_refusal = [&](int layer, auto change) {
    kvq_write_args w = runner.cache.write_args();
    w.k = w.v = rows.get();
    change(w);
    CHECK(plan.write(runner.cache.handle(), layer, w, nullptr, &error) != KVQ_OK);
    return std::string(error.message);
  };
  CHECK_THAT(write_refusal(0, [](auto& w) { w.window_mapping = nullptr; }), Contains("need a window_mapping"));
  CHECK_THAT(write_refusal(0, [](auto& w) { w.num_tokens = -1; }), Contains("-1 tokens"));
  CHECK_THAT(write_refusal(0, [](auto& w) { w.k_token_stride = 8; }), Contains("k: rows"));
  // The device model's own memory is checked, too.
  kvq_device_model* device_model = nullptr;
  CHECK(kvq_model_upload(engine.model->get(), engine.memory.get(), engine.memory.bytes() - 1, nullptr, &device_model,
                         &error) == KVQ_INVALID_ARGUMENT);
  CHECK_THAT(error.message, Contains("bytes of memory"));
  // Pools are checked, too.
  const auto pools_refusal = [&](auto change) {
    std::vector<kvq_layer_pools> pools(6, runtime::init<kvq_layer_pools>());
    for (kvq_layer_pools& p : pools) p.pages = p.sinks = p.rings = rows.get();
    auto options = runtime::init<kvq_cache_options>();
    options.num_pages = options.num_sink_slots = options.num_ring_slots = 1;
    change(pools, options);
    kvq_cache* cache = nullptr;
    CHECK(kvq_cache_create(engine.device_model->get(), &options, pools.data(), static_cast<std::int32_t>(pools.size()),
                           workspace.get(), workspace.bytes(), nullptr, &cache, &error) == KVQ_INVALID_ARGUMENT);
    return std::string(error.message);
  };
  CHECK_THAT(pools_refusal([](auto&, auto& o) { o.num_pages = 0; }),
             Contains("num_pages: expected 1 or more, found 0"));
  CHECK_THAT(pools_refusal([](auto&, auto& o) { o.num_sink_slots = 0; }),
             Contains("num_sink_slots: expected 1 or more"));
  CHECK_THAT(pools_refusal([](auto&, auto& o) { o.num_ring_slots = -1; }), Contains("num_ring_slots: expected 1"));
  CHECK_THAT(pools_refusal([](auto&, auto& o) { o.flags = 2; }), Contains("unknown bits in 0x2"));
  CHECK_THAT(pools_refusal([](auto& pools, auto&) { pools.pop_back(); }),
             Contains("expected pools of 6 layers, found 5"));
  CHECK_THAT(pools_refusal([](auto& pools, auto&) { pools[3].pages = nullptr; }),
             Contains("layer 3: pages must be there"));
  CHECK_THAT(pools_refusal([](auto& pools, auto&) { pools[3].sinks = nullptr; }),
             Contains("layer 3: 4 sink tokens need"));
  CHECK_THAT(pools_refusal([](auto& pools, auto&) { pools[3].rings = nullptr; }),
             Contains("layer 3: 16 recent tokens"));
  CHECK_THAT(pools_refusal([](auto& pools, auto&) { pools[4].page_stride = 16; }),
             Contains("layer 4: page_stride: expected a"));
  CHECK_THAT(pools_refusal([](auto& pools, auto&) { pools[4].page_stride = std::int64_t{1} << 32; }),
             Contains("layer 4: page_stride: expected less than 2^32 bytes, found 4294967296"));
  CHECK_THROWS_WITH(runner.cache.step(std::vector<Growth>{{0, 101}}, nullptr),
                    Contains("101 tokens, there is room for 2 and 100"));
  for (int i = 0; i < 4; ++i) REQUIRE(runner.cache.step(std::vector<Growth>{{0, 100}}, nullptr));
  CHECK_FALSE(runner.cache.step(std::vector<Growth>{{0, 100}}, nullptr));  // 8 pages of 64 tokens
  CHECK(runner.cache.allocator().length(0) == 430);
}
