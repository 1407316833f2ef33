#include <kvq/codec/poisoned.h>
#include <kvq/codec/rotation_matrix.h>
#include <kvq/compute/backend.h>
#include <kvq/compute/parallel.h>
#include <kvq/compute/tensor_moments.h>
#include <kvq/core/error.h>

#include <algorithm>
#include <utility>

namespace kvq {

namespace {

/// f(i) of all i in [0, count), computed in parallel.
template <typename F>
auto each(std::size_t count, F f) {
  std::vector<decltype(f(std::size_t{0}))> results(count);
  parallel_for(static_cast<std::int64_t>(count),
               [&](std::int64_t i) { results[static_cast<std::size_t>(i)] = f(static_cast<std::size_t>(i)); });
  return results;
}

/// reconstruct() with products in float instead of double: faster, and equal up to rounding.
std::vector<float> coded(const TensorPlan& plan, int h, const std::vector<float>& rows, int dim) {
  const auto d = static_cast<std::size_t>(dim);
  const int entry = plan.rotation.head_index(h);
  const std::vector<double> matrix = rotation_matrix(plan.rotation, entry, dim);
  const auto center = plan.center.empty() ? std::span<const float>{}
                                          : std::span(plan.center).subspan(static_cast<std::size_t>(entry) * d, d);
  std::vector<float> x = rotate(FitData{.dim = dim, .rows = rows}, matrix, center).rows;
  const RowCodec codec(plan, h, dim);
  for (std::size_t start = 0; start < x.size(); start += d) {
    const std::span<float> row = std::span(x).subspan(start, d);
    expect_finite(row);
    codec.quantize(row);
  }
  if (!matrix.empty())
    x = rotate(FitData{.dim = dim, .rows = std::move(x)}, inverse_matrix(plan.rotation, entry, dim), {}).rows;
  for (std::size_t i = 0; i < x.size() && !center.empty(); ++i) x[i] += center[i % d];
  return x;
}

class CpuJudge : public OutputJudge {
 public:
  explicit CpuJudge(std::vector<AttentionCase> heads)
      : heads_(each(heads.size(), [&](std::size_t h) { return std::make_unique<OutputError>(std::move(heads[h])); })) {
    for (const auto& head : heads_) energy_ += head->energy();
  }

  OutputChange energy() const override { return energy_; }
  std::vector<OutputChange> changes(const TensorPlan& plan, Side side) const override {
    return each(heads_.size(), [&](std::size_t h) {
      const OutputError& head = *heads_[h];
      const AttentionCase& data = head.data();
      return side == Side::k ? head.of_keys(coded(plan, static_cast<int>(h), data.k, data.dim))
                             : head.of_values(coded(plan, static_cast<int>(h), data.v, data.v_dim));
    });
  }

 private:
  std::vector<std::unique_ptr<OutputError>> heads_;
  OutputChange energy_;
};

class CpuBackend : public Backend {
 public:
  std::string name() const override { return "cpu"; }

  std::vector<MomentSum> second_moments(const TensorView& rows, const MomentRequest& request) override {
    return kvq::second_moments(rows, request);
  }
  std::vector<float> quadratic_forms(const TensorView& rows, std::span<const double> matrices,
                                     const MomentRequest& request) override {
    return kvq::quadratic_forms(rows, matrices, request);
  }
  void add_attention_moments(const SequenceAttention& sequence, bool with_scored_query,
                             std::span<AttentionMoments> into, const std::function<void()>& head_done) override {
    KVQ_ASSERT(into.size() == static_cast<std::size_t>(sequence.geometry.num_kv_heads));
    for (int h = sequence.first_kv_head; h < sequence.end_kv_head(); ++h) {
      add_head(sequence, h, with_scored_query, into[static_cast<std::size_t>(h)]);
      if (head_done) head_done();
    }
  }

  std::vector<EigenPairs> eigh(std::span<const double> matrices, int dim) override {
    const std::size_t size = static_cast<std::size_t>(dim) * static_cast<std::size_t>(dim);
    KVQ_ASSERT(matrices.size() % size == 0);
    return each(matrices.size() / size,
                [&](std::size_t i) { return kvq::eigh(matrices.subspan(i * size, size), dim); });
  }

  std::vector<double> coding_costs(std::span<const CodingTask> tasks) override {
    return each(tasks.size(), [&](std::size_t i) { return coding_cost(*tasks[i].rows, *tasks[i].codec); });
  }
  std::vector<double> clip_costs(std::span<const CodingTask> tasks) override {
    return each(tasks.size(), [&](std::size_t i) { return clip_cost(*tasks[i].rows, *tasks[i].codec); });
  }
  std::vector<std::vector<double>> error_covariances(std::span<const CodingTask> tasks) override {
    return each(tasks.size(), [&](std::size_t i) { return error_covariance(*tasks[i].rows, *tasks[i].codec); });
  }

  /// One task after the other, because kmeans() divides its rows over threads.
  std::vector<KMeansResult> kmeans(std::span<const ClusterTask> tasks) override {
    std::vector<KMeansResult> results;
    for (const ClusterTask& task : tasks) results.push_back(kvq::kmeans(task.rows, task.dim, task.options));
    return results;
  }
  std::vector<float> sorted(std::vector<float> numbers) override {
    std::sort(numbers.begin(), numbers.end());
    return numbers;
  }
  std::unique_ptr<OutputJudge> judge_outputs(std::vector<AttentionCase> heads) override {
    return std::make_unique<CpuJudge>(std::move(heads));
  }

 private:
  /// One head at a time, so that the widened rows of one head are in memory.
  static void add_head(const SequenceAttention& sequence, int kv_head, bool with_scored_query, AttentionMoments& into) {
    const LayerGeometry& geometry = sequence.geometry;
    const int group = geometry.queries_per_kv_head();
    const auto n = static_cast<std::size_t>(sequence.count);
    std::vector<float> q(n * static_cast<std::size_t>(group * geometry.head_dim)),
        k(n * static_cast<std::size_t>(geometry.head_dim)), v(n * static_cast<std::size_t>(geometry.v_head_dim));
    parallel_for(group, [&](std::int64_t g) {
      sequence.q.load_head(kv_head * group + static_cast<int>(g), sequence.first, sequence.count,
                           q.data() + g * sequence.count * geometry.head_dim);
    });
    sequence.k.load_head(kv_head, sequence.first, sequence.count, k.data());
    sequence.v.load_head(kv_head, sequence.first, sequence.count, v.data());
    kvq::add_attention_moments(
        {
            .tokens = sequence.count,
            .queries = group,
            .dim = geometry.head_dim,
            .v_dim = geometry.v_head_dim,
            .scale = geometry.softmax_scale,
            .window = geometry.sliding_window,
            .cap = geometry.logit_softcap,
            .sinks = geometry.sinks_of(kv_head),
            .q = q.data(),
            .k = k.data(),
            .v = v.data(),
            .counts = sequence.counts == nullptr ? nullptr : sequence.counts + sequence.first,
        },
        with_scored_query, into);
  }
};

}  // namespace

Backend& cpu_backend() {
  static CpuBackend backend;
  return backend;
}

}  // namespace kvq
