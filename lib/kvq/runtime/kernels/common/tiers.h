#pragma once

#include <kvq/device/host_device.h>
#include <kvq/plan/page_layout.h>

/// Which tokens are exact, and which tokens a step demotes (formats/pages.md, "Exact windows" and "Steps"): pure
/// functions of positions and lengths, for host and device.
namespace kvq {

/// Positions begin .. end - 1.
struct PositionRange {
  int begin = 0, end = 0;
  KVQ_HD constexpr int count() const { return begin < end ? end - begin : 0; }
  KVQ_HD constexpr bool contains(int position) const { return position >= begin && position < end; }
};

/// Sinks and recent tokens are exact (bfloat16, in the windows); the others are coded (quantized, in pages).
enum class Tier { sink, coded, recent };

/// The rule, for a cache.
struct Tiers {
  int sink_tokens = 0, recent_tokens = 0;

  /// @param length  tokens of the sequence
  KVQ_HD constexpr Tier tier_of(int position, int length) const {
    return !exact(position, length) ? Tier::coded : position < sink_tokens ? Tier::sink : Tier::recent;
  }
  KVQ_HD constexpr bool exact(int position, int length) const {
    return position < sink_tokens || position >= length - recent_tokens;
  }
  /// The coded tokens of a sequence: sinks lie before them, recent tokens behind them.
  KVQ_HD PositionRange coded(int length) const { return until_recent(smaller(sink_tokens, length), length); }
  /// Those from position `first` on. The exact tokens from there on are the sinks before smaller(sink_tokens, length)
  /// and the recent tokens from `end` on.
  KVQ_HD PositionRange coded_from(int first, int length) const {
    return until_recent(larger(smaller(sink_tokens, length), first), length);
  }
  /// Does a step that appends the token and ends at this length store it in the windows? The ring holds more tokens
  /// than the recent ones, because taking tokens back makes older tokens recent again.
  /// @param ring_rows  rows of a window slot's ring
  KVQ_HD constexpr bool enters_window(int position, int length, int ring_rows) const {
    return position < sink_tokens || (recent_tokens > 0 && position >= length - ring_rows);
  }
  /// Tokens that were exact before a step and are coded after it.
  KVQ_HD constexpr PositionRange demoted(int length_before, int length) const {
    const int first_recent = length_before - recent_tokens, first_kept = length - recent_tokens;
    return {first_recent > sink_tokens ? first_recent : sink_tokens,
            first_kept < length_before ? first_kept : length_before};
  }

 private:
  KVQ_HD PositionRange until_recent(int begin, int length) const {
    return {begin, larger(begin, length - recent_tokens)};
  }
};

}  // namespace kvq
