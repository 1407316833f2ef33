#include "api_expected.h"
#include "api_rig.h"
#include "slow_writer.h"

#include "support/served_artifact.h"

#include <catch2/catch.hpp>

#include <cstddef>
#include <vector>

/// Programmatic dependent launch: kernels of write and decode start while the stream's kernel before them still runs.
/// That kernel is slow here (slow_writer.h).
namespace kvq::test {

namespace {

/// Memory that holds garbage until a slow writer puts its contents there.
class LateMemory {
 public:
  LateMemory(void* to, std::size_t bytes, int garbage) : to_(static_cast<std::byte*>(to)), good_(bytes) {
    check_cuda(cudaMemcpy(good_.get(), to, bytes, cudaMemcpyDeviceToDevice), "cudaMemcpy");
    check_cuda(cudaMemset(to, garbage, bytes), "cudaMemset");
  }
  LateWrite late() const { return {to_, good_.get(), good_.bytes()}; }

 private:
  std::byte* to_;
  DeviceMemory good_;
};

std::vector<std::byte> bytes_at(const void* at, std::size_t count) {
  std::vector<std::byte> bytes(count);
  check_cuda(cudaMemcpy(bytes.data(), at, count, cudaMemcpyDeviceToHost), "cudaMemcpy");
  return bytes;
}

template <typename T>
T* writable(const T* pointer) {
  return const_cast<T*>(pointer);
}

/// A layer of served_artifact(). With trellis codes it is written by the generic kernel, and decoded by a tuned one.
struct CodedLayer {
  int layer;
  bool trellis;

  Artifact artifact() const {
    Artifact artifact = served_artifact({.sink_tokens = 4, .recent_tokens = 24}, 0);
    LayerPlan& plan = artifact.layers[static_cast<std::size_t>(layer)];
    if (trellis)
      for (TensorPlan* side : {&plan.k, &plan.v.value()}) {
        side->clip_ratio.clear();
        side->coder = TrellisCoder{
            .bits = 2,
            .group_size = 128,
            .taps = {
                {.bits = 2, .memory = 1, .search = TrellisSearch::integer, .theta = {1.48f, 0.92f, -0.79f, 0.99f}}}};
      }
    return artifact;
  }
};
constexpr CodedLayer kHadamard = {0, false}, kDense = {4, false}, kTrellis = {0, true};

}  // namespace

TEST_CASE("Write and decode wait for a slow kernel before them", "[runtime][gpu][api][emulated]") {
  const CodedLayer coded = GENERATE(kHadamard, kDense, kTrellis);
  const Engine engine(coded.artifact());
  const int layer = coded.layer;
  const std::vector<Growth> batch = {{0, 90}, {1, 300}};
  LayerRunner runner(engine, layer, {.num_pages = 16, .max_sequences = 2, .max_tokens = 400}, nullptr);
  runner.rows = {{runner.cache.create(), 1}, {runner.cache.create(), 2}};
  const std::vector<std::uint16_t> expected = runner.step(batch);
  const kvq_sequences s = runner.cache.sequences();
  const auto pages = static_cast<std::size_t>(16 * runner.info.page_bytes),
             rings = static_cast<std::size_t>(2 * runner.info.ring_slot_bytes);
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreate(&stream), "cudaStreamCreate");
  const auto after_slow = [&](const std::vector<const LateMemory*>& memory, auto&& call) {
    std::vector<LateWrite> late;
    for (const LateMemory* m : memory) late.push_back(m->late());
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    run_slow_writer(late, stream);
    call();
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  };
  auto error = runtime::init<kvq_error>();

  // Decode: lengths, tables, pages and exact rows are late.
  const runtime::Plan plan(*engine.model, plan_options(2));
  const DeviceMemory workspace(plan.workspace_bytes(KVQ_KERNEL_DECODE)), out(expected.size() * 2);
  std::vector<std::uint16_t> q = runner.query(1, 90), more = runner.query(2, 300);
  q.insert(q.end(), more.begin(), more.end());
  const DeviceMemory queries = to_device<std::uint16_t>(q, nullptr);
  for (int i = 0; i < 3; ++i) {
    check_cuda(cudaMemset(out.get(), 0xFF, out.bytes()), "cudaMemset");
    const LateMemory lengths(writable(s.seq_lens), 8, 0x7F), table(writable(s.page_table), 7 * 4, 0x7F),
        slots(writable(s.ring_slots), 8, 0x7F), late_pages(runner.cache.pages(layer), pages, 0xFF),
        late_rings(runner.cache.rings(layer), rings, 0xFF), late_queries(queries.get(), queries.bytes(), 0xFF);
    auto d = runner.cache.decode_args();
    d.q = queries.get(), d.out = out.get(), d.workspace = workspace.get(), d.workspace_bytes = workspace.bytes();
    after_slow({&lengths, &table, &slots, &late_pages, &late_rings, &late_queries},
               [&] { expect_ok(plan.decode(runner.cache.handle(), layer, d, stream, &error), error); });
    std::vector<std::uint16_t> found(expected.size());
    to_host<std::uint16_t>(out, found, nullptr);
    CHECK(found == expected);
  }
  CHECK(runner.cache.handle().fault(nullptr).code == KVQ_FAULT_NONE);

  // Write: rows and mappings are late.
  std::vector<std::uint16_t> k, v;
  for (const auto& [sequence, tokens] : {std::pair{1, 90}, std::pair{2, 300}})
    for (int t = 0; t < tokens; ++t) {
      const auto key = runner.key(static_cast<std::uint64_t>(sequence), t),
                 value = runner.value(static_cast<std::uint64_t>(sequence), t);
      k.insert(k.end(), key.begin(), key.end()), v.insert(v.end(), value.begin(), value.end());
    }
  const DeviceMemory keys = to_device<std::uint16_t>(k, nullptr), values = to_device<std::uint16_t>(v, nullptr);
  kvq_write_args w = runner.cache.write_args();
  w.k = keys.get(), w.v = values.get();
  const auto clear = [&] {
    check_cuda(cudaMemset(runner.cache.pages(layer), 0, pages), "cudaMemset");
    check_cuda(cudaMemset(runner.cache.rings(layer), 0, rings), "cudaMemset");
  };
  clear();
  expect_ok(plan.write(runner.cache.handle(), layer, w, nullptr, &error), error);
  const std::vector<std::byte> wanted_pages = bytes_at(runner.cache.pages(layer), pages),
                               wanted_rings = bytes_at(runner.cache.rings(layer), rings);
  for (int i = 0; i < 3; ++i) {
    clear();
    const LateMemory late_keys(keys.get(), keys.bytes(), 0xFF), late_values(values.get(), values.bytes(), 0xFF),
        slots(writable(w.slot_mapping), 390 * 8, 0xFF), windows(writable(w.window_mapping), 390 * 8, 0xFF);
    after_slow({&late_keys, &late_values, &slots, &windows},
               [&] { expect_ok(plan.write(runner.cache.handle(), layer, w, stream, &error), error); });
    CHECK((bytes_at(runner.cache.pages(layer), pages) == wanted_pages));
    CHECK((bytes_at(runner.cache.rings(layer), rings) == wanted_rings));
  }
  check_cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

TEST_CASE("An append of one sequence waits for a slow kernel before it", "[runtime][gpu][api][emulated]") {
  const CodedLayer coded = GENERATE(kHadamard, kDense, kTrellis);
  const Engine engine(coded.artifact());
  const int layer = coded.layer;
  constexpr int kLength = 300;
  LayerRunner runner(engine, layer, {.num_pages = 8, .max_sequences = 1, .max_tokens = 400}, nullptr);
  runner.rows = {{runner.cache.create(), 1}};
  runner.step(std::vector<Growth>{{0, kLength - 1}});
  const std::vector<std::uint16_t> expected = runner.step(std::vector<Growth>{{0, 1}});
  const auto pages = static_cast<std::size_t>(8 * runner.info.page_bytes),
             rings = static_cast<std::size_t>(runner.info.ring_slot_bytes);
  const std::vector<std::byte> wanted_pages = bytes_at(runner.cache.pages(layer), pages),
                               wanted_rings = bytes_at(runner.cache.rings(layer), rings);
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreate(&stream), "cudaStreamCreate");
  const runtime::Plan plan(*engine.model, plan_options(1));
  const DeviceMemory workspace(plan.workspace_bytes(KVQ_KERNEL_DECODE)), out(expected.size() * 2),
      queries = to_device<std::uint16_t>(runner.query(1, kLength), nullptr),
      keys = to_device<std::uint16_t>(runner.key(1, kLength - 1), nullptr),
      values = to_device<std::uint16_t>(runner.value(1, kLength - 1), nullptr);
  const kvq_sequences s = runner.cache.sequences();
  const kvq_write_args w = runner.cache.write_args();
  const kvq_decode_args d = runner.cache.decode_args();
  auto a = runtime::init<kvq_append_args>();
  a.sequences = d.sequences, a.q = queries.get(), a.k = keys.get(), a.v = values.get(), a.out = out.get();
  a.slot_mapping = w.slot_mapping, a.window_mapping = w.window_mapping;
  a.workspace = workspace.get(), a.workspace_bytes = workspace.bytes();
  auto error = runtime::init<kvq_error>();
  // The second append of a pair uses the workspace while the first one may still run.
  for (int i = 0; i < 3; ++i) {
    check_cuda(cudaMemset(out.get(), 0xFF, out.bytes()), "cudaMemset");
    std::vector<LateWrite> late;
    const LateMemory memory[] = {{writable(s.seq_lens), 4, 0x7F},          {writable(s.page_table), 5 * 4, 0x7F},
                                 {writable(s.ring_slots), 4, 0x7F},        {runner.cache.pages(layer), pages, 0xFF},
                                 {runner.cache.rings(layer), rings, 0xFF}, {queries.get(), queries.bytes(), 0xFF},
                                 {keys.get(), keys.bytes(), 0xFF},         {values.get(), values.bytes(), 0xFF},
                                 {writable(w.slot_mapping), 8, 0xFF},      {writable(w.window_mapping), 8, 0xFF}};
    for (const LateMemory& m : memory) late.push_back(m.late());
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    run_slow_writer(late, stream);
    for (int call = 0; call < 2; ++call) expect_ok(plan.append(runner.cache.handle(), layer, a, stream, &error), error);
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    std::vector<std::uint16_t> found(expected.size());
    to_host<std::uint16_t>(out, found, nullptr);
    CHECK(found == expected);
    CHECK((bytes_at(runner.cache.pages(layer), pages) == wanted_pages));
    CHECK((bytes_at(runner.cache.rings(layer), rings) == wanted_rings));
  }
  CHECK(runner.cache.handle().fault(nullptr).code == KVQ_FAULT_NONE);
  check_cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

TEST_CASE("Plans without programmatic launch give the same results", "[runtime][gpu][api][emulated]") {
  const Artifact artifact = served_artifact({.sink_tokens = 4, .recent_tokens = 24}, 0);
  const Engine engine(artifact);
  LayerRunner runner(engine, 0, {.num_pages = 8, .max_sequences = 1, .max_tokens = 200}, nullptr);
  runner.rows = {{runner.cache.create(), 1}};
  const std::vector<std::uint16_t> expected = runner.step(std::vector<Growth>{{0, 150}});
  kvq_plan_options options = plan_options(1);
  options.flags = KVQ_PLAN_NO_OVERLAP;
  const runtime::Plan plan(*engine.model, options);
  const DeviceMemory workspace(plan.workspace_bytes(KVQ_KERNEL_DECODE)), out(expected.size() * 2),
      queries = to_device<std::uint16_t>(runner.query(1, 150), nullptr);
  auto d = runner.cache.decode_args();
  d.q = queries.get(), d.out = out.get(), d.workspace = workspace.get(), d.workspace_bytes = workspace.bytes();
  auto error = runtime::init<kvq_error>();
  expect_ok(plan.decode(runner.cache.handle(), 0, d, nullptr, &error), error);
  std::vector<std::uint16_t> found(expected.size());
  to_host<std::uint16_t>(out, found, nullptr);
  CHECK(floats(found).size() == floats(expected).size());
  std::vector<float> wanted = floats(expected);
  CHECK(relative_error(floats(found), std::vector<double>(wanted.begin(), wanted.end())) < 4e-3);
  options.flags = 2;
  CHECK_THROWS_WITH(runtime::Plan(*engine.model, options),
                    Catch::Matchers::Contains("plan: flags: unknown bits in 0x2"));
}

}  // namespace kvq::test
