#include <kvq/methods/recipes.h>
#include <kvq/methods/rotated_plan.h>
#include <kvq/solve/structured.h>

namespace kvq {

namespace {

Rotation haar_rotation(const RotationRequest& request) {
  Rotation rotation;
  rotation.kind = RotationKind::dense;
  rotation.recipe = "Haar";
  for (int h = 0; h < request.heads(); ++h) {
    const auto matrix = haar_matrix(request.dim(), request.options.seed, request.stats.layer, stream(h, request.side));
    rotation.matrix.insert(rotation.matrix.end(), matrix.begin(), matrix.end());
  }
  return rotation;
}

Decision random_decide(const StatsSource& source, const Options& options, const MethodContext& context) {
  return decide_by_rotation(source, options, context, haar_rotation, 0);
}

Decision plain_decide(const StatsSource& source, const Options& options, const MethodContext& context) {
  return decide_by_rotation(source, options, context, [](const RotationRequest&) { return Rotation{}; }, 0);
}

void no_defaults(Options&) {}

}  // namespace

Method random_method() {
  return {
      .name = "random",
      .summary = "baseline: random orthogonal rotation (Haar, seeded)",
      .set_defaults = no_defaults,
      .needs = common_needs,
      .tensors = [](const Options&, Side, int) { return RotationTensors{.matrix = true}; },
      .decide = random_decide,
  };
}

Method plain_method() {
  return {
      .name = "plain",
      .summary = "baseline: no rotation",
      .set_defaults = no_defaults,
      .needs = common_needs,
      .tensors = [](const Options&, Side, int) { return RotationTensors{}; },
      .decide = plain_decide,
  };
}

}  // namespace kvq
