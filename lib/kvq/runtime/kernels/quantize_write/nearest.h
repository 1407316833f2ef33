#pragma once

#include <kvq/runtime/kernels/quantize_write/variant.h>

namespace kvq {

/// Whether choose_centroids() takes rows of so many channels. The generic kernel searches the centroids of others.
bool chooses_centroids(int head_dim);

/// Loads the kernels of choose_centroids() onto the current device, and reads what its launches need.
Status plan_centroids(WriteLaunch& launch, bool bf16);

/// Finds the nearest centroid of each row that has a page (packing.md, "Centroids"), of the sides that have centroids
/// and a head_dim that chooses_centroids(), and stores the index in the page. Sets WriteSide::has_indices of these
/// sides, so that the kernel that writes the rows, next in the stream, reads the indices from the pages.
Status choose_centroids(const WriteLaunch& launch, WriteParams& params, bool bf16, CUstream_st* stream);

}  // namespace kvq
