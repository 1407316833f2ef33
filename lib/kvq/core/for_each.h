#pragma once

#include <cstdint>
#include <functional>

namespace kvq {

/// Runs body(i) for i in [0, count), in any order. parallel_for() of kvq/compute is one.
using ForEach = std::function<void(std::int64_t count, const std::function<void(std::int64_t)>& body)>;

inline void one_after_another(std::int64_t count, const std::function<void(std::int64_t)>& body) {
  for (std::int64_t i = 0; i < count; ++i) body(i);
}

}  // namespace kvq
