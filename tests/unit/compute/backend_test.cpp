#include "support/backend_conformance.h"

#include <catch2/catch.hpp>

using namespace kvq;

TEST_CASE("The CPU backend conforms", "[compute][backend]") { test::check_conformance(cpu_backend()); }
