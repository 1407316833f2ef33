#pragma once

namespace kvq {

/// CSS of the report for light mode, dark mode and paper. The colors of series start from those of Okabe and Ito and
/// were adjusted for contrast with the page and for color-blind readers.
extern const char* const kReportStyle;

}  // namespace kvq
