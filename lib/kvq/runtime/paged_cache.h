#pragma once

/// C++20. Only in the static library (kvq::runtime_static), because the shared library exports the C interface alone.
#include <kvq/runtime/cache_allocator.h>
#include <kvq/runtime.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace kvq::runtime {

/// Capacity of a PagedCache.
struct PagedCacheOptions {
  std::int32_t num_pages = 0;       ///< of page_size tokens, in every layer
  std::int32_t max_sequences = 0;   ///< that exist at once
  std::int32_t num_sink_slots = 0;  ///< 0: max_sequences. More of them keep sinks of prefixes in the tree
  std::int32_t max_batch = 0;       ///< sequences of a step; 0: max_sequences
  std::int32_t max_tokens = 0;      ///< new tokens of a step, all sequences together; 0: max_batch
};

/// A sequence outside the cache, in host memory.
struct SavedSequence {
  std::int64_t length = 0, exact_from = 0;
  bool has_sinks = false;
  std::vector<std::byte> pages = {}, sinks = {}, ring = {};
};

/// A cache that owns its memory: pages, sinks and rings of all layers, the page tables, and a prefix tree. For tests,
/// tools and small users; a serving engine has all this and uses <kvq/runtime.h>. Calls that take a stream enqueue
/// their work on it; use one stream for the life of the cache, or order streams by events. Not thread-safe. A call that
/// throws leaves all sequences as they were; after a step() that threw, the arguments below are not valid.
///
///     PagedCache cache(model, device_model, {.num_pages = 100, .max_sequences = 2}, stream);
///     const std::int32_t sequence = cache.create();
///     cache.step({{{.sequence = sequence, .tokens = 1}}}, stream);
///     for each layer:  auto w = cache.write_args(), d = cache.decode_args();  set k, v, q, out, workspace;
///                      plan.write(cache.handle(), layer, w, stream), plan.decode(cache.handle(), layer, d, stream)
class PagedCache {
 public:
  /// Allocates on the current device. @throws Error
  PagedCache(const Model& model, const DeviceModel& device_model, const PagedCacheOptions& options, kvq_stream stream);
  ~PagedCache();

  static constexpr std::int32_t kNone = CacheAllocator::kNone;

  /// A new empty sequence, or kNone if there are max_sequences.
  std::int32_t create();
  /// A new sequence that begins with the longest match of the prefix tree; its first step takes the tokens behind
  /// `hit_tokens`.
  CacheAllocator::Start create(std::span<const std::int32_t> tokens);
  /// A new sequence with the same tokens, or kNone if there are max_sequences. Pages are shared, the ring is copied;
  /// the tokens of both sequences become committed.
  std::int32_t fork(std::int32_t sequence, kvq_stream stream);
  void destroy(std::int32_t sequence);
  /// Registers the sequence's full pages in the prefix tree. @param tokens  of the positions 0, 1, ...
  void insert(std::int32_t sequence, std::span<const std::int32_t> tokens);
  /// Takes pages out of the prefix tree that no sequence holds. @return  how many
  std::int32_t evict(std::int32_t pages);
  /// Commits all tokens of the sequence: rollback() can no longer take them back.
  void commit(std::int32_t sequence);
  /// Takes the last tokens back: at most the model's max_step_tokens, none of which may be committed. The next step
  /// sees the shorter sequence.
  void rollback(std::int32_t sequence, std::int32_t tokens);
  /// Copies a sequence to the host. Waits for the stream. The sequence stays.
  SavedSequence save(std::int32_t sequence, kvq_stream stream) const;
  /// A new sequence with these contents, or kNone if there is no room. Waits for the stream.
  std::int32_t restore(const SavedSequence& saved, kvq_stream stream);

  /// Begins a step: allocates pages for the new tokens, copies page tables and lengths to the device, calls
  /// kvq_step_run. Waits until the tables are copied. @return  false, and nothing changed, if there are not enough
  /// pages
  /// @throws  Error; kvq::Error{usage} for sequences that do not exist or occur twice, and for a batch beyond the
  /// options
  [[nodiscard]] bool step(std::span<const Growth> batch, kvq_stream stream);

  /// Arguments of the step's calls for any layer, valid until the next step; the caller sets rows, queries, results and
  /// workspace. Prefill: the new tokens are the chunks.
  kvq_write_args write_args() const;
  kvq_decode_args decode_args() const;
  kvq_prefill_args prefill_args() const;
  const kvq_sequences& sequences() const;

  const Cache& handle() const;
  const CacheAllocator& allocator() const;

  /// One layer's bytes on the device. @param layer  index in the whole model
  std::byte* pages(std::int32_t layer) const;
  std::byte* sinks(std::int32_t layer) const;  ///< null without sink tokens
  std::byte* rings(std::int32_t layer) const;  ///< null without recent tokens

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvq::runtime
