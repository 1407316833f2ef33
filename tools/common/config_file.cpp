#include "common/config_file.h"

#include <kvq/core/error.h>
#include <kvq/core/suggestion.h>
#include <kvq/core/text.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <system_error>

namespace kvq {

namespace {

constexpr std::size_t kMostBytes = std::size_t{1} << 20;

bool is_name_character(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
}

/// Reads a text from left to right and knows the line.
class Scanner {
 public:
  Scanner(std::string_view text, const std::string& name) : text_(text), name_(name) {}

  std::vector<ConfigEntry> entries() {
    std::vector<ConfigEntry> all;
    std::map<std::string, int> lines;
    for (skip_to_entry(); !at_end(); skip_to_entry()) {
      ConfigEntry entry = read_entry();
      const auto [first, fresh] = lines.try_emplace(entry.name, entry.line);
      if (!fresh) fail(entry.line, fmt::format("the flag stands already in line {}", first->second));
      all.push_back(std::move(entry));
    }
    return all;
  }

 private:
  [[noreturn]] void fail(int line, const std::string& what) const {
    throw Error{ErrorKind::bad_input, fmt::format("{}: line {}: {}", name_, line, what),
                "a line is: name = value, with the name of a flag; a text with spaces needs quotes"};
  }
  [[noreturn]] void fail(const std::string& what) const { fail(line_, what); }

  bool at_end() const { return at_ >= text_.size(); }
  char here() const { return at_end() ? '\0' : text_[at_]; }
  bool at_line_end() const { return at_end() || here() == '\n'; }
  char take() {
    const char c = text_[at_++];
    line_ += c == '\n' ? 1 : 0;
    return c;
  }

  void skip_blanks() {
    while (here() == ' ' || here() == '\t' || here() == '\r') take();
  }
  void skip_line() {
    while (!at_line_end()) take();
  }
  void skip_comment() {
    skip_blanks();
    if (here() == '#') skip_line();
  }
  /// Blank lines and comments.
  void skip_to_entry() {
    for (skip_comment(); here() == '\n' || here() == ';'; skip_comment()) here() == ';' ? skip_line() : void(take());
  }
  void skip_in_list() {
    for (skip_comment(); here() == '\n'; skip_comment()) take();
  }

  ConfigEntry read_entry() {
    ConfigEntry entry{.line = line_, .name = read_name(), .values = {}};
    skip_blanks();
    if (here() != '=') fail("expected name = value");
    take();
    skip_blanks();
    if (here() == '[') {
      entry.values = read_list();
    } else {
      entry.values.push_back(read_value(false));
    }
    skip_comment();
    if (!at_line_end()) fail("expected the end of the line behind the value");
    return entry;
  }

  std::string read_name() {
    if (here() == '[') fail("sections are not supported");
    std::string name;
    while (is_name_character(here())) name += take();
    const std::size_t start = name.find_first_not_of('-');  // --bits = 2 is as good as bits = 2
    if (start == std::string::npos) fail("expected name = value");
    return name.substr(start);
  }

  std::vector<std::string> read_list() {
    const int first_line = line_;
    std::vector<std::string> values;
    take();
    for (skip_in_list(); here() != ']'; skip_in_list()) {
      if (at_end()) fail(first_line, "the list has no end, expected ]");
      values.push_back(read_value(true));
      skip_in_list();
      if (at_end()) fail(first_line, "the list has no end, expected ]");
      if (here() == ',') {
        take();
      } else if (here() != ']') {
        fail("expected , or ] behind a value of the list");
      }
    }
    take();
    if (values.empty()) fail("expected a list with values");
    return values;
  }

  std::string read_value(bool in_list) {
    if (here() == '"') return read_basic_string();
    if (here() == '\'') return read_literal_string();
    std::string word;
    const auto ends = [&](char c) { return c == ' ' || c == '\t' || c == '\r' || (in_list && (c == ',' || c == ']')); };
    while (!at_line_end() && !ends(here())) word += take();
    if (word.empty() || word[0] == '#') fail("expected a value");
    if (word.find_first_of("\"'[]{}=") != word.npos) fail("a value with such characters needs quotes");
    return word;
  }

  std::string read_literal_string() {
    std::string text;
    for (take(); here() != '\''; text += take())
      if (at_line_end()) fail("the text has no end, expected '");
    take();
    return text;
  }

  std::string read_basic_string() {
    std::string text;
    for (take(); here() != '"';) {
      if (at_line_end()) fail("the text has no end, expected \"");
      const char c = take();
      text += c == '\\' ? read_escape() : c;
    }
    take();
    return text;
  }

  char read_escape() {
    if (at_line_end()) fail("the text has no end, expected \"");
    switch (take()) {
      case '"': return '"';
      case '\\': return '\\';
      case 'n': return '\n';
      case 't': return '\t';
      default: fail("expected \\\\, \\\", \\n or \\t, found another escape");
    }
  }

  std::string_view text_;
  const std::string& name_;
  std::size_t at_ = 0;
  int line_ = 1;
};

/// Closes a descriptor.
class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  ~Descriptor() {
    if (value_ >= 0) ::close(value_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  operator int() const { return value_; }

 private:
  int value_;
};

[[noreturn]] void refuse_file(const std::string& name, const std::string& what, ErrorKind kind = ErrorKind::io) {
  throw Error{kind, fmt::format("--config: {}: {}", name, what)};
}

std::string read_text(const std::string& path, const std::string& name) {
  // O_NONBLOCK: opening a pipe would wait for its writer.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  struct stat status;
  if (file < 0 || ::fstat(file, &status) != 0)
    refuse_file(name, "cannot open: " + std::generic_category().message(errno));
  if (!S_ISREG(status.st_mode)) refuse_file(name, "not a regular file");
  std::string text(kMostBytes + 1, '\0');  // the size that the system tells is not trusted: files of /proc have none
  std::size_t size = 0;
  while (size < text.size()) {
    const auto count = ::read(file, text.data() + size, text.size() - size);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) refuse_file(name, "cannot read: " + std::generic_category().message(errno));
    if (count == 0) break;
    size += static_cast<std::size_t>(count);
  }
  if (size > kMostBytes)
    refuse_file(name, fmt::format("expected at most {} bytes, found more", kMostBytes), ErrorKind::bad_input);
  text.resize(size);
  if (!is_utf8(text) || text.find('\0') != text.npos) refuse_file(name, "not a text in UTF-8", ErrorKind::bad_input);
  return text;
}

/// The option that an entry sets, or null.
CLI::Option* find_option(CLI::App& app, const std::string& name) {
  CLI::Option* option = app.get_option_no_throw("--" + name);
  return option != nullptr && option->get_configurable() ? option : nullptr;
}

void give(CLI::Option& option, const ConfigEntry& entry) {
  if (option.get_expected_max() == 0 || option.get_items_expected_max() == 0) {  // a flag
    if (entry.values.size() != 1) throw CLI::ConversionError("");
    option.add_result(option.get_flag_value(entry.name, entry.values.front()));
  } else {
    option.add_result(entry.values);
  }
  option.run_callback();
}

/// Flags that a file may set. A suggestion is one of these, never text of the file.
std::vector<std::string> names_of(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options())
    if (option->get_configurable())
      for (const std::string& name : option->get_lnames()) names.push_back(name);
  return names;
}

/// A YAML file would fail in its first line, which says little to users who did not know that TOML is meant.
void refuse_yaml(const std::string& path, const std::string& file) {
  if (path.ends_with(".yaml") || path.ends_with(".yml"))
    throw Error{ErrorKind::usage, fmt::format("--config: {}: expected TOML, found the name of a YAML file", file),
                "write name = value in place of name: value, as in examples/recipes, and name the file .toml"};
}

void apply_config(CLI::App& app, const std::string& path) {
  const std::string file = safe_line(path);
  refuse_yaml(path, file);
  const auto refuse = [&](const ConfigEntry& entry, const std::string& what, const std::string& nearest) {
    throw Error{
        ErrorKind::usage, fmt::format("--config: {}: line {}: {}", file, entry.line, what),
        nearest.empty() ? "--help lists the flags and what they take" : fmt::format("did you mean {}?", nearest)};
  };
  for (const ConfigEntry& entry : read_config_file(path)) {
    CLI::Option* option = find_option(app, entry.name);
    if (option == nullptr) refuse(entry, "there is no flag of this name", nearest_name(entry.name, names_of(app)));
    if (option->count() > 0) continue;  // the command line wins
    try {
      give(*option, entry);
    } catch (const CLI::ParseError&) {  // its text quotes the value
      refuse(entry, fmt::format("{} does not take this value", option->get_name()), "");
    }
  }
}

}  // namespace

std::vector<ConfigEntry> parse_config(std::string_view text, const std::string& name) {
  return Scanner(text, name).entries();
}

std::vector<ConfigEntry> read_config_file(const std::string& path) {
  const std::string name = safe_line(path);
  const std::string text = read_text(path, name);
  return parse_config(text, "--config: " + name);
}

CLI::Option* add_config_flag(CLI::App& app) {
  return app
      .add_option_function<std::string>(
          "--config", [&app](const std::string& path) { apply_config(app, path); },
          "read flags from a TOML file of lines name = value, such as those of examples/recipes; a flag on the command "
          "line wins")
      ->type_name("FILE")
      ->configurable(false);
}

}  // namespace kvq
