#include <kvq/compute/cuda/kmeans.h>
#include <kvq/compute/cuda/kmeans_kernels.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace kvq::cuda {

namespace {

constexpr const char* kWhat = "k-means";

/// Most bytes of the tasks that run side by side, if more than one does.
constexpr std::size_t kBatchBytes = std::size_t{2} << 30;
/// Most rows of all runs: the sort has 32-bit positions.
constexpr std::int64_t kBatchRows = std::int64_t{1} << 30;

/// Parts of one piece of memory. The first pass adds up their sizes, the second one gives addresses.
class Arena {
 public:
  explicit Arena(std::byte* memory = nullptr) : memory_(memory) {}
  template <typename T>
  void place(T*& pointer, std::int64_t count) {
    constexpr std::size_t kAlignment = 256;
    if (memory_ != nullptr) pointer = reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += (static_cast<std::size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
  }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* memory_;
  std::size_t bytes_ = 0;
};

/// What the kernels read through pointers to const.
struct Inputs {
  float* rows = nullptr;
  double* uniforms = nullptr;
  int* moving = nullptr;
  std::uint32_t* sorted_keys = nullptr;
  std::int32_t *values = nullptr, *order = nullptr;  ///< row in its set of each key, and of each sorted key
  std::byte* sort_memory = nullptr;
};

std::int64_t mean_blocks(int dim) { return (dim + 127) / 128; }

/// Addresses, or with an empty arena sizes.
void place(Arena& arena, Clustering& c, Inputs& in) {
  const std::int64_t runs = c.runs, sets = c.sets, rows = runs * c.count, clusters = runs * c.clusters,
                     row_channels = sets * c.count * c.padded_dim;
  arena.place(in.rows, sets * c.count * c.dim);
  arena.place(c.middle, sets * c.dim);
  arena.place(c.largest, sets);
  arena.place(c.scale, sets);
  arena.place(c.centered, row_channels);
  arena.place(c.halves, row_channels);
  arena.place(c.norms, 2 * sets * c.count);
  arena.place(c.spread, sets);
  arena.place(in.uniforms, runs * (1 + std::int64_t{c.clusters - 1} * c.trials));
  for (int** numbers : {&c.draws, &c.best, &c.tried, &in.moving}) arena.place(*numbers, runs);
  arena.place(c.candidates, runs * c.trials);
  arena.place(c.seeds, clusters);
  for (float*& distances : c.distances) arena.place(distances, rows * c.trials);
  arena.place(c.block_sums, runs * c.trials * c.seed_blocks());
  for (float*& centroids : c.centroids) arena.place(centroids, clusters * c.dim);
  arena.place(c.centroid_halves, runs * c.padded_clusters * c.padded_dim);
  arena.place(c.squares, 2 * runs * c.padded_clusters);
  arena.place(c.reach, 2 * runs);
  arena.place(c.keys, rows);
  arena.place(c.open, 2 * rows);
  arena.place(c.num_open, 2);
  arena.place(in.sorted_keys, rows);
  arena.place(in.values, rows);
  arena.place(in.order, rows);
  arena.place(c.starts, clusters + 1);
  arena.place(c.own_distances, rows);
  arena.place(c.shifts, clusters * mean_blocks(c.dim));
  arena.place(c.states, runs);
  arena.place(in.sort_memory, static_cast<std::int64_t>(sort_bytes(rows)));
}

int round_up(int x, int to) { return (x + to - 1) / to * to; }

Clustering shape_of(const ClusterTask& task, int sets) {
  const KMeansOptions& options = task.options;
  Clustering c{.sets = sets,
               .runs = sets * options.restarts,
               .runs_of_set = options.restarts,
               .clusters = options.clusters,
               .dim = task.dim,
               .padded_dim = round_up(task.dim, kChannelTile),
               .padded_clusters = round_up(options.clusters, kCentroidTile),
               .count = static_cast<std::int64_t>(task.rows.size()) / task.dim};
  c.trials = seeding_trials(options.clusters);
  return c;
}

bool have_one_shape(const ClusterTask& a, const ClusterTask& b) {
  return a.dim == b.dim && a.rows.size() == b.rows.size() && a.options.clusters == b.options.clusters &&
         a.options.max_iterations == b.options.max_iterations && a.options.restarts == b.options.restarts;
}

/// Bytes of so many tasks side by side.
std::size_t bytes_of(const ClusterTask& task, int sets) {
  Clustering c = shape_of(task, sets);
  Inputs in;
  Arena arena;
  place(arena, c, in);
  return arena.bytes();
}

/// How many of the tasks have one shape and at most kBatchBytes and kBatchRows together, or 1.
int batch_size(std::span<const ClusterTask> tasks) {
  int sets = 1;
  while (sets < static_cast<int>(tasks.size()) &&
         have_one_shape(tasks.front(), tasks[static_cast<std::size_t>(sets)])) {
    const Clustering more = shape_of(tasks.front(), sets + 1);
    if (more.runs * more.count > kBatchRows || bytes_of(tasks.front(), sets + 1) > kBatchBytes) break;
    ++sets;
  }
  return sets;
}

/// Runs of tasks of one shape.
class Batch {
 public:
  Batch(Context& context, std::span<const ClusterTask> tasks)
      : context_(context), tasks_(tasks), c_(shape_of(tasks.front(), static_cast<int>(tasks.size()))) {
    Arena sizes;
    place(sizes, c_, in_);
    Arena arena(context.clusters.room<std::byte>(sizes.bytes(), kWhat));
    place(arena, c_, in_);
    c_.rows = in_.rows, c_.uniforms = in_.uniforms, c_.moving = in_.moving;
    c_.sorted_keys = in_.sorted_keys, c_.order = in_.order;
  }

  /// Uploads and centers rows. Returns whether the kernels can take them.
  /// @throws Error{numerical} for NaN or infinity
  bool prepare() {
    for (std::size_t s = 0; s < tasks_.size(); ++s) {
      const std::span<const float> rows = tasks_[s].rows;
      upload(in_.rows + s * rows.size(), rows);
    }
    count_up(in_.values, c_.runs * c_.count, c_.count, context_.stream());
    find_middle();
    measure_rows(c_, context_.stream());
    const auto sets = static_cast<std::size_t>(c_.sets);
    const std::vector<float> middle = context_.download(c_.middle, sets * static_cast<std::size_t>(c_.dim), kWhat),
                             largest = context_.download(c_.largest, sets, kWhat);
    if (!std::all_of(middle.begin(), middle.end(), [](float x) { return std::isfinite(x); }))
      throw Error{ErrorKind::numerical, "k-means: expected finite rows, found NaN or infinity"};
    std::vector<float> scale;
    for (const float x : largest) {
      // The largest magnitude becomes 128 to 256, far from the ends of float16's range.
      constexpr int kExponent = 8, kMostExponent = 100;
      int exponent = kExponent;
      if (x > 0.0f) std::frexp(x, &exponent);
      if (!std::isfinite(x) || std::abs(exponent) > kMostExponent) return false;
      scale.push_back(std::ldexp(1.0f, kExponent - exponent));
    }
    upload(c_.scale, std::span<const float>(scale));
    center_rows(c_, context_.stream());
    const std::vector<double> spread = context_.download(c_.spread, sets, kWhat);
    for (std::size_t s = 0; s < sets; ++s) {
      const double square = double{scale[s]} * double{scale[s]};
      still_.push_back(tasks_[s].options.tolerance * spread[s] / square / static_cast<double>(c_.count * c_.dim));
    }
    return true;
  }

  std::vector<KMeansResult> run() {
    seed();
    const auto runs = static_cast<std::size_t>(c_.runs);
    results_.assign(runs, {});
    std::vector<int> moving(runs, 1);
    check(cudaMemsetAsync(c_.states, 0, runs * sizeof(RunState), context_.stream()), kWhat);
    upload(in_.moving, std::span<const int>(moving));
    int from = 0;
    std::size_t left = runs;
    for (int i = 0; i < tasks_.front().options.max_iterations && left > 0; ++i, from = 1 - from) {
      step(from);
      const std::size_t before = left;
      for (std::size_t r = 0; r < runs; ++r) {
        if (moving[r] == 0) continue;
        ++results_[r].iterations;
        if (states_[r].total > still_[r / static_cast<std::size_t>(c_.runs_of_set)]) continue;
        moving[r] = 0;
        --left;
      }
      if (left < before) upload(in_.moving, std::span<const int>(moving));
    }
    upload(in_.moving, std::span<const int>(std::vector<int>(runs, 1)));
    assign_rows(c_, from, context_.stream());
    add_distances(c_, from, context_.stream());
    return take_best(from);
  }

 private:
  template <typename T>
  void upload(T* to, std::span<const T> from) {
    context_.upload_rows(reinterpret_cast<std::byte*>(to), reinterpret_cast<const std::byte*>(from.data()),
                         from.size_bytes(), from.size_bytes(), from.empty() ? 0 : 1, kWhat);
  }

  /// The mean of each set is that of a cluster that has all rows.
  void find_middle() {
    Clustering one = c_;
    one.runs = one.sets, one.runs_of_set = 1, one.clusters = 1;
    std::vector<std::int32_t> starts;
    for (int s = 0; s <= c_.sets; ++s) starts.push_back(static_cast<std::int32_t>(s * c_.count));
    upload(c_.starts, std::span<const std::int32_t>(starts));
    upload(in_.moving, std::span<const int>(std::vector<int>(static_cast<std::size_t>(c_.sets), 1)));
    one.order = in_.values;
    one.centroids[0] = one.centroids[1] = c_.middle;
    check(cudaMemsetAsync(c_.middle, 0, static_cast<std::size_t>(c_.sets * c_.dim) * sizeof(float), context_.stream()),
          kWhat);
    move_to_means(one, 0, context_.stream());
  }

  void seed() {
    std::vector<double> uniforms;
    const std::int64_t most = 1 + std::int64_t{c_.clusters - 1} * c_.trials;
    for (const ClusterTask& task : tasks_)
      for (int restart = 0; restart < c_.runs_of_set; ++restart) {
        RandomStream random = seeding_stream(task.options, restart);
        for (std::int64_t i = 0; i < most; ++i) uniforms.push_back(random.next_uniform());
      }
    upload(in_.uniforms, std::span<const double>(uniforms));
    choose_seeds(c_, context_.stream());
  }

  void sort_rows() {
    const std::int64_t rows = c_.runs * c_.count;
    const int bits = std::bit_width(static_cast<unsigned>(c_.runs * c_.clusters - 1));
    sort_pairs(in_.sort_memory, sort_bytes(rows), c_.keys, in_.sorted_keys, in_.values, in_.order, rows,
               std::max(bits, 1), context_.stream());
    find_starts(c_, context_.stream());
  }

  /// One step of Lloyd's algorithm of the runs that move. Clusters rarely become empty, so the means are there already
  /// when that is known.
  void step(int from) {
    assign_rows(c_, from, context_.stream());
    sort_rows();
    move_to_means(c_, from, context_.stream());
    read_states();
    if (std::all_of(states_.begin(), states_.end(), [](const RunState& run) { return run.empty == 0; })) return;
    repair_empty(c_, from, context_.stream());
    sort_rows();
    move_to_means(c_, from, context_.stream());
    read_states();
  }

  void read_states() {
    check(cudaGetLastError(), kWhat);
    states_ = context_.download_soon(c_.states, static_cast<std::size_t>(c_.runs), kWhat);
  }

  std::vector<KMeansResult> take_best(int from) {
    const auto runs = static_cast<std::size_t>(c_.runs), clusters = static_cast<std::size_t>(c_.clusters),
               size = clusters * static_cast<std::size_t>(c_.dim), count = static_cast<std::size_t>(c_.count),
               each = static_cast<std::size_t>(c_.runs_of_set);
    read_states();
    std::vector<KMeansResult> best;
    for (std::size_t first = 0; first < runs; first += each) {
      std::size_t r = first;
      for (std::size_t other = first + 1; other < first + each; ++other)
        if (states_[other].total < states_[r].total) r = other;
      KMeansResult result = std::move(results_[r]);
      result.inertia = states_[r].total;
      result.repaired = states_[r].repaired;
      result.centroids = context_.download(c_.centroids[from] + r * size, size, kWhat);
      for (const std::uint32_t key : context_.download(c_.keys + r * count, count, kWhat))
        result.assignment.push_back(static_cast<std::int32_t>(key - r * clusters));
      best.push_back(std::move(result));
    }
    return best;
  }

  Context& context_;
  std::span<const ClusterTask> tasks_;
  Clustering c_;
  Inputs in_;
  std::vector<double> still_;  ///< of each set: a run ends when its centroids move less
  std::vector<RunState> states_;
  std::vector<KMeansResult> results_;
};

}  // namespace

std::vector<KMeansResult> kmeans(Context& context, std::span<const ClusterTask> tasks, Backend& host) {
  for (const ClusterTask& task : tasks) {
    KVQ_ASSERT(task.dim >= 1 && task.rows.size() % static_cast<std::size_t>(task.dim) == 0);
    check_clusters(task.options, static_cast<std::int64_t>(task.rows.size()) / task.dim);
  }
  std::vector<KMeansResult> results;
  while (results.size() < tasks.size()) {
    const std::span<const ClusterTask> rest = tasks.subspan(results.size());
    std::vector<KMeansResult> found;
    if (const Clustering shape = shape_of(rest.front(), 1);
        shape.dim > kMostClusterDim || shape.runs * shape.count > kBatchRows) {
      found = host.kmeans(rest.first(1));
    } else {
      int sets = batch_size(rest);
      const auto bytes = [&] { return static_cast<std::int64_t>(bytes_of(rest.front(), sets)); };
      const Claim claim(context.lane, {static_cast<std::int64_t>(bytes_of(rest.front(), 1)), bytes(), kWhat});
      while (sets > 1 && bytes() > claim.bytes()) --sets;
      const std::span<const ClusterTask> own = rest.first(static_cast<std::size_t>(sets));
      Batch batch(context, own);
      found = batch.prepare() ? batch.run() : host.kmeans(own);
    }
    for (KMeansResult& result : found) results.push_back(std::move(result));
  }
  return results;
}

std::vector<float> sorted(Context& context, std::vector<float> numbers) {
  const auto count = static_cast<std::int64_t>(numbers.size());
  if (count == 0) return numbers;
  Arena sizes;
  float *from = nullptr, *to = nullptr;
  std::byte* memory = nullptr;
  const auto place_all = [&](Arena& arena) {
    arena.place(from, count);
    arena.place(to, count);
    arena.place(memory, static_cast<std::int64_t>(sort_bytes(count)));
  };
  place_all(sizes);
  const auto bytes = static_cast<std::int64_t>(sizes.bytes());
  const Claim claim(context.lane, {bytes, bytes, "sort"});
  Arena arena(context.clusters.room<std::byte>(sizes.bytes(), "sort"));
  place_all(arena);
  context.upload_rows(reinterpret_cast<std::byte*>(from), reinterpret_cast<const std::byte*>(numbers.data()),
                      numbers.size() * sizeof(float), numbers.size() * sizeof(float), 1, "sort");
  sort_numbers(memory, sort_bytes(count), from, to, count, context.stream());
  check(cudaGetLastError(), "sort");
  return context.download(to, numbers.size(), "sort");
}

}  // namespace kvq::cuda
