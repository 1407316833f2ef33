#pragma once

#include <kvq/plan/page_layout.h>
#include <kvq/plan/scheme.h>

#include <cstddef>
#include <cstdint>

struct CUstream_st;

/// Kernels that quantize rows as RowCodec does, bit for bit, and weigh the errors. Pointers are of the device.
namespace kvq::cuda {

/// RowCodec::Group.
struct CodedGroup {
  enum class Kind { uniform, codebook, trellis };
  Kind kind = Kind::uniform;
  int first = 0, count = 0;  ///< channels
  int bits = 0, memory = 0;
  bool integers = false;  ///< of a trellis: the search is that in integers
  UniformLevels levels = UniformLevels::affine;
  ZeroKind zero = ZeroKind::floating;
  ScaleRule rule = ScaleRule::minmax;
  ScaleType type = ScaleType::fp16;
  float gain = 1.0f;             ///< of rows with one scale
  const float* table = nullptr;  ///< codebook: [2^b], then [2^b - 1] thresholds; trellis:
                                 ///< TrellisGroup::kernel_table()
};

/// Rows to quantize, and what an error costs.
struct CodedRows {
  const float* rows = nullptr;     ///< [count, dim]
  const float* metric = nullptr;   ///< [dim, dim] or null
  const float* weights = nullptr;  ///< [count] or null
  const CodedGroup* groups = nullptr;
  int num_groups = 0;
  int count = 0, dim = 0;
  int clip_index = -1;      ///< rank of the clip threshold among the sorted magnitudes of a row; -1: no clip
  bool exact = false;       ///< rounded to bfloat16
  bool row_scale = false;   ///< the row has one scale, else each group has one
  float* errors = nullptr;  ///< [count, dim] result: quantized rows minus rows
  bool keeps_rows = false;  ///< `errors` becomes the quantized rows themselves
};

/// Sums over the rows: w e M e, w x M e and w x M x.
struct CodedSums {
  double total = 0.0, along = 0.0, energy = 0.0;
};

/// Constants of TrellisGroup and IntegerSearch; coded.cpp checks that they are equal.
constexpr int kMostStates = 256, kSeamLength = 32;
constexpr int kWarmUp = 40, kLeastOpen = 96, kLargestY = 1152, kFarInUnits = 32;
/// Steps of the first run of the search in integers, without the warm-up.
KVQ_HD constexpr int first_steps(int channels) { return channels < kLeastOpen ? kWarmUp : channels; }
KVQ_HD constexpr int trellis_unit(int bits) { return 20 << 2 * ((bits < 4 ? bits : 4) - 1); }
/// The trellises for which the kernel's search in integers is compiled, and the longest rows whose survivors are in
/// shared memory.
KVQ_HD constexpr bool is_known_trellis(int bits, int memory) {
  return (bits == 2 && memory == 3) || (bits == 3 && memory == 2) || (bits == 4 && memory == 1);
}
constexpr int kMostNearby = 256, kKnownStates = 64;
/// Bytes of shared memory of one warp.
KVQ_HD constexpr int nearby_bytes(int dim) {
  return dim > kMostNearby ? 0 : (dim > 2 * kSeamLength ? dim : 2 * kSeamLength) * kKnownStates;
}
/// The gains of the steps: two in a word, two words a step.
KVQ_HD constexpr int gain_words(int dim) {
  return dim > kMostNearby ? 0 : 2 * (kWarmUp + (dim > kWarmUp ? dim : kWarmUp));
}
KVQ_HD constexpr bool needs_survivors(int bits, int memory, int dim, bool integers) {
  return dim > kMostNearby || !is_known_trellis(bits, memory) || !integers;
}
/// Other trellises: codes that surviving states drop, of one warp, for all steps of a search, in global memory.
KVQ_HD constexpr std::size_t survivor_bytes(int dim) {
  return static_cast<std::size_t>(dim > 2 * kSeamLength ? dim : 2 * kSeamLength) * kMostStates;
}
/// Warps that quantize rows of a trellis at once.
constexpr int kTrellisWarps = 132 * 16;
/// Of all warps.
constexpr std::int64_t trellis_bytes(int dim) { return kTrellisWarps * static_cast<std::int64_t>(survivor_bytes(dim)); }

/// Fills in the errors of all tasks. Rows with a number that is not finite set *failed.
/// @param tasks  [num_tasks] on the device, equal dim  @param most_rows  of a task
/// @param trellis    whether a group is a trellis
/// @param row_scale  whether rows of a task have one scale
/// @param survivors  [kTrellisWarps, survivor_bytes(dim)], if a trellis needs_survivors(); else null
void code_rows(const CodedRows* tasks, int num_tasks, int most_rows, int dim, bool trellis, bool row_scale,
               std::uint8_t* survivors, int* failed, CUstream_st* stream);
/// sums[task]. @param row_sums  [num_tasks, most_rows], for intermediate results
void weigh_errors(const CodedRows* tasks, int num_tasks, int most_rows, int dim, bool with_energy, CodedSums* row_sums,
                  CodedSums* sums, CUstream_st* stream);

}  // namespace kvq::cuda
