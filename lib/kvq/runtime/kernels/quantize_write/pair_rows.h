#pragma once

#include <kvq/device/host_device.h>
#include <kvq/plan/page_layout.h>

#include <cstddef>
#include <cstdint>

/// Many rows of two-bit trellis codes are written by three kernels: one rotates rows and computes what the bits of
/// their codes gain (pair_gains.cuh), one searches (pair_search.cuh), and one follows the paths found and stores the
/// rows (pair_store.cuh). A thread searches a *pair*: two rows, whose costs are the halves of a word.
namespace kvq {

constexpr int kPairHeadDim = 128;  ///< of rows that are searched in pairs
constexpr int kMostPairMemory = 3;
/// The state that costs are relative to: for the trellises that kvq ships their differences are smallest with it.
KVQ_HD constexpr int pair_reference(int memory) { return memory == 3 ? 23 : 0; }

/// 64 tokens of one head and side in the workspace of a write. Token 16 r + g + 8 h of a block is half h of pair
/// 8 r + g: a lane of the kernels that rotate rows has both rows of a pair.
struct PairBlock {
  static constexpr int kPairs = 32, kTokens = 2 * kPairs;
  int memory = 1;

  KVQ_HD static constexpr int token(int pair, int half) { return pair / 8 * kTileTokens + pair % 8 + 8 * half; }
  KVQ_HD constexpr int states() const { return 1 << 2 * memory; }
  /// Bytes of a pair and step: what all states' paths dropped, two bits each, of both rows.
  KVQ_HD constexpr int survivor_bytes() const { return memory == 1 ? 4 : states() / 2; }

  /// [D, kPairs] two words, the gains of both bits: in each half four times that of a row. Four, because the lowest two
  /// bits of costs are a path's dropped code.
  KVQ_HD static constexpr int gains_bytes() { return kPairHeadDim * kPairs * 8; }
  /// [D, survivor_bytes() / n, kPairs] of n = min(survivor_bytes(), 16) bytes.
  KVQ_HD static constexpr int survivors() { return gains_bytes(); }
  KVQ_HD constexpr int survivors_bytes() const { return kPairHeadDim * kPairs * survivor_bytes(); }
  /// [kTokens] PairRow
  KVQ_HD constexpr int rows() const { return survivors() + survivors_bytes(); }
  /// [kPairs] words: the state in which each row's cheapest path ends, in halves.
  KVQ_HD constexpr int ends() const { return rows() + kTokens * 8; }
  KVQ_HD constexpr int bytes() const { return ends() + kPairs * 4; }
};

/// What is known of a row before the search.
struct PairRow {
  float energy;  ///< sum of its squares
  float d;       ///< packing.md (d) and "One scale a row"; NaN: the row is not finite
};

/// The workspace of a write.
struct PairRows {
  std::byte* blocks = nullptr;  ///< [jobs, blocks_of_job] PairBlock, aligned to 256 bytes
  int blocks_of_job = 0;        ///< tokens / 64, rounded up
  int first_job = 0;            ///< the first job of which rows are there; see quantize_write_kernel
  int memory = 0;               ///< of the trellis

  KVQ_HD std::byte* block(int job, int number) const {
    return blocks + (std::int64_t{job - first_job} * blocks_of_job + number) * PairBlock{memory}.bytes();
  }
};

}  // namespace kvq
