#include "support/naive_attention.h"

#include "support/random_data.h"

#include <algorithm>
#include <cmath>

namespace kvq::test {

namespace {

/// Row `row` of a buffer of rows with `dim` numbers.
std::span<const float> row_of(const std::vector<float>& rows, std::int64_t row, int dim) {
  return std::span(rows).subspan(static_cast<std::size_t>(row * dim), static_cast<std::size_t>(dim));
}

double dot(std::span<const float> a, std::span<const float> b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

double logit_of(const AttentionCase& input, int query, std::int64_t i, std::int64_t t) {
  const double logit =
      input.scale * dot(row_of(input.q, query * input.tokens + i, input.dim), row_of(input.k, t, input.dim));
  return input.cap > 0.0 ? input.cap * std::tanh(logit / input.cap) : logit;
}

}  // namespace

AttentionCase random_case(AttentionCase input, std::uint64_t seed, double logit_size) {
  const auto tokens = static_cast<std::size_t>(input.tokens);
  const auto dim = static_cast<std::size_t>(input.dim), v_dim = static_cast<std::size_t>(input.v_dim);
  // A dot product of two Gaussian rows has standard deviation sqrt(dim).
  const double size = std::sqrt(logit_size / (input.scale * std::sqrt(static_cast<double>(input.dim))));
  input.q = gaussian(static_cast<std::size_t>(input.queries) * tokens * dim, seed, size);
  input.k = gaussian(tokens * dim, seed + 1000, size);
  input.v = gaussian(tokens * v_dim, seed + 2000);
  return input;
}

std::vector<double> softmax_scores(const AttentionCase& input, int query) {
  const auto tokens = static_cast<std::size_t>(input.tokens);
  std::vector<double> scores(tokens * tokens, 0.0);
  for (std::int64_t i = 0; i < input.tokens; ++i) {
    double* row = scores.data() + i * input.tokens;
    const std::int64_t first = input.window == 0 ? 0 : std::max<std::int64_t>(0, i - input.window + 1);
    const double sink = input.sinks.empty() ? -HUGE_VAL : input.sinks[static_cast<std::size_t>(query)];
    double largest = sink;
    for (std::int64_t t = first; t <= i; ++t) largest = std::max(largest, row[t] = logit_of(input, query, i, t));
    double sum = std::exp(sink - largest);
    for (std::int64_t t = first; t <= i; ++t) sum += row[t] = std::exp(row[t] - largest);
    for (std::int64_t t = first; t <= i; ++t) row[t] /= sum;
  }
  return scores;
}

std::vector<double> attention_output(const AttentionCase& input, int query) {
  const std::vector<double> scores = softmax_scores(input, query);
  std::vector<double> out(static_cast<std::size_t>(input.tokens * input.v_dim), 0.0);
  for (std::int64_t i = 0; i < input.tokens; ++i)
    for (std::int64_t t = 0; t <= i; ++t) {
      const double s = scores[static_cast<std::size_t>(i * input.tokens + t)];
      if (s == 0.0) continue;
      for (int c = 0; c < input.v_dim; ++c)
        out[static_cast<std::size_t>(i * input.v_dim + c)] +=
            s * static_cast<double>(input.v[static_cast<std::size_t>(t * input.v_dim + c)]);
    }
  return out;
}

void add_outer(std::span<const double> x, double weight, std::vector<double>& sum, std::vector<double>& first) {
  for (std::size_t i = 0; i < x.size(); ++i) {
    first[i] += weight * x[i];
    for (std::size_t j = 0; j < x.size(); ++j) sum[i * x.size() + j] += weight * x[i] * x[j];
  }
}

NaiveMoments naive_moments(const AttentionCase& input) {
  const auto dim = static_cast<std::size_t>(input.dim), v_dim = static_cast<std::size_t>(input.v_dim);
  const auto tokens = static_cast<std::size_t>(input.tokens);
  NaiveMoments moments{
      .outputs = std::vector<double>(v_dim * v_dim),
      .outputs_first = std::vector<double>(v_dim),
      .scored_query = std::vector<double>(dim * dim),
      .scored_query_first = std::vector<double>(dim),
      .column_energy = std::vector<double>(tokens),
  };
  for (int query = 0; query < input.queries; ++query) {
    const std::vector<double> scores = softmax_scores(input, query), out = attention_output(input, query);
    for (std::size_t i = 0; i < tokens; ++i) {
      const std::span<const double> o(out.data() + i * v_dim, v_dim);
      add_outer(o, 1.0, moments.outputs, moments.outputs_first);
      double weight = 0.0;
      for (std::size_t t = 0; t <= i; ++t) {
        const double s = scores[i * tokens + t];
        moments.column_energy[t] += s * s;
        double distance = 0.0;
        for (std::size_t c = 0; c < v_dim; ++c)
          distance += std::pow(static_cast<double>(input.v[t * v_dim + c]) - o[c], 2);
        const double part =
            input.cap > 0.0 && s > 0.0
                ? logit_of(input, query, static_cast<std::int64_t>(i), static_cast<std::int64_t>(t)) / input.cap
                : 0.0;
        weight += std::pow(s * (1.0 - part * part), 2) * distance;
      }
      const auto row = row_of(input.q, query * input.tokens + static_cast<std::int64_t>(i), input.dim);
      const std::vector<double> q(row.begin(), row.end());
      weight *= input.scale * input.scale;
      add_outer(q, weight, moments.scored_query, moments.scored_query_first);
      moments.scored_query_weight += weight;
    }
  }
  return moments;
}

}  // namespace kvq::test
