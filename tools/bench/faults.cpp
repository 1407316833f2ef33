#include "bench/faults.h"

#include <kvq/core/error.h>
#include <kvq/runtime.h>

#include <fmt/format.h>

namespace kvq::bench {

void Faults::expect_none(const std::string& what) const {
  const FaultRecord found = get(record_, 1).front();
  if (found.code != 0)
    throw Error{ErrorKind::check_failed, fmt::format("{}: fault: {}, sequence {}, value {}", what,
                                                     kvq_fault_string(found.code), found.sequence, found.value)};
}

}  // namespace kvq::bench
