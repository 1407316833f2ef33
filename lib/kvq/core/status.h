#pragma once

#include <cstdarg>
#include <cstdio>

namespace kvq {

/// Outcomes of a runtime call to which a caller can react differently. The numbers are part of the C interface.
enum class StatusCode : int {
  ok = 0,
  invalid_argument = 1,  ///< an impossible size, pointer or stride
  unsupported = 2,       ///< valid, but not in this build or not possible on this device
  mismatch = 3,          ///< an artifact that does not fit the model or the device plan
  io = 4,                ///< a file that cannot be read
  cuda = 5,              ///< the CUDA runtime refused; the message holds its reason
  internal = 6,          ///< a bug in kvq
};

/// The result of a runtime call: a code and a message of one line. No member throws or allocates.
class [[nodiscard]] Status {
 public:
  static constexpr int kMessageBytes = 256;

  Status() = default;
#ifdef __clang_analyzer__  // clang's analyzer does not follow variadic functions, and would take the result for ok
  template <typename... Values>
  static Status fail(StatusCode code, const char*, const Values&...) {
    Status status;
    status.code_ = code;
    return status;
  }
#else
  static Status fail(StatusCode code, const char* format, ...) __attribute__((format(printf, 2, 3))) {
    Status status;
    status.code_ = code;
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(status.message_, sizeof status.message_, format, arguments);
    va_end(arguments);
    return status;
  }
#endif
  bool ok() const { return code_ == StatusCode::ok; }
  StatusCode code() const { return code_; }
  const char* message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::ok;
  char message_[kMessageBytes] = "";
};

}  // namespace kvq
