#include "bench/cache.h"

#include "bench/kernels.h"

#include <algorithm>
#include <numeric>
#include <random>

namespace kvq::bench {

Cache::Cache(const Device& device, const CacheShape& shape, unsigned seed) : shape_(shape) {
  const PageLayout layout = shape.pages();
  const std::int64_t num_pages = std::int64_t{shape.batch} * shape.num_pages();
  pages_ = memory_.take<std::byte>(static_cast<std::size_t>(num_pages * layout.page_bytes()));
  check(fill_pages(device.stream(), pages_, num_pages, layout, shape.k_bfloat, shape.v_bfloat, seed));
  if (const std::int64_t bytes = shape.batch * shape.windows().slot_bytes(); bytes > 0) {
    windows_ = memory_.take<std::byte>(static_cast<std::size_t>(bytes));
    check(fill_rows(device.stream(), windows_, bytes / 2, true, seed + 1));
  }
  std::mt19937 random(seed);
  table_.resize(static_cast<std::size_t>(num_pages));
  std::iota(table_.begin(), table_.end(), 0);
  std::shuffle(table_.begin(), table_.end(), random);
  slots_.resize(static_cast<std::size_t>(shape.batch));
  std::iota(slots_.begin(), slots_.end(), 0);
  std::shuffle(slots_.begin(), slots_.end(), random);
  table_on_device_ = memory_.put(table_), slots_on_device_ = memory_.put(slots_);
  lengths_on_device_ = memory_.put(std::vector<int>(slots_.size(), shape.context));
}

void Cache::read(const Device& device, unsigned* sink) const {
  const CacheBytes bytes = bytes_of(shape_);
  check(
      read_bytes(device.stream(), device.machine().multiprocessors, pages_, bytes.coded, windows_, bytes.exact, sink));
}

HostSequence Cache::sequence(int index) const {
  HostSequence host;
  const std::int64_t page_bytes = shape_.pages().page_bytes(), slot_bytes = shape_.windows().slot_bytes();
  for (int i = 0; i < shape_.num_pages(); ++i) {
    const int page = table_[static_cast<std::size_t>(index) * static_cast<std::size_t>(shape_.num_pages()) +
                            static_cast<std::size_t>(i)];
    const std::vector<std::byte> bytes = get(pages_ + page * page_bytes, static_cast<std::size_t>(page_bytes));
    host.pages.insert(host.pages.end(), bytes.begin(), bytes.end());
  }
  if (windows_)
    host.window =
        get(windows_ + slots_[static_cast<std::size_t>(index)] * slot_bytes, static_cast<std::size_t>(slot_bytes));
  return host;
}

}  // namespace kvq::bench
