#pragma once

#include <kvq/core/status.h>
#include <kvq/runtime/loaded_model.h>

#include <cstdint>
#include <string>

struct CUstream_st;

namespace kvq {

/// What became of one layer's golden rows on a device.
struct SelftestLayer {
  int layer = 0;
  StatusCode write = StatusCode::ok, decode = StatusCode::ok;
  std::int64_t rows = 0, firm_rows = 0, firm_faults = 0, soft_faults = 0;
  double output_error = 0.0;  ///< largest difference from the truth over the largest of its head
  std::string message = {};   ///< the first fault, or why a part was not run

  /// Of both parts: a mismatch before what is unsupported.
  StatusCode status() const;
};

/// Largest output_error that passes: results are rounded to bfloat16, which takes 2^-9 of it, or to fp16. Transforms
/// add output_rounding().
inline constexpr double kSelftestOutputTolerance = 0x1p-7;

/// Replays one layer's golden rows on the current device: allocates, waits for the stream. They are rows of weights
/// that hold no rotation, so what the served weights hold is not looked at.
/// @param pointers  into an image on the device, to which the layer was added as not folded, in its key's type
/// @throws          CudaError, Error{internal}
SelftestLayer selftest(const LoadedLayer& layer, const LayerPointers& pointers, CUstream_st* stream);

}  // namespace kvq
