#pragma once

#include "bench/rows.h"
#include "bench/targets.h"

#include <string>

namespace kvq::bench {

/// Tables for people, within 80 columns: what was measured, or what would be.
std::string text_of(const Run& run);
std::string text_of(const std::vector<Target>& targets);

/// One document for machines (formats/bench.schema.json).
Json json_of(const Run& run, const std::vector<Target>& targets);

}  // namespace kvq::bench
