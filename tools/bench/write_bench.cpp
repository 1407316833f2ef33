#include "bench/copies.h"
#include "bench/kernels.h"
#include "bench/measure.h"
#include "bench/reference.h"
#include "bench/rotations.h"

#include <kvq/codec/codec.h>
#include <kvq/codec/page_codec.h>
#include <kvq/codec/row_codec.h>
#include <kvq/core/error.h>
#include <kvq/runtime/prepare.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>

namespace kvq::bench {

namespace {

constexpr double kMostDiffering =
    2e-3;  // share of quotients so close to a rounding edge that the rotation's rounding decides
constexpr int kCheckedTokens = 16;

std::size_t elements_of(const WriteCase& c, const TileSide& side) {
  return static_cast<std::size_t>(c.tokens) * static_cast<std::size_t>(c.num_kv_heads) *
         static_cast<std::size_t>(side.head_dim);
}

PageLayout layout_of(const WriteCase& c) { return {c.variant->k, c.variant->v, c.num_kv_heads, c.page_size}; }

/// One copy of the data: rows from the model and the pages that the kernel writes.
struct Rows {
  Rows(const Device& device, const WriteCase& c, unsigned seed) : count(bytes_of(c)) {
    const std::size_t k_elements = elements_of(c, c.variant->k), v_elements = elements_of(c, c.variant->v);
    k = memory.take<std::uint16_t>(k_elements), v = memory.take<std::uint16_t>(v_elements);
    check(fill_rows(device.stream(), k, static_cast<std::int64_t>(k_elements), c.variant->bf16, seed));
    check(fill_rows(device.stream(), v, static_cast<std::int64_t>(v_elements), c.variant->bf16, seed + 1));
    const PageLayout layout = layout_of(c);
    const std::int64_t num_pages = (c.tokens + c.page_size - 1) / c.page_size;
    pages = memory.take<std::byte>(static_cast<std::size_t>(num_pages * layout.page_bytes()));
    check(fill_rows(device.stream(), pages, num_pages * layout.page_bytes() / 2, true, seed + 2));
    std::vector<std::int64_t> order(static_cast<std::size_t>(num_pages));
    std::iota(order.begin(), order.end(), 0);
    std::mt19937 random(seed);
    std::shuffle(order.begin(), order.end(), random);
    for (int t = 0; t < c.tokens; ++t)
      slots.push_back(order[static_cast<std::size_t>(t / c.page_size)] * c.page_size + t % c.page_size);
    slot_mapping = memory.put(slots);
    const auto half = static_cast<std::size_t>(count.total() / 2);
    from = memory.take<std::byte>(half), to = memory.take<std::byte>(half);
    check(fill_rows(device.stream(), from, static_cast<std::int64_t>(half / 2), true, seed + 3));
  }

  void enter(WriteParams& p) const {
    p.k.x = k, p.v.x = v;
    p.pages = pages, p.slot_mapping = slot_mapping;
  }

  Memory memory;
  RowBytes count;
  std::uint16_t *k = nullptr, *v = nullptr;
  std::byte *pages = nullptr, *from = nullptr,
            *to = nullptr;  ///< from, to: buffers of the copy baseline, which moves as many bytes
  std::vector<std::int64_t> slots;
  std::int64_t* slot_mapping = nullptr;
};

/// The plan of one side, for the codec.
TensorPlan plan_of(const WriteCase& c, const TileSide& side, bool bfloat, std::mt19937& random) {
  TensorPlan plan;
  plan.coder = coder_of(side, bfloat, c.symmetric_rule);
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

/// Compares the rows of one side in the pages with the codec's codes of the same input.
class WrittenRows {
 public:
  WrittenRows(const WriteCase& c, const Rows& rows, Side which, const TensorPlan& plan)
      : c_(c),
        rows_(rows),
        which_(which),
        layout_(layout_of(c)),
        side_(which == Side::v ? layout_.v : layout_.k),
        bfloat_(which == Side::v ? c.variant->v_bfloat : c.variant->k_bfloat),
        plan_(plan) {}

  void compare(int token, CodeCount& count) const {
    const std::int64_t slot = rows_.slots[static_cast<std::size_t>(token)];
    const auto page_bytes = static_cast<std::size_t>(layout_.page_bytes());
    const std::vector<std::byte> page = get(rows_.pages + slot / c_.page_size * layout_.page_bytes(), page_bytes);
    const auto dim = static_cast<std::size_t>(side_.head_dim);
    const std::uint16_t* x = which_ == Side::v ? rows_.v : rows_.k;
    for (int head = 0; head < c_.num_kv_heads; ++head) {
      const RowCodec codec(plan_, head, side_.head_dim);
      std::vector<float> rotated(dim), numbers(static_cast<std::size_t>(codec.num_numbers())), theirs(numbers);
      std::vector<std::uint8_t> codes(dim), their_codes(dim);
      const auto row = static_cast<std::size_t>(token * c_.num_kv_heads + head) * dim;
      rotate_row(plan_, head, floats_at(x + row, dim, c_.variant->bf16), rotated);
      codec.encode(rotated, codes, numbers);
      load_page_row(layout_, which_, number_type(bfloat_), head, static_cast<int>(slot % c_.page_size), page,
                    their_codes, theirs);
      for (std::size_t i = 0; i < dim; ++i) {
        const int difference = std::abs(codes[i] - their_codes[i]);
        ++count.seen, count.differing += difference > 0, count.far += difference > 1;
      }
    }
  }

 private:
  const WriteCase& c_;
  const Rows& rows_;
  Side which_;
  PageLayout layout_;
  TileSide side_;
  bool bfloat_;
  const TensorPlan& plan_;
};

/// Share of the last tokens' codes that differ from the codec's.
/// @throws Error{check_failed} if rounding cannot explain the differences
double differing_ratio(const WriteCase& c, const Rows& rows, const TensorPlan& k, const TensorPlan& v) {
  CodeCount count;
  for (const Side which : kSides) {
    const WrittenRows written(c, rows, which, which == Side::v ? v : k);
    for (int token = std::max(0, c.tokens - kCheckedTokens); token < c.tokens; ++token) written.compare(token, count);
  }
  const double ratio = static_cast<double>(count.differing) / static_cast<double>(count.seen);
  if (count.far > 0 || ratio > (c.order > 1 || c.dense ? kMostDiffering : 0.0))
    throw Error{ErrorKind::check_failed,
                fmt::format("{}: {} tokens, rotation {}: {} of {} codes are not the codec's, {} by more than one",
                            c.variant->name, c.tokens, rotation_name(c), count.differing, count.seen, count.far)};
  return ratio;
}

}  // namespace

WriteResult measure_write(const Device& device, const WriteCase& c) {
  const WriteVariant& variant = *c.variant;
  const RowBytes bytes = bytes_of(c);
  std::vector<std::unique_ptr<Rows>> sets;
  sets.reserve(static_cast<std::size_t>(num_sets(bytes.total())));
  for (int i = 0; i < num_sets(bytes.total()); ++i)
    sets.push_back(std::make_unique<Rows>(device, c, static_cast<unsigned>(4 * i + 1)));
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
  p.page_stride = layout_of(c).page_bytes();
  const auto run = [&](int i) {
    set(i).enter(p);
    check(variant.run(launch, p, device.stream()));
  };
  set(0).enter(p);
  check(check_write(variant, p));

  WriteResult result;
  device.synchronize();
  run(0);
  result.differing_ratio = differing_ratio(c, set(0), k_plan, v_plan);
  const int calls = num_calls(bytes.total());
  result.time = device.time(calls, run);
  result.copy = time_copy(device, calls, bytes.total() / 2, [&](int i) { return CopyEnds{set(i).to, set(i).from}; });
  if (c.dense || c.transform || c.order < 8) return result;

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
