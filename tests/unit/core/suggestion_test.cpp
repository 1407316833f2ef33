#include <kvq/core/suggestion.h>

#include <catch2/catch.hpp>

using namespace kvq;

namespace {

const std::vector<std::string> kFlags = {"threads", "bits", "bits-k", "bits-v", "budget-bits", "seed", "json", "stats"};
const std::vector<std::string> kMethods = {"oscar", "saw-int4", "block-gtq", "kvq", "quarot", "random", "plain"};

}  // namespace

TEST_CASE("A mistyped word suggests the name that differs least", "[core]") {
  CHECK(nearest_name("treads", kFlags) == "threads");    // left out
  CHECK(nearest_name("threadds", kFlags) == "threads");  // added
  CHECK(nearest_name("thraeds", kFlags) == "threads");   // swapped
  CHECK(nearest_name("sead", kFlags) == "seed");         // changed
  CHECK(nearest_name("bits-x", kFlags) == "bits-k");     // the first of equals
  CHECK(nearest_name("OSCAR", kMethods) == "oscar");     // letters of either case
  CHECK(nearest_name("oskar", kMethods) == "oscar");
  CHECK(nearest_name("saw_int4", kMethods) == "saw-int4");
  CHECK(nearest_name("budget", kFlags) == "budget-bits");  // the only one that begins so
  CHECK(nearest_name("blok-gtq", kMethods) == "block-gtq");
}

TEST_CASE("A word that is near to no name suggests nothing", "[core]") {
  CHECK(nearest_name("frobnicate", kFlags).empty());
  CHECK(nearest_name("", kFlags).empty());
  CHECK(nearest_name("x", kFlags).empty());
  CHECK(nearest_name("q", {}).empty());
  CHECK(nearest_name(std::string(100000, 't'), kFlags).empty());
}

TEST_CASE("The hint of an unknown name lists all names behind the suggestion", "[core]") {
  const std::vector<std::string> names = {"affine", "symmetric"};
  CHECK(hint_of_names("afine", names) == "did you mean affine? choose one of affine, symmetric");
  CHECK(hint_of_names("codebook", names) == "choose one of affine, symmetric");
  CHECK(hint_of_names("afine", names, "two") == "did you mean affine? choose one of two");
}
