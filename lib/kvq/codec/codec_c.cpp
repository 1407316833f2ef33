#include <kvq/codec/arithmetic.h>
#include <kvq/codec/codec_c.h>
#include <kvq/codec/group_coder.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace kvq {

namespace {

constexpr int kInterfaceVersion = 2;
constexpr int kMostThreads = 1024;

/// Everything that kvq_codec_trellis() refuses, as one line; empty if there is nothing.
std::string fault_of(int bits, int memory, int search, std::int64_t groups, std::int64_t channels, int threads) {
  if (bits < 1 || memory < 1 || memory > 8 || bits * memory > 8 || bits * (memory + 1) > 16)
    return fmt::format("trellis: {} bits do not go with memory {}", bits, memory);
  if (search != 0 && search != 1) return fmt::format("search: expected 0 (binary32) or 1 (integer), found {}", search);
  if (channels < TrellisGroup::kLeastChannels || channels > arithmetic::kLargestGroup)
    return fmt::format("channels: expected {} to {}, found {}", TrellisGroup::kLeastChannels, arithmetic::kLargestGroup,
                       channels);
  if (groups < 0) return fmt::format("groups: expected at least 0, found {}", groups);
  if (threads < 1 || threads > kMostThreads)
    return fmt::format("threads: expected 1 to {}, found {}", kMostThreads, threads);
  return {};
}

/// Groups [first, last) of y and codes.
void search_groups(const TrellisGroup& trellis, const float* y, std::uint8_t* codes, std::size_t channels,
                   std::int64_t first, std::int64_t last) {
  for (std::int64_t group = first; group < last; ++group) {
    const std::size_t begin = static_cast<std::size_t>(group) * channels;
    trellis.search({y + begin, channels}, {codes + begin, channels});
  }
}

/// The same for all groups, in equal parts. A part that throws ends the call, after all parts have ended.
void search_all(const TrellisGroup& trellis, const float* y, std::uint8_t* codes, std::size_t channels,
                std::int64_t groups, int threads) {
  const std::int64_t parts = std::clamp<std::int64_t>(groups, 1, threads);
  std::vector<std::exception_ptr> faults(static_cast<std::size_t>(parts));
  const auto run = [&](std::int64_t part) noexcept {
    try {
      search_groups(trellis, y, codes, channels, groups * part / parts, groups * (part + 1) / parts);
    } catch (...) {
      faults[static_cast<std::size_t>(part)] = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> workers;  // joined at the end of the block, also if a thread cannot be started
    for (std::int64_t part = 1; part < parts; ++part) workers.emplace_back(run, part);
    run(0);
  }
  for (const std::exception_ptr& fault : faults)
    if (fault) std::rethrow_exception(fault);
}

std::int32_t refuse(const char* text, char* message, std::int64_t message_bytes) noexcept {
  if (message == nullptr || message_bytes < 1) return 1;
  const std::size_t length = std::min(std::strlen(text), static_cast<std::size_t>(message_bytes) - 1);
  std::memcpy(message, text, length);
  message[length] = '\0';
  return 1;
}

}  // namespace

}  // namespace kvq

extern "C" {

std::int32_t kvq_codec_version(void) { return kvq::kInterfaceVersion; }

std::int32_t kvq_codec_trellis(const float* theta, std::int32_t bits, std::int32_t memory, std::int32_t search,
                               const float* y, std::int64_t groups, std::int64_t channels, std::int32_t threads,
                               std::uint8_t* codes, char* message, std::int64_t message_bytes) {
  // No exception may pass a function with C linkage.
  try {
    if (const std::string fault = kvq::fault_of(bits, memory, search, groups, channels, threads); !fault.empty())
      return kvq::refuse(fault.c_str(), message, message_bytes);
    const kvq::TrellisTaps taps{
        bits, memory, static_cast<kvq::TrellisSearch>(search), {theta, theta + bits * (memory + 1)}};
    const kvq::TrellisGroup trellis(taps, kvq::ScaleRule::rms, kvq::ScaleType::fp32);
    kvq::search_all(trellis, y, codes, static_cast<std::size_t>(channels), groups, threads);
    return kvq::refuse("", message, message_bytes) - 1;
  } catch (const std::exception& error) {
    return kvq::refuse(error.what(), message, message_bytes);
  } catch (...) {
    return kvq::refuse("an unknown fault", message, message_bytes);
  }
}

}  // extern "C"
