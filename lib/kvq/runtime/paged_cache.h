#pragma once

/// C++20. Only in the static library (kvq::runtime_static), because the shared library exports the C interface alone.
#include <kvq/runtime/page_allocator.h>
#include <kvq/runtime.hpp>

#include <cstdint>
#include <memory>
#include <span>

namespace kvq::runtime {

/// Capacity of a PagedCache.
struct PagedCacheOptions {
  std::int32_t num_pages = 0;      ///< of page_size tokens, in every layer
  std::int32_t max_sequences = 0;  ///< that exist at once
  std::int32_t max_batch = 0;      ///< sequences of a step; 0: max_sequences
  std::int32_t max_tokens = 0;     ///< new tokens of a step, all sequences together; 0: max_batch
};

/// A cache that owns its memory: pages and windows of all layers, and the page tables. For tests, tools and small
/// users; a serving engine has all this and uses <kvq/runtime.h>. Calls that take a stream enqueue their work on it;
/// use one stream for the life of the cache, or order streams by events. Not thread-safe. A call that throws leaves all
/// sequences as they were; after a step() that threw, write_args() and decode_args() are not valid.
///
///     PagedCache cache(model, device_model, {.num_pages = 100, .max_sequences = 2}, stream);
///     const std::int32_t sequence = cache.create();
///     cache.step({{{.sequence = sequence, .tokens = 1}}}, stream);
///     for each layer:  auto w = cache.write_args(), d = cache.decode_args();  set k, v, q, out, workspace;  run both
///     plans
class PagedCache {
 public:
  /// Allocates on the current device. @throws Error
  PagedCache(const Model& model, const DeviceModel& device_model, const PagedCacheOptions& options, kvq_stream stream);
  ~PagedCache();

  static constexpr std::int32_t kNone = PageAllocator::kNone;

  /// A new empty sequence, or kNone if there are max_sequences.
  std::int32_t create();
  /// A new sequence with the same tokens, or kNone if there are max_sequences. Full pages are shared, the window is
  /// copied; the tokens of both sequences become committed.
  std::int32_t fork(std::int32_t sequence, kvq_stream stream);
  void destroy(std::int32_t sequence);
  /// Commits all tokens of the sequence: rollback() can no longer take them back.
  void commit(std::int32_t sequence);
  /// Takes the last tokens back: at most the model's max_step_tokens, none of which may be committed. The next step
  /// sees the shorter sequence.
  void rollback(std::int32_t sequence, std::int32_t tokens);

  /// Begins a step: allocates pages for the new tokens, copies page tables and lengths to the device, calls
  /// kvq_step_run. Waits until the tables are copied. @return  false, and nothing changed, if there are not enough
  /// pages
  /// @throws  Error; kvq::Error{usage} for sequences that do not exist or occur twice, and for a batch beyond the
  /// options
  [[nodiscard]] bool step(std::span<const Growth> batch, kvq_stream stream);

  /// Arguments of the step's calls for any layer; the caller sets rows, queries, results and workspace.
  kvq_write_args write_args() const;
  kvq_decode_args decode_args() const;

  const Cache& handle() const;
  const PageAllocator& allocator() const;

  /// One layer's bytes on the device. @param layer  index in the whole model
  std::byte* pages(std::int32_t layer) const;
  std::byte* windows(std::int32_t layer) const;  ///< null without windows

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvq::runtime
