#include "selftest/report.h"

#include "common/plural.h"
#include "common/table.h"
#include "common/text_wrap.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <utility>

namespace kvq {

namespace {

constexpr std::string_view kIndent = "   ";  // of the later lines of a message

/// Text of a test's status.
std::string outcome(std::int32_t status) {
  return status == KVQ_OK ? "ok" : status == KVQ_UNSUPPORTED ? "not run" : "FAILED";
}

/// Messages of the layers; layers with the same message share a line.
std::string messages(const SelftestReport& report) {
  std::vector<std::pair<std::string, std::vector<int>>> said;
  for (const auto& [k, v, result] : report.layers) {
    if (!result.message[0]) continue;
    const auto same = std::find_if(said.begin(), said.end(), [&](const auto& m) { return m.first == result.message; });
    (same == said.end() ? said.emplace_back(result.message, std::vector<int>{}) : *same).second.push_back(result.layer);
  }
  std::string text;
  for (const auto& [message, layers] : said) {
    const auto all = fmt::format("layer{} {}: {}", layers.size() > 1 ? "s" : "", fmt::join(layers, ", "), message);
    text += wrapped(std::string(kIndent), all).substr(kIndent.size());
  }
  return text.empty() ? "" : "\n" + text;
}

int count(const SelftestReport& report, kvq_status status) {
  return static_cast<int>(std::count_if(report.layers.begin(), report.layers.end(),
                                        [&](const auto& layer) { return layer.result.status == status; }));
}

}  // namespace

kvq_status SelftestReport::status() const {
  if (count(*this, KVQ_OK) == static_cast<int>(layers.size())) return KVQ_OK;
  return count(*this, KVQ_MISMATCH) > 0 ? KVQ_MISMATCH : KVQ_UNSUPPORTED;
}

std::string text_of(const SelftestReport& report) {
  std::vector<std::vector<std::string>> table = {
      {"layer", "keys", "values", "write", "rows", "firm", "wrong", "decode", "error"}};
  for (const auto& [k, v, result] : report.layers) {
    const bool written = result.write_status != KVQ_UNSUPPORTED, read = result.decode_status != KVQ_UNSUPPORTED;
    table.push_back({fmt::to_string(result.layer), k.empty() ? "-" : k, v.empty() ? "-" : v,
                     outcome(result.write_status), written ? fmt::to_string(result.rows) : "-",
                     written ? fmt::to_string(result.firm_rows) : "-",
                     written ? fmt::to_string(result.firm_faults + result.soft_faults) : "-",
                     outcome(result.decode_status), read ? fmt::format("{:.4f}", result.output_error) : "-"});
  }
  return fmt::format("{}, {}: golden rows on {} (device {}), {}, pages of {} tokens\n\n", report.model, report.method,
                     report.gpu, report.device, report.bf16 ? "bf16" : "fp16", report.page_size) +
         format_table(table, "rlllrrrlr") + messages(report) +
         fmt::format("\n{} of {} passed, {} failed, {} not run\n", count(report, KVQ_OK),
                     counted(report.layers.size(), "layer"), count(report, KVQ_MISMATCH),
                     count(report, KVQ_UNSUPPORTED));
}

Json json_of(const SelftestReport& report) {
  Json layers = Json::array();
  for (const auto& [k, v, result] : report.layers) {
    Json layer = {{"layer", result.layer},
                  {"status", kvq_status_string(result.status)},
                  {"write", {{"status", kvq_status_string(result.write_status)}}},
                  {"decode", {{"status", kvq_status_string(result.decode_status)}}}};
    if (!k.empty()) layer["k"] = k, layer["v"] = v;
    if (result.write_status != KVQ_UNSUPPORTED) {
      layer["write"]["rows"] = result.rows, layer["write"]["firm_rows"] = result.firm_rows;
      layer["write"]["firm_faults"] = result.firm_faults, layer["write"]["soft_faults"] = result.soft_faults;
    }
    if (result.decode_status != KVQ_UNSUPPORTED) layer["decode"]["output_error"] = result.output_error;
    if (result.message[0]) layer["message"] = result.message;
    layers.push_back(std::move(layer));
  }
  return {{"schema_version", "1.1"},
          {"tool", "kvq-selftest " KVQ_VERSION},
          {"artifact", report.artifact},
          {"model", report.model},
          {"method", report.method},
          {"device", {{"index", report.device}, {"name", report.gpu}}},
          {"activation", report.bf16 ? "bf16" : "fp16"},
          {"page_size", report.page_size},
          {"status", kvq_status_string(report.status())},
          {"layers", std::move(layers)}};
}

}  // namespace kvq
