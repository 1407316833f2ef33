#include <kvq/dump/tensor_numbers.h>

#include <kvq/core/definite.h>
#include <kvq/core/error.h>

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace kvq {
namespace {

constexpr std::size_t kBlock = std::size_t{256} << 10;  // small enough to stay in the cache between two uses

/// The float32 value of one stored element.
float element_at(DType dtype, std::span<const std::byte> raw, std::size_t index) {
  float value = 0.0f;
  widen(dtype, raw.data() + index * size_of(dtype), 1, &value);
  return value;
}

/// Matrix [dim, dim] of a tensor of matrices.
struct MatrixView {
  std::span<const float> values;  ///< of all matrices
  std::size_t first, dim;
  const hdf5::Dataset& dataset;
  float at(std::size_t i, std::size_t j) const { return values[first + i * dim + j]; }
  std::string where(std::size_t i, std::size_t j) const { return index_text(first + i * dim + j, dataset.shape()); }
  [[noreturn]] void reject(const std::string& what) const {
    throw Error{ErrorKind::bad_input, fmt::format("{}: {}", dataset.place(), what)};
  }
};

void check_diagonal(const MatrixView& m) {
  for (std::size_t i = 0; i < m.dim; ++i)
    if (m.at(i, i) < 0.0f)
      m.reject(fmt::format("{:g} at {}: expected a diagonal that is not negative", m.at(i, i), m.where(i, i)));
}

void check_symmetry(const MatrixView& m) {
  constexpr float kAsymmetry = 1e-5f;
  float largest = 0.0f;
  for (const float value : m.values.subspan(m.first, m.dim * m.dim)) largest = std::max(largest, std::abs(value));
  for (std::size_t i = 0; i < m.dim; ++i)
    for (std::size_t j = 0; j < i; ++j)
      if (std::abs(m.at(i, j) - m.at(j, i)) > kAsymmetry * largest)
        m.reject(fmt::format("{:g} at {}, {:g} at {}: expected a symmetric matrix", m.at(i, j), m.where(i, j),
                             m.at(j, i), m.where(j, i)));
}

void check_definite(const MatrixView& m) {
  constexpr double kNegative = 1e-4;
  std::vector<double> mean(m.dim * m.dim);  // of the matrix and its mirror
  double largest = 0.0;
  for (std::size_t i = 0; i < m.dim; ++i) {
    largest = std::max(largest, double{m.at(i, i)});
    for (std::size_t j = 0; j < m.dim; ++j) mean[i * m.dim + j] = 0.5 * (double{m.at(i, j)} + double{m.at(j, i)});
  }
  if (!is_semidefinite(mean, m.dim, kNegative * largest))
    m.reject(fmt::format("head {}: expected a second moment, found a matrix with an eigenvalue below {:g}",
                         m.first / (m.dim * m.dim), -kNegative * largest));
}

}  // namespace

std::string index_text(std::size_t flat, std::span<const std::int64_t> shape) {
  std::vector<std::string> numbers(shape.size());
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    const auto extent = static_cast<std::size_t>(shape[axis]);
    numbers[axis] = std::to_string(flat % extent);
    flat /= extent;
  }
  return fmt::format("[{}]", fmt::join(numbers, ", "));
}

TensorCheck::TensorCheck(DType dtype, std::span<const std::int64_t> shape, std::string place, float limit)
    : check_(dtype, limit),
      dtype_(dtype),
      limit_(limit),
      shape_(shape.begin(), shape.end()),
      place_(std::move(place)) {}

void TensorCheck::add(std::span<const std::byte> block) {
  check_.add(block);
  if (const auto bad = check_.first_bad()) {
    const float value = element_at(dtype_, block, *bad - elements_);
    const std::string where = index_text(*bad, shape_);
    throw Error{ErrorKind::numerical,
                std::isfinite(value)
                    ? fmt::format("{}: {:g} at {}: expected magnitudes below {:g}", place_, value, where, limit_)
                    : fmt::format("{}: NaN or infinity at {}", place_, where)};
  }
  elements_ += block.size() / size_of(dtype_);
}

void TensorCheck::finish() const {
  if (check_.all_zero()) throw Error{ErrorKind::numerical, fmt::format("{}: all numbers are zero", place_)};
}

void read_numbers(const StoredTensor& stored, std::span<std::byte> target, const OnBlock& on_block) {
  const hdf5::Dataset& dataset = stored.dataset;
  dataset.read(target);
  TensorCheck check(stored.dtype, dataset.shape(), dataset.place());
  for (std::size_t begin = 0; begin < target.size(); begin += kBlock) {
    const auto block = target.subspan(begin, std::min(kBlock, target.size() - begin));
    if (on_block) on_block(block);
    check.add(block);
  }
  check.finish();
}

void check_numbers(const StoredTensor& stored, const OnBlock& on_block) {
  const hdf5::Dataset& dataset = stored.dataset;
  if (dataset.is_chunked()) {
    std::vector<std::byte> raw(dataset.bytes());
    return read_numbers(stored, raw, on_block);
  }
  TensorCheck check(stored.dtype, dataset.shape(), dataset.place());
  std::vector<std::byte> block(std::min<std::uint64_t>(dataset.bytes(), 4 * kBlock));
  for (std::uint64_t begin = 0; begin < dataset.bytes(); begin += block.size()) {
    const auto part = std::span(block).first(std::min<std::uint64_t>(block.size(), dataset.bytes() - begin));
    dataset.read_part(begin, part);
    if (on_block) on_block(part);
    check.add(part);
  }
  check.finish();
}

void check_second_moments(const StoredTensor& stored) {
  std::vector<float> values(stored.dataset.bytes() / sizeof(float));
  read_numbers(stored, std::as_writable_bytes(std::span(values)));
  const auto dim = static_cast<std::size_t>(stored.dataset.shape()[1]);
  for (std::size_t first = 0; first < values.size(); first += dim * dim) {
    const MatrixView matrix{values, first, dim, stored.dataset};
    check_diagonal(matrix);
    check_symmetry(matrix);
    check_definite(matrix);
  }
}

}  // namespace kvq
