#include <kvq/core/random.h>
#include <kvq/dump/dump_file.h>

#include "support/container_edit.h"
#include "support/dump_writer.h"
#include "support/error_of.h"
#include "support/temp_folder.h"

#include <catch2/catch.hpp>

#include <fstream>

/// LeakSanitizer calls this function. HDF5 leaks objects that it has read only in part from a damaged file.
extern "C" const char* __lsan_default_suppressions() { return "leak:libhdf5"; }

using namespace kvq;
using namespace kvq::test;
using Catch::Matchers::Contains;

namespace {

void write_text(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary).write(text.data(), static_cast<std::streamsize>(text.size()));
}

/// Opens and loads everything. Success and every Error that is no bug pass.
void survive(const std::filesystem::path& path) {
  const auto error = error_of([&] {
    const auto dump = Dump::open({path});
    for (const LayerEntry& entry : dump.model().layers) dump.load_layer(entry.layer);
  });
  CHECK((!error || error->kind() != ErrorKind::internal));
}

DumpContent small_dump(bool chunked) {
  DumpContent content = random_dump({.num_q_heads = 2, .num_kv_heads = 1, .lengths = {3, 2}, .dtype = DType::f16});
  content.generated = {0, 0, 1, 0, 1};
  content.layers[0].o_proj = std::vector<float>(2 * 12, 0.5f);
  content.layers[0].o_proj_metric = std::vector<float>(6 * 6, 0.5f);
  content.chunk_tokens = chunked ? 2 : 0;
  content.fixed_strings = chunked;
  return content;
}

/// Changes one to four bytes of small dumps, which consist mostly of structure.
void survive_flipped_bytes(int rounds) {
  const TempFolder folder;
  constexpr std::uint64_t kSeed = 20240607;
  RandomStream random(kSeed, RandomStream::Purpose::test);
  for (const bool chunked : {false, true}) {
    write_dump(folder / "whole.h5", small_dump(chunked));
    const std::string whole = file_bytes(folder / "whole.h5");
    for (int round = 0; round < rounds; ++round) {
      INFO("seed " << kSeed << " chunked " << chunked << " round " << round);
      std::string damaged = whole;
      for (std::uint32_t flips = 1 + random.next_u32() % 4; flips > 0; --flips)
        damaged[random.next_u32() % damaged.size()] = static_cast<char>(random.next_u32());
      write_text(folder / "damaged.h5", damaged);
      survive(folder / "damaged.h5");
    }
  }
}

}  // namespace

TEST_CASE("A dump that is cut off at any place is refused", "[dump]") {
  const TempFolder folder;
  for (const bool chunked : {false, true}) {
    write_dump(folder / "whole.h5", small_dump(chunked));
    const std::string whole = file_bytes(folder / "whole.h5");
    for (std::size_t size = 0; size < whole.size(); size += 1 + size / 24) {
      INFO("cut at " << size);
      write_text(folder / "cut.h5", whole.substr(0, size));
      CHECK_THAT(error_text([&] { Dump::open({folder / "cut.h5"}); }),
                 Contains("bad_input: " + (folder / "cut.h5").string()));
    }
  }
}

TEST_CASE("A dump with flipped bytes reads or is refused, and nothing else", "[dump]") { survive_flipped_bytes(100); }

TEST_CASE("A dump with flipped bytes reads or is refused, many times", "[.][slow][dump]") {
  survive_flipped_bytes(5000);
}

TEST_CASE("A file that is no HDF5 file is refused", "[dump]") {
  const TempFolder folder;
  write_text(folder / "text", "hello");
  CHECK_THAT(error_text([&] { Dump::open({folder / "text"}); }),
             Contains("bad_input:") && Contains("not an HDF5 file"));
  CHECK_THAT(error_text([&] { Dump::open({folder.path()}); }), Contains("io:") && Contains("not a regular file"));
  CHECK_THAT(error_text([&] { Dump::open({folder / "none"}); }), Contains("io:") && Contains("No such file"));
}

TEST_CASE("Data that is cut off while the dump is open is noticed", "[dump]") {
  const TempFolder folder;
  write_dump(folder / "a.h5", random_dump({.lengths = {5000}}));
  const auto dump = Dump::open({folder / "a.h5"});
  std::filesystem::resize_file(folder / "a.h5", std::filesystem::file_size(folder / "a.h5") / 2);
  CHECK_THAT(error_text([&] { dump.load_layer(0); }),
             Contains("bad_input:") && Contains("layer 0: q: the file ends") && Contains("bytes early"));
}
