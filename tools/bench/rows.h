#pragma once

#include "bench/explain.h"
#include "bench/measure.h"
#include "bench/sdpa.h"

#include <functional>
#include <optional>
#include <vector>

/// Cases with their results, and the baselines of the same run.
namespace kvq::bench {

/// One line of the decode table. Without `result`, the line lists the case that would be measured.
struct DecodeRow {
  DecodeCase c;
  std::optional<DecodeResult> result;
  std::optional<Timing> bf16, sdpa;             ///< bfloat16 variant of kvq over pages; PyTorch over contiguous K and V
  std::optional<Explanation> explanation = {};  ///< of --explain
  /// Time of the faster baseline.
  std::optional<double> best_bf16_us() const;
  std::optional<double> speedup() const;
  double bytes_per_second() const;
  /// Time of the read-only kernel over time of the decode kernel.
  double read_floor_ratio() const;
  /// Time over the time without checks.
  std::optional<double> checks_ratio() const;
};
struct PrefillRow {
  PrefillCase c;
  std::optional<PrefillResult> result;
  std::optional<Timing> sdpa;  ///< PyTorch's attention with the same lengths
  double operations_per_second() const;
  std::optional<double> sdpa_ratio() const;  ///< PyTorch's time over this time
};

struct WriteRow {
  WriteCase c;
  std::optional<WriteResult> result;
  double bytes_per_second() const;
  /// Time of two kernels over the time of this one.
  std::optional<double> unfused_ratio() const;
  /// Time of a write with windows over the time of the same write without.
  std::optional<double> windows_ratio() const;
  std::optional<double> checks_ratio() const;
};

struct Run {
  std::optional<Machine> machine;  ///< none if nothing was measured
  double copy_bytes_per_second = 0.0;
  Json sdpa = nullptr;
  std::vector<DecodeRow> decode;
  std::vector<WriteRow> write;
  std::vector<PrefillRow> prefill;
};

/// The row with this case, or null.
const DecodeRow* find(const Run& run, const DecodeCase& c);
const WriteRow* find(const Run& run, const WriteCase& c);
/// Time of several new tokens of a sequence over the time of one; none unless the run has both.
std::optional<double> new_tokens_ratio(const Run& run, const DecodeRow& row);
/// Time of a transform over the time of the same case with an orthogonal rotation; none unless the run has both.
std::optional<double> transform_ratio(const Run& run, const WriteRow& row);

/// Called with the work done so far, in units of work_of(), and the name of the case that runs.
using OnProgress = std::function<void(double, const std::string&)>;
double work_of(const Run& run);

SdpaShape sdpa_shape(const DecodeCase& c);
SdpaShape sdpa_shape(const PrefillCase& c);
/// Measures all cases of a run on this device and stores the results in `run`.
/// @param python  interpreter for PyTorch's baseline, or empty for none
void measure(int device, const std::string& python, Run& run, const OnProgress& on_progress);

}  // namespace kvq::bench
