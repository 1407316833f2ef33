#include "support/file_faults.h"

#include "support/error_of.h"
#include "support/temp_folder.h"

#include <catch2/catch.hpp>

namespace kvq::test {

void check_refused(std::span<const FileFault> faults, const std::filesystem::path& good,
                   const std::function<void(const std::filesystem::path&)>& read) {
  using Catch::Matchers::Contains;
  using Catch::Matchers::StartsWith;
  const TempFolder folder;
  const EditableFile sound = EditableFile::read(good);
  sound.write(folder / "same");
  CHECK(file_bytes(good) == file_bytes(folder / "same"));
  for (const FileFault& fault : faults) {
    INFO(fault.name);
    EditableFile bad = sound;
    fault.make(bad);
    bad.write(folder / "bad");
    const std::string text = error_text([&] { read(folder / "bad"); });
    CHECK_THAT(text, StartsWith(fault.kind) && Contains((folder / "bad").string()) && Contains(fault.word));
    CHECK_THAT(text, !Contains("\n"));
  }
}

}  // namespace kvq::test
