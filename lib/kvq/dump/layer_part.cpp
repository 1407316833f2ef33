#include <kvq/dump/layer_part.h>

#include <kvq/core/error.h>
#include <kvq/core/text.h>

#include <algorithm>
#include <cmath>

namespace kvq {

void fail_at(const hdf5::Object& object, const std::string& what, ErrorKind kind) {
  throw Error{kind, fmt::format("{}: {}", object.place(), what)};
}

namespace {

constexpr std::int64_t kMaxHeads = 4096;  // the artifact's limit
constexpr std::int64_t kMaxHeadDim = 1024;
constexpr std::int64_t kMaxWindow = (std::int64_t{1} << 30) - 1;  // the artifact's limit
constexpr double kMaxFactor = 100.0;                              // with kMostMagnitude, keeps every logit finite

constexpr double kMaxLogit = 1e6;  // of caps and sinks

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const std::int64_t extent : shape)
    text += (text.empty() ? "" : ", ") + (extent < 0 ? "any" : std::to_string(extent));
  return "[" + text + "]";
}

/// -1 matches any extent.
void expect_shape(const hdf5::Dataset& dataset, const std::vector<std::int64_t>& expected) {
  const bool fits =
      std::ranges::equal(dataset.shape(), expected, [](auto is, auto want) { return want == -1 || is == want; });
  if (!fits)
    fail_at(dataset, fmt::format("expected shape {}, found {}", shape_text(expected), shape_text(dataset.shape())));
}

double read_factor(const hdf5::Object& object, const char* name) {
  const double value = object.float_attribute(name);
  if (!(value > 0.0 && value <= kMaxFactor))
    fail_at(object, fmt::format("{}: expected a positive number up to {:g}, found {}", name, kMaxFactor, value));
  return value;
}

double read_cap(const hdf5::Group& layer) {
  const double value = layer.float_attribute("logit_softcapping");
  if (!(value > 0.0 && value <= kMaxLogit))
    fail_at(layer, fmt::format("logit_softcapping: expected a positive number up to {:g}, found {}", kMaxLogit, value));
  return value;
}

std::vector<double> read_sinks(const hdf5::Group& layer, int num_q_heads) {
  const hdf5::Dataset dataset = layer.dataset("sink_logits");
  if (dataset.element() != hdf5::Element::f64) fail_at(dataset, "expected float64, found " + dataset.type_text());
  expect_shape(dataset, {num_q_heads});
  std::vector<double> values(static_cast<std::size_t>(num_q_heads));
  dataset.read(std::as_writable_bytes(std::span(values)));
  for (std::size_t h = 0; h < values.size(); ++h)
    if (!(std::abs(values[h]) <= kMaxLogit))
      fail_at(dataset,
              fmt::format("query head {}: expected a magnitude up to {:g}, found {}", h, kMaxLogit, values[h]));
  return values;
}

AttentionKind read_kind(const hdf5::Group& layer) {
  const std::string word = layer.string_attribute("kind");
  if (word == "gqa") return AttentionKind::gqa;
  if (word == "mla_rope") return AttentionKind::mla_rope;
  fail_at(layer, fmt::format("kind '{}' is not supported, expected gqa or mla_rope", printable(word)),
          ErrorKind::unsupported);
}

RopeLayout read_layout(const hdf5::Group& layer) {
  const std::string word = layer.string_attribute("rope_layout");
  if (word == "none") return RopeLayout::none;
  if (word == "half") return RopeLayout::half;
  if (word == "interleaved") return RopeLayout::interleaved;
  fail_at(layer, fmt::format("rope_layout '{}' is not supported, expected half, interleaved or none", printable(word)),
          ErrorKind::unsupported);
}

std::vector<double> read_inv_freq(const hdf5::Group& layer, int rotary_dim) {
  const hdf5::Dataset dataset = layer.dataset("rope_inv_freq");
  if (dataset.element() != hdf5::Element::f64) fail_at(dataset, "expected float64, found " + dataset.type_text());
  expect_shape(dataset, {rotary_dim / 2});
  std::vector<double> values(static_cast<std::size_t>(rotary_dim / 2));
  dataset.read(std::as_writable_bytes(std::span(values)));
  for (std::size_t j = 0; j < values.size(); ++j)
    if (!std::isfinite(values[j]) || values[j] < 0.0)
      fail_at(dataset, fmt::format("pair {}: expected a frequency that is not negative, found {}", j, values[j]));
  return values;
}

/// @param head_dim  bounds the rotary slice; 0 if head_dim is at fault and no bound is known
RopeStyle read_rope(const hdf5::Group& layer, int head_dim) {
  RopeStyle rope;
  rope.layout = read_layout(layer);
  rope.dim = read_bounded(layer, "rotary_dim", 0, kMaxHeadDim);
  rope.offset = read_bounded(layer, "rotary_offset", 0, kMaxHeadDim);
  if (layer.has_attribute("rope_attention_factor")) rope.attention_factor = read_factor(layer, "rope_attention_factor");
  if (head_dim > 0 && rope.offset + rope.dim > head_dim)
    fail_at(layer, fmt::format("the rotary slice [{}, {}) reaches beyond head_dim {}", rope.offset,
                               rope.offset + rope.dim, head_dim));
  if (rope.layout == RopeLayout::none) {
    if (rope.dim != 0) fail_at(layer, fmt::format("rotary_dim: expected 0 for rope_layout none, found {}", rope.dim));
    return rope;
  }
  if (rope.dim == 0 || rope.dim % 2 != 0)
    fail_at(layer, fmt::format("rotary_dim: expected a positive even number, found {}", rope.dim));
  rope.inv_freq = read_inv_freq(layer, rope.dim);
  return rope;
}

void check_heads(const hdf5::Group& layer, const LayerGeometry& geometry) {
  if (geometry.num_q_heads % geometry.num_kv_heads != 0)
    fail_at(layer, fmt::format("num_q_heads {} is not a multiple of num_kv_heads {}", geometry.num_q_heads,
                               geometry.num_kv_heads));
  if (geometry.kind == AttentionKind::mla_rope && geometry.num_kv_heads != 1)
    fail_at(layer, fmt::format("num_kv_heads: expected 1 for kind mla_rope, found {}", geometry.num_kv_heads));
}

LayerGeometry read_geometry(const hdf5::Group& layer, Faults& faults) {
  LayerGeometry geometry;
  const auto count = faults.count();
  faults.collect([&] { geometry.num_q_heads = read_bounded(layer, "num_q_heads", 1, kMaxHeads); });
  faults.collect([&] { geometry.num_kv_heads = read_bounded(layer, "num_kv_heads", 1, kMaxHeads); });
  faults.collect([&] { geometry.head_dim = read_bounded(layer, "head_dim", 1, kMaxHeadDim); });
  faults.collect([&] { geometry.v_head_dim = read_bounded(layer, "v_head_dim", 1, kMaxHeadDim); });
  faults.collect([&] { geometry.softmax_scale = read_factor(layer, "softmax_scale"); });
  faults.collect([&] { geometry.sliding_window = read_bounded(layer, "sliding_window", 0, kMaxWindow); });
  if (layer.has_attribute("logit_softcapping")) faults.collect([&] { geometry.logit_softcap = read_cap(layer); });
  faults.collect([&] { geometry.kind = read_kind(layer); });
  faults.collect([&] { geometry.rope = read_rope(layer, geometry.head_dim); });
  if (faults.count() == count) faults.collect([&] { check_heads(layer, geometry); });
  if (faults.count() == count && layer.has("sink_logits"))
    faults.collect([&] { geometry.sink_logits = read_sinks(layer, geometry.num_q_heads); });
  return geometry;
}

/// The type that `kvq_dtype` names, after a check that the dataset holds it.
DType read_dtype(const hdf5::Dataset& dataset) {
  const std::string word = dataset.string_attribute("kvq_dtype");
  const auto dtype = activation_dtype(word);
  if (!dtype)
    fail_at(dataset,
            fmt::format("kvq_dtype '{}' is not supported, expected float32, float16 or bfloat16", printable(word)),
            ErrorKind::unsupported);
  using hdf5::Element;
  const Element found = dataset.element();
  const bool fits = *dtype == DType::f32   ? found == Element::f32
                    : *dtype == DType::f16 ? found == Element::f16 || found == Element::u16
                                           : found == Element::u16;
  const char* expected = *dtype == DType::f32 ? "float32" : *dtype == DType::f16 ? "float16 or uint16" : "uint16";
  if (!fits)
    fail_at(dataset, fmt::format("kvq_dtype {} is stored as {}, found {}", word, expected, dataset.type_text()));
  return *dtype;
}

StoredTensor read_activation(const hdf5::Group& layer, const char* name, const std::vector<std::int64_t>& shape) {
  hdf5::Dataset dataset = layer.dataset(name);
  expect_shape(dataset, shape);
  const DType dtype = read_dtype(dataset);
  return {std::move(dataset), dtype};
}

StoredTensor read_o_proj(const hdf5::Group& layer, const LayerGeometry& geometry) {
  hdf5::Dataset dataset = layer.dataset("o_proj");
  if (dataset.element() != hdf5::Element::f16) fail_at(dataset, "expected float16, found " + dataset.type_text());
  expect_shape(dataset, {-1, std::int64_t{geometry.num_q_heads} * geometry.v_head_dim});
  if (dataset.shape()[0] == 0) fail_at(dataset, "has no rows");
  return {std::move(dataset), DType::f16};
}

/// float32 [heads, Dv, Dv]
StoredTensor read_matrices(const hdf5::Group& layer, const char* name, int heads, int v_head_dim) {
  hdf5::Dataset dataset = layer.dataset(name);
  if (dataset.element() != hdf5::Element::f32) fail_at(dataset, "expected float32, found " + dataset.type_text());
  expect_shape(dataset, {heads, v_head_dim, v_head_dim});
  return {std::move(dataset), DType::f32};
}

}  // namespace

int read_bounded(const hdf5::Object& object, const char* name, std::int64_t low, std::int64_t high) {
  const std::int64_t value = object.integer_attribute(name);
  if (value < low || value > high)
    fail_at(object, fmt::format("{}: expected {} to {}, found {}", name, low, high, value));
  return static_cast<int>(value);
}

LayerPart read_layer_part(const hdf5::Group& layer, std::int64_t tokens, Faults& faults) {
  LayerPart part;
  const auto count = faults.count();
  part.geometry = read_geometry(layer, faults);
  if (faults.count() != count) return part;  // without a geometry the tensors' shapes cannot be checked

  const LayerGeometry& g = part.geometry;
  faults.collect([&] { part.q = read_activation(layer, "q", {tokens, g.num_q_heads, g.head_dim}); });
  faults.collect([&] { part.k = read_activation(layer, "k", {tokens, g.num_kv_heads, g.head_dim}); });
  if (g.kind == AttentionKind::gqa || layer.has("v"))
    faults.collect([&] { part.v = read_activation(layer, "v", {tokens, g.num_kv_heads, g.v_head_dim}); });
  if (layer.has("o_proj")) faults.collect([&] { part.o_proj = read_o_proj(layer, g); });
  if (layer.has("o_proj_metric"))
    faults.collect([&] { part.o_proj_metric = read_matrices(layer, "o_proj_metric", g.num_kv_heads, g.v_head_dim); });
  if (layer.has("output_curvature"))
    faults.collect(
        [&] { part.output_curvature = read_matrices(layer, "output_curvature", g.num_q_heads, g.v_head_dim); });
  return part;
}

}  // namespace kvq
