#include "report/page.h"

#include "report/style.h"
#include "report/text.h"

#include <fmt/format.h>

namespace kvq {

std::string html_section(const std::string& id, const std::string& title, const std::string& note,
                         const std::string& body) {
  return fmt::format("<section id=\"{}\">\n<h2>{}</h2>\n{}{}</section>\n", id, html_text(title), html_note(note), body);
}

std::string html_figure(const std::string& title, const std::string& chart, const std::string& numbers) {
  return fmt::format("<figure>\n<figcaption>{}</figcaption>\n{}{}</figure>\n", html_text(title), chart, numbers);
}

std::string html_charts(const std::string& figures) {
  return figures.empty() ? "" : "<div class=\"charts\">\n" + figures + "</div>\n";
}

std::string html_small_charts(const std::string& figures) {
  return "<div class=\"charts small\">\n" + figures + "</div>\n";
}

std::string html_missing(const std::string& text) { return "<p class=\"missing\">" + html_text(text, 400) + "</p>\n"; }

std::string html_note(const std::string& text) {
  return text.empty() ? "" : "<p class=\"note\">" + html_text(text, 600) + "</p>\n";
}

std::string html_page(const std::string& title, const std::string& body) {
  return fmt::format(
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<meta name=\"color-scheme\" "
      "content=\"light dark\">\n"
      "<title>{}</title>\n<style>{}</style>\n</head>\n<body>\n<main>\n{}</main>\n</body>\n</html>\n",
      html_text(title), kReportStyle, body);
}

}  // namespace kvq
