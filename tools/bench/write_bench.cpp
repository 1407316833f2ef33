#include "bench/copies.h"
#include "bench/faults.h"
#include "bench/kernels.h"
#include "bench/measure.h"
#include "bench/reference.h"
#include "bench/rotations.h"

#include <kvq/codec/codec.h>
#include <kvq/codec/page_codec.h>
#include <kvq/codec/row_codec.h>
#include <kvq/core/error.h>
#include <kvq/runtime/prepare.h>
#include <kvq/runtime/row_code_data.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <optional>
#include <random>

namespace kvq::bench {

namespace {

constexpr double kMostDiffering =
    2e-3;  // share of quotients so close to a rounding edge that the rotation's rounding decides
constexpr double kMostExactError = 4e-3;  // rounding a row to bfloat16 alone gives 1.7e-3
constexpr int kCheckedTokens = 16;

std::size_t elements_of(const WriteCase& c, const TileSide& side) {
  return static_cast<std::size_t>(c.tokens) * static_cast<std::size_t>(c.num_kv_heads) *
         static_cast<std::size_t>(side.head_dim);
}

std::vector<std::int64_t> shuffled(std::int64_t count, std::mt19937& random) {
  std::vector<std::int64_t> numbers(static_cast<std::size_t>(count));
  std::iota(numbers.begin(), numbers.end(), 0);
  std::shuffle(numbers.begin(), numbers.end(), random);
  return numbers;
}

/// Sinks and rings, which all copies of the data share: more than the L2 cache holds.
struct WindowPools {
  WindowPools(const Device& device, const WriteCase& c) : layouts(c.windows()) {
    const auto take = [&](const WindowLayout& layout, int sequences, int& slots) -> std::byte* {
      if (layout.slot_bytes() == 0) return nullptr;
      slots = std::max(sequences, num_sets(layout.slot_bytes()));
      const std::int64_t bytes = slots * layout.slot_bytes();
      auto* pool = memory.take<std::byte>(static_cast<std::size_t>(bytes));
      check(fill_rows(device.stream(), pool, bytes / 2, true, 1));
      return pool;
    };
    sinks = take(layouts.sinks, 1, sink_slots);
    rings = take(layouts.rings, c.step == WriteStep::prompt ? 1 : c.tokens, ring_slots);
  }

  Memory memory;
  WindowLayouts layouts;
  int sink_slots = 0, ring_slots = 0;
  std::byte *sinks = nullptr, *rings = nullptr;
};

/// Where the tokens of a case go.
struct Places {
  std::int64_t num_pages = 0;
  std::vector<std::int64_t> slots = {}, window_rows = {};
};

/// A prompt fills pages. In a decode step each token has a page and a ring of its own, and a random position behind the
/// sinks.
Places places_of(const WriteCase& c, const WindowPools& pools, std::mt19937& random) {
  const bool prompt = c.step == WriteStep::prompt;
  Places places;
  places.num_pages = prompt ? (c.tokens + c.page_size - 1) / c.page_size : c.tokens;
  const std::vector<std::int64_t> pages = shuffled(places.num_pages, random),
                                  sinks = shuffled(pools.sink_slots, random),
                                  rings = shuffled(pools.ring_slots, random);
  const auto& [sink_layout, ring_layout] = pools.layouts;
  const ExactTokens exact = exact_tokens(c);
  for (int t = 0; t < c.tokens; ++t) {
    const std::int64_t position = prompt ? t : c.exact.sink_tokens + static_cast<std::int64_t>(random() % (1 << 16));
    places.slots.push_back(pages[static_cast<std::size_t>(prompt ? t / c.page_size : t)] * c.page_size +
                           position % c.page_size);
    std::int64_t row = -1;
    if (t < exact.sink_end) row = kSinkRow + sinks.front() * sink_layout.rows + sink_layout.row(position);
    if (t >= exact.ring_begin)
      row = rings[static_cast<std::size_t>(prompt ? 0 : t)] * ring_layout.rows + ring_layout.row(position);
    places.window_rows.push_back(row);
  }
  return places;
}

/// One copy of the data: rows from the model, and the pages that the kernel writes.
struct Rows {
  Rows(const Device& device, const WriteCase& c, const WindowPools& pools, unsigned seed)
      : count(bytes_of(c)), windows(pools) {
    const std::size_t k_elements = elements_of(c, c.variant->k), v_elements = elements_of(c, c.variant->v);
    k = memory.take<std::uint16_t>(k_elements), v = memory.take<std::uint16_t>(v_elements);
    check(fill_rows(device.stream(), k, static_cast<std::int64_t>(k_elements), c.variant->bf16, seed));
    check(fill_rows(device.stream(), v, static_cast<std::int64_t>(v_elements), c.variant->bf16, seed + 1));
    std::mt19937 random(seed);
    places = places_of(c, pools, random);
    const std::int64_t page_bytes = places.num_pages * c.pages().page_bytes();
    pages = memory.take<std::byte>(static_cast<std::size_t>(page_bytes));
    check(fill_rows(device.stream(), pages, page_bytes / 2, true, seed + 2));
    slot_mapping = memory.put(places.slots);
    if (c.has_windows()) window_mapping = memory.put(places.window_rows);
    const auto half = static_cast<std::size_t>(count.total() / 2);
    from = memory.take<std::byte>(half), to = memory.take<std::byte>(half);
    check(fill_rows(device.stream(), from, static_cast<std::int64_t>(half / 2), true, seed + 3));
  }

  void enter(WriteParams& p) const {
    p.k.x = k, p.v.x = v;
    p.pages = pages, p.slot_mapping = slot_mapping;
    p.window_mapping = window_mapping;
  }

  Memory memory;
  RowBytes count;
  std::uint16_t *k = nullptr, *v = nullptr;
  const WindowPools& windows;
  Places places;
  std::byte *pages = nullptr, *from = nullptr,
            *to = nullptr;  ///< from, to: buffers of the copy baseline, which moves as many bytes
  std::int64_t *slot_mapping = nullptr, *window_mapping = nullptr;
};

/// The plan of one side, for the codec.
TensorPlan plan_of(const WriteCase& c, const TileSide& side, bool bfloat, std::mt19937& random) {
  TensorPlan plan;
  if (side.is_bits()) {
    plan = for_heads(bit_plan(side, bfloat, c.memory, c.symmetric_rule), c.num_kv_heads);
  } else {
    plan.coder = coder_of(side, bfloat, c.symmetric_rule);
  }
  if (side.index_bytes > 0) {
    Centroids centroids{.count = c.centroids};
    std::normal_distribution<float> normal;
    for (int i = 0; i < c.num_kv_heads * c.centroids * side.head_dim; ++i) centroids.values.push_back(normal(random));
    centroids.inertia.assign(static_cast<std::size_t>(c.num_kv_heads), 0.5);
    plan.centroids = std::move(centroids);
  }
  if (c.clip_ratio < 1.0 && side.numbers == 2)
    plan.clip_ratio.assign(static_cast<std::size_t>(c.num_kv_heads), c.clip_ratio);
  if (c.dense) {
    const HeadRotations all = random_rotations(c.transform ? CaseRotation::transform : CaseRotation::dense,
                                               c.num_kv_heads, side.head_dim, random);
    plan.rotation = {.kind = RotationKind::dense, .matrix = all.matrices};
    if (c.transform) plan.rotation.inverse = all.results;
    return plan;
  }
  if (c.order > 1) plan.rotation = {.kind = RotationKind::block_hadamard, .order = c.order};
  for (int i = 0; c.transform && i < c.num_kv_heads * side.head_dim; ++i)
    plan.rotation.channel_scale.push_back(std::ldexp(1.0f, static_cast<int>(random() % 5) - 2));
  return plan;
}

/// The write parameters of one side, all but the pointer to the rows.
WriteSide side_of(const WriteCase& c, const TileSide& side, const TensorPlan& plan, Memory& memory) {
  WriteSide w;
  w.token_stride = std::int64_t{c.num_kv_heads} * side.head_dim;
  w.rule = rule_of(c, side);
  if (!c.dense) w.order = c.order;
  if (side.is_bits() || plan.centroids) {
    const RowCodeData code = row_code_data(plan, c.num_kv_heads, side.head_dim);
    w.code = code.values;
    if (side.is_bits()) w.code.heads = memory.put(code.heads), w.code.tables = memory.put(code.tables);
    if (plan.centroids) {
      w.code.centroids = memory.put(code.centroids);
      w.code.rotated_centroids = memory.put(code.rotated_centroids);
    }
  }
  if (const std::vector<std::int32_t> ranks = clip_ranks(plan, c.num_kv_heads, side.head_dim); !ranks.empty())
    w.clip_ranks = memory.put(ranks);
  if (c.dense) {
    w.rotation_stride = packed_rotation_bytes(side.head_dim);
    std::vector<std::byte> packed(static_cast<std::size_t>(c.num_kv_heads * w.rotation_stride));
    std::vector<float> row_scales;
    if (c.transform && !c.variant->bf16) row_scales = fp16_row_scales(plan.rotation.matrix, side.head_dim);
    check(pack_rotations(plan.rotation.matrix, side.head_dim, c.variant->bf16, packed, row_scales));
    w.rotation = memory.put(packed);
    if (!row_scales.empty()) w.row_scales = memory.put(row_scales);
  } else if (c.transform) {
    const WriteFactors before = write_factors(plan.rotation, side.head_dim, c.variant->bf16);
    w.factors = memory.put(before.factors), w.row_scales = memory.put(before.row_scales), w.per_head = true;
  }
  return w;
}

/// Codes compared, codes that differ from the codec's, and codes that differ by more than one.
struct CodeCount {
  std::int64_t seen = 0, differing = 0, far = 0;
};

/// Compares the rows of one side with the codec's of the same input: codes in the pages, exact rows in the windows.
class WrittenRows {
 public:
  WrittenRows(const WriteCase& c, const Rows& rows, Side which, const TensorPlan& plan)
      : c_(c),
        rows_(rows),
        which_(which),
        layout_(c.pages()),
        side_(which == Side::v ? layout_.v : layout_.k),
        bfloat_(which == Side::v ? c.variant->v_bfloat : c.variant->k_bfloat),
        plan_(without_centroids(plan)),
        centroids_(plan.centroids) {}

  void compare(int token, CodeCount& count) const {
    const std::int64_t slot = rows_.places.slots[static_cast<std::size_t>(token)];
    const auto page_bytes = static_cast<std::size_t>(layout_.page_bytes());
    const std::vector<std::byte> page = get(rows_.pages + slot / c_.page_size * layout_.page_bytes(), page_bytes);
    const auto dim = static_cast<std::size_t>(side_.head_dim);
    for (int head = 0; head < c_.num_kv_heads; ++head) {
      const RowCodec codec(plan_, head, side_.head_dim);
      std::vector<float> numbers(static_cast<std::size_t>(codec.num_numbers())), theirs(numbers);
      std::vector<std::uint8_t> codes(dim), their_codes(dim);
      const int in_page = static_cast<int>(slot % c_.page_size);
      std::vector<float> x = row_of(token, head);
      if (centroids_) {
        const int nearest = nearest_centroid(*centroids_, head, x),
                  found = load_page_index(layout_, which_, head, in_page, page);
        if (nearest != found)
          throw Error{ErrorKind::check_failed,
                      fmt::format("{}: token {}, KV head {}, {}: expected centroid {}, found {}", c_.variant->name,
                                  token, head, name(which_), nearest, found)};
        const float* centroid =
            centroids_->values.data() + (static_cast<std::size_t>(head * centroids_->count + nearest)) * dim;
        for (std::size_t i = 0; i < dim; ++i) x[i] -= centroid[i];
      }
      codec.encode(rotated(x, head), codes, numbers);
      if (side_.is_bits())
        load_page_row(layout_, which_, number_type_of(side_, bfloat_), head, in_page,
                      bit_segments(plan_, head, side_.head_dim), page, their_codes, theirs);
      else
        load_page_row(layout_, which_, number_type_of(side_, bfloat_), head, in_page, page, their_codes, theirs);
      for (std::size_t i = 0; i < dim; ++i) {
        const int difference = std::abs(codes[i] - their_codes[i]);
        ++count.seen, count.differing += difference > 0, count.far += difference > 1 && !side_.is_bits();
      }
    }
  }

  /// Largest relative error of a token's exact rows, 0 if it has none.
  double exact_error(int token) const {
    const std::int64_t at = rows_.places.window_rows[static_cast<std::size_t>(token)];
    if (at < 0) return 0.0;
    const bool is_sink = at >= kSinkRow;
    const WindowPools& pools = rows_.windows;
    const WindowLayout& layout = is_sink ? pools.layouts.sinks : pools.layouts.rings;
    const std::int64_t row = is_sink ? at - kSinkRow : at;
    const std::vector<std::byte> slot =
        get((is_sink ? pools.sinks : pools.rings) + row / layout.rows * layout.slot_bytes(),
            static_cast<std::size_t>(layout.slot_bytes()));
    double most = 0.0;
    for (int head = 0; head < c_.num_kv_heads; ++head) {
      std::vector<float> found(static_cast<std::size_t>(side_.head_dim));
      load_window_row(layout, which_, head, static_cast<int>(row % layout.rows), slot, found);
      const std::vector<float> expected = rotated(row_of(token, head), head);
      most = std::max(most, relative_error(found, std::vector<double>(expected.begin(), expected.end())));
    }
    return most;
  }

 private:
  static TensorPlan without_centroids(TensorPlan plan) {
    plan.centroids.reset();
    return plan;
  }
  std::vector<float> row_of(int token, int head) const {
    const auto dim = static_cast<std::size_t>(side_.head_dim),
               first = static_cast<std::size_t>(token * c_.num_kv_heads + head) * dim;
    return floats_at((which_ == Side::v ? rows_.v : rows_.k) + first, dim, c_.variant->bf16);
  }
  std::vector<float> rotated(const std::vector<float>& x, int head) const {
    std::vector<float> result(x.size());
    rotate_row(plan_, head, x, result);
    return result;
  }

  const WriteCase& c_;
  const Rows& rows_;
  Side which_;
  PageLayout layout_;
  TileSide side_;
  bool bfloat_;
  TensorPlan plan_;  ///< of rows without their centroids
  std::optional<Centroids> centroids_;
};

/// Share of the last tokens' codes that differ from the codec's.
/// @throws Error{check_failed} if rounding cannot explain the differences, or the differences of exact rows
double differing_ratio(const WriteCase& c, const Rows& rows, const TensorPlan& k, const TensorPlan& v) {
  CodeCount count;
  double exact_error = 0.0;
  for (const Side which : kSides) {
    const WrittenRows written(c, rows, which, which == Side::v ? v : k);
    for (int token = std::max(0, c.tokens - kCheckedTokens); token < c.tokens; ++token) {
      written.compare(token, count);
      exact_error = std::max({exact_error, written.exact_error(token), written.exact_error(c.tokens - 1 - token)});
    }
  }
  const double ratio = static_cast<double>(count.differing) / static_cast<double>(count.seen);
  if (count.far > 0 || ratio > (c.order > 1 || c.dense ? kMostDiffering : 0.0))
    throw Error{ErrorKind::check_failed,
                fmt::format("{}: {} tokens, rotation {}: {} of {} codes are not the codec's, {} by more than one",
                            c.variant->name, c.tokens, rotation_name(c), count.differing, count.seen, count.far)};
  if (!(exact_error <= kMostExactError))
    throw Error{ErrorKind::check_failed,
                fmt::format("{}: {} tokens, rotation {}: error {:.2e} of exact rows, expected at most {:.0e}",
                            c.variant->name, c.tokens, rotation_name(c), exact_error, kMostExactError)};
  return ratio;
}

}  // namespace

WriteResult measure_write(const Device& device, const WriteCase& c) {
  const WriteVariant& variant = *c.variant;
  if (variant.k.bits == 16)
    throw Error{
        ErrorKind::unsupported,
        fmt::format("{}: writes of exact pages are not timed, because they have no codes to check", variant.name)};
  const RowBytes bytes = bytes_of(c);
  const WindowPools windows(device, c);
  std::vector<std::unique_ptr<Rows>> sets;
  sets.reserve(static_cast<std::size_t>(num_sets(bytes.total())));
  for (int i = 0; i < num_sets(bytes.total()); ++i)
    sets.push_back(std::make_unique<Rows>(device, c, windows, static_cast<unsigned>(4 * i + 1)));
  const auto set = [&](int i) -> const Rows& { return *sets[static_cast<std::size_t>(i) % sets.size()]; };

  Memory memory;
  std::mt19937 random(1);
  const TensorPlan k_plan = plan_of(c, variant.k, variant.k_bfloat, random),
                   v_plan = plan_of(c, variant.v, variant.v_bfloat, random);
  WriteLaunch launch;
  check(variant.plan(launch));
  WriteParams p;
  p.num_tokens = c.tokens, p.num_kv_heads = c.num_kv_heads;
  p.k = side_of(c, variant.k, k_plan, memory), p.v = side_of(c, variant.v, v_plan, memory);
  p.page_shift = page_shift(c.page_size);
  p.page_stride = c.pages().page_bytes();
  p.sinks = windows.sinks, p.sink_layout = windows.layouts.sinks;
  p.rings = windows.rings, p.ring_layout = windows.layouts.rings;
  p.workspace_bytes = write_workspace_bytes(variant, c.num_kv_heads, c.workspace_tokens.value_or(c.tokens));
  if (p.workspace_bytes > 0) p.workspace = memory.take<std::byte>(p.workspace_bytes);
  const Faults faults;
  p.extents = {static_cast<int>(set(0).places.num_pages), windows.sink_slots, windows.ring_slots};
  p.faults = faults.record();
  const auto run = [&](int i, WriteParams q, bool with_windows) {
    set(i).enter(q);
    if (!with_windows) q.window_mapping = nullptr;
    check(variant.run(launch, q, device.stream()));
  };
  set(0).enter(p);
  check(check_write(variant, p));

  WriteResult result;
  device.synchronize();
  run(0, p, true);
  result.differing_ratio = differing_ratio(c, set(0), k_plan, v_plan);
  const int calls = num_calls(bytes.total());
  const auto time = [&](const WriteParams& q, bool with_windows) {
    return device.time(calls, [&](int i) { run(i, q, with_windows); });
  };
  result.time = time(p, true);
  if (c.has_windows()) result.coded_only = time(p, false);
  if (c.unchecked) {
    WriteParams unchecked = p;
    unchecked.extents = {};
    result.unchecked = time(unchecked, true);
  }
  result.copy = time_copy(device, calls, bytes.total() / 2, [&](int i) { return CopyEnds{set(i).to, set(i).from}; });
  faults.expect_none(fmt::format("{}: {} tokens", variant.name, c.tokens));
  if (c.dense || c.transform || c.order < 8 || c.has_windows() || variant.k.is_bits() || variant.k.index_bytes > 0)
    return result;

  // All calls share one buffer for rotated rows, as in an inference engine. If the buffer fits into the L2 cache,
  // rotated rows stay there.
  auto* k = memory.take<std::uint16_t>(elements_of(c, variant.k));
  auto* v = memory.take<std::uint16_t>(elements_of(c, variant.v));
  WriteParams plain = p;
  plain.k.order = plain.v.order = 1;
  result.unfused = device.time(calls, [&](int i) {
    check(rotate_rows(device.stream(), set(i).k, set(i).v, k, v, static_cast<std::int64_t>(elements_of(c, variant.k)),
                      static_cast<std::int64_t>(elements_of(c, variant.v)), c.order, variant.bf16));
    set(i).enter(plain);
    plain.k.x = k, plain.v.x = v;
    check(variant.run(launch, plain, device.stream()));
  });
  return result;
}

}  // namespace kvq::bench
