#include <kvq/artifact/versions.h>
#include <kvq/core/error.h>

#include "artifact_schema_text.h"
#include "stats_schema_text.h"

#include <algorithm>
#include <charconv>

namespace kvq {

namespace {

const std::string& metadata(const SafetensorsFile& file, const std::string& key) {
  const auto it = file.metadata().find(key);
  if (it == file.metadata().end())
    throw Error{ErrorKind::bad_input, fmt::format("{}: __metadata__ has no `{}`: not a kvq file", file.name(), key)};
  return it->second;
}

int parse_major(const std::string& text, const std::string& name) {
  int major = 0, minor = 0;
  const char* end = text.data() + text.size();
  const auto first = std::from_chars(text.data(), end, major);
  const bool dotted = first.ec == std::errc{} && first.ptr != end && *first.ptr == '.';
  const auto second = dotted ? std::from_chars(first.ptr + 1, end, minor) : first;
  if (!dotted || second.ec != std::errc{} || second.ptr != end || major < 0 || minor < 0)
    throw Error{ErrorKind::bad_input, fmt::format("{}: version: expected major.minor, found \"{}\"", name, text)};
  return major;
}

std::string joined_words(const Json& words) {
  std::string text;
  for (const Json& word : words) text += (text.empty() ? "" : ",") + word.get<std::string>();
  return text;
}

void check_requires(const std::string& words, const std::vector<std::string>& known, const std::string& name) {
  std::size_t begin = 0;
  while (begin < words.size()) {
    const std::size_t comma = std::min(words.find(',', begin), words.size());
    const std::string word = words.substr(begin, comma - begin);
    if (std::find(known.begin(), known.end(), word) == known.end())
      throw Error{ErrorKind::unsupported,
                  fmt::format("{}: requires the feature \"{}\", which kvq {} does not know", name, word, KVQ_VERSION),
                  "use a newer kvq"};
    begin = comma + 1;
  }
}

}  // namespace

Json read_manifest(const SafetensorsFile& file, std::string_view format, int major, const Json& schema,
                   const std::vector<std::string>& known_features) {
  const std::string& found = metadata(file, "format");
  if (found != format)
    throw Error{ErrorKind::bad_input, fmt::format("{}: expected format {}, found \"{}\"", file.name(), format, found)};
  const std::string& version = metadata(file, "version");
  if (const int file_major = parse_major(version, file.name()); file_major != major)
    throw Error{ErrorKind::unsupported,
                fmt::format("{}: {} version {}: this kvq reads {}.x", file.name(), format, version, major),
                file_major > major ? "use a newer kvq" : "calibrate again with this kvq"};
  check_requires(metadata(file, "requires"), known_features, file.name());
  const std::string& text = metadata(file, "kvq.manifest");
  const std::string where = file.name() + ": kvq.manifest";
  Json manifest = parse_json(text, where);
  check_schema(manifest, schema, where);
  if (manifest["version"] != version || joined_words(manifest["requires"]) != metadata(file, "requires"))
    throw Error{ErrorKind::bad_input,
                fmt::format("{}: version or requires differ from the file's __metadata__", where)};
  return manifest;
}

int minor_of(std::string_view version) {
  int minor = 0;
  const std::size_t dot = version.find('.');
  KVQ_ASSERT(dot != version.npos);
  std::from_chars(version.data() + dot + 1, version.data() + version.size(), minor);
  return minor;
}

std::string write_manifest(SafetensorsWriter& writer, const Json& manifest) {
  const std::string text = canonical_json(manifest);
  const std::string words = joined_words(manifest.at("requires"));
  writer.set_metadata("format", manifest.at("format").get<std::string>());
  writer.set_metadata("version", manifest.at("version").get<std::string>());
  writer.set_metadata("requires", words);
  std::string hash = writer.content_hash(text);
  writer.set_metadata("kvq.content_hash", hash);
  writer.set_metadata("kvq.manifest", text);
  return hash;
}

const Json& artifact_schema() {
  static const Json schema = parse_json(schema::artifact, "artifact.schema.json");
  return schema;
}

const Json& stats_schema() {
  static const Json schema = parse_json(schema::stats, "stats.schema.json");
  return schema;
}

}  // namespace kvq
