#include <kvq/codec/golden_rows.h>
#include <kvq/runtime/head_slice.h>

#include "support/served_artifact.h"

#include <catch2/catch.hpp>

#include <vector>

using namespace kvq;

namespace {

/// Entries of `values` [outer, heads, inner] of one head, copied element by element.
template <typename T>
std::vector<T> of_head(const std::vector<T>& values, std::size_t outer, std::size_t heads, std::size_t head) {
  std::vector<T> some;
  for (std::size_t i = 0; i < values.size(); ++i)
    if (i / (values.size() / (outer * heads)) % heads == head) some.push_back(values[i]);
  return some;
}

template <typename T>
void append(std::vector<T>& to, const std::vector<T>& more) {
  to.insert(to.end(), more.begin(), more.end());
}

}  // namespace

TEST_CASE("Ranks share the query heads, and have their KV heads", "[runtime]") {
  const LayerGeometry g{.num_q_heads = 48, .num_kv_heads = 4, .head_dim = 64, .v_head_dim = 64};
  for (const int size : {1, 2, 4, 8, 16}) {
    CAPTURE(size);
    CHECK(slice_fault(g, size).empty());
    int next = 0;
    for (int rank = 0; rank < size; ++rank) {
      const HeadSlice slice = slice_of(g, rank, size);
      CHECK(slice.first_q == next);
      next += slice.num_q;
      CHECK(slice.num_kv == std::max(1, 4 / size));
      for (int q = slice.first_q; q < next; ++q) {
        CHECK(q / 12 >= slice.first_kv);
        CHECK(q / 12 < slice.first_kv + slice.num_kv);
      }
      CHECK(slice.num_q % slice.num_kv == 0);
    }
    CHECK(next == 48);
  }
}

TEST_CASE("Ranks that heads cannot be divided among are refused with the numbers", "[runtime]") {
  const LayerGeometry g{.num_q_heads = 24, .num_kv_heads = 8, .head_dim = 64, .v_head_dim = 64};
  CHECK_THAT(slice_fault(g, 5), Catch::Contains("24 query heads on 5 ranks"));
  CHECK_THAT(slice_fault(g, 3), Catch::Contains("8 KV heads on 3 ranks"));
  CHECK_THAT(slice_fault(g, 12), Catch::Contains("8 KV heads on 12 ranks"));
  CHECK(slice_fault(g, 24).empty());
}

TEST_CASE("A rank's plan is that of its heads, cut by hand", "[runtime]") {
  const Artifact artifact = test::served_artifact({}, 0);
  for (const LayerPlan& plan : artifact.layers)
    for (const int size : {1, 2, 4, 8}) {
      for (int rank = 0; rank < size; ++rank) {
        CAPTURE(plan.layer, size, rank);
        const HeadSlice heads = slice_of(plan.geometry, rank, size);
        const LayerPlan mine = slice(plan, heads);
        CHECK_NOTHROW(validate(mine));
        CHECK(mine.geometry.num_kv_heads == heads.num_kv);
        for (const auto& [whole, part] : {std::pair{&plan.k, &mine.k}, std::pair{&*plan.v, &*mine.v}}) {
          std::vector<float> matrix, center;
          std::vector<std::int8_t> signs;
          std::vector<double> clip;
          const bool shared = whole->rotation.scope == Scope::layer;
          const int first = shared ? 0 : heads.first_kv, count = shared ? 1 : heads.num_kv;
          for (int head = first; head < first + count; ++head) {
            const std::size_t all = shared ? 1 : 4, h = static_cast<std::size_t>(head);
            append(matrix, of_head(whole->rotation.matrix, 1, all, h));
            append(signs, of_head(whole->rotation.signs, 1, all, h));
            append(center, of_head(whole->center, 1, all, h));
            append(clip, of_head(whole->clip_ratio, 1, all, h));
          }
          CHECK(part->rotation.matrix == matrix);
          CHECK(part->rotation.signs == signs);
          CHECK(part->center == center);
          CHECK(part->clip_ratio == clip);
          CHECK(part->rotation.kind == whole->rotation.kind);
          CHECK(part->coder == whole->coder);
        }
      }
    }
}

TEST_CASE("A rank's sinks are those of its query heads, also where ranks share a KV head", "[runtime]") {
  LayerPlan plan = test::served_artifact({}, 0).layers.front();
  const int all = plan.geometry.num_q_heads;
  CHECK(slice(plan, slice_of(plan.geometry, 1, 2)).geometry.sink_logits.empty());
  for (int q = 0; q < all; ++q) plan.geometry.sink_logits.push_back(0.25 * q - 1.0);  // no two heads have the same
  for (const int size : {1, 2, 4, 8, 16}) {
    std::vector<double> of_all_ranks;
    for (int rank = 0; rank < size; ++rank) {
      CAPTURE(size, rank);
      const LayerPlan mine = slice(plan, slice_of(plan.geometry, rank, size));
      CHECK_NOTHROW(validate(mine));
      REQUIRE(mine.geometry.sink_logits.size() == static_cast<std::size_t>(all / size));
      CHECK(mine.geometry.sink_logits.front() == 0.25 * (rank * (all / size)) - 1.0);
      append(of_all_ranks, mine.geometry.sink_logits);
    }
    CAPTURE(size);
    CHECK(of_all_ranks == plan.geometry.sink_logits);
  }
}

TEST_CASE("A rank's transforms are those of its heads", "[runtime]") {
  const Artifact artifact = test::transformed_artifact({}, 0);
  for (const LayerPlan& plan : artifact.layers)
    for (const int size : {1, 2, 8})
      for (int rank = 0; rank < size; ++rank) {
        CAPTURE(plan.layer, size, rank);
        const HeadSlice heads = slice_of(plan.geometry, rank, size);
        const LayerPlan mine = slice(plan, heads);
        CHECK_NOTHROW(validate(mine));
        for (const auto& [whole, part] : {std::pair{&plan.k, &mine.k}, std::pair{&*plan.v, &*mine.v}}) {
          std::vector<float> inverse, scale;
          std::vector<double> gain, condition;
          const bool shared = whole->rotation.scope == Scope::layer;
          const int first = shared ? 0 : heads.first_kv, count = shared ? 1 : heads.num_kv;
          for (int head = first; head < first + count; ++head) {
            const std::size_t all = shared ? 1 : 4, h = static_cast<std::size_t>(head);
            append(inverse, of_head(whole->rotation.inverse, 1, all, h));
            append(scale, of_head(whole->rotation.channel_scale, 1, all, h));
            if (!whole->transform) continue;
            append(gain, of_head(whole->transform->outlier_gain, 1, all, h));
            append(condition, of_head(whole->transform->condition, 1, all, h));
          }
          CHECK(part->rotation.inverse == inverse);
          CHECK(part->rotation.channel_scale == scale);
          REQUIRE(part->transform.has_value() == whole->transform.has_value());
          if (!whole->transform) continue;
          CHECK(part->transform->kind == whole->transform->kind);
          CHECK(part->transform->outlier_gain == gain);
          CHECK(part->transform->condition == condition);
        }
      }
}

TEST_CASE("A rank's golden rows are what its plan makes of its tokens", "[runtime]") {
  const bool transformed = GENERATE(false, true);
  const Artifact artifact = transformed ? test::transformed_artifact({}, 5) : test::served_artifact({}, 5);
  for (const LayerPlan& plan : artifact.layers)
    for (const int size : {2, 4, 8})
      for (int rank = 0; rank < size; ++rank) {
        CAPTURE(plan.layer, size, rank);
        const HeadSlice heads = slice_of(plan.geometry, rank, size);
        const GoldenRows& whole = artifact.golden.at(plan.layer);
        const GoldenRows mine = slice(whole, plan, heads);
        CHECK(mine.tokens.q.size() == static_cast<std::size_t>(heads.num_q * 128));
        CHECK(golden_fault(slice(plan, heads), mine) == "");
        if (heads.num_kv == 1)
          CHECK(mine.k.bytes == of_head(whole.k.bytes, 5, 4, static_cast<std::size_t>(heads.first_kv)));
      }
}
