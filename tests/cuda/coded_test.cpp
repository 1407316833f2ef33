#include <kvq/compute/cuda_library.h>
#include <kvq/solve/trellis_tables.h>

#include "support/random_data.h"
#include "support/row_plans.h"

#include <catch2/catch.hpp>

#include <cmath>
#include <vector>

namespace kvq::test {

namespace {

/// Rows of different kinds: outliers, constants, zeros of both signs, few nonzero channels, extreme sizes.
std::vector<float> odd_rows(std::size_t count, int dim, std::uint64_t seed) {
  const auto d = static_cast<std::size_t>(dim);
  std::vector<float> rows = rows_with_outliers(count, dim, seed, 8.0);
  for (std::size_t t = 0; t < count; ++t)
    for (std::size_t j = 0; j < d; ++j) {
      float& x = rows[t * d + j];
      switch (t % 12) {
        case 3: x = 0.75f; break;
        case 5: x = j % 2 == 0 ? 0.0f : -0.0f; break;
        case 7: x = j % 17 == 4 ? x : 0.0f; break;
        case 8: x *= 1e-6f; break;
        case 9: x *= 1e4f; break;
        case 10: x = std::round(x); break;  // many equal magnitudes
        default: break;
      }
    }
  return rows;
}

std::vector<RowCodec> codecs_of(int dim) {
  std::vector<RowCodec> codecs;
  const auto add = [&](const TensorPlan& plan) { codecs.emplace_back(plan, 0, dim); };
  for (const ScaleType type : {ScaleType::fp16, ScaleType::bf16, ScaleType::fp32})
    for (const int bits : {2, 3, 4})
      for (int group = dim; group >= 16 && group % 2 == 0; group /= 2)
        for (const TensorPlan& plan : plain_plans(bits, group, type)) add(plan);
  for (const double ratio : {0.5, 0.9, 0.99, 1.0})
    codecs.emplace_back(UniformCoder{.bits = 2, .group_size = dim}, ratio, dim);
  for (const ScaleRule rule : {ScaleRule::norm, ScaleRule::rms, ScaleRule::least_squares})
    for (const int bits : {2, 3, 4})
      for (int memory = 1; memory <= 3; ++memory) {
        TensorPlan plan;
        plan.coder =
            TrellisCoder{.bits = bits, .group_size = dim, .rule = rule, .taps = trellis_taps(bits, memory, dim)};
        add(plan);
      }
  for (const ScaleRule rule : {ScaleRule::absmax, ScaleRule::norm, ScaleRule::least_squares}) {
    TensorPlan plan;
    plan.coder = UniformCoder{.bits = 3, .group_size = dim, .levels = UniformLevels::symmetric, .rule = rule};
    add(plan);
  }
  Random random(12);
  for (int i = 0; i < 6; ++i)
    for (const int coder : {0, 1, 2}) {
      TensorPlan plan = mixed_plan(descending_widths(random, dim), dim, coder, ScaleType::bf16, 13);
      add(plan);
      add_row_scale(plan, static_cast<std::uint64_t>(i));
      add(plan);
    }
  return codecs;
}

}  // namespace

TEST_CASE("A CUDA device quantizes each row as processors do") {
  const int device = 0;
  const auto backend = CudaLibrary().make_backend(std::span(&device, 1));
  for (const int dim : {20, 64, 128, 192, 256, 320}) {
    const std::size_t count = 48, d = static_cast<std::size_t>(dim);
    const std::vector<float> rows = odd_rows(count, dim, static_cast<std::uint64_t>(dim));
    // Each row is a task, so that the error of one row does not hide in those of others.
    std::vector<RotatedData> data(count);
    for (std::size_t t = 0; t < count; ++t)
      data[t] = {.dim = dim,
                 .rows = {rows.begin() + static_cast<std::ptrdiff_t>(t * d),
                          rows.begin() + static_cast<std::ptrdiff_t>((t + 1) * d)}};
    const std::vector<RowCodec> codecs = codecs_of(dim);
    std::vector<CodingTask> tasks;
    for (const RowCodec& codec : codecs)
      for (const RotatedData& row : data) tasks.push_back({&row, &codec});
    const std::vector<double> found = backend->coding_costs(tasks), expected = cpu_backend().coding_costs(tasks);
    std::size_t different = 0;
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      if (found[i] == Approx(expected[i]).epsilon(1e-5).margin(1e-30)) continue;
      UNSCOPED_INFO("codec " << i / count << ", row " << i % count << ": " << found[i] << ", not " << expected[i]);
      ++different;
    }
    INFO("dim " << dim << ", " << tasks.size() << " tasks");
    CHECK(different == 0);
  }
}

}  // namespace kvq::test
