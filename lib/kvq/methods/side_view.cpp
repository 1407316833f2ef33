#include <kvq/compute/parallel.h>
#include <kvq/core/error.h>
#include <kvq/methods/rotated_plan.h>
#include <kvq/methods/side_view.h>
#include <kvq/solve/spectral.h>

#include <algorithm>
#include <cstring>

namespace kvq {

namespace {

using Doubles = std::vector<double>;

int dim_of(const LayerStats& stats, Side side) { return stats.geometry.dim(side); }

void add_to(Doubles& sum, const Doubles& more) {
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += more[i];
}

/// Metric of one KV head's rows: the queries' moment for keys, o_proj's metric for values (the identity if the dump has
/// no such metric).
Doubles metric_of(const LayerStats& stats, Side side, std::size_t head) {
  const auto d = static_cast<std::size_t>(dim_of(stats, side));
  if (side == Side::k) return mean_moment(stats.moment(Moment::query)[head]);
  Doubles metric(d * d, 0.0);
  for (std::size_t i = 0; i < d; ++i) metric[i * d + i] = 1.0;
  if (!stats.o_proj_metric.empty())
    std::copy_n(stats.o_proj_metric.begin() + static_cast<std::ptrdiff_t>(head * d * d), d * d, metric.begin());
  return metric;
}

/// Rotary pairs of keys, whose two channels share a factor; empty for values.
ChannelPairs pairs_of(const LayerGeometry& geometry, Side side) {
  ChannelPairs pairs;
  if (side == Side::v || geometry.rope.layout == RopeLayout::none) return pairs;
  const std::vector<RopeBlock> blocks = rope_blocks(geometry);  // the rotary pairs come first
  for (std::size_t i = 0; i < static_cast<std::size_t>(geometry.rope.dim / 2); ++i)
    pairs.emplace_back(blocks[i].first, blocks[i].second);
  return pairs;
}

/// a^T m a
MomentSum moved(const MomentSum& sum, const Doubles& a) {
  MomentSum result(sum.dim);
  result.sum = turned(sum.sum, a, sum.dim);
  result.mean.assign(sum.mean.size(), 0.0);
  const auto d = static_cast<std::size_t>(sum.dim);
  for (std::size_t i = 0; i < d; ++i)
    for (std::size_t j = 0; j < d; ++j) result.mean[j] += sum.mean[i] * a[i * d + j];
  result.weight = sum.weight;
  return result;
}

/// Rows [n, H, D] with those of each head multiplied by its matrix, in double, rounded to float once.
SampledRows moved(const SampledRows& rows, const std::vector<const Doubles*>& matrices) {
  SampledRows result{DType::f32, rows.heads, rows.dim, {}};
  const auto d = static_cast<std::size_t>(rows.dim), heads = static_cast<std::size_t>(rows.heads);
  const std::size_t count = rows.raw.size() / (heads * d * size_of(rows.dtype));
  std::vector<float> all(count * heads * d);
  parallel_for(rows.heads, [&](std::int64_t h) {
    const std::vector<float> own = rows.head(static_cast<int>(h));
    const Doubles& matrix = *matrices[static_cast<std::size_t>(h)];
    Doubles sum(d);
    for (std::size_t t = 0; t < count; ++t) {
      std::fill(sum.begin(), sum.end(), 0.0);
      for (std::size_t i = 0; i < d; ++i)
        for (std::size_t j = 0; j < d; ++j) sum[j] += double{own[t * d + i]} * matrix[i * d + j];
      std::copy(sum.begin(), sum.end(),
                all.begin() + static_cast<std::ptrdiff_t>((t * heads + static_cast<std::size_t>(h)) * d));
    }
  });
  result.raw.resize(all.size() * sizeof(float));
  std::memcpy(result.raw.data(), all.data(), result.raw.size());
  return result;
}

/// One KV head in new coordinates. @param transform  null: the coordinates are the old ones
HeadView head_view(const LayerStats& stats, Side side, std::size_t head, const HeadTransform* transform) {
  const int dim = dim_of(stats, side);
  HeadView view;
  // A^-T, which multiplies queries and errors of outputs.
  const Doubles dual = transform != nullptr ? transposed(transform->inverse, dim) : Doubles{};
  for (const auto& [which, sums] : stats.moments) {
    if (side_of(which) != side) continue;
    const bool of_queries = which == Moment::query || which == Moment::scored_query;
    view.moments[which] = transform == nullptr ? sums[head] : moved(sums[head], of_queries ? dual : transform->matrix);
  }
  if (side == Side::k) return view;
  view.metric = metric_of(stats, side, head);
  if (transform != nullptr) view.metric = turned(view.metric, dual, dim);
  return view;
}

/// The side's statistics in new coordinates, without rows. @param kinds  of each entry
std::unique_ptr<const LayerStats> transformed(const HeadTransforms& transforms,
                                              const std::vector<TransformKind>& kinds) {
  const LayerStats& stats = transforms.stats();
  auto view = std::make_unique<LayerStats>();
  view->layer = stats.layer, view->geometry = stats.geometry, view->has_values = stats.has_values;
  view->tokens = stats.tokens, view->sequences = stats.sequences, view->content_hash = stats.content_hash;
  view->sample.key = stats.sample.key, view->sample.token = stats.sample.token;
  view->sample.value_weight = stats.sample.value_weight;
  for (std::size_t h = 0; h < static_cast<std::size_t>(stats.geometry.num_kv_heads); ++h) {
    const HeadView& head = transforms.view(kinds[transforms.entry_of(h)], h);
    for (const auto& [which, sum] : head.moments) view->moments[which].push_back(sum);
    view->o_proj_metric.insert(view->o_proj_metric.end(), head.metric.begin(), head.metric.end());
  }
  return view;
}

std::string kind_name(const std::vector<TransformKind>& kinds) {
  const bool alike = std::all_of(kinds.begin(), kinds.end(), [&](TransformKind kind) { return kind == kinds.front(); });
  return alike ? to_string(kinds.front()) : "mixed";
}

/// The recipe with the letter of the transform in front.
std::string prefixed(const std::string& kind, const std::string& recipe) {
  const std::string letter = kind == "diagonal" ? "D" : "B";
  return recipe == "I" ? letter : letter + "*" + recipe;
}

/// [D, D] inverse of the float32 `matrix`: one Newton step from `inverse`, the inverse of the unrounded matrix.
Doubles refined_inverse(const Doubles& inverse, std::span<const float> matrix, int dim) {
  const Doubles rounded(matrix.begin(), matrix.end());
  Doubles correction = product(rounded, inverse, dim);
  const auto d = static_cast<std::size_t>(dim);
  for (double& value : correction) value = -value;
  for (std::size_t i = 0; i < d; ++i) correction[i * d + i] += 2.0;
  return product(inverse, correction, dim);
}

}  // namespace

struct HeadTransforms::EntryMoments {
  Doubles covariance, metric, mean;
  std::int64_t tokens = 0;
};

std::vector<HeadTransforms::EntryMoments> HeadTransforms::entry_moments(const LayerStats& stats, const Options& options,
                                                                        Side side) {
  const std::vector<MomentSum>& rows = stats.moment(side == Side::k ? Moment::key : Moment::value);
  const std::vector<float> centers =
      options.side(side).center ? make_center(stats, options, side) : std::vector<float>{};
  const auto d = static_cast<std::size_t>(dim_of(stats, side));
  std::vector<EntryMoments> entries;
  for (std::size_t h = 0; h < rows.size(); ++h) {
    const std::size_t entry = options.scope == Scope::layer ? 0 : h;
    Doubles center;
    if (!centers.empty())
      center.assign(centers.begin() + static_cast<std::ptrdiff_t>(entry * d),
                    centers.begin() + static_cast<std::ptrdiff_t>((entry + 1) * d));
    EntryMoments own{mean_moment(rows[h], center), metric_of(stats, side, h), mean_vector(rows[h]),
                     static_cast<std::int64_t>(rows[h].weight)};
    if (entry == entries.size()) {
      entries.push_back(std::move(own));
      continue;
    }
    add_to(entries[entry].covariance, own.covariance);
    add_to(entries[entry].metric, own.metric);
    add_to(entries[entry].mean, own.mean);
    entries[entry].tokens += own.tokens;
  }
  if (options.scope == Scope::layer)
    for (Doubles* sum : {&entries[0].covariance, &entries[0].metric, &entries[0].mean})
      for (double& value : *sum) value /= static_cast<double>(rows.size());
  return entries;
}

void HeadTransforms::prepare(const std::vector<TransformKind>& kinds) {
  std::vector<std::size_t> missing;
  for (std::size_t entry = 0; entry < kinds.size(); ++entry)
    if (!transforms_.contains({kinds[entry], entry})) missing.push_back(entry);
  if (missing.empty()) return;
  const int dim = dim_of(stats_, side_);
  const auto d = static_cast<std::size_t>(dim), heads = static_cast<std::size_t>(stats_.geometry.num_kv_heads);
  const std::vector<EntryMoments> moments = entry_moments(stats_, options_, side_);
  const ChannelPairs pairs = pairs_of(stats_.geometry, side_);
  std::vector<HeadTransform> found(missing.size());
  std::vector<std::map<std::size_t, HeadView>> views(missing.size());
  const auto find = [&](std::size_t i) {
    const std::size_t entry = missing[i];
    const EntryMoments& own = moments[entry];
    HeadTransform& transform = found[i];
    switch (kinds[entry]) {
      case TransformKind::orthogonal:  // plans report the outlier gain of these heads, too
        transform.outlier_gain = outlier_gain(own.covariance, own.metric, dim, own.tokens);
        transform.scale.assign(d, 1.0);
        transform.matrix.assign(d * d, 0.0);
        for (std::size_t j = 0; j < d; ++j) transform.matrix[j * d + j] = 1.0;
        transform.inverse = transform.matrix;
        break;
      case TransformKind::diagonal:
        transform = diagonal_transform(own.covariance, own.metric, dim, own.tokens, pairs);
        break;
      case TransformKind::balanced:
      case TransformKind::klt:
        transform = balanced_transform(own.covariance, own.metric, own.mean, dim, own.tokens, kMostCondition);
        break;
    }
    const bool changes = kinds[entry] != TransformKind::orthogonal;
    for (std::size_t h = 0; h < heads; ++h)
      if (entry_of(h) == entry) views[i][h] = head_view(stats_, side_, h, changes ? &transform : nullptr);
  };
  try {
    parallel_for(static_cast<std::int64_t>(missing.size()), [&](std::int64_t i) { find(static_cast<std::size_t>(i)); });
  } catch (const Error& error) {
    throw Error{error.kind(), fmt::format("layer {} {}: {}", stats_.layer, name(side_), error.what()), error.hint()};
  }
  for (std::size_t i = 0; i < missing.size(); ++i) {
    const TransformKind kind = kinds[missing[i]];
    transforms_[{kind, missing[i]}] = std::move(found[i]);
    for (auto& [head, view] : views[i]) views_[{kind, head}] = std::move(view);
  }
}

SideView::SideView(const LayerStats& stats, const Options& options, Side side)
    : original_(stats),
      side_(side),
      kinds_(options.scope == Scope::layer ? 1 : static_cast<std::size_t>(stats.geometry.num_kv_heads),
             options.side(side).transform) {
  HeadTransforms transforms(stats, options, side);
  make_view(transforms);
}

SideView::SideView(HeadTransforms& transforms, std::vector<TransformKind> kinds)
    : original_(transforms.stats()), side_(transforms.side()), kinds_(std::move(kinds)) {
  make_view(transforms);
}

void SideView::make_view(HeadTransforms& transforms) {
  if (std::all_of(kinds_.begin(), kinds_.end(), [](TransformKind kind) { return kind == TransformKind::orthogonal; }))
    return;
  transforms.prepare(kinds_);
  for (std::size_t entry = 0; entry < kinds_.size(); ++entry)
    heads_.push_back(transforms.transform(kinds_[entry], entry));
  view_ = transformed(transforms, kinds_);
}

const SampledRows& SideView::sample() const {
  const SampledRows& rows = side_ == Side::k ? original_.sample.k : original_.sample.v;
  if (is_orthogonal()) return rows;
  std::call_once(sampled_, [&] {
    std::vector<const Doubles*> matrices;
    for (int h = 0; h < original_.geometry.num_kv_heads; ++h)
      matrices.push_back(&heads_[heads_.size() == 1 ? 0 : static_cast<std::size_t>(h)].matrix);
    sample_ = moved(rows, matrices);
  });
  return sample_;
}

void SideView::compose(TensorPlan& plan, const Options& options) const {
  if (is_orthogonal()) return;
  const int dim = dim_of(original_, side_);
  const auto d = static_cast<std::size_t>(dim);
  Rotation& rotation = plan.rotation;
  if (!plan.center.empty()) plan.center = make_center(original_, options, side_);
  MetricTransform told{.kind = kind_name(kinds_), .outlier_gain = {}, .condition = {}};
  const bool diagonal =
      std::all_of(heads_.begin(), heads_.end(), [](const HeadTransform& head) { return !head.scale.empty(); });
  if (diagonal && rotation.kind != RotationKind::dense) {
    for (const HeadTransform& head : heads_)
      rotation.channel_scale.insert(rotation.channel_scale.end(), head.scale.begin(), head.scale.end());
  } else {
    std::vector<float> matrix(heads_.size() * d * d), inverse(heads_.size() * d * d);
    parallel_for(static_cast<std::int64_t>(heads_.size()), [&](std::int64_t index) {
      const auto h = static_cast<std::size_t>(index);
      const Doubles own = rotation_matrix(rotation, static_cast<int>(h), dim);
      const Doubles a = own.empty() ? heads_[h].matrix : product(heads_[h].matrix, own, dim);
      const Doubles back = own.empty() ? heads_[h].inverse : product(transposed(own, dim), heads_[h].inverse, dim);
      const auto rounded = std::span(matrix).subspan(h * d * d, d * d);
      std::copy(a.begin(), a.end(), rounded.begin());
      const Doubles refined = refined_inverse(back, rounded, dim);
      std::copy(refined.begin(), refined.end(), inverse.begin() + static_cast<std::ptrdiff_t>(h * d * d));
    });
    rotation.kind = RotationKind::dense;
    rotation.matrix = std::move(matrix);
    rotation.inverse = std::move(inverse);
    rotation.signs.clear();
  }
  // An eigenbasis in the transform's coordinates does not explain the composed matrix.
  rotation.eigenbasis.clear();
  rotation.spectrum.clear();
  rotation.sign_choice.clear();
  rotation.target.clear();
  rotation.recipe = prefixed(told.kind, rotation.recipe);
  for (std::size_t h = 0; h < heads_.size(); ++h) {
    told.outlier_gain.push_back(heads_[h].outlier_gain);
    told.condition.push_back(transform_condition(rotation, static_cast<int>(h), dim));
  }
  plan.transform = std::move(told);
}

std::vector<double> outlier_gains(const LayerStats& stats, const Options& options, Side side) {
  const std::vector<HeadTransforms::EntryMoments> moments = HeadTransforms::entry_moments(stats, options, side);
  std::vector<double> gains(moments.size());
  parallel_for(static_cast<std::int64_t>(moments.size()), [&](std::int64_t index) {
    const HeadTransforms::EntryMoments& own = moments[static_cast<std::size_t>(index)];
    gains[static_cast<std::size_t>(index)] = outlier_gain(own.covariance, own.metric, dim_of(stats, side), own.tokens);
  });
  return gains;
}

}  // namespace kvq
