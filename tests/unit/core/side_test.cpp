#include <kvq/core/geometry.h>

#include <catch2/catch.hpp>

#include <string>

using namespace kvq;

TEST_CASE("Sides have the names of tensors, flags and messages", "[core]") {
  CHECK(std::string(name(Side::k)) == "k");
  CHECK(std::string(name(Side::v)) == "v");
  CHECK(std::string(plural(Side::k)) == "keys");
  CHECK(std::string(plural(Side::v)) == "values");
  for (const Side side : kSides) {
    CHECK(kSides[index(side)] == side);
    CHECK(other(other(side)) == side);
    CHECK(other(side) != side);
  }
}

TEST_CASE("Keys have the even streams of random numbers, values the odd ones", "[core]") {
  for (int head = 0; head < 5; ++head) {
    CHECK(stream(head, Side::k) == 2 * head);
    CHECK(stream(head, Side::v) == 2 * head + 1);
  }
}

TEST_CASE("A side's channels are those of its rows", "[core]") {
  const LayerGeometry geometry{.head_dim = 192, .v_head_dim = 128};
  CHECK(geometry.dim(Side::k) == 192);
  CHECK(geometry.dim(Side::v) == 128);
}
