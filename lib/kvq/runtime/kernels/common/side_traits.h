#pragma once

#include <kvq/plan/page_layout.h>
#include <kvq/plan/segment_layout.h>
#include <kvq/plan/table_layout.h>

namespace kvq {

/// The format of one side of the cache, at compile time.
/// @tparam kGroupParamsArg  stored for each group (TileSide::numbers): 2 scale and minimum (affine), 1 scale
/// (symmetric), 0 exact rows
/// @tparam kBfloatArg   scales and minima are bfloat16, else fp16
/// @tparam kIndexBytesArg  of the index of a row's centroid (TileSide::index_bytes)
template <int kDim, int kBitsArg, int kGroupArg, int kGroupParamsArg, bool kBfloatArg = false, int kIndexBytesArg = 0>
struct SideTraits {
  static constexpr int kHeadDim = kDim, kBits = kBitsArg, kGroup = kGroupArg, kGroupParams = kGroupParamsArg,
                       kIndexBytes = kIndexBytesArg;
  static constexpr bool kBfloat = kBfloatArg, kLinear = false, kTable = false, kSegments = false;
  KVQ_HD static constexpr TileSide side() {
    return {
        .head_dim = kDim,
        .bits = kBitsArg,
        .group_size = kGroupArg,
        .numbers = kGroupParamsArg,
        .index_bytes = kIndexBytesArg,
    };
  }
  static constexpr bool kExact = kBits == 16;
  static constexpr bool kAffine = kGroupParams == 2;
  static constexpr int kGroups = kExact ? 1 : kDim / kGroup;
  static constexpr int kStepsInGroup = kExact ? 1 : kGroup / 32;
  static constexpr int kWords = kExact ? 0 : side().words();
  static constexpr int kPerByte = kExact ? 1 : 8 / kBits;
  static constexpr unsigned kMask = kBits == 2 ? 0x03030303u : 0x0F0F0F0Fu;
  /// The largest code: the levels of a group are 0 .. kLevels steps above its lowest one.
  static constexpr float kLevels = static_cast<float>((1 << (kExact ? 1 : kBits)) - 1);
  static_assert(kExact || kBits == 2 || kBits == 4);
  static_assert(kExact || (kGroup % 32 == 0 && kDim % kGroup == 0));
  static_assert(kExact || kDim * kBits % 128 == 0, "codes of each lane are whole words");
};

/// The format of one side in bit tiles whose rows are linear: a row is its scale times a matrix [D, B] times its bits,
/// each +1/2 or -1/2 (BitBasis).
/// @tparam kRowWordsArg  words of a row, B = 32 kRowWords bits
template <int kDim, int kRowWordsArg, bool kBfloatArg = false>
struct LinearSideTraits {
  static constexpr int kHeadDim = kDim, kBits = 1, kGroup = kDim, kGroupParams = 1, kIndexBytes = 0;
  static constexpr bool kBfloat = kBfloatArg, kLinear = true, kTable = false, kSegments = false, kExact = false,
                        kAffine = false;
  KVQ_HD static constexpr TileSide side() {
    return {.head_dim = kDim, .bits = 0, .group_size = kDim, .numbers = 1, .row_words = kRowWordsArg};
  }
  static constexpr int kRowWords = kRowWordsArg, kRowBits = 32 * kRowWords;
  static constexpr int kGroups = 1;
  static constexpr float kLevels = 1.0f;                    ///< a bit of 0 stands for half a level below zero
  static constexpr int kLongChunks = kRowWords / 8;         ///< of eight words
  static constexpr bool kFour = kRowWords / 4 % 2 != 0;     ///< is there a chunk of four words?
  static constexpr int kRest = kRowWords % 4;               ///< words behind the chunks
  static constexpr int kRestAt = (kRowWords - kRest) * 64;  ///< their first byte in a tile
  static constexpr int kChunks = (kRowWords + 7) / 8;  ///< products of keys: the last may have four words and a rest
  /// Of values: pairs of a lane's words, for 16 bytes of a row. Of a rest, not all bytes of the last pair are there.
  static constexpr int kPairs = (kRowWords + 3) / 4;
  static constexpr int kWords = kRowWords;  ///< that keys are multiplied by
  /// Whether lane t of a product has the words 2 t and 2 t + 1 of a chunk, else t and t + 4.
  KVQ_HD static constexpr bool is_long(int chunk) { return chunk < kLongChunks; }
};

/// The format of one side in bit tiles whose rows are one group of codebook codes: a channel is the row's scale times a
/// weighted sum of odd sets of its code's bits (table_layout.h).
template <int kDim, int kBitsArg, bool kBfloatArg = false>
struct TableSideTraits {
  static_assert(kDim == kTableHeadDim && has_table_kernels(kBitsArg));
  static constexpr int kHeadDim = kDim, kBits = kBitsArg, kGroup = kDim, kGroupParams = 1, kIndexBytes = 0;
  static constexpr bool kBfloat = kBfloatArg, kLinear = false, kTable = true, kSegments = false, kExact = false,
                        kAffine = false;
  KVQ_HD static constexpr TileSide side() { return codebook_tiles(kDim, kBits); }
  static constexpr int kGroups = 1;
  static constexpr int kSets = odd_sets(kBits), kWords = table_words(kBits);  ///< words that keys are multiplied by
  static constexpr int kChunks = kWords / 8;  ///< products of keys; of three bits the last has words 8 + t and 12 + t
  KVQ_HD static constexpr bool is_long(int chunk) { return kBits != 3 || chunk == 0; }
};

/// The format of keys in bit tiles of mixed widths with codebook codes (segment_layout.h).
/// @tparam kNumbersArg  scales of a row
template <int kDim, int kRowWordsArg, int kNumbersArg, bool kBfloatArg = false>
struct SegmentSideTraits {
  static_assert(kDim == kTableHeadDim && is_segment_row(kRowWordsArg) && kNumbersArg <= kMostSegments);
  static constexpr int kHeadDim = kDim, kGroup = kDim, kGroupParams = 1, kIndexBytes = 0;
  static constexpr bool kBfloat = kBfloatArg, kLinear = false, kTable = false, kSegments = true, kExact = false,
                        kAffine = false;
  KVQ_HD static constexpr TileSide side() {
    return {
        .head_dim = kDim,
        .bits = 0,
        .group_size = kDim,
        .numbers = kNumbersArg,
        .row_words = kRowWordsArg,
        .segments = true,
    };
  }
  static constexpr int kGroups = kNumbersArg;  ///< scales: units of one are summed up separately
  static constexpr int kRowWords = kRowWordsArg;
  static constexpr int kWords = kMostSegmentUnits;  ///< steps that keys are multiplied in, of a channel for each lane
};

}  // namespace kvq
