#pragma once

#include <kvq/dump/dump_part.h>
#include <kvq/dump/number_check.h>

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvq {

/// "[5, 2, 17]": the index of an element in a row-major tensor.
std::string index_text(std::size_t flat, std::span<const std::int64_t> shape);

/// Checks blocks of one tensor's numbers in order: finite, with magnitudes below a limit, not all zero.
class TensorCheck {
 public:
  /// @param place  file, layer and tensor, for errors
  TensorCheck(DType dtype, std::span<const std::int64_t> shape, std::string place, float limit = kMostMagnitude);
  /// @throws Error{numerical} naming the first bad element, its value and the limit
  void add(std::span<const std::byte> block);
  /// @throws Error{numerical} if all numbers were zero
  void finish() const;

 private:
  NumberCheck check_;
  DType dtype_;
  float limit_;
  std::vector<std::int64_t> shape_;
  std::string place_;
  std::size_t elements_ = 0;
};

/// Sees a tensor's bytes in order.
using OnBlock = std::function<void(std::span<const std::byte>)>;

/// Reads a tensor as stored and checks its numbers.
void read_numbers(const StoredTensor& stored, std::span<std::byte> target, const OnBlock& on_block = {});

/// Checks a tensor's numbers. Contiguous data is read block by block, so memory does not grow with the tensor.
void check_numbers(const StoredTensor& stored, const OnBlock& on_block = {});

/// Reads a float32 tensor [heads, Dv, Dv] and checks that each matrix is a second moment: symmetric up to 1e-5 of its
/// largest element, its diagonal not negative, and positive semidefinite up to 1e-4 of its largest diagonal element.
/// @throws Error{numerical, bad_input} naming file, layer, tensor and place
void check_second_moments(const StoredTensor& stored);

}  // namespace kvq
