#pragma once

#include <kvq/eval/stored_side.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace kvq {

/// A way to store keys and values that needs no calibration, to compare with.
struct Scheme {
  std::string name;
  std::function<StoredLayer(const LayerGeometry&, int layer, std::uint64_t seed, bool with_windows)> make;

  /// @param with_windows  false: tokens that the scheme keeps exact are codes as well, also in its effective bits
  StoredLayer of_layer(const LayerGeometry& geometry, int layer, std::uint64_t seed, bool with_windows = true) const {
    return make(geometry, layer, seed, with_windows);
  }
};

/// A row of the registry. `<b>` in a name stands for 1 to 8 bits; kivi, kivi-scale-only and turboquant-qjl may go
/// without: 2 bits.
struct SchemeFamily {
  std::string_view pattern, summary;
};
const std::vector<SchemeFamily>& scheme_families();

/// The scheme of a name, such as naive-int2, tq-mse-3 or kivi-k; the suffix -k leaves values exact.
/// @throws Error{usage} listing the names
Scheme find_scheme(std::string_view name);

}  // namespace kvq
