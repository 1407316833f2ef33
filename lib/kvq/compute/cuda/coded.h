#pragma once

#include <kvq/compute/backend.h>
#include <kvq/compute/cuda/coded_kernels.h>
#include <kvq/compute/cuda/context.h>

#include <span>
#include <vector>

namespace kvq::cuda {

/// Sums of each task. @throws Error{numerical} if a row is not finite, as the processors' verbs do
std::vector<CodedSums> code_and_weigh(Context& context, std::span<const CodingTask> tasks, bool with_energy);
/// RowCodec::quantize() of rows that are on the device: codec h quantizes rows [h, count, dim].
/// @param to  [codecs, count, dim]  @throws Error{numerical} if a row is not finite
void quantize_rows(Context& context, std::span<const RowCodec> codecs, const float* rows, int count, float* to);
/// Backend::error_covariances().
std::vector<std::vector<double>> error_covariances(Context& context, std::span<const CodingTask> tasks);

}  // namespace kvq::cuda
