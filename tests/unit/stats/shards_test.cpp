#include <kvq/stats/shards.h>

#include "support/dump_writer.h"
#include "support/error_of.h"
#include "support/free_backend.h"
#include "support/layers.h"
#include "support/temp_folder.h"

#include <catch2/catch.hpp>

#include <atomic>
#include <chrono>
#include <fstream>
#include <iterator>
#include <limits>
#include <stdexcept>

using namespace kvq;
using Catch::Matchers::Contains;
using test::error_text;
using test::TempFolder;

namespace fs = std::filesystem;

namespace {

constexpr std::int64_t kTokens = 41;

Dump open_dump(const TempFolder& folder, std::uint64_t seed = 1) {
  const fs::path path = folder / "dump.h5";
  test::write_dump(path, test::random_dump({.layers = {0, 2, 3}, .lengths = {kTokens - 4, 4}, .seed = seed}));
  return Dump::open({path});
}

CollectRequest request_of(const Dump& dump) {
  return {
      .layers = dump.model().layers,
      .stats = {.moments = {Moment::key, Moment::value}, .sample_tokens = 9, .seed = 5},
      .tokens = {0, kTokens},
  };
}

std::string bytes_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// The layers whose shards a run with resume writes. A kept shard has its old time of writing.
std::vector<int> written_again(const Dump& dump, const CollectRequest& request, const fs::path& folder) {
  const fs::file_time_type old = fs::file_time_type::clock::now() - std::chrono::hours(1);
  for (const fs::directory_entry& part : fs::directory_iterator(folder)) fs::last_write_time(part, old);
  const StatsOrigin origin = collect_shards(dump, request, PartsFolder(folder), true);
  std::vector<int> layers;
  for (std::size_t i = 0; i < origin.size(); ++i)
    if (fs::last_write_time(origin.entries[i].path) != old) layers.push_back(request.layers[i].layer);
  return layers;
}

/// The only part of a layer.
fs::path part_of(const fs::path& folder, int layer) {
  fs::path found;
  for (const fs::directory_entry& part : fs::directory_iterator(folder))
    if (part.path().filename().string().starts_with(fmt::format("layer-{:04d}.", layer))) found = part;
  return found;
}

}  // namespace

TEST_CASE("A run writes one shard for each layer", "[stats]") {
  const TempFolder folder;
  const Dump dump = open_dump(folder);
  const CollectRequest request = request_of(dump);
  const StatsOrigin origin = collect_shards(dump, request, PartsFolder(folder / "parts"), false);
  REQUIRE(origin.size() == 3);
  CHECK(!origin.header.range);
  for (std::size_t i = 0; i < 3; ++i) {
    const StatsOrigin::Entry& entry = origin.entries[i];
    const int layer = request.layers[i].layer;
    CHECK(entry.path == part_of(folder / "parts", layer));
    CHECK(entry.file_hash == StatsFile::open(entry.path).file_hash());
    CHECK(entry.tokens == kTokens);
    CHECK(entry.sequences == 2);
    CHECK(entry.content_hash == dump.load_layer(layer).content_hash);
    CHECK(origin.load(i)->layer == layer);
    CHECK((entry.stats != nullptr) == (i == 2));
    const LayerStats direct = collect(dump.load_layer(layer), request.stats);
    for (const Moment which : request.stats.moments)
      CHECK(origin.load(i)->moment(which)[0].sum == direct.moment(which)[0].sum);
  }
}

TEST_CASE("A run with resume keeps valid shards and collects the others again", "[stats]") {
  const TempFolder folder;
  const Dump dump = open_dump(folder);
  const CollectRequest request = request_of(dump);
  const fs::path parts = folder / "parts";
  collect_shards(dump, request, PartsFolder(parts), false);
  const fs::path second = part_of(parts, 2);
  const std::string bytes = bytes_of(second);
  CHECK(written_again(dump, request, parts).empty());
  SECTION("missing") { fs::remove(second); }
  SECTION("truncated") { fs::resize_file(second, fs::file_size(second) / 2); }
  SECTION("foreign") { std::ofstream(second) << "not a shard"; }
  SECTION("of another layer") { fs::copy_file(part_of(parts, 3), second, fs::copy_options::overwrite_existing); }
  CHECK(written_again(dump, request, parts) == std::vector<int>{2});
  CHECK(bytes_of(second) == bytes);
}

TEST_CASE("A shard of another request or another dump is not kept", "[stats]") {
  const TempFolder folder;
  const Dump dump = open_dump(folder);
  const fs::path parts = folder / "parts";
  collect_shards(dump, request_of(dump), PartsFolder(parts), false);
  const std::vector<int> all = {0, 2, 3};
  CollectRequest request = request_of(dump);
  SECTION("seed") { request.stats.seed = 6; }
  SECTION("sample") { request.stats.sample_tokens = 10; }
  SECTION("fewer moments") { request.stats.moments = {Moment::key}; }
  SECTION("other moments") { request.stats.moments = {Moment::key, Moment::query}; }
  SECTION("held-out tokens") { request.stats.held_out_tokens = 10; }
  SECTION("golden tokens") { request.stats.golden_tokens = 3; }
  SECTION("tokens") { request.tokens = {2, kTokens - 2}; }
  CHECK(written_again(dump, request, parts) == all);
  CHECK(written_again(dump, request, parts).empty());
  const TempFolder other;
  const Dump foreign = open_dump(other, 2);
  CHECK(written_again(foreign, request, parts) == all);
}

TEST_CASE("Moments that others need are part of a valid shard", "[stats]") {
  const TempFolder folder;
  const Dump dump = open_dump(folder);
  CollectRequest request = request_of(dump);
  request.stats.moments = {Moment::sst, Moment::scored_query};
  collect_shards(dump, request, PartsFolder(folder / "parts"), false);
  CHECK(written_again(dump, request, folder / "parts").empty());
}

TEST_CASE("A shard that was replaced after it was collected is refused", "[stats]") {
  const TempFolder folder, other;
  const Dump dump = open_dump(folder);
  const PartsFolder parts(folder / "parts");
  const StatsOrigin origin = collect_shards(dump, request_of(dump), parts, false);
  const StatsOrigin foreign =
      collect_shards(open_dump(other, 2), request_of(dump), PartsFolder(other / "parts"), false);
  fs::copy_file(foreign.entries[0].path, origin.entries[0].path, fs::copy_options::overwrite_existing);
  const std::string expected =
      fmt::format("bad_input: {}: content hash: expected {} as this run collected it, found {}",
                  origin.entries[0].path.string(), origin.entries[0].file_hash, foreign.entries[0].file_hash);
  CHECK(error_text([&] { origin.load(0); }) == expected);
  CHECK(error_text([&] { merge_parts(origin, folder / "all"); }) == expected);
  CHECK(origin.load(1)->layer == 2);
}

TEST_CASE("Files take at least the bytes that are predicted", "[stats]") {
  const TempFolder folder;
  const Dump dump = open_dump(folder);
  CollectRequest request = request_of(dump);
  SECTION("few moments") {}
  SECTION("all moments") { request.stats.moments = test::all_moments(true); }
  SECTION("held-out tokens") { request.stats.held_out_tokens = 10; }
  const PartsFolder parts(folder / "parts");
  collect_shards(dump, request, parts, false);
  CHECK(least_bytes(request) <= parts.num_bytes());
  CHECK(least_bytes(request) > parts.num_bytes() / 4);
}

TEST_CASE("A range of tokens is collected and recorded", "[stats]") {
  const TempFolder folder;
  const Dump dump = open_dump(folder);
  CollectRequest request = request_of(dump);
  request.tokens = choose_tokens(kTokens, 3, 20);
  const StatsOrigin origin = collect_shards(dump, request, PartsFolder(folder / "parts"), false);
  CHECK(origin.header.range == TokenRange{3, 20});
  CHECK(origin.load(0)->tokens == 20);
  CHECK(origin.entries[0].sequences == 1);
}

TEST_CASE("Progress ends at the work of all layers", "[stats]") {
  const TempFolder folder;
  const Dump dump = open_dump(folder);
  const CollectRequest request = request_of(dump);
  CollectProgress last;
  collect_shards(dump, request, PartsFolder(folder / "parts"), false, cpu_backend(), [&](const CollectProgress& now) {
    if (now.done >= last.done) last = now;
  });
  CHECK(last.done == Approx(collect_work(request)));
  CHECK(last.index == 2);
  CHECK(last.layer == 3);
  CHECK(last.tokens == 3.0 * kTokens);
}

TEST_CASE("A range of tokens lies inside the dump", "[stats]") {
  CHECK(choose_tokens(10, 0, {}) == TokenRange{0, 10});
  CHECK(choose_tokens(10, 4, {}) == TokenRange{4, 6});
  CHECK(choose_tokens(10, 4, 6) == TokenRange{4, 6});
  CHECK(error_text([] { choose_tokens(10, 10, {}); }) == "usage: --first-token 10: the dump has 10 tokens");
  CHECK(error_text([] { choose_tokens(10, 4, 7); }) ==
        "usage: --first-token 4 and --num-tokens 7: the dump has 10 tokens");
}

TEST_CASE("Chosen layers must be there", "[stats]") {
  const TempFolder folder;
  const Dump dump = open_dump(folder);
  CHECK(choose_layers(dump.model(), {}).size() == 3);
  CHECK(choose_layers(dump.model(), {2}).at(0).layer == 2);
  CHECK(error_text([&] { choose_layers(dump.model(), {0, 1}); }) ==
        "usage: --layers: layer 1 is not there (the file has 3 layers, 0 to 3)");
}

TEST_CASE("A statistics file is opened with the chosen layers", "[stats]") {
  const TempFolder folder;
  const Dump dump = open_dump(folder);
  const StatsOrigin shards = collect_shards(dump, request_of(dump), PartsFolder(folder / "parts"), false);
  std::vector<fs::path> paths;
  for (const StatsOrigin::Entry& entry : shards.entries) paths.push_back(entry.path);
  merge_stats_files(paths, folder / "all.safetensors");
  const StatsOrigin origin = open_stats(folder / "all.safetensors", {0, 3});
  REQUIRE(origin.size() == 2);
  CHECK(origin.header.model.layers.size() == 2);
  CHECK(origin.load(1)->layer == 3);
  CHECK(origin.entries[1].content_hash == shards.entries[2].content_hash);
}

TEST_CASE("A layer without values loses the moments of values", "[stats]") {
  const StatsRequest all{.moments = test::all_moments(true), .sample_tokens = 4};
  const StatsRequest keys = restrict_to_layer(all, {.layer = 0, .geometry = {}, .has_values = false});
  CHECK(keys.moments == std::set<Moment>{Moment::query, Moment::key});
  CHECK(restrict_to_layer(all, {.layer = 0, .geometry = {}, .has_values = true}).moments == all.moments);
}

namespace {

/// Nine layers, of which some may have a NaN.
Dump open_long_dump(const TempFolder& folder, const std::vector<std::size_t>& damaged = {}) {
  test::DumpContent content = test::random_dump({.layers = {0, 1, 2, 3, 4, 5, 6, 7, 8}, .lengths = {kTokens - 4, 4}});
  content.chunk_tokens = 16;
  for (const std::size_t i : damaged) content.layers[i].k[77] = std::numeric_limits<float>::quiet_NaN();
  test::write_dump(folder / "dump.h5", content);
  return Dump::open({folder / "dump.h5"});
}

}  // namespace

TEST_CASE("Layers that are collected side by side have the shards of a run layer by layer", "[stats]") {
  const TempFolder folder;
  const Dump dump = open_long_dump(folder);
  CollectRequest request = request_of(dump);
  request.stats.moments = test::all_moments(true);
  const PartsFolder alone(folder / "alone"), together(folder / "together");
  const StatsOrigin expected = collect_shards(dump, request, alone, false);
  test::FreeBackend backend;
  CollectProgress last;
  const auto say = [&](const CollectProgress& now) {
    CHECK(now.done >= last.done);
    CHECK(now.index >= last.index);
    last = now;
  };
  collect_shards(dump, {{request.layers[4]}, request.stats, request.tokens}, together, false);
  const StatsOrigin found = collect_shards(dump, request, together, true, backend, say);
  CHECK(last.done == Approx(collect_work(request)));
  CHECK(last.layer == 8);
  REQUIRE(found.size() == expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    CHECK(bytes_of(found.entries[i].path) == bytes_of(expected.entries[i].path));
    CHECK(found.entries[i].file_hash == expected.entries[i].file_hash);
    CHECK(found.entries[i].content_hash == expected.entries[i].content_hash);
    CHECK((found.entries[i].stats != nullptr) == (i + 1 == found.size()));
  }
}

TEST_CASE("Of layers that are collected side by side, the lowest that fails gives the error", "[stats]") {
  const TempFolder folder;
  const Dump dump = open_long_dump(folder, {3, 5});
  const CollectRequest request = request_of(dump);
  const std::string expected = error_text([&] { collect_shards(dump, request, PartsFolder(folder / "alone"), false); });
  CHECK_THAT(expected, Contains("layer 3: k: NaN or infinity"));
  test::FreeBackend backend;
  const PartsFolder parts(folder / "together");
  CHECK(error_text([&] { collect_shards(dump, request, parts, false, backend); }) == expected);
  CHECK(parts.num_parts() >= 3);
  for (const int layer : {0, 1, 2})
    CHECK(bytes_of(part_of(folder / "alone", layer)) == bytes_of(part_of(folder / "together", layer)));
}

TEST_CASE("A verb that fails ends layers that are collected side by side", "[stats]") {
  const TempFolder folder;
  const Dump dump = open_long_dump(folder);
  std::atomic<int> calls = 0;
  test::FreeBackend backend([&](const std::string&) {
    if (++calls == 5) throw std::runtime_error("device lost");
  });
  CHECK_THROWS_WITH(collect_shards(dump, request_of(dump), PartsFolder(folder / "parts"), false, backend),
                    "device lost");
}
