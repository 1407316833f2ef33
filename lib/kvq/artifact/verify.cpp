#include <kvq/artifact/recipe_check.h>
#include <kvq/artifact/repeated_facts.h>
#include <kvq/artifact/verify.h>
#include <kvq/codec/golden_rows.h>
#include <kvq/core/text.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace kvq {

namespace {

constexpr double kOrthogonalityTolerance = 1e-6;
constexpr double kClaimTolerance = 1e-3;  // of a condition in the manifest, relative

/// The larger number, where NaN is larger than any number, so that a maximum keeps a NaN.
double larger(double a, double b) { return std::isnan(a) || a >= b ? a : b; }

/// A fault with the place in front, or nothing.
std::string placed(const std::string& where, const std::string& fault) {
  return fault.empty() ? "" : where + ": " + fault;
}

/// Findings of one layer, or of all layers so far.
struct Findings {
  double orthogonality = 0.0, inverse = 0.0, condition = 0.0;
  std::string geometry, spectrum, recipe, widths, claim, golden;  ///< first fault of each kind
  bool has_basis = false, has_widths = false, has_transform = false, has_golden = false;
  std::int64_t rows = 0, firm = 0;

  /// Adds the findings of a later layer.
  void add(const Findings& other) {
    orthogonality = larger(orthogonality, other.orthogonality);
    inverse = larger(inverse, other.inverse);
    condition = larger(condition, other.condition);
    for (std::string Findings::* fault : {&Findings::geometry, &Findings::spectrum, &Findings::recipe,
                                          &Findings::widths, &Findings::claim, &Findings::golden})
      if ((this->*fault).empty()) this->*fault = other.*fault;
    for (bool Findings::* flag :
         {&Findings::has_basis, &Findings::has_widths, &Findings::has_transform, &Findings::has_golden})
      this->*flag = this->*flag || other.*flag;
    rows += other.rows;
    firm += other.firm;
  }
};

double basis_error(const Rotation& rotation, int dim) {
  Rotation basis{.kind = RotationKind::dense};
  basis.matrix = rotation.eigenbasis;
  return orthogonality_error(basis, dim);
}

Findings find_in_transform(const TensorPlan& plan, int dim, const std::string& where) {
  Findings found;
  found.has_transform = true;
  for (int h = 0; h < static_cast<int>(plan.transform->condition.size()); ++h) {
    const double condition = transform_condition(plan.rotation, h, dim),
                 claimed = plan.transform->condition[static_cast<std::size_t>(h)];
    found.inverse = larger(found.inverse, inverse_error(plan.rotation, h, dim) / condition);
    found.condition = larger(found.condition, condition);
    if (found.claim.empty() && !(std::abs(condition - claimed) <= kClaimTolerance * condition))
      found.claim = fmt::format("{} head {}: expected {:.6g}, found {:.6g}", where, h, condition, claimed);
  }
  return found;
}

Findings find_in_side(const TensorPlan& plan, const LayerGeometry& geometry, Side side, const std::string& where) {
  const int dim = geometry.dim(side);
  Findings found;
  found.has_basis = !plan.rotation.eigenbasis.empty();
  found.has_widths = plan.allocation.has_value();
  found.orthogonality = orthogonality_error(plan.rotation, dim);
  if (found.has_basis) found.orthogonality = larger(found.orthogonality, basis_error(plan.rotation, dim));
  found.spectrum = placed(where, spectrum_fault(plan.rotation, dim));
  found.recipe = placed(where, placed("recipe " + printable(plan.rotation.recipe, 40), recipe_fault(plan, dim)));
  found.widths = placed(where, widths_fault(plan, geometry));
  if (plan.transform) found.add(find_in_transform(plan, dim, where));
  return found;
}

Findings find_in_layer(const LayerPlan& plan, const GoldenRows* golden) {
  Findings found;
  found.geometry = geometry_fault(plan);
  for (const Side side : kSides)
    if (const TensorPlan* own = plan.side(side))
      found.add(find_in_side(*own, plan.geometry, side, fmt::format("layer {} {}", plan.layer, name(side))));
  if (golden == nullptr) return found;
  found.has_golden = true;
  found.golden = placed(fmt::format("layer {}", plan.layer), golden_fault(plan, *golden));
  for (const GoldenSide* side : {&golden->k, &golden->v}) {
    found.rows += static_cast<std::int64_t>(side->firm.size());
    found.firm += std::count(side->firm.begin(), side->firm.end(), 1);
  }
  return found;
}

Findings find_in_layers(const Artifact& artifact, const ForEach& for_each) {
  std::vector<Findings> layers(artifact.layers.size());
  for_each(static_cast<std::int64_t>(layers.size()), [&](std::int64_t i) {
    const LayerPlan& plan = artifact.layers[static_cast<std::size_t>(i)];
    const auto golden = artifact.golden.find(plan.layer);
    layers[static_cast<std::size_t>(i)] =
        find_in_layer(plan, golden == artifact.golden.end() ? nullptr : &golden->second);
  });
  Findings all;
  for (const Findings& layer : layers) all.add(layer);
  return all;
}

/// A check that has failed if there is a fault.
Check of_fault(std::string name, std::string fault, std::string fine) {
  const bool passed = fault.empty();
  return {std::move(name), passed, passed ? std::move(fine) : std::move(fault)};
}

Check hash_check(const SafetensorsFile& file) {
  const std::string found = content_hash(file, file.metadata().at("kvq.manifest")), stated = stated_hash(file);
  return {"content hash", stated == found,
          stated == found ? found : fmt::format("expected {}, found {}", printable(stated, 60), found)};
}

void add_transform_checks(const Findings& found, std::vector<Check>& checks) {
  checks.push_back(
      {"inverses", found.inverse <= kInverseTolerance,
       fmt::format("max |A^-1 A - I| / condition = {:.2e}, allowed {:.0e}", found.inverse, kInverseTolerance)});
  const bool passed = found.claim.empty() && found.condition <= kMostCondition;
  checks.push_back({"condition", passed,
                    found.claim.empty() ? fmt::format("largest {:.3g}, allowed {:.0f}", found.condition, kMostCondition)
                                        : found.claim});
}

}  // namespace

std::vector<Check> verify_artifact(const SafetensorsFile& file, const Artifact& artifact, const ForEach& for_each) {
  const Findings found = find_in_layers(artifact, for_each);
  std::vector<Check> checks;
  checks.push_back({"schema, tensors, finite values", true,
                    fmt::format("{} layers, {} tensors", artifact.layers.size(), file.tensors().size())});
  checks.push_back(hash_check(file));
  checks.push_back(of_fault("version", version_fault(file, artifact), file.metadata().at("version")));
  checks.push_back(of_fault("geometry", found.geometry, "kinds, heads and values agree"));
  checks.push_back({"orthogonality", found.orthogonality <= kOrthogonalityTolerance,
                    fmt::format("max |R^T R - I| = {:.2e}, allowed 1e-6", found.orthogonality)});
  if (found.has_basis) checks.push_back(of_fault("spectra", found.spectrum, "descending, not negative"));
  checks.push_back(of_fault("recipes", found.recipe, "agree with the tensors"));
  if (found.has_widths) checks.push_back(of_fault("widths", found.widths, "of blocks, channels and sources agree"));
  if (found.has_transform) add_transform_checks(found, checks);
  if (found.has_golden)
    checks.push_back(of_fault("golden rows", found.golden,
                              fmt::format("{} rows in {} layers coded alike, {} of them firm", found.rows,
                                          artifact.golden.size(), found.firm)));
  return checks;
}

std::vector<Check> verify_artifact(const std::filesystem::path& path, const ForEach& for_each) {
  const SafetensorsFile file = SafetensorsFile::open(path);
  return verify_artifact(file, load_artifact(file, HashCheck::left_out), for_each);
}

}  // namespace kvq
