#pragma once

#include <kvq/eval/stored_side.h>

#include <memory>

namespace kvq {

/// KIVI (arXiv 2402.02750): groups of 32, affine, scale and minimum in fp16. Keys: a group is 32 tokens of one channel,
/// so tokens are quantized 32 at a time and the last 32 to 63 are exact.
/// @param with_windows  false: the last tokens are quantized as well, and a group that is not full has its own range
std::unique_ptr<StoredSide> kivi_keys(int dim, int bits, bool with_windows = true);
/// Values: a group is 32 channels of a token (the last group may be smaller); the last 32 tokens are exact.
std::unique_ptr<StoredSide> kivi_values(int dim, int bits, bool with_windows = true);

/// Block-GTQ's variant without exact tokens (arXiv 2606.24033, B.4 and D.4): each key is quantized on arrival with the
/// range that the channel had in the 32 tokens of the group before; the first group, for which the paper takes a
/// calibration text, has its own range. Values: tq-mse.
std::unique_ptr<StoredSide> kivi_scale_only_keys(int dim, int bits);

}  // namespace kvq
