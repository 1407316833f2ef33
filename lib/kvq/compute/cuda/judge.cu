#include <kvq/compute/cuda/judge_kernels.h>

#include <cuda_runtime.h>
#include <math_constants.h>

namespace kvq::cuda {

namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kTogether = 4;  // rows of a block at a time
constexpr float kLog2e = 1.44269504f;

/// Grid: [rows in fours, heads]; threads: columns in turn.
__global__ void __launch_bounds__(kThreads) multiply_kernel(const __grid_constant__ MatrixProduct p) {
  extern __shared__ double rows[];  // [kTogether, dim]
  const int head = static_cast<int>(blockIdx.y), first = static_cast<int>(blockIdx.x) * kTogether, dim = p.dim;
  const std::int64_t base = (std::int64_t{head} * p.count + first) * dim;
  const int count = min(kTogether, p.count - first);
  for (int i = static_cast<int>(threadIdx.x); i < kTogether * dim; i += kThreads) {
    const float center = p.before ? p.before[head * dim + i % dim] : 0.0f;
    rows[i] = i < count * dim ? double{p.rows[base + i] - center} : 0.0;
  }
  __syncthreads();
  for (int column = static_cast<int>(threadIdx.x); column < dim; column += kThreads) {
    double sum[kTogether] = {};
    if (p.matrix) {
      const double* m = p.matrix + std::int64_t{head} * dim * dim + column;
#pragma unroll 4
      for (int k = 0; k < dim; ++k) {
        const double element = m[std::int64_t{k} * dim];
#pragma unroll
        for (int r = 0; r < kTogether; ++r) sum[r] = fma(rows[r * dim + k], element, sum[r]);
      }
    } else {
#pragma unroll
      for (int r = 0; r < kTogether; ++r) sum[r] = rows[r * dim + column];
    }
    const float offset = p.after ? p.after[head * dim + column] : 0.0f;
    for (int r = 0; r < count; ++r) p.to[base + std::int64_t{r} * dim + column] = static_cast<float>(sum[r]) + offset;
  }
}

/// Over all threads of the block; they get the same result.
template <typename X, typename F>
__device__ __forceinline__ X reduce(X x, X* of_warp, F combine) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = combine(x, __shfl_xor_sync(kAll, x, step));
  __syncthreads();
  if ((threadIdx.x & 31) == 0) of_warp[threadIdx.x >> 5] = x;
  __syncthreads();
  x = of_warp[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) x = combine(x, of_warp[w]);
  return x;
}

/// Shared memory of a block.
struct Memory {
  double* errors;  ///< [kTogether, v_dim]
  float* weights;  ///< [kTogether, keys]
  float* q;        ///< [kTogether, dim]
  __host__ __device__ static int bytes(const JudgedHeads& p) {
    return kTogether * (p.v_dim * 8 + p.keys * 4 + p.dim * 4);
  }
};

/// Grid: [queries in fours, query heads].
__global__ void __launch_bounds__(kThreads)
    judge_kernel(const __grid_constant__ JudgedHeads p, Changed changed, const float* other, ChangedRow* rows) {
  extern __shared__ double memory[];
  __shared__ float of_warp[kWarps];
  __shared__ double sum_of_warp[kWarps];
  const Memory shared{memory, reinterpret_cast<float*>(memory + kTogether * p.v_dim),
                      reinterpret_cast<float*>(memory + kTogether * p.v_dim) + kTogether * p.keys};
  const int thread = static_cast<int>(threadIdx.x), head = static_cast<int>(blockIdx.y), kv_head = head / p.group;
  const int first = static_cast<int>(blockIdx.x) * kTogether, count = min(kTogether, p.queries - first);
  const std::int64_t row = std::int64_t{head} * p.queries + first;
  const float* exact_k = p.k + std::int64_t{kv_head} * p.keys * p.dim;
  const float* keys = changed == Changed::keys ? other + std::int64_t{kv_head} * p.keys * p.dim : exact_k;
  const float* v = p.v + std::int64_t{kv_head} * p.keys * p.v_dim;
  const float* other_v = changed == Changed::values ? other + std::int64_t{kv_head} * p.keys * p.v_dim : nullptr;
  for (int i = thread; i < kTogether * p.dim; i += kThreads)
    shared.q[i] = i < count * p.dim ? p.q[row * p.dim + i] : 0.0f;
  __syncthreads();

  // What each key weighs in the change.
  for (int r = 0; r < count; ++r) {
    const int position = static_cast<int>(p.position[first + r]), end = position + 1,
              begin = p.window > 0 ? max(0, end - p.window) : 0;
    const auto is_exact = [&](int t) { return t < p.sink_tokens || t >= end - p.recent_tokens; };
    float* weights = shared.weights + r * p.keys;
    float* stored = p.weights + (row + r) * p.keys;
    if (changed == Changed::values) {
      for (int t = thread; t < p.keys; t += kThreads)
        weights[t] = t >= begin && t < end && !is_exact(t) ? stored[t] : 0.0f;
      continue;
    }
    const float sink = p.sinks ? p.sinks[head] : -CUDART_INF_F;
    float most = sink;
    for (int t = thread; t < p.keys; t += kThreads) {
      float logit = -CUDART_INF_F;
      if (t >= begin && t < end) {
        const float4* key = reinterpret_cast<const float4*>((is_exact(t) ? exact_k : keys) + std::int64_t{t} * p.dim);
        const float4* q = reinterpret_cast<const float4*>(shared.q + r * p.dim);
        float sum = 0.0f;
        if (p.dim % 4 == 0) {
          for (int j = 0; j < p.dim / 4; ++j) {
            const float4 a = q[j], b = __ldg(key + j);
            sum = fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
          }
        } else {
          const float *a = shared.q + r * p.dim, *b = reinterpret_cast<const float*>(key);
          for (int j = 0; j < p.dim; ++j) sum = fmaf(a[j], b[j], sum);
        }
        logit = sum * p.scale;
        if (p.cap > 0.0f) logit = p.cap * tanhf(logit / p.cap);
      }
      weights[t] = logit;
      most = fmaxf(most, logit);
    }
    most = reduce(most, of_warp, [](float a, float b) { return fmaxf(a, b); });
    double sum = 0.0;
    for (int t = thread; t < p.keys; t += kThreads) {
      weights[t] = exp2f((weights[t] - most) * kLog2e);
      sum += double{weights[t]};
    }
    sum = reduce(sum, sum_of_warp, [](double a, double b) { return a + b; });
    const float inverse = static_cast<float>(1.0 / (sum + (p.sinks ? exp2f((sink - most) * kLog2e) : 0.0f)));
    for (int t = thread; t < p.keys; t += kThreads) {
      const float weight = weights[t] * inverse;
      if (changed == Changed::nothing)
        stored[t] = weights[t] = weight;
      else
        weights[t] = weight - stored[t];
    }
  }
  __syncthreads();

  // The change of each row's output, a channel at a time.
  int last = 0;
  for (int r = 0; r < count; ++r) last = max(last, static_cast<int>(p.position[first + r]) + 1);
  for (int channel = thread; channel < p.v_dim; channel += kThreads) {
    double total[kTogether] = {};
    for (int block = 0; block < last; block += 64) {
      float sum[kTogether] = {};
      for (int t = block; t < min(block + 64, last); ++t) {
        const std::int64_t at = std::int64_t{t} * p.v_dim + channel;
        const float x = other_v ? other_v[at] - v[at] : v[at];
#pragma unroll
        for (int r = 0; r < kTogether; ++r) sum[r] = fmaf(shared.weights[r * p.keys + t], x, sum[r]);
      }
#pragma unroll
      for (int r = 0; r < kTogether; ++r) total[r] += double{sum[r]};
    }
    for (int r = 0; r < count; ++r) shared.errors[r * p.v_dim + channel] = total[r];
  }
  __syncthreads();

  // Sizes of the changes.
  const float* curvature = p.curvature ? p.curvature + std::int64_t{head} * p.v_dim * p.v_dim : nullptr;
  const double* metric = p.metric ? p.metric + std::int64_t{kv_head} * p.v_dim * p.v_dim : nullptr;
  double curved[kTogether] = {}, squared[kTogether] = {};
  for (int j = thread; j < p.v_dim; j += kThreads) {
    double curved_image[kTogether] = {}, squared_image[kTogether] = {};
    for (int i = 0; i < p.v_dim && (curvature || metric); ++i) {
      const std::int64_t at = std::int64_t{i} * p.v_dim + j;
      const double g = curvature ? double{curvature[at]} : 0.0, m = metric ? metric[at] : 0.0;
      for (int r = 0; r < count; ++r) {
        const double e = shared.errors[r * p.v_dim + i];
        curved_image[r] = fma(e, g, curved_image[r]), squared_image[r] = fma(e, m, squared_image[r]);
      }
    }
    for (int r = 0; r < count; ++r) {
      const double e = shared.errors[r * p.v_dim + j];
      curved[r] = fma(e, curvature ? curved_image[r] : e, curved[r]);
      squared[r] = fma(e, metric ? squared_image[r] : e, squared[r]);
    }
  }
  const auto add = [](double a, double b) { return a + b; };
  for (int r = 0; r < count; ++r) {
    const ChangedRow sums{reduce(curved[r], sum_of_warp, add), reduce(squared[r], sum_of_warp, add)};
    if (thread == 0) rows[row + r] = sums;
  }
}

unsigned divide(int a, int b) { return static_cast<unsigned>((a + b - 1) / b); }

}  // namespace

void multiply_rows(const MatrixProduct& product, CUstream_st* stream) {
  multiply_kernel<<<dim3(divide(product.count, kTogether), static_cast<unsigned>(product.heads)), kThreads,
                    static_cast<std::size_t>(kTogether * product.dim) * sizeof(double), stream>>>(product);
}

int judge_shared_bytes(const JudgedHeads& judged) { return Memory::bytes(judged); }

void judge(const JudgedHeads& judged, Changed changed, const float* other, ChangedRow* rows, CUstream_st* stream) {
  const int bytes = Memory::bytes(judged);
  cudaFuncSetAttribute(judge_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  judge_kernel<<<dim3(divide(judged.queries, kTogether), static_cast<unsigned>(judged.heads * judged.group)), kThreads,
                 static_cast<std::size_t>(bytes), stream>>>(judged, changed, other, rows);
}

}  // namespace kvq::cuda
