#pragma once

#include <string>

namespace kvq {

/// Pieces of the page. `title` and `note` are text and get escaped; `body` and other arguments are HTML.
std::string html_section(const std::string& id, const std::string& title, const std::string& note,
                         const std::string& body);
/// A chart with its title and, below it, its numbers.
std::string html_figure(const std::string& title, const std::string& chart, const std::string& numbers);
/// Charts side by side where the page is wide enough.
std::string html_charts(const std::string& figures);
std::string html_small_charts(const std::string& figures);
/// One line in place of a chart: what is missing, and what would make it appear.
std::string html_missing(const std::string& text);
std::string html_note(const std::string& text);

/// The whole document.
std::string html_page(const std::string& title, const std::string& body);

}  // namespace kvq
