#include <kvq/methods/options.h>

#include "support/decide.h"
#include "support/error_of.h"

#include <catch2/catch.hpp>

using namespace kvq;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;

TEST_CASE("The group size is the one asked for, else the preferred one if it divides, else the whole row",
          "[methods]") {
  CHECK(resolve_group_size(32, 64, 128, 0, Side::k) == 32);
  CHECK(resolve_group_size(0, 64, 128, 0, Side::k) == 64);
  CHECK(resolve_group_size(0, 64, 96, 0, Side::k) == 96);
  CHECK(resolve_group_size(0, 0, 80, 0, Side::k) == 80);
  CHECK(resolve_group_size(1, 0, 80, 0, Side::k) == 1);
  const auto error = test::error_of([] { resolve_group_size(48, 64, 128, 7, Side::v); });
  REQUIRE(error);
  CHECK(error->kind() == ErrorKind::usage);
  CHECK_THAT(std::string(error->what()) + error->hint(),
             Contains("layer 7") && Contains("48") && Contains("128") && Contains("64"));
}

TEST_CASE("Options that contradict each other are refused", "[methods]") {
  const auto checked = [](const std::function<void(Options&)>& change) {
    const Options options = test::options_of("oscar", change);
    return test::error_text([&] { check_options(options); });
  };
  const auto symmetric = [](SideOptions& side) {
    side.coder = CoderKind::symmetric;
    side.rule = ScaleRule::norm;
    side.clip = 1.0;
  };
  CHECK(checked([](Options&) {}) == "no error");
  CHECK(checked([&](Options& o) { symmetric(o.k); }) == "no error");
  CHECK(checked([](Options& o) { o.k.bits = 16; }) == "no error");
  for (const auto& change : std::vector<std::function<void(Options&)>>{
           [](Options& o) { o.k.rule = ScaleRule::norm; }, [](Options& o) { o.v.coder = CoderKind::symmetric; },
           [&](Options& o) {
             symmetric(o.k);
             o.k.clip = 0.9;
           },
           [&](Options& o) {
             symmetric(o.v);
             o.v.clip = std::nullopt;
           },
           [](Options& o) { o.k.clip = 0.0; }, [](Options& o) { o.v.clip = 1.01; }, [](Options& o) { o.k.bits = 0; },
           [](Options& o) { o.k.bits = 9; }, [](Options& o) { o.v.bits = 15; },
           [](Options& o) { o.windows.sink_tokens = -1; }, [](Options& o) { o.windows.recent_tokens = -1; },
           [](Options& o) { o.sign_search = -1; }})
    CHECK_THAT(checked(change), StartsWith("usage: "));
}

TEST_CASE("Every option that decides shows in the manifest", "[methods]") {
  const Json plain = options_to_json(test::options_of("oscar"));
  for (const auto& change : std::vector<std::function<void(Options&)>>{
           [](Options& o) { o.k.bits = 3; }, [](Options& o) { o.v.bits = 3; }, [](Options& o) { o.k.group_size = 16; },
           [](Options& o) { o.k.coder = CoderKind::symmetric; }, [](Options& o) { o.k.rule = ScaleRule::norm; },
           [](Options& o) { o.v.zero = ZeroKind::integer; }, [](Options& o) { o.v.scale_type = ScaleType::fp32; },
           [](Options& o) { o.k.center = true; }, [](Options& o) { o.k.clip = 0.9; },
           [](Options& o) { o.v.target = Moment::sst; }, [](Options& o) { o.k.hadamard = false; },
           [](Options& o) { o.scope = Scope::layer; }, [](Options& o) { o.exact_layers = {1}; },
           [](Options& o) { o.composition = "uh"; }, [](Options& o) { o.sign_search = 4; },
           [](Options& o) { o.hadamard_order = 16; }, [](Options& o) { o.random_signs = true; }})
    CHECK(options_to_json(test::options_of("oscar", change)) != plain);
}
