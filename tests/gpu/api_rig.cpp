#include "api_rig.h"

#include "support/random_data.h"
#include "support/served_artifact.h"

#include <kvq/codec/codec.h>
#include <kvq/core/dtype.h>
#include <kvq/runtime/api/handles.h>
#include <kvq/runtime/part_rounding.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <stdexcept>
#include <variant>

#include <stdlib.h>

namespace kvq::test {

namespace {

/// Bound on the error of rotations in float32, relative to a row's largest channel. The dense write kernel is the least
/// exact.
constexpr float kRotationError = 0x1p-17f;

struct Coded {
  explicit Coded(const UniformCoder& coder, double clip_ratio, std::span<const float> row)
      : codes(row.size()), numbers(static_cast<std::size_t>(numbers_per_row(coder, static_cast<int>(row.size())))) {
    encode_row(coder, clip_ratio, row, codes, numbers);
  }
  bool operator==(const Coded&) const = default;
  std::vector<std::uint8_t> codes;
  std::vector<float> numbers;
};

/// Does the row get the same codes, scales and minima whatever the rounding errors of the rotation are, quantized at
/// once or from bfloat16? The four probes move all channels up, down, outwards and inwards by the largest error, which
/// moves both extremes, on which scales and minima depend, in all combinations.
bool firm(const TensorPlan& plan, int head, std::span<const float> x) {
  const auto* coder = std::get_if<UniformCoder>(&plan.coder);
  if (!coder || plan.rotation.kind == RotationKind::identity) return true;
  const std::size_t entry = static_cast<std::size_t>(plan.rotation.head_index(head));
  const double clip_ratio = plan.clip_ratio.empty() ? 1.0 : plan.clip_ratio[entry];
  std::vector<float> rotated(x.size()), exact;
  rotate_row(plan, head, x, rotated);
  quantize_exact(exact = rotated);
  const Coded at_once(*coder, clip_ratio, rotated), later(*coder, clip_ratio, exact);
  float largest = 0.0f;
  for (const float y : rotated) largest = std::max(largest, std::abs(y));
  // The terms of a transform may be larger than their sum.
  const float step = std::max(kRotationError * largest, static_cast<float>(4.0 * row_rounding(plan.rotation, head, x)));
  for (const bool outwards : {false, true})
    for (const float by : {step, -step}) {
      std::vector<float> moved = rotated;
      for (float& y : moved) y += outwards && y < 0.0f ? -by : by;
      if (Coded(*coder, clip_ratio, moved) != at_once) return false;
      quantize_exact(moved);
      if (Coded(*coder, clip_ratio, moved) != later) return false;
    }
  return true;
}

std::vector<std::uint16_t> row(std::uint64_t seed, std::int64_t place, std::uint64_t kind, std::int32_t count) {
  const std::vector<float> x =
      gaussian(static_cast<std::size_t>(count), (seed * 1000 + static_cast<std::uint64_t>(place)) * 4 + kind);
  std::vector<std::uint16_t> bits(x.size());
  std::transform(x.begin(), x.end(), bits.begin(), float_to_bf16);
  return bits;
}

/// For each head the first random row that is firm.
std::vector<std::uint16_t> firm_rows(const TensorPlan& plan, std::uint64_t seed, std::int64_t place, std::uint64_t kind,
                                     std::int32_t heads, std::int32_t dim) {
  std::vector<std::uint16_t> all;
  for (int head = 0; head < heads; ++head)
    for (std::uint64_t draw = 0;; ++draw) {
      const std::uint64_t stream = draw * static_cast<std::uint64_t>(heads) + static_cast<std::uint64_t>(head);
      std::vector<std::uint16_t> bits = row(seed, place, kind + (stream << 32), dim);
      if (plan.transform) {
        std::vector<float> wanted(bits.size());
        std::transform(bits.begin(), bits.end(), wanted.begin(), bf16_to_float);
        bits = rows_for(plan, wanted, head);
      }
      std::vector<float> x(bits.size());
      std::transform(bits.begin(), bits.end(), x.begin(), bf16_to_float);
      if (!firm(plan, head, x)) continue;
      all.insert(all.end(), bits.begin(), bits.end());
      break;
    }
  return all;
}

template <typename T>
void append(std::vector<T>& to, const std::vector<T>& more) {
  to.insert(to.end(), more.begin(), more.end());
}

kvq_layer_geometry geometry_of(const LayerPlan& plan) {
  auto g = runtime::init<kvq_layer_geometry>();
  g.num_q_heads = plan.geometry.num_q_heads, g.num_kv_heads = plan.geometry.num_kv_heads;
  g.head_dim = plan.geometry.head_dim, g.sliding_window = plan.geometry.sliding_window;
  return g;
}

/// The plan of a layer as this rank holds it.
const LayerPlan& layer_of(const runtime::Model& model, int layer) { return abi::layer_of(model.get(), layer).plan; }

}  // namespace

void expect_ok(kvq_status status, const kvq_error& error) {
  if (status != KVQ_OK) throw std::runtime_error(std::string(kvq_status_string(status)) + ": " + error.message);
}

std::vector<std::uint16_t> random_rows(int rows, int width, unsigned seed) {
  std::vector<std::uint16_t> all(static_cast<std::size_t>(rows) * static_cast<std::size_t>(width));
  for (std::uint16_t& x : all) {
    seed = seed * 1664525u + 1013904223u;
    x = float_to_bf16(static_cast<float>(static_cast<int>(seed >> 9) - (1 << 22)) / (1 << 21));
  }
  return all;
}

kvq_plan_options plan_options(std::int32_t batch, std::int32_t queries, std::int32_t keys) {
  auto options = runtime::init<kvq_plan_options>();
  options.max_batch = batch;
  if (queries > 0)
    options.max_prefill_batch = batch, options.max_prefill_queries = queries, options.max_prefill_keys = keys;
  return options;
}

Engine::Engine(const Artifact& artifact, kvq_model_options options, std::uint32_t fold) {
  std::string pattern = (std::filesystem::temp_directory_path() / "kvq-engine-XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("cannot make a temporary folder");
  path = pattern + "/served.safetensors";
  save_artifact(artifact, path);
  std::vector<kvq_layer_geometry> geometry;
  for (const LayerPlan& plan : artifact.layers) {
    geometry.push_back(geometry_of(plan));
    if (!plan.k.rotation.channel_scale.empty()) geometry.back().fold = fold;
  }
  options.num_layers = options.num_geometries = static_cast<std::int32_t>(geometry.size());
  options.geometry = geometry.data();
  model = std::make_unique<runtime::Model>(path, options);
  memory = DeviceMemory(model->device_bytes());
  device_model = std::make_unique<runtime::DeviceModel>(*model, memory.get(), memory.bytes(), nullptr);
}

Engine::~Engine() {
  std::error_code ignored;
  std::filesystem::remove_all(std::filesystem::path(path).parent_path(), ignored);
}

LayerRunner::LayerRunner(const Engine& engine, std::int32_t layer, const runtime::PagedCacheOptions& options,
                         kvq_stream stream)
    : cache(*engine.model, *engine.device_model, options, stream),
      info(engine.model->layer(layer)),
      layer_(layer),
      plan_(layer_of(*engine.model, layer)),
      stream_(stream),
      kernels_(*engine.model, plan_options(options.max_sequences)),
      workspace_(kernels_.workspace_bytes(KVQ_KERNEL_DECODE)),
      out_(static_cast<std::size_t>(options.max_sequences * info.num_q_heads * info.head_dim) * 2),
      lse_(static_cast<std::size_t>(options.max_sequences * info.num_q_heads) * 4) {}

std::vector<std::uint16_t> LayerRunner::key(std::uint64_t seed, std::int64_t position) const {
  std::vector<std::uint16_t> bits = firm_rows(plan_.k, seed, position, 0, info.num_kv_heads, info.head_dim);
  for (std::size_t i = 0; scaled_ && i < bits.size(); ++i)
    bits[i] = float_to_bf16(bf16_to_float(bits[i]) * plan_.k.rotation.channel_scale[i]);
  return bits;
}
std::vector<std::uint16_t> LayerRunner::value(std::uint64_t seed, std::int64_t position) const {
  return firm_rows(*plan_.v, seed, position, 1, info.num_kv_heads, info.head_dim);
}
std::vector<std::uint16_t> LayerRunner::query(std::uint64_t seed, std::int64_t length) const {
  const std::vector<std::uint16_t> bits = row(seed, length, 2, info.num_q_heads * info.head_dim);
  if (!plan_.k.transform) return bits;
  std::vector<float> wanted(bits.size());
  std::transform(bits.begin(), bits.end(), wanted.begin(), bf16_to_float);
  std::vector<std::uint16_t> queries = queries_for(plan_.k, info.num_kv_heads, wanted);
  const std::size_t dim = static_cast<std::size_t>(info.head_dim),
                    group = static_cast<std::size_t>(info.num_q_heads / info.num_kv_heads);
  for (std::size_t i = 0; scaled_ && i < queries.size(); ++i)
    queries[i] =
        float_to_bf16(bf16_to_float(queries[i]) / plan_.k.rotation.channel_scale[i / dim / group * dim + i % dim]);
  return queries;
}

std::uint64_t LayerRunner::seed_of(std::int32_t sequence, std::int64_t position) const {
  const auto own = tokens.find(sequence);
  if (own == tokens.end()) return rows.count(sequence) ? rows.at(sequence) : 0;
  return static_cast<std::uint64_t>(own->second.at(static_cast<std::size_t>(position)));
}

bool LayerRunner::begin(std::span<const Growth> batch) {
  std::vector<std::uint16_t> q, k, v;
  for (const Growth& g : batch) {
    const std::int64_t length = cache.allocator().length(g.sequence);
    for (int i = 0; i < g.tokens; ++i)
      append(k, key(seed_of(g.sequence, length + i), length + i)),
          append(v, value(seed_of(g.sequence, length + i), length + i));
    const std::int64_t after = length + g.tokens;
    append(q, query(after > 0 ? seed_of(g.sequence, after - 1) : 0, after));
  }
  if (!cache.step(batch, stream_)) return false;
  check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  q_ = to_device<std::uint16_t>(q, stream_), k_ = to_device<std::uint16_t>(k, stream_),
  v_ = to_device<std::uint16_t>(v, stream_);
  batch_ = batch.size();
  return true;
}

void LayerRunner::run() {
  auto error = runtime::init<kvq_error>();
  kvq_write_args write = cache.write_args();
  write.k = k_.get(), write.v = v_.get();
  expect_ok(kernels_.write(cache.handle(), layer_, write, stream_, &error), error);
  kvq_decode_args decode = cache.decode_args();
  decode.q = q_.get(), decode.out = out_.get(), decode.lse_natural = lse_.get<float>();
  decode.workspace = workspace_.get(), decode.workspace_bytes = workspace_.bytes();
  expect_ok(kernels_.decode(cache.handle(), layer_, decode, stream_, &error), error);
}

std::vector<std::uint16_t> LayerRunner::results() {
  std::vector<std::uint16_t> out(batch_ * static_cast<std::size_t>(info.num_q_heads * info.head_dim));
  to_host<std::uint16_t>(out_, out, stream_);
  return out;
}

std::vector<float> LayerRunner::lse() {
  std::vector<float> values(batch_ * static_cast<std::size_t>(info.num_q_heads));
  to_host<float>(lse_, values, stream_);
  return values;
}

std::vector<std::uint16_t> LayerRunner::step(std::span<const Growth> batch) {
  if (!begin(batch)) return {};
  run();
  return results();
}

}  // namespace kvq::test
