#include <kvq/dump/keep_tokens.h>

#include <kvq/dump/content_hash.h>

#include "support/layers.h"

#include <catch2/catch.hpp>

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <set>

using namespace kvq;

namespace {

using Borders = std::vector<std::int64_t>;

/// 45 tokens in sequences of 13, 1 and 31. Positions do not start at 0, as in a dump that begins in the middle of a
/// text.
LayerActivations example(DType dtype = DType::f32, bool has_values = true) {
  LayerActivations layer = test::make_layer({.has_values = has_values, .dtype = dtype});
  for (std::size_t t = 0; t < layer.positions.size(); ++t) layer.positions[t] = 1000 + 3 * layer.positions[t];
  for (std::size_t t = 0; t < layer.positions.size(); ++t) layer.generated.push_back(t % 3 == 1);
  layer.o_proj = {1.0f, 2.0f, 3.0f};
  layer.o_proj_rows = 3;
  layer.o_proj_metric = {6.0f};
  layer.output_curvature = {4.0f, 5.0f};
  return layer;
}

LayerActivations kept(LayerActivations layer, std::int64_t first, std::int64_t count) {
  keep_tokens(layer, first, count);
  return layer;
}

/// Reference for the borders, token by token: a sequence begins where the previous token belongs to another sequence.
Borders expected_borders(const Borders& whole, std::int64_t first, std::int64_t count) {
  const auto sequence_of = [&](std::int64_t token) {
    return std::upper_bound(whole.begin(), whole.end(), token) - whole.begin();
  };
  Borders borders;
  for (std::int64_t token = first; token < first + count; ++token)
    if (token == first || sequence_of(token) != sequence_of(token - 1)) borders.push_back(token - first);
  borders.push_back(count);
  return borders;
}

void check_rows(const ActivationTensor& found, const ActivationTensor& whole, std::int64_t first, std::int64_t count) {
  CHECK(found.dtype == whole.dtype);
  CHECK(found.tokens == count);
  CHECK(found.heads == whole.heads);
  CHECK(found.dim == whole.dim);
  const auto row = whole.raw.size() / static_cast<std::size_t>(whole.tokens);
  REQUIRE(found.raw.size() == row * static_cast<std::size_t>(count));
  CHECK(std::memcmp(found.raw.data(), whole.raw.data() + row * static_cast<std::size_t>(first), found.raw.size()) == 0);
}

template <typename T>
std::vector<T> part(const std::vector<T>& whole, std::int64_t first, std::int64_t count) {
  return {whole.begin() + first, whole.begin() + first + count};
}

void check_kept(const LayerActivations& whole, std::int64_t first, std::int64_t count) {
  CAPTURE(first, count);
  const LayerActivations found = kept(whole, first, count);
  CHECK(found.layer == whole.layer);
  CHECK(found.geometry == whole.geometry);
  CHECK(found.cu_seqlens == expected_borders(whole.cu_seqlens, first, count));
  CHECK(found.positions == part(whole.positions, first, count));
  if (whole.generated.empty())
    CHECK(found.generated.empty());
  else
    CHECK(found.generated == part(whole.generated, first, count));
  check_rows(found.q, whole.q, first, count);
  check_rows(found.k, whole.k, first, count);
  REQUIRE(found.v.has_value() == whole.v.has_value());
  if (whole.v) check_rows(*found.v, *whole.v, first, count);
  CHECK(found.o_proj == whole.o_proj);
  CHECK(found.o_proj_rows == whole.o_proj_rows);
  CHECK(found.o_proj_metric == whole.o_proj_metric);
  CHECK(found.output_curvature == whole.output_curvature);
}

}  // namespace

TEST_CASE("Every range of tokens is cut from a layer", "[dump][keep_tokens]") {
  const LayerActivations whole = example();
  for (std::int64_t first = 0; first < 45; ++first)
    for (std::int64_t count = 1; first + count <= 45; ++count) check_kept(whole, first, count);
}

TEST_CASE("Ranges are cut whatever the type, with and without values and marks of generated tokens",
          "[dump][keep_tokens]") {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16})
    for (const bool has_values : {true, false})
      for (const bool marked : {true, false}) {
        LayerActivations whole = example(dtype, has_values);
        if (!marked) whole.generated.clear();
        for (const auto& [first, count] : {std::pair{0, 45}, {0, 1}, {44, 1}, {13, 1}, {12, 3}, {5, 30}, {14, 31}})
          check_kept(whole, first, count);
      }
}

TEST_CASE("Hand-made borders", "[dump][keep_tokens]") {
  const LayerActivations whole = example();
  const auto borders = [&](std::int64_t first, std::int64_t count) { return kept(whole, first, count).cu_seqlens; };
  CHECK(borders(0, 45) == Borders{0, 13, 14, 45});
  CHECK(borders(3, 7) == Borders{0, 7});         // within one sequence
  CHECK(borders(0, 13) == Borders{0, 13});       // exactly one sequence
  CHECK(borders(13, 1) == Borders{0, 1});        // the sequence of one token
  CHECK(borders(12, 2) == Borders{0, 1, 2});     // an end and a beginning
  CHECK(borders(12, 4) == Borders{0, 1, 2, 4});  // across two borders
  CHECK(borders(14, 31) == Borders{0, 31});      // from a border to the end
  CHECK(kept(whole, 12, 3).positions == Borders{1036, 1000, 1000});
  CHECK(kept(whole, 20, 2).positions == Borders{1018, 1021});
}

TEST_CASE("Heads of a cut layer are read as those of the whole", "[dump][keep_tokens]") {
  const LayerActivations whole = example(DType::bf16), found = kept(whole, 11, 20);
  std::vector<float> a(16), b(16);
  for (const std::int64_t token : {0, 1, 2, 19}) {
    found.k.load_head(1, token, 1, a.data());
    whole.k.load_head(1, 11 + token, 1, b.data());
    CHECK(a == b);
  }
}

TEST_CASE("A range of a range is a range", "[dump][keep_tokens]") {
  const LayerActivations whole = example(), twice = kept(kept(whole, 4, 35), 6, 20), once = kept(whole, 10, 20);
  CHECK(twice.cu_seqlens == once.cu_seqlens);
  CHECK(twice.positions == once.positions);
  CHECK(twice.q.raw == once.q.raw);
  CHECK(twice.v->raw == once.v->raw);
}

TEST_CASE("A range of a layer has a hash of its own, from the layer's and the range", "[dump][keep_tokens]") {
  const LayerActivations whole = example();
  LayerActivations other = whole;
  other.content_hash = "xxh3-128:00000000000000000000000000000001";
  std::set<std::string> hashes = {whole.content_hash, other.content_hash};
  std::size_t ranges = 2;
  for (const auto& [first, count] : {std::pair{0, 44}, {1, 44}, {0, 1}, {1, 1}, {11, 2}, {1, 12}, {11, 1}, {1, 11}}) {
    const std::string hash = kept(whole, first, count).content_hash;
    CHECK(hash == content_hash_of(fmt::format("{} {} {}", whole.content_hash, first, count)));
    CHECK(hash == kept(whole, first, count).content_hash);
    hashes.insert(hash);
    hashes.insert(kept(other, first, count).content_hash);
    ranges += 2;
  }
  CHECK(hashes.size() == ranges);
}

TEST_CASE("The whole of a layer is the layer, its hash included", "[dump][keep_tokens]") {
  const LayerActivations whole = example();
  CHECK(kept(whole, 0, 45).content_hash == whole.content_hash);
}

TEST_CASE("A hash of a text is XXH3-128 with seed 0, in canonical order", "[dump][content_hash]") {
  // From xxhsum -H128 of xxHash 0.8.
  CHECK(content_hash_of("") == "xxh3-128:99aa06d3014798d86001c324468d497f");
  CHECK(content_hash_of("abc") == "xxh3-128:06b05ab6733a618578af5f94892f3950");
  CHECK(content_hash_of(std::string(1, '\0')) != content_hash_of(""));
  CHECK(content_hash_of(std::string("a\0b", 3)) != content_hash_of(std::string("a\0c", 3)));
  CHECK(content_hash_of("xxh3-128:0 1 2") == content_hash_of(std::string("xxh3-128:0 ") + "1 2"));
}
