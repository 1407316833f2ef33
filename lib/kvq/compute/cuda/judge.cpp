#include <kvq/codec/rotation_matrix.h>
#include <kvq/compute/cuda/coded.h>
#include <kvq/compute/cuda/judge.h>
#include <kvq/compute/cuda/judge_kernels.h>
#include <kvq/compute/device_memory.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace kvq::cuda {

namespace {

constexpr const char* kWhat = "errors of outputs";
constexpr int kMostSharedBytes = 99 * 1024;  // what a block has on every architecture
constexpr std::size_t kMostWeights = std::size_t{1} << 29;

constexpr std::int64_t kTableBytes = 128 << 10;  // of one head's codec, by estimate

std::size_t size(std::int64_t x) { return static_cast<std::size_t>(x); }

/// One array of all heads, in order.
template <typename T, typename Part>
std::vector<T> joined(const std::vector<AttentionCase>& heads, Part part) {
  std::vector<T> all;
  for (const AttentionCase& head : heads) {
    const auto& own = part(head);
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

JudgedHeads shape_of(const std::vector<AttentionCase>& heads) {
  const AttentionCase& one = heads.front();
  return {.heads = static_cast<int>(heads.size()),
          .group = one.queries_per_head,
          .queries = static_cast<int>(one.query.size()),
          .keys = static_cast<int>(one.k.size()) / one.dim,
          .dim = one.dim,
          .v_dim = one.v_dim,
          .scale = static_cast<float>(one.scale),
          .cap = static_cast<float>(one.cap),
          .window = one.window,
          .sink_tokens = one.sink_tokens,
          .recent_tokens = one.recent_tokens};
}

/// All that heads of this shape take: what is kept from call to call, rows that a plan stores, the changes of rows.
std::int64_t judge_bytes(const AttentionCase& head, std::int64_t heads) {
  const auto numbers = [](const auto& vector) { return static_cast<std::int64_t>(vector.size()); };
  const std::int64_t queries = numbers(head.query), rows = head.queries_per_head * queries,
                     dim = std::max(head.dim, head.v_dim), keys = numbers(head.k) / head.dim;
  const std::int64_t kept = 4 * (numbers(head.sinks) + numbers(head.q) + numbers(head.k) + numbers(head.v) +
                                 numbers(head.curvature) + rows * keys) +
                            8 * numbers(head.output_metric);
  const std::int64_t rotated = 2 * 4 * keys * dim + 2 * 8 * dim * dim + 4 * dim;
  const std::int64_t coded = kTableBytes + dim * static_cast<std::int64_t>(sizeof(CodedGroup) + sizeof(CodedRows));
  return heads * (kept + rotated + coded + rows * static_cast<std::int64_t>(sizeof(ChangedRow))) + 8 * queries +
         trellis_bytes(static_cast<int>(dim));
}

/// Some heads, which are on the device together. What is there may go between calls; then the next one puts it there
/// again.
class JudgedPart {
 public:
  JudgedPart(Context& context, std::vector<AttentionCase> heads, int first_head)
      : context_(context), heads_(std::move(heads)), first_head_(first_head), judged_(shape_of(heads_)) {
    const std::lock_guard lock(context_.mutex);
    context_.use();
    const Claim claim(context_.lane, need());
    energy_ = upload();
  }

  /// Of each head.
  const std::vector<OutputChange>& energy() const { return energy_; }

  std::vector<OutputChange> changes(const TensorPlan& plan, Side side) {
    const std::lock_guard lock(context_.mutex);
    context_.use();
    const Claim claim(context_.lane, need());
    if (weights_.is_empty()) upload();
    const bool keys = side == Side::k;
    return run(keys ? Changed::keys : Changed::values,
               coded(plan, keys ? judged_.k : judged_.v, keys ? judged_.dim : judged_.v_dim));
  }

 private:
  Need need() const {
    const std::int64_t bytes = judge_bytes(heads_.front(), std::ssize(heads_));
    return {bytes, bytes, kWhat};
  }

  /// @return  the energy of each head
  std::vector<OutputChange> upload() {
    const auto put = [&](Buffer& buffer, const auto& data) {
      return data.empty() ? nullptr : context_.upload(buffer, data.data(), data.size(), kWhat);
    };
    judged_.position = put(position_, heads_.front().query);
    judged_.sinks = put(sinks_, joined<float>(heads_, [](const AttentionCase& head) -> auto& { return head.sinks; }));
    judged_.q = put(q_, joined<float>(heads_, [](const AttentionCase& head) -> auto& { return head.q; }));
    judged_.k = put(k_, joined<float>(heads_, [](const AttentionCase& head) -> auto& { return head.k; }));
    judged_.v = put(v_, joined<float>(heads_, [](const AttentionCase& head) -> auto& { return head.v; }));
    judged_.curvature =
        put(curvature_, joined<float>(heads_, [](const AttentionCase& head) -> auto& { return head.curvature; }));
    judged_.metric =
        put(metric_, joined<double>(heads_, [](const AttentionCase& head) -> auto& { return head.output_metric; }));
    judged_.weights = weights_.room<float>(num_rows() * size(judged_.keys), kWhat);
    return run(Changed::nothing, nullptr);
  }

  std::size_t num_rows() const { return size(judged_.heads * judged_.group) * size(judged_.queries); }

  /// Rows as they are read when `plan` stores them: rotated, quantized, rotated back.
  /// @param rows  [heads, keys, dim]
  const float* coded(const TensorPlan& plan, const float* rows, int dim) const {
    const auto d = size(dim), heads = size(judged_.heads);
    std::vector<double> forward, back;
    std::vector<float> centers;
    std::vector<RowCodec> codecs;
    for (int h = 0; h < judged_.heads; ++h) {
      const int entry = plan.rotation.head_index(first_head_ + h);
      const auto add = [](std::vector<double>& to, const std::vector<double>& matrix) {
        to.insert(to.end(), matrix.begin(), matrix.end());
      };
      add(forward, rotation_matrix(plan.rotation, entry, dim));
      add(back, inverse_matrix(plan.rotation, entry, dim));
      if (!plan.center.empty()) {
        const auto center = plan.center.begin() + static_cast<std::ptrdiff_t>(size(entry) * d);
        centers.insert(centers.end(), center, center + dim);
      }
      codecs.emplace_back(plan, first_head_ + h, dim);
    }
    KVQ_ASSERT(forward.size() == back.size() && (forward.empty() || forward.size() == heads * d * d));
    const std::size_t numbers = heads * size(judged_.keys) * d;
    float* rotated = context_.plain.room<float>(2 * numbers, kWhat);
    float* quantized = rotated + numbers;
    const double* matrices = nullptr;
    if (!forward.empty()) {
      forward.insert(forward.end(), back.begin(), back.end());
      matrices = context_.upload(context_.matrices, forward.data(), forward.size(), kWhat);
    }
    const float* center =
        centers.empty() ? nullptr : context_.upload(context_.means, centers.data(), centers.size(), kWhat);
    MatrixProduct product{.rows = rows,
                          .matrix = matrices,
                          .before = center,
                          .to = rotated,
                          .heads = judged_.heads,
                          .count = judged_.keys,
                          .dim = dim};
    multiply_rows(product, context_.stream());
    quantize_rows(context_, codecs, rotated, judged_.keys, quantized);
    product.rows = quantized, product.matrix = matrices ? matrices + heads * d * d : nullptr;
    product.before = nullptr, product.after = center;
    multiply_rows(product, context_.stream());
    return rotated;
  }

  std::vector<OutputChange> run(Changed changed, const float* other) const {
    ChangedRow* rows = context_.products.room<ChangedRow>(num_rows(), kWhat);
    judge(judged_, changed, other, rows, context_.stream());
    check(cudaGetLastError(), kWhat);
    const std::vector<ChangedRow> found = context_.download(rows, num_rows(), kWhat);
    std::vector<OutputChange> changes(size(judged_.heads));
    const double half = 0.5 / judged_.queries;
    for (std::size_t i = 0; i < found.size(); ++i) {
      OutputChange& change = changes[i / (found.size() / changes.size())];
      change += {half * found[i].curved, half * found[i].squared};
    }
    return changes;
  }

  Context& context_;
  const std::vector<AttentionCase> heads_;
  const int first_head_;
  JudgedHeads judged_;
  Buffer position_{context_.lane}, sinks_{context_.lane}, q_{context_.lane}, k_{context_.lane}, v_{context_.lane},
      curvature_{context_.lane}, metric_{context_.lane}, weights_{context_.lane};
  std::vector<OutputChange> energy_;
};

/// All heads, in parts that the device has room for.
class CudaJudge : public OutputJudge {
 public:
  CudaJudge(Context& context, std::vector<AttentionCase> heads) {
    const auto count = std::ssize(heads);
    const std::int64_t one = judge_bytes(heads.front(), 1), each = judge_bytes(heads.front(), 2) - one,
                       room = context.lane.memory().limit() / 2;
    const std::int64_t at_once = units_at_once(room, one - each, each, count);
    for (std::ptrdiff_t first = 0; first < count; first += at_once) {
      const auto begin = std::make_move_iterator(heads.begin() + first);
      parts_.push_back(std::make_unique<JudgedPart>(
          context, std::vector<AttentionCase>(begin, begin + std::min(at_once, count - first)),
          static_cast<int>(first)));
      for (const OutputChange& change : parts_.back()->energy()) energy_ += change;
    }
  }

  OutputChange energy() const override { return energy_; }

  std::vector<OutputChange> changes(const TensorPlan& plan, Side side) const override {
    std::vector<OutputChange> all;
    for (const auto& part : parts_)
      for (const OutputChange& change : part->changes(plan, side)) all.push_back(change);
    return all;
  }

 private:
  std::vector<std::unique_ptr<JudgedPart>> parts_;
  OutputChange energy_;
};

}  // namespace

bool can_judge(const std::vector<AttentionCase>& heads) {
  if (heads.empty()) return false;
  const AttentionCase& one = heads.front();
  const bool same = std::all_of(heads.begin(), heads.end(), [&](const AttentionCase& head) {
    return head.dim == one.dim && head.v_dim == one.v_dim && head.queries_per_head == one.queries_per_head &&
           head.query == one.query && head.k.size() == one.k.size() && head.sinks.size() == one.sinks.size() &&
           head.curvature.size() == one.curvature.size() && head.output_metric.size() == one.output_metric.size() &&
           head.scale == one.scale && head.cap == one.cap && head.window == one.window &&
           head.sink_tokens == one.sink_tokens && head.recent_tokens == one.recent_tokens;
  });
  const JudgedHeads shape = shape_of(heads);
  return same && !one.query.empty() && judge_shared_bytes(shape) <= kMostSharedBytes &&
         size(shape.heads * shape.group) * size(shape.queries) * size(shape.keys) <= kMostWeights;
}

std::unique_ptr<OutputJudge> judge_outputs(Context& context, std::vector<AttentionCase> heads) {
  return std::make_unique<CudaJudge>(context, std::move(heads));
}

}  // namespace kvq::cuda
