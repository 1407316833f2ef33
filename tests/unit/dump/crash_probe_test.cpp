#include <kvq/dump/crash_probe.h>

#include <catch2/catch.hpp>

#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <stdexcept>
#include <vector>

using namespace kvq;

TEST_CASE("A child that comes through has no fate, whatever it throws or changes", "[dump]") {
  int here = 1;
  CHECK_FALSE(fate_in_child([&] { here = 2; }, 0));
  CHECK(here == 1);
  CHECK_FALSE(fate_in_child([] { throw std::runtime_error("x"); }, 0));
}

TEST_CASE("A child that dies is told by its signal or its exit", "[dump]") {
  CHECK(fate_in_child([] { ::raise(SIGSEGV); }, 0) == "Segmentation fault");
  CHECK(fate_in_child([] { ::abort(); }, 0) == "Aborted");
  CHECK(fate_in_child([] { ::_exit(1); }, 0) == "failure");
}

TEST_CASE("A child that takes memory without end is stopped", "[dump]") {
  const auto eat = [] {
    for (std::vector<std::vector<char>> eaten;;) eaten.emplace_back(std::size_t{16} << 20, 'x');
  };
  CHECK(fate_in_child(eat, 0) == "too much memory");
}

TEST_CASE("A child that runs for ever is stopped", "[.][slow][dump]") {
  const auto run = [] {
    for (volatile bool go_on = true; go_on;) continue;
  };
  CHECK(fate_in_child(run, 0) == "endless loop");
}
