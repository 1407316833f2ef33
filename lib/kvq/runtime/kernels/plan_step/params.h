#pragma once

#include <kvq/plan/page_layout.h>

#include <cstdint>

namespace kvq {

/// One step of a batch: where its new tokens go, and which old tokens are demoted (evicted from the recent window). The
/// same for all layers that share page tables and window slots. Lengths are read on the device, so that a captured
/// graph can be replayed with other lengths.
///
/// Order of a step: plan_step, then demote, then for each layer quantize_write and decode (formats/pages.md, "Steps").
struct PlanStepParams {
  int batch = 0;       ///< B
  int num_tokens = 0;  ///< T rows of the step's keys and values; rows behind the last sequence's are not written

  const std::int32_t* seq_lens = nullptr;      ///< [B] tokens of each sequence after the step
  const std::int32_t* token_indptr = nullptr;  ///< [B + 1] ascending: rows of each sequence's new tokens, its last ones

  const std::int32_t* page_table = nullptr;   ///< [B, max_pages], or one list if page_indptr is given
  const std::int32_t* page_indptr = nullptr;  ///< [B + 1] or null
  std::int64_t page_table_stride = 0;
  int page_shift = 6;  ///< log2 of page_size: 4, 5 or 6

  int sink_tokens = 0, recent_tokens = 0;
  int max_rollback = 0;                        ///< most tokens that are taken back at once; not read on the device
  const std::int32_t* window_slots = nullptr;  ///< [B] window slot of each sequence; null without windows
  WindowLayout window_layout = {};

  // results
  std::int64_t* slot_mapping = nullptr;    ///< [T] page * page_size + slot of tokens that are coded; else negative
  std::int64_t* window_mapping = nullptr;  ///< [T] slot * rows() + row() in the windows, else -1; null without windows
  int max_demotions = 0;                   ///< M, at least min(T, B * recent_tokens)
  std::int64_t* demote_from = nullptr;     ///< [M] as window_mapping; sequence by sequence, then -1. Null if M is 0
  std::int64_t* demote_to = nullptr;       ///< [M] as slot_mapping
  std::int32_t* num_demotions = nullptr;   ///< [1]; null if M is 0
};

}  // namespace kvq
