#pragma once

#include <kvq/artifact/artifact.h>

#include <optional>
#include <string>
#include <vector>

/// Lines of text that several views of an artifact have in common.
namespace kvq {

/// Recipes of all sides, as tables show them.
std::vector<std::string> recipes_of(const Artifact& artifact);

/// "rotation: U eigenbasis of the target moment, H Hadamard": the letters that appear, and no other. Empty if none
/// does.
std::string rotation_legend(const std::vector<std::string>& recipes);

/// A paragraph for --help: all letters of recipes.
std::string letters_help();

/// "0.032 -> 0.015".
/// @param digits  behind the point
std::string change_text(double before, double after, int digits);

/// "2-bit g64": the codes that FitError::before is of. Empty for files before 1.3.
std::string baseline_text(const FitError& error);

/// What the numbers of an error mean, and that they are of the calibration's own tokens.
std::string error_legend(const Artifact& artifact);

/// Layers of the model that the artifact has no plan for, ascending.
std::vector<int> missing_layers(const Artifact& artifact);
/// "4 layers of 6, without 2, 5"; "6 layers of 6".
std::string layers_text(const Artifact& artifact);

}  // namespace kvq
