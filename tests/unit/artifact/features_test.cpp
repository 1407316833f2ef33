#include <kvq/artifact/artifact.h>
#include <kvq/artifact/manifest.h>
#include <kvq/artifact/verify.h>

#include "support/artifacts.h"
#include "support/container_edit.h"
#include "support/error_of.h"
#include "support/featured_artifact.h"
#include "support/file_faults.h"
#include "support/same_artifact.h"
#include "support/temp_folder.h"

#include <catch2/catch.hpp>

#include <cstring>
#include <functional>
#include <limits>

using namespace kvq;
using namespace kvq::test;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;

namespace {

Json& keys(EditableFile& file) { return file.manifest["layers"][0]["k"]; }
Json& values(EditableFile& file) { return file.manifest["layers"][0]["v"]; }
Json& plain_keys(EditableFile& file) { return file.manifest["layers"][1]["k"]; }
Json& plain_values(EditableFile& file) { return file.manifest["layers"][1]["v"]; }

void set_byte(EditableFile& file, const std::string& tensor, std::size_t at, std::uint8_t value) {
  file.tensors.at(tensor).data.at(at) = static_cast<std::byte>(value);
}

const float kNan = std::numeric_limits<float>::quiet_NaN();

const FileFault kFaults[] = {
    // Features that a reader must know.
    {"a feature of the future", "unsupported: ", "zigzag",
     [](EditableFile& f) {
       f.metadata["requires"] += ",zigzag";
       f.manifest["requires"].push_back("zigzag");
     }},
    {"a feature that is used and not listed", "bad_input: ", "mixed_widths",
     [](EditableFile& f) {
       f.metadata["requires"] = "codebook,trellis,centroids";
       f.manifest["requires"] = {"codebook", "trellis", "centroids"};
     }},
    {"codebooks that are not listed", "bad_input: ", "codebook",
     [](EditableFile& f) {
       f.metadata["requires"] = "trellis,mixed_widths,centroids";
       f.manifest["requires"] = {"trellis", "mixed_widths", "centroids"};
     }},
    {"trellises that are not listed", "bad_input: ", "trellis",
     [](EditableFile& f) {
       f.metadata["requires"] = "codebook,mixed_widths,centroids";
       f.manifest["requires"] = {"codebook", "mixed_widths", "centroids"};
     }},
    {"centroids that are not listed", "bad_input: ", "centroids",
     [](EditableFile& f) {
       f.metadata["requires"] = "codebook,trellis,mixed_widths";
       f.manifest["requires"] = {"codebook", "trellis", "mixed_widths"};
     }},
    {"no features at all", "bad_input: ", "",
     [](EditableFile& f) {
       f.metadata["requires"] = "";
       f.manifest["requires"] = Json::array();
     }},
    {"metadata that list less than the manifest", "bad_input: ", "requires",
     [](EditableFile& f) { f.metadata["requires"] = ""; }},
    {"metadata and manifest that disagree", "bad_input: ", "requires",
     [](EditableFile& f) { f.manifest["requires"] = {"codebook", "trellis", "centroids"}; }},
    {"capped logits that are not listed", "bad_input: ", "logit_softcapping",
     [](EditableFile& f) { f.manifest["layers"][0]["geometry"]["logit_softcapping"] = 50.0; }},
    {"a cap of zero", "bad_input: ", "logit_softcapping",
     [](EditableFile& f) { f.manifest["layers"][0]["geometry"]["logit_softcapping"] = 0.0; }},
    {"a sink too few", "bad_input: ", "sink_logits",
     [](EditableFile& f) { f.manifest["layers"][0]["geometry"]["sink_logits"] = {1.0}; }},
    // Mixed widths.
    {"another row size", "bad_input: ", "row_bytes", [](EditableFile& f) { keys(f)["allocation"]["row_bytes"] = 16; }},
    {"a row size too small", "bad_input: ", "row_bytes",
     [](EditableFile& f) { values(f)["allocation"]["row_bytes"] = 4; }},
    {"widths that ascend", "bad_input: ", "channel_bits",
     [](EditableFile& f) { set_byte(f, "layers.0.k.channel_bits", 1, 7); }},
    {"a width of nine", "bad_input: ", "channel_bits",
     [](EditableFile& f) { set_byte(f, "layers.0.k.channel_bits", 0, 9); }},
    {"an order with a channel twice", "bad_input: ", "channel_order",
     [](EditableFile& f) { set_byte(f, "layers.0.k.channel_order", 0, 3); }},
    {"an order with a channel beyond the head", "bad_input: ", "channel_order",
     [](EditableFile& f) { set_byte(f, "layers.0.k.channel_order", 1, 1); }},
    {"no widths", "bad_input: ", "layers.0.k.channel_bits",
     [](EditableFile& f) { f.tensors.erase("layers.0.k.channel_bits"); }},
    {"no order", "bad_input: ", "layers.0.v.channel_order",
     [](EditableFile& f) { f.tensors.erase("layers.0.v.channel_order"); }},
    {"no bits of blocks", "bad_input: ", "block_bits",
     [](EditableFile& f) { f.tensors.erase("layers.0.k.block_bits"); }},
    {"widths of another shape", "bad_input: ", "layers.0.k.channel_bits",
     [](EditableFile& f) { f.tensors.at("layers.0.k.channel_bits").shape = {16}; }},
    {"widths of another type", "bad_input: ", "layers.0.k.channel_bits",
     [](EditableFile& f) { f.tensors.at("layers.0.k.channel_bits").dtype = DType::i8; }},
    {"NaN among the scores of blocks", "bad_input: ", "block_energy",
     [](EditableFile& f) { f.set_float("layers.0.k.block_energy", 2, kNan); }},
    {"widths without an allocation", "bad_input: ", "layers.1.k.channel_bits",
     [](EditableFile& f) { f.tensors["layers.1.k.channel_bits"] = f.tensors.at("layers.0.k.channel_bits"); }},
    {"an allocation of an unknown unit", "bad_input: ", "unit",
     [](EditableFile& f) { keys(f)["allocation"]["unit"] = "token"; }},
    {"a group size of mixed rows", "bad_input: ", "group_size", [](EditableFile& f) { keys(f)["group_size"] = 8; }},
    {"no group size of plain rows", "bad_input: ", "group_size",
     [](EditableFile& f) { plain_keys(f).erase("group_size"); }},
    {"bits that are not the largest width", "bad_input: ", "bits", [](EditableFile& f) { keys(f)["bits"] = 5; }},
    // Codebooks.
    {"a table that does not ascend", "bad_input: ", "codebook",
     [](EditableFile& f) { f.set_float("layers.1.k.codebook.3", 3, -50.0f); }},
    {"a table with two equal entries", "bad_input: ", "codebook",
     [](EditableFile& f) {
       auto& data = f.tensors.at("layers.1.k.codebook.3").data;
       std::memcpy(data.data() + 4, data.data(), 4);
     }},
    {"NaN in a table", "bad_input: ", "codebook",
     [](EditableFile& f) { f.set_float("layers.0.v.codebook.3", 3, kNan); }},
    {"a missing table", "bad_input: ", "layers.0.v.codebook.3",
     [](EditableFile& f) { f.tensors.erase("layers.0.v.codebook.3"); }},
    {"a superfluous table", "bad_input: ", "layers.1.k.codebook.2",
     [](EditableFile& f) { f.tensors["layers.1.k.codebook.2"] = f.tensors.at("layers.1.k.codebook.3"); }},
    {"a table of one head where each has one", "bad_input: ", "codebook",
     [](EditableFile& f) {
       f.tensors.at("layers.0.v.codebook.1").shape = {2};
       f.tensors.at("layers.0.v.codebook.1").data.resize(8);
     }},
    {"a width without a table", "bad_input: ", "",
     [](EditableFile& f) {
       values(f)["codebooks"]["bits"] = {1, 6};
       f.tensors.erase("layers.0.v.codebook.3");
     }},
    {"no codebooks", "bad_input: ", "codebook", [](EditableFile& f) { plain_keys(f).erase("codebooks"); }},
    {"a source of codebooks that is none", "bad_input: ", "source",
     [](EditableFile& f) { plain_keys(f)["codebooks"]["source"] = "guess"; }},
    {"a codebook with a rule of ranges", "bad_input: ", "minmax",
     [](EditableFile& f) { plain_keys(f)["scale_rule"] = "minmax"; }},
    {"symmetric with the rule rms", "bad_input: ", "rms",
     [](EditableFile& f) { f.manifest["layers"][2]["k"]["scale_rule"] = "rms"; }},
    // Trellises.
    {"no theta", "bad_input: ", "layers.1.v.trellis", [](EditableFile& f) { f.tensors.erase("layers.1.v.trellis"); }},
    {"theta too short", "bad_input: ", "trellis",
     [](EditableFile& f) {
       auto& tensor = f.tensors.at("layers.1.v.trellis");
       tensor.shape = {tensor.shape[0] - 1};
       tensor.data.resize(tensor.data.size() - 4);
     }},
    {"NaN in theta", "bad_input: ", "trellis", [](EditableFile& f) { f.set_float("layers.0.k.trellis", 0, kNan); }},
    {"another memory", "bad_input: ", "trellis", [](EditableFile& f) { plain_values(f)["trellis"][0]["memory"] = 4; }},
    {"a memory that is too much", "bad_input: ", "memory",
     [](EditableFile& f) { plain_values(f)["trellis"][0]["memory"] = 9; }},
    {"a trellis without trellises", "bad_input: ", "trellis",
     [](EditableFile& f) { plain_values(f).erase("trellis"); }},
    {"theta for a coder that has none", "bad_input: ", "layers.1.k.trellis",
     [](EditableFile& f) { f.tensors["layers.1.k.trellis"] = f.tensors.at("layers.1.v.trellis"); }},
    // Centroids.
    {"no centroids", "bad_input: ", "layers.0.k.centroids",
     [](EditableFile& f) { f.tensors.erase("layers.0.k.centroids"); }},
    {"fewer centroids than said", "bad_input: ", "centroids",
     [](EditableFile& f) { keys(f)["centroids"]["count"] = 4; }},
    {"one centroid", "bad_input: ", "count", [](EditableFile& f) { keys(f)["centroids"]["count"] = 1; }},
    {"NaN in a centroid", "bad_input: ", "centroids",
     [](EditableFile& f) { f.set_float("layers.0.k.centroids", 7, kNan); }},
    {"an inertia of one head", "bad_input: ", "inertia",
     [](EditableFile& f) { keys(f)["centroids"]["inertia"] = {0.5}; }},
    {"an unknown scope of centroids", "bad_input: ", "scope",
     [](EditableFile& f) { keys(f)["centroids"]["scope"] = "layer"; }},
    {"centroids that the plan does not name", "bad_input: ", "layers.1.v.centroids",
     [](EditableFile& f) { plain_values(f).erase("centroids"); }},
    {"row bytes of a plan with centroids", "bad_input: ", "layer 0 k: row_bytes: expected 8, found 12",
     [](EditableFile& f) { keys(f).erase("centroids"); }},
    {"a center beside centroids", "bad_input: ", "cent",
     [](EditableFile& f) {
       keys(f)["center"] = true;
       f.tensors["layers.0.k.center"] = {DType::f32, {2, 8}, std::vector<std::byte>(64)};
     }},
    {"a budget of an unknown unit", "bad_input: ", "unit",
     [](EditableFile& f) { f.manifest["calibration"]["budget"]["unit"] = "coins"; }},
};

}  // namespace

TEST_CASE("An artifact with everything of 1.1 reads back as it was written", "[artifact]") {
  const TempFolder folder;
  const Artifact artifact = featured_artifact();
  save_artifact(artifact, folder / "a");
  const Artifact back = load_artifact(folder / "a");
  check_equal(back, artifact);
  check_equal_features(back, artifact);
  CHECK(canonical_json(artifact_manifest(back)) == canonical_json(artifact_manifest(artifact)));
  for (const Check& check : verify_artifact(folder / "a")) CHECK(check.passed);
  save_artifact(artifact, folder / "b");
  save_artifact(back, folder / "c");
  CHECK(file_bytes(folder / "a") == file_bytes(folder / "b"));
  CHECK(file_bytes(folder / "a") == file_bytes(folder / "c"));
}

TEST_CASE("The tensors of 1.1 have the names, shapes and types of the format, and there are no others", "[artifact]") {
  const TempFolder folder;
  save_artifact(featured_artifact(), folder / "a");
  const EditableFile file = EditableFile::read(folder / "a");
  using Shape = std::vector<std::int64_t>;
  const std::map<std::string, std::pair<DType, Shape>> expected = {
      {"layers.0.k.block_bits", {DType::u8, {2, 4}}},     {"layers.0.k.block_energy", {DType::f32, {2, 4}}},
      {"layers.0.k.centroids", {DType::f32, {2, 3, 8}}},  {"layers.0.k.channel_bits", {DType::u8, {2, 8}}},
      {"layers.0.k.channel_order", {DType::u16, {2, 8}}}, {"layers.0.k.trellis", {DType::f32, {2 * 3 + 4 * 2}}},
      {"layers.0.v.channel_bits", {DType::u8, {2, 6}}},   {"layers.0.v.channel_order", {DType::u16, {2, 6}}},
      {"layers.0.v.codebook.1", {DType::f32, {2, 2}}},    {"layers.0.v.codebook.3", {DType::f32, {2, 8}}},
      {"layers.0.v.codebook.6", {DType::f32, {2, 64}}},   {"layers.1.k.codebook.3", {DType::f32, {8}}},
      {"layers.1.v.centroids", {DType::f32, {2, 2, 6}}},  {"layers.1.v.trellis", {DType::f32, {8}}}};
  CHECK(file.tensors.size() == expected.size());
  for (const auto& [name, what] : expected) {
    INFO(name);
    REQUIRE(file.tensors.count(name) == 1);
    CHECK(file.tensors.at(name).dtype == what.first);
    CHECK(file.tensors.at(name).shape == what.second);
  }
  CHECK(file.metadata.at("version") == "1.1");
  CHECK(file.metadata.at("requires") == "codebook,trellis,mixed_widths,centroids");
  CHECK(file.manifest.at("version") == "1.1");
  CHECK(file.manifest.at("requires") == Json{"codebook", "trellis", "mixed_widths", "centroids"});
}

TEST_CASE("A trellis that is searched in integers makes an artifact 1.5, and readers must know it", "[artifact]") {
  Artifact artifact = featured_artifact();
  std::get<TrellisCoder>(artifact.layers[0].k.coder).taps[1].search = TrellisSearch::integer;
  const Json manifest = artifact_manifest(artifact);
  CHECK(manifest.at("version") == "1.5");
  CHECK(manifest.at("requires") == Json{"codebook", "trellis", "mixed_widths", "centroids", "integer_search"});
  CHECK(manifest.at("layers")[0].at("k").at("trellis") ==
        Json{{{"bits", 2}, {"memory", 2}}, {{"bits", 4}, {"memory", 1}, {"search", "integer"}}});
  const TempFolder folder;
  save_artifact(artifact, folder / "a.safetensors");
  test::check_equal(load_artifact(folder / "a.safetensors"), artifact);
}

TEST_CASE("Caps and sinks make an artifact 1.3, and a cap is required of readers", "[artifact]") {
  Artifact artifact = featured_artifact();
  LayerGeometry& g = artifact.layers[0].geometry;
  g.sink_logits.assign(static_cast<std::size_t>(g.num_q_heads), 0.25);
  CHECK(artifact_manifest(artifact).at("version") == "1.3");
  CHECK(artifact_manifest(artifact).at("requires") == artifact_manifest(featured_artifact()).at("requires"));
  g.logit_softcap = 50.0;
  CHECK(artifact_manifest(artifact).at("requires").back() == "logit_softcapping");
  const TempFolder folder;
  save_artifact(artifact, folder / "a.safetensors");
  CHECK(load_artifact(folder / "a.safetensors").layers[0].geometry == g);
}

TEST_CASE("The manifest of 1.1 says in the words of the format what the plan says", "[artifact]") {
  const Json manifest = artifact_manifest(featured_artifact());
  const Json &k = manifest.at("layers").at(0).at("k"), &v = manifest.at("layers").at(0).at("v");
  CHECK(k.at("coder") == "trellis");
  CHECK(k.at("bits") == 4);
  CHECK_FALSE(k.contains("group_size"));
  CHECK(k.at("scale_rule") == "rms");
  CHECK(k.at("trellis") == Json{{{"bits", 2}, {"memory", 2}}, {{"bits", 4}, {"memory", 1}}});
  CHECK(k.at("centroids") == Json{{"count", 3}, {"scope", "joint"}, {"order", "after"}, {"inertia", {0.5, 0.25}}});
  CHECK(k.at("allocation").at("unit") == "rope_block");
  CHECK(k.at("allocation").at("score") == "energy");
  CHECK(k.at("allocation").at("objective") == 0.75);
  CHECK(k.at("allocation").at("free_objective") == 0.5);
  CHECK(k.at("allocation").at("mean_bits") == Approx((4 * 4 + 2 * 2 + 4 * 2 + 2 * 6) / 16.0));
  CHECK(k.at("allocation").at("row_bytes") == row_bytes(featured_artifact().layers[0].k, 8));
  CHECK(v.at("codebooks") == Json{{"bits", {1, 3, 6}}, {"per_head", true}, {"source", "fitted"}});
  CHECK(v.at("coder") == "codebook");
  const Json &plain = manifest.at("layers").at(1).at("k"), &values = manifest.at("layers").at(1).at("v");
  CHECK(plain.at("codebooks") == Json{{"bits", {3}}, {"per_head", false}, {"source", "sphere"}});
  CHECK(plain.at("group_size") == 4);
  CHECK(values.at("centroids").at("scope") == "kv_head");
  CHECK(values.at("centroids").at("order") == "before");
  CHECK(values.at("trellis") == Json{{{"bits", 2}, {"memory", 3}}});
  CHECK(manifest.at("calibration").at("budget").at("unit") == "bits");
}

TEST_CASE("Only the features that are used are required, in the order of the format", "[artifact]") {
  const TempFolder folder;
  const auto requires_of = [&](const std::function<void(Artifact&)>& change) {
    Artifact artifact = featured_artifact();
    change(artifact);
    save_artifact(artifact, folder / "a");
    load_artifact(folder / "a");
    const EditableFile file = EditableFile::read(folder / "a");
    CHECK(file.metadata.at("version") == (file.metadata.at("requires").empty() ? "1.0" : "1.1"));
    return file.metadata.at("requires");
  };
  const auto keep = [](std::size_t layer, Side side) {
    return [layer, side](Artifact& artifact) {
      LayerPlan plan = artifact.layers[layer];
      if (side == Side::k)
        plan.v->coder = ExactCoder{}, plan.v->allocation.reset(), plan.v->centroids.reset();
      else
        plan.k = TensorPlan{};
      artifact.layers = {plan};
    };
  };
  CHECK(requires_of(keep(0, Side::k)) == "trellis,mixed_widths,centroids");
  CHECK(requires_of(keep(0, Side::v)) == "codebook,mixed_widths");
  CHECK(requires_of(keep(1, Side::k)) == "codebook");
  CHECK(requires_of(keep(1, Side::v)) == "trellis,centroids");
  CHECK(requires_of(keep(2, Side::k)) == "");
  CHECK(features(featured_artifact().layers[0].k) == std::vector<std::string>{"trellis", "mixed_widths", "centroids"});
  CHECK(features(TensorPlan{}).empty());
}

TEST_CASE("An artifact without features of 1.1 is a file of 1.0", "[artifact]") {
  const TempFolder folder;
  save_artifact(example_artifact(), folder / "a");
  const EditableFile file = EditableFile::read(folder / "a");
  CHECK(file.metadata.at("version") == "1.0");
  CHECK(file.manifest.at("version") == "1.0");
  CHECK(file.metadata.at("requires").empty());
  CHECK(file.manifest.at("requires") == Json::array());
  CHECK_FALSE(file.manifest.at("calibration").contains("budget"));
  for (const Json& layer : file.manifest.at("layers"))
    for (const char* word : {"allocation", "codebooks", "trellis", "centroids"})
      CHECK_FALSE(layer.at("k").contains(word));
}

TEST_CASE("A faulty artifact of 1.1 is refused with the reason", "[artifact]") {
  const TempFolder folder;
  save_artifact(featured_artifact(), folder / "good");
  check_refused(kFaults, folder / "good", [](const auto& path) { load_artifact(path); });
}

TEST_CASE("A plan of 1.1 that is not valid is never written", "[artifact]") {
  const TempFolder folder;
  const auto saving = [&](const std::function<void(LayerPlan&)>& change) {
    Artifact artifact = featured_artifact();
    change(artifact.layers[0]);
    return error_text([&] { save_artifact(artifact, folder / "a"); });
  };
  CHECK_THAT(saving([](LayerPlan& p) { p.k.allocation->channel_bits[3] = 8; }), StartsWith("internal: "));
  CHECK_THAT(saving([](LayerPlan& p) { std::get<CodebookCoder>(p.v->coder).tables[3][2] = 9e9f; }),
             StartsWith("internal: "));
  CHECK_THAT(saving([](LayerPlan& p) { std::get<TrellisCoder>(p.k.coder).taps[0].theta[2] = kNan; }),
             StartsWith("internal: "));
  CHECK_THAT(saving([](LayerPlan& p) { p.k.centroids->values.pop_back(); }), StartsWith("internal: "));
  CHECK_THAT(saving([](LayerPlan& p) { p.k.allocation->objective = std::nan(""); }), StartsWith("internal: "));
  CHECK_THAT(saving([](LayerPlan& p) { p.k.centroids->inertia[0] = HUGE_VAL; }), StartsWith("internal: "));
  CHECK_FALSE(std::filesystem::exists(folder / "a"));
}

TEST_CASE("The baseline of errors and errors on held-out tokens make a file of 1.3", "[artifact]") {
  const TempFolder folder;
  Artifact artifact = example_artifact();
  artifact.layers[0].k.error = FitError{"query_weighted", 0.25, 0.1, BaselineCodes{.bits = 2, .group_size = 8}};
  save_artifact(artifact, folder / "baseline");
  const EditableFile file = EditableFile::read(folder / "baseline");
  CHECK(file.metadata.at("version") == "1.3");
  CHECK(file.metadata.at("requires").empty());
  CHECK(file.manifest.at("layers").at(0).at("k").at("error").at("baseline") == Json{{"bits", 2}, {"group_size", 8}});
  CHECK(load_artifact(folder / "baseline").layers[0].k.error->baseline == BaselineCodes{.bits = 2, .group_size = 8});
  artifact = example_artifact();
  artifact.calibration.held_out = {{"tokens", 100}, {"output_error", 0.125}, {"baseline_error", 0.25}};
  save_artifact(artifact, folder / "held_out");
  CHECK(EditableFile::read(folder / "held_out").metadata.at("version") == "1.3");
  CHECK(load_artifact(folder / "held_out").calibration.held_out == artifact.calibration.held_out);
}

TEST_CASE("A baseline outside its ranges is refused", "[artifact]") {
  const TempFolder folder;
  Artifact artifact = example_artifact();
  artifact.layers[0].k.error = FitError{"query_weighted", 0.25, 0.1, BaselineCodes{.bits = 2, .group_size = 8}};
  save_artifact(artifact, folder / "a");
  EditableFile file = EditableFile::read(folder / "a");
  file.manifest["layers"][0]["k"]["error"]["baseline"]["bits"] = 9;
  file.write(folder / "b");
  CHECK_THAT(error_text([&] { load_artifact(folder / "b"); }), StartsWith("bad_input: "));
}
