#include <kvq/compute/blas.h>

#include <cblas.h>

namespace kvq::blas {

namespace {
blasint narrow(std::int64_t n) { return static_cast<blasint>(n); }
}  // namespace

void gemm_nt(std::int64_t m, std::int64_t n, std::int64_t k, float alpha, const float* a, std::int64_t lda,
             const float* b, std::int64_t ldb, float* c, std::int64_t ldc) {
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, narrow(m), narrow(n), narrow(k), alpha, a, narrow(lda), b,
              narrow(ldb), 0.0f, c, narrow(ldc));
}

void gemm_nn(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, std::int64_t lda, const float* b,
             std::int64_t ldb, bool accumulate, float* c, std::int64_t ldc) {
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, narrow(m), narrow(n), narrow(k), 1.0f, a, narrow(lda), b,
              narrow(ldb), accumulate ? 1.0f : 0.0f, c, narrow(ldc));
}

void syrk(std::int64_t n, std::int64_t rows, const double* a, std::int64_t lda, double* c, std::int64_t ldc) {
  cblas_dsyrk(CblasRowMajor, CblasUpper, CblasTrans, narrow(n), narrow(rows), 1.0, a, narrow(lda), 1.0, c, narrow(ldc));
}

void use_one_thread() { openblas_set_num_threads(1); }

}  // namespace kvq::blas
