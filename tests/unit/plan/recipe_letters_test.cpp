#include <kvq/plan/recipe_letters.h>

#include <catch2/catch.hpp>

using namespace kvq;

namespace {

std::string found(const std::vector<std::string>& recipes) {
  std::string text;
  for (const RecipeLetter& letter : letters_in(recipes)) text += std::string(letter.letter) + " ";
  return text;
}

}  // namespace

TEST_CASE("A legend has the letters that appear, and no other", "[plan]") {
  CHECK(found({"U*H*P"}) == "U H P ");
  CHECK(found({"c U*G*S*H or S*H", "G*Haar"}) == "c U H S G Haar ");
  CHECK(found({"H128", "c S*H64 shared", "I"}) == "c H S I ");
  CHECK(found({"Uc*J*Ue^T"}) == "Uc Ue T J ");
  CHECK(found({"B*U*H*P", "D*H"}) == "U H P B D ");
  CHECK(found({}).empty());
}
