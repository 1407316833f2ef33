#pragma once

#include "inspect/compare.h"

#include <kvq/container/json.h>

#include <string>
#include <string_view>
#include <vector>

namespace kvq {

/// A document of kvq-eval --json (formats/eval.md) for the artifact's model.
struct Evaluation {
  std::string file;  ///< file name without folder
  std::string name;  ///< file stem, with a number if another document has the same stem
  Json document;     ///< valid by formats/eval.schema.json
};

/// @throws Error{io, bad_input} with file, expected and found: unreadable, too large, invalid by the schema, of another
///         model or of other layers
/// @throws Error{unsupported} for another major version
std::vector<Evaluation> read_evaluations(const std::vector<std::string>& paths, const NamedArtifact& artifact);

/// One candidate of a document.
struct EvaluatedScheme {
  std::string name;  ///< unique; begins with the document's name if several documents have the scheme
  const Evaluation* evaluation;
  const Json* json;
  bool own = false;  ///< the report's artifact: same file name, method and widths
};

/// The candidates of all documents, those of the report's artifact first.
std::vector<EvaluatedScheme> schemes_of(const std::vector<Evaluation>& evaluations, const NamedArtifact& artifact);

/// A number of a mean, a layer or a bucket; "attention_kl/p99" is the member p99 of attention_kl. NaN if absent.
double metric_of(const Json& part, std::string_view metric);

}  // namespace kvq
