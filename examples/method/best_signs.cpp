// A calibration method of one's own. `best-signs` rotates each head by a Hadamard transform with random signs, draws
// the signs several times, and keeps the draw that codes the head's sample with the smallest error.
//
//     example-method DUMP.h5 ARTIFACT.safetensors [DRAWS]
//
// The program collects statistics of the dump, hands the method to kvq::decide(), and writes the artifact, as
// kvq-calibrate does with a method of its registry. To make a method part of the registry, so that
// `kvq-calibrate --method best-signs` finds it: move the first part of this file, with best_signs_method(), to a file
// in lib/kvq/methods/, declare it in recipes.h, and add it to the array in registry.cpp (docs/extending.md lists the
// other steps). Then kvq-calibrate has the flag --draws, with the help text, the range and the manifest entry of its
// row.
#include <kvq/artifact/artifact.h>
#include <kvq/codec/rotation_matrix.h>
#include <kvq/core/error.h>
#include <kvq/dump/dump_file.h>
#include <kvq/methods/decide.h>
#include <kvq/methods/option_table.h>
#include <kvq/methods/rotated_plan.h>
#include <kvq/solve/structured.h>
#include <kvq/stats/collect.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace kvq;

// ---- The method ----

/// An option that only this method has: its name in the artifact's manifest, and its default.
constexpr OwnOption<int> kDraws{"draws", 16};

OptionSpec draws_option() {
  return integer_option({"--draws", option_group::kRotations, "best-signs: random signs tried for each head [16]"},
                        kDraws, {1, 4096}, {.key = kDraws.key});
}

/// One entry's rotation with the signs of one draw.
Rotation draw_rotation(const RotationRequest& request, int entry, int draw) {
  Rotation rotation;
  rotation.kind = RotationKind::block_hadamard;
  rotation.order = hadamard_order(request.dim());
  rotation.recipe = "S*H";
  rotation.signs = random_signs(request.dim(), request.options.seed + static_cast<std::uint64_t>(draw),
                                request.stats.layer, stream(entry, request.side));
  return rotation;
}

/// Error of the coder on the sample of the heads that share the entry, under the metric of attention.
double cost_of(const RotationRequest& request, int entry, const Rotation& rotation) {
  const std::vector<double> matrix = rotation_matrix(rotation, 0, request.dim());
  std::vector<RotatedData> rotated;
  for (const std::size_t head : request.members(entry)) rotated.push_back(rotate(request.data[head], matrix, {}));
  return coding_cost_of(rotated, RowCodec(request.coder, 1.0, request.dim()), request.backend);
}

/// All that the method decides. decide_by_rotation() adds the coder, searches the clip, and measures the errors.
Rotation best_signs(const RotationRequest& request) {
  Rotation all;
  for (int entry = 0; entry < request.heads(); ++entry) {
    Rotation best;
    double least = std::numeric_limits<double>::infinity();
    for (int draw = 0; draw < kDraws.of(request.options); ++draw) {
      Rotation drawn = draw_rotation(request, entry, draw);
      const double cost = cost_of(request, entry, drawn);
      if (cost < least) least = cost, best = std::move(drawn);
    }
    const std::vector<std::int8_t> signs = best.signs;
    if (entry == 0) all = std::move(best);
    if (entry > 0) all.signs.insert(all.signs.end(), signs.begin(), signs.end());
  }
  return all;
}

/// 2-bit affine codes with one group a head, a searched clip, and exact windows: a format that the runtime serves.
void set_defaults(Options& options) {
  options.k.clip = options.v.clip = std::nullopt;
  options.windows = {.sink_tokens = 64, .recent_tokens = 256};
}

Decision decide_best_signs(const StatsSource& source, const Options& options, const MethodContext& context) {
  return decide_by_rotation(source, options, context, best_signs, /*preferred_group=*/0);
}

Method best_signs_method() {
  return {
      .name = "best-signs",
      .summary = "Hadamard rotation with the best of several random signs",
      .options = {draws_option()},
      .set_defaults = set_defaults,
      .needs = common_needs,
      .tensors = [](const Options&, Side, int) { return RotationTensors{.signs = true}; },
      .decide = decide_best_signs,
  };
}

// ---- From a dump to an artifact ----

/// Statistics of all layers in memory. For a large model collect() belongs in load(), because one layer is loaded at a
/// time.
class CollectedStats : public StatsSource {
 public:
  CollectedStats(const Dump& dump, const StatsRequest& request) {
    for (const LayerEntry& entry : dump.model().layers)
      layers_.push_back(std::make_shared<const LayerStats>(collect(dump.load_layer(entry.layer), request)));
  }
  std::size_t size() const override { return layers_.size(); }
  std::shared_ptr<const LayerStats> load(std::size_t index) const override { return layers_.at(index); }

 private:
  std::vector<std::shared_ptr<const LayerStats>> layers_;
};

void calibrate(const std::string& dump_path, const std::string& artifact_path, const GivenOptions& given) {
  const Method method = best_signs_method();
  const Options options = resolve_options(method, given);

  const Dump dump = Dump::open({dump_path});
  const StatsRequest request{.moments = method.needs(options), .seed = options.seed, .golden_tokens = 32};
  const CollectedStats stats(dump, request);

  DecisionOrigin origin{
      .header = {.model = dump.model(),
                 .producer = dump.producer(),
                 .capture_point = to_string(dump.capture_point()),
                 .seed = options.seed,
                 .sample_tokens = request.sample_tokens},
      .content_hashes = {},
      .tokens = dump.num_tokens(),
      .sequences = dump.num_sequences(),
  };
  for (std::size_t i = 0; i < stats.size(); ++i) origin.content_hashes.push_back(stats.load(i)->content_hash);
  const Artifact artifact = decide(method, stats, origin, options, request.golden_tokens);
  save_artifact(artifact, artifact_path);

  for (const LayerPlan& layer : artifact.layers)
    for (const Side side : kSides)
      if (const TensorPlan* plan = layer.side(side); plan != nullptr && plan->error)
        std::printf("layer %d %s  error %.3f > %.3f\n", layer.layer, name(side), plan->error->before,
                    plan->error->after);
  std::printf("wrote %s\n", artifact_path.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) {
    std::fprintf(stderr, "usage: example-method DUMP.h5 ARTIFACT.safetensors [DRAWS]\n");
    return exit_code(ErrorKind::usage);
  }
  try {
    GivenOptions given;
    if (argc == 4) given.put("--draws", std::int64_t{std::atoi(argv[3])});
    calibrate(argv[1], argv[2], given);
    return 0;
  } catch (const Error& error) {
    std::fprintf(stderr, "example-method: error: %s\n", error.what());
    return exit_code(error.kind());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "example-method: error: %s\n", error.what());
    return exit_code(ErrorKind::internal);
  }
}
