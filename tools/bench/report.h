#pragma once

#include "bench/rows.h"
#include "bench/targets.h"

#include <string>

namespace kvq::bench {

/// Text tables within 80 columns, with results or, without a device, the cases that would be measured.
std::string text_of(const Run& run);
std::string text_of(const std::vector<Target>& targets);

/// The JSON document of --json (formats/bench.schema.json).
Json json_of(const Run& run, const std::vector<Target>& targets);

}  // namespace kvq::bench
