#pragma once

#include "bench/device.h"

#include <kvq/runtime/kernels/common/fault.h>

#include <string>

namespace kvq::bench {

/// The fault record of a case, on the device. Measured calls have no faults.
class Faults {
 public:
  FaultRecord* record() const { return record_; }
  /// Waits for the device. @throws Error{check_failed} if a kernel recorded a fault
  void expect_none(const std::string& what) const;

 private:
  Memory memory_;
  FaultRecord* record_ = memory_.put(std::vector<FaultRecord>(1));
};

}  // namespace kvq::bench
