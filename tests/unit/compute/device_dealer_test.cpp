#include <kvq/compute/device_dealer.h>

#include <catch2/catch.hpp>

#include <memory>
#include <set>

namespace kvq::test {

namespace {
using Contexts = std::vector<std::size_t>;
}

TEST_CASE("A call that comes alone is divided over all devices", "[compute][dealer]") {
  DeviceDealer dealer(3, 12);
  for (std::size_t turn = 0; turn < 9; ++turn) {
    const DeviceDealer::Call call(dealer, 7.0);
    std::set<std::size_t> devices;
    for (const std::size_t context : call.contexts()) {
      CHECK(context / 3 == turn % 4);
      devices.insert(context % 3);
    }
    CHECK(devices == std::set<std::size_t>{0, 1, 2});
  }
}

TEST_CASE("Calls at the same time go to the device that has the least work", "[compute][dealer]") {
  DeviceDealer dealer(2, 8);
  const DeviceDealer::Call all(dealer, 2.0);  // 1 each
  auto heavy = std::make_unique<DeviceDealer::Call>(dealer, 10.0);
  REQUIRE(heavy->contexts().size() == 1);
  CHECK(heavy->contexts()[0] % 2 == 0);
  for (int i = 0; i < 3; ++i) {  // 3 times 3 beside 10
    const DeviceDealer::Call light(dealer, 3.0);
    CHECK(light.contexts()[0] % 2 == 1);
  }
  const DeviceDealer::Call light(dealer, 3.0), second(dealer, 3.0), third(dealer, 3.0), fourth(dealer, 3.0);
  CHECK(third.contexts()[0] % 2 == 1);
  CHECK(fourth.contexts()[0] % 2 == 1);
  const DeviceDealer::Call fifth(dealer, 3.0);
  CHECK(fifth.contexts()[0] % 2 == 0);
  heavy.reset();
  const DeviceDealer::Call sixth(dealer, 3.0);
  CHECK(sixth.contexts()[0] % 2 == 0);
}

TEST_CASE("One device has all calls, in all of its contexts", "[compute][dealer]") {
  DeviceDealer dealer(1, 4);
  std::vector<std::unique_ptr<DeviceDealer::Call>> calls;
  std::set<std::size_t> contexts;
  for (int i = 0; i < 4; ++i) {
    calls.push_back(std::make_unique<DeviceDealer::Call>(dealer, 1.0));
    REQUIRE(calls.back()->contexts().size() == 1);
    contexts.insert(calls.back()->contexts()[0]);
  }
  CHECK(contexts.size() == 4);
}

}  // namespace kvq::test
