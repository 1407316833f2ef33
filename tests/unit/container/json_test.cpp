#include <kvq/container/json.h>

#include "support/error_of.h"

#include <rapidcheck/catch.h>
#include <catch2/catch.hpp>

#include <bit>
#include <charconv>
#include <cmath>
#include <limits>
#include <string>

using namespace kvq;
using Catch::Matchers::Contains;
using test::error_text;

namespace {

std::string parse_fault(std::string_view text, const JsonLimits& limits = {}) {
  return error_text([&] { parse_json(text, "a.json", limits); });
}

rc::Gen<Json> json_value(int depth) {
  using rc::gen::map;
  const auto text =
      map(rc::gen::container<std::string>(rc::gen::inRange(char{1}, char{127})), [](std::string s) { return Json(s); });
  const auto number = map(rc::gen::arbitrary<std::uint64_t>(), [](std::uint64_t bits) {
    const double value = std::bit_cast<double>(bits);
    return std::isfinite(value) ? Json(value) : Json(bits);
  });
  const auto integer = map(rc::gen::arbitrary<std::int64_t>(), [](std::int64_t value) { return Json(value); });
  const auto leaf = rc::gen::oneOf(text, number, integer, rc::gen::element(Json(true), Json(false), Json(nullptr)));
  if (depth == 0) return leaf;
  const auto child = rc::gen::resize(4, json_value(depth - 1));
  const auto array = map(rc::gen::container<std::vector<Json>>(child), [](std::vector<Json> v) { return Json(v); });
  const auto object = map(rc::gen::container<std::map<std::string, Json>>(
                              rc::gen::container<std::string>(rc::gen::inRange('a', 'f')), child),
                          [](std::map<std::string, Json> m) { return Json(m); });
  return rc::gen::oneOf(leaf, array, object);
}

}  // namespace

TEST_CASE("Strict JSON is parsed", "[container]") {
  const Json value = parse_json(R"( {"a": [1, -2, 2.5, "\u00e9\n", true, null], "b": {}} )", "a.json");
  CHECK(value["a"][0] == 1);
  CHECK(value["a"][1] == -2);
  CHECK(value["a"][2] == 2.5);
  CHECK(value["a"][3] == "\xc3\xa9\n");
  CHECK(value["b"].is_object());
}

TEST_CASE("What is not strict JSON is refused with its place", "[container]") {
  for (const char* text :
       {"",    "{",   "[1,]",     "{\"a\":1,}",       "{'a':1}",     "// c\n1", "/* c */ 1", "NaN",    "Infinity",
        "01",  "1 2", "\"\xff\"", "\"\xed\xa0\x80\"", "\"\\ud800\"", "\"\t\"",  "1e999",     "-1e999", "\xef\xbb\xbf{}",
        "[1}", "tru"}) {
    INFO(text);
    CHECK_THAT(parse_fault(text), Catch::Matchers::StartsWith("bad_input: a.json: not valid JSON"));
  }
  using namespace std::string_view_literals;
  CHECK_THAT(parse_fault("{}\0{"sv), Contains("not valid JSON at byte 3: zero byte"));
}

TEST_CASE("A message about JSON is one short printable line, whatever the input", "[container]") {
  const std::string fault = parse_fault("\"" + std::string(100'000, 'x') + "\n\x1b[2J");
  CHECK(fault.size() < 400);
  CHECK_THAT(fault, !Contains("\n") && !Contains("\x1b"));
}

TEST_CASE("Duplicate keys are refused at any depth", "[container]") {
  CHECK_THAT(parse_fault(R"({"a":1,"b":{"c":1,"c":1}})"), Contains("the key 'c' appears twice"));
  CHECK(parse_fault(R"({"a":{"c":1},"b":{"c":1}})") == "no error");
}

TEST_CASE("The limits of JSON are exact", "[container]") {
  CHECK(parse_fault("[[[]]]", {.max_depth = 3}) == "no error");
  CHECK_THAT(parse_fault("[[[]]]", {.max_depth = 2}), Contains("nested deeper than 2 levels"));
  CHECK_THAT(parse_fault(std::string(1'000'000, '[')), Contains("nested deeper than 64 levels"));
  CHECK(parse_fault("[1,2]", {.max_bytes = 5}) == "no error");
  CHECK_THAT(parse_fault("[1,2]", {.max_bytes = 4}), Contains("JSON of 5 bytes, expected at most 4"));
  CHECK(parse_fault("[1,2]", {.max_values = 3}) == "no error");
  CHECK_THAT(parse_fault("[1,2]", {.max_values = 2}), Contains("more than 2 values"));
}

TEST_CASE("Canonical JSON is what Python's json.dumps writes", "[container]") {
  const std::pair<double, const char*> numbers[] = {{0.0, "0.0"},
                                                    {-0.0, "-0.0"},
                                                    {1.0, "1.0"},
                                                    {-2.5, "-2.5"},
                                                    {0.1, "0.1"},
                                                    {100000.0, "100000.0"},
                                                    {1e15, "1000000000000000.0"},
                                                    {1e16, "1e+16"},
                                                    {1.5e16, "1.5e+16"},
                                                    {0.0001, "0.0001"},
                                                    {0.00001, "1e-05"},
                                                    {1.25e-7, "1.25e-07"},
                                                    {5e-324, "5e-324"},
                                                    {1.7976931348623157e308, "1.7976931348623157e+308"},
                                                    {123456789.125, "123456789.125"},
                                                    {2.0 / 3.0, "0.6666666666666666"}};
  for (const auto& [value, text] : numbers) CHECK(canonical_json(Json(value)) == text);
  CHECK(canonical_json(parse_json(R"({ "b" : [ 1 , 2.50 ], "a" : { }, "c" : [ ], "B": "\u00e9\u0001\"\\\/" })", "x")) ==
        "{\"B\":\"\xc3\xa9\\u0001\\\"\\\\/\",\"a\":{},\"b\":[1,2.5],\"c\":[]}");
}

TEST_CASE("Canonical JSON refuses what has no JSON text", "[container]") {
  CHECK_THAT(error_text([] { canonical_json(Json(std::numeric_limits<double>::quiet_NaN())); }), Contains("internal:"));
  CHECK_THAT(error_text([] { canonical_json(Json({std::numeric_limits<double>::infinity()})); }),
             Contains("internal:"));
  CHECK_THAT(error_text([] { canonical_json(Json("\xff")); }), Contains("internal:"));
}

TEST_CASE("Canonical JSON reads back as the same value and the same text", "[container][property]") {
  rc::prop("parse(canonical(x)) == x", [] {
    const Json value = *json_value(3);
    const std::string text = canonical_json(value);
    const Json again = parse_json(text, "x");
    RC_ASSERT(again == value);
    RC_ASSERT(canonical_json(again) == text);
  });
  rc::prop("numbers keep every bit and are as short as std::to_chars makes them", [](std::uint64_t bits) {
    const double value = std::bit_cast<double>(bits);
    RC_PRE(std::isfinite(value));
    const std::string text = canonical_json(Json(value));
    RC_ASSERT(std::bit_cast<std::uint64_t>(parse_json(text, "x").get<double>()) == bits);
  });
}

TEST_CASE("Bytes that were changed at random parse or are refused, and nothing else", "[container][property]") {
  rc::prop("no crash", [](const std::vector<std::pair<std::uint16_t, char>>& changes) {
    std::string text =
        R"({"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":[1e5,-0.25,"\u00e9",null,true]})";
    for (const auto& [where, what] : changes) text[where % text.size()] = what;
    const auto error = test::error_of([&] { parse_json(text, "x"); });
    const bool is_clean = !error || error->kind() == ErrorKind::bad_input;  // RC_ASSERT does not short-circuit
    RC_ASSERT(is_clean);
  });
}

TEST_CASE("A schema's faults are named by path, rule and what was found", "[container]") {
  const Json schema =
      parse_json(R"({"type": "object", "required": ["layers"], "additionalProperties": false, "properties": {
      "layers": {"type": "array", "items": {"$ref": "#/definitions/layer"}}}, "definitions": {"layer": {
      "type": "object", "properties": {"bits": {"type": "integer", "minimum": 1, "maximum": 16},
      "kind": {"enum": ["gqa", "mla_rope"]}, "hash": {"type": "string", "pattern": "^[0-9a-f]{4}$"}}}}})",
                 "schema");
  const auto fault = [&](const char* text) {
    return error_text([&] { check_schema(parse_json(text, "x"), schema, "a.json"); });
  };
  CHECK(fault(R"({"layers":[{"bits":4,"kind":"gqa","hash":"12ef"}]})") == "no error");
  CHECK_THAT(fault("{}"), Contains("bad_input: a.json: the document: Missing required property 'layers'"));
  CHECK_THAT(fault("3"), Contains("a.json: the document, found 3: "));
  CHECK_THAT(fault(R"({"layers":[{},{"bits":"four"}]})"), Contains("layers/1/bits, found \"four\": Value type"));
  CHECK_THAT(fault(R"({"layers":[{"bits":17}]})"),
             Contains("layers/0/bits, found 17: Expected number less than or equal to 16"));
  CHECK_THAT(fault(R"({"layers":[{"kind":"x"}]})"),
             Contains("layers/0/kind, found \"x\": Failed to match against any enum"));
  CHECK_THAT(fault(R"({"layers":[{"hash":"12eg"}]})"), Contains("layers/0/hash"));
  CHECK_THAT(fault(R"({"layers":[], "more": 1})"), Contains("more"));
  CHECK_THAT(fault((R"({"layers":[{"hash":")" + std::string(1'000'000, '1') + R"("}]})").c_str()),
             Contains("layers/0/hash"));
}

TEST_CASE("A schema that could overflow the stack is a bug", "[container]") {
  const Json value = Json::object();
  const Json unbounded = {{"properties", {{"a", {{"pattern", "^a*$"}}}}}};
  CHECK_THAT(error_text([&] { check_schema(value, unbounded, "a.json"); }), Contains("internal:") && Contains("{0,n}"));
  const Json named = {{"patternProperties", {{"^x+$", true}}}};
  CHECK_THAT(error_text([&] { check_schema(value, named, "a.json"); }), Contains("internal:"));
}
