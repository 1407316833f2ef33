#include <kvq/codec/poisoned.h>
#include <kvq/compute/cuda/coded.h>
#include <kvq/compute/cuda/moments.h>
#include <kvq/compute/device_bytes.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <set>
#include <variant>

namespace kvq::cuda {

namespace {

constexpr const char* kWhat = "coding costs";
static_assert(kMostStates == TrellisGroup::kMostStates && kSeamLength == TrellisGroup::kSeamLength);
static_assert(kWarmUp == IntegerSearch::kWarmUp && kLeastOpen == IntegerSearch::kLeastOpen &&
              kLargestY == IntegerSearch::kLargestY && kFarInUnits == IntegerSearch::kFarInUnits);
/// Bytes of errors of the tasks that are coded at a time, unless one task takes more.
constexpr std::int64_t kBytesAtOnce = std::int64_t{1} << 30;
constexpr std::int64_t kMostTasks = 65535;  ///< the y extent of a grid

std::size_t size(std::int64_t x) { return static_cast<std::size_t>(x); }

/// Arrays that are copied to the device together. Offsets are handed out first, addresses when all is known.
class Packed {
 public:
  template <typename T>
  std::size_t add(std::span<const T> data) {
    const std::size_t at = (bytes_.size() + 15) / 16 * 16;
    bytes_.resize(at + data.size_bytes());
    if (!data.empty()) std::memcpy(bytes_.data() + at, data.data(), data.size_bytes());
    return at;
  }
  const std::byte* upload(Context& context, Buffer& buffer) const {
    return context.upload(buffer, bytes_.data(), bytes_.size(), kWhat);
  }

 private:
  std::vector<std::byte> bytes_;
};

/// Offsets of a RotatedData and of a codec's groups in Packed.
struct PlacedRows {
  std::size_t rows, metric, weights;
};
struct PlacedCodec {
  std::vector<CodedGroup> groups;
  std::vector<std::size_t> tables;          ///< of each group
  bool trellis = false, survivors = false;  ///< whether there is one; whether it needs_survivors()
};

PlacedRows place_rows(Packed& packed, const RotatedData& data) {
  return {packed.add(std::span(data.rows)), packed.add(std::span(data.metric)), packed.add(std::span(data.weights))};
}

CodedGroup uniform_group(const UniformCoder& coder, int first, int count) {
  return {.first = first,
          .count = count,
          .bits = coder.bits,
          .levels = coder.levels,
          .zero = coder.zero,
          .rule = coder.rule,
          .type = coder.scale_type};
}

/// Adds a group of RowCodec.
struct PlaceGroup {
  Packed& packed;
  PlacedCodec& to;
  int first, count, dim;

  void operator()(const UniformCoder& coder) const {
    to.groups.push_back(uniform_group(coder, first, count));
    to.tables.push_back(0);
  }
  void operator()(const CodebookGroup& group) const {
    std::vector<float> tables(group.table().begin(), group.table().end());
    tables.insert(tables.end(), group.thresholds().begin(), group.thresholds().end());
    add({.kind = CodedGroup::Kind::codebook,
         .bits = static_cast<int>(std::lround(std::log2(group.table().size()))),
         .rule = group.rule(),
         .type = group.type()},
        tables);
  }
  void operator()(const TrellisGroup& group) const {
    to.trellis = true;
    const bool integers = group.integer_search() != nullptr;
    to.survivors = to.survivors || needs_survivors(group.bits(), group.memory(), dim, integers);
    add({.kind = CodedGroup::Kind::trellis,
         .bits = group.bits(),
         .memory = group.memory(),
         .integers = integers,
         .rule = group.rule(),
         .type = group.type()},
        group.kernel_table());
  }

 private:
  void add(CodedGroup group, std::span<const float> table) const {
    group.first = first, group.count = count;
    to.groups.push_back(group);
    to.tables.push_back(packed.add(table));
  }
};

PlacedCodec place_codec(Packed& packed, const RowCodec& codec) {
  PlacedCodec placed;
  if (const UniformCoder* coder = codec.uniform()) {
    for (int first = 0; first < codec.dim(); first += coder->group_size)
      PlaceGroup{packed, placed, first, coder->group_size, codec.dim()}(*coder);
  } else {
    for (const RowCodec::Group& group : codec.groups()) {
      std::visit(PlaceGroup{packed, placed, group.first, group.count, codec.dim()}, group.coder);
      placed.groups.back().gain = group.gain;
    }
    if (codec.row_scale() && !placed.groups.empty()) {
      // The first group's rule and type are the row's; those of symmetric segments of a trellis coder may differ.
      placed.groups.front().rule = codec.row_scale()->rule;
      placed.groups.front().type = codec.row_scale()->type;
    }
  }
  return placed;
}

/// Rank of the clip threshold among the magnitudes of a row, -1 without a clip: clip_threshold().
int clip_index(const RowCodec& codec) {
  const UniformCoder* coder = codec.uniform();
  if (coder == nullptr || coder->rule != ScaleRule::minmax || !(codec.clip_ratio() < 1.0)) return -1;
  return std::min(static_cast<int>(std::floor(codec.clip_ratio() * codec.dim())), codec.dim() - 1);
}

/// Groups of codecs, in Packed and then on the device.
class DeviceCodecs {
 public:
  void add(Packed& packed, const RowCodec& codec) {
    if (!placed_.contains(&codec)) placed_[&codec] = place_codec(packed, codec);
  }
  /// @param base  address of Packed
  void upload(Context& context, const std::byte* base) {
    std::vector<CodedGroup> all;
    for (auto& [codec, placed] : placed_) {
      first_[codec] = all.size();
      row_scale_ = row_scale_ || codec->row_scale() != nullptr;
      trellis_ = trellis_ || placed.trellis, survivors_ = survivors_ || placed.survivors;
      for (std::size_t g = 0; g < placed.groups.size(); ++g) {
        placed.groups[g].table = reinterpret_cast<const float*>(base + placed.tables[g]);
        all.push_back(placed.groups[g]);
      }
    }
    groups_ = context.upload(context.groups, all.data(), all.size(), kWhat);
  }
  /// Fills in what of a task is the codec's.
  void describe(const RowCodec& codec, CodedRows& task) const {
    task.groups = groups_ + first_.at(&codec), task.num_groups = static_cast<int>(placed_.at(&codec).groups.size());
    task.dim = codec.dim(), task.clip_index = clip_index(codec), task.exact = codec.is_exact();
    task.row_scale = codec.row_scale() != nullptr;
  }
  bool have_trellis() const { return trellis_; }
  bool have_row_scale() const { return row_scale_; }
  bool need_survivors() const { return survivors_; }

 private:
  std::map<const RowCodec*, PlacedCodec> placed_;
  std::map<const RowCodec*, std::size_t> first_;
  const CodedGroup* groups_ = nullptr;
  bool trellis_ = false, survivors_ = false, row_scale_ = false;
};

/// Tasks of equal dim, on the device with their errors.
struct CodedBatch {
  const CodedRows* on_device = nullptr;
  std::vector<CodedRows> tasks = {};
  int most_rows = 0, dim = 0;
  const int* failed = nullptr;  ///< on the device: 1 if a row is not finite
};

/// Codes the rows of tasks that are described but not yet on the device. @return  the address of the result: 1 if a row
/// is not finite
const int* code_tasks(Context& context, CodedBatch& batch, const DeviceCodecs& codecs) {
  for (const CodedRows& task : batch.tasks) batch.most_rows = std::max(batch.most_rows, task.count);
  batch.on_device = context.upload(context.tasks, batch.tasks.data(), batch.tasks.size(), kWhat);
  int* failed = context.status.room<int>(1, kWhat);
  check(cudaMemsetAsync(failed, 0, sizeof(int), context.stream()), kWhat);
  std::uint8_t* survivors = codecs.need_survivors()
                                ? context.solver_memory.room<std::uint8_t>(size(trellis_bytes(batch.dim)), kWhat)
                                : nullptr;
  if (batch.most_rows > 0)
    code_rows(batch.on_device, static_cast<int>(batch.tasks.size()), batch.most_rows, batch.dim, codecs.have_trellis(),
              codecs.have_row_scale(), survivors, failed, context.stream());
  check(cudaGetLastError(), kWhat);
  return failed;
}

/// Codes the rows of tasks; their dims are equal.
CodedBatch code(Context& context, std::span<const CodingTask> tasks) {
  Packed packed;
  std::map<const RotatedData*, PlacedRows> rows;
  DeviceCodecs codecs;
  CodedBatch batch{.dim = tasks.front().codec->dim()};
  std::size_t errors = 0;
  for (const CodingTask& task : tasks) {
    if (!rows.contains(task.rows)) rows[task.rows] = place_rows(packed, *task.rows);
    codecs.add(packed, *task.codec);
    errors += task.rows->rows.size();
  }
  const std::byte* base = packed.upload(context, context.rows);
  codecs.upload(context, base);
  const auto floats = [&](std::size_t offset) { return reinterpret_cast<const float*>(base + offset); };
  float* error_rows = context.outputs.room<float>(errors, kWhat);
  for (const CodingTask& task : tasks) {
    const PlacedRows& at = rows[task.rows];
    CodedRows coded{.rows = floats(at.rows),
                    .metric = task.rows->metric.empty() ? nullptr : floats(at.metric),
                    .weights = task.rows->weights.empty() ? nullptr : floats(at.weights),
                    .count = static_cast<int>(task.rows->rows.size() / size(batch.dim)),
                    .errors = error_rows};
    codecs.describe(*task.codec, coded);
    batch.tasks.push_back(coded);
    error_rows += task.rows->rows.size();
  }
  batch.failed = code_tasks(context, batch, codecs);
  return batch;
}

/// Throws what the codec throws, if a row of the tasks is not finite. Waits for the device.
void expect_finite_rows(Context& context, const CodedBatch& batch, std::span<const CodingTask> tasks) {
  if (context.download(batch.failed, 1, kWhat)[0] == 0) return;
  for (const CodingTask& task : tasks)
    for (std::size_t at = 0; at < task.rows->rows.size(); at += size(batch.dim))
      expect_finite(std::span(task.rows->rows).subspan(at, size(batch.dim)));
}

/// Bytes of a codec's tables.
std::int64_t table_bytes(const RowCodec& codec) {
  struct Numbers {
    std::size_t operator()(const UniformCoder&) const { return 0; }
    std::size_t operator()(const CodebookGroup& group) const {
      return group.table().size() + group.thresholds().size();
    }
    std::size_t operator()(const TrellisGroup& group) const { return group.kernel_table().size(); }
  };
  std::size_t bytes = static_cast<std::size_t>(codec.dim()) * sizeof(CodedGroup);  // no more groups than channels
  if (codec.uniform() == nullptr)
    for (const RowCodec::Group& group : codec.groups())
      bytes += std::visit(Numbers{}, group.coder) * sizeof(float) + 16;
  return static_cast<std::int64_t>(bytes);
}

bool has_survivors(const RowCodec& codec) {
  return codec.uniform() == nullptr &&
         std::any_of(codec.groups().begin(), codec.groups().end(), [&](const RowCodec::Group& group) {
           const auto* trellis = std::get_if<TrellisGroup>(&group.coder);
           return trellis != nullptr && needs_survivors(trellis->bits(), trellis->memory(), codec.dim(),
                                                        trellis->integer_search() != nullptr);
         });
}

/// What a batch of tasks takes, in bytes.
struct BatchBytes {
  bool covariance = false;  ///< the moment of one task's errors is computed, too; else sums of each row
  bool trellis = false;
  std::int64_t packed = 0, errors = 0, most_rows = 0, tasks = 0;
  int dim = 0;

  std::int64_t all() const {
    const auto of_task = static_cast<std::int64_t>(sizeof(CodedRows) + sizeof(CodedSums));
    const std::int64_t results = covariance ? moment_bytes(most_rows, dim, false)
                                            : tasks * most_rows * static_cast<std::int64_t>(sizeof(CodedSums));
    return packed + errors + tasks * of_task + results + (trellis ? trellis_bytes(dim) : 0);
  }
};

/// Adds up the bytes of tasks, which may have rows and codecs in common.
class CountedBatch {
 public:
  explicit CountedBatch(bool covariance) { bytes.covariance = covariance; }

  void add(const CodingTask& task) {
    constexpr std::int64_t kAligned = 3 * 16;
    const auto floats = [](const std::vector<float>& numbers) { return 4 * static_cast<std::int64_t>(numbers.size()); };
    const RotatedData& data = *task.rows;
    if (rows_.insert(&data).second)
      bytes.packed += floats(data.rows) + floats(data.metric) + floats(data.weights) + kAligned;
    if (codecs_.insert(task.codec).second) bytes.packed += table_bytes(*task.codec);
    bytes.trellis = bytes.trellis || has_survivors(*task.codec);
    bytes.errors += floats(data.rows);
    bytes.dim = task.codec->dim();
    bytes.most_rows = std::max(bytes.most_rows, static_cast<std::int64_t>(data.rows.size()) / bytes.dim);
    ++bytes.tasks;
  }

  BatchBytes bytes;

 private:
  std::set<const RotatedData*> rows_;
  std::set<const RowCodec*> codecs_;
};

/// The first tasks that are coded together: of one dimension, and within `most` bytes if they are more than one.
BatchBytes batch_of(std::span<const CodingTask> tasks, std::int64_t most, bool covariance) {
  CountedBatch batch(covariance);
  for (const CodingTask& task : tasks) {
    const BatchBytes before = batch.bytes;
    if (before.tasks > 0 &&
        (task.codec->dim() != before.dim || before.errors >= kBytesAtOnce || before.tasks == kMostTasks))
      break;
    batch.add(task);
    if (before.tasks > 0 && batch.bytes.all() > most) return before;
  }
  return batch.bytes;
}

/// Calls f(batch, number of its first task) for tasks in order, as many at a time as there is room for.
template <typename F>
void for_each_batch(Context& context, std::span<const CodingTask> tasks, bool covariance, F f) {
  constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();
  Need need{.what = kWhat};
  for (std::size_t first = 0; first < tasks.size();) {
    const BatchBytes batch = batch_of(tasks.subspan(first), kAny, covariance);
    need.wanted = std::max(need.wanted, batch.all());
    first += static_cast<std::size_t>(batch.tasks);
  }
  for (const CodingTask& task : tasks)
    need.smallest = std::max(need.smallest, batch_of({&task, 1}, kAny, covariance).all());
  const Claim claim(context.lane, need);
  for (std::size_t first = 0; first < tasks.size();) {
    const auto count = static_cast<std::size_t>(batch_of(tasks.subspan(first), claim.bytes(), covariance).tasks);
    f(code(context, tasks.subspan(first, count)), first);
    first += count;
  }
}

}  // namespace

std::vector<CodedSums> code_and_weigh(Context& context, std::span<const CodingTask> tasks, bool with_energy) {
  std::vector<CodedSums> sums(tasks.size());
  for_each_batch(context, tasks, false, [&](const CodedBatch& batch, std::size_t first) {
    const std::size_t count = batch.tasks.size();
    if (batch.most_rows == 0) return;
    CodedSums* row_sums = context.products.room<CodedSums>(count * size(batch.most_rows), kWhat);
    CodedSums* own = context.sums.room<CodedSums>(count, kWhat);
    weigh_errors(batch.on_device, static_cast<int>(count), batch.most_rows, batch.dim, with_energy, row_sums, own,
                 context.stream());
    check(cudaGetLastError(), kWhat);
    const std::vector<CodedSums> found = context.download(own, count, kWhat);
    expect_finite_rows(context, batch, tasks.subspan(first, count));
    std::copy(found.begin(), found.end(), sums.begin() + static_cast<std::ptrdiff_t>(first));
  });
  return sums;
}

std::vector<std::vector<double>> error_covariances(Context& context, std::span<const CodingTask> tasks) {
  std::vector<std::vector<double>> covariances;
  for_each_batch(context, tasks, true, [&](const CodedBatch& batch, std::size_t first) {
    expect_finite_rows(context, batch, tasks.subspan(first, batch.tasks.size()));
    for (const CodedRows& task : batch.tasks) {
      const Rows errors{
          .data = task.errors, .token_stride = task.dim, .tokens = task.count, .heads = 1, .dim = task.dim};
      MomentSum sum(task.dim);
      add_moment(context, errors, {}, sum);
      sum.symmetrize();
      for (double& value : sum.sum) value /= static_cast<double>(task.count);
      covariances.push_back(std::move(sum.sum));
    }
  });
  return covariances;
}

void quantize_rows(Context& context, std::span<const RowCodec> codecs, const float* rows, int count, float* to) {
  Packed packed;
  DeviceCodecs on_device;
  CodedBatch batch{.dim = codecs.front().dim()};
  for (const RowCodec& codec : codecs) on_device.add(packed, codec);
  packed.add(std::span<const float>(std::vector<float>(1)));  // exact codecs have no tables
  on_device.upload(context, packed.upload(context, context.rows));
  const std::int64_t numbers = std::int64_t{count} * batch.dim;
  for (std::size_t h = 0; h < codecs.size(); ++h) {
    const auto at = static_cast<std::int64_t>(h) * numbers;
    CodedRows coded{.rows = rows + at, .count = count, .errors = to + at, .keeps_rows = true};
    on_device.describe(codecs[h], coded);
    batch.tasks.push_back(coded);
  }
  const int* failed = code_tasks(context, batch, on_device);
  if (context.download(failed, 1, kWhat)[0] == 0) return;
  const std::vector<float> all = context.download(rows, size(numbers) * codecs.size(), kWhat);
  for (std::size_t at = 0; at < all.size(); at += size(batch.dim))
    expect_finite(std::span(all).subspan(at, size(batch.dim)));
}

}  // namespace kvq::cuda
