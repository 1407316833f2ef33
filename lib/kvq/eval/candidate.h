#pragma once

#include <kvq/artifact/artifact.h>
#include <kvq/eval/scheme.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace kvq {

/// An artifact or a scheme to measure.
struct Candidate {
  std::string name;        ///< for tables
  std::string path;        ///< of the artifact's file, or empty
  std::string method;      ///< of the artifact
  bool temporary = false;  ///< the file is deleted when the process ends, so no message names it
  std::optional<Artifact> artifact;
  std::optional<Scheme> scheme;

  /// Stores rows of a layer by the artifact or the scheme. The result must not outlive the candidate. An artifact must
  /// have the layer, see check_model().
  /// @param with_windows  false: tokens in the exact windows count as codes, also in effective bits
  StoredLayer of_layer(const LayerGeometry& geometry, int layer, std::uint64_t seed, bool with_windows) const;
};

/// Appends a number to the second, third, ... of equal names: "kivi-2", "kivi-2 (2)".
void number_equal_names(std::vector<Candidate>& candidates);

/// Loads artifacts, named by file stem, or by path where two stems are equal; appends schemes. number_equal_names()
/// then makes names unique.
/// @throws Error{io, bad_input, unsupported, usage} as load_artifact() and find_scheme() do
std::vector<Candidate> load_candidates(const std::vector<std::string>& paths, const std::vector<std::string>& schemes);

/// @param who  prefix of messages: the candidate made for the model `own`; may be empty
/// @throws Error{bad_input} for the first difference between the two models in these layers
void check_same_model(const std::string& who, const ModelGeometry& own, const ModelGeometry& model,
                      const std::vector<int>& layers);

/// @throws Error{bad_input} for the first difference between the artifact's model and the dump's
void check_model(const Candidate& candidate, const ModelGeometry& model, const std::vector<int>& layers);

}  // namespace kvq
