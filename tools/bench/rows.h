#pragma once

#include "bench/measure.h"
#include "bench/sdpa.h"

#include <functional>
#include <optional>
#include <vector>

/// Cases with what was measured of them, and the baselines of the same run.
namespace kvq::bench {

/// One line of a decode table. Without a result it says what would be measured.
struct DecodeRow {
  DecodeCase c;
  std::optional<DecodeResult> result;
  std::optional<Timing> bf16, sdpa;  ///< kvq's own paged kernel, PyTorch's contiguous one
  /// The faster of the two.
  std::optional<double> best_bf16_us() const;
  std::optional<double> speedup() const;
  double bytes_per_second() const;
  /// Time of a plain read over the kernel's.
  double read_floor_ratio() const;
};

struct PrefillRow {
  PrefillCase c;
  std::optional<PrefillResult> result;
  std::optional<Timing> sdpa;  ///< PyTorch's, the same lengths
  double operations_per_second() const;
  std::optional<double> sdpa_ratio() const;  ///< speed as part of PyTorch's
};

struct WriteRow {
  WriteCase c;
  std::optional<WriteResult> result;
  double bytes_per_second() const;
};

struct Run {
  std::optional<Machine> machine;  ///< none: nothing was measured
  double copy_bytes_per_second = 0.0;
  Json sdpa = nullptr;
  std::vector<DecodeRow> decode;
  std::vector<WriteRow> write;
  std::vector<PrefillRow> prefill;
};

/// The row of the same case, or null.
const WriteRow* find(const Run& run, const WriteCase& c);
/// Of a transform the time over that of the same case without, if the run has both.
std::optional<double> transform_ratio(const Run& run, const WriteRow& row);

/// How far it is: what the cases that are done have to move, and which one is on.
using OnProgress = std::function<void(double, const std::string&)>;
double work_of(const Run& run);

SdpaShape sdpa_shape(const DecodeCase& c);
SdpaShape sdpa_shape(const PrefillCase& c);
/// Fills in what a run's cases give on this device.
/// @param python  interpreter for PyTorch's baseline, or empty for none
void measure(int device, const std::string& python, Run& run, const OnProgress& on_progress);

}  // namespace kvq::bench
