#include "bench/report.h"

#include "common/side_format.h"
#include "common/table.h"

#include <fmt/format.h>

#include <algorithm>

namespace kvq::bench {

namespace {

using Table = std::vector<std::vector<std::string>>;

std::string percent(double ratio) { return fmt::format("{:.1f}%", 100.0 * ratio); }
std::string microseconds(double us) { return us < 100.0 ? fmt::format("{:.1f}", us) : fmt::format("{:.0f}", us); }
std::string times(const std::optional<double>& factor) { return factor ? fmt::format("{:.2f}x", *factor) : "-"; }
std::string gigabytes(double bytes_per_second) { return fmt::format("{:.0f}", bytes_per_second / 1e9); }

/// A column that a table has if one of its rows has a value.
struct Column {
  const char *title, *meaning;
  std::vector<std::string> values = {};
};
/// @return  what the columns mean that the table now has
std::string add_columns(Table& table, const std::vector<Column>& columns) {
  std::string legend;
  for (const auto& [title, meaning, values] : columns) {
    if (std::all_of(values.begin(), values.end(), [](const std::string& value) { return value == "-"; })) continue;
    table.front().emplace_back(title);
    for (std::size_t i = 0; i < values.size(); ++i) table[i + 1].push_back(values[i]);
    legend += fmt::format("{}: {}\n", title, meaning);
  }
  return legend;
}

constexpr const char* kNewTokens = "new tokens of each sequence";
constexpr const char *kChecks = "time over that of the same call without checks of numbers and rings",
                     *kWindows = "rows stored exactly, too: first and last ones of a prompt, or all";

/// Left-aligned first column, the others right.
std::string format_rows(const Table& table) {
  return format_table(table, "l" + std::string(table.front().size() - 1, 'r'));
}

std::string windows_of(const WriteCase& c) { return c.has_windows() ? to_string(c.step) : "-"; }

std::string tokens_of(const Run& run, const DecodeCase& c) {
  const bool any =
      std::any_of(run.decode.begin(), run.decode.end(), [](const DecodeRow& row) { return row.c.new_tokens > 1; });
  return any ? fmt::format("{}", c.new_tokens) : "-";
}

std::string machine_line(const Run& run) {
  const Machine& m = *run.machine;
  std::string text =
      fmt::format("{}, {} SMs, driver {}, CUDA {}.{}; copy {} GB/s\n", m.gpu, m.multiprocessors, m.driver,
                  m.cuda_runtime / 1000, m.cuda_runtime % 1000 / 10, gigabytes(run.copy_bytes_per_second));
  if (!run.sdpa.is_null())
    text +=
        fmt::format("PyTorch {}, cuDNN {}\n", run.sdpa.at("torch").get<std::string>(), run.sdpa.at("cudnn").get<int>());
  return text;
}

std::string decode_table(const Run& run) {
  // Spread and bandwidth make room for the columns of new tokens and appends; the document has both.
  const bool narrow = std::any_of(run.decode.begin(), run.decode.end(),
                                  [](const DecodeRow& row) { return row.c.append || row.c.new_tokens > 1; });
  Table table{{"decode", "batch x ctx", "bytes", "us"}};
  if (!narrow) table.front().insert(table.front().end(), {"+-", "GB/s"});
  table.front().insert(table.front().end(), {"copy", "floor", "bf16"});
  Column tokens{"new", kNewTokens}, one{"one", "time over that of one new token"}, checks{"checks", kChecks},
      append{"layer", "us, behind the write of the new tokens"};
  const auto us = [](const std::optional<Timing>& time) { return time ? microseconds(time->median_us) : "-"; };
  for (const DecodeRow& row : run.decode) {
    append.values.push_back(us(row.result->append));
    tokens.values.push_back(tokens_of(run, row.c));
    one.values.push_back(times(new_tokens_ratio(run, row)));
    checks.values.push_back(times(row.checks_ratio()));
    std::vector<std::string> line{
        cache_name(*row.c.variant),
        fmt::format("{} x {}", row.c.batch, row.c.context),
        format_bytes(static_cast<double>(bytes_of(row.c).total())),
        microseconds(row.result->time.median_us),
    };
    if (!narrow) line.insert(line.end(), {percent(row.result->time.spread()), gigabytes(row.bytes_per_second())});
    line.insert(line.end(), {percent(row.bytes_per_second() / run.copy_bytes_per_second),
                             percent(row.read_floor_ratio()), times(row.speedup())});
    table.push_back(std::move(line));
  }
  const std::string legend = add_columns(table, {tokens, one, checks, append});
  return format_rows(table) +
         "copy, floor: of the bandwidth of a copy, and of a plain read of the same bytes\n"
         "bf16: how much faster than the best bfloat16 kernel of this run\n" +
         legend;
}

std::string write_table(const Run& run) {
  Table table{{"write", "tokens", "rotation", "bytes", "us", "+-", "GB/s", "copy", "same"}};
  Column unfused{"unfused", "how much longer a rotating kernel and a quantizing one take"},
      plain{"plain", "time of a transform over that of the same case without"}, windows{"exact", kWindows},
      coded{"coded", "time with exact rows over that of the same write without"}, checks{"checks", kChecks};
  for (const WriteRow& row : run.write) {
    unfused.values.push_back(times(row.unfused_ratio()));
    plain.values.push_back(times(transform_ratio(run, row)));
    windows.values.push_back(windows_of(row.c));
    coded.values.push_back(times(row.windows_ratio()));
    checks.values.push_back(times(row.checks_ratio()));
    table.push_back({cache_name(*row.c.variant), fmt::format("{}", row.c.tokens), rotation_name(row.c),
                     format_bytes(static_cast<double>(bytes_of(row.c).total())),
                     microseconds(row.result->time.median_us), percent(row.result->time.spread()),
                     gigabytes(row.bytes_per_second()), percent(row.bytes_per_second() / run.copy_bytes_per_second),
                     percent(row.result->copy.median_us / row.result->time.median_us)});
  }
  const std::string legend = add_columns(table, {unfused, plain, windows, coded, checks});
  return format_rows(table) + "copy, same: of the bandwidth of a large copy, and of one of as many bytes\n" + legend;
}

std::string prefill_table(const Run& run) {
  Table table{{"prefill", "batch x prefix + chunk", "ms", "+-", "TFLOP/s", "cuDNN"}};
  for (const PrefillRow& row : run.prefill)
    table.push_back({cache_name(*row.c.rows), fmt::format("{} x {} + {}", row.c.batch, row.c.prefix, row.c.chunk),
                     fmt::format("{:.2f}", row.result->time.median_us / 1e3), percent(row.result->time.spread()),
                     fmt::format("{:.0f}", row.operations_per_second() / 1e12),
                     row.sdpa_ratio() ? percent(*row.sdpa_ratio()) : "-"});
  return format_table(table, "lrrrrr") + "cuDNN: speed as part of PyTorch's on bfloat16 K and V of the same lengths\n";
}

std::string prefill_plan(const Run& run) {
  Table table{{"prefill", "batch x prefix + chunk", "a token", "prefix", "TFLOP", "sets"}};
  for (const PrefillRow& row : run.prefill) {
    const std::int64_t bytes = bytes_of(cache_of(row.c)).total();
    table.push_back({cache_name(*row.c.rows), fmt::format("{} x {} + {}", row.c.batch, row.c.prefix, row.c.chunk),
                     fmt::format("{}", token_bytes(row.c.rows->k, row.c.rows->v)),
                     format_bytes(static_cast<double>(bytes)), fmt::format("{:.3f}", operations_of(row.c) / 1e12),
                     fmt::format("{}", num_sets(bytes))});
  }
  return format_table(table, "lrrrrr");
}

std::string decode_explanations(const Run& run) {
  std::vector<std::string> tables;
  tables.reserve(run.decode.size());
  for (const DecodeRow& row : run.decode) tables.push_back(text_of(row.c, *row.explanation));
  return fmt::format("{}", fmt::join(tables, "\n"));
}

std::string decode_plan(const Run& run) {
  if (run.decode.front().explanation) return decode_explanations(run);
  Table table{{"decode", "batch x ctx", "a token", "coded", "exact", "bytes", "sets"}};
  Column tokens{"new", kNewTokens};
  for (const DecodeRow& row : run.decode) {
    tokens.values.push_back(tokens_of(run, row.c));
    const CacheBytes bytes = bytes_of(row.c);
    table.push_back({cache_name(*row.c.variant), fmt::format("{} x {}", row.c.batch, row.c.context),
                     fmt::format("{}", token_bytes(row.c.variant->k, row.c.variant->v)),
                     format_bytes(static_cast<double>(bytes.coded)), format_bytes(static_cast<double>(bytes.exact)),
                     format_bytes(static_cast<double>(bytes.total())), fmt::format("{}", num_sets(bytes.total()))});
  }
  const std::string legend = add_columns(table, {tokens});
  return format_rows(table) + "a token: its bytes in the pages of one KV head, K and V\n" + legend;
}

std::string write_plan(const Run& run) {
  Table table{{"write", "tokens", "rotation", "a token", "read", "written", "sets"}};
  Column windows{"exact", kWindows};
  for (const WriteRow& row : run.write) {
    windows.values.push_back(windows_of(row.c));
    const RowBytes bytes = bytes_of(row.c);
    table.push_back({cache_name(*row.c.variant), fmt::format("{}", row.c.tokens), rotation_name(row.c),
                     fmt::format("{}", token_bytes(row.c.variant->k, row.c.variant->v)),
                     format_bytes(static_cast<double>(bytes.read)), format_bytes(static_cast<double>(bytes.written)),
                     fmt::format("{}", num_sets(bytes.total()))});
  }
  const std::string legend = add_columns(table, {windows});
  return format_rows(table) + legend;
}

Json timing_json(const Timing& t) { return {{"median_us", t.median_us}, {"min_us", t.min_us}, {"max_us", t.max_us}}; }

Json machine_json(const Run& run) {
  const Machine& m = *run.machine;
  return {{"gpu", m.gpu},
          {"driver", m.driver},
          {"compute_capability", m.compute_capability},
          {"cuda_runtime", m.cuda_runtime},
          {"cuda_driver", m.cuda_driver},
          {"multiprocessors", m.multiprocessors},
          {"clock_mhz", m.clock_mhz},
          {"memory_clock_mhz", m.memory_clock_mhz},
          {"memory_bytes", m.memory_bytes},
          {"l2_bytes", m.l2_bytes},
          {"copy_bytes_per_second", run.copy_bytes_per_second}};
}

Json row_json(const Run& run, const DecodeRow& row) {
  const DecodeCase& c = row.c;
  const CacheBytes bytes = bytes_of(c);
  Json json = {{"cache", cache_name(*c.variant)},
               {"variant", c.variant->name},
               {"head_dim", c.variant->k.head_dim},
               {"num_q_heads", c.num_q_heads},
               {"num_kv_heads", c.num_kv_heads},
               {"batch", c.batch},
               {"context", c.context},
               {"page_size", c.page_size},
               {"sink_tokens", c.exact.sink_tokens},
               {"recent_tokens", c.exact.recent_tokens},
               {"rotation", to_string(c.rotation)},
               {"bytes_per_token", token_bytes(c.variant->k, c.variant->v)},
               {"coded_bytes", bytes.coded},
               {"exact_bytes", bytes.exact},
               {"bytes", bytes.total()},
               {"sets", num_sets(bytes.total())},
               {"calls", num_calls(bytes.total())}};
  if (c.new_tokens > 1) json["new_tokens"] = c.new_tokens;
  if (row.explanation) json["explain"] = json_of(*row.explanation);
  if (!row.result) return json;
  json["time"] = timing_json(row.result->time);
  json["read_floor"] = timing_json(row.result->floor);
  json["error"] = row.result->error;
  json["bytes_per_second"] = row.bytes_per_second();
  json["copy_ratio"] = row.bytes_per_second() / run.copy_bytes_per_second;
  json["read_floor_ratio"] = row.read_floor_ratio();
  if (row.result->unchecked) json["unchecked"] = timing_json(*row.result->unchecked);
  if (const auto ratio = row.checks_ratio()) json["checks_ratio"] = *ratio;
  if (row.result->append) json["append"] = timing_json(*row.result->append);
  if (const auto ratio = new_tokens_ratio(run, row)) json["one_token_ratio"] = *ratio;
  if (row.bf16) json["bf16"] = timing_json(*row.bf16);
  if (row.sdpa) json["sdpa"] = timing_json(*row.sdpa);
  if (const auto speedup = row.speedup()) json["speedup"] = *speedup;
  return json;
}

Json row_json(const PrefillRow& row) {
  const PrefillCase& c = row.c;
  const CacheBytes bytes = bytes_of(cache_of(c));
  Json json = {{"cache", cache_name(*c.rows)},
               {"variant", c.attention->name},
               {"rows_variant", c.rows->name},
               {"head_dim", c.rows->k.head_dim},
               {"num_q_heads", c.num_q_heads},
               {"num_kv_heads", c.num_kv_heads},
               {"batch", c.batch},
               {"prefix", c.prefix},
               {"chunk", c.chunk},
               {"page_size", c.page_size},
               {"sink_tokens", c.exact.sink_tokens},
               {"recent_tokens", c.exact.recent_tokens},
               {"rotation", to_string(c.rotation)},
               {"bytes_per_token", token_bytes(c.rows->k, c.rows->v)},
               {"bytes", bytes.total()},
               {"operations", operations_of(c)},
               {"sets", num_sets(bytes.total())},
               {"calls", num_sets(bytes.total())}};
  if (!row.result) return json;
  json["time"] = timing_json(row.result->time);
  json["error"] = row.result->error;
  json["workspace_bytes"] = row.result->workspace_bytes;
  json["operations_per_second"] = row.operations_per_second();
  if (row.sdpa) json["sdpa"] = timing_json(*row.sdpa);
  if (const auto ratio = row.sdpa_ratio()) json["sdpa_ratio"] = *ratio;
  return json;
}

Json row_json(const Run& run, const WriteRow& row) {
  const WriteCase& c = row.c;
  const RowBytes bytes = bytes_of(c), unfused = unfused_bytes_of(c);
  Json json = {{"cache", cache_name(*c.variant)},
               {"variant", c.variant->name},
               {"head_dim", c.variant->k.head_dim},
               {"num_kv_heads", c.num_kv_heads},
               {"tokens", c.tokens},
               {"page_size", c.page_size},
               {"hadamard_order", c.dense ? 1 : c.order},
               {"dense_rotation", c.dense},
               {"transform", c.transform},
               {"clip_ratio", c.clip_ratio},
               {"scale_rule_k", to_string(rule_of(c, c.variant->k))},
               {"scale_rule_v", to_string(rule_of(c, c.variant->v))},
               {"bytes_per_token", token_bytes(c.variant->k, c.variant->v)},
               {"read_bytes", bytes.read},
               {"written_bytes", bytes.written},
               {"bytes", bytes.total()},
               {"sets", num_sets(bytes.total())},
               {"calls", num_calls(bytes.total())}};
  if (c.has_windows()) {
    json["windows"] = to_string(c.step);
    json["sink_tokens"] = c.exact.sink_tokens, json["recent_tokens"] = c.exact.recent_tokens;
  }
  if (c.order > 1 && !c.dense && !c.transform && !c.has_windows()) json["unfused_bytes"] = unfused.total();
  if (!row.result) return json;
  json["time"] = timing_json(row.result->time);
  json["same_size_copy"] = timing_json(row.result->copy);
  json["differing_code_ratio"] = row.result->differing_ratio;
  json["bytes_per_second"] = row.bytes_per_second();
  json["copy_ratio"] = row.bytes_per_second() / run.copy_bytes_per_second;
  if (row.result->unfused) json["unfused"] = timing_json(*row.result->unfused);
  if (row.result->coded_only) json["coded_only"] = timing_json(*row.result->coded_only);
  if (const auto ratio = row.windows_ratio()) json["windows_ratio"] = *ratio;
  if (row.result->unchecked) json["unchecked"] = timing_json(*row.result->unchecked);
  if (const auto ratio = row.checks_ratio()) json["checks_ratio"] = *ratio;
  if (const auto ratio = transform_ratio(run, row)) json["transform_ratio"] = *ratio;
  return json;
}

/// The lowest version that has what the document has.
const char* version_of(const Run& run) {
  const auto any = [](const auto& rows, const auto& has) { return std::any_of(rows.begin(), rows.end(), has); };
  const auto large_pages = [](const auto& row) { return row.c.page_size == 128; };
  if (any(run.decode, [](const DecodeRow& row) { return row.c.new_tokens > 1 || row.c.append; })) return "1.4";
  if (any(run.decode, large_pages) || any(run.write, large_pages) || any(run.prefill, large_pages) ||
      any(run.decode, [](const DecodeRow& row) { return row.c.unchecked; }) ||
      any(run.write, [](const WriteRow& row) { return row.c.has_windows() || row.c.unchecked; }))
    return "1.3";
  return any(run.decode, [](const DecodeRow& row) { return row.explanation.has_value(); }) ? "1.2" : "1.1";
}

/// Formats a target's value: microseconds, a multiple as "3.40x", a share as "90%".
std::string amount(const Target& target, double value) {
  if (target.measure.starts_with("us")) return microseconds(value);
  return target.measure == "over bf16" ? fmt::format("{:.2f}x", value) : percent(value);
}

}  // namespace

std::string text_of(const Run& run) {
  std::string text;
  if (run.machine) text += machine_line(run) + "\n";
  std::vector<std::string> tables;
  if (!run.decode.empty()) tables.push_back(run.machine ? decode_table(run) : decode_plan(run));
  if (!run.write.empty()) tables.push_back(run.machine ? write_table(run) : write_plan(run));
  if (!run.prefill.empty()) tables.push_back(run.machine ? prefill_table(run) : prefill_plan(run));
  return text + fmt::format("{}", fmt::join(tables, "\n"));
}

std::string text_of(const std::vector<Target>& targets) {
  Table table{{"target", "", "asked", "reached", ""}};
  int met = 0;
  for (const Target& target : targets) {
    met += target.met() ? 1 : 0;
    table.push_back({target.what, target.measure, (target.at_most ? "<= " : ">= ") + amount(target, target.asked),
                     target.reached ? amount(target, *target.reached) : "-",
                     !target.reached ? "not measured"
                     : target.met()  ? "met"
                                     : "MISSED"});
  }
  return format_table(table, "llrrl") + fmt::format("{} of {} targets met\n", met, targets.size());
}

Json json_of(const Run& run, const std::vector<Target>& targets) {
  Json decode = Json::array(), write = Json::array(), prefill = Json::array();
  for (const DecodeRow& row : run.decode) decode.push_back(row_json(run, row));
  for (const WriteRow& row : run.write) write.push_back(row_json(run, row));
  for (const PrefillRow& row : run.prefill) prefill.push_back(row_json(row));
  Json json = {{"schema_version", version_of(run)},
               {"tool", "kvq-bench " KVQ_VERSION},
               {"decode", decode},
               {"write", write},
               {"prefill", prefill}};
  if (run.machine) json["machine"] = machine_json(run);
  if (!run.sdpa.is_null()) json["sdpa"] = run.sdpa;
  if (!targets.empty()) json["targets"] = Json::array();
  for (const Target& target : targets) {
    Json one = {{"what", target.what},
                {"measure", target.measure},
                {"asked", target.asked},
                {"at_most", target.at_most},
                {"met", target.met()}};
    if (target.reached) one["reached"] = *target.reached;
    json["targets"].push_back(one);
  }
  return json;
}

}  // namespace kvq::bench
