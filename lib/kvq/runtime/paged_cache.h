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

/// Layers that share page tables and have a pool of pages of their own. Its sliding window is the largest of its
/// layers' (kvq_layer_info), or none if a layer sees all tokens.
struct LayerGroup {
  std::vector<std::int32_t> layers = {};  ///< indices in the whole model
  std::int32_t num_pages = 0;             ///< of page_size tokens, in each of the layers. 0: the group keeps no pages,
                                          ///< which its window must allow: at most the model's recent_tokens
};

/// Capacity of a PagedCache.
struct PagedCacheOptions {
  std::int32_t num_pages = 0;           ///< of page_size tokens, in every layer; 0 with groups
  std::int32_t max_sequences = 0;       ///< that exist at once
  std::int32_t num_sink_slots = 0;      ///< 0: max_sequences. More of them keep sinks of prefixes in the tree
  std::int32_t max_batch = 0;           ///< sequences of a step; 0: max_sequences
  std::int32_t max_tokens = 0;          ///< new tokens of a step, all sequences together; 0: max_batch
  std::vector<LayerGroup> groups = {};  ///< each layer of the rank in one of them; empty: one group of all layers,
                                        ///< which keeps all pages
};

/// A sequence outside the cache, in host memory. Pages: those that restore() needs, one group after the other.
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
///
/// Models that mix sliding windows with full attention give groups of layers, and pass the group of a layer to
/// write_args() and the like:
///
///     {.max_sequences = 2,
///      .groups = {{.layers = {5}, .num_pages = 100}, {.layers = {0, 1, 2, 3, 4}, .num_pages = 20}}}
///
/// Pages behind a group's window go back to its pool while sequences grow, unless the prefix tree or a fork holds them:
/// with steps of up to n new tokens, a sequence has at most page_run(window + max(n, max_step_tokens), page_size) pages
/// of the group. The tree has pages of all groups, or none: insert() registers a sequence's pages up to the first that
/// a group has released, so call it behind each step, or behind the prompt. A group without pages reads its ring alone:
///
/// - The ring begins empty after a hit, so there are no hits, and insert() does nothing.
/// - When a step is written, the ring has the last recent_tokens. A call that attends for n new tokens of a sequence at
///   once (drafts) finds all that they see if the window + n - 1 is at most recent_tokens. Longer chunks must attend
///   before they are written, with prefill_before_write_args().
///
/// What a call does not find is a fault, and its result NaN. So is what is released, if a call widens the window.
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
  /// Takes pages of a group out of the prefix tree that no sequence holds. @return  how many
  std::int32_t evict(std::int32_t pages, std::int32_t group = 0);
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
  /// kvq_step_run for each group. Waits until the tables are copied. @return  false, and nothing changed, if there are
  /// not enough pages
  /// @throws  Error; kvq::Error{usage} for sequences that do not exist or occur twice, and for a batch beyond the
  /// options
  [[nodiscard]] bool step(std::span<const Growth> batch, kvq_stream stream);

  /// Arguments of the step's calls for any layer of a group, valid until the next step; the caller sets rows, queries,
  /// results and workspace. Prefill: the new tokens are the chunks.
  kvq_write_args write_args(std::int32_t group = 0) const;
  kvq_decode_args decode_args(std::int32_t group = 0) const;
  kvq_prefill_args prefill_args(std::int32_t group = 0) const;
  /// For chunks that attend before they are written: see kvq_prefill_args.
  kvq_prefill_args prefill_before_write_args(std::int32_t group = 0) const;
  const kvq_sequences& sequences(std::int32_t group = 0) const;
  /// The group of a layer, an index in PagedCacheOptions::groups. @param layer  index in the whole model
  std::int32_t group_of(std::int32_t layer) const;

  const Cache& handle() const;
  const CacheAllocator& allocator() const;

  /// One layer's bytes on the device. @param layer  index in the whole model
  std::byte* pages(std::int32_t layer) const;  ///< null without pages
  std::byte* sinks(std::int32_t layer) const;  ///< null without sink tokens
  std::byte* rings(std::int32_t layer) const;  ///< null without recent tokens

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvq::runtime
