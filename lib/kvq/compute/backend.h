#pragma once

#include <kvq/compute/attention_moment.h>
#include <kvq/compute/coded_error.h>
#include <kvq/compute/eigh.h>
#include <kvq/compute/kmeans.h>
#include <kvq/compute/moment.h>
#include <kvq/compute/output_error.h>
#include <kvq/core/geometry.h>
#include <kvq/core/side.h>
#include <kvq/core/tensor_view.h>
#include <kvq/plan/layer_plan.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace kvq {

/// Which rows of a tensor are summed, and how they are weighted.
struct MomentRequest {
  int heads_per_group = 1;                            ///< consecutive heads that share one sum
  std::int64_t skipped_first = 0, skipped_count = 0;  ///< tokens that are in no sum
  std::span<const float> weights = {};                ///< [T] or [H, T], non-negative; empty: 1
};

/// One sequence of one layer.
struct SequenceAttention {
  const LayerGeometry& geometry;
  TensorView q, k, v;                      ///< of the layer, [T, Hq | Hkv, D | Dv]
  std::int64_t first = 0, count = 0;       ///< tokens of the sequence
  const std::uint8_t* counts = nullptr;    ///< [T] 0: the token's queries are in no sum; null: all queries count
  int first_kv_head = 0, kv_heads = kAll;  ///< whose moments are computed
  static constexpr int kAll = -1;

  int end_kv_head() const { return kv_heads == kAll ? geometry.num_kv_heads : first_kv_head + kv_heads; }
};

/// Rows to quantize, and how. Both outlive the call.
struct CodingTask {
  const RotatedData* rows = nullptr;
  const RowCodec* codec = nullptr;
};

/// Rows to cluster, [n, dim], which outlive the call.
struct ClusterTask {
  std::span<const float> rows;
  int dim = 0;
  KMeansOptions options = {};
};

/// The KV heads of one layer, whose exact attention is computed once, to compare plans by the error that they cause.
class OutputJudge {
 public:
  virtual ~OutputJudge() = default;
  /// OutputError::energy(), summed over the heads.
  virtual OutputChange energy() const = 0;
  /// [Hkv] change of the outputs when a plan stores the keys (or the values) of each head.
  virtual std::vector<OutputChange> changes(const TensorPlan& plan, Side side) const = 0;
};

/// All that touches many tokens or tries many plans: methods and statistics know these verbs, not what carries them
/// out. Every implementation keeps the bounds that tests/support/backend_conformance.h checks. The result of a call
/// depends on its arguments and on the device, never on the number of threads or on earlier calls. Any thread may call
/// any verb. Errors are those of the functions that a verb names.
class Backend {
 public:
  virtual ~Backend() = default;
  /// For people: "cpu", or the device.
  virtual std::string name() const = 0;
  /// Whether verbs run elsewhere, so that processors can read one layer while the verbs are at another one.
  virtual bool leaves_processors_free() const { return false; }
  /// The most memory that verbs have taken on one device so far, in bytes; 0 for processors.
  virtual std::int64_t device_bytes() const { return 0; }

  /// Uncentered second moment of each group of heads, [H / heads_per_group], symmetric.
  virtual std::vector<MomentSum> second_moments(const TensorView& rows, const MomentRequest& request) = 0;
  /// [H, T] x M_h x^T of each row, at least 0; 0 for skipped tokens.
  /// @param matrices  [H, D, D] symmetric
  virtual std::vector<float> quadratic_forms(const TensorView& rows, std::span<const double> matrices,
                                             const MomentRequest& request) = 0;
  /// Adds the moments of one sequence (attention_moment.h) to those of each KV head, [Hkv]. `column_energy` is
  /// overwritten, [count]. KV heads that the sequence does not ask for stay as they are.
  /// @param head_done  called once for each KV head that is asked for, from any thread
  virtual void add_attention_moments(const SequenceAttention& sequence, bool with_scored_query,
                                     std::span<AttentionMoments> into, const std::function<void()>& head_done) = 0;

  /// kvq::eigh() of each matrix. @param matrices  [n, D, D]
  virtual std::vector<EigenPairs> eigh(std::span<const double> matrices, int dim) = 0;

  /// coding_cost(), clip_cost() and error_covariance() of each task (coded_error.h).
  virtual std::vector<double> coding_costs(std::span<const CodingTask> tasks) = 0;
  virtual std::vector<double> clip_costs(std::span<const CodingTask> tasks) = 0;
  virtual std::vector<std::vector<double>> error_covariances(std::span<const CodingTask> tasks) = 0;

  /// kvq::kmeans() of each task.
  virtual std::vector<KMeansResult> kmeans(std::span<const ClusterTask> tasks) = 0;
  /// The numbers in ascending order, for Lloyd's algorithm on a line (fit_codebook()). @param numbers  finite
  virtual std::vector<float> sorted(std::vector<float> numbers) = 0;

  /// @param heads  [Hkv]
  virtual std::unique_ptr<OutputJudge> judge_outputs(std::vector<AttentionCase> heads) = 0;
};

/// The processors, by the functions that the verbs name; threads as parallel.h allows.
Backend& cpu_backend();

}  // namespace kvq
