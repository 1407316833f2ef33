#pragma once

#include <kvq/plan/scheme.h>

#include <vector>

namespace kvq {

/// The thetas that kvq ships: smallest mean squared error on Gaussian rows that scripts/experiments/search_trellis.py
/// found (formats/packing.md, "Trellis tables").
/// They are searched in integers.
/// @param bits      1..4; one bit has no theta, because none beats symmetric codes
/// @param memory    largest memory allowed; smaller if 64 states are not enough for it
/// @param channels  of the shortest group: short groups gain nothing from a long memory
/// @return          empty for one bit and for more than four
std::vector<TrellisTaps> trellis_taps(int bits, int memory, int channels);

}  // namespace kvq
