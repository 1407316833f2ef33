#pragma once

#include <kvq/core/status.h>
#include <kvq/plan/layer_pages.h>
#include <kvq/plan/serving.h>
#include <kvq/runtime/kernels/decode/variant.h>
#include <kvq/runtime/kernels/dequantize/variant.h>
#include <kvq/runtime/kernels/prefill/variant.h>
#include <kvq/runtime/kernels/quantize_write/variant.h>

/// Which kernel a layer's plan needs, and the error message if there is none.
namespace kvq {

/// A layer's format, to be compared with variants.
struct KernelKey {
  TileSide k, v;
  bool k_bfloat = false, v_bfloat = false;
  int heads = 0;  ///< query heads of a KV head
  bool bf16 = true;
  TunedRows k_rows = TunedRows::none, v_rows = TunedRows::none;
  bool k_linear = false, v_linear = false;  ///< those of a side are, and it has bit tiles
  CodedRows k_coded = {}, v_coded = {};     ///< for writes
  bool operator==(const KernelKey&) const;
};
KernelKey kernel_key(const LayerPlan& plan, const PageLayout& pages, bool bf16);

/// The tuned decode kernel that choose_decode() takes, or null.
const DecodeVariant* find_tuned_decode(const KernelKey& key, int new_tokens = 1);
/// Whether that kernel is one for linear rows, which reads other fragments of rotations (DeviceRotation).
bool decodes_linear_rows(const KernelKey& key);

/// Whether choose_dequantize() takes the kernels for rows in bit tiles, which read DeviceRotation::row_matrices.
bool dequantizes_bits(const KernelKey& key);

/// A tuned variant (an entry of variants.json, or the one for rows in bit tiles) if there is one, else the generic
/// kernels.
/// @throws  Error{unsupported} with the format, the limits of the generic kernels and the nearest tuned variants
/// @param new_tokens  of a sequence: a variant with rows for all of them, or for as many as any variant has
DecodeVariant choose_decode(const KernelKey& key, int new_tokens = 1);
WriteVariant choose_write(const KernelKey& key);
DequantizeVariant choose_dequantize(const KernelKey& key);
/// The attention kernel over the output of a dequantize variant.
PrefillVariant choose_prefill(const DequantizeVariant& rows);

}  // namespace kvq
