#include <kvq/core/error.h>
#include <kvq/runtime/device_memory.h>
#include <kvq/runtime/paged_cache.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

namespace kvq::runtime {

namespace {

struct LayerMemory {
  DeviceMemory pages = {}, sinks = {}, rings = {};
  std::size_t page_bytes = 0;
  std::int32_t group = 0;
};

[[noreturn]] void refuse(const std::string& what) { throw kvq::Error{ErrorKind::usage, "paged cache: " + what}; }

void check(cudaError_t error) { check_cuda(error, "paged cache"); }

/// A list on the device that grows as needed.
template <typename T>
class DeviceList {
 public:
  void put(const std::vector<T>& values, kvq_stream stream) {
    const std::size_t bytes = values.size() * sizeof(T);
    if (memory_.bytes() < bytes) {
      check(cudaStreamSynchronize(stream));  // kernels may still read the old list
      memory_ = DeviceMemory(2 * bytes);
    }
    if (bytes > 0) check(cudaMemcpyAsync(memory_.get(), values.data(), bytes, cudaMemcpyHostToDevice, stream));
  }
  T* get() const { return memory_.get<T>(); }

 private:
  DeviceMemory memory_ = {};
};

/// One group's page tables.
struct HostPages {
  std::vector<std::int32_t> pages, indptr = {0};
};

/// The step's tables on the host.
struct HostTables {
  std::vector<std::int32_t> seq_lens, prefix_lens, token_indptr = {0};
  std::vector<std::int32_t> sink_slots, ring_slots, exact_from;
  std::vector<std::uint64_t> ids;
  std::vector<HostPages> groups = {};
};

/// The same of one group on the device.
struct GroupTables {
  explicit GroupTables(std::size_t slot_bytes) : slot_mapping(slot_bytes) {}
  DeviceList<std::int32_t> pages, indptr;
  DeviceMemory slot_mapping;
  kvq_sequences sequences = init<kvq_sequences>(), before = init<kvq_sequences>();
};

/// The same on the device.
struct StepTables {
  int num_tokens = 0;
  DeviceList<std::int32_t> seq_lens, prefix_lens, token_indptr, sink_slots, ring_slots, exact_from;
  DeviceList<std::uint64_t> ids;
  DeviceMemory window_mapping;
  std::vector<GroupTables> groups;

  explicit StepTables(const PagedCacheOptions& o)
      : window_mapping(static_cast<std::size_t>(o.max_tokens) * sizeof(std::int64_t)) {
    for (std::size_t i = 0; i < o.groups.size(); ++i) groups.emplace_back(window_mapping.bytes());
  }

  void put(const HostTables& from, kvq_stream stream) {
    num_tokens = from.token_indptr.back();
    seq_lens.put(from.seq_lens, stream), prefix_lens.put(from.prefix_lens, stream);
    token_indptr.put(from.token_indptr, stream);
    sink_slots.put(from.sink_slots, stream), ring_slots.put(from.ring_slots, stream);
    exact_from.put(from.exact_from, stream), ids.put(from.ids, stream);
    for (std::size_t i = 0; i < groups.size(); ++i) {
      GroupTables& group = groups[i];
      group.pages.put(from.groups[i].pages, stream), group.indptr.put(from.groups[i].indptr, stream);
      kvq_sequences& s = group.sequences;
      s.batch = static_cast<std::int32_t>(from.seq_lens.size());
      s.seq_lens = seq_lens.get();
      s.page_table = group.pages.get(), s.page_indptr = group.indptr.get();
      s.page_table_stride = static_cast<std::int64_t>(from.groups[i].pages.size());
      s.sink_slots = sink_slots.get(), s.ring_slots = ring_slots.get();
      s.exact_from = exact_from.get(), s.sequence_ids = ids.get();
      group.before = s;
      group.before.seq_lens = prefix_lens.get();
    }
  }
};

/// The options with what they leave out: one group at least, and num_pages those of the largest.
PagedCacheOptions complete(PagedCacheOptions options, const kvq_model_info& info) {
  const bool grouped = !options.groups.empty();
  if (grouped && options.num_pages != 0)
    refuse(fmt::format("expected num_pages or groups, found {} pages and {} groups", options.num_pages,
                       options.groups.size()));
  if ((!grouped && options.num_pages < 1) || options.max_sequences < 1)
    refuse(fmt::format("{} pages and {} sequences: expected 1 or more", options.num_pages, options.max_sequences));
  if (!grouped) {
    options.groups.push_back({.num_pages = options.num_pages});
    for (std::int32_t i = 0; i < info.layer_count; ++i) options.groups.front().layers.push_back(info.first_layer + i);
  }
  for (const LayerGroup& group : options.groups) options.num_pages = std::max({1, options.num_pages, group.num_pages});
  if (options.num_sink_slots == 0) options.num_sink_slots = options.max_sequences;
  if (options.max_batch == 0) options.max_batch = options.max_sequences;
  if (options.max_tokens == 0) options.max_tokens = options.max_batch;
  return options;
}

/// The group of each layer of the rank.
std::vector<std::int32_t> groups_by_layer(const kvq_model_info& info, const std::vector<LayerGroup>& groups) {
  std::vector<std::int32_t> found(static_cast<std::size_t>(info.layer_count), -1);
  for (std::size_t g = 0; g < groups.size(); ++g)
    for (const std::int32_t layer : groups[g].layers) {
      const std::int64_t i = std::int64_t{layer} - info.first_layer;
      if (i < 0 || i >= info.layer_count)
        refuse(fmt::format("group {}: layer: expected {} to {}, found {}", g, info.first_layer,
                           info.first_layer + info.layer_count - 1, layer));
      std::int32_t& own = found[static_cast<std::size_t>(i)];
      if (own >= 0) refuse(fmt::format("layer {}: expected one group, found {} and {}", layer, own, g));
      own = static_cast<std::int32_t>(g);
    }
  const auto missing = std::ranges::find(found, -1) - found.begin();
  if (missing < info.layer_count)
    refuse(fmt::format("layer {}: expected one group, found none", info.first_layer + missing));
  return found;
}

/// @param group  of several, by the caller; a group of all layers for want of others keeps all pages
PageGroup page_group(const Model& model, const LayerGroup& group, std::size_t index) {
  const auto window_of = [&](std::int32_t layer) { return model.layer(layer).sliding_window; };
  std::vector<std::int32_t> windows;
  std::ranges::transform(group.layers, std::back_inserter(windows), window_of);
  const bool sees_all = windows.empty() || std::ranges::count(windows, 0) > 0;
  const std::int32_t window = sees_all ? 0 : std::ranges::max(windows), recent = model.info().recent_tokens;
  if (group.num_pages < (window > 0 && window <= recent ? 0 : 1))
    refuse(
        fmt::format("group {}: num_pages: expected 1 or more, or 0 with a sliding window of at most {} tokens; "
                    "found {} with a window of {}",
                    index, recent, group.num_pages, window));
  return {.num_pages = group.num_pages, .sliding_window = window};
}

std::vector<PageGroup> page_groups(const Model& model, const PagedCacheOptions& given) {
  std::vector<PageGroup> groups;
  for (std::size_t i = 0; i < given.groups.size(); ++i) groups.push_back(page_group(model, given.groups[i], i));
  return groups;
}

kvq_cache_options cache_options(const PagedCacheOptions& o, const kvq_model_info& info) {
  auto options = init<kvq_cache_options>();
  options.num_pages = o.num_pages;
  options.num_sink_slots = info.sink_tokens > 0 ? o.num_sink_slots : 0;
  options.num_ring_slots = info.recent_tokens > 0 ? o.max_sequences : 0;
  return options;
}

std::int32_t kind_of(CopyKind kind) {
  return kind == CopyKind::page ? KVQ_COPY_PAGES : kind == CopyKind::sink ? KVQ_COPY_SINKS : KVQ_COPY_RINGS;
}

}  // namespace

struct PagedCache::State {
  State(const Model& model, const DeviceModel& device_model, const PagedCacheOptions& given, kvq_stream stream)
      : info(model.info()),
        options(complete(given, info)),
        group_of_layer(groups_by_layer(info, options.groups)),
        allocator({.num_pages = given.num_pages,
                   .page_size = info.page_size,
                   .num_sequences = options.max_sequences,
                   .num_sink_slots = info.sink_tokens > 0 ? options.num_sink_slots : 0,
                   .sink_tokens = info.sink_tokens,
                   .max_rollback = info.max_step_tokens,
                   .groups = page_groups(model, given)}),
        ids(static_cast<std::size_t>(options.max_sequences)),
        layers(layers_of(model)),
        memory(device_model.cache_bytes(cache_options(options, info))),
        cache(device_model, cache_options(options, info), pools(), memory.get(), memory.bytes(), stream),
        tables(options) {}

  std::vector<LayerMemory> layers_of(const Model& model) const {
    const kvq_cache_options pool = cache_options(options, info);
    std::vector<LayerMemory> made(group_of_layer.size());
    for (std::int32_t i = 0; i < info.layer_count; ++i) {
      const kvq_layer_info one = model.layer(info.first_layer + i);
      LayerMemory& m = made[static_cast<std::size_t>(i)];
      m.page_bytes = static_cast<std::size_t>(one.page_bytes);
      m.group = group_of_layer[static_cast<std::size_t>(i)];
      const std::int32_t num_pages = options.groups[static_cast<std::size_t>(m.group)].num_pages;
      if (num_pages > 0) m.pages = DeviceMemory(m.page_bytes * static_cast<std::size_t>(num_pages));
      m.sinks = DeviceMemory(static_cast<std::size_t>(one.sink_slot_bytes * pool.num_sink_slots));
      m.rings = DeviceMemory(static_cast<std::size_t>(one.ring_slot_bytes * pool.num_ring_slots));
    }
    return made;
  }

  std::vector<kvq_layer_pools> pools() const {
    std::vector<kvq_layer_pools> all;
    for (const LayerMemory& layer : layers) {
      auto pools = init<kvq_layer_pools>();
      pools.pages = layer.pages.get(), pools.sinks = layer.sinks.get(), pools.rings = layer.rings.get();
      pools.page_stride = static_cast<std::int64_t>(layer.page_bytes);  // of `model`; device_model may be of another
      pools.group = layer.group, pools.num_pages = options.groups[static_cast<std::size_t>(layer.group)].num_pages;
      all.push_back(pools);
    }
    return all;
  }

  const LayerMemory& layer(std::int32_t index) const {
    const std::int32_t i = index - info.first_layer;
    if (i < 0 || i >= info.layer_count)
      refuse(fmt::format("layer: expected {} to {}, found {}", info.first_layer,
                         info.first_layer + info.layer_count - 1, index));
    return layers[static_cast<std::size_t>(i)];
  }

  bool has_windows() const { return info.sink_tokens + info.recent_tokens > 0; }

  /// A number that no other sequence has. @return  the sequence
  std::int32_t named(std::int32_t sequence) {
    if (sequence != kNone) ids[static_cast<std::size_t>(sequence)] = ++last_id;
    return sequence;
  }

  /// Runs a copy whose lists are on the host. Waits for the stream, because the lists end with the call.
  void run_copy(kvq_copy_args args, const std::vector<std::int32_t>& from, const std::vector<std::int32_t>& to,
                const std::vector<std::uint64_t>& owners, kvq_stream stream) const {
    args.count = static_cast<std::int32_t>(std::max(from.size(), to.size()));
    if (args.count == 0) return;
    DeviceList<std::int32_t> from_list, to_list;
    DeviceList<std::uint64_t> owner_list;
    from_list.put(from, stream), to_list.put(to, stream), owner_list.put(owners, stream);
    args.from = from_list.get(), args.to = to_list.get(), args.sequence_ids = owner_list.get();
    call(kvq_copy_run, cache.get(), &args, stream);
    check(cudaStreamSynchronize(stream));
  }

  void copy(const std::vector<CacheCopy>& copies, kvq_stream stream) const {
    for (std::int32_t group = 0; group < allocator.groups(); ++group) copy(copies, CopyKind::page, group, stream);
    copy(copies, CopyKind::sink, 0, stream);
    if (info.recent_tokens > 0) copy(copies, CopyKind::ring, 0, stream);
  }
  void copy(const std::vector<CacheCopy>& copies, CopyKind kind, std::int32_t group, kvq_stream stream) const {
    std::vector<std::int32_t> from, to;
    std::vector<std::uint64_t> owners;
    for (const CacheCopy& c : copies) {
      if (c.kind != kind || c.group != group) continue;
      from.push_back(c.from), to.push_back(c.to);
      if (kind == CopyKind::ring) owners.push_back(ids[static_cast<std::size_t>(c.to)]);
    }
    auto args = init<kvq_copy_args>();
    args.kind = kind_of(kind), args.group = group;
    run_copy(args, from, to, owners, stream);
  }

  /// Bytes of an entry in a buffer.
  std::size_t entry_bytes(CopyKind kind, std::int32_t group) const {
    if (kind != CopyKind::page) return cache.copy_bytes(kind_of(kind));
    std::size_t bytes = 0;
    for (const LayerMemory& layer : layers)
      if (layer.group == group && layer.pages.get()) bytes += layer.page_bytes;
    return bytes;
  }

  /// Copies entries to host memory.
  std::vector<std::byte> to_host(CopyKind kind, const std::vector<std::int32_t>& entries, kvq_stream stream,
                                 std::int32_t group = 0) const {
    auto args = init<kvq_copy_args>();
    args.kind = kind_of(kind), args.group = group;
    std::vector<std::byte> bytes(entry_bytes(kind, group) * entries.size());
    const DeviceMemory buffer(bytes.size());
    args.buffer = buffer.get();
    if (bytes.empty()) return bytes;
    run_copy(args, entries, {}, {}, stream);
    check(cudaMemcpyAsync(bytes.data(), buffer.get(), bytes.size(), cudaMemcpyDeviceToHost, stream));
    check(cudaStreamSynchronize(stream));
    return bytes;
  }
  static void expect_bytes(std::size_t expected, std::size_t found) {
    if (found != expected)
      refuse(fmt::format("restore: expected {} bytes, found {}: saved by another cache?", expected, found));
  }
  void from_host(CopyKind kind, std::span<const std::byte> bytes, const std::vector<std::int32_t>& entries,
                 const std::vector<std::uint64_t>& owners, kvq_stream stream, std::int32_t group = 0) const {
    auto args = init<kvq_copy_args>();
    args.kind = kind_of(kind), args.group = group;
    expect_bytes(entry_bytes(kind, group) * entries.size(), bytes.size());
    if (bytes.empty()) return;
    const DeviceMemory buffer(bytes.size());
    check(cudaMemcpyAsync(buffer.get(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice, stream));
    args.buffer = buffer.get();
    run_copy(args, {}, entries, owners, stream);
  }

  HostTables tables_of(const CacheAllocator& grown, std::span<const Growth> batch) const {
    HostTables t;
    for (const Growth& g : batch) {
      const auto length = static_cast<std::int32_t>(grown.length(g.sequence));
      t.seq_lens.push_back(length), t.prefix_lens.push_back(length - g.tokens);
      t.token_indptr.push_back(t.token_indptr.back() + g.tokens);
      t.sink_slots.push_back(grown.sink_slot(g.sequence));
      t.ring_slots.push_back(info.recent_tokens > 0 ? g.sequence : -1);
      t.exact_from.push_back(static_cast<std::int32_t>(grown.exact_from(g.sequence)));
      t.ids.push_back(ids[static_cast<std::size_t>(g.sequence)]);
    }
    for (std::int32_t group = 0; group < grown.groups(); ++group) t.groups.push_back(pages_of(grown, batch, group));
    return t;
  }
  static HostPages pages_of(const CacheAllocator& grown, std::span<const Growth> batch, std::int32_t group) {
    HostPages t;
    for (const Growth& g : batch) {
      const auto own = grown.pages(g.sequence, group);
      t.pages.insert(t.pages.end(), own.begin(), own.end());
      t.indptr.push_back(static_cast<std::int32_t>(t.pages.size()));
    }
    if (t.pages.empty()) t.pages.push_back(0);  // so that the list has an address
    return t;
  }

  const GroupTables& group(std::int32_t index) const {
    if (index < 0 || index >= allocator.groups())
      refuse(fmt::format("group: expected 0 to {}, found {}", allocator.groups() - 1, index));
    return tables.groups[static_cast<std::size_t>(index)];
  }

  /// The pages of a group that a restored sequence has.
  static std::vector<std::int32_t> needed_pages(const CacheAllocator& allocator, std::int32_t sequence,
                                                std::int32_t group) {
    const auto pages = allocator.pages(sequence, group);
    return {pages.begin() + allocator.first_page(allocator.length(sequence), group), pages.end()};
  }

  kvq_model_info info;
  PagedCacheOptions options;
  std::vector<std::int32_t> group_of_layer;
  CacheAllocator allocator;
  std::uint64_t last_id = 0;
  std::vector<std::uint64_t> ids;  ///< of each sequence
  std::vector<LayerMemory> layers;
  DeviceMemory memory;
  Cache cache;
  StepTables tables;
};

PagedCache::PagedCache(const Model& model, const DeviceModel& device_model, const PagedCacheOptions& options,
                       kvq_stream stream)
    : state_(std::make_unique<State>(model, device_model, options, stream)) {}

PagedCache::~PagedCache() = default;

std::int32_t PagedCache::create() { return state_->named(state_->allocator.create()); }

CacheAllocator::Start PagedCache::create(std::span<const std::int32_t> tokens) {
  const CacheAllocator::Start start = state_->allocator.create(tokens);
  state_->named(start.sequence);
  return start;
}

std::int32_t PagedCache::fork(std::int32_t sequence, kvq_stream stream) {
  CacheAllocator forked = state_->allocator;  // replaces the cache's allocator if nothing throws
  const CacheAllocator::Fork fork = forked.fork(sequence);
  if (state_->named(fork.sequence) == kNone) return kNone;
  state_->copy(fork.copies, stream);
  state_->allocator = std::move(forked);
  return fork.sequence;
}

void PagedCache::destroy(std::int32_t sequence) { state_->allocator.destroy(sequence); }
void PagedCache::insert(std::int32_t sequence, std::span<const std::int32_t> tokens) {
  state_->allocator.insert(sequence, tokens);
}
std::int32_t PagedCache::evict(std::int32_t pages, std::int32_t group) { return state_->allocator.evict(pages, group); }
void PagedCache::commit(std::int32_t sequence) { state_->allocator.commit(sequence); }
void PagedCache::rollback(std::int32_t sequence, std::int32_t tokens) { state_->allocator.rollback(sequence, tokens); }

SavedSequence PagedCache::save(std::int32_t sequence, kvq_stream stream) const {
  const State& s = *state_;
  SavedSequence saved{.length = s.allocator.length(sequence), .exact_from = s.allocator.exact_from(sequence)};
  for (std::int32_t group = 0; group < s.allocator.groups(); ++group) {
    const auto bytes = s.to_host(CopyKind::page, s.needed_pages(s.allocator, sequence, group), stream, group);
    saved.pages.insert(saved.pages.end(), bytes.begin(), bytes.end());
  }
  const std::int32_t sinks = s.allocator.sink_slot(sequence);
  saved.has_sinks = sinks != kNone;
  if (saved.has_sinks) saved.sinks = s.to_host(CopyKind::sink, {sinks}, stream);
  if (s.info.recent_tokens > 0) saved.ring = s.to_host(CopyKind::ring, {sequence}, stream);
  return saved;
}

std::int32_t PagedCache::restore(const SavedSequence& saved, kvq_stream stream) {
  State& s = *state_;
  CacheAllocator grown = s.allocator;  // replaces the cache's allocator if nothing throws
  const std::int32_t made = s.named(grown.restore(saved.length, saved.exact_from, saved.has_sinks));
  if (made == kNone) return kNone;
  std::vector<std::vector<std::int32_t>> pages;
  std::vector<std::size_t> bytes;
  for (std::int32_t group = 0; group < grown.groups(); ++group) {
    pages.push_back(s.needed_pages(grown, made, group));
    bytes.push_back(pages.back().size() * s.entry_bytes(CopyKind::page, group));
  }
  s.expect_bytes(std::accumulate(bytes.begin(), bytes.end(), std::size_t{0}), saved.pages.size());
  std::span<const std::byte> left = saved.pages;
  for (std::int32_t group = 0; group < grown.groups(); ++group) {
    const auto i = static_cast<std::size_t>(group);
    s.from_host(CopyKind::page, left.first(bytes[i]), pages[i], {}, stream, group);
    left = left.subspan(bytes[i]);
  }
  if (grown.sink_slot(made) != kNone) s.from_host(CopyKind::sink, saved.sinks, {grown.sink_slot(made)}, {}, stream);
  if (s.info.recent_tokens > 0)
    s.from_host(CopyKind::ring, saved.ring, {made}, {s.ids[static_cast<std::size_t>(made)]}, stream);
  s.allocator = std::move(grown);
  return made;
}

bool PagedCache::step(std::span<const Growth> batch, kvq_stream stream) {
  State& s = *state_;
  std::int64_t tokens = 0;
  for (const Growth& g : batch) tokens += g.tokens;
  if (static_cast<std::int64_t>(batch.size()) > s.options.max_batch || tokens > s.options.max_tokens)
    refuse(fmt::format("a step of {} sequences and {} tokens, there is room for {} and {}", batch.size(), tokens,
                       s.options.max_batch, s.options.max_tokens));
  CacheAllocator grown = s.allocator;  // replaces the cache's allocator if nothing throws
  std::vector<CacheCopy> copies;
  if (!grown.grow(batch, copies)) return false;
  s.copy(copies, stream);
  const HostTables host = s.tables_of(grown, batch);
  StepTables& t = s.tables;
  t.put(host, stream);
  check(cudaStreamSynchronize(stream));

  for (const GroupTables& group : t.groups) {
    auto args = init<kvq_step_args>();
    args.sequences = &group.sequences, args.num_tokens = t.num_tokens, args.token_indptr = t.token_indptr.get();
    args.slot_mapping = group.slot_mapping.get<std::int64_t>();
    if (s.has_windows()) args.window_mapping = t.window_mapping.get<std::int64_t>();  // the same for all groups
    call(kvq_step_run, s.cache.get(), &args, stream);
  }
  s.allocator = std::move(grown);
  return true;
}

kvq_write_args PagedCache::write_args(std::int32_t group) const {
  const StepTables& t = state_->tables;
  auto args = init<kvq_write_args>();
  args.num_tokens = t.num_tokens;
  args.slot_mapping = state_->group(group).slot_mapping.get<std::int64_t>();
  if (state_->has_windows()) args.window_mapping = t.window_mapping.get<std::int64_t>();
  return args;
}

kvq_decode_args PagedCache::decode_args(std::int32_t group) const {
  auto args = init<kvq_decode_args>();
  args.sequences = &sequences(group);
  return args;
}

kvq_prefill_args PagedCache::prefill_args(std::int32_t group) const {
  const StepTables& t = state_->tables;
  auto args = init<kvq_prefill_args>();
  args.sequences = &sequences(group), args.prefix_lens = t.prefix_lens.get();
  args.num_tokens = t.num_tokens, args.q_indptr = t.token_indptr.get();
  return args;
}

kvq_prefill_args PagedCache::prefill_before_write_args(std::int32_t group) const {
  kvq_prefill_args args = prefill_args(group);
  args.sequences = &state_->group(group).before, args.prefix_lens = nullptr;
  return args;
}

const kvq_sequences& PagedCache::sequences(std::int32_t group) const { return state_->group(group).sequences; }
std::int32_t PagedCache::group_of(std::int32_t layer) const { return state_->layer(layer).group; }
const Cache& PagedCache::handle() const { return state_->cache; }
const CacheAllocator& PagedCache::allocator() const { return state_->allocator; }
std::byte* PagedCache::pages(std::int32_t layer) const { return state_->layer(layer).pages.get(); }
std::byte* PagedCache::sinks(std::int32_t layer) const { return state_->layer(layer).sinks.get(); }
std::byte* PagedCache::rings(std::int32_t layer) const { return state_->layer(layer).rings.get(); }

}  // namespace kvq::runtime
