#include <kvq/core/definite.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace kvq {

bool is_semidefinite(std::span<const double> matrix, std::size_t dim, double slack) {
  if (!(slack > 0.0)) return std::ranges::all_of(matrix, [](double x) { return x == 0.0; });
  std::vector<double> root(dim * dim, 0.0);  // lower triangle
  for (std::size_t i = 0; i < dim; ++i) {
    double* row = root.data() + i * dim;
    for (std::size_t j = 0; j <= i; ++j) {
      const double* other = root.data() + j * dim;
      double rest = matrix[i * dim + j];
      for (std::size_t k = 0; k < j; ++k) rest -= row[k] * other[k];
      if (j < i) {
        row[j] = rest / other[j];
        continue;
      }
      rest += slack;
      if (!(rest > 0.0)) return false;
      row[j] = std::sqrt(rest);
    }
  }
  return true;
}

}  // namespace kvq
