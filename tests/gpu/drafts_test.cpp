#include "api_rig.h"

#include "support/served_artifact.h"

#include <kvq/codec/golden_rows.h>
#include <kvq/core/dtype.h>

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

/// Several new tokens of a sequence, ranges of positions, merges and soft caps through the public interface. The
/// numbers themselves are checked by decode_test.cpp.
using namespace kvq;
using namespace kvq::test;
using Catch::Matchers::Contains;

namespace {

constexpr Windows kWindows = {.sink_tokens = 20, .recent_tokens = 40};
constexpr int kHeads = 16, kKvHeads = 4, kDim = 128, kMost = 6;

kvq_model_options drafts_options() {
  auto options = runtime::init<kvq_model_options>();
  options.max_step_tokens = kMost;
  return options;
}

/// Two sequences whose last tokens are new, in every layer's cache, and the rows of these tokens.
struct Drafts {
  explicit Drafts(const Artifact& artifact)
      : engine(artifact, drafts_options()),
        cache(*engine.model, *engine.device_model, {.num_pages = 16, .max_sequences = 2, .max_tokens = 400}, nullptr) {
    auto options = plan_options(2);
    one = std::make_unique<runtime::Plan>(*engine.model, options);
    options.max_new_tokens = kMost;
    several = std::make_unique<runtime::Plan>(*engine.model, options);
    workspace =
        DeviceMemory(std::max(one->workspace_bytes(KVQ_KERNEL_DECODE), several->workspace_bytes(KVQ_KERNEL_DECODE)));
    cache.create(), cache.create();
    write({{0, before[0]}, {1, before[1]}}, 1);
    write({{0, drafts[0]}, {1, drafts[1]}}, 2);
    q = to_device<std::uint16_t>(random_rows(tokens(), kHeads * kDim, 3), nullptr);
    q_indptr = to_device<std::int32_t>(std::vector<std::int32_t>{0, drafts[0], tokens()}, nullptr);
  }

  int tokens() const { return drafts[0] + drafts[1]; }
  int length(int sequence) const { return before[sequence] + drafts[sequence]; }

  /// A step with new rows, which are written in all layers.
  void write(const std::vector<Growth>& batch, unsigned seed) {
    int count = 0;
    for (const Growth& growth : batch) count += growth.tokens;
    k = to_device<std::uint16_t>(random_rows(count, kKvHeads * kDim, 10 * seed), nullptr);
    v = to_device<std::uint16_t>(random_rows(count, kKvHeads * kDim, 10 * seed + 1), nullptr);
    REQUIRE(cache.step(batch, nullptr));
    auto error = runtime::init<kvq_error>();
    for (int layer = 0; layer < engine.model->info().layer_count; ++layer) {
      kvq_write_args w = cache.write_args();
      w.k = k.get(), w.v = v.get();
      expect_ok(one->write(cache.handle(), layer, w, nullptr, &error), error);
    }
  }

  struct Result {
    std::vector<float> out, lse;
  };
  /// Runs `call` with arguments of so many rows.
  template <typename Args, typename Call>
  Result run(Args args, int rows, Call call) const {
    const DeviceMemory out(static_cast<std::size_t>(rows * kHeads * kDim) * 2),
        lse(static_cast<std::size_t>(rows * kHeads) * 4);
    args.out = out.get(), args.lse_natural = lse.get<float>();
    args.workspace = workspace.get(), args.workspace_bytes = workspace.bytes();
    auto error = runtime::init<kvq_error>();
    expect_ok(call(args, &error), error);
    std::vector<std::uint16_t> bits(static_cast<std::size_t>(rows * kHeads * kDim));
    to_host<std::uint16_t>(out, bits, nullptr);
    Result result{{}, std::vector<float>(static_cast<std::size_t>(rows * kHeads))};
    to_host<float>(lse, result.lse, nullptr);
    std::transform(bits.begin(), bits.end(), std::back_inserter(result.out), bf16_to_float);
    return result;
  }
  kvq_decode_args args() const {
    kvq_decode_args a = cache.decode_args();
    a.q = q.get(), a.q_indptr = q_indptr.get<std::int32_t>(), a.num_tokens = tokens();
    return a;
  }
  Result decode(int layer, const kvq_decode_args& a, int rows) const {
    const runtime::Plan& plan = a.q_indptr ? *several : *one;
    return run(a, rows, [&](const kvq_decode_args& args, kvq_error* error) {
      return plan.decode(cache.handle(), layer, args, nullptr, error);
    });
  }

  std::vector<int> before = {150, 3}, drafts = {5, 3};
  Engine engine;
  runtime::PagedCache cache;
  std::unique_ptr<runtime::Plan> one, several;
  DeviceMemory workspace, k, v, q, q_indptr;
};

/// Error of `found` relative to `expected`, over rows of results or of LSE.
double distance(const float* found, const float* expected, std::size_t count) {
  double error = 0.0, size = 0.0;
  for (std::size_t i = 0; i < count; ++i) {
    const double x = static_cast<double>(found[i]), y = static_cast<double>(expected[i]);
    error += (x - y) * (x - y), size += y * y;
  }
  return std::sqrt(error / std::max(size, 1e-30));
}

constexpr std::size_t kRow = kHeads * kDim;
constexpr double kRounding = 4e-3;  // both results are bfloat16

}  // namespace

TEST_CASE("Drafts see what queries one after the other would see", "[runtime][gpu][api][emulated]") {
  const Drafts d(served_artifact(kWindows, 0));
  for (const int layer : {0, 1, 3, 4, 5}) {
    CAPTURE(layer);
    const Drafts::Result all = d.decode(layer, d.args(), d.tokens());
    for (int i = 0; i < d.drafts[0]; ++i) {
      // Query i of both sequences alone, at the same lengths, with the later tokens out of range.
      std::vector<std::uint16_t> bits(static_cast<std::size_t>(d.tokens()) * kRow), own;
      to_host<std::uint16_t>(d.q, bits, nullptr);
      std::vector<std::int32_t> last;
      for (const int b : {0, 1}) {
        const int n = std::min(i, d.drafts[b] - 1);
        const auto from = bits.begin() + static_cast<std::ptrdiff_t>((b ? d.drafts[0] : 0) + n) * std::ptrdiff_t{kRow};
        own.insert(own.end(), from, from + std::ptrdiff_t{kRow});
        last.push_back(d.before[b] + n + 1);
      }
      const DeviceMemory q = to_device<std::uint16_t>(own, nullptr), behind = to_device<std::int32_t>(last, nullptr);
      kvq_decode_args a = d.cache.decode_args();
      a.q = q.get(), a.last = behind.get<std::int32_t>();
      if (layer == 5) {  // a sliding window goes by a query's own position
        const std::vector<std::int32_t> first = {std::max(0, last[0] - 33), std::max(0, last[1] - 33)};
        const DeviceMemory begin = to_device<std::int32_t>(first, nullptr);
        a.first = begin.get<std::int32_t>(), a.sliding_window = -1;
        const Drafts::Result alone = d.decode(layer, a, 2);
        CHECK(distance(&all.out[static_cast<std::size_t>(i) * kRow], alone.out.data(), kRow) < kRounding);
        continue;
      }
      const Drafts::Result alone = d.decode(layer, a, 2);
      for (const int b : {0, 1}) {
        const auto row = static_cast<std::size_t>((b ? d.drafts[0] : 0) + std::min(i, d.drafts[b] - 1));
        CAPTURE(i, b);
        CHECK(distance(&all.out[row * kRow], &alone.out[static_cast<std::size_t>(b) * kRow], kRow) < kRounding);
        CHECK(distance(&all.lse[row * kHeads], &alone.lse[static_cast<std::size_t>(b) * kHeads], kHeads) < 1e-4);
      }
    }
  }
}

TEST_CASE("A mask that is causal is no mask, and a tree hides its other branch", "[runtime][gpu][api][emulated]") {
  const Drafts d(served_artifact(kWindows, 0));
  const Drafts::Result causal = d.decode(0, d.args(), d.tokens());
  kvq_decode_args a = d.args();
  std::vector<std::uint32_t> masks = {1, 3, 7, 15, 31, 1, 3, 7};
  const DeviceMemory same = to_device<std::uint32_t>(masks, nullptr);
  a.token_masks = same.get<std::uint32_t>();
  const Drafts::Result masked = d.decode(0, a, d.tokens());
  CHECK(distance(masked.out.data(), causal.out.data(), masked.out.size()) < kRounding);
  // Token 2 is a second child of token 0: it does not see token 1, and only its own result changes.
  masks[2] = 5;
  const DeviceMemory tree = to_device<std::uint32_t>(masks, nullptr);
  a.token_masks = tree.get<std::uint32_t>();
  const Drafts::Result branched = d.decode(0, a, d.tokens());
  for (std::size_t t = 0; t < masks.size(); ++t) {
    CAPTURE(t);
    const double change = distance(&branched.out[t * kRow], &masked.out[t * kRow], kRow);
    if (t == 2)
      CHECK(change > kRounding);
    else
      CHECK(change == 0.0);
  }
}

TEST_CASE("An append of drafts is their write and their attention", "[runtime][gpu][api][emulated]") {
  Drafts d(served_artifact(kWindows, 0));
  const auto append = [&](int layer) {
    const kvq_write_args w = d.cache.write_args();
    auto a = runtime::init<kvq_append_args>();
    a.sequences = &d.cache.sequences(), a.q = d.q.get(), a.k = d.k.get(), a.v = d.v.get();
    a.slot_mapping = w.slot_mapping, a.window_mapping = w.window_mapping;
    a.q_indptr = d.q_indptr.get<std::int32_t>(), a.num_tokens = d.tokens();
    return d.run(a, d.tokens(), [&](const kvq_append_args& args, kvq_error* error) {
      return kvq_append_run(d.several->get(), d.cache.handle().get(), layer, &args, nullptr, error);
    });
  };
  for (const int layer : {0, 1, 4}) {
    CAPTURE(layer);
    const Drafts::Result before = d.decode(layer, d.args(), d.tokens());
    const DeviceMemory k = std::move(d.k), v = std::move(d.v);
    d.k = to_device<std::uint16_t>(random_rows(d.tokens(), kKvHeads * kDim, 50), nullptr);
    d.v = to_device<std::uint16_t>(random_rows(d.tokens(), kKvHeads * kDim, 51), nullptr);
    const Drafts::Result appended = append(layer);
    CHECK(distance(appended.out.data(), before.out.data(), before.out.size()) > kRounding);
    const Drafts::Result after = d.decode(layer, d.args(), d.tokens());
    CHECK(appended.out == after.out);
    CHECK(appended.lse == after.lse);
  }
}

TEST_CASE("Results over parts of the positions are merged into the result over all", "[runtime][gpu][api][emulated]") {
  const Drafts d(served_artifact(kWindows, 0));
  const std::vector<float> logits(kHeads, 0.5f);
  const DeviceMemory sinks = to_device<float>(logits, nullptr);
  for (const int layer : {0, 4}) {
    CAPTURE(layer);
    kvq_decode_args a = d.args();
    a.sink_logits = sinks.get<float>();
    const Drafts::Result whole = d.decode(layer, a, d.tokens());
    const int cuts[4] = {0, 77, 152, 1000};  // the last cut lies between drafts; sequence 1 has the first part only
    std::vector<std::uint16_t> states;
    std::vector<float> lse;
    for (int part = 0; part < 3; ++part) {
      const DeviceMemory first = to_device<std::int32_t>(std::vector<std::int32_t>(2, cuts[part]), nullptr),
                         last = to_device<std::int32_t>(std::vector<std::int32_t>(2, cuts[part + 1]), nullptr);
      a.first = first.get<std::int32_t>(), a.last = last.get<std::int32_t>();
      a.sink_logits = part == 0 ? sinks.get<float>() : nullptr;
      const Drafts::Result result = d.decode(layer, a, d.tokens());
      std::transform(result.out.begin(), result.out.end(), std::back_inserter(states), float_to_bf16);
      lse.insert(lse.end(), result.lse.begin(), result.lse.end());
      if (part > 0) CHECK(result.lse.back() == -std::numeric_limits<float>::infinity());
    }
    const DeviceMemory all = to_device<std::uint16_t>(states, nullptr), all_lse = to_device<float>(lse, nullptr),
                       out(whole.out.size() * 2), out_lse(whole.lse.size() * 4);
    auto m = runtime::init<kvq_merge_args>();
    m.num_states = 3, m.num_tokens = d.tokens(), m.num_heads = kHeads, m.head_dim = kDim;
    m.states = all.get(), m.state_lse_natural = all_lse.get<float>();
    m.out = out.get(), m.lse_natural = out_lse.get<float>();
    auto error = runtime::init<kvq_error>();
    expect_ok(kvq_merge_run(&m, nullptr, &error), error);
    std::vector<std::uint16_t> bits(whole.out.size());
    to_host<std::uint16_t>(out, bits, nullptr);
    std::vector<float> merged, merged_lse(whole.lse.size());
    std::transform(bits.begin(), bits.end(), std::back_inserter(merged), bf16_to_float);
    to_host<float>(out_lse, merged_lse, nullptr);
    CHECK(distance(merged.data(), whole.out.data(), merged.size()) < 2 * kRounding);
    CHECK(distance(merged_lse.data(), whole.lse.data(), merged_lse.size()) < 1e-4);
    m.head_dim = 12;
    CHECK(kvq_merge_run(&m, nullptr, &error) == KVQ_INVALID_ARGUMENT);
  }
}

TEST_CASE("New tokens that cannot be are faults, and their rows are NaN", "[runtime][gpu][api][faults][emulated]") {
  Drafts d(served_artifact(kWindows, 0));
  auto error = runtime::init<kvq_error>();
  const auto fault_of = [&](const std::vector<std::int32_t>& indptr, bool rows_are_nan) {
    const DeviceMemory wrong = to_device<std::int32_t>(indptr, nullptr);
    kvq_decode_args a = d.args();
    a.q_indptr = wrong.get<std::int32_t>();
    const Drafts::Result found = d.decode(0, a, d.tokens());
    auto fault = runtime::init<kvq_fault>();
    expect_ok(kvq_fault_query(d.cache.handle().get(), &fault, nullptr, &error), error);
    if (rows_are_nan) CHECK(std::isnan(found.out[0]));
    return fault.code;
  };
  CHECK(fault_of({0, 5, 8}, false) == KVQ_FAULT_NONE);
  CHECK(fault_of({0, 7, 8}, true) == KVQ_FAULT_PLAN);         // more than the plan's max_new_tokens
  CHECK(fault_of({0, 5, 9}, false) == KVQ_FAULT_NEW_TOKENS);  // more than the call's tokens
  CHECK(fault_of({-1, 5, 8}, false) == KVQ_FAULT_NEW_TOKENS);
  CHECK(fault_of({0, 5, 3}, false) == KVQ_FAULT_NEW_TOKENS);  // descends
  kvq_decode_args a = d.args();
  a.q_indptr = nullptr, a.token_masks = d.q_indptr.get<std::uint32_t>();
  CHECK(d.one->decode(d.cache.handle(), 0, a, nullptr, &error) == KVQ_INVALID_ARGUMENT);
  auto options = plan_options(2);
  options.max_new_tokens = 17;
  CHECK_THROWS_WITH(runtime::Plan(*d.engine.model, options), Contains("max_new_tokens: expected 0 to 16, found 17"));
}

TEST_CASE("Layers with capped logits are served, and pass their golden rows", "[runtime][gpu][api][emulated]") {
  Artifact artifact = served_artifact(kWindows, 5);
  artifact.model.num_layers = 2;
  artifact.layers.resize(2);
  artifact.golden.erase(artifact.golden.lower_bound(2), artifact.golden.end());
  for (int layer : {0, 1}) {
    LayerPlan& plan = artifact.layers[static_cast<std::size_t>(layer)];
    plan.geometry.logit_softcap = 0.4;
    artifact.golden[layer] = code_golden_rows(plan, GoldenTokens(artifact.golden.at(layer).tokens));
  }
  Drafts d(artifact);
  CHECK(d.engine.model->layer(1).logit_softcap == 0.4);
  std::vector<kvq_selftest_layer> layers(2, runtime::init<kvq_selftest_layer>());
  auto error = runtime::init<kvq_error>();
  CHECK(kvq_selftest(d.engine.model->get(), layers.data(), 2, nullptr, nullptr, &error) == KVQ_OK);
  CHECK(std::string(error.message) == "");

  // The model's cap is the default; a call may have another one, or none.
  kvq_decode_args a = d.args();
  const Drafts::Result capped = d.decode(0, a, d.tokens());
  a.logit_softcap = 0.4f;
  CHECK(d.decode(0, a, d.tokens()).out == capped.out);
  a.logit_softcap = -1.0f;
  const Drafts::Result plain = d.decode(0, a, d.tokens());
  CHECK(distance(plain.out.data(), capped.out.data(), plain.out.size()) > kRounding);
  a.logit_softcap = 1e6f;  // as good as none
  const Drafts::Result loose = d.decode(0, a, d.tokens());
  CHECK(distance(loose.out.data(), plain.out.data(), plain.out.size()) < kRounding);
  a.logit_softcap = std::numeric_limits<float>::quiet_NaN();
  CHECK(d.several->decode(d.cache.handle(), 0, a, nullptr, &error) == KVQ_INVALID_ARGUMENT);
}
