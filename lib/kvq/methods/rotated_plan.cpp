#include <kvq/compute/parallel.h>
#include <kvq/core/error.h>
#include <kvq/methods/centroids.h>
#include <kvq/methods/layers.h>
#include <kvq/methods/make_coder.h>
#include <kvq/methods/rotated_plan.h>
#include <kvq/plan/baseline.h>
#include <kvq/solve/clip_search.h>
#include <kvq/solve/spectral.h>

#include <algorithm>

namespace kvq {

namespace {

/// Replaces matrices or vectors by their mean, as the only entry.
void average(std::vector<std::vector<double>>& entries) {
  for (std::size_t h = 1; h < entries.size(); ++h)
    for (std::size_t i = 0; i < entries[0].size(); ++i) entries[0][i] += entries[h][i];
  for (double& value : entries[0]) value /= static_cast<double>(entries.size());
  entries.resize(1);
}

}  // namespace

std::vector<float> make_center(const LayerStats& stats, const Options& options, Side side) {
  const auto& sums = stats.moment(side == Side::k ? Moment::key : Moment::value);
  std::vector<std::vector<double>> means;
  means.reserve(sums.size());
  for (const MomentSum& sum : sums) means.push_back(mean_vector(sum));
  if (options.scope == Scope::layer) average(means);
  std::vector<float> center;
  for (const auto& mean : means) center.insert(center.end(), mean.begin(), mean.end());
  return center;
}

namespace {

std::span<const float> center_of(const std::vector<float>& center, int h, int dim) {
  if (center.empty()) return {};
  return std::span<const float>{center}.subspan(static_cast<std::size_t>(h) * static_cast<std::size_t>(dim),
                                                static_cast<std::size_t>(dim));
}

struct EntryResult {
  double clip = 1.0, cost = 0.0, plain_cost = 0.0, energy = 0.0;
};

/// Weight of shrinking all keys, relative to independent errors of the same size. Found by experiment on the sample
/// model, not derived (docs/measurements.md).
constexpr double kKeyShrinkWeight = 4.0;

/// Further factor on the weight of shrinking, of keys and of values, if there are exact windows. Tokens in exact
/// windows do not shrink with the others, so attention moves between the two kinds of tokens. Also found by experiment.
constexpr double kWindowsShrinkFactor = 2.0;

/// Weight of shrinking all values, from the statistics: -a v_t moves every output by -a o_i, at a cost of a^2 E|o|^2
/// per query, where independent errors of that size cost a^2 sum_t S_it^2 |v_t|^2.
double value_shrink_weight(const RotationRequest& request, const RotatedData& rotated, std::size_t member,
                           std::span<const float> center) {
  const auto moments = request.stats.moments.find(Moment::scored_value);
  if (moments == request.stats.moments.end()) return 1.0;
  const std::vector<double> outputs = mean_moment(moments->second[member], {center.begin(), center.end()});
  const std::vector<double>& metric = request.data[member].metric;
  double trace = 0.0;
  for (std::size_t i = 0, d = static_cast<std::size_t>(rotated.dim); i < (metric.empty() ? d : d * d); ++i)
    trace += metric.empty() ? outputs[i * (d + 1)] : metric[i] * outputs[i];
  return trace * static_cast<double>(request.stats.sample.size()) / energy(rotated);
}

double shrink_weight(const RotationRequest& request, const RotatedData& rotated, std::size_t member,
                     std::span<const float> center) {
  const Windows& windows = request.options.windows;
  const double factor = windows.sink_tokens + windows.recent_tokens > 0 ? kWindowsShrinkFactor : 1.0;
  return factor * (request.side == Side::k ? kKeyShrinkWeight : value_shrink_weight(request, rotated, member, center));
}

/// Rotated rows of the heads that share entry h. `coded` holds the rows to quantize: residuals if there are centroids.
std::vector<RotatedData> rotate_members(const RotationRequest& request, const std::vector<FitData>& coded,
                                        const Rotation& rotation, int h) {
  const std::vector<double> matrix = rotation_matrix(rotation, h, request.dim());
  const auto center = center_of(request.center, h, request.dim());
  std::vector<RotatedData> rotated;
  for (const std::size_t member : request.members(h)) {
    rotated.push_back(rotate(coded[member], matrix, center));
    rotated.back().shrink_weight = shrink_weight(request, rotated.back(), member, center);
  }
  return rotated;
}

/// The best clip ratio; 1 for coders to which clip ratios do not apply.
struct SearchClip {
  const std::vector<RotatedData>& rotated;
  Backend& backend;
  double operator()(const ExactCoder&) const { return 1.0; }
  double operator()(const UniformCoder& coder) const {
    return takes_clip(coder) ? search_clip(rotated, coder, backend).ratio : 1.0;
  }
  double operator()(const CodebookCoder&) const { return 1.0; }
  double operator()(const TrellisCoder&) const { return 1.0; }
};

/// Clip search and errors of the heads that share entry h.
/// @param plain        the rows as the model has them, with their metric
/// @param transformed  whether `rotated` is in the coordinates of a transform, not in those of `plain`
EntryResult fit_entry(const RotationRequest& request, const TensorPlan& plan, const std::vector<FitData>& plain,
                      bool transformed, const std::vector<RotatedData>& rotated, int h) {
  const SideOptions& side = request.options.side(request.side);
  EntryResult result;
  const RowCodec plain_codec(plain_baseline(row_bytes(plan, request.dim()), request.dim()), 1.0, request.dim());
  for (const std::size_t member : request.members(h)) {
    if (transformed) {
      result.plain_cost += coding_cost(plain[member], plain_codec);
      result.energy += energy(plain[member]);
    } else {
      const RotatedData rows = rotate(plain[member], {}, {});
      result.plain_cost += coding_cost_of(std::span(&rows, 1), plain_codec, request.backend);
      result.energy += energy(rows);
    }
  }
  result.clip = side.clip ? *side.clip : std::visit(SearchClip{rotated, request.backend}, request.coder);
  TensorPlan coded = plan;
  if (scale_rule(plan.coder) == ScaleRule::minmax)
    coded.clip_ratio.assign(static_cast<std::size_t>(request.heads()), result.clip);
  const RowCodec codec(coded, h, request.dim());
  result.cost = coding_cost_of(rotated, codec, request.backend);
  return result;
}

}  // namespace

const char* metric_name(const SideView& view) {
  const LayerStats& stats = view.original();
  if (view.side() == Side::k) return stats.moments.count(Moment::query) ? "query_weighted" : "unweighted";
  if (!view.is_orthogonal() && !stats.o_proj_metric.empty()) return "output_weighted";
  return stats.sample.value_weight.empty() ? "unweighted" : "attention_weighted";
}

bool stays_exact(const Options& options, int layer, Side side) {
  return options.side(side).bits == 16 ||
         std::find(options.exact_layers.begin(), options.exact_layers.end(), layer) != options.exact_layers.end();
}

TensorPlan exact_plan(const Options& options) {
  TensorPlan plan;
  plan.rotation.scope = options.scope;
  return plan;
}

std::vector<std::size_t> RotationRequest::members(int h) const {
  std::vector<std::size_t> all;
  for (int head = 0; head < stats.geometry.num_kv_heads; ++head)
    if (options.scope == Scope::layer || head == h) all.push_back(static_cast<std::size_t>(head));
  return all;
}

std::vector<FitData> fit_metrics(const LayerStats& stats, Side side, bool output_metric) {
  std::vector<FitData> data;
  for (int h = 0; h < stats.geometry.num_kv_heads; ++h) {
    FitData entry{.dim = stats.geometry.dim(side)};
    if (side == Side::k && stats.moments.count(Moment::query))
      entry.metric = mean_moment(stats.moment(Moment::query)[static_cast<std::size_t>(h)]);
    if (side == Side::v && output_metric && !stats.o_proj_metric.empty()) {
      const std::size_t size = static_cast<std::size_t>(entry.dim) * static_cast<std::size_t>(entry.dim),
                        first = static_cast<std::size_t>(h) * size;
      entry.metric.assign(stats.o_proj_metric.begin() + static_cast<std::ptrdiff_t>(first),
                          stats.o_proj_metric.begin() + static_cast<std::ptrdiff_t>(first + size));
    }
    data.push_back(std::move(entry));
  }
  return data;
}

namespace {

/// fit_metrics() with rows and their weights.
std::vector<FitData> with_rows(std::vector<FitData> data, const LayerStats& stats, Side side, const SampledRows& rows) {
  for (std::size_t h = 0; h < data.size(); ++h) {
    data[h].rows = rows.head(static_cast<int>(h));
    if (side == Side::v && !stats.sample.value_weight.empty())
      data[h].weights = stats.sample.weights(static_cast<int>(h), stats.geometry.num_kv_heads);
  }
  return data;
}

}  // namespace

std::vector<FitData> fit_data(const LayerStats& stats, Side side, bool output_metric) {
  return with_rows(fit_metrics(stats, side, output_metric), stats, side,
                   side == Side::k ? stats.sample.k : stats.sample.v);
}

std::vector<FitData> fit_data(const SideView& view) {
  return with_rows(fit_metrics(view.stats(), view.side(), !view.is_orthogonal()), view.stats(), view.side(),
                   view.sample());
}

std::vector<std::vector<double>> scoped_moment(const RotationRequest& request, Moment which, bool centered) {
  const auto& sums = request.stats.moment(which);
  std::vector<std::vector<double>> means;
  for (std::size_t h = 0; h < sums.size(); ++h) {
    const int entry = request.options.scope == Scope::layer ? 0 : static_cast<int>(h);
    const auto c = centered ? center_of(request.center, entry, sums[h].dim) : std::span<const float>{};
    means.push_back(mean_moment(sums[h], std::vector<double>(c.begin(), c.end())));
  }
  if (request.options.scope == Scope::layer) average(means);
  return means;
}

std::vector<EigenPairs> eigenbases(const std::vector<std::vector<double>>& matrices, int dim, Backend& backend) {
  std::vector<double> batch;
  for (const std::vector<double>& matrix : matrices) batch.insert(batch.end(), matrix.begin(), matrix.end());
  return backend.eigh(batch, dim);
}

double coding_cost_of(std::span<const RotatedData> heads, const RowCodec& codec, Backend& backend) {
  std::vector<CodingTask> tasks;
  for (const RotatedData& rows : heads) tasks.push_back({&rows, &codec});
  double sum = 0.0;
  for (const double cost : backend.coding_costs(tasks)) sum += cost;
  return sum;
}

std::set<Moment> common_needs(const Options& options) {
  std::set<Moment> needs{Moment::query, Moment::key, Moment::value};
  if (options.v.bits != 16 && !options.v.clip) needs.insert(Moment::scored_value);  // attention weights for the search
  return needs;
}

TensorPlan plan_side(const LayerStats& stats, const Options& options, Side which, ChooseRotation choose,
                     int preferred_group, Backend& backend) {
  const SideOptions& side = options.side(which);
  const int dim = stats.geometry.dim(which);
  if (stays_exact(options, stats.layer, which)) return exact_plan(options);

  TensorPlan plan;
  plan.coder =
      make_coder(options, which, resolve_group_size(side.group_size, preferred_group, dim, stats.layer, which));
  const SideView view(stats, options, which);
  if (side.center) plan.center = make_center(view.stats(), options, which);
  const std::vector<FitData> data = fit_data(view);
  const std::vector<FitData> plain = view.is_orthogonal() ? data : fit_data(stats, which, true);
  const RotationRequest request{view.stats(), options, which, plan.coder, data, plan.center, backend};
  plan.rotation = choose(request);
  plan.rotation.scope = options.scope;

  const std::vector<FitData> coded = side.kmeans > 1 ? add_centroids(plan, request) : data;

  const auto heads = static_cast<std::size_t>(request.heads());
  std::vector<std::vector<RotatedData>> rotated(heads);
  parallel_for(request.heads(), [&](std::int64_t h) {
    rotated[static_cast<std::size_t>(h)] = rotate_members(request, coded, plan.rotation, static_cast<int>(h));
  });
  fit_tables(plan, side.fitted, rotated, request.backend);
  std::vector<EntryResult> entries(heads);
  parallel_for(request.heads(), [&](std::int64_t h) {
    entries[static_cast<std::size_t>(h)] = fit_entry(request, plan, plain, !view.is_orthogonal(),
                                                     rotated[static_cast<std::size_t>(h)], static_cast<int>(h));
  });
  EntryResult total;
  for (const EntryResult& entry : entries) {
    total.cost += entry.cost;
    total.plain_cost += entry.plain_cost;
    total.energy += entry.energy;
    if (scale_rule(plan.coder) == ScaleRule::minmax) plan.clip_ratio.push_back(entry.clip);
  }
  if (!(total.energy > 0.0))
    throw Error{ErrorKind::numerical, fmt::format("layer {} {}: the sampled rows have no energy under the error metric",
                                                  stats.layer, name(which))};
  const UniformCoder baseline = plain_baseline(row_bytes(plan, dim), dim);
  plan.error = FitError{metric_name(view), total.plain_cost / total.energy, total.cost / total.energy,
                        BaselineCodes{baseline.bits, baseline.group_size}};
  view.compose(plan, options);
  return plan;
}

Decision decide_by_rotation(const StatsSource& source, const Options& options, const MethodContext& context,
                            ChooseRotation choose, int preferred_group) {
  return plan_layers(source, context, [&](const LayerStats& stats, Side side) {
    return plan_side(stats, options, side, choose, preferred_group, context.backend);
  });
}

LayerRotationReport report_rotations(const LayerStats& stats, Scope scope, int group_size) {
  LayerRotationReport report{.layer = stats.layer, .heads = {}};
  const std::vector<FitData> data = fit_data(stats, Side::k);
  const int dim = stats.geometry.head_dim;
  const int group = dim % group_size == 0 ? group_size : dim;
  std::vector<std::vector<double>> c_q, c_k;
  for (std::size_t h = 0; h < data.size(); ++h) {
    c_q.push_back(mean_moment(stats.moment(Moment::query)[h]));
    c_k.push_back(mean_moment(stats.moment(Moment::key)[h]));
  }
  if (scope == Scope::layer) {
    average(c_q);
    average(c_k);
  }
  report.heads.resize(data.size());
  parallel_for(static_cast<std::int64_t>(data.size()), [&](std::int64_t index) {
    const auto h = static_cast<std::size_t>(index), entry = scope == Scope::layer ? 0 : h;
    report.heads[h].k = rotation_rows(data[h], c_q[entry], group);
    report.heads[h].alignment = top8_alignment(c_q[entry], c_k[entry], dim);
  });
  return report;
}

}  // namespace kvq
