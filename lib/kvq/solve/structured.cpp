#include <kvq/core/error.h>
#include <kvq/core/random.h>
#include <kvq/solve/structured.h>

#include <Eigen/QR>

#include <cmath>

namespace kvq {

namespace {

void check_order(int dim, int order) {
  if (order < 1 || (order & (order - 1)) != 0 || dim % order != 0)
    throw Error{ErrorKind::usage,
                fmt::format("Hadamard order: expected a power of two that divides head_dim {}, found {}", dim, order)};
}

}  // namespace

std::vector<double> block_hadamard_matrix(int dim, int order) {
  check_order(dim, order);
  const auto d = static_cast<std::size_t>(dim);
  std::vector<double> h(d * d, 0.0);
  const double entry = 1.0 / std::sqrt(static_cast<double>(order));
  for (int i = 0; i < dim; ++i)
    for (int j = i / order * order; j < (i / order + 1) * order; ++j) {
      const bool odd = __builtin_parity(static_cast<unsigned>((i % order) & (j % order))) != 0;
      h[static_cast<std::size_t>(i) * d + static_cast<std::size_t>(j)] = odd ? -entry : entry;
    }
  return h;
}

void block_hadamard_rows(std::span<float> rows, int dim, int order, std::span<const std::int8_t> signs) {
  check_order(dim, order);
  const auto d = static_cast<std::size_t>(dim), n = static_cast<std::size_t>(order);
  const auto norm = static_cast<float>(1.0 / std::sqrt(static_cast<double>(order)));
  for (std::size_t start = 0; start < rows.size(); start += d) {
    float* x = rows.data() + start;
    for (std::size_t j = 0; j < d && !signs.empty(); ++j) x[j] *= static_cast<float>(signs[j]);
    for (std::size_t block = 0; block < d; block += n)
      for (std::size_t half = 1; half < n; half *= 2)
        for (std::size_t i = block; i < block + n; i += 2 * half)
          for (std::size_t j = i; j < i + half; ++j) {
            const float sum = x[j] + x[j + half];
            x[j + half] = x[j] - x[j + half];
            x[j] = sum;
          }
    for (std::size_t j = 0; j < d; ++j) x[j] *= norm;
  }
}

std::vector<double> haar_matrix(int dim, std::uint64_t seed, int layer, int head) {
  RandomStream random(seed, RandomStream::Purpose::haar, static_cast<std::uint32_t>(layer),
                      static_cast<std::uint32_t>(head));
  Eigen::MatrixXd gaussian(dim, dim);
  for (int i = 0; i < dim; ++i)
    for (int j = 0; j < dim; ++j) gaussian(i, j) = random.next_normal();
  const Eigen::HouseholderQR<Eigen::MatrixXd> qr(gaussian);
  const Eigen::MatrixXd q = qr.householderQ();
  std::vector<double> matrix(static_cast<std::size_t>(dim) * static_cast<std::size_t>(dim));
  std::size_t at = 0;
  for (int i = 0; i < dim; ++i)
    for (int j = 0; j < dim; ++j) matrix[at++] = qr.matrixQR()(j, j) < 0.0 ? -q(i, j) : q(i, j);
  return matrix;
}

std::vector<std::int8_t> random_signs(int dim, std::uint64_t seed, int layer, int head) {
  RandomStream random(seed, RandomStream::Purpose::signs, static_cast<std::uint32_t>(layer),
                      static_cast<std::uint32_t>(head));
  std::vector<std::int8_t> signs(static_cast<std::size_t>(dim));
  for (auto& sign : signs) sign = (random.next_u32() & 1u) ? std::int8_t{-1} : std::int8_t{1};
  return signs;
}

}  // namespace kvq
