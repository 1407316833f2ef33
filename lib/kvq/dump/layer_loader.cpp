#include <kvq/dump/layer_loader.h>

#include <kvq/core/error.h>
#include <kvq/dump/rope.h>
#include <kvq/dump/tensor_numbers.h>

#include <sys/mman.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
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
  void add(const Sequences& sequences) {
    add(std::as_bytes(std::span(sequences.cu_seqlens)));
    add(std::as_bytes(std::span(sequences.positions)));
  }
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
void read_share(const StoredTensor& stored, std::int64_t first, ActivationTensor& tensor,
                std::span<Hasher* const> hashers) {
  const std::size_t token_bytes = tensor.raw.size() / static_cast<std::size_t>(tensor.tokens);
  const auto share =
      std::span(tensor.raw).subspan(static_cast<std::size_t>(first) * token_bytes, stored.dataset.bytes());
  read_numbers(stored, share, [&](std::span<const std::byte> block) {
    for (Hasher* hasher : hashers) hasher->add(block);
  });
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
    read_numbers(*stored, raw);
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

/// Files of equal content, such as a copy of a file, would count their tokens twice.
void expect_distinct(int layer, const std::vector<DumpRange>& ranges, std::span<const DumpPart* const> parts) {
  for (std::size_t i = 0; i < ranges.size(); ++i)
    for (std::size_t j = 0; j < i; ++j)
      if (ranges[i].dump == ranges[j].dump)
        throw Error{ErrorKind::bad_input,
                    fmt::format("{}: layer {}: the same tokens as in {}", parts[i]->name(), layer, parts[j]->name())};
}

}  // namespace

void check_layer(int layer, std::span<const DumpPart* const> parts) {
  std::vector<DumpRange> ranges;
  for (const DumpPart* part : parts) {
    const LayerPart& stored = part->layers.at(layer);
    Hasher hasher;
    hasher.add(part->sequences);
    const auto hash = [&](std::span<const std::byte> block) { hasher.add(block); };
    check_numbers(stored.q, hash);
    check_numbers(stored.k, hash);
    if (stored.v) check_numbers(*stored.v, hash);
    ranges.push_back({.dump = hasher.result(), .first = 0, .count = part->sequences.tokens()});
  }
  expect_distinct(layer, ranges, parts);
  for (const OptionalTensor which : {&LayerPart::o_proj, &LayerPart::o_proj_metric, &LayerPart::output_curvature})
    read_shared(layer, which, parts);
}

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
      .ranges = {},
  };
  if (facts.v) result.v = make_tensor(facts.v->dtype, joined.tokens(), g.num_kv_heads, g.v_head_dim);

  Hasher hasher;
  std::array<Hasher*, 2> all{&hasher, nullptr};
  hasher.add(joined);
  std::int64_t first = 0;
  for (const DumpPart* part : parts) {
    const LayerPart& stored = part->layers.at(layer);
    Hasher own;  // of this file's tokens alone: the same as of all tokens if there is one file
    own.add(part->sequences);
    const std::span<Hasher* const> hashers = std::span(all).first(parts.size() > 1 ? 2 : 1);
    all[1] = &own;
    read_share(stored.q, first, result.q, hashers);
    read_share(stored.k, first, result.k, hashers);
    if (result.v && stored.v) read_share(*stored.v, first, *result.v, hashers);
    const std::string dump = parts.size() > 1 ? own.result() : hasher.result();
    result.ranges.push_back({.dump = dump, .first = 0, .count = part->sequences.tokens()});
    first += part->sequences.tokens();
  }
  result.content_hash = hasher.result();
  expect_distinct(layer, result.ranges, parts);

  result.o_proj = read_shared(layer, &LayerPart::o_proj, parts);
  if (facts.o_proj) result.o_proj_rows = facts.o_proj->dataset.shape()[0];
  result.o_proj_metric = read_shared(layer, &LayerPart::o_proj_metric, parts);
  result.output_curvature = read_shared(layer, &LayerPart::output_curvature, parts);
  if (parts.front()->capture_point == CapturePoint::pre_rope && g.rope.layout != RopeLayout::none) {
    rotate(g.rope, joined.positions, result.q);
    rotate(g.rope, joined.positions, result.k);
  }
  return result;
}

}  // namespace kvq
