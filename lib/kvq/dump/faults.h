#pragma once

#include <kvq/core/error.h>

#include <cstddef>
#include <string>
#include <vector>

namespace kvq {

/// Collects the faults of an input, so that one run reports all of them, one per line.
class Faults {
 public:
  /// Runs one independent check; an Error that `check` throws becomes a line.
  /// @return  true if the check held
  template <typename Check>
  bool collect(Check&& check) {
    try {
      check();
      return true;
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::internal) throw;
      add(error);
      return false;
    }
  }

  std::size_t count() const { return count_; }

  /// @throws  Error{unsupported} if every fault is of that kind, else Error of the first other kind
  void throw_if_any() const {
    if (count_ == 0) return;
    const std::size_t shown = lines_.size();
    throw Error{kind_, count_ > shown ? fmt::format("{}\n... and {} more", text(), count_ - shown) : text(), hint_};
  }

 private:
  void add(const Error& error) {
    if (count_ == 0 || kind_ == ErrorKind::unsupported) kind_ = error.kind();
    if (hint_.empty()) hint_ = error.hint();
    constexpr std::size_t kMaxLines = 50;
    if (lines_.size() < kMaxLines) lines_.emplace_back(error.what());
    ++count_;
  }

  std::string text() const {
    std::string joined;
    for (const std::string& line : lines_) joined += (joined.empty() ? "" : "\n") + line;
    return joined;
  }

  ErrorKind kind_ = ErrorKind::bad_input;
  std::vector<std::string> lines_;
  std::string hint_;
  std::size_t count_ = 0;
};

}  // namespace kvq
