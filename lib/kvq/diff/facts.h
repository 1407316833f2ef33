#pragma once

#include <kvq/container/json.h>
#include <kvq/core/geometry.h>
#include <kvq/diff/readings.h>

#include <fmt/format.h>

#include <string>
#include <vector>

namespace kvq {

/// Compares facts of two artifacts and keeps the differences.
class Facts {
 public:
  explicit Facts(std::vector<Difference>& differences) : differences_(differences) {}

  template <typename T>
  void compare(const std::string& what, const T& before, const T& after) {
    if (before == after) return;
    differences_.push_back({what, fmt::format("{}", before), fmt::format("{}", after)});
  }
  /// Compares member by member, and names a member "what.key".
  void compare_json(const std::string& what, const Json& before, const Json& after);
  /// Compares the facts that must agree for one artifact to replace the other.
  void compare_geometry(const std::string& where, const LayerGeometry& before, const LayerGeometry& after);

 private:
  std::vector<Difference>& differences_;
};

}  // namespace kvq
