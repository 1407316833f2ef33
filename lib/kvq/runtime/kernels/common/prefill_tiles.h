#pragma once

#include <kvq/plan/page_layout.h>

#include <cstdint>

namespace kvq {

/// The workspace of prefill attention: for each work tile (a KV head of a sequence), tiles of tokens in order of
/// position. A tile has the layout that the attention kernel needs in shared memory, keys then values in panels
/// (device/wgmma.cuh) of 64 channels, so that one copy of consecutive bytes loads it.
struct PrefillTiles {
  int head_dim = 128;
  /// So few that shared memory holds three sides at once, and queries of wide heads.
  KVQ_HD constexpr int tokens() const { return head_dim <= 128 ? 128 : 32; }
  KVQ_HD constexpr int panel_bytes() const { return tokens() * 128; }
  KVQ_HD constexpr int side_bytes() const { return head_dim / 64 * panel_bytes(); }
  KVQ_HD constexpr int bytes() const { return 2 * side_bytes(); }
  /// Byte offset of a channel in its side's part of the tile. Eight channels from a multiple of eight on are
  /// contiguous.
  KVQ_HD constexpr int offset(int token, int channel) const {
    return channel / 64 * panel_bytes() + token * 128 + ((channel / 8 % 8) ^ (token % 8)) * 16 + channel % 8 * 2;
  }
};

}  // namespace kvq
