#pragma once

#include <array>
#include <cstdint>

namespace kvq {

/// Philox4x32-10 (Salmon et al., SC'11): a counter-based generator. The same key and counter give the same numbers on
/// every machine, for any thread and in any order, so randomness is a function of (seed, purpose, layer, head, index).
std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key);

/// Random numbers of one (seed, purpose, layer, head). Each use of randomness has its own purpose and so its own
/// stream.
class RandomStream {
 public:
  enum class Purpose : std::uint32_t {
    haar = 1,
    signs = 2,
    sign_search = 3,
    kmeans = 4,
    test = 5,
    qjl = 6,
    bootstrap = 7
  };
  RandomStream(std::uint64_t seed, Purpose purpose, std::uint32_t layer = 0, std::uint32_t head = 0);

  std::uint32_t next_u32();
  double next_uniform();  ///< in (0, 1), 53 bits
  double next_normal();   ///< standard Gaussian, Box-Muller

 private:
  std::array<std::uint32_t, 2> key_;
  std::array<std::uint32_t, 4> counter_;
  std::array<std::uint32_t, 4> block_{};
  unsigned used_ = 4;
  bool has_spare_ = false;
  double spare_ = 0.0;
};

}  // namespace kvq
