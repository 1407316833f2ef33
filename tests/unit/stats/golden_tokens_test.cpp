#include <kvq/core/dtype.h>
#include <kvq/stats/collect.h>
#include <kvq/stats/golden_tokens.h>
#include <kvq/stats/stats_file.h>

#include "support/container_edit.h"
#include "support/error_of.h"
#include "support/layers.h"
#include "support/temp_folder.h"

#include <catch2/catch.hpp>

#include <functional>

using namespace kvq;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;
using test::EditableFile;
using test::TempFolder;

namespace {

StatsHeader header() {
  StatsHeader header{.model = {}, .producer = "test", .capture_point = "post_rope", .seed = 9, .sample_tokens = 17};
  header.model.name = "model";
  header.model.num_layers = 8;
  return header;
}

StatsRequest request(std::int64_t golden, std::int64_t held_out = 0, bool has_values = true) {
  return {
      .moments = has_values ? std::set{Moment::key, Moment::value} : std::set{Moment::key},
      .sample_tokens = 17,
      .seed = 9,
      .held_out_tokens = held_out,
      .golden_tokens = golden,
  };
}

/// Rows [first, first + count) of a tensor in bfloat16, read element by element.
std::vector<std::uint16_t> rows(const ActivationTensor& tensor, std::int64_t first, std::int64_t count) {
  std::vector<std::uint16_t> bits;
  std::vector<float> row(static_cast<std::size_t>(tensor.dim));
  for (std::int64_t t = first; t < first + count; ++t)
    for (int h = 0; h < tensor.heads; ++h) {
      tensor.load_head(h, t, 1, row.data());
      for (const float x : row) bits.push_back(float_to_bf16(x));
    }
  return bits;
}

}  // namespace

TEST_CASE("Golden tokens are the last of the longest sequence", "[stats][golden_rows]") {
  const auto chosen = [](std::vector<std::int64_t> lengths, std::int64_t wanted, TokenRange held = {}) {
    return choose_golden(test::make_layer({.lengths = std::move(lengths)}), wanted, held);
  };
  CHECK(chosen({13, 1, 31}, 8) == TokenRange{37, 8});
  CHECK(chosen({31, 1, 13}, 8) == TokenRange{23, 8});
  CHECK(chosen({20, 20}, 8) == TokenRange{12, 8});  // the first of equally long sequences
  CHECK(chosen({13, 1, 31}, 100) == TokenRange{14, 31});
  CHECK(chosen({5}, 5) == TokenRange{0, 5});
  CHECK(chosen({1}, 32) == TokenRange{0, 1});
  CHECK(chosen({13, 1, 31}, 0).count == 0);
}

TEST_CASE("No golden token is held out", "[stats][golden_rows]") {
  const auto chosen = [](std::vector<std::int64_t> lengths, std::int64_t wanted, TokenRange held) {
    return choose_golden(test::make_layer({.lengths = std::move(lengths)}), wanted, held);
  };
  CHECK(chosen({60}, 32, {0, 20}) == TokenRange{28, 32});
  CHECK(chosen({40}, 32, {0, 13}) == TokenRange{13, 27});
  CHECK(chosen({30, 31, 29}, 32, {30, 30}) == TokenRange{0, 30});  // of the longest sequence, one token is left
  CHECK(chosen({31}, 32, {0, 31}).count == 0);
}

TEST_CASE("Golden rows are those of the dump in bfloat16, and count in sums and sample", "[stats][golden_rows]") {
  const DType dtype = GENERATE(DType::f32, DType::f16, DType::bf16);
  const LayerActivations layer = test::make_layer({.lengths = {13, 40, 31}, .dtype = dtype});
  const LayerStats stats = collect(layer, request(8, 16)), plain = collect(layer, request(0, 16));
  REQUIRE(stats.golden);
  CHECK_FALSE(plain.golden);
  CHECK(stats.golden->first == 76);  // the 40 lose 16
  CHECK(stats.golden->count == 8);
  CHECK(stats.golden->q == rows(layer.q, 83, 1));
  CHECK(stats.golden->k == rows(layer.k, 76, 8));
  CHECK(stats.golden->v == rows(*layer.v, 76, 8));
  CHECK(stats.sample.token == plain.sample.token);
  CHECK(stats.moment(Moment::key)[1].sum == plain.moment(Moment::key)[1].sum);
}

TEST_CASE("The last golden tokens are those of a shorter run", "[stats][golden_rows]") {
  for (const bool has_values : {true, false}) {
    const LayerActivations layer = test::make_layer({.lengths = {13, 40}, .has_values = has_values});
    const GoldenTokens all = *collect(layer, request(20, 0, has_values)).golden;
    for (const std::int64_t count : {1, 7, 20, 21})
      CHECK(last_golden(all, layer.geometry, count) ==
            *collect(layer, request(std::min<std::int64_t>(count, 20), 0, has_values)).golden);
  }
}

TEST_CASE("Merging keeps the longer golden run, the first of equals", "[stats][golden_rows]") {
  const LayerStats a = collect(test::make_layer({.lengths = {13, 20}, .seed = 2}), request(16)),
                   b = collect(test::make_layer({.lengths = {14, 12}, .seed = 3}), request(16));
  const LayerStats none = collect(test::make_layer({.lengths = {20}, .seed = 4}), request(0)),
                   equal = collect(test::make_layer({.lengths = {50}, .seed = 5}), request(16));
  const auto merged = [](LayerStats into, const LayerStats& other) {
    merge(into, other, 17);
    return into.golden;
  };
  const auto moved = [](GoldenTokens tokens, std::int64_t offset) {
    tokens.first += offset;
    return tokens;
  };
  REQUIRE(b.golden->count == 14);
  CHECK(*merged(a, b) == *a.golden);
  CHECK(*merged(b, a) == moved(*a.golden, 26));
  CHECK(*merged(a, equal) == *a.golden);
  CHECK(*merged(none, b) == moved(*b.golden, 20));
  CHECK(*merged(b, none) == *b.golden);
  CHECK_FALSE(merged(none, collect(test::make_layer({.lengths = {20}, .seed = 6}), request(0))));
}

TEST_CASE("Statistics with golden tokens survive their file, byte for byte, as version 1.3", "[stats][golden_rows]") {
  const TempFolder folder;
  LayerStats a = collect(test::make_layer({.layer = 2, .dtype = DType::bf16}), request(8)),
             b = collect(test::make_layer({.layer = 3, .has_values = false}), request(8, 0, false)),
             c = collect(test::make_layer({.layer = 4}), request(0));
  for (LayerStats* stats : {&a, &b, &c}) stats->ranges.clear();  // which make version 1.5
  save_stats(header(), std::vector<LayerStats>{a, b, c}, folder / "a");
  const StatsFile file = StatsFile::open(folder / "a");
  CHECK(*file.load(0).golden == *a.golden);
  CHECK(*file.load(1).golden == *b.golden);
  CHECK_FALSE(file.load(2).golden);
  save_stats(file.header(), std::vector<LayerStats>{file.load(0), file.load(1), file.load(2)}, folder / "b");
  CHECK(test::file_bytes(folder / "a") == test::file_bytes(folder / "b"));
  merge_stats_files({folder / "a"}, folder / "c");
  CHECK(test::file_bytes(folder / "a") == test::file_bytes(folder / "c"));
  const EditableFile edit = EditableFile::read(folder / "a");
  CHECK(edit.metadata.at("version") == "1.3");
  CHECK(edit.metadata.at("requires").empty());
  CHECK(edit.manifest.at("layers").at(0).at("golden_tokens") == 8);
  CHECK(edit.tensors.at("layers.2.golden.q").shape == std::vector<std::int64_t>{4, 16});
  CHECK(edit.tensors.at("layers.2.golden.k").shape == std::vector<std::int64_t>{8, 2, 16});
  CHECK(edit.tensors.at("layers.2.golden.v").shape == std::vector<std::int64_t>{8, 2, 12});
  CHECK(edit.tensors.count("layers.3.golden.v") == 0);
}

TEST_CASE("Golden tokens of a file that do not fit are refused", "[stats][golden_rows]") {
  const TempFolder folder;
  save_stats(header(), std::vector<LayerStats>{collect(test::make_layer({.layer = 2}), request(8))}, folder / "good");
  const EditableFile good = EditableFile::read(folder / "good");
  const auto refused = [&](const char* word, const std::function<void(EditableFile&)>& change) {
    INFO(word);
    EditableFile bad = good;
    change(bad);
    bad.write(folder / "bad");
    CHECK_THAT(test::error_text([&] { StatsFile::open(folder / "bad").load(0); }),
               StartsWith("bad_input: ") && Contains(word) && Contains((folder / "bad").string()));
  };
  for (const char* name : {"token", "q", "k", "v"}) {
    const std::string tensor = std::string("layers.2.golden.") + name;
    refused(tensor.c_str(), [&](EditableFile& f) { f.tensors.erase(tensor); });
    refused(tensor.c_str(),
            [&](EditableFile& f) { f.tensors.at(tensor).shape.insert(f.tensors.at(tensor).shape.begin(), 1); });
    refused(tensor.c_str(), [&](EditableFile& f) {
      for (std::byte& byte : f.tensors.at(tensor).data) byte = std::byte{0xff};
    });
  }
  for (const char* name : {"q", "k", "v"})
    refused("U16", [&](EditableFile& f) { f.tensors.at(std::string("layers.2.golden.") + name).dtype = DType::bf16; });
  for (const Json& count : {Json(7), Json(9), Json(4096)})
    refused("golden.k", [&](EditableFile& f) { f.manifest["layers"][0]["golden_tokens"] = count; });
  for (const Json& count : {Json(0), Json(-1), Json(4097), Json(1e18), Json("8")})
    refused("golden_tokens", [&](EditableFile& f) { f.manifest["layers"][0]["golden_tokens"] = count; });
}
