#include <kvq/container/json.h>
#include <kvq/core/error.h>
#include <kvq/core/text.h>

#include <valijson/adapters/nlohmann_json_adapter.hpp>
#include <valijson/schema.hpp>
#include <valijson/schema_parser.hpp>
#include <valijson/validation_results.hpp>
#include <valijson/validator.hpp>

#include <stdexcept>

namespace kvq {
namespace {

/// valijson matches patterns with std::regex, which recurses once per character of a `*` or `+`: a long string from a
/// hostile file would overflow the stack. A schema therefore writes {0,n}.
void refuse_unbounded_patterns(const Json& schema) {
  const auto refuse = [](const std::string& pattern) {
    if (pattern.find_first_of("*+") != pattern.npos)
      throw Error{ErrorKind::internal, fmt::format("bug: schema pattern '{}': write {{0,n}}, not * or +", pattern)};
  };
  if (schema.is_object()) {
    if (const auto pattern = schema.find("pattern"); pattern != schema.end() && pattern->is_string())
      refuse(pattern->get<std::string>());
    if (const auto patterns = schema.find("patternProperties"); patterns != schema.end() && patterns->is_object())
      for (const auto& [pattern, child] : patterns->items()) refuse(pattern);
  }
  for (const Json& child : schema)
    if (child.is_structured()) refuse_unbounded_patterns(child);
}

void compile(const Json& schema, valijson::Schema& compiled) {
  refuse_unbounded_patterns(schema);
  try {
    valijson::SchemaParser(valijson::SchemaParser::kDraft7)
        .populateSchema(valijson::adapters::NlohmannJsonAdapter(schema), compiled);
  } catch (const std::runtime_error& error) {
    throw Error{ErrorKind::internal, fmt::format("bug: the schema itself is wrong: {}", error.what())};
  }
}

/// One step of valijson's path, "[name]" or "[3]", without the brackets.
std::string_view unwrapped(std::string_view step) {
  return step.size() >= 2 && step.front() == '[' ? step.substr(1, step.size() - 2) : step;
}

/// "layers/0/bits, found "four"": the path of the fault and the value at that path.
std::string place_of(const valijson::ValidationResults::Error& fault, const Json& root) {
  std::string path;
  const Json* here = &root;
  for (const std::string& raw : fault.context) {
    if (&raw == &fault.context.front()) continue;  // "<root>"
    const std::string step(unwrapped(raw));
    path += (path.empty() ? "" : "/") + printable(step);
    if (here == nullptr) continue;
    if (here->is_object() && here->contains(step)) {
      here = &here->at(step);
    } else if (here->is_array() && !step.empty() && step.size() < 10 &&
               step.find_first_not_of("0123456789") == step.npos && std::stoul(step) < here->size()) {
      here = &here->at(std::stoul(step));
    } else {
      here = nullptr;
    }
  }
  if (path.empty()) path = "the document";
  if (here == nullptr || here->is_structured()) return path;
  return fmt::format("{}, found {}", path, printable(canonical_json(*here), 60));
}

}  // namespace

void check_schema(const Json& value, const Json& schema, std::string_view where) {
  valijson::Schema compiled;
  compile(schema, compiled);
  const valijson::adapters::NlohmannJsonAdapter adapter(value);
  if (valijson::Validator().validate(compiled, adapter, nullptr)) return;

  valijson::ValidationResults results;
  valijson::Validator().validate(compiled, adapter, &results);
  valijson::ValidationResults::Error fault;
  if (!results.popError(fault)) fault.description = "Does not fit the schema.";
  throw Error{ErrorKind::bad_input,
              fmt::format("{}: {}: {}", where, place_of(fault, value), printable(fault.description, 200))};
}

}  // namespace kvq
