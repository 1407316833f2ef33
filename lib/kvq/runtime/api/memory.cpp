#include <kvq/runtime/api/cache_memory.h>
#include <kvq/runtime/api/handles.h>
#include <kvq/runtime/cache_allocator.h>
#include <kvq/runtime/memory_bound.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

using namespace kvq;
using namespace kvq::abi;

namespace {

constexpr int kMostMultiprocessors = 256;  // more than any device has

struct Workspaces {
  std::size_t decode = 0, prefill = 0, write = 0;
};

/// Upper bounds of what a plan with these options demands.
Workspaces most_workspaces(const LoadedModel& m, const kvq_plan_options& o, int multiprocessors) {
  Workspaces most;
  for (const LoadedLayer& l : m.layers) {
    most.write = std::max(most.write, write_workspace_bytes(choose_write(l.key), l.heads.num_kv, o.max_write_tokens));
    if (o.max_batch > 0) {
      const int new_tokens = std::max(1, o.max_new_tokens);
      const DecodeVariant decode = choose_decode(l.key, new_tokens);
      const std::size_t work_tiles = decode_work_tiles(decode, o.max_batch, l.heads.num_kv, l.key.heads, new_tokens);
      most.decode = std::max(most.decode, most_decode_workspace_bytes(decode, multiprocessors, work_tiles));
    }
    if (o.max_prefill_batch > 0) {
      const DequantizeVariant rows = choose_dequantize(l.key);
      const PrefillVariant attention = choose_prefill(rows);
      const PrefillShape shape = prefill_shape(l, o);
      raise(check_prefill_shape(attention, rows, shape));
      most.prefill = std::max(most.prefill, prefill_workspace_bytes(attention, rows, shape));
    }
  }
  return most;
}

/// What a plan demands, which must have been made for these layers.
Workspaces workspaces_of(const LoadedModel& m, const kvq_plan& plan) {
  for (const LoadedLayer& l : m.layers) {
    const std::int64_t i = l.plan.layer - plan.first_layer;
    if (i < 0 || i >= static_cast<std::int64_t>(plan.of_layer.size()) ||
        !(plan.kernels[plan.of_layer[static_cast<std::size_t>(i)]].key == l.key))
      throw Error{ErrorKind::usage, fmt::format("memory: the plan is not for layer {} of this model", l.plan.layer)};
  }
  return {plan.decode_workspace_bytes, plan.prefill_workspace_bytes, plan.write_workspace_bytes};
}

kvq_memory_options options_of(const kvq_memory_options* options) {
  kvq_memory_options o;
  raise(read_struct(options, o, "options"));
  const auto fail = [](const std::string& what) { throw Error{ErrorKind::usage, "memory: " + what}; };
  if (o.batch < 1) fail(fmt::format("batch: expected 1 or more, found {}", o.batch));
  if (o.length < 1) fail(fmt::format("length: expected 1 or more, found {}", o.length));
  if (o.num_sink_slots < 0) fail(fmt::format("num_sink_slots: expected 0 or more, found {}", o.num_sink_slots));
  if (o.multiprocessors < 0 || o.multiprocessors > 1024)
    fail(fmt::format("multiprocessors: expected 0 to 1024, found {}", o.multiprocessors));
  if (o.plan && o.plan_options) fail("expected a plan or plan_options, found both");
  return o;
}

/// Most pages of each layer that one sequence has at once.
std::vector<std::int64_t> pages_of_sequence(const LoadedModel& m, const kvq_memory_options& o) {
  const std::int64_t all = (std::int64_t{o.length} + m.claim.page_size - 1) / m.claim.page_size;
  std::vector<std::int64_t> pages(m.layers.size(), all);
  for (std::size_t i = 0; o.page_tokens && i < pages.size(); ++i) {
    const std::int32_t tokens = o.page_tokens[i];
    const LayerGeometry& geometry = m.layers[i].plan.geometry;
    const auto fail = [&](const std::string& expected) {
      throw Error{ErrorKind::usage, fmt::format("memory: layer {}: page_tokens: expected {}, found {}",
                                                m.layers[i].plan.layer, expected, tokens)};
    };
    const bool window = geometry.sliding_window > 0;
    const std::int32_t needed = window ? std::min(geometry.sliding_window, o.length) : o.length;
    const bool none = window && geometry.sliding_window <= m.windows.recent_tokens;
    if (tokens < (none && tokens == 0 ? 0 : needed))
      fail(none ? fmt::format("0, or {} or more", needed) : fmt::format("{} or more", needed));
    pages[i] = std::min(all, page_run(tokens, m.claim.page_size));
  }
  return pages;
}

/// The numbers of entries in the pools. @param of_sequence  most pages that one sequence has in a layer
kvq_cache_options extents_of(const LoadedModel& m, const kvq_memory_options& o, std::int64_t of_sequence) {
  const std::int64_t pages = of_sequence * o.batch;
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (pages > kMost)
    throw Error{ErrorKind::usage, fmt::format("memory: {} sequences of {} tokens: expected at most {} pages, found {}",
                                              o.batch, o.length, kMost, pages)};
  kvq_cache_options extents{};
  extents.num_pages = static_cast<std::int32_t>(pages);
  if (m.windows.sink_tokens > 0) extents.num_sink_slots = o.num_sink_slots ? o.num_sink_slots : o.batch;
  if (m.windows.recent_tokens > 0) extents.num_ring_slots = o.batch;
  return extents;
}

kvq_memory memory_of(const LoadedModel& m, const kvq_memory_options& o) {
  const std::vector<std::int64_t> pages = pages_of_sequence(m, o);
  const kvq_cache_options extents = extents_of(m, o, *std::ranges::max_element(pages));
  kvq_memory r{};
  r.num_pages = extents.num_pages, r.num_sink_slots = extents.num_sink_slots, r.num_ring_slots = extents.num_ring_slots;
  std::int64_t page = 0, sink = 0, ring = 0, elements = 0;  // of all layers: an entry's bytes, a token's elements
  for (std::size_t i = 0; i < m.layers.size(); ++i) {
    const LoadedLayer& l = m.layers[i];
    page += l.pages.page_bytes();
    r.sequence_page_bytes += l.pages.page_bytes() * pages[i];
    sink += l.windows.sinks.slot_bytes(), ring += l.windows.rings.slot_bytes();
    elements += std::int64_t{l.heads.num_kv} * (l.pages.k.head_dim + l.pages.v.head_dim);
  }
  r.page_bytes = r.sequence_page_bytes * o.batch;
  r.sink_bytes = sink * extents.num_sink_slots, r.ring_bytes = ring * extents.num_ring_slots;
  r.device_model_bytes = static_cast<std::int64_t>(m.image.bytes().size());
  r.cache_bytes = static_cast<std::int64_t>(CacheMemory(m.layers.size(), extents).total);

  Workspaces workspaces;
  if (o.plan) {
    workspaces = workspaces_of(m, *o.plan);
  } else if (o.plan_options) {
    kvq_plan_options calls;
    raise(read_struct(o.plan_options, calls, "plan_options"));
    raise(check_plan_options(calls));
    workspaces = most_workspaces(m, calls, o.multiprocessors ? o.multiprocessors : kMostMultiprocessors);
  }
  r.decode_workspace_bytes = static_cast<std::int64_t>(workspaces.decode);
  r.prefill_workspace_bytes = static_cast<std::int64_t>(workspaces.prefill);
  r.write_workspace_bytes = static_cast<std::int64_t>(workspaces.write);
  r.total_bytes = r.page_bytes + r.sink_bytes + r.ring_bytes + r.device_model_bytes + r.cache_bytes +
                  std::max({r.decode_workspace_bytes, r.prefill_workspace_bytes, r.write_workspace_bytes});

  r.sequence_window_bytes = sink + ring;
  const auto of_token = static_cast<double>(elements);
  r.coded_bits = 8.0 * static_cast<double>(page) / (of_token * m.claim.page_size);
  r.effective_bits = 8.0 * static_cast<double>(r.sequence_page_bytes + r.sequence_window_bytes) / (of_token * o.length);
  return r;
}

}  // namespace

kvq_status kvq_memory_estimate(const kvq_model* model, const kvq_memory_options* options, kvq_memory* memory,
                               kvq_error* error) {
  return guarded(error, [&] {
    const LoadedModel& m = required(model, "model").model;
    raise(write_struct(memory_of(m, options_of(options)), memory, "memory"));
  });
}
