#pragma once

#include "inspect/compare.h"

#include <kvq/container/json.h>

#include <string>
#include <string_view>
#include <vector>

namespace kvq {

/// A document of kvq-eval (formats/eval.md) on the artifact's model.
struct Evaluation {
  std::string file;  ///< name without folder
  std::string name;  ///< its stem, numbered if another document has the same
  Json document;     ///< fits formats/eval.schema.json
};

/// @throws Error{io, bad_input} naming file, expected and found: unreadable, too large, against the schema, another
/// model or other layers
/// @throws Error{unsupported} for another major version
std::vector<Evaluation> read_evaluations(const std::vector<std::string>& paths, const NamedArtifact& artifact);

/// One candidate of a document.
struct EvaluatedScheme {
  std::string name;  ///< unlike all others; with the document's name in front where several have it
  const Evaluation* evaluation;
  const Json* json;
  bool own = false;  ///< made from the artifact: the same file name, method and widths
};

/// All candidates, the artifact's own first.
std::vector<EvaluatedScheme> schemes_of(const std::vector<Evaluation>& evaluations, const NamedArtifact& artifact);

/// A number of a scheme's mean, a layer or a bucket; "attention_kl/p99" is inside an object. NaN if it is not there.
double metric_of(const Json& part, std::string_view metric);

}  // namespace kvq
