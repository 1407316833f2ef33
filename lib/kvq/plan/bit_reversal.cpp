#include <kvq/plan/bit_reversal.h>

namespace kvq {

std::vector<int> bit_reversal_places(int n) {
  int bits = 0;
  while ((1 << bits) < n) ++bits;
  std::vector<int> places;
  for (int i = 0; i < (1 << bits); ++i) {
    int reversed = 0;
    for (int b = 0; b < bits; ++b) reversed |= ((i >> b) & 1) << (bits - 1 - b);
    if (reversed < n) places.push_back(reversed);
  }
  return places;
}

}  // namespace kvq
