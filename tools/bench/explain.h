#pragma once

#include "bench/cases.h"

#include <kvq/container/json.h>

#include <string>

/// How a decode call is scheduled, on a device that is assumed (kvq-bench decode --explain). Needs no device.
namespace kvq::bench {

struct Explanation {
  DecodeKernelShape kernel = {};
  DecodeDevice device = {};
  DecodeSchedule schedule = {};
  DecodeWorkspace workspace = {};
};

/// @throws Error{unsupported} if the call has more KV chunks than kernels can count
Explanation explain(const DecodeCase& c, int multiprocessors);

/// A text table within 80 columns.
std::string text_of(const DecodeCase& c, const Explanation& e);
/// `explain` of formats/bench.schema.json.
Json json_of(const Explanation& e);

}  // namespace kvq::bench
