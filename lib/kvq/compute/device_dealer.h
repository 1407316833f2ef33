#pragma once

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <vector>

namespace kvq {

/// Deals calls to the contexts of some devices: context i is of device i % devices, and calls at the same time take
/// different contexts of a device in turn. A call that comes alone is divided over all devices. If there are others,
/// as when layers are in work side by side, it goes to the device that has the least work. What a call computes does
/// not depend on where. Safe from several threads.
class DeviceDealer {
 public:
  DeviceDealer(int devices, std::size_t contexts)
      : contexts_(contexts), work_(static_cast<std::size_t>(devices), 0.0) {}

  /// A call under way. Its work counts until it is destroyed.
  class Call {
   public:
    /// @param work  of the call, in any unit that all calls have in common
    Call(DeviceDealer& dealer, double work) : dealer_(dealer), contexts_(dealer.deal(work)), work_(work) {}
    ~Call() { dealer_.end(contexts_, work_); }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    /// Of the devices that divide the call.
    const std::vector<std::size_t>& contexts() const { return contexts_; }

   private:
    DeviceDealer& dealer_;
    const std::vector<std::size_t> contexts_;
    const double work_;
  };

 private:
  std::vector<std::size_t> deal(double work) {
    const std::lock_guard lock(mutex_);
    const std::size_t devices = work_.size(), first = turn_++ * devices;
    std::vector<std::size_t> chosen;
    if (calls_++ == 0)
      for (std::size_t device = 0; device < devices; ++device) chosen.push_back((first + device) % contexts_);
    else
      chosen.push_back(
          (first + static_cast<std::size_t>(std::min_element(work_.begin(), work_.end()) - work_.begin())) % contexts_);
    add(chosen, work);
    return chosen;
  }
  void end(const std::vector<std::size_t>& contexts, double work) {
    const std::lock_guard lock(mutex_);
    --calls_;
    add(contexts, -work);
    if (calls_ == 0) std::fill(work_.begin(), work_.end(), 0.0);  // no rounding remains
  }
  void add(const std::vector<std::size_t>& contexts, double work) {
    for (const std::size_t context : contexts)
      work_[context % work_.size()] += work / static_cast<double>(contexts.size());
  }

  const std::size_t contexts_;
  std::mutex mutex_;  ///< of all below
  std::vector<double> work_;
  std::size_t turn_ = 0;
  int calls_ = 0;
};

}  // namespace kvq
