#include "api_expected.h"
#include "api_rig.h"

#include "support/served_artifact.h"

#include <kvq/core/dtype.h>

#include <catch2/catch.hpp>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

using namespace kvq;
using namespace kvq::test;

/// Mistakes of a caller that only the device sees: the sequence's results are NaN, the others' are what they were, the
/// first fault can be read, and nothing is read or written out of bounds (AddressSanitizer and compute-sanitizer look).
namespace {

constexpr Windows kWindows{.sink_tokens = 8, .recent_tokens = 20};
constexpr int kPages = 16, kSlots = 3, kStride = 6;
constexpr std::int32_t kFar = 0x3FFFFFFF;

/// Tables of three sequences, on the host.
struct Tables {
  std::vector<std::int32_t> lengths = {70, 33, 100}, pages, sinks = {2, 0, 1}, rings = {0, 1, 2},
                            exact_from = {0, 0, 0};
  std::vector<std::uint64_t> ids = {21, 22, 23};
  Tables() {
    for (int b = 0; b < 3; ++b)
      for (int i = 0; i < kStride; ++i) pages.push_back(i < 5 ? (b * 5 + i + 3) % kPages : kFar);
  }
  std::int32_t& page(int sequence, int i) { return pages[static_cast<std::size_t>(sequence * kStride + i)]; }
};

/// Tables on the device.
struct OnDevice {
  explicit OnDevice(const Tables& t)
      : lengths(to_device<std::int32_t>(t.lengths, nullptr)),
        pages(to_device<std::int32_t>(t.pages, nullptr)),
        sinks(to_device<std::int32_t>(t.sinks, nullptr)),
        rings(to_device<std::int32_t>(t.rings, nullptr)),
        exact_from(to_device<std::int32_t>(t.exact_from, nullptr)),
        ids(to_device<std::uint64_t>(t.ids, nullptr)) {
    s.batch = static_cast<std::int32_t>(t.lengths.size()), s.seq_lens = lengths.get<std::int32_t>();
    s.page_table = pages.get<std::int32_t>(), s.page_table_stride = kStride;
    s.sink_slots = sinks.get<std::int32_t>(), s.ring_slots = rings.get<std::int32_t>();
    s.exact_from = exact_from.get<std::int32_t>(), s.sequence_ids = ids.get<std::uint64_t>();
  }
  DeviceMemory lengths, pages, sinks, rings, exact_from, ids;
  kvq_sequences s = runtime::init<kvq_sequences>();
};

/// What a fault must look like.
struct Wanted {
  kvq_fault_code code;
  int sequence, layer;
  std::int64_t value;
};

/// One layer of a cache with three sequences.
class FaultRig {
 public:
  FaultRig(const Artifact& artifact, int layer)
      : engine_(artifact, small_pages()),
        layer_(layer),
        info_(engine_.model->layer(layer)),
        plan_(*engine_.model, plan_options(3, 6, 110)),
        workspace_(std::max(plan_.workspace_bytes(KVQ_KERNEL_DECODE), plan_.workspace_bytes(KVQ_KERNEL_PREFILL))) {
    auto options = runtime::init<kvq_cache_options>();
    options.num_pages = kPages, options.num_sink_slots = options.num_ring_slots = kSlots;
    std::vector<kvq_layer_pools> pools;
    for (int i = 0; i < engine_.model->info().layer_count; ++i) {
      const kvq_layer_info one = engine_.model->layer(i);
      auto p = runtime::init<kvq_layer_pools>();
      p.pages = take(one.page_bytes * kPages), p.sinks = take(one.sink_slot_bytes * kSlots);
      p.rings = take(one.ring_slot_bytes * kSlots);
      pools.push_back(p);
    }
    const std::size_t bytes = engine_.device_model->cache_bytes(options);
    cache_ = std::make_unique<runtime::Cache>(*engine_.device_model, options, pools,
                                              take(static_cast<std::int64_t>(bytes)), bytes, nullptr);
    fill();
  }

  const runtime::Cache& cache() const { return *cache_; }
  int layer() const { return layer_; }

  /// Results [B, Hq, D] of decode.
  std::vector<float> decode(const Tables& t, const std::vector<std::uint16_t>& q) {
    const OnDevice tables(t);
    const DeviceMemory queries = to_device<std::uint16_t>(q, nullptr);
    const DeviceMemory out(3 * row() * 2), lse(static_cast<std::size_t>(3 * info_.num_q_heads) * 4);
    auto d = runtime::init<kvq_decode_args>();
    d.sequences = &tables.s, d.q = queries.get(), d.out = out.get(), d.lse_natural = lse.get<float>();
    d.workspace = workspace_.get(), d.workspace_bytes = workspace_.bytes();
    ok(plan_.decode(*cache_, layer_, d, nullptr, &error_));
    lse_.resize(static_cast<std::size_t>(3 * info_.num_q_heads));
    to_host<float>(lse, lse_, nullptr);
    return read(out, 3 * row());
  }
  /// Attention of the last tokens of each sequence, `counts` of them. @param change  of the arguments
  template <typename Change>
  std::vector<float> prefill(const Tables& t, const std::vector<std::int32_t>& indptr, Change change) {
    const OnDevice tables(t);
    const std::size_t tokens = 12, kv = static_cast<std::size_t>(info_.num_kv_heads * info_.head_dim);
    const DeviceMemory q = to_device<std::uint16_t>(rows(tokens * row(), 5), nullptr),
                       k = to_device<std::uint16_t>(rows(tokens * kv, 6), nullptr),
                       v = to_device<std::uint16_t>(rows(tokens * kv, 7), nullptr), out(tokens * row() * 2);
    check_cuda(cudaMemset(out.get(), 0, out.bytes()), "cudaMemset");
    const DeviceMemory starts = to_device<std::int32_t>(indptr, nullptr);
    std::vector<std::int32_t> prefixes;
    for (std::size_t b = 0; b < 3; ++b) prefixes.push_back(t.lengths[b] - 2);
    change(prefixes);
    const DeviceMemory before = to_device<std::int32_t>(prefixes, nullptr);
    auto p = runtime::init<kvq_prefill_args>();
    p.sequences = &tables.s, p.prefix_lens = before.get<std::int32_t>();
    p.num_tokens = static_cast<std::int32_t>(tokens), p.q_indptr = starts.get<std::int32_t>();
    p.q = q.get(), p.k = k.get(), p.v = v.get(), p.out = out.get();
    p.workspace = workspace_.get(), p.workspace_bytes = workspace_.bytes();
    ok(plan_.prefill(*cache_, layer_, p, nullptr, &error_));
    return read(out, tokens * row());
  }
  std::vector<float> dequantize(const Tables& t, const std::vector<std::int32_t>& indptr) {
    const OnDevice tables(t);
    const std::size_t kv = static_cast<std::size_t>(info_.num_kv_heads * info_.head_dim);
    const DeviceMemory k(203 * kv * 2), v(203 * kv * 2), starts = to_device<std::int32_t>(indptr, nullptr);
    check_cuda(cudaMemset(k.get(), 0, k.bytes()), "cudaMemset");
    auto d = runtime::init<kvq_dequantize_args>();
    d.sequences = &tables.s, d.num_rows = 203, d.out_indptr = starts.get<std::int32_t>();
    d.k = k.get(), d.v = v.get();
    ok(plan_.dequantize(*cache_, layer_, d, nullptr, &error_));
    return read(k, 203 * kv);
  }
  struct Mappings {
    std::vector<std::int64_t> slots, windows;
  };
  Mappings step(const Tables& t, const std::vector<std::int32_t>& indptr, int num_tokens) {
    const OnDevice tables(t);
    const auto count = static_cast<std::size_t>(num_tokens);
    const DeviceMemory starts = to_device<std::int32_t>(indptr, nullptr), slots(count * 8), windows(count * 8);
    auto a = runtime::init<kvq_step_args>();
    a.sequences = &tables.s, a.num_tokens = num_tokens, a.token_indptr = starts.get<std::int32_t>();
    a.slot_mapping = slots.get<std::int64_t>(), a.window_mapping = windows.get<std::int64_t>();
    ok(cache_->step(a, nullptr, &error_));
    Mappings m{std::vector<std::int64_t>(count), std::vector<std::int64_t>(count)};
    to_host<std::int64_t>(slots, m.slots, nullptr), to_host<std::int64_t>(windows, m.windows, nullptr);
    return m;
  }
  void write(const Mappings& m, const std::vector<std::uint16_t>& k, const std::vector<std::uint16_t>& v) {
    const DeviceMemory keys = to_device<std::uint16_t>(k, nullptr), values = to_device<std::uint16_t>(v, nullptr),
                       slots = to_device<std::int64_t>(m.slots, nullptr),
                       windows = to_device<std::int64_t>(m.windows, nullptr);
    auto w = runtime::init<kvq_write_args>();
    w.num_tokens = static_cast<std::int32_t>(m.slots.size()), w.k = keys.get(), w.v = values.get();
    w.slot_mapping = slots.get<std::int64_t>(), w.window_mapping = windows.get<std::int64_t>();
    ok(plan_.write(*cache_, layer_, w, nullptr, &error_));
    check_cuda(cudaDeviceSynchronize(), "write");
  }
  void copy(std::int32_t kind, const std::vector<std::int32_t>& from, const std::vector<std::int32_t>& to) {
    const DeviceMemory sources = to_device<std::int32_t>(from, nullptr), targets = to_device<std::int32_t>(to, nullptr);
    auto c = runtime::init<kvq_copy_args>();
    c.kind = kind, c.count = static_cast<std::int32_t>(from.size());
    c.from = sources.get<std::int32_t>(), c.to = targets.get<std::int32_t>();
    ok(cache_->copy(c, nullptr, &error_));
    check_cuda(cudaDeviceSynchronize(), "copy");
  }

  void check_fault(const Wanted& wanted) {
    const kvq_fault found = cache_->fault(nullptr);
    CHECK(std::string(kvq_fault_string(found.code)) == kvq_fault_string(wanted.code));
    CHECK(found.sequence == wanted.sequence);
    CHECK(found.layer == wanted.layer);
    CHECK(found.value == wanted.value);
    CHECK(cache_->fault(nullptr).code == KVQ_FAULT_NONE);
  }
  /// Checks that the elements of sequence `faulty` alone are NaN, and the others near those without a fault.
  void check_results(const std::vector<float>& found, const std::vector<float>& good, int faulty) const {
    REQUIRE(found.size() == good.size());
    for (std::size_t b = 0; b < 3; ++b) {
      CAPTURE(b);
      int nans = 0;
      double error = 0.0, size = 0.0;
      for (std::size_t i = b * row(); i < (b + 1) * row(); ++i) {
        nans += std::isnan(found[i]);
        error += std::pow(static_cast<double>(found[i]) - static_cast<double>(good[i]), 2);
        size += std::pow(static_cast<double>(good[i]), 2);
      }
      CHECK(nans == (static_cast<int>(b) == faulty ? static_cast<int>(row()) : 0));
      if (static_cast<int>(b) != faulty) CHECK(std::sqrt(error / size) < 1e-2);
    }
  }
  /// Checks that the LSE of the last decode is NaN for sequence `faulty` alone.
  void check_lse(int faulty) const {
    for (std::size_t i = 0; i < lse_.size(); ++i) {
      CAPTURE(i);
      CHECK(std::isnan(lse_[i]) == (static_cast<int>(i) / info_.num_q_heads == faulty));
    }
  }
  std::size_t row() const { return static_cast<std::size_t>(info_.num_q_heads * info_.head_dim); }
  std::size_t kv_row() const { return static_cast<std::size_t>(info_.num_kv_heads * info_.head_dim); }
  static std::vector<std::uint16_t> rows(std::size_t count, unsigned seed) {
    std::vector<std::uint16_t> all;
    for (std::size_t i = 0; i < count; ++i)
      all.push_back(float_to_bf16(std::sin(static_cast<float>(i) * 0.37f + static_cast<float>(seed))));
    return all;
  }

 private:
  static kvq_model_options small_pages() {
    auto options = runtime::init<kvq_model_options>();
    options.page_size = 32, options.max_step_tokens = 4;
    return options;
  }
  void* take(std::int64_t bytes) {
    memory_.emplace_back(static_cast<std::size_t>(bytes));
    if (bytes > 0) check_cuda(cudaMemset(memory_.back().get(), 0xFF, memory_.back().bytes()), "cudaMemset");
    return memory_.back().get();
  }
  void ok(kvq_status status) { expect_ok(status, error_); }
  static std::vector<float> read(const DeviceMemory& memory, std::size_t count) {
    std::vector<std::uint16_t> bits(count);
    to_host<std::uint16_t>(memory, bits, nullptr);
    return floats(bits);
  }
  /// Writes all tokens of the three sequences.
  void fill() {
    const Mappings m = step(Tables(), {0, 70, 103, 203}, 203);
    write(m, rows(203 * kv_row(), 1), rows(203 * kv_row(), 2));
    CHECK(cache_->fault(nullptr).code == KVQ_FAULT_NONE);
  }

  Engine engine_;
  int layer_;
  kvq_layer_info info_;
  runtime::Plan plan_;
  DeviceMemory workspace_;
  std::vector<DeviceMemory> memory_;
  std::unique_ptr<runtime::Cache> cache_;
  std::vector<float> lse_;  ///< of the last decode, [B, Hq]
  kvq_error error_ = runtime::init<kvq_error>();
};

/// Layer 0 affine, 3 exact in pages; with groups of 32 no row of variants.json fits and generic kernels run.
struct FaultCase {
  int layer;
  bool generic;
};
Artifact artifact_of(const FaultCase& c) {
  Artifact artifact = served_artifact(kWindows, 0);
  const auto coder = [](TensorPlan& plan) -> UniformCoder& { return std::get<UniformCoder>(plan.coder); };
  if (!c.generic) return artifact;
  for (TensorPlan* side : {&artifact.layers[0].k, &*artifact.layers[0].v}) coder(*side).group_size = 32;
  LayerPlan& later = artifact.layers[2];
  coder(later.k).bits = 3, coder(later.k).zero = ZeroKind::integer, coder(*later.v).scale_type = ScaleType::fp32;
  return artifact;
}

/// Mistakes in the tables that every call reads.
struct Mistake {
  const char* name;
  void (*make)(Tables&);
  Wanted wanted;
};
const std::vector<Mistake>& mistakes() {
  static const std::vector<Mistake> all = {
      {"length beyond the table", [](Tables& t) { t.lengths[1] = kStride * 32 + 1; }, {KVQ_FAULT_LENGTH, 1, 0, 193}},
      {"negative length", [](Tables& t) { t.lengths[2] = -1; }, {KVQ_FAULT_LENGTH, 2, 0, -1}},
      {"page beyond the pool", [](Tables& t) { t.page(0, 1) = kPages; }, {KVQ_FAULT_PAGE, 0, 0, kPages}},
      {"page -1", [](Tables& t) { t.page(2, 2) = -1; }, {KVQ_FAULT_PAGE, 2, 0, -1}},
      {"page far away", [](Tables& t) { t.page(2, 1) = kFar; }, {KVQ_FAULT_PAGE, 2, 0, kFar}},
      {"sink slot", [](Tables& t) { t.sinks[1] = kSlots; }, {KVQ_FAULT_SINK_SLOT, 1, 0, kSlots}},
      {"ring slot", [](Tables& t) { t.rings[2] = kFar; }, {KVQ_FAULT_RING_SLOT, 2, 0, kFar}},
      {"foreign ring", [](Tables& t) { t.ids[1] = 99; }, {KVQ_FAULT_FOREIGN_RING, 1, 0, 1}},
  };
  return all;
}

}  // namespace

TEST_CASE("A mistake in the tables makes one sequence NaN, and is told", "[runtime][gpu][faults][emulated]") {
  const FaultCase c = GENERATE(FaultCase{0, false}, FaultCase{3, false}, FaultCase{0, true});
  FaultRig rig(artifact_of(c), c.layer);
  const std::vector<std::uint16_t> q = FaultRig::rows(3 * rig.row(), 3);
  const std::vector<float> good = rig.decode(Tables(), q);
  rig.check_results(good, good, -1);
  rig.check_fault({KVQ_FAULT_NONE, -1, -1, 0});
  for (const Mistake& mistake : mistakes()) {
    CAPTURE(c.layer, c.generic, mistake.name);
    Tables tables;
    mistake.make(tables);
    Wanted wanted = mistake.wanted;
    wanted.layer = c.layer;
    rig.check_results(rig.decode(tables, q), good, wanted.sequence);
    rig.check_lse(wanted.sequence);
    rig.check_fault(wanted);
  }
  rig.check_results(rig.decode(Tables(), q), good, -1);
}

TEST_CASE("The same of prefill, and of its own arguments", "[runtime][gpu][faults][emulated]") {
  const FaultCase c = GENERATE(FaultCase{0, false}, FaultCase{3, false}, FaultCase{0, true});
  FaultRig rig(artifact_of(c), c.layer);
  const std::vector<std::int32_t> starts = {0, 2, 4, 6};
  const auto none = [](auto&) {};
  const auto cut = [&](const std::vector<float>& all) {  // a token of each sequence
    std::vector<float> rows;
    for (const std::size_t token : {0, 2, 4})
      rows.insert(rows.end(), all.begin() + static_cast<std::ptrdiff_t>(token * rig.row()),
                  all.begin() + static_cast<std::ptrdiff_t>((token + 1) * rig.row()));
    return rows;
  };
  const std::vector<float> all = rig.prefill(Tables(), starts, none), good = cut(all);
  rig.check_results(good, good, -1);
  for (std::size_t i = 6 * rig.row(); i < all.size(); ++i) REQUIRE(all[i] == 0.0f);  // rows of nobody
  rig.check_fault({KVQ_FAULT_NONE, -1, -1, 0});
  for (const Mistake& mistake : mistakes()) {
    CAPTURE(c.layer, c.generic, mistake.name);
    Tables tables;
    mistake.make(tables);
    Wanted wanted = mistake.wanted;
    wanted.layer = c.layer;
    rig.check_results(cut(rig.prefill(tables, starts, none)), good, wanted.sequence);
    rig.check_fault(wanted);
  }
  rig.check_results(cut(rig.prefill(Tables(), starts, [](auto& prefixes) { prefixes[1] = 34; })), good, 1);
  rig.check_fault({KVQ_FAULT_PREFIX, 1, c.layer, 34});
  rig.check_results(cut(rig.prefill(Tables(), starts, [](auto& prefixes) { prefixes[0] = -1; })), good, 0);
  rig.check_fault({KVQ_FAULT_PREFIX, 0, c.layer, -1});
  // A chunk of 7 where the plan has 6: all its rows are NaN.
  const std::vector<float> longer = rig.prefill(Tables(), {0, 2, 4, 11}, none);
  rig.check_results(cut(longer), good, 2);
  for (std::size_t i = 4 * rig.row(); i < 11 * rig.row(); ++i) REQUIRE(std::isnan(longer[i]));
  rig.check_fault({KVQ_FAULT_PLAN, 2, c.layer, 105});
  // More rows than the call has: those that there are become NaN.
  const std::vector<float> beyond = rig.prefill(Tables(), {0, 2, 4, 13}, none);
  for (std::size_t i = 4 * rig.row(); i < 12 * rig.row(); ++i) REQUIRE(std::isnan(beyond[i]));
  rig.check_fault({KVQ_FAULT_NEW_TOKENS, 2, c.layer, 13});
}

TEST_CASE("The same of dequantize, and of its own arguments", "[runtime][gpu][faults][emulated]") {
  const FaultCase c = GENERATE(FaultCase{0, false}, FaultCase{3, false}, FaultCase{0, true});
  FaultRig rig(artifact_of(c), c.layer);
  const std::vector<std::int32_t> starts = {0, 70, 103, 203};
  const std::vector<float> good = rig.dequantize(Tables(), starts);
  const auto nans_of = [&](const std::vector<float>& found, int sequence) {
    int nans = 0;
    const auto first = static_cast<std::size_t>(starts[static_cast<std::size_t>(sequence)]) * rig.kv_row(),
               last = static_cast<std::size_t>(starts[static_cast<std::size_t>(sequence) + 1]) * rig.kv_row();
    for (std::size_t i = first; i < last; ++i) nans += std::isnan(found[i]);
    return nans;
  };
  for (const Mistake& mistake : mistakes()) {
    CAPTURE(c.layer, c.generic, mistake.name);
    Tables tables;
    mistake.make(tables);
    Wanted wanted = mistake.wanted;
    wanted.layer = c.layer;
    const std::vector<float> found = rig.dequantize(tables, starts);
    for (int b = 0; b < 3; ++b) CHECK((nans_of(found, b) > 0) == (b == wanted.sequence));
    // Of a sequence with a bad page, only that page's rows are NaN.
    if (wanted.code == KVQ_FAULT_PAGE) CHECK(nans_of(found, wanted.sequence) <= static_cast<int>(32 * rig.kv_row()));
    rig.check_fault(wanted);
  }
  CHECK(rig.dequantize(Tables(), starts) == good);
  rig.dequantize(Tables(), {0, 70, 90, 190});
  rig.check_fault({KVQ_FAULT_OUTPUT_ROWS, 1, c.layer, 20});
}

TEST_CASE("A step stores nothing of a sequence whose tables are wrong", "[runtime][gpu][faults][emulated]") {
  FaultRig rig(artifact_of({0, false}), 0);
  const std::vector<std::int32_t> starts = {0, 2, 4, 6};
  const auto grown = [](Tables t) {
    for (std::int32_t& length : t.lengths) length += 2;
    return t;
  };
  const FaultRig::Mappings good = rig.step(grown({}), starts, 6);
  for (const std::int64_t slot : good.slots) CHECK(slot >= 0);
  for (const std::int64_t row : good.windows) CHECK(row >= 0);
  rig.check_fault({KVQ_FAULT_NONE, -1, -1, 0});
  const auto check = [&](const FaultRig::Mappings& found, int sequence, bool pages_too) {
    for (std::size_t i = 0; i < 6; ++i) {
      CAPTURE(i);
      const bool is_faulty = static_cast<int>(i) / 2 == sequence;
      CHECK(found.slots[i] == (is_faulty && pages_too ? -1 : good.slots[i]));
      CHECK(found.windows[i] == (is_faulty ? -1 : good.windows[i]));
    }
  };
  for (const Mistake& mistake : mistakes()) {
    CAPTURE(mistake.name);
    if (mistake.wanted.code == KVQ_FAULT_PAGE) continue;
    Tables tables;
    mistake.make(tables);
    if (tables.lengths[2] < 0) tables.lengths[2] = -3;  // 2 new tokens are added
    check(rig.step(grown(tables), starts, 6), mistake.wanted.sequence, mistake.wanted.code != KVQ_FAULT_FOREIGN_RING);
    CHECK(rig.cache().fault(nullptr).code == mistake.wanted.code);
  }
  Tables page = grown({});
  page.page(0, 2) = kPages + 5;  // of positions 64 to 95
  check(rig.step(page, starts, 6), 0, true);
  rig.check_fault({KVQ_FAULT_PAGE, 0, -1, kPages + 5});
  // A negative number is no page: tokens in it are not coded, but their exact rows are stored.
  page.page(0, 2) = -1;
  const FaultRig::Mappings without = rig.step(page, starts, 6);
  CHECK(without.windows == good.windows);
  for (std::size_t i = 0; i < 6; ++i) CHECK(without.slots[i] == (i < 2 ? -1 : good.slots[i]));
  rig.check_fault({KVQ_FAULT_NONE, -1, -1, 0});
  CHECK(rig.step(grown({}), {0, 2, 1, 6}, 6).slots[0] >= 0);
  CHECK(rig.cache().fault(nullptr).code == KVQ_FAULT_NEW_TOKENS);
  rig.step(grown({}), {0, 2, 4, 7}, 6);
  rig.check_fault({KVQ_FAULT_NEW_TOKENS, 2, -1, 3});
}

TEST_CASE("Tokens taken back beyond the ring make a sequence NaN until its ring is taken over",
          "[runtime][gpu][faults][emulated]") {
  FaultRig rig(artifact_of({0, false}), 0);
  const std::vector<std::uint16_t> q = FaultRig::rows(3 * rig.row(), 3);
  Tables back;  // ring: 32 rows, 20 recent tokens
  back.lengths = {70, 33, 88};
  const std::vector<float> good = rig.decode(back, q);
  rig.step(back, {0, 0, 0, 0}, 0);
  rig.check_fault({KVQ_FAULT_NONE, -1, -1, 0});
  back.lengths[2] = 87;
  rig.step(back, {0, 0, 0, 0}, 0);
  rig.check_fault({KVQ_FAULT_ROLLBACK, 2, -1, 2});
  rig.check_results(rig.decode(back, q), good, 2);
  rig.check_fault({KVQ_FAULT_ROLLBACK, 2, 0, 2});
  back.exact_from[2] = 87;  // as a hit of all its tokens
  rig.step(back, {0, 0, 0, 0}, 0);
  for (const float x : rig.decode(back, q)) CHECK(std::isfinite(x));
  rig.check_fault({KVQ_FAULT_NONE, -1, -1, 0});
}

TEST_CASE("Mappings and copies beyond the pools store nothing", "[runtime][gpu][faults][emulated]") {
  const FaultCase c = GENERATE(FaultCase{0, false}, FaultCase{3, false}, FaultCase{0, true});
  FaultRig rig(artifact_of(c), c.layer);
  const std::vector<std::uint16_t> q = FaultRig::rows(3 * rig.row(), 3), rows = FaultRig::rows(2 * rig.kv_row(), 9);
  const std::vector<float> good = rig.decode(Tables(), q);
  for (const std::int64_t slot : {std::int64_t{kPages * 32}, std::numeric_limits<std::int64_t>::max()}) {
    rig.write({{slot, -1}, {-1, -1}}, rows, rows);
    rig.check_fault({KVQ_FAULT_SLOT_MAPPING, -1, c.layer, slot});
  }
  constexpr std::int64_t kSink = std::int64_t{1} << 40;
  for (const std::int64_t row :
       {std::int64_t{kSlots * 32}, kSink + kSlots * 16, std::numeric_limits<std::int64_t>::max()}) {
    rig.write({{-1, -5}, {row, -1}}, rows, rows);
    rig.check_fault({KVQ_FAULT_WINDOW_ROW, -1, c.layer, row});
  }
  rig.copy(KVQ_COPY_PAGES, {kPages, 3, -1}, {0, kFar, 1});
  CHECK(rig.cache().fault(nullptr).code == KVQ_FAULT_PAGE);
  rig.copy(KVQ_COPY_RINGS, {0}, {kSlots});
  rig.check_fault({KVQ_FAULT_RING_SLOT, 0, -1, kSlots});
  rig.check_results(rig.decode(Tables(), q), good, -1);
}

TEST_CASE("Keys, values and queries that are not finite make results NaN", "[runtime][gpu][faults][emulated]") {
  const FaultCase c = GENERATE(FaultCase{0, false}, FaultCase{1, false}, FaultCase{2, false}, FaultCase{3, false},
                               FaultCase{4, false}, FaultCase{0, true}, FaultCase{2, true});
  CAPTURE(c.layer, c.generic);
  FaultRig rig(artifact_of(c), c.layer);
  const std::vector<std::uint16_t> q = FaultRig::rows(3 * rig.row(), 3);
  const std::uint16_t bad = GENERATE(std::uint16_t{0x7FC0}, std::uint16_t{0x7F80}, std::uint16_t{0xFF80});
  CAPTURE(bad);
  // One channel of one query head.
  const std::vector<float> good = rig.decode(Tables(), q);
  std::vector<std::uint16_t> wrong = q;
  wrong[rig.row() + 5] = bad;
  const std::vector<float> found = rig.decode(Tables(), wrong);
  for (std::size_t i = 0; i < found.size(); ++i) {
    CAPTURE(i);
    REQUIRE(std::isnan(found[i]) == (i / 128 == rig.row() / 128));
  }
  Tables grown;
  grown.lengths[1] += 25;
  // One channel of one key, then value, of a token that is recent, then coded.
  const bool value = GENERATE(false, true);
  std::vector<std::uint16_t> rows = FaultRig::rows(25 * rig.kv_row(), 9), other = rows;
  rows[3] = bad;
  const FaultRig::Mappings m = rig.step(grown, {0, 0, 25, 25}, 25);
  rig.write(m, value ? other : rows, value ? rows : other);
  for (const std::int32_t ring : {1, -1}) {  // exact, then coded
    Tables seen = grown;
    seen.rings[1] = ring;
    if (ring == 1) seen.exact_from[1] = 0;
    CAPTURE(value, ring);
    const std::vector<float> out = rig.decode(seen, q);
    // Query heads of the first KV head see it: the others do not.
    for (std::size_t i = rig.row(); i < rig.row() + 4 * 128; i += 128) CHECK(std::isnan(out[i + 3]));
    for (std::size_t i = rig.row() + 4 * 128; i < 2 * rig.row(); ++i) REQUIRE(std::isfinite(out[i]));
    for (std::size_t i = 0; i < rig.row(); ++i) REQUIRE(std::isfinite(out[i]));
  }
  rig.check_fault({KVQ_FAULT_NONE, -1, -1, 0});
}
