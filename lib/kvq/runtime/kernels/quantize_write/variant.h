#pragma once

#include <kvq/core/status.h>
#include <kvq/runtime/kernels/common/format.h>
#include <kvq/runtime/kernels/quantize_write/params.h>

#include <span>

struct CUstream_st;

namespace kvq {

/// Properties of one variant on one device, for launches; WriteVariant::plan() fills it.
struct WriteLaunch {
  CacheFormat format = {};  ///< of the variant
  int multiprocessors = 0;
  bool overlapping = false;                      ///< kernels may start before the stream's previous kernel has ended
  int shared_bytes = 0;                          ///< generic: dynamic shared memory that a block may have
  int k_codebook_bits = 0, v_codebook_bits = 0;  ///< of the variant
};

/// A tuned variant, one entry of variants.json; or the generic kernel for one format.
struct WriteVariant {
  const char* name = "";
  TileSide k, v;
  bool k_bfloat = false, v_bfloat = false;  ///< scales and minima are bfloat16, else fp16
  bool bf16 = true;                         ///< input rows are bfloat16, else fp16
  Status (*plan_kernel)(WriteLaunch& launch) = nullptr;
  Status (*run)(const WriteLaunch& launch, const WriteParams& params, CUstream_st* stream) = nullptr;
  bool tuned = true;                             ///< both sides; else one or both are written by the generic kernel
  int k_codebook_bits = 0, v_codebook_bits = 0;  ///< of codebook_write()

  /// Fills `launch` for the current device.
  Status plan(WriteLaunch& launch) const {
    launch.format = {k, v, k_bfloat, v_bfloat};
    launch.k_codebook_bits = k_codebook_bits, launch.v_codebook_bits = v_codebook_bits;
    return plan_kernel(launch);
  }
};

/// All tuned variants that are built.
std::span<const WriteVariant* const> write_variants();

/// The generic variant of one format, for which generic_supports() must be true.
WriteVariant generic_write(const CacheFormat& format, bool bf16);

/// A kernel for sides of which at least one has codebook codes that a tuned kernel writes (codebook_row_bits()); the
/// other side is written as by generic_write(), unless it has such codes, too.
/// @param k_bits, v_bits  codebook_row_bits()
WriteVariant codebook_write(const CacheFormat& format, int k_bits, int v_bits, bool bf16);

/// generic_write() of one side. @param launch  of generic_write()
Status run_generic_write(const WriteLaunch& launch, const WriteParams& params, bool value, bool bf16,
                         CUstream_st* stream);

/// Checks the preconditions of a launch. Host only; reads no device memory.
Status check_write(const WriteVariant& variant, const WriteParams& params);

}  // namespace kvq
