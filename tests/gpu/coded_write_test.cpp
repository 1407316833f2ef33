#include "write_case.h"

#include <kvq/codec/codec.h>
#include <kvq/codec/golden_rows.h>
#include <kvq/codec/page_codec.h>
#include <kvq/codec/row_codec.h>
#include <kvq/plan/layer_pages.h>
#include <kvq/runtime/device_image.h>
#include <kvq/runtime/device_memory.h>
#include <kvq/runtime/golden_pages.h>
#include <kvq/runtime/head_slice.h>
#include <kvq/runtime/kernel_choice.h>
#include <kvq/runtime/kernels/common/ring_state.h>
#include <kvq/solve/trellis_tables.h>

#include <catch2/catch.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>

/// Generic writing of rows in bit tiles and of indices of centroids, byte for byte as RowCodec and page_codec.h store
/// them. Plans go through DeviceImage, so what it uploads is tested, too.
using namespace kvq;
using namespace kvq::test;

namespace {

constexpr int kHeads = 3;
constexpr ScaleType kTypes[] = {ScaleType::fp16, ScaleType::bf16, ScaleType::fp32};
constexpr ScaleRule kSearched[] = {ScaleRule::norm, ScaleRule::least_squares, ScaleRule::rms};
constexpr ScaleRule kSymmetric[] = {ScaleRule::norm, ScaleRule::absmax, ScaleRule::least_squares};

TensorPlan uniform(int bits, int group, UniformLevels levels, ScaleRule rule, ScaleType type) {
  TensorPlan plan;
  plan.coder = UniformCoder{.bits = bits, .group_size = group, .levels = levels, .rule = rule, .scale_type = type};
  if (rule == ScaleRule::minmax) plan.clip_ratio.assign(kHeads, 1.0);
  return plan;
}

/// Ascending numbers, not evenly spaced.
std::vector<float> codebook(int bits, std::mt19937& random) {
  std::vector<float> table;
  std::uniform_real_distribution<float> gap(0.5f, 1.5f);
  float at = 0.0f;
  for (int i = 0; i < 1 << bits; ++i) table.push_back(at += gap(random));
  for (float& x : table) x = (x - at * 0.5f) * 5.0f / at;
  return table;
}

TensorPlan codebooks(int bits, int group, bool per_head, ScaleRule rule, ScaleType type) {
  CodebookCoder coder{.bits = bits, .group_size = group, .rule = rule, .scale_type = type, .per_head = per_head};
  std::mt19937 random(static_cast<unsigned>(bits));
  for (int width = group == 0 ? 1 : bits; width <= bits; ++width)
    for (int head = 0; head < (per_head ? kHeads : 1); ++head) {
      const std::vector<float> table = codebook(width, random);
      coder.tables[width].insert(coder.tables[width].end(), table.begin(), table.end());
    }
  TensorPlan plan;
  plan.coder = coder;
  return plan;
}

TrellisTaps taps(int bits, int memory, TrellisSearch search = TrellisSearch::integer) {
  std::mt19937 random(static_cast<unsigned>(10 * bits + memory));
  std::normal_distribution<float> normal;
  TrellisTaps all{.bits = bits, .memory = memory, .search = search};
  for (int i = 0; i < bits * (memory + 1); ++i) all.theta.push_back(normal(random) * 0.8f);
  return all;
}

TensorPlan trellis(std::vector<TrellisTaps> all, int bits, int group, ScaleRule rule, ScaleType type) {
  TensorPlan plan;
  plan.coder =
      TrellisCoder{.bits = bits, .group_size = group, .rule = rule, .scale_type = type, .taps = std::move(all)};
  return plan;
}

/// Widths that differ from head to head. @param ends  for each head the ends of the segments of width 8, 7, ..., 1
TensorPlan mixed(TensorPlan plan, int dim, std::vector<std::vector<int>> ends, bool row_scale) {
  BitAllocation allocation;
  int most = 0;
  for (int head = 0; head < kHeads; ++head) {
    for (int c = 0; c < dim; ++c) {
      int width = 8;
      for (const int end : ends[static_cast<std::size_t>(head)]) width -= c >= end;
      allocation.channel_bits.push_back(static_cast<std::uint8_t>(width));
      allocation.channel_order.push_back(static_cast<std::uint16_t>(c));
      most = std::max(most, width);
    }
    if (!row_scale) continue;
    for (int width = 1; width <= 8; ++width) {
      const auto first = allocation.channel_bits.end() - dim;
      const bool used = std::find(first, allocation.channel_bits.end(), width) != allocation.channel_bits.end();
      allocation.segment_gain.push_back(used ? std::ldexp(1.37f + 0.1f * static_cast<float>(head), width - 4) : 1.0f);
    }
  }
  if (auto* coder = std::get_if<UniformCoder>(&plan.coder)) coder->bits = most;
  if (auto* coder = std::get_if<CodebookCoder>(&plan.coder)) coder->bits = most;
  if (auto* coder = std::get_if<TrellisCoder>(&plan.coder)) coder->bits = most;
  plan.allocation = allocation;
  return plan;
}

/// Three heads with few, many and no segments.
std::vector<std::vector<int>> some_widths(int dim) {
  const int step = dim / 12;
  return {{0, 0, 0, step * 3, step * 3, step * 7, step * 11, step * 11},
          {step, 2 * step, 3 * step, 4 * step + 1, 5 * step + 2, 6 * step + 4, 8 * step, dim},
          {0, 0, 0, 0, 0, 0, 0, 0}};
}

TensorPlan with_centroids(TensorPlan plan, int count, bool joint, int dim, float size = 1.0f) {
  std::mt19937 random(static_cast<unsigned>(count));
  std::normal_distribution<float> normal;
  const int heads = plan.rotation.scope == Scope::layer ? 1 : kHeads;
  Centroids centroids{.count = count, .joint = joint};
  for (int i = 0; i < heads * count * dim; ++i) centroids.values.push_back(normal(random) * size);
  // The last ones repeat the first: the first of equal ones is taken.
  const auto d = static_cast<std::size_t>(dim), each = static_cast<std::size_t>(count) * d;
  for (std::size_t h = 0; h < static_cast<std::size_t>(heads); ++h)
    std::copy_n(centroids.values.begin() + static_cast<std::ptrdiff_t>(h * each), d,
                centroids.values.begin() + static_cast<std::ptrdiff_t>((h + 1) * each - d));
  centroids.inertia.assign(static_cast<std::size_t>(heads), 0.5);
  plan.centroids = std::move(centroids);
  return plan;
}

/// Hadamard blocks of 4 with signs: exact in float32 for rows of small integers.
TensorPlan rotated(TensorPlan plan, int dim) {
  plan.rotation.kind = RotationKind::block_hadamard, plan.rotation.order = 4;
  for (int i = 0; i < kHeads * dim; ++i) plan.rotation.signs.push_back(i * i % 7 % 2 ? 1 : -1);
  return plan;
}

LayerPlan layer_of(TensorPlan k, int k_dim, TensorPlan v, int v_dim) {
  LayerPlan plan{.layer = 0, .geometry = {}, .k = std::move(k), .v = std::move(v)};
  plan.geometry.num_q_heads = plan.geometry.num_kv_heads = kHeads;
  plan.geometry.head_dim = k_dim, plan.geometry.v_head_dim = v_dim;
  plan.geometry.softmax_scale = 1.0;
  return plan;
}

struct Rows {
  int tokens = 0;
  std::vector<std::uint16_t> k, v;  ///< [T, Hkv, D]
};

/// Hard rows among random ones. @param integers  only small integers
Rows random_rows(const LayerPlan& plan, int tokens, bool bf16, unsigned seed, bool integers = false) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const float huge = bf16 ? 1e38f : 6e4f, tiny = bf16 ? 1e-39f : 1e-7f;
  const auto rows = [&](int dim) {
    std::vector<std::uint16_t> all;
    for (int r = 0; r < tokens * kHeads; ++r) {
      const int kind = integers ? 99 : r % 23;
      for (int i = 0; i < dim; ++i) {
        float x = normal(random);
        if (integers) x = std::round(x * 6.0f);
        if (kind == 0) x = 0.0f;
        if (kind == 1) x = i == dim / 3 ? NAN : x;
        if (kind == 2) x = i == dim - 1 ? -HUGE_VALF : x;
        if (kind == 3) x = i == 5 ? 100.0f : 0.0f;
        if (kind == 4) x *= tiny;
        if (kind == 5) x = i % 2 ? huge : -huge;
        if (kind == 6) x = -0.3f;
        if (kind == 7) x = static_cast<float>(i % 4) - 1.5f;
        if (kind == 8) x = std::round(x);
        if (kind == 9) x *= 1e-6f;
        if (kind == 10) x *= 1e4f;
        if (kind == 11) x = i % 2 ? -0.0f : 0.0f;
        if (kind == 12) x *= std::ldexp(1.0f, -i / 8);
        if (kind == 13) x = i == 0 ? tiny : 0.0f;
        if (kind == 14) x = i < dim / 2 ? 0.0f : x;  // a segment of zeros
        all.push_back(to_16_bits(x, bf16));
      }
    }
    return all;
  };
  Rows all{.tokens = tokens, .k = {}, .v = {}};
  all.k = rows(plan.geometry.head_dim), all.v = rows(plan.geometry.v_head_dim);
  return all;
}

/// Where the tokens of a write go.
struct Target {
  int page_size = 32, pages = 4;
  std::vector<std::int64_t> slots = {};
  std::vector<std::int64_t> window_rows = {};  ///< of rings, or negative; empty: no windows
  WindowLayouts windows = {};
  std::string_view chosen = {};  ///< the runtime's choice, whose name begins so; empty: the generic kernel
  int multiprocessors = 0;       ///< that the launch goes by; 0: the device's
  int round_tokens = 0;          ///< the workspace has room for; 0: no workspace
};
constexpr int kRingRows = 32, kRings = 2;

Target target_of(int tokens, int page_size, int first) {
  Target t{.page_size = page_size, .pages = (tokens + first) / page_size + 1};
  for (int i = 0; i < tokens; ++i) t.slots.push_back(first + i);
  return t;
}

struct Pools {
  std::vector<std::byte> pages, rings;
};

/// What the codec stores.
void expect_row(const LayerPlan& plan, const PageLayout& layout, const Target& t, Side side, int token,
                std::span<const std::vector<float>> x, Pools& pools) {
  const TensorPlan& of = side == Side::v ? *plan.v : plan.k;
  const TileSide& tile = side == Side::v ? layout.v : layout.k;
  const auto dim = static_cast<std::size_t>(tile.head_dim);
  int joint = 0;
  if (of.centroids && of.centroids->joint) {
    std::vector<float> sums(static_cast<std::size_t>(of.centroids->count), 0.0f);
    for (int head = 0; head < kHeads; ++head)
      add_centroid_distances(*of.centroids, of.rotation.head_index(head), x[static_cast<std::size_t>(head)], sums);
    joint = static_cast<int>(std::min_element(sums.begin(), sums.end()) - sums.begin());
  }
  for (int head = 0; head < kHeads; ++head) {
    const std::vector<float>& row = x[static_cast<std::size_t>(head)];
    std::vector<float> rotated(dim);
    const std::int64_t slot = t.slots[static_cast<std::size_t>(token)];
    if (!t.window_rows.empty() && t.window_rows[static_cast<std::size_t>(token)] >= 0) {
      const std::int64_t at = t.window_rows[static_cast<std::size_t>(token)];
      const auto size = static_cast<std::size_t>(t.windows.rings.slot_bytes());
      TensorPlan map;  // without centroids
      map.rotation = of.rotation;
      rotate_row(map, head, row, rotated);
      store_window_row(t.windows.rings, side, head, static_cast<int>(at % kRingRows), rotated,
                       std::span(pools.rings).subspan(static_cast<std::size_t>(at / kRingRows) * size, size));
    }
    if (slot < 0) continue;
    const auto page_bytes = static_cast<std::size_t>(layout.page_bytes());
    const auto page =
        std::span(pools.pages).subspan(static_cast<std::size_t>(slot / t.page_size) * page_bytes, page_bytes);
    const int at = static_cast<int>(slot % t.page_size);
    int index = 0;
    if (of.centroids)
      index = of.centroids->joint ? joint : nearest_centroid(*of.centroids, of.rotation.head_index(head), row);
    rotate_row(of, head, row, rotated, index);
    if (tile.exact()) {
      store_page_row(layout, side, head, at, rotated, page);
      continue;
    }
    const RowCodec codec(of, head, tile.head_dim);
    std::vector<std::uint8_t> codes(dim);
    std::vector<float> numbers(static_cast<std::size_t>(codec.num_numbers()));
    codec.encode(rotated, codes, numbers);
    if (tile.is_bits())
      store_page_row(layout, side, scale_type(of.coder), head, at, bit_segments(of, head, tile.head_dim), codes,
                     numbers, page);
    else
      store_page_row(layout, side, scale_type(of.coder), head, at, codes, numbers, page);
    const bool finite = std::all_of(rotated.begin(), rotated.end(), [](float y) { return std::isfinite(y); });
    if (of.centroids) store_page_index(layout, side, head, at, finite ? index : 0, page);
  }
}

Pools expected_pools(const LayerPlan& plan, const PageLayout& layout, const Target& t, const Rows& rows, bool bf16,
                     Pools pools) {
  for (const Side side : kSides) {
    const auto& all = side == Side::v ? rows.v : rows.k;
    const auto dim = static_cast<std::size_t>(plan.geometry.dim(side));
    for (int token = 0; token < rows.tokens; ++token) {
      std::vector<std::vector<float>> x(kHeads, std::vector<float>(dim));
      for (std::size_t head = 0; head < kHeads; ++head)
        for (std::size_t i = 0; i < dim; ++i)
          x[head][i] = from_16_bits(all[(static_cast<std::size_t>(token) * kHeads + head) * dim + i], bf16);
      expect_row(plan, layout, t, side, token, x, pools);
    }
  }
  return pools;
}

Pools written_pools(const LayerPlan& plan, const PageLayout& layout, const Target& t, const Rows& rows, bool bf16,
                    Pools pools) {
  DeviceImage image;
  image.add(plan, {}, bf16);
  const DeviceMemory constants = to_device(image.bytes(), nullptr);
  const LayerPointers pointers = image.pointers(0, constants.get());
  const WriteVariant variant =
      !t.chosen.empty()
          ? choose_write(kernel_key(plan, layout, bf16))
          : generic_write({layout.k, layout.v, has_bfloat_scales(plan.k), has_bfloat_scales(*plan.v)}, bf16);
  CAPTURE(variant.name);
  CHECK(std::string_view(variant.name).starts_with(t.chosen));
  WriteLaunch launch;
  REQUIRE(variant.plan(launch).ok());
  if (t.multiprocessors > 0) launch.multiprocessors = t.multiprocessors;
  launch.least_pair_rows = 1;
  const std::vector<std::byte> workspace_bytes(write_workspace_bytes(variant, kHeads, t.round_tokens), std::byte{0x5A});
  const DeviceMemory k = to_device<std::uint16_t>(rows.k, nullptr), v = to_device<std::uint16_t>(rows.v, nullptr),
                     slots = to_device<std::int64_t>(t.slots, nullptr),
                     window_rows = to_device<std::int64_t>(t.window_rows, nullptr),
                     pages = to_device<std::byte>(pools.pages, nullptr),
                     rings = to_device<std::byte>(pools.rings, nullptr),
                     workspace = to_device<std::byte>(workspace_bytes, nullptr);
  WriteParams p;
  if (!workspace_bytes.empty()) p.workspace = workspace.get(), p.workspace_bytes = workspace_bytes.size();
  p.num_tokens = rows.tokens, p.num_kv_heads = kHeads;
  p.k = pointers.write_k, p.v = pointers.write_v;
  p.k.x = k.get(), p.v.x = v.get();
  p.k.token_stride = kHeads * layout.k.head_dim, p.v.token_stride = kHeads * layout.v.head_dim;
  p.slot_mapping = slots.get<std::int64_t>();
  p.pages = pages.get(), p.page_stride = layout.page_bytes();
  p.page_shift = std::countr_zero(static_cast<unsigned>(t.page_size));
  p.extents.num_pages = t.pages;
  if (!t.window_rows.empty()) {
    p.window_mapping = window_rows.get<std::int64_t>(), p.rings = rings.get();
    p.sink_layout = t.windows.sinks, p.ring_layout = t.windows.rings;
    p.extents.num_ring_slots = kRings;
  }
  const Status checked = check_write(variant, p);
  CAPTURE(checked.message());
  REQUIRE(checked.ok());
  REQUIRE(variant.run(launch, p, nullptr).ok());
  to_host<std::byte>(pages, pools.pages, nullptr), to_host<std::byte>(rings, pools.rings, nullptr);
  return pools;
}

std::string difference(const std::vector<std::byte>& expected, const std::vector<std::byte>& found, std::int64_t each) {
  const auto at = std::mismatch(expected.begin(), expected.end(), found.begin()).first;
  if (at == expected.end()) return "";
  return "byte " + std::to_string((at - expected.begin()) % each) + " of " + std::to_string(each) + ", number " +
         std::to_string((at - expected.begin()) / each);
}

/// Writes rows and compares all bytes, also those that no row has.
void check_write_of(const LayerPlan& plan, Target t, const Rows& rows, bool bf16) {
  validate(plan);
  const PageLayout layout = page_layout_of(plan, t.page_size);
  Pools before;
  before.pages.assign(static_cast<std::size_t>(t.pages * layout.page_bytes()), std::byte{0xA5});
  if (!t.window_rows.empty()) {
    t.windows = window_layouts_of(layout, {.sink_tokens = 0, .recent_tokens = 16}, 16);
    REQUIRE(t.windows.rings.rows == kRingRows);
    before.rings.assign(static_cast<std::size_t>(kRings * t.windows.rings.slot_bytes()), std::byte{0xA5});
  }
  const Pools expected = expected_pools(plan, layout, t, rows, bf16, before),
              found = written_pools(plan, layout, t, rows, bf16, before);
  CHECK(difference(expected.pages, found.pages, layout.page_bytes()) == "");
  if (!before.rings.empty()) CHECK(difference(expected.rings, found.rings, t.windows.rings.slot_bytes()) == "");
}

/// Keys and values of one plan: a whole tile and more, then single tokens at random slots. A launch for many
/// multiprocessors gives each warp one row, a launch for one multiprocessor up to four.
void check_plan(const TensorPlan& plan, int dim, bool bf16, unsigned seed) {
  const LayerPlan layer = layer_of(plan, dim, plan, dim);
  for (const int multiprocessors : {1000, 1}) {
    CAPTURE(multiprocessors);
    Target t = target_of(21, 16, 16);
    t.multiprocessors = multiprocessors;
    check_write_of(layer, t, random_rows(layer, 21, bf16, seed), bf16);
    t = target_of(3, 16, 0);
    t.multiprocessors = multiprocessors;
    t.slots = {31, -1, 6}, t.pages = 3;
    check_write_of(layer, t, random_rows(layer, 3, bf16, seed + 1), bf16);
    t.slots = {18};
    check_write_of(layer, t, random_rows(layer, 1, bf16, seed + 2), bf16);
  }
}

}  // namespace

TEST_CASE("Uniform codes of every width and group in bit tiles", "[runtime][gpu][generic][emulated]") {
  const int bits = GENERATE(1, 2, 3, 4, 5, 6, 7, 8);
  constexpr int kDims[][2] = {{128, 16}, {40, 8}, {72, 72}, {100, 25}, {16, 1}, {80, 40}, {256, 64}, {33, 11}};
  const auto& [dim, group] = kDims[bits - 1];
  for (std::size_t i = 0; i < 3; ++i) {
    CAPTURE(bits, dim, group, i);
    TensorPlan affine = uniform(bits, group, UniformLevels::affine, ScaleRule::minmax, kTypes[i]);
    if (i != 1) std::get<UniformCoder>(affine.coder).zero = ZeroKind::integer;
    if (i == 1) affine.clip_ratio = {0.9, 1.0, 0.5};
    check_plan(affine, dim, i != 2, 10 + static_cast<unsigned>(bits));
    check_plan(uniform(bits, group, UniformLevels::symmetric, kSymmetric[i], kTypes[i]), dim, i != 2, 20);
  }
}

TEST_CASE("Codebooks in bit tiles", "[runtime][gpu][generic][emulated]") {
  const int bits = GENERATE(1, 2, 3, 5, 8);
  for (std::size_t i = 0; i < 3; ++i) {
    CAPTURE(bits, i);
    check_plan(codebooks(bits, i == 0 ? 128 : 32, i == 1, kSearched[i], kTypes[(i + 1) % 3]), 128, i != 2, 30);
  }
}

TEST_CASE("Codebook codes of one group by their tuned write", "[runtime][gpu][emulated]") {
  const int bits = GENERATE(2, 3, 4);
  const bool bf16 = GENERATE(true, false);
  const ScaleRule rule = bf16 ? ScaleRule::norm : ScaleRule::rms;
  TensorPlan plain = codebooks(bits, 128, bits == 3, rule, ScaleType::fp16);
  if (bf16) {  // symmetric about 0, so that channels of 0 lie on a threshold
    std::vector<float>& all = std::get<CodebookCoder>(plain.coder).tables[bits];
    const std::vector<float> table = all;
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = 0.5f * (table[i] - table[i ^ ((1u << bits) - 1)]);
  }
  // Maps that are exact for small integers, in both kernels for rotations.
  TensorPlan blocks = rotated(plain, 128), dense = plain;
  dense.rotation.kind = RotationKind::dense;
  dense.rotation.matrix.assign(std::size_t{kHeads} * 128 * 128, 0.0);
  for (std::size_t row = 0; row < std::size_t{kHeads} * 128; ++row)
    dense.rotation.matrix[row * 128 + row * 37 % 128] = row % 3 ? 1.0 : -1.0;
  const auto check = [&](const TensorPlan& k, const TensorPlan& v, Target t, bool integers) {
    const LayerPlan layer = layer_of(k, 128, v, 128);
    t.chosen = "quantize_write_coded";
    check_write_of(layer, t, random_rows(layer, static_cast<int>(t.slots.size()), bf16, 35, integers), bf16);
  };
  CAPTURE(bits, bf16);
  Target single = target_of(3, 16, 0);
  single.slots = {31, -1, 6}, single.pages = 3;
  Target windows = target_of(24, 32, 0);
  for (int i = 0; i < 24; ++i) windows.window_rows.push_back(i % 3 ? i + 8 : -1);
  for (const TensorPlan& plan : {plain, blocks, dense}) {
    const bool integers = plan.rotation.kind != RotationKind::identity;
    check(plan, plan, target_of(37, 16, 16), integers);
    check(plan, plan, single, integers);
  }
  check(dense, blocks, windows, true);
  // Beside a side of other codes, which the generic kernel writes.
  check(plain, codebooks(5 - bits % 4, 128, false, rule, ScaleType::bf16), target_of(21, 32, 5), false);
  check(mixed(codebooks(8, 0, true, ScaleRule::norm, ScaleType::fp16), 128, some_widths(128), false), plain,
        target_of(21, 32, 5), false);
}

TEST_CASE("Keys of mixed widths with codebook codes by their tuned write", "[runtime][gpu][emulated]") {
  const bool row_scale = GENERATE(false, true), bf16 = GENERATE(true, false);
  const ScaleRule rule = bf16 == row_scale ? ScaleRule::norm : ScaleRule::rms;
  CAPTURE(row_scale, bf16);
  // Ends of the segments of widths 8, 7, ..., 1: short and long ones, at odd channels; one width for the whole row; and
  // channels that are not stored.
  const std::vector<std::vector<std::vector<int>>> widths = {
      {{0, 0, 0, 0, 20, 61, 97, 128}, {0, 0, 0, 0, 1, 18, 83, 128}, {0, 0, 0, 0, 0, 0, 0, 0}},
      {{0, 0, 0, 0, 128, 128, 128, 128}, {0, 0, 0, 0, 0, 127, 128, 128}, {0, 0, 0, 0, 0, 0, 65, 97}}};
  const TensorPlan values = codebooks(3, 128, false, ScaleRule::norm, ScaleType::fp16);
  for (const auto& ends : widths) {
    TensorPlan plain = mixed(codebooks(4, 0, true, rule, ScaleType::fp16), 128, ends, row_scale);
    TensorPlan blocks = rotated(plain, 128), dense = plain;
    dense.rotation.kind = RotationKind::dense;
    dense.rotation.matrix.assign(std::size_t{kHeads} * 128 * 128, 0.0);
    for (std::size_t row = 0; row < std::size_t{kHeads} * 128; ++row)
      dense.rotation.matrix[row * 128 + row * 37 % 128] = row % 3 ? 1.0 : -1.0;
    const auto check = [&](const TensorPlan& k, Target t, bool integers) {
      const LayerPlan layer = layer_of(k, 128, integers ? rotated(values, 128) : values, 128);
      t.chosen = "quantize_write_coded";
      for (const int multiprocessors : {1, 2, 1000}) {  // one warp for 16 tokens, some, eight
        t.multiprocessors = multiprocessors;
        check_write_of(layer, t, random_rows(layer, static_cast<int>(t.slots.size()), bf16, 36, integers), bf16);
      }
    };
    check(plain, target_of(37, 16, 16), false);
    Target single = target_of(3, 16, 0);
    single.slots = {31, -1, 6}, single.pages = 3;
    check(plain, single, false);
    Target windows = target_of(24, 32, 0);
    for (int i = 0; i < 24; ++i) windows.window_rows.push_back(i % 3 ? i + 8 : -1);
    for (const TensorPlan& plan : {blocks, dense}) check(plan, windows, true);
  }
}

/// Two-bit codes of the trellises that kvq ships.
TensorPlan pair_trellis(int memory, ScaleRule rule) {
  return trellis(trellis_taps(2, memory, 128), 2, 128, rule, ScaleType::fp16);
}

/// Rows with many channels beyond the range of y, side by side, in patterns that spread the costs of states.
void make_hard(Rows& rows, bool bf16, unsigned seed) {
  std::mt19937 random(seed);
  for (auto* all : {&rows.k, &rows.v})
    for (std::size_t r = 0; r < all->size() / 128; r += 2) {
      const std::size_t first = random() % 128, count = 2 + random() % 8, pattern = random();
      for (std::size_t i = 0; i < count; ++i)
        (*all)[r * 128 + (first + i) % 128] = to_16_bits(pattern >> i & 1 ? 40.0f : -40.0f, bf16);
    }
}

TEST_CASE("Trellis codes that are searched in pairs of rows", "[runtime][gpu][emulated][pairs]") {
  const int memory = GENERATE(1, 2, 3);
  const bool bf16 = GENERATE(true, false);
  const TensorPlan plain = pair_trellis(memory, bf16 ? ScaleRule::norm : ScaleRule::rms);
  CAPTURE(memory, bf16);
  const auto check = [&](const TensorPlan& k, const TensorPlan& v, Target t, int round_tokens, bool integers) {
    const LayerPlan layer = layer_of(k, 128, v, 128);
    Rows rows = random_rows(layer, static_cast<int>(t.slots.size()), bf16, 37, integers);
    if (!integers) make_hard(rows, bf16, 38);
    t.chosen = "quantize_write_coded", t.round_tokens = round_tokens;
    check_write_of(layer, t, rows, bf16);
  };
  check(plain, plain, target_of(171, 32, 7), 171, false);
  check(plain, plain, target_of(171, 16, 16), 64, false);  // three rounds, whole tiles
  Target single = target_of(3, 16, 0);
  single.slots = {31, -1, 6}, single.pages = 3;
  check(plain, plain, single, 3, false);
  // Maps that are exact for small integers, in both kernels for rotations, beside windows.
  TensorPlan blocks = rotated(plain, 128), dense = plain;
  dense.rotation.kind = RotationKind::dense;
  dense.rotation.matrix.assign(std::size_t{kHeads} * 128 * 128, 0.0);
  for (std::size_t row = 0; row < std::size_t{kHeads} * 128; ++row)
    dense.rotation.matrix[row * 128 + row * 37 % 128] = row % 3 ? 1.0 : -1.0;
  Target windows = target_of(24, 32, 0);
  for (int i = 0; i < 24; ++i) windows.window_rows.push_back(i % 3 ? i + 8 : -1);
  check(dense, blocks, windows, 24, true);
  // One scale a row, with a gain for each head.
  const std::vector<std::vector<int>> all_of_two_bits(kHeads, {0, 0, 0, 0, 0, 0, 128, 128});
  TensorPlan gains = plain;
  std::get<TrellisCoder>(gains.coder).group_size = 0;
  gains = mixed(gains, 128, all_of_two_bits, true);
  check(gains, gains, target_of(70, 32, 0), 70, false);
  // Beside a side of other codes.
  check(plain, codebooks(3, 128, false, ScaleRule::norm, ScaleType::fp16), target_of(21, 32, 5), 21, false);
  check(pair_trellis(memory % 3 + 1, ScaleRule::norm), plain, target_of(21, 32, 5), 21, false);
}

TEST_CASE("Trellis codes of few rows, or without workspace, are searched row by row",
          "[runtime][gpu][emulated][pairs]") {
  const TensorPlan plan = pair_trellis(2, ScaleRule::norm);
  const LayerPlan layer = layer_of(plan, 128, plan, 128);
  Target t = target_of(21, 32, 5);
  t.chosen = "quantize_write_coded";
  check_write_of(layer, t, random_rows(layer, 21, true, 39), true);
}

TEST_CASE("Trellises in bit tiles", "[runtime][gpu][generic][emulated]") {
  constexpr int kMemories[][2] = {{1, 8}, {2, 1}, {2, 3}, {2, 4}, {3, 2}, {4, 1}};
  const auto& [bits, memory] = kMemories[GENERATE(0, 1, 2, 3, 4, 5)];
  const TrellisSearch search = GENERATE(TrellisSearch::integer, TrellisSearch::binary32);
  for (std::size_t i = 0; i < 3; ++i) {
    CAPTURE(bits, memory, search, i);
    const int group = i == 0 ? 64 : i == 1 ? 8 : 32;
    check_plan(trellis({taps(bits, memory, search)}, bits, group, kSearched[i], kTypes[i]), 64, i != 1, 40);
  }
}

TEST_CASE("Trellises of long groups, which are searched in one run", "[runtime][gpu][generic][emulated]") {
  constexpr int kMemories[][2] = {{1, 8}, {2, 1}, {2, 2}, {2, 3}, {3, 1}, {3, 2}, {4, 1}};
  const auto& [bits, memory] = kMemories[GENERATE(0, 1, 2, 3, 4, 5, 6)];
  for (const int dim : {96, 128}) {
    CAPTURE(bits, memory, dim);
    check_plan(trellis({taps(bits, memory)}, bits, dim, ScaleRule::norm, ScaleType::fp16), dim, dim == 128, 41);
  }
}

TEST_CASE("A trellis of eight bits", "[runtime][gpu][generic]") {
  check_plan(trellis({taps(8, 1)}, 8, 32, kSearched[2], kTypes[2]), 64, true, 40);
}

TEST_CASE("The largest search of a trellis", "[runtime][gpu][generic][emulated]") {
  check_plan(trellis({taps(2, 4)}, 2, 256, ScaleRule::norm, ScaleType::fp16), 256, true, 50);
}

TEST_CASE("Mixed widths, with a scale for each segment or one for the row", "[runtime][gpu][generic][emulated]") {
  const bool row_scale = GENERATE(false, true);
  for (std::size_t i = 0; i < 3; ++i) {
    const int dim = i == 1 ? 96 : 128;
    CAPTURE(row_scale, i);
    const ScaleRule symmetric = row_scale && i == 1 ? ScaleRule::norm : kSymmetric[i];
    check_plan(mixed(uniform(8, 0, UniformLevels::symmetric, symmetric, kTypes[i]), dim, some_widths(dim), row_scale),
               dim, i != 2, 60);
    check_plan(mixed(codebooks(8, 0, i == 1, kSearched[i], kTypes[i]), dim, some_widths(dim), row_scale), dim, i != 2,
               61);
    check_plan(mixed(trellis({taps(1, 3), taps(2, 3), taps(3, 2), taps(4, 1)}, 8, 0, kSearched[i], kTypes[i]), dim,
                     some_widths(dim), row_scale),
               dim, i != 2, 62);
  }
}

TEST_CASE("Mixed widths that all heads share", "[runtime][gpu][generic][emulated]") {
  TensorPlan plan = mixed(trellis({taps(2, 3)}, 8, 0, ScaleRule::norm, ScaleType::fp16), 64,
                          {{0, 0, 0, 0, 0, 9, 60, 64}, {}, {}}, true);
  plan.rotation.scope = Scope::layer;
  plan.allocation->channel_bits.resize(64), plan.allocation->channel_order.resize(64);
  plan.allocation->segment_gain.resize(8);
  std::get<TrellisCoder>(plan.coder).bits = 3;
  check_plan(plan, 64, true, 70);
}

TEST_CASE("Sides of different kinds and head_dims in one write", "[runtime][gpu][generic][emulated]") {
  const TensorPlan bits =
      mixed(trellis({taps(2, 2)}, 8, 0, ScaleRule::norm, ScaleType::fp16), 96, some_widths(96), true);
  const TensorPlan code = uniform(2, 64, UniformLevels::affine, ScaleRule::minmax, ScaleType::bf16);
  const TensorPlan exact;
  for (const bool bf16 : {false, true}) {
    CAPTURE(bf16);
    for (const LayerPlan& layer : {layer_of(bits, 96, code, 128), layer_of(code, 64, bits, 96),
                                   layer_of(exact, 80, bits, 96), layer_of(bits, 96, exact, 16)})
      check_write_of(layer, target_of(40, 64, 3), random_rows(layer, 40, bf16, 80), bf16);
  }
}

TEST_CASE("Rows are residuals of their nearest centroid", "[runtime][gpu][generic][emulated]") {
  const int count = GENERATE(5, 300);
  const bool joint = GENERATE(false, true);
  const ScaleRule norm = ScaleRule::norm;
  const TensorPlan code = uniform(4, 32, UniformLevels::affine, ScaleRule::minmax, ScaleType::fp16),
                   bits = mixed(trellis({taps(2, 2)}, 8, 0, norm, ScaleType::fp16), 32, some_widths(32), true);
  CAPTURE(count, joint);
  for (const TensorPlan& plan : {code, bits}) {
    if (joint && count == 300 && !plan.allocation) continue;  // takes long in the emulator
    const TensorPlan side = with_centroids(plan, count, joint, 32);
    check_plan(side, 32, true, 90);
    // Beside windows, which have rows without a centroid; tokens that go to one of both, or to none.
    TensorPlan integers = with_centroids(rotated(plan, 32), count, joint, 32, 6.0f);
    for (float& x : integers.centroids->values) x = std::round(x);
    const LayerPlan layer = layer_of(integers, 32, with_centroids(code, count, joint, 32), 32);
    Target t = target_of(37, 32, 5);
    for (int i = 0; i < 37; ++i) t.window_rows.push_back(i % 3 == 0 ? -1 : 20 + i);
    t.slots[1] = t.slots[2] = t.slots[9] = -1;
    check_write_of(layer, t, random_rows(layer, 37, true, 91, true), true);
  }
}

/// Centroids of which the nearest one is hard to find: equal ones, some that differ by the last bit of a channel, some
/// with zero in their middle.
/// @param with_long  some are beyond the range of fp16, or below its normal numbers, too; then fewer are ruled out by
/// their scores
void make_hard(Centroids& centroids, int dim, bool with_long) {
  const auto d = static_cast<std::size_t>(dim), each = static_cast<std::size_t>(centroids.count) * d;
  for (std::size_t begin = 0; begin < centroids.values.size(); begin += each)
    for (std::size_t c = 1; c < static_cast<std::size_t>(centroids.count); ++c) {
      float *x = centroids.values.data() + begin + c * d, *before = x - d;
      if (c % 16 == 3 || c % 16 == 8) std::copy_n(before, d, x);
      if (c % 16 == 12 && c > 64)  // a lane scores both
        for (std::size_t i = 0; i < d; ++i) x[i] = std::nextafter((x - 64 * d)[i], 9.0f);
      if (c % 16 == 14)  // nearly the same in 16 bits
        for (std::size_t i = 0; i < d; ++i) x[i] = before[i] * (1.0f + 0.001f * std::sin(static_cast<float>(i * c)));
      if (c % 16 == 5) std::copy_n(before, d, x), x[c % d] = std::nextafter(x[c % d], 9.0f);
      if (c % 16 == 7)
        for (std::size_t i = 0; i < d; ++i) x[i] = -before[i];  // zeros lie in the middle
      if (!with_long) continue;
      if (c % 64 == 9) x[0] = 1e5f;
      if (c % 64 == 10)
        for (std::size_t i = 0; i < d; ++i) x[i] *= 1e-7f;
      if (c % 64 == 11) std::fill_n(x, d, 0.0f);
      if (c % 64 == 12) x[d - 1] = 1e30f;
    }
}

struct NearestCase {
  int dim, count;
  bool joint, bf16, many;  ///< many: blocks of 128 rows, else of 16
  bool with_long = count >= 100;
};
void check_nearest(const NearestCase& c) {
  CAPTURE(c.dim, c.count, c.joint, c.bf16, c.many, c.with_long);
  const TensorPlan code = uniform(4, 32, UniformLevels::affine, ScaleRule::minmax, ScaleType::fp16);
  LayerPlan layer = layer_of(with_centroids(code, c.count, c.joint, c.dim), c.dim,
                             with_centroids(code, c.count, false, c.dim), c.dim);
  make_hard(*layer.k.centroids, c.dim, c.with_long);
  Target t = target_of(141, 32, 5);
  t.slots[7] = t.slots[130] = -1;
  t.multiprocessors = c.many ? 1 : 1000;
  Rows rows = random_rows(layer, 141, c.bf16, 98);
  std::mt19937 random(99);
  std::normal_distribution<float> normal;
  for (std::size_t r = 60; r < 141; ++r) {  // rows near a centroid of each head
    const std::size_t d = static_cast<std::size_t>(c.dim), count = static_cast<std::size_t>(c.count);
    const std::size_t near = r % 2 == 0 && count > 124 ? 92 + 16 * (r % 3) : r * 7 % count;
    for (std::size_t i = 0; i < kHeads * d; ++i) {
      const float x = layer.k.centroids->values[(i / d * static_cast<std::size_t>(c.count) + near) * d + i % d];
      rows.k[r * kHeads * d + i] = to_16_bits(std::clamp(x, -6e4f, 6e4f) + 0.05f * normal(random), c.bf16);
    }
  }
  check_write_of(layer, t, rows, c.bf16);
}

TEST_CASE("Nearest centroids by tensor cores", "[runtime][gpu]") {
  for (const int dim : {64, 128})
    for (const int count : {2, 63, 64, 65, 300, 4096})
      for (const bool joint : {false, true})
        for (const bool bf16 : {false, true})
          for (const bool many : {false, true}) check_nearest({dim, count, joint, bf16, many});
}

TEST_CASE("Some nearest centroids by tensor cores", "[runtime][gpu][emulated]") {
  check_nearest({.dim = 128, .count = 300, .joint = false, .bf16 = true, .many = true});
  check_nearest({.dim = 128, .count = 64, .joint = false, .bf16 = false, .many = false});
  check_nearest({.dim = 64, .count = 63, .joint = true, .bf16 = false, .many = true});
  check_nearest({.dim = 64, .count = 65, .joint = true, .bf16 = true, .many = false});
  check_nearest({.dim = 64, .count = 130, .joint = false, .bf16 = false, .many = false});
  for (const bool many : {false, true})
    check_nearest({.dim = 64, .count = 130, .joint = false, .bf16 = true, .many = many, .with_long = false});
}

TEST_CASE("Keys and values of different head_dims or without centroids have the nearest ones",
          "[runtime][gpu][emulated]") {
  const TensorPlan code = uniform(4, 32, UniformLevels::affine, ScaleRule::minmax, ScaleType::fp16);
  for (const LayerPlan& layer :
       {layer_of(with_centroids(code, 70, false, 64), 64, with_centroids(code, 5, true, 128), 128),
        layer_of(code, 64, with_centroids(code, 70, false, 128), 128),
        layer_of(with_centroids(code, 70, true, 128), 128, TensorPlan{}, 128),
        layer_of(with_centroids(code, 5, false, 128), 128, with_centroids(code, 5, false, 32), 32)})
    check_write_of(layer, target_of(40, 16, 3), random_rows(layer, 40, true, 99), true);
}

TEST_CASE("Rows with centroids by their tuned write", "[runtime][gpu][emulated]") {
  const bool joint = GENERATE(false, true);
  const TensorPlan code = uniform(4, 128, UniformLevels::affine, ScaleRule::minmax, ScaleType::fp16);
  CAPTURE(joint);
  Target t = target_of(141, 32, 5);
  t.chosen = "quantize_write_d128_u4g128i1_u4g128i1";
  t.slots[1] = t.slots[2] = t.slots[9] = -1;
  const LayerPlan layer =
      layer_of(with_centroids(code, 200, joint, 128), 128, with_centroids(code, 256, false, 128), 128);
  check_write_of(layer, t, random_rows(layer, 141, true, 190), true);
  // Beside windows, which have rows without a centroid. The product with the identity turns -0 into +0.
  for (int i = 0; i < 141; ++i) t.window_rows.push_back(i % 3 == 0 || i > 40 ? -1 : i);
  Rows rows = random_rows(layer, 141, true, 191, true);
  for (std::vector<std::uint16_t>* side : {&rows.k, &rows.v}) std::ranges::replace(*side, 0x8000, 0);
  check_write_of(layer, t, rows, true);
}

TEST_CASE("Rotated residuals by their tuned write are the codec's, but for what rotations round",
          "[runtime][gpu][emulated]") {
  constexpr int kDim = 128, kTokens = 48;
  const TensorPlan code = uniform(4, kDim, UniformLevels::affine, ScaleRule::minmax, ScaleType::fp16);
  TensorPlan turned = rotated(code, kDim);
  turned.rotation.order = GENERATE(8, 128);
  LayerPlan plan = layer_of(with_centroids(turned, 200, GENERATE(false, true), kDim), kDim,
                            with_centroids(turned, 40, false, kDim), kDim);
  for (TensorPlan* side : {&plan.k, &*plan.v})
    for (float& x : side->centroids->values) x = from_16_bits(to_16_bits(x, true), true);
  validate(plan);
  const Target t{.page_size = 16,
                 .pages = 3,
                 .slots = target_of(kTokens, 16, 0).slots,
                 .chosen = "quantize_write_d128_u4g128i1_u4g128i1"};
  GoldenTokens tokens{.first = 0, .count = kTokens};
  std::mt19937 random(6);
  std::normal_distribution<float> normal;
  for (auto* rows : {&tokens.q, &tokens.k, &tokens.v})
    for (int i = 0; i < (rows == &tokens.q ? 1 : kTokens) * kHeads * kDim; ++i)
      rows->push_back(to_16_bits(normal(random), true));
  for (std::size_t i = 0; i < 4 * kHeads * kDim; ++i) {  // four tokens are centroids, so that nothing is left of them
    const std::size_t head = i / kDim % kHeads, row = 5 + i / (kHeads * kDim);
    tokens.k[i] = to_16_bits(plan.k.centroids->values[(head * 200 + row) * kDim + i % kDim], true);
  }
  const GoldenRows golden = code_golden_rows(plan, tokens);
  const PageLayout layout = page_layout_of(plan, 16);
  Pools pools;
  pools.pages.assign(static_cast<std::size_t>(t.pages * layout.page_bytes()), std::byte{0xFF});
  pools = written_pools(plan, layout, t, {.tokens = kTokens, .k = tokens.k, .v = tokens.v}, true, pools);
  const PageDifference found = compare_pages(plan, layout, golden, pools.pages);
  CHECK(found.first == "");
  CHECK(found.firm_rows > kTokens * kHeads);
}

TEST_CASE("Centroids that all heads share", "[runtime][gpu][generic][emulated]") {
  TensorPlan plan = uniform(3, 16, UniformLevels::symmetric, ScaleRule::least_squares, ScaleType::fp32);
  plan.rotation.scope = Scope::layer;
  check_plan(with_centroids(plan, 7, GENERATE(false, true), 48), 48, false, 95);
}

TEST_CASE("A rank's heads are coded as the whole plan codes them", "[runtime][gpu][generic][emulated]") {
  const TensorPlan plan = with_centroids(
      mixed(codebooks(8, 0, true, ScaleRule::norm, ScaleType::fp16), 96, some_widths(96), true), 5, false, 96);
  const LayerPlan whole = layer_of(plan, 96, plan, 96);
  for (int head = 0; head < kHeads; ++head) {
    CAPTURE(head);
    const LayerPlan one = slice(whole, {.first_q = head, .num_q = 1, .first_kv = head, .num_kv = 1});
    const Rows rows = random_rows(whole, 8, true, 97);
    for (std::size_t token = 0; token < 8; ++token) {
      std::vector<float> x(96), numbers, expected_numbers;
      const std::size_t first = (token * kHeads + static_cast<std::size_t>(head)) * 96;
      for (std::size_t i = 0; i < 96; ++i) x[i] = from_16_bits(rows.k[first + i], true);
      const RowCodec all(whole.k, head, 96), sliced(one.k, 0, 96);
      std::vector<std::uint8_t> codes(96), expected(96);
      numbers.resize(static_cast<std::size_t>(sliced.num_numbers()));
      expected_numbers.resize(static_cast<std::size_t>(all.num_numbers()));
      REQUIRE(numbers.size() == expected_numbers.size());
      all.encode(x, expected, expected_numbers), sliced.encode(x, codes, numbers);
      CHECK(codes == expected);
      CHECK(std::ranges::equal(numbers, expected_numbers, [](float a, float b) {
        return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
      }));
      CHECK(nearest_centroid(*one.k.centroids, 0, x) == nearest_centroid(*whole.k.centroids, head, x));
    }
  }
  LayerPlan joint = whole;
  joint.v->centroids->joint = true;
  CHECK(joint_fault(whole, 3) == "");
  CHECK(joint_fault(joint, 1) == "");
  CHECK(joint_fault(joint, 3) == "v: joint centroids on 3 ranks: expected 1, because all heads of a token decide");
}

TEST_CASE("Golden rows in bit tiles and with indices come out right, and faults are found",
          "[runtime][gpu][generic][emulated]") {
  constexpr int kDim = 64, kTokens = 24;
  const TensorPlan code = uniform(4, 32, UniformLevels::affine, ScaleRule::minmax, ScaleType::fp16),
                   bits = mixed(trellis({taps(2, 2)}, 8, 0, ScaleRule::norm, ScaleType::fp16), kDim, some_widths(kDim),
                                GENERATE(false, true)),
                   wide = uniform(6, 16, UniformLevels::symmetric, ScaleRule::norm, ScaleType::fp16),
                   table = codebooks(3, 16, true, ScaleRule::norm, ScaleType::bf16);
  const auto turned = [&](TensorPlan plan) {
    plan = rotated(std::move(plan), kDim), plan.rotation.order = 32;  // sums that are rounded
    return plan;
  };
  for (const LayerPlan& plan : {layer_of(turned(bits), kDim, turned(with_centroids(code, 5, false, kDim)), kDim),
                                layer_of(turned(with_centroids(bits, 300, true, kDim)), kDim, turned(table), kDim),
                                layer_of(turned(wide), kDim, with_centroids(table, 5, true, kDim), kDim)}) {
    validate(plan);
    const Target t{.page_size = 16, .pages = 2, .slots = target_of(kTokens, 16, 0).slots};
    GoldenTokens tokens{.first = 0, .count = kTokens};
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<std::uint16_t>& rows, int count) {
      for (int i = 0; i < count; ++i) rows.push_back(to_16_bits(normal(random), true));
    };
    fill(tokens.q, kHeads * kDim), fill(tokens.k, kTokens * kHeads * kDim), fill(tokens.v, kTokens * kHeads * kDim);
    const GoldenRows golden = code_golden_rows(plan, tokens);
    const PageLayout layout = page_layout_of(plan, 16);
    Pools pools;
    pools.pages = golden_pages(plan, layout, golden);
    REQUIRE(pools.pages.size() == static_cast<std::size_t>(2 * layout.page_bytes()));
    CHECK(compare_pages(plan, layout, golden, pools.pages).first == "");
    std::fill(pools.pages.begin(), pools.pages.end(), std::byte{0xFF});
    pools = written_pools(plan, layout, t, {.tokens = kTokens, .k = tokens.k, .v = tokens.v}, true, pools);
    PageDifference found = compare_pages(plan, layout, golden, pools.pages);
    CHECK(found.first == "");
    CHECK(found.rows == 2 * kTokens * kHeads);
    CHECK(found.firm_rows > found.rows / 8);
    for (const Side side : kSides) {  // the number of a firm row is damaged, then its index
      const GoldenSide& of = side == Side::v ? golden.v : golden.k;
      int row = 0;
      while (row < 16 * kHeads && !(of.firm[static_cast<std::size_t>(row)] && row % kHeads != 2)) ++row;
      const int head = row % kHeads, slot = row / kHeads;  // mixed rows of head 2 have no numbers
      REQUIRE(slot < 16);
      const TileSide& tile = side == Side::v ? layout.v : layout.k;
      const int first = side == Side::v ? layout.value_tile(head, slot) : layout.key_tile(head, slot);
      for (const int at : {number_offset(tile, slot, 0, 0), tile.index_bytes ? index_offset(tile, slot) : -1}) {
        if (at < 0) continue;
        std::vector<std::byte> damaged = pools.pages;
        damaged[static_cast<std::size_t>(first + at)] ^= std::byte{1};
        found = compare_pages(plan, layout, golden, damaged);
        CHECK(found.firm_faults == 1);
        CHECK(found.soft_faults == 0);
      }
    }
  }
}
