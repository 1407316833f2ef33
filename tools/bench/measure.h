#pragma once

#include "bench/cases.h"
#include "bench/device.h"

#include <optional>

/// Measures cases on a device. Contents are random, pages in random order, and calls take turns on sets of data that
/// together are larger than the L2 cache. Results are held against the reference codec before anything is timed.
namespace kvq::bench {

struct DecodeResult {
  Timing time;
  Timing floor;        ///< of a plain read of as many bytes of the same pages and windows
  double error = 0.0;  ///< relative, of one sequence and KV head
};
/// @throws Error{check_failed} if the result is not what the codec's attention gives
DecodeResult measure_decode(const Device& device, const DecodeCase& c);

struct PrefillResult {
  Timing time;
  double error = 0.0;  ///< relative, of the last query of one sequence and KV head
  std::int64_t workspace_bytes = 0;
};
/// @throws Error{check_failed} if the result is not what the codec's attention gives
PrefillResult measure_prefill(const Device& device, const PrefillCase& c);

struct WriteResult {
  Timing time;
  Timing copy;                    ///< of a copy that moves as many bytes
  std::optional<Timing> unfused;  ///< a kernel that rotates, then one that quantises; none for order 1
  double differing_ratio = 0.0;   ///< of the codes, by one, where rotated rows round another way than the codec's
};
/// @throws Error{check_failed} if the pages hold other codes than the codec's
WriteResult measure_write(const Device& device, const WriteCase& c);

}  // namespace kvq::bench
