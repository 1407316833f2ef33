#include <kvq/stats/parts_folder.h>

#include "support/error_of.h"
#include "support/temp_folder.h"

#include <catch2/catch.hpp>

#include <fstream>
#include <set>

using namespace kvq;
using Catch::Matchers::Contains;
using test::error_text;
using test::TempFolder;

namespace fs = std::filesystem;

namespace {

void write(const fs::path& path) { std::ofstream(path) << "text"; }

std::set<std::string> names(const fs::path& folder) {
  std::set<std::string> all;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) all.insert(entry.path().filename());
  return all;
}

}  // namespace

TEST_CASE("A folder of parts is made once and known again", "[stats]") {
  const TempFolder folder;
  const fs::path path = folder / "out.parts";
  for (int run = 0; run < 2; ++run) {
    const PartsFolder parts(path);
    CHECK(names(path) == std::set<std::string>{"kvq-parts.txt"});
    CHECK(names(folder.path()) == std::set<std::string>{"out.parts"});
    CHECK(parts.num_parts() == 0);
  }
}

TEST_CASE("Only files that kvq named are removed", "[stats]") {
  const TempFolder folder;
  const PartsFolder parts(folder / "out.parts");
  const std::set<std::string> own = {"layer-0003.0123456789abcdef.safetensors",
                                     "layer-10000.ffffffffffffffff.safetensors", ".kvq-17-3.tmp"};
  const std::set<std::string> foreign = {"layer-0003.safetensors",
                                         "layer-0003.0123456789abcdeF.safetensors",
                                         "layer-0003.0123456789abcde.safetensors",
                                         "layer-0003.0123456789abcdef0.safetensors",
                                         "layer-.0123456789abcdef.safetensors",
                                         "layer-0003.0123456789abcdef.safetensors.bak",
                                         "my-layer-0003.0123456789abcdef.safetensors",
                                         ".kvq-notes.tmp",
                                         ".kvq-17-3.tmp2",
                                         "notes.txt"};
  for (const std::string& name : own) write(parts.path() / name);
  CHECK(parts.num_parts() == 2);
  CHECK(parts.num_bytes() == 12);
  SECTION("nothing else") {
    CHECK(parts.remove());
    CHECK(!fs::exists(parts.path()));
  }
  SECTION("files of others") {
    for (const std::string& name : foreign) write(parts.path() / name);
    CHECK(!parts.remove());
    std::set<std::string> expected = foreign;
    expected.insert("kvq-parts.txt");
    CHECK(names(parts.path()) == expected);
  }
  SECTION("links") {
    write(folder / "precious");
    fs::create_symlink(folder / "precious", parts.path() / "layer-0004.0123456789abcdef.safetensors");
    CHECK(!parts.remove());
    CHECK(fs::exists(folder / "precious"));
  }
  SECTION("parts are not empty") {
    parts.remove_if_empty();
    CHECK(parts.num_parts() == 2);
  }
}

TEST_CASE("What kvq did not make is no folder of parts", "[stats]") {
  const TempFolder folder;
  const fs::path path = folder / "out.parts";
  SECTION("a file") { write(path); }
  SECTION("an empty folder") { fs::create_directory(path); }
  SECTION("a folder with files") {
    fs::create_directory(path);
    write(path / "layer-0003.0123456789abcdef.safetensors");
  }
  SECTION("a marker that is a link") {
    fs::create_directory(path);
    write(folder / "text");
    fs::create_symlink(folder / "text", path / "kvq-parts.txt");
  }
  CHECK_THAT(error_text([&] { PartsFolder{path}; }),
             Contains("bad_input: " + path.string() + ": expected a folder that kvq-calibrate made, found "));
  CHECK(fs::exists(path));
}

TEST_CASE("The name of a part depends on all that decides its content", "[stats]") {
  const TempFolder folder;
  const PartsFolder parts(folder / "out.parts");
  StatsHeader header;
  StatsRequest request{.moments = {Moment::key}, .sample_tokens = 9, .seed = 5};
  LayerActivations layer;
  layer.content_hash = "xxh3-128:1";
  const fs::path name = parts.part(header, request, layer);
  CHECK(parts.part(header, request, layer) == name);
  SECTION("dump data") { layer.content_hash = "xxh3-128:2"; }
  SECTION("layer") { layer.layer = 1; }
  SECTION("moments") { request.moments.insert(Moment::value); }
  SECTION("seed") { request.seed = 6; }
  SECTION("sample") { request.sample_tokens = 10; }
  SECTION("held-out tokens") { request.held_out_tokens = 1; }
  SECTION("golden tokens") { request.golden_tokens += 1; }
  SECTION("range") { header.range = TokenRange{1, 2}; }
  SECTION("model") { header.model.fingerprint = "other"; }
  SECTION("producer") { header.producer = "other"; }
  CHECK(parts.part(header, request, layer) != name);
}
