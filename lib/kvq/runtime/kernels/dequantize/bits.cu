#include <kvq/runtime/kernels/dequantize/variant.h>
#include <kvq/device/launch.cuh>
#include <kvq/runtime/kernels/dequantize/coded_rows.cuh>
#include <kvq/runtime/kernels/dequantize/linear_rows.cuh>

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>

/// The tuned kernels that dequantize bit tiles: of a head_dim and type of results, one for linear rows of all numbers
/// of words and one that decodes rows of all widths. A launch for keys and values of both kinds is two launches.
namespace kvq {

namespace dequantize {

namespace {

constexpr int kMostBlockBytes = 99 * 1024;  ///< what a block has on every architecture

/// @param most   bytes of the largest launch, because a device has one limit for the rows of all layers
/// @param bytes  of this format's launches  @param each  result: resident blocks a multiprocessor
template <typename Kernel>
cudaError_t prepare_kernel(Kernel kernel, int threads, int most, int bytes, int& each) {
  cudaError_t error = load_kernel(kernel);
  if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  return error != cudaSuccess
             ? error
             : cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, static_cast<std::size_t>(bytes));
}

template <int kDim, typename Activation>
struct BitTileKernels {
  using Linear = LinearRowsTraits<kDim, Activation>;
  using Coded = CodedRowsTraits<kDim, Activation>;
  static constexpr int kMostLinearBytes = Linear::shared_bytes(kMostLinearRowWords),
                       kCodedBytes = Coded::layout().bytes();
  static_assert(kMostLinearBytes <= kMostBlockBytes && kCodedBytes <= kMostBlockBytes);

  static Status plan(DequantizeLaunch& launch) {
    const DecodedSides& decoded = launch.decoded;
    launch.shared_bytes = Linear::shared_bytes(
        std::max(decoded.k ? 0 : launch.format.k.row_words, decoded.v ? 0 : launch.format.v.row_words));
    int device = 0, multiprocessors = 0, each = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    const auto prepare = [&](auto to_rows, auto to_tiles, int threads, int most, int bytes, int& blocks) {
      if (error == cudaSuccess) error = prepare_kernel(to_rows, threads, most, bytes, each);
      if (error == cudaSuccess) error = prepare_kernel(to_tiles, threads, most, bytes, each);
      blocks = each * multiprocessors;
    };
    if (!decoded.k || !decoded.v)
      prepare(linear_dequantize_kernel<Linear, ToRows<Linear>>, linear_dequantize_kernel<Linear, ToTiles<Linear>>,
              Linear::kThreads, kMostLinearBytes, launch.shared_bytes, launch.blocks);
    if (decoded.any())
      prepare(coded_dequantize_kernel<Coded, ToRows<Coded>>, coded_dequantize_kernel<Coded, ToTiles<Coded>>,
              Coded::kThreads, kCodedBytes, kCodedBytes, launch.decoding_blocks);
    return cuda_status(error, "dequantize: bit tiles: plan");
  }

  /// As many blocks as are resident at once, the same number for each head and side.
  template <typename T, typename Kernel, typename Destination>
  static Status launch_sides(Kernel kernel, int blocks, int bytes, const DequantizeLaunch& launch,
                             const Destination& destination, LaunchedSides sides, CUstream_st* stream) {
    if (sides.count() == 0) return {};
    const int heads = sides.count() * destination.cache().num_kv_heads;
    const dim3 grid(static_cast<unsigned>(std::max(1, blocks / (heads * T::kColumnBlocks))), T::kColumnBlocks,
                    static_cast<unsigned>(heads));
    return cuda_status(
        launch_kernel(kernel, grid, T::kThreads, bytes, false, stream, destination, launch.format, sides),
        "dequantize: bit tiles: launch");
  }

  template <template <typename> class Destination, typename... Args>
  static Status launch_all(const DequantizeLaunch& launch, CUstream_st* stream, const Args&... args) {
    const Destination<Linear> of_bits{args...};
    const Destination<Coded> of_codes{args...};
    if (of_bits.cache().batch == 0) return {};
    const DecodedSides& decoded = launch.decoded;
    const Status status = launch_sides<Linear>(linear_dequantize_kernel<Linear, Destination<Linear>>, launch.blocks,
                                               launch.shared_bytes, launch, of_bits, {!decoded.k, !decoded.v}, stream);
    return status.ok() ? launch_sides<Coded>(coded_dequantize_kernel<Coded, Destination<Coded>>, launch.decoding_blocks,
                                             kCodedBytes, launch, of_codes, {decoded.k, decoded.v}, stream)
                       : status;
  }

  static Status run(const DequantizeLaunch& launch, const DequantizeParams& params, CUstream_st* stream) {
    return launch_all<ToRows>(launch, stream, params);
  }
  static Status to_tiles(const DequantizeLaunch& launch, const PrefillParams& params, const PrefillSlab& slab,
                         CUstream_st* stream) {
    return launch_all<ToTiles>(launch, stream, params, slab);
  }
};

template <int kDim, typename Activation>
void take_kernels(DequantizeVariant& variant) {
  using Kernels = BitTileKernels<kDim, Activation>;
  variant.plan_kernel = Kernels::plan, variant.run = Kernels::run, variant.to_tiles = Kernels::to_tiles;
}

}  // namespace

}  // namespace dequantize

DequantizeVariant bits_dequantize(const CacheFormat& format, DecodedSides decoded, bool bf16) {
  DequantizeVariant variant{
      .name = decoded.any() ? bf16 ? "dequantize_coded_bf16" : "dequantize_coded_fp16"
              : bf16        ? "dequantize_linear_bf16"
                            : "dequantize_linear_fp16",
      .k = format.k,
      .v = format.v,
      .k_bfloat = format.k_bfloat,
      .v_bfloat = format.v_bfloat,
      .bf16 = bf16,
  };
  variant.decoded = decoded;
  if (bf16)
    dequantize::take_kernels<kLinearHeadDim, __nv_bfloat16>(variant);
  else
    dequantize::take_kernels<kLinearHeadDim, __half>(variant);
  return variant;
}

}  // namespace kvq
