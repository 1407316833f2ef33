#pragma once

#include <kvq/eval/stored_side.h>

#include <memory>

namespace kvq {

/// Tokens of KIVI's exact residual R as published.
inline constexpr int kKiviResidual = 128;

/// KIVI (arXiv 2402.02750): groups of 32, affine, scale and minimum in fp16. Keys: a group is 32 tokens of one channel.
/// They are quantized when R of them are there, after the query of the last one has read them. So query i reads its own
/// key and the i mod R keys before it exactly.
/// @param residual      R, a multiple of 32
/// @param with_windows  false: the last tokens are quantized as well, and a group that is not full has its own range
std::unique_ptr<StoredSide> kivi_keys(int dim, int bits, int residual = kKiviResidual, bool with_windows = true);
/// Values: a group is 32 channels of a token (the last group may be smaller). A query reads its own value and the R
/// values before it exactly.
std::unique_ptr<StoredSide> kivi_values(int dim, int bits, int residual = kKiviResidual, bool with_windows = true);

/// Block-GTQ's variant without exact tokens (arXiv 2606.24033, B.4 and D.4): each key is quantized on arrival with the
/// range that the channel had in the 32 tokens of the group before; the first group, for which the paper takes a
/// calibration text, has its own range. Values: tq-mse.
std::unique_ptr<StoredSide> kivi_scale_only_keys(int dim, int bits);

}  // namespace kvq
