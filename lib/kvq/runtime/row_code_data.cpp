#include <kvq/codec/codec.h>
#include <kvq/codec/row_codec.h>
#include <kvq/core/error.h>
#include <kvq/plan/layer_pages.h>
#include <kvq/plan/table_rows.h>
#include <kvq/runtime/row_code_data.h>

#include <algorithm>
#include <map>
#include <span>
#include <variant>

namespace kvq {

namespace {

/// Tables one after the other, equal ones once.
class Tables {
 public:
  int add(std::vector<float> table) {
    const auto [at, is_new] = known_.try_emplace(std::move(table), static_cast<int>(all_.size()));
    if (is_new) all_.insert(all_.end(), at->first.begin(), at->first.end());
    return at->second;
  }
  std::vector<float> take() { return std::move(all_); }

 private:
  std::vector<float> all_;
  std::map<std::vector<float>, int> known_;
};

static_assert(kWarmUp == IntegerSearch::kWarmUp && kLeastOpen == IntegerSearch::kLeastOpen &&
              kLargestY == IntegerSearch::kLargestY && kFarInUnits == IntegerSearch::kFarInUnits);

/// Fills in how a segment's groups are coded.
struct DescribeCoder {
  RowSegment& segment;
  Tables& tables;
  RowCode& code;
  void operator()(const UniformCoder& coder) const {
    segment.kind = coder.levels == UniformLevels::affine ? CodeKind::affine : CodeKind::symmetric;
  }
  void operator()(const CodebookGroup& coder) const {
    segment.kind = CodeKind::codebook;
    std::vector<float> table(coder.table().begin(), coder.table().end());
    table.insert(table.end(), coder.thresholds().begin(), coder.thresholds().end());
    segment.table = tables.add(std::move(table));
  }
  void operator()(const TrellisGroup& coder) const {
    segment.kind = CodeKind::trellis, segment.memory = coder.memory();
    segment.integers = coder.integer_search() != nullptr;
    segment.table = tables.add(coder.kernel_table());
    code.search_bytes = std::max(
        code.search_bytes, trellis_search_bytes(coder.bits(), coder.memory(), segment.group_size, segment.integers));
    code.searches_each_row |= searched_at_once(coder.bits(), coder.memory(), segment.integers) == 1;
  }
};

HeadRows head_rows(const TensorPlan& plan, int head, int dim, Tables& tables, RowCode& code) {
  const RowCodec codec(plan, head, dim);
  HeadRows rows;
  for (const BitSegment& place : bit_segments(plan, head, dim)) {
    RowSegment segment{.place = place};
    const DescribeCoder describe{segment, tables, code};
    if (const UniformCoder* uniform = codec.uniform()) {
      segment.group_size = uniform->group_size;
      describe(*uniform);
    } else {
      const auto group = std::find_if(codec.groups().begin(), codec.groups().end(),
                                      [&](const ChannelGroup& each) { return each.first == place.first_channel; });
      KVQ_ASSERT(group != codec.groups().end());
      segment.group_size = group->count, segment.gain = group->gain;
      std::visit(describe, group->coder);
    }
    segment.first_number = codec.row_scale() ? 0 : rows.groups;
    rows.groups += place.channels / segment.group_size;
    rows.segments[rows.num_segments++] = segment;
  }
  return rows;
}

bool is_bit_tiles(const TensorPlan& plan, int num_kv_heads, int dim) {
  LayerPlan layer;
  layer.k = plan, layer.v = plan;
  layer.geometry.num_kv_heads = num_kv_heads, layer.geometry.head_dim = layer.geometry.v_head_dim = dim;
  return !is_exact(plan.coder) && page_layout_of(layer, kTileTokens).k.is_bits();
}

/// Each centroid @ A, in double, rounded once. @return  [H, C, D]
std::vector<float> rotated(const TensorPlan& plan, int dim) {
  TensorPlan map;  // without centroids
  map.rotation = plan.rotation;
  const auto d = static_cast<std::size_t>(dim), each = static_cast<std::size_t>(plan.centroids->count) * d;
  std::vector<float> all(plan.centroids->values.size());
  for (std::size_t first = 0; first < all.size(); first += d)
    rotate_row(map, static_cast<int>(first / each), std::span(plan.centroids->values).subspan(first, d),
               std::span(all).subspan(first, d));
  return all;
}

}  // namespace

RowCodeData row_code_data(const TensorPlan& plan, int num_kv_heads, int dim) {
  RowCodeData data;
  if (is_bit_tiles(plan, num_kv_heads, dim)) {
    Tables tables;
    for (int head = 0; head < num_kv_heads; ++head)
      data.heads.push_back(head_rows(plan, head, dim, tables, data.values));
    data.tables = tables.take();
    data.weights = table_weights(plan, num_kv_heads, dim), data.levels = level_tables(plan, num_kv_heads, dim);
    data.segments = segment_rows(plan, num_kv_heads, dim);
    data.values.one_scale = plan.allocation && plan.allocation->has_row_scale();
  }
  if (plan.centroids) {
    data.values.num_centroids = plan.centroids->count, data.values.joint = plan.centroids->joint;
    data.values.per_head = plan.rotation.scope == Scope::kv_head;
    data.centroids = plan.centroids->values;
    data.rotated_centroids = rotated(plan, dim);
  }
  return data;
}

}  // namespace kvq
