#include <kvq/compute/cuda/kernels.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math_constants.h>

#include <cstddef>

// Kernels around the products of cuBLAS: they widen rows and add up sums, in a fixed order.

namespace kvq::cuda {

namespace {

__device__ __forceinline__ float number_at(Number type, const void* data, std::int64_t i) {
  switch (type) {
    case Number::f16: return __half2float(static_cast<const __half*>(data)[i]);
    case Number::bf16: return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
    case Number::f32: return static_cast<const float*>(data)[i];
  }
  return 0.0f;
}

constexpr int kWidenTokens = 32;  // of a block

/// Grid: tokens of all chunks, in runs of kWidenTokens; threads: channels.
__global__ void widen_kernel(Rows rows, Weights weights, int head, std::int64_t first, std::int64_t count,
                             double* plain, double* weighted) {
  const int j = static_cast<int>(threadIdx.x), dim = rows.dim;
#pragma unroll 4
  for (int i = 0; i < kWidenTokens; ++i) {
    const std::int64_t at = std::int64_t{blockIdx.x} * kWidenTokens + i, token = first + at;
    double x = 0.0, w = 0.0;
    if (at < count && !(token >= weights.skipped_first && token < weights.skipped_end) &&
        !(weights.counts && weights.counts[token] == 0)) {
      x = number_at(rows.type, rows.data, head * rows.head_stride + token * rows.token_stride + j);
      w = weights.of_tokens ? double{weights.of_tokens[head * weights.head_stride + token]} : 1.0;
    }
    if (plain) plain[at * dim + j] = x;
    if (weighted) weighted[at * dim + j] = w * x;
  }
}

constexpr int kSumChannels = 32, kSumSlices = 16;
/// Grid: [chunks, channels]; threads: [channels, slices of the rows].
__global__ void sum_rows_kernel(const double* rows, int dim, double* sums, std::int64_t stride) {
  __shared__ double of_slice[kSumSlices][kSumChannels];
  const int slice = static_cast<int>(threadIdx.y), j = static_cast<int>(blockIdx.y * kSumChannels + threadIdx.x);
  constexpr int kRows = kChunkTokens / kSumSlices;
  double sum = 0.0;
  if (j < dim) {
    const double* x = rows + (std::int64_t{blockIdx.x} * kChunkTokens + slice * kRows) * dim + j;
#pragma unroll
    for (int i = 0; i < kRows; ++i) sum += x[std::int64_t{i} * dim];
  }
  of_slice[slice][threadIdx.x] = sum;
  __syncthreads();
  if (slice != 0 || j >= dim) return;
  for (int s = 1; s < kSumSlices; ++s) sum += of_slice[s][threadIdx.x];
  sums[blockIdx.x * stride + j] = sum;
}

__global__ void add_parts_kernel(const double* parts, int count, std::int64_t size, double* total) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= size) return;
  double sum = total[i];
#pragma unroll 16
  for (int c = 0; c < count; ++c) sum += parts[c * size + i];
  total[i] = sum;
}

constexpr int kWarps = 8;
__device__ __forceinline__ double sum_of_warp(double x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
  return x;
}

__global__ void dot_rows_kernel(const double* x, const double* y, std::int64_t count, int dim, float* forms) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const std::int64_t row = std::int64_t{blockIdx.x} * kWarps + (threadIdx.x >> 5);
  if (row >= count) return;
  double sum = 0.0;
  for (int j = lane; j < dim; j += 32) sum += x[row * dim + j] * y[row * dim + j];
  sum = sum_of_warp(sum);
  if (lane == 0) forms[row] = static_cast<float>(fmax(sum, 0.0));
}

__global__ void norms_kernel(Rows rows, float* norms) {
  const int lane = static_cast<int>(threadIdx.x) & 31, head = static_cast<int>(blockIdx.y);
  const std::int64_t token = std::int64_t{blockIdx.x} * kWarps + (threadIdx.x >> 5);
  if (token >= rows.tokens) return;
  double sum = 0.0;
  for (int j = lane; j < rows.dim; j += 32) {
    const double x = number_at(rows.type, rows.data, head * rows.head_stride + token * rows.token_stride + j);
    sum += x * x;
  }
  sum = sum_of_warp(sum);
  if (lane == 0) norms[head * rows.tokens + token] = static_cast<float>(sum);
}

__global__ void split_kernel(Rows rows, Parts parts) {
  const int head = static_cast<int>(blockIdx.y), dim = parts.padded_dim;
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x, token = i / dim;
  const int channel = static_cast<int>(i % dim);
  if (token >= rows.tokens) return;
  float rest = channel < rows.dim
                   ? number_at(rows.type, rows.data, head * rows.head_stride + token * rows.token_stride + channel)
                   : 0.0f;
  for (int part = 0; part < parts.count; ++part) {
    const __nv_bfloat16 rounded = __float2bfloat16_rn(rest);
    parts.data[part * parts.part_size() + head * parts.head_size() + i] = __bfloat16_as_ushort(rounded);
    rest -= __bfloat162float(rounded);
  }
}

/// Grid: matrices. The matrices are column-major; the residual is A V, from which V diag(values) is subtracted here.
__global__ void defects_kernel(const double* residuals, const double* products, const double* vectors,
                               const double* values, int dim, double* defects) {
  __shared__ double largest[2][32];
  const std::int64_t size = std::int64_t{dim} * dim, base = blockIdx.x * size;
  double residual = 0.0, defect = 0.0;
  for (std::int64_t i = threadIdx.x; i < size; i += blockDim.x) {
    const std::int64_t column = i / dim, row = i % dim;
    const double r = fabs(residuals[base + i] - vectors[base + i] * values[blockIdx.x * dim + column]);
    const double d = fabs(products[base + i] - (row == column ? 1.0 : 0.0));
    residual = fmax(residual, r < CUDART_INF ? r : CUDART_INF);  // fmax() would drop a NaN
    defect = fmax(defect, d < CUDART_INF ? d : CUDART_INF);
  }
  for (int step = 16; step > 0; step /= 2) {
    residual = fmax(residual, __shfl_xor_sync(0xFFFFFFFFu, residual, step));
    defect = fmax(defect, __shfl_xor_sync(0xFFFFFFFFu, defect, step));
  }
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  if ((threadIdx.x & 31) == 0) largest[0][warp] = residual, largest[1][warp] = defect;
  __syncthreads();
  if (threadIdx.x < 2) {
    double x = 0.0;
    for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) x = fmax(x, largest[threadIdx.x][w]);
    defects[blockIdx.x * 2 + threadIdx.x] = x;
  }
}

/// Grid: matrices.
__global__ void symmetrize_kernel(const double* from, double* to, double* largest, int dim) {
  __shared__ double of_warp[32];
  const std::int64_t size = std::int64_t{dim} * dim, base = blockIdx.x * size;
  double most = 0.0;
  for (std::int64_t i = threadIdx.x; i < size; i += blockDim.x) {
    const double x = 0.5 * (from[base + i] + from[base + i % dim * dim + i / dim]);
    to[base + i] = x;
    most = fmax(most, fabs(x) < CUDART_INF ? fabs(x) : CUDART_INF);  // fmax() would drop a NaN
  }
  for (int step = 16; step > 0; step /= 2) most = fmax(most, __shfl_xor_sync(0xFFFFFFFFu, most, step));
  if ((threadIdx.x & 31) == 0) of_warp[threadIdx.x >> 5] = most;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (unsigned w = 0; w < blockDim.x / 32; ++w) most = fmax(most, of_warp[w]);
  largest[blockIdx.x] = most;
}

/// Grid: [vectors, in the order of the result, matrices]; threads: a warp.
__global__ void canonical_kernel(const double* values, const double* vectors, double* pairs, int dim) {
  const int lane = static_cast<int>(threadIdx.x), j = static_cast<int>(blockIdx.x), source = dim - 1 - j;
  const std::int64_t matrix = blockIdx.y, size = std::int64_t{dim} * dim;
  const double* vector = vectors + matrix * size + std::int64_t{source} * dim;
  double* out = pairs + matrix * (size + dim);
  double most = -1.0;
  int at = 0;
  for (int i = lane; i < dim; i += 32)
    if (fabs(vector[i]) > most) most = fabs(vector[i]), at = i;
  for (int step = 16; step > 0; step /= 2) {  // the first of equal ones
    const double other = __shfl_xor_sync(0xFFFFFFFFu, most, step);
    const int other_at = __shfl_xor_sync(0xFFFFFFFFu, at, step);
    if (other > most || (other == most && other_at < at)) most = other, at = other_at;
  }
  const double sign = vector[at] < 0.0 ? -1.0 : 1.0;
  for (int i = lane; i < dim; i += 32) out[dim + std::int64_t{i} * dim + j] = sign * vector[i];
  if (lane == 0) out[j] = values[matrix * dim + source];
}

unsigned blocks_for(std::int64_t count, int each) { return static_cast<unsigned>((count + each - 1) / each); }

}  // namespace

Rows Rows::head(int h) const {
  const std::int64_t bytes = (type == Number::f32 ? 4 : 2) * head_stride * h;
  Rows one = *this;
  one.data = static_cast<const std::byte*>(data) + bytes;
  one.heads = 1;
  return one;
}

void widen(const Rows& rows, const Weights& weights, int head, std::int64_t first, std::int64_t count, double* plain,
           double* weighted, CUstream_st* stream) {
  widen_kernel<<<blocks_for(count, kChunkTokens) * (kChunkTokens / kWidenTokens), static_cast<unsigned>(rows.dim), 0,
                 stream>>>(rows, weights, head, first, count, plain, weighted);
}
void sum_rows(const double* rows, int chunks, int dim, double* sums, std::int64_t stride, CUstream_st* stream) {
  sum_rows_kernel<<<dim3(static_cast<unsigned>(chunks), blocks_for(dim, kSumChannels)), dim3(kSumChannels, kSumSlices),
                    0, stream>>>(rows, dim, sums, stride);
}
void add_parts(const double* parts, int count, std::int64_t size, double* total, CUstream_st* stream) {
  add_parts_kernel<<<blocks_for(size, 128), 128, 0, stream>>>(parts, count, size, total);
}
void dot_rows(const double* x, const double* y, std::int64_t count, int dim, float* forms, CUstream_st* stream) {
  dot_rows_kernel<<<blocks_for(count, kWarps), 32 * kWarps, 0, stream>>>(x, y, count, dim, forms);
}
void squared_norms(const Rows& rows, float* norms, CUstream_st* stream) {
  norms_kernel<<<dim3(blocks_for(rows.tokens, kWarps), static_cast<unsigned>(rows.heads)), 32 * kWarps, 0, stream>>>(
      rows, norms);
}
void split_rows(const Rows& rows, const Parts& parts, CUstream_st* stream) {
  split_kernel<<<dim3(blocks_for(rows.tokens * parts.padded_dim, 256), static_cast<unsigned>(rows.heads)), 256, 0,
                 stream>>>(rows, parts);
}
void symmetrize(const double* from, double* to, double* largest, int dim, int count, CUstream_st* stream) {
  symmetrize_kernel<<<static_cast<unsigned>(count), 256, 0, stream>>>(from, to, largest, dim);
}
void canonical_pairs(const double* values, const double* vectors, double* pairs, int dim, int count,
                     CUstream_st* stream) {
  canonical_kernel<<<dim3(static_cast<unsigned>(dim), static_cast<unsigned>(count)), 32, 0, stream>>>(values, vectors,
                                                                                                      pairs, dim);
}
void largest_defects(const double* residuals, const double* products, const double* vectors, const double* values,
                     int dim, int count, double* defects, CUstream_st* stream) {
  defects_kernel<<<static_cast<unsigned>(count), 256, 0, stream>>>(residuals, products, vectors, values, dim, defects);
}

}  // namespace kvq::cuda
