#pragma once

#include <kvq/core/status.h>
#include <kvq/runtime/kernels/common/format.h>
#include <kvq/runtime/kernels/quantize_write/params.h>

#include <span>

struct CUstream_st;

namespace kvq {

/// The rows of one side in bit tiles for which there are tuned kernels.
struct CodedRows {
  int codebook_bits = 0;  ///< codebook_row_bits(); 0: none
  int pair_memory = 0;    ///< pair_search_memory(); 0: none
  constexpr bool any() const { return codebook_bits > 0 || pair_memory > 0; }
  bool operator==(const CodedRows&) const = default;
};

/// Rows, of all heads and sides of a call, from which on the search in pairs is faster than row by row.
constexpr int kLeastPairRows = 10240;

/// Properties of one variant on one device, for launches; WriteVariant::plan() fills it.
struct WriteLaunch {
  CacheFormat format = {};  ///< of the variant
  int multiprocessors = 0;
  bool overlapping = false;              ///< kernels may start before the stream's previous kernel has ended
  int shared_bytes = 0;                  ///< generic: dynamic shared memory that a block may have
  CodedRows k_rows = {}, v_rows = {};    ///< of the variant
  int least_pair_rows = kLeastPairRows;  ///< of a call that is searched in pairs
};

/// A tuned variant, one entry of variants.json; or the generic kernel for one format.
struct WriteVariant {
  const char* name = "";
  TileSide k, v;
  bool k_bfloat = false, v_bfloat = false;  ///< scales and minima are bfloat16, else fp16
  bool bf16 = true;                         ///< input rows are bfloat16, else fp16
  Status (*plan_kernel)(WriteLaunch& launch) = nullptr;
  Status (*run)(const WriteLaunch& launch, const WriteParams& params, CUstream_st* stream) = nullptr;
  bool tuned = true;  ///< both sides, of any number of tokens; else the generic kernel writes one or both
  CodedRows k_rows = {}, v_rows = {};  ///< of coded_write()

  /// Fills `launch` for the current device.
  Status plan(WriteLaunch& launch) const {
    launch.format = {k, v, k_bfloat, v_bfloat};
    launch.k_rows = k_rows, launch.v_rows = v_rows;
    return plan_kernel(launch);
  }
};

/// All tuned variants that are built.
std::span<const WriteVariant* const> write_variants();

/// The generic variant of one format, for which generic_supports() must be true.
WriteVariant generic_write(const CacheFormat& format, bool bf16);

/// Kernels for sides of which at least one has CodedRows; the other side is written as by generic_write(), unless it
/// has such rows, too. Trellis codes are searched in pairs (pair_rows.h) if a call has a workspace and enough rows,
/// else as by generic_write().
WriteVariant coded_write(const CacheFormat& format, CodedRows k, CodedRows v, bool bf16);
/// Bytes of workspace with which such a variant searches all tokens of a call at once. With fewer bytes it takes
/// several rounds. 0 for all other variants.
std::size_t write_workspace_bytes(const WriteVariant& variant, int num_kv_heads, int num_tokens);

/// generic_write() of some jobs: the keys of all heads, then the values. @param launch  of generic_write()
Status run_generic_write(const WriteLaunch& launch, const WriteParams& params, int first_job, int jobs, bool bf16,
                         CUstream_st* stream);

/// Checks the preconditions of a launch. Host only; reads no device memory.
Status check_write(const WriteVariant& variant, const WriteParams& params);

}  // namespace kvq
