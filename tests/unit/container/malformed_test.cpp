#include <kvq/container/safetensors.h>

#include "support/error_of.h"

#include <catch2/catch.hpp>

#include <filesystem>
#include <map>
#include <string>

using namespace kvq;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;

namespace {

/// Text that the message must have, for files whose reason matters. For all other files any clean refusal passes.
const std::map<std::string, std::string> kReasons = {
    {"empty", "expected at least 8 bytes, found 0"},
    {"length_huge", "header of 18446744073709551615 bytes, expected at most 100000000"},
    {"length_past_end", "but only"},
    {"leading_space", "does not begin with '{'"},
    {"duplicate_tensor", "the key 'a' appears twice"},
    {"duplicate_field", "the key 'dtype' appears twice"},
    {"depth_bomb", "nested deeper than 3 levels"},
    {"trailing_zero_bytes", "zero byte"},
    {"metadata_not_a_string", "__metadata__: 'version': expected a string, found number"},
    {"dtype_unknown", "tensor 'a': dtype 'F99' is not supported, expected one of F16"},
    {"dtype_wrong", "F64 [2] takes 16 bytes, but data_offsets span 8"},
    {"shape_overflow", "overflows"},
    {"shape_overflow_to_size", "overflows"},
    {"shape_overflow_times_zero", "overflows"},
    {"offsets_past_end", "data_offsets end at 16, but the file has only 8 bytes of data"},
    {"data_left_over", "the tensors end at data offset 8, but the file has 9 bytes of data"},
    {"overlap", "tensor 'b': overlaps another tensor at data offset 4"},
    {"same_bytes", "overlaps another tensor"},
    {"hole", "tensor 'b': begins at data offset 8, which leaves a hole behind 4"},
    {"hole_at_begin", "tensor 'a': begins at data offset 4, which leaves a hole behind 0"},
};

}  // namespace

TEST_CASE("Every malformed safetensors file is refused with one line that says why", "[container]") {
  const std::filesystem::path folder = std::filesystem::path(KVQ_SOURCE_DIR) / "formats" / "malformed";
  std::size_t num_files = 0, num_reasons = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors") continue;
    ++num_files;
    const std::string name = entry.path().stem().string();
    INFO(name);
    const auto error = test::error_of([&] { SafetensorsFile::open(entry.path()); });
    REQUIRE(error);
    CHECK((error->kind() == ErrorKind::bad_input || error->kind() == ErrorKind::unsupported));
    CHECK_THAT(error->what(), StartsWith(entry.path().string() + ": "));
    CHECK_THAT(error->what(), !Contains("\n"));
    if (const auto reason = kReasons.find(name); reason != kReasons.end()) {
      ++num_reasons;
      CHECK_THAT(error->what(), Contains(reason->second));
    }
  }
  CHECK(num_files >= 40);
  CHECK(num_reasons == kReasons.size());
}
