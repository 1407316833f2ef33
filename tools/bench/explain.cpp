#include "bench/explain.h"

#include "common/plural.h"
#include "common/side_format.h"
#include "common/table.h"

#include <kvq/core/error.h>

#include <fmt/format.h>

#include <vector>

namespace kvq::bench {

namespace {

/// One number, for the table and for the document.
struct Field {
  const char* key;
  const char* label;
  std::int64_t value;
};
struct Section {
  const char* key;
  std::vector<Field> fields;
};

Section policy_of(const DecodePolicy& p) {
  return {"policy",
          {
              {"multiprocessor_blocks", "decode blocks of a multiprocessor", p.multiprocessor_blocks},
              {"registers", "registers of a thread, decode", p.registers},
              {"rotate_registers", "registers of a thread, queries and combine", p.rotate_registers},
              {"stage_bytes", "bytes of a block's stages, at most", p.ring_bytes},
              {"first_load_divisor", "part of the first work tile that the first load has, 1 /", p.first_load_divisor},
              {"least_first_load", "stages of the first load, at least", p.least_first_load},
              {"loads_at_once", "stages that are issued at once", p.loads_at_once},
              {"query_blocks", "queries blocks of a multiprocessor", p.query_blocks},
              {"displaced_blocks", "decode blocks that a queries block displaces", p.displaced_blocks},
              {"combine_blocks", "combine blocks of a multiprocessor", p.combine_blocks},
              {"combine_batch", "partial results that a warp loads at once", p.combine_batch},
              {"poll_nanoseconds", "ns between looks at a completion counter", p.poll_nanoseconds},
              {"long_queue", "KV chunks a block of a long queue", kDecodeRounds.long_queue},
              {"very_long_queue", "KV chunks a block of a very long queue", kDecodeRounds.very_long_queue},
          }};
}

Section kernel_of(const DecodeKernelShape& k) {
  return {"kernel",
          {
              {"heads", "rows of a work tile, with padding", k.heads},
              {"consumer_warps", "consumer warps of a block", k.consumer_warps},
              {"stages", "stages of a block", k.stages},
              {"stage_bytes", "bytes of a stage", k.stage_bytes},
              {"coded_tokens", "quantized tokens of a KV chunk", k.chunk.coded},
              {"exact_tokens", "exact tokens of a KV chunk", k.chunk.exact},
              {"query_buffers", "query buffers of a block", k.query_buffers},
              {"shared_bytes", "shared memory of a block", k.shared_bytes},
          }};
}

Section schedule_of(const DecodeSchedule& s) {
  return {"schedule",
          {
              {"query_blocks", "blocks of the queries kernel", s.grids.query_blocks},
              {"decode_blocks", "blocks of the decode kernel", s.grids.decode_blocks},
              {"idle_blocks", "decode blocks that stay idle", s.idle_blocks},
              {"combine_blocks", "blocks of the combine kernel", s.grids.combine_blocks},
              {"work_tiles", "work tiles", s.work_tiles},
              {"chunks", "KV chunks of the queue", static_cast<std::int64_t>(s.chunks)},
              {"splits", "splits of the queue", s.splits.count()},
              {"split_tiles", "work tiles of several splits", s.split_tiles},
              {"most_splits", "splits of a work tile, at most", s.most_splits},
              {"partials", "partial results", s.partials},
              {"combine_units", "units of the combine kernel", s.grids.combine.count() * s.num_kv_heads},
              {"unit_sequences", "sequences of a unit", s.grids.combine.unit_passes},
              {"unit_heads", "query heads of a unit", s.grids.combine.unit_rows},
              {"tail_sequences", "sequences of the tail", s.grids.combine.tail_passes},
          }};
}

Section workspace_of(const DecodeWorkspace& w) {
  const auto bytes = [](std::size_t size) { return static_cast<std::int64_t>(size); };
  return {"workspace",
          {
              {"work_counter", "work counter, at byte", bytes(w.work_counter)},
              {"completions", "completion counters, at byte", bytes(w.completions)},
              {"partials", "partial results, at byte", bytes(w.partials)},
              {"operands", "queries, at byte", bytes(w.operands)},
              {"total", "bytes in all", bytes(w.total)},
          }};
}

std::vector<Section> sections_of(const Explanation& e) {
  return {policy_of(e.kernel.policy), kernel_of(e.kernel), schedule_of(e.schedule), workspace_of(e.workspace)};
}

/// Chunks of the longest split of a round.
std::int64_t most_chunks(const decode::Splits& splits, int round) {
  const std::int64_t chunks = splits.round_begin(round + 1) - splits.round_begin(round);
  return (chunks + splits.per_round - 1) / splits.per_round;
}

}  // namespace

Explanation explain(const DecodeCase& c, int multiprocessors) {
  Explanation e;
  e.kernel = c.variant->shape;
  e.device = assumed_device(e.kernel, multiprocessors);
  const std::vector<std::int32_t> lengths(static_cast<std::size_t>(c.batch), c.context);
  e.schedule = make_decode_schedule(e.kernel, e.device,
                                    {.num_q_heads = c.num_q_heads,
                                     .num_kv_heads = c.num_kv_heads,
                                     .windows = {c.exact.sink_tokens, c.exact.recent_tokens},
                                     .new_tokens = c.new_tokens,
                                     .lengths = lengths});
  if (e.schedule.too_long)
    throw Error{ErrorKind::unsupported, fmt::format("batch {}, context {}: {} KV chunks, expected fewer than 2^32",
                                                    c.batch, c.context, e.schedule.chunks)};
  e.workspace = make_decode_workspace(
      static_cast<std::size_t>(e.schedule.work_tiles), static_cast<std::size_t>(decode::cut_partials(e.device.blocks)),
      static_cast<std::size_t>(e.kernel.partial_bytes), static_cast<std::size_t>(e.kernel.operand_bytes));
  return e;
}

std::string text_of(const DecodeCase& c, const Explanation& e) {
  std::string text = fmt::format("{}, {} x {}, {}, {}, {} assumed\n", cache_name(*c.variant), c.batch, c.context,
                                 counted(c.num_q_heads, "query head"), counted(c.num_kv_heads, "KV head"),
                                 counted(e.device.multiprocessors, "multiprocessor"));
  std::vector<std::vector<std::string>> table{{"", "", ""}};
  for (const Section& section : sections_of(e)) {
    const char* title = section.key;
    for (const Field& field : section.fields) {
      table.push_back({title, field.label, fmt::format("{}", field.value)});
      title = "";
    }
    if (section.key != std::string("schedule")) continue;
    for (int round = 0; round < e.schedule.splits.rounds; ++round)
      table.push_back({"", fmt::format("round {}: splits x KV chunks of one, at most", round + 1),
                       fmt::format("{} x {}", e.schedule.splits.per_round, most_chunks(e.schedule.splits, round))});
  }
  const std::string body = format_table(table, "llr");
  return text + body.substr(body.find('\n') + 1);
}

Json json_of(const Explanation& e) {
  Json json = {{"multiprocessors", e.device.multiprocessors}};
  for (const Section& section : sections_of(e))
    for (const Field& field : section.fields) json[section.key][field.key] = field.value;
  Json rounds = Json::array();
  for (int round = 0; round < e.schedule.splits.rounds; ++round)
    rounds.push_back({{"splits", e.schedule.splits.per_round}, {"chunks", most_chunks(e.schedule.splits, round)}});
  json["schedule"]["rounds"] = rounds;
  return json;
}

}  // namespace kvq::bench
