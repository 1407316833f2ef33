#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

// What the searches of trellis codes share. Steps are compiled twice, for plain and for wide vectors; each lane does
// the same operations for any vector width. Sanitizers would check each number of a step and take a third of the time
// of tests that search, so steps are not sanitized, and searches assert the sizes.
#define KVQ_UNSANITIZED no_sanitize("address"), no_sanitize("undefined")
#define KVQ_STEP inline __attribute__((always_inline, KVQ_UNSANITIZED))
#define KVQ_STEP_LAMBDA __attribute__((always_inline, KVQ_UNSANITIZED))
#if defined(__x86_64__) || defined(__i386__)
#define KVQ_X86
#endif

namespace kvq::viterbi {

constexpr std::size_t kMostStates = 256;
/// Lanes of a vector. A step reads kLanes costs from any state on, so arrays of costs have as many numbers more.
constexpr std::size_t kLanes = 8;

template <typename Number>
struct Lanes {
  typedef Number Vector __attribute__((vector_size(kLanes * sizeof(Number))));
};
typedef std::int32_t Choices __attribute__((vector_size(kLanes * 4)));
typedef std::uint8_t Codes __attribute__((vector_size(kLanes)));

// By reference: passing such a type by value has a different calling convention on every target.
template <typename Vector, typename Number>
KVQ_STEP void load(const Number* from, Vector& to) {
  std::memcpy(&to, from, sizeof to);
}

// A window of codes w = c[j] + c[j-1] 2^b + ... of m + 1 codes is a new state w mod S together with the oldest code
// w div S, where S = 2^(b m), and it is reached from the old state w div 2^b. So the paths to a new state n come from
// the windows n + p S, p < 2^b.

/// What the costs of the states before count for in the windows from w on. kRepeats: B, or kLanes if B is no less;
/// neighboring windows share the state before.
/// @param cost  [S + kLanes]
template <std::size_t kRepeats, typename Number>
KVQ_STEP void load_before(const Number* cost, std::size_t w, std::size_t branches, auto& to) {
  load(cost + (w >> std::countr_zero(branches)), to);
  if constexpr (kRepeats == 2)
    to = __builtin_shufflevector(to, to, 0, 0, 1, 1, 2, 2, 3, 3);
  else if constexpr (kRepeats == 4)
    to = __builtin_shufflevector(to, to, 0, 0, 0, 0, 1, 1, 1, 1);
  else
    to = __builtin_shufflevector(to, to, 0, 0, 0, 0, 0, 0, 0, 0);
}

/// next[n] = the smallest of cost[w div B] + added(w) over w = n + p S, p < B; oldest[n] = its p, the smallest on a
/// tie. For S >= kLanes.
/// @param cost  [S + kLanes]; @param next, oldest  [S]; @param added  (w, vector) stores what windows w to w + 7 add
template <std::size_t kRepeats, typename Number, typename Added>
KVQ_STEP void take_wide(const Number* cost, std::size_t branches, std::size_t states, Number* next,
                        std::uint8_t* oldest, const Added& added) {
  const auto paths = [&](std::size_t w, auto& to) KVQ_STEP_LAMBDA {
    typename Lanes<Number>::Vector before;
    load_before<kRepeats>(cost, w, branches, before);
    added(w, to);
    to = before + to;
  };
  typename Lanes<Number>::Vector best, other;
  for (std::size_t n = 0; n < states; n += kLanes) {
    paths(n, best);
    Choices from = {};
    for (std::size_t p = 1; p < branches; ++p) {
      paths(n + p * states, other);
      const Choices better = other < best;
      best = better ? other : best;
      from = better ? Choices{} + static_cast<std::int32_t>(p) : from;
    }
    const auto codes = __builtin_convertvector(from, Codes);
    std::memcpy(next + n, &best, sizeof best);
    std::memcpy(oldest + n, &codes, sizeof codes);
  }
}

/// The same for fewer states. @param added  (w) returns what window w adds
template <typename Number, typename Added>
KVQ_STEP void take_narrow(const Number* cost, std::size_t branches, std::size_t states, Number* next,
                          std::uint8_t* oldest, const Added& added) {
  for (std::size_t n = 0; n < states; ++n)
    for (std::size_t p = 0; p < branches; ++p) {
      const std::size_t w = n + p * states;
      const Number path = cost[w / branches] + added(w);
      if (p != 0 && !(path < next[n])) continue;
      next[n] = path;
      oldest[n] = static_cast<std::uint8_t>(p);
    }
}

/// Either of them. @param wide, narrow  their `added`
template <typename Number, typename Wide, typename Narrow>
KVQ_STEP void take(const Number* cost, std::size_t branches, std::size_t states, Number* next, std::uint8_t* oldest,
                   const Wide& wide, const Narrow& narrow) {
  if (states < kLanes)
    take_narrow(cost, branches, states, next, oldest, narrow);
  else if (branches == 2)
    take_wide<2>(cost, 2, states, next, oldest, wide);
  else if (branches == 4)
    take_wide<4>(cost, 4, states, next, oldest, wide);
  else
    take_wide<kLanes>(cost, branches, states, next, oldest, wide);
}

/// The state before a state whose survivor dropped a code.
inline std::size_t step_back(std::size_t state, std::size_t dropped, int bits, int memory) {
  return (state >> bits) | (dropped << (bits * (memory - 1)));
}

}  // namespace kvq::viterbi
