#include <kvq/stats/collect.h>
#include <kvq/stats/held_out.h>
#include <kvq/stats/stats_file.h>

#include "support/compare.h"
#include "support/container_edit.h"
#include "support/error_of.h"
#include "support/layers.h"
#include "support/matrix.h"
#include "support/naive_stats.h"
#include "support/random_data.h"
#include "support/temp_folder.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cstring>
#include <limits>
#include <set>

using namespace kvq;
using namespace kvq::test;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;

namespace {

/// The stored bytes of tokens [first, first + count), all heads.
std::vector<std::byte> raw_rows(const ActivationTensor& tensor, std::int64_t first, std::int64_t count) {
  const auto row = static_cast<std::ptrdiff_t>(size_of(tensor.dtype)) * tensor.heads * tensor.dim;
  return {tensor.raw.begin() + first * row, tensor.raw.begin() + (first + count) * row};
}

std::set<Moment> mergeable(bool has_values) {
  std::set<Moment> moments = all_moments(has_values);
  moments.erase(Moment::sst);
  return moments;
}

/// A moment over the first `count` tokens of one sequence, as queries.
NaiveMoment naive_part(const LayerActivations& layer, const TokenRange& range, Moment which, int kv_head) {
  std::size_t sequence = 0;
  while (layer.cu_seqlens[sequence + 1] <= range.first) ++sequence;
  LayerActivations part = keep_sequences(layer, sequence, 1);
  // Attention is causal, so the first tokens alone give the same as in the whole sequence.
  part.cu_seqlens = {0, range.count};
  for (ActivationTensor* tensor : {&part.q, &part.k}) {
    tensor->raw = raw_rows(*tensor, 0, range.count);
    tensor->tokens = range.count;
  }
  if (part.v) {
    part.v->raw = raw_rows(*part.v, 0, range.count);
    part.v->tokens = range.count;
  }
  return naive_moment(part, which, kv_head);
}

void check_equal(const HeldOut& a, const HeldOut& b) {
  CHECK(a.token == b.token);
  CHECK(a.query == b.query);
  CHECK(a.count() == b.count());
  for (const auto& [x, y] : {std::pair{&a.q, &b.q}, std::pair{&a.k, &b.k}, std::pair{&a.v, &b.v}}) {
    CHECK(x->dtype == y->dtype);
    CHECK(x->heads == y->heads);
    CHECK(x->dim == y->dim);
    CHECK(x->raw == y->raw);
  }
  CHECK(a.curvature == b.curvature);
}

StatsHeader header() {
  return {
      .model = {.name = "tiny", .fingerprint = "", .config_json = "", .num_layers = 6, .layers = {}},
      .producer = "kvq tests",
      .capture_point = "post_rope",
      .seed = 9,
      .sample_tokens = 17,
  };
}

/// Each query head's curvature is A A^T of a random A.
LayerActivations layer_with_curvature(const LayerSpec& spec) {
  LayerActivations layer = make_layer(spec);
  const int dim = spec.v_head_dim;
  for (int head = 0; head < spec.num_q_heads; ++head) {
    const auto a = gaussian_double(static_cast<std::size_t>(dim * dim), static_cast<std::uint64_t>(head) + 5);
    for (const double value : multiply(a, transpose(a, dim), dim))
      layer.output_curvature.push_back(static_cast<float>(value));
  }
  return layer;
}

}  // namespace

TEST_CASE("Held out are the first tokens of the first longest sequence, at most a third of the dump", "[stats][held]") {
  const auto chosen = [](std::vector<std::int64_t> lengths, std::int64_t wanted) {
    const TokenRange range = choose_held_out(make_layer({.lengths = std::move(lengths)}), wanted);
    return std::pair{range.first, range.count};
  };
  using Range = std::pair<std::int64_t, std::int64_t>;
  CHECK(chosen({50, 90, 60}, 20) == Range{50, 20});
  CHECK(chosen({50, 90, 60}, 1000) == Range{50, 66});                  // a third of 200
  CHECK(chosen({90, 30, 90}, 16) == Range{0, 16});                     // the first of equal ones
  CHECK(chosen({20, 25, 20, 20, 20, 20, 20}, 1000) == Range{20, 25});  // no more than the sequence has
  CHECK(chosen({200}, 50) == Range{0, 50});
  CHECK(chosen({200}, 8) == Range{0, 8});
  CHECK(chosen({200}, 7).second == 0);  // fewer than 8
  CHECK(chosen({200}, 0).second == 0);
  CHECK(chosen({23}, 100).second == 0);
  CHECK(chosen({24}, 100) == Range{0, 8});
  CHECK(chosen({7, 7, 7, 7, 7}, 100).second == 0);
  const TokenRange range{10, 5};
  CHECK_FALSE(range.contains(9));
  CHECK(range.contains(10));
  CHECK(range.contains(14));
  CHECK_FALSE(range.contains(15));
  CHECK_FALSE(TokenRange{}.contains(0));
}

TEST_CASE("The rows held out are those of the dump, with up to 512 evenly spaced queries", "[stats][held]") {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const LayerActivations layer = layer_with_curvature({.lengths = {30, 700, 40}, .dtype = dtype});
    for (const TokenRange& range :
         {TokenRange{30, 20}, TokenRange{30, 512}, TokenRange{30, 513}, TokenRange{30, 690}, TokenRange{0, 30}}) {
      const HeldOut held = hold_out(layer, range);
      INFO("tokens " << range.count);
      CHECK(held.token == range.first);
      CHECK(held.count() == range.count);
      CHECK(held.k.raw == raw_rows(layer.k, range.first, range.count));
      CHECK(held.v.raw == raw_rows(*layer.v, range.first, range.count));
      CHECK(held.k.dtype == dtype);
      CHECK(held.k.heads == 2);
      CHECK(held.v.dim == 12);
      CHECK(held.curvature == layer.output_curvature);
      REQUIRE(held.query.size() == static_cast<std::size_t>(std::min<std::int64_t>(512, range.count)));
      CHECK(held.q.raw.size() == held.query.size() * 4 * 16 * size_of(dtype));
      std::int64_t least = range.count, most = 1;
      for (std::size_t i = 0; i < held.query.size(); ++i) {
        CHECK(held.query[i] >= 0);
        CHECK(held.query[i] < range.count);
        const std::vector<std::byte> row = raw_rows(layer.q, range.first + held.query[i], 1);
        CHECK(std::equal(row.begin(), row.end(), held.q.raw.begin() + static_cast<std::ptrdiff_t>(i * row.size())));
        if (i == 0) continue;
        least = std::min(least, held.query[i] - held.query[i - 1]);
        most = std::max(most, held.query[i] - held.query[i - 1]);
      }
      CHECK(least >= 1);
      CHECK(most - least <= 1);
      CHECK(range.count - held.query.back() <= most);  // to the end
    }
  }
}

TEST_CASE("What is held out and what is left make up the whole", "[stats][held]") {
  for (const int window : {0, 9})
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const LayerActivations layer = make_layer({.lengths = {23, 70, 17}, .dtype = dtype, .sliding_window = window});
      const StatsRequest request{.moments = mergeable(true), .sample_tokens = 21, .seed = 5};
      StatsRequest without = request;
      without.held_out_tokens = 30;
      const LayerStats whole = collect(layer, request), left = collect(layer, without);
      CHECK_FALSE(whole.held_out);
      REQUIRE(left.held_out);
      const TokenRange range{23, 30};
      CHECK(left.held_out->token == 23);
      CHECK(left.held_out->count() == 30);
      check_equal(*left.held_out, hold_out(layer, range));
      for (const Moment which : request.moments)
        for (int head = 0; head < 2; ++head) {
          INFO(to_string(which) << ", head " << head << ", window " << window);
          const auto h = static_cast<std::size_t>(head);
          const NaiveMoment part = naive_part(layer, range, which, head), all = naive_moment(layer, which, head);
          std::vector<double> sum(part.sum), first(part.first);
          for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = all.sum[i] - part.sum[i];
          for (std::size_t i = 0; i < first.size(); ++i) first[i] = all.first[i] - part.first[i];
          const bool exact = which == Moment::query || which == Moment::key || which == Moment::value;
          const double tolerance = exact ? 1e-12 : 2e-6;  // attention runs in binary32
          CHECK(relative_difference(left.moment(which)[h].sum, sum) < tolerance);
          CHECK(left.moment(which)[h].weight == Approx(all.weight - part.weight).epsilon(1e-9));
        }
    }
}

TEST_CASE("Moments without the tokens held out are those with them less their part", "[stats][held]") {
  // The same sums, collected by the library from a dump that has only the held-out tokens.
  const LayerActivations layer = make_layer({.lengths = {60, 33}});
  StatsRequest request{.moments = mergeable(true), .sample_tokens = 10};
  const LayerStats whole = collect(layer, request);
  LayerActivations part = keep_sequences(layer, 0, 1);
  part.cu_seqlens = {0, 25};
  part.positions.resize(25);
  for (ActivationTensor* tensor : {&part.q, &part.k, &*part.v}) {
    tensor->raw = raw_rows(*tensor, 0, 25);
    tensor->tokens = 25;
  }
  const LayerStats held = collect(part, request);
  request.held_out_tokens = 25;
  const LayerStats left = collect(layer, request);
  CHECK(left.tokens + (left.tokens == whole.tokens ? 0 : 25) == whole.tokens);
  for (const Moment which : request.moments)
    for (std::size_t head = 0; head < 2; ++head) {
      INFO(to_string(which) << ", head " << head);
      std::vector<double> sum = left.moment(which)[head].sum;
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += held.moment(which)[head].sum[i];
      CHECK(relative_difference(sum, whole.moment(which)[head].sum) < 1e-9);
      CHECK(left.moment(which)[head].weight + held.moment(which)[head].weight ==
            Approx(whole.moment(which)[head].weight).epsilon(1e-12));
    }
}

TEST_CASE("No sampled token is held out, and the sample is that of the other tokens", "[stats][held]") {
  for (const std::int64_t wanted : {std::int64_t{5}, std::int64_t{40}, std::int64_t{1000}}) {
    const LayerActivations layer = make_layer({.lengths = {23, 70, 17}});
    const LayerStats whole = collect(layer, {.moments = {Moment::key}, .sample_tokens = 1000, .seed = 4});
    const LayerStats left =
        collect(layer, {.moments = {Moment::key}, .sample_tokens = wanted, .seed = 4, .held_out_tokens = 36});
    REQUIRE(left.held_out);
    const TokenRange range{left.held_out->token, left.held_out->count()};
    std::vector<std::int64_t> expected;
    for (const std::int64_t token : whole.sample.token)
      if (!range.contains(token)) expected.push_back(token);
    expected.resize(std::min<std::size_t>(expected.size(), static_cast<std::size_t>(wanted)));
    CHECK(left.sample.token == expected);
    CHECK(sample_tokens(layer, 4, wanted, range.first, range.first + range.count).token == expected);
  }
}

TEST_CASE("Without enough tokens nothing is held out, and nothing changes", "[stats][held]") {
  const LayerActivations layer = make_layer({.lengths = {13, 1, 9}});  // a third is 7
  const StatsRequest request{.moments = mergeable(true), .sample_tokens = 9};
  StatsRequest wanting = request;
  wanting.held_out_tokens = 100;
  const LayerStats a = collect(layer, request), b = collect(layer, wanting);
  CHECK_FALSE(b.held_out);
  CHECK(a.sample.token == b.sample.token);
  for (const Moment which : request.moments) CHECK((a.moment(which)[0].sum == b.moment(which)[0].sum));
}

TEST_CASE("Merging keeps the longest part held out, counted in the order of merging", "[stats][held]") {
  const StatsRequest request{.moments = mergeable(true), .sample_tokens = 12, .held_out_tokens = 40};
  const LayerActivations shorter = make_layer({.lengths = {60, 20}, .seed = 1}),
                         longer = make_layer({.lengths = {30, 130}, .seed = 2});
  const LayerActivations none = make_layer({.lengths = {20}, .seed = 3});
  const LayerStats a = collect(shorter, request), b = collect(longer, request), c = collect(none, request);
  REQUIRE(a.held_out->count() == 26);
  REQUIRE(b.held_out->count() == 40);
  REQUIRE_FALSE(c.held_out);
  const auto merged = [](LayerStats into, const LayerStats& other) {
    merge(into, other, 12);
    return into;
  };
  HeldOut moved = *b.held_out;
  moved.token += 80;  // after the tokens of the first dump
  check_equal(*merged(a, b).held_out, moved);
  check_equal(*merged(b, a).held_out, *b.held_out);
  check_equal(*merged(a, c).held_out, *a.held_out);
  HeldOut behind = *a.held_out;
  behind.token += 20;
  check_equal(*merged(c, a).held_out, behind);
  // Of equally long ranges the first is kept.
  check_equal(*merged(a, collect(make_layer({.lengths = {60, 20}, .seed = 9}), request)).held_out, *a.held_out);
  CHECK(merged(a, b).tokens == a.tokens + b.tokens);
}

TEST_CASE("Statistics with tokens held out survive their file, byte for byte, as version 1.1", "[stats][held]") {
  const TempFolder folder;
  const StatsRequest request{.moments = all_moments(true), .sample_tokens = 17, .seed = 9, .held_out_tokens = 20};
  const LayerActivations curved = layer_with_curvature({.layer = 2, .lengths = {30, 40}, .dtype = DType::bf16});
  LayerStats a = collect(curved, request), b = collect(make_layer({.layer = 3, .lengths = {30, 40}}), request);
  LayerStats c =
      collect(make_layer({.layer = 4, .lengths = {30, 40}, .has_values = false}),
              {.moments = {Moment::query, Moment::key}, .sample_tokens = 17, .seed = 9, .held_out_tokens = 20});
  for (LayerStats* stats : {&a, &b, &c}) stats->ranges.clear();  // which make version 1.5
  save_stats(header(), std::vector<LayerStats>{a, b, c}, folder / "a");
  const StatsFile file = StatsFile::open(folder / "a");
  check_equal(*file.load(0).held_out, *a.held_out);
  check_equal(*file.load(1).held_out, *b.held_out);
  REQUIRE(file.load(2).held_out.has_value() == c.held_out.has_value());
  if (c.held_out) check_equal(*file.load(2).held_out, *c.held_out);
  CHECK(file.load(0).held_out->curvature.size() == 4 * 12 * 12);
  save_stats(file.header(), std::vector<LayerStats>{file.load(0), file.load(1), file.load(2)}, folder / "b");
  CHECK(file_bytes(folder / "a") == file_bytes(folder / "b"));
  const EditableFile edit = EditableFile::read(folder / "a");
  CHECK(edit.metadata.at("version") == "1.1");
  CHECK(edit.metadata.at("requires").empty());
  const Json& layer = edit.manifest.at("layers").at(0);
  CHECK(layer.at("held_out_tokens") == 20);
  CHECK(layer.at("curvature") == true);
  CHECK(edit.manifest.at("layers").at(1).at("curvature") == false);
  const auto shape = [&](const std::string& name) { return edit.tensors.at("layers.2.held_out." + name).shape; };
  CHECK(shape("token") == std::vector<std::int64_t>{1});
  CHECK(shape("query") == std::vector<std::int64_t>{20});
  CHECK(shape("q") == std::vector<std::int64_t>{20, 4, 16});
  CHECK(shape("k") == std::vector<std::int64_t>{20, 2, 16});
  CHECK(shape("v") == std::vector<std::int64_t>{20, 2, 12});
  CHECK(shape("curvature") == std::vector<std::int64_t>{4, 12, 12});
  CHECK(edit.tensors.count("layers.3.held_out.curvature") == 0);
}

TEST_CASE("Statistics without tokens held out stay version 1.0", "[stats][held]") {
  const TempFolder folder;
  LayerStats stats = collect(make_layer({.layer = 2}), {.moments = {Moment::key}, .sample_tokens = 17, .seed = 9});
  stats.ranges.clear();  // which make version 1.5
  save_stats(header(), std::vector<LayerStats>{stats}, folder / "a");
  const EditableFile file = EditableFile::read(folder / "a");
  CHECK(file.metadata.at("version") == "1.0");
  CHECK_FALSE(file.manifest.at("layers").at(0).contains("held_out_tokens"));
  for (const auto& [name, tensor] : file.tensors) CHECK_THAT(name, !Contains("held_out"));
}

TEST_CASE("Merged files keep the longest part held out", "[stats][held]") {
  const TempFolder folder;
  const StatsRequest request{.moments = mergeable(true), .sample_tokens = 17, .seed = 9, .held_out_tokens = 40};
  const LayerStats a = collect(make_layer({.layer = 2, .lengths = {60, 20}, .seed = 1}), request),
                   b = collect(make_layer({.layer = 2, .lengths = {130}, .seed = 2}), request);
  save_stats(header(), std::vector<LayerStats>{a}, folder / "a");
  save_stats(header(), std::vector<LayerStats>{b}, folder / "b");
  merge_stats_files({folder / "a", folder / "b"}, folder / "both");
  LayerStats expected = a;
  merge(expected, b, 17);
  check_equal(*StatsFile::open(folder / "both").load(0).held_out, *expected.held_out);
}

TEST_CASE("A faulty part held out is refused with the reason", "[stats][held]") {
  const TempFolder folder;
  const StatsRequest request{.moments = {Moment::key}, .sample_tokens = 17, .seed = 9, .held_out_tokens = 20};
  save_stats(header(),
             std::vector<LayerStats>{collect(layer_with_curvature({.layer = 2, .lengths = {30, 40}}), request)},
             folder / "good");
  const auto check = [&](const char* what, const char* kind, const char* word,
                         const std::function<void(EditableFile&)>& make) {
    INFO(what);
    EditableFile bad = EditableFile::read(folder / "good");
    make(bad);
    bad.write(folder / "bad");
    CHECK_THAT(error_text([&] { StatsFile::open(folder / "bad").load(0); }),
               StartsWith(kind) && Contains((folder / "bad").string()) && Contains(word));
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const char* name : {"token", "query", "q", "k", "v", "curvature"})
    check(name, "bad_input: ", name,
          [&](EditableFile& f) { f.tensors.erase(std::string("layers.2.held_out.") + name); });
  check("NaN in queries", "numerical: ", "held_out.q",
        [&](EditableFile& f) { f.set_float("layers.2.held_out.q", 5, nan); });
  check("NaN in keys", "numerical: ", "held_out.k",
        [&](EditableFile& f) { f.set_float("layers.2.held_out.k", 5, nan); });
  check("infinity in values", "numerical: ", "held_out.v",
        [&](EditableFile& f) { f.set_float("layers.2.held_out.v", 5, HUGE_VALF); });
  check("NaN in the curvature", "numerical: ", "held_out.curvature",
        [&](EditableFile& f) { f.set_float("layers.2.held_out.curvature", 5, nan); });
  const auto set_query = [](EditableFile& f, std::size_t i, std::int64_t place) {
    std::memcpy(f.tensors.at("layers.2.held_out.query").data.data() + 8 * i, &place, 8);
  };
  check("a query beyond the tokens", "bad_input: ", "held_out.query", [&](EditableFile& f) { set_query(f, 19, 20); });
  check("a negative query", "bad_input: ", "held_out.query", [&](EditableFile& f) { set_query(f, 0, -1); });
  check("queries out of order", "bad_input: ", "held_out.query", [&](EditableFile& f) { set_query(f, 3, 1); });
  check("keys of another shape", "bad_input: ", "held_out.k",
        [&](EditableFile& f) { f.tensors.at("layers.2.held_out.k").shape = {20, 32}; });
  check("another number of tokens", "bad_input: ", "held_out",
        [&](EditableFile& f) { f.manifest["layers"][0]["held_out_tokens"] = 19; });
}
