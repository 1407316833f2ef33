#include <kvq/core/error.h>
#include <kvq/core/geometry.h>

#include "support/error_of.h"

#include <catch2/catch.hpp>

#include <string>

using namespace kvq;
using Catch::Matchers::Contains;

TEST_CASE("Every kind of error has its exit code", "[core]") {
  CHECK(exit_code(ErrorKind::internal) == 1);
  CHECK(exit_code(ErrorKind::usage) == 2);
  CHECK(exit_code(ErrorKind::bad_input) == 3);
  CHECK(exit_code(ErrorKind::io) == 3);
  CHECK(exit_code(ErrorKind::numerical) == 4);
  CHECK(exit_code(ErrorKind::unsupported) == 5);
  CHECK(exit_code(ErrorKind::check_failed) == 6);
}

TEST_CASE("An error carries kind, message and hint", "[core]") {
  const Error error(ErrorKind::usage, "wrong", "try this");
  CHECK(error.kind() == ErrorKind::usage);
  CHECK(std::string(error.what()) == "wrong");
  CHECK(error.hint() == "try this");
  CHECK(Error(ErrorKind::io, "x").hint().empty());
}

TEST_CASE("A failed assertion is an internal error that names the expression and the place, also in a release build",
          "[core]") {
  const auto error = test::error_of([] { KVQ_ASSERT(1 + 1 == 3); });
  REQUIRE(error);
  CHECK(error->kind() == ErrorKind::internal);
  CHECK_THAT(error->what(), Contains("1 + 1 == 3") && Contains("error_test.cpp"));
  CHECK(!test::error_of([] { KVQ_ASSERT(1 + 1 == 2); }));
}

TEST_CASE("Enumerations of the geometry print as the words of the dump format", "[core]") {
  CHECK(std::string(to_string(RopeLayout::none)) == "none");
  CHECK(std::string(to_string(RopeLayout::half)) == "half");
  CHECK(std::string(to_string(RopeLayout::interleaved)) == "interleaved");
  CHECK(std::string(to_string(AttentionKind::gqa)) == "gqa");
  CHECK(std::string(to_string(AttentionKind::mla_rope)) == "mla_rope");
  CHECK(std::string(to_string(CapturePoint::post_rope)) == "post_rope");
  CHECK(std::string(to_string(CapturePoint::pre_rope)) == "pre_rope");
}
