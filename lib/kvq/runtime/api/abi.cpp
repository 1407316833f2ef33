#include <kvq/runtime/api/abi.h>
#include <kvq/runtime/device_memory.h>

#include <algorithm>

namespace kvq::abi {

namespace {

kvq_status status_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::usage: return KVQ_INVALID_ARGUMENT;
    case ErrorKind::unsupported: return KVQ_UNSUPPORTED;
    case ErrorKind::check_failed:
    case ErrorKind::numerical: return KVQ_MISMATCH;
    case ErrorKind::bad_input:
    case ErrorKind::io: return KVQ_IO;
    case ErrorKind::internal: break;
  }
  return KVQ_INTERNAL;
}

}  // namespace

void report(kvq_error* error, const char* message) {
  // The caller's structure may be older and shorter, or newer and longer.
  if (!error || error->struct_size <= offsetof(kvq_error, message)) return;
  const std::size_t room = std::min(error->struct_size, sizeof(kvq_error)) - offsetof(kvq_error, message);
  const std::size_t length = std::min(std::strlen(message), room - 1);
  std::memcpy(error->message, message, length);
  error->message[length] = '\0';
}

kvq_status caught(kvq_error* error) noexcept {
  try {
    throw;
  } catch (const StatusError& e) {
    return done(error, e.status);
  } catch (const CudaError& e) {
    report(error, e.what());
    return KVQ_CUDA;
  } catch (const Error& e) {
    report(error, e.what());
    return status_of(e.kind());
  } catch (const std::bad_alloc&) {
    report(error, "no host memory");
  } catch (const std::exception& e) {
    report(error, e.what());
  } catch (...) {
    report(error, "unknown exception");
  }
  return KVQ_INTERNAL;
}

bool all_zero(const unsigned char* begin, const unsigned char* end) {
  return std::all_of(begin, end, [](unsigned char byte) { return byte == 0; });
}

}  // namespace kvq::abi
