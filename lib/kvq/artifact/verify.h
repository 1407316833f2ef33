#pragma once

#include <kvq/artifact/artifact.h>
#include <kvq/core/for_each.h>

#include <string>
#include <vector>

namespace kvq {

/// The result of one check.
struct Check {
  std::string name;
  bool passed = false;
  std::string detail;
};

/// Checks a file that loads (formats/artifact.md, "Verifying"): content hash, version words, geometry, orthogonality,
/// spectra, recipes, widths, inverses and conditions of transforms, and golden rows, which are quantized again. A check
/// that has nothing to check is left out.
/// @param artifact  of the same file, loaded with HashCheck::left_out
/// @param for_each  runs the layers' checks
std::vector<Check> verify_artifact(const SafetensorsFile& file, const Artifact& artifact,
                                   const ForEach& for_each = one_after_another);
/// @throws Error{io, bad_input, unsupported} for a file that does not load
std::vector<Check> verify_artifact(const std::filesystem::path& path, const ForEach& for_each = one_after_another);

}  // namespace kvq
