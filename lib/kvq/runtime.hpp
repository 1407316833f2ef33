#pragma once

#include <kvq/runtime.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

/// The C interface with owners and exceptions; C++17, header only. What makes a handle throws Error; what runs returns
/// a status and never throws, allocates or waits. See <kvq/runtime.h> for everything that is not said here.
namespace kvq::runtime {

/// Why a handle could not be made.
class Error : public std::runtime_error {
 public:
  Error(kvq_status status, const char* message) : std::runtime_error(message), status_(status) {}
  kvq_status status() const noexcept { return status_; }

 private:
  kvq_status status_;
};

/// A structure with struct_size set and everything else zero, its default.
template <typename T>
T init() noexcept {
  T object;
  KVQ_INIT(object);
  return object;
}

/// Calls `function` with its arguments and a place for the message. @throws Error
template <typename Function, typename... Arguments>
void call(Function function, Arguments... arguments) {
  kvq_error error = init<kvq_error>();
  if (const kvq_status status = function(arguments..., &error); status != KVQ_OK) throw Error(status, error.message);
}

namespace detail {

/// A handle and the function that destroys it.
template <typename T, void (*kDestroy)(T*)>
struct Destroyer {
  void operator()(T* handle) const noexcept { kDestroy(handle); }
};
template <typename T, void (*kDestroy)(T*)>
using Owner = std::unique_ptr<T, Destroyer<T, kDestroy>>;

}  // namespace detail

/// One rank's part of an artifact, on the host. Owners may be destroyed in any order.
class Model {
 public:
  Model(const std::string& path, const kvq_model_options& options) {
    kvq_model* model = nullptr;
    call(kvq_model_load, path.c_str(), &options, &model);
    handle_.reset(model);
  }
  const kvq_model* get() const noexcept { return handle_.get(); }

  kvq_model_info info() const {
    auto info = init<kvq_model_info>();
    call(kvq_model_query, get(), &info);
    return info;
  }
  kvq_layer_info layer(std::int32_t layer) const {
    auto info = init<kvq_layer_info>();
    call(kvq_model_query_layer, get(), layer, &info);
    return info;
  }
  std::size_t device_bytes() const {
    std::size_t bytes = 0;
    call(kvq_model_device_bytes, get(), &bytes);
    return bytes;
  }

  /// Memory of this model, a cache, and calls; see kvq_memory_estimate().
  kvq_memory memory(const kvq_memory_options& options) const {
    auto memory = init<kvq_memory>();
    call(kvq_memory_estimate, get(), &options, &memory);
    return memory;
  }

  /// Folds a layer's values or keys into the caller's weights; see kvq_fold_values() and kvq_fold_keys().
  kvq_fold_error fold_values(std::int32_t layer, const kvq_fold_values_args& args) const {
    auto result = init<kvq_fold_error>();
    call(kvq_fold_values, get(), layer, &args, &result);
    return result;
  }
  void fold_keys(std::int32_t layer, const kvq_fold_keys_args& args) const { call(kvq_fold_keys, get(), layer, &args); }
  void fold_key_scales(std::int32_t layer, const kvq_fold_key_scales_args& args) const {
    call(kvq_fold_key_scales, get(), layer, &args);
  }

  /// Results of all layers. @throws Error only if the test could not be made; see `status` of each layer
  std::vector<kvq_selftest_layer> selftest(kvq_stream stream) const {
    std::vector<kvq_selftest_layer> layers(static_cast<std::size_t>(info().layer_count), init<kvq_selftest_layer>());
    for (kvq_selftest_layer& layer : layers)  // until the library says otherwise
      layer.status = layer.write_status = layer.decode_status = KVQ_INTERNAL;
    kvq_error error = init<kvq_error>();
    const kvq_status status =
        kvq_selftest(get(), layers.data(), static_cast<std::int32_t>(layers.size()), nullptr, stream, &error);
    if (status != KVQ_OK && status != KVQ_MISMATCH && status != KVQ_UNSUPPORTED) throw Error(status, error.message);
    return layers;
  }

 private:
  detail::Owner<kvq_model, kvq_model_destroy> handle_;
};

/// A model's rotations and centers on the current device, in the caller's memory.
class DeviceModel {
 public:
  DeviceModel(const Model& model, void* memory, std::size_t bytes, kvq_stream stream) {
    kvq_device_model* device_model = nullptr;
    call(kvq_model_upload, model.get(), memory, bytes, stream, &device_model);
    handle_.reset(device_model);
  }
  const kvq_device_model* get() const noexcept { return handle_.get(); }
  std::size_t cache_bytes(const kvq_cache_options& options) const {
    std::size_t bytes = 0;
    call(kvq_cache_device_bytes, get(), &options, &bytes);
    return bytes;
  }

 private:
  detail::Owner<kvq_device_model, kvq_device_model_destroy> handle_;
};

/// The caller's pools, bound to a device model.
class Cache {
 public:
  Cache(const DeviceModel& model, const kvq_cache_options& options, const std::vector<kvq_layer_pools>& pools,
        void* memory, std::size_t bytes, kvq_stream stream) {
    kvq_cache* cache = nullptr;
    call(kvq_cache_create, model.get(), &options, pools.data(), static_cast<std::int32_t>(pools.size()), memory, bytes,
         stream, &cache);
    handle_.reset(cache);
  }
  const kvq_cache* get() const noexcept { return handle_.get(); }

  [[nodiscard]] kvq_status step(const kvq_step_args& args, kvq_stream stream,
                                kvq_error* error = nullptr) const noexcept {
    return kvq_step_run(get(), &args, stream, error);
  }
  [[nodiscard]] kvq_status copy(const kvq_copy_args& args, kvq_stream stream,
                                kvq_error* error = nullptr) const noexcept {
    return kvq_copy_run(get(), &args, stream, error);
  }
  /// Bytes of one entry of a kvq_copy_kind in a buffer.
  std::size_t copy_bytes(std::int32_t kind) const {
    std::size_t bytes = 0;
    call(kvq_copy_bytes, get(), kind, &bytes);
    return bytes;
  }
  /// The first fault since the last call. Waits for the stream.
  kvq_fault fault(kvq_stream stream) const {
    auto fault = init<kvq_fault>();
    call(kvq_fault_query, get(), &fault, stream);
    return fault;
  }

 private:
  detail::Owner<kvq_cache, kvq_cache_destroy> handle_;
};

/// The kernels of all layers of a model on the current device.
class Plan {
 public:
  Plan(const Model& model, const kvq_plan_options& options) {
    kvq_plan* plan = nullptr;
    call(kvq_plan_create, model.get(), &options, &plan);
    handle_.reset(plan);
  }
  /// Writes, decode steps of up to max_batch sequences, and dequantization; no prefill.
  Plan(const Model& model, std::int32_t max_batch) : Plan(model, decode_options(max_batch)) {}
  const kvq_plan* get() const noexcept { return handle_.get(); }

  /// The kernel of a layer. @param kernel  kvq_kernel
  kvq_kernel_info kernel(std::int32_t layer, std::int32_t kernel) const {
    auto info = init<kvq_kernel_info>();
    call(kvq_plan_kernel, get(), layer, kernel, &info);
    return info;
  }
  /// Bytes of workspace that suffice for the calls of all layers. @param kernel  kvq_kernel
  std::size_t workspace_bytes(std::int32_t kernel) const {
    std::size_t bytes = 0;
    call(kvq_plan_workspace_bytes, get(), kernel, &bytes);
    return bytes;
  }

  [[nodiscard]] kvq_status write(const Cache& cache, std::int32_t layer, const kvq_write_args& args, kvq_stream stream,
                                 kvq_error* error = nullptr) const noexcept {
    return kvq_write_run(get(), cache.get(), layer, &args, stream, error);
  }
  [[nodiscard]] kvq_status decode(const Cache& cache, std::int32_t layer, const kvq_decode_args& args,
                                  kvq_stream stream, kvq_error* error = nullptr) const noexcept {
    return kvq_decode_run(get(), cache.get(), layer, &args, stream, error);
  }
  [[nodiscard]] kvq_status append(const Cache& cache, std::int32_t layer, const kvq_append_args& args,
                                  kvq_stream stream, kvq_error* error = nullptr) const noexcept {
    return kvq_append_run(get(), cache.get(), layer, &args, stream, error);
  }
  [[nodiscard]] kvq_status prefill(const Cache& cache, std::int32_t layer, const kvq_prefill_args& args,
                                   kvq_stream stream, kvq_error* error = nullptr) const noexcept {
    return kvq_prefill_run(get(), cache.get(), layer, &args, stream, error);
  }
  [[nodiscard]] kvq_status dequantize(const Cache& cache, std::int32_t layer, const kvq_dequantize_args& args,
                                      kvq_stream stream, kvq_error* error = nullptr) const noexcept {
    return kvq_dequantize_run(get(), cache.get(), layer, &args, stream, error);
  }

 private:
  static kvq_plan_options decode_options(std::int32_t max_batch) noexcept {
    auto options = init<kvq_plan_options>();
    options.max_batch = max_batch;
    return options;
  }
  detail::Owner<kvq_plan, kvq_plan_destroy> handle_;
};

/// Merges results of attention over parts of the keys: kvq_merge_run().
[[nodiscard]] inline kvq_status merge(const kvq_merge_args& args, kvq_stream stream,
                                      kvq_error* error = nullptr) noexcept {
  return kvq_merge_run(&args, stream, error);
}

/// Which kernels serve the layers of an artifact, without a device. @param activation  kvq_activation
inline std::vector<kvq_layer_serving> artifact_serving(const std::string& path, std::int32_t activation = KVQ_BF16) {
  std::int32_t count = 0;
  call(kvq_artifact_serving, path.c_str(), activation, static_cast<kvq_layer_serving*>(nullptr), std::int32_t{0},
       &count);
  std::vector<kvq_layer_serving> layers(static_cast<std::size_t>(count), init<kvq_layer_serving>());
  call(kvq_artifact_serving, path.c_str(), activation, layers.data(), count, &count);
  return layers;
}

}  // namespace kvq::runtime
