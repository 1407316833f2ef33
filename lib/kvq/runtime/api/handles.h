#pragma once

#include <kvq/device/cuda_status.h>
#include <kvq/runtime.h>
#include <kvq/runtime/api/abi.h>
#include <kvq/runtime/kernel_choice.h>
#include <kvq/runtime/kernels/demote/variant.h>
#include <kvq/runtime/loaded_model.h>

#include <cuda_runtime.h>

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
  int sliding_window = 0;
  kvq::Folded folded;
  bool center_in_o_proj = false;  ///< values are folded and have a center, so attention weights must sum to 1
  kvq::PageLayout pages;
  kvq::WindowLayout windows;
  kvq::LayerPointers pointers;
};

struct kvq_device_model {
  int device = 0;
  int first_layer = 0;
  int max_rollback = 0;
  kvq::Windows windows;
  std::vector<kvq_device_layer> layers;
};

/// Layers that one demote launch handles: of equal format, sizes and page stride.
struct kvq_demote_group {
  kvq::DemoteVariant variant;
  kvq::DemoteParams params;  ///< the lists of demotions are set by each step
};

struct kvq_cache {
  /// Addresses of one layer's pages and windows.
  struct Pools {
    std::byte* pages = nullptr;
    std::int64_t page_stride = 0;
    std::byte* windows = nullptr;
  };
  const kvq_device_model* model = nullptr;
  std::vector<Pools> pools;                     ///< in the order of model->layers
  std::vector<kvq_demote_group> demote_groups;  ///< empty without a recent window
};

struct kvq_step_plan {
  int max_batch = 0, max_tokens = 0;
  int max_demotions = 0;
  kvq::Windows windows;
  kvq::WindowLayout window_layout;  ///< only the numbers of rows are read

  std::size_t list_bytes() const;  ///< of one of the two lists of demotions at the workspace's beginning; the number of
                                   ///< demotions follows
  std::size_t workspace_bytes() const;
};

struct kvq_write_plan {
  kvq::WriteVariant variant;
  kvq::KernelKey key;
  kvq::WriteLaunch launch = {};
  int device = 0;
};

struct kvq_decode_plan {
  kvq::DecodeVariant variant;
  kvq::KernelKey key;
  kvq::DecodeLaunch launch = {};
  int num_kv_heads = 0;
  int max_batch = 0;
  int device = 0;

  std::size_t workspace_bytes() const;
};

struct kvq_prefill_plan {
  kvq::DequantizeVariant rows;
  kvq::PrefillVariant variant;
  kvq::KernelKey key;
  kvq::PrefillLaunch launch = {};
  int device = 0;
};

struct kvq_dequantize_plan {
  kvq::DequantizeVariant variant;
  kvq::KernelKey key;
  kvq::DequantizeLaunch launch = {};
  int device = 0;
};

namespace kvq::abi {

inline bool aligned(const void* pointer, std::uintptr_t to) {
  return reinterpret_cast<std::uintptr_t>(pointer) % to == 0;
}

/// Checks that `device` is current. @param what  the object that is on `device`, for the message
inline Status check_device(const char* call, int device, const char* what) {
  int current = 0;
  const Status status = cuda_status(cudaGetDevice(&current), call);
  if (status.ok() && current != device)
    return Status::fail(StatusCode::invalid_argument, "%s: the current device is %d, the %s is on %d", call, current,
                        what, device);
  return status;
}

/// One layer of a cache.
struct CacheLayer {
  const kvq_device_layer* layer = nullptr;
  const kvq_cache::Pools* pools = nullptr;
};

/// Finds a layer of a cache. Fails if there is no such layer, the plan is for another format, or another device is
/// current.
inline Status find_layer(const char* call, const kvq_cache* cache, int layer, const KernelKey& key, CacheLayer& found) {
  if (!cache) return Status::fail(StatusCode::invalid_argument, "%s: cache must not be null", call);
  const kvq_device_model& model = *cache->model;
  const std::int64_t i = std::int64_t{layer} - model.first_layer,
                     count = static_cast<std::int64_t>(model.layers.size());
  if (i < 0 || i >= count)
    return Status::fail(StatusCode::invalid_argument, "%s: layer: expected %d to %lld, found %d", call,
                        model.first_layer, static_cast<long long>(model.first_layer + count - 1), layer);
  found = {&model.layers[static_cast<std::size_t>(i)], &cache->pools[static_cast<std::size_t>(i)]};
  if (!(found.layer->key == key))
    return Status::fail(StatusCode::invalid_argument, "%s: layer %d has another format than the layer of the plan",
                        call, layer);
  return check_device(call, model.device, "cache");
}

inline int page_shift(const PageLayout& pages) { return pages.page_size == 64 ? 6 : pages.page_size == 32 ? 5 : 4; }

/// One layer's cache for kernels that read rows in the served model's basis. Folded keys have no center to add.
inline PagedCacheView paged_cache_view(const kvq_cache& cache, const CacheLayer& found) {
  const auto& [l, pools] = found;
  PagedCacheView c;
  c.num_kv_heads = l->num_kv_heads;
  c.sink_tokens = cache.model->windows.sink_tokens, c.recent_tokens = cache.model->windows.recent_tokens;
  c.pages = pools->pages, c.page_stride = pools->page_stride, c.page_shift = page_shift(l->pages);
  c.windows = pools->windows, c.window_layout = l->windows;
  c.rotation_k = l->pointers.rotation_k, c.rotation_v = l->pointers.rotation_v;
  c.center_k = l->folded.k ? nullptr : l->pointers.center_k, c.center_v = l->pointers.center_v;
  return c;
}

const LoadedLayer& layer_of(const kvq_model* model, int layer);

}  // namespace kvq::abi
