#include <kvq/codec/group_coder.h>
#include <kvq/solve/sphere_codebook.h>

#include "support/random_data.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <future>
#include <numbers>

using namespace kvq;

namespace {

// In many dimensions few points cause most of the error at many bits; with fewer points than this, noise exceeds 2%.
std::size_t points_for(int dim) { return dim < 16 ? 100000 : 400000; }
constexpr double kPi = std::numbers::pi;
const int kDims[] = {2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 255, 256};

/// Integrals of t^k, k = 0, 1, 2, over the cell [low, high] of t = sqrt(n) sin(angle), whose angle has a density of
/// cos^(n-2): four-point Gauss-Legendre quadrature in short steps.
struct Cell {
  double mass = 0.0, first = 0.0, second = 0.0;
};
Cell cell(int dim, double low, double high) {
  constexpr double at[] = {-0.861136311594052575224, -0.339981043584856264803, 0.339981043584856264803,
                           0.861136311594052575224};
  constexpr double weight[] = {0.347854845137453857373, 0.652145154862546142627, 0.652145154862546142627,
                               0.347854845137453857373};
  const double radius = std::sqrt(dim), reach = 14.0 / radius;  // the density is negligible beyond
  const auto angle = [&](double t) { return std::asin(std::clamp(t / radius, -1.0, 1.0)); };
  double a = angle(low), b = angle(high);
  if (a >= 0.0)
    b = std::min(b, a + reach);
  else if (b <= 0.0)
    a = std::max(a, b - reach);
  else
    a = std::max(a, -reach), b = std::min(b, reach);
  const int panels = 3 + static_cast<int>(std::ceil(12.0 * (b - a) * radius));
  const double half = (b - a) / (2.0 * panels);
  Cell sums;
  for (int i = 0; i < panels; ++i)
    for (std::size_t j = 0; j < 4; ++j) {
      const double u = a + (2 * i + 1) * half + at[j] * half, t = radius * std::sin(u),
                   mass = weight[j] * half * std::pow(std::cos(u), dim - 2);
      sums.mass += mass;
      sums.first += mass * t;
      sums.second += mass * t * t;
    }
  return sums;
}

std::vector<double> edges(const ScalarCodebook& book, int dim) {
  std::vector<double> result = {-std::sqrt(dim)};
  for (std::size_t i = 1; i < book.entries.size(); ++i) result.push_back((book.entries[i - 1] + book.entries[i]) / 2);
  result.push_back(std::sqrt(dim));
  return result;
}

/// Relative squared error after quantizing random points of the sphere.
double coded_distortion(const ScalarCodebook& book, ScaleRule rule, const std::vector<float>& points, int dim) {
  const std::vector<float> table(book.entries.begin(), book.entries.end());
  const CodebookGroup group(table, rule, ScaleType::fp32);
  const auto d = static_cast<std::size_t>(dim);
  std::vector<std::uint8_t> codes(d);
  std::vector<float> decoded(d);
  double error = 0.0, energy = 0.0;
  for (std::size_t row = 0; row < points.size(); row += d) {
    const std::span<const float> x(points.data() + row, d);
    group.decode(codes, group.encode(x, codes), decoded);
    for (std::size_t j = 0; j < d; ++j) {
      const double e = static_cast<double>(x[j]) - static_cast<double>(decoded[j]);
      error += e * e;
      energy += static_cast<double>(x[j]) * static_cast<double>(x[j]);
    }
  }
  return error / energy;
}

/// Gaussian rows divided by their length: uniform on the sphere.
std::vector<float> sphere_points(int dim, std::size_t numbers, std::uint64_t seed) {
  const auto d = static_cast<std::size_t>(dim);
  std::vector<double> rows = test::gaussian_double(numbers / d * d, seed);
  for (std::size_t row = 0; row < rows.size(); row += d) {
    double square = 0.0;
    for (std::size_t j = 0; j < d; ++j) square += rows[row + j] * rows[row + j];
    for (std::size_t j = 0; j < d; ++j) rows[row + j] /= std::sqrt(square);
  }
  return {rows.begin(), rows.end()};
}

}  // namespace

TEST_CASE("Every entry of a sphere codebook is the mean of its cell", "[solve][codebook]") {
  for (const int dim : kDims)
    for (int bits = 1; bits <= 8; ++bits) {
      const ScalarCodebook& book = sphere_codebook(bits, dim);
      INFO("bits " << bits << ", dim " << dim);
      REQUIRE(book.entries.size() == std::size_t{1} << bits);
      const std::vector<double> edge = edges(book, dim);
      double worst = 0.0, error = 0.0, mass = 0.0, second = 0.0;
      for (std::size_t i = 0; i < book.entries.size(); ++i) {
        const Cell here = cell(dim, edge[i], edge[i + 1]);
        const double entry = book.entries[i];
        worst = std::max(worst, std::abs(here.first / here.mass - entry));
        error += here.second - 2.0 * entry * here.first + entry * entry * here.mass;
        mass += here.mass;
        second += here.second;
      }
      CHECK(worst < 1e-10);
      CHECK(second / mass == Approx(1.0).epsilon(1e-9));  // checks the quadrature
      CHECK(error / mass == Approx(book.distortion).epsilon(1e-7));
    }
}

TEST_CASE("Sphere codebooks are symmetric, strictly ascending and inside the sphere", "[solve][codebook]") {
  for (const int dim : kDims)
    for (int bits = 1; bits <= 8; ++bits) {
      const ScalarCodebook& book = sphere_codebook(bits, dim);
      INFO("bits " << bits << ", dim " << dim);
      const std::size_t count = book.entries.size();
      double skew = 0.0;
      for (std::size_t i = 0; i < count; ++i)
        skew = std::max(skew, std::abs(book.entries[i] + book.entries[count - 1 - i]));
      CHECK(skew < 1e-9);
      for (std::size_t i = 1; i < count; ++i) REQUIRE(book.entries[i] > book.entries[i - 1]);
      CHECK(book.entries.back() < std::sqrt(dim));
      // An artifact's tables are binary32 and strictly ascending.
      for (std::size_t i = 1; i < count; ++i)
        REQUIRE(static_cast<float>(book.entries[i]) > static_cast<float>(book.entries[i - 1]));
      if (bits > 1) CHECK(book.distortion < sphere_codebook(bits - 1, dim).distortion);
    }
}

TEST_CASE("In many dimensions the sphere codebook is the Gaussian one of Lloyd and Max", "[solve][codebook]") {
  constexpr int kMany = 8192;
  const auto book = [](int bits) { return sphere_codebook(bits, kMany); };
  CHECK(book(1).entries.back() == Approx(0.7979).margin(1e-4));
  CHECK(book(2).entries[2] == Approx(0.4528).margin(1e-4));
  CHECK(book(2).entries[3] == Approx(1.510).margin(5e-4));
  const double distortion[] = {0.3634, 0.1175, 0.03454, 0.009497};
  for (int bits = 1; bits <= 4; ++bits) CHECK(book(bits).distortion == Approx(distortion[bits - 1]).epsilon(5e-4));
  // Max 1960, table I, eight levels.
  const double eight[] = {0.2451, 0.7560, 1.344, 2.152};
  for (std::size_t i = 0; i < 4; ++i) CHECK(book(3).entries[4 + i] == Approx(eight[i]).margin(6e-4));
  // From 256 dimensions on the difference is of the order of 1 / n.
  for (int bits = 1; bits <= 8; ++bits)
    CHECK(std::abs(sphere_codebook(bits, 1024).distortion / book(bits).distortion - 1.0) <
          std::abs(sphere_codebook(bits, 128).distortion / book(bits).distortion - 1.0));
}

TEST_CASE("In two dimensions the marginal is the arcsine law", "[solve][codebook]") {
  CHECK(sphere_codebook(1, 2).entries[1] == Approx(std::sqrt(2.0) * 2.0 / kPi).epsilon(1e-11));
  CHECK(sphere_codebook(1, 2).distortion == Approx(1.0 - 8.0 / (kPi * kPi)).epsilon(1e-11));
  // Lloyd's algorithm in the angle, where means of cells have a closed form: sqrt(2) (cos a - cos b) / (b - a).
  for (int bits = 2; bits <= 5; ++bits) {
    const std::size_t count = std::size_t{1} << bits;
    std::vector<double> entries(count);
    for (std::size_t i = 0; i < count; ++i)
      entries[i] = std::sqrt(2.0) * std::sin(kPi * ((static_cast<double>(i) + 0.5) / static_cast<double>(count) - 0.5));
    for (int round = 0; round < 6000; ++round) {
      std::vector<double> angle = {-kPi / 2};
      for (std::size_t i = 1; i < count; ++i)
        angle.push_back(std::asin((entries[i - 1] + entries[i]) / std::sqrt(8.0)));
      angle.push_back(kPi / 2);
      for (std::size_t i = 0; i < count; ++i)
        entries[i] = std::sqrt(2.0) * (std::cos(angle[i]) - std::cos(angle[i + 1])) / (angle[i + 1] - angle[i]);
    }
    INFO("bits " << bits);
    for (std::size_t i = 0; i < count; ++i)
      CHECK(sphere_codebook(bits, 2).entries[i] == Approx(entries[i]).margin(1e-9));
  }
}

TEST_CASE("In three dimensions the marginal is uniform, and so are the entries", "[solve][codebook]") {
  for (int bits = 1; bits <= 8; ++bits) {
    const double count = std::pow(2.0, bits);
    const ScalarCodebook& book = sphere_codebook(bits, 3);
    INFO("bits " << bits);
    for (std::size_t i = 0; i < book.entries.size(); ++i)
      CHECK(book.entries[i] == Approx(std::sqrt(3.0) * (2 * static_cast<double>(i) + 1 - count) / count).margin(1e-9));
    CHECK(book.distortion == Approx(1.0 / (count * count)).epsilon(1e-9));
  }
}

TEST_CASE("One dimension is taken as two", "[solve][codebook]") {
  for (int bits = 1; bits <= 8; ++bits) {
    CHECK(sphere_codebook(bits, 1).entries == sphere_codebook(bits, 2).entries);
    CHECK(sphere_codebook(bits, 1).distortion == sphere_codebook(bits, 2).distortion);
  }
}

TEST_CASE("Sphere codebooks are the same from any thread, and one object each", "[solve][codebook]") {
  // No other test asks for these dimensions, so the threads compute the tables.
  std::vector<std::future<std::vector<const ScalarCodebook*>>> asked;
  for (int thread = 0; thread < 4; ++thread)
    asked.push_back(std::async(std::launch::async, [] {
      std::vector<const ScalarCodebook*> list;
      for (int bits = 1; bits <= 8; ++bits)
        for (const int dim : {7, 41, 67, 131}) list.push_back(&sphere_codebook(bits, dim));
      return list;
    }));
  std::vector<std::vector<const ScalarCodebook*>> found;
  for (auto& future : asked) found.push_back(future.get());
  for (const auto& list : found) CHECK(list == found[0]);
  for (const ScalarCodebook* book : found[0]) CHECK(std::is_sorted(book->entries.begin(), book->entries.end()));
}

TEST_CASE("Coding random points of the sphere gives the distortion that the codebook says",
          "[solve][codebook][codec]") {
  for (const int dim : {2, 3, 4, 6, 8, 16, 32, 64, 128, 256}) {
    const std::vector<float> points = sphere_points(dim, points_for(dim), static_cast<std::uint64_t>(dim));
    for (int bits = 1; bits <= 8; ++bits) {
      const ScalarCodebook& book = sphere_codebook(bits, dim);
      INFO("bits " << bits << ", dim " << dim);
      CHECK(coded_distortion(book, ScaleRule::rms, points, dim) == Approx(book.distortion).epsilon(0.02));
    }
  }
}

TEST_CASE("Keeping the norm makes the distortion 2 - 2 sqrt(1 - D), less what a row's own length takes",
          "[solve][codebook][codec]") {
  // The formula assumes that the length of the quantized row is known, as it is in many dimensions. In few dimensions,
  // the norm rule also removes the error along the row. With many bits, errors are uniform in cells of width
  // density^(-1/3), so the error along the row is E t^2 density^(1/3) / (n E density^(1/3)) = 3 / (n + 6): 2% and more
  // below n = 144. With one bit all quantized rows have the same length.
  for (const int dim : {2, 3, 4, 6, 8, 16, 32, 64, 128, 256}) {
    const std::vector<float> points = sphere_points(dim, points_for(dim), static_cast<std::uint64_t>(dim) + 500);
    for (int bits = 1; bits <= 8; ++bits) {
      const ScalarCodebook& book = sphere_codebook(bits, dim);
      const double expected = 2.0 - 2.0 * std::sqrt(1.0 - book.distortion),
                   ratio = coded_distortion(book, ScaleRule::norm, points, dim) / expected;
      const double many_bits = (dim + 3.0) / (dim + 6.0);
      INFO("bits " << bits << ", dim " << dim << ", ratio " << ratio << ", of many bits " << many_bits);
      CHECK(ratio < 1.02);
      if (bits == 1 || dim >= 256 || (bits == 2 && dim >= 64) || (bits <= 4 && dim >= 128))
        CHECK(ratio == Approx(1.0).epsilon(0.02));
      if (bits >= 5 && dim > 2) CHECK(ratio == Approx(many_bits).epsilon(0.02));
      if (dim > 3) CHECK(ratio > many_bits * 0.98);
    }
  }
}

TEST_CASE("Lloyd on samples finds the codebook of the samples", "[solve][codebook]") {
  SECTION("a codebook that fits is kept") {
    const ScalarCodebook start{.entries = {-2.0, 1.0, 5.0, 9.0}, .distortion = 0.0};
    const ScalarCodebook fitted = fit_codebook(std::vector<float>{-2, -2, 1, 1, 5, 5, 5, 9, 9}, start);
    CHECK(fitted.entries == start.entries);
  }
  SECTION("entries are the means of their samples") {
    const ScalarCodebook fitted =
        fit_codebook(std::vector<float>{-3, -1, 0.5f, 2, 4}, {.entries = {-1.0, 1.0}, .distortion = 0.0});
    REQUIRE(fitted.entries.size() == 2);
    CHECK(fitted.entries[0] == Approx(-2.0).margin(1e-6));
    CHECK(fitted.entries[1] == Approx(6.5 / 3).margin(1e-6));
  }
  SECTION("an entry whose cell is empty stays where it was") {
    const ScalarCodebook fitted =
        fit_codebook(std::vector<float>{-1, -1, 1, 1}, {.entries = {-1.5, 0.5, 3.0, 100.0}, .distortion = 0.0});
    CHECK(fitted.entries == std::vector<double>{-1.0, 1.0, 3.0, 100.0});
  }
  SECTION("conditions, and never worse than the start") {
    for (int bits = 1; bits <= 6; ++bits) {
      std::vector<float> samples = test::gaussian(5000, static_cast<std::uint64_t>(bits), 0.7);
      for (std::size_t i = 0; i < samples.size(); i += 3) samples[i] = samples[i] * samples[i];  // skewed
      std::sort(samples.begin(), samples.end());
      const ScalarCodebook& start = sphere_codebook(bits, 64);
      const ScalarCodebook fitted = fit_codebook(samples, start);
      const auto error = [&](const ScalarCodebook& book) {
        double sum = 0.0;
        for (const float x : samples) {
          double least = HUGE_VAL;
          for (const double entry : book.entries) least = std::min(least, std::pow(static_cast<double>(x) - entry, 2));
          sum += least;
        }
        return sum / static_cast<double>(samples.size());
      };
      INFO("bits " << bits);
      CHECK(std::is_sorted(fitted.entries.begin(), fitted.entries.end()));
      CHECK(error(fitted) < error(start));
      // Each entry with samples is the mean of its samples.
      std::vector<double> sum(fitted.entries.size()), count(fitted.entries.size());
      for (const float x : samples) {
        std::size_t best = 0;
        for (std::size_t i = 1; i < fitted.entries.size(); ++i)
          if (std::abs(static_cast<double>(x) - fitted.entries[i]) <
              std::abs(static_cast<double>(x) - fitted.entries[best]))
            best = i;
        sum[best] += static_cast<double>(x);
        count[best] += 1.0;
      }
      for (std::size_t i = 0; i < sum.size(); ++i)
        if (count[i] > 0.0) CHECK(std::abs(sum[i] / count[i] - fitted.entries[i]) < 0.02);
      CHECK(fitted.distortion == Approx(error(fitted)).epsilon(1e-3));
    }
  }
}
