#include <kvq/artifact/side_tensors.h>

namespace kvq {

namespace {

/// `Of`, const if `Plan` is const.
template <typename Plan, typename Of>
using Like = std::conditional_t<std::is_const_v<Plan>, const Of, Of>;

/// Adds the tensors of a coder.
template <typename Plan>
struct CoderTensors {
  std::vector<TensorSpec<Plan>>& list;
  std::int64_t heads;

  void operator()(Like<Plan, ExactCoder>&) const {}
  void operator()(Like<Plan, UniformCoder>&) const {}
  void operator()(Like<Plan, CodebookCoder>& coder) const {
    for (auto& [bits, table] : coder.tables) {
      std::vector<std::int64_t> shape = {std::int64_t{1} << bits};
      if (coder.per_head) shape.insert(shape.begin(), heads);
      list.push_back({"codebook." + std::to_string(bits), std::move(shape), &table});
    }
  }
  void operator()(Like<Plan, TrellisCoder>& coder) const {
    std::int64_t thetas = 0;
    for (const TrellisTaps& taps : coder.taps) thetas += taps.bits * (taps.memory + 1);
    list.push_back({"trellis", {thetas}, &coder.taps});
  }
};

}  // namespace

AnnouncedTensors announced_tensors(const TensorPlan& plan) {
  return {
      .inverse = !plan.rotation.inverse.empty(),
      .channel_scale = !plan.rotation.channel_scale.empty(),
      .eigenbasis = !plan.rotation.eigenbasis.empty(),
      .signs = !plan.rotation.signs.empty(),
      .center = !plan.center.empty(),
      .segment_gain = plan.allocation && plan.allocation->has_row_scale(),
  };
}

AnnouncedTensors announced_tensors(const Json& json) {
  const Json& rotation = json.at("rotation");
  return {
      .inverse = rotation.value("inverse", false),
      .channel_scale = rotation.value("channel_scale", false),
      .eigenbasis = rotation.value("eigenbasis", false),
      .signs = rotation.value("signs", false),
      .center = json.at("center").get<bool>(),
      .segment_gain = json.contains("allocation") && json.at("allocation").contains("scale_scope"),
  };
}

template <typename Plan>
std::vector<TensorSpec<Plan>> side_tensors(Plan& plan, const AnnouncedTensors& announced, std::int64_t heads,
                                           std::int64_t dim) {
  std::vector<TensorSpec<Plan>> list;
  auto& rotation = plan.rotation;
  if (rotation.kind == RotationKind::dense) list.push_back({"rotation", {heads, dim, dim}, &rotation.matrix});
  if (announced.inverse) list.push_back({"inverse", {heads, dim, dim}, &rotation.inverse});
  if (announced.channel_scale) list.push_back({"channel_scale", {heads, dim}, &rotation.channel_scale});
  if (announced.eigenbasis) {
    list.push_back({"eigenbasis", {heads, dim, dim}, &rotation.eigenbasis});
    list.push_back({"spectrum", {heads, dim}, &rotation.spectrum});
  }
  if (announced.signs) list.push_back({"hadamard_signs", {heads, dim}, &rotation.signs});
  if (announced.center) list.push_back({"center", {heads, dim}, &plan.center});
  if (plan.centroids) list.push_back({"centroids", {heads, plan.centroids->count, dim}, &plan.centroids->values});
  if (plan.allocation) {
    auto& allocation = *plan.allocation;
    list.push_back({"channel_bits", {heads, dim}, &allocation.channel_bits});
    list.push_back({"channel_order", {heads, dim}, &allocation.channel_order});
    if (announced.segment_gain) list.push_back({"segment_gain", {heads, kGainWidths}, &allocation.segment_gain});
    if (allocation.unit == "rope_block") {
      const std::int64_t blocks = num_blocks(static_cast<int>(dim));
      list.push_back({"block_bits", {heads, blocks}, &allocation.block_bits});
      list.push_back({"block_energy", {heads, blocks}, &allocation.block_energy});
    }
  }
  std::visit(CoderTensors<Plan>{list, heads}, plan.coder);
  return list;
}

template std::vector<TensorSpec<TensorPlan>> side_tensors(TensorPlan&, const AnnouncedTensors&, std::int64_t,
                                                          std::int64_t);
template std::vector<TensorSpec<const TensorPlan>> side_tensors(const TensorPlan&, const AnnouncedTensors&,
                                                                std::int64_t, std::int64_t);

}  // namespace kvq
