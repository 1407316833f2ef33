#include <kvq/artifact/artifact.h>
#include <kvq/artifact/verify.h>
#include <kvq/codec/codec.h>
#include <kvq/codec/golden_rows.h>
#include <kvq/codec/row_codec.h>
#include <kvq/core/dtype.h>

#include "support/artifacts.h"
#include "support/container_edit.h"
#include "support/error_of.h"
#include "support/featured_artifact.h"
#include "support/random_data.h"
#include "support/row_plans.h"
#include "support/temp_folder.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cstring>
#include <functional>

using namespace kvq;
using namespace kvq::test;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;

namespace {

std::vector<std::uint16_t> random_bf16(std::int64_t count, std::uint64_t seed) {
  const std::vector<float> x = gaussian(static_cast<std::size_t>(count), seed);
  std::vector<std::uint16_t> bits(x.size());
  std::transform(x.begin(), x.end(), bits.begin(), float_to_bf16);
  return bits;
}

GoldenTokens random_tokens(const LayerPlan& plan, std::int64_t count, std::uint64_t seed) {
  const LayerGeometry& g = plan.geometry;
  GoldenTokens tokens{.first = 100, .count = count};
  tokens.q = random_bf16(std::int64_t{g.num_q_heads} * g.head_dim, seed);
  tokens.k = random_bf16(count * g.num_kv_heads * g.head_dim, seed + 1);
  if (plan.v) tokens.v = random_bf16(count * g.num_kv_heads * g.v_head_dim, seed + 2);
  return tokens;
}

Artifact with_golden_rows(Artifact artifact, std::int64_t count = 7) {
  for (const LayerPlan& plan : artifact.layers)
    artifact.golden[plan.layer] =
        code_golden_rows(plan, random_tokens(plan, count, static_cast<std::uint64_t>(plan.layer)));
  return artifact;
}

/// [H, N, D] of bfloat16 rows [N, H, D].
std::vector<float> by_head(const std::vector<std::uint16_t>& rows, int heads, int dim) {
  std::vector<float> x(rows.size());
  const auto h = static_cast<std::size_t>(heads), d = static_cast<std::size_t>(dim), n = rows.size() / (h * d);
  for (std::size_t i = 0; i < rows.size(); ++i) x[((i / d % h) * n + i / d / h) * d + i % d] = bf16_to_float(rows[i]);
  return x;
}

/// Decodes the bytes of one head's rows and rotates them back.
std::vector<float> decoded(const TensorPlan& plan, const GoldenSide& side, int head, int heads, int dim) {
  const RowCodec codec(plan, head, dim);
  const auto size = static_cast<std::size_t>(row_bytes(plan, dim)), d = static_cast<std::size_t>(dim);
  std::vector<float> rows;
  for (std::size_t row = static_cast<std::size_t>(head); row < side.firm.size();
       row += static_cast<std::size_t>(heads)) {
    const auto bytes = std::as_bytes(std::span(side.bytes)).subspan(row * size, size);
    std::vector<float> x_hat(d), x(d), numbers(static_cast<std::size_t>(codec.num_numbers()));
    std::vector<std::uint8_t> codes(d);
    int centroid = 0;
    if (is_exact(plan.coder)) {
      widen(DType::bf16, bytes.data(), d, x_hat.data());
    } else {
      centroid = codec.unpack(bytes, codes, numbers);
      codec.decode(codes, numbers, x_hat);
    }
    unrotate_row(plan, head, x_hat, x, centroid);
    rows.insert(rows.end(), x.begin(), x.end());
  }
  return rows;
}

void check_side(const TensorPlan& plan, const std::vector<std::uint16_t>& rows, const GoldenSide& side, int heads,
                int dim) {
  std::vector<float> expected = by_head(rows, heads, dim);
  reconstruct_heads(plan, heads, expected, dim);
  std::vector<float> found;
  for (int head = 0; head < heads; ++head) {
    const std::vector<float> own = decoded(plan, side, head, heads, dim);
    found.insert(found.end(), own.begin(), own.end());
  }
  CHECK(found == expected);
}

/// A plan of one head of keys; its rotation matrix is the identity.
LayerPlan small_plan(Coder coder, int dim) {
  LayerPlan plan{
      .layer = 0,
      .geometry = {.num_q_heads = 1, .num_kv_heads = 1, .head_dim = dim, .v_head_dim = dim, .softmax_scale = 1.0},
      .k = {},
      .v = {},
  };
  plan.k.coder = std::move(coder);
  plan.k.rotation.kind = RotationKind::dense;
  for (int i = 0; i < dim * dim; ++i) plan.k.rotation.matrix.push_back(i % (dim + 1) == 0 ? 1.0f : 0.0f);
  return plan;
}

std::vector<std::uint8_t> firm_of(const LayerPlan& plan, const std::vector<float>& rows) {
  GoldenTokens tokens{.first = 0, .count = static_cast<std::int64_t>(rows.size()) / plan.geometry.head_dim};
  tokens.q.resize(static_cast<std::size_t>(plan.geometry.head_dim));
  for (const float x : rows) {
    REQUIRE(bf16_to_float(float_to_bf16(x)) == x);
    tokens.k.push_back(float_to_bf16(x));
  }
  return code_golden_rows(plan, tokens).k.firm;
}

using Firm = std::vector<std::uint8_t>;

bool golden_check_fails(const std::filesystem::path& path) {
  for (const Check& check : verify_artifact(path))
    if (check.name == "golden rows") return !check.passed;
  FAIL("no golden check");
  return false;
}

constexpr UniformCoder kSymmetric{
    .bits = 2,
    .group_size = 4,
    .levels = UniformLevels::symmetric,
    .rule = ScaleRule::absmax,
    .scale_type = ScaleType::fp16,
};

}  // namespace

TEST_CASE("Golden rows decode to what attention sees of them, in every code", "[artifact][golden_rows]") {
  for (const Artifact& artifact : {example_artifact(), featured_artifact()})
    for (const LayerPlan& plan : artifact.layers) {
      INFO("layer " << plan.layer << " of " << artifact.calibration.method);
      const LayerGeometry& g = plan.geometry;
      const GoldenRows rows = code_golden_rows(plan, random_tokens(plan, 11, 5));
      check_side(plan.k, rows.tokens.k, rows.k, g.num_kv_heads, g.head_dim);
      if (plan.v) check_side(*plan.v, rows.tokens.v, rows.v, g.num_kv_heads, g.v_head_dim);
      CHECK(rows.out.size() == (plan.v ? static_cast<std::size_t>(g.num_q_heads * g.v_head_dim) : 0u));
    }
}

TEST_CASE("The golden output is causal attention of the last token, through the layer's window",
          "[artifact][golden_rows]") {
  const Artifact artifact = featured_artifact();
  const int window = GENERATE(0, 3, 5, 64);
  CAPTURE(window);
  for (LayerPlan plan : artifact.layers) {
    plan.geometry.sliding_window = window;
    const LayerGeometry& g = plan.geometry;
    const GoldenRows rows = code_golden_rows(plan, random_tokens(plan, 5, 9));
    const auto d = static_cast<std::size_t>(g.head_dim), dv = static_cast<std::size_t>(g.v_head_dim);
    for (int hq = 0; hq < g.num_q_heads; ++hq) {
      const int head = hq / g.queries_per_kv_head();
      std::vector<float> q(5 * d, 0.0f);  // other query heads do not matter
      for (std::size_t j = 0; j < d; ++j)
        q[4 * d + j] = bf16_to_float(rows.tokens.q[static_cast<std::size_t>(hq) * d + j]);
      std::vector<double> out(5 * dv);
      attend(q, decoded(plan.k, rows.k, head, g.num_kv_heads, g.head_dim),
             decoded(*plan.v, rows.v, head, g.num_kv_heads, g.v_head_dim), g.head_dim, g.v_head_dim, g.softmax_scale,
             window, out);
      for (std::size_t j = 0; j < dv; ++j)
        CHECK(rows.out[static_cast<std::size_t>(hq) * dv + j] == static_cast<float>(out[4 * dv + j]));
    }
  }
}

TEST_CASE("Rows are firm unless a small step changes their bytes", "[artifact][golden_rows]") {
  // s = 1 and m = 1: the edges are 1.5, 2.5 and 3.5. Half a step of fp16 at 1 is 2^-11, more than the move of 4 *
  // 2^-18.
  LayerPlan affine = small_plan(UniformCoder{.bits = 2, .group_size = 4, .scale_type = ScaleType::fp16}, 4);
  affine.k.clip_ratio = {1.0};
  CHECK(firm_of(affine, {1, 2, 3, 4, /**/ 1, 2.5, 3, 4, /**/ 1, 2, 3.5, 4, /**/ 0, 0, 0, 0}) == Firm{1, 0, 0, 1});
  CHECK(firm_of(affine, {0, 1, 2, 3}) == Firm{0});  // a minimum of 0 becomes another number in fp16 when it moves

  // s = R(2 * 3 / 3) = 2: the edges are -2, 0 and 2.
  LayerPlan symmetric = small_plan(kSymmetric, 4);
  const std::vector<float> rows = {3, 1, -1, -3, /**/ 3, 0, -1, -3, /**/ 3, 1, 2, 1, /**/ 3, 1, 1, 1};
  CHECK(firm_of(symmetric, rows) == Firm{1, 0, 0, 1});
  std::get<UniformCoder>(symmetric.k.coder).scale_type = ScaleType::fp32;  // fp32 shows every step
  CHECK(firm_of(symmetric, rows) == Firm{0, 0, 0, 0});
  symmetric.k.rotation = {};  // without a rotation nothing moves
  CHECK(firm_of(symmetric, rows) == Firm{1, 1, 1, 1});

  // 1.00390625 = 1 + 2^-8 lies halfway between two bfloat16 numbers. Without a center, bfloat16 rows are stored
  // unchanged.
  CHECK(firm_of(small_plan(ExactCoder{}, 4), {1, 2, 3, 4}) == Firm{1});
  LayerPlan shifted = small_plan(ExactCoder{}, 4);
  shifted.k.center = {-0x1p-8f, 0, 0, 0};
  CHECK(firm_of(shifted, {1, 2, 3, 4}) == Firm{0});
}

TEST_CASE("A scale near a rounding edge is not firm, whichever two channels it comes from", "[artifact][golden_rows]") {
  // s = R((hi - lo) / 3) with hi - lo = 3 (1 + 2^-11) lies halfway between two fp16 numbers. s changes only if hi and
  // lo move in opposite directions.
  LayerPlan plan = small_plan(UniformCoder{.bits = 2, .group_size = 16, .scale_type = ScaleType::fp16}, 16);
  plan.k.clip_ratio = {1.0};
  const float half = 3 * 0x1p-12f,
              lo = -1.5f - half;  // of 1.5 + half the channels of a row know 8 bits: centers know all
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) {
      if (i == j) continue;
      std::vector<float> row(16, 0.25f);
      plan.k.center.assign(16, 0.0f);
      row[static_cast<std::size_t>(i)] = 1.5f;
      row[static_cast<std::size_t>(j)] = -1.5f;
      CHECK(firm_of(plan, row) == Firm{1});
      plan.k.center[static_cast<std::size_t>(i)] = -half;
      plan.k.center[static_cast<std::size_t>(j)] = -1.5f - lo;
      CHECK(firm_of(plan, row) == Firm{0});
    }
}

TEST_CASE("Rows between two centroids are not firm", "[artifact][golden_rows]") {
  LayerPlan plan = small_plan(kSymmetric, 4);
  plan.k.centroids = Centroids{.count = 2, .values = {8, 0, 0, 0, -8, 0, 0, 0}, .inertia = {0.5}};
  CHECK(firm_of(plan, {9, 1, -1, 3, 0, 1, -1, 3, -5, 1, -1, 3}) == Firm{1, 0, 1});
}

TEST_CASE("An artifact with golden rows reads back as it was written, as version 1.1", "[artifact][golden_rows]") {
  const TempFolder folder;
  for (const bool featured : {false, true}) {
    const Artifact artifact = with_golden_rows(featured ? featured_artifact() : example_artifact());
    save_artifact(artifact, folder / "a");
    const Artifact back = load_artifact(folder / "a");
    CHECK(back.golden == artifact.golden);
    save_artifact(back, folder / "b");
    CHECK(file_bytes(folder / "a") == file_bytes(folder / "b"));
    CHECK_FALSE(golden_check_fails(folder / "a"));
    const EditableFile file = EditableFile::read(folder / "a");
    CHECK(file.metadata.at("version") == "1.1");
    CHECK(file.metadata.at("requires").empty() == !featured);
    CHECK(file.manifest["layers"][0]["golden"] == Json{{"first", 100}, {"count", 7}});
    CHECK(file.tensors.at("layers.0.golden.k").dtype == DType::u16);
  }
}

TEST_CASE("A layer without values has golden keys only, and some layers may have none", "[artifact][golden_rows]") {
  const TempFolder folder;
  Artifact artifact = with_golden_rows(example_artifact());
  artifact.golden.erase(0);
  save_artifact(artifact, folder / "a");
  CHECK(load_artifact(folder / "a").golden == artifact.golden);
  const EditableFile file = EditableFile::read(folder / "a");
  CHECK(file.tensors.count("layers.0.golden.k") == 0);
  CHECK(file.tensors.count("layers.4.golden.k_bytes") == 1);
  for (const char* name : {"v", "v_bytes", "v_firm", "out"})
    CHECK(file.tensors.count(std::string("layers.4.golden.") + name) == 0);
  CHECK_FALSE(golden_check_fails(folder / "a"));
}

TEST_CASE("Golden tensors that do not fit are refused", "[artifact][golden_rows]") {
  const TempFolder folder;
  save_artifact(with_golden_rows(featured_artifact()), folder / "good");
  const EditableFile good = EditableFile::read(folder / "good");
  for (const char* name : {"q", "k", "v", "k_bytes", "v_bytes", "k_firm", "v_firm", "out"}) {
    INFO(name);
    const std::string tensor = std::string("layers.1.golden.") + name;
    const auto refused = [&](const std::function<void(EditableFile&)>& change) {
      EditableFile bad = good;
      change(bad);
      bad.write(folder / "bad");
      const std::string text = error_text([&] { load_artifact(folder / "bad"); });
      CHECK_THAT(text, StartsWith("bad_input: ") && Contains(tensor) && Contains((folder / "bad").string()) &&
                           !Contains("\n"));
    };
    refused([&](EditableFile& f) { f.tensors.erase(tensor); });
    refused([&](EditableFile& f) {
      f.tensors.at(tensor).dtype = f.tensors.at(tensor).dtype == DType::u16  ? DType::bf16
                                   : f.tensors.at(tensor).dtype == DType::u8 ? DType::i8
                                                                             : DType::f32;
      if (std::string(name) == "out") f.set_float(tensor, 3, NAN);
    });
    refused([&](EditableFile& f) {
      std::rotate(f.tensors.at(tensor).shape.begin(), f.tensors.at(tensor).shape.begin() + 1,
                  f.tensors.at(tensor).shape.end());
    });
    refused([&](EditableFile& f) {
      std::vector<std::byte>& data = f.tensors.at(tensor).data;
      f.tensors.at(tensor).shape[0] *= 2;
      data.resize(2 * data.size());
    });
    if (name[1] == '\0')
      refused([&](EditableFile& f) { f.tensors.at(tensor).data[1] = f.tensors.at(tensor).data[0] = std::byte{0xff}; });
    if (std::string(name).ends_with("firm"))
      refused([&](EditableFile& f) { f.tensors.at(tensor).data[2] = std::byte{2}; });
  }
  for (const Json& golden : {Json{{"first", 0}}, Json{{"first", -1}, {"count", 7}}, Json{{"first", 0}, {"count", 0}},
                             Json{{"first", 0}, {"count", 4097}}, Json{{"first", 0}, {"count", 4096}},
                             Json{{"first", 0}, {"count", 6}}, Json(3)}) {
    INFO(golden);
    EditableFile bad = good;
    bad.manifest["layers"][0]["golden"] = golden;
    bad.write(folder / "bad");
    CHECK_THAT(error_text([&] { load_artifact(folder / "bad"); }), StartsWith("bad_input: ") && Contains("golden"));
  }
}

TEST_CASE("Verifying notices golden rows that are not what the plan makes of them, although the hash fits",
          "[artifact][golden_rows]") {
  const TempFolder folder;
  for (const bool featured : {false, true}) {
    save_artifact(with_golden_rows(featured ? featured_artifact() : example_artifact()), folder / "good");
    const EditableFile good = EditableFile::read(folder / "good");
    for (const auto& [name, tensor] : good.tensors) {
      if (name.find(".golden.") == std::string::npos) continue;
      INFO(name);
      EditableFile bad = good;
      std::vector<std::byte>& data = bad.tensors.at(name).data;
      if (name.ends_with("_bytes")) {
        data[data.size() / 2] ^= std::byte{1};
      } else if (name.ends_with("_firm")) {
        data[data.size() / 2] ^= std::byte{1};
      } else if (name.ends_with("out")) {
        float x = 0.0f;
        std::memcpy(&x, data.data() + 8, 4);
        bad.set_float(name, 2, x * 1.0001f + 0.0001f);
      } else if (name.ends_with("golden.q")) {
        for (std::size_t i = 1; i < data.size(); i += 2) data[i] ^= std::byte{0x80};  // q changes its sign
      } else {
        data[1] ^= std::byte{0x80};
      }
      bad.write(folder / "bad");
      CHECK(error_text([&] { load_artifact(folder / "bad"); }) == "no error");
      const bool unseen =
          name.ends_with("golden.q") && good.tensors.count(name.substr(0, name.size() - 1) + "out") == 0;
      CHECK(golden_check_fails(folder / "bad") == !unseen);  // without values, no output shows a change of q
    }
    // A plan that was replaced while its golden rows stayed.
    EditableFile bad = good;
    if (featured) continue;
    bad.set_float("layers.0.k.center", 1, 3.0f);
    bad.write(folder / "bad");
    CHECK(golden_check_fails(folder / "bad"));
  }
}

TEST_CASE("Golden rows of huge numbers fail the check, and do nothing worse", "[artifact][golden_rows]") {
  const TempFolder folder;
  save_artifact(with_golden_rows(example_artifact()), folder / "good");
  EditableFile bad = EditableFile::read(folder / "good");
  auto& data = bad.tensors.at("layers.0.golden.k").data;
  for (std::size_t i = 0; i < data.size(); i += 2) {
    data[i] = std::byte{0x7f};  // the largest finite bfloat16
    data[i + 1] = std::byte{0x7f};
  }
  bad.write(folder / "bad");
  CHECK(golden_check_fails(folder / "bad"));
}

TEST_CASE("Golden rows that overflow in the rotation are refused, also without values and outside the window",
          "[artifact][golden_rows]") {
  const Coder coders[] = {UniformCoder{.bits = 2, .group_size = 8},
                          codebook_coder(2, 8, ScaleRule::norm, ScaleType::fp16, 1), ExactCoder{}};
  for (const Coder& coder : coders) {
    LayerPlan plan = small_plan(coder, 8);
    plan.geometry.sliding_window = 1;
    plan.k.rotation.matrix[0] = 4.0f;
    GoldenTokens tokens{.first = 0, .count = 2};
    tokens.q.resize(8);
    tokens.k.resize(16);
    tokens.k[0] = 0x7f7f;
    CHECK(error_text([&] { code_golden_rows(plan, tokens); }) ==
          "numerical: row to encode: channel 0 is inf, expected a finite number");
  }
}
