#pragma once

#include <vector>

namespace kvq {

/// Order in which bit reversal visits 0 .. n-1: place[k] is the index that the k-th largest gets (OSCAR A.4, P_br). For
/// a power of two place is the bit reversal; for other n the reversal of the next power of two without indices from n
/// on (the van der Corput order), so that every prefix is spread evenly.
std::vector<int> bit_reversal_places(int n);

}  // namespace kvq
