#include "calibrate/predict.h"

#include "calibrate/device_rates.h"

#include <kvq/compute/blas.h>
#include <kvq/compute/device_bytes.h>
#include <kvq/compute/device_memory.h>
#include <kvq/compute/parallel.h>
#include <kvq/core/error.h>
#include <kvq/core/text.h>
#include <kvq/methods/make_coder.h>
#include <kvq/methods/method.h>
#include <kvq/stats/shards.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <map>
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

/// 0 for a text that is no number from 1 to `most`.
template <typename T>
T number_from_one(const std::string& text, T most) {
  T value{};
  const char* const end = text.data() + text.size();
  const auto [rest, fault] = std::from_chars(text.data(), end, value);
  return fault == std::errc{} && rest == end && value >= 1 && value <= most ? value : T{};
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

}  // namespace

PredictedInput input_of(const Dump& dump, const std::vector<LayerEntry>& layers, std::int64_t tokens) {
  PredictedInput input{.layers = layers, .layer_bytes = {}, .sequences = dump.num_sequences(), .tokens = tokens};
  for (const LayerEntry& entry : layers) {
    const LayerGeometry& g = entry.geometry;
    const std::int64_t numbers = dump.num_tokens() * ((g.num_q_heads + g.num_kv_heads) * g.head_dim +
                                                      (entry.has_values ? g.num_kv_heads * g.v_head_dim : 0));
    input.layer_bytes.push_back(dump.layer_bytes(entry.layer));
    // float16 has the size of bfloat16; only its time on a device differs.
    if (dump.capture_point() == CapturePoint::pre_rope || input.layer_bytes.back() > 3 * numbers) input.is_bf16 = false;
  }
  return input;
}

PredictedInput input_of_geometry(const std::string& text, std::int64_t tokens) {
  const auto refuse = [&](const std::string& fault) {
    throw Error{ErrorKind::usage,
                fmt::format("--geometry: expected layers=N,q-heads=N,kv-heads=N,head-dim=N, found {}", fault),
                "v-head-dim=N, window=N and sequences=N may follow"};
  };
  std::map<std::string, int> values = {{"layers", 0},     {"q-heads", 0}, {"kv-heads", 0}, {"head-dim", 0},
                                       {"v-head-dim", 0}, {"window", 0},  {"sequences", 1}};
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find(',', at), text.size()), equal = std::min(text.find('=', at), end);
    const auto found = values.find(text.substr(at, equal - at));
    constexpr int kMost = 1 << 20;
    int value = 0;
    if (found == values.end() || equal == end) refuse(printable(text));
    const char* const last = text.data() + end;
    if (const auto [rest, fault] = std::from_chars(text.data() + equal + 1, last, value);
        fault != std::errc{} || rest != last || value < 0 || value > kMost)
      refuse(printable(text));
    found->second = value;
    at = end + 1;
  }
  LayerGeometry g{.num_q_heads = values["q-heads"],
                  .num_kv_heads = values["kv-heads"],
                  .head_dim = values["head-dim"],
                  .v_head_dim = values["v-head-dim"] > 0 ? values["v-head-dim"] : values["head-dim"],
                  .sliding_window = values["window"]};
  if (values["layers"] < 1 || g.num_q_heads < 1 || g.num_kv_heads < 1 || g.head_dim < 1 || values["sequences"] < 1 ||
      g.num_q_heads % g.num_kv_heads != 0)
    refuse(printable(text));
  PredictedInput input{.layers = {}, .layer_bytes = {}, .sequences = values["sequences"], .tokens = tokens};
  const std::int64_t channels =
      std::int64_t{g.num_q_heads + g.num_kv_heads} * g.head_dim + std::int64_t{g.num_kv_heads} * g.v_head_dim;
  for (int layer = 0; layer < values["layers"]; ++layer) {
    input.layers.push_back({.layer = layer, .geometry = g});
    input.layer_bytes.push_back(2 * channels * tokens);
  }
  return input;
}

PredictedMachine parse_machine(const std::string& text) {
  std::vector<std::string> words;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find(':', at), text.size());
    words.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  const std::size_t size = words.size();
  if (words[0] == "h200" && size <= 2)
    if (const int devices = size == 1 ? 1 : number_from_one<int>(words[1], 64); devices > 0)
      return {.name = text, .devices = devices, .cores = rates::kCoresBeside};
  if (words[0] == "cpu" && (size == 2 || size == 3)) {
    const int cores = number_from_one<int>(words[1], 4096);
    const double gflops = size == 3 ? number_from_one<double>(words[2], 1e6) : 0.0;
    if (cores > 0 && (size == 2 || gflops > 0.0)) return {.name = text, .cores = cores, .core_gflops = gflops};
  }
  throw Error{ErrorKind::usage,
              fmt::format("--predict-for: expected cpu:CORES, h200 or h200:GPUS, found {}", printable(text, 40))};
}

Prediction predict(const PredictedInput& input, const StatsRequest& request, const Options& options,
                   const PredictedMachine& machine, int threads, bool decides) {
  using namespace rates;
  Prediction p;
  set_processors(p, machine, threads);
  const double host_flops = kOfGemm * p.gemm_gflops * 1e9, tokens = static_cast<double>(input.tokens);
  const double sample = std::min(static_cast<double>(request.sample_tokens), tokens),
               held_out = std::min(static_cast<double>(request.held_out_tokens), tokens / 3.0);
  const bool joint = options.budget_bits || options.budget_bytes, on_device = machine.devices > 0;
  const double serial = joint ? kSerialShare : 0.0, speedup = 1.0 / (serial + (1.0 - serial) / p.threads);
  // Sequence lengths are known only after loading, so predict() assumes equal lengths.
  std::vector<std::int64_t> borders;
  for (std::int64_t s = 0; s <= input.sequences; ++s) borders.push_back(input.tokens * s / input.sequences);
  double read_first = 0.0;
  if (on_device) p.start_seconds = kStartSeconds;
  for (std::size_t i = 0; i < input.layers.size(); ++i) {
    const LayerEntry& entry = input.layers[i];
    const LayerGeometry& g = entry.geometry;
    const StatsRequest own = restrict_to_layer(request, entry);
    const auto bytes = static_cast<double>(input.layer_bytes[i]);
    const double flops = collect_flops(g, borders, own), read = bytes / kReadRate;
    p.read_bytes += bytes;
    p.collect_flops += flops;
    const DecisionWork work = decision_work(options, entry, sample, held_out);
    const double kmeans = work.kmeans_flops / host_flops;
    if (!on_device) {
      p.collect_seconds += flops / host_flops + read;
      p.decide_seconds += kmeans + kSearchSeconds * work.searched_rows / p.threads + work.code_seconds / speedup;
    } else {
      const auto stats_bytes = static_cast<double>(least_bytes({{entry}, own, {0, input.tokens}}));
      // A head is one device's, so the device with the most heads counts.
      const double share =
          static_cast<double>((g.num_kv_heads + machine.devices - 1) / machine.devices) / g.num_kv_heads;
      const double device = device_collect_seconds(input, entry, bytes, borders, own, share);
      // The next layer is read, and the last one written, while the device is at this one.
      p.collect_seconds += std::max({read, device, stats_bytes / kSaveRate});
      read_first = std::max(read_first, read);
      // A search calls one device at a time. Under a budget layers are side by side, on all devices in turn.
      const double search = kDeviceSearchSeconds * work.searched_rows + kEighSeconds * work.matrices;
      const double of_budget =
          joint ? std::max(kCodeSeconds * work.coded_rows / machine.devices, work.budget_seconds / p.threads) : 0.0;
      p.decide_seconds += std::max(stats_bytes / kLoadRate, search + of_budget) + kmeans;
    }
    const bool exact = std::ranges::find(options.exact_layers, entry.layer) != options.exact_layers.end();
    for (const Side side : kSides)
      if (!exact && options.side(side).bits != 16)
        p.artifact_bytes += side_bytes(options, side, g.num_kv_heads, g.dim(side));
    p.artifact_bytes +=
        manifest_bytes(g) +
        golden_bytes(options, entry, std::min(static_cast<double>(request.golden_tokens), tokens), exact);
    p.peak_bytes = std::max(p.peak_bytes, layer_peak(bytes, g, request, tokens, p.threads) + (on_device ? bytes : 0.0));
  }
  p.collect_seconds += read_first;
  if (!decides) p.decide_seconds = 0.0;
  p.seconds = p.start_seconds + p.collect_seconds + p.decide_seconds;
  if (on_device) {
    p.device_bytes = wanted_device_bytes(input, request, options, machine);
    if (machine.memory_limit > 0) p.device_bytes = std::min(p.device_bytes, static_cast<double>(machine.memory_limit));
  }
  p.peak_bytes += 2.0 * p.artifact_bytes + 30e6;  // 30 MB for the program, its libraries and their buffers
  return p;
}

}  // namespace kvq
