#pragma once

#include <kvq/core/error.h>

#include <string>
#include <vector>

namespace kvq {

/// The next step for a user who gave something else than a dump: a model folder, the name of a model on the Hugging
/// Face hub, an artifact, statistics, model weights or a text. Empty if the argument may be a damaged dump.
std::string hint_for_dump(const std::string& argument);

/// The same for an argument that should be an artifact.
std::string hint_for_artifact(const std::string& argument);

/// Runs `open`, and adds a hint to an error that has none.
/// @param arguments  files that the user named; the first one with a hint counts
/// @param hint_for   hint_for_dump or hint_for_artifact
template <typename Open>
auto open_with_hint(const std::vector<std::string>& arguments, std::string (*hint_for)(const std::string&),
                    const Open& open) {
  try {
    return open();
  } catch (const Error& error) {
    if (!error.hint().empty() || (error.kind() != ErrorKind::bad_input && error.kind() != ErrorKind::io)) throw;
    for (const std::string& argument : arguments)
      if (const std::string hint = hint_for(argument); !hint.empty()) throw Error{error.kind(), error.what(), hint};
    throw;
  }
}

}  // namespace kvq
