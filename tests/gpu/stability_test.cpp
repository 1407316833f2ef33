#include "api_expected.h"
#include "api_rig.h"

#include "support/random_data.h"
#include "support/served_artifact.h"

#include <kvq/codec/codec.h>
#include <kvq/codec/page_codec.h>
#include <kvq/codec/row_codec.h>
#include <kvq/core/dtype.h>
#include <kvq/plan/layer_pages.h>

#include <catch2/catch.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

using namespace kvq;
using namespace kvq::test;

/// Long decodes: two sequences grow by one token a step through the interface, as in an engine. At chosen steps all
/// bytes of the pages are those of the codec, and attention is that over the codec's rows, whatever the length.
///
/// Rows are small integers, and maps have the entries 0 and +-1/8. So rotated rows are exact in any order of sums, the
/// kernels quantize the numbers that the codec quantizes, and codes must be equal. (Not those of the tuned write
/// kernels, which approximate quotients of rotated rows: encode_rotated.cuh.)
namespace {

constexpr int kKvHeads = 2, kQHeads = 8, kLayer = 0;
constexpr int kSequences = 2;

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

// ---- Formats

/// Lloyd-Max codes of 2 bits for rows of so many channels on the sphere: sphere_codebook().
constexpr float kLloydMax128[] = {-1.50519298f, -0.45245325f, 0.45245325f, 1.50519298f};
constexpr float kLloydMax64[] = {-1.49997480f, -0.45211895f, 0.45211895f, 1.49997480f};

/// The thetas of trellis_taps().
TrellisTaps two_bit_taps() {
  return {.bits = 2,
          .memory = 3,
          .search = TrellisSearch::integer,
          .theta = {0.955407229f, 0.953921669f, -0.519271679f, 0.508955923f, 0.482909586f, 0.52327051f, 0.956043081f,
                    -0.933100524f}};
}
TrellisTaps three_bit_taps() {
  return {.bits = 3,
          .memory = 1,
          .search = TrellisSearch::integer,
          .theta = {1.37657522f, -1.09347555f, 0.68231607f, 0.947085401f, 1.08014076f, 0.488084484f}};
}

/// A dense rotation of each head: Hadamard blocks of 64 between permutations and signs of channels.
void add_dense(TensorPlan& plan, std::uint64_t seed) {
  Random random(seed);
  plan.rotation.kind = RotationKind::dense;
  constexpr unsigned kBlock = 64;
  for (int head = 0; head < kKvHeads; ++head) {
    std::array<unsigned, kDim> rows, columns;
    for (auto* order : {&rows, &columns}) {
      std::iota(order->begin(), order->end(), 0u);
      for (int i = kDim - 1; i > 0; --i) std::swap((*order)[size(i)], (*order)[size(random.integer(0, i))]);
    }
    std::array<float, kDim> signs;
    for (float& sign : signs) sign = random.integer(0, 1) ? 0.125f : -0.125f;
    for (const unsigned row : rows)
      for (const unsigned column : columns)
        plan.rotation.matrix.push_back(row / kBlock != column / kBlock   ? 0.0f
                                       : std::popcount(row & column) % 2 ? -signs[row]
                                                                         : signs[row]);
  }
}

/// Hadamard blocks with signs, behind a center.
void add_blocks(TensorPlan& plan, std::uint64_t seed) {
  Random random(seed);
  plan.rotation.kind = RotationKind::block_hadamard, plan.rotation.order = 64;
  for (int i = 0; i < kKvHeads * static_cast<int>(kDim); ++i) {
    plan.rotation.signs.push_back(random.integer(0, 1) ? 1 : -1);
    plan.center.push_back(static_cast<float>(random.integer(-6, 6)));
  }
}

TensorPlan lloyd_max(std::span<const float> table, int group_size, std::uint64_t seed) {
  CodebookCoder coder{.bits = 2, .group_size = group_size};
  coder.tables[2].assign(table.begin(), table.end());
  TensorPlan plan;
  plan.coder = coder;
  add_dense(plan, seed);
  return plan;
}

TensorPlan trellis(std::uint64_t seed) {
  TensorPlan plan;
  plan.coder = TrellisCoder{.taps = {two_bit_taps()}};
  add_blocks(plan, seed);
  return plan;
}

/// Two widths of a trellis with one scale a row. @param count  channels of the larger width
TensorPlan mixed_trellis(int width, int count, std::uint64_t seed) {
  TensorPlan plan;
  TrellisCoder coder{.bits = width, .group_size = 0, .taps = {two_bit_taps()}};
  if (width == 3) coder.taps.push_back(three_bit_taps());
  plan.coder = coder;
  BitAllocation allocation;
  for (int head = 0; head < kKvHeads; ++head) {
    for (int c = 0; c < static_cast<int>(kDim); ++c) {
      allocation.channel_bits.push_back(static_cast<std::uint8_t>(c < count ? width : width - 1));
      allocation.channel_order.push_back(static_cast<std::uint16_t>(c));
    }
    for (int w = 1; w <= kGainWidths; ++w)
      allocation.segment_gain.push_back(w == width ? 1.125f : w == width - 1 ? 0.875f : 1.0f);
  }
  plan.allocation = allocation;
  add_blocks(plan, seed);
  return plan;
}

struct Format {
  const char* name;
  TensorPlan k, v;
  const char* decode;  ///< its kernel
};

std::vector<Format> formats() {
  return {
      {"OSCAR, Lloyd-Max, one group", lloyd_max(kLloydMax128, 128, 1), lloyd_max(kLloydMax128, 128, 2),
       "decode_d128_w8n1_w8n1_h4_bf16"},
      {"OSCAR, Lloyd-Max, groups of 64", lloyd_max(kLloydMax64, 64, 3), lloyd_max(kLloydMax64, 64, 4),
       "decode_generic_bf16"},
      {"trellis, one scale", trellis(7), trellis(8), "decode_d128_w8n1_w8n1_h4_bf16"},
      {"trellis, two widths, one scale", mixed_trellis(2, 96, 9), mixed_trellis(3, 64, 10),
       "decode_d128_w7n1_w10n1_h4_bf16"},
  };
}

// ---- Sequences

/// How sequences live.
struct Life {
  Windows windows;
  int page_size, steps;
  int second;  ///< step at which the second sequence begins
};

Artifact artifact_of(const Format& format, const Life& life) {
  Artifact artifact = served_artifact(life.windows, 0);
  artifact.layers.resize(1), artifact.model.num_layers = 1;
  LayerPlan& layer = artifact.layers[kLayer];
  layer.geometry.num_q_heads = kQHeads, layer.geometry.num_kv_heads = kKvHeads;
  layer.k = format.k, layer.v = format.v;
  return artifact;
}

/// [heads, D] small integers: some channels are larger, and have a mean.
std::vector<std::uint16_t> integers(int heads, std::uint64_t seed) {
  std::vector<float> x = gaussian(size(heads) * kDim, seed, 5.0);
  std::vector<std::uint16_t> bits;
  for (std::size_t i = 0; i < x.size(); ++i)
    bits.push_back(float_to_bf16(std::round(i % 19 == 3 ? 3.0f * x[i] + 9.0f : x[i])));
  return bits;
}

std::vector<std::uint16_t> queries(std::uint64_t seed) {
  std::vector<std::uint16_t> bits;
  for (const float x : gaussian(size(kQHeads) * kDim, seed, 0.35)) bits.push_back(float_to_bf16(x));
  return bits;
}

/// One side of a plan: its codec, and rows in pages and windows.
class SideModel {
 public:
  SideModel(const LayerPlan& layer, Side side, const PageLayout& layout)
      : plan_(*layer.side(side)), side_(side), layout_(layout) {
    for (int head = 0; head < kKvHeads; ++head) {
      codecs_.emplace_back(plan_, head, static_cast<int>(kDim));
      if (is_bits()) segments_.push_back(bit_segments(plan_, head, static_cast<int>(kDim)));
    }
  }

  /// Codes a token and stores it in its page. @param row  [Hkv, D]
  /// @param coded, exact  [Hkv, D] appended: as readers of pages and of windows see it
  void store(std::span<const float> row, std::span<std::byte> page, int slot, std::vector<float>& coded,
             std::vector<float>& exact) const {
    std::vector<float> x_rot(kDim), back(kDim);
    std::vector<std::uint8_t> codes(kDim);
    for (int head = 0; head < kKvHeads; ++head) {
      const RowCodec& codec = codecs_[size(head)];
      std::vector<float> numbers(size(codec.num_numbers()));
      rotate_row(plan_, head, row.subspan(size(head) * kDim, kDim), x_rot);
      codec.encode(x_rot, codes, numbers);
      if (is_bits())
        store_page_row(layout_, side_, scale_type(plan_.coder), head, slot, segments_[size(head)], codes, numbers,
                       page);
      else
        store_page_row(layout_, side_, scale_type(plan_.coder), head, slot, codes, numbers, page);
      quantize_exact(x_rot);
      append(exact, head, x_rot, back);
      codec.decode(codes, numbers, x_rot);
      append(coded, head, x_rot, back);
    }
  }

 private:
  bool is_bits() const { return (side_ == Side::v ? layout_.v : layout_.k).is_bits(); }
  void append(std::vector<float>& rows, int head, std::span<const float> x_rot, std::span<float> back) const {
    unrotate_row(plan_, head, x_rot, back);
    rows.insert(rows.end(), back.begin(), back.end());
  }

  const TensorPlan& plan_;
  Side side_;
  PageLayout layout_;
  std::vector<RowCodec> codecs_ = {};
  std::vector<std::vector<BitSegment>> segments_ = {};  ///< of bit tiles
};

/// Rows [T, Hkv, D] of a sequence.
struct Rows {
  std::vector<float> k_coded, v_coded, k_exact, v_exact;
  std::int64_t length() const { return static_cast<std::int64_t>(k_coded.size() / (kKvHeads * kDim)); }
};

struct Attention {
  std::vector<double> out, lse;  ///< [Hq, D], [Hq]
};

Attention plain_attention(const Rows& rows, const Windows& windows, double scale, std::span<const float> q) {
  const std::int64_t length = rows.length();
  const auto row = [&](const std::vector<float>& exact, const std::vector<float>& coded, std::int64_t t, int head) {
    const bool is_exact = t < windows.sink_tokens || t >= length - windows.recent_tokens;
    return (is_exact ? exact : coded).data() + size(t * kKvHeads + head) * kDim;
  };
  Attention result;
  std::vector<double> scores(size(length));
  for (int i = 0; i < kQHeads; ++i) {
    const int head = i / (kQHeads / kKvHeads);
    const float* query = q.data() + size(i) * kDim;
    for (std::int64_t t = 0; t < length; ++t)
      scores[size(t)] = scale * std::inner_product(query, query + kDim, row(rows.k_exact, rows.k_coded, t, head), 0.0);
    const double largest = *std::max_element(scores.begin(), scores.end());
    std::vector<double> sum(kDim);
    double total = 0.0;
    for (std::int64_t t = 0; t < length; ++t) {
      const double weight = std::exp(scores[size(t)] - largest);
      const float* value = row(rows.v_exact, rows.v_coded, t, head);
      for (std::size_t c = 0; c < kDim; ++c) sum[c] += weight * static_cast<double>(value[c]);
      total += weight;
    }
    for (const double x : sum) result.out.push_back(x / total);
    result.lse.push_back(largest + std::log(total));
  }
  return result;
}

/// Errors of one sequence at one step.
struct Errors {
  std::int64_t length;
  double out;  ///< relative to what is allowed
  double lse;  ///< largest, absolute
};

double mean(const std::vector<Errors>& all, std::int64_t from, std::int64_t to, double Errors::* error) {
  double sum = 0.0;
  int count = 0;
  for (const Errors& each : all)
    if (each.length > from && each.length <= to) sum += each.*error, ++count;
  REQUIRE(count > 0);
  return sum / count;
}

// ---- The decode

class LongDecode {
 public:
  LongDecode(const Format& format, const Life& life)
      : life_(life),
        artifact_(artifact_of(format, life)),
        engine_(artifact_, options_of(life)),
        layout_(page_layout_of(plan(), life.page_size)),
        k_(plan(), Side::k, layout_),
        v_(plan(), Side::v, layout_),
        num_pages_(kSequences * ((life.steps + life.page_size - 1) / life.page_size) + 1),
        cache_(*engine_.model, *engine_.device_model, {.num_pages = num_pages_, .max_sequences = kSequences}, nullptr),
        kernels_(*engine_.model, plan_options(kSequences)),
        workspace_(kernels_.workspace_bytes(KVQ_KERNEL_DECODE)),
        q_in_(kSequences * kQHeads * kDim * 2),
        k_in_(kSequences * kKvHeads * kDim * 2),
        v_in_(kSequences * kKvHeads * kDim * 2),
        out_(kSequences * kQHeads * kDim * 2),
        lse_(kSequences * kQHeads * 4),
        expected_(size(num_pages_ * layout_.page_bytes()), std::byte{0xFF}) {
    check_cuda(cudaMemset(cache_.pages(kLayer), 0xFF, expected_.size()), "cudaMemset");
  }

  std::string decode_kernel() const { return kernels_.kernel(kLayer, KVQ_KERNEL_DECODE).name; }

  void run() {
    for (int step = 0; step < life_.steps; ++step) {
      if (step == 0 || step == life_.second) begin_sequence();
      append_tokens(step);
      if (is_checked()) check();
    }
    check_errors();
  }

 private:
  static kvq_model_options options_of(const Life& life) {
    auto options = runtime::init<kvq_model_options>();
    options.page_size = life.page_size;
    return options;
  }
  const LayerPlan& plan() const { return artifact_.layers[kLayer]; }

  void begin_sequence() {
    REQUIRE(cache_.create() == static_cast<int>(rows_.size()));
    rows_.emplace_back(), errors_.emplace_back();
  }

  /// One token of each sequence, written and attended to.
  void append_tokens(int step) {
    std::vector<Growth> batch;
    for (int s = 0; s < static_cast<int>(rows_.size()); ++s) batch.push_back({s, 1});
    REQUIRE(cache_.step(batch, nullptr));
    std::vector<std::uint16_t> q, k, v;
    for (int s = 0; s < static_cast<int>(rows_.size()); ++s) {
      const std::uint64_t seed = (static_cast<std::uint64_t>(step) * kSequences + static_cast<std::uint64_t>(s)) * 3;
      const std::vector<std::uint16_t> own[] = {queries(seed), integers(kKvHeads, seed + 1),
                                                integers(kKvHeads, seed + 2)};
      q.insert(q.end(), own[0].begin(), own[0].end());
      k.insert(k.end(), own[1].begin(), own[1].end()), v.insert(v.end(), own[2].begin(), own[2].end());
      Rows& rows = rows_[size(s)];
      const std::int64_t position = rows.length();
      const std::int32_t page = cache_.allocator().pages(s)[size(position / life_.page_size)];
      const auto bytes = std::span(expected_).subspan(size(page * layout_.page_bytes()), size(layout_.page_bytes()));
      const int slot = static_cast<int>(position % life_.page_size);
      k_.store(floats(own[1]), bytes, slot, rows.k_coded, rows.k_exact);
      v_.store(floats(own[2]), bytes, slot, rows.v_coded, rows.v_exact);
    }
    put(q_in_, q), put(k_in_, k), put(v_in_, v);
    const kvq_write_args mapped = cache_.write_args();
    auto a = runtime::init<kvq_append_args>();
    auto error = runtime::init<kvq_error>();
    a.sequences = &cache_.sequences(), a.q = q_in_.get(), a.k = k_in_.get(), a.v = v_in_.get(), a.out = out_.get();
    a.slot_mapping = mapped.slot_mapping, a.window_mapping = mapped.window_mapping;
    a.lse_natural = lse_.get<float>();
    a.workspace = workspace_.get(), a.workspace_bytes = workspace_.bytes();
    expect_ok(kernels_.append(cache_.handle(), kLayer, a, nullptr, &error), error);
    q_ = floats(q);
  }
  static void put(const DeviceMemory& to, const std::vector<std::uint16_t>& from) {
    check_cuda(cudaMemcpy(to.get(), from.data(), from.size() * 2, cudaMemcpyHostToDevice), "cudaMemcpy");
  }

  /// At the beginning, at ends of pages, where tokens leave windows and rings wrap, and now and then.
  bool is_checked() const {
    const int sinks = life_.windows.sink_tokens, recent = life_.windows.recent_tokens,
              ring = (recent + 1 + 15) / 16 * 16;
    return std::ranges::any_of(rows_, [&](const Rows& rows) {
      const auto length = static_cast<int>(rows.length()), in_page = length % life_.page_size;
      const bool edge = std::ranges::any_of(std::array{sinks, recent, sinks + recent, ring, 2 * ring},
                                            [&](int border) { return std::abs(length - border) <= 1; });
      return length <= 8 || edge || in_page <= 1 || length % 256 == 0 || length == life_.steps;
    });
  }

  void check() {
    const kvq_fault fault = cache_.handle().fault(nullptr);
    CAPTURE(rows_.front().length(), fault.sequence, fault.value);
    REQUIRE(std::string(kvq_fault_string(fault.code)) == "none");
    check_pages();
    std::vector<std::uint16_t> bits(rows_.size() * kQHeads * kDim);
    std::vector<float> lse(rows_.size() * kQHeads);
    to_host<std::uint16_t>(out_, bits, nullptr), to_host<float>(lse_, lse, nullptr);
    const std::vector<float> out = floats(bits);
    for (std::size_t s = 0; s < rows_.size(); ++s) {
      const Attention expected = plain_attention(rows_[s], life_.windows, plan().geometry.softmax_scale,
                                                 std::span(q_).subspan(s * kQHeads * kDim, kQHeads * kDim));
      const Comparison found = compare(std::span(out).subspan(s * kQHeads * kDim, kQHeads * kDim), expected.out);
      Errors errors{rows_[s].length(), found.error / found.allowed, 0.0};
      for (std::size_t i = 0; i < kQHeads; ++i)
        errors.lse = std::max(errors.lse, std::abs(static_cast<double>(lse[s * kQHeads + i]) - expected.lse[i]));
      CAPTURE(s, errors.length);
      CHECK(found.error <= found.allowed);
      CHECK(errors.lse <= kMostLseError);
      errors_[s].push_back(errors);
    }
  }

  void check_pages() const {
    std::vector<std::byte> found(expected_.size());
    check_cuda(cudaMemcpy(found.data(), cache_.pages(kLayer), found.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    const auto at = std::mismatch(found.begin(), found.end(), expected_.begin()).first - found.begin();
    CAPTURE(at / layout_.page_bytes(), at % layout_.page_bytes());  // page, and byte in it
    REQUIRE(size(at) == found.size());
  }

  /// The last quarter of the steps has no larger errors than those behind the windows.
  void check_errors() const {
    const std::int64_t whole = life_.windows.sink_tokens + life_.windows.recent_tokens, early = whole + life_.steps / 4,
                       late = life_.steps * 3 / 4;
    const auto& all = errors_.front();
    CAPTURE(early, late);
    CHECK(mean(all, late, life_.steps, &Errors::out) <= 1.25 * mean(all, whole, early, &Errors::out));
    CHECK(mean(all, late, life_.steps, &Errors::lse) <= 3.0 * mean(all, whole, early, &Errors::lse) + 1e-4);
  }

  static constexpr double kMostLseError = 2e-3;  // queries are rounded to 16 bits behind their rotation

  Life life_;
  Artifact artifact_;
  Engine engine_;
  PageLayout layout_;
  SideModel k_, v_;
  std::int32_t num_pages_;
  runtime::PagedCache cache_;
  runtime::Plan kernels_;
  DeviceMemory workspace_, q_in_, k_in_, v_in_, out_, lse_;
  std::vector<std::byte> expected_;  ///< all pages
  std::vector<Rows> rows_ = {};      ///< of each sequence
  std::vector<std::vector<Errors>> errors_ = {};
  std::vector<float> q_ = {};  ///< of the last step
};

void run_all(const Life& life) {
  for (const Format& format : formats()) {
    CAPTURE(format.name);
    LongDecode decode(format, life);
    CHECK(decode.decode_kernel() == format.decode);
    decode.run();
  }
}

}  // namespace

TEST_CASE("Thousands of decode steps: codes stay those of the codec, and errors do not grow",
          "[runtime][gpu][stability]") {
  run_all({.windows = {.sink_tokens = 64, .recent_tokens = 256}, .page_size = 64, .steps = 4500, .second = 700});
}

TEST_CASE("A shorter decode with small pages and windows", "[runtime][gpu][stability][emulated]") {
  run_all({.windows = {.sink_tokens = 5, .recent_tokens = 24}, .page_size = 16, .steps = 60, .second = 21});
}
