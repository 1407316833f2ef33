#include <kvq/core/error.h>
#include <kvq/solve/spectral.h>
#include <kvq/solve/structured.h>

#include <Eigen/Core>

#include <array>

namespace kvq {

namespace {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

const std::array<Composition, 13>& table() {
  static const std::array<Composition, 13> rows = {{
      {CompositionId::uhp, "uhp", "U*H*P", "r_h_pbr", "eigenbasis, Hadamard, bit reversal: OSCAR Eq. 3, the default"},
      {CompositionId::uh, "uh", "U*H", "r_h", "eigenbasis, Hadamard"},
      {CompositionId::u, "u", "U", "plain", "eigenbasis alone"},
      {CompositionId::up, "up", "U*P", "br", "eigenbasis, bit reversal"},
      {CompositionId::uph, "uph", "U*P*H", "br_h128", "eigenbasis, bit reversal, Hadamard"},
      {CompositionId::h, "h", "H", "", "Hadamard alone (QuaRot)"},
      {CompositionId::hp, "hp", "H*P", "h_pbr", "Hadamard, bit reversal"},
      {CompositionId::p, "p", "P", "pbr", "bit reversal alone"},
      {CompositionId::hup, "hup", "H*U*P", "h_r_pbr", "Hadamard, eigenbasis, bit reversal"},
      {CompositionId::hpu, "hpu", "H*P*U", "h_pbr_r", "Hadamard, bit reversal, eigenbasis"},
      {CompositionId::i, "i", "I", "", "no rotation"},
      {CompositionId::residual, "residual", "Uc*J*Ue^T", "", "importance basis against the coder's error basis"},
      {CompositionId::residual_published, "residual-published", "Ue*J*Uc^T", "uresidual",
       "the same as OSCAR's script builds it, transposed"},
  }};
  return rows;
}

Matrix permutation(int dim) {
  const std::vector<int> places = bit_reversal_places(dim);
  Matrix p = Matrix::Zero(dim, dim);
  for (int k = 0; k < dim; ++k) p(k, places[static_cast<std::size_t>(k)]) = 1.0;
  return p;
}

std::vector<double> entries_of(const Matrix& m) { return {m.data(), m.data() + m.size()}; }

}  // namespace

std::span<const Composition> compositions() { return table(); }

const Composition& composition_of(CompositionId id) {
  const Composition& row = table().at(static_cast<std::size_t>(id));
  KVQ_ASSERT(row.id == id);
  return row;
}

const Composition* find_composition(std::string_view name) {
  for (const Composition& row : table())
    if (name == row.name || (!row.official.empty() && name == row.official)) return &row;
  return nullptr;
}

std::vector<double> compose(const Composition& composition, std::span<const double> basis, int dim, int order) {
  Matrix product = Matrix::Identity(dim, dim);
  for (const char factor : composition.recipe) {
    if (factor == 'U') {
      KVQ_ASSERT(basis.size() == static_cast<std::size_t>(product.size()));
      product = Matrix(product * Eigen::Map<const Matrix>(basis.data(), dim, dim));
    } else if (factor == 'H') {
      const std::vector<double> h = block_hadamard_matrix(dim, order);
      product = Matrix(product * Eigen::Map<const Matrix>(h.data(), dim, dim));
    } else if (factor == 'P') {
      product = Matrix(product * permutation(dim));
    } else {
      KVQ_ASSERT(factor == '*' || factor == 'I');
    }
  }
  return entries_of(product);
}

std::vector<double> product(std::span<const double> a, std::span<const double> b, int dim) {
  const Matrix result = Eigen::Map<const Matrix>(a.data(), dim, dim) * Eigen::Map<const Matrix>(b.data(), dim, dim);
  return {result.data(), result.data() + result.size()};
}

std::vector<double> transposed(std::span<const double> a, int dim) {
  const Matrix result = Eigen::Map<const Matrix>(a.data(), dim, dim).transpose();
  return {result.data(), result.data() + result.size()};
}

std::vector<double> turned(std::span<const double> m, std::span<const double> r, int dim) {
  const Eigen::Map<const Matrix> moment(m.data(), dim, dim), rotation(r.data(), dim, dim);
  const Matrix result = rotation.transpose() * moment * rotation;
  return {result.data(), result.data() + result.size()};
}

std::vector<double> with_signs(std::span<const double> basis, int dim, std::uint64_t seed, int layer, int head,
                               int candidate) {
  std::vector<double> result(basis.begin(), basis.end());
  if (candidate == 0) return result;
  // One stream per candidate: the counter's head word holds head and candidate.
  RandomStream random(seed, RandomStream::Purpose::sign_search, static_cast<std::uint32_t>(layer),
                      static_cast<std::uint32_t>(head) | (static_cast<std::uint32_t>(candidate) << 12));
  const auto width = static_cast<std::size_t>(dim);
  for (std::size_t j = 0; j < width; ++j)
    if (random.next_u32() & 1u)
      for (std::size_t at = j; at < result.size(); at += width) result[at] *= -1.0;
  return result;
}

std::vector<double> residual_rotation(const EigenPairs& target, const EigenPairs& error, int dim, bool published) {
  const Eigen::Map<const Matrix> uc(target.vectors.data(), dim, dim), ue(error.vectors.data(), dim, dim);
  const Matrix rotation = uc * ue.rowwise().reverse().transpose();  // both descending: J reverses one of them
  return entries_of(published ? Matrix(rotation.transpose()) : rotation);
}

}  // namespace kvq
