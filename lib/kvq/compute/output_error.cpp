#include <kvq/compute/blas.h>
#include <kvq/compute/output_error.h>
#include <kvq/compute/row_ops.h>

#include <algorithm>
#include <cmath>

namespace kvq {

namespace {

struct Span {
  std::int64_t first, end;  ///< keys that a query sees
};

Span seen_by(const AttentionCase& data, std::int64_t position) {
  return {data.window > 0 ? std::max<std::int64_t>(0, position + 1 - data.window) : 0, position + 1};
}

}  // namespace

OutputError::OutputError(AttentionCase data) : data_(std::move(data)) {
  const auto m = static_cast<std::int64_t>(data_.query.size()),
             n = static_cast<std::int64_t>(data_.k.size()) / data_.dim;
  for (int h = 0; h < data_.queries_per_head; ++h) {
    weights_.push_back(weights(h, data_.k));
    outputs_.emplace_back(static_cast<std::size_t>(m * data_.v_dim));
    blas::gemm_nn(m, data_.v_dim, n, weights_.back().data(), n, data_.v.data(), data_.v_dim, false,
                  outputs_.back().data(), data_.v_dim);
    energy_ += form(h, outputs_.back());
  }
}

std::vector<float> OutputError::weights(int head, std::span<const float> k) const {
  const auto m = static_cast<std::int64_t>(data_.query.size()),
             n = static_cast<std::int64_t>(data_.k.size()) / data_.dim;
  const float* q = data_.q.data() + static_cast<std::int64_t>(head) * m * data_.dim;
  std::vector<float> s(static_cast<std::size_t>(m * n));
  blas::gemm_nt(m, n, data_.dim, static_cast<float>(data_.scale), q, data_.dim, k.data(), data_.dim, s.data(), n);
  const bool exact_somewhere = k.data() != data_.k.data() && data_.sink_tokens + data_.recent_tokens > 0;
  std::vector<float> exact;
  if (exact_somewhere) {
    exact.resize(s.size());
    blas::gemm_nt(m, n, data_.dim, static_cast<float>(data_.scale), q, data_.dim, data_.k.data(), data_.dim,
                  exact.data(), n);
  }
  for (std::int64_t i = 0; i < m; ++i) {
    float* row = s.data() + i * n;
    const Span seen = seen_by(data_, data_.query[static_cast<std::size_t>(i)]);
    if (exact_somewhere)
      for (std::int64_t t = seen.first; t < seen.end; ++t)
        if (t < data_.sink_tokens || t >= seen.end - data_.recent_tokens)
          row[t] = exact[static_cast<std::size_t>(i * n + t)];
    if (data_.cap > 0.0) row_ops::soft_cap(row + seen.first, seen.end - seen.first, static_cast<float>(data_.cap));
    const float sink =
        data_.sinks.empty() ? -HUGE_VALF : static_cast<float>(data_.sinks[static_cast<std::size_t>(head)]);
    const float top = std::max(sink, row_ops::largest(row + seen.first, seen.end - seen.first));
    const float sum = row_ops::exponentiate(row + seen.first, seen.end - seen.first, top) + std::exp(sink - top);
    std::fill(row, row + seen.first, 0.0f);
    std::fill(row + seen.end, row + n, 0.0f);
    for (std::int64_t t = seen.first; t < seen.end; ++t) row[t] /= sum;
  }
  return s;
}

OutputChange OutputError::form(int head, std::span<const float> e) const {
  const auto d = static_cast<std::size_t>(data_.v_dim);
  // Sums of e^T e in double, because a model's scaling may give the matrices a condition number beyond the precision of
  // float32.
  const std::vector<double> errors(e.begin(), e.end());
  std::vector<double> sums(d * d);
  blas::syrk(data_.v_dim, static_cast<std::int64_t>(e.size() / d), errors.data(), data_.v_dim, sums.data(),
             data_.v_dim);
  const auto quadratic = [&](const auto* matrix) {
    double sum = 0.0;
    for (std::size_t i = 0; i < d; ++i) {
      if (matrix == nullptr) {
        sum += sums[i * (d + 1)];
        continue;
      }
      sum += sums[i * (d + 1)] * matrix[i * (d + 1)];
      for (std::size_t j = i + 1; j < d; ++j)
        sum += sums[i * d + j] * (double{matrix[i * d + j]} + double{matrix[j * d + i]});
    }
    return sum;
  };
  const OutputChange total{
      quadratic(data_.curvature.empty() ? nullptr : data_.curvature.data() + static_cast<std::size_t>(head) * d * d),
      quadratic(data_.output_metric.empty() ? nullptr : data_.output_metric.data())};
  const std::size_t rows = e.size() / d;
  const double half = 0.5 / static_cast<double>(rows);
  return {half * total.curved, half * total.squared};
}

OutputChange OutputError::of_keys(std::span<const float> k) const {
  const auto m = static_cast<std::int64_t>(data_.query.size()),
             n = static_cast<std::int64_t>(data_.k.size()) / data_.dim;
  OutputChange total;
  for (int h = 0; h < data_.queries_per_head; ++h) {
    std::vector<float> s = weights(h, k), e(outputs_[static_cast<std::size_t>(h)].size());
    const std::vector<float>& exact = weights_[static_cast<std::size_t>(h)];
    for (std::size_t i = 0; i < s.size(); ++i) s[i] -= exact[i];
    blas::gemm_nn(m, data_.v_dim, n, s.data(), n, data_.v.data(), data_.v_dim, false, e.data(), data_.v_dim);
    total += form(h, e);
  }
  return total;
}

OutputChange OutputError::of_values(std::span<const float> v) const {
  const auto m = static_cast<std::int64_t>(data_.query.size()),
             n = static_cast<std::int64_t>(data_.k.size()) / data_.dim;
  std::vector<float> difference(v.begin(), v.end());
  for (std::size_t i = 0; i < difference.size(); ++i) difference[i] -= data_.v[i];
  OutputChange total;
  for (int h = 0; h < data_.queries_per_head; ++h) {
    std::vector<float> e(outputs_[static_cast<std::size_t>(h)].size()), masked;
    const std::vector<float>* weights = &weights_[static_cast<std::size_t>(h)];
    if (data_.sink_tokens + data_.recent_tokens > 0) {  // values in a query's windows are exact
      masked = *weights;
      for (std::int64_t i = 0; i < m; ++i) {
        const Span seen = seen_by(data_, data_.query[static_cast<std::size_t>(i)]);
        for (std::int64_t t = seen.first; t < seen.end; ++t)
          if (t < data_.sink_tokens || t >= seen.end - data_.recent_tokens)
            masked[static_cast<std::size_t>(i * n + t)] = 0.0f;
      }
      weights = &masked;
    }
    blas::gemm_nn(m, data_.v_dim, n, weights->data(), n, difference.data(), data_.v_dim, false, e.data(), data_.v_dim);
    total += form(h, e);
  }
  return total;
}

}  // namespace kvq
