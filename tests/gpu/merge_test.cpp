#include "device_memory.h"

#include <kvq/runtime/kernels/merge/params.h>

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

using namespace kvq;
using namespace kvq::test;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float of_bf16(std::uint16_t bits) {
  const std::uint32_t wide = std::uint32_t{bits} << 16;
  float x;
  std::memcpy(&x, &wide, sizeof x);
  return x;
}

/// Results of several parts of the keys, bfloat16, with gaps between tokens and between states.
struct States {
  int count, tokens, heads, dim;
  std::int64_t token_stride, state_stride;
  std::vector<std::uint16_t> values;
  std::vector<float> lse;

  States(int states, int num_tokens, int num_heads, int head_dim)
      : count(states),
        tokens(num_tokens),
        heads(num_heads),
        dim(head_dim),
        token_stride(std::int64_t{num_heads} * head_dim + 8),
        state_stride(token_stride * num_tokens + 16) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    values.resize(static_cast<std::size_t>(state_stride * count), 0xFFFF);
    for (int s = 0; s < count; ++s)
      for (int t = 0; t < tokens; ++t)
        for (int i = 0; i < heads * dim; ++i) {
          const float x = normal(random);
          std::uint32_t bits;
          std::memcpy(&bits, &x, sizeof bits);
          values[at(s, t, i)] = static_cast<std::uint16_t>(bits >> 16);
        }
    for (int i = 0; i < count * tokens * heads; ++i) lse.push_back(5.0f * normal(random));
  }
  std::size_t at(int state, int token, int element) const {
    return static_cast<std::size_t>(state * state_stride + token * token_stride + element);
  }
  float& lse_of(int state, int token, int head) {
    return lse[static_cast<std::size_t>((state * tokens + token) * heads + head)];
  }
};

struct Merged {
  std::vector<std::uint16_t> out;
  std::vector<float> lse;
};
Merged merge(const States& s) {
  Arena arena;
  MergeParams p;
  p.num_states = s.count, p.num_tokens = s.tokens, p.num_heads = s.heads, p.head_dim = s.dim;
  p.states = arena.put(s.values), p.state_stride = s.state_stride, p.token_stride = s.token_stride;
  p.state_lse = arena.put(s.lse);
  p.out_stride = std::int64_t{s.heads} * s.dim;
  const auto rows = static_cast<std::size_t>(s.tokens * s.heads);
  auto* out = arena.take<std::uint16_t>(rows * static_cast<std::size_t>(s.dim), 0xFF);
  p.out = out;
  p.lse = arena.take<float>(rows, 0xFF);
  REQUIRE(check_merge(p).ok());
  REQUIRE(run_merge(p, nullptr).ok());
  check(cudaDeviceSynchronize(), "merge");
  return {get(out, rows * static_cast<std::size_t>(s.dim)), get(p.lse, rows)};
}

}  // namespace

TEST_CASE("Results of parts of the keys are merged by their sums of exponentials", "[runtime][gpu][emulated]") {
  for (const int count : {1, 2, 5})
    for (const int dim : {8, 64, 128, 200}) {
      States s(count, 3, 5, dim);
      s.lse_of(count - 1, 1, 2) = -kInfinity;  // this part has no key: its result may be anything
      for (int c = 0; c < dim; ++c) s.values[s.at(count - 1, 1, 2 * dim + c)] = 0x7FC0;
      const Merged found = merge(s);
      for (int t = 0; t < 3; ++t)
        for (int h = 0; h < 5; ++h) {
          CAPTURE(count, dim, t, h);
          double sum = 0.0;
          std::vector<double> expected(static_cast<std::size_t>(dim));
          for (int part = 0; part < count; ++part) {
            const double weight = std::exp(static_cast<double>(s.lse_of(part, t, h)));
            if (weight == 0.0) continue;
            sum += weight;
            for (int c = 0; c < dim; ++c)
              expected[static_cast<std::size_t>(c)] +=
                  weight * static_cast<double>(of_bf16(s.values[s.at(part, t, h * dim + c)]));
          }
          const std::size_t row = static_cast<std::size_t>(t * 5 + h);
          if (sum == 0.0)
            CHECK(found.lse[row] == -kInfinity);
          else
            CHECK(static_cast<double>(found.lse[row]) == Approx(std::log(sum)).margin(1e-5));
          double worst = 0.0;
          for (int c = 0; c < dim; ++c) {
            const double x = static_cast<double>(
                of_bf16(found.out[row * static_cast<std::size_t>(dim) + static_cast<std::size_t>(c)]));
            worst = std::max(worst, std::abs(x - (sum == 0.0 ? 0.0 : expected[static_cast<std::size_t>(c)] / sum)));
          }
          CHECK(worst < 0.02);
        }
    }
}

TEST_CASE("A result that is NaN stays visible behind a merge", "[runtime][gpu][emulated]") {
  States s(3, 2, 1, 16);
  s.lse_of(1, 0, 0) = std::numeric_limits<float>::quiet_NaN();
  const Merged found = merge(s);
  for (std::size_t c = 0; c < 16; ++c)
    CHECK((std::isnan(of_bf16(found.out[c])) && !std::isnan(of_bf16(found.out[16 + c]))));
  CHECK(std::isnan(found.lse[0]));
}

TEST_CASE("What a merge refuses", "[runtime]") {
  MergeParams p;
  p.num_states = 2, p.num_tokens = 3, p.num_heads = 4, p.head_dim = 64;
  alignas(16) static std::byte memory[64];
  p.states = p.out = memory, p.state_lse = reinterpret_cast<const float*>(memory);
  p.state_stride = p.token_stride = p.out_stride = 256;
  CHECK(check_merge(p).ok());
  const auto refused = [&](auto edit, const char* word) {
    MergeParams wrong = p;
    edit(wrong);
    const Status status = check_merge(wrong);
    CHECK(!status.ok());
    CHECK_THAT(status.message(), Catch::Contains(word));
  };
  refused([](MergeParams& w) { w.num_states = 0; }, "num_states");
  refused([](MergeParams& w) { w.num_tokens = -1; }, "num_tokens");
  refused([](MergeParams& w) { w.num_heads = 0; }, "num_heads");
  refused([](MergeParams& w) { w.head_dim = 12; }, "head_dim");
  refused([](MergeParams& w) { w.states = nullptr; }, "states");
  refused([](MergeParams& w) { w.out = memory + 2; }, "aligned");
  refused([](MergeParams& w) { w.token_stride = 255; }, "token_stride");
  refused([](MergeParams& w) { w.out_stride = 128; }, "out_stride");
  refused([](MergeParams& w) { w.state_stride = -8; }, "state_stride");
  refused([](MergeParams& w) { w.num_tokens = 1 << 30; }, "more than one launch");
}
