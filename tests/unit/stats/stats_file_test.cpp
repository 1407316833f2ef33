#include <kvq/stats/collect.h>
#include <kvq/stats/stats_file.h>

#include "support/compare.h"
#include "support/container_edit.h"
#include "support/error_of.h"
#include "support/file_faults.h"
#include "support/layers.h"
#include "support/temp_folder.h"

#include <catch2/catch.hpp>

#include <cstring>
#include <limits>

using namespace kvq;
using namespace kvq::test;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;

namespace {

StatsHeader header() {
  return {
      .model =
          {
              .name = "tiny",
              .fingerprint = std::string(64, 'a'),
              .config_json = R"({"hidden_size":64})",
              .num_layers = 6,
              .layers = {},
          },
      .producer = "kvq tests",
      .capture_point = "post_rope",
      .seed = 9,
      .sample_tokens = 17,
  };
}

LayerStats layer_stats(int layer, bool has_values = true) {
  const LayerActivations activations = make_layer({.layer = layer, .has_values = has_values, .dtype = DType::bf16});
  return collect(activations, {.moments = all_moments(has_values), .sample_tokens = 17, .seed = 9});
}

void check_equal(const LayerStats& a, const LayerStats& b) {
  CHECK(a.layer == b.layer);
  CHECK(a.geometry == b.geometry);
  CHECK(a.has_values == b.has_values);
  CHECK(a.tokens == b.tokens);
  CHECK(a.sequences == b.sequences);
  CHECK(a.content_hash == b.content_hash);
  REQUIRE(a.moments.size() == b.moments.size());
  for (const auto& [which, sums] : a.moments)
    for (std::size_t head = 0; head < sums.size(); ++head) {
      const MomentSum& other = b.moment(which).at(head);
      CHECK(sums[head].dim == other.dim);
      CHECK(sums[head].sum == other.sum);
      CHECK(sums[head].mean == other.mean);
      CHECK(sums[head].weight == other.weight);
    }
  CHECK(a.sample.key == b.sample.key);
  CHECK(a.sample.token == b.sample.token);
  CHECK(a.sample.q.raw == b.sample.q.raw);
  CHECK(a.sample.k.raw == b.sample.k.raw);
  CHECK(a.sample.v.raw == b.sample.v.raw);
  CHECK(a.sample.k.dtype == b.sample.k.dtype);
  CHECK(a.sample.v.heads == b.sample.v.heads);
  CHECK(a.sample.value_weight == b.sample.value_weight);
}

void read_whole(const std::filesystem::path& path) {
  const StatsFile file = StatsFile::open(path);
  for (std::size_t i = 0; i < file.header().model.layers.size(); ++i) file.load(i);
}

/// The error of reading a file whole, or "no error".
std::string reading(const std::filesystem::path& path) {
  return error_text([&] { read_whole(path); });
}

void set_half(EditableFile& file, const std::string& tensor, std::uint16_t bits) {
  std::memcpy(file.tensors.at(tensor).data.data() + 2, &bits, 2);
}
void set_double(EditableFile& file, const std::string& tensor, double value) {
  std::memcpy(file.tensors.at(tensor).data.data() + 8, &value, 8);
}

const FileFault kFaults[] = {
    {"another format", "bad_input: ", "kvq-artifact", [](EditableFile& f) { f.metadata["format"] = "kvq-artifact"; }},
    {"another format in the manifest", "bad_input: ", "format",
     [](EditableFile& f) { f.manifest["format"] = "kvq-artifact"; }},
    {"no format", "bad_input: ", "format", [](EditableFile& f) { f.metadata.erase("format"); }},
    {"a higher major version", "unsupported: ", "2.0",
     [](EditableFile& f) { f.metadata["version"] = f.manifest["version"] = "2.0"; }},
    {"an unknown required feature", "unsupported: ", "sparse-moments",
     [](EditableFile& f) {
       f.metadata["requires"] = "sparse-moments";
       f.manifest["requires"] = {"sparse-moments"};
     }},
    {"no geometry", "bad_input: ", "geometry", [](EditableFile& f) { f.manifest["layers"][0].erase("geometry"); }},
    {"heads that do not divide", "bad_input: ", "num_q_heads",
     [](EditableFile& f) { f.manifest["layers"][0]["geometry"]["num_q_heads"] = 5; }},
    {"a layer twice", "bad_input: ", "",
     [](EditableFile& f) { f.manifest["layers"].push_back(f.manifest["layers"][0]); }},
    {"a layer beyond the model", "bad_input: ", "", [](EditableFile& f) { f.manifest["model"]["num_layers"] = 1; }},
    {"a moment of the future", "unsupported: ", "third",
     [](EditableFile& f) { f.manifest["layers"][0]["moments"].push_back("third"); }},
    {"a missing sum", "bad_input: ", "layers.2.key.sum", [](EditableFile& f) { f.tensors.erase("layers.2.key.sum"); }},
    {"a missing weight", "bad_input: ", "layers.2.sst.weight",
     [](EditableFile& f) { f.tensors.erase("layers.2.sst.weight"); }},
    {"missing sampled rows", "bad_input: ", "layers.2.sample.v",
     [](EditableFile& f) { f.tensors.erase("layers.2.sample.v"); }},
    {"a sum of another shape", "bad_input: ", "layers.2.key.sum",
     [](EditableFile& f) { f.tensors.at("layers.2.key.sum").shape = {1, 2 * 16, 16}; }},
    {"a sum of another type", "bad_input: ", "layers.2.key.first",
     [](EditableFile& f) { f.tensors.at("layers.2.key.first").dtype = DType::i64; }},
    {"NaN in a sum", "numerical: ", "layers.2.query.sum",
     [](EditableFile& f) { set_double(f, "layers.2.query.sum", std::nan("")); }},
    {"infinity in a first moment", "numerical: ", "layers.2.query.first",
     [](EditableFile& f) { set_double(f, "layers.2.query.first", HUGE_VAL); }},
    {"a weight of zero", "numerical: ", "query", [](EditableFile& f) { set_double(f, "layers.2.query.weight", 0.0); }},
    {"NaN in sampled keys", "numerical: ", "layers.2.sample.k",
     [](EditableFile& f) { set_half(f, "layers.2.sample.k", 0x7fc0); }},
    {"infinity in sampled values", "numerical: ", "layers.2.sample.v",
     [](EditableFile& f) { set_half(f, "layers.2.sample.v", 0x7f80); }},
    {"NaN in the value weights", "numerical: ", "layers.2.sample.value_weight",
     [](EditableFile& f) { f.set_float("layers.2.sample.value_weight", 1, std::numeric_limits<float>::quiet_NaN()); }},
    {"a negative value weight", "bad_input: ", "layers.2.sample.value_weight",
     [](EditableFile& f) { f.set_float("layers.2.sample.value_weight", 1, -1.0f); }},
    {"a sample that squares beyond float32",
     "numerical: ", "layers.2.sample.k: 9.97277e+19 at [0, 0, 1]: expected magnitudes below 1.5e+09",
     [](EditableFile& f) { set_half(f, "layers.2.sample.k", 0x60ad); }},
    {"a weight that is no count", "bad_input: ", "layer 2: tensor key.weight: head 1: expected 45",
     [](EditableFile& f) { set_double(f, "layers.2.key.weight", 17.0); }},
    {"a moment without symmetry", "bad_input: ", "layer 2: tensor value.sum: head 0: expected a symmetric matrix",
     [](EditableFile& f) { set_double(f, "layers.2.value.sum", 1e6); }},
    {"more tokens than ranges", "bad_input: ", "layer 2: ranges: expected 45 tokens, found 17",
     [](EditableFile& f) { f.manifest["layers"][0]["ranges"][0]["count"] = 17; }},
    {"a range of no tokens", "bad_input: ", "count",
     [](EditableFile& f) { f.manifest["layers"][0]["ranges"][0]["count"] = 0; }},
    {"sampling keys out of order", "bad_input: ", "layers.2.sample.key",
     [](EditableFile& f) { std::memset(f.tensors.at("layers.2.sample.key").data.data() + 8, 0, 8); }},
};

}  // namespace

TEST_CASE("A statistics file gives back every bit, also of a layer without values", "[stats]") {
  const TempFolder folder;
  const std::vector<LayerStats> layers = {layer_stats(2), layer_stats(3, false), layer_stats(5)};
  save_stats(header(), layers, folder / "a.kvqstats");
  const StatsFile file = StatsFile::open(folder / "a.kvqstats");
  CHECK(file.header().model.name == "tiny");
  CHECK(file.header().model.fingerprint == std::string(64, 'a'));
  CHECK(parse_json(file.header().model.config_json, "config") == Json{{"hidden_size", 64}});
  CHECK(file.header().model.num_layers == 6);
  CHECK(file.header().producer == "kvq tests");
  CHECK(file.header().capture_point == "post_rope");
  CHECK(file.header().seed == 9);
  CHECK(file.header().sample_tokens == 17);
  REQUIRE(file.header().model.layers.size() == 3);
  CHECK_FALSE(file.header().model.layers[1].has_values);
  for (std::size_t i = 0; i < 3; ++i) {
    INFO("layer " << layers[i].layer);
    check_equal(file.load(i), layers[i]);
    CHECK(file.content_hash(i) == layers[i].content_hash);
    CHECK(file.tokens(i) == layers[i].tokens);
    CHECK(file.sequences(i) == layers[i].sequences);
  }
}

TEST_CASE("The same statistics give the same bytes, and a round trip changes none", "[stats]") {
  const TempFolder folder;
  save_stats(header(), std::vector<LayerStats>{layer_stats(2), layer_stats(5)}, folder / "a");
  save_stats(header(), std::vector<LayerStats>{layer_stats(2), layer_stats(5)}, folder / "b");
  const StatsFile file = StatsFile::open(folder / "a");
  save_stats(file.header(), std::vector<LayerStats>{file.load(0), file.load(1)}, folder / "c");
  CHECK(file_bytes(folder / "a") == file_bytes(folder / "b"));
  CHECK(file_bytes(folder / "a") == file_bytes(folder / "c"));
}

TEST_CASE("A faulty statistics file is refused with the reason", "[stats]") {
  const TempFolder folder;
  save_stats(header(), std::vector<LayerStats>{layer_stats(2)}, folder / "good");
  check_refused(kFaults, folder / "good", read_whole);
}

TEST_CASE("A statistics file with a flipped bit is refused: sums would not show it", "[stats]") {
  const TempFolder folder;
  save_stats(header(), std::vector<LayerStats>{layer_stats(2)}, folder / "good");
  const std::string good = file_bytes(folder / "good");
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, good.data(), 8);
  for (std::size_t i = 8 + header_bytes; i < good.size(); i += 211) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 1);
    write_file_atomically(folder / "bad", std::as_bytes(std::span(bad)));
    CHECK_THAT(reading(folder / "bad"), StartsWith("bad_input: ") && Contains("content hash"));
  }
  EditableFile changed = EditableFile::read(folder / "good");
  changed.manifest["seed"] = 10;
  changed.write(folder / "bad", false);
  CHECK_THAT(reading(folder / "bad"), StartsWith("bad_input: ") && Contains("content hash"));
}

TEST_CASE("Statistics of capped logits and learned sinks require that a reader knows them", "[stats]") {
  const TempFolder folder;
  LayerStats stats = layer_stats(2);
  stats.geometry.logit_softcap = 50.0;
  stats.geometry.sink_logits.assign(static_cast<std::size_t>(stats.geometry.num_q_heads), -0.5);
  save_stats(header(), std::vector<LayerStats>{stats}, folder / "a");
  const EditableFile file = EditableFile::read(folder / "a");
  CHECK(file.metadata.at("version") == "1.5");
  CHECK(file.metadata.at("requires") == "logit_softcapping,sink_logits");
  CHECK(StatsFile::open(folder / "a").load(0).geometry == stats.geometry);
}

TEST_CASE("A statistics file of a newer minor version is read if it requires nothing unknown", "[stats]") {
  const TempFolder folder;
  save_stats(header(), std::vector<LayerStats>{layer_stats(2)}, folder / "good");
  EditableFile newer = EditableFile::read(folder / "good");
  newer.metadata["version"] = newer.manifest["version"] = "1.7";
  newer.manifest["invented_later"] = true;
  newer.write(folder / "newer");
  CHECK(reading(folder / "newer") == "no error");
}

TEST_CASE("Shards by layer give the bytes of the joint run, in any order", "[stats]") {
  const TempFolder folder;
  const LayerStats a = layer_stats(1), b = layer_stats(2, false), c = layer_stats(4);
  save_stats(header(), std::vector<LayerStats>{a, b, c}, folder / "joint");
  save_stats(header(), std::vector<LayerStats>{a, c}, folder / "first");
  save_stats(header(), std::vector<LayerStats>{b}, folder / "second");
  merge_stats_files({folder / "first", folder / "second"}, folder / "merged");
  CHECK(file_bytes(folder / "merged") == file_bytes(folder / "joint"));
  merge_stats_files({folder / "second", folder / "first"}, folder / "merged");
  CHECK(file_bytes(folder / "merged") == file_bytes(folder / "joint"));
  merge_stats_files({folder / "joint"}, folder / "merged");
  CHECK(file_bytes(folder / "merged") == file_bytes(folder / "joint"));
}

TEST_CASE("Shards by sequences add up to the joint run", "[stats]") {
  const TempFolder folder;
  const LayerActivations layer = make_layer({.layer = 1, .lengths = {13, 1, 31}});
  const StatsRequest request{
      .moments = {Moment::query, Moment::key, Moment::scored_value},
      .sample_tokens = 17,
      .seed = 9,
  };
  const LayerStats joint = collect(layer, request);
  save_stats(header(), std::vector<LayerStats>{collect(keep_sequences(layer, 0, 2), request)}, folder / "first");
  save_stats(header(), std::vector<LayerStats>{collect(keep_sequences(layer, 2, 1), request)}, folder / "second");
  merge_stats_files({folder / "first", folder / "second"}, folder / "merged");
  const LayerStats merged = StatsFile::open(folder / "merged").load(0);
  CHECK(merged.tokens == 45);
  CHECK(merged.sequences == 3);
  for (const Moment which : request.moments)
    for (std::size_t head = 0; head < 2; ++head)
      CHECK(relative_difference(merged.moment(which)[head].sum, joint.moment(which)[head].sum) < 1e-12);
  CHECK(merged.sample.token == joint.sample.token);
  CHECK(merged.sample.k.raw == joint.sample.k.raw);
  CHECK(merged.sample.value_weight == joint.sample.value_weight);
  CHECK(std::distance(std::filesystem::directory_iterator(folder / ""), {}) == 3);  // no temporary file remains
}

TEST_CASE("Statistics files that do not belong together are not merged, and nothing is written", "[stats]") {
  const TempFolder folder;
  const LayerStats a = layer_stats(1), b = layer_stats(2);
  save_stats(header(), std::vector<LayerStats>{a}, folder / "a");
  const auto merging = [&](const StatsHeader& other, const LayerStats& stats) {
    save_stats(other, std::vector<LayerStats>{stats}, folder / "b");
    return error_text([&] { merge_stats_files({folder / "a", folder / "b"}, folder / "out"); });
  };
  StatsHeader changed = header();
  changed.model.name = "other";
  CHECK_THAT(merging(changed, b), StartsWith("bad_input: ") && Contains("other"));
  changed = header();
  changed.model.fingerprint = std::string(64, 'b');
  CHECK_THAT(merging(changed, b), StartsWith("bad_input: ") && Contains("fingerprint"));
  changed = header();
  changed.model.num_layers = 7;
  CHECK_THAT(merging(changed, b), StartsWith("bad_input: ") && Contains("num_layers"));
  changed = header();
  changed.capture_point = "pre_rope";
  CHECK_THAT(merging(changed, b), StartsWith("bad_input: ") && Contains("capture_point"));
  changed = header();
  changed.seed = 10;
  CHECK_THAT(merging(changed, b), StartsWith("bad_input: ") && Contains("seed"));
  changed = header();
  changed.sample_tokens = 18;
  CHECK_THAT(merging(changed, b), StartsWith("bad_input: ") && Contains("sample_tokens"));
  CHECK_THAT(merging(header(), a), StartsWith("bad_input: ") && Contains("the same dump data"));
  LayerStats other_sequences = a;
  other_sequences.content_hash = "xxh3-128:" + std::string(32, 'e');
  other_sequences.ranges.front().dump = other_sequences.content_hash;
  CHECK_THAT(merging(header(), other_sequences), StartsWith("unsupported: ") && Contains("sst"));
  LayerStats fewer = b;
  fewer.sequences = 2;
  CHECK_THAT(merging(header(), fewer), StartsWith("bad_input: ") && Contains("sequences"));
  CHECK_FALSE(std::filesystem::exists(folder / "out"));
}

TEST_CASE("Statistics keep which tokens of which dump they hold, and no token is merged twice", "[stats]") {
  const TempFolder folder;
  const LayerActivations layer = make_layer({.layer = 1, .lengths = {13, 7, 31, 9}});
  const StatsRequest request{.moments = {Moment::query, Moment::key}, .sample_tokens = 17, .seed = 9};
  const auto save = [&](const char* name, std::size_t first, std::size_t count) {
    save_stats(header(), std::vector<LayerStats>{collect(keep_sequences(layer, first, count), request)}, folder / name);
  };
  save("a", 0, 1);
  save("b", 1, 2);
  save("c", 3, 1);
  save("ab", 0, 3);
  const auto merging = [&](const char* first, const char* second) {
    return error_text([&] { merge_stats_files({folder / first, folder / second}, folder / "out"); });
  };
  REQUIRE(merging("a", "b") == "no error");
  CHECK(StatsFile::open(folder / "out").ranges(0) == StatsFile::open(folder / "ab").ranges(0));
  std::filesystem::rename(folder / "out", folder / "merged");
  REQUIRE(merging("merged", "c") == "no error");
  CHECK(StatsFile::open(folder / "out").ranges(0) == std::vector<DumpRange>{{layer.content_hash, 0, 60}});
  std::filesystem::remove(folder / "out");
  for (const char* part : {"a", "b", "ab"}) {
    INFO(part);
    CHECK_THAT(merging("merged", part), StartsWith("bad_input: " + (folder / part).string() + ": layer 1: tokens ") &&
                                            Contains("also in " + (folder / "merged").string()));
  }
  CHECK_THAT(merging("ab", "b"), Contains("tokens 13 to 50 of dump " + layer.content_hash));
  CHECK_FALSE(std::filesystem::exists(folder / "out"));
}

TEST_CASE("Files before version 1.5 merge with a warning, but not with tokens that both have sampled", "[stats]") {
  const TempFolder folder;
  const LayerActivations layer = make_layer({.layer = 1, .lengths = {13, 7, 31}});
  const StatsRequest request{.moments = {Moment::query, Moment::key}, .sample_tokens = 17, .seed = 9};
  const auto save_old = [&](const char* name, std::size_t first, std::size_t count) {
    LayerStats stats = collect(keep_sequences(layer, first, count), request);
    stats.ranges.clear();
    save_stats(header(), std::vector<LayerStats>{stats}, folder / name);
  };
  save_old("a", 0, 1);
  save_old("b", 1, 2);
  save_old("all", 0, 3);
  std::vector<std::string> warnings;
  merge_stats_files({folder / "a", folder / "b"}, folder / "out",
                    [&](const std::string& text) { warnings.push_back(text); });
  REQUIRE(warnings.size() == 1);
  CHECK_THAT(warnings[0], Contains("do not say which tokens they hold"));
  CHECK(StatsFile::open(folder / "out").ranges(0).empty());
  CHECK(EditableFile::read(folder / "out").metadata.at("version") == "1.0");
  CHECK_THAT(error_text([&] { merge_stats_files({folder / "all", folder / "a"}, folder / "bad"); }),
             StartsWith("bad_input: ") && Contains("sampled tokens are also in"));
}

TEST_CASE("A statistics file that is not there or no container is refused", "[stats]") {
  const TempFolder folder;
  CHECK_THAT(error_text([&] { StatsFile::open(folder / "nothing"); }), StartsWith("io: ") && Contains("nothing"));
  write_file_atomically(folder / "text", std::as_bytes(std::span("not a container", 15)));
  CHECK_THAT(error_text([&] { StatsFile::open(folder / "text"); }), StartsWith("bad_input: "));
}
