#include <kvq/container/atomic_file.h>
#include <kvq/container/output_claim.h>
#include <kvq/container/output_target.h>
#include <kvq/container/safetensors.h>
#include <kvq/container/temporaries.h>

#include "support/container_edit.h"
#include "support/error_of.h"
#include "support/temp_folder.h"

#include <catch2/catch.hpp>

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <thread>
#include <vector>

using namespace kvq;
using Catch::Matchers::Contains;
using test::error_text;
using test::TempFolder;

namespace fs = std::filesystem;

namespace {

void write(const fs::path& path, const std::string& text) {
  write_file_atomically(path, std::as_bytes(std::span(text)));
}

mode_t mode_of(const fs::path& path) {
  struct stat found{};
  ::stat(path.c_str(), &found);
  return found.st_mode & 07777;
}

std::size_t num_entries(const TempFolder& folder) {
  const fs::directory_iterator entries(folder.path());
  return static_cast<std::size_t>(std::distance(begin(entries), end(entries)));
}

}  // namespace

TEST_CASE("A link stays a link and the file behind it is replaced", "[container]") {
  const TempFolder folder;
  fs::create_directory(folder / "far");
  fs::create_symlink("far/file", folder / "near");
  fs::create_symlink("near", folder / "link");
  CHECK(output_target(folder / "link") == folder / "far/file");
  for (const char* text : {"first", "second"}) {
    write(folder / "link", text);
    CHECK(fs::is_symlink(folder / "link"));
    CHECK(fs::is_symlink(folder / "near"));
    CHECK(test::file_bytes(folder / "far/file") == text);
  }
  fs::create_symlink("loop", folder / "loop");
  CHECK_THAT(error_text([&] { write(folder / "loop", "x"); }), Contains("io: " + (folder / "loop").string()));
}

TEST_CASE("The mode of a replaced file is kept and never wider before", "[container]") {
  const TempFolder folder;
  const fs::path path = folder / "a";
  write(path, "old");
  ::chmod(path.c_str(), 0640);
  AtomicFile file(path);
  for (const fs::directory_entry& entry : fs::directory_iterator(folder.path())) CHECK(mode_of(entry) == 0640);
  file.commit();
  CHECK(mode_of(path) == 0640);
  ::chmod(path.c_str(), 04755);
  write(path, "new");
  CHECK(mode_of(path) == 0755);  // whoever may write the file does not get the rights of its owner
}

TEST_CASE("A descriptor is no file, whatever it leads to", "[container]") {
  const TempFolder folder;
  write(folder / "a", "old");
  std::ifstream open(folder / "a");
  fs::create_symlink("/proc/self/fd/1", folder / "stdout");
  for (const fs::path& path : {folder / "stdout", fs::path("/proc/self/fd/1"), fs::path("/dev/stdout")}) {
    if (path == "/dev/stdout" && !fs::is_symlink(path)) continue;  // a machine may lack it
    CHECK_THAT(error_text([&] { output_target(path); }), Contains("io: " + path.string() + ": cannot write: "));
  }
  CHECK(fs::is_symlink(folder / "stdout"));
  CHECK_THAT(error_text([&] { output_target("-"); }), Contains("usage: -: "));
  CHECK(output_target("./-") == "./-");
}

TEST_CASE("An output has one writer at a time", "[container]") {
  const TempFolder folder;
  const fs::path path = folder / "out";
  std::optional<OutputClaim> first(OutputClaim::of_file(path, "one"));
  CHECK_THAT(
      error_text([&] { OutputClaim::of_file(path, "two"); }),
      Contains(fmt::format("io: {}: another run is writing it (process {}, since 20", path.string(), ::getpid())) &&
          Contains(" UTC)"));
  CHECK_NOTHROW(OutputClaim::of_file(folder / "other", "two"));
  write(path, "text");
  first.reset();
  CHECK(num_entries(folder) == 1);
  CHECK_NOTHROW(OutputClaim::of_file(path, "two"));
  const OutputClaim all = OutputClaim::of_folder(folder.path(), "one");
  CHECK_THAT(error_text([&] { OutputClaim::of_folder(folder.path(), "two"); }), Contains("another run is writing it"));
}

TEST_CASE("The system releases the claim of a killed process", "[container]") {
  const TempFolder folder;
  const fs::path path = folder / "out";
  const pid_t child = ::fork();
  if (child == 0) {
    const OutputClaim claim = OutputClaim::of_file(path, "child");
    ::kill(::getpid(), SIGKILL);
  }
  ::waitpid(child, nullptr, 0);
  CHECK(num_entries(folder) == 1);  // the lock file
  {
    const OutputClaim claim = OutputClaim::of_file(path, "parent");
  }
  CHECK(num_entries(folder) == 0);
}

TEST_CASE("What a lock file says need not be sound", "[container]") {
  const TempFolder folder;
  const fs::path path = folder / "out";
  const OutputClaim claim = OutputClaim::of_file(path, "one");
  const fs::path lock = fs::directory_iterator(folder.path())->path();
  for (const char* text : {"", "x", "12", "12 ", "-3 5 a", "99999999999999999999 5 a", "7 \x1b[31m\n"}) {
    std::ofstream(lock) << text;
    CHECK_THAT(error_text([&] { OutputClaim::of_file(path, "two"); }), Contains("out: another run is writing it"));
    CHECK_THAT(error_text([&] { OutputClaim::of_file(path, "two"); }), !Contains("process") && !Contains("\x1b"));
  }
}

TEST_CASE("Of many that claim an output at once one has it", "[container]") {
  const TempFolder folder;
  std::atomic<int> inside{0}, most{0}, claims{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread)
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) try {
          const OutputClaim claim = OutputClaim::of_file(folder / "out", "test");
          const int now = ++inside;
          if (now > most) most = now;
          ++claims;
          --inside;
        } catch (const Error&) {
        }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(most == 1);
  CHECK(claims > 0);
  CHECK(num_entries(folder) == 0);
}

TEST_CASE("A scratch folder is removed unless it is kept", "[container]") {
  const TempFolder folder;
  {
    const ScratchFolder scratch(folder / "a-");
    write(scratch.path() / "file", "text");
    CHECK(num_entries(folder) == 1);
  }
  CHECK(num_entries(folder) == 0);
  {
    ScratchFolder scratch(folder / "a-");
    write(scratch.path() / "file", "text");
    scratch.keep_as(folder / "kept");
  }
  CHECK(test::file_bytes(folder / "kept/file") == "text");
  ScratchFolder scratch(folder / "a-");
  CHECK_THAT(error_text([&] { scratch.keep_as(folder / "kept"); }), Contains("io: ") && Contains("kept"));
}

TEST_CASE("Folders of outputs are not made, but an output that is a folder is", "[container]") {
  const TempFolder folder;
  CHECK_THAT(error_text([&] { make_output_folder(folder / "a/b"); }), Contains("io: ") && Contains("a is missing"));
  make_output_folder(folder / "a");
  make_output_folder(folder / "a/");
  make_output_folder((folder / "a/b").string() + "/");
  CHECK(fs::is_directory(folder / "a/b"));
  write(folder / "file", "text");
  CHECK_THAT(error_text([&] { make_output_folder(folder / "file"); }), Contains("not a folder"));
}
