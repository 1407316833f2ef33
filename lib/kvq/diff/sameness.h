#pragma once

#include <kvq/container/safetensors.h>

#include <cstdint>
#include <string>
#include <vector>

namespace kvq {

/// identical: equal manifests and tensors, hence equal content hashes. equal_but_for_rounding: the files differ in
/// floating-point numbers by no more than rounding explains, and in what follows from these numbers. different: all
/// else.
enum class SamenessVerdict { identical, equal_but_for_rounding, different };
const char* to_string(SamenessVerdict verdict);

/// Largest differences that rounding explains. Of tensors: relative to the largest magnitude in the tensor. Of numbers
/// of the manifest: relative to the number; larger, because errors and costs are sums over codes, and rounding may
/// change a few codes. docs/versioning.md has what was measured.
inline constexpr double kTensorRounding = 1e-4, kManifestRounding = 1e-3;

/// The largest difference of one kind of number.
struct NumberDifference {
  std::string what;         ///< end of a tensor's name, or path inside the manifest: "rotation", "error/after"
  std::string where;        ///< "layer 3 k", or empty
  double difference = 0.0;  ///< relative
};

struct Sameness {
  SamenessVerdict verdict = SamenessVerdict::identical;
  std::vector<NumberDifference> numbers = {};  ///< of each kind of number that differs, largest first
  std::int64_t golden_rows = 0;  ///< golden rows with other bytes or another firm flag; numbers that differ cause some
  std::string reason = {};       ///< the first fact that makes the files different
};

/// Compares two artifacts of any version, number by number.
Sameness compare_files(const SafetensorsFile& before, const SafetensorsFile& after);

}  // namespace kvq
