#pragma once

namespace kvq {

/// CSS of the report: light, dark and paper. Colours of series are Okabe and Ito's, moved until they stand out from the
/// page and stay apart for colour-blind readers.
extern const char* const kReportStyle;

}  // namespace kvq
