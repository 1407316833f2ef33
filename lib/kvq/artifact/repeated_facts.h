#pragma once

#include <kvq/artifact/artifact.h>
#include <kvq/container/safetensors.h>

#include <string>

/// Checks of what one file says twice. Each returns the first fault, or an empty text.
namespace kvq {

/// `requires` against the features of the plans, and `version` against the lowest version that has these features.
std::string version_fault(const SafetensorsFile& file, const Artifact& artifact);

/// Kind, heads and values of a layer against each other.
std::string geometry_fault(const LayerPlan& plan);

/// Eigenvalues: descending, and none below 0 by more than rounding explains.
std::string spectrum_fault(const Rotation& rotation, int dim);

/// Widths of RoPE blocks and sources of channels against the widths of channels, for mixed widths.
std::string widths_fault(const TensorPlan& plan, const LayerGeometry& geometry);

}  // namespace kvq
