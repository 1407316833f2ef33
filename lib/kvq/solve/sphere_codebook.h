#pragma once

#include <span>
#include <vector>

namespace kvq {

/// A scalar quantizer: entries ascend, and a number takes the nearest entry.
struct ScalarCodebook {
  std::vector<double> entries;  ///< [2^bits]
  double distortion = 0.0;      ///< E (t - entry)^2 for t of mean square 1
};

/// Lloyd-Max quantizer for one coordinate t of a uniform point on the sphere of radius sqrt(n) in n dimensions, density
/// proportional to (1 - t^2 / n)^((n-3)/2): the distribution of each channel of a randomly rotated row of root mean
/// square 1 (TurboQuant-MSE, arXiv 2504.19874, which takes N(0, 1/n) for larger n). The conditions "entry = mean of its
/// cell" hold to 1e-11; masses of cells are integrated to full relative accuracy. Results are cached; safe from several
/// threads.
/// @param bits  1..8; @param dim  n >= 2 (1 is taken as 2)
const ScalarCodebook& sphere_codebook(int bits, int dim);

/// Lloyd's algorithm on samples, from `start`: the codebook of smallest squared error that it finds.
/// @param sorted  the samples, ascending; @param start  ascending
/// @return         ascending; an entry whose cell is empty stays where it was
ScalarCodebook fit_codebook(std::span<const float> sorted, const ScalarCodebook& start);

}  // namespace kvq
