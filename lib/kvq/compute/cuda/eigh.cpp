#include <kvq/compute/cuda/moments.h>
#include <kvq/compute/parallel.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace kvq::cuda {

namespace {

constexpr const char* kWhat = "eigendecomposition";

/// What a decomposition may be off: the bounds of tests/support/backend_conformance.cpp, residuals as a multiple of the
/// matrix's largest element.
constexpr double kDefect = 1e-13;

/// cuSOLVER decomposes a single matrix by other operations than one of several. So that a result does not depend on the
/// others of its batch, there are two at least.
constexpr std::size_t kLeastBatch = 2;

/// Parameters of cuSOLVER's batched solver.
struct Parameters {
  cusolverDnParams_t handle = nullptr;
  Parameters() { check(cusolverDnCreateParams(&handle), kWhat); }
  ~Parameters() { cusolverDnDestroyParams(handle); }
};

/// Memory that cuSOLVER works in.
struct Workspace {
  std::size_t on_device = 0, on_host = 0;
};
Workspace workspace(Context& context, const Parameters& parameters, const double* matrices, const double* values,
                    int dim, std::size_t count) {
  Workspace bytes;
  check(
      cusolverDnXsyevBatched_bufferSize(context.solver(), parameters.handle, CUSOLVER_EIG_MODE_VECTOR,
                                        CUBLAS_FILL_MODE_LOWER, dim, CUDA_R_64F, matrices, dim, CUDA_R_64F, values,
                                        CUDA_R_64F, &bytes.on_device, &bytes.on_host, static_cast<std::int64_t>(count)),
      kWhat);
  return bytes;
}

/// The matrices become their eigenvectors, vector after vector. @param values  [n, D] ascending
void decompose(Context& context, double* matrices, double* values, int* status, int dim, std::size_t count) {
  const Parameters parameters;
  const auto batch = static_cast<std::int64_t>(count);
  const auto [on_device, on_host] = workspace(context, parameters, matrices, values, dim, count);
  std::byte* memory = context.solver_memory.room<std::byte>(on_device, kWhat);
  std::vector<std::byte> host_memory(on_host);
  check(cusolverDnXsyevBatched(context.solver(), parameters.handle, CUSOLVER_EIG_MODE_VECTOR, CUBLAS_FILL_MODE_LOWER,
                               dim, CUDA_R_64F, matrices, dim, CUDA_R_64F, values, CUDA_R_64F, memory, on_device,
                               host_memory.data(), on_host, status, batch),
        kWhat);
}

/// defects[i]: see largest_defects(). @param symmetric  the matrices themselves
void measure_defects(Context& context, const double* symmetric, const double* vectors, const double* values,
                     double* defects, int dim, std::size_t count) {
  const std::size_t size = static_cast<std::size_t>(dim) * static_cast<std::size_t>(dim);
  double* residuals = context.weighted.room<double>(count * size, kWhat);
  double* products = context.products.room<double>(count * size, kWhat);
  const double one = 1.0, zero = 0.0;
  const auto stride = static_cast<long long>(size);
  const auto multiply = [&](cublasOperation_t transpose, const double* left, double* to) {
    check(cublasDgemmStridedBatched(context.blas(), transpose, CUBLAS_OP_N, dim, dim, dim, &one, left, dim, stride,
                                    vectors, dim, stride, &zero, to, dim, stride, static_cast<int>(count)),
          kWhat);
  };
  multiply(CUBLAS_OP_N, symmetric, residuals);
  multiply(CUBLAS_OP_T, vectors, products);
  largest_defects(residuals, products, vectors, values, dim, static_cast<int>(count), defects, context.stream());
}

/// All that eigh_batch() takes.
std::int64_t batch_bytes(Context& context, int dim, std::size_t count) {
  const std::size_t d = static_cast<std::size_t>(dim), numbers = 5 * d * d + 2 * d + 3 + 1;
  const double not_read = 0.0;  // the size does not depend on where matrices are
  return static_cast<std::int64_t>(count * numbers * sizeof(double) +
                                   workspace(context, Parameters(), &not_read, &not_read, dim, count).on_device);
}

std::vector<EigenPairs> eigh_batch(Context& context, std::span<const double> matrices, int dim) {
  const std::size_t d = static_cast<std::size_t>(dim), size = d * d, asked = matrices.size() / size,
                    count = std::max(asked, kLeastBatch);
  double* given = context.plain.room<double>(count * size, kWhat);
  check(cudaMemsetAsync(given, 0, count * size * sizeof(double), context.stream()), kWhat);
  context.upload_rows(reinterpret_cast<std::byte*>(given), reinterpret_cast<const std::byte*>(matrices.data()),
                      matrices.size_bytes(), matrices.size_bytes(), 1, kWhat);
  double* symmetric = context.matrices.room<double>(count * size, kWhat);
  double* facts = context.sums.room<double>(3 * count, kWhat);  // largest element, defects
  const int n = static_cast<int>(count);
  symmetrize(given, symmetric, facts, dim, n, context.stream());
  const std::vector<double> largest = context.download(facts, asked, kWhat);
  for (const double x : largest)
    if (!(x < std::numeric_limits<double>::infinity()))
      throw Error{ErrorKind::numerical, "eigendecomposition: the matrix holds NaN or Inf"};
  double* vectors = given;
  double* values = context.means.room<double>(count * d, kWhat);
  int* status = context.status.room<int>(count, kWhat);
  check(cudaMemcpyAsync(vectors, symmetric, count * size * sizeof(double), cudaMemcpyDeviceToDevice, context.stream()),
        kWhat);
  decompose(context, vectors, values, status, dim, count);
  measure_defects(context, symmetric, vectors, values, facts + count, dim, count);
  double* pairs = context.outputs.room<double>(count * (size + d), kWhat);
  canonical_pairs(values, vectors, pairs, dim, n, context.stream());
  check(cudaGetLastError(), kWhat);
  const std::vector<int> statuses = context.download(status, asked, kWhat);
  const std::vector<double> defects = context.download(facts + count, 2 * asked, kWhat);
  std::vector<EigenPairs> found(asked);
  const auto take = [&](std::size_t first, std::size_t some, const double* piece) {
    isolated_parallel_for(static_cast<std::int64_t>(some), [&](std::int64_t i) {
      const auto m = first + static_cast<std::size_t>(i);
      const bool good =
          statuses[m] == 0 && defects[2 * m] <= kDefect * largest[m] * dim && defects[2 * m + 1] <= kDefect * dim;
      const double* own = piece + static_cast<std::size_t>(i) * (size + d);
      // The processors' solver takes over what the device's did not solve well enough.
      found[m] = good ? EigenPairs{{own, own + d}, {own + d, own + d + size}}
                      : kvq::eigh(matrices.subspan(m * size, size), dim);
    });
  };
  context.download_units(pairs, size + d, asked, take, kWhat);
  return found;
}

}  // namespace

std::vector<EigenPairs> eigh(Context& context, std::span<const double> matrices, int dim) {
  const std::size_t size = static_cast<std::size_t>(dim) * static_cast<std::size_t>(dim),
                    asked = matrices.size() / size;
  KVQ_ASSERT(matrices.size() == asked * size);
  if (asked == 0) return {};
  const Claim claim(context.lane, {batch_bytes(context, dim, kLeastBatch),
                                   batch_bytes(context, dim, std::max(asked, kLeastBatch)), kWhat});
  std::size_t at_once = std::max(asked, kLeastBatch);
  while (at_once > kLeastBatch && batch_bytes(context, dim, at_once) > claim.bytes())
    at_once = std::max(at_once / 2, kLeastBatch);
  std::vector<EigenPairs> all;
  for (std::size_t first = 0; first < asked; first += at_once) {
    const std::size_t count = std::min(at_once, asked - first);
    for (EigenPairs& pairs : eigh_batch(context, matrices.subspan(first * size, count * size), dim))
      all.push_back(std::move(pairs));
  }
  return all;
}

}  // namespace kvq::cuda
