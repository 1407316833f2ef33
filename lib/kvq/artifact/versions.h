#pragma once

#include <kvq/container/json.h>
#include <kvq/container/safetensors.h>

#include <string>
#include <string_view>
#include <vector>

namespace kvq {

/// Checks `format`, `version` and `requires` of a safetensors file's metadata, then parses and checks its manifest.
/// A file written by a newer minor version is read if every word of `requires` is in `known_features`.
/// @throws Error{bad_input} for another format, Error{unsupported} for a higher major or an unknown required feature,
/// by name
Json read_manifest(const SafetensorsFile& file, std::string_view format, int major, const Json& schema,
                   const std::vector<std::string>& known_features = {});

/// The minor version of "major.minor", the text of a file that was read.
int minor_of(std::string_view version);

/// Metadata of a new file: format, version, requires, manifest and content hash. @return  the content hash
std::string write_manifest(SafetensorsWriter& writer, const Json& manifest);

const Json& artifact_schema();
const Json& stats_schema();

}  // namespace kvq
