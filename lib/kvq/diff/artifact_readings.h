#pragma once

#include <kvq/artifact/artifact.h>
#include <kvq/diff/readings.h>

#include <optional>
#include <span>
#include <vector>

namespace kvq {

struct PlanDistance;

struct ArtifactDiff {
  std::vector<Difference> differences;
  std::vector<Reading> readings;
};

/// Readings from the two files: structure, widths, rotations, clip ratios, tables, bytes. Differences of geometry come
/// first, then those of windows, method, options and codes.
ArtifactDiff diff_artifacts(const Artifact& before, const Artifact& after);

/// Whether both artifacts were calibrated on the same tokens of the same dump. Errors that a calibration states about
/// its own tokens compare only then.
bool same_data(const Artifact& before, const Artifact& after);

/// Whether the reading of geometry is above 0. Such artifacts cannot store the same dump.
bool geometries_differ(const ArtifactDiff& diff);

/// A distance between two plans of a side: name, summary, field.
struct DistanceRow {
  const char *name, *summary;
  std::optional<double> PlanDistance::* value;
};
/// All distances, in the order of readings.
std::span<const DistanceRow> distance_rows();

}  // namespace kvq
