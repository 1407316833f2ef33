#include <kvq/runtime/checks.h>
#include <kvq/runtime/kernels/plan_step/launch.h>

#include <cstdint>

namespace kvq {

namespace {

Status check_windows(const PlanStepParams& p) {
  constexpr StatusCode kBad = StatusCode::invalid_argument;
  const auto [sink_tokens, recent_tokens] = p.windows;
  if (p.max_rollback < 0)
    return Status::fail(kBad, "plan_step: max_rollback is %d, expected 0 or more", p.max_rollback);
  if (sink_tokens + recent_tokens == 0) return {};
  if (p.sink_rows < sink_tokens || p.sink_rows % kTileTokens || p.ring_rows < 0 || p.ring_rows % kTileTokens)
    return Status::fail(kBad,
                        "plan_step: %d sink and %d ring rows, expected whole tiles of %d, and %d or more sink rows",
                        p.sink_rows, p.ring_rows, kTileTokens, sink_tokens);
  if (recent_tokens > 0 && std::int64_t{recent_tokens} + p.max_rollback > p.ring_rows)
    return Status::fail(kBad,
                        "plan_step: %d ring rows do not hold %d recent tokens and %d more that taking tokens back "
                        "makes recent again",
                        p.ring_rows, recent_tokens, p.max_rollback);
  if (p.num_tokens > 0 && !p.window_mapping)
    return Status::fail(kBad, "plan_step: %d sink and %d recent tokens need a window_mapping", sink_tokens,
                        recent_tokens);
  return {};
}

}  // namespace

Status check_plan_step(const PlanStepParams& p) {
  constexpr StatusCode kBad = StatusCode::invalid_argument;
  if (p.num_tokens < 0) return Status::fail(kBad, "plan_step: %d tokens: expected 0 or more", p.num_tokens);
  for (const Status& status :
       {check_page_shift("plan_step", p.page_shift), check_sequences("plan_step", p, p.windows), check_windows(p)})
    if (!status.ok()) return status;
  if (p.batch > 0 && !p.token_indptr) return Status::fail(kBad, "plan_step: token_indptr must not be null");
  if (p.num_tokens > 0 && !p.slot_mapping) return Status::fail(kBad, "plan_step: slot_mapping must not be null");
  const Status mappings =
      check_numbers("plan_step", "slot_mapping and window_mapping", {p.slot_mapping, p.window_mapping}, 8);
  return mappings.ok() ? check_numbers("plan_step", "token_indptr", {p.token_indptr}, 4) : mappings;
}

}  // namespace kvq
