#include "window_cache.h"

#include "device_memory.h"
#include "plain_attention.cuh"

#include <kvq/plan/layer_pages.h>
#include <kvq/runtime/kernels/plan_step/launch.h>
#include <kvq/runtime/prepare.h>
#include <kvq/device/launch.cuh>

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>
#include <stdexcept>
#include <string>

namespace kvq::test {

namespace {

using test::check;
void check(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

/// Device memory that is initialized with bytes of 0xFF, which are NaNs.
template <typename T>
class Buffer {
 public:
  explicit Buffer(std::size_t count = 0) : count_(count) {
    if (count == 0) return;
    check(cudaMalloc(&data_, count * sizeof(T)), "cudaMalloc");
    check(cudaMemset(data_, 0xFF, count * sizeof(T)), "cudaMemset");
  }
  explicit Buffer(const std::vector<T>& values) : Buffer(values.size()) { put(values); }
  Buffer(Buffer&& other) noexcept : data_(other.data_), count_(other.count_) { other.data_ = nullptr; }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_), std::swap(count_, other.count_);
    return *this;
  }
  ~Buffer() { cudaFree(data_); }
  T* get() const { return static_cast<T*>(data_); }
  std::size_t size() const { return count_; }
  void put(const std::vector<T>& values) const {
    if (values.size() > count_) throw std::runtime_error("a buffer is too small");
    check(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  std::vector<T> all() const {
    std::vector<T> values(count_);
    check(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return values;
  }

 private:
  void* data_ = nullptr;
  std::size_t count_ = 0;
};

int shift_of(int page_size) { return std::countr_zero(static_cast<unsigned>(page_size)); }

/// plan_step's arrays.
struct PlanMemory {
  Buffer<std::int32_t> seq_lens, token_indptr, page_table, page_indptr, sink_slots, ring_slots, exact_from;
  Buffer<std::uint64_t> ids;
  Buffer<std::int64_t> slot_mapping, window_mapping;
  Buffer<RingState> states;
  Buffer<FaultRecord> faults;
  PlanStepParams params;

  PlanMemory(const StepCase& c, int max_tokens) {
    const int batch = static_cast<int>(c.page_tables.size());
    const auto sequences = static_cast<std::size_t>(batch), rows = static_cast<std::size_t>(max_tokens);
    seq_lens = Buffer<std::int32_t>(sequences), token_indptr = Buffer<std::int32_t>(sequences + 1);
    sink_slots = Buffer<std::int32_t>(c.sink_slots), ring_slots = Buffer<std::int32_t>(c.ring_slots);
    exact_from = Buffer<std::int32_t>(c.exact_from), ids = Buffer<std::uint64_t>(c.ids);
    states = Buffer<RingState>(std::vector<RingState>(static_cast<std::size_t>(std::max(1, c.num_slots))));
    faults = Buffer<FaultRecord>(std::vector<FaultRecord>(1));
    std::vector<std::int32_t> list, indptr = {0};
    std::size_t longest = 1;
    for (const auto& table : c.page_tables) longest = std::max(longest, table.size());
    for (const auto& table : c.page_tables) {
      list.insert(list.end(), table.begin(), table.end());
      if (!c.csr) list.insert(list.end(), longest - table.size(), 0x3FFFFFFF);  // never to be read
      indptr.push_back(static_cast<std::int32_t>(list.size()));
    }
    list.push_back(0x3FFFFFFF);
    page_table = Buffer<std::int32_t>(list);
    slot_mapping = Buffer<std::int64_t>(rows), window_mapping = Buffer<std::int64_t>(rows);
    PlanStepParams& p = params;
    p.batch = batch, p.num_tokens = max_tokens;
    p.seq_lens = seq_lens.get(), p.token_indptr = token_indptr.get();
    p.page_table = page_table.get(), p.page_table_stride = static_cast<std::int64_t>(longest);
    if (c.csr) {
      page_indptr = Buffer<std::int32_t>(indptr), p.page_indptr = page_indptr.get();
      p.page_table_stride = static_cast<std::int64_t>(list.size());
    }
    p.page_shift = shift_of(c.page_size);
    p.windows = {c.sink_tokens, c.recent_tokens}, p.max_rollback = c.max_rollback;
    p.sink_rows = c.sink_rows(), p.ring_rows = c.ring_rows;
    p.extents = {c.num_pages, c.num_slots, c.num_slots};
    p.sink_slots = sink_slots.get(), p.ring_slots = ring_slots.get(), p.exact_from = exact_from.get();
    p.sequence_ids = ids.get();
    p.ring_states = states.get(), p.faults = faults.get();
    p.slot_mapping = slot_mapping.get();
    if (c.sink_tokens + c.recent_tokens > 0) p.window_mapping = window_mapping.get();
  }
  /// Sets the number of rows of further steps.
  void resize(int num_tokens) { params.num_tokens = num_tokens; }
  StepResult result() const {
    StepResult r{slot_mapping.all(), window_mapping.all()};
    const auto rows = static_cast<std::size_t>(params.num_tokens);
    r.slot_mapping.resize(rows);
    if (params.window_mapping)
      r.window_mapping.resize(rows);
    else
      r.window_mapping.assign(rows, -1);
    return r;
  }
};

}  // namespace

StepResult run_step_case(const StepCase& c) {
  PlanMemory memory(c, c.num_tokens);
  memory.seq_lens.put(c.seq_lens), memory.token_indptr.put(c.token_indptr);
  check(check_plan_step(memory.params));
  check(run_plan_step(memory.params, nullptr));
  check(cudaDeviceSynchronize(), "plan_step");
  StepResult result = memory.result();
  result.fault = memory.faults.all()[0];
  return result;
}

TensorPlan cache_plan(const WindowCase& c, Side side) {
  const bool value = side == Side::v;
  const TileSide& format = value ? c.write->v : c.write->k;
  TensorPlan plan;
  plan.center = c.center;
  if (c.order > 1) plan.rotation = {.kind = RotationKind::block_hadamard, .order = c.order};
  if (!c.matrix.empty())
    plan.rotation = {.kind = RotationKind::dense, .scope = Scope::layer, .matrix = c.matrix, .inverse = c.inverse};
  plan.rotation.channel_scale = c.scale;
  if (format.exact()) return plan;
  UniformCoder coder;
  coder.bits = format.bits, coder.group_size = format.group_size, coder.rule = value ? c.rule_v : c.rule_k;
  coder.levels = format.numbers == 2 ? UniformLevels::affine : UniformLevels::symmetric;
  coder.scale_type = number_type_of(format, value ? c.write->v_bfloat : c.write->k_bfloat);
  coder.zero = format.integer_zero ? ZeroKind::integer : ZeroKind::floating;
  plan.coder = coder;
  if (coder.rule == ScaleRule::minmax) plan.clip_ratio = c.clip;
  return plan;
}

struct WindowCache::Device {
  WindowCase c;
  int dim;
  PageLayout page_layout;
  WindowLayout sink_layout, ring_layout;
  std::int64_t page_stride;
  PlanMemory plan;
  StepCase asked;

  std::vector<Buffer<std::byte>> pages, sinks, rings;
  std::vector<Buffer<std::uint16_t>> x[2], out;
  Buffer<float> center, rotated_center;  ///< for decode; for quantize_write
  Buffer<std::int32_t> clip_ranks[2];
  Buffer<std::byte> rotation;
  Buffer<std::uint16_t> write_factors;
  Buffer<float> row_scales, read_factors;
  Buffer<std::uint16_t> q;
  Buffer<std::byte> decode_workspace;
  WriteLaunch write_launch;
  DecodeLaunch launch;

  cudaStream_t stream = nullptr;
  cudaGraphExec_t graph = nullptr;

  static WindowLayout windows_of(const WindowCase& c, int rows) {
    const int dim = c.write->k.head_dim;
    const TileSide exact{dim, 16, dim, 0};
    return {c.num_kv_heads, exact, exact, c.write->v, rows};
  }

  explicit Device(const WindowCase& cache)
      : c(cache),
        dim(c.write->k.head_dim),
        page_layout{c.write->k, c.write->v, c.num_kv_heads, c.step.page_size},
        sink_layout(windows_of(c, c.step.sink_rows())),
        ring_layout(windows_of(c, c.step.ring_rows)),
        page_stride(page_layout.page_bytes() + 16),
        plan(c.step, c.max_tokens),
        asked(c.step) {
    const auto batch = c.step.page_tables.size(), heads = static_cast<std::size_t>(c.num_kv_heads),
               channels = static_cast<std::size_t>(dim), rows = static_cast<std::size_t>(c.max_tokens) * heads;
    center = Buffer<float>(c.center);
    rotated_center = Buffer<float>(kvq::rotated_center(cache_plan(c, Side::k), c.num_kv_heads, dim));
    if (!c.matrix.empty()) {
      std::vector<std::byte> packed(static_cast<std::size_t>(packed_rotation_bytes(dim)));
      check(pack_rotations(c.matrix, dim, c.write->bf16, packed));
      rotation = Buffer<std::byte>(packed);
    }
    if (!c.scale.empty()) {
      const WriteFactors before = kvq::write_factors(cache_plan(c, Side::k).rotation, dim, c.write->bf16);
      write_factors = Buffer<std::uint16_t>(before.factors), row_scales = Buffer<float>(before.row_scales);
      read_factors = Buffer<float>(kvq::read_factors(cache_plan(c, Side::k).rotation));
    }
    for (const Side side : kSides)
      clip_ranks[index(side)] = Buffer<std::int32_t>(kvq::clip_ranks(cache_plan(c, side), c.num_kv_heads, dim));
    for (int l = 0; l < c.num_layers; ++l) {
      pages.emplace_back(static_cast<std::size_t>(c.step.num_pages * page_stride));
      sinks.emplace_back(static_cast<std::size_t>(c.step.num_slots * sink_layout.slot_bytes()));
      rings.emplace_back(static_cast<std::size_t>(c.step.num_slots * ring_layout.slot_bytes()));
      for (auto& side : x) side.emplace_back(rows * channels);
      out.emplace_back(batch * heads * static_cast<std::size_t>(c.heads) * channels);
    }
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    std::vector<std::uint16_t> queries(batch * heads * static_cast<std::size_t>(c.heads) * channels);
    for (auto& value : queries)
      value = c.write->bf16 ? __bfloat16_as_ushort(__float2bfloat16(normal(random)))
                            : __half_as_ushort(__float2half(normal(random)));
    q = Buffer<std::uint16_t>(queries);
    check(c.write->plan(write_launch));
    if (c.decode) {
      check(c.decode->plan(launch));
      decode_workspace = Buffer<std::byte>(std::vector<std::byte>(decode_workspace_bytes(launch, batch * heads)));
    }
    check(cudaStreamCreate(&stream), "cudaStreamCreate");
  }
  ~Device() {
    if (graph) cudaGraphExecDestroy(graph);
    cudaStreamDestroy(stream);
  }

  WriteParams write_params(std::size_t layer) const {
    WriteParams p;
    p.num_tokens = plan.params.num_tokens, p.num_kv_heads = c.num_kv_heads;
    const std::int64_t stride = std::int64_t{c.num_kv_heads} * dim;
    p.k.x = x[0][layer].get(), p.v.x = x[1][layer].get();
    for (WriteSide* side : {&p.k, &p.v})
      side->token_stride = stride, side->center = rotated_center.get(), side->order = c.order,
      side->factors = write_factors.get(), side->row_scales = row_scales.get(), side->per_head = true;
    p.k.rotation = p.v.rotation = rotation.get();
    p.k.clip_ranks = clip_ranks[0].get(), p.v.clip_ranks = clip_ranks[1].get();
    p.k.rule = c.rule_k, p.v.rule = c.rule_v;
    p.slot_mapping = plan.params.slot_mapping;
    p.pages = pages[layer].get(), p.page_shift = plan.params.page_shift, p.page_stride = page_stride;
    p.window_mapping = plan.params.window_mapping;
    p.sinks = sinks[layer].get(), p.sink_layout = sink_layout;
    p.rings = rings[layer].get(), p.ring_layout = ring_layout;
    p.extents = plan.params.extents, p.faults = plan.faults.get();
    return p;
  }
  DecodeParams decode_params(std::size_t layer) const {
    DecodeParams p;
    static_cast<SequenceTables&>(p.cache) = plan.params;
    p.cache.num_kv_heads = c.num_kv_heads, p.num_q_heads = c.num_kv_heads * c.heads;
    p.softmax_scale = 1.0f / std::sqrt(static_cast<float>(dim));
    p.q = q.get(), p.q_stride = std::int64_t{p.num_q_heads} * dim;
    p.out = out[layer].get(), p.out_stride = p.q_stride;
    p.cache.windows = plan.params.windows, p.cache.extents = plan.params.extents;
    p.cache.ring_states = plan.states.get(), p.cache.faults = plan.faults.get();
    p.cache.pages = pages[layer].get(), p.cache.page_shift = plan.params.page_shift, p.cache.page_stride = page_stride;
    p.cache.sinks = sinks[layer].get(), p.cache.sink_layout = sink_layout;
    p.cache.rings = rings[layer].get(), p.cache.ring_layout = ring_layout;
    p.cache.rotation_k = {.order = c.order, .per_head = true, .factors = read_factors.get()};
    p.cache.rotation_v = p.cache.rotation_k;
    if (!c.center.empty()) p.cache.center_k = p.cache.center_v = center.get();
    p.workspace = decode_workspace.get();
    return p;
  }

  void run() const {
    check(check_plan_step(plan.params));
    check(run_plan_step(plan.params, stream));
    for (std::size_t l = 0; l < pages.size(); ++l) {
      const WriteParams write = write_params(l);
      check(check_write(*c.write, write));
      check(c.write->run(write_launch, write, stream));
      if (!c.decode) continue;
      const DecodeParams decode = decode_params(l);
      check(check_decode(*c.decode, decode));
      check(c.decode->run(launch, decode, stream));
    }
  }
};

WindowCache::WindowCache(const WindowCase& c) : device_(std::make_unique<Device>(c)) {}
WindowCache::~WindowCache() = default;

void WindowCache::step(const std::vector<int>& lengths, const std::vector<int>& new_tokens,
                       const std::vector<std::vector<std::uint16_t>> (&rows)[2], bool tight) {
  Device& d = *device_;
  d.asked.seq_lens = lengths;
  d.asked.token_indptr = {0};
  for (const int n : new_tokens) d.asked.token_indptr.push_back(d.asked.token_indptr.back() + n);
  d.asked.num_tokens = tight && !d.graph ? d.asked.token_indptr.back() : d.c.max_tokens;
  d.plan.resize(d.asked.num_tokens);
  d.plan.seq_lens.put(lengths), d.plan.token_indptr.put(d.asked.token_indptr);
  for (std::size_t l = 0; l < d.pages.size(); ++l) {
    for (int side = 0; side < 2; ++side) d.x[side][l].put(rows[side][l]);
    d.out[l].put(std::vector<std::uint16_t>(d.out[l].size(), 0xFFFF));
  }
  check(cudaDeviceSynchronize(), "before a step");
  if (d.graph)
    check(cudaGraphLaunch(d.graph, d.stream), "cudaGraphLaunch");
  else
    d.run();
  check(cudaStreamSynchronize(d.stream), "step");
}

void WindowCache::set_slots(std::size_t sequence, int sink_slot, int ring_slot, int exact_from, std::uint64_t id) {
  Device& d = *device_;
  d.asked.sink_slots[sequence] = sink_slot, d.asked.ring_slots[sequence] = ring_slot;
  d.asked.exact_from[sequence] = exact_from, d.asked.ids[sequence] = id;
  d.plan.sink_slots.put(d.asked.sink_slots), d.plan.ring_slots.put(d.asked.ring_slots);
  d.plan.exact_from.put(d.asked.exact_from), d.plan.ids.put(d.asked.ids);
}

void WindowCache::capture() {
  Device& d = *device_;
  d.plan.resize(d.c.max_tokens);
  cudaGraph_t graph = nullptr;
  check(cudaStreamBeginCapture(d.stream, cudaStreamCaptureModeGlobal), "capture");
  d.run();
  check(cudaStreamEndCapture(d.stream, &graph), "capture");
  check(cudaGraphInstantiate(&d.graph, graph, 0), "cudaGraphInstantiate");
  cudaGraphDestroy(graph);
}

StepResult WindowCache::planned() const { return device_->plan.result(); }
StepCase WindowCache::asked() const { return device_->asked; }
std::vector<std::byte> WindowCache::pages(int layer) const {
  return device_->pages[static_cast<std::size_t>(layer)].all();
}
std::vector<std::byte> WindowCache::sinks(int layer) const {
  return device_->sinks[static_cast<std::size_t>(layer)].all();
}
std::vector<std::byte> WindowCache::rings(int layer) const {
  return device_->rings[static_cast<std::size_t>(layer)].all();
}
FaultRecord WindowCache::fault() const { return device_->plan.faults.all()[0]; }
std::int64_t WindowCache::page_stride() const { return device_->page_stride; }
PageLayout WindowCache::page_layout() const { return device_->page_layout; }
WindowLayout WindowCache::sink_layout() const { return device_->sink_layout; }
WindowLayout WindowCache::ring_layout() const { return device_->ring_layout; }

DecodeResult WindowCache::decoded(int layer) const {
  const Device& d = *device_;
  const auto l = static_cast<std::size_t>(layer);
  const DecodeParams p = d.decode_params(l);
  const auto rows = static_cast<std::size_t>(p.cache.batch * p.num_q_heads),
             elements = rows * static_cast<std::size_t>(d.dim);
  const int longest = std::max(1, *std::max_element(d.asked.seq_lens.begin(), d.asked.seq_lens.end()));
  const bool bf16 = d.c.write->bf16;
  const auto plain = [&](auto zero) {
    using Float = decltype(zero);
    const Buffer<Float> scores(rows * static_cast<std::size_t>(longest)), result(elements), sums(rows);
    const dim3 grid(static_cast<unsigned>(p.cache.batch), static_cast<unsigned>(p.num_q_heads));
    const auto kernel = bf16 ? plain::plain_decode<Float, __nv_bfloat16> : plain::plain_decode<Float, __half>;
    check(launch_kernel(kernel, grid, kPlainThreads, 0, false, nullptr, p, d.page_layout, plain::PlainBases{},
                        d.c.write->k_bfloat, d.c.write->v_bfloat, scores.get(), longest, result.get(), sums.get()),
          "plain_decode");
    check(cudaDeviceSynchronize(), "plain_decode");
    return result.all();
  };
  const std::vector<double> truth = plain(0.0);
  const std::vector<float> plain32 = plain(0.0f);
  DecodeResult result{d.out[l].all()};
  double error = 0.0, error32 = 0.0, size = 0.0;
  for (std::size_t i = 0; i < elements; ++i) {
    const float x =
        bf16 ? __bfloat162float(__ushort_as_bfloat16(result.out[i])) : __half2float(__ushort_as_half(result.out[i]));
    const float y = bf16 ? __bfloat162float(__float2bfloat16(plain32[i])) : __half2float(__float2half(plain32[i]));
    error += std::pow(static_cast<double>(x) - truth[i], 2), error32 += std::pow(static_cast<double>(y) - truth[i], 2);
    size += truth[i] * truth[i];
  }
  result.error = std::sqrt(error / std::max(size, 1e-30)),
  result.plain_error = std::sqrt(error32 / std::max(size, 1e-30));
  return result;
}

}  // namespace kvq::test
