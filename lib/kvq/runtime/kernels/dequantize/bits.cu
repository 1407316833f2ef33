#include <kvq/runtime/kernels/dequantize/variant.h>
#include <kvq/device/launch.cuh>
#include <kvq/runtime/kernels/dequantize/linear_rows.cuh>

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>

/// The tuned kernel that dequantizes linear rows: of a head_dim and type of results, one for all numbers of words.
namespace kvq {

namespace dequantize {

namespace {

/// Loads a kernel for the largest rows, because a device has one limit for the rows of all layers.
/// @param bytes  of this format's launches  @param each  result: resident blocks a multiprocessor
template <typename T, typename Destination>
cudaError_t prepare_linear(int bytes, int& each) {
  constexpr int kMostBytes = T::shared_bytes(kMostLinearRowWords);
  static_assert(kMostBytes <= 99 * 1024, "what a block has on every architecture");
  const auto kernel = linear_dequantize_kernel<T, Destination>;
  cudaError_t error = load_kernel(kernel);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostBytes);
  return error != cudaSuccess ? error
                              : cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, T::kThreads,
                                                                              static_cast<std::size_t>(bytes));
}

template <typename T>
Status plan_linear(DequantizeLaunch& launch) {
  launch.shared_bytes = T::shared_bytes(std::max(launch.format.k.row_words, launch.format.v.row_words));
  int device = 0, multiprocessors = 0, each = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = prepare_linear<T, ToRows<T>>(launch.shared_bytes, each);
  if (error == cudaSuccess) error = prepare_linear<T, ToTiles<T>>(launch.shared_bytes, each);
  launch.blocks = each * multiprocessors;
  return cuda_status(error, "dequantize: linear rows: plan");
}

/// As many blocks as are resident at once, the same number for each head and side.
template <typename T, typename Destination>
Status launch_linear(const DequantizeLaunch& launch, const Destination& destination, CUstream_st* stream) {
  const int heads = destination.cache().num_kv_heads;
  if (destination.cache().batch == 0) return {};
  const dim3 grid(static_cast<unsigned>(std::max(1, launch.blocks / (2 * heads * T::kColumnBlocks))), T::kColumnBlocks,
                  static_cast<unsigned>(2 * heads));
  return cuda_status(launch_kernel(linear_dequantize_kernel<T, Destination>, grid, T::kThreads, launch.shared_bytes,
                                   false, stream, destination, launch.format),
                     "dequantize: linear rows: launch");
}

template <typename T>
Status run_linear(const DequantizeLaunch& launch, const DequantizeParams& params, CUstream_st* stream) {
  return launch_linear<T>(launch, ToRows<T>{params}, stream);
}

template <typename T>
Status linear_to_tiles(const DequantizeLaunch& launch, const PrefillParams& params, const PrefillSlab& slab,
                       CUstream_st* stream) {
  return launch_linear<T>(launch, ToTiles<T>{params, slab}, stream);
}

template <int kDim, typename Activation>
void take_kernels(DequantizeVariant& variant) {
  using T = LinearRowsTraits<kDim, Activation>;
  variant.plan_kernel = plan_linear<T>, variant.run = run_linear<T>, variant.to_tiles = linear_to_tiles<T>;
}

}  // namespace

}  // namespace dequantize

DequantizeVariant linear_dequantize(const CacheFormat& format, bool bf16) {
  DequantizeVariant variant{
      .name = bf16 ? "dequantize_linear_bf16" : "dequantize_linear_fp16",
      .k = format.k,
      .v = format.v,
      .k_bfloat = format.k_bfloat,
      .v_bfloat = format.v_bfloat,
      .bf16 = bf16,
  };
  if (bf16)
    dequantize::take_kernels<kLinearHeadDim, __nv_bfloat16>(variant);
  else
    dequantize::take_kernels<kLinearHeadDim, __half>(variant);
  return variant;
}

}  // namespace kvq
