#include "coded_write_case.h"
#include "write_case.h"

#include <kvq/codec/codec.h>
#include <kvq/codec/page_codec.h>
#include <kvq/codec/row_codec.h>
#include <kvq/plan/layer_pages.h>
#include <kvq/runtime/device_image.h>
#include <kvq/runtime/device_memory.h>
#include <kvq/runtime/kernel_choice.h>
#include <kvq/runtime/kernels/common/ring_state.h>

#include <catch2/catch.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>

namespace kvq::test::coded {

namespace {

/// Ascending numbers, not evenly spaced.
std::vector<float> codebook(int bits, std::mt19937& random) {
  std::vector<float> table;
  std::uniform_real_distribution<float> gap(0.5f, 1.5f);
  float at = 0.0f;
  for (int i = 0; i < 1 << bits; ++i) table.push_back(at += gap(random));
  for (float& x : table) x = (x - at * 0.5f) * 5.0f / at;
  return table;
}

constexpr int kRingRows = 32, kRings = 2;

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
      map.rotation = of.rotation, map.center = of.center;
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

std::string difference(const std::vector<std::byte>& expected, const std::vector<std::byte>& found, std::int64_t each) {
  const auto at = std::mismatch(expected.begin(), expected.end(), found.begin()).first;
  if (at == expected.end()) return "";
  return "byte " + std::to_string((at - expected.begin()) % each) + " of " + std::to_string(each) + ", number " +
         std::to_string((at - expected.begin()) / each);
}

}  // namespace

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

TensorPlan uniform(int bits, int group, UniformLevels levels, ScaleRule rule, ScaleType type) {
  TensorPlan plan;
  plan.coder = UniformCoder{.bits = bits, .group_size = group, .levels = levels, .rule = rule, .scale_type = type};
  if (rule == ScaleRule::minmax) plan.clip_ratio.assign(kHeads, 1.0);
  return plan;
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

TrellisTaps taps(int bits, int memory, TrellisSearch search) {
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

std::vector<std::vector<int>> some_widths(int dim) {
  const int step = dim / 12;
  return {{0, 0, 0, step * 3, step * 3, step * 7, step * 11, step * 11},
          {step, 2 * step, 3 * step, 4 * step + 1, 5 * step + 2, 6 * step + 4, 8 * step, dim},
          {0, 0, 0, 0, 0, 0, 0, 0}};
}

TensorPlan with_centroids(TensorPlan plan, int count, bool joint, int dim, float size) {
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

TensorPlan rotated(TensorPlan plan, int dim) {
  plan.rotation.kind = RotationKind::block_hadamard, plan.rotation.order = 4;
  for (int i = 0; i < kHeads * dim; ++i) plan.rotation.signs.push_back(i * i % 7 % 2 ? 1 : -1);
  return plan;
}

TensorPlan permuted(TensorPlan plan, int dim) {
  const auto d = static_cast<std::size_t>(dim);
  plan.rotation.kind = RotationKind::dense;
  plan.rotation.matrix.assign(kHeads * d * d, 0.0);
  for (std::size_t row = 0; row < kHeads * d; ++row)
    plan.rotation.matrix[row * d + row * 37 % d] = row % 3 ? 1.0 : -1.0;
  return plan;
}

LayerPlan layer_of(TensorPlan k, int k_dim, TensorPlan v, int v_dim) {
  LayerPlan plan{.layer = 0, .geometry = {}, .k = std::move(k), .v = std::move(v)};
  plan.geometry.num_q_heads = plan.geometry.num_kv_heads = kHeads;
  plan.geometry.head_dim = k_dim, plan.geometry.v_head_dim = v_dim;
  plan.geometry.softmax_scale = 1.0;
  return plan;
}

Rows random_rows(const LayerPlan& plan, int tokens, bool bf16, unsigned seed, bool integers) {
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

Target target_of(int tokens, int page_size, int first) {
  Target t{.page_size = page_size, .pages = (tokens + first) / page_size + 1};
  for (int i = 0; i < tokens; ++i) t.slots.push_back(first + i);
  return t;
}

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

void check_plan(const TensorPlan& plan, int dim, bool bf16, unsigned seed) {
  const LayerPlan layer = layer_of(plan, dim, plan, dim);
  for (const int multiprocessors : {1000, 20, 1}) {
    CAPTURE(multiprocessors);
    Target t = target_of(21, 16, 16);
    t.multiprocessors = multiprocessors;
    check_write_of(layer, t, random_rows(layer, 21, bf16, seed), bf16);
    if (multiprocessors == 20) continue;
    t = target_of(3, 16, 0);
    t.multiprocessors = multiprocessors;
    t.slots = {31, -1, 6}, t.pages = 3;
    check_write_of(layer, t, random_rows(layer, 3, bf16, seed + 1), bf16);
    t.slots = {18};
    check_write_of(layer, t, random_rows(layer, 1, bf16, seed + 2), bf16);
  }
}

}  // namespace kvq::test::coded
