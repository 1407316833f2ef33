#include <kvq/artifact/artifact.h>

#include "support/artifacts.h"
#include "support/container_edit.h"
#include "support/error_of.h"
#include "support/file_faults.h"
#include "support/temp_folder.h"

#include <catch2/catch.hpp>

#include <limits>

using namespace kvq;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;
using test::EditableFile;

namespace {

Json& keys(EditableFile& file) { return file.manifest["layers"][0]["k"]; }
Json& values(EditableFile& file) { return file.manifest["layers"][0]["v"]; }
Json& geometry(EditableFile& file) { return file.manifest["layers"][0]["geometry"]; }

const test::FileFault kFaults[] = {
    // The file itself.
    {"another format", "bad_input: ", "kvq-stats", [](EditableFile& f) { f.metadata["format"] = "kvq-stats"; }},
    {"no version", "bad_input: ", "version", [](EditableFile& f) { f.metadata.erase("version"); }},
    {"a version that is none", "bad_input: ", "version", [](EditableFile& f) { f.metadata["version"] = "one"; }},
    {"a higher major version", "unsupported: ", "2.0",
     [](EditableFile& f) { f.metadata["version"] = f.manifest["version"] = "2.0"; }},
    {"an unknown required feature", "unsupported: ", "codebooks",
     [](EditableFile& f) {
       f.metadata["requires"] = "codebooks";
       f.manifest["requires"] = {"codebooks"};
     }},
    {"two unknown features", "unsupported: ", "codebooks",
     [](EditableFile& f) { f.metadata["requires"] = "codebooks,zigzag"; }},
    // Tensors.
    {"a missing rotation", "bad_input: ", "layers.0.k.rotation",
     [](EditableFile& f) { f.tensors.erase("layers.0.k.rotation"); }},
    {"missing signs", "bad_input: ", "layers.0.v.hadamard_signs",
     [](EditableFile& f) { f.tensors.erase("layers.0.v.hadamard_signs"); }},
    {"a missing center", "bad_input: ", "layers.0.k.center",
     [](EditableFile& f) { f.tensors.erase("layers.0.k.center"); }},
    {"a missing spectrum", "bad_input: ", "layers.4.k.spectrum",
     [](EditableFile& f) { f.tensors.erase("layers.4.k.spectrum"); }},
    {"a superfluous tensor", "bad_input: ", "layers.1.k.rotation",
     [](EditableFile& f) { f.tensors["layers.1.k.rotation"] = f.tensors.at("layers.0.k.rotation"); }},
    {"a tensor of no layer", "bad_input: ", "secret",
     [](EditableFile& f) { f.tensors["secret"] = f.tensors.at("layers.0.k.center"); }},
    {"a golden tensor of nothing", "bad_input: ", "golden.rows",
     [](EditableFile& f) { f.tensors["golden.rows"] = f.tensors.at("layers.0.k.center"); }},
    {"a golden tensor of no layer", "bad_input: ", "evil.golden.rows",
     [](EditableFile& f) { f.tensors["evil.golden.rows"] = f.tensors.at("layers.0.k.center"); }},
    {"a center that the plan does not name", "bad_input: ", "layers.0.k.center",
     [](EditableFile& f) { keys(f)["center"] = false; }},
    {"a rotation of another shape", "bad_input: ", "layers.0.k.rotation",
     [](EditableFile& f) { f.tensors.at("layers.0.k.rotation").shape = {2, 64}; }},
    {"a rotation for one head", "bad_input: ", "layers.0.k.rotation",
     [](EditableFile& f) { f.tensors["layers.0.k.rotation"] = f.tensors.at("layers.4.k.rotation"); }},
    {"signs of another type", "bad_input: ", "layers.0.v.hadamard_signs",
     [](EditableFile& f) { f.tensors.at("layers.0.v.hadamard_signs").dtype = DType::u8; }},
    {"a sign of zero", "bad_input: ", "hadamard_signs",
     [](EditableFile& f) { f.tensors.at("layers.0.v.hadamard_signs").data[3] = std::byte{0}; }},
    {"NaN in a rotation", "bad_input: ", "rotation",
     [](EditableFile& f) { f.set_float("layers.0.k.rotation", 9, std::numeric_limits<float>::quiet_NaN()); }},
    {"infinity in a center", "bad_input: ", "center",
     [](EditableFile& f) { f.set_float("layers.0.k.center", 9, std::numeric_limits<float>::infinity()); }},
    {"NaN in a spectrum", "bad_input: ", "spectrum",
     [](EditableFile& f) { f.set_float("layers.4.k.spectrum", 0, std::numeric_limits<float>::quiet_NaN()); }},
    {"NaN in an eigenbasis", "bad_input: ", "eigenbasis",
     [](EditableFile& f) { f.set_float("layers.4.k.eigenbasis", 0, std::numeric_limits<float>::quiet_NaN()); }},
    // The plan.
    {"a group size that does not divide", "bad_input: ", "group_size",
     [](EditableFile& f) { keys(f)["group_size"] = 3; }},
    {"a group size above the dimension", "bad_input: ", "group_size",
     [](EditableFile& f) { values(f)["group_size"] = 8; }},
    {"no group size", "bad_input: ", "group_size", [](EditableFile& f) { keys(f).erase("group_size"); }},
    {"a clip of zero", "bad_input: ", "clip_ratio", [](EditableFile& f) { keys(f)["clip_ratio"][0] = 0; }},
    {"a clip above one", "bad_input: ", "clip_ratio", [](EditableFile& f) { keys(f)["clip_ratio"][0] = 1.1; }},
    {"a clip for one head", "bad_input: ", "clip_ratio", [](EditableFile& f) { keys(f)["clip_ratio"] = {1.0}; }},
    {"no clip", "bad_input: ", "clip_ratio", [](EditableFile& f) { keys(f).erase("clip_ratio"); }},
    {"a clip of a rule without range", "bad_input: ", "clip_ratio",
     [](EditableFile& f) { values(f)["clip_ratio"] = {1.0, 1.0}; }},
    {"nine bits", "bad_input: ", "bits", [](EditableFile& f) { keys(f)["bits"] = 9; }},
    {"no bits", "bad_input: ", "bits", [](EditableFile& f) { keys(f)["bits"] = 0; }},
    {"half a bit", "bad_input: ", "bits", [](EditableFile& f) { keys(f)["bits"] = 2.5; }},
    {"exact in four bits", "bad_input: ", "bits", [](EditableFile& f) { f.manifest["layers"][1]["k"]["bits"] = 4; }},
    {"an unknown coder", "bad_input: ", "coder", [](EditableFile& f) { keys(f)["coder"] = "codebook"; }},
    {"an unknown number type", "bad_input: ", "scale_type", [](EditableFile& f) { keys(f)["scale_type"] = "fp8"; }},
    {"affine with a symmetric rule", "bad_input: ", "scale_rule",
     [](EditableFile& f) { keys(f)["scale_rule"] = "norm"; }},
    {"affine without a zero", "bad_input: ", "zero", [](EditableFile& f) { keys(f).erase("zero"); }},
    {"an unknown rotation", "bad_input: ", "kind", [](EditableFile& f) { keys(f)["rotation"]["kind"] = "givens"; }},
    {"an order that is no power of two", "bad_input: ", "order",
     [](EditableFile& f) { values(f)["rotation"]["order"] = 3; }},
    {"a block Hadamard without order", "bad_input: ", "order",
     [](EditableFile& f) { values(f)["rotation"].erase("order"); }},
    {"sign choices for one head", "bad_input: ", "sign_choice",
     [](EditableFile& f) { keys(f)["rotation"]["sign_choice"] = {"canonical"}; }},
    {"an unknown metric", "bad_input: ", "metric", [](EditableFile& f) { keys(f)["error"]["metric"] = "vibes"; }},
    // Layers and model.
    {"no layers", "bad_input: ", "layers", [](EditableFile& f) { f.manifest["layers"] = Json::array(); }},
    {"layers out of order", "bad_input: ", "layer",
     [](EditableFile& f) { std::swap(f.manifest["layers"][0], f.manifest["layers"][1]); }},
    {"a layer beyond the model", "bad_input: ", "", [](EditableFile& f) { f.manifest["model"]["num_layers"] = 4; }},
    {"a fingerprint that is none", "bad_input: ", "fingerprint",
     [](EditableFile& f) { f.manifest["model"]["fingerprint"] = "abc"; }},
    {"a dump hash that is none", "bad_input: ", "hash",
     [](EditableFile& f) { f.manifest["calibration"]["dump"]["hash"] = "sha1:00"; }},
    {"a negative window", "bad_input: ", "sink_tokens",
     [](EditableFile& f) { f.manifest["windows"]["sink_tokens"] = -1; }},
    {"no windows", "bad_input: ", "windows", [](EditableFile& f) { f.manifest.erase("windows"); }},
    {"heads that do not divide", "bad_input: ", "num_q_heads", [](EditableFile& f) { geometry(f)["num_q_heads"] = 5; }},
    {"a softmax scale of zero", "bad_input: ", "softmax_scale",
     [](EditableFile& f) { geometry(f)["softmax_scale"] = 0; }},
    {"a rotary slice outside the head", "bad_input: ", "rotary",
     [](EditableFile& f) { geometry(f)["rope"]["offset"] = 5; }},
    {"too few rotary frequencies", "bad_input: ", "inv_freq",
     [](EditableFile& f) { geometry(f)["rope"]["inv_freq"] = {1.0}; }},
    {"an odd rotary slice", "bad_input: ", "rotary", [](EditableFile& f) { geometry(f)["rope"]["dim"] = 3; }},
};

}  // namespace

TEST_CASE("A faulty artifact is refused with the reason", "[artifact]") {
  const test::TempFolder folder;
  save_artifact(test::example_artifact(), folder / "good");
  test::check_refused(kFaults, folder / "good", [](const auto& path) { load_artifact(path); });
}

TEST_CASE("A manifest that is missing or no JSON is refused", "[artifact]") {
  const test::TempFolder folder;
  for (const char* text : {"", "{", "[]", "{\"a\":1,\"a\":2}", "null"}) {
    SafetensorsWriter writer;
    writer.set_metadata("format", "kvq-artifact");
    writer.set_metadata("version", "1.0");
    writer.set_metadata("requires", "");
    if (*text) writer.set_metadata("kvq.manifest", text);
    writer.write(folder / "bad");
    CHECK_THAT(test::error_text([&] { load_artifact(folder / "bad"); }),
               StartsWith("bad_input: ") && Contains("manifest"));
  }
}
