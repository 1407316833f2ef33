#include "bench/targets.h"

#include "bench/choose.h"

#include <fmt/format.h>

#include <algorithm>

namespace kvq::bench {

namespace {

enum class Measure { read_floor, over_bf16, microseconds, layer, of_int2, of_one_token };

struct DecodeTarget {
  const char *name, *cache;
  int batch, context;
  Measure measure;
  double asked;
  int new_tokens = 1;
};

constexpr int k32 = 32768, k128 = 131072;
constexpr DecodeTarget kDecode[] = {
    {"INT2", "u2g128", 32, k32, Measure::read_floor, 0.91},
    {"INT2", "u2g128", 32, k32, Measure::over_bf16, 6.2},
    {"INT2", "u2g128", 128, k32, Measure::read_floor, 0.94},
    {"INT2", "u2g128", 128, k32, Measure::over_bf16, 6.5},
    {"INT2 symmetric", "s2g128", 32, k32, Measure::read_floor, 0.91},
    {"INT2 symmetric", "s2g128", 32, k32, Measure::of_int2, 1.0},
    {"INT2", "u2g128", 8, k32, Measure::microseconds, 44.0},
    {"INT2", "u2g128", 8, k32, Measure::over_bf16, 5.5},
    {"INT2", "u2g128", 1, k128, Measure::microseconds, 24.0},
    {"INT2", "u2g128", 1, k128, Measure::over_bf16, 5.0},
    {"INT2", "u2g128", 1, k32, Measure::microseconds, 10.0},
    {"INT2", "u2g128", 1, k32, Measure::layer, 13.0},
    {"INT2", "u2g128", 1, k32, Measure::over_bf16, 3.5},
    {"INT2 g64", "u2g64", 32, k32, Measure::read_floor, 0.88},
    {"INT2 4 drafts", "u2g128", 32, k32, Measure::of_one_token, 1.15, 4},
    {"INT4", "u4g128", 32, k32, Measure::read_floor, 0.90},
    {"INT4", "u4g128", 32, k32, Measure::over_bf16, 3.4},
    {"paged bf16", "bf16", 32, k32, Measure::read_floor, 0.92},
};

/// Fused write of K and V: Hadamard of order 128, or dense rotation with clip. `asked` is a share of the copy
/// bandwidth.
struct WriteTarget {
  const char *name, *cache;
  double asked;
  int tokens;
  bool dense_and_clip = false;
};
constexpr WriteTarget kWrite[] = {
    {"INT4", "u4g128", 0.75, 8192},
    {"INT4", "u4g128", 0.75, 32768},
    {"INT2 norm", "s2g128", 0.70, 8192},
    {"INT2 norm", "s2g128", 0.70, 32768},
    {"INT2 dense", "u2g128", 0.45, 8192, true},
    {"INT2 dense", "u2g128", 0.55, 32768, true},
};

/// Writes of 8192 tokens of a prompt with windows, Hadamard of order 128.
struct WindowsTarget {
  const char *name, *cache;
};
constexpr WindowsTarget kWindows[] = {{"INT2", "u2g128"}, {"INT4", "u4g128"}};
constexpr int kWindowsTokens = 8192;

/// Largest time of a write with windows, over the time of the same write without.
constexpr double kWindowsTime = 1.15;

constexpr Windows kExact = {.sink_tokens = 64, .recent_tokens = 256};

/// Largest time of a write with a transform (channel scales before the Hadamard, or a matrix that is not orthogonal),
/// over the time of the same write without one.
constexpr double kTransformTime = 1.03;

/// Prefill of new chunks on INT2 caches.
struct PrefillTarget {
  int batch, prefix, chunk;
  double asked;
};
constexpr PrefillTarget kPrefill[] = {{1, 30720, 2048, 0.75}, {8, 30720, 2048, 0.75}};

DecodeCase case_of(const DecodeTarget& t) {
  const bool exact = std::string(t.cache) == "bf16";
  return {
      .variant = &choose_decode(t.cache, t.cache, 128, 4, true, t.new_tokens),
      .num_q_heads = 32,
      .num_kv_heads = 8,
      .batch = t.batch,
      .context = t.context,
      .new_tokens = t.new_tokens,
      .page_size = 64,
      .exact = exact ? Windows{} : kExact,
      .rotation = exact ? CaseRotation::none : CaseRotation::dense,
      .append = !exact,
  };
}

WriteCase case_of(const WriteTarget& t) {
  return {
      .variant = &choose_write(t.cache, t.cache, 128, true),
      .num_kv_heads = 8,
      .tokens = t.tokens,
      .page_size = 64,
      .order = t.dense_and_clip ? 1 : 128,
      .dense = t.dense_and_clip,
      .clip_ratio = t.dense_and_clip ? 0.96 : 1.0,
      .symmetric_rule = ScaleRule::norm,
  };
}

WriteCase case_of(const WindowsTarget& t) {
  return {
      .variant = &choose_write(t.cache, t.cache, 128, true),
      .num_kv_heads = 8,
      .tokens = kWindowsTokens,
      .page_size = 64,
      .order = 128,
      .exact = kExact,
  };
}

WriteCase transformed(WriteCase c) {
  c.transform = true;
  return c;
}

PrefillCase case_of(const PrefillTarget& t) {
  const DequantizeVariant& rows = choose_prefill("u2g128", "u2g128", 128, true);
  return {
      .rows = &rows,
      .attention = find_prefill_variant(rows),
      .num_q_heads = 32,
      .num_kv_heads = 8,
      .batch = t.batch,
      .prefix = t.prefix,
      .chunk = t.chunk,
      .page_size = 64,
      .exact = kExact,
      .rotation = CaseRotation::dense,
  };
}

const char* text_of(Measure measure) {
  switch (measure) {
    case Measure::read_floor: return "of read floor";
    case Measure::over_bf16: return "over bf16";
    case Measure::microseconds: return "us";
    case Measure::layer: return "us, layer";
    case Measure::of_int2: return "of INT2's time";
    case Measure::of_one_token: return "of one token";
  }
  return "";
}

std::optional<double> reached(const Run& run, const DecodeRow& row, Measure measure) {
  if (!row.result) return std::nullopt;
  switch (measure) {
    case Measure::read_floor: return row.read_floor_ratio();
    case Measure::over_bf16: return row.speedup();
    case Measure::microseconds: return row.result->time.median_us;
    case Measure::layer: return row.result->append->median_us;
    case Measure::of_one_token: return new_tokens_ratio(run, row);
    case Measure::of_int2: {
      DecodeCase affine = row.c;
      affine.variant = &choose_decode("u2g128", "u2g128", 128, 4, true);
      return row.result->time.median_us / find(run, affine)->result->time.median_us;
    }
  }
  return std::nullopt;
}

}  // namespace

Run target_cases() {
  Run run;
  for (const DecodeTarget& t : kDecode)
    if (const DecodeCase c = case_of(t); !find(run, c)) run.decode.push_back({c, {}, {}, {}});
  for (const WriteTarget& t : kWrite) run.write.push_back({case_of(t), {}});
  for (const WriteTarget& t : kWrite) run.write.push_back({transformed(case_of(t)), {}});
  for (const WindowsTarget& t : kWindows) run.write.push_back({case_of(t), {}});
  for (const PrefillTarget& t : kPrefill) run.prefill.push_back({case_of(t), {}, {}});
  return run;
}

std::vector<Target> judge(const Run& run) {
  std::vector<Target> targets;
  for (const DecodeTarget& t : kDecode) {
    const DecodeRow& row = *find(run, case_of(t));
    targets.push_back({
        .what = fmt::format("{} decode {} x {}k", t.name, t.batch, t.context / 1024),
        .measure = text_of(t.measure),
        .asked = t.asked,
        .at_most = t.measure != Measure::read_floor && t.measure != Measure::over_bf16,
        .reached = reached(run, row, t.measure),
    });
  }
  for (const WriteTarget& t : kWrite) {
    const WriteRow& row = *find(run, case_of(t));
    Target target{
        .what = fmt::format("{} write {}k tokens", t.name, t.tokens / 1024),
        .measure = "of copy",
        .asked = t.asked,
        .at_most = false,
        .reached = {},
    };
    if (row.result) target.reached = row.bytes_per_second() / run.copy_bytes_per_second;
    targets.push_back(target);
  }
  for (const WriteTarget& t : kWrite)
    targets.push_back({
        .what = fmt::format("{} transform write {}k", t.name, t.tokens / 1024),
        .measure = "of plain",
        .asked = kTransformTime,
        .at_most = true,
        .reached = transform_ratio(run, *find(run, transformed(case_of(t)))),
    });
  for (const WindowsTarget& t : kWindows) {
    const WriteRow& row = *find(run, case_of(t));
    targets.push_back({
        .what = fmt::format("{} write {}k with windows", t.name, kWindowsTokens / 1024),
        .measure = "of coded only",
        .asked = kWindowsTime,
        .at_most = true,
        .reached = row.result ? row.windows_ratio() : std::nullopt,
    });
  }
  for (const PrefillTarget& t : kPrefill) {
    const auto row =
        std::find_if(run.prefill.begin(), run.prefill.end(), [&](const PrefillRow& r) { return r.c.batch == t.batch; });
    targets.push_back({
        .what = fmt::format("INT2 prefill {} x {}k + {}k", t.batch, t.prefix / 1024, t.chunk / 1024),
        .measure = "of cuDNN",
        .asked = t.asked,
        .at_most = false,
        .reached = row->result ? row->sdpa_ratio() : std::nullopt,
    });
  }
  return targets;
}

}  // namespace kvq::bench
