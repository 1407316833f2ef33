#include <kvq/container/json.h>
#include <kvq/container/safetensors.h>

#include "support/container_edit.h"
#include "support/error_of.h"
#include "support/temp_folder.h"

#include <rapidcheck/catch.h>
#include <catch2/catch.hpp>

#include <sys/stat.h>
#include <xxhash.h>

#include <cstring>
#include <numeric>
#include <string>

using namespace kvq;
using Catch::Matchers::Contains;
using test::error_text;
using test::TempFolder;

namespace {

std::span<const std::byte> as_bytes(const std::string& text) { return std::as_bytes(std::span(text)); }

std::string with_header(const std::string& header, const std::string& data) {
  const std::uint64_t length = header.size();
  std::string file(8, '\0');
  std::memcpy(file.data(), &length, 8);
  return file + header + data;
}

SafetensorsWriter example() {
  SafetensorsWriter writer;
  writer.add<float>("z", {2, 2}, std::vector<float>{1, 2, 3, 4});
  writer.add<double>("f64", {1}, std::vector<double>{0.1});
  writer.add<std::int8_t>("a", {3}, std::vector<std::int8_t>{-1, 1, -128});
  writer.add<std::uint8_t>("u8", {1}, std::vector<std::uint8_t>{255});
  writer.add<std::uint16_t>("u16", {1}, std::vector<std::uint16_t>{65535});
  writer.add<std::int64_t>("scalar", {}, std::vector<std::int64_t>{-7});
  writer.add<float>("nothing", {0, 5}, std::span<const float>{});
  writer.set_metadata("format", "test");
  return writer;
}

/// Tensors with random names, types, shapes and bytes.
struct AnyTensor {
  std::string name;
  DType dtype;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> data;
};

rc::Gen<AnyTensor> any_tensor() {
  return rc::gen::exec([] {
    AnyTensor tensor;
    tensor.name = *rc::gen::container<std::string>(rc::gen::inRange(char{1}, char{127}));
    tensor.dtype = *rc::gen::element(DType::f16, DType::bf16, DType::f32, DType::f64, DType::i8, DType::u8, DType::u16,
                                     DType::i64);
    tensor.shape =
        *rc::gen::resize(3, rc::gen::container<std::vector<std::int64_t>>(rc::gen::inRange<std::int64_t>(0, 6)));
    const auto count = std::accumulate(tensor.shape.begin(), tensor.shape.end(), std::int64_t{1}, std::multiplies<>());
    tensor.data = *rc::gen::container<std::vector<std::byte>>(
        static_cast<std::size_t>(count) * size_of(tensor.dtype),
        rc::gen::map(rc::gen::arbitrary<std::uint8_t>(), [](std::uint8_t value) { return std::byte{value}; }));
    return tensor;
  });
}

}  // namespace

TEST_CASE("A tensor shown in pieces is written as one that was copied", "[container]") {
  const TempFolder folder;
  const std::vector<double> values{1.0, -2.5, 3.0, 0.0, 7.0, 9.5};
  const std::span<const double> all(values);
  SafetensorsWriter copied, shown;
  copied.add<double>("x", {2, 3}, all);
  copied.add<double>("empty", {0, 3}, {});
  shown.add_view("x", DType::f64, {2, 3},
                 {std::as_bytes(all.first(1)), {}, std::as_bytes(all.subspan(1, 4)), std::as_bytes(all.last(1))});
  shown.add_view("empty", DType::f64, {0, 3}, {});
  CHECK(copied.content_hash("m") == shown.content_hash("m"));
  copied.write(folder / "copied");
  const SafetensorsWriter moved = std::move(shown);
  moved.write(folder / "shown");
  CHECK(SafetensorsFile::open(folder / "shown").read<double>("x", {2, 3}) == values);
  CHECK(test::file_bytes(folder / "copied") == test::file_bytes(folder / "shown"));
}

TEST_CASE("What was written reads back", "[container]") {
  const TempFolder folder;
  example().write(folder / "a.safetensors");
  const auto file = SafetensorsFile::open(folder / "a.safetensors");
  CHECK(file.name() == (folder / "a.safetensors").string());
  CHECK(file.metadata() == std::map<std::string, std::string>{{"format", "test"}});
  CHECK(file.tensors().size() == 7);
  CHECK(file.read<float>("z", {2, -1}) == std::vector<float>{1, 2, 3, 4});
  CHECK(file.read<double>("f64", {1}) == std::vector<double>{0.1});
  CHECK(file.read<std::int8_t>("a", {-1}) == std::vector<std::int8_t>{-1, 1, -128});
  CHECK(file.read<std::uint8_t>("u8", {1}) == std::vector<std::uint8_t>{255});
  CHECK(file.read<std::uint16_t>("u16", {1}) == std::vector<std::uint16_t>{65535});
  CHECK(file.read<std::int64_t>("scalar", {}) == std::vector<std::int64_t>{-7});
  CHECK(file.read<float>("nothing", {0, 5}).empty());
  CHECK(file.info("z").count() == 4);
  CHECK(file.bytes("z").size() == 16);
  CHECK(file.has("z"));
  CHECK_FALSE(file.has("zz"));
}

TEST_CASE("The layout is the one of formats/artifact.md: sorted, packed, padded to 8", "[container]") {
  const TempFolder folder;
  SafetensorsWriter writer;
  writer.add<std::int8_t>("b", {1}, std::vector<std::int8_t>{2});
  writer.add<std::int8_t>("a", {3}, std::vector<std::int8_t>{1, 1, 1});
  writer.set_metadata("k", "v");
  writer.write(folder / "a.safetensors");
  const std::string header = R"({"__metadata__":{"k":"v"},"a":{"data_offsets":[0,3],"dtype":"I8","shape":[3]},)"
                             R"("b":{"data_offsets":[3,4],"dtype":"I8","shape":[1]}})";
  const std::string padding((8 - header.size() % 8) % 8, ' ');
  CHECK(test::file_bytes(folder / "a.safetensors") == with_header(header + padding, "\x01\x01\x01\x02"));
}

TEST_CASE("Without tensors and metadata a file is a header only", "[container]") {
  const TempFolder folder;
  SafetensorsWriter().write(folder / "a.safetensors");
  CHECK(test::file_bytes(folder / "a.safetensors") == with_header("{}      ", ""));
  CHECK(SafetensorsFile::open(folder / "a.safetensors").tensors().empty());
}

TEST_CASE("Tensors may stand in any order and need no alignment", "[container]") {
  const std::string header =
      R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[1,5]},"y":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  std::string data(5, '\0');
  const float value = 1.5f;
  std::memcpy(data.data() + 1, &value, 4);
  const auto file = SafetensorsFile::parse(as_bytes(with_header(header, data)), "memory");
  CHECK(file.read<float>("x", {1}) == std::vector<float>{1.5f});
}

TEST_CASE("A dtype of other programs is named with its tensor", "[container]") {
  const std::string header = R"({"layers.3.mask":{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]}})";
  CHECK_THAT(error_text([&] { SafetensorsFile::parse(as_bytes(with_header(header, "x")), "m"); }),
             Contains("unsupported: m: tensor 'layers.3.mask': dtype 'BOOL' is not supported, expected one of F16"));
}

TEST_CASE("A wrong expectation names expected and found", "[container]") {
  const TempFolder folder;
  example().write(folder / "a.safetensors");
  const auto file = SafetensorsFile::open(folder / "a.safetensors");
  CHECK_THAT(error_text([&] { file.read<double>("z", {-1, 3}); }),
             Contains("bad_input:") && Contains("a.safetensors: tensor 'z': expected F64 [any, 3], found F32 [2, 2]"));
  CHECK_THAT(error_text([&] { file.read<float>("z", {4}); }), Contains("expected F32 [4], found F32 [2, 2]"));
  CHECK_THAT(error_text([&] { file.read<float>("y", {4}); }), Contains("there is no tensor 'y'"));
  CHECK_THAT(error_text([&] { file.bytes("y"); }), Contains("there is no tensor 'y'"));
}

TEST_CASE("Files that cannot be opened say so", "[container]") {
  const TempFolder folder;
  CHECK_THAT(error_text([&] { SafetensorsFile::open(folder / "none"); }), Contains("io:") && Contains("No such file"));
  CHECK_THAT(error_text([&] { SafetensorsFile::open(folder.path()); }),
             Contains("io:") && Contains("not a regular file"));
  REQUIRE(::mkfifo((folder / "pipe").c_str(), 0600) == 0);  // the reader must not wait for a writer
  CHECK_THAT(error_text([&] { SafetensorsFile::open(folder / "pipe"); }), Contains("not a regular file"));
}

TEST_CASE("The writer holds its caller to the contract", "[container]") {
  SafetensorsWriter writer;
  writer.add<float>("a", {1}, std::vector<float>{1});
  const std::vector<float> two{1, 2};
  CHECK_THAT(error_text([&] { writer.add<float>("a", {2}, two); }), Contains("internal:"));             // name taken
  CHECK_THAT(error_text([&] { writer.add<float>("b", {3}, two); }), Contains("internal:"));             // wrong size
  CHECK_THAT(error_text([&] { writer.add<float>("c", {-1, -2}, two); }), Contains("internal:"));        // negative
  CHECK_THAT(error_text([&] { writer.add<float>("__metadata__", {2}, two); }), Contains("internal:"));  // reserved
}

TEST_CASE("The content hash is XXH3-128 over the text of formats/artifact.md", "[container]") {
  const TempFolder folder;
  SafetensorsWriter writer;
  writer.add<std::int8_t>("b", {2}, std::vector<std::int8_t>{3, 4});
  writer.add<float>("a", {}, std::vector<float>{1.0f});
  writer.write(folder / "a.safetensors");
  using namespace std::string_literals;
  const std::string hashed = "{}\0"s + "a\0F32\0\0\0\x80\x3f"s + "b\0I8\0\2\0\0\0\0\0\0\0\3\4"s;
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(hashed.data(), hashed.size()));
  std::string expected = "xxh3-128:";
  for (const unsigned char byte : canonical.digest) expected += fmt::format("{:02x}", byte);
  CHECK(writer.content_hash("{}") == expected);
  CHECK(content_hash(SafetensorsFile::open(folder / "a.safetensors"), "{}") == expected);
  CHECK(writer.content_hash("{ }") != expected);
}

TEST_CASE("A round trip keeps every byte", "[container][property]") {
  const TempFolder folder;
  const auto path = folder / "a.safetensors", again_path = folder / "b.safetensors";
  rc::prop("write(read(write(x))) == write(x)", [&] {
    const auto tensors = *rc::gen::resize(
        6, rc::gen::uniqueBy<std::vector<AnyTensor>>(any_tensor(), [](const AnyTensor& t) { return t.name; }));
    SafetensorsWriter writer, again;
    for (const AnyTensor& tensor : tensors) writer.add(tensor.name, tensor.dtype, tensor.shape, tensor.data);
    writer.set_metadata("any", *rc::gen::container<std::string>(rc::gen::inRange(char{1}, char{127})));
    writer.write(path);
    const auto file = SafetensorsFile::open(path);
    for (const auto& [name, info] : file.tensors()) {
      const auto data = file.bytes(name);
      again.add(name, info.dtype, info.shape, {data.begin(), data.end()});
    }
    for (const auto& [key, value] : file.metadata()) again.set_metadata(key, value);
    again.write(again_path);
    RC_ASSERT(test::file_bytes(path) == test::file_bytes(again_path));
    RC_ASSERT(content_hash(file, "m") == writer.content_hash("m"));
    RC_ASSERT(file.tensors().size() == tensors.size());
  });
}

TEST_CASE("Every cut and every changed byte is refused or read, and nothing else", "[container][property]") {
  const TempFolder folder;
  example().write(folder / "a.safetensors");
  const std::string whole = test::file_bytes(folder / "a.safetensors");
  for (std::size_t size = 0; size < whole.size(); ++size)
    CHECK_THAT(error_text([&] { SafetensorsFile::parse(as_bytes(whole.substr(0, size)), "m"); }),
               Contains("bad_input: m: "));
  rc::prop("changed bytes", [&](const std::vector<std::pair<std::uint16_t, char>>& changes) {
    std::string text = whole;
    for (const auto& [where, what] : changes) text[where % text.size()] = what;
    const auto error = test::error_of([&] {
      const auto file = SafetensorsFile::parse(as_bytes(text), "m");
      content_hash(file, "");  // reads every byte
    });
    const bool is_clean = !error || error->kind() == ErrorKind::bad_input || error->kind() == ErrorKind::unsupported;
    RC_ASSERT(is_clean);  // one variable, because RC_ASSERT does not short-circuit
  });
}
