#pragma once

#include <kvq/device/host_device.h>

/// Which tokens of a sequence are exact (formats/pages.md, "Exact windows"): pure functions of positions and lengths,
/// for host and device. Kernels, tests and the host find it here and nowhere else.
namespace kvq {

/// Positions begin .. end - 1.
struct PositionRange {
  int begin = 0, end = 0;
  KVQ_HD constexpr int count() const { return begin < end ? end - begin : 0; }
  KVQ_HD constexpr bool contains(int position) const { return position >= begin && position < end; }
};

/// The tokens of one sequence. Every token is coded (quantized, in pages); attention takes the exact row (bfloat16, in
/// windows) of the positions below sink_end and of those from recent_begin on.
struct SequenceTokens {
  int length = 0;
  int sink_end = 0;      ///< positions below it have exact rows in the sequence's sink slot
  int recent_begin = 0;  ///< positions from it on have exact rows in the sequence's ring; sink_end .. length

  KVQ_HD constexpr bool is_exact(int position) const { return position < sink_end || position >= recent_begin; }
  /// Positions from `first` on whose codes attention takes.
  KVQ_HD PositionRange coded_from(int first) const {
    const int begin = larger(sink_end, first);
    return {begin, larger(begin, recent_begin)};
  }
};

/// The windows of a cache.
struct WindowRule {
  int sink_tokens = 0, recent_tokens = 0;

  KVQ_HD constexpr bool exist() const { return sink_tokens > 0 || recent_tokens > 0; }

  /// @param length      tokens of the sequence
  /// @param exact_from  first position whose exact row the sequence's ring holds
  /// @param has_sinks, has_ring  the sequence has a sink slot, a ring
  KVQ_HD SequenceTokens tokens_of(int length, int exact_from, bool has_sinks, bool has_ring) const {
    SequenceTokens tokens{length, has_sinks ? smaller(sink_tokens, length) : 0, length};
    if (has_ring && recent_tokens > 0)
      tokens.recent_begin = larger(tokens.sink_end, smaller(length, larger(length - recent_tokens, exact_from)));
    return tokens;
  }
};

}  // namespace kvq
