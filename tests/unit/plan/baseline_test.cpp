#include <kvq/plan/baseline.h>

#include <catch2/catch.hpp>

using namespace kvq;

namespace {

/// "2g64 40": width, group size and bytes of the baseline of rows of `bytes`.
std::string baseline(int bytes, int dim) {
  const UniformCoder coder = plain_baseline(bytes, dim);
  return std::to_string(coder.bits) + "g" + std::to_string(coder.group_size) + " " +
         std::to_string(row_bytes(Coder{coder}, dim));
}

}  // namespace

TEST_CASE("The baseline has at least the plan's bytes, as few as min-max codes can have", "[plan]") {
  CHECK(baseline(40, 128) == "2g64 40");   // oscar
  CHECK(baseline(36, 128) == "2g128 36");  // quarot
  CHECK(baseline(34, 128) == "2g128 36");  // symmetric codes
  CHECK(baseline(45, 128) == "2g32 48");   // mixed widths
  CHECK(baseline(68, 128) == "4g128 68");  // saw-int4
  CHECK(baseline(48, 128) == "2g32 48");   // not one bit in groups of 16
  CHECK(baseline(64, 128) == "3g32 64");   // not two bits in groups of 16
  CHECK(baseline(69, 128) == "4g64 72");
  CHECK(baseline(1, 128) == "1g128 20");     // nothing is as small
  CHECK(baseline(4000, 128) == "8g16 160");  // nothing is as large
}

TEST_CASE("Groups of the baseline divide any head_dim", "[plan]") {
  CHECK(baseline(28, 80) == "2g40 28");
  CHECK(baseline(24, 80) == "2g80 24");
  CHECK(baseline(6, 8) == "2g8 6");
  CHECK(baseline(11, 20) == "3g20 12");
  for (const int dim : {8, 24, 64, 80, 96, 100, 128, 256})
    for (int bytes = 1; bytes < dim; ++bytes) {
      const UniformCoder coder = plain_baseline(bytes, dim);
      INFO(dim << " channels, " << bytes << " bytes");
      CHECK(dim % coder.group_size == 0);
      CHECK((row_bytes(Coder{coder}, dim) >= bytes || coder.bits == 8));
    }
}
