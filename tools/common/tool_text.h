#pragma once

#include <map>
#include <string>
#include <vector>

namespace kvq {

/// A command that a user can type, and its effect.
struct ToolExample {
  std::string command, effect;
};

/// A heading with text below. A line of the text that begins with spaces keeps its indent when it is wrapped; if two or
/// more spaces divide the line, continuation lines begin below the second part.
struct TextSection {
  std::string title, text;
};

/// What a tool says of itself beside its flags. Help texts, manual pages and completions are made of it and of the
/// flags that CLI::App holds.
struct ToolText {
  std::string name;         ///< "kvq-calibrate"
  std::string summary;      ///< one line without a point, for -h and manual pages
  std::string description;  ///< paragraphs
  std::vector<ToolExample> examples = {};
  std::vector<std::string> first_flags = {};     ///< those that -h shows, in this order, such as "--output"
  std::vector<TextSection> short_sections = {};  ///< below the flags of -h
  std::vector<TextSection> sections = {};        ///< below the flags of --help
  /// Words that a flag takes, by the flag: completions offer them.
  std::map<std::string, std::vector<std::string>> words = {};
};

}  // namespace kvq
