#pragma once

#include <kvq/runtime/kernels/decode/params.h>
#include <kvq/runtime/kernels/decode/partial.h>
#include <kvq/runtime/kernels/decode/policy.h>

#include <cuda_runtime.h>

namespace kvq {

/// The combine kernel (combine.cuh) of one head_dim, number of rows and type of results. Decode kernels of all formats
/// share it, because partial results do not depend on the format. combine_launch.cuh defines the functions, and one
/// source for each head_dim instantiates them (KvqVariants.cmake).
/// @tparam kRowsArg  rows of a work tile
template <int kHeadDimArg, int kRowsArg, typename ActivationArg>
struct DecodeCombine {
  using Activation = ActivationArg;
  using Partial = DecodePartial<kRowsArg, kHeadDimArg>;
  static constexpr int kHeadDim = kHeadDimArg, kHeads = kRowsArg;
  static constexpr DecodePolicy kPolicy = decode_policy(kHeadDim, kHeads);
  static constexpr int kRows = kHeadDim <= 128 ? 16 : kHeads;  ///< rows of all work tiles that are rotated at once
  static constexpr int kTailRows = kHeads / 4;                 ///< rows of a unit of the tail
  static constexpr int kWarps = 8;                             ///< of a block
  static constexpr int kBatch = kPolicy.combine_batch;
  /// Partial results of a work tile that a block loads at once if it has all heads.
  static constexpr int kPartialsAtOnce = kBatch * (kHeads < kWarps ? kWarps / kHeads : 1);

  /// Loads the kernel onto the current device and sets its shared memory.
  /// @param overlapping  result of load_kernel()
  static cudaError_t prepare(bool& overlapping);
  /// Enqueues the kernel behind the decode kernel.
  /// @param blocks         of this kernel
  /// @param decode_blocks  of the decode kernel
  static cudaError_t launch(const DecodeKernelParams& params, int blocks, int decode_blocks,
                            const decode::CombineSchedule& units, bool overlapping, CUstream_st* stream);
};

}  // namespace kvq
