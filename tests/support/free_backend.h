#pragma once

#include <kvq/compute/backend.h>

#include <functional>
#include <string>
#include <utility>

namespace kvq::test {

/// The processors, as a backend that says that it leaves them free: what runs layers side by side for a device does so
/// for this backend, and the results must be those of cpu_backend().
class FreeBackend : public Backend {
 public:
  /// @param before  called with the name of each verb before it runs; may throw
  explicit FreeBackend(std::function<void(const std::string&)> before = [](const std::string&) {})
      : before_(std::move(before)) {}

  std::string name() const override { return "free"; }
  bool leaves_processors_free() const override { return true; }

  std::vector<MomentSum> second_moments(const TensorView& rows, const MomentRequest& request) override {
    before_("second_moments");
    return cpu_.second_moments(rows, request);
  }
  std::vector<float> quadratic_forms(const TensorView& rows, std::span<const double> matrices,
                                     const MomentRequest& request) override {
    before_("quadratic_forms");
    return cpu_.quadratic_forms(rows, matrices, request);
  }
  void add_attention_moments(const SequenceAttention& sequence, bool with_scored_query,
                             std::span<AttentionMoments> into, const std::function<void()>& head_done) override {
    before_("add_attention_moments");
    cpu_.add_attention_moments(sequence, with_scored_query, into, head_done);
  }
  std::vector<EigenPairs> eigh(std::span<const double> matrices, int dim) override {
    before_("eigh");
    return cpu_.eigh(matrices, dim);
  }
  std::vector<double> coding_costs(std::span<const CodingTask> tasks) override {
    before_("coding_costs");
    return cpu_.coding_costs(tasks);
  }
  std::vector<double> clip_costs(std::span<const CodingTask> tasks) override {
    before_("clip_costs");
    return cpu_.clip_costs(tasks);
  }
  std::vector<std::vector<double>> error_covariances(std::span<const CodingTask> tasks) override {
    before_("error_covariances");
    return cpu_.error_covariances(tasks);
  }
  std::vector<KMeansResult> kmeans(std::span<const ClusterTask> tasks) override {
    before_("kmeans");
    return cpu_.kmeans(tasks);
  }
  std::vector<float> sorted(std::vector<float> numbers) override {
    before_("sorted");
    return cpu_.sorted(std::move(numbers));
  }
  std::unique_ptr<OutputJudge> judge_outputs(std::vector<kvq::AttentionCase> heads) override {
    before_("judge_outputs");
    return cpu_.judge_outputs(std::move(heads));
  }

 private:
  Backend& cpu_ = cpu_backend();
  std::function<void(const std::string&)> before_;
};

}  // namespace kvq::test
