#pragma once

#include <kvq/artifact/artifact.h>

#include <string>

namespace kvq {

/// The artifact on a page of 80 columns; tables of mixed widths follow below.
std::string describe(const Artifact& artifact, bool color);
/// One layer in detail: geometry, and of every head clip ratio, spectrum, signs and widths.
std::string describe_layer(const Artifact& artifact, const LayerPlan& layer, bool color);

/// Coder, width, group and centroids: "2-bit trellis m3 g128", "mixed codebook 2.00b km16" (mean width, 16 centroids).
std::string coder_text(const TensorPlan& plan);
/// The rotation's recipe, with "c " in front if rows are centered and " shared" behind if all heads share the rotation.
std::string rotation_text(const TensorPlan& plan);

/// A descending spectrum as `columns` block characters of eight heights, on a logarithmic scale.
std::string sparkline(const float* values, int count, int columns);

}  // namespace kvq
