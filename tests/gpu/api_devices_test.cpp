#include "api_expected.h"
#include "api_rig.h"

#include "support/served_artifact.h"

#include <catch2/catch.hpp>

#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

using namespace kvq;
using namespace kvq::test;
using Catch::Matchers::Contains;

namespace {

constexpr Windows kWindows = {.sink_tokens = 4, .recent_tokens = 24};
/// One layer has Hadamard blocks, one a dense rotation, whose kernel needs more than the default limit of shared
/// memory.
constexpr int kLayers[] = {0, 4};
const std::vector<int> kSteps = {150, 1, 1, 30, 1, 70, 1};

/// Makes a device current during its lifetime.
class Current {
 public:
  explicit Current(int device) {
    check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  ~Current() { cudaSetDevice(before_); }
  Current(const Current&) = delete;

 private:
  int before_ = 0;
};

/// A model, a cache and plans on the current device. Rows, hence results, differ between devices.
struct OnDevice {
  OnDevice(const Artifact& artifact, int layer)
      : engine(artifact), plan(artifact.layers[static_cast<std::size_t>(layer)]) {
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    check_cuda(cudaStreamCreate(&stream), "cudaStreamCreate");
    runner = std::make_unique<LayerRunner>(
        engine, layer, runtime::PagedCacheOptions{.num_pages = 16, .max_sequences = 1, .max_tokens = 400}, stream);
    runner->rows[runner->cache.create()] = static_cast<std::uint64_t>(10 + device);
  }
  ~OnDevice() { cudaStreamDestroy(stream); }

  bool begin(int tokens) { return runner->begin(std::vector<Growth>{{0, tokens}}); }

  /// Compares the result of the next step with the codec's.
  void check(int tokens, const std::vector<std::uint16_t>& found) {
    const std::uint64_t seed = runner->rows[0];
    const auto length = static_cast<std::int64_t>(expected.k.size()) + tokens;
    for (auto t = static_cast<std::int64_t>(expected.k.size()); t < length; ++t)
      expected.grow(plan, floats(runner->key(seed, t)), floats(runner->value(seed, t)));
    CAPTURE(device, plan.layer, length);
    REQUIRE(found.size() == 16 * kDim);
    const Comparison result =
        compare(floats(found), attend_expected(plan, kWindows, expected, floats(runner->query(seed, length))));
    CHECK(result.error <= result.allowed);
  }

  int device = 0;
  Engine engine;
  const LayerPlan& plan;
  cudaStream_t stream = nullptr;
  std::unique_ptr<LayerRunner> runner;
  Expected expected;
};

std::unique_ptr<OnDevice> on_device(int device, const Artifact& artifact, int layer) {
  const Current current(device);
  return std::make_unique<OnDevice>(artifact, layer);
}

/// Are there two devices? Prints a warning if not.
bool two_devices() {
  int count = 0;
  check_cuda(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  if (count < 2) WARN("skipped: needs two CUDA devices, found " << count);
  return count >= 2;
}

}  // namespace

TEST_CASE("Two threads work on a device each", "[runtime][gpu][api][devices][emulated]") {
  if (!two_devices()) return;
  const Artifact artifact = served_artifact(kWindows, 0);
  for (const int layer : kLayers) {
    const auto first = on_device(0, artifact, layer), second = on_device(1, artifact, layer);
    std::vector<std::vector<std::uint16_t>> found[2];
    std::exception_ptr failed[2];
    const auto work = [&](OnDevice& d) noexcept {
      try {
        const Current current(d.device);
        for (const int tokens : kSteps) found[d.device].push_back(d.runner->step(std::vector<Growth>{{0, tokens}}));
      } catch (...) {
        failed[d.device] = std::current_exception();
      }
    };
    std::thread one([&] { work(*first); }), other([&] { work(*second); });
    one.join(), other.join();
    for (const std::exception_ptr& failure : failed)
      if (failure) std::rethrow_exception(failure);
    for (OnDevice* d : {first.get(), second.get()})
      for (std::size_t i = 0; i < kSteps.size(); ++i) d->check(kSteps[i], found[d->device][i]);
  }
}

TEST_CASE("One thread switches between two devices that are both at work", "[runtime][gpu][api][devices]") {
  if (!two_devices()) return;
  const Artifact artifact = served_artifact(kWindows, 0);
  for (const int layer : kLayers) {
    const auto first = on_device(0, artifact, layer), second = on_device(1, artifact, layer);
    for (const int tokens : kSteps) {
      const auto on_both = [&](auto&& work) {
        for (OnDevice* d : {first.get(), second.get()}) {
          const Current current(d->device);
          work(*d);
        }
      };
      on_both([&](OnDevice& d) { REQUIRE(d.begin(tokens)); });
      for (int i = 0; i < 10; ++i) on_both([](OnDevice& d) { d.runner->run(); });
      on_both([&](OnDevice& d) { d.check(tokens, d.runner->results()); });
    }
  }
}

TEST_CASE("Golden rows on a device that is not the first", "[runtime][gpu][api][devices][emulated]") {
  if (!two_devices()) return;
  const Current current(1);
  const Engine engine(served_artifact({}, 20));
  for (const kvq_selftest_layer& layer : engine.model->selftest(nullptr)) {
    CAPTURE(layer.layer, layer.message);
    CHECK(layer.status == KVQ_OK);
  }
}

TEST_CASE("What belongs to one device is refused on another one", "[runtime][gpu][api][devices][emulated]") {
  if (!two_devices()) return;
  const Artifact artifact = served_artifact(kWindows, 0);
  const auto first = on_device(0, artifact, 0), second = on_device(1, artifact, 0);
  const auto started = [](OnDevice& d) {
    const Current current(d.device);
    REQUIRE(d.begin(100));
    d.runner->run();
    d.check(100, d.runner->results());
  };
  started(*first), started(*second);

  {
    // The cache is on device 0, and device 1 is current.
    const Current current(1);
    CHECK_THROWS_WITH(first->runner->run(),
                      Contains("invalid argument: write: the current device is 1, the cache is on 0"));
    CHECK_THROWS_WITH(first->begin(1), Contains("step: the current device is 1, the model is on 0"));
    CHECK_THROWS_WITH(runtime::PagedCache(*first->engine.model, *first->engine.device_model,
                                          {.num_pages = 16, .max_sequences = 1}, nullptr),
                      Contains("cache: the current device is 1, the model is on 0"));
  }
  // The plan is for device 1, the cache on device 0, which is current.
  auto error = runtime::init<kvq_error>();
  const auto refused = [&](kvq_status status, const std::string& call) {
    CHECK(status == KVQ_INVALID_ARGUMENT);
    CHECK(error.message == call + ": the plan was made on device 1, the cache is on 0");
  };
  const runtime::Plan plan = [&] {
    const Current current(1);
    return runtime::Plan(*second->engine.model, plan_options(1, 1, 1));
  }();
  const runtime::Cache& cache = first->runner->cache.handle();
  refused(plan.write(cache, 0, first->runner->cache.write_args(), nullptr, &error), "write");
  refused(plan.decode(cache, 0, first->runner->cache.decode_args(), nullptr, &error), "decode");
  refused(plan.prefill(cache, 0, runtime::init<kvq_prefill_args>(), nullptr, &error), "prefill");
  refused(plan.dequantize(cache, 0, runtime::init<kvq_dequantize_args>(), nullptr, &error), "dequantize");

  // The refused calls have changed nothing.
  for (OnDevice* d : {first.get(), second.get()}) {
    const Current current(d->device);
    REQUIRE(d->begin(1));
    d->runner->run();
    d->check(1, d->runner->results());
  }
}
