#include <kvq/codec/rotation_matrix.h>
#include <kvq/compute/eigh.h>
#include <kvq/core/error.h>
#include <kvq/eval/plan_distance.h>
#include <kvq/solve/spectral.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>
#include <type_traits>
#include <utility>

namespace kvq {

namespace {

using Matrix = std::vector<double>;

/// The larger number, where NaN is larger than any number, so that a maximum over heads keeps a NaN.
double larger(double a, double b) { return std::isnan(a) || a >= b ? a : b; }

void raise(std::optional<double>& largest, double value) { largest = larger(largest.value_or(0.0), value); }

/// KV head h's entry of [H, n] numbers, or of [1, n] numbers for all heads, widened to double.
Matrix entry_of(const std::vector<float>& values, int h, std::size_t size) {
  const float* first = values.data() + (values.size() == size ? 0 : static_cast<std::size_t>(h) * size);
  return {first, first + size};
}

double norm(std::span<const double> x) {
  double sum = 0.0;
  for (const double value : x) sum += value * value;
  return std::sqrt(sum);
}

double distance(std::span<const double> a, std::span<const double> b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum);
}

/// U diag(spectrum) U^T
Matrix covariance_of(const Rotation& rotation, int h, int dim) {
  const auto d = static_cast<std::size_t>(dim);
  const Matrix basis = entry_of(rotation.eigenbasis, h, d * d), spectrum = entry_of(rotation.spectrum, h, d);
  Matrix scaled = basis;
  for (std::size_t i = 0; i < d; ++i)
    for (std::size_t j = 0; j < d; ++j) scaled[i * d + j] *= spectrum[j];
  return product(scaled, transposed(basis, dim), dim);
}

Matrix diagonal_under(const Matrix& covariance, const Matrix& rotation, int dim) {
  const auto d = static_cast<std::size_t>(dim);
  const Matrix inside = turned(covariance, rotation, dim);
  Matrix diagonal;
  for (std::size_t j = 0; j < d; ++j) diagonal.push_back(inside[j * d + j]);
  return diagonal;
}

bool is_random(const std::string& recipe) {
  return recipe.find("Haar") != std::string::npos || recipe.find('S') != std::string::npos;
}

/// Part of a source channel's energy that R maps to channels of another width; the largest over all channels of a mixed
/// row. Not meaningful for heads that are mixed as a whole.
double gather_error(const TensorPlan& plan, int h, int dim) {
  const auto d = static_cast<std::size_t>(dim);
  Matrix factor = entry_of(plan.rotation.matrix, h, d * d);
  if (!plan.rotation.eigenbasis.empty())
    factor = product(transposed(entry_of(plan.rotation.eigenbasis, h, d * d), dim), factor, dim);
  const std::size_t first = static_cast<std::size_t>(plan.rotation.head_index(h)) * d;
  const std::uint8_t* bits = plan.allocation->channel_bits.data() + first;
  const std::uint16_t* order = plan.allocation->channel_order.data() + first;
  double worst = 0.0;
  for (std::size_t place = 0; place < d; ++place) {
    double inside = 0.0;
    for (std::size_t j = 0; j < d; ++j)
      if (bits[j] == bits[place]) inside += factor[order[place] * d + j] * factor[order[place] * d + j];
    worst = larger(worst, std::abs(1.0 - inside));
  }
  return worst;
}

/// Rows of one width: largest difference of |U^T R|, the absolute values of the recipe's other factors. Mixed rows: how
/// far gather_error() exceeds the reference's; 0 if the reference mixes the head as a whole.
double factor_distance(const TensorPlan& plan, const TensorPlan& reference, int h, int dim) {
  const auto d = static_cast<std::size_t>(dim);
  if (plan.allocation && reference.allocation) {
    constexpr double kMixedAsAWhole = 0.01;  // rounding leaves 1e-6
    const double expected = gather_error(reference, h, dim);
    return expected > kMixedAsAWhole ? 0.0 : larger(0.0, gather_error(plan, h, dim) - expected);
  }
  const auto factor = [&](const TensorPlan& own) {
    const Matrix matrix = entry_of(own.rotation.matrix, h, d * d);
    return own.rotation.eigenbasis.empty()
               ? matrix
               : product(transposed(entry_of(own.rotation.eigenbasis, h, d * d), dim), matrix, dim);
  };
  const Matrix a = factor(plan), b = factor(reference);
  double worst = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) worst = larger(worst, std::abs(std::abs(a[i]) - std::abs(b[i])));
  return worst;
}

/// Block index of each channel of x_rot. A block is the channels of one width, or of one scale group.
std::vector<std::size_t> blocks_of(const TensorPlan& plan, int h, int dim) {
  const auto d = static_cast<std::size_t>(dim);
  std::vector<std::size_t> blocks(d, 0);
  const auto group = static_cast<std::size_t>(group_size(plan.coder));
  for (std::size_t j = 0; j < d; ++j)
    if (plan.allocation)
      blocks[j] = plan.allocation->channel_bits[static_cast<std::size_t>(plan.rotation.head_index(h)) * d + j];
    else if (group > 0)
      blocks[j] = j / group;
  return blocks;
}

/// A^-1 A_other, which maps rows x A to rows x A_other.
Matrix between(const Rotation& rotation, const Rotation& other, int h, int dim) {
  const auto d = static_cast<std::size_t>(dim);
  Matrix back = inverse_matrix(rotation, rotation.head_index(h), dim);
  Matrix there = rotation_matrix(other, other.head_index(h), dim);
  if (!back.empty()) return there.empty() ? back : product(back, there, dim);
  if (!there.empty()) return there;
  back.assign(d * d, 0.0);
  for (std::size_t i = 0; i < d; ++i) back[i * d + i] = 1.0;
  return back;
}

/// Largest |eigenvalue - shift| of m m^T.
double largest_eigenvalue(const Matrix& m, double shift, int dim) {
  Matrix gram = product(m, transposed(m, dim), dim);
  if (!std::all_of(gram.begin(), gram.end(), [](double x) { return std::isfinite(x); }))
    return NAN;  // which eigh() cannot take
  const std::vector<double> values = eigh(gram, dim).values;
  return std::max(std::abs(values.front() - shift), std::abs(values.back() - shift));
}

/// How far a map is from orthogonal inside the blocks and zero outside.
double block_distance(Matrix map, const std::vector<std::size_t>& blocks) {
  const std::size_t d = blocks.size();
  Matrix outside(d * d, 0.0);
  for (std::size_t i = 0; i < d; ++i)
    for (std::size_t j = 0; j < d; ++j)
      if (blocks[i] != blocks[j]) std::swap(map[i * d + j], outside[i * d + j]);
  const int dim = static_cast<int>(d);
  const double inside = largest_eigenvalue(map, 1.0, dim);
  return blocks.front() == blocks.back() ? inside : larger(inside, std::sqrt(largest_eigenvalue(outside, 0.0, dim)));
}

void compare_rotations(const TensorPlan& plan, const TensorPlan& reference, int heads, int dim, PlanDistance& found) {
  const Rotation &own = plan.rotation, &other = reference.rotation;
  const auto d = static_cast<std::size_t>(dim);
  if (own.kind == RotationKind::dense) found.orthogonality = orthogonality_error(own, dim);
  for (int h = 0; h < heads && !own.inverse.empty(); ++h) {
    const int entry = own.head_index(h);
    raise(found.orthogonality, inverse_error(own, entry, dim) / transform_condition(own, entry, dim));
  }
  const bool orthogonal = own.is_orthogonal() && other.is_orthogonal();
  const bool both_dense = own.kind == RotationKind::dense && other.kind == RotationKind::dense;
  const bool both_spectral = !own.eigenbasis.empty() && !other.eigenbasis.empty();
  for (int h = 0; h < heads; ++h) {
    if (both_spectral) {
      const Matrix mine = covariance_of(own, h, dim), theirs = covariance_of(other, h, dim);
      raise(found.covariance, distance(mine, theirs) / std::max(norm(theirs), 1e-300));
      const auto spectrum = std::span(other.spectrum).subspan(static_cast<std::size_t>(other.head_index(h)) * d, d);
      double trace = 0.0;
      for (const float value : spectrum) trace += static_cast<double>(value);
      const std::vector<std::size_t> borders = eigenspaces(spectrum);
      const Matrix a = entry_of(own.eigenbasis, h, d * d), b = entry_of(other.eigenbasis, h, d * d);
      for (std::size_t s = 0; s + 1 < borders.size(); ++s) {
        double held = 0.0;
        for (std::size_t j = borders[s]; j < borders[s + 1]; ++j) held += static_cast<double>(spectrum[j]);
        if (!(held < 0.01 * trace)) raise(found.angle, principal_angle(a, b, dim, borders[s], borders[s + 1]));
      }
      if (both_dense && !is_random(own.recipe) && !is_random(other.recipe)) {
        const Matrix one = diagonal_under(theirs, entry_of(own.matrix, h, d * d), dim),
                     two = diagonal_under(theirs, entry_of(other.matrix, h, d * d), dim);
        double change = 0.0;
        for (std::size_t j = 0; j < d; ++j) change += std::abs(one[j] - two[j]);
        raise(found.importance, change / std::max(trace, 1e-300));
      }
    }
    if (!orthogonal) raise(found.gauge, gauge_distance(plan, reference, h, dim));
    const bool mixed = plan.allocation && reference.allocation;
    if (orthogonal && both_dense && (mixed || (own.recipe == other.recipe && !is_random(own.recipe))))
      raise(found.factor, factor_distance(plan, reference, h, dim));
  }
}

void compare_transforms(const TensorPlan& plan, const TensorPlan& reference, int heads, int dim, PlanDistance& found) {
  const std::vector<float>&own = plan.rotation.channel_scale, &other = reference.rotation.channel_scale;
  const auto d = static_cast<std::size_t>(dim);
  for (int h = 0; h < heads; ++h) {
    if (!own.empty() && !other.empty()) {
      const Matrix a = entry_of(own, h, d), b = entry_of(other, h, d);
      for (std::size_t j = 0; j < d; ++j) raise(found.channel_scale, std::abs(std::log2(a[j] / b[j])));
    }
    if (plan.transform && reference.transform) {
      const auto gain = [h](const TensorPlan& side) {
        return side.transform->outlier_gain[static_cast<std::size_t>(side.rotation.head_index(h))];
      };
      raise(found.outlier_gain, std::abs(gain(plan) / gain(reference) - 1.0));
    }
  }
}

/// Largest distance of an entry of either table from the nearest entry of the other table.
double table_distance(std::span<const float> a, std::span<const float> b) {
  double worst = 0.0;
  for (const auto& [from, to] : {std::pair{a, b}, {b, a}})
    for (const float x : from) {
      double nearest = HUGE_VAL;
      for (const float y : to) nearest = std::min(nearest, std::abs(static_cast<double>(x) - static_cast<double>(y)));
      worst = larger(worst, std::isnan(x) ? NAN : nearest);
    }
  return worst;
}

/// The table of KV head h.
std::span<const float> table_of(const CodebookCoder& coder, const std::vector<float>& table, int bits,
                                const Rotation& rotation, int h) {
  const std::size_t entries = std::size_t{1} << bits;
  return std::span(table).subspan(coder.per_head ? static_cast<std::size_t>(rotation.head_index(h)) * entries : 0,
                                  entries);
}

/// Distances of the tables that two coders of one kind share.
struct CompareCoders {
  const TensorPlan& plan;
  const TensorPlan& reference;
  int heads;
  PlanDistance& found;

  void operator()(const ExactCoder&, const ExactCoder&) const {}
  void operator()(const UniformCoder&, const UniformCoder&) const {}
  void operator()(const CodebookCoder& a, const CodebookCoder& b) const {
    for (const auto& [bits, table] : a.tables) {
      const auto other = b.tables.find(bits);
      if (other == b.tables.end()) continue;
      for (int h = 0; h < heads; ++h)
        raise(found.codebook, table_distance(table_of(a, table, bits, plan.rotation, h),
                                             table_of(b, other->second, bits, reference.rotation, h)));
    }
  }
  void operator()(const TrellisCoder& a, const TrellisCoder& b) const {
    for (const TrellisTaps& taps : a.taps) {
      const TrellisTaps* other = b.find(taps.bits);
      if (other == nullptr || other->theta.size() != taps.theta.size()) continue;
      for (std::size_t i = 0; i < taps.theta.size(); ++i)
        raise(found.trellis, std::abs(static_cast<double>(taps.theta[i]) - static_cast<double>(other->theta[i])));
    }
  }
  template <typename A, typename B>
    requires(!std::is_same_v<A, B>)
  void operator()(const A&, const B&) const {}
};

/// Mean distance of the rows of `a` from the nearest row of `b`.
double mean_nearest(std::span<const float> a, std::span<const float> b, std::size_t d) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); i += d) {
    double nearest = HUGE_VAL;
    for (std::size_t j = 0; j < b.size(); j += d) {
      double squared = 0.0;
      for (std::size_t c = 0; c < d && squared < nearest; ++c) {
        const double gap = static_cast<double>(a[i + c]) - static_cast<double>(b[j + c]);
        squared += gap * gap;
      }
      nearest = std::min(nearest, squared);
    }
    sum += std::sqrt(nearest);
  }
  const std::size_t rows = a.size() / d;
  return sum / static_cast<double>(rows);
}

double spread_of(std::span<const float> rows, std::size_t d) {
  std::vector<double> mean(d, 0.0);
  const std::size_t num_rows = rows.size() / d;
  const auto count = static_cast<double>(num_rows);
  for (std::size_t i = 0; i < rows.size(); ++i) mean[i % d] += static_cast<double>(rows[i]) / count;
  double sum = 0.0;
  for (std::size_t i = 0; i < rows.size(); i += d) {
    double squared = 0.0;
    for (std::size_t c = 0; c < d; ++c)
      squared += (static_cast<double>(rows[i + c]) - mean[c]) * (static_cast<double>(rows[i + c]) - mean[c]);
    sum += std::sqrt(squared);
  }
  return sum / count;
}

/// Centroids [C, n] of KV head h, or of all heads side by side where one index serves all.
std::vector<float> centroid_rows(const Centroids& centroids, const Rotation& rotation, int h, int heads,
                                 std::size_t d) {
  const auto count = static_cast<std::size_t>(centroids.count);
  std::vector<float> rows;
  for (std::size_t c = 0; c < count; ++c)
    for (int head = centroids.joint ? 0 : h; head < (centroids.joint ? heads : h + 1); ++head) {
      const float* first =
          centroids.values.data() + (static_cast<std::size_t>(rotation.head_index(head)) * count + c) * d;
      rows.insert(rows.end(), first, first + d);
    }
  return rows;
}

void compare_offsets(const TensorPlan& plan, const TensorPlan& reference, int heads, int dim, PlanDistance& found) {
  const auto d = static_cast<std::size_t>(dim);
  for (int h = 0; h < heads && !plan.center.empty() && !reference.center.empty(); ++h) {
    const Matrix a = entry_of(plan.center, h, d), b = entry_of(reference.center, h, d);
    raise(found.center, distance(a, b) / std::max(norm(b), 1e-300));
  }
  if (!plan.centroids || !reference.centroids || plan.centroids->joint != reference.centroids->joint) return;
  for (int h = 0; h < (plan.centroids->joint ? 1 : heads); ++h) {
    const std::vector<float> a = centroid_rows(*plan.centroids, plan.rotation, h, heads, d),
                             b = centroid_rows(*reference.centroids, reference.rotation, h, heads, d);
    const std::size_t width = plan.centroids->joint ? d * static_cast<std::size_t>(heads) : d;
    raise(found.centroids,
          0.5 * (mean_nearest(a, b, width) + mean_nearest(b, a, width)) / std::max(spread_of(b, width), 1e-300));
  }
}

}  // namespace

double gauge_distance(const TensorPlan& plan, const TensorPlan& reference, int kv_head, int dim) {
  std::vector<std::size_t> blocks = blocks_of(plan, kv_head, dim);
  if (blocks != blocks_of(reference, kv_head, dim)) blocks.assign(static_cast<std::size_t>(dim), 0);
  const Rotation &a = plan.rotation, &b = reference.rotation;
  return larger(block_distance(between(a, b, kv_head, dim), blocks),
                block_distance(between(b, a, kv_head, dim), blocks));
}

std::vector<std::size_t> eigenspaces(std::span<const float> spectrum, double gap) {
  std::vector<std::size_t> borders{0};
  for (std::size_t j = 1; j < spectrum.size(); ++j) {
    const double larger = spectrum[j - 1], smaller = spectrum[j];
    if (larger - smaller >= gap * std::abs(larger)) borders.push_back(j);
  }
  borders.push_back(spectrum.size());
  return borders;
}

double principal_angle(std::span<const double> a, std::span<const double> b, int dim, std::size_t first,
                       std::size_t end) {
  const auto d = static_cast<std::size_t>(dim), n = end - first;
  KVQ_ASSERT(n >= 1 && end <= d);
  // `rest` is the part of each column of a outside of the span of b; its largest singular value is the sine of the
  // angle.
  Matrix cross(n * n, 0.0), gram(n * n, 0.0), rest(d * n);
  for (std::size_t i = 0; i < n; ++i)
    for (std::size_t j = 0; j < n; ++j)
      for (std::size_t r = 0; r < d; ++r) cross[i * n + j] += b[r * d + first + i] * a[r * d + first + j];
  for (std::size_t r = 0; r < d; ++r)
    for (std::size_t j = 0; j < n; ++j) {
      rest[r * n + j] = a[r * d + first + j];
      for (std::size_t i = 0; i < n; ++i) rest[r * n + j] -= b[r * d + first + i] * cross[i * n + j];
    }
  for (std::size_t i = 0; i < n; ++i)
    for (std::size_t j = 0; j < n; ++j)
      for (std::size_t r = 0; r < d; ++r) gram[i * n + j] += rest[r * n + i] * rest[r * n + j];
  if (!std::all_of(gram.begin(), gram.end(), [](double x) { return std::isfinite(x); }))
    return NAN;  // which eigh() cannot take
  const double sine = std::sqrt(std::clamp(eigh(gram, static_cast<int>(n)).values.front(), 0.0, 1.0));
  return std::asin(sine) * 180.0 / std::numbers::pi;
}

PlanDistance plan_distance(const TensorPlan& plan, const TensorPlan& reference, int num_kv_heads, int dim) {
  PlanDistance found;
  compare_rotations(plan, reference, num_kv_heads, dim, found);
  compare_transforms(plan, reference, num_kv_heads, dim, found);
  compare_offsets(plan, reference, num_kv_heads, dim, found);
  std::visit(CompareCoders{plan, reference, num_kv_heads, found}, plan.coder, reference.coder);
  for (int h = 0; h < num_kv_heads && !plan.clip_ratio.empty() && !reference.clip_ratio.empty(); ++h) {
    const auto ratio = [h](const TensorPlan& own) {
      return own.clip_ratio[static_cast<std::size_t>(own.rotation.head_index(h))];
    };
    raise(found.clip, std::abs(ratio(plan) - ratio(reference)));
  }
  return found;
}

}  // namespace kvq
