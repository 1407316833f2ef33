#include <kvq/artifact/artifact.h>
#include <kvq/artifact/verify.h>

#include "support/artifacts.h"
#include "support/container_edit.h"
#include "support/error_of.h"
#include "support/featured_artifact.h"
#include "support/temp_folder.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <functional>
#include <thread>

using namespace kvq;
using namespace kvq::test;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;

namespace {

/// A change after which a file still loads, and the check that finds the change.
struct Damage {
  const char* name;
  const char* check;
  const char* word;  ///< in the check's detail
  std::function<void(EditableFile&)> make;
};

Json& keys(EditableFile& file) { return file.manifest["layers"][0]["k"]; }
Json& values(EditableFile& file) { return file.manifest["layers"][0]["v"]; }

void set_byte(EditableFile& file, const std::string& tensor, std::size_t at, std::uint8_t value) {
  file.tensors.at(tensor).data.at(at) = static_cast<std::byte>(value);
}

void swap_bytes(EditableFile& file, const std::string& tensor, std::size_t a, std::size_t b, std::size_t size) {
  auto first = file.tensors.at(tensor).data.begin();
  std::swap_ranges(first + static_cast<std::ptrdiff_t>(a * size), first + static_cast<std::ptrdiff_t>((a + 1) * size),
                   first + static_cast<std::ptrdiff_t>(b * size));
}

void set_words(EditableFile& file, const char* version, const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ",") + word;
  file.metadata["version"] = file.manifest["version"] = version;
  file.metadata["requires"] = text;
  file.manifest["requires"] = words;
}

/// Of example_artifact(): eigenbases, signs, no feature.
const Damage kPlain[] = {
    {"eigenvectors in another order", "recipes", "layer 0 k: recipe U*H*P: head 0",
     [](EditableFile& f) {
       for (std::size_t row = 0; row < 8; ++row) swap_bytes(f, "layers.0.k.eigenbasis", 8 * row, 8 * row + 1, 4);
     }},
    {"an eigenbasis that is none", "orthogonality", "max |R^T R - I|",
     [](EditableFile& f) { f.set_float("layers.4.k.eigenbasis", 5, 2.0f); }},
    {"an ascending spectrum", "spectra", "layer 0 k: head 1",
     [](EditableFile& f) { swap_bytes(f, "layers.0.k.spectrum", 9, 10, 4); }},
    {"a negative eigenvalue", "spectra", "not negative",
     [](EditableFile& f) { f.set_float("layers.0.k.spectrum", 7, -0.1f); }},
    {"negative eigenvalues alone", "spectra", "not negative",
     [](EditableFile& f) {
       for (std::size_t j = 0; j < 8; ++j) f.set_float("layers.4.k.spectrum", j, -1.0f - 0.1f * static_cast<float>(j));
     }},
    {"a recipe with another factor", "recipes", "recipe U*P",
     [](EditableFile& f) { keys(f)["rotation"]["recipe"] = "U*P"; }},
    {"a recipe without the eigenbasis", "recipes", "no factor names",
     [](EditableFile& f) { keys(f)["rotation"]["recipe"] = "H*P"; }},
    {"another order of the Hadamard", "recipes", "product of its factors",
     [](EditableFile& f) { keys(f)["rotation"]["order"] = 4; }},
    {"a recipe that names no signs", "recipes", "expected the recipe S*H",
     [](EditableFile& f) { values(f)["rotation"]["recipe"] = "H"; }},
    {"a recipe of exact keys", "recipes", "expected the recipe I",
     [](EditableFile& f) { f.manifest["layers"][1]["k"]["rotation"]["recipe"] = "H"; }},
    {"a letter of a transform", "recipes", "whose letter is none",
     [](EditableFile& f) { keys(f)["rotation"]["recipe"] = "B*U*H*P"; }},
    {"a gather of equal widths", "recipes", "one width",
     [](EditableFile& f) { keys(f)["rotation"]["recipe"] = "U*G*H"; }},
    {"a feature that nothing uses", "version", "requires: expected \"\"",
     [](EditableFile& f) { set_words(f, "1.1", {"trellis"}); }},
    {"no values of a layer that has some", "geometry", "layer 4: kind gqa",
     [](EditableFile& f) { f.manifest["layers"][2]["geometry"]["kind"] = "gqa"; }},
    {"two heads of a rotary key", "geometry", "expected 1 KV head",
     [](EditableFile& f) { f.manifest["layers"][1]["geometry"]["kind"] = "mla_rope"; }},
};

/// Of featured_artifact(): mixed widths.
const Damage kMixed[] = {
    {"a block of another width", "widths", "layer 0 k: head 0: block_bits of block 0",
     [](EditableFile& f) { set_byte(f, "layers.0.k.block_bits", 0, 2); }},
    {"blocks of another head", "widths", "block_bits",
     [](EditableFile& f) {
       for (std::size_t b = 0; b < 4; ++b) swap_bytes(f, "layers.0.k.block_bits", b, 4 + b, 1);
     }},
    {"channels that change places", "widths", "block_bits",
     [](EditableFile& f) { swap_bytes(f, "layers.0.k.channel_order", 0, 7, 2); }},
    {"channels of one width out of order", "widths", "layer 0 v: head 0: channel_order",
     [](EditableFile& f) { swap_bytes(f, "layers.0.v.channel_order", 0, 1, 2); }},
    {"a version below its features", "version", "1.1 or higher",
     [](EditableFile& f) { set_words(f, "1.0", {"codebook", "trellis", "mixed_widths", "centroids"}); }},
};

std::vector<std::string> failed(const std::vector<Check>& checks) {
  std::vector<std::string> names;
  for (const Check& check : checks)
    if (!check.passed) names.push_back(check.name);
  return names;
}

void check_damages(std::span<const Damage> damages, const Artifact& artifact) {
  const TempFolder folder;
  save_artifact(artifact, folder / "good");
  const EditableFile sound = EditableFile::read(folder / "good");
  CHECK(failed(verify_artifact(folder / "good")).empty());
  for (const Damage& damage : damages) {
    INFO(damage.name);
    EditableFile bad = sound;
    damage.make(bad);
    bad.write(folder / "bad");
    CHECK(error_text([&] { load_artifact(folder / "bad"); }) == "no error");
    const std::vector<Check> checks = verify_artifact(folder / "bad");
    const auto own = std::find_if(checks.begin(), checks.end(), [&](const Check& c) { return c.name == damage.check; });
    REQUIRE(own != checks.end());
    CHECK_FALSE(own->passed);
    CHECK_THAT(own->detail, Contains(damage.word));
  }
}

}  // namespace

TEST_CASE("Verifying finds whatever one file says twice and not alike", "[artifact]") {
  check_damages(kPlain, example_artifact());
  check_damages(kMixed, featured_artifact());
}

TEST_CASE("A block of channels that were mixed first has the smallest width", "[artifact]") {
  const TempFolder folder;
  Artifact artifact = featured_artifact();
  BitAllocation& a = *artifact.layers[0].k.allocation;
  std::fill_n(a.block_bits.begin(), 4, std::uint8_t{0});
  std::fill_n(a.block_energy.begin(), 4, 0.0f);
  a.channel_order = {0, 1, 2, 3, 4, 5, 6, 7, /**/ 2, 3, 0, 1, 4, 5, 6, 7};
  save_artifact(artifact, folder / "a");
  CHECK(failed(verify_artifact(folder / "a")).empty());
  a.block_bits[0] = 2;
  save_artifact(artifact, folder / "a");
  CHECK(failed(verify_artifact(folder / "a")) == std::vector<std::string>{"widths"});
}

TEST_CASE("Recipes with unknown words are not compared, and a later minor version is no fault", "[artifact]") {
  const TempFolder folder;
  save_artifact(example_artifact(), folder / "a");
  EditableFile file = EditableFile::read(folder / "a");
  keys(file)["rotation"]["recipe"] = "U*Givens";
  set_words(file, "1.77", {});
  file.write(folder / "a");
  CHECK(failed(verify_artifact(folder / "a")).empty());
}

TEST_CASE("A wrong or missing content hash is refused when a file is opened", "[artifact]") {
  const TempFolder folder;
  save_artifact(example_artifact(), folder / "good");
  const EditableFile sound = EditableFile::read(folder / "good");
  const auto refusal = [&](const std::function<void(EditableFile&)>& change) {
    EditableFile bad = sound;
    change(bad);
    bad.write(folder / "bad", false);
    CHECK(failed(verify_artifact(folder / "bad")) == std::vector<std::string>{"content hash"});
    const SafetensorsFile file = SafetensorsFile::open(folder / "bad");
    CHECK(load_artifact(file, HashCheck::left_out).layers.size() == 3);
    return error_text([&] { load_artifact(folder / "bad"); });
  };
  const std::string start = "bad_input: " + (folder / "bad").string() + ": content hash: expected ";
  CHECK_THAT(refusal([](EditableFile& f) { f.metadata["kvq.content_hash"] = "xxh3-128:0"; }),
             StartsWith(start + "xxh3-128:0, found xxh3-128:"));
  CHECK_THAT(refusal([](EditableFile& f) { f.metadata.erase("kvq.content_hash"); }), StartsWith(start + "none"));
  CHECK_THAT(refusal([](EditableFile& f) { f.set_float("layers.0.k.center", 3, 0.5f); }), StartsWith(start));
  CHECK_THAT(refusal([](EditableFile& f) { f.manifest["calibration"]["seed"] = 1; }), StartsWith(start));
}

TEST_CASE("Layers can be verified at once, with the same result", "[artifact]") {
  const TempFolder folder;
  save_artifact(featured_artifact(), folder / "a");
  const ForEach at_once = [](std::int64_t count, const std::function<void(std::int64_t)>& body) {
    std::vector<std::jthread> threads;
    for (std::int64_t i = count - 1; i >= 0; --i) threads.emplace_back([&body, i] { body(i); });
  };
  const std::vector<Check> one = verify_artifact(folder / "a"), all = verify_artifact(folder / "a", at_once);
  REQUIRE(one.size() == all.size());
  for (std::size_t i = 0; i < one.size(); ++i) CHECK(one[i].detail == all[i].detail);
}
