#include <kvq/core/error.h>
#include <kvq/runtime/device_memory.h>
#include <kvq/runtime/paged_cache.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace kvq::runtime {

namespace {

struct LayerMemory {
  DeviceMemory pages = {}, windows = {};
  std::size_t page_bytes = 0, slot_bytes = 0;
};

/// The step's tables on the device, each with room for the largest step.
struct StepTables {
  explicit StepTables(const PagedCacheOptions& o)
      : seq_lens(static_cast<std::size_t>(o.max_batch) * sizeof(std::int32_t)),
        token_indptr((static_cast<std::size_t>(o.max_batch) + 1) * sizeof(std::int32_t)),
        page_indptr(token_indptr.bytes()),
        window_slots(seq_lens.bytes()),
        slot_mapping(static_cast<std::size_t>(o.max_tokens) * sizeof(std::int64_t)),
        window_mapping(slot_mapping.bytes()) {}
  int batch = 0, num_tokens = 0;
  DeviceMemory seq_lens, token_indptr, page_indptr, window_slots, slot_mapping, window_mapping;
  DeviceMemory pages;  ///< one list of all sequences' pages; grows as needed, because it repeats shared pages
};

}  // namespace

struct PagedCache::State {
  State(const Model& model, const DeviceModel& device_model, const PagedCacheOptions& o, kvq_stream stream)
      : options(o),
        info(model.info()),
        allocator(o.num_pages, info.page_size, o.max_sequences, info.max_step_tokens),
        layers(layers_of(model, o)),
        memory(device_model.cache_bytes()),
        cache(device_model, pools(), memory.get(), memory.bytes(), stream),
        plan(device_model, o.max_batch, o.max_tokens),
        workspace(plan.workspace_bytes()),
        tables(o) {}

  static std::vector<LayerMemory> layers_of(const Model& model, const PagedCacheOptions& o) {
    const kvq_model_info whole = model.info();
    std::vector<LayerMemory> made(static_cast<std::size_t>(whole.layer_count));
    for (std::int32_t i = 0; i < whole.layer_count; ++i) {
      const kvq_layer_info one = model.layer(whole.first_layer + i);
      LayerMemory& m = made[static_cast<std::size_t>(i)];
      m.page_bytes = static_cast<std::size_t>(one.page_bytes),
      m.slot_bytes = static_cast<std::size_t>(one.window_slot_bytes);
      m.pages = DeviceMemory(m.page_bytes * static_cast<std::size_t>(o.num_pages));
      m.windows = DeviceMemory(m.slot_bytes * static_cast<std::size_t>(o.max_sequences));
    }
    return made;
  }

  std::vector<kvq_layer_pools> pools() const {
    std::vector<kvq_layer_pools> all;
    for (const LayerMemory& layer : layers) {
      auto pools = init<kvq_layer_pools>();
      pools.pages = layer.pages.get(), pools.windows = layer.windows.get();
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

  PagedCacheOptions options;
  kvq_model_info info;
  PageAllocator allocator;
  std::vector<LayerMemory> layers;
  DeviceMemory memory;
  Cache cache;
  StepPlan plan;
  DeviceMemory workspace;
  StepTables tables;
};

namespace {

PagedCacheOptions complete(PagedCacheOptions options) {
  if (options.num_pages < 1 || options.max_sequences < 1)
    throw kvq::Error{ErrorKind::usage, fmt::format("paged cache: {} pages and {} sequences: expected 1 or more",
                                                   options.num_pages, options.max_sequences)};
  if (options.max_batch == 0) options.max_batch = options.max_sequences;
  if (options.max_tokens == 0) options.max_tokens = options.max_batch;
  return options;
}

void copy(std::byte* pool, std::size_t bytes, const PageCopy& copy, kvq_stream stream) {
  check_cuda(
      cudaMemcpyAsync(pool + static_cast<std::size_t>(copy.to) * bytes,
                      pool + static_cast<std::size_t>(copy.from) * bytes, bytes, cudaMemcpyDeviceToDevice, stream),
      "cudaMemcpy");
}

void upload(const DeviceMemory& to, const std::vector<std::int32_t>& values, kvq_stream stream) {
  check_cuda(
      cudaMemcpyAsync(to.get(), values.data(), values.size() * sizeof(std::int32_t), cudaMemcpyHostToDevice, stream),
      "cudaMemcpy");
}

}  // namespace

PagedCache::PagedCache(const Model& model, const DeviceModel& device_model, const PagedCacheOptions& options,
                       kvq_stream stream)
    : state_(std::make_unique<State>(model, device_model, complete(options), stream)) {}

PagedCache::~PagedCache() = default;

std::int32_t PagedCache::create() { return state_->allocator.create(); }

std::int32_t PagedCache::fork(std::int32_t sequence, kvq_stream stream) {
  PageAllocator forked = state_->allocator;  // replaces the cache's allocator if nothing throws
  const std::int32_t made = forked.fork(sequence);
  if (made == kNone) return kNone;
  for (const LayerMemory& layer : state_->layers)
    if (layer.slot_bytes > 0) copy(layer.windows.get(), layer.slot_bytes, {sequence, made}, stream);
  state_->allocator = std::move(forked);
  return made;
}

void PagedCache::destroy(std::int32_t sequence) { state_->allocator.destroy(sequence); }
void PagedCache::commit(std::int32_t sequence) { state_->allocator.commit(sequence); }
void PagedCache::rollback(std::int32_t sequence, std::int32_t tokens) { state_->allocator.rollback(sequence, tokens); }

bool PagedCache::step(std::span<const Growth> batch, kvq_stream stream) {
  State& s = *state_;
  std::int64_t tokens = 0;
  for (const Growth& g : batch) tokens += g.tokens;
  if (static_cast<std::int64_t>(batch.size()) > s.options.max_batch || tokens > s.options.max_tokens)
    throw kvq::Error{ErrorKind::usage,
                     fmt::format("paged cache: a step of {} sequences and {} tokens, there is room for {} and {}",
                                 batch.size(), tokens, s.options.max_batch, s.options.max_tokens)};
  PageAllocator grown = s.allocator;  // replaces the cache's allocator if nothing throws
  std::vector<PageCopy> copies;
  if (!grown.grow(batch, copies)) return false;
  for (const LayerMemory& layer : s.layers)
    for (const PageCopy& c : copies) copy(layer.pages.get(), layer.page_bytes, c, stream);

  std::vector<std::int32_t> lengths, slots, rows = {0}, indptr = {0}, pages;
  for (const Growth& g : batch) {
    lengths.push_back(static_cast<std::int32_t>(grown.length(g.sequence)));
    slots.push_back(g.sequence);
    rows.push_back(rows.back() + g.tokens);
    const auto own = grown.pages(g.sequence);
    pages.insert(pages.end(), own.begin(), own.end());
    indptr.push_back(static_cast<std::int32_t>(pages.size()));
  }
  StepTables& t = s.tables;
  if (t.pages.bytes() < (pages.size() + 1) * sizeof(std::int32_t)) {
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");  // kernels may still read the old list
    t.pages = DeviceMemory(2 * (pages.size() + 1) * sizeof(std::int32_t));
  }
  t.batch = static_cast<int>(batch.size()), t.num_tokens = static_cast<int>(tokens);
  upload(t.seq_lens, lengths, stream), upload(t.window_slots, slots, stream);
  upload(t.token_indptr, rows, stream), upload(t.page_indptr, indptr, stream), upload(t.pages, pages, stream);
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");

  auto args = init<kvq_step_args>();
  args.batch = t.batch, args.num_tokens = t.num_tokens;
  args.seq_lens = t.seq_lens.get<std::int32_t>(), args.token_indptr = t.token_indptr.get<std::int32_t>();
  args.page_table = t.pages.get<std::int32_t>(), args.page_indptr = t.page_indptr.get<std::int32_t>();
  args.slot_mapping = t.slot_mapping.get<std::int64_t>();
  if (s.has_windows())
    args.window_slots = t.window_slots.get<std::int32_t>(), args.window_mapping = t.window_mapping.get<std::int64_t>();
  args.workspace = s.workspace.get(), args.workspace_bytes = s.workspace.bytes();
  call(kvq_step_run, s.plan.get(), s.cache.get(), &args, stream);
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
  const StepTables& t = state_->tables;
  auto args = init<kvq_decode_args>();
  args.batch = t.batch;
  args.seq_lens = t.seq_lens.get<std::int32_t>();
  args.page_table = t.pages.get<std::int32_t>(), args.page_indptr = t.page_indptr.get<std::int32_t>();
  if (state_->has_windows()) args.window_slots = t.window_slots.get<std::int32_t>();
  return args;
}

const Cache& PagedCache::handle() const { return state_->cache; }
const PageAllocator& PagedCache::allocator() const { return state_->allocator; }
std::byte* PagedCache::pages(std::int32_t layer) const { return state_->layer(layer).pages.get(); }
std::byte* PagedCache::windows(std::int32_t layer) const { return state_->layer(layer).windows.get(); }

}  // namespace kvq::runtime
