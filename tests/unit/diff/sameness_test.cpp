#include <kvq/artifact/artifact.h>
#include <kvq/diff/sameness.h>
#include <kvq/diff/verification.h>

#include "support/artifacts.h"
#include "support/container_edit.h"
#include "support/featured_artifact.h"
#include "support/temp_folder.h"

#include <catch2/catch.hpp>

#include <functional>

using namespace kvq;
using Catch::Matchers::Contains;
using test::EditableFile;

namespace {

/// Compares an artifact with what a change makes of it.
Sameness compared(const Artifact& artifact, const std::function<void(EditableFile&)>& change) {
  const test::TempFolder folder;
  save_artifact(artifact, folder / "a");
  EditableFile file = EditableFile::read(folder / "a");
  change(file);
  file.write(folder / "b");
  return compare_files(SafetensorsFile::open(folder / "a"), SafetensorsFile::open(folder / "b"));
}

float first_of(const EditableFile& file, const std::string& name) {
  return *reinterpret_cast<const float*>(file.tensors.at(name).data.data());
}

}  // namespace

TEST_CASE("Equal files are identical", "[diff]") {
  for (const Artifact& artifact : {test::example_artifact(), test::featured_artifact()}) {
    const Sameness same = compared(artifact, [](EditableFile&) {});
    CHECK(same.verdict == SamenessVerdict::identical);
    CHECK(same.numbers.empty());
    CHECK(same.reason.empty());
  }
}

TEST_CASE("Small differences of floating-point numbers are rounding, and are measured", "[diff]") {
  const Sameness same = compared(test::example_artifact(), [](EditableFile& f) {
    f.set_float("layers.4.k.eigenbasis", 0, first_of(f, "layers.4.k.eigenbasis") + 8e-6f);
    f.manifest["layers"][0]["k"]["error"]["after"] = 0.1 * (1 + 1e-9);
    f.manifest["layers"][0]["k"]["clip_ratio"][1] = 1.0 - 1e-12;
  });
  CHECK(same.verdict == SamenessVerdict::equal_but_for_rounding);
  REQUIRE(same.numbers.size() == 3);
  CHECK(same.numbers[0].what == "eigenbasis");
  CHECK(same.numbers[0].where == "layer 4 k");
  CHECK(same.numbers[0].difference > 7e-6);
  CHECK(same.numbers[0].difference < 4e-5);
  CHECK(same.numbers[1].what == "error/after");
  CHECK(same.numbers[1].difference == Approx(1e-9).epsilon(0.01));
  CHECK(same.numbers[2].what == "clip_ratio");
}

TEST_CASE("Other numbers, words and tensors make files different, with the reason", "[diff]") {
  const auto reason = [](const std::function<void(EditableFile&)>& change) {
    const Sameness same = compared(test::featured_artifact(), change);
    CHECK(same.verdict == SamenessVerdict::different);
    return same.reason;
  };
  CHECK(reason([](EditableFile& f) { f.manifest["calibration"]["seed"] = 5; }) ==
        "calibration/seed: 9223372036854775807 -> 5");
  CHECK_THAT(reason([](EditableFile& f) { f.set_float("layers.1.v.trellis", 0, 9.0f); }),
             Contains("layers.1.v.trellis: a number differs by"));
  CHECK_THAT(reason([](EditableFile& f) { f.tensors.at("layers.0.k.block_bits").data[0] = std::byte{2}; }),
             Contains("layers.0.k.block_bits: other numbers"));
  CHECK_THAT(reason([](EditableFile& f) { f.tensors.erase("layers.1.v.trellis"); }), Contains("only in the old file"));
  CHECK_THAT(reason([](EditableFile& f) { f.manifest["later"] = true; }), Contains("later: only in the new file"));
  CHECK_THAT(reason([](EditableFile& f) { f.manifest["layers"][1]["k"]["bits"] = 3.5; }), Contains("layers/1/k/bits"));
}

TEST_CASE("Checks that a file does not pass are readings, with file, check and detail", "[diff]") {
  const std::vector<Check> fine = {{"content hash", true, "xxh3-128:0"}},
                           bad = {{"content hash", true, "x"}, {"widths", false, "layer 3 k: other widths"}};
  const std::vector<Reading> none = verification_readings(fine, fine), one = verification_readings(fine, bad);
  REQUIRE(none.size() == 1);
  CHECK(none[0].after == 0.0);
  REQUIRE(one.size() == 1);
  CHECK(one[0].after == 1.0);
  CHECK(one[0].where == "new: widths: layer 3 k: other widths");
  CHECK(verification_readings(bad, bad).size() == 2);
}

TEST_CASE("Golden rows that are gone or zero are lost", "[diff]") {
  Artifact before = test::example_artifact();
  GoldenRows rows;
  rows.tokens = {.first = 0, .count = 2, .q = {}, .k = std::vector<std::uint16_t>(2 * 2 * 8, 0x3f80), .v = {}};
  rows.k.firm.assign(4, 1);
  before.golden[0] = rows;
  const auto lost = [&](const std::function<void(Artifact&)>& change) {
    Artifact after = before;
    change(after);
    const std::vector<Reading> readings = lost_golden_rows(before, after);
    REQUIRE(readings.size() == 1);
    CHECK(readings[0].where == "layer 0 k");
    return readings[0].after;
  };
  CHECK(lost([](Artifact&) {}) == 0.0);
  CHECK(lost([](Artifact& a) { a.golden.clear(); }) == 4.0);
  CHECK(lost([](Artifact& a) { std::fill_n(a.golden[0].tokens.k.begin(), 8, std::uint16_t{0x8000}); }) == 1.0);
  CHECK(lost([](Artifact& a) { a.golden[0].tokens.k.resize(16), a.golden[0].k.firm.resize(2); }) == 2.0);
  CHECK(lost_golden_rows(test::example_artifact(), before).empty());
}
