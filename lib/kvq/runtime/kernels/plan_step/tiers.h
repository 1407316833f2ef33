#pragma once

#include <kvq/plan/page_layout.h>

/// Which tokens are exact, and which tokens a step demotes (formats/pages.md, "Exact windows" and "Steps"): pure
/// functions of positions and lengths, for host and device.
namespace kvq {

/// Positions begin .. end - 1.
struct PositionRange {
  int begin = 0, end = 0;
  KVQ_HD constexpr int count() const { return begin < end ? end - begin : 0; }
};

struct Tiers {
  int sink_tokens = 0, recent_tokens = 0;
  int ring_rows = 0;  ///< rows of a window slot's ring

  /// Is the token exact in a sequence of this length?
  KVQ_HD constexpr bool exact(int position, int length) const {
    return position < sink_tokens || position >= length - recent_tokens;
  }
  /// Does a step that appends the token and ends at this length store it in the windows? The ring holds more tokens
  /// than the recent ones, because taking tokens back makes older tokens recent again.
  KVQ_HD constexpr bool enters_window(int position, int length) const {
    return position < sink_tokens || (recent_tokens > 0 && position >= length - ring_rows);
  }
  /// Tokens that were exact before a step and are coded after it.
  KVQ_HD constexpr PositionRange demoted(int length_before, int length) const {
    const int first_recent = length_before - recent_tokens, first_kept = length - recent_tokens;
    return {first_recent > sink_tokens ? first_recent : sink_tokens,
            first_kept < length_before ? first_kept : length_before};
  }
};

}  // namespace kvq
