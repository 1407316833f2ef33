#include <kvq/artifact/recipe_check.h>
#include <kvq/codec/rotation_matrix.h>
#include <kvq/plan/bit_reversal.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>

namespace kvq {

namespace {

using Words = std::vector<std::string>;

/// Words of residual rotations, which are made from an eigenbasis that the file does not have.
constexpr std::string_view kResidualWords[] = {"Uc", "J", "Ue^T", "Ue", "Uc^T"};
constexpr std::string_view kWords[] = {"I", "U", "H", "P", "S", "G", "Haar", "D", "B"};

Words split(const std::string& text, std::string_view separator) {
  Words parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(separator, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + separator.size();
  }
  return parts;
}

bool has(const Words& words, std::string_view word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

/// A recipe in parts. "B*G*S*H or S*H": heads that differ have one of several lists of factors.
struct Recipe {
  std::string transform;            ///< "D", "B" or empty
  std::vector<Words> alternatives;  ///< without the transform's letter
  bool known = true, residual = false;

  bool any(std::string_view word) const {
    return std::any_of(alternatives.begin(), alternatives.end(), [&](const Words& own) { return has(own, word); });
  }
  bool is(const Words& factors) const { return alternatives.size() == 1 && alternatives.front() == factors; }
};

Recipe parse_recipe(const std::string& text) {
  Recipe recipe;
  for (const std::string& alternative : split(text, " or ")) {
    Words factors = split(alternative, "*");
    for (const std::string& word : factors) {
      const bool residual =
          std::find(std::begin(kResidualWords), std::end(kResidualWords), word) != std::end(kResidualWords);
      recipe.residual = recipe.residual || residual;
      recipe.known =
          recipe.known && (residual || std::find(std::begin(kWords), std::end(kWords), word) != std::end(kWords));
    }
    if (recipe.alternatives.empty() && (factors.front() == "D" || factors.front() == "B")) {
      recipe.transform = factors.front();
      factors.erase(factors.begin());
      if (factors.empty()) factors.emplace_back("I");
    }
    recipe.alternatives.push_back(std::move(factors));
  }
  return recipe;
}

std::string transform_fault(const TensorPlan& plan, const Recipe& recipe) {
  const std::string expected = !plan.transform ? "" : plan.transform->kind == "diagonal" ? "D" : "B";
  if (recipe.transform == expected) return "";
  return fmt::format("the transform is {}, whose letter is {}", plan.transform ? plan.transform->kind : "none",
                     expected.empty() ? "none" : expected);
}

std::string kind_fault(const TensorPlan& plan, const Recipe& recipe) {
  const Rotation& rotation = plan.rotation;
  const auto fault = [&](const char* expected) {
    return fmt::format("kind {}{}: expected {}", to_string(rotation.kind),
                       rotation.signs.empty() ? "" : " with hadamard_signs", expected);
  };
  if (rotation.kind == RotationKind::identity) return recipe.is({"I"}) ? "" : fault("the recipe I");
  if (rotation.kind != RotationKind::block_hadamard) return "";
  const Words expected = rotation.signs.empty() ? Words{"H"} : Words{"S", "H"};
  return recipe.is(expected) ? "" : fault(rotation.signs.empty() ? "the recipe H" : "the recipe S*H");
}

std::string tensors_fault(const TensorPlan& plan, const Recipe& recipe) {
  const Rotation& rotation = plan.rotation;
  const bool basis = !rotation.eigenbasis.empty(), names_basis = recipe.any("U") || recipe.residual;
  if (basis && !names_basis) return "an eigenbasis is there, which no factor names";
  // A transform, and heads of several kinds, leave the eigenbasis out.
  if (!basis && names_basis && !plan.transform && recipe.alternatives.size() == 1)
    return "a factor U, and no eigenbasis";
  if (recipe.any("G") && !plan.allocation) return "a factor G, and all channels have one width";
  return "";
}

using Matrix = std::vector<double>;

/// Entry h of [H, n] numbers, widened.
Matrix entry_of(const std::vector<float>& values, std::size_t h, std::size_t size) {
  const float* first = values.data() + h * size;
  return {first, first + size};
}

Matrix product(const Matrix& a, const Matrix& b, std::size_t d) {
  Matrix result(d * d, 0.0);
  for (std::size_t i = 0; i < d; ++i)
    for (std::size_t k = 0; k < d; ++k)
      for (std::size_t j = 0; j < d; ++j) result[i * d + j] += a[i * d + k] * b[k * d + j];
  return result;
}

/// Whether all factors are in the file, so that their product can be compared with the rotation.
bool is_in_file(const TensorPlan& plan, const Words& factors) {
  const Rotation& rotation = plan.rotation;
  if (rotation.kind != RotationKind::dense || !rotation.inverse.empty()) return false;
  return std::all_of(factors.begin(), factors.end(), [&](const std::string& word) {
    return word == "I" || word == "P" || (word == "U" && !rotation.eigenbasis.empty()) ||
           (word == "H" && rotation.order > 0) || (word == "S" && !rotation.signs.empty());
  });
}

/// The product of factors for entry h.
Matrix composed(const Rotation& rotation, const Words& factors, std::size_t h, std::size_t d) {
  Matrix result(d * d, 0.0);
  for (std::size_t i = 0; i < d; ++i) result[i * d + i] = 1.0;
  for (const std::string& word : factors) {
    if (word == "U") {
      const Matrix basis = entry_of(rotation.eigenbasis, h, d * d);
      result = &word == &factors.front() ? basis : product(result, basis, d);
    } else if (word == "H") {
      block_hadamard(result, static_cast<std::size_t>(rotation.order));
    } else if (word == "S") {
      for (std::size_t i = 0; i < d * d; ++i) result[i] *= rotation.signs[h * d + i % d];
    } else if (word == "P") {
      const std::vector<int> places = bit_reversal_places(static_cast<int>(d));
      const Matrix source = result;
      for (std::size_t i = 0; i < d; ++i)
        for (std::size_t k = 0; k < d; ++k) result[i * d + static_cast<std::size_t>(places[k])] = source[i * d + k];
    }
  }
  return result;
}

std::string product_fault(const Rotation& rotation, const Words& factors, std::size_t h, std::size_t d) {
  const Matrix expected = composed(rotation, factors, h, d);
  double worst = 0.0;
  for (std::size_t i = 0; i < d * d; ++i)
    worst = std::max(worst, std::abs(expected[i] - double{rotation.matrix[h * d * d + i]}));
  if (worst <= kRecipeTolerance) return "";
  return fmt::format("head {}: the rotation differs from the product of its factors by {:.2e}, allowed {:.0e}", h,
                     worst, kRecipeTolerance);
}

/// Of a gathered rotation: the energy of each source channel must stay among the channels of one width.
std::string gather_fault(const TensorPlan& plan, std::size_t h, std::size_t d) {
  constexpr double kTolerance = 1e-5;
  const Rotation& rotation = plan.rotation;
  Matrix factor = entry_of(rotation.matrix, h, d * d);
  if (!rotation.eigenbasis.empty()) {
    const Matrix basis = entry_of(rotation.eigenbasis, h, d * d);
    Matrix back(d * d);
    for (std::size_t i = 0; i < d; ++i)
      for (std::size_t j = 0; j < d; ++j) back[j * d + i] = basis[i * d + j];
    factor = product(back, factor, d);
  }
  const std::uint8_t* bits = plan.allocation->channel_bits.data() + h * d;
  const std::uint16_t* order = plan.allocation->channel_order.data() + h * d;
  for (std::size_t place = 0; place < d; ++place) {
    double inside = 0.0;
    for (std::size_t j = 0; j < d; ++j)
      if (bits[j] == bits[place]) inside += factor[order[place] * d + j] * factor[order[place] * d + j];
    if (!(std::abs(1.0 - inside) <= kTolerance))
      return fmt::format("head {}: channel_order says that source channel {} has {} bits, but {:.1f}% of it has", h,
                         order[place], bits[place], 100.0 * inside);
  }
  return "";
}

std::string matrix_fault(const TensorPlan& plan, const Recipe& recipe, int dim) {
  const Rotation& rotation = plan.rotation;
  if (rotation.kind != RotationKind::dense || !rotation.inverse.empty() || recipe.alternatives.size() != 1) return "";
  const Words& factors = recipe.alternatives.front();
  const auto d = static_cast<std::size_t>(dim), heads = rotation.matrix.size() / (d * d);
  const bool whole = is_in_file(plan, factors), gathers = plan.allocation && has(factors, "G");
  for (std::size_t h = 0; h < heads; ++h) {
    if (whole)
      if (std::string fault = product_fault(rotation, factors, h, d); !fault.empty()) return fault;
    if (gathers)
      if (std::string fault = gather_fault(plan, h, d); !fault.empty()) return fault;
  }
  return "";
}

}  // namespace

std::string recipe_fault(const TensorPlan& plan, int dim) {
  const Recipe recipe = parse_recipe(plan.rotation.recipe);
  if (!recipe.known) return "";
  if (std::string fault = transform_fault(plan, recipe); !fault.empty()) return fault;
  if (std::string fault = kind_fault(plan, recipe); !fault.empty()) return fault;
  if (std::string fault = tensors_fault(plan, recipe); !fault.empty()) return fault;
  return matrix_fault(plan, recipe, dim);
}

}  // namespace kvq
