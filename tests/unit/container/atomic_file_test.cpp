#include <kvq/container/atomic_file.h>
#include <kvq/container/safetensors.h>

#include "support/container_edit.h"
#include "support/error_of.h"
#include "support/temp_folder.h"

#include <catch2/catch.hpp>

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <iterator>
#include <string>

using namespace kvq;
using Catch::Matchers::Contains;
using test::error_text;
using test::TempFolder;

namespace {

std::size_t num_entries(const TempFolder& folder) {
  const std::filesystem::directory_iterator entries(folder.path());
  return static_cast<std::size_t>(std::distance(begin(entries), end(entries)));
}

std::span<const std::byte> as_bytes(const std::string& text) { return std::as_bytes(std::span(text)); }

/// Limits the size of files to `bytes`: a longer write stops early and the next write fails, as on a full disk.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &old_);
    const rlimit limit{bytes, old_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &old_);
    ::signal(SIGXFSZ, handler_);
  }

 private:
  void (*handler_)(int);
  rlimit old_{};
};

}  // namespace

TEST_CASE("A file appears whole, and the old one is replaced", "[container]") {
  const TempFolder folder;
  write_file_atomically(folder / "a", as_bytes("first"));
  CHECK(test::file_bytes(folder / "a") == "first");
  write_file_atomically(folder / "a", as_bytes(std::string(3'000'000, 'x')));
  CHECK(test::file_bytes(folder / "a") == std::string(3'000'000, 'x'));
  CHECK(num_entries(folder) == 1);
}

TEST_CASE("A file that is not committed leaves nothing behind", "[container]") {
  const TempFolder folder;
  write_file_atomically(folder / "a", as_bytes("old"));
  {
    AtomicFile file(folder / "a");
    file.write(as_bytes("new"));
    CHECK(num_entries(folder) == 2);
    CHECK(test::file_bytes(folder / "a") == "old");
  }
  CHECK(num_entries(folder) == 1);
  CHECK(test::file_bytes(folder / "a") == "old");
}

TEST_CASE("When the disk is full the error says so and the old file stays", "[container]") {
  const TempFolder folder;
  write_file_atomically(folder / "a", as_bytes("old"));
  std::string text;
  {
    const FileSizeLimit limit(100'000);
    text = error_text([&] { write_file_atomically(folder / "a", as_bytes(std::string(1'000'000, 'x'))); });
  }
  CHECK_THAT(text, Contains("io: " + (folder / "a").string() + ": cannot write: File too large"));
  CHECK(test::file_bytes(folder / "a") == "old");
  CHECK(num_entries(folder) == 1);
}

TEST_CASE("A folder that is missing or a target that is no file is refused", "[container]") {
  const TempFolder folder;
  CHECK_THAT(error_text([&] { write_file_atomically(folder / "none/a", as_bytes("x")); }),
             Contains("io:") && Contains(fmt::format("the folder {} is missing", (folder / "none").string())));
  CHECK_THAT(error_text([&] { write_file_atomically(folder.path(), as_bytes("x")); }), Contains("not a regular file"));
  REQUIRE(::mkfifo((folder / "pipe").c_str(), 0600) == 0);
  CHECK_THAT(error_text([&] { write_file_atomically(folder / "pipe", as_bytes("x")); }),
             Contains("not a regular file"));
  CHECK(num_entries(folder) == 1);
}

TEST_CASE("The longest name a file can have is fine", "[container]") {
  const TempFolder folder;
  const std::string name(255, 'n');
  write_file_atomically(folder / name, as_bytes("x"));
  CHECK(test::file_bytes(folder / name) == "x");
}

TEST_CASE("A path without a folder means the current one", "[container]") {
  const TempFolder folder;
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path());
  const std::string text = error_text([] { write_file_atomically("plain", as_bytes("x")); });
  std::filesystem::current_path(before);
  CHECK(text == "no error");
  CHECK(test::file_bytes(folder / "plain") == "x");
}
