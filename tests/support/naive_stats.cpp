#include "support/naive_stats.h"

#include "support/compare.h"
#include "support/layers.h"
#include "support/naive_attention.h"

namespace kvq::test {

namespace {

/// All rows of one head, [T, dim].
std::vector<double> rows_of(const ActivationTensor& tensor, int head) {
  std::vector<float> rows(static_cast<std::size_t>(tensor.tokens * tensor.dim));
  tensor.load_head(head, 0, tensor.tokens, rows.data());
  return widened(rows);
}

NaiveMoment empty(int dim) {
  const auto d = static_cast<std::size_t>(dim);
  return {std::vector<double>(d * d), std::vector<double>(d)};
}

void add_rows(const std::vector<double>& rows, std::span<const double> weights, NaiveMoment& into) {
  const std::size_t dim = into.first.size();
  for (std::size_t row = 0; row < rows.size() / dim; ++row) {
    const double weight = weights.empty() ? 1.0 : weights[row];
    add_outer(std::span(rows).subspan(row * dim, dim), weight, into.sum, into.first);
    into.weight += weight;
  }
}

/// w = k C_Q k^T of every token.
std::vector<double> sst_weights(const LayerActivations& layer, int kv_head) {
  const NaiveMoment query = naive_moment(layer, Moment::query, kv_head);
  const std::vector<double> keys = rows_of(layer.k, kv_head);
  const auto dim = static_cast<std::size_t>(layer.k.dim);
  std::vector<double> weights(static_cast<std::size_t>(layer.k.tokens), 0.0);
  for (std::size_t t = 0; t < weights.size(); ++t)
    for (std::size_t i = 0; i < dim; ++i)
      for (std::size_t j = 0; j < dim; ++j)
        weights[t] += keys[t * dim + i] * query.sum[i * dim + j] / query.weight * keys[t * dim + j];
  return weights;
}

}  // namespace

NaiveMoment naive_moment(const LayerActivations& layer, Moment which, int kv_head) {
  const int group = layer.geometry.queries_per_kv_head();
  NaiveMoment moment = empty(layer.geometry.dim(side_of(which)));
  if (which == Moment::query) {
    for (int g = 0; g < group; ++g) add_rows(rows_of(layer.q, kv_head * group + g), {}, moment);
  } else if (which == Moment::key) {
    add_rows(rows_of(layer.k, kv_head), {}, moment);
  } else if (which == Moment::value) {
    add_rows(rows_of(*layer.v, kv_head), {}, moment);
  } else if (which == Moment::sst) {
    add_rows(rows_of(*layer.v, kv_head), sst_weights(layer, kv_head), moment);
  } else {
    for (std::size_t s = 0; s + 1 < layer.cu_seqlens.size(); ++s) {
      const NaiveMoments sums = naive_moments(attention_case(layer, s, kv_head));
      const bool value = which == Moment::scored_value;
      const std::vector<double>&sum = value ? sums.outputs : sums.scored_query,
            &first = value ? sums.outputs_first : sums.scored_query_first;
      for (std::size_t i = 0; i < sum.size(); ++i) moment.sum[i] += sum[i];
      for (std::size_t i = 0; i < first.size(); ++i) moment.first[i] += first[i];
    }
    moment.weight = static_cast<double>(layer.k.tokens * group);  // N, because scored_query is a mean over query rows
  }
  return moment;
}

std::vector<double> naive_value_weight(const LayerActivations& layer, int kv_head) {
  std::vector<double> weights;
  for (std::size_t s = 0; s + 1 < layer.cu_seqlens.size(); ++s)
    for (const double energy : naive_moments(attention_case(layer, s, kv_head)).column_energy)
      weights.push_back(energy / layer.geometry.queries_per_kv_head());
  return weights;
}

}  // namespace kvq::test
