#include "calibrate/predict.h"

#include "calibrate/device_rates.h"

#include <kvq/compute/blas.h>
#include <kvq/compute/device_bytes.h>
#include <kvq/compute/device_memory.h>
#include <kvq/compute/parallel.h>
#include <kvq/methods/make_coder.h>
#include <kvq/methods/method.h>
#include <kvq/stats/shards.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>
#include <utility>

namespace kvq {

namespace {

/// Single-precision GEMM rate of the machine: each thread multiplies 512 x 512 matrices in three rounds, of which the
/// best one counts, because other programs may take the processors for a moment; returns the sum of the rates.
double measure_gemm_gflops(int threads) {
  constexpr std::int64_t n = 512;
  std::vector<double> rates(static_cast<std::size_t>(threads));
  parallel_for(threads, [&](std::int64_t index) {
    std::vector<float> a(n * n, 0.5f), b(n * n, 0.25f), c(n * n);
    blas::gemm_nt(n, n, n, 1.0f, a.data(), n, b.data(), n, c.data(), n);
    double best = 0.0;
    for (int round = 0; round < 3; ++round) {
      const auto start = std::chrono::steady_clock::now();
      std::chrono::duration<double> elapsed{};
      int count = 0;
      while (elapsed.count() < 0.05) {
        blas::gemm_nt(n, n, n, 1.0f, a.data(), n, b.data(), n, c.data(), n);
        ++count;
        elapsed = std::chrono::steady_clock::now() - start;
      }
      best = std::max(best, count * 2.0 * n * n * n / elapsed.count() * 1e-9);
    }
    rates[static_cast<std::size_t>(index)] = best;
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
      options.choose_transform ? TransformKind::klt : options.side(side).transform;  // the largest that may be chosen
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
double layer_peak(double raw_bytes, const LayerGeometry& g, const StatsRequest& request, double tokens, int threads) {
  const double group = 4.0 * tokens * ((g.queries_per_kv_head() + 1) * g.head_dim + g.v_head_dim);
  const double panels = threads * 4.0 * 128.0 * tokens;
  const double sample = std::min<double>(static_cast<double>(request.sample_tokens), tokens) *
                        (2.0 * (g.num_q_heads + g.num_kv_heads) * g.head_dim + 2.0 * g.num_kv_heads * g.v_head_dim);
  const double moments = static_cast<double>(request.moments.size()) * 8.0 * g.num_kv_heads * g.head_dim * g.head_dim;
  return raw_bytes + group + panels + 2.0 * sample + 2.0 * moments;
}

double cubed(int dim) { return std::pow(dim / 128.0, 3.0); }

/// What decisions about the sides of a layer take.
struct DecisionWork {
  double searched_rows = 0.0;  ///< whose clip ratio is searched
  double code_seconds = 0.0;   ///< of one processor, to quantize rows
  double coded_rows = 0.0;     ///< of 128 channels
  double kmeans_flops = 0.0;
  double matrices = 0.0;        ///< of 128 x 128, decomposed
  double budget_seconds = 0.0;  ///< of processors beside a device
};

DecisionWork decision_work(const Options& options, const LayerEntry& entry, double sample, double held_out) {
  constexpr double kIterations = 25.0;
  const bool joint = options.budget_bits || options.budget_bytes;
  const int heads = entry.geometry.num_kv_heads;
  DecisionWork work;
  if (std::ranges::find(options.exact_layers, entry.layer) != options.exact_layers.end()) return work;
  for (const Side side : kSides) {
    const SideOptions& own = options.side(side);
    if (own.bits == 16 || (side == Side::v && !entry.has_values)) continue;
    const int dim = entry.geometry.dim(side);
    if (!own.clip) work.searched_rows += heads * sample * dim / 128.0;
    const double coded = heads * (2.0 * sample + (joint ? rates::kTriedBudgets * held_out : 0.0));
    work.coded_rows += coded * dim / 128.0;
    work.code_seconds += coded * dim * traits_of(own.coder).code_seconds;
    work.kmeans_flops += 2.0 * kIterations * heads * sample * own.kmeans * dim * options.kmeans_restarts;
    work.matrices += heads * cubed(dim);
    if (joint) work.budget_seconds += rates::kBudgetSeconds * heads * cubed(dim);
  }
  return work;
}

/// Seconds of a device for the statistics of one layer. @param share  part of the heads that the device has
double device_collect_seconds(const PredictedInput& input, const LayerEntry& entry, double layer_bytes,
                              const std::vector<std::int64_t>& borders, const StatsRequest& request, double share) {
  const LayerGeometry& g = entry.geometry;
  const double tokens = static_cast<double>(input.tokens), number = input.is_bf16 ? 2.0 : 4.0, groups = g.num_kv_heads;
  const auto moment = [&](double heads, double dim) {
    return heads * tokens * dim * (number / rates::kCopyRate + rates::kMomentSeconds) + groups * rates::kGroupSeconds;
  };
  const auto wants = [&](Moment one) { return request.moments.count(one) != 0; };
  double seconds = 0.0;
  if (wants(Moment::query) || wants(Moment::sst)) seconds += moment(g.num_q_heads, g.head_dim);
  if (wants(Moment::key)) seconds += moment(g.num_kv_heads, g.head_dim);
  if (wants(Moment::value)) seconds += moment(g.num_kv_heads, g.v_head_dim);
  if (wants(Moment::sst)) seconds += moment(g.num_kv_heads, g.head_dim) + moment(g.num_kv_heads, g.v_head_dim);
  const bool scored = wants(Moment::scored_query);
  if (scored || wants(Moment::scored_value)) {
    const auto flops_of = [&](std::set<Moment> moments) {
      StatsRequest only = request;
      only.moments = std::move(moments);
      return collect_flops(g, borders, only);
    };
    const double attend = flops_of({Moment::scored_value}), score = flops_of({Moment::scored_query}) - attend;
    const double parts = input.is_bf16 ? 1.0 : rates::kPartsFactor;
    seconds += layer_bytes / rates::kCopyRate + parts * attend / rates::kAttentionRate;
    if (scored) seconds += parts * score / rates::kScoreRate;
  }
  return seconds * share;
}

/// Bytes that verbs want on one device.
double wanted_device_bytes(const PredictedInput& input, const StatsRequest& request, const Options& options,
                           const PredictedMachine& machine) {
  using namespace cuda;
  const bool joint = options.budget_bits || options.budget_bytes;
  const std::int64_t number = input.is_bf16 ? 2 : 4, longest = input.tokens / input.sequences,
                     sample = std::min(request.sample_tokens, input.tokens);
  std::int64_t collect = 0, decide = 0;
  for (const LayerEntry& entry : input.layers) {
    const LayerGeometry& g = entry.geometry;
    const StatsRequest own = restrict_to_layer(request, entry);
    const int heads = (g.num_kv_heads + machine.devices - 1) / machine.devices;
    const auto expect = [&](const Need& need) {
      collect = std::max(collect, need.wanted);
      if (machine.memory_limit == 0) return;
      // The claim of a run, which refuses what this limit has no room for.
      const std::int64_t beside = bytes_beside(lanes_within(machine.memory_limit));
      DeviceMemory memory(std::max<std::int64_t>(machine.memory_limit - beside, 0), beside, {});
      std::mutex mutex;
      Lane lane(memory, mutex);
      const Claim claim(lane, need);
    };
    const MomentShape rows{
        .tokens = input.tokens, .dim = g.head_dim, .heads_per_group = g.queries_per_kv_head(), .number_bytes = number};
    expect(moment_need(rows, heads));
    if (own.moments.count(Moment::scored_value) || own.moments.count(Moment::scored_query))
      expect(attention_need({.tokens = longest,
                             .group = g.queries_per_kv_head(),
                             .k_dim = g.head_dim,
                             .v_dim = g.v_head_dim,
                             .number_bytes = number,
                             .parts_bytes = input.is_bf16 ? 2 : 6,
                             .scored = own.moments.count(Moment::scored_query) != 0},
                            heads));
    // Rows of a side with one error for each clip ratio of a search; under a budget the weights of held-out queries.
    constexpr std::int64_t kRatios = 16;
    const std::int64_t searched = g.num_kv_heads * sample * (4 * g.head_dim + 24);
    decide = std::max(decide, (options.k.clip && options.v.clip ? 2 : kRatios) * searched);
    if (joint)
      decide = std::max(decide, 4 * g.num_q_heads * request.held_out_tokens * (request.held_out_tokens + g.head_dim));
  }
  const std::int64_t decides_at_once = joint ? kMostLanes : 1;
  return static_cast<double>(bytes_beside(kMostLanes) + std::max(collect, decide) + (decides_at_once - 1) * decide);
}

/// Rate of all threads, and how many there are.
void set_processors(Prediction& p, const PredictedMachine& machine, int threads) {
  const int here = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  p.threads = threads > 0 ? threads : machine.cores > 0 ? machine.cores : here;
  if (machine.devices == 0 && machine.cores > 0) p.threads = std::min(p.threads, machine.cores);
  if (machine.core_gflops > 0.0) {
    p.gemm_gflops = machine.core_gflops * p.threads;
    return;
  }
  // Cores that are not there run at the rate of those that are.
  const int measured = machine.cores > 0 ? std::min(p.threads, here) : p.threads;
  p.gemm_gflops = measure_gemm_gflops(measured) * p.threads / measured;
}

double share_of_gemm(int threads) {
  const double doublings = std::log2(std::max(threads, 2) / 2.0);
  return std::max(rates::kLeastOfGemm, rates::kOfGemm - rates::kLessOfGemm * doublings);
}

/// One layer of a run.
struct PredictedLayer {
  double bytes = 0.0, flops = 0.0;  ///< read; of statistics
  double stats_bytes = 0.0;         ///< written
  DecisionWork work;
};

void add_processors_time(Prediction& p, const PredictedLayer& layer, double host_flops, bool joint) {
  using namespace rates;
  const double serial = joint ? kSerialShare : 0.0, shared = serial + (1.0 - serial) / p.threads;
  p.collect_seconds += layer.flops / host_flops + layer.bytes / kReadRate;
  p.decide_seconds += layer.work.kmeans_flops / host_flops + kSearchSeconds * layer.work.searched_rows / p.threads +
                      layer.work.code_seconds * shared;
}

/// @param on_device  seconds of the device with the most heads, for the statistics
void add_device_time(Prediction& p, const PredictedLayer& layer, double on_device, int devices, bool joint) {
  using namespace rates;
  // The next layer is read, and the last one written, while the device is at this one.
  p.collect_seconds +=
      std::max({layer.bytes / kReadRate / kLayersRead, on_device, layer.stats_bytes / kSaveRate / kLayersRead});
  // Searches wait for processors, so that more devices do not make them faster.
  const DecisionWork& work = layer.work;
  const double search = kDeviceSearchSeconds * work.searched_rows + kEighSeconds * work.matrices;
  const double of_budget =
      joint ? std::max(kCodeSeconds * work.coded_rows / devices, work.budget_seconds / p.threads) : 0.0;
  p.decide_seconds +=
      std::max(layer.stats_bytes / kLoadRate / kLayersDecided, search + of_budget) + work.kmeans_flops / kClusterRate;
}

double artifact_bytes(const Options& options, const LayerEntry& entry, double golden_tokens) {
  const LayerGeometry& g = entry.geometry;
  const bool exact = std::ranges::find(options.exact_layers, entry.layer) != options.exact_layers.end();
  double bytes = manifest_bytes(g) + golden_bytes(options, entry, golden_tokens, exact);
  for (const Side side : kSides)
    if (!exact && options.side(side).bits != 16) bytes += side_bytes(options, side, g.num_kv_heads, g.dim(side));
  return bytes;
}

}  // namespace

Prediction predict(const PredictedInput& input, const StatsRequest& request, const Options& options,
                   const PredictedMachine& machine, int threads, bool decides) {
  Prediction p;
  set_processors(p, machine, threads);
  const double host_flops = share_of_gemm(p.threads) * p.gemm_gflops * 1e9, tokens = static_cast<double>(input.tokens);
  const auto at_most = [&](std::int64_t count, double most) { return std::min(static_cast<double>(count), most); };
  const bool joint = options.budget_bits || options.budget_bytes, on_device = machine.devices > 0;
  // Sequence lengths are known only after loading, so predict() assumes equal lengths.
  std::vector<std::int64_t> borders;
  for (std::int64_t s = 0; s <= input.sequences; ++s) borders.push_back(input.tokens * s / input.sequences);
  double largest = 0.0;
  for (std::size_t i = 0; i < input.layers.size(); ++i) {
    const LayerEntry& entry = input.layers[i];
    const LayerGeometry& g = entry.geometry;
    const StatsRequest own = restrict_to_layer(request, entry);
    const PredictedLayer layer{
        .bytes = static_cast<double>(input.layer_bytes[i]),
        .flops = collect_flops(g, borders, own),
        .stats_bytes = static_cast<double>(least_bytes({{entry}, own, {0, input.tokens}})),
        .work = decision_work(options, entry, at_most(request.sample_tokens, tokens),
                              at_most(request.held_out_tokens, tokens / 3.0)),
    };
    p.read_bytes += layer.bytes;
    p.collect_flops += layer.flops;
    if (on_device) {
      const double share =
          static_cast<double>((g.num_kv_heads + machine.devices - 1) / machine.devices) / g.num_kv_heads;
      add_device_time(p, layer, device_collect_seconds(input, entry, layer.bytes, borders, own, share), machine.devices,
                      joint);
    } else {
      add_processors_time(p, layer, host_flops, joint);
    }
    largest = std::max(largest, layer.bytes);
    p.artifact_bytes += artifact_bytes(options, entry, at_most(request.golden_tokens, tokens));
    p.peak_bytes = std::max(p.peak_bytes, layer_peak(layer.bytes, g, request, tokens, p.threads));
  }
  if (on_device) {
    p.start_seconds = rates::kStartSeconds;
    p.collect_seconds += largest / rates::kReadRate;  // the device waits for the first layer
    const double in_work = std::clamp(rates::kBytesInWork / std::max(largest, 1.0), 2.0, rates::kLayersInWork);
    p.peak_bytes += (in_work - 1.0) * largest;
    p.device_bytes = wanted_device_bytes(input, request, options, machine);
    if (machine.memory_limit > 0) p.device_bytes = std::min(p.device_bytes, static_cast<double>(machine.memory_limit));
  }
  if (!decides) p.decide_seconds = 0.0;
  p.seconds = p.start_seconds + p.collect_seconds + p.decide_seconds;
  p.peak_bytes += 2.0 * p.artifact_bytes + 30e6;  // 30 MB for the program, its libraries and their buffers
  return p;
}

}  // namespace kvq
