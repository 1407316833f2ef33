#include "bench/rows.h"

#include "bench/copies.h"
#include "common/side_format.h"

#include <fmt/format.h>

#include <algorithm>

namespace kvq::bench {

std::optional<double> DecodeRow::best_bf16_us() const {
  if (!bf16 && !sdpa) return std::nullopt;
  return std::min(bf16 ? bf16->median_us : sdpa->median_us, sdpa ? sdpa->median_us : bf16->median_us);
}

namespace {

std::optional<double> ratio(const Timing& time, const std::optional<Timing>& baseline) {
  if (!baseline) return std::nullopt;
  return time.median_us / baseline->median_us;
}

}  // namespace

std::optional<double> DecodeRow::checks_ratio() const { return ratio(result->time, result->unchecked); }
std::optional<double> WriteRow::checks_ratio() const { return ratio(result->time, result->unchecked); }
std::optional<double> WriteRow::unfused_ratio() const {
  if (!result->unfused) return std::nullopt;
  return result->unfused->median_us / result->time.median_us;
}
std::optional<double> WriteRow::windows_ratio() const { return ratio(result->time, result->coded_only); }

std::optional<double> DecodeRow::speedup() const {
  const std::optional<double> best = best_bf16_us();
  if (!best) return std::nullopt;
  return *best / result->time.median_us;
}

double DecodeRow::bytes_per_second() const {
  return static_cast<double>(bytes_of(c).total()) / (result->time.median_us * 1e-6);
}

double DecodeRow::read_floor_ratio() const { return result->floor.median_us / result->time.median_us; }

double WriteRow::bytes_per_second() const {
  return static_cast<double>(bytes_of(c).total()) / (result->time.median_us * 1e-6);
}

double PrefillRow::operations_per_second() const { return operations_of(c) / (result->time.median_us * 1e-6); }

std::optional<double> PrefillRow::sdpa_ratio() const {
  if (!sdpa) return std::nullopt;
  return sdpa->median_us / result->time.median_us;
}

const DecodeRow* find(const Run& run, const DecodeCase& c) {
  const auto at = std::find_if(run.decode.begin(), run.decode.end(), [&](const DecodeRow& row) {
    return row.c.variant == c.variant && row.c.num_q_heads == c.num_q_heads && row.c.batch == c.batch &&
           row.c.context == c.context && row.c.new_tokens == c.new_tokens;
  });
  return at == run.decode.end() ? nullptr : &*at;
}

std::optional<double> new_tokens_ratio(const Run& run, const DecodeRow& row) {
  if (row.c.new_tokens == 1 || !row.result) return std::nullopt;
  DecodeCase one = row.c;
  one.new_tokens = 1;
  one.variant = find_decode_variant(one.key());
  const DecodeRow* found = find(run, one);
  if (!found || !found->result) return std::nullopt;
  return row.result->time.median_us / found->result->time.median_us;
}

const WriteRow* find(const Run& run, const WriteCase& c) {
  const auto at = std::find_if(run.write.begin(), run.write.end(), [&](const WriteRow& row) {
    return row.c.variant == c.variant && row.c.num_kv_heads == c.num_kv_heads && row.c.tokens == c.tokens &&
           row.c.order == c.order && row.c.dense == c.dense && row.c.transform == c.transform &&
           row.c.clip_ratio == c.clip_ratio && row.c.step == c.step && row.c.exact == c.exact;
  });
  return at == run.write.end() ? nullptr : &*at;
}

std::optional<double> transform_ratio(const Run& run, const WriteRow& row) {
  if (!row.c.transform || !row.result) return std::nullopt;
  WriteCase orthogonal = row.c;
  orthogonal.transform = false;
  const WriteRow* found = find(run, orthogonal);
  if (!found || !found->result) return std::nullopt;
  return row.result->time.median_us / found->result->time.median_us;
}

namespace {

constexpr double kOperationsPerByte = 150.0;  // operations that take as long as one byte; for progress only

double work_of(const PrefillCase& c) { return operations_of(c) / kOperationsPerByte; }

}  // namespace

double work_of(const Run& run) {
  double bytes = 0.0;
  for (const DecodeRow& row : run.decode) bytes += static_cast<double>(bytes_of(row.c).total());
  for (const WriteRow& row : run.write) bytes += static_cast<double>(bytes_of(row.c).total());
  for (const PrefillRow& row : run.prefill) bytes += work_of(row.c);
  return bytes;
}

SdpaShape sdpa_shape(const PrefillCase& c) {
  return {
      .batch = c.batch,
      .context = c.prefix + c.chunk,
      .q_len = c.chunk,
      .num_q_heads = c.num_q_heads,
      .num_kv_heads = c.num_kv_heads,
      .head_dim = c.rows->k.head_dim,
  };
}

SdpaShape sdpa_shape(const DecodeCase& c) {
  return {
      .batch = c.batch,
      .context = c.context,
      .q_len = c.new_tokens,
      .num_q_heads = c.num_q_heads,
      .num_kv_heads = c.num_kv_heads,
      .head_dim = c.variant->k.head_dim,
  };
}

void measure(int index, const std::string& python, Run& run, const OnProgress& on_progress) {
  const Device device(index);
  run.machine = device.machine();
  Sdpa sdpa;
  if (!python.empty()) {
    std::vector<SdpaShape> shapes;
    const auto add = [&](const SdpaShape& shape) {
      if (std::find(shapes.begin(), shapes.end(), shape) == shapes.end()) shapes.push_back(shape);
    };
    for (const DecodeRow& row : run.decode) add(sdpa_shape(row.c));
    for (const PrefillRow& row : run.prefill) add(sdpa_shape(row.c));
    on_progress(0.0, "PyTorch");
    sdpa = Sdpa(python, shapes);
    run.sdpa = sdpa.document();
  }
  run.copy_bytes_per_second = copy_bandwidth(device);

  double done = 0.0;
  std::vector<std::pair<SdpaShape, Timing>> baselines;  // bfloat16 variant of kvq, by shape
  const auto baseline_of = [&](const DecodeCase& c) -> std::optional<Timing> {
    const std::optional<DecodeCase> baseline = bf16_baseline(c);
    if (!baseline) return std::nullopt;
    const SdpaShape shape = sdpa_shape(c);
    for (const auto& [known, timing] : baselines)
      if (known == shape) return timing;
    baselines.emplace_back(shape, measure_decode(device, *baseline).time);
    return baselines.back().second;
  };
  for (DecodeRow& row : run.decode) {
    on_progress(done, fmt::format("decode {} {} x {}", cache_name(*row.c.variant), row.c.batch, row.c.context));
    row.result = measure_decode(device, row.c);
    row.bf16 = baseline_of(row.c);
    row.sdpa = sdpa.find(sdpa_shape(row.c));
    done += static_cast<double>(bytes_of(row.c).total());
  }
  for (WriteRow& row : run.write) {
    on_progress(done, fmt::format("write {} tokens{}, rotation {}", row.c.tokens,
                                  row.c.has_windows() ? ", windows" : "", rotation_name(row.c)));
    row.result = measure_write(device, row.c);
    done += static_cast<double>(bytes_of(row.c).total());
  }
  for (PrefillRow& row : run.prefill) {
    on_progress(
        done, fmt::format("prefill {} {} x {} + {}", cache_name(*row.c.rows), row.c.batch, row.c.prefix, row.c.chunk));
    row.result = measure_prefill(device, row.c);
    row.sdpa = sdpa.find(sdpa_shape(row.c));
    done += work_of(row.c);
  }
}

}  // namespace kvq::bench
