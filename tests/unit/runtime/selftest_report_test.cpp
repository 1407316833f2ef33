#include "selftest/report.h"

#include "support/container_edit.h"

#include <kvq/runtime.hpp>

#include <catch2/catch.hpp>

#include <cstdio>
#include <sstream>

using namespace kvq;
using Catch::Matchers::Contains;
using Catch::Matchers::EndsWith;

namespace {

SelftestReport::Layer layer(int index, kvq_status write, kvq_status decode, const std::string& message = "") {
  auto r = runtime::init<kvq_selftest_layer>();
  r.layer = index, r.write_status = write, r.decode_status = decode;
  r.status = write == KVQ_MISMATCH || decode == KVQ_MISMATCH ? KVQ_MISMATCH : write == KVQ_OK ? decode : write;
  if (write != KVQ_UNSUPPORTED) r.rows = 128, r.firm_rows = 120, r.firm_faults = write == KVQ_OK ? 0 : 2;
  if (decode != KVQ_UNSUPPORTED) r.output_error = 0.00321;
  std::snprintf(r.message, sizeof r.message, "%s", message.c_str());
  return {"u2g128", "u2g128", r};
}

SelftestReport report(std::vector<SelftestReport::Layer> layers) {
  return {
      .artifact = "a.safetensors",
      .model = "tiny",
      .method = "oscar",
      .device = 1,
      .gpu = "Some GPU",
      .page_size = 32,
      .layers = std::move(layers),
  };
}

Json schema() {
  const std::string path = KVQ_SOURCE_DIR "/formats/selftest.schema.json";
  return parse_json(test::file_bytes(path), path);
}

}  // namespace

TEST_CASE("A self-test passes only if every layer was run and passed", "[runtime]") {
  CHECK(report({layer(0, KVQ_OK, KVQ_OK), layer(1, KVQ_OK, KVQ_OK)}).status() == KVQ_OK);
  CHECK(report({layer(0, KVQ_OK, KVQ_OK), layer(1, KVQ_OK, KVQ_UNSUPPORTED)}).status() == KVQ_UNSUPPORTED);
  CHECK(report({layer(0, KVQ_UNSUPPORTED, KVQ_OK), layer(1, KVQ_OK, KVQ_MISMATCH)}).status() == KVQ_MISMATCH);
}

TEST_CASE("The self-test's table says what was compared, and each message once", "[runtime]") {
  const std::string text = text_of(report({layer(0, KVQ_OK, KVQ_OK), layer(3, KVQ_MISMATCH, KVQ_OK, "k of token 7"),
                                           layer(4, KVQ_UNSUPPORTED, KVQ_UNSUPPORTED, "no kernel"),
                                           layer(5, KVQ_UNSUPPORTED, KVQ_UNSUPPORTED, "no kernel")}));
  CHECK(text ==
        "tiny, oscar: golden rows on Some GPU (device 1), bf16, pages of 32 tokens\n"
        "\n"
        "layer  keys    values  write    rows  firm  wrong  decode    error\n"
        "    0  u2g128  u2g128  ok        128   120      0  ok       0.0032\n"
        "    3  u2g128  u2g128  FAILED    128   120      2  ok       0.0032\n"
        "    4  u2g128  u2g128  not run     -     -      -  not run       -\n"
        "    5  u2g128  u2g128  not run     -     -      -  not run       -\n"
        "\n"
        "layer 3: k of token 7\n"
        "layers 4, 5: no kernel\n"
        "\n"
        "1 of 4 layers passed, 1 failed, 2 not run\n");
}

TEST_CASE("Long messages of a self-test are broken between words", "[runtime]") {
  std::string message;
  for (int i = 0; i < 40; ++i) message += "word ";
  const std::string text = text_of(report({layer(0, KVQ_OK, KVQ_UNSUPPORTED, message)}));
  CHECK_THAT(text, Contains("\nlayer 0: word ") && Contains("\n   word ") &&
                       EndsWith("\n0 of 1 layer passed, 0 failed, 1 not run\n"));
  std::istringstream lines(text);
  std::size_t words = 0;
  for (std::string line; std::getline(lines, line);) {
    CHECK(line.size() <= 80);
    for (std::size_t at = line.find("word"); at != std::string::npos; at = line.find("word", at + 1)) ++words;
  }
  CHECK(words == 40);
}

TEST_CASE("The self-test's document is as its schema says", "[runtime]") {
  SelftestReport all = report({layer(0, KVQ_OK, KVQ_OK), layer(3, KVQ_MISMATCH, KVQ_OK, "k of token 7"),
                               layer(4, KVQ_UNSUPPORTED, KVQ_UNSUPPORTED, "no kernel")});
  all.layers.back().k = all.layers.back().v = "";
  const Json document = json_of(all);
  check_schema(document, schema(), "document");
  CHECK(document.at("status") == "mismatch");
  CHECK(document.at("activation") == "bf16");
  all.bf16 = false;
  CHECK(json_of(all).at("activation") == "fp16");
  CHECK(document.at("layers").at(1).at("write").at("firm_faults") == 2);
  CHECK(document.at("layers").at(1).at("message") == "k of token 7");
  CHECK_FALSE(document.at("layers").at(2).at("write").contains("rows"));
  CHECK_FALSE(document.at("layers").at(2).contains("k"));
  Json wrong = document;
  wrong["layers"][0]["status"] = "passed";
  CHECK_THROWS_WITH(check_schema(wrong, schema(), "document"), Contains("document"));
}
