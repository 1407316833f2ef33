#pragma once

#include <kvq/container/json.h>
#include <kvq/plan/layer_plan.h>

#include <cstdint>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

/// One list of the tensors of one side's plan, for writing and for reading. The writer saves the vectors of the plan;
/// the reader makes a plan from the manifest and fills its vectors.
namespace kvq {

/// Optional tensors of a side that the manifest announces, because no other field of the plan implies them.
struct AnnouncedTensors {
  bool inverse = false, channel_scale = false, eigenbasis = false, signs = false, center = false;
  bool segment_gain = false;
};
AnnouncedTensors announced_tensors(const TensorPlan& plan);
/// @param json  a side of a manifest that fits the schema
AnnouncedTensors announced_tensors(const Json& json);

/// One tensor of a plan, TensorPlan for reading and const TensorPlan for writing.
template <typename Plan>
struct TensorSpec {
  template <typename T>
  using Field = std::conditional_t<std::is_const_v<Plan>, const T, T>*;

  std::string name;  ///< behind "layers.<i>.<side>."
  std::vector<std::int64_t> shape;
  /// The vector in the plan; for taps, the thetas of all widths one after another.
  std::variant<Field<std::vector<float>>, Field<std::vector<std::int8_t>>, Field<std::vector<std::uint8_t>>,
               Field<std::vector<std::uint16_t>>, Field<std::vector<TrellisTaps>>>
      values;
};

/// @param heads  entries of the plan's tensors: 1 if all KV heads share them
template <typename Plan>
std::vector<TensorSpec<Plan>> side_tensors(Plan& plan, const AnnouncedTensors& announced, std::int64_t heads,
                                           std::int64_t dim);

}  // namespace kvq
