#include "support/backend_conformance.h"

#include <kvq/codec/codec.h>

#include "support/compare.h"
#include "support/error_of.h"
#include "support/layers.h"
#include "support/matrix.h"
#include "support/naive_attention.h"
#include "support/random_data.h"
#include "support/row_plans.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvq::test {

namespace {

using Catch::Matchers::StartsWith;

std::vector<double> row_of(const TensorView& tensor, int head, std::int64_t token) {
  std::vector<float> row(static_cast<std::size_t>(tensor.dim));
  tensor.load_head(head, token, 1, row.data());
  return widened(row);
}

// ---- second moments ----------------------------------------------------------------------------------------------

/// What second_moments() must give for one group of heads.
MomentSum naive_moment(const TensorView& rows, const MomentRequest& request, int group) {
  MomentSum sum(rows.dim);
  const bool of_heads = request.weights.size() != static_cast<std::size_t>(rows.tokens);
  for (int h = group * request.heads_per_group; h < (group + 1) * request.heads_per_group; ++h)
    for (std::int64_t t = 0; t < rows.tokens; ++t) {
      if (t >= request.skipped_first && t < request.skipped_first + request.skipped_count) continue;
      const std::int64_t at = t + (of_heads ? h * rows.tokens : 0);
      const double w = request.weights.empty() ? 1.0 : double{request.weights[static_cast<std::size_t>(at)]};
      add_outer(row_of(rows, h, t), w, sum.sum, sum.mean);
      sum.weight += w;
    }
  return sum;
}

void check_second_moments(Backend& backend) {
  for (const DType type : {DType::f32, DType::bf16, DType::f16})
    for (const int dim : {4, 96, 128}) {
      const LayerActivations layer =
          make_layer({.num_q_heads = 4, .head_dim = dim, .lengths = {2100, 40}, .dtype = type, .seed = 3});
      const TensorView q = layer.q.view();
      std::vector<float> weights = gaussian(static_cast<std::size_t>(q.tokens * q.heads), 5);
      for (float& weight : weights) weight = std::max(0.0f, weight);
      const MomentRequest requests[] = {
          {},
          {.heads_per_group = 2, .skipped_first = 17, .skipped_count = 33},
          {.heads_per_group = 4, .weights = std::span(weights).first(static_cast<std::size_t>(q.tokens))},
          {.skipped_first = 0, .skipped_count = q.tokens, .weights = weights},
          {.skipped_first = 2100, .skipped_count = 40, .weights = weights},
      };
      for (const MomentRequest& request : requests) {
        INFO("moments of dim " << dim << ", type " << activation_name(type) << ", " << request.heads_per_group
                               << " heads, skipped " << request.skipped_count << ", weights "
                               << request.weights.size());
        const std::vector<MomentSum> found = backend.second_moments(q, request);
        REQUIRE(found.size() == static_cast<std::size_t>(q.heads / request.heads_per_group));
        for (std::size_t g = 0; g < found.size(); ++g) {
          const MomentSum expected = naive_moment(q, request, static_cast<int>(g));
          CHECK(relative_difference(found[g].sum, expected.sum) < 2e-6);
          CHECK(relative_difference(found[g].mean, expected.mean) < 2e-6);
          CHECK(found[g].weight == Approx(expected.weight).epsilon(1e-12));
          CHECK(found[g].sum == transpose(found[g].sum, dim));
        }
        CHECK(backend.second_moments(q, request)[0].sum == found[0].sum);
      }
    }
}

void check_quadratic_forms(Backend& backend) {
  constexpr int kDim = 24;
  const LayerActivations layer = make_layer({.head_dim = kDim, .lengths = {2050, 9}, .dtype = DType::bf16});
  const TensorView k = layer.k.view();
  std::vector<double> matrices;
  for (int h = 0; h < k.heads; ++h) {
    const std::vector<double> one = random_covariance(kDim, static_cast<std::uint64_t>(h) + 1);
    matrices.insert(matrices.end(), one.begin(), one.end());
  }
  const MomentRequest request{.skipped_first = 4, .skipped_count = 3};
  std::vector<double> expected;
  for (int h = 0; h < k.heads; ++h)
    for (std::int64_t t = 0; t < k.tokens; ++t) {
      const std::vector<double> x = row_of(k, h, t);
      double form = 0.0;
      for (std::size_t i = 0; i < kDim; ++i)
        for (std::size_t j = 0; j < kDim; ++j)
          form += x[i] * matrices[(static_cast<std::size_t>(h) * kDim + i) * kDim + j] * x[j];
      expected.push_back(t >= 4 && t < 7 ? 0.0 : form);
    }
  CHECK(relative_difference(backend.quadratic_forms(k, matrices, request), expected) < 1e-6);
}

// ---- attention ---------------------------------------------------------------------------------------------------

std::vector<AttentionMoments> no_moments(const LayerGeometry& geometry, bool scored) {
  return std::vector<AttentionMoments>(static_cast<std::size_t>(geometry.num_kv_heads),
                                       {MomentSum{geometry.v_head_dim}, MomentSum{scored ? geometry.head_dim : 0}, {}});
}
void symmetrize(std::vector<AttentionMoments>& moments) {
  for (AttentionMoments& head : moments) head.outputs.symmetrize(), head.scored_query.symmetrize();
}

/// Whose queries count in which half: by turns.
std::vector<std::uint8_t> every_third(std::int64_t tokens, bool others) {
  std::vector<std::uint8_t> counts;
  for (std::int64_t t = 0; t < tokens; ++t) counts.push_back((t % 3 == 1) != others ? 1 : 0);
  return counts;
}

/// Sum of the outputs of the queries that count.
std::vector<double> output_sum(const LayerActivations& layer, std::size_t sequence, int kv_head,
                               std::span<const std::uint8_t> counts) {
  const AttentionCase input = attention_case(layer, sequence, kv_head);
  const auto dim = static_cast<std::size_t>(input.v_dim);
  std::vector<double> sum(dim, 0.0);
  for (int q = 0; q < input.queries; ++q) {
    const std::vector<double> outputs = attention_output(input, q);
    for (std::size_t i = 0; i < outputs.size(); ++i)
      if (counts[static_cast<std::size_t>(layer.cu_seqlens[sequence]) + i / dim] != 0) sum[i % dim] += outputs[i];
  }
  return sum;
}

void check_attention_of(Backend& backend, const LayerActivations& layer) {
  const LayerGeometry& g = layer.geometry;
  for (std::size_t s = 0; s + 1 < layer.cu_seqlens.size(); ++s) {
    const SequenceAttention sequence{.geometry = g,
                                     .q = layer.q.view(),
                                     .k = layer.k.view(),
                                     .v = layer.v->view(),
                                     .first = layer.cu_seqlens[s],
                                     .count = layer.cu_seqlens[s + 1] - layer.cu_seqlens[s]};
    std::vector<AttentionMoments> found = no_moments(g, true);
    int heads_done = 0;
    backend.add_attention_moments(sequence, true, found, [&] { ++heads_done; });
    CHECK(heads_done == g.num_kv_heads);
    // A second call adds as much again, and column energies are of the last call.
    std::vector<AttentionMoments> twice = found;
    backend.add_attention_moments(sequence, true, twice, {});
    // What the two halves of the queries add is what all add.
    std::vector<AttentionMoments> halves = no_moments(g, true), half[2];
    for (const bool others : {false, true}) {
      const std::vector<std::uint8_t> counts = every_third(layer.k.tokens, others);
      SequenceAttention counted = sequence;
      counted.counts = counts.data();
      half[others] = no_moments(g, true);
      backend.add_attention_moments(counted, true, half[others], {});
      for (std::size_t h = 0; h < halves.size(); ++h) {
        CHECK(relative_difference(half[others][h].outputs.mean, output_sum(layer, s, static_cast<int>(h), counts)) <
              5e-6);
        halves[h].outputs.add(half[others][h].outputs);
        halves[h].scored_query.add(half[others][h].scored_query);
      }
    }
    // One head at a time gives the same bits.
    std::vector<AttentionMoments> one_by_one = no_moments(g, true);
    for (int h = g.num_kv_heads - 1; h >= 0; --h) {
      SequenceAttention one = sequence;
      one.first_kv_head = h, one.kv_heads = 1;
      backend.add_attention_moments(one, true, one_by_one, {});
    }
    for (std::size_t h = 0; h < found.size(); ++h) {
      CHECK(one_by_one[h].outputs.sum == found[h].outputs.sum);
      CHECK(one_by_one[h].scored_query.sum == found[h].scored_query.sum);
      CHECK(one_by_one[h].column_energy == found[h].column_energy);
    }
    std::vector<AttentionMoments> unscored = no_moments(g, false);
    backend.add_attention_moments(sequence, false, unscored, {});
    for (auto* moments : {&found, &twice, &halves, &unscored}) symmetrize(*moments);
    for (std::size_t h = 0; h < found.size(); ++h) {
      INFO("attention of sequence " << s << ", KV head " << h);
      const NaiveMoments expected = naive_moments(attention_case(layer, s, static_cast<int>(h)));
      const AttentionMoments& own = found[h];
      CHECK(relative_difference(own.outputs.sum, expected.outputs) < 5e-6);
      CHECK(relative_difference(own.outputs.mean, expected.outputs_first) < 5e-6);
      CHECK(relative_difference(own.column_energy, expected.column_energy) < 5e-6);
      CHECK(own.outputs.weight == static_cast<double>(sequence.count * g.queries_per_kv_head()));
      if (sequence.count > 1) {  // one token's query sees one key, so its weight is 0
        CHECK(relative_difference(own.scored_query.sum, expected.scored_query) < 5e-6);
        CHECK(relative_difference(own.scored_query.mean, expected.scored_query_first) < 5e-6);
      }
      CHECK(relative_difference(unscored[h].outputs.sum, own.outputs.sum) < 1e-12);
      CHECK(twice[h].outputs.weight == 2.0 * own.outputs.weight);
      std::vector<double> doubled = own.outputs.sum;
      for (double& value : doubled) value *= 2.0;
      CHECK(relative_difference(twice[h].outputs.sum, doubled) < 1e-12);
      CHECK(twice[h].column_energy == own.column_energy);
      CHECK(relative_difference(halves[h].outputs.sum, own.outputs.sum) < 5e-6);
      if (sequence.count > 1) CHECK(relative_difference(halves[h].scored_query.sum, own.scored_query.sum) < 5e-6);
      std::vector<double> columns = half[0][h].column_energy;
      for (std::size_t t = 0; t < columns.size(); ++t) columns[t] += half[1][h].column_energy[t];
      CHECK(relative_difference(columns, own.column_energy) < 5e-6);
    }
  }
}

void check_attention(Backend& backend) {
  std::uint64_t seed = 20;
  for (const int dim : {16, 64, 128})
    for (const int window : {0, 7, 150}) {
      LayerSpec spec{.head_dim = dim, .v_head_dim = dim == 64 ? 32 : dim, .lengths = {1, 300, 17}};
      spec.num_q_heads = dim == 16 ? 2 : 6;
      spec.dtype = dim == 128 ? DType::bf16 : DType::f32;
      spec.sliding_window = window;
      spec.softmax_scale = 1.0 / std::sqrt(dim);
      spec.seed = ++seed;
      LayerActivations layer = make_layer(spec);
      INFO("head_dim " << dim << ", window " << window);
      check_attention_of(backend, layer);
      layer.geometry.logit_softcap = 2.5;
      for (int q = 0; q < layer.geometry.num_q_heads; ++q) layer.geometry.sink_logits.push_back(0.5 * q - 1.0);
      check_attention_of(backend, layer);
    }
}

// ---- eigenvectors ------------------------------------------------------------------------------------------------

/// Residual, orthogonality, order and signs of one decomposition.
void check_pairs(std::span<const double> matrix, const EigenPairs& pairs, int dim) {
  const auto n = static_cast<std::size_t>(dim);
  double size = 0.0;
  for (const double value : matrix) size = std::max(size, std::abs(value));
  const std::vector<double> image = multiply(matrix, pairs.vectors, dim);
  std::vector<double> expected = pairs.vectors;
  for (std::size_t i = 0; i < n; ++i)
    for (std::size_t j = 0; j < n; ++j) expected[i * n + j] *= pairs.values[j];
  CHECK(largest_difference(image, expected) <= 1e-13 * size * dim);
  CHECK(orthogonality_defect(pairs.vectors, dim) <= 1e-13 * dim);
  CHECK(std::is_sorted(pairs.values.rbegin(), pairs.values.rend()));
  for (std::size_t j = 0; j < n; ++j) {
    std::size_t largest = 0;
    for (std::size_t i = 1; i < n; ++i)
      if (std::abs(pairs.vectors[i * n + j]) > std::abs(pairs.vectors[largest * n + j])) largest = i;
    CHECK(pairs.vectors[largest * n + j] > 0.0);
  }
}

void check_eigh(Backend& backend) {
  for (const int dim : {1, 5, 64, 128}) {
    const std::size_t size = static_cast<std::size_t>(dim) * static_cast<std::size_t>(dim);
    std::vector<std::vector<double>> matrices = {
        random_covariance(dim, 1),
        random_covariance(dim, 2, 0.5),  // eigenvalues down to the rounding of the largest
        identity(dim),                   // all eigenvalues equal
        std::vector<double>(size, 0.0),
        random_covariance(dim, 3),
    };
    for (double& value : matrices.back()) value *= -1e20;
    std::vector<double> batch;
    for (const auto& matrix : matrices) batch.insert(batch.end(), matrix.begin(), matrix.end());
    const std::vector<EigenPairs> found = backend.eigh(batch, dim);
    REQUIRE(found.size() == matrices.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
      INFO("eigenvectors of dim " << dim << ", matrix " << i);
      check_pairs(matrices[i], found[i], dim);
      const EigenPairs alone = backend.eigh(matrices[i], dim).front();
      CHECK(alone.values == found[i].values);
      CHECK(alone.vectors == found[i].vectors);
    }
    batch.back() = std::numeric_limits<double>::quiet_NaN();
    CHECK_THAT(error_text([&] { backend.eigh(batch, dim); }), StartsWith("numerical: "));
  }
  CHECK(backend.eigh({}, 8).empty());
}

// ---- coded rows --------------------------------------------------------------------------------------------------

/// The sums of coded_error.h, in double.
struct NaiveCost {
  double total = 0.0, along = 0.0, energy = 0.0;
  std::vector<double> covariance;
};
NaiveCost naive_cost(const RotatedData& data, const RowCodec& codec) {
  const auto d = static_cast<std::size_t>(data.dim), count = data.rows.size() / d;
  NaiveCost sums;
  sums.covariance.assign(d * d, 0.0);
  for (std::size_t t = 0; t < count; ++t) {
    std::vector<float> coded(data.rows.begin() + static_cast<std::ptrdiff_t>(t * d),
                             data.rows.begin() + static_cast<std::ptrdiff_t>((t + 1) * d));
    const std::vector<double> x = widened(coded);
    codec.quantize(coded);
    std::vector<double> e(d);
    for (std::size_t i = 0; i < d; ++i) e[i] = double{coded[i]} - x[i];
    const double w = data.weights.empty() ? 1.0 : double{data.weights[t]};
    for (std::size_t i = 0; i < d; ++i)
      for (std::size_t j = 0; j < d; ++j) {
        sums.covariance[i * d + j] += e[i] * e[j] / static_cast<double>(count);
        const double m = data.metric.empty() ? (i == j ? 1.0 : 0.0) : double{data.metric[i * d + j]};
        sums.total += w * e[i] * m * e[j];
        sums.along += w * x[i] * m * e[j];
        sums.energy += w * x[i] * m * x[j];
      }
  }
  return sums;
}

void check_coded_errors(Backend& backend) {
  constexpr int kDim = 64;
  constexpr std::size_t kRows = 70;
  std::vector<RotatedData> data;
  for (const bool metric : {false, true})
    for (const bool weights : {false, true}) {
      const std::vector<double> m = random_covariance(kDim, 4);
      RotatedData one{.dim = kDim, .rows = rows_with_outliers(kRows, kDim, data.size() + 7, 4.0)};
      if (metric) one.metric.assign(m.begin(), m.end());
      if (weights)
        for (const float weight : gaussian(kRows, 9)) one.weights.push_back(std::abs(weight));
      one.shrink_weight = metric ? 4.0 : 1.0;
      data.push_back(std::move(one));
    }
  std::vector<RowCodec> codecs;
  for (const int bits : {2, 4})
    for (const TensorPlan& plan : plain_plans(bits, kDim, ScaleType::fp16)) codecs.emplace_back(plan, 0, kDim);
  codecs.emplace_back(UniformCoder{.bits = 2, .group_size = 32}, 0.9, kDim);
  codecs.emplace_back(UniformCoder{.bits = 3, .group_size = 16, .zero = ZeroKind::integer}, 1.0, kDim);
  Random random(12);
  for (const int coder : {0, 1, 2}) {
    TensorPlan plan = mixed_plan(descending_widths(random, kDim), kDim, coder, ScaleType::bf16, 13);
    codecs.emplace_back(plan, 0, kDim);
    add_row_scale(plan, 14);
    codecs.emplace_back(plan, 0, kDim);
  }
  codecs.emplace_back(ExactCoder{}, 1.0, kDim);

  std::vector<CodingTask> tasks;
  for (const RotatedData& rows : data)
    for (const RowCodec& codec : codecs) tasks.push_back({&rows, &codec});
  const std::vector<double> costs = backend.coding_costs(tasks), clips = backend.clip_costs(tasks);
  const auto covariances = backend.error_covariances(tasks);
  REQUIRE(costs.size() == tasks.size());
  REQUIRE(clips.size() == tasks.size());
  REQUIRE(covariances.size() == tasks.size());
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    INFO("codec " << i % codecs.size() << ", rows " << i / codecs.size());
    const NaiveCost expected = naive_cost(*tasks[i].rows, *tasks[i].codec);
    const double shrink = tasks[i].rows->shrink_weight - 1.0;
    CHECK(costs[i] == Approx(expected.total).epsilon(2e-5).margin(1e-30));
    CHECK(clips[i] == Approx(expected.total + shrink * expected.along * expected.along / expected.energy)
                          .epsilon(2e-5)
                          .margin(1e-30));
    CHECK(relative_difference(covariances[i], expected.covariance) < 2e-6);
    CHECK(backend.coding_costs(std::span(tasks).subspan(i, 1)).front() == costs[i]);
  }
  RotatedData broken = data.front();
  broken.rows[3 * kDim + 5] = std::numeric_limits<float>::infinity();
  const CodingTask task{&broken, &codecs.front()};
  CHECK_THAT(error_text([&] { backend.coding_costs(std::span(&task, 1)); }), StartsWith("numerical: "));
  CHECK_THAT(error_text([&] { backend.clip_costs(std::span(&task, 1)); }), StartsWith("numerical: "));
  CHECK_THAT(error_text([&] { backend.error_covariances(std::span(&task, 1)); }), StartsWith("numerical: "));
}

// ---- k-means -----------------------------------------------------------------------------------------------------

void check_kmeans(Backend& backend) {
  constexpr int kDim = 20;
  constexpr std::size_t kRows = 700;
  const std::vector<float> rows = rows_with_outliers(kRows, kDim, 31, 6.0);
  const auto distance = [&](std::size_t t, const float* c) {
    double sum = 0.0;
    for (std::size_t j = 0; j < kDim; ++j) sum += std::pow(double{rows[t * kDim + j]} - double{c[j]}, 2);
    return sum;
  };
  const auto cluster = [&](const KMeansOptions& options) {
    const ClusterTask task{rows, kDim, options};
    return backend.kmeans(std::span(&task, 1)).front();
  };
  for (const int clusters : {1, 2, 33, 256}) {
    INFO(clusters << " clusters");
    const KMeansOptions options{.clusters = clusters, .restarts = clusters == 33 ? 3 : 1, .seed = 5, .head = 2};
    const KMeansResult found = cluster(options);
    REQUIRE(found.centroids.size() == static_cast<std::size_t>(clusters) * kDim);
    REQUIRE(found.assignment.size() == kRows);
    double inertia = 0.0;
    for (std::size_t t = 0; t < kRows; ++t) {
      std::size_t nearest = 0;
      for (std::size_t c = 1; c < static_cast<std::size_t>(clusters); ++c)
        if (distance(t, found.centroids.data() + c * kDim) < distance(t, found.centroids.data() + nearest * kDim))
          nearest = c;
      CHECK(found.assignment[t] == static_cast<std::int32_t>(nearest));
      inertia += distance(t, found.centroids.data() + nearest * kDim);
    }
    CHECK(found.inertia == Approx(inertia).epsilon(1e-9));
    // Lloyd's algorithm lowers the inertia of its seeds, and the best of several runs is no worse than the first.
    KMeansOptions seeds = options, single = options;
    seeds.max_iterations = 0;
    single.restarts = 1;
    CHECK(found.inertia <= cluster(seeds).inertia);
    CHECK(found.inertia <= cluster(single).inertia);
    const KMeansResult again = cluster(options);
    CHECK(first_bit_difference(again.centroids, found.centroids).empty());
    CHECK(again.assignment == found.assignment);
  }
  CHECK_THAT(error_text([&] { cluster({.clusters = 701}); }), StartsWith("usage: "));
}

void check_sorted(Backend& backend) {
  for (const std::size_t count : {0, 1, 1000}) {
    std::vector<float> numbers = gaussian(count, count + 3), expected = numbers;
    std::sort(expected.begin(), expected.end());
    CHECK(backend.sorted(numbers) == expected);
  }
}

// ---- attention's error under plans -------------------------------------------------------------------------------

void check_judge(Backend& backend) {
  constexpr int kHeads = 3, kDim = 32;
  constexpr std::int64_t kTokens = 120;
  std::vector<kvq::AttentionCase> heads;
  for (std::uint64_t h = 0; h < kHeads; ++h) {
    kvq::AttentionCase one{.dim = kDim, .v_dim = kDim, .queries_per_head = 2, .scale = 0.2, .window = h == 1 ? 50 : 0};
    if (h == 2) one.cap = 3.0, one.sinks = {0.5, -1.0}, one.sink_tokens = 4, one.recent_tokens = 9;
    for (std::int64_t i = 3; i < kTokens; i += 5) one.query.push_back(i);
    one.q = gaussian(2 * one.query.size() * kDim, 60 + h);
    one.k = rows_with_outliers(kTokens, kDim, 70 + h, 3.0);
    one.v = gaussian(kTokens * kDim, 80 + h);
    if (h == 1) one.output_metric = random_covariance(kDim, 3);
    heads.push_back(std::move(one));
  }
  // Reference: the same attention with rows that the codec stored.
  std::vector<OutputError> expected(heads.begin(), heads.end());
  OutputChange energy;
  for (const OutputError& head : expected) energy += head.energy();
  const auto judge = backend.judge_outputs(heads);
  CHECK(judge->energy().squared == Approx(energy.squared).epsilon(1e-5));
  CHECK(judge->energy().curved == Approx(energy.curved).epsilon(1e-5));
  for (const bool per_head : {false, true}) {
    TensorPlan plan;
    plan.coder = UniformCoder{.bits = 3, .group_size = 16};
    plan.rotation.scope = per_head ? Scope::kv_head : Scope::layer;
    plan.rotation.kind = RotationKind::dense;
    const int entries = per_head ? kHeads : 1;
    for (int h = 0; h < entries; ++h) {
      const std::vector<double> matrix = random_orthogonal(kDim, static_cast<std::uint64_t>(h) + 90);
      plan.rotation.matrix.insert(plan.rotation.matrix.end(), matrix.begin(), matrix.end());
      const std::vector<float> center = gaussian(kDim, static_cast<std::uint64_t>(h) + 95, 0.3);
      plan.center.insert(plan.center.end(), center.begin(), center.end());
    }
    plan.clip_ratio.assign(static_cast<std::size_t>(entries), 0.97);
    for (const Side side : kSides) {
      const std::vector<OutputChange> found = judge->changes(plan, side);
      REQUIRE(found.size() == kHeads);
      for (std::size_t h = 0; h < kHeads; ++h) {
        INFO(name(side) << " of head " << h << ", a rotation for each head " << per_head);
        std::vector<float> rows = side == Side::k ? heads[h].k : heads[h].v;
        for (std::size_t t = 0; t < rows.size(); t += kDim)
          reconstruct(plan, static_cast<int>(h), std::span(rows).subspan(t, kDim), kDim);
        const OutputChange change = side == Side::k ? expected[h].of_keys(rows) : expected[h].of_values(rows);
        // A code whose quotient lies within rounding of an edge may be its neighbor.
        CHECK(found[h].squared == Approx(change.squared).epsilon(2e-3));
        CHECK(found[h].curved == Approx(change.curved).epsilon(2e-3));
      }
      CHECK(judge->changes(plan, side)[1].squared == found[1].squared);
    }
  }
}

}  // namespace

void check_conformance(Backend& backend) {
  CHECK(!backend.name().empty());
  check_second_moments(backend);
  check_quadratic_forms(backend);
  check_attention(backend);
  check_eigh(backend);
  check_coded_errors(backend);
  check_kmeans(backend);
  check_sorted(backend);
  check_judge(backend);
}

}  // namespace kvq::test
