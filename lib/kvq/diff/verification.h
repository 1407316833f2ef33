#pragma once

#include <kvq/artifact/verify.h>
#include <kvq/diff/readings.h>

#include <vector>

namespace kvq {

/// Readings `verification`: 1 for each check of --verify that a file does not pass, named in `where`; one reading of 0
/// if both files pass all checks.
std::vector<Reading> verification_readings(const std::vector<Check>& before, const std::vector<Check>& after);

/// Readings `golden_rows.lost`, for each layer and side of which the old artifact has golden rows: how many fewer of
/// them the new artifact has. Rows of zeros do not count, because they test nothing.
std::vector<Reading> lost_golden_rows(const Artifact& before, const Artifact& after);

}  // namespace kvq
