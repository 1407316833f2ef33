#include <kvq/codec/row_codec.h>
#include <kvq/solve/sphere_codebook.h>
#include <kvq/solve/trellis_tables.h>

#include "support/random_data.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

using namespace kvq;

namespace {

double relative_error(const Coder& coder, int dim, int rows) {
  const RowCodec codec(coder, 1.0, dim);
  const auto d = static_cast<std::size_t>(dim);
  const std::vector<float> x = test::gaussian(static_cast<std::size_t>(rows) * d, 99);
  std::vector<float> coded = x;
  double error = 0.0, energy = 0.0;
  for (std::size_t row = 0; row < x.size(); row += d) codec.quantize(std::span(coded).subspan(row, d));
  for (std::size_t i = 0; i < x.size(); ++i) {
    error += std::pow(static_cast<double>(x[i]) - static_cast<double>(coded[i]), 2);
    energy += std::pow(static_cast<double>(x[i]), 2);
  }
  return error / energy;
}

}  // namespace

TEST_CASE("The shipped thetas are codes that packing.md allows, of at most 64 states", "[solve][trellis]") {
  for (int bits = 1; bits <= 8; ++bits)
    for (int memory = 1; memory <= 8; ++memory)
      for (const int channels : {8, 16, 32, 64, 128, 256}) {
        INFO("bits " << bits << ", memory " << memory << ", channels " << channels);
        const std::vector<TrellisTaps> taps = trellis_taps(bits, memory, channels);
        if (bits == 1 || bits > 4) {
          CHECK(taps.empty());
          continue;
        }
        REQUIRE(taps.size() == 1);
        CHECK(taps[0].bits == bits);
        CHECK(taps[0].memory >= 1);
        CHECK(taps[0].memory <= memory);
        CHECK(bits * (taps[0].memory + 1) <= 16);
        CHECK(bits * taps[0].memory <= 8);
        CHECK(taps[0].theta.size() == static_cast<std::size_t>(bits * (taps[0].memory + 1)));
        for (const float theta : taps[0].theta) CHECK(std::isfinite(theta));
        LayerPlan plan{
            .layer = 0,
            .geometry =
                {
                    .num_q_heads = 1,
                    .num_kv_heads = 1,
                    .head_dim = channels,
                    .v_head_dim = channels,
                    .softmax_scale = 1.0,
                },
            .k = {},
            .v = std::nullopt,
        };
        plan.k.coder = TrellisCoder{.bits = bits, .group_size = channels, .taps = taps};
        CHECK_NOTHROW(validate(plan));
      }
}

TEST_CASE("Longer groups get no shorter memory, and a longer memory no larger error", "[solve][trellis]") {
  for (int bits = 2; bits <= 4; ++bits) {
    for (int memory = 1; memory <= 8; ++memory) {
      int last = 0;
      for (const int channels : {8, 16, 32, 64, 128, 256}) {
        const int found = trellis_taps(bits, memory, channels).at(0).memory;
        CHECK(found >= last);
        last = found;
      }
    }
    const double lloyd = sphere_codebook(bits, 128).distortion;
    double last = lloyd;
    int last_memory = 0;
    for (int memory = 1; memory <= 4; ++memory) {
      const std::vector<TrellisTaps> taps = trellis_taps(bits, memory, 128);
      if (taps.at(0).memory == last_memory) continue;
      const double error = relative_error(
          TrellisCoder{.bits = bits, .group_size = 128, .rule = ScaleRule::least_squares, .taps = taps}, 128, 60);
      INFO("bits " << bits << ", memory " << taps[0].memory << ": " << error << ", the best scalar quantizer "
                   << lloyd);
      CHECK(error < last * 1.01);
      CHECK(error < lloyd);
      CHECK(error > std::pow(4.0, -bits));  // the bound of rate-distortion theory, less what the sample's scale gives
      last = error;
      last_memory = taps[0].memory;
    }
  }
}

TEST_CASE("In the shortest groups the shipped trellis is no worse than symmetric codes", "[solve][trellis]") {
  for (int bits = 2; bits <= 4; ++bits)
    for (const int dim : {8, 16, 32, 64}) {
      const double trellis = relative_error(
          TrellisCoder{
              .bits = bits,
              .group_size = dim,
              .rule = ScaleRule::least_squares,
              .taps = trellis_taps(bits, 3, dim),
          },
          dim, 4000 / dim);
      const double symmetric = relative_error(
          UniformCoder{
              .bits = bits,
              .group_size = dim,
              .levels = UniformLevels::symmetric,
              .rule = ScaleRule::least_squares,
          },
          dim, 4000 / dim);
      INFO("bits " << bits << ", " << dim << " channels: " << trellis << " and " << symmetric);
      CHECK(trellis < symmetric * 1.02);
    }
}
