#include <kvq/core/error.h>
#include <kvq/runtime/device_memory.h>
#include <kvq/runtime/paged_cache.h>

#include <algorithm>
#include <utility>

namespace kvq::runtime {

namespace {

struct LayerMemory {
  DeviceMemory pages = {}, sinks = {}, rings = {};
  std::size_t page_bytes = 0;
};

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

/// The step's tables on the host.
struct HostTables {
  std::vector<std::int32_t> seq_lens, prefix_lens, token_indptr = {0}, pages, page_indptr = {0};
  std::vector<std::int32_t> sink_slots, ring_slots, exact_from;
  std::vector<std::uint64_t> ids;
};

/// The same on the device.
struct StepTables {
  int num_tokens = 0;
  DeviceList<std::int32_t> seq_lens, prefix_lens, token_indptr, pages, page_indptr, sink_slots, ring_slots, exact_from;
  DeviceList<std::uint64_t> ids;
  DeviceMemory slot_mapping, window_mapping;
  kvq_sequences sequences = init<kvq_sequences>();

  explicit StepTables(const PagedCacheOptions& o)
      : slot_mapping(static_cast<std::size_t>(o.max_tokens) * sizeof(std::int64_t)),
        window_mapping(slot_mapping.bytes()) {}

  void put(const HostTables& from, kvq_stream stream) {
    num_tokens = from.token_indptr.back();
    seq_lens.put(from.seq_lens, stream), prefix_lens.put(from.prefix_lens, stream);
    token_indptr.put(from.token_indptr, stream);
    pages.put(from.pages, stream);
    page_indptr.put(from.page_indptr, stream);
    sink_slots.put(from.sink_slots, stream), ring_slots.put(from.ring_slots, stream);
    exact_from.put(from.exact_from, stream), ids.put(from.ids, stream);
    sequences.batch = static_cast<std::int32_t>(from.seq_lens.size());
    sequences.seq_lens = seq_lens.get();
    sequences.page_table = pages.get(), sequences.page_indptr = page_indptr.get();
    sequences.page_table_stride = static_cast<std::int64_t>(from.pages.size());
    sequences.sink_slots = sink_slots.get(), sequences.ring_slots = ring_slots.get();
    sequences.exact_from = exact_from.get(), sequences.sequence_ids = ids.get();
  }
};

PagedCacheOptions complete(PagedCacheOptions options) {
  if (options.num_pages < 1 || options.max_sequences < 1)
    throw kvq::Error{ErrorKind::usage, fmt::format("paged cache: {} pages and {} sequences: expected 1 or more",
                                                   options.num_pages, options.max_sequences)};
  if (options.num_sink_slots == 0) options.num_sink_slots = options.max_sequences;
  if (options.max_batch == 0) options.max_batch = options.max_sequences;
  if (options.max_tokens == 0) options.max_tokens = options.max_batch;
  return options;
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
  State(const Model& model, const DeviceModel& device_model, const PagedCacheOptions& o, kvq_stream stream)
      : options(o),
        info(model.info()),
        allocator({.num_pages = o.num_pages,
                   .page_size = info.page_size,
                   .num_sequences = o.max_sequences,
                   .num_sink_slots = info.sink_tokens > 0 ? o.num_sink_slots : 0,
                   .sink_tokens = info.sink_tokens,
                   .max_rollback = info.max_step_tokens}),
        ids(static_cast<std::size_t>(o.max_sequences)),
        layers(layers_of(model, o)),
        memory(device_model.cache_bytes(cache_options(o, info))),
        cache(device_model, cache_options(o, info), pools(), memory.get(), memory.bytes(), stream),
        tables(o) {}

  static std::vector<LayerMemory> layers_of(const Model& model, const PagedCacheOptions& o) {
    const kvq_model_info whole = model.info();
    const kvq_cache_options pool = cache_options(o, whole);
    std::vector<LayerMemory> made(static_cast<std::size_t>(whole.layer_count));
    for (std::int32_t i = 0; i < whole.layer_count; ++i) {
      const kvq_layer_info one = model.layer(whole.first_layer + i);
      LayerMemory& m = made[static_cast<std::size_t>(i)];
      m.page_bytes = static_cast<std::size_t>(one.page_bytes);
      m.pages = DeviceMemory(m.page_bytes * static_cast<std::size_t>(pool.num_pages));
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
      all.push_back(pools);
    }
    return all;
  }

  const LayerMemory& layer(std::int32_t index) const {
    const std::int32_t i = index - info.first_layer;
    if (i < 0 || i >= info.layer_count)
      throw kvq::Error{ErrorKind::usage, fmt::format("paged cache: layer: expected {} to {}, found {}",
                                                     info.first_layer, info.first_layer + info.layer_count - 1, index)};
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
    for (const CopyKind kind : {CopyKind::page, CopyKind::sink, CopyKind::ring}) {
      if (kind == CopyKind::ring && info.recent_tokens == 0) continue;
      std::vector<std::int32_t> from, to;
      std::vector<std::uint64_t> owners;
      for (const CacheCopy& c : copies) {
        if (c.kind != kind) continue;
        from.push_back(c.from), to.push_back(c.to);
        if (kind == CopyKind::ring) owners.push_back(ids[static_cast<std::size_t>(c.to)]);
      }
      auto args = init<kvq_copy_args>();
      args.kind = kind_of(kind);
      run_copy(args, from, to, owners, stream);
    }
  }

  /// Copies entries to host memory.
  std::vector<std::byte> to_host(CopyKind kind, const std::vector<std::int32_t>& entries, kvq_stream stream) const {
    auto args = init<kvq_copy_args>();
    args.kind = kind_of(kind);
    std::vector<std::byte> bytes(cache.copy_bytes(args.kind) * entries.size());
    const DeviceMemory buffer(bytes.size());
    args.buffer = buffer.get();
    if (bytes.empty()) return bytes;
    run_copy(args, entries, {}, {}, stream);
    check(cudaMemcpyAsync(bytes.data(), buffer.get(), bytes.size(), cudaMemcpyDeviceToHost, stream));
    check(cudaStreamSynchronize(stream));
    return bytes;
  }
  void from_host(CopyKind kind, std::span<const std::byte> bytes, const std::vector<std::int32_t>& entries,
                 const std::vector<std::uint64_t>& owners, kvq_stream stream) const {
    auto args = init<kvq_copy_args>();
    args.kind = kind_of(kind);
    if (bytes.size() != cache.copy_bytes(args.kind) * entries.size())
      throw kvq::Error{ErrorKind::usage,
                       fmt::format("paged cache: restore: expected {} bytes, found {}: saved by another cache?",
                                   cache.copy_bytes(args.kind) * entries.size(), bytes.size())};
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
      const auto own = grown.pages(g.sequence);
      t.pages.insert(t.pages.end(), own.begin(), own.end());
      t.page_indptr.push_back(static_cast<std::int32_t>(t.pages.size()));
      t.sink_slots.push_back(grown.sink_slot(g.sequence));
      t.ring_slots.push_back(info.recent_tokens > 0 ? g.sequence : -1);
      t.exact_from.push_back(static_cast<std::int32_t>(grown.exact_from(g.sequence)));
      t.ids.push_back(ids[static_cast<std::size_t>(g.sequence)]);
    }
    if (t.pages.empty()) t.pages.push_back(0);  // so that the list has an address
    return t;
  }

  PagedCacheOptions options;
  kvq_model_info info;
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
    : state_(std::make_unique<State>(model, device_model, complete(options), stream)) {}

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
std::int32_t PagedCache::evict(std::int32_t pages) { return state_->allocator.evict(pages); }
void PagedCache::commit(std::int32_t sequence) { state_->allocator.commit(sequence); }
void PagedCache::rollback(std::int32_t sequence, std::int32_t tokens) { state_->allocator.rollback(sequence, tokens); }

SavedSequence PagedCache::save(std::int32_t sequence, kvq_stream stream) const {
  const State& s = *state_;
  const auto pages = s.allocator.pages(sequence);
  SavedSequence saved{.length = s.allocator.length(sequence), .exact_from = s.allocator.exact_from(sequence)};
  saved.pages = s.to_host(CopyKind::page, {pages.begin(), pages.end()}, stream);
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
  const auto pages = grown.pages(made);
  s.from_host(CopyKind::page, saved.pages, {pages.begin(), pages.end()}, {}, stream);
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
    throw kvq::Error{ErrorKind::usage,
                     fmt::format("paged cache: a step of {} sequences and {} tokens, there is room for {} and {}",
                                 batch.size(), tokens, s.options.max_batch, s.options.max_tokens)};
  CacheAllocator grown = s.allocator;  // replaces the cache's allocator if nothing throws
  std::vector<CacheCopy> copies;
  if (!grown.grow(batch, copies)) return false;
  s.copy(copies, stream);
  const HostTables host = s.tables_of(grown, batch);
  StepTables& t = s.tables;
  t.put(host, stream);
  check(cudaStreamSynchronize(stream));

  auto args = init<kvq_step_args>();
  args.sequences = &t.sequences, args.num_tokens = t.num_tokens, args.token_indptr = t.token_indptr.get();
  args.slot_mapping = t.slot_mapping.get<std::int64_t>();
  if (s.has_windows()) args.window_mapping = t.window_mapping.get<std::int64_t>();
  call(kvq_step_run, s.cache.get(), &args, stream);
  s.allocator = std::move(grown);
  return true;
}

kvq_write_args PagedCache::write_args() const {
  const StepTables& t = state_->tables;
  auto args = init<kvq_write_args>();
  args.num_tokens = t.num_tokens;
  args.slot_mapping = t.slot_mapping.get<std::int64_t>();
  if (state_->has_windows()) args.window_mapping = t.window_mapping.get<std::int64_t>();
  return args;
}

kvq_decode_args PagedCache::decode_args() const {
  auto args = init<kvq_decode_args>();
  args.sequences = &state_->tables.sequences;
  return args;
}

kvq_prefill_args PagedCache::prefill_args() const {
  const StepTables& t = state_->tables;
  auto args = init<kvq_prefill_args>();
  args.sequences = &t.sequences, args.prefix_lens = t.prefix_lens.get();
  args.num_tokens = t.num_tokens, args.q_indptr = t.token_indptr.get();
  return args;
}

const kvq_sequences& PagedCache::sequences() const { return state_->tables.sequences; }
const Cache& PagedCache::handle() const { return state_->cache; }
const CacheAllocator& PagedCache::allocator() const { return state_->allocator; }
std::byte* PagedCache::pages(std::int32_t layer) const { return state_->layer(layer).pages.get(); }
std::byte* PagedCache::sinks(std::int32_t layer) const { return state_->layer(layer).sinks.get(); }
std::byte* PagedCache::rings(std::int32_t layer) const { return state_->layer(layer).rings.get(); }

}  // namespace kvq::runtime
