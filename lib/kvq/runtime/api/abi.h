#pragma once

#include <kvq/core/error.h>
#include <kvq/core/status.h>
#include <kvq/runtime.h>
#include <kvq/runtime/api/struct_sizes.h>

#include <cstddef>
#include <cstring>
#include <new>
#include <type_traits>

/// Between the C interface and C++: structures of other versions, exceptions to status codes.
namespace kvq::abi {

/// Fills the caller's message, cut to its buffer.
void report(kvq_error* error, const char* message);

/// The status of the current exception; its message goes into `error`. Call it from a catch block.
kvq_status caught(kvq_error* error) noexcept;

inline kvq_status done(kvq_error* error) {
  report(error, "");
  return KVQ_OK;
}
inline kvq_status done(kvq_error* error, const Status& status) {
  report(error, status.message());
  return static_cast<kvq_status>(status.code());
}

/// Runs `work`, which throws kvq::Error or returns a Status; no exception gets out.
template <typename Work>
kvq_status guarded(kvq_error* error, Work&& work) noexcept {
  try {
    if constexpr (std::is_void_v<std::invoke_result_t<Work>>) {
      work();
      return done(error);
    } else {
      return done(error, work());
    }
  } catch (...) {
    return caught(error);
  }
}

template <typename T>
T& required(T* pointer, const char* name) {
  if (!pointer) throw Error{ErrorKind::usage, fmt::format("{} must not be null", name)};
  return *pointer;
}

/// Is every byte zero? Both ends may be null if they are equal.
bool all_zero(const unsigned char* begin, const unsigned char* end);

/// If struct_size exceeds the known size by more than this, it is garbage rather than a newer version.
inline constexpr std::size_t kMostUnknownBytes = 4096;

/// Copies the caller's structure to this library's version. Fields that an older caller does not have become zero;
/// further fields of a newer caller must be zero.
/// @param name    for messages
/// @return  on failure `into` is undefined
template <typename T>
Status read_struct(const T* from, T& into, const char* name) {
  static_assert(std::is_trivially_copyable_v<T> && offsetof(T, struct_size) == 0);
  constexpr std::size_t oldest = kFirstSize<T>;
  if (!from) return Status::fail(StatusCode::invalid_argument, "%s must not be null", name);
  const std::size_t size = from->struct_size;
  if (size < oldest)
    return Status::fail(StatusCode::invalid_argument, "%s: struct_size is %zu, expected %zu or more: use KVQ_INIT",
                        name, size, oldest);
  if (size > sizeof(T) + kMostUnknownBytes)
    return Status::fail(StatusCode::invalid_argument, "%s: struct_size is %zu, expected about %zu: use KVQ_INIT", name,
                        size, sizeof(T));
  const auto* bytes = reinterpret_cast<const unsigned char*>(from);
  if (size > sizeof(T) && !all_zero(bytes + sizeof(T), bytes + size))
    return Status::fail(
        StatusCode::unsupported,
        "%s: fields behind byte %zu are set, which this library (ABI %d) does not know: it is older than "
        "the caller's header",
        name, sizeof(T), KVQ_ABI_VERSION);
  into = T{};
  std::memcpy(&into, from, size < sizeof(T) ? size : sizeof(T));
  into.struct_size = sizeof(T);
  return {};
}

/// Copies as much of a structure as the caller's version has; the caller's struct_size stays.
template <typename T>
Status write_struct(const T& from, T* into, const char* name) {
  constexpr std::size_t oldest = kFirstSize<T>;
  if (!into) return Status::fail(StatusCode::invalid_argument, "%s must not be null", name);
  const std::size_t size = into->struct_size;
  if (size < oldest)
    return Status::fail(StatusCode::invalid_argument, "%s: struct_size is %zu, expected %zu or more: use KVQ_INIT",
                        name, size, oldest);
  std::memcpy(into, &from, size < sizeof(T) ? size : sizeof(T));
  into->struct_size = size;
  return {};
}

/// A Status thrown as an exception, for guarded().
struct StatusError {
  Status status;
};
inline void raise(const Status& status) {
  if (!status.ok()) throw StatusError{status};
}

}  // namespace kvq::abi
