#define CATCH_CONFIG_RUNNER
#include "run_tests.h"

#include <catch2/catch.hpp>

int kvq::test::run_tests(int argc, char** argv) { return Catch::Session().run(argc, argv); }

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
/// A report names four callers of the allocation. To keep 30 of them for each allocation would take a fifth of the
/// tests' time; ASAN_OPTIONS=malloc_context_size=30 keeps them.
extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() {
  return "malloc_context_size=4";
}
#endif
#endif
