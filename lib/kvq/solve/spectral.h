#pragma once

#include <kvq/compute/eigh.h>
#include <kvq/core/random.h>

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvq {

enum class CompositionId { uhp, uh, u, up, uph, h, hp, p, hup, hpu, i, residual, residual_published };

/// A product of factors, from left to right as rows of activations meet them: U the eigenbasis, H the block Hadamard, P
/// the bit-reversal permutation. "uhp" is OSCAR Eq. 3. `residual` is built from the coder's error instead, see
/// residual_rotation().
struct Composition {
  CompositionId id;
  std::string name;      ///< the name a user types
  std::string recipe;    ///< "U*H*P"
  std::string official;  ///< the name of OSCAR's published script, or empty
  std::string summary;
  bool uses(char factor) const { return recipe.find(factor) != std::string::npos; }
};

/// All compositions, the default first.
std::span<const Composition> compositions();
const Composition& composition_of(CompositionId id);
/// Finds a composition by `name` or by `official`; null if there is none.
const Composition* find_composition(std::string_view name);

/// Multiplies the factors of a recipe. @return [D, D] double
/// @param basis  [D, D] eigenvectors in columns, descending; unused if the recipe has no U
std::vector<double> compose(const Composition& composition, std::span<const double> basis, int dim, int order);

/// a @ b, a^T and r^T m r of [D, D] matrices.
std::vector<double> product(std::span<const double> a, std::span<const double> b, int dim);
std::vector<double> transposed(std::span<const double> a, int dim);
std::vector<double> turned(std::span<const double> m, std::span<const double> r, int dim);

/// Multiplies columns of a basis by random signs; candidate 0 is the canonical basis itself. R = U H depends on these
/// signs. No eigensolver determines them, so a search may choose them.
std::vector<double> with_signs(std::span<const double> basis, int dim, std::uint64_t seed, int layer, int head,
                               int candidate);

/// Rotation of OSCAR's "residual" variant: given the coder's error covariance E in some rotated basis and the target C,
/// the frozen-error surrogate tr(R^T C R E) is smallest for R = U_C J U_E^T with J reversing the order (largest
/// importance meets smallest error). The published script builds the transpose; `published` returns the transpose, for
/// comparison.
std::vector<double> residual_rotation(const EigenPairs& target, const EigenPairs& error, int dim, bool published);

}  // namespace kvq
