#include "bench/cache.h"

#include "bench/kernels.h"

#include <algorithm>
#include <numeric>
#include <random>

namespace kvq::bench {

namespace {

std::vector<int> shuffled(std::int64_t count, std::mt19937& random) {
  std::vector<int> numbers(static_cast<std::size_t>(count));
  std::iota(numbers.begin(), numbers.end(), 0);
  std::shuffle(numbers.begin(), numbers.end(), random);
  return numbers;
}

}  // namespace

Cache::Cache(const Device& device, const CacheShape& shape, unsigned seed) : shape_(shape) {
  const PageLayout layout = shape.pages();
  const std::int64_t num_pages = std::int64_t{shape.batch} * shape.num_pages();
  pages_ = memory_.take<std::byte>(static_cast<std::size_t>(num_pages * layout.page_bytes()));
  check(fill_pages(device.stream(), pages_, num_pages, layout, shape.k_bfloat, shape.v_bfloat, seed));
  const WindowLayouts windows = shape.windows();
  sink_bytes_ = shape.batch * windows.sinks.slot_bytes();
  if (const std::int64_t bytes = sink_bytes_ + shape.batch * windows.rings.slot_bytes(); bytes > 0) {
    windows_ = memory_.take<std::byte>(static_cast<std::size_t>(bytes));
    check(fill_rows(device.stream(), windows_, bytes / 2, true, seed + 1));
  }
  std::mt19937 random(seed);
  table_ = shuffled(num_pages, random);
  sink_slots_ = shuffled(shape.batch, random), ring_slots_ = shuffled(shape.batch, random);
  const auto batch = static_cast<std::size_t>(shape.batch);
  std::vector<std::uint64_t> ids(batch);
  std::vector<RingState> states(batch);
  for (std::size_t i = 0; i < batch; ++i) {
    ids[i] = i + 1;
    states[static_cast<std::size_t>(ring_slots_[i])] = {.owner = ids[i]};
  }
  tables_ = {
      .batch = shape.batch,
      .seq_lens = memory_.put(std::vector<int>(batch, shape.context)),
      .page_table = memory_.put(table_),
      .page_table_stride = shape.num_pages(),
      .sink_slots = shape.exact.sink_tokens > 0 ? memory_.put(sink_slots_) : nullptr,
      .ring_slots = shape.exact.recent_tokens > 0 ? memory_.put(ring_slots_) : nullptr,
      .sequence_ids = memory_.put(ids),
  };
  ring_states_ = memory_.put(states);
  std::vector<std::int64_t> slots, rows;
  for (std::size_t b = 0; b < batch; ++b)
    for (int position = shape.context - shape.new_tokens; position < shape.context; ++position) {
      const auto page =
          b * static_cast<std::size_t>(shape.num_pages()) + static_cast<std::size_t>(position / shape.page_size);
      slots.push_back(std::int64_t{table_[page]} * shape.page_size + position % shape.page_size);
      rows.push_back(windows.rings.rows > 0
                         ? std::int64_t{ring_slots_[b]} * windows.rings.rows + windows.rings.row(position)
                         : -1);
    }
  slots_ = memory_.put(slots), window_rows_ = memory_.put(rows);
}

void Cache::enter(WriteParams& p) const {
  const WindowLayouts windows = shape_.windows();
  p.num_tokens = shape_.batch * shape_.new_tokens, p.num_kv_heads = shape_.num_kv_heads;
  p.slot_mapping = slots_, p.window_mapping = shape_.exact.recent_tokens > 0 ? window_rows_ : nullptr;
  p.pages = pages_, p.page_stride = shape_.pages().page_bytes(), p.page_shift = page_shift(shape_.page_size);
  p.sinks = windows_, p.sink_layout = windows.sinks;
  p.rings = windows_ ? windows_ + sink_bytes_ : nullptr, p.ring_layout = windows.rings;
  p.extents = {static_cast<int>(table_.size()), shape_.batch, shape_.batch};
}

void Cache::enter(PagedCacheView& p, bool checked) const {
  static_cast<SequenceTables&>(p) = tables_;
  p.num_kv_heads = shape_.num_kv_heads;
  p.windows = {shape_.exact.sink_tokens, shape_.exact.recent_tokens};
  p.pages = pages_, p.page_stride = shape_.pages().page_bytes(), p.page_shift = page_shift(shape_.page_size);
  const WindowLayouts windows = shape_.windows();
  p.sinks = windows_, p.sink_layout = windows.sinks;
  p.rings = windows_ ? windows_ + sink_bytes_ : nullptr, p.ring_layout = windows.rings;
  p.extents = checked ? CacheExtents{static_cast<int>(table_.size()), shape_.batch, shape_.batch} : CacheExtents{};
  p.ring_states = checked ? ring_states_ : nullptr;
}

void Cache::read(const Device& device, unsigned* sink) const {
  const CacheBytes bytes = bytes_of(shape_);
  check(
      read_bytes(device.stream(), device.machine().multiprocessors, pages_, bytes.coded, windows_, bytes.exact, sink));
}

HostSequence Cache::sequence(int index) const {
  HostSequence host;
  const std::int64_t page_bytes = shape_.pages().page_bytes();
  for (int i = 0; i < shape_.num_pages(); ++i) {
    const int page = table_[static_cast<std::size_t>(index) * static_cast<std::size_t>(shape_.num_pages()) +
                            static_cast<std::size_t>(i)];
    const std::vector<std::byte> bytes = get(pages_ + page * page_bytes, static_cast<std::size_t>(page_bytes));
    host.pages.insert(host.pages.end(), bytes.begin(), bytes.end());
  }
  const auto slot_of = [&](const std::byte* pool, const WindowLayout& layout, const std::vector<int>& slots) {
    const auto bytes = static_cast<std::size_t>(layout.slot_bytes());
    return bytes > 0 ? get(pool + slots[static_cast<std::size_t>(index)] * layout.slot_bytes(), bytes)
                     : std::vector<std::byte>{};
  };
  host.sinks = slot_of(windows_, shape_.windows().sinks, sink_slots_);
  host.ring = slot_of(windows_ + sink_bytes_, shape_.windows().rings, ring_slots_);
  return host;
}

}  // namespace kvq::bench
