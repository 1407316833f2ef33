#include <kvq/dump/dump_file.h>

#include "support/dump_writer.h"
#include "support/error_of.h"
#include "support/temp_folder.h"

#include <catch2/catch.hpp>

#include <functional>

using namespace kvq;
using namespace kvq::test;
using Catch::Matchers::Contains;

namespace {

/// A dump with only sequences [first, last) of another dump.
DumpContent cut(const DumpContent& whole, std::size_t first, std::size_t last) {
  DumpContent part = whole;
  const auto begin = whole.cu_seqlens[first], end = whole.cu_seqlens[last];
  part.cu_seqlens.assign(whole.cu_seqlens.begin() + static_cast<std::ptrdiff_t>(first),
                         whole.cu_seqlens.begin() + static_cast<std::ptrdiff_t>(last) + 1);
  for (std::int64_t& border : part.cu_seqlens) border -= begin;
  const auto slice = [&](auto& values, std::int64_t row) {
    if (!values.empty()) values = {values.begin() + begin * row, values.begin() + end * row};
  };
  slice(part.positions, 1);
  slice(part.generated, 1);
  for (DumpLayer& layer : part.layers) {
    const LayerGeometry& g = layer.geometry;
    slice(layer.q, g.num_q_heads * g.head_dim);
    slice(layer.k, g.num_kv_heads * g.head_dim);
    slice(layer.v, g.num_kv_heads * g.v_head_dim);
  }
  return part;
}

DumpContent only_layers(DumpContent content, const std::vector<int>& layers) {
  std::erase_if(content.layers,
                [&](const DumpLayer& layer) { return std::ranges::find(layers, layer.layer) == layers.end(); });
  return content;
}

void check_same(const Dump& a, const Dump& b) {
  REQUIRE(a.model().layers.size() == b.model().layers.size());
  CHECK(a.num_sequences() == b.num_sequences());
  for (const LayerEntry& entry : a.model().layers) {
    const auto x = a.load_layer(entry.layer), y = b.load_layer(entry.layer);
    CHECK(x.cu_seqlens == y.cu_seqlens);
    CHECK(x.positions == y.positions);
    CHECK(x.generated == y.generated);
    CHECK(x.q.raw == y.q.raw);
    CHECK(x.k.raw == y.k.raw);
    CHECK(x.v->raw == y.v->raw);
    CHECK(x.o_proj == y.o_proj);
    CHECK(x.o_proj_metric == y.o_proj_metric);
  }
}

DumpContent whole_dump() {
  DumpContent whole = random_dump({.layers = {0, 1, 2}, .lengths = {5, 1, 7}, .capture_point = CapturePoint::pre_rope});
  whole.generated = std::vector<std::uint8_t>(13, 0);
  whole.generated[12] = whole.generated[5] = 1;
  whole.layers[1].o_proj = std::vector<float>(3 * 24, 0.25f);
  whole.layers[2].o_proj_metric = std::vector<float>(2 * 6 * 6, 0.5f);
  return whole;
}

}  // namespace

TEST_CASE("However a dump is split, its files join to the same dump", "[dump]") {
  const TempFolder folder;
  const DumpContent whole = whole_dump();
  const auto file = [&](const std::string& name, const DumpContent& content) {
    write_dump(folder / name, content);
    return folder / name;
  };
  const auto reference = Dump::open({file("whole", whole)});
  SECTION("by layer") {
    const auto joined = Dump::open({file("a", only_layers(whole, {1})), file("b", only_layers(whole, {0, 2}))});
    check_same(reference, joined);
    CHECK(reference.load_layer(1).content_hash == joined.load_layer(1).content_hash);
  }
  SECTION("by sequences") {
    check_same(reference, Dump::open({file("a", cut(whole, 0, 1)), file("b", cut(whole, 1, 3))}));
  }
  SECTION("by both, each layer in its own way") {
    check_same(reference,
               Dump::open({file("a", only_layers(cut(whole, 0, 2), {0})), file("b", only_layers(whole, {1})),
                           file("c", only_layers(cut(whole, 2, 3), {0})), file("d", only_layers(cut(whole, 0, 1), {2})),
                           file("e", only_layers(cut(whole, 1, 3), {2}))}));
  }
}

TEST_CASE("Layers that see other sequences are refused", "[dump]") {
  const TempFolder folder;
  const DumpContent whole = whole_dump();
  write_dump(folder / "a", only_layers(whole, {0, 1}));
  write_dump(folder / "b", only_layers(cut(whole, 0, 2), {2}));
  CHECK_THAT(error_text([&] { Dump::open({folder / "a", folder / "b"}); }),
             Contains("bad_input: layer 2 sees other sequences (from " + (folder / "b").string() + ") than layer 0"));
  write_dump(folder / "first", cut(whole, 0, 1));
  write_dump(folder / "second", only_layers(cut(whole, 1, 3), {0, 2}));
  CHECK_THAT(error_text([&] { Dump::open({folder / "first", folder / "second"}); }),
             Contains("layer 1 sees other sequences"));
}

TEST_CASE("Files of different models are refused by the first difference and the number of the others", "[dump]") {
  const TempFolder folder;
  const std::string a = (folder / "a").string(), b = (folder / "b").string();
  write_dump(a, random_dump({}));
  DumpContent all = random_dump({.seed = 2});
  const auto refusal = [&](const DumpContent& other) {
    write_dump(b, other);
    return error_text([&] { Dump::open({a, b}); });
  };
  const auto expect = [&](const std::string& text, const std::function<void(DumpContent&)>& change) {
    DumpContent other = random_dump({.seed = 2});
    change(other);
    CHECK(refusal(other) == "bad_input: " + b + ": " + text);
    change(all);
  };
  expect("model_name: expected 'test-model' as in " + a + ", found 'other'",
         [](DumpContent& other) { other.model_name = "other"; });
  expect("model_fingerprint: expected '' as in " + a + ", found '" + std::string(64, '0') + "'",
         [](DumpContent& other) { other.model_fingerprint = std::string(64, '0'); });
  expect("layer 0: softmax_scale: expected '0.125' as in " + a + ", found '0.5'",
         [](DumpContent& other) { other.layers[0].geometry.softmax_scale = 0.5; });
  expect("layer 0: rope_inv_freq differs from " + a,
         [](DumpContent& other) { other.layers[0].geometry.rope.inv_freq[1] = 0.25; });
  expect("layer 0: q: kvq_dtype: expected 'float32' as in " + a + ", found 'bfloat16' (2 further differences)",
         [](DumpContent& other) { other.layers[0].dtype = DType::bf16; });  // of k and v
  CHECK(refusal(all) == "bad_input: " + b + ": model_name: expected 'test-model' as in " + a +
                            ", found 'other' (6 further differences)");
}

TEST_CASE("A tensor that all files share must be the same in all", "[dump]") {
  const TempFolder folder;
  DumpContent content = random_dump({});
  content.layers[0].o_proj = std::vector<float>(24, 0.25f);
  write_dump(folder / "a", content);
  content = random_dump({.seed = 2});
  content.layers[0].o_proj = std::vector<float>(24, 0.25f);
  content.layers[0].o_proj[3] = 0.5f;
  write_dump(folder / "b", content);
  const auto dump = Dump::open({folder / "a", folder / "b"});
  CHECK_THAT(
      error_text([&] { dump.load_layer(0); }),
      Contains("bad_input: " + (folder / "b").string() + ": layer 0: o_proj: differs from " + (folder / "a").string()));
}

TEST_CASE("All files have the metric of the output projection, and the same one, or none has it", "[dump]") {
  const TempFolder folder;
  DumpContent content = random_dump({});
  write_dump(folder / "without", content);
  content.layers[0].o_proj_metric = std::vector<float>(2 * 6 * 6, 0.25f);
  write_dump(folder / "a", content);
  content = random_dump({.seed = 2});
  content.layers[0].o_proj_metric = std::vector<float>(2 * 6 * 6, 0.25f);
  content.layers[0].o_proj_metric[71] = 0.5f;
  write_dump(folder / "b", content);
  CHECK_THAT(
      error_text([&] { Dump::open({folder / "a", folder / "without"}); }),
      Contains("bad_input: " + (folder / "without").string() + ": layer 0: o_proj_metric: heads: expected '2' as in " +
               (folder / "a").string() + ", found '0'"));
  CHECK_THAT(error_text([&] { Dump::open({folder / "without", folder / "a"}); }),
             Contains("o_proj_metric: heads: expected '0'"));
  const auto dump = Dump::open({folder / "a", folder / "b"});
  CHECK_THAT(error_text([&] { dump.load_layer(0); }),
             Contains("bad_input: " + (folder / "b").string() + ": layer 0: o_proj_metric: differs from " +
                      (folder / "a").string()));
}

TEST_CASE("The same file twice is refused, under any name", "[dump]") {
  const TempFolder folder;
  write_dump(folder / "a", random_dump({}));
  std::filesystem::create_symlink(folder / "a", folder / "b");
  CHECK_THAT(error_text([&] { Dump::open({folder / "a", folder / "b"}); }), Contains("is the same file as"));
}

TEST_CASE("Faults of several files are reported together", "[dump]") {
  const TempFolder folder;
  write_dump(folder / "a", random_dump({}), [](hid_t file) { remove_attribute(file, "/layers/0", "head_dim"); });
  write_dump(folder / "b", random_dump({}), [](hid_t file) { remove_attribute(file, "/", "producer"); });
  const std::string text = error_text([&] { Dump::open({folder / "a", folder / "none", folder / "b"}); });
  CHECK_THAT(text, Contains((folder / "a").string() + ": layer 0: attribute head_dim is missing\n"));
  CHECK_THAT(text, Contains((folder / "none").string() + ": cannot open: No such file or directory\n"));
  CHECK_THAT(text, Contains((folder / "b").string() + ": attribute producer is missing"));
}

TEST_CASE("A dump of no files is refused", "[dump]") {
  CHECK_THAT(error_text([] { Dump::open({}); }), Contains("at least one file"));
}
