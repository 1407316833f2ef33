#include "decode_check.h"
#include "kernels.h"
#include "measure.h"
#include "reference.h"
#include "rotations.h"

#include <kvq/core/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>

namespace kvq::bench {

namespace {

constexpr double kMostError = 5e-3;  // rounding the result to bfloat16 alone gives 1.7e-3

int round_up(int tokens) { return (tokens + kTileTokens - 1) / kTileTokens * kTileTokens; }

/// One set: a cache with pages in random order.
class Cache {
 public:
  Cache(const Device& device, const DecodeCase& c, unsigned seed)
      : layout_{c.variant->k, c.variant->v, c.num_kv_heads, c.page_size}, pages_of_one_(num_pages(c)) {
    const TileSide exact{c.variant->k.head_dim, 16, c.variant->k.head_dim, 0};
    windows_layout_ = {c.num_kv_heads,
                       exact,
                       exact,
                       c.variant->v,
                       round_up(c.sink_tokens),
                       c.recent_tokens > 0 ? round_up(c.recent_tokens) + kTileTokens : 0};
    const std::int64_t num_pages = std::int64_t{c.batch} * pages_of_one_;
    pages_ = memory_.take<std::byte>(static_cast<std::size_t>(num_pages * layout_.page_bytes()));
    check(fill_pages(device.stream(), pages_, num_pages, layout_, c.variant->k_bfloat, c.variant->v_bfloat, seed));
    if (windows_layout_.tiles() > 0) {
      const std::int64_t bytes = c.batch * windows_layout_.slot_bytes();
      windows_ = memory_.take<std::byte>(static_cast<std::size_t>(bytes));
      check(fill_rows(device.stream(), windows_, bytes / 2, true, seed + 1));
    }
    std::mt19937 random(seed);
    table_.resize(static_cast<std::size_t>(num_pages));
    std::iota(table_.begin(), table_.end(), 0);
    std::shuffle(table_.begin(), table_.end(), random);
    slots_.resize(static_cast<std::size_t>(c.batch));
    std::iota(slots_.rbegin(), slots_.rend(), 0);
    table_on_device_ = memory_.put(table_), slots_on_device_ = memory_.put(slots_);
  }

  void enter(DecodeParams& p) const {
    p.pages = pages_, p.page_stride = layout_.page_bytes();
    p.page_table = table_on_device_, p.page_table_stride = pages_of_one_;
    p.windows = windows_, p.window_slots = slots_on_device_, p.window_layout = windows_layout_;
  }

  void read(const Device& device, const CacheBytes& bytes, unsigned* sink) const {
    check(read_bytes(device.stream(), device.machine().multiprocessors, pages_, bytes.coded, windows_, bytes.exact,
                     sink));
  }

  const WindowLayout& windows_layout() const { return windows_layout_; }

  HostSequence sequence(int index) const {
    HostSequence host;
    const auto bytes = static_cast<std::size_t>(layout_.page_bytes());
    host.pages.resize(bytes * static_cast<std::size_t>(pages_of_one_));
    for (int i = 0; i < pages_of_one_; ++i) {
      const int page = table_[static_cast<std::size_t>(index * pages_of_one_ + i)];
      get_bytes(host.pages.data() + static_cast<std::size_t>(i) * bytes, pages_ + page * layout_.page_bytes(), bytes);
    }
    if (windows_)
      host.window = get(windows_ + slots_[static_cast<std::size_t>(index)] * windows_layout_.slot_bytes(),
                        static_cast<std::size_t>(windows_layout_.slot_bytes()));
    return host;
  }

 private:
  Memory memory_;
  PageLayout layout_;
  WindowLayout windows_layout_;
  int pages_of_one_;
  std::vector<int> table_, slots_;
  std::byte *pages_ = nullptr, *windows_ = nullptr;
  int *table_on_device_ = nullptr, *slots_on_device_ = nullptr;
};

/// The last sequence's last KV head against the codec.
double error_of(const DecodeCase& c, const Cache& cache, const HeadRotations& k, const HeadRotations& v,
                const std::uint16_t* q, const std::uint16_t* out, float softmax_scale) {
  const auto heads = static_cast<std::size_t>(c.num_q_heads / c.num_kv_heads),
             elements = heads * static_cast<std::size_t>(c.variant->k.head_dim),
             first = static_cast<std::size_t>(c.batch) * static_cast<std::size_t>(c.num_q_heads) *
                         static_cast<std::size_t>(c.variant->k.head_dim) -
                     elements;
  const std::vector<float> queries = floats_at(q + first, elements, c.variant->bf16),
                           found = floats_at(out + first, elements, c.variant->bf16);
  const std::vector<double> expected =
      plain_decode(c, cache.windows_layout(), cache.sequence(c.batch - 1), c.num_kv_heads - 1, k.plans.back(),
                   v.plans.back(), queries, static_cast<double>(softmax_scale));
  double error = 0.0, size = 0.0;
  for (std::size_t i = 0; i < elements; ++i) {
    const double difference = static_cast<double>(found[i]) - expected[i];
    error += difference * difference, size += expected[i] * expected[i];
  }
  return std::sqrt(error / size);
}

}  // namespace

DecodeResult measure_decode(const Device& device, const DecodeCase& c) {
  const DecodeVariant& variant = *c.variant;
  const CacheBytes bytes = bytes_of(c);
  DecodeLaunch launch;
  check(variant.plan(launch));

  std::vector<std::unique_ptr<Cache>> sets;
  for (int i = 0; i < num_sets(bytes.total()); ++i)
    sets.push_back(std::make_unique<Cache>(device, c, static_cast<unsigned>(2 * i + 1)));
  Memory memory;
  std::mt19937 random(1);
  const HeadRotations k = random_rotations(c.rotation, c.num_kv_heads, variant.k.head_dim, random),
                      v = random_rotations(c.rotation, c.num_kv_heads, variant.v.head_dim, random);
  const auto rows = static_cast<std::size_t>(c.batch) * static_cast<std::size_t>(c.num_q_heads);
  const std::size_t elements = rows * static_cast<std::size_t>(variant.k.head_dim);
  auto* q = memory.take<std::uint16_t>(elements);
  auto* out = memory.take<std::uint16_t>(elements);
  check(fill_rows(device.stream(), q, static_cast<std::int64_t>(elements), variant.bf16, 3));

  DecodeParams p;
  p.batch = c.batch, p.num_q_heads = c.num_q_heads, p.num_kv_heads = c.num_kv_heads;
  p.softmax_scale = 1.0f / std::sqrt(static_cast<float>(variant.k.head_dim));
  p.q = q, p.out = out, p.q_stride = p.out_stride = std::int64_t{c.num_q_heads} * variant.k.head_dim;
  p.seq_lens = memory.put(std::vector<std::int32_t>(static_cast<std::size_t>(c.batch), c.context));
  p.sink_tokens = c.sink_tokens, p.recent_tokens = c.recent_tokens;
  p.page_shift = page_shift(c.page_size);
  if (c.rotation == CaseRotation::hadamard) {
    p.rotation_k = {k.order, true, memory.put(k.signs), nullptr};
    p.rotation_v = {v.order, true, memory.put(v.signs), nullptr};
  } else if (c.rotation == CaseRotation::dense) {
    p.rotation_k = {0, true, nullptr, memory.put(k.matrices)};
    p.rotation_v = {0, true, nullptr, memory.put(v.transposed)};
  }
  p.partials =
      memory.take<float>(static_cast<std::size_t>(launch.blocks) * 2 * static_cast<std::size_t>(launch.record_floats));
  p.arrivals = memory.zeros<std::int32_t>(static_cast<std::size_t>(c.batch) * static_cast<std::size_t>(c.num_kv_heads));
  const auto run = [&](int i) {
    sets[static_cast<std::size_t>(i) % sets.size()]->enter(p);
    check(variant.run(launch, p, device.stream()));
  };
  sets[0]->enter(p);
  check(check_decode(variant, p));

  DecodeResult result;
  device.synchronize();
  run(0);
  result.error = error_of(c, *sets[0], k, v, q, out, p.softmax_scale);
  if (!(result.error <= kMostError))
    throw Error{
        ErrorKind::check_failed,
        fmt::format("{}: batch {}, context {}: error {:.2e} against the codec's attention, expected at most {:.0e}",
                    variant.name, c.batch, c.context, result.error, kMostError)};
  const int calls = num_calls(bytes.total());
  result.time = device.time(calls, run);
  auto* sink = memory.take<unsigned>(1);
  result.floor =
      device.time(calls, [&](int i) { sets[static_cast<std::size_t>(i) % sets.size()]->read(device, bytes, sink); });
  return result;
}

}  // namespace kvq::bench
