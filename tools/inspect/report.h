#pragma once

#include <kvq/artifact/artifact.h>

#include <string>

namespace kvq {

/// The whole artifact on a page of 80 columns; mixed widths follow behind the table.
std::string describe(const Artifact& artifact, bool color);
/// One layer in detail: geometry, every head's clip ratio, spectrum, signs, widths.
std::string describe_layer(const Artifact& artifact, const LayerPlan& layer, bool color);

/// How rows are coded: "2-bit trellis m3 g128", "mixed codebook 2.00b km16" (mean width, 16 centroids).
std::string coder_text(const TensorPlan& plan);
/// The rotation's factors, "c " in front if rows are centred, " shared" behind if all heads have the same.
std::string rotation_text(const TensorPlan& plan);

/// Eight block characters for a descending spectrum, on a logarithmic scale.
std::string sparkline(const float* values, int count, int columns);

}  // namespace kvq
