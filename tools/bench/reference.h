#pragma once

#include <kvq/plan/page_layout.h>
#include <kvq/plan/scheme.h>

#include <cstddef>
#include <cstdint>
#include <vector>

/// Between the device's words and those of the reference codec.
namespace kvq::bench {

/// The coder of a side's codes. @param symmetric_rule  where there are no minima
UniformCoder coder_of(const TileSide& side, bool bfloat, ScaleRule symmetric_rule = ScaleRule::norm);
inline ScaleType number_type(bool bfloat) { return bfloat ? ScaleType::bf16 : ScaleType::fp16; }

/// 16-bit numbers on the device as floats on the host.
std::vector<float> floats_at(const std::uint16_t* from, std::size_t count, bool bf16);

}  // namespace kvq::bench
