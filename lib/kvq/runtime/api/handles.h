#pragma once

#include <kvq/device/cuda_status.h>
#include <kvq/runtime.h>
#include <kvq/runtime/api/abi.h>
#include <kvq/runtime/kernel_choice.h>
#include <kvq/runtime/kernels/copy/params.h>
#include <kvq/runtime/loaded_model.h>

#include <cuda_runtime.h>

#include <memory>
#include <vector>

/// The structures behind the opaque handles. None changes after a caller has it.

struct kvq_model {
  kvq::LoadedModel model;
};

/// One layer on a device: everything that a run reads of it.
struct kvq_device_layer {
  kvq::KernelKey key;
  int num_q_heads = 0, num_kv_heads = 0;
  float softmax_scale = 0.0f;
  float logit_softcap = 0.0f;
  int sliding_window = 0;
  kvq::Folded folded;
  bool center_in_o_proj = false;  ///< values are folded and have a center, so attention weights must sum to 1
  kvq::PageLayout pages;
  kvq::WindowLayouts windows;
  kvq::LayerPointers pointers;
};

namespace kvq::abi {

/// A model on a device; handles of it and of its caches share it.
struct DeviceModel {
  int device = 0;
  int first_layer = 0;
  int max_rollback = 0;
  Windows windows;
  std::vector<kvq_device_layer> layers;
};

}  // namespace kvq::abi

struct kvq_device_model {
  std::shared_ptr<const kvq::abi::DeviceModel> data;
};

struct kvq_cache {
  /// Addresses of one layer's pools.
  struct Pools {
    std::byte* pages = nullptr;
    std::int64_t page_stride = 0;
    std::byte *sinks = nullptr, *rings = nullptr;
    int group = 0, num_pages = 0;
  };
  std::shared_ptr<const kvq::abi::DeviceModel> model;
  kvq::CacheExtents extents;               ///< as kernels check them
  std::vector<Pools> pools;                ///< in the order of model->layers
  std::vector<kvq::CopyParams> copies[3];  ///< by kvq_copy_kind and, of pages, group: everything but the entries
  kvq::FaultRecord* faults = nullptr;      ///< on the device; null: unchecked
  kvq::RingState* ring_states = nullptr;   ///< on the device; null: unchecked
};

/// Refers to no other handle: what it needs of the model is copied.
struct kvq_plan {
  /// The kernels of layers with one format and head count.
  struct Kernels {
    kvq::KernelKey key = {};
    int first_layer = 0;  ///< the first layer that has them, in the whole model
    int num_kv_heads = 0;
    kvq::WriteVariant write = {};
    kvq::WriteLaunch write_launch = {};
    kvq::DequantizeVariant dequantize = {};
    kvq::DequantizeLaunch dequantize_launch = {};
    kvq::DecodeVariant decode = {};
    kvq::DecodeLaunch decode_launch = {};
    kvq::PrefillVariant prefill = {};
    kvq::PrefillLaunch prefill_launch = {};
  };
  int device = 0;
  int first_layer = 0;
  int max_batch = 0;  ///< of decode; 0: no decode
  int max_new_tokens = 1;
  bool prefills = false;  ///< prefill kernels are planned
  std::size_t decode_workspace_bytes = 0, prefill_workspace_bytes = 0, write_workspace_bytes = 0;
  std::vector<Kernels> kernels = {};
  std::vector<std::size_t> of_layer = {};  ///< index in `kernels` of each layer
};

namespace kvq::abi {

inline bool aligned(const void* pointer, std::uintptr_t to) {
  return reinterpret_cast<std::uintptr_t>(pointer) % to == 0;
}

Status check_plan_options(const kvq_plan_options& options);
/// What a plan with these options demands of a layer's prefill.
PrefillShape prefill_shape(const LoadedLayer& layer, const kvq_plan_options& options);

/// Checks that `device` is current. @param what  the object that is on `device`, for the message
inline Status check_device(const char* call, int device, const char* what) {
  int current = 0;
  const Status status = cuda_status(cudaGetDevice(&current), call);
  if (status.ok() && current != device)
    return Status::fail(StatusCode::invalid_argument, "%s: the current device is %d, the %s is on %d", call, current,
                        what, device);
  return status;
}

/// One layer of a cache, and the plan's kernels for it.
struct CacheLayer {
  const kvq_device_layer* layer = nullptr;
  const kvq_cache::Pools* pools = nullptr;
  const kvq_plan::Kernels* kernels = nullptr;
};

/// Finds a layer of a cache and its kernels. Fails if there is no such layer, the plan's layer has another format or
/// other heads, or another device is current.
Status find_layer(const char* call, const kvq_plan& plan, const kvq_cache* cache, int layer, CacheLayer& found);

inline int page_shift(const PageLayout& pages) {
  int shift = 4;
  while (1 << shift < pages.page_size) ++shift;
  return shift;
}

inline WindowRule window_rule(const Windows& windows) { return {windows.sink_tokens, windows.recent_tokens}; }

/// The sizes of one layer's pools. A layer without pages has none that a table may name, also if nothing is checked.
inline CacheExtents extents_of(const kvq_cache& cache, const kvq_cache::Pools& pools) {
  CacheExtents extents = cache.extents;
  if (!pools.pages || extents.num_pages != CacheExtents::kUnchecked) extents.num_pages = pools.num_pages;
  return extents;
}

/// One layer's cache for kernels that read rows in the served model's basis. Folded keys have no center to add.
inline PagedCacheView paged_cache_view(const kvq_cache& cache, const CacheLayer& found, int layer) {
  const auto& [l, pools, kernels] = found;
  PagedCacheView c;
  c.num_kv_heads = l->num_kv_heads;
  c.windows = window_rule(cache.model->windows), c.extents = extents_of(cache, *pools);
  c.pages = pools->pages, c.page_stride = pools->page_stride, c.page_shift = page_shift(l->pages);
  c.sinks = pools->sinks, c.sink_layout = l->windows.sinks;
  c.rings = pools->rings, c.ring_layout = l->windows.rings;
  c.ring_states = cache.ring_states, c.faults = cache.faults, c.layer = layer;
  c.rotation_k = l->pointers.rotation_k, c.rotation_v = l->pointers.rotation_v;
  c.center_k = l->folded.k ? nullptr : l->pointers.center_k, c.center_v = l->pointers.center_v;
  c.code_k = l->pointers.code_k, c.code_v = l->pointers.code_v;
  return c;
}

/// Copies the caller's sequences. @param most  the plan's max_batch
inline Status read_sequences(const char* call, const kvq_sequences* from, int most, SequenceTables& into) {
  kvq_sequences s;
  if (const Status status = read_struct(from, s, "sequences"); !status.ok()) return status;
  if (s.batch > most)
    return Status::fail(StatusCode::invalid_argument, "%s: batch is %d, the plan's max_batch %d", call, s.batch, most);
  into = {
      .batch = s.batch,
      .seq_lens = s.seq_lens,
      .page_table = s.page_table,
      .page_indptr = s.page_indptr,
      .page_table_stride = s.page_table_stride,
      .sink_slots = s.sink_slots,
      .ring_slots = s.ring_slots,
      .exact_from = s.exact_from,
      .sequence_ids = s.sequence_ids,
  };
  return {};
}

/// What a call may set in place of the model's. @param call  for messages
struct AttentionOptions {
  float softmax_scale = 0.0f, logit_softcap = 0.0f;
  int sliding_window = 0;
};
inline Status attention_options(const char* call, const kvq_device_layer& layer, float softmax_scale,
                                float logit_softcap, std::int32_t sliding_window, AttentionOptions& options) {
  if (!(softmax_scale >= 0.0f) || softmax_scale > 3.4e38f)
    return Status::fail(StatusCode::invalid_argument, "%s: softmax_scale is %g, expected a positive number, or 0", call,
                        static_cast<double>(softmax_scale));
  if (sliding_window < -1)
    return Status::fail(StatusCode::invalid_argument, "%s: sliding_window is %d, expected -1 or more", call,
                        sliding_window);
  if (!(logit_softcap <= 3.4e38f))
    return Status::fail(StatusCode::invalid_argument, "%s: logit_softcap is %g, expected a number", call,
                        static_cast<double>(logit_softcap));
  options.softmax_scale = softmax_scale > 0.0f ? softmax_scale : layer.softmax_scale;
  options.logit_softcap = logit_softcap == 0.0f ? layer.logit_softcap : logit_softcap < 0.0f ? 0.0f : logit_softcap;
  options.sliding_window = sliding_window == 0 ? layer.sliding_window : sliding_window < 0 ? 0 : sliding_window;
  return {};
}

const LoadedLayer& layer_of(const kvq_model* model, int layer);

/// Checks all arguments of a call and makes its kernels' parameters. Nothing is launched.
Status write_params(const kvq_plan& plan, const kvq_cache* cache, int layer, const kvq_write_args& args,
                    CacheLayer& found, WriteParams& params);
Status decode_params(const kvq_plan& plan, const kvq_cache* cache, int layer, const kvq_decode_args& args,
                     CacheLayer& found, DecodeParams& params);

}  // namespace kvq::abi
