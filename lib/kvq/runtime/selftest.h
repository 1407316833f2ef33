#pragma once

#include <kvq/core/status.h>
#include <kvq/runtime/loaded_model.h>

#include <cstdint>
#include <string>

struct CUstream_st;

namespace kvq {

/// Result of replaying one layer's golden rows on a device.
struct SelftestLayer {
  int layer = 0;
  StatusCode write = StatusCode::ok, decode = StatusCode::ok;
  std::int64_t rows = 0, firm_rows = 0, firm_faults = 0, soft_faults = 0;
  double output_error = 0.0;  ///< largest error of an output, relative to the largest output of its head
  std::string message = {};   ///< the first fault, or why write or decode was not run

  /// The worse of write and decode: a mismatch is worse than unsupported.
  StatusCode status() const;
};

/// Largest output_error that passes. It includes rounding of results to bfloat16 (2^-9) or fp16. Transforms add
/// output_rounding().
inline constexpr double kSelftestOutputTolerance = 0x1p-7;

/// Replays one layer's golden rows on the current device; allocates memory and waits for the stream. Golden rows come
/// from weights without folded rotations, so `layer.folded` is ignored.
/// @param pointers  into an image on the device, to which the layer was added as not folded, in its key's type
/// @throws          CudaError, Error{internal}
SelftestLayer selftest(const LoadedLayer& layer, const LayerPointers& pointers, CUstream_st* stream);

}  // namespace kvq
