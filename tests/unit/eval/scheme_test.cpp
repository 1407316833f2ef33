#include <kvq/eval/scheme.h>

#include <kvq/core/dtype.h>
#include <kvq/core/error.h>
#include <kvq/core/suggestion.h>
#include <kvq/eval/kivi.h>
#include <kvq/plan/rotation.h>
#include <kvq/solve/sphere_codebook.h>
#include <kvq/solve/structured.h>

#include "support/compare.h"
#include "support/error_of.h"
#include "support/matrix.h"
#include "support/packing_reference.h"
#include "support/random_data.h"
#include "support/row_reference.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

using namespace kvq;

namespace {

using Rows = std::vector<float>;

LayerGeometry geometry_of(int dim, int v_dim) {
  LayerGeometry geometry{
      .num_q_heads = 4,
      .num_kv_heads = 2,
      .head_dim = dim,
      .v_head_dim = v_dim,
      .softmax_scale = 0.25,
  };
  if (v_dim == 0) geometry.kind = AttentionKind::mla_rope;
  return geometry;
}

StoredLayer store(const std::string& name, int dim, int layer = 0, std::uint64_t seed = 1) {
  return find_scheme(name).of_layer(geometry_of(dim, dim), layer, seed);
}

Rows restored(const StoredSide& side, Rows rows, int head = 0) {
  side.restore({}, 0, head, rows);
  return rows;
}

/// A tensor whose heads all have the rows [T, dim].
ActivationTensor tensor_of(const Rows& rows, int dim, int heads) {
  ActivationTensor tensor{
      .tokens = static_cast<std::int64_t>(rows.size()) / dim, .heads = heads, .dim = dim, .raw = {}};
  for (std::int64_t t = 0; t < tensor.tokens; ++t)
    for (int head = 0; head < heads; ++head) {
      const auto bytes =
          std::as_bytes(std::span(rows).subspan(static_cast<std::size_t>(t * dim), static_cast<std::size_t>(dim)));
      tensor.raw.insert(tensor.raw.end(), bytes.begin(), bytes.end());
    }
  return tensor;
}

/// Rows [T, dim] of one of two equal heads.
Rows restored_of_two(const StoredSide& side, Rows rows, int dim, int head = 0) {
  const ActivationTensor tensor = tensor_of(rows, dim, 2);
  side.restore(tensor, 0, head, rows);
  return rows;
}

/// Rows [count, dim] of a head: Gaussian with large channels, a row of zeros and a row of equal numbers.
Rows test_rows(std::size_t count, int dim, std::uint64_t seed = 1) {
  Rows rows = test::rows_with_outliers(count, dim, seed);
  const auto d = static_cast<std::size_t>(dim);
  if (count > 4) {
    std::fill_n(rows.begin() + static_cast<std::ptrdiff_t>(2 * d), d, 0.0f);
    std::fill_n(rows.begin() + static_cast<std::ptrdiff_t>(4 * d), d, 0.7f);
  }
  return rows;
}

/// Applies `of_row` to each row.
Rows by_row(const Rows& rows, int dim, const std::function<Rows(const Rows&)>& of_row) {
  Rows result;
  for (auto at = rows.begin(); at != rows.end(); at += dim)
    for (const float x : of_row(Rows(at, at + dim))) result.push_back(x);
  return result;
}

/// x M, computed in double and rounded once.
Rows times(const Rows& x, const std::vector<double>& matrix) {
  Rows result(x.size());
  for (std::size_t j = 0; j < x.size(); ++j) {
    double sum = 0.0;
    for (std::size_t i = 0; i < x.size(); ++i) sum += double{x[i]} * matrix[i * x.size() + j];
    result[j] = static_cast<float>(sum);
  }
  return result;
}

Rows coded(const UniformCoder& coder, const Rows& row) { return test::reference_row(coder, 1.0, row).decoded; }

/// Rotates by Hadamard blocks of this order, quantizes, and rotates back.
Rows coded_in_blocks(const UniformCoder& coder, int order, const Rows& row) {
  const auto blocks = test::sylvester_blocks(static_cast<int>(row.size()), order);
  return times(coded(coder, times(row, blocks)), blocks);
}

UniformCoder affine(int bits, int dim) { return {.bits = bits, .group_size = dim}; }
UniformCoder symmetric_norm(int bits, int dim) {
  return {.bits = bits, .group_size = dim, .levels = UniformLevels::symmetric, .rule = ScaleRule::norm};
}

/// The names that a pattern stands for, with the code bits of each name.
std::vector<std::pair<std::string, double>> names_of(const std::string& pattern) {
  const auto at = pattern.find("<b>");
  if (at == std::string::npos) return {{pattern, pattern == "bf16" ? 16.0 : pattern.starts_with("fp8") ? 8.0 : 4.0}};
  std::vector<std::pair<std::string, double>> names;
  for (int bits = 1; bits <= 8; ++bits) names.emplace_back(pattern.substr(0, at) + std::to_string(bits), bits);
  return names;
}

/// Bound on the relative error. With few bits, codes of rows with large channels may have larger errors than zeros.
double most_error(double bits) { return 8.0 / std::exp2(bits) + 0.1; }

/// Bits per element of a sequence, counted token by token: quantized tokens cost `coded`, exact tokens 16.
double counted_bits(const ExactTokens& tokens, std::int64_t context, double coded) {
  double total = 0.0;
  for (std::int64_t t = 0; t < context; ++t)
    total += t >= tokens.sink && t < tokens.coded_end(context - 1) ? coded : 16.0;
  return total / static_cast<double>(context);
}

constexpr std::int64_t kContexts[] = {1, 2, 31, 32, 33, 63, 64, 65, 95, 96, 1000, 32768};

}  // namespace

TEST_CASE("The registry lists every family once", "[eval][scheme]") {
  std::vector<std::string> patterns;
  for (const SchemeFamily& family : scheme_families()) {
    patterns.emplace_back(family.pattern);
    CHECK(!family.summary.empty());
  }
  std::sort(patterns.begin(), patterns.end());
  CHECK(patterns == std::vector<std::string>{"bf16", "fp8", "fp8-head", "fp8-unscaled", "kivi-<b>",
                                             "kivi-scale-only-<b>", "naive-int<b>", "nvfp4", "quarot-int<b>",
                                             "saw-int4", "symmetric-norm-<b>", "tq-mse-<b>", "turboquant-qjl-<b>"});
}

TEST_CASE("Every name of the registry makes both sides, and keys alone with -k", "[eval][scheme]") {
  for (const SchemeFamily& family : scheme_families())
    for (const auto& [name, bits] : names_of(std::string(family.pattern)))
      for (const int dim : {16, 80, 128}) {
        CAPTURE(name, dim);
        const Scheme both = find_scheme(name), keys = find_scheme(name + "-k");
        CHECK(both.name == name);
        CHECK(keys.name == name + "-k");
        const int v_dim = dim == 128 ? 80 : dim;
        const StoredLayer stored = both.of_layer(geometry_of(dim, v_dim), 3, 7),
                          stored_keys = keys.of_layer(geometry_of(dim, v_dim), 3, 7);
        REQUIRE(stored.k);
        REQUIRE(stored.v);
        REQUIRE(stored_keys.k);
        CHECK(!stored_keys.v);
        CHECK(stored.k->code_bits() == bits);
        CHECK(stored.v->code_bits() == bits);
        const Rows k = test_rows(70, dim), v = test_rows(70, v_dim);
        for (const int head : {0, 1}) {
          const Rows k_changed = restored_of_two(*stored.k, k, dim, head),
                     v_changed = restored_of_two(*stored.v, v, v_dim, head);
          CHECK(test::first_bit_difference(k_changed, restored_of_two(*stored_keys.k, k, dim, head)) == "");
          for (const double error :
               {test::relative_difference(k_changed, k), test::relative_difference(v_changed, v)}) {
            CHECK(error > 0.0);
            CHECK(error < most_error(bits));
          }
        }
      }
}

TEST_CASE("A layer of rotary keys without values stores keys alone", "[eval][scheme]") {
  for (const SchemeFamily& family : scheme_families())
    for (const auto& [name, bits] : names_of(std::string(family.pattern))) {
      CAPTURE(name);
      const StoredLayer stored = find_scheme(name).of_layer(geometry_of(64, 0), 0, 1);
      REQUIRE(stored.k);
      CHECK(!stored.v);
      CHECK(stored.k->code_bits() == bits);
      const Rows rows = test_rows(64, 64);
      CHECK(test::relative_difference(restored_of_two(*stored.k, rows, 64), rows) < most_error(bits));
    }
}

TEST_CASE("Names that may go without bits mean two", "[eval][scheme]") {
  for (const std::string name : {"kivi", "kivi-scale-only", "turboquant-qjl"}) {
    CAPTURE(name);
    CHECK(find_scheme(name).name == name);
    CHECK(find_scheme(name + "-k").name == name + "-k");
    CHECK(!store(name + "-k", 32).v);
    const StoredLayer without = store(name, 32), with = store(name + "-2", 32);
    const Rows rows = test_rows(96, 32);
    for (const int head : {0, 1}) {
      CHECK(test::first_bit_difference(restored(*without.k, rows, head), restored(*with.k, rows, head)) == "");
      CHECK(test::first_bit_difference(restored(*without.v, rows, head), restored(*with.v, rows, head)) == "");
    }
    CHECK(without.k->code_bits() == 2.0);
    CHECK(without.k->exact_tokens() == with.k->exact_tokens());
  }
}

TEST_CASE("Other names are refused with the list of names", "[eval][scheme]") {
  for (const std::string name : {"",
                                 "-k",
                                 "-",
                                 "k",
                                 "naive-int",
                                 "naive-int0",
                                 "naive-int9",
                                 "naive-int22",
                                 "naive-int-2",
                                 "naive-int2.",
                                 "naive-int 2",
                                 "Naive-int2",
                                 "naive-int2-v",
                                 "naive-int2-k-k",
                                 "naive",
                                 "tq-mse-",
                                 "tq-mse",
                                 "tq-mse-0",
                                 "tq-mse-k",
                                 "kivi-",
                                 "kivi-0",
                                 "kivi-9",
                                 "kivi-k-k",
                                 "kivi-k-2",
                                 "kivi-10",
                                 "kivi-2-r",
                                 "kivi-2-r0",
                                 "kivi-2-r33",
                                 "kivi-2-r032",
                                 "kivi-2-r+32",
                                 "kivi-2-r32-r32",
                                 "kivi-2-r65568",
                                 "kivi-2-k-r32",
                                 "kivi-scale-only-2-r32",
                                 "naive-int2-r32",
                                 "fp8-2",
                                 "fp8-",
                                 "fp8-head-8",
                                 "nvfp4-16",
                                 "nvfp",
                                 "kiv",
                                 "kivi-scale-only-",
                                 "kivi-scale-only-0",
                                 "kivi-scale-only-k-k",
                                 "turboquant-qjl-",
                                 "turboquant-qjl-9",
                                 "turboquant",
                                 "bf16-",
                                 "bf16-2",
                                 "bf1",
                                 "bf16 ",
                                 " bf16",
                                 "saw-int3",
                                 "saw-int",
                                 "saw-int44",
                                 "saw-int4-4",
                                 "quarot-int",
                                 "symmetric-norm-",
                                 "symmetric-norm",
                                 "symmetric-norm-+",
                                 "kivi-<b>",
                                 "naive-int<b>",
                                 "naive-int:",
                                 "naive-int/"}) {
    CAPTURE(name);
    const auto error = test::error_of([&] { find_scheme(name); });
    REQUIRE(error.has_value());
    CHECK(error->kind() == ErrorKind::usage);
    CHECK(std::string(error->what()).find("\"" + name + "\"") != std::string::npos);
    const std::string stem = name.ends_with("-k") ? name.substr(0, name.size() - 2) : name;
    if (const std::string nearest = nearest_name(stem, scheme_names()); !nearest.empty()) {
      CHECK(error->hint() == "did you mean " + nearest + "? kvq-eval --help lists all schemes");
      continue;
    }
    for (const SchemeFamily& family : scheme_families()) CHECK(error->hint().find(family.pattern) != std::string::npos);
  }
  const auto hint = [](const char* name) { return test::error_of([&] { find_scheme(name); })->hint(); };
  CHECK(hint("Naive-int2") == "did you mean naive-int2? kvq-eval --help lists all schemes");
  CHECK(hint("naive-int22-k") == "did you mean naive-int2? kvq-eval --help lists all schemes");
  CHECK(hint("zigzag").starts_with("choose one of "));
  CHECK(test::error_of([] { find_scheme(std::string_view("bf16\0", 5)); }).has_value());
}

TEST_CASE("bf16 rounds every number to bfloat16", "[eval][scheme]") {
  const StoredLayer stored = store("bf16", 16);
  const Rows rows = test_rows(40, 16);
  Rows expected;
  for (const float x : rows) expected.push_back(bf16_to_float(float_to_bf16(x)));
  CHECK(test::first_bit_difference(restored(*stored.k, rows), expected) == "");
  CHECK(test::first_bit_difference(restored(*stored.v, rows, 1), expected) == "");
}

TEST_CASE("naive-int codes a row with one scale and minimum", "[eval][scheme]") {
  for (const int dim : {16, 80, 128})
    for (int bits = 1; bits <= 8; ++bits) {
      CAPTURE(dim, bits);
      const StoredLayer stored = store(fmt::format("naive-int{}", bits), dim);
      const Rows rows = test_rows(70, dim),
                 expected = by_row(rows, dim, [&](const Rows& row) { return coded(affine(bits, dim), row); });
      CHECK(test::first_bit_difference(restored(*stored.k, rows), expected) == "");
      CHECK(test::first_bit_difference(restored(*stored.v, rows, 1), expected) == "");
    }
}

TEST_CASE("quarot-int and symmetric-norm rotate by the largest Hadamard blocks, saw-int4 keys by 128 at most",
          "[eval][scheme]") {
  for (const int dim : {16, 80, 128, 256}) {
    const int order = hadamard_order(dim);
    CAPTURE(dim, order);
    const Rows rows = test::rows_with_outliers(20, dim, 1);
    // The rotation's sums may differ in the last bit. No row of this test is so near a tie that a code changes.
    const auto check = [&](const StoredSide& side, const std::function<Rows(const Rows&)>& of_row) {
      const Rows found = restored(side, rows, 1), expected = by_row(rows, dim, of_row);
      for (std::size_t t = 0; t < 20; ++t) {
        const auto at = static_cast<std::size_t>(dim) * t, d = static_cast<std::size_t>(dim);
        CAPTURE(t);
        CHECK(test::relative_difference(std::span(found).subspan(at, d), std::span(expected).subspan(at, d)) < 1e-6);
      }
    };
    for (const int bits : {1, 2, 3, 4, 8}) {
      CAPTURE(bits);
      const StoredLayer quarot = store(fmt::format("quarot-int{}", bits), dim),
                        symmetric = store(fmt::format("symmetric-norm-{}", bits), dim);
      for (const StoredSide* side : {quarot.k.get(), quarot.v.get()})
        check(*side, [&](const Rows& row) { return coded_in_blocks(affine(bits, dim), order, row); });
      for (const StoredSide* side : {symmetric.k.get(), symmetric.v.get()})
        check(*side, [&](const Rows& row) { return coded_in_blocks(symmetric_norm(bits, dim), order, row); });
    }
    const StoredLayer saw = store("saw-int4", dim), naive = store("naive-int4", dim);
    check(*saw.k, [&](const Rows& row) { return coded_in_blocks(affine(4, dim), std::min(order, 128), row); });
    CHECK(test::first_bit_difference(restored(*saw.v, rows), restored(*naive.v, rows)) == "");
  }
}

TEST_CASE("symmetric-norm and tq-mse keep the length of a row", "[eval][scheme]") {
  const Rows rows = test::gaussian(50 * 80, 3);
  for (const std::string family : {"symmetric-norm-", "tq-mse-"})
    for (int bits = 1; bits <= 8; ++bits) {
      CAPTURE(family, bits);
      const Rows found = restored(*store(fmt::format("{}{}", family, bits), 80).k, rows);
      for (std::size_t t = 0; t < 50; ++t) {
        double exact = 0.0, length = 0.0;
        for (std::size_t c = 80 * t; c < 80 * (t + 1); ++c)
          exact += double{rows[c]} * double{rows[c]}, length += double{found[c]} * double{found[c]};
        CHECK(std::sqrt(length / exact) == Approx(1.0).epsilon(0x1p-11));  // half a unit of fp16
      }
    }
}

TEST_CASE("tq-mse codes Haar-rotated rows by the Lloyd-Max table of the sphere, and keeps their length",
          "[eval][scheme]") {
  constexpr int kLayer = 3;
  constexpr std::uint64_t kSeed = 11;
  for (const int dim : {16, 80})
    for (const int bits : {1, 2, 5}) {
      CAPTURE(dim, bits);
      const Rows rows = test::rows_with_outliers(15, dim, 4);
      const auto& entries = sphere_codebook(bits, dim).entries;
      const Rows table(entries.begin(), entries.end());
      const StoredLayer stored = store(fmt::format("tq-mse-{}", bits), dim, kLayer, kSeed);
      // The format does not say which random stream a side uses, but it must be one of the layer's.
      const auto stream_of = [&](const StoredSide& side) {
        const Rows found = restored(side, rows, 1);
        for (int stream = 0; stream < 4; ++stream) {
          std::vector<double> matrix;
          for (const double value : haar_matrix(dim, kSeed, kLayer, stream))
            matrix.push_back(double{static_cast<float>(value)});
          const Rows expected = by_row(rows, dim, [&](const Rows& row) {
            return times(test::reference_codebook(table, ScaleRule::norm, ScaleType::fp16, times(row, matrix)).decoded,
                         test::transpose(matrix, dim));
          });
          if (test::relative_difference(found, expected) < 1e-6) return stream;
        }
        return -1;
      };
      const int k = stream_of(*stored.k), v = stream_of(*stored.v);
      CHECK(k >= 0);
      CHECK(v >= 0);
      CHECK(k != v);
    }
}

TEST_CASE("tq-mse rotates by the seed, otherwise for every layer and side", "[eval][scheme]") {
  const Rows rows = test_rows(30, 80);
  for (const std::string name : {"tq-mse-2", "turboquant-qjl-2", "kivi-scale-only-2"}) {
    CAPTURE(name);
    const StoredLayer stored = store(name, 80, 1, 5), same = store(name, 80, 1, 5), other_layer = store(name, 80, 2, 5),
                      other_seed = store(name, 80, 1, 6);
    CHECK(restored(*stored.k, rows) == restored(*same.k, rows));
    CHECK(restored(*stored.v, rows) == restored(*same.v, rows));
    CHECK(restored(*stored.k, rows) != restored(*stored.v, rows));
    CHECK(restored(*stored.v, rows) != restored(*other_layer.v, rows));
    CHECK(restored(*stored.v, rows) != restored(*other_seed.v, rows));
    if (name == "kivi-scale-only-2") continue;  // its keys are not rotated
    CHECK(restored(*stored.k, rows) != restored(*other_layer.k, rows));
    CHECK(restored(*stored.k, rows) != restored(*other_seed.k, rows));
  }
}

TEST_CASE("Values of turboquant-qjl and kivi-scale-only are those of tq-mse", "[eval][scheme]") {
  const Rows rows = test_rows(30, 80);
  for (const int bits : {1, 2, 5}) {
    const StoredLayer mse = store(fmt::format("tq-mse-{}", bits), 80, 2, 9);
    for (const char* family : {"turboquant-qjl-", "kivi-scale-only-"}) {
      const StoredLayer stored = store(fmt::format("{}{}", family, bits), 80, 2, 9);
      CAPTURE(family, bits);
      CHECK(restored(*stored.v, rows) == restored(*mse.v, rows));
      CHECK(stored.v->effective_bits(100) == mse.v->effective_bits(100));
    }
  }
}

namespace {

/// Channel c of rows [n, dim], tokens [first, first + count).
Rows column(const Rows& rows, int dim, int c, std::size_t first, std::size_t count) {
  Rows result;
  for (std::size_t t = first; t < first + count; ++t)
    result.push_back(rows[t * static_cast<std::size_t>(dim) + static_cast<std::size_t>(c)]);
  return result;
}

/// Affine codes of packing.md (a) with the extremes of `range`; each step is rounded once, as in packing.md.
Rows coded_in_range(int bits, const Rows& range, const Rows& x) {
  const auto rounded = [](double value) { return double{static_cast<float>(value)}; };
  const double lo = *std::min_element(range.begin(), range.end()), hi = *std::max_element(range.begin(), range.end()),
               n = (1 << bits) - 1;
  const double s = test::nearest_f16(rounded(rounded(hi - lo) / n)), m = test::nearest_f16(lo);
  Rows result;
  for (const float value : x) {
    double code = 0.0;
    if (s > 0.0) code = std::clamp(std::floor(rounded(rounded(rounded(double{value} - m) / s) + 0.5)), 0.0, n);
    result.push_back(static_cast<float>(rounded(code * s) + m));
  }
  return result;
}

}  // namespace

TEST_CASE("KIVI keys are affine groups of 32 tokens of a channel; the last group may be smaller", "[eval][scheme]") {
  for (const int dim : {16, 80, 128})
    for (const int bits : {1, 2, 3, 4, 8})
      for (const std::size_t tokens : {1u, 31u, 32u, 33u, 64u, 100u}) {
        CAPTURE(dim, bits, tokens);
        const Rows rows = test_rows(tokens, dim), found = restored(*kivi_keys(dim, bits), rows);
        CHECK(test::first_bit_difference(found, restored(*store(fmt::format("kivi-{}", bits), dim).k, rows)) == "");
        for (int c = 0; c < dim; ++c)
          for (std::size_t first = 0; first < tokens; first += 32) {
            const std::size_t count = std::min<std::size_t>(32, tokens - first);
            const Rows x = column(rows, dim, c, first, count);
            const Rows expected = coded(affine(bits, static_cast<int>(count)), x);
            const std::string difference = test::first_bit_difference(column(found, dim, c, first, count), expected);
            if (!difference.empty()) FAIL_CHECK(fmt::format("channel {}, tokens from {}: {}", c, first, difference));
          }
      }
}

TEST_CASE("KIVI without windows counts every token as codes", "[eval][scheme]") {
  for (const std::int64_t context : {1, 32, 100, 32768}) {
    CAPTURE(context);
    const StoredLayer stored = find_scheme("kivi-2").of_layer(geometry_of(80, 80), 0, 1, false);
    const auto groups = std::ceil(static_cast<double>(context) / 32.0);
    CHECK(stored.k->effective_bits(context) == Approx(2.0 + 32.0 * groups / static_cast<double>(context)));
    CHECK(stored.v->effective_bits(context) == Approx(2.0 + 32.0 * 3.0 / 80.0));
    CHECK(stored.k->exact_tokens() == ExactTokens{});
    CHECK(stored.v->exact_tokens() == ExactTokens{});
    const Rows rows = test_rows(70, 80);
    CHECK(test::first_bit_difference(restored(*stored.k, rows), restored(*kivi_keys(80, 2), rows)) == "");
  }
}

TEST_CASE("KIVI values are affine groups of 32 channels of a token, the last of what is left", "[eval][scheme]") {
  for (const int dim : {1, 16, 33, 80, 128})
    for (const int bits : {1, 2, 3, 4, 8}) {
      CAPTURE(dim, bits);
      const Rows rows = test_rows(70, dim), found = restored(*kivi_values(dim, bits), rows);
      const Rows expected = by_row(rows, dim, [&](const Rows& row) {
        Rows result;
        for (std::size_t first = 0; first < row.size(); first += 32) {
          const std::size_t count = std::min<std::size_t>(32, row.size() - first);
          const auto at = row.begin() + static_cast<std::ptrdiff_t>(first);
          for (const float x :
               coded(affine(bits, static_cast<int>(count)), Rows(at, at + static_cast<std::ptrdiff_t>(count))))
            result.push_back(x);
        }
        return result;
      });
      CHECK(test::first_bit_difference(found, expected) == "");
      CHECK(test::first_bit_difference(found, restored(*store(fmt::format("kivi-{}", bits), dim).v, rows)) == "");
    }
}

TEST_CASE("KIVI keys with scales alone take the range of the 32 tokens before", "[eval][scheme]") {
  for (const int dim : {16, 80})
    for (const int bits : {1, 2, 4, 8})
      for (const std::size_t tokens : {1u, 20u, 32u, 33u, 64u, 100u}) {
        CAPTURE(dim, bits, tokens);
        Rows rows = test_rows(tokens, dim);
        for (std::size_t i = 0; i < rows.size(); ++i)
          rows[i] += static_cast<float>(i / (32 * static_cast<std::size_t>(dim)));  // groups drift
        const Rows found = restored(*kivi_scale_only_keys(dim, bits), rows);
        CHECK(test::first_bit_difference(found,
                                         restored(*store(fmt::format("kivi-scale-only-{}", bits), dim).k, rows)) == "");
        for (int c = 0; c < dim; ++c)
          for (std::size_t first = 0; first < tokens; first += 32) {
            const std::size_t count = std::min<std::size_t>(32, tokens - first);
            const Rows x = column(rows, dim, c, first, count);
            const Rows expected = coded_in_range(bits, first == 0 ? x : column(rows, dim, c, first - 32, 32), x);
            const std::string difference = test::first_bit_difference(column(found, dim, c, first, count), expected);
            if (!difference.empty()) FAIL_CHECK(fmt::format("channel {}, tokens from {}: {}", c, first, difference));
          }
      }
}

TEST_CASE("KIVI's scales alone clamp what lies outside of the range before", "[eval][scheme]") {
  // One channel: 32 tokens between 1 and 4 set the range; later tokens get the codes 0 .. 3 of that range.
  Rows rows(32, 1.0f);
  rows[7] = 4.0f;
  for (const float x : {-100.0f, 0.9f, 1.4f, 1.6f, 2.0f, 3.6f, 4.0f, 1e6f}) rows.push_back(x);
  const Rows found = restored(*kivi_scale_only_keys(1, 2), rows);
  CHECK(Rows(found.begin() + 32, found.end()) == Rows{1.0f, 1.0f, 1.0f, 2.0f, 2.0f, 4.0f, 4.0f, 4.0f});
  CHECK(Rows(found.begin(), found.begin() + 32) == Rows(rows.begin(), rows.begin() + 32));
  // A constant channel has no range, so each later token becomes the minimum.
  rows.assign(40, 2.5f);
  rows[35] = 7.0f;
  CHECK(restored(*kivi_scale_only_keys(1, 4), rows) == Rows(40, 2.5f));
}

TEST_CASE("Codes end before the recent tokens, at a whole granule", "[eval][scheme]") {
  for (const std::int64_t recent : {0, 1, 5, 32, 100})
    for (const std::int64_t granule : {1, 2, 7, 32}) {
      const ExactTokens tokens{.sink = 0, .recent = recent, .granule = granule};
      for (std::int64_t query = 0; query < 300; ++query) {
        std::int64_t end = 0;  // counted token by token: a granule is quantized when it lies before the recent tokens
        while (end + granule <= query + 1 - recent) end += granule;
        if (tokens.coded_end(query) != end)
          FAIL_CHECK(fmt::format("recent {}, granule {}, query {}: {} and {}", recent, granule, query,
                                 tokens.coded_end(query), end));
      }
    }
  CHECK(ExactTokens{}.coded_end(5) == 6);
  CHECK(ExactTokens{.sink = 3, .recent = 2, .granule = 1}.coded_end(5) == 4);
}

TEST_CASE("KIVI keeps a query's own token and its residual exact: keys i mod R, values R", "[eval][scheme]") {
  for (const auto& [name, residual] : std::vector<std::pair<std::string, int>>{
           {"kivi", 128}, {"kivi-3", 128}, {"kivi-2-r32", 32}, {"kivi-r64", 64}, {"kivi-2-r160-k", 160}}) {
    CAPTURE(name, residual);
    const StoredLayer stored = store(name, 64);
    // The loop of KIVI's decoding step: the query reads the cache, then a full residual is quantized.
    std::int64_t coded_keys = 0, coded_values = 0;
    for (std::int64_t query = 0; query < 700; ++query) {
      const std::int64_t keys = stored.k->exact_tokens().coded_end(query);
      if (keys != coded_keys) FAIL_CHECK(fmt::format("query {}: {} coded keys, expected {}", query, keys, coded_keys));
      if (query + 1 - coded_keys == residual) coded_keys += residual;
      if (!stored.v) continue;
      const std::int64_t values = stored.v->exact_tokens().coded_end(query);
      if (values != coded_values)
        FAIL_CHECK(fmt::format("query {}: {} coded values, expected {}", query, values, coded_values));
      if (query + 1 - coded_values > residual) ++coded_values;
    }
    CHECK(coded_keys > 0);
  }
  const StoredLayer kivi = store("kivi", 64);
  CHECK(kivi.k->exact_tokens().sink == 0);
  CHECK(kivi.v->exact_tokens().sink == 0);
  for (const char* name : {"bf16", "naive-int2", "quarot-int2", "saw-int4", "symmetric-norm-2", "tq-mse-2",
                           "turboquant-qjl-2", "kivi-scale-only-2", "fp8", "fp8-head", "fp8-unscaled", "nvfp4"}) {
    CAPTURE(name);
    const StoredLayer stored = store(name, 64);
    CHECK(stored.k->exact_tokens() == ExactTokens{});
    if (std::string(name) != "bf16") CHECK(stored.v->exact_tokens() == ExactTokens{});
  }
}

TEST_CASE("Effective bits count codes, numbers beside them and exact tokens", "[eval][scheme]") {
  for (const int dim : {16, 80, 128})
    for (int bits = 1; bits <= 8; ++bits) {
      CAPTURE(dim, bits);
      const auto check = [&](const std::string& name, double k, double v) {
        const StoredLayer stored = store(name, dim);
        for (const std::int64_t context : kContexts) {
          CAPTURE(name, context);
          CHECK(stored.k->effective_bits(context) ==
                Approx(counted_bits(stored.k->exact_tokens(), context, k)).epsilon(1e-12));
          CHECK(stored.v->effective_bits(context) ==
                Approx(counted_bits(stored.v->exact_tokens(), context, v)).epsilon(1e-12));
        }
      };
      const double d = dim, codes = 8.0 * std::ceil(d * bits / 8.0) / d;  // rows end at a byte
      check(fmt::format("naive-int{}", bits), codes + 32.0 / d, codes + 32.0 / d);
      check(fmt::format("quarot-int{}", bits), codes + 32.0 / d, codes + 32.0 / d);
      check(fmt::format("symmetric-norm-{}", bits), codes + 16.0 / d, codes + 16.0 / d);
      check(fmt::format("tq-mse-{}", bits), codes + 16.0 / d, codes + 16.0 / d);
      check(fmt::format("turboquant-qjl-{}", bits), bits + 32.0 / d, codes + 16.0 / d);
      check(fmt::format("kivi-{}-r32", bits), bits + 32.0 / 32.0, bits + 32.0 * std::ceil(d / 32.0) / d);
      check(fmt::format("kivi-{}", bits), bits + 32.0 / 32.0, bits + 32.0 * std::ceil(d / 32.0) / d);
      if (bits == 4) check("saw-int4", 4.0 + 32.0 / d, 4.0 + 32.0 / d);
      if (bits == 4) check("bf16", 16.0, 16.0);
      if (bits == 8) check("fp8", 8.0, 8.0);
      if (bits == 8) check("fp8-head", 8.0, 8.0);
      if (bits == 4) check("nvfp4", 4.0 + 8.0 * std::ceil(d / 16.0) / d, 4.0 + 8.0 * std::ceil(d / 16.0) / d);
    }
}

TEST_CASE("Effective bits of KIVI's scales alone: a scale and a minimum for each group of 32 tokens",
          "[eval][scheme]") {
  for (const std::int64_t context : {32, 64, 1024, 32768}) {
    CAPTURE(context);
    const StoredLayer stored = store("kivi-scale-only-2", 64);
    CHECK(stored.k->effective_bits(context) ==
          Approx(2.0 + 32.0 * std::ceil(static_cast<double>(context) / 32.0) / static_cast<double>(context)));
  }
}

TEST_CASE("Effective bits of KIVI's scales alone where the last group is not full", "[eval][scheme]") {
  for (const std::int64_t context : {1, 33, 1000}) {
    CAPTURE(context);
    const StoredLayer stored = store("kivi-scale-only-2", 64);
    CHECK(stored.k->effective_bits(context) ==
          Approx(2.0 + 32.0 * std::ceil(static_cast<double>(context) / 32.0) / static_cast<double>(context)));
  }
}

TEST_CASE("A plan's windows are its exact tokens, and count in its bits", "[eval][scheme]") {
  TensorPlan plan;
  plan.coder = affine(2, 80);
  plan.clip_ratio = {1.0};
  plan.rotation.scope = Scope::layer;
  for (const Windows& windows :
       {Windows{}, Windows{.sink_tokens = 4, .recent_tokens = 0}, Windows{.sink_tokens = 0, .recent_tokens = 128},
        Windows{.sink_tokens = 64, .recent_tokens = 256}}) {
    const auto stored = stored_by_plan(plan, 80, windows);
    CHECK(stored->exact_tokens() ==
          ExactTokens{.sink = windows.sink_tokens, .recent = windows.recent_tokens, .granule = 1});
    for (const std::int64_t context : kContexts) {
      CAPTURE(windows.sink_tokens, windows.recent_tokens, context);
      CHECK(stored->effective_bits(context) ==
            Approx(counted_bits(stored->exact_tokens(), context, 2.0 + 32.0 / 80.0)).epsilon(1e-12));
    }
  }
  CHECK(stored_by_plan(plan, 80, {})->code_bits() == 2.0);
}
