#pragma once

#include <kvq/stats/stats_file.h>

#include <cstddef>
#include <map>
#include <vector>

namespace kvq {

/// One layer of one file.
struct LayerPlace {
  const StatsFile* file;
  std::size_t index;
};

/// Refuses a token that two files of a layer hold, because it would count double.
/// @param layers  the files of each layer
/// @param warn    called if a file does not say which tokens it holds (before version 1.5). Then whole files and
/// sampled
///                tokens are compared, which finds everything but overlapping parts of one sequence.
/// @throws Error{bad_input} naming both files, the layer and the tokens
void expect_other_tokens(const std::map<int, std::vector<LayerPlace>>& layers, const SayWarning& warn);

}  // namespace kvq
