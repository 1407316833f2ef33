#include <kvq/artifact/artifact.h>
#include <kvq/artifact/verify.h>

#include "support/artifacts.h"
#include "support/container_edit.h"
#include "support/error_of.h"
#include "support/same_artifact.h"
#include "support/temp_folder.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cstring>
#include <limits>

using namespace kvq;
using namespace kvq::test;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;

namespace {

bool all_pass(const std::vector<Check>& checks) {
  return !checks.empty() && std::all_of(checks.begin(), checks.end(), [](const Check& check) { return check.passed; });
}

/// Names of the checks that failed.
std::string failed(const std::filesystem::path& path) {
  std::string names;
  for (const Check& check : verify_artifact(path))
    if (!check.passed) names += (names.empty() ? "" : "; ") + check.name;
  return names;
}

EditableFile saved_example(const TempFolder& folder) {
  save_artifact(example_artifact(), folder / "example.kvq");
  return EditableFile::read(folder / "example.kvq");
}

}  // namespace

TEST_CASE("An artifact reads back as it was written", "[artifact]") {
  const TempFolder folder;
  const Artifact artifact = example_artifact();
  save_artifact(artifact, folder / "a.kvq");
  const Artifact back = load_artifact(folder / "a.kvq");
  check_equal(back, artifact);
  CHECK(canonical_json(artifact_manifest(back)) == canonical_json(artifact_manifest(artifact)));
  CHECK(all_pass(verify_artifact(folder / "a.kvq")));
}

TEST_CASE("An artifact of a model without fingerprint and configuration reads back too", "[artifact]") {
  const TempFolder folder;
  Artifact artifact = example_artifact();
  artifact.model.fingerprint.clear();
  artifact.model.config_json.clear();
  artifact.layers[0].k.error.reset();
  save_artifact(artifact, folder / "a.kvq");
  const Artifact back = load_artifact(folder / "a.kvq");
  CHECK(back.model.fingerprint.empty());
  CHECK(back.model.config_json.empty());
  CHECK_FALSE(back.layers[0].k.error);
}

TEST_CASE("Every 64-bit seed survives",
          "[artifact][!shouldfail]") {  // valijson reads integers of 2^63 and above as negative
  const TempFolder folder;
  Artifact artifact = example_artifact();
  artifact.calibration.seed = 0xffffffffffffffff;
  save_artifact(artifact, folder / "a.kvq");
  CHECK(load_artifact(folder / "a.kvq").calibration.seed == 0xffffffffffffffff);
}

TEST_CASE("The same artifact gives the same bytes, and a round trip changes none", "[artifact]") {
  const TempFolder folder;
  save_artifact(example_artifact(), folder / "a");
  save_artifact(example_artifact(), folder / "b");
  save_artifact(load_artifact(folder / "a"), folder / "c");
  CHECK(file_bytes(folder / "a") == file_bytes(folder / "b"));
  CHECK(file_bytes(folder / "a") == file_bytes(folder / "c"));
}

TEST_CASE("The file holds the tensors and metadata of formats/artifact.md and no others", "[artifact]") {
  const TempFolder folder;
  const EditableFile file = saved_example(folder);
  std::vector<std::string> names;
  for (const auto& [name, tensor] : file.tensors) names.push_back(name);
  CHECK(names == std::vector<std::string>{"layers.0.k.center", "layers.0.k.eigenbasis", "layers.0.k.rotation",
                                          "layers.0.k.spectrum", "layers.0.v.hadamard_signs", "layers.4.k.eigenbasis",
                                          "layers.4.k.rotation", "layers.4.k.spectrum"});
  const auto shape = [&](const char* name) { return file.tensors.at(name).shape; };
  CHECK(shape("layers.0.k.rotation") == std::vector<std::int64_t>{2, 8, 8});
  CHECK(shape("layers.0.k.center") == std::vector<std::int64_t>{2, 8});
  CHECK(shape("layers.0.k.spectrum") == std::vector<std::int64_t>{2, 8});
  CHECK(shape("layers.0.v.hadamard_signs") == std::vector<std::int64_t>{2, 4});
  CHECK(shape("layers.4.k.rotation") == std::vector<std::int64_t>{1, 8, 8});  // the heads share
  CHECK(file.tensors.at("layers.0.k.rotation").dtype == DType::f32);
  CHECK(file.tensors.at("layers.0.v.hadamard_signs").dtype == DType::i8);
  CHECK(file.metadata.size() == 5);
  CHECK(file.metadata.at("format") == "kvq-artifact");
  CHECK(file.metadata.at("version") == "1.0");
  CHECK(file.metadata.at("requires").empty());
  CHECK(file.metadata.at("kvq.content_hash").size() == 9 + 32);
  CHECK(file.metadata.at("kvq.manifest") == canonical_json(artifact_manifest(example_artifact())));
}

TEST_CASE("The manifest says in the words of the format what the plan says", "[artifact]") {
  const Json manifest = artifact_manifest(example_artifact());
  CHECK(manifest.at("format") == "kvq-artifact");
  CHECK(manifest.at("windows") == Json{{"sink_tokens", 64}, {"recent_tokens", 256}});
  CHECK(manifest.at("calibration").at("seed") == std::uint64_t{0x7fffffffffffffff});
  CHECK(manifest.at("calibration").at("tool") == "kvq " KVQ_VERSION);
  CHECK(manifest.at("model").at("config") == Json{{"hidden_size", 32}, {"rope_theta", 10000.0}});
  const Json& keys = manifest.at("layers").at(0).at("k");
  CHECK(keys.at("coder") == "affine");
  CHECK(keys.at("scale_rule") == "minmax");
  CHECK(keys.at("zero") == "float");
  CHECK(keys.at("scale_type") == "fp16");
  CHECK(keys.at("clip_ratio") == Json{0.96, 1.0});
  CHECK(keys.at("center") == true);
  CHECK(keys.at("rotation").at("kind") == "dense");
  CHECK(keys.at("rotation").at("eigenbasis") == true);
  CHECK(keys.at("error") == Json{{"metric", "query_weighted"}, {"before", 0.25}, {"after", 0.1}});
  const Json& values = manifest.at("layers").at(0).at("v");
  CHECK(values.at("coder") == "symmetric");
  CHECK(values.at("scale_rule") == "norm");
  CHECK_FALSE(values.contains("zero"));
  CHECK_FALSE(values.contains("clip_ratio"));
  CHECK(values.at("rotation").at("signs") == true);
  CHECK(values.at("rotation").at("order") == 2);
  const Json& exact = manifest.at("layers").at(1).at("k");
  CHECK(exact.at("coder") == "exact");
  CHECK(exact.at("bits") == 16);
  CHECK(exact.at("rotation").at("kind") == "identity");
  for (const char* field : {"group_size", "scale_type", "scale_rule", "zero", "clip_ratio"})
    CHECK_FALSE(exact.contains(field));
  CHECK_FALSE(manifest.at("layers").at(2).contains("v"));
  CHECK(manifest.at("layers").at(2).at("k").at("rotation").at("scope") == "layer");
}

TEST_CASE("Verifying notices every flipped bit of the data", "[artifact]") {
  const TempFolder folder;
  save_artifact(example_artifact(), folder / "good");
  const std::string good = file_bytes(folder / "good");
  std::uint64_t header = 0;
  std::memcpy(&header, good.data(), 8);
  for (std::size_t i = 8 + header; i < good.size(); i += 7) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 1);
    write_file_atomically(folder / "bad", std::as_bytes(std::span(bad)));
    const auto text = error_text([&] {
      if (failed(folder / "bad").find("hash") != std::string::npos) throw Error{ErrorKind::check_failed, "noticed"};
    });
    if (text == "no error") FAIL("byte " << i);
  }
}

TEST_CASE("Verifying notices a manifest that was changed after hashing", "[artifact]") {
  const TempFolder folder;
  EditableFile file = saved_example(folder);
  file.manifest["calibration"]["tokens"] = 4097;
  file.write(folder / "bad", false);
  CHECK_THAT(failed(folder / "bad"), Contains("hash"));
  file.write(folder / "fitted");
  CHECK(failed(folder / "fitted").empty());
  file.metadata.erase("kvq.content_hash");
  file.write(folder / "without", false);
  CHECK_THAT(error_text([&] {
               if (!failed(folder / "without").empty()) throw Error{ErrorKind::check_failed, "noticed"};
             }),
             !StartsWith("no error"));
}

TEST_CASE("Verifying notices a rotation that is not orthogonal, although its hash fits", "[artifact]") {
  const TempFolder folder;
  for (const char* tensor : {"layers.0.k.rotation", "layers.4.k.rotation"}) {
    INFO(tensor);
    EditableFile file = saved_example(folder);
    auto& data = file.tensors.at(tensor).data;
    for (std::size_t i = 0; i < data.size() / 4; ++i) {
      float number = 0.0f;
      std::memcpy(&number, data.data() + 4 * i, 4);
      file.set_float(tensor, i, number * 1.00001f);  // error of orthogonality: 2e-5
    }
    file.write(folder / "bad");
    CHECK(error_text([&] { load_artifact(folder / "bad"); }) == "no error");
    CHECK_THAT(failed(folder / "bad"), Contains("orthogonal"));
    CHECK_THAT(failed(folder / "bad"), !Contains("hash"));
  }
}

TEST_CASE("Golden tensors are tolerated and hashed", "[artifact]") {
  const TempFolder folder;
  EditableFile file = saved_example(folder);
  file.tensors["layers.0.golden.k.rows"] = {DType::f32, {1, 8}, std::vector<std::byte>(32)};
  file.tensors["layers.4.golden.bytes"] = {DType::u8, {3}, std::vector<std::byte>(3)};
  file.write(folder / "golden");
  check_equal(load_artifact(folder / "golden"), example_artifact());
  CHECK(all_pass(verify_artifact(folder / "golden")));
}

TEST_CASE("An artifact of a newer minor version is read if it requires nothing unknown", "[artifact]") {
  const TempFolder folder;
  EditableFile file = saved_example(folder);
  file.metadata["version"] = file.manifest["version"] = "1.9";
  file.manifest["invented_later"] = {1, 2, 3};
  file.write(folder / "newer");
  check_equal(load_artifact(folder / "newer"), example_artifact());
}

TEST_CASE("A plan that is not valid is never written", "[artifact]") {
  const TempFolder folder;
  Artifact artifact = example_artifact();
  artifact.layers[0].k.rotation.matrix[3] = std::numeric_limits<float>::quiet_NaN();
  CHECK_THAT(error_text([&] { save_artifact(artifact, folder / "a"); }), StartsWith("internal: "));
  artifact = example_artifact();
  artifact.layers[0].k.clip_ratio = {1.0};
  CHECK_THAT(error_text([&] { save_artifact(artifact, folder / "a"); }), StartsWith("internal: "));
  CHECK_FALSE(std::filesystem::exists(folder / "a"));
}

TEST_CASE("A folder that is not there is an io error", "[artifact]") {
  const TempFolder folder;
  CHECK_THAT(error_text([&] { save_artifact(example_artifact(), folder / "none" / "a"); }), StartsWith("io: "));
  CHECK_THAT(error_text([&] { load_artifact(folder / "a"); }), StartsWith("io: "));
}
