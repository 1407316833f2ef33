#include "inspect/legend.h"

#include "common/layers.h"
#include "common/plural.h"
#include "common/text_wrap.h"
#include "inspect/report.h"

#include <kvq/plan/recipe_letters.h>

#include <fmt/format.h>

#include <algorithm>

namespace kvq {

namespace {

/// Calls `visit(plan)` for both sides of all layers.
template <typename Visit>
void for_each_plan(const Artifact& artifact, Visit visit) {
  for (const LayerPlan& layer : artifact.layers) {
    visit(layer.k);
    if (layer.v) visit(*layer.v);
  }
}

template <typename Has>
bool any_plan(const Artifact& artifact, Has has) {
  bool any = false;
  for_each_plan(artifact, [&](const TensorPlan& plan) { any = any || has(plan); });
  return any;
}

}  // namespace

std::vector<std::string> recipes_of(const Artifact& artifact) {
  std::vector<std::string> recipes;
  for_each_plan(artifact, [&](const TensorPlan& plan) { recipes.push_back(rotation_text(plan)); });
  return recipes;
}

std::string rotation_legend(const std::vector<std::string>& recipes) {
  std::string text;
  for (const RecipeLetter& letter : letters_in(recipes))
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", letter.letter, letter.meaning);
  return text.empty() ? "" : wrapped("rotation: ", text + ".");
}

std::string letters_help() {
  std::string text = "Rows meet the factors from left to right.";
  for (const RecipeLetter& letter : recipe_letters())
    text += fmt::format("\n  {:<5} {}", letter.letter, letter.meaning);
  return text;
}

std::string change_text(double before, double after, int digits) {
  return fmt::format("{:.{}f} -> {:.{}f}", before, digits, after, digits);
}

std::string baseline_text(const FitError& error) {
  return error.baseline ? fmt::format("{}-bit g{}", error.baseline->bits, error.baseline->group_size) : "";
}

std::string error_legend(const Artifact& artifact) {
  if (!any_plan(artifact, [](const TensorPlan& plan) { return plan.error.has_value(); })) return "";
  const bool same_codes =
      any_plan(artifact, [](const TensorPlan& plan) { return plan.error && !plan.error->baseline; });
  std::string text =
      "relative, in sample (on the calibration's own tokens); keys weighted by queries, values by attention";
  if (any_plan(artifact, [](const TensorPlan& plan) { return plan.error && plan.error->metric == "output_weighted"; }))
    text += ", with a transform by o_proj's metric";
  text += same_codes ? "; from the same codes without rotation, center and clip -> to this plan."
                     : "; from plain min-max codes of as many bytes or a few more -> to this plan.";
  return wrapped("error: ", text);
}

std::vector<int> missing_layers(const Artifact& artifact) {
  std::vector<int> present;
  for (const LayerPlan& layer : artifact.layers) present.push_back(layer.layer);
  return layers_without(present, artifact.model.num_layers);
}

std::string layers_text(const Artifact& artifact) {
  const std::vector<int> missing = missing_layers(artifact);
  return fmt::format("{} of {}{}", counted(artifact.layers.size(), "layer"), artifact.model.num_layers,
                     missing.empty() ? "" : ", without " + range_text(missing));
}

}  // namespace kvq
