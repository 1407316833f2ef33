#include "common/man_page.h"

#include "common/flag_facts.h"
#include "common/help.h"
#include "common/text_wrap.h"

#include <kvq/core/exit_code.h>

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <sstream>

namespace kvq {

namespace {

/// Text of a roff line: characters with a meaning in roff stand for themselves, and no line is a request.
std::string roff(const std::string& text) {
  std::string result = text.starts_with('.') ? "\\&" : "";
  for (const char c : text) {
    switch (c) {
      case '\\': result += "\\e"; break;
      case '-': result += "\\-"; break;
      case '\'': result += "\\(aq"; break;
      case '`': result += "\\(ga"; break;
      case '^': result += "\\(ha"; break;
      case '~': result += "\\(ti"; break;
      default: result += c;
    }
  }
  return result;
}

/// An argument of a request, between quotes.
std::string roff_argument(const std::string& text) {
  std::string result;
  for (const char c : roff(text)) result += c == '"' ? std::string("\\(dq") : std::string(1, c);
  return "\"" + result + "\"";
}

std::string heading(const std::string& title) { return ".SH " + roff_argument(title) + "\n"; }

std::string upper(std::string text) {
  for (char& c : text) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return text;
}

std::string tagged(const std::string& term, const std::string& text) {
  return ".TP\n.B " + roff_argument(term) + "\n" + (text.empty() ? "\\&" : roff(text)) + "\n";
}

/// Paragraphs; lines that begin with spaces keep their form.
std::string body(const std::string& text) {
  constexpr std::size_t kColumns = 72;  // man indents text by 7
  std::string result;
  std::istringstream lines(wrap_text(text, kColumns));
  bool is_literal = false;
  for (std::string line; std::getline(lines, line);) {
    const bool keeps_form = line.starts_with(' ');
    if (keeps_form != is_literal) result += keeps_form ? ".nf\n" : ".fi\n";
    is_literal = keeps_form;
    result += line.empty() ? ".PP\n" : roff(line) + "\n";
  }
  return result + (is_literal ? ".fi\n" : "");
}

std::string flag_list(const std::vector<FlagFacts>& flags) {
  std::string list, group;
  for (const FlagFacts& flag : flags) {
    if (flag.group != group && flag.group != "Options") list += ".SS " + roff_argument(flag.group) + "\n";
    group = flag.group;
    list += tagged(flag.term(), flag.help);
  }
  return list;
}

std::string examples(const std::vector<ToolExample>& examples) {
  std::string list = heading("EXAMPLES");
  for (const ToolExample& example : examples) list += tagged(example.command, example.effect);
  return list;
}

std::string exit_status() {
  std::string list = heading("EXIT STATUS");
  for (const ExitCodeRow& row : exit_codes())
    list += tagged(std::to_string(to_int(row.code)), std::string(row.meaning));
  return list;
}

}  // namespace

std::string man_page(const CLI::App& app, const ToolText& text) {
  std::string page = fmt::format(".\\\" generated from the flags of {0}\n.TH {1} 1 \"\" \"kvq {2}\" \"kvq\"\n",
                                 text.name, roff_argument(upper(text.name)), KVQ_VERSION);
  page += heading("NAME") + roff(text.name) + " \\- " + roff(text.summary) + "\n";
  page += heading("SYNOPSIS") + roff(usage_line(app, text, text.name)) + "\n";
  page += heading("DESCRIPTION") + body(text.description);
  page += heading("OPTIONS") + flag_list(flag_facts(app, text));
  for (const CLI::App* command : commands_of(app)) {
    page += heading(upper(text.name + " " + command->get_name())) + roff(command->get_description()) + "\n";
    page += flag_list(flag_facts(*command, text)) + ".PP\n" + body(command->get_footer());
  }
  if (!text.sections.empty()) page += heading("NOTES");
  for (const TextSection& section : text.sections)
    page += (section.title.empty() ? ".PP\n" : ".SS " + roff_argument(section.title) + "\n") + body(section.text);
  return page + examples(text.examples) + exit_status();
}

}  // namespace kvq
