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
  std::string path;        ///< of an artifact's file, or empty
  std::string method;      ///< of an artifact
  bool temporary = false;  ///< the file goes away with the process: nobody is told its name
  std::optional<Artifact> artifact;
  std::optional<Scheme> scheme;

  /// How it keeps a layer; lives as long as the candidate. The layer is in the artifact, see check_model().
  /// @param with_windows  false: tokens of its windows are codes as well, also in its effective bits
  StoredLayer of_layer(const LayerGeometry& geometry, int layer, std::uint64_t seed, bool with_windows) const;
};

/// Gives the second, third, ... of equal names a number: "kivi-2", "kivi-2 (2)".
void number_equal_names(std::vector<Candidate>& candidates);

/// Artifacts, named by their file stems, or by their paths where two stems are equal; then schemes. Names that are
/// equal nevertheless are numbered.
/// @throws Error{usage} if there is nothing to measure
std::vector<Candidate> load_candidates(const std::vector<std::string>& paths, const std::vector<std::string>& schemes);

/// @param who  that was made for the model `own`, in front of messages; may be empty
/// @throws Error{bad_input} for the first thing in which the two models differ, in these layers
void check_same_model(const std::string& who, const ModelGeometry& own, const ModelGeometry& model,
                      const std::vector<int>& layers);

/// @throws Error{bad_input} for the first thing that shows that the artifact was not made for the dump's model
void check_model(const Candidate& candidate, const ModelGeometry& model, const std::vector<int>& layers);

}  // namespace kvq
