#include "api_expected.h"
#include "api_rig.h"

#include "support/served_artifact.h"

#include <catch2/catch.hpp>

#include <array>
#include <limits>
#include <random>
#include <string>
#include <vector>

using namespace kvq;
using namespace kvq::test;

/// Random hostile arguments of the C interface. Under AddressSanitizer, on the emulated device, an access out of bounds
/// ends the program; so does it under compute-sanitizer.
namespace {

constexpr Windows kWindows{.sink_tokens = 8, .recent_tokens = 20};
constexpr int kBatch = 3, kPages = 12, kSlots = 3, kStride = 4, kTokens = 40, kPageSize = 32;

class Hostile {
 public:
  explicit Hostile(unsigned seed) : random_(seed) {}
  bool chance(unsigned of) { return random_() % of == 0; }
  std::int64_t number() {
    constexpr std::array<std::int64_t, 12> kBad = {-1,
                                                   0,
                                                   1,
                                                   kPages - 1,
                                                   kPages,
                                                   kSlots,
                                                   31,
                                                   33,
                                                   std::numeric_limits<std::int32_t>::max(),
                                                   std::numeric_limits<std::int32_t>::min(),
                                                   1 << 20,
                                                   -77};
    return random_() % 4 ? kBad[random_() % kBad.size()] : static_cast<std::int32_t>(random_());
  }
  /// Some entries replaced.
  template <typename T>
  std::vector<T> spoilt(std::vector<T> values, unsigned of) {
    for (T& x : values)
      if (chance(of)) x = static_cast<T>(number());
    return values;
  }
  /// null, misaligned, or as it is.
  template <typename T>
  void spoil(T*& pointer, unsigned of) {
    if (!chance(of)) return;
    pointer = chance(2) ? nullptr : reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(pointer) + 1);
  }

 private:
  std::mt19937 random_;
};

/// A cache, plans and memory for every call, each large enough for the sizes that the arguments name.
struct HostileRig {
  Artifact artifact = served_artifact(kWindows, 0);
  Engine engine;
  int layer;
  kvq_layer_info info;
  runtime::Plan plan;
  std::vector<DeviceMemory> memory = {};
  std::unique_ptr<runtime::Cache> cache;
  DeviceMemory workspace, q, k, v, out, lse, slots, windows, buffer;

  static kvq_model_options model_options() {
    auto options = runtime::init<kvq_model_options>();
    options.page_size = kPageSize, options.max_step_tokens = 4;
    return options;
  }
  explicit HostileRig(int of_layer)
      : engine(artifact, model_options()),
        layer(of_layer),
        info(engine.model->layer(layer)),
        plan(*engine.model, plan_options(kBatch, 16, 100)),
        workspace(std::max(plan.workspace_bytes(KVQ_KERNEL_DECODE), plan.workspace_bytes(KVQ_KERNEL_PREFILL))),
        q(rows(info.num_q_heads)),
        k(rows(info.num_kv_heads)),
        v(rows(info.num_kv_heads)),
        out(rows(info.num_q_heads)),
        lse(static_cast<std::size_t>(kTokens * info.num_q_heads) * 4),
        slots(kTokens * 8),
        windows(kTokens * 8) {
    auto options = runtime::init<kvq_cache_options>();
    options.num_pages = kPages, options.num_sink_slots = options.num_ring_slots = kSlots;
    std::vector<kvq_layer_pools> pools;
    for (int i = 0; i < engine.model->info().layer_count; ++i) {
      const kvq_layer_info one = engine.model->layer(i);
      auto p = runtime::init<kvq_layer_pools>();
      p.pages = take(one.page_bytes * kPages), p.sinks = take(one.sink_slot_bytes * kSlots);
      p.rings = take(one.ring_slot_bytes * kSlots);
      pools.push_back(p);
    }
    const std::size_t bytes = engine.device_model->cache_bytes(options);
    cache = std::make_unique<runtime::Cache>(*engine.device_model, options, pools,
                                             take(static_cast<std::int64_t>(bytes)), bytes, nullptr);
    buffer = DeviceMemory(2 * std::max(cache->copy_bytes(KVQ_COPY_PAGES), cache->copy_bytes(KVQ_COPY_RINGS)));
    for (const DeviceMemory* rows : {&q, &k, &v})
      check_cuda(cudaMemset(rows->get(), 0x3C, rows->bytes()), "cudaMemset");
  }
  std::size_t rows(int heads) const { return static_cast<std::size_t>(kTokens * heads * info.head_dim) * 2; }
  void* take(std::int64_t bytes) {
    memory.emplace_back(static_cast<std::size_t>(bytes));
    check_cuda(cudaMemset(memory.back().get(), 0, memory.back().bytes()), "cudaMemset");
    return memory.back().get();
  }

  /// Tables of hostile numbers, and all calls with them. @param pointers  arguments are spoilt, too
  void run(Hostile& h, bool pointers) {
    const unsigned numbers = pointers ? 50 : 6, arguments = pointers ? 12 : 1000000;
    const auto put32 = [&](const std::vector<std::int32_t>& values, unsigned of) {
      return to_device<std::int32_t>(h.spoilt(values, of), nullptr);
    };
    const DeviceMemory lengths = put32({60, 33, 100}, numbers), sinks = put32({2, -1, 1}, numbers),
                       rings = put32({0, 1, -1}, numbers), exact_from = put32({0, 10, 0}, numbers),
                       table = put32({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, numbers),
                       indptr = put32({0, 4, 8, 12}, numbers), token_indptr = put32({0, 5, 5, 20}, numbers),
                       out_indptr = put32({0, 10, 20, 30}, numbers), first = put32({0, 30, 90}, numbers),
                       last = put32({10, 40, 100}, numbers), prefixes = put32({55, 33, 85}, numbers),
                       entries = put32({0, 2}, numbers), targets = put32({1, 3}, numbers);
    const DeviceMemory ids = to_device<std::uint64_t>(std::vector<std::uint64_t>{1, 2, 3}, nullptr);
    auto s = runtime::init<kvq_sequences>();
    s.batch = kBatch, s.seq_lens = lengths.get<std::int32_t>(), s.page_table = table.get<std::int32_t>();
    s.page_table_stride = kStride, s.sink_slots = sinks.get<std::int32_t>(), s.ring_slots = rings.get<std::int32_t>();
    s.exact_from = exact_from.get<std::int32_t>(), s.sequence_ids = ids.get<std::uint64_t>();
    if (h.chance(3)) s.page_indptr = indptr.get<std::int32_t>(), s.page_table_stride = kBatch * kStride;
    if (pointers) {
      h.spoil(s.seq_lens, 12), h.spoil(s.page_table, 12), h.spoil(s.sink_slots, 12), h.spoil(s.ring_slots, 12);
      h.spoil(s.exact_from, 12), h.spoil(s.sequence_ids, 12);
      if (h.chance(12)) s.batch = h.chance(2) ? -1 : kBatch + 1;
      if (h.chance(12)) s.struct_size = static_cast<std::size_t>(h.number());
      if (h.chance(12)) s.page_table_stride = h.chance(2) ? 0 : -5;
    }
    auto error = runtime::init<kvq_error>();
    const auto done = [&](const char* call, kvq_status status) {
      CAPTURE(call);
      // A refusal says why.
      CHECK((status == KVQ_OK) == (std::string(error.message).empty()));
      CHECK(status != KVQ_INTERNAL);
      check_cuda(cudaDeviceSynchronize(), "a call");
    };

    auto a = runtime::init<kvq_step_args>();
    a.sequences = &s, a.num_tokens = kTokens, a.token_indptr = token_indptr.get<std::int32_t>();
    a.slot_mapping = slots.get<std::int64_t>(), a.window_mapping = windows.get<std::int64_t>();
    if (pointers) {
      h.spoil(a.token_indptr, 12), h.spoil(a.slot_mapping, 12), h.spoil(a.window_mapping, 12);
      if (h.chance(12)) a.num_tokens = -3;
      if (h.chance(20)) a.sequences = nullptr;
    }
    done("step", cache->step(a, nullptr, &error));

    if (!pointers && h.chance(3)) {  // an engine's own mapping
      std::vector<std::int64_t> own(kTokens);
      for (std::int64_t& x : own) x = h.number();
      check_cuda(cudaMemcpy(h.chance(2) ? slots.get() : windows.get(), own.data(), kTokens * 8, cudaMemcpyHostToDevice),
                 "cudaMemcpy");
    }
    auto w = runtime::init<kvq_write_args>();
    w.num_tokens = kTokens, w.k = k.get(), w.v = v.get();
    w.slot_mapping = slots.get<std::int64_t>(), w.window_mapping = windows.get<std::int64_t>();
    if (pointers) {
      h.spoil(w.k, arguments), h.spoil(w.v, arguments);
      if (h.chance(arguments)) w.k_token_stride = h.number() | 1;
      if (h.chance(arguments)) w.num_tokens = -1;
      if (h.chance(arguments)) w.slot_mapping = nullptr;
      if (h.chance(arguments)) w.window_mapping = nullptr;
    }
    done("write",
         plan.write(*cache, pointers && h.chance(12) ? static_cast<int>(h.number()) : layer, w, nullptr, &error));

    auto d = runtime::init<kvq_decode_args>();
    d.sequences = &s, d.q = q.get(), d.out = out.get(), d.lse_natural = lse.get<float>();
    d.workspace = workspace.get(), d.workspace_bytes = workspace.bytes();
    if (pointers) {
      h.spoil(d.q, arguments), h.spoil(d.out, arguments), h.spoil(d.lse_natural, arguments),
          h.spoil(d.workspace, arguments);
      if (h.chance(arguments)) d.workspace_bytes = 5;
      if (h.chance(arguments)) d.q_stride = h.chance(2) ? 8 : -8;
      if (h.chance(arguments)) d.softmax_scale = h.chance(2) ? std::numeric_limits<float>::quiet_NaN() : -1.0f;
      if (h.chance(arguments)) d.sliding_window = h.chance(2) ? 7 : -9;
    }
    done("decode", plan.decode(*cache, layer, d, nullptr, &error));

    auto ap = runtime::init<kvq_append_args>();
    ap.sequences = d.sequences, ap.q = d.q, ap.k = w.k, ap.v = w.v, ap.out = d.out, ap.lse_natural = d.lse_natural;
    ap.q_stride = d.q_stride, ap.k_stride = w.k_token_stride, ap.v_stride = w.v_token_stride;
    ap.slot_mapping = w.slot_mapping, ap.window_mapping = w.window_mapping, ap.softmax_scale = d.softmax_scale;
    ap.sliding_window = d.sliding_window, ap.workspace = d.workspace, ap.workspace_bytes = d.workspace_bytes;
    done("append", plan.append(*cache, layer, ap, nullptr, &error));

    auto p = runtime::init<kvq_prefill_args>();
    p.sequences = &s, p.prefix_lens = h.chance(3) ? nullptr : prefixes.get<std::int32_t>();
    p.num_tokens = kTokens, p.q_indptr = token_indptr.get<std::int32_t>();
    p.q = q.get(), p.k = k.get(), p.v = v.get(), p.out = out.get(), p.lse_natural = lse.get<float>();
    p.workspace = workspace.get(), p.workspace_bytes = workspace.bytes();
    if (pointers) {
      h.spoil(p.q, arguments), h.spoil(p.k, arguments), h.spoil(p.v, arguments), h.spoil(p.out, arguments);
      h.spoil(p.workspace, arguments);
      if (h.chance(arguments)) p.q_indptr = nullptr;
      if (h.chance(arguments)) p.num_tokens = -1;
      if (h.chance(arguments)) p.workspace_bytes = 0;
    }
    done("prefill", plan.prefill(*cache, layer, p, nullptr, &error));

    auto r = runtime::init<kvq_dequantize_args>();
    r.sequences = &s, r.num_rows = 30, r.out_indptr = out_indptr.get<std::int32_t>();
    r.first = first.get<std::int32_t>(), r.last = last.get<std::int32_t>();
    r.k = k.get(), r.v = v.get();
    if (pointers) {
      h.spoil(r.k, arguments), h.spoil(r.v, arguments);
      if (h.chance(arguments)) r.flags = static_cast<std::uint32_t>(h.number());
      if (h.chance(arguments)) r.num_rows = -4;
      if (h.chance(arguments)) r.out_indptr = nullptr;
    }
    done("dequantize", plan.dequantize(*cache, layer, r, nullptr, &error));

    auto c = runtime::init<kvq_copy_args>();
    c.kind = static_cast<std::int32_t>(h.chance(2) ? KVQ_COPY_PAGES : KVQ_COPY_RINGS), c.count = 2;
    c.from = entries.get<std::int32_t>(), c.to = targets.get<std::int32_t>();
    if (h.chance(3)) (h.chance(2) ? c.from : c.to) = nullptr, c.buffer = buffer.get();
    if (c.kind == KVQ_COPY_RINGS && h.chance(2)) c.sequence_ids = ids.get<std::uint64_t>();
    if (pointers) {
      h.spoil(c.from, arguments), h.spoil(c.to, arguments), h.spoil(c.buffer, arguments);
      if (h.chance(arguments)) c.kind = static_cast<std::int32_t>(h.number());
      if (h.chance(arguments)) c.count = -1;
    }
    done("copy", cache->copy(c, nullptr, &error));
    cache->fault(nullptr);
  }
};

}  // namespace

TEST_CASE("Tables full of hostile numbers", "[runtime][gpu][hostile][emulated]") {
  HostileRig rig(GENERATE(0, 3));
  for (unsigned seed = 0; seed < 12; ++seed) {
    CAPTURE(rig.layer, seed);
    Hostile hostile(seed);
    rig.run(hostile, false);
  }
}

TEST_CASE("Arguments that are null, misaligned, negative or too large", "[runtime][gpu][hostile][emulated]") {
  HostileRig rig(0);
  for (unsigned seed = 0; seed < 40; ++seed) {
    CAPTURE(seed);
    Hostile hostile(seed + 1000);
    rig.run(hostile, true);
  }
}

TEST_CASE("Many more hostile calls", "[runtime][gpu][hostile]") {
  HostileRig rig(GENERATE(0, 2, 3, 4));
  for (unsigned seed = 0; seed < 150; ++seed) {
    CAPTURE(rig.layer, seed);
    Hostile hostile(seed + 5000);
    rig.run(hostile, seed % 2);
  }
}
