#include <kvq/codec/codec.h>
#include <kvq/codec/row_codec.h>
#include <kvq/compute/parallel.h>
#include <kvq/core/error.h>
#include <kvq/eval/stored_side.h>

#include <algorithm>
#include <vector>

namespace kvq {

std::int64_t ExactTokens::coded_end(std::int64_t query) const {
  const std::int64_t rest = std::max<std::int64_t>(0, query + 1 - recent);
  return rest / granule * granule;
}

namespace {

constexpr std::int64_t kRowsPerTask = 64;

class StoredByPlan : public StoredSide {
 public:
  StoredByPlan(const TensorPlan& plan, int dim, const Windows& windows) : plan_(plan), dim_(dim), windows_(windows) {}

  void restore(const ActivationTensor& tensor, std::int64_t first, int kv_head, std::span<float> rows) const override {
    const auto d = static_cast<std::size_t>(dim_);
    const auto count = static_cast<std::int64_t>(rows.size() / d);
    parallel_for((count + kRowsPerTask - 1) / kRowsPerTask, [&](std::int64_t task) {
      const std::int64_t begin = task * kRowsPerTask, size = std::min(kRowsPerTask, count - begin);
      const auto piece = rows.subspan(static_cast<std::size_t>(begin) * d, static_cast<std::size_t>(size) * d);
      if (plan_.centroids && plan_.centroids->joint)
        restore_with_all_heads(tensor, first + begin, kv_head, piece);
      else
        reconstruct(plan_, kv_head, piece, dim_);
    });
  }

  ExactTokens exact_tokens() const override {
    if (is_exact(plan_.coder)) return {};
    return {.sink = windows_.sink_tokens, .recent = windows_.recent_tokens};
  }
  double effective_bits(std::int64_t context) const override {
    return kvq::effective_bits(plan_, dim_, windows_, context);
  }
  double code_bits() const override { return mean_code_bits(plan_); }
  const TensorPlan* plan() const override { return &plan_; }

 private:
  /// Joint centroids: a token's index depends on the rows of all heads.
  void restore_with_all_heads(const ActivationTensor& tensor, std::int64_t first, int kv_head,
                              std::span<float> rows) const {
    const auto count = static_cast<std::int64_t>(rows.size()) / dim_;
    std::vector<float> all(static_cast<std::size_t>(tensor.heads) * rows.size());
    for (int h = 0; h < tensor.heads; ++h)
      tensor.load_head(h, first, count, all.data() + static_cast<std::size_t>(h) * rows.size());
    reconstruct_heads(plan_, tensor.heads, all, dim_);
    std::copy_n(all.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(kv_head) * rows.size()), rows.size(),
                rows.begin());
  }

  const TensorPlan& plan_;
  int dim_;
  Windows windows_;
};

}  // namespace

std::unique_ptr<StoredSide> stored_by_plan(const TensorPlan& plan, int dim, const Windows& windows) {
  return std::make_unique<StoredByPlan>(plan, dim, windows);
}

}  // namespace kvq
