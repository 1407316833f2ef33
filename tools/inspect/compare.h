#pragma once

#include <kvq/artifact/artifact.h>
#include <kvq/plan/allocation_stats.h>

#include <string>
#include <vector>

namespace kvq {

/// An artifact and the file it came from, for messages.
struct NamedArtifact {
  std::string path;
  Artifact artifact;
};

/// How far the widths of the keys' RoPE blocks are from those of a reference artifact (Block-GTQ, Appendix C.4).
struct AllocationComparison {
  struct Layer {
    int layer = 0;
    AllocationDistance distance = {};
  };
  std::vector<Layer> layers = {};
  AllocationDistance total = {};
};

/// @throws Error{bad_input} with file, layer, expected and found, if layers or geometry differ or a key plan has no
///         widths by RoPE block
AllocationComparison compare_allocations(const NamedArtifact& own, const NamedArtifact& reference);

std::string describe_comparison(const AllocationComparison& comparison);
Json comparison_json(const AllocationComparison& comparison);

}  // namespace kvq
