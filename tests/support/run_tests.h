#pragma once

namespace kvq::test {

/// Runs the program's tests as Catch2's main() would; the source has Catch2's own code.
int run_tests(int argc, char** argv);

}  // namespace kvq::test
