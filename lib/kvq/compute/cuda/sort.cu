#include <kvq/compute/cuda/kmeans_kernels.h>

#include <cub/device/device_radix_sort.cuh>

#include <algorithm>

namespace kvq::cuda {

std::size_t sort_bytes(std::int64_t count) {
  std::size_t pairs = 0, numbers = 0;
  cub::DeviceRadixSort::SortPairs(nullptr, pairs, static_cast<const std::uint32_t*>(nullptr),
                                  static_cast<std::uint32_t*>(nullptr), static_cast<const std::int32_t*>(nullptr),
                                  static_cast<std::int32_t*>(nullptr), count);
  cub::DeviceRadixSort::SortKeys(nullptr, numbers, static_cast<const float*>(nullptr), static_cast<float*>(nullptr),
                                 count);
  return std::max(pairs, numbers);
}

void sort_pairs(void* memory, std::size_t bytes, const std::uint32_t* keys, std::uint32_t* sorted_keys,
                const std::int32_t* values, std::int32_t* sorted_values, std::int64_t count, int key_bits,
                CUstream_st* stream) {
  cub::DeviceRadixSort::SortPairs(memory, bytes, keys, sorted_keys, values, sorted_values, count, 0, key_bits, stream);
}

void sort_numbers(void* memory, std::size_t bytes, const float* numbers, float* sorted, std::int64_t count,
                  CUstream_st* stream) {
  cub::DeviceRadixSort::SortKeys(memory, bytes, numbers, sorted, count, 0, 32, stream);
}

}  // namespace kvq::cuda
