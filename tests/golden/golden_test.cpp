#include <kvq/artifact/artifact.h>
#include <kvq/artifact/verify.h>
#include <kvq/codec/codec.h>
#include <kvq/codec/row_codec.h>
#include <kvq/dump/dump_file.h>
#include <kvq/methods/method.h>
#include <kvq/plan/table_rows.h>
#include <kvq/solve/sphere_codebook.h>
#include <kvq/stats/collect.h>
#include <kvq/stats/stats_file.h>

#include "support/compare.h"
#include "support/container_edit.h"
#include "support/temp_folder.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <span>

// Tests of files of released format versions. No build writes these files again.

using namespace kvq;

namespace {

const std::filesystem::path kGolden = std::filesystem::path(KVQ_SOURCE_DIR) / "formats/golden";
const std::filesystem::path kFolder = kGolden / "v1.0", kFolder11 = kGolden / "v1.1";

/// Path of a golden file, from a name such as "v1.1/kvq".
std::filesystem::path file_of(const std::string& name) { return kGolden / (name + ".safetensors"); }

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  double scale = 0.0, difference = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    scale = std::max(scale, std::abs(a[i]));
    difference = std::max(difference, std::abs(a[i] - b[i]));
  }
  return difference / scale;
}

class GoldenStats : public StatsSource {
 public:
  explicit GoldenStats(const std::filesystem::path& folder) : file_(StatsFile::open(folder / "stats.safetensors")) {}
  std::size_t size() const override { return file_.header().model.layers.size(); }
  std::shared_ptr<const LayerStats> load(std::size_t index) const override {
    return std::make_shared<LayerStats>(file_.load(index));
  }

 private:
  StatsFile file_;
};

bool same_bytes(const std::filesystem::path& a, const std::filesystem::path& b) {
  return test::file_bytes(a) == test::file_bytes(b);
}

const Json& budget_of(const Artifact& artifact) { return artifact.calibration.budget; }

/// Widths of all heads, one digit for each channel.
std::string widths_of(const TensorPlan& plan) {
  std::string digits;
  for (const auto width : plan.allocation->channel_bits) digits += static_cast<char>('0' + width);
  return digits;
}

/// theta of formats/packing.md, "Trellis tables".
const TrellisTaps kTaps21 = {.bits = 2, .memory = 1, .theta = {1.48225427f, 0.918767927f, -0.792501826f, 0.993044327f}};
const TrellisTaps kTaps22 = {
    .bits = 2,
    .memory = 2,
    .theta = {-0.886770233f, -1.34449962f, 0.717407561f, -0.0397294397f, 0.927222248f, -0.814774881f},
};
const TrellisTaps kTaps41 = {
    .bits = 4,
    .memory = 1,
    .theta = {1.2847827f, 1.1339953f, 0.911722797f, 0.601804498f, 0.910166869f, -0.982628213f, -0.266429482f,
              0.453091539f},
};

/// Lloyd-Max tables as the library computes them now: for each head from its channels of this width, for a head without
/// such channels from the whole row.
std::vector<float> sphere_tables(const TensorPlan& plan, int width, int dim) {
  std::vector<float> tables;
  const auto& bits = plan.allocation->channel_bits;
  for (auto head = bits.begin(); head != bits.end(); head += dim) {
    const auto run = static_cast<int>(std::count(head, head + dim, width));
    for (const double entry : sphere_codebook(width, run > 0 ? run : dim).entries)
      tables.push_back(static_cast<float>(entry));
  }
  return tables;
}

/// The rows of a held-out token, of all KV heads, [H][D].
std::vector<std::vector<float>> held_out_rows(const StatsFile& stats, const Json& row) {
  const LayerStats layer = stats.load(row.at("layer").get<std::size_t>());
  const SampledRows& rows = row.at("side") == "k" ? layer.held_out.value().k : layer.held_out.value().v;
  const auto start = row.at("token").get<std::ptrdiff_t>() * rows.dim;
  std::vector<std::vector<float>> heads;
  for (int h = 0; h < rows.heads; ++h) {
    const std::vector<float> all = rows.head(h);
    heads.emplace_back(all.begin() + start, all.begin() + start + rows.dim);
  }
  return heads;
}

/// Centroid of one head's row, or of the whole token if its heads choose together.
int centroid_of(const TensorPlan& plan, const std::vector<std::vector<float>>& x, int head) {
  if (!plan.centroids) return 0;
  if (!plan.centroids->joint)
    return nearest_centroid(*plan.centroids, plan.rotation.head_index(head), x.at(static_cast<std::size_t>(head)));
  std::vector<float> sums(static_cast<std::size_t>(plan.centroids->count), 0.0f);
  for (std::size_t h = 0; h < x.size(); ++h)
    add_centroid_distances(*plan.centroids, plan.rotation.head_index(static_cast<int>(h)), x[h], sums);
  return static_cast<int>(std::min_element(sums.begin(), sums.end()) - sums.begin());
}

std::vector<std::byte> packed(const TensorPlan& plan, const std::vector<std::vector<float>>& x, int head) {
  const std::vector<float>& row = x.at(static_cast<std::size_t>(head));
  const auto dim = static_cast<int>(row.size());
  const int centroid = centroid_of(plan, x, head);
  std::vector<float> rotated(row.size());
  rotate_row(plan, head, row, rotated, centroid);
  const RowCodec codec(plan, head, dim);
  std::vector<std::uint8_t> codes(row.size());
  std::vector<float> numbers(static_cast<std::size_t>(codec.num_numbers()));
  codec.encode(rotated, codes, numbers);
  std::vector<std::byte> bytes(static_cast<std::size_t>(row_bytes(plan, dim)));
  codec.pack(codes, numbers, centroid, bytes);
  return bytes;
}

std::vector<float> unpacked(const TensorPlan& plan, std::span<const std::byte> bytes, int head, int dim) {
  const RowCodec codec(plan, head, dim);
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(dim));
  std::vector<float> numbers(static_cast<std::size_t>(codec.num_numbers())), rotated(codes.size()), row(codes.size());
  const int centroid = codec.unpack(bytes, codes, numbers);
  codec.decode(codes, numbers, rotated);
  unrotate_row(plan, head, rotated, row, centroid);
  return row;
}

/// One head's row of one token after reconstruct_heads().
std::vector<float> reconstructed(const TensorPlan& plan, const std::vector<std::vector<float>>& x, int head) {
  std::vector<float> all;
  for (const auto& row : x) all.insert(all.end(), row.begin(), row.end());
  const auto dim = static_cast<std::ptrdiff_t>(x.front().size());
  reconstruct_heads(plan, static_cast<int>(x.size()), all, static_cast<int>(dim));
  return {all.begin() + head * dim, all.begin() + (head + 1) * dim};
}

std::vector<std::byte> bytes_of(const std::string& hex) {
  std::vector<std::byte> bytes;
  for (std::size_t i = 0; i < hex.size(); i += 2)
    bytes.push_back(static_cast<std::byte>(std::stoul(hex.substr(i, 2), nullptr, 16)));
  return bytes;
}

std::vector<float> floats_of(const Json& patterns) {
  std::vector<float> numbers;
  for (const Json& word : patterns)
    numbers.push_back(
        std::bit_cast<float>(static_cast<std::uint32_t>(std::stoul(word.get<std::string>(), nullptr, 16))));
  return numbers;
}

}  // namespace

TEST_CASE("every golden artifact is read and verified", "[golden]") {
  const std::string name =
      GENERATE("v1.0/oscar", "v1.0/symmetric", "v1.0/quarot", "v1.1/kvq", "v1.1/block-gtq", "v1.1/tq-mse",
               "v1.1/saw-int4", "v1.2/kvq", "v1.2/block-gtq", "v1.2/oscar", "v1.2/quarot", "v1.2/plain", "v1.3/kvq",
               "v1.3/oscar", "v1.3/quarot", "v1.4/kvq", "v1.4/block-gtq", "v1.4/symmetric");
  const auto path = file_of(name);
  CAPTURE(path);
  CHECK(load_artifact(path).layers.size() == 2);
  for (const Check& check : verify_artifact(path)) {
    CAPTURE(check.name, check.detail);
    CHECK(check.passed);
  }
  const test::TempFolder folder;
  save_artifact(load_artifact(path), folder / "again");
  CHECK(same_bytes(folder / "again", path));
}

TEST_CASE("the golden symmetric artifact says what it was made with", "[golden]") {
  const Artifact artifact = load_artifact(kFolder / "symmetric.safetensors");
  CHECK(artifact.calibration.method == "oscar");
  CHECK(artifact.calibration.budget.is_null());
  CHECK(artifact.windows == Windows{64, 256});
  const LayerPlan& layer = artifact.layers[1];
  CHECK(layer.k.rotation.recipe == "U*H*P");
  CHECK(layer.k.center.size() == 2 * 16);
  REQUIRE(layer.v);
  CHECK(std::get<UniformCoder>(layer.v->coder) == UniformCoder{
                                                      .bits = 3,
                                                      .group_size = 16,
                                                      .levels = UniformLevels::symmetric,
                                                      .rule = ScaleRule::norm,
                                                      .scale_type = ScaleType::bf16,
                                                  });
}

TEST_CASE("golden statistics are written again as they are", "[golden]") {
  const std::string version = GENERATE("v1.0", "v1.1", "v1.2", "v1.3");
  CAPTURE(version);
  const StatsFile golden = StatsFile::open(file_of(version + "/stats"));
  const std::vector<LayerStats> layers = {golden.load(0), golden.load(1)};
  const test::TempFolder folder;
  save_stats(golden.header(), layers, folder / "again");
  CHECK(same_bytes(folder / "again", golden.name()));
}

TEST_CASE("the golden dump still gives the golden statistics", "[golden]") {
  const auto [version, held_out_tokens] = GENERATE(table<std::string, std::int64_t>({{"v1.0", 0}, {"v1.1", 24}}));
  CAPTURE(version);
  const Dump dump = Dump::open({kFolder / "dump.h5"});
  const StatsFile golden = StatsFile::open(file_of(version + "/stats"));
  const StatsRequest request{
      .moments = {std::begin(kAllMoments), std::end(kAllMoments)},
      .sample_tokens = 32,
      .seed = 0,
      .held_out_tokens = held_out_tokens,
  };
  for (std::size_t i = 0; i < 2; ++i) {
    const LayerStats now = collect(dump.load_layer(static_cast<int>(i)), request), then = golden.load(i);
    CHECK(now.content_hash == then.content_hash);
    CHECK(now.sample.key == then.sample.key);
    CHECK(now.sample.k.raw == then.sample.k.raw);
    for (const Moment moment : kAllMoments) {
      // Products are exact and summed in double. Scores are float32, and other CPUs sum them in another order.
      const bool of_scores = moment != Moment::query && moment != Moment::key && moment != Moment::value;
      for (std::size_t h = 0; h < 2; ++h) {
        CAPTURE(i, to_string(moment), h);
        CHECK(largest_difference(now.moment(moment)[h].sum, then.moment(moment)[h].sum) < (of_scores ? 1e-5 : 1e-12));
      }
    }
    REQUIRE(then.held_out.has_value() == (held_out_tokens > 0));
    if (!then.held_out) continue;
    REQUIRE(now.held_out);
    CHECK(then.held_out->count() == held_out_tokens);
    CHECK(then.held_out->curvature.empty());
    CHECK(now.held_out->token == then.held_out->token);
    CHECK(now.held_out->query == then.held_out->query);
    CHECK(now.held_out->q.raw == then.held_out->q.raw);
    CHECK(now.held_out->k.raw == then.held_out->k.raw);
    CHECK(now.held_out->v.raw == then.held_out->v.raw);
    CHECK(*std::min_element(then.sample.token.begin(), then.sample.token.end()) >= held_out_tokens);
  }
}

TEST_CASE("the golden dump of version 1.2 still gives the golden metric, and the statistics the golden transforms",
          "[golden]") {
  const Dump dump = Dump::open({kGolden / "v1.2/dump.h5"});
  const StatsFile golden = StatsFile::open(file_of("v1.2/stats"));
  for (std::size_t i = 0; i < 2; ++i)
    CHECK(collect(dump.load_layer(static_cast<int>(i)), {.moments = {Moment::query}, .sample_tokens = 32})
              .o_proj_metric == golden.load(i).o_proj_metric);
  const Method& method = find_method("quarot");
  Options options;
  options.method = "quarot";
  method.set_defaults(options);
  options.random_signs = true;
  for (SideOptions* side : {&options.k, &options.v}) {
    side->coder = CoderKind::symmetric;
    side->rule = ScaleRule::norm;
    side->center = true;
    side->transform = TransformKind::diagonal;
  }
  const auto plans = method.decide(GoldenStats{kGolden / "v1.2"}, options, {}).plans;
  const Artifact artifact = load_artifact(file_of("v1.2/quarot"));
  for (std::size_t i = 0; i < 2; ++i) {
    CHECK(plans[i].k.rotation.channel_scale == artifact.layers[i].k.rotation.channel_scale);
    CHECK(plans[i].v->rotation.channel_scale == artifact.layers[i].v->rotation.channel_scale);
    CHECK(test::largest_difference(plans[i].v->transform->outlier_gain, artifact.layers[i].v->transform->outlier_gain) <
          1e-9);
  }
}

TEST_CASE("the golden dump of version 1.3 still gives the golden cap, sinks and moments behind them", "[golden]") {
  const Dump dump = Dump::open({kGolden / "v1.3/dump.h5"});
  const StatsFile golden = StatsFile::open(file_of("v1.3/stats"));
  const StatsRequest request{
      .moments = {std::begin(kAllMoments), std::end(kAllMoments)},
      .sample_tokens = 32,
      .held_out_tokens = 24,
      .golden_tokens = 4,
  };
  for (const std::string name : {"kvq", "oscar"}) {
    const Artifact artifact = load_artifact(file_of("v1.3/" + name));
    CAPTURE(name);
    CHECK(artifact_manifest(artifact).at("version") == "1.3");
    for (const LayerPlan& layer : artifact.layers) {
      CHECK(layer.geometry == dump.load_layer(layer.layer).geometry);
      CHECK(layer.geometry.logit_softcap == 8.0);
      CHECK(layer.geometry.sink_logits.size() == 4);
    }
  }
  for (std::size_t i = 0; i < 2; ++i) {
    const LayerStats now = collect(dump.load_layer(static_cast<int>(i)), request), then = golden.load(i);
    CHECK(now.content_hash == then.content_hash);
    CHECK(now.geometry == then.geometry);
    for (const Moment moment : kAllMoments) {
      const bool of_scores = moment != Moment::query && moment != Moment::key && moment != Moment::value;
      for (std::size_t h = 0; h < 2; ++h) {
        CAPTURE(i, to_string(moment), h);
        CHECK(largest_difference(now.moment(moment)[h].sum, then.moment(moment)[h].sum) < (of_scores ? 1e-5 : 1e-12));
      }
    }
  }
}

TEST_CASE("the golden artifacts of version 1.3 have baselines and the error on held-out tokens", "[golden]") {
  const auto [name, bits] = GENERATE(table<std::string, int>({{"kvq", 6}, {"oscar", 4}, {"quarot", 1}}));
  CAPTURE(name);
  const Artifact artifact = load_artifact(file_of("v1.3/" + name));
  CHECK(artifact.calibration.held_out.at("tokens") == 24);
  CHECK(artifact_manifest(artifact).at("requires").empty() == (name == "quarot"));
  for (const LayerPlan& layer : artifact.layers)
    for (const TensorPlan* plan : {&layer.k, &*layer.v}) {
      REQUIRE(plan->error);
      REQUIRE(plan->error->baseline);
      CHECK(plan->error->baseline->bits == bits);
      CHECK(plan->error->baseline->group_size == 16);
    }
}

TEST_CASE("the golden artifacts of version 1.4 have one scale a row", "[golden]") {
  const std::string name = GENERATE("kvq", "block-gtq", "symmetric");
  CAPTURE(name);
  const Artifact artifact = load_artifact(file_of("v1.4/" + name));
  CHECK(artifact_manifest(artifact).at("version") == "1.4");
  int most_segments = 0;
  for (const LayerPlan& layer : artifact.layers)
    for (const TensorPlan* plan : {&layer.k, &*layer.v}) {
      REQUIRE(plan->allocation);
      CHECK(plan->allocation->has_row_scale());
      CHECK(row_layout(*plan, 0, 16).num_numbers == 1);
      most_segments = std::max(most_segments, row_layout(*plan, 0, 16).num_segments);
    }
  CHECK(most_segments > 2);
}

TEST_CASE("the golden statistics still give the golden rotation", "[golden]") {
  const Method& method = find_method("oscar");
  Options options;
  method.set_defaults(options);
  options.k.group_size = options.v.group_size = 8;
  const auto plans = method.decide(GoldenStats{kFolder}, options, {}).plans;
  const Artifact golden = load_artifact(kFolder / "oscar.safetensors");
  for (std::size_t i = 0; i < plans.size(); ++i) {
    const auto& now = plans[i].k.rotation.matrix;
    const auto& then = golden.layers[i].k.rotation.matrix;
    CHECK(largest_difference({now.begin(), now.end()}, {then.begin(), then.end()}) < 1e-5);
    CHECK(plans[i].k.clip_ratio == golden.layers[i].k.clip_ratio);
  }
}

TEST_CASE("the golden artifacts of version 1.1 say which features they use", "[golden]") {
  const auto [name, required] =
      GENERATE(table<std::string, Json>({{"kvq", {"trellis", "mixed_widths"}},
                                         {"block-gtq", {"codebook", "mixed_widths"}},
                                         {"tq-mse", {"codebook", "centroids"}},
                                         {"saw-int4", {"codebook", "trellis", "centroids"}}}));
  const Artifact artifact = load_artifact(file_of("v1.1/" + name));
  CAPTURE(name);
  CHECK(artifact.calibration.method == name);
  CHECK(artifact_manifest(artifact).at("version") == "1.1");
  CHECK(artifact_manifest(artifact).at("requires") == required);
  CHECK(artifact.calibration.budget.is_null() == (name != "kvq" && name != "block-gtq"));
}

TEST_CASE("the golden kvq artifact has blocks of mixed widths, trellises and a budget", "[golden]") {
  const Artifact artifact = load_artifact(file_of("v1.1/kvq"));
  CHECK(artifact.windows == Windows{2, 4});
  CHECK(artifact.calibration.options.at("min_bits") == 0);
  CHECK(budget_of(artifact).at("unit") == "bits");
  CHECK(budget_of(artifact).at("metric") == "relative_output");
  CHECK(budget_of(artifact).at("spent") == 1.5);
  CHECK(budget_of(artifact).at("mean_bytes") == 2 * (8 + 8));
  CHECK(budget_of(artifact).at("held_out_tokens") == 24);
  const TensorPlan &k0 = artifact.layers[0].k, &v0 = *artifact.layers[0].v, &k1 = artifact.layers[1].k,
                   &v1 = *artifact.layers[1].v;
  CHECK(std::get<TrellisCoder>(k0.coder) == TrellisCoder{.bits = 2, .group_size = 0, .taps = {kTaps21}});
  CHECK(std::get<TrellisCoder>(v0.coder).taps == std::vector{kTaps22});
  CHECK(std::get<TrellisCoder>(k1.coder).taps == std::vector{kTaps22});
  CHECK(std::get<TrellisCoder>(v1.coder).taps == std::vector{kTaps21});
  CHECK(widths_of(k0) == "22222222221111002222222211111111");
  CHECK(widths_of(v0) == "22222222222211112222222222221111");
  CHECK(widths_of(k1) == "22221111111111112222111111111111");
  CHECK(widths_of(v1) == "22222222111111112222222211111111");
  for (const TensorPlan* plan : {&k0, &v0, &k1, &v1}) CHECK(row_bytes(*plan, 16) == 8);
  CHECK(row_layout(k0, 0, 16).row_bytes == 8);  // 10 codes of 2 bits, 4 of 1, two scales; two channels are not stored
  CHECK(row_layout(k0, 0, 16).num_segments == 2);
  CHECK(k0.allocation->unit == "rope_block");
  CHECK(k0.allocation->block_bits == std::vector<std::uint8_t>{1, 2, 0, 2, 2, 2, 1, 2, /**/ 1, 1, 1, 1, 1, 1, 1, 1});
  CHECK(k0.allocation->block_energy.size() == 16);
  CHECK(k0.allocation->channel_order[0] == 1);
  CHECK(k0.allocation->channel_order[1] == 9);
  CHECK(v0.allocation->unit == "channel");
  CHECK(k0.rotation.recipe == "G*S*H or S*H");
  CHECK(k0.center.size() == 2 * 16);
}

TEST_CASE("the golden Block-GTQ artifact has a Lloyd-Max codebook for each width and head", "[golden]") {
  const Artifact artifact = load_artifact(file_of("v1.1/block-gtq"));
  CHECK(budget_of(artifact).at("budget") == 3.0);
  CHECK(budget_of(artifact).at("mean_bytes") == 16 + 12 + 12 + 24);  // two heads in each of two layers
  const TensorPlan &k0 = artifact.layers[0].k, &v0 = *artifact.layers[0].v, &k1 = artifact.layers[1].k,
                   &v1 = *artifact.layers[1].v;
  CHECK(widths_of(k0) == "53333322222211115333322222222111");
  CHECK(widths_of(v0) == "44443333333333334444333333333333");
  CHECK(widths_of(k1) == "52222221111111005222222111111100");
  CHECK(widths_of(v1) == "65555555555555545555555555555555");
  CHECK(row_bytes(k0, 16) == 16);
  CHECK(row_bytes(v0, 16) == 12);
  CHECK(row_bytes(k1, 16) == 12);
  CHECK(row_bytes(v1, 16) == 24);  // widths 5 and 6 lie in bytes
  for (const TensorPlan* plan : {&k0, &v0, &k1, &v1}) {
    const auto& coder = std::get<CodebookCoder>(plan->coder);
    CHECK(coder.per_head);
    CHECK_FALSE(coder.fitted);
    CHECK(coder.rule == ScaleRule::least_squares);
    CHECK(coder.scale_type == ScaleType::bf16);
    for (const auto& [width, table] : coder.tables) {
      CAPTURE(width);
      CHECK(test::largest_difference(table, sphere_tables(*plan, width, 16)) < 1e-6);
    }
    CHECK(plan->rotation.eigenbasis.size() == 2 * 16 * 16);
    CHECK(plan->allocation->block_bits.empty());
  }
  CHECK(std::get<CodebookCoder>(k0.coder).tables.size() == 4);
  CHECK(std::get<CodebookCoder>(v1.coder).tables.size() == 3);
}

TEST_CASE("the golden TQ-MSE artifact has one codebook and centroids for all heads", "[golden]") {
  const Artifact artifact = load_artifact(file_of("v1.1/tq-mse"));
  for (const LayerPlan& layer : artifact.layers) {
    const auto &k = std::get<CodebookCoder>(layer.k.coder), &v = std::get<CodebookCoder>(layer.v->coder);
    CHECK(layer.k.rotation.scope == Scope::layer);
    CHECK(k.rule == ScaleRule::rms);
    CHECK_FALSE(k.per_head);
    CHECK(test::largest_difference(k.tables.at(2), sphere_codebook(2, 16).entries) < 1e-6);
    CHECK(test::largest_difference(v.tables.at(1), sphere_codebook(1, 16).entries) < 1e-6);
    REQUIRE(layer.k.centroids);
    CHECK(layer.k.centroids->count == 3);
    CHECK_FALSE(layer.k.centroids->joint);
    CHECK_FALSE(layer.k.centroids->after_rotation);
    CHECK(layer.k.centroids->values.size() == 3 * 16);
    CHECK(layer.k.centroids->inertia.size() == 1);
    CHECK_FALSE(layer.v->centroids);
    CHECK(row_bytes(layer.k, 16) == 4 + 2 + 1);  // codes, scale, index
    CHECK(row_bytes(*layer.v, 16) == 2 + 2);
  }
}

TEST_CASE("the golden SAW-INT4 artifact has trellises, fitted codebooks and joint centroids", "[golden]") {
  const Artifact artifact = load_artifact(file_of("v1.1/saw-int4"));
  for (const LayerPlan& layer : artifact.layers) {
    CHECK(std::get<TrellisCoder>(layer.k.coder) ==
          TrellisCoder{.bits = 4, .group_size = 8, .scale_type = ScaleType::fp32, .taps = {kTaps41}});
    const auto& coder = std::get<CodebookCoder>(layer.v->coder);
    CHECK(coder.per_head);
    CHECK(coder.fitted);
    REQUIRE(coder.tables.at(3).size() == 2 * 8);
    CHECK(coder.tables.at(3)[0] != coder.tables.at(3)[8]);
    for (const TensorPlan* plan : {&layer.k, &*layer.v}) {
      CHECK(plan->rotation.signs.size() == 2 * 16);
      REQUIRE(plan->centroids);
      CHECK(plan->centroids->joint);
      CHECK(plan->centroids->after_rotation);
      CHECK(plan->centroids->values.size() == 2 * 3 * 16);
    }
    CHECK(row_bytes(layer.k, 16) == 8 + 2 * 4 + 1);  // codes, two scales, index
    CHECK(row_bytes(*layer.v, 16) == 6 + 2 * 4 + 1);
  }
}

TEST_CASE("the golden statistics of version 1.1 still give the golden codebooks and centroids", "[golden]") {
  Options options;
  options.method = "saw-int4";
  const Method& method = find_method(options.method);
  method.set_defaults(options);
  options.random_signs = options.kmeans_joint = options.kmeans_after = true;
  options.memory = 1;
  options.k.coder = CoderKind::trellis;
  options.v.coder = CoderKind::codebook;
  options.v.fitted = options.v.hadamard = true;
  options.v.bits = 3;
  for (SideOptions* side : {&options.k, &options.v}) {
    side->group_size = 8;
    side->kmeans = 3;
    side->rule = ScaleRule::norm;
    side->scale_type = ScaleType::fp32;
  }
  const auto plans = method.decide(GoldenStats{kFolder11}, options, {}).plans;
  const Artifact golden = load_artifact(file_of("v1.1/saw-int4"));
  REQUIRE(plans.size() == 2);
  for (std::size_t i = 0; i < plans.size(); ++i) {
    const LayerPlan &now = plans[i], &then = golden.layers[i];
    // Since then trellises are searched in integers.
    auto trellis = std::get<TrellisCoder>(then.k.coder);
    for (TrellisTaps& taps : trellis.taps) taps.search = TrellisSearch::integer;
    CHECK(now.k.coder == Coder{trellis});
    CHECK(now.k.rotation.signs == then.k.rotation.signs);
    CHECK(test::largest_difference(now.k.centroids->values, then.k.centroids->values) < 1e-5);
    CHECK(test::largest_difference(now.v->centroids->values, then.v->centroids->values) < 1e-5);
    // Since then codebooks of up to 4 bits are rounded to a grid of levels.
    const std::vector<float>& unrounded = std::get<CodebookCoder>(then.v->coder).tables.at(3);
    std::vector<float> tables;
    for (std::size_t first = 0; first < unrounded.size(); first += 8)
      for (const float entry :
           level_grid(std::vector<double>(unrounded.begin() + static_cast<std::ptrdiff_t>(first),
                                          unrounded.begin() + static_cast<std::ptrdiff_t>(first + 8))))
        tables.push_back(entry);
    CHECK(test::largest_difference(std::get<CodebookCoder>(now.v->coder).tables.at(3), tables) < 1e-5);
  }
}

TEST_CASE("golden rows have the golden bytes and come back with the golden bits", "[golden]") {
  using Names = std::vector<std::string>;
  const auto [version, names] =
      GENERATE(table<std::string, Names>({{"v1.1", {"kvq", "block-gtq", "tq-mse", "saw-int4"}},
                                          {"v1.2", {"kvq", "block-gtq", "oscar", "quarot", "plain"}},
                                          {"v1.3", {"kvq", "oscar", "quarot"}},
                                          {"v1.4", {"kvq", "block-gtq", "symmetric"}}}));
  CAPTURE(version);
  const Json rows = parse_json(test::file_bytes(kGolden / version / "rows.json"), "rows.json");
  REQUIRE(rows.size() == names.size() * 2 * 2 * 2 * 3);  // artifacts, layers, sides, heads, tokens
  // Artifacts of 1.4 were made from the statistics of 1.3.
  const StatsFile stats = StatsFile::open(file_of(version == "v1.4" ? "v1.3/stats" : version + "/stats"));
  std::map<std::string, Artifact> artifacts;
  for (const std::string& name : names) artifacts[name] = load_artifact(file_of(version + "/" + name));
  for (const Json& row : rows) {
    CAPTURE(row.dump());
    const LayerPlan& layer = artifacts.at(row.at("artifact")).layers.at(row.at("layer").get<std::size_t>());
    const TensorPlan& plan = row.at("side") == "k" ? layer.k : *layer.v;
    const int head = row.at("head");
    const auto x = held_out_rows(stats, row);
    const std::vector<std::byte> bytes = bytes_of(row.at("bytes"));
    const std::vector<float> left = floats_of(row.at("reconstructed_bits"));
    CHECK(packed(plan, x, head) == bytes);
    CHECK(test::first_bit_difference(unpacked(plan, bytes, head, 16), left) == "");
    CHECK(test::first_bit_difference(reconstructed(plan, x, head), left) == "");
  }
}
