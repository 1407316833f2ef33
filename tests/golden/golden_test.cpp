#include <kvq/artifact/artifact.h>
#include <kvq/dump/dump_file.h>
#include <kvq/methods/method.h>
#include <kvq/stats/collect.h>
#include <kvq/stats/stats_file.h>

#include <catch2/catch.hpp>

#include <cmath>

// Files of released format versions, which no build writes again.

using namespace kvq;

namespace {

const std::filesystem::path kFolder = std::filesystem::path(KVQ_SOURCE_DIR) / "formats/golden/v1.0";

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
  std::size_t size() const override { return file_.header().model.layers.size(); }
  std::shared_ptr<const LayerStats> load(std::size_t index) const override { return std::make_shared<LayerStats>(file_.load(index)); }

 private:
  StatsFile file_ = StatsFile::open(kFolder / "stats.safetensors");
};

}  // namespace

TEST_CASE("every golden artifact of version 1.0 is read and verified", "[golden]") {
  const auto name = GENERATE("oscar", "symmetric", "quarot");
  const auto path = kFolder / (std::string(name) + ".safetensors");
  CAPTURE(path);
  CHECK(load_artifact(path).layers.size() == 2);
  for (const Check& check : verify_artifact(path)) {
    CAPTURE(check.name, check.detail);
    CHECK(check.passed);
  }
}

TEST_CASE("the golden symmetric artifact says what it was made with", "[golden]") {
  const Artifact artifact = load_artifact(kFolder / "symmetric.safetensors");
  CHECK(artifact.calibration.method == "oscar");
  CHECK(artifact.windows == Windows{64, 256});
  const LayerPlan& layer = artifact.layers[1];
  CHECK(layer.k.rotation.recipe == "U*H*P");
  CHECK(layer.k.center.size() == 2 * 16);
  REQUIRE(layer.v);
  CHECK(std::get<UniformCoder>(layer.v->coder) == UniformCoder{.bits = 3, .group_size = 16, .levels = UniformLevels::symmetric,
                                                               .rule = ScaleRule::norm, .scale_type = ScaleType::bf16});
}

TEST_CASE("the golden dump still gives the golden statistics", "[golden]") {
  const Dump dump = Dump::open({kFolder / "dump.h5"});
  const StatsFile golden = StatsFile::open(kFolder / "stats.safetensors");
  StatsRequest request{.moments = {std::begin(kAllMoments), std::end(kAllMoments)}, .sample_tokens = 32, .seed = 0};
  for (std::size_t i = 0; i < 2; ++i) {
    const LayerStats now = collect(dump.load_layer(static_cast<int>(i)), request), then = golden.load(i);
    CHECK(now.content_hash == then.content_hash);
    CHECK(now.sample.key == then.sample.key);
    CHECK(now.sample.k.raw == then.sample.k.raw);
    for (const Moment moment : kAllMoments)
      for (std::size_t h = 0; h < 2; ++h) {
        CAPTURE(i, to_string(moment), h);
        CHECK(largest_difference(now.moment(moment)[h].sum, then.moment(moment)[h].sum) < 1e-6);
      }
  }
}

TEST_CASE("the golden statistics still give the golden rotation", "[golden]") {
  const Method& method = find_method("oscar");
  Options options;
  method.set_defaults(options);
  options.k.group_size = options.v.group_size = 8;
  const auto plans = method.decide(GoldenStats{}, options, {});
  const Artifact golden = load_artifact(kFolder / "oscar.safetensors");
  for (std::size_t i = 0; i < plans.size(); ++i) {
    const auto& now = plans[i].k.rotation.matrix;
    const auto& then = golden.layers[i].k.rotation.matrix;
    CHECK(largest_difference({now.begin(), now.end()}, {then.begin(), then.end()}) < 1e-5);
    CHECK(plans[i].k.clip_ratio == golden.layers[i].k.clip_ratio);
  }
}
