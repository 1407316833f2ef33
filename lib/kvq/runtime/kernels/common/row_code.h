#pragma once

#include <kvq/plan/page_layout.h>
#include <kvq/plan/segment_layout.h>
#include <kvq/runtime/kernels/common/linear_taps.h>

#include <cstdint>

/// What generic kernels know of coded rows beside the sizes of their tiles: plain structs in device memory, made on the
/// host by row_code_data.h.
namespace kvq {

enum class CodeKind : std::int32_t { affine, symmetric, codebook, trellis };

/// A segment of a row in bit tiles. Its groups follow each other, each coded for itself.
struct RowSegment {
  BitSegment place = {};
  CodeKind kind = CodeKind::symmetric;
  int group_size = 0;     ///< channels of a group, at most those of the segment
  int first_number = 0;   ///< number of the row that is the first group's scale; of rows with one scale 0
  int memory = 0;         ///< of a trellis
  bool integers = false;  ///< of a trellis: the search is that in integers (packing.md (d))
  int table = 0;          ///< first element in RowCode::tables. Codebook: [2^b] entries, then [2^b - 1] thresholds;
                          ///< trellis: TrellisGroup::kernel_table()
  float gain = 1.0f;      ///< of rows with one scale
};

/// The rows of one KV head.
struct HeadRows {
  static constexpr int kMostSegments = 8;
  int num_segments = 0;
  int groups = 0;  ///< of affine codes: the number of the first minimum or zero point
  RowSegment segments[kMostSegments] = {};
};

/// The rows of one side. All null for exact rows, and for code tiles without centroids.
struct RowCode {
  // bit tiles
  const HeadRows* heads = nullptr;  ///< [Hkv]
  const float* tables = nullptr;
  // Of sides with table_bits, else null: [Hkv, odd_sets(b)] table_weights(), [Hkv] level_tables() aligned to 16
  const float* weights = nullptr;
  const LevelTable* levels = nullptr;
  /// [Hkv] of keys with TileSide::segments, aligned to 16, else null; what a channel of the query counts for a channel
  /// of a unit: [Hkv, 1, kMostUnitChannels] taps
  const SegmentProgram* programs = nullptr;
  LinearTaps program_taps = {};
  bool one_scale = false;          ///< a row has one scale (packing.md, "One scale a row")
  int search_bytes = 0;            ///< that the search of a trellis needs at most (trellis_search_bytes())
  bool searches_each_row = false;  ///< there is a trellis of which a warp searches one row at a time

  // centroids
  int num_centroids = 0;
  bool joint = false;                        ///< one index for all heads of a token
  bool per_head = false;                     ///< centroids are [Hkv, C, D], else [1, C, D]
  const float* centroids = nullptr;          ///< unrotated: for writing, and for rows that are rotated back
  const float* rotated_centroids = nullptr;  ///< M @ A: a row is read in the basis of x @ A
};

/// The trellises that kvq ships: kernels have a search in integers for each (trellis_search.cuh).
KVQ_HD constexpr bool is_known_trellis(int bits, int memory) {
  return (bits == 2 && memory >= 1 && memory <= 3) || (bits == 3 && memory >= 1 && memory <= 2) ||
         (bits == 4 && memory == 1);
}
/// Rows that a warp searches in one call.
constexpr int kMostSearched = 4;
// The search in integers; integer_search.h has the same numbers.
constexpr int kWarmUp = 40;      ///< steps of the first run before the row, and behind the seam of short rows
constexpr int kLeastOpen = 96;   ///< channels of rows that need no second run
constexpr int kLargestY = 1152;  ///< of y in 1/256
constexpr int kFarInUnits = 32;  ///< cost of states in which the second run does not begin
KVQ_HD constexpr int trellis_unit(int bits) { return 20 << 2 * ((bits < 4 ? bits : 4) - 1); }
/// The search in binary32 begins with a run over so many channels on both sides of the seam.
constexpr int kSeamLength = 32;
/// Steps of the first run of a search, without the warm-up of that in integers.
KVQ_HD constexpr int first_steps(int channels, bool integers) {
  if (integers) return channels < kLeastOpen ? kWarmUp : channels;
  return 2 * (channels < kSeamLength ? channels : kSeamLength);
}
/// Steps of the longer run of a search.
KVQ_HD constexpr int search_steps(int channels, bool integers) {
  const int first = first_steps(channels, integers);
  return channels > first ? channels : first;
}

/// What the search of a known trellis has in shared memory: for each row that is searched at the same time the paths to
/// all states before and after a step, and what each path's codes were at the end of each unit of steps; behind them
/// the codes of the path of each of the warp's rows, and what the bits of a code gain at each step.
struct SearchLayout {
  int bits, memory;
  KVQ_HD constexpr int states() const { return 1 << (bits * memory); }
  KVQ_HD constexpr int branches() const { return 1 << bits; }
  KVQ_HD constexpr int families() const { return states() / branches(); }
  /// States of a lane: as few as let a warp search kMostSearched rows at once, at most two.
  KVQ_HD constexpr int lane_states() const { return states() * kMostSearched > 32 ? 2 : 1; }
  /// Rows that a warp searches at the same time.
  KVQ_HD constexpr int rows() const { return 32 * lane_states() / states(); }
  /// The codes of so many steps are one word.
  KVQ_HD constexpr int unit_steps() const { return bits == 2 ? 16 : 8; }
  KVQ_HD constexpr int units(int channels) const { return (channels + unit_steps() - 1) / unit_steps(); }
  KVQ_HD constexpr int unit_bytes() const { return states() * 4; }
  /// Costs before a step, costs after it, words of codes before it and after it. The numbers of the predecessors of a
  /// family of states are neighbors.
  KVQ_HD constexpr int paths_bytes() const { return 4 * 4 * states(); }
  /// Such that the lanes of different rows store to different banks.
  KVQ_HD constexpr int row_bytes(int channels) const {
    return (paths_bytes() + units(search_steps(channels, true)) * unit_bytes() + 127) / 128 * 128 +
           (lane_states() == 2 ? 64 : 4 * states());
  }
  /// Where the stream of codes of one of the warp's rows begins: a word for each unit of steps, and one for the state
  /// in the end.
  KVQ_HD constexpr int stream_at(int row, int channels) const {
    return rows() * row_bytes(channels) + row * 4 * (units(channels) + 1);
  }
  /// Words with the gains of a step, two in each.
  KVQ_HD constexpr int gain_words() const { return (bits + 1) / 2; }
  /// Gains of one of the warp's rows, from the first step of the warm-up on. The search loads some of kAhead steps
  /// behind the last one.
  static constexpr int kAhead = 4;
  KVQ_HD constexpr int gains_at(int row, int channels) const {
    return (stream_at(kMostSearched, channels) + 15) / 16 * 16 +
           row * 4 * gain_words() * (kWarmUp + search_steps(channels, true) + kAhead);
  }
  KVQ_HD constexpr int bytes(int channels) const { return gains_at(kMostSearched, channels); }
};

/// Rows that a warp searches at the same time, of any trellis.
KVQ_HD constexpr int searched_at_once(int bits, int memory, bool integers) {
  return integers && is_known_trellis(bits, memory) ? SearchLayout{bits, memory}.rows() : 1;
}

/// Memory of a warp's search. Of a trellis that is not known, or searched in binary32: costs of states before and after
/// a step, then survivors, one byte for each step and state.
KVQ_HD constexpr int trellis_search_bytes(int bits, int memory, int channels, bool integers) {
  if (integers && is_known_trellis(bits, memory)) return SearchLayout{bits, memory}.bytes(channels);
  const int states = 1 << (bits * memory);
  return (2 * static_cast<int>(sizeof(float)) + search_steps(channels, integers)) * states;
}

}  // namespace kvq
