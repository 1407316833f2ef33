#include <kvq/runtime/head_slice.h>

#include <fmt/format.h>

#include <cstddef>
#include <variant>
#include <vector>

namespace kvq {

namespace {

/// Heads [first, first + count) of values [outer, heads, ...].
template <typename T>
std::vector<T> part(const std::vector<T>& values, std::size_t outer, int heads, int first, int count) {
  std::vector<T> some;
  if (values.empty() || outer == 0) return some;
  const std::size_t inner = values.size() / outer / static_cast<std::size_t>(heads);
  for (std::size_t o = 0; o < outer; ++o) {
    const std::size_t begin = (o * static_cast<std::size_t>(heads) + static_cast<std::size_t>(first)) * inner;
    const auto from = values.begin() + static_cast<std::ptrdiff_t>(begin);
    some.insert(some.end(), from, from + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(count) * inner));
  }
  return some;
}

/// The coder of the heads that `cut` keeps.
template <typename Cut>
Coder slice_coder(const Coder& coder, const Cut& cut) {
  Coder some = coder;
  if (auto* codebooks = std::get_if<CodebookCoder>(&some); codebooks && codebooks->per_head)
    for (auto& [width, table] : codebooks->tables) table = cut(table);
  return some;
}

template <typename Cut>
BitAllocation slice_allocation(const BitAllocation& allocation, const Cut& cut) {
  BitAllocation some = allocation;
  some.channel_bits = cut(allocation.channel_bits), some.channel_order = cut(allocation.channel_order);
  some.block_bits = cut(allocation.block_bits), some.block_energy = cut(allocation.block_energy);
  some.segment_gain = cut(allocation.segment_gain);
  return some;
}

TensorPlan slice_side(const TensorPlan& plan, int heads, const HeadSlice& slice) {
  TensorPlan some;
  some.rotation = {.kind = plan.rotation.kind, .scope = plan.rotation.scope, .order = plan.rotation.order};
  some.rotation.recipe = plan.rotation.recipe;
  const bool shared = plan.rotation.scope == Scope::layer;
  const auto cut = [&](const auto& values) {
    return shared ? values : part(values, 1, heads, slice.first_kv, slice.num_kv);
  };
  some.coder = slice_coder(plan.coder, cut);
  some.rotation.matrix = cut(plan.rotation.matrix);
  some.rotation.inverse = cut(plan.rotation.inverse);
  some.rotation.channel_scale = cut(plan.rotation.channel_scale);
  if (plan.transform)
    some.transform = {
        .kind = plan.transform->kind,
        .outlier_gain = cut(plan.transform->outlier_gain),
        .condition = cut(plan.transform->condition),
    };
  // The signs of a dense rotation only explain the matrix, so they are left out.
  if (plan.rotation.kind == RotationKind::block_hadamard) some.rotation.signs = cut(plan.rotation.signs);
  some.center = cut(plan.center);
  if (plan.centroids)
    some.centroids = {
        .count = plan.centroids->count,
        .joint = plan.centroids->joint,
        .after_rotation = plan.centroids->after_rotation,
        .values = cut(plan.centroids->values),
        .inertia = cut(plan.centroids->inertia),
    };
  if (plan.allocation) some.allocation = slice_allocation(*plan.allocation, cut);
  some.clip_ratio = cut(plan.clip_ratio);
  return some;
}

}  // namespace

std::string slice_fault(const LayerGeometry& g, int size) {
  if (g.num_q_heads % size != 0)
    return fmt::format("{} query heads on {} ranks: expected a divisor of {}", g.num_q_heads, size, g.num_q_heads);
  if (g.num_kv_heads % size != 0 && size % g.num_kv_heads != 0)
    return fmt::format("{} KV heads on {} ranks: expected a divisor or a multiple of {}", g.num_kv_heads, size,
                       g.num_kv_heads);
  return "";
}

HeadSlice slice_of(const LayerGeometry& g, int rank, int size) {
  HeadSlice slice{.first_q = rank * (g.num_q_heads / size), .num_q = g.num_q_heads / size};
  if (size <= g.num_kv_heads) {
    slice.num_kv = g.num_kv_heads / size;
    slice.first_kv = rank * slice.num_kv;
  } else {
    slice.num_kv = 1;
    slice.first_kv = rank / (size / g.num_kv_heads);
  }
  return slice;
}

std::string joint_fault(const LayerPlan& plan, int size) {
  if (size == 1 || plan.geometry.num_kv_heads == 1) return "";
  for (const Side side : kSides)
    if (const TensorPlan* of = plan.side(side); of && of->centroids && of->centroids->joint)
      return fmt::format("{}: joint centroids on {} ranks: expected 1, because all heads of a token decide", name(side),
                         size);
  return "";
}

LayerPlan slice(const LayerPlan& plan, const HeadSlice& heads) {
  LayerPlan some{.layer = plan.layer, .geometry = plan.geometry, .k = {}, .v = {}};
  some.geometry.sink_logits = part(plan.geometry.sink_logits, 1, plan.geometry.num_q_heads, heads.first_q, heads.num_q);
  some.geometry.num_q_heads = heads.num_q, some.geometry.num_kv_heads = heads.num_kv;
  some.k = slice_side(plan.k, plan.geometry.num_kv_heads, heads);
  if (plan.v) some.v = slice_side(*plan.v, plan.geometry.num_kv_heads, heads);
  return some;
}

GoldenRows slice(const GoldenRows& rows, const LayerPlan& plan, const HeadSlice& heads) {
  const auto n = static_cast<std::size_t>(rows.tokens.count);
  const auto cut = [&](const auto& values) {
    return part(values, n, plan.geometry.num_kv_heads, heads.first_kv, heads.num_kv);
  };
  const auto cut_queries = [&](const auto& values) {
    return part(values, 1, plan.geometry.num_q_heads, heads.first_q, heads.num_q);
  };
  return {
      .tokens =
          {
              .first = rows.tokens.first,
              .count = rows.tokens.count,
              .q = cut_queries(rows.tokens.q),
              .k = cut(rows.tokens.k),
              .v = cut(rows.tokens.v),
          },
      .k = {.bytes = cut(rows.k.bytes), .firm = cut(rows.k.firm)},
      .v = {.bytes = cut(rows.v.bytes), .firm = cut(rows.v.firm)},
      .out = cut_queries(rows.out),
  };
}

}  // namespace kvq
