#include <kvq/core/error.h>
#include <kvq/solve/sphere_codebook.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <numbers>

namespace kvq {

namespace {

/// With t = sqrt(n) sin(phi) the density of phi is cos^(n-2)(phi) / c_n. Masses are sums of positive terms, so that
/// they keep their relative accuracy in the outermost cells, whose probability is tiny; first moments have a closed
/// form.
class SphereMarginal {
 public:
  explicit SphereMarginal(int dim) : n_(dim), total_(2.0 * integral(0.0, std::numbers::pi / 2.0)) {}

  double edge() const { return std::sqrt(static_cast<double>(n_)); }
  double density(double t) const {
    const double c = cosine(t);
    // dphi / dt = 1 / (sqrt(n) cos(phi)); at n = 2 the density is infinite at the edge, where no threshold ever lies.
    return c <= 0.0 ? 0.0 : std::pow(c, n_ - 3) / (total_ * edge());
  }
  /// Probability of (a, b).
  double mass(double a, double b) const { return integral(angle(a), angle(b)) / total_; }
  /// Integral of t over (a, b): -sqrt(n) cos^(n-1)(phi) / (n - 1).
  double first(double a, double b) const {
    return edge() * (std::pow(cosine(a), n_ - 1) - std::pow(cosine(b), n_ - 1)) / ((n_ - 1) * total_);
  }

 private:
  double cosine(double t) const { return std::sqrt(std::max(0.0, 1.0 - t * t / n_)); }
  double angle(double t) const { return std::asin(std::clamp(t / edge(), -1.0, 1.0)); }
  /// Integral of cos^(n-2) over (a, b): Gauss-Legendre with 8 points on pieces of at most half a standard deviation.
  double integral(double a, double b) const {
    constexpr double kNodes[] = {0.1834346424956498, 0.5255324099163290, 0.7966664774136267, 0.9602898564975363};
    constexpr double kWeights[] = {0.3626837833783620, 0.3137066458778873, 0.2223810344533745, 0.1012285362903763};
    const int pieces = std::max(1, static_cast<int>(std::ceil((b - a) * edge() * 2.0)));
    const double half = (b - a) / (2.0 * pieces);
    double sum = 0.0;
    for (int i = 0; i < pieces; ++i) {
      const double middle = a + (2 * i + 1) * half;
      for (int k = 0; k < 4; ++k)
        sum += kWeights[k] * (std::pow(std::max(0.0, std::cos(middle - half * kNodes[k])), n_ - 2) +
                              std::pow(std::max(0.0, std::cos(middle + half * kNodes[k])), n_ - 2));
    }
    return sum * half;
  }

  int n_;
  double total_;
};

/// Solves (I - J) delta = r with J tridiagonal, delta in place of r: the Thomas algorithm. `diagonal` is used up.
void solve_tridiagonal(std::span<const double> below, std::span<double> diagonal, std::span<const double> above,
                       std::span<double> r) {
  for (std::size_t i = 1; i < r.size(); ++i) {
    const double factor = below[i] / diagonal[i - 1];
    diagonal[i] -= factor * above[i - 1];
    r[i] -= factor * r[i - 1];
  }
  for (std::size_t i = r.size(); i-- > 0;) r[i] = (r[i] - (i + 1 < r.size() ? above[i] * r[i + 1] : 0.0)) / diagonal[i];
}

/// One step of Lloyd's map c -> means of the cells, and one of Newton on its fixed point.
struct LloydStep {
  std::vector<double> means, newton;
  double residual = 0.0, distortion = 1.0;
};

LloydStep lloyd_step(const SphereMarginal& marginal, const std::vector<double>& c) {
  const std::size_t size = c.size();
  LloydStep step;
  std::vector<double> below(size, 0.0), diagonal(size, 1.0), above(size, 0.0), r(size);
  for (std::size_t i = 0; i < size; ++i) {
    const double lo = i == 0 ? -marginal.edge() : 0.5 * (c[i - 1] + c[i]),
                 hi = i + 1 == size ? marginal.edge() : 0.5 * (c[i] + c[i + 1]);
    const double mass = marginal.mass(lo, hi), mean = marginal.first(lo, hi) / mass;
    step.means.push_back(mean);
    step.distortion -= mass * mean * mean;
    r[i] = mean - c[i];
    step.residual = std::max(step.residual, std::abs(r[i]));
    if (i > 0) {
      const double slope = 0.5 * marginal.density(lo) * (mean - lo) / mass;
      below[i] = -slope;
      diagonal[i] -= slope;
    }
    if (i + 1 < size) {
      const double slope = 0.5 * marginal.density(hi) * (hi - mean) / mass;
      above[i] = -slope;
      diagonal[i] -= slope;
    }
  }
  solve_tridiagonal(below, diagonal, above, r);
  for (std::size_t i = 0; i < size; ++i) step.newton.push_back(c[i] + r[i]);
  return step;
}

bool is_valid(const std::vector<double>& c, double edge) {
  for (std::size_t i = 0; i < c.size(); ++i)
    if (!(std::abs(c[i]) < edge) || (i > 0 && !(c[i - 1] < c[i]))) return false;
  return true;
}

/// Entries at equal steps of the companding function, the integral of density^(1/3) (Panter and Dite).
std::vector<double> companding_start(const SphereMarginal& marginal, std::size_t size) {
  constexpr int kSteps = 4096;
  const double step = 2.0 * marginal.edge() / kSteps;
  std::vector<double> integral(kSteps + 1, 0.0);
  for (int i = 0; i < kSteps; ++i)
    integral[static_cast<std::size_t>(i) + 1] =
        integral[static_cast<std::size_t>(i)] + std::cbrt(marginal.density(-marginal.edge() + (i + 0.5) * step));
  std::vector<double> entries;
  for (std::size_t k = 0; k < size; ++k) {
    const double target = integral.back() * (static_cast<double>(k) + 0.5) / static_cast<double>(size);
    const auto above =
        static_cast<std::size_t>(std::lower_bound(integral.begin() + 1, integral.end() - 1, target) - integral.begin());
    const double fraction = (target - integral[above - 1]) / (integral[above] - integral[above - 1]);
    entries.push_back(-marginal.edge() + (static_cast<double>(above - 1) + fraction) * step);
  }
  return entries;
}

ScalarCodebook solve(int bits, int dim) {
  constexpr double kTolerance = 1e-11;  // rounding alone is 1e-12 far out, where sqrt(n) is large
  constexpr int kMostSteps = 10000;
  const SphereMarginal marginal(dim);
  std::vector<double> c = companding_start(marginal, std::size_t{1} << bits);
  LloydStep step = lloyd_step(marginal, c);
  for (int i = 0; i < kMostSteps && step.residual > kTolerance; ++i) {
    // Newton's step if it lowers the residual, else Lloyd's own step, which always lowers the distortion.
    LloydStep next;
    if (is_valid(step.newton, marginal.edge())) next = lloyd_step(marginal, step.newton);
    if (!next.means.empty() && next.residual < step.residual) {
      c = step.newton;
    } else {
      c = step.means;
      next = lloyd_step(marginal, c);
    }
    step = std::move(next);
  }
  if (step.residual > 1e-10)
    throw Error{ErrorKind::numerical,
                fmt::format("codebook of {} bits on the sphere in {} dimensions: not converged, residual {}", bits, dim,
                            step.residual)};
  return {c, step.distortion};
}

}  // namespace

const ScalarCodebook& sphere_codebook(int bits, int dim) {
  KVQ_ASSERT(bits >= 1 && bits <= 8 && dim >= 1);
  static std::mutex mutex;
  static std::map<std::pair<int, int>, ScalarCodebook> cache;
  const std::pair key{bits, std::max(dim, 2)};
  const std::lock_guard lock(mutex);
  const auto found = cache.find(key);
  return found != cache.end() ? found->second : cache.emplace(key, solve(key.first, key.second)).first->second;
}

ScalarCodebook fit_codebook(std::span<const float> sorted, const ScalarCodebook& start) {
  KVQ_ASSERT(std::is_sorted(sorted.begin(), sorted.end()));
  std::vector<double> sum(sorted.size() + 1, 0.0);
  double energy = 0.0;
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    sum[i + 1] = sum[i] + double{sorted[i]};
    energy += double{sorted[i]} * double{sorted[i]};
  }
  ScalarCodebook result = start;
  std::vector<double>& c = result.entries;
  constexpr int kMostSteps = 1000;
  for (int step = 0; step < kMostSteps; ++step) {
    double change = 0.0, explained = 0.0;
    std::size_t begin = 0;
    std::vector<double> next = c;
    for (std::size_t i = 0; i < c.size(); ++i) {
      const auto border = [&](double t) {
        return static_cast<std::size_t>(std::lower_bound(sorted.begin(), sorted.end(), t) - sorted.begin());
      };
      const std::size_t end = i + 1 == c.size() ? sorted.size() : std::max(begin, border(0.5 * (c[i] + c[i + 1])));
      const double total = sum[end] - sum[begin], count = static_cast<double>(end - begin);
      if (end > begin) next[i] = total / count;
      explained += 2.0 * next[i] * total - count * next[i] * next[i];
      change = std::max(change, std::abs(next[i] - c[i]));
      begin = end;
    }
    c = std::move(next);
    if (!sorted.empty()) result.distortion = (energy - explained) / static_cast<double>(sorted.size());
    if (change < 1e-9) break;
  }
  return result;
}

}  // namespace kvq
