#pragma once

namespace kvq::ptx {

inline float at_least(float x, float y) { return x >= y ? 1.0f : 0.0f; }

}  // namespace kvq::ptx
