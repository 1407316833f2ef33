#pragma once

#include "bench/cases.h"
#include "bench/device.h"

#include <optional>

/// Measures cases on a device. Contents are random, pages are in random order, and calls take turns on copies of the
/// data that together exceed the L2 cache. Each measure_*() compares the result with the reference codec before timing,
/// and throws Error{check_failed} if a kernel recorded a fault.
namespace kvq::bench {

struct DecodeResult {
  Timing time;
  Timing floor;                     ///< read floor: a kernel reads as many bytes of the same pages and windows
  std::optional<Timing> unchecked;  ///< without checks of page and slot numbers
  std::optional<Timing> append;     ///< behind the write of the new tokens
  double error = 0.0;               ///< relative error of one sequence and KV head
};
/// @throws Error{check_failed} if the result differs from attention over the codec's rows
DecodeResult measure_decode(const Device& device, const DecodeCase& c);

struct PrefillResult {
  Timing time;
  double error = 0.0;  ///< relative error of the last query of one sequence and KV head
  std::int64_t workspace_bytes = 0;
};
/// @throws Error{check_failed} if the result differs from attention over the codec's rows
PrefillResult measure_prefill(const Device& device, const PrefillCase& c);

struct WriteResult {
  Timing time;
  Timing copy;                       ///< a copy that moves as many bytes
  std::optional<Timing> unfused;     ///< a rotation kernel, then a write kernel; only for Hadamard blocks of order 8 or
                                     ///< more without a transform and without windows
  std::optional<Timing> coded_only;  ///< of a case with windows: the same call without exact rows
  std::optional<Timing> unchecked;   ///< without checks of slot numbers
  double differing_ratio =
      0.0;  ///< share of codes that are off by one because rotated rows round differently in the codec
};
/// @throws Error{check_failed} if more codes differ from the codec's than rounding explains, or exact rows are not
/// x_rot
WriteResult measure_write(const Device& device, const WriteCase& c);

}  // namespace kvq::bench
