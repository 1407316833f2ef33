#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

namespace kvq {

/// The numbers of things that several owners share, 0 to count - 1. Each number is free or has users.
/// Callers keep the preconditions; nothing is checked here.
class ReferencePool {
 public:
  explicit ReferencePool(std::int32_t count)
      : users_(static_cast<std::size_t>(count)), free_(static_cast<std::size_t>(count)) {
    std::iota(free_.rbegin(), free_.rend(), 0);
  }

  std::int32_t size() const { return static_cast<std::int32_t>(users_.size()); }
  std::int32_t free() const { return static_cast<std::int32_t>(free_.size()); }
  std::int32_t users(std::int32_t number) const { return users_[static_cast<std::size_t>(number)]; }

  /// A number that was free and has one user now; needs free() > 0.
  std::int32_t take() {
    const std::int32_t number = free_.back();
    free_.pop_back();
    users_[static_cast<std::size_t>(number)] = 1;
    return number;
  }
  void share(std::int32_t number) { ++users_[static_cast<std::size_t>(number)]; }
  void release(std::int32_t number) {
    if (--users_[static_cast<std::size_t>(number)] == 0) free_.push_back(number);
  }

 private:
  std::vector<std::int32_t> users_;
  std::vector<std::int32_t> free_;  ///< stack
};

}  // namespace kvq
