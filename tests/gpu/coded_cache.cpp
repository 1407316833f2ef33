#include "coded_cache.h"

#include "support/random_data.h"

#include <kvq/codec/page_codec.h>
#include <kvq/codec/poisoned.h>
#include <kvq/codec/rotation_matrix.h>
#include <kvq/codec/row_codec.h>
#include <kvq/runtime/device_image.h>
#include <kvq/runtime/kernel_choice.h>
#include <kvq/runtime/kernels/decode/variant.h>
#include <kvq/runtime/kernels/dequantize/variant.h>
#include <kvq/runtime/kernels/prefill/variant.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <span>

namespace kvq::test {

namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

double of_16_bits(unsigned short bits, bool bf16) {
  return static_cast<double>(bf16 ? std::bit_cast<float>(unsigned{bits} << 16) : __half2float(__ushort_as_half(bits)));
}
unsigned short in_16_bits(double x, bool bf16) {
  return bf16 ? __bfloat16_as_ushort(__float2bfloat16(static_cast<float>(x)))
              : __half_as_ushort(__float2half(static_cast<float>(x)));
}

/// Rows of one side as attention should see them, in the model's basis.
struct Rows {
  int heads = 0, dim = 0, longest = 0;
  std::vector<double> x;  ///< [B, longest, Hkv, D]
  double* at(int b, int position, int head) {
    return x.data() + ((std::int64_t{b} * longest + position) * heads + head) * dim;
  }
};

/// x_rot @ A^-1 + offsets. @param inverse  empty: the identity  @param offsets  null: zeros
void put_back(std::span<const double> inverse, std::span<const float> x_rot,
              std::initializer_list<const float*> offsets, double* x) {
  const std::size_t d = x_rot.size();
  for (std::size_t i = 0; i < d; ++i) {
    x[i] = inverse.empty() ? static_cast<double>(x_rot[i]) : 0.0;
    for (std::size_t j = 0; !inverse.empty() && j < d; ++j) x[i] += static_cast<double>(x_rot[j]) * inverse[j * d + i];
    for (const float* offset : offsets)
      if (offset) x[i] += static_cast<double>(offset[i]);
  }
}

/// The cache of a case on the device, and its rows.
struct CodedCache {
  Arena arena;
  PagedCacheView view;
  CacheFormat format;
  Rows k, v;
  FaultRecord* faults = nullptr;
  DecodedSides decoded;

  explicit CodedCache(const CodedCase& c) : random_(c.seed) {
    LayerPlan plan{.layer = 0, .geometry = {}, .k = c.k, .v = c.v};
    plan.geometry.num_kv_heads = c.num_kv_heads, plan.geometry.num_q_heads = c.num_kv_heads * c.heads;
    plan.geometry.head_dim = c.k_dim, plan.geometry.v_head_dim = c.v_dim;
    const PageLayout layout = page_layout_of(plan, c.page_size);
    format = {layout.k, layout.v, has_bfloat_scales(c.k), has_bfloat_scales(c.v)};
    const int batch = static_cast<int>(c.lengths.size());
    const int longest = std::max(1, *std::max_element(c.lengths.begin(), c.lengths.end())),
              most_pages = (longest + c.page_size - 1) / c.page_size;
    k = {c.num_kv_heads, c.k_dim, longest, {}}, v = {c.num_kv_heads, c.v_dim, longest, {}};
    for (Rows* rows : {&k, &v}) rows->x.resize(size(std::int64_t{batch} * longest * rows->heads * rows->dim));

    // Pages in falling order; slots beyond the lengths hold NaN and indices out of range.
    view.batch = batch, view.num_kv_heads = c.num_kv_heads, view.seq_lens = arena.put(c.lengths);
    view.windows = {c.sink_tokens, c.recent_tokens};
    view.extents = {batch * most_pages, batch, batch};
    view.page_shift = std::countr_zero(static_cast<unsigned>(c.page_size)), view.page_table_stride = most_pages;
    view.page_stride = layout.page_bytes() + 16;
    std::vector<std::int32_t> table, slots;
    for (int i = 0; i < batch * most_pages; ++i) table.push_back(batch * most_pages - 1 - i);
    for (int b = 0; b < batch; ++b) slots.push_back(batch - 1 - b);
    std::vector<std::byte> pages(size(view.page_stride) * table.size(), std::byte{0xFF});
    const WindowLayouts windows = window_layouts_of(layout, {c.sink_tokens, c.recent_tokens}, 16);
    view.sink_layout = windows.sinks, view.ring_layout = windows.rings;
    std::vector<std::byte> sinks(size(windows.sinks.slot_bytes() * batch), std::byte{0xFF}),
        rings(size(windows.rings.slot_bytes() * batch), std::byte{0xFF});

    for (const Side side : kSides) {
      const TensorPlan& of = side == Side::v ? c.v : c.k;
      Rows& rows = side == Side::v ? v : k;
      for (int head = 0; head < c.num_kv_heads; ++head) {
        const RowCodec codec(of, head, rows.dim);
        const int entry = of.rotation.head_index(head);
        const std::vector<double> inverse = inverse_matrix(of.rotation, entry, rows.dim);
        const float* center = of.center.empty() ? nullptr : of.center.data() + size(entry * rows.dim);
        const std::vector<BitSegment> segments =
            format.side(side == Side::v).is_bits() ? bit_segments(of, head, rows.dim) : std::vector<BitSegment>{};
        for (int b = 0; b < batch; ++b) {
          const int length = c.lengths[size(b)];
          const SequenceTokens tokens = view.windows.tokens_of(length, 0, c.sink_tokens > 0, c.recent_tokens > 0);
          for (int position = 0; position < length; ++position) {
            std::vector<float> x = gaussian(size(rows.dim), random_.bits());
            if (position % 5 == 4)
              for (float& channel : x) channel *= 3.0f;
            if (position == c.poisoned && head == 0) x[size(rows.dim / 2)] = NAN;
            const int page = table[size(b * most_pages + position / c.page_size)];
            const std::span<std::byte> bytes =
                std::span(pages).subspan(size(page * view.page_stride), size(layout.page_bytes()));
            const int slot = position % c.page_size;
            const float* centroid = nullptr;
            if (tokens.is_exact(position)) {
              const bool sink = position < tokens.sink_end;
              const WindowLayout& window = sink ? windows.sinks : windows.rings;
              for (float& channel : x)
                channel = static_cast<float>(of_16_bits(in_16_bits(double{channel}, true), true));
              store_window_row(window, side, head, window.row(position), x,
                               std::span(sink ? sinks : rings)
                                   .subspan(size(slots[size(b)] * window.slot_bytes()), size(window.slot_bytes())));
            } else if (codec.is_exact()) {
              for (float& channel : x)
                channel = static_cast<float>(of_16_bits(in_16_bits(double{channel}, true), true));
              store_page_row(layout, side, head, slot, x, bytes);
            } else {
              std::vector<std::uint8_t> codes(x.size());
              std::vector<float> numbers(size(codec.num_numbers()));
              codec.encode(x, codes, numbers);
              if (segments.empty() && !format.side(side == Side::v).is_bits())
                store_page_row(layout, side, scale_type(of.coder), head, slot, codes, numbers, bytes);
              else
                store_page_row(layout, side, scale_type(of.coder), head, slot, segments, codes, numbers, bytes);
              codec.decode(codes, numbers, x);
              if (of.centroids) {
                const int index = random_.integer(0, of.centroids->count - 1);
                store_page_index(layout, side, head, slot, index, bytes);
                centroid = of.centroids->values.data() + size(entry * of.centroids->count + index) * x.size();
              }
            }
            put_back(inverse, x, {centroid, center}, rows.at(b, position, head));
          }
        }
      }
    }
    if (c.lost >= 0) table[size(c.lost * most_pages)] = 0x3FFFFFFF;
    view.page_table = arena.put(table), view.pages = arena.put(pages);
    view.sink_slots = arena.put(slots), view.ring_slots = arena.put(slots);
    view.sinks = arena.put(sinks), view.rings = arena.put(rings);
    view.faults = faults = arena.put(std::vector<FaultRecord>(1));
    DeviceImage image;
    decoded = {tuned_rows(c.k, layout.k, c.num_kv_heads) == TunedRows::coded,
               tuned_rows(c.v, layout.v, c.num_kv_heads) == TunedRows::coded};
    image.add(plan, {}, c.bf16, layout, {.decode = c.tuned, .dequantize = c.bits, .decoded = decoded});
    const std::span<const std::byte> constants = image.bytes();
    const LayerPointers p = image.pointers(0, arena.put(std::vector(constants.begin(), constants.end())));
    view.code_k = p.code_k, view.code_v = p.code_v;
    view.rotation_k = p.rotation_k, view.rotation_v = p.rotation_v;
    view.center_k = p.center_k, view.center_v = p.center_v;
  }

  DequantizeVariant dequantize(const CodedCase& c) const {
    return c.bits ? bits_dequantize(format, decoded, c.bf16) : generic_dequantize(format, c.bf16);
  }
  int fault() const { return static_cast<int>(get(faults, 1)[0].code); }

 private:
  Random random_;
};

/// Sums of squared differences; rows that should be NaN must be.
struct Difference {
  CodedOutcome& outcome;
  double error = 0.0, plain = 0.0, all = 0.0;
  void add(double found, double truth, bool bf16, std::size_t element) {
    if (std::isnan(found) != std::isnan(truth) && outcome.failure.empty())
      outcome.failure = "element " + std::to_string(element) + ": expected " + std::to_string(truth) + ", found " +
                        std::to_string(found);
    if (std::isnan(truth)) return;
    const double rounded = of_16_bits(in_16_bits(truth, bf16), bf16);
    error += (found - truth) * (found - truth), plain += (rounded - truth) * (rounded - truth), all += truth * truth;
  }
  CodedOutcome finish() {
    outcome.error = std::sqrt(error / std::max(all, 1e-30));
    outcome.plain_error = std::sqrt(plain / std::max(all, 1e-30));
    return outcome;
  }
};

std::vector<unsigned short> random_16_bits(std::int64_t count, std::uint64_t seed, bool bf16) {
  std::vector<unsigned short> all;
  for (const float x : gaussian(size(count), seed)) all.push_back(in_16_bits(double{x}, bf16));
  return all;
}

/// Attention of one query head of one token. @param row  position -> key and value, or null pointers if not seen
template <typename RowsAt>
void plain_attention(const unsigned short* q, bool bf16, int dim, int v_dim, int count, double scale, double softcap,
                     const float* sink, RowsAt rows_at, double* out, double& lse) {
  std::vector<double> scores(size(count), -INFINITY);
  double largest = sink ? double{*sink} : -INFINITY;
  bool any = false, poisoned = false;
  for (int t = 0; t < count; ++t) {
    const double* key = rows_at(t, false);
    if (!key) continue;
    double sum = 0.0;
    for (int c = 0; c < dim; ++c) sum += of_16_bits(q[c], bf16) * key[c];
    sum *= scale;
    if (softcap > 0.0) sum = softcap * std::tanh(sum / softcap);
    scores[size(t)] = sum, largest = std::max(largest, sum), any = true, poisoned = poisoned || std::isnan(sum);
  }
  double sum = sink ? std::exp(double{*sink} - largest) : 0.0;
  std::fill_n(out, v_dim, 0.0);
  for (int t = 0; t < count; ++t) {
    const double* value = rows_at(t, true);
    if (!value) continue;
    const double weight = std::exp(scores[size(t)] - largest);
    sum += weight;
    for (int c = 0; c < v_dim; ++c) out[c] += weight * value[c];
  }
  for (int c = 0; any && c < v_dim; ++c) out[c] /= sum;
  if (poisoned) std::fill_n(out, v_dim, double{NAN});
  lse = poisoned ? double{NAN} : any || sink ? largest + std::log(sum) : -INFINITY;
}

/// The larger one of an error before and that of a number.
double largest_error(double before, double found, double expected) {
  if (std::isnan(expected) || found == expected) return before;
  return std::max(before, std::abs(found - expected));
}
void compare_lse(double found, double expected, CodedOutcome& outcome) {
  if (std::isnan(found) != std::isnan(expected) && outcome.failure.empty()) outcome.failure = "lse: NaN or not";
  outcome.lse_error = largest_error(outcome.lse_error, found, expected);
}

}  // namespace

CodedOutcome decode_coded(const CodedCase& c) {
  CodedCache made(c);
  CodedOutcome outcome;
  Arena& arena = made.arena;
  const int q_heads = c.num_kv_heads * c.heads, batch = static_cast<int>(c.lengths.size());
  DecodeParams p;
  p.cache = made.view, p.num_q_heads = q_heads, p.softmax_scale = 1.0f / std::sqrt(static_cast<float>(c.k_dim));
  p.logit_softcap = c.softcap, p.sliding_window = c.sliding_window;
  std::vector<int> indptr = {0};
  for (int b = 0; b < batch; ++b) indptr.push_back(indptr.back() + (c.new_tokens.empty() ? 1 : c.new_tokens[size(b)]));
  const int tokens = indptr.back();
  Random random(c.seed + 77);
  std::vector<std::uint32_t> masks;
  for (int i = 0; i < tokens; ++i) masks.push_back(random.bits());
  if (!c.new_tokens.empty()) {
    p.q_indptr = arena.put(indptr), p.num_tokens = tokens;
    p.max_new_tokens = *std::max_element(c.new_tokens.begin(), c.new_tokens.end());
    if (c.masks) p.token_masks = arena.put(masks);
  }
  if (!c.first.empty()) p.first = arena.put(c.first);
  if (!c.last.empty()) p.last = arena.put(c.last);
  const std::vector<float> logits = gaussian(size(q_heads), c.seed + 78);
  if (c.sink_logits) p.sink_logits = arena.put(logits);
  const std::vector<unsigned short> q = random_16_bits(std::int64_t{tokens} * q_heads * c.k_dim, c.seed + 79, c.bf16);
  const std::size_t elements = size(tokens) * size(q_heads * c.v_dim);
  auto* out = arena.take<unsigned short>(elements, 0xFF);
  p.q = arena.put(q), p.q_stride = q_heads * c.k_dim, p.out = out, p.out_stride = q_heads * c.v_dim;
  p.lse = arena.take<float>(size(tokens * q_heads), 0xFF);

  const DecodeVariant* built = nullptr;
  if (c.tuned) {
    const CacheFormat& of = made.format;
    built = find_decode_variant({of.k, of.v, of.k_bfloat, of.v_bfloat, c.heads, c.bf16, p.max_new_tokens});
    if (!built) return {.failure = "no tuned kernel is built"};
  }
  const DecodeVariant variant = built ? *built : generic_decode(made.format, c.heads, c.bf16);
  DecodeLaunch launch;
  Status status = variant.plan(launch);
  if (status.ok()) {
    p.workspace = arena.take<std::byte>(
        decode_workspace_bytes(launch, decode_work_tiles(variant, batch, c.num_kv_heads, c.heads, p.max_new_tokens)),
        0xFF);
    status = check_decode(variant, p);
  }
  if (status.ok()) status = variant.run(launch, p, nullptr);
  check(cudaDeviceSynchronize(), "decode");
  if (!status.ok()) return {.failure = status.message()};
  outcome.fault = made.fault();

  const std::vector<unsigned short> found = get(out, elements);
  const std::vector<float> lse = get(p.lse, size(tokens * q_heads));
  Difference difference{outcome};
  std::vector<double> expected(size(c.v_dim));
  for (int b = 0; b < batch; ++b)
    for (int token = indptr[size(b)]; token < indptr[size(b) + 1]; ++token)
      for (int head = 0; head < q_heads; ++head) {
        const int length = c.lengths[size(b)], n = indptr[size(b) + 1] - indptr[size(b)], old = length - n,
                  own = old + token - indptr[size(b)];
        const auto sees = [&](int t) {
          if ((!c.first.empty() && t < c.first[size(b)]) || (!c.last.empty() && t >= c.last[size(b)])) return false;
          if (c.sliding_window > 0 && t <= own - c.sliding_window) return false;
          return t < old || !c.masks ? t <= own : (masks[size(token)] >> (t - old) & 1u) != 0;
        };
        const auto rows_at = [&](int t, bool value) -> const double* {
          return sees(t) ? (value ? made.v : made.k).at(b, t, head / c.heads) : nullptr;
        };
        const std::size_t row = size(token) * size(q_heads) + size(head);
        double sum = 0.0;
        plain_attention(q.data() + row * size(c.k_dim), c.bf16, c.k_dim, c.v_dim, length, double{p.softmax_scale},
                        double{c.softcap}, c.sink_logits ? &logits[size(head)] : nullptr, rows_at, expected.data(),
                        sum);
        if (b == c.lost) sum = NAN, std::fill(expected.begin(), expected.end(), double{NAN});
        for (std::size_t i = 0; i < expected.size(); ++i)
          difference.add(of_16_bits(found[row * expected.size() + i], c.bf16), expected[i], c.bf16,
                         row * expected.size() + i);
        compare_lse(double{lse[row]}, sum, outcome);
      }
  return difference.finish();
}

CodedOutcome dequantize_coded(const CodedCase& c) {
  CodedCache made(c);
  CodedOutcome outcome;
  Arena& arena = made.arena;
  const int batch = static_cast<int>(c.lengths.size());
  std::vector<int> indptr = {0}, first, last;
  for (int b = 0; b < batch; ++b) {
    first.push_back(c.first.empty() ? 0 : std::min(c.first[size(b)], c.lengths[size(b)]));
    last.push_back(c.last.empty() ? c.lengths[size(b)] : std::clamp(c.last[size(b)], first.back(), c.lengths[size(b)]));
    indptr.push_back(indptr.back() + last.back() - first.back());
  }
  DequantizeParams p;
  p.cache = made.view, p.out_indptr = arena.put(indptr), p.num_rows = indptr.back();
  if (!c.first.empty()) p.first = arena.put(c.first);
  if (!c.last.empty()) p.last = arena.put(c.last);
  p.k_stride = c.num_kv_heads * c.k_dim, p.v_stride = c.num_kv_heads * c.v_dim;
  auto* k = arena.take<unsigned short>(size(p.num_rows * p.k_stride), 0xFF);
  auto* v = arena.take<unsigned short>(size(p.num_rows * p.v_stride), 0xFF);
  p.k = k, p.v = v;
  const DequantizeVariant variant = made.dequantize(c);
  DequantizeLaunch launch;
  Status status = variant.plan(launch);
  if (status.ok()) status = check_dequantize(variant, p);
  if (status.ok()) status = variant.run(launch, p, nullptr);
  check(cudaDeviceSynchronize(), "dequantize");
  if (!status.ok()) return {.failure = status.message()};
  outcome.fault = made.fault();
  Difference difference{outcome};
  for (const bool value : {false, true}) {
    Rows& rows = value ? made.v : made.k;
    const int row = rows.heads * rows.dim;
    const std::vector<unsigned short> found = get(value ? v : k, size(p.num_rows * row));
    for (int b = 0; b < batch; ++b)
      for (int i = 0; i < (last[size(b)] - first[size(b)]) * row; ++i) {
        const std::size_t element = size(indptr[size(b)] * row + i);
        const double* expected = rows.at(b, first[size(b)] + i / row, 0);
        difference.add(of_16_bits(found[element], c.bf16), expected[i % row], c.bf16, element);
      }
  }
  return difference.finish();
}

CodedOutcome prefill_coded(const CodedCase& c, const std::vector<int>& chunks) {
  CodedCache made(c);
  CodedOutcome outcome;
  Arena& arena = made.arena;
  const int q_heads = c.num_kv_heads * c.heads, batch = static_cast<int>(c.lengths.size());
  std::vector<int> indptr = {0};
  int longest_chunk = 0, longest = 1;
  for (int b = 0; b < batch; ++b) {
    indptr.push_back(indptr.back() + chunks[size(b)]);
    longest_chunk = std::max(longest_chunk, chunks[size(b)]);
    longest = std::max(longest, chunks[size(b)] + c.lengths[size(b)]);
  }
  const int tokens = indptr.back();
  const std::vector<unsigned short> q = random_16_bits(std::int64_t{tokens} * q_heads * c.k_dim, c.seed + 81, c.bf16),
                                    k = random_16_bits(std::int64_t{tokens} * c.num_kv_heads * c.k_dim, c.seed + 82,
                                                       c.bf16),
                                    v = random_16_bits(std::int64_t{tokens} * c.num_kv_heads * c.v_dim, c.seed + 83,
                                                       c.bf16);
  PrefillParams p;
  p.cache = made.view, p.num_q_heads = q_heads, p.softmax_scale = 1.0f / std::sqrt(static_cast<float>(c.k_dim));
  p.sliding_window = c.sliding_window, p.logit_softcap = c.softcap;
  p.num_tokens = tokens, p.q_indptr = arena.put(indptr), p.max_queries = longest_chunk, p.max_keys = longest;
  p.q = arena.put(q), p.k = arena.put(k), p.v = arena.put(v);
  p.q_stride = q_heads * c.k_dim, p.k_stride = c.num_kv_heads * c.k_dim;
  p.v_stride = c.num_kv_heads * c.v_dim, p.out_stride = q_heads * c.v_dim;
  const std::size_t elements = size(tokens) * size(q_heads * c.v_dim);
  auto* out = arena.take<unsigned short>(elements, 0xFF);
  p.out = out, p.lse = arena.take<float>(size(tokens * q_heads), 0xFF);
  const DequantizeVariant rows = made.dequantize(c);
  const PrefillVariant variant = c.bits ? choose_prefill(rows) : generic_prefill(rows);
  PrefillLaunch launch;
  launch.shape = {batch, q_heads, c.num_kv_heads, longest_chunk, longest, 0, false};
  Status status = check_prefill_shape(variant, rows, launch.shape);
  if (status.ok()) status = variant.plan(rows, launch);
  if (status.ok()) {
    p.workspace = arena.take<std::byte>(size(launch.workspace_bytes), 0xFF);
    status = check_prefill(variant, rows, launch, p);
  }
  if (status.ok()) status = variant.run(rows, launch, p, nullptr);
  check(cudaDeviceSynchronize(), "prefill");
  if (!status.ok()) return {.failure = status.message()};
  outcome.fault = made.fault();

  // The rows of the cache, then those of the chunk.
  Rows all[2] = {{c.num_kv_heads, c.k_dim, longest, {}}, {c.num_kv_heads, c.v_dim, longest, {}}};
  for (const bool value : {false, true}) {
    Rows& to = all[value];
    Rows& cached = value ? made.v : made.k;
    const int row = to.heads * to.dim;
    to.x.resize(size(std::int64_t{batch} * longest * row));
    for (int b = 0; b < batch; ++b) {
      const int prefix = c.lengths[size(b)];
      if (prefix) std::copy_n(cached.at(b, 0, 0), prefix * row, to.at(b, 0, 0));
      for (int i = 0; i < chunks[size(b)] * row; ++i)
        to.at(b, prefix, 0)[i] = of_16_bits((value ? v : k)[size(indptr[size(b)] * row + i)], c.bf16);
    }
  }
  Rows rounded_keys = all[0];
  for (double& x : rounded_keys.x) x = of_16_bits(in_16_bits(x, c.bf16), c.bf16);
  const std::vector<unsigned short> found = get(out, elements);
  const std::vector<float> lse = get(p.lse, size(tokens * q_heads));
  Difference difference{outcome};
  std::vector<double> expected(size(c.v_dim)), unused(size(c.v_dim));
  for (int b = 0; b < batch; ++b)
    for (int token = indptr[size(b)]; token < indptr[size(b) + 1]; ++token)
      for (int head = 0; head < q_heads; ++head) {
        const int own = c.lengths[size(b)] + token - indptr[size(b)];
        const std::size_t row = size(token) * size(q_heads) + size(head);
        const auto attend = [&](Rows& keys, std::vector<double>& result) {
          const auto rows_at = [&](int t, bool value) -> const double* {
            if (c.sliding_window > 0 && t <= own - c.sliding_window) return nullptr;
            return (value ? all[1] : keys).at(b, t, head / c.heads);
          };
          double sum = 0.0;
          plain_attention(q.data() + row * size(c.k_dim), c.bf16, c.k_dim, c.v_dim, own + 1, double{p.softmax_scale},
                          double{c.softcap}, nullptr, rows_at, result.data(), sum);
          return sum;
        };
        const double sum = attend(all[0], expected), rounded = attend(rounded_keys, unused);
        for (std::size_t i = 0; i < expected.size(); ++i)
          difference.add(of_16_bits(found[row * expected.size() + i], c.bf16), expected[i], c.bf16,
                         row * expected.size() + i);
        outcome.lse_plain_error = largest_error(outcome.lse_plain_error, rounded, sum);
        compare_lse(double{lse[row]}, sum, outcome);
      }
  return difference.finish();
}

}  // namespace kvq::test
