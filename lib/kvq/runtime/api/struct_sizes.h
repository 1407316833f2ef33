#pragma once

#include <kvq/runtime.h>

#include <cstddef>

/// struct_size of every structure of runtime.h in the first library of this major version (ABI 300), which callers of
/// that version pass. A field that is added later goes to the end and changes no number here.
namespace kvq::abi {

template <typename T>
inline constexpr std::size_t kFirstSize = 0;

#define KVQ_FIRST_SIZE(type, bytes)                      \
  template <>                                            \
  inline constexpr std::size_t kFirstSize<type> = bytes; \
  static_assert(sizeof(type) >= (bytes));
KVQ_FIRST_SIZE(kvq_error, 1032)
KVQ_FIRST_SIZE(kvq_kernel_info, 24)
KVQ_FIRST_SIZE(kvq_layer_serving, 328)
KVQ_FIRST_SIZE(kvq_layer_geometry, 48)
KVQ_FIRST_SIZE(kvq_model_options, 64)
KVQ_FIRST_SIZE(kvq_model_info, 72)
KVQ_FIRST_SIZE(kvq_layer_info, 144)
KVQ_FIRST_SIZE(kvq_fold_values_args, 48)
KVQ_FIRST_SIZE(kvq_fold_error, 40)
KVQ_FIRST_SIZE(kvq_fold_keys_args, 48)
KVQ_FIRST_SIZE(kvq_fold_key_scales_args, 64)
KVQ_FIRST_SIZE(kvq_layer_pools, 40)
KVQ_FIRST_SIZE(kvq_cache_options, 24)
KVQ_FIRST_SIZE(kvq_sequences, 80)
KVQ_FIRST_SIZE(kvq_step_args, 48)
KVQ_FIRST_SIZE(kvq_fault, 32)
KVQ_FIRST_SIZE(kvq_copy_args, 48)
KVQ_FIRST_SIZE(kvq_plan_options, 40)
KVQ_FIRST_SIZE(kvq_memory_options, 40)
KVQ_FIRST_SIZE(kvq_memory, 120)
KVQ_FIRST_SIZE(kvq_write_args, 64)
KVQ_FIRST_SIZE(kvq_decode_args, 88)
KVQ_FIRST_SIZE(kvq_append_args, 136)
KVQ_FIRST_SIZE(kvq_prefill_args, 144)
KVQ_FIRST_SIZE(kvq_merge_args, 88)
KVQ_FIRST_SIZE(kvq_dequantize_args, 80)
KVQ_FIRST_SIZE(kvq_selftest_layer, 320)
#undef KVQ_FIRST_SIZE

}  // namespace kvq::abi
