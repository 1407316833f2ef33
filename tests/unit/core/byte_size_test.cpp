#include <kvq/core/byte_size.h>
#include <kvq/core/error.h>

#include <catch2/catch.hpp>

namespace kvq::test {

TEST_CASE("Sizes in bytes are numbers with or without a unit", "[core]") {
  const auto bytes = [](const char* text) { return parse_byte_size(text, "--mem-limit"); };
  CHECK(bytes("80000000") == 80'000'000);
  CHECK(bytes("1") == 1);
  CHECK(bytes("7B") == 7);
  CHECK(bytes("4GB") == 4'000'000'000);
  CHECK(bytes("4gb") == 4'000'000'000);
  CHECK(bytes("1.5 GB") == 1'500'000'000);
  CHECK(bytes("512MiB") == 512LL * 1024 * 1024);
  CHECK(bytes("3KiB") == 3072);
  CHECK(bytes("3kB") == 3000);
  CHECK(bytes("2TiB") == 2LL << 40);
}

TEST_CASE("Texts that are no sizes are refused in one line that names the flag", "[core]") {
  for (const char* text : {"", "GB", "-4GB", "4XB", "4G", "4GiBB", "0", "0.1", "4 GB ", "4  GB", "1e3", "0x10", "nan",
                           "inf", "99999999TB", "four", "4GB\n"}) {
    INFO(text);
    try {
      parse_byte_size(text, "--mem-limit");
      FAIL("accepted");
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::usage);
      const std::string message = error.what();
      CHECK(message.starts_with("--mem-limit: expected a size such as 4GB"));
      CHECK(message.find('\n') == std::string::npos);
    }
  }
}

}  // namespace kvq::test
