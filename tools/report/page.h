#pragma once

#include <string>

namespace kvq {

/// HTML parts of the page. The functions escape `title`, `note` and `text`; all other arguments are HTML.
std::string html_section(const std::string& id, const std::string& title, const std::string& note,
                         const std::string& body);
/// A chart with a title above and a table of its numbers below.
std::string html_figure(const std::string& title, const std::string& chart, const std::string& numbers);
/// Puts charts side by side where the page is wide enough.
std::string html_charts(const std::string& figures);
std::string html_small_charts(const std::string& figures);
/// A line in place of a chart that says what is missing and how to get it.
std::string html_missing(const std::string& text);
std::string html_note(const std::string& text);

/// The whole HTML document.
std::string html_page(const std::string& title, const std::string& body);

}  // namespace kvq
