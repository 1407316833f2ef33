#pragma once

#include <kvq/core/status.h>
#include <kvq/plan/layer_plan.h>
#include <kvq/runtime/kernels/decode/variant.h>
#include <kvq/runtime/kernels/demote/variant.h>
#include <kvq/runtime/kernels/dequantize/variant.h>
#include <kvq/runtime/kernels/prefill/variant.h>
#include <kvq/runtime/kernels/quantize_write/variant.h>

#include <string>

/// Which kernel a layer's plan needs, and what to say if there is none.
namespace kvq {

/// "u2g128", as in variants.json. @param bfloat  of the numbers beside the codes
std::string side_name(const TileSide& side, bool bfloat);

/// A layer's format, as rows of the variant tables have it.
struct KernelKey {
  TileSide k, v;
  bool k_bfloat = false, v_bfloat = false;
  int heads = 0;  ///< query heads of a KV head
  bool bf16 = true;
  bool operator==(const KernelKey&) const;
};
KernelKey kernel_key(const LayerPlan& plan, const PageLayout& pages, bool bf16);

/// A row of variants.json if there is one, else plain kernels.
/// @throws  Error{unsupported} naming what was asked for, what plain kernels take and the nearest rows
DecodeVariant choose_decode(const KernelKey& key);
WriteVariant choose_write(const KernelKey& key);
DemoteVariant choose_demote(const KernelKey& key);
DequantizeVariant choose_dequantize(const KernelKey& key);
/// The attention over what these rows become.
PrefillVariant choose_prefill(const DequantizeVariant& rows);

}  // namespace kvq
