#include <kvq/dump/layer_loader.h>

#include <kvq/core/error.h>
#include <kvq/dump/number_check.h>
#include <kvq/dump/rope.h>

#include <fmt/ranges.h>
#include <sys/mman.h>
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

namespace kvq {
namespace {

class Hasher {
 public:
  Hasher() : state_(XXH3_createState(), &XXH3_freeState) {
    KVQ_ASSERT(state_ != nullptr);
    XXH3_128bits_reset(state_.get());
  }
  void add(std::span<const std::byte> bytes) { XXH3_128bits_update(state_.get(), bytes.data(), bytes.size()); }
  std::string result() const {
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state_.get()));
    std::string text = "xxh3-128:";
    for (const unsigned char byte : canonical.digest) text += fmt::format("{:02x}", byte);
    return text;
  }

 private:
  std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state_;
};

/// "[5, 2, 17]": the index of an element in a row-major tensor.
std::string index_text(std::size_t flat, const std::vector<std::int64_t>& shape) {
  std::vector<std::string> numbers(shape.size());
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    const auto extent = static_cast<std::size_t>(shape[axis]);
    numbers[axis] = std::to_string(flat % extent);
    flat /= extent;
  }
  return fmt::format("[{}]", fmt::join(numbers, ", "));
}

/// The float32 value of one stored element.
float element_at(DType dtype, std::span<const std::byte> raw, std::size_t index) {
  float value = 0.0f;
  widen(dtype, raw.data() + index * size_of(dtype), 1, &value);
  return value;
}

/// Reads a tensor as stored; checks its numbers and, given a hasher, hashes its bytes.
void read_numbers(const StoredTensor& stored, std::span<std::byte> target, Hasher* hasher) {
  const hdf5::Dataset& dataset = stored.dataset;
  dataset.read(target);
  NumberCheck check(stored.dtype, kMaxMagnitude);
  constexpr std::size_t kBlock = std::size_t{256} << 10;  // small enough to stay in the cache between hash and check
  for (std::size_t begin = 0; begin < target.size(); begin += kBlock) {
    const auto block = target.subspan(begin, std::min(kBlock, target.size() - begin));
    if (hasher != nullptr) hasher->add(block);
    check.add(block);
  }
  if (const auto bad = check.first_bad()) {
    const float value = element_at(stored.dtype, target, *bad);
    const std::string where = index_text(*bad, dataset.shape());
    throw Error{ErrorKind::numerical, std::isfinite(value)
                                          ? fmt::format("{}: {:g} at {}: expected magnitudes below {:g}",
                                                        dataset.place(), value, where, kMaxMagnitude)
                                          : fmt::format("{}: NaN or infinity at {}", dataset.place(), where)};
  }
  if (check.all_zero()) throw Error{ErrorKind::numerical, fmt::format("{}: all numbers are zero", dataset.place())};
}

/// Resizes an empty buffer, on large pages if the system has them: the first touch of a memory page costs more than
/// reading and checking the data on it, and large pages need fewer first touches.
void resize_large(std::vector<std::byte>& buffer, std::size_t size) {
  buffer.reserve(size);
#ifdef MADV_HUGEPAGE
  constexpr std::size_t kPage = 4096, kWorthIt = std::size_t{8} << 20;
  void* begin = buffer.data();
  std::size_t room = size;
  if (size >= kWorthIt && std::align(kPage, kPage, begin, room) != nullptr)
    ::madvise(begin, room, MADV_HUGEPAGE);  // a hint: it may fail
#endif
  buffer.resize(size);
}

/// A tensor of zeros with room for all files' tokens.
ActivationTensor make_tensor(DType dtype, std::int64_t tokens, int heads, int dim) {
  ActivationTensor tensor{.dtype = dtype, .tokens = tokens, .heads = heads, .dim = dim, .raw = {}};
  resize_large(tensor.raw, static_cast<std::size_t>(tokens) * static_cast<std::size_t>(heads) *
                               static_cast<std::size_t>(dim) * size_of(dtype));
  return tensor;
}

/// Reads one file's tokens into `tensor`, from token `first` of the tensor on.
void read_share(const StoredTensor& stored, std::int64_t first, ActivationTensor& tensor, Hasher& hasher) {
  const std::size_t token_bytes = tensor.raw.size() / static_cast<std::size_t>(tensor.tokens);
  const auto share =
      std::span(tensor.raw).subspan(static_cast<std::size_t>(first) * token_bytes, stored.dataset.bytes());
  read_numbers(stored, share, &hasher);
}

using OptionalTensor = std::optional<StoredTensor> LayerPart::*;

/// Reads a tensor that must be equal in all files; empty if no file has it.
std::vector<float> read_shared(int layer, OptionalTensor which, std::span<const DumpPart* const> parts) {
  std::vector<float> values;
  std::vector<std::byte> first;
  for (const DumpPart* part : parts) {
    const auto& stored = part->layers.at(layer).*which;
    if (!stored) return {};  // then no file has the tensor: Dump::open() checked that all agree
    std::vector<std::byte> raw(stored->dataset.bytes());
    read_numbers(*stored, raw, nullptr);
    if (part != parts.front()) {
      if (raw != first)
        throw Error{ErrorKind::bad_input,
                    fmt::format("{}: differs from {}", stored->dataset.place(), parts.front()->name())};
      continue;
    }
    values.resize(raw.size() / size_of(stored->dtype));
    widen(stored->dtype, raw.data(), values.size(), values.data());
    first = std::move(raw);
  }
  return values;
}

/// Checks that finite matrices [heads, dim, dim] are metrics: symmetric up to kMetricAsymmetry times the head's largest
/// element, without a negative diagonal element.
void check_metric(const hdf5::Dataset& dataset, std::span<const float> values) {
  constexpr float kMetricAsymmetry = 1e-5f;
  const auto dim = static_cast<std::size_t>(dataset.shape()[1]), size = dim * dim;
  for (std::size_t first = 0; first < values.size(); first += size) {
    const auto metric = values.subspan(first, size);
    float largest = 0.0f;
    for (const float value : metric) largest = std::max(largest, std::abs(value));
    for (std::size_t i = 0; i < dim; ++i) {
      if (metric[i * dim + i] < 0.0f)
        throw Error{ErrorKind::bad_input,
                    fmt::format("{}: {:g} at {}: expected a diagonal that is not negative", dataset.place(),
                                metric[i * dim + i], index_text(first + i * dim + i, dataset.shape()))};
      for (std::size_t j = 0; j < i; ++j)
        if (std::abs(metric[i * dim + j] - metric[j * dim + i]) > kMetricAsymmetry * largest)
          throw Error{ErrorKind::bad_input,
                      fmt::format("{}: {:g} at {}, {:g} at {}: expected a symmetric matrix", dataset.place(),
                                  metric[i * dim + j], index_text(first + i * dim + j, dataset.shape()),
                                  metric[j * dim + i], index_text(first + j * dim + i, dataset.shape()))};
    }
  }
}

/// Widens a tensor to float32 and applies RoPE (formats/dump.md).
void rotate(const RopeStyle& rope, const std::vector<std::int64_t>& positions, ActivationTensor& tensor) {
  ActivationTensor rotated = make_tensor(DType::f32, tensor.tokens, tensor.heads, tensor.dim);
  const auto row_floats = static_cast<std::size_t>(tensor.heads) * static_cast<std::size_t>(tensor.dim);
  const std::size_t source_bytes = row_floats * size_of(tensor.dtype), target_bytes = row_floats * sizeof(float);
  Rotator rotator(rope);
  std::vector<float> row(row_floats);
  for (std::size_t t = 0; t < positions.size(); ++t) {
    widen(tensor.dtype, tensor.raw.data() + t * source_bytes, row_floats, row.data());
    rotator.set_position(positions[t]);
    for (int head = 0; head < tensor.heads; ++head) rotator.apply(row.data() + std::ptrdiff_t{head} * tensor.dim);
    std::memcpy(rotated.raw.data() + t * target_bytes, row.data(), target_bytes);
  }
  tensor = std::move(rotated);
}

}  // namespace

LayerActivations read_layer(int layer, std::span<const DumpPart* const> parts, const Sequences& joined) {
  const LayerPart& facts = parts.front()->layers.at(layer);
  const LayerGeometry& g = facts.geometry;
  LayerActivations result{
      .layer = layer,
      .geometry = g,
      .cu_seqlens = joined.cu_seqlens,
      .positions = joined.positions,
      .generated = joined.generated,
      .q = make_tensor(facts.q.dtype, joined.tokens(), g.num_q_heads, g.head_dim),
      .k = make_tensor(facts.k.dtype, joined.tokens(), g.num_kv_heads, g.head_dim),
      .v = std::nullopt,
      .o_proj = {},
      .o_proj_metric = {},
      .output_curvature = {},
      .content_hash = {},
  };
  if (facts.v) result.v = make_tensor(facts.v->dtype, joined.tokens(), g.num_kv_heads, g.v_head_dim);

  Hasher hasher;
  hasher.add(std::as_bytes(std::span(joined.cu_seqlens)));
  hasher.add(std::as_bytes(std::span(joined.positions)));
  std::int64_t first = 0;
  for (const DumpPart* part : parts) {
    const LayerPart& stored = part->layers.at(layer);
    read_share(stored.q, first, result.q, hasher);
    read_share(stored.k, first, result.k, hasher);
    if (result.v && stored.v) read_share(*stored.v, first, *result.v, hasher);
    first += part->sequences.tokens();
  }
  result.content_hash = hasher.result();

  result.o_proj = read_shared(layer, &LayerPart::o_proj, parts);
  if (facts.o_proj) result.o_proj_rows = facts.o_proj->dataset.shape()[0];
  result.o_proj_metric = read_shared(layer, &LayerPart::o_proj_metric, parts);
  if (facts.o_proj_metric) check_metric(facts.o_proj_metric->dataset, result.o_proj_metric);
  result.output_curvature = read_shared(layer, &LayerPart::output_curvature, parts);
  if (parts.front()->capture_point == CapturePoint::pre_rope && g.rope.layout != RopeLayout::none) {
    rotate(g.rope, joined.positions, result.q);
    rotate(g.rope, joined.positions, result.k);
  }
  return result;
}

}  // namespace kvq
