#pragma once

#include "diff/report.h"

#include <string>
#include <vector>

/// Words and numbers that all forms of kvq-diff's report share.
namespace kvq {

constexpr const char* kNothingCoded =
    "exact windows hold all tokens of the dump, none is read as codes; take longer sequences, or --no-windows";

/// As number_text(), but with NaN spelled out.
std::string value_text(double x);
/// "0.0312 -> 0.0340 (+9.0%) at layer 3"; for a distance only the new value.
std::string describe(const Reading& reading);
/// "pass", "FAIL", "skipped"
const char* word_of(Outcome outcome);
/// Readings over all layers that have an old and a new value.
std::vector<Reading> summary(const DiffReport& report);
/// "+9.0%", "=", or "-" if there is no percentage.
std::string change_of(const Reading& reading);
/// What the rules rest on, in one line.
const char* basis_text(const DiffReport& report);
/// The reason of a failure that no limit explains, else empty. Tables use the short text and print kNothingCoded below.
std::string reason_of(const CheckResult& check, bool short_text, bool nothing_coded);
/// The worst reading of a check, and how many fail.
std::string detail_text(const CheckResult& check);
/// "identical", "different (layers/0/k/bits: 2 -> 3)", or "equal but for rounding: rotation 8.1e-06 at layer 3 k".
std::string sameness_text(const Sameness& sameness);

}  // namespace kvq
