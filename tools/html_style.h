#pragma once

namespace kvq {

/// CSS of the report: light, dark and paper. Colours of series are Okabe and Ito's, darker or lighter until they stand out from the page.
extern const char* const kReportStyle;

}  // namespace kvq
