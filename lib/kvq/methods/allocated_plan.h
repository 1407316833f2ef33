#pragma once

#include <kvq/methods/rotated_plan.h>
#include <kvq/stats/layer_stats.h>

#include <memory>
#include <set>
#include <vector>

namespace kvq {

double block_score(BlockScore score, double query_energy, double key_energy);

/// The budget of one side.
struct SideBudget {
  double bits = 0.0;  ///< average code bits of a channel
  int row_bytes = 0;  ///< if not 0: bytes of a head's row instead
  int max_bits =
      0;  ///< if not 0: largest width instead of Options::max_bits, which BitAllocation::free_objective keeps
};

/// The plan of one side with mixed widths, which differ from head to head. For each entry of the scope, `how` names
/// what has one width: a RoPE block of keys, a channel of an eigenbasis (values, or keys with --k-allocation channel),
/// or all channels. With a balanced transform, channels are sorted by eigenvalue already. The channels of one width are
/// gathered, rotated among themselves and quantized as one group.
///   keys, rope_block   R = gather * blockdiag(mixing)
///   channel            R = U * gather * blockdiag(mixing), U of the query moment (keys) or the score-weighted moment
///                      (values); scores are the centered energies along U, for keys times the query's energies
///                      balanced: U = I, scores are the covariance times the metric along each channel
///   none               R = mixing of the whole head; if the average is no whole number, the first channels get one bit
///                      more
/// If only some heads of the keys have RoPE blocks, the unit stays rope_block: a head without blocks lists the smallest
/// width of its channels for all blocks.
/// @param with_error  also measure the error before and after on the sample
TensorPlan allocate_side(const SideView& view, const Options& options, const SideBudget& budget,
                         const std::vector<Allocate>& how, bool with_error, Backend& backend);

/// allocate_side() for many budgets of one view: eigenbases, scores and random matrices are computed once. For one
/// thread at a time.
class SideAllocator {
 public:
  /// All outlive it.
  SideAllocator(const SideView& view, const Options& options, Backend& backend);
  ~SideAllocator();
  TensorPlan plan(const SideBudget& budget, const std::vector<Allocate>& how, bool with_error);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Tensors of a side that allocate_side() or the rotation of tq-mse decides.
RotationTensors allocation_tensors(const Options& options, Side side, int dim);

/// Moments that allocate_side() needs.
std::set<Moment> allocation_needs(const Options& options);

}  // namespace kvq
