#include <kvq/core/error.h>
#include <kvq/methods/centroids.h>
#include <kvq/solve/spectral.h>

#include <algorithm>

namespace kvq {

namespace {

KMeansOptions kmeans_options(const RotationRequest& request, int h) {
  const Options& options = request.options;
  return {
      .clusters = options.side(request.side).kmeans,
      .restarts = options.kmeans_restarts,
      .seed = options.seed,
      .layer = request.stats.layer,
      .head = stream(h, request.side),
  };
}

void expect_rows(const RotationRequest& request, std::int64_t rows) {
  const int wanted = request.options.side(request.side).kmeans;
  if (rows < wanted)
    throw Error{ErrorKind::usage,
                fmt::format("layer {} {}: --kmeans {} needs at least as many rows, the sample has {}",
                            request.stats.layer, name(request.side), wanted, rows),
                "--sample-tokens keeps more tokens of the dump"};
}

/// The rows to cluster: those of all heads that share entry h, one after another, rotated if kmeans_after.
std::vector<float> rows_of_entry(const RotationRequest& request, const Rotation& rotation, int h) {
  std::vector<float> rows;
  const std::vector<double> matrix =
      request.options.kmeans_after ? rotation_matrix(rotation, h, request.dim()) : std::vector<double>{};
  for (const std::size_t member : request.members(h)) {
    FitData plain{.dim = request.dim(), .rows = request.data[member].rows};
    const std::vector<float> turned = matrix.empty() ? plain.rows : rotate(plain, matrix, {}).rows;
    rows.insert(rows.end(), turned.begin(), turned.end());
  }
  return rows;
}

/// Rotates centroids back if kmeans_after, because plans store them unrotated.
std::vector<float> unrotated(const RotationRequest& request, const Rotation& rotation, int h,
                             std::vector<float> centroids) {
  const std::vector<double> matrix =
      request.options.kmeans_after ? rotation_matrix(rotation, h, request.dim()) : std::vector<double>{};
  if (matrix.empty()) return centroids;
  return rotate(FitData{.dim = request.dim(), .rows = std::move(centroids)}, transposed(matrix, request.dim()), {})
      .rows;
}

/// Sum of squared distances of rows from their mean.
double spread(const std::vector<float>& rows, int dim) {
  const auto d = static_cast<std::size_t>(dim);
  const std::size_t count = rows.size() / d;
  const auto n = static_cast<double>(count);
  double total = 0.0;
  for (std::size_t j = 0; j < d; ++j) {
    double sum = 0.0, squares = 0.0;
    for (std::size_t i = j; i < rows.size(); i += d) {
      sum += double{rows[i]};
      squares += double{rows[i]} * double{rows[i]};
    }
    total += squares - sum * sum / n;
  }
  return total;
}

/// Rows of all heads of a token side by side, [n, H D].
std::vector<float> side_by_side(const RotationRequest& request, const Rotation& rotation) {
  const auto d = static_cast<std::size_t>(request.dim()), heads = request.data.size();
  const auto n = static_cast<std::size_t>(request.data.front().count());
  std::vector<float> joint(n * heads * d);
  for (std::size_t h = 0; h < heads; ++h) {
    const std::vector<float> rows = rows_of_entry(request, rotation, static_cast<int>(h));
    for (std::size_t t = 0; t < n; ++t)
      std::copy_n(rows.begin() + static_cast<std::ptrdiff_t>(t * d), d,
                  joint.begin() + static_cast<std::ptrdiff_t>((t * heads + h) * d));
  }
  return joint;
}

struct Clustering {
  std::vector<float> values;                          ///< [H, C, D] unrotated
  std::vector<std::vector<std::int32_t>> assignment;  ///< per KV head, of its rows
};

Clustering cluster_heads(const RotationRequest& request, const Rotation& rotation, Centroids& centroids) {
  Clustering result{{}, std::vector<std::vector<std::int32_t>>(request.data.size())};
  std::vector<std::vector<float>> rows_of_entries;
  std::vector<ClusterTask> tasks;
  for (int h = 0; h < request.heads(); ++h) {
    rows_of_entries.push_back(rows_of_entry(request, rotation, h));
    expect_rows(request, static_cast<std::int64_t>(rows_of_entries.back().size()) / request.dim());
    tasks.push_back({rows_of_entries.back(), request.dim(), kmeans_options(request, h)});
  }
  const std::vector<KMeansResult> results = request.backend.kmeans(tasks);
  for (int h = 0; h < request.heads(); ++h) {
    const std::vector<float>& rows = rows_of_entries[static_cast<std::size_t>(h)];
    const KMeansResult& found = results[static_cast<std::size_t>(h)];
    const std::vector<float> values = unrotated(request, rotation, h, found.centroids);
    result.values.insert(result.values.end(), values.begin(), values.end());
    const double all = spread(rows, request.dim());
    centroids.inertia.push_back(all > 0.0 ? found.inertia / all : 0.0);
    auto next = found.assignment.begin();
    for (const std::size_t member : request.members(h)) {
      const auto count = static_cast<std::ptrdiff_t>(request.data[member].count());
      result.assignment[member].assign(next, next + count);
      next += count;
    }
  }
  return result;
}

Clustering cluster_jointly(const RotationRequest& request, const Rotation& rotation, Centroids& centroids) {
  if (request.options.scope == Scope::layer)
    throw Error{ErrorKind::usage, "--kmeans-scope joint and --share layer exclude each other",
                "joint centroids have a part of their own for each head"};
  const auto d = static_cast<std::size_t>(request.dim()), heads = request.data.size();
  const std::vector<float> rows = side_by_side(request, rotation);
  expect_rows(request, request.data.front().count());
  const int wide = request.dim() * static_cast<int>(heads);
  const ClusterTask task{rows, wide, kmeans_options(request, 0)};
  const KMeansResult found = request.backend.kmeans(std::span(&task, 1)).front();
  Clustering result{{}, std::vector<std::vector<std::int32_t>>(heads, found.assignment)};
  const double all = spread(rows, wide);
  for (std::size_t h = 0; h < heads; ++h) {
    std::vector<float> own;
    for (int c = 0; c < centroids.count; ++c) {
      const auto start =
          found.centroids.begin() + static_cast<std::ptrdiff_t>((static_cast<std::size_t>(c) * heads + h) * d);
      own.insert(own.end(), start, start + static_cast<std::ptrdiff_t>(d));
    }
    own = unrotated(request, rotation, static_cast<int>(h), std::move(own));
    result.values.insert(result.values.end(), own.begin(), own.end());
    centroids.inertia.push_back(all > 0.0 ? found.inertia / all : 0.0);
  }
  return result;
}

}  // namespace

std::vector<FitData> add_centroids(TensorPlan& plan, const RotationRequest& request) {
  const Options& options = request.options;
  Centroids centroids{
      .count = options.side(request.side).kmeans,
      .joint = options.kmeans_joint,
      .after_rotation = options.kmeans_after,
  };
  Clustering clusters = centroids.joint ? cluster_jointly(request, plan.rotation, centroids)
                                        : cluster_heads(request, plan.rotation, centroids);
  centroids.values = std::move(clusters.values);
  std::vector<FitData> residuals = request.data;
  const auto d = static_cast<std::size_t>(request.dim());
  for (std::size_t member = 0; member < residuals.size(); ++member) {
    const std::size_t entry = options.scope == Scope::layer ? 0 : member;
    const float* table = centroids.values.data() + entry * static_cast<std::size_t>(centroids.count) * d;
    for (std::size_t t = 0; t < clusters.assignment[member].size(); ++t)
      for (std::size_t j = 0; j < d; ++j)
        residuals[member].rows[t * d + j] -= table[static_cast<std::size_t>(clusters.assignment[member][t]) * d + j];
  }
  plan.centroids = std::move(centroids);
  return residuals;
}

}  // namespace kvq
