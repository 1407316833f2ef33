#include <kvq/methods/option_table.h>

#include "support/decide.h"
#include "support/error_of.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <limits>
#include <map>
#include <set>

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
           [](Options& o) { o.composition = CompositionId::uh; }, [](Options& o) { o.sign_search = 4; },
           [](Options& o) { o.hadamard_order = 16; }, [](Options& o) { o.random_signs = true; }})
    CHECK(options_to_json(test::options_of("oscar", change)) != plain);
}

namespace {

GivenOptions given(std::initializer_list<std::pair<const char*, OptionValue>> values) {
  GivenOptions all;
  for (const auto& [flag, value] : values) all.put(flag, value);
  return all;
}

OptionValue number(std::int64_t value) { return value; }

std::string refusal(const char* method, const GivenOptions& options) {
  return test::error_text([&] { resolve_options(find_method(method), options); });
}

/// The smallest value that the row takes, and the value below it.
struct Edge {
  OptionValue inside, outside;
};

std::optional<Edge> edge_of(const OptionSpec& row) {
  if (row.kind == OptionKind::integer && row.integers.lowest > std::numeric_limits<int>::min())
    return Edge{row.integers.lowest, row.integers.lowest - 1};
  if (row.kind == OptionKind::number && row.numbers.lowest > -1e300)
    return Edge{row.numbers.lowest, row.numbers.lowest - 1.0};
  if (row.kind == OptionKind::text && !row.choices.empty())
    return Edge{row.choices.front().word, std::string("no such word")};
  return std::nullopt;
}

/// A value that is not the default of any method.
OptionValue uncommon(const OptionSpec& row) {
  const std::map<std::string, OptionValue> texts = {{"--clip", "0.9"}, {"--clip-k", "0.9"},     {"--clip-v", "0.9"},
                                                    {"--center", "k"}, {"--exact-layers", "1"}, {"--hadamard", "v"}};
  switch (row.kind) {
    case OptionKind::toggle: return true;
    case OptionKind::integer: return std::max<std::int64_t>(row.integers.lowest, 0) + 2;
    case OptionKind::number: return 3.0;
    case OptionKind::text: break;
  }
  return row.choices.empty() ? texts.at(row.text.flag) : OptionValue(row.choices.back().word);
}

}  // namespace

TEST_CASE("Each row of the options has a flag of its own, a heading and a help text", "[methods]") {
  std::set<std::string> flags;
  for (const OptionSpec& row : option_table()) {
    INFO(row.text.flag);
    CHECK(flags.insert(row.text.flag).second);
    CHECK_THAT(row.text.flag, StartsWith("--"));
    CHECK(!row.text.group.empty());
    CHECK(!row.text.help.empty());
  }
  for (const Method& method : methods())
    for (const OptionSpec& row : method.options)
      if (!row.text.flag.empty()) CHECK(flags.contains(row.text.flag));
}

TEST_CASE("A value outside a row's range or list is refused by the row's flag", "[methods]") {
  int edges = 0;
  for (const Method& method : methods())
    for (const OptionSpec& row : options_of(method)) {
      const auto edge = edge_of(row);
      if (!edge) continue;
      INFO(method.name << " " << row.text.flag);
      ++edges;
      CHECK(test::error_text([&] { check_value(row, edge->inside); }) == "no error");
      GivenOptions outside;
      outside.put(row.text.flag, edge->outside);
      CHECK_THAT(test::error_text([&] { resolve_options(method, outside); }),
                 StartsWith("usage: " + row.text.flag + ": "));
    }
  CHECK(edges > 100);
}

TEST_CASE("A method refuses the rows that only others have, and names these", "[methods]") {
  for (const OptionSpec& row : option_table())
    for (const Method& method : methods()) {
      const auto own = options_of(method);
      const auto same = [&](const OptionSpec& other) { return other.text.flag == row.text.flag; };
      if (std::any_of(own.begin(), own.end(), same)) continue;
      INFO(method.name << " " << row.text.flag);
      GivenOptions foreign;
      foreign.put(row.text.flag, uncommon(row));
      const auto error = test::error_of([&] { resolve_options(method, foreign); });
      REQUIRE(error);
      CHECK(std::string(error->what()) == row.text.flag + " has no meaning for --method " + method.name);
      CHECK_THAT(error->hint(), StartsWith("it belongs to "));
    }
}

TEST_CASE("Every row changes the manifest when it is typed", "[methods]") {
  // Windows and the seed have places of their own in the manifest; the others act only beside a second option, or not
  // in the manifest: the recipe of the rotation tells the mixing of tq-mse.
  const std::set<std::string> elsewhere = {"--sink-tokens", "--recent-tokens", "--seed"};
  const std::set<std::string> beside_another = {"--memory",       "--scale-rule",      "--kmeans-scope",
                                                "--kmeans-order", "--kmeans-restarts", "--row-bytes-v"};
  for (const Method& method : methods()) {
    const Json plain = options_to_json(resolve_options(method, {}));
    for (const OptionSpec& row : options_of(method)) {
      const std::string& flag = row.text.flag;
      if (flag.empty() || elsewhere.contains(flag) || beside_another.contains(flag)) continue;
      if (method.name == "tq-mse" && flag == "--mixing") continue;
      INFO(method.name << " " << flag);
      std::vector<OptionValue> values = {uncommon(row)};
      for (const OptionWord& choice : row.choices) values.emplace_back(choice.word);
      bool is_accepted = false, is_seen = false;
      for (const OptionValue& value : values) {
        GivenOptions one;
        one.put(flag, value);
        Json json;
        if (test::error_of([&] { json = options_to_json(resolve_options(method, one)); })) continue;
        is_accepted = true;
        is_seen = is_seen || json != plain;
      }
      CHECK(is_seen == is_accepted);
    }
  }
}

TEST_CASE("An option of one method lives in its file: default, value, manifest", "[methods]") {
  constexpr OwnOption<int> draws{"draws", 16};
  Method method = find_method("plain");
  method.name = "own";
  method.options = {
      integer_option({"--draws", option_group::kRotations, "random signs tried"}, draws, {1, 64}, {.key = draws.key})};
  CHECK(draws.of(resolve_options(method, {})) == 16);
  CHECK(options_to_json(method, resolve_options(method, {})).at("draws") == 16);
  const Options options = resolve_options(method, given({{"--draws", number(3)}}));
  CHECK(draws.of(options) == 3);
  CHECK(options_to_json(method, options).at("draws") == 3);
  CHECK(!options_to_json(find_method("plain"), options).contains("draws"));
  CHECK(test::error_text([&] { resolve_options(method, given({{"--draws", number(65)}})); }) ==
        "usage: --draws: expected 1 to 64, found 65");
}

TEST_CASE("Options that are typed together settle each other", "[methods]") {
  const auto resolved = [](const char* method, const GivenOptions& options) {
    return resolve_options(find_method(method), options);
  };
  const Options symmetric = resolved("oscar", given({{"--coder", "symmetric"}, {"--coder-v", "affine"}}));
  CHECK(symmetric.k.rule == ScaleRule::norm);
  CHECK(symmetric.k.clip == 1.0);
  CHECK(symmetric.v.rule == ScaleRule::minmax);
  CHECK(symmetric.v.clip == std::nullopt);
  CHECK(resolved("oscar", given({{"--codebook", "fitted"}, {"--coder-k", "symmetric"}})).v.fitted);
  CHECK_THAT(refusal("oscar", given({{"--codebook", "fitted"}, {"--coder", "symmetric"}})),
             Contains("--codebook needs"));
  const Options klt = resolved("block-gtq", given({{"--transform", "klt"}, {"--v-allocation", "channel"}}));
  CHECK(klt.k.allocate == Allocate::channel);
  const Options balanced = resolved("kvq", given({{"--transform-k", "balanced"}}));
  CHECK(balanced.k.allocate == Allocate::none);
  CHECK(balanced.min_bits == 1);
  CHECK(!balanced.choose_transform);
  CHECK(resolved("kvq", given({{"--budget-bytes", 96.0}})).budget_bits == std::nullopt);
  const Options joint = resolved("block-gtq", given({{"--joint", true}, {"--bits", 2.5}}));
  CHECK(joint.budget_bits == 2.5);
  CHECK(joint.k.bits == 2);
  CHECK_THAT(refusal("block-gtq", given({{"--uniform-layout", true}})), Contains("need --joint"));
  CHECK_THAT(refusal("kvq", given({{"--bits", 2.0}})), Contains("spends one budget"));
  const Options mean = resolved("plain", given({{"--kmeans", number(1)}}));
  CHECK(mean.k.center);
  CHECK(mean.k.kmeans == 0);
}
