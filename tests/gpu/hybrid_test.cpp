#include "api_rig.h"

#include "support/served_artifact.h"

#include <kvq/core/dtype.h>

#include <catch2/catch.hpp>

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

/// Groups of layers with page tables of their own: layers with full attention beside one whose sliding window is within
/// the recent tokens, which keeps no pages. groups_test.cpp has groups in a PagedCache.
using namespace kvq;
using namespace kvq::test;
using Catch::Matchers::Contains;

namespace {

constexpr Windows kWindows = {.sink_tokens = 20, .recent_tokens = 40};
constexpr int kHeads = 16, kKvHeads = 4, kDim = 128, kPages = 8, kFull = 0, kSliding = 5;

/// One sequence in a cache whose sliding layer has pages, or none.
class Hybrid {
 public:
  /// @param change  of the layers' pools before the cache is made
  Hybrid(
      const Engine& engine, bool sliding_pages,
      const std::function<void(std::vector<kvq_layer_pools>&)>& change = [](auto&) {})
      : plan_(*engine.model, 1), workspace_(plan_.workspace_bytes(KVQ_KERNEL_DECODE)), sliding_pages_(sliding_pages) {
    auto extents = runtime::init<kvq_cache_options>();
    extents.num_pages = kPages, extents.num_sink_slots = extents.num_ring_slots = 1;
    std::vector<kvq_layer_pools> pools;
    for (int layer = 0; layer < 6; ++layer) {
      const kvq_layer_info info = engine.model->layer(layer);
      auto p = runtime::init<kvq_layer_pools>();
      if (layer != kSliding || sliding_pages) p.pages = take(kPages * info.page_bytes);
      p.sinks = take(info.sink_slot_bytes), p.rings = take(info.ring_slot_bytes);
      pools.push_back(p);
    }
    change(pools);
    const std::size_t bytes = engine.device_model->cache_bytes(extents);
    auto error = runtime::init<kvq_error>();
    expect_ok(kvq_cache_create(engine.device_model->get(), &extents, pools.data(), 6,
                               take(static_cast<std::int64_t>(bytes)), bytes, nullptr, &cache_, &error),
              error);
    table_ = to_device<std::int32_t>(std::vector<std::int32_t>{3, 0, 5, 1}, nullptr);
    no_table_ = to_device<std::int32_t>(std::vector<std::int32_t>(4, -1), nullptr);
    slot_ = to_device<std::int32_t>(std::vector<std::int32_t>{0}, nullptr);
  }
  ~Hybrid() { kvq_cache_destroy(cache_); }
  Hybrid(const Hybrid&) = delete;

  /// Appends tokens to both layers. @return  results of the full layer and of the sliding one
  std::vector<std::vector<std::uint16_t>> grow(int tokens, unsigned seed) {
    length_ += tokens;
    auto error = runtime::init<kvq_error>();
    const DeviceMemory length = to_device<std::int32_t>(std::vector<std::int32_t>{length_}, nullptr),
                       indptr = to_device<std::int32_t>(std::vector<std::int32_t>{0, tokens}, nullptr),
                       k = to_device<std::uint16_t>(random_rows(tokens, kKvHeads * kDim, seed), nullptr),
                       v = to_device<std::uint16_t>(random_rows(tokens, kKvHeads * kDim, seed + 1), nullptr),
                       q = to_device<std::uint16_t>(random_rows(1, kHeads * kDim, seed + 2), nullptr);
    std::vector<std::vector<std::uint16_t>> results;
    for (const int layer : {kFull, kSliding}) {
      const bool pages = layer == kFull || sliding_pages_;
      auto s = runtime::init<kvq_sequences>();
      s.batch = 1, s.seq_lens = length.get<std::int32_t>();
      s.page_table = (pages ? table_ : no_table_).get<std::int32_t>(), s.page_table_stride = 4;
      s.sink_slots = s.ring_slots = slot_.get<std::int32_t>();
      const DeviceMemory slots(static_cast<std::size_t>(tokens) * 8), windows(static_cast<std::size_t>(tokens) * 8),
          out(kHeads * kDim * 2);
      auto a = runtime::init<kvq_step_args>();
      a.sequences = &s, a.num_tokens = tokens, a.token_indptr = indptr.get<std::int32_t>();
      a.slot_mapping = slots.get<std::int64_t>(), a.window_mapping = windows.get<std::int64_t>();
      expect_ok(kvq_step_run(cache_, &a, nullptr, &error), error);
      auto w = runtime::init<kvq_write_args>();
      w.num_tokens = tokens, w.k = k.get(), w.v = v.get();
      w.slot_mapping = a.slot_mapping, w.window_mapping = a.window_mapping;
      expect_ok(kvq_write_run(plan_.get(), cache_, layer, &w, nullptr, &error), error);
      auto d = runtime::init<kvq_decode_args>();
      d.sequences = &s, d.q = q.get(), d.out = out.get();
      d.workspace = workspace_.get(), d.workspace_bytes = workspace_.bytes();
      if (wide_) d.sliding_window = -1;
      expect_ok(kvq_decode_run(plan_.get(), cache_, layer, &d, nullptr, &error), error);
      results.emplace_back(kHeads * kDim);
      to_host<std::uint16_t>(out, results.back(), nullptr);
    }
    return results;
  }
  kvq_cache* cache() const { return cache_; }
  std::int32_t fault() const {
    auto error = runtime::init<kvq_error>();
    auto found = runtime::init<kvq_fault>();
    expect_ok(kvq_fault_query(cache_, &found, nullptr, &error), error);
    return found.code;
  }
  /// From here on all layers see all tokens.
  void widen() { wide_ = true; }

 private:
  void* take(std::int64_t bytes) {
    memory_.emplace_back(static_cast<std::size_t>(bytes));
    check_cuda(cudaMemset(memory_.back().get(), 0xFF, memory_.back().bytes()), "cudaMemset");
    return memory_.back().get();
  }

  runtime::Plan plan_;
  DeviceMemory workspace_, table_, no_table_, slot_;
  std::vector<DeviceMemory> memory_ = {};
  kvq_cache* cache_ = nullptr;
  bool sliding_pages_, wide_ = false;
  int length_ = 0;
};

}  // namespace

TEST_CASE("A layer whose sliding window fits the recent rows needs no pages", "[runtime][gpu][api][emulated]") {
  const Engine engine(served_artifact(kWindows, 0));
  REQUIRE(engine.model->layer(kSliding).sliding_window == 33);
  Hybrid with(engine, true), without(engine, false);
  unsigned seed = 1;
  for (const int tokens : {150, 1, 1, 17, 1, 40}) {
    CAPTURE(tokens);
    CHECK(with.grow(tokens, seed) == without.grow(tokens, seed));
    seed += 3;
  }
  CHECK(with.fault() == KVQ_FAULT_NONE);
  CHECK(without.fault() == KVQ_FAULT_NONE);
  // A query that needs a token of the pages is a fault, and NaN.
  without.widen();
  const auto results = without.grow(1, seed);
  CHECK(without.fault() == KVQ_FAULT_PAGE);
  CHECK(std::isnan(bf16_to_float(results[1][0])));
  CHECK_FALSE(std::isnan(bf16_to_float(results[0][0])));
}

TEST_CASE("Layers that read tokens beyond their ring need pages", "[runtime][gpu][api][emulated]") {
  const Engine engine(served_artifact({.sink_tokens = 20, .recent_tokens = 32}, 0));
  CHECK_THROWS_WITH(Hybrid(engine, false),
                    Contains("layer 5: pages must be there, unless a sliding window of at most recent_tokens, 32"));
}

TEST_CASE("Pools of groups have sizes of their own, and pages are copied in one group",
          "[runtime][gpu][api][emulated]") {
  const Engine engine(served_artifact(kWindows, 0));
  const auto made = [&](auto change) {
    return Hybrid(engine, true, [&](std::vector<kvq_layer_pools>& pools) { change(pools); });
  };
  const auto second = [](std::int32_t group, std::int32_t num_pages) {
    return [=](std::vector<kvq_layer_pools>& p) { p[kSliding].group = group, p[kSliding].num_pages = num_pages; };
  };
  CHECK_THROWS_WITH(made(second(6, 0)), Contains("cache: layer 5: group: expected 0 to 5, found 6"));
  CHECK_THROWS_WITH(made(second(-1, 0)), Contains("cache: layer 5: group: expected 0 to 5, found -1"));
  CHECK_THROWS_WITH(made(second(1, 9)), Contains("cache: layer 5: num_pages: expected 0 to 8, found 9"));
  CHECK_THROWS_WITH(made(second(0, 4)), Contains("layer 5: num_pages: expected 8 as in layers of group 0 before"));

  std::byte* pages[2] = {};
  Hybrid hybrid(engine, true, [&](std::vector<kvq_layer_pools>& p) {
    second(2, 4)(p);
    pages[0] = static_cast<std::byte*>(p[kFull].pages), pages[1] = static_cast<std::byte*>(p[kSliding].pages);
  });
  hybrid.grow(100, 1);  // the table's pages are 3, 0, 5, 1: position 128 would be in page 5
  CHECK(hybrid.fault() == KVQ_FAULT_NONE);
  auto error = runtime::init<kvq_error>();
  auto args = runtime::init<kvq_copy_args>();
  const DeviceMemory from = to_device<std::int32_t>(std::vector<std::int32_t>{3}, nullptr),
                     to = to_device<std::int32_t>(std::vector<std::int32_t>{2}, nullptr);
  args.count = 1, args.from = from.get<std::int32_t>(), args.to = to.get<std::int32_t>();
  const auto page = [&](int layer, int number) {
    const auto bytes = static_cast<std::size_t>(engine.model->layer(layer ? kSliding : kFull).page_bytes);
    std::vector<std::byte> found(bytes);
    check_cuda(cudaMemcpy(found.data(), pages[layer] + static_cast<std::size_t>(number) * bytes, bytes,
                          cudaMemcpyDeviceToHost),
               "cudaMemcpy");
    return found;
  };
  for (const std::int32_t group : {2, 0}) {
    args.group = group;
    expect_ok(kvq_copy_run(hybrid.cache(), &args, nullptr, &error), error);
    CHECK((page(1, 2) == page(1, 3)));
    CHECK((page(0, 2) == page(0, 3)) == (group == 0));
  }
  for (const std::int32_t group : {-1, 3}) {
    args.group = group;
    CHECK(kvq_copy_run(hybrid.cache(), &args, nullptr, &error) == KVQ_INVALID_ARGUMENT);
    CHECK(std::string(error.message) == "copy: group: expected 0 to 2, found " + std::to_string(group));
  }
  args.group = 1;  // of no layer
  CHECK(kvq_copy_run(hybrid.cache(), &args, nullptr, &error) == KVQ_INVALID_ARGUMENT);
  CHECK(std::string(error.message) == "copy: the cache has no pages of this group");
  hybrid.grow(40, 2);  // page 5 is in the first group's pool alone
  CHECK(hybrid.fault() == KVQ_FAULT_SLOT_MAPPING);
}
