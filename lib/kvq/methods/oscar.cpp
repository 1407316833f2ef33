#include <kvq/compute/parallel.h>
#include <kvq/core/error.h>
#include <kvq/methods/recipes.h>
#include <kvq/methods/rotated_plan.h>
#include <kvq/plan/recipe_letters.h>
#include <kvq/solve/spectral.h>

#include <algorithm>

// OSCAR (arXiv 2605.17757): R = U H P_br, U the eigenbasis of C_Q = (1/N) sum q^T q for keys and of C_S = (1/N) V^T S^T
// S V for values (section 3, Eq. 3), 2-bit affine codes in groups of 64, clip ratios, exact windows (A.5). Where the
// published code differs from the paper (`sst` in place of C_S, one rotation per layer, eigenvectors as the solver
// returns them), this file follows the paper by default and offers the code's choice as an option.

namespace kvq {

namespace {

constexpr int kGroupSize = 64;

const Composition& composition_of(const Options& options) { return kvq::composition_of(options.composition); }

bool is_residual(const Composition& composition) {
  return composition.id == CompositionId::residual || composition.id == CompositionId::residual_published;
}

struct Candidate {
  std::vector<double> matrix, basis;
  std::string signs;
};

/// Costs of candidate rotations on the heads that share entry h, without clip, so that comparing candidates is cheap.
std::vector<double> candidate_costs(const RotationRequest& request, int h, const std::vector<Candidate>& candidates) {
  const auto d = static_cast<std::size_t>(request.dim());
  std::span<const float> center;
  if (!request.center.empty())
    center = std::span<const float>{request.center}.subspan(static_cast<std::size_t>(h) * d, d);
  const std::vector<std::size_t> members = request.members(h);
  std::vector<RotatedData> rotated(candidates.size() * members.size());
  parallel_for(static_cast<std::int64_t>(rotated.size()), [&](std::int64_t index) {
    const auto i = static_cast<std::size_t>(index);
    rotated[i] = rotate(request.data[members[i % members.size()]], candidates[i / members.size()].matrix, center);
  });
  const RowCodec codec(request.coder, 1.0, request.dim());
  std::vector<CodingTask> tasks;
  for (const RotatedData& rows : rotated) tasks.push_back({&rows, &codec});
  const std::vector<double> of_tasks = request.backend.coding_costs(tasks);
  std::vector<double> costs(candidates.size(), 0.0);
  for (std::size_t i = 0; i < of_tasks.size(); ++i) costs[i / members.size()] += of_tasks[i];
  return costs;
}

/// The best of the canonical signs and of N = sign_search random choices; on a tie the earlier candidate.
Candidate choose_signs(const RotationRequest& request, int h, const Composition& composition, const EigenPairs& pairs) {
  constexpr int kTogether = 16;  // candidates whose rows are in memory at a time
  const int dim = request.dim(), order = hadamard_order(dim);
  const bool search = request.options.sign_search > 0 && composition.uses('U') && composition.uses('H');
  Candidate best{compose(composition, pairs.vectors, dim, order), pairs.vectors, "canonical"};
  if (!search) return best;
  double best_cost = candidate_costs(request, h, {best}).front();
  // Keys and values draw from different streams: the side is part of the head word.
  const int stream = kvq::stream(h, request.side), last = request.options.sign_search;
  for (int first = 1; first <= last; first += kTogether) {
    std::vector<Candidate> candidates;
    for (int n = first; n <= std::min(last, first + kTogether - 1); ++n) {
      std::vector<double> basis = with_signs(pairs.vectors, dim, request.options.seed, request.stats.layer, stream, n);
      std::vector<double> matrix = compose(composition, basis, dim, order);
      candidates.push_back({std::move(matrix), std::move(basis), fmt::format("random {} of {}", n, last)});
    }
    const std::vector<double> costs = candidate_costs(request, h, candidates);
    for (std::size_t i = 0; i < candidates.size(); ++i)
      if (costs[i] < best_cost) best = std::move(candidates[i]), best_cost = costs[i];
  }
  return best;
}

/// Covariance of the coder's error under the default rotation, summed over the heads that share entry h.
std::vector<double> residual_covariance(const RotationRequest& request, int h, const EigenPairs& pairs) {
  const int dim = request.dim();
  const auto d = static_cast<std::size_t>(dim);
  const std::vector<double> reference =
      compose(kvq::composition_of(CompositionId::uhp), pairs.vectors, dim, hadamard_order(dim));
  std::span<const float> center;
  if (!request.center.empty())
    center = std::span<const float>{request.center}.subspan(static_cast<std::size_t>(h) * d, d);
  const RowCodec codec(request.coder, 1.0, dim);
  std::vector<double> covariance(d * d, 0.0);
  for (const std::size_t member : request.members(h)) {
    const RotatedData rows = rotate(request.data[member], reference, center);
    const auto one = request.backend.error_covariances(std::vector<CodingTask>{{&rows, &codec}}).front();
    for (std::size_t i = 0; i < covariance.size(); ++i) covariance[i] += one[i];
  }
  return covariance;
}

/// The residual variant: matches the eigenbases of target and error in opposite order.
Candidate residual_candidate(const RotationRequest& request, int h, const Composition& composition,
                             const EigenPairs& pairs) {
  const int dim = request.dim();
  const EigenPairs error = request.backend.eigh(residual_covariance(request, h, pairs), dim).front();
  return {residual_rotation(pairs, error, dim, composition.id == CompositionId::residual_published), pairs.vectors,
          "canonical"};
}

Rotation oscar_rotation(const RotationRequest& request) {
  const Composition& composition = composition_of(request.options);
  Rotation rotation;
  rotation.recipe = composition.recipe;
  rotation.order = composition.uses('H') ? hadamard_order(request.dim()) : 0;
  if (composition.recipe == "I") return rotation;
  if (composition.recipe == "H") {
    rotation.kind = RotationKind::block_hadamard;
    return rotation;
  }
  rotation.kind = RotationKind::dense;
  const bool spectral = composition.uses('U');
  const Moment target = request.options.side(request.side).target;
  std::vector<EigenPairs> bases(static_cast<std::size_t>(request.heads()));
  if (spectral) {
    const auto moments = scoped_moment(request, target, request.side == Side::v || target == Moment::key);
    bases = eigenbases(moments, request.dim(), request.backend);
  }
  const auto heads = static_cast<std::size_t>(request.heads());
  const auto d = static_cast<std::size_t>(request.dim());
  rotation.matrix.resize(heads * d * d);
  if (spectral) {
    rotation.target = to_string(target);
    rotation.eigenbasis.resize(heads * d * d);
    rotation.spectrum.resize(heads * d);
    rotation.sign_choice.resize(heads);
  }
  parallel_for(request.heads(), [&](std::int64_t index) {
    const auto h = static_cast<std::size_t>(index);
    const EigenPairs& pairs = bases[h];
    const Candidate chosen = is_residual(composition)
                                 ? residual_candidate(request, static_cast<int>(h), composition, pairs)
                                 : choose_signs(request, static_cast<int>(h), composition, pairs);
    std::copy(chosen.matrix.begin(), chosen.matrix.end(),
              rotation.matrix.begin() + static_cast<std::ptrdiff_t>(h * d * d));
    if (!spectral) return;
    std::copy(chosen.basis.begin(), chosen.basis.end(),
              rotation.eigenbasis.begin() + static_cast<std::ptrdiff_t>(h * d * d));
    std::copy(pairs.values.begin(), pairs.values.end(), rotation.spectrum.begin() + static_cast<std::ptrdiff_t>(h * d));
    rotation.sign_choice[h] = chosen.signs;
  });
  return rotation;
}

void oscar_defaults(Options& options) {
  options.k.target = Moment::query;
  options.v.target = Moment::scored_value;
  options.k.clip = options.v.clip = std::nullopt;
  options.windows = {64, 256};
}

std::set<Moment> oscar_needs(const Options& options) {
  std::set<Moment> needs = common_needs(options);
  if (composition_of(options).uses('U')) {
    needs.insert(options.k.target);
    needs.insert(options.v.target);
  }
  return needs;
}

RotationTensors oscar_tensors(const Options& options, Side, int) {
  return {
      .matrix = options.composition != CompositionId::i && options.composition != CompositionId::h,
      .basis = composition_of(options).uses('U'),
      .signs = false,
  };
}

Decision oscar_decide(const StatsSource& source, const Options& options, const MethodContext& context) {
  return decide_by_rotation(source, options, context, oscar_rotation, kGroupSize);
}

std::string composition_notes() {
  std::string text =
      "Compositions (rows of activations meet the factors from left to right; [name in OSCAR's script]):";
  for (const Composition& row : compositions()) {
    const std::string official = row.official.empty() ? "" : fmt::format(" [{}]", row.official);
    text += fmt::format("\n  {:<18} {:<10} {}{}", row.name, row.recipe, row.summary, official);
  }
  text += "\n\nLetters of rotations in tables:";
  for (const RecipeLetter& letter : recipe_letters())
    text += fmt::format("\n  {:<18} {}", letter.letter, letter.meaning);
  return text;
}

/// kvq's names of compositions, with OSCAR's as aliases.
OptionSpec composition_option() {
  OptionSpec spec{.text = {"--composition", option_group::kRotations, "oscar: factors of the rotation, see below [uhp]",
                           composition_notes()}};
  for (const Composition& row : compositions()) spec.choices.push_back({row.name, row.official});
  spec.set = [spec](Options& options, const OptionValue& word) {
    options.composition = compositions()[choice_index(spec, std::get<std::string>(word))].id;
  };
  write_in_manifest(spec, {.key = "composition", .every_method = true},
                    [](const Options& options) { return Json(to_string(options.composition)); });
  return spec;
}

OptionSpec target_option(const char* flag, const char* help, Sides side, const std::vector<Moment>& moments) {
  return side_choice<Moment>(
      {flag, option_group::kRotations, help}, side, &SideOptions::target, moments,
      {.key = "target", .value = [](const SideOptions& s) { return Json(to_string(s.target)); }, .every_method = true});
}

std::vector<OptionSpec> oscar_options() {
  return {
      composition_option(),
      target_option("--target-k", "oscar: query (C_Q), scored_query (C_SQ) or key (K^T K) [query]", Sides::k,
                    {Moment::query, Moment::scored_query, Moment::key}),
      target_option("--target-v", "oscar: scored_value (exact C_S), sst (OSCAR's code) or value (V^T V) [scored_value]",
                    Sides::v, {Moment::scored_value, Moment::sst, Moment::value}),
      integer_option(
          {"--sign-search", option_group::kRotations, "oscar: also try N random eigenvector signs a head [0]"},
          &Options::sign_search, {0, 4096}, {.key = "sign_search", .every_method = true}),
  };
}

}  // namespace

Method oscar_method() {
  return {
      .name = "oscar",
      .summary = "INT2 with query- and score-covariance rotations, clip ratios and exact windows",
      .options = oscar_options(),
      .set_defaults = oscar_defaults,
      .needs = oscar_needs,
      .tensors = oscar_tensors,
      .decide = oscar_decide,
  };
}

}  // namespace kvq
