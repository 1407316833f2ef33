#include "calibrate/predicted_case.h"

#include "calibrate/device_rates.h"

#include <kvq/core/error.h>
#include <kvq/core/text.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <map>
#include <system_error>

namespace kvq {

namespace {

/// 0 for a text that is no number from 1 to `most`.
template <typename T>
T number_from_one(const std::string& text, T most) {
  T value{};
  const char* const end = text.data() + text.size();
  const auto [rest, fault] = std::from_chars(text.data(), end, value);
  return fault == std::errc{} && rest == end && value >= 1 && value <= most ? value : T{};
}

}  // namespace

PredictedInput input_of(const Dump& dump, const std::vector<LayerEntry>& layers, std::int64_t tokens) {
  PredictedInput input{.layers = layers, .layer_bytes = {}, .sequences = dump.num_sequences(), .tokens = tokens};
  for (const LayerEntry& entry : layers) {
    const LayerGeometry& g = entry.geometry;
    const std::int64_t numbers = dump.num_tokens() * ((g.num_q_heads + g.num_kv_heads) * g.head_dim +
                                                      (entry.has_values ? g.num_kv_heads * g.v_head_dim : 0));
    input.layer_bytes.push_back(dump.layer_bytes(entry.layer));
    // float16 has the size of bfloat16; only its time on a device differs.
    if (dump.capture_point() == CapturePoint::pre_rope || input.layer_bytes.back() > 3 * numbers) input.is_bf16 = false;
  }
  return input;
}

PredictedInput input_of_geometry(const std::string& text, std::int64_t tokens) {
  const auto refuse = [&](const std::string& fault) {
    throw Error{ErrorKind::usage,
                fmt::format("--geometry: expected layers=N,q-heads=N,kv-heads=N,head-dim=N, found {}", fault),
                "v-head-dim=N, window=N and sequences=N may follow"};
  };
  std::map<std::string, int> values = {{"layers", 0},     {"q-heads", 0}, {"kv-heads", 0}, {"head-dim", 0},
                                       {"v-head-dim", 0}, {"window", 0},  {"sequences", 1}};
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find(',', at), text.size()), equal = std::min(text.find('=', at), end);
    const auto found = values.find(text.substr(at, equal - at));
    constexpr int kMost = 1 << 20;
    int value = 0;
    if (found == values.end() || equal == end) refuse(printable(text));
    const char* const last = text.data() + end;
    if (const auto [rest, fault] = std::from_chars(text.data() + equal + 1, last, value);
        fault != std::errc{} || rest != last || value < 0 || value > kMost)
      refuse(printable(text));
    found->second = value;
    at = end + 1;
  }
  LayerGeometry g{.num_q_heads = values["q-heads"],
                  .num_kv_heads = values["kv-heads"],
                  .head_dim = values["head-dim"],
                  .v_head_dim = values["v-head-dim"] > 0 ? values["v-head-dim"] : values["head-dim"],
                  .sliding_window = values["window"]};
  if (values["layers"] < 1 || g.num_q_heads < 1 || g.num_kv_heads < 1 || g.head_dim < 1 || values["sequences"] < 1)
    refuse(printable(text));
  if (g.num_q_heads % g.num_kv_heads != 0)
    throw Error{ErrorKind::usage,
                fmt::format("--geometry: expected q-heads to be a multiple of kv-heads, found {} and {}", g.num_q_heads,
                            g.num_kv_heads)};
  PredictedInput input{.layers = {}, .layer_bytes = {}, .sequences = values["sequences"], .tokens = tokens};
  const std::int64_t channels =
      std::int64_t{g.num_q_heads + g.num_kv_heads} * g.head_dim + std::int64_t{g.num_kv_heads} * g.v_head_dim;
  if (tokens > std::numeric_limits<std::int64_t>::max() / (2 * channels))
    throw Error{ErrorKind::usage, fmt::format("--geometry: {} tokens of {} channels are more bytes than can be counted",
                                              tokens, channels)};
  for (int layer = 0; layer < values["layers"]; ++layer) {
    input.layers.push_back({.layer = layer, .geometry = g});
    input.layer_bytes.push_back(2 * channels * tokens);
  }
  return input;
}

PredictedMachine parse_machine(const std::string& text) {
  std::vector<std::string> words;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find(':', at), text.size());
    words.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  const std::size_t size = words.size();
  if (words[0] == "h200" && size <= 2)
    if (const int devices = size == 1 ? 1 : number_from_one<int>(words[1], 64); devices > 0)
      return {.name = text, .devices = devices, .cores = rates::kCoresBeside};
  if (words[0] == "cpu" && (size == 2 || size == 3)) {
    const int cores = number_from_one<int>(words[1], 4096);
    const double gflops = size == 3 ? number_from_one<double>(words[2], 1e6) : 0.0;
    if (cores > 0 && (size == 2 || gflops > 0.0)) return {.name = text, .cores = cores, .core_gflops = gflops};
  }
  throw Error{ErrorKind::usage,
              fmt::format("--predict-for: expected cpu:CORES, h200 or h200:GPUS, found {}", printable(text, 40))};
}

}  // namespace kvq
