#include <kvq/runtime/kernels/plan_step/launch.h>

#include <algorithm>
#include <cstdint>

namespace kvq {

namespace {

Status check_windows(const PlanStepParams& p) {
  constexpr StatusCode kBad = StatusCode::invalid_argument;
  const WindowLayout& w = p.window_layout;
  if (p.sink_tokens < 0 || p.recent_tokens < 0 || p.max_rollback < 0)
    return Status::fail(kBad, "plan_step: sink_tokens, recent_tokens and max_rollback must be 0 or more");
  if (p.sink_tokens + p.recent_tokens == 0) return {};
  if (w.sink_rows < p.sink_tokens || w.sink_rows % kTileTokens || w.ring_rows < 0 || w.ring_rows % kTileTokens)
    return Status::fail(kBad,
                        "plan_step: %d sink and %d ring rows, expected whole tiles of %d, and %d or more sink rows",
                        w.sink_rows, w.ring_rows, kTileTokens, p.sink_tokens);
  if (p.recent_tokens > 0 && std::int64_t{p.recent_tokens} + p.max_rollback > w.ring_rows)
    return Status::fail(kBad,
                        "plan_step: %d ring rows do not hold %d recent tokens and %d more that taking tokens back "
                        "makes recent again",
                        w.ring_rows, p.recent_tokens, p.max_rollback);
  if (p.batch > 0 && !p.window_slots)
    return Status::fail(kBad, "plan_step: %d sink and %d recent tokens need window_slots", p.sink_tokens,
                        p.recent_tokens);
  if (p.num_tokens > 0 && !p.window_mapping)
    return Status::fail(kBad, "plan_step: %d sink and %d recent tokens need a window_mapping", p.sink_tokens,
                        p.recent_tokens);
  return {};
}

}  // namespace

Status check_plan_step(const PlanStepParams& p) {
  constexpr StatusCode kBad = StatusCode::invalid_argument;
  if (p.batch < 0 || p.num_tokens < 0 || p.max_demotions < 0)
    return Status::fail(kBad, "plan_step: %d sequences, %d tokens, %d demotions: expected 0 or more", p.batch,
                        p.num_tokens, p.max_demotions);
  if (p.page_shift < 4 || p.page_shift > 6)
    return Status::fail(StatusCode::unsupported, "plan_step: pages of 2^%d tokens; supported are 16, 32 and 64",
                        p.page_shift);
  const Status windows = check_windows(p);
  if (!windows.ok()) return windows;
  if (p.batch > 0 && (!p.seq_lens || !p.token_indptr || !p.page_table))
    return Status::fail(kBad, "plan_step: seq_lens, token_indptr and page_table must not be null");
  if (p.batch > 1 && !p.page_indptr && p.page_table_stride < 1)
    return Status::fail(kBad, "plan_step: page_table_stride is %lld, expected 1 or more",
                        static_cast<long long>(p.page_table_stride));
  if (p.num_tokens > 0 && !p.slot_mapping) return Status::fail(kBad, "plan_step: slot_mapping must not be null");
  const std::int64_t most = std::min<std::int64_t>(p.num_tokens, std::int64_t{p.batch} * p.recent_tokens);
  if (p.max_demotions < most)
    return Status::fail(kBad,
                        "plan_step: room for %d demotions, expected %lld: a step of %d tokens of %d sequences demotes "
                        "as many at most",
                        p.max_demotions, static_cast<long long>(most), p.num_tokens, p.batch);
  if (p.max_demotions > 0 && (!p.demote_from || !p.demote_to || !p.num_demotions))
    return Status::fail(kBad, "plan_step: demote_from, demote_to and num_demotions must not be null");
  return {};
}

}  // namespace kvq
