#pragma once

#include "calibrate_mpi/channel.h"

#include <kvq/compute/backend.h>
#include <kvq/stats/shards.h>

#include <memory>
#include <vector>

namespace kvq {

/// The backend of a rank that leads a group: the CPU's, but the other ranks of the group compute the attention moments
/// of some KV heads. A head's sums are made by one process in one order, so results keep their bytes. Only the main
/// thread may call it, because MPI is used by that thread alone.
class GroupBackend : public Backend {
 public:
  /// @param ranks  of the group, this one first
  GroupBackend(const Channel& channel, std::vector<int> ranks) : channel_(channel), ranks_(std::move(ranks)) {}
  /// Ends serve() of the other ranks.
  ~GroupBackend() override;

  /// The layer that the next calls are about. @param layer  its number in the model
  void begin_layer(int layer) { layer_ = layer; }

  std::string name() const override;
  void add_attention_moments(const SequenceAttention& sequence, bool with_scored_query,
                             std::span<AttentionMoments> into, const std::function<void()>& head_done) override;

  std::vector<MomentSum> second_moments(const TensorView& rows, const MomentRequest& request) override {
    return cpu_backend().second_moments(rows, request);
  }
  std::vector<float> quadratic_forms(const TensorView& rows, std::span<const double> matrices,
                                     const MomentRequest& request) override {
    return cpu_backend().quadratic_forms(rows, matrices, request);
  }
  std::vector<EigenPairs> eigh(std::span<const double> matrices, int dim) override {
    return cpu_backend().eigh(matrices, dim);
  }
  std::vector<double> coding_costs(std::span<const CodingTask> tasks) override {
    return cpu_backend().coding_costs(tasks);
  }
  std::vector<double> clip_costs(std::span<const CodingTask> tasks) override { return cpu_backend().clip_costs(tasks); }
  std::vector<std::vector<double>> error_covariances(std::span<const CodingTask> tasks) override {
    return cpu_backend().error_covariances(tasks);
  }
  std::vector<KMeansResult> kmeans(std::span<const ClusterTask> tasks) override { return cpu_backend().kmeans(tasks); }
  std::vector<float> sorted(std::vector<float> numbers) override { return cpu_backend().sorted(std::move(numbers)); }
  std::unique_ptr<OutputJudge> judge_outputs(std::vector<AttentionCase> heads) override {
    return cpu_backend().judge_outputs(std::move(heads));
  }

 private:
  const Channel& channel_;
  std::vector<int> ranks_;
  int layer_ = 0;
};

/// What the other ranks of a group do: they load the layers that the leader names, and compute the KV heads that it
/// asks for, until its backend ends.
/// @param leader  rank that leads the group
void serve_group(const Channel& channel, int leader, const Dump& dump, const CollectRequest& request);

}  // namespace kvq
