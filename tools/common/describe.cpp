#include "common/describe.h"

#include "common/completion.h"
#include "common/config_file.h"
#include "common/decimal.h"
#include "common/flag_facts.h"
#include "common/help.h"
#include "common/man_page.h"
#include "common/version.h"

#include <kvq/core/suggestion.h>
#include <kvq/core/text.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <iostream>
#include <limits>
#include <memory>
#include <utility>

namespace kvq {

namespace {

/// Answers --help with the long text, and CLI11's "help for all" with the short one: the flag of the latter is -h.
class HelpFormatter : public CLI::FormatterBase {
 public:
  explicit HelpFormatter(std::shared_ptr<const ToolText> text) : text_(std::move(text)) {}

  std::string make_help(const CLI::App* app, std::string command, CLI::AppFormatMode mode) const override {
    const bool is_short = mode == CLI::AppFormatMode::All && app->get_parent() == nullptr;
    return is_short ? short_help(*app, *text_) : long_help(*app, *text_, command);
  }

 private:
  std::shared_ptr<const ToolText> text_;
};

/// A page that the build prints into a file.
std::string page(const CLI::App& app, const ToolText& text, const std::string& kind) {
  if (kind == "man") return man_page(app, text);
  if (kind == "bash") return bash_completion(app, text);
  if (kind == "zsh") return zsh_completion(app, text);
  if (kind == "fish") return fish_completion(app, text);
  throw CLI::ValidationError("--print-page", "expected man, bash, zsh or fish");
}

template <typename Number>
bool parse_number(const std::string& text, Number& number) {
  const char* end = text.data() + text.size();
  const auto [stop, failed] = std::from_chars(text.data(), end, number);
  return failed == std::errc{} && stop == end;
}

}  // namespace

void describe(CLI::App& app, ToolText text, ConfigFlag config) {
  const auto shared = std::make_shared<const ToolText>(std::move(text));
  app.name(shared->name);
  app.description(shared->summary);
  app.formatter(std::make_shared<HelpFormatter>(shared));
  app.set_help_flag("--help", "all flags, with examples")->group(kToolGroup);
  app.set_help_all_flag("-h", "the flags that most runs need")->group(kToolGroup);
  app.set_version_flag("-V,--version", version_line(shared->name))->description("version")->group(kToolGroup);
  if (config == ConfigFlag::of_tool) add_config_flag(app)->group(kToolGroup);
  app.add_option_function<std::string>("--print-page",
                                       [&app, shared](const std::string& kind) {
                                         std::cout << page(app, *shared, kind);
                                         throw CLI::Success();
                                       })
      ->group("")
      ->configurable(false);
}

CLI::Validator whole_number(std::int64_t lowest, std::int64_t highest) {
  return CLI::Validator(
      [lowest, highest](const std::string& text) {
        std::int64_t value = 0;
        if (is_decimal(text) && parse_number(text, value) && value >= lowest && value <= highest) return std::string();
        if (has_leading_zeros(text)) return decimal_fault(text);
        using Limits = std::numeric_limits<std::int64_t>;
        const bool is_any = lowest == Limits::min() && highest == Limits::max();
        const std::string limits =
            fmt::format(" from {} to {}", lowest == Limits::min() ? "-2^63" : std::to_string(lowest),
                        highest == Limits::max() ? "2^63 - 1" : std::to_string(highest));
        return fmt::format("expected a whole number{}, found {}", is_any && !is_decimal(text) ? "" : limits,
                           printable(text, 40));
      },
      "");
}

CLI::Validator whole_number() {
  return whole_number(std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max());
}

CLI::Validator number_between(double lowest, double highest) {
  return CLI::Validator(
      [lowest, highest](const std::string& text) {
        double value = 0.0;
        const bool fits = parse_number(text, value) && value >= lowest && value <= highest;
        return fits ? std::string()
                    : fmt::format("expected a number from {} to {}, found {}", lowest, highest, printable(text, 40));
      },
      "");
}

CLI::Validator one_of(std::vector<std::string> words) {
  return CLI::Validator(
      [words = std::move(words)](const std::string& text) {
        if (std::find(words.begin(), words.end(), text) != words.end()) return std::string();
        const std::string nearest = nearest_name(text, words);
        return fmt::format("expected {}, found {}{}", fmt::join(words, " or "), printable(text, 40),
                           nearest.empty() ? "" : fmt::format(" (did you mean {}?)", nearest));
      },
      "");
}

}  // namespace kvq
