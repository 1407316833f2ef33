// A serving engine in small, in C++20: two sequences of different length in one batch, then a prefix hit and a fork,
// for each tensor-parallel rank.
//
//     example-engine-cpp ARTIFACT.safetensors
//
// Random numbers stand for the model's queries, keys and values. kvq::runtime::PagedCache owns pages, slots, block
// tables and a prefix tree; engine.c keeps its pages and tables itself. The ranks run one after the other here; each
// has a device of its own in an engine.
#include <cuda_runtime_api.h>
#include <kvq/runtime/paged_cache.h>
#include <kvq/runtime.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using namespace kvq::runtime;

constexpr int kLayers = 6, kQHeads = 8, kKvHeads = 2, kDim = 128;  // sample_data/model
constexpr int kRanks = 2, kPage = 64, kSteps = 64;
constexpr int kLongPrompt = 600, kShortPrompt = 150, kPrompts = kLongPrompt + kShortPrompt;
constexpr int kRows = kPrompts + 2 * kSteps + kLongPrompt;  // of all steps, at most

void require(bool holds, const char* message) {
  if (!holds) throw std::runtime_error(message);
}
void check(cudaError_t status) { require(status == cudaSuccess, cudaGetErrorString(status)); }

class Stream {
 public:
  Stream() { check(cudaStreamCreate(&stream_)); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Device memory, 256-byte aligned; null if it is empty.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t count) : bytes_(count * sizeof(T)) {
    void* memory = nullptr;
    if (count > 0) check(cudaMalloc(&memory, bytes_));
    memory_.reset(static_cast<T*>(memory));
  }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) {
    check(cudaMemcpy(get(), host.data(), bytes_, cudaMemcpyHostToDevice));
  }
  T* get() const { return memory_.get(); }
  std::size_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(T* memory) const { cudaFree(memory); }
  };
  std::size_t bytes_;
  std::unique_ptr<T, Free> memory_;
};

/// Rows of bfloat16 numbers in [-1, 1].
DeviceArray<std::uint16_t> random_rows(int tokens, int row_length, std::mt19937& random) {
  std::uniform_int_distribution<int> sign_and_mantissa(0, 0xFF);
  std::vector<std::uint16_t> rows(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(row_length));
  for (std::uint16_t& x : rows) {
    const int bits = sign_and_mantissa(random);
    x = static_cast<std::uint16_t>((bits & 0x80) << 8 | 0x3F00 | (bits & 0x7F));  // +-[0.5, 1)
  }
  return DeviceArray<std::uint16_t>(rows);
}

Model load(const std::string& path, int rank) {
  auto geometry = init<kvq_layer_geometry>();  // of the whole model: the library slices it
  geometry.num_q_heads = kQHeads, geometry.num_kv_heads = kKvHeads, geometry.head_dim = kDim;
  auto options = init<kvq_model_options>();
  options.num_layers = kLayers, options.num_geometries = 1, options.geometry = &geometry;
  options.page_size = kPage;
  options.tp_rank = rank, options.tp_size = kRanks;
  return Model(path, options);
}

void serve(const std::string& path, int rank) {
  const Stream stream;
  const Model model = load(path, rank);
  for (const kvq_selftest_layer& layer : model.selftest(stream)) require(layer.status == KVQ_OK, layer.message);
  const DeviceArray<std::byte> memory(model.device_bytes());
  const DeviceModel device_model(model, memory.get(), memory.bytes(), stream);

  // If the pages do not suffice, step() returns false, and an engine then preempts a sequence. Here they suffice.
  const int pages = (kLongPrompt + kSteps) / kPage + (kShortPrompt + kSteps) / kPage + 2;
  PagedCache cache(model, device_model, {.num_pages = pages, .max_sequences = 3, .max_tokens = kPrompts}, stream);
  const std::int32_t long_one = cache.create(), short_one = cache.create();

  // One plan serves all layers and calls. The workspace serves all kinds of calls, because they follow each other on
  // one stream. Writes use it for trellis codes only.
  auto calls = init<kvq_plan_options>();
  calls.max_batch = calls.max_prefill_batch = 2;
  calls.max_prefill_queries = calls.max_prefill_keys = kLongPrompt;
  calls.max_write_tokens = kPrompts;
  const Plan plan(model, calls);
  const DeviceArray<std::byte> workspace(
      std::max({plan.workspace_bytes(KVQ_KERNEL_DECODE), plan.workspace_bytes(KVQ_KERNEL_PREFILL),
                plan.workspace_bytes(KVQ_KERNEL_WRITE)}));

  // Rows of this rank's heads. Every layer has the same, and each step takes the next ones.
  const kvq_layer_info layer_info = model.layer(0);
  const int q_row = layer_info.num_q_heads * kDim, kv_row = layer_info.num_kv_heads * kDim;
  std::mt19937 random(static_cast<unsigned>(rank));
  const auto q = random_rows(kRows, q_row, random);
  const auto k = random_rows(kRows, kv_row, random);
  const auto v = random_rows(kRows, kv_row, random);
  const DeviceArray<std::uint16_t> out(static_cast<std::size_t>(kPrompts) * static_cast<std::size_t>(q_row));
  auto error = init<kvq_error>();
  const auto ran = [&](kvq_status status) { require(status == KVQ_OK, error.message); };

  // A step: all layers write the new tokens and attend. The arguments that describe the sequences come from the cache.
  int next_row = 0;
  const auto step = [&](const std::vector<kvq::Growth>& batch, bool is_prefill) {
    require(cache.step(batch, stream), "no pages");
    kvq_write_args write = cache.write_args();
    kvq_prefill_args prefill = cache.prefill_args();
    kvq_decode_args decode = cache.decode_args();
    prefill.q = decode.q = q.get() + next_row * q_row;
    write.k = prefill.k = k.get() + next_row * kv_row, write.v = prefill.v = v.get() + next_row * kv_row;
    prefill.out = decode.out = out.get();
    write.workspace = prefill.workspace = decode.workspace = workspace.get();
    write.workspace_bytes = prefill.workspace_bytes = decode.workspace_bytes = workspace.bytes();
    for (int layer = 0; layer < kLayers; ++layer) {
      ran(plan.write(cache.handle(), layer, write, stream, &error));
      ran(is_prefill ? plan.prefill(cache.handle(), layer, prefill, stream, &error)
                     : plan.decode(cache.handle(), layer, decode, stream, &error));
    }
    next_row += write.num_tokens;
  };

  // Each prompt is one chunk. The short sequence ends after half of the decode steps, and its pages are free again.
  step({{long_one, kLongPrompt}, {short_one, kShortPrompt}}, true);
  std::vector<kvq::Growth> batch = {{long_one, 1}, {short_one, 1}};
  for (int i = 0; i < kSteps; ++i) {
    if (i == kSteps / 2) cache.destroy(short_one), batch.pop_back();
    step(batch, false);
  }

  // The long prompt again: the new sequence shares the full pages of the first one, and prefill takes the other tokens.
  std::vector<std::int32_t> tokens(kLongPrompt);  // stand for the tokenizer's numbers
  std::iota(tokens.begin(), tokens.end(), 0);
  cache.insert(long_one, tokens);
  const auto [again, hit_tokens] = cache.create(tokens);
  step({{again, kLongPrompt - static_cast<int>(hit_tokens)}}, true);

  // A fork shares all pages until one of both writes into the last one, which is then copied.
  const std::int32_t twin = cache.fork(again, stream);
  step({{again, 1}, {twin, 1}}, false);

  const kvq_fault fault = cache.handle().fault(stream);  // what the device alone can see
  if (fault.code != KVQ_FAULT_NONE)
    throw std::runtime_error("fault: " + std::string(kvq_fault_string(fault.code)) + ", sequence " +
                             std::to_string(fault.sequence) + ", layer " + std::to_string(fault.layer) + ", value " +
                             std::to_string(fault.value));
  std::vector<std::uint16_t> row(static_cast<std::size_t>(q_row));
  check(cudaMemcpy(row.data(), out.get(), row.size() * sizeof row[0], cudaMemcpyDeviceToHost));
  for (const std::uint16_t bits : row)  // larger bits are larger magnitudes, infinity or NaN
    require((bits & 0x7FFF) <= 0x3F80, "a mean of values in [-1, 1] lies outside");
  std::printf("rank %d of %d: %d query heads from %d, %d KV heads from %d; served 4 sequences, a hit of %d tokens\n",
              rank, kRanks, layer_info.num_q_heads, layer_info.first_q_head, layer_info.num_kv_heads,
              layer_info.first_kv_head, static_cast<int>(hit_tokens));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return std::fputs("usage: example-engine-cpp ARTIFACT.safetensors\n", stderr), 2;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0)
    return std::puts("example-engine-cpp: no CUDA device here: skipped"), 77;
  try {
    for (int rank = 0; rank < kRanks; ++rank) serve(argv[1], rank);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "example-engine-cpp: error: %s\n", error.what());
    return 1;
  }
}
