#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

// What the searches of trellis codes share. Their loops run over neighboring numbers and are compiled twice, for plain
// and for wide vectors; each lane does the same operations for any vector width.
#define KVQ_INLINE inline __attribute__((always_inline))
#if defined(__x86_64__) || defined(__i386__)
#define KVQ_X86
#endif

namespace kvq::viterbi {

constexpr std::size_t kMostStates = 256;

/// cost[z] = the smallest of reached[z + p S] over p, oldest[z] = its p, the smallest on a tie.
template <typename Cost>
KVQ_INLINE void keep_survivors(std::span<const Cost> reached, std::span<Cost> cost, std::uint8_t* oldest) {
  const std::size_t states = cost.size();
  std::array<int, kMostStates> from;
  std::fill_n(from.begin(), states, 0);
  std::copy_n(reached.begin(), states, cost.begin());
  int code = 1;
  for (const Cost* slice = reached.data() + states; slice != reached.data() + reached.size(); slice += states, ++code)
    for (std::size_t z = 0; z < states; ++z) {
      const bool better = slice[z] < cost[z];
      cost[z] = better ? slice[z] : cost[z];
      from[z] = better ? code : from[z];
    }
  for (std::size_t z = 0; z < states; ++z) oldest[z] = static_cast<std::uint8_t>(from[z]);
}

/// Calls `of`, whose parameter is a std::integral_constant: the number of branches, or 0 if it is not 2, 4, 8 or 16.
template <typename Of>
KVQ_INLINE void with_branches(std::size_t branches, Of of) {
  switch (branches) {
    case 2: of(std::integral_constant<std::size_t, 2>()); break;
    case 4: of(std::integral_constant<std::size_t, 4>()); break;
    case 8: of(std::integral_constant<std::size_t, 8>()); break;
    case 16: of(std::integral_constant<std::size_t, 16>()); break;
    default: of(std::integral_constant<std::size_t, 0>());
  }
}

/// The code that a state's survivor dropped leads to the state before it. @param oldest  [S]
inline std::size_t step_back(std::size_t state, const std::uint8_t* oldest, int bits, int memory) {
  return (state >> bits) | (std::size_t{oldest[state]} << (bits * (memory - 1)));
}

}  // namespace kvq::viterbi
