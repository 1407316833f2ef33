#include "calibrate/predict.h"

#include <kvq/compute/blas.h>
#include <kvq/compute/parallel.h>
#include <kvq/methods/make_coder.h>
#include <kvq/methods/method.h>
#include <kvq/stats/shards.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <thread>

namespace kvq {

namespace {

/// Single-precision GEMM rate of the machine: each thread multiplies 512 x 512 matrices for a tenth of a second;
/// returns the sum of the rates.
double measure_gemm_gflops(int threads) {
  constexpr std::int64_t n = 512;
  std::vector<double> rates(static_cast<std::size_t>(threads));
  parallel_for(threads, [&](std::int64_t index) {
    std::vector<float> a(n * n, 0.5f), b(n * n, 0.25f), c(n * n);
    blas::gemm_nt(n, n, n, 1.0f, a.data(), n, b.data(), n, c.data(), n);
    const auto start = std::chrono::steady_clock::now();
    std::chrono::duration<double> elapsed{};
    int count = 0;
    while (elapsed.count() < 0.1) {
      blas::gemm_nt(n, n, n, 1.0f, a.data(), n, b.data(), n, c.data(), n);
      ++count;
      elapsed = std::chrono::steady_clock::now() - start;
    }
    rates[static_cast<std::size_t>(index)] = count * 2.0 * n * n * n / elapsed.count() * 1e-9;
  });
  return std::accumulate(rates.begin(), rates.end(), 0.0);
}

/// Tensors of a side's rotation with its transform.
struct TransformedTensors : RotationTensors {
  bool inverse = false;  ///< [H, D, D]
  bool scale = false;    ///< [H, D]
};

/// The tensors of a side with its transform. A transform replaces signs and eigenbasis, except `diagonal` in front of a
/// Hadamard.
TransformedTensors rotation_tensors(const Options& options, Side side, int dim) {
  const RotationTensors plain = find_method(options.method).tensors(options, side, dim);
  const TransformKind kind =
      options.choose_transform ? TransformKind::klt : options.side(side).transform;  // most heads get klt
  if (kind == TransformKind::orthogonal) return {plain};
  if (kind == TransformKind::diagonal && !plain.matrix) return {{.signs = plain.signs}, false, true};
  return {{.matrix = true}, true, false};
}

/// Bytes of a plan's tensors: rotation, inverse and eigenbasis [H, D, D]; spectrum, center, channel scales and signs
/// [H, D]; centroids [H, C, D]; widths.
double side_bytes(const Options& options, Side side, int heads, int dim) {
  const SideOptions& asked = options.side(side);
  const double h = options.scope == Scope::layer ? 1 : heads, d = dim;
  const TransformedTensors tensors = rotation_tensors(options, side, dim);
  double bytes = asked.center ? 4.0 * h * d : 0.0;
  if (tensors.matrix) bytes += 4.0 * h * d * d;
  if (tensors.inverse) bytes += 4.0 * h * d * d;
  if (tensors.scale) bytes += 4.0 * h * d;
  if (tensors.basis) bytes += 4.0 * (h * d * d + h * d);
  if (tensors.signs) bytes += h * d;
  if (asked.kmeans > 1) bytes += 4.0 * h * asked.kmeans * d;
  if (asked.allocate != Allocate::none) bytes += 3.0 * h * d;              // channel_bits, channel_order
  if (asked.allocate == Allocate::rope_block) bytes += 5.0 * h * d / 2.0;  // block_bits, block_energy
  return bytes;
}

/// Bytes of a layer's golden rows: queries, outputs, and for each row 16 bits a channel, codes, scale and minimum, and
/// the byte that says whether the row is firm.
double golden_bytes(const Options& options, const LayerEntry& layer, double tokens, bool exact) {
  const LayerGeometry& g = layer.geometry;
  if (tokens == 0.0) return 0.0;
  double bytes = 2.0 * g.num_q_heads * g.head_dim + (layer.has_values ? 4.0 * g.num_q_heads * g.v_head_dim : 0.0);
  for (const Side side : kSides) {
    if (side == Side::v && !layer.has_values) continue;
    const double bits = exact ? 16.0 : options.budget_bits.value_or(options.side(side).bits), dim = g.dim(side);
    bytes += tokens * g.num_kv_heads * (2.0 * dim + dim * bits / 8.0 + 4.0 + 1.0);
  }
  return bytes;
}

/// Bytes of manifest and header, fitted to artifacts of the sample model; rotary frequencies take the most.
double manifest_bytes(const LayerGeometry& geometry) {
  return 1600.0 + 22.0 * static_cast<double>(geometry.rope.inv_freq.size());
}

/// Peak bytes of one layer: raw rows, one head group in float32, panels of S, and the layer's statistics.
double layer_peak(const Dump& dump, const LayerEntry& entry, const StatsRequest& request, std::int64_t num_tokens,
                  int threads) {
  const LayerGeometry& g = entry.geometry;
  const auto tokens = static_cast<double>(num_tokens);
  const double group = 4.0 * tokens * ((g.queries_per_kv_head() + 1) * g.head_dim + g.v_head_dim);
  const double panels = threads * 4.0 * 128.0 * tokens;
  const double sample = std::min<double>(static_cast<double>(request.sample_tokens), tokens) *
                        (2.0 * (g.num_q_heads + g.num_kv_heads) * g.head_dim + 2.0 * g.num_kv_heads * g.v_head_dim);
  const double moments = static_cast<double>(request.moments.size()) * 8.0 * g.num_kv_heads * g.head_dim * g.head_dim;
  return static_cast<double>(dump.layer_bytes(entry.layer)) + group + panels + 2.0 * sample + 2.0 * moments;
}

/// Rows of one side that are quantized, and multiply-adds of clustering them.
struct DecisionWork {
  double coded_rows = 0.0, kmeans_flops = 0.0;
};

DecisionWork decision_work(const Options& options, Side side, int heads, int dim, double sample, double held_out) {
  constexpr double kTriedBudgets = 14.0, kIterations = 25.0;
  const bool joint = options.budget_bits || options.budget_bytes;
  return {
      .coded_rows = heads * (2.0 * sample + (joint ? kTriedBudgets * held_out : 0.0)),
      .kmeans_flops = 2.0 * kIterations * heads * sample * options.side(side).kmeans * dim * options.kmeans_restarts,
  };
}

}  // namespace

Prediction predict(const Dump& dump, const std::vector<LayerEntry>& layers, const StatsRequest& request,
                   const Options& options, std::int64_t tokens, int threads) {
  // Measured with release builds: attention runs at about 0.7 of the GEMM rate; reading and hashing run at about 1.5
  // GB/s; a clip search takes about 30 us for each sampled row and side.
  constexpr double kEfficiency = 0.7, kReadRate = 1.5e9, kSearchSeconds = 3e-5;
  Prediction p;
  p.threads = threads > 0 ? threads : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  p.gemm_gflops = measure_gemm_gflops(p.threads);
  double flops = 0.0, bytes = 0.0, searched_rows = 0.0, coding_seconds = 0.0;
  const double sample = std::min<double>(static_cast<double>(request.sample_tokens), static_cast<double>(tokens));
  const double held_out =
      std::min<double>(static_cast<double>(request.held_out_tokens), static_cast<double>(tokens) / 3.0);
  for (const LayerEntry& entry : layers) {
    const LayerGeometry& g = entry.geometry;
    // Sequence lengths are known only after loading, so predict() assumes equal lengths.
    std::vector<std::int64_t> borders;
    for (std::int64_t s = 0; s <= dump.num_sequences(); ++s) borders.push_back(tokens * s / dump.num_sequences());
    flops += collect_flops(g, borders, restrict_to_layer(request, entry));
    bytes += static_cast<double>(dump.layer_bytes(entry.layer));
    for (const Side side : kSides) {
      if (std::find(options.exact_layers.begin(), options.exact_layers.end(), entry.layer) !=
          options.exact_layers.end())
        continue;
      if (options.side(side).bits == 16) continue;
      const int dim = g.dim(side);
      p.artifact_bytes += side_bytes(options, side, g.num_kv_heads, dim);
      if (!options.side(side).clip) searched_rows += g.num_kv_heads * sample;
      const DecisionWork work = decision_work(options, side, g.num_kv_heads, dim, sample, held_out);
      coding_seconds += work.coded_rows * dim * traits_of(options.side(side).coder).code_seconds;
      flops += work.kmeans_flops;
    }
    const bool exact =
        std::find(options.exact_layers.begin(), options.exact_layers.end(), entry.layer) != options.exact_layers.end();
    p.artifact_bytes +=
        manifest_bytes(g) +
        golden_bytes(options, entry,
                     std::min<double>(static_cast<double>(request.golden_tokens), static_cast<double>(tokens)), exact);
    p.peak_bytes = std::max(p.peak_bytes, layer_peak(dump, entry, request, tokens, p.threads));
  }
  p.seconds = flops / (kEfficiency * p.gemm_gflops * 1e9) + bytes / kReadRate +
              (kSearchSeconds * searched_rows + coding_seconds) / p.threads;
  p.peak_bytes += 2.0 * p.artifact_bytes + 30e6;  // 30 MB for the program, its libraries and their buffers
  return p;
}

}  // namespace kvq
