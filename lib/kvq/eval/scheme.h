#pragma once

#include <kvq/eval/stored_side.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace kvq {

/// A built-in way of storing rows, without calibration, for comparison.
struct Scheme {
  std::string name;
  std::function<StoredLayer(const LayerGeometry&, int layer, std::uint64_t seed, bool with_windows)> make;

  /// @param with_windows  false: tokens that the scheme keeps exact are quantized as well, also in effective_bits()
  StoredLayer of_layer(const LayerGeometry& geometry, int layer, std::uint64_t seed, bool with_windows = true) const {
    return make(geometry, layer, seed, with_windows);
  }
};

/// An entry of the registry. `<b>` in a name stands for 1 to 8 bits; kivi, kivi-scale-only and turboquant-qjl have 2
/// bits if the name omits `<b>`. kivi-<b>-r<n> has a residual of n tokens, a multiple of 32.
struct SchemeFamily {
  std::string_view pattern, summary;
};
const std::vector<SchemeFamily>& scheme_families();
/// All names that find_scheme() takes, the suffix -k left out: "kivi-2" of the family kivi-<b>.
std::vector<std::string> scheme_names();

/// The scheme of a name, such as naive-int2, tq-mse-3, kivi-2-r32 or kivi-k; the suffix -k leaves values exact.
/// @throws Error{usage} listing the names
Scheme find_scheme(std::string_view name);

}  // namespace kvq
