#pragma once

#include <cstdint>

/// The BLAS calls that kvq makes, row-major and single-threaded: only parallel.h starts threads, so that sums keep one
/// order for any number of threads. OpenBLAS chooses its kernels by CPU, so results are reproducible only on one kind
/// of CPU.
namespace kvq::blas {

/// c [m, n] = alpha * a [m, k] @ b^T, b [n, k].
void gemm_nt(std::int64_t m, std::int64_t n, std::int64_t k, float alpha, const float* a, std::int64_t lda,
             const float* b, std::int64_t ldb, float* c, std::int64_t ldc);
/// c [m, n] = a [m, k] @ b [k, n] (+ c if accumulate).
void gemm_nn(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, std::int64_t lda, const float* b,
             std::int64_t ldb, bool accumulate, float* c, std::int64_t ldc);
/// Upper triangle of c [n, n] += a^T @ a, a [rows, n].
void syrk(std::int64_t n, std::int64_t rows, const double* a, std::int64_t lda, double* c, std::int64_t ldc);

/// Restricts OpenBLAS to the calling thread. Called once, before the first product.
void use_one_thread();

}  // namespace kvq::blas
