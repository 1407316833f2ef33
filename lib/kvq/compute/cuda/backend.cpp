#include <kvq/compute/cuda/attention.h>
#include <kvq/compute/cuda/coded.h>
#include <kvq/compute/cuda/entry.h>
#include <kvq/compute/cuda/judge.h>
#include <kvq/compute/cuda/kmeans.h>
#include <kvq/compute/cuda/moments.h>
#include <kvq/compute/device_bytes.h>
#include <kvq/compute/device_dealer.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

namespace kvq::cuda {

namespace {

double weight_of_group(const TensorView& rows, const MomentRequest& request, int group) {
  const std::int64_t skipped_end = request.skipped_first + request.skipped_count;
  const bool of_heads = request.weights.size() != static_cast<std::size_t>(rows.tokens);
  double total = 0.0;
  for (int h = group * request.heads_per_group; h < (group + 1) * request.heads_per_group; ++h) {
    if (request.weights.empty()) {
      total += static_cast<double>(rows.tokens - request.skipped_count);
      continue;
    }
    const float* weights = request.weights.data() + (of_heads ? h * rows.tokens : 0);
    for (std::int64_t t = 0; t < rows.tokens; ++t)
      if (t < request.skipped_first || t >= skipped_end) total += double{weights[t]};
  }
  return total;
}

/// One device or several. Calls for statistics are dealt by their work (DeviceDealer), other calls in turn. A head is
/// always computed whole, on one device, so the number of devices does not change a result. Attention with heads of
/// more than kMostDim channels is the host's.
class CudaBackend : public Backend {
 public:
  CudaBackend(std::span<const int> devices, std::int64_t limit, Backend& host)
      : host_(host),
        num_devices_(static_cast<int>(devices.size())),
        contexts_(devices.size() * static_cast<std::size_t>(lanes_of(limit))),
        dealer_(num_devices_, contexts_.size()) {
    const int lanes = lanes_of(limit);
    for (std::size_t i = 0; i < devices.size(); ++i) {
      memories_.push_back(memory_of(devices[i], limit, lanes));
      contexts_[i] = std::make_unique<Context>(devices[i], *memories_[i]);
    }
  }

  std::string name() const override {
    const std::string& first = contexts_.front()->name();
    return num_devices_ == 1 ? first : fmt::format("{} x {}", num_devices_, first);
  }

  bool leaves_processors_free() const override { return true; }

  std::int64_t device_bytes() const override {
    std::int64_t most = 0;
    for (const auto& memory : memories_) most = std::max(most, memory->most_used());
    return most;
  }

  std::vector<MomentSum> second_moments(const TensorView& rows, const MomentRequest& request) override {
    const bool of_heads = request.weights.size() == static_cast<std::size_t>(rows.tokens * rows.heads);
    const int each = request.heads_per_group;
    KVQ_ASSERT(rows.heads % each == 0 && (request.weights.empty() || of_heads ||
                                          request.weights.size() == static_cast<std::size_t>(rows.tokens)));
    std::vector<MomentSum> sums(static_cast<std::size_t>(rows.heads / each), MomentSum{rows.dim});
    const double work = static_cast<double>(rows.tokens) * rows.heads * rows.dim * rows.dim;
    for_each_device(rows.heads / each, work, [&](Context& context, int first, int count) {
      cuda::second_moments(context, rows, request, first, count, sums);
    });
    for (std::size_t g = 0; g < sums.size(); ++g) {
      sums[g].weight = weight_of_group(rows, request, static_cast<int>(g));
      sums[g].symmetrize();
    }
    return sums;
  }

  std::vector<float> quadratic_forms(const TensorView& rows, std::span<const double> matrices,
                                     const MomentRequest& request) override {
    const auto square = static_cast<std::size_t>(rows.dim) * static_cast<std::size_t>(rows.dim);
    KVQ_ASSERT(matrices.size() == static_cast<std::size_t>(rows.heads) * square);
    std::vector<float> forms(static_cast<std::size_t>(rows.heads * rows.tokens));
    const double work = static_cast<double>(rows.tokens) * rows.heads * rows.dim * rows.dim;
    for_each_device(rows.heads, work, [&](Context& context, int first, int count) {
      cuda::quadratic_forms(context, rows, matrices, request, first, count, forms);
    });
    return forms;
  }

  void add_attention_moments(const SequenceAttention& sequence, bool with_scored_query,
                             std::span<AttentionMoments> into, const std::function<void()>& head_done) override {
    KVQ_ASSERT(into.size() == static_cast<std::size_t>(sequence.geometry.num_kv_heads));
    if (!can_attend(sequence.geometry))
      return host_.add_attention_moments(sequence, with_scored_query, into, head_done);
    std::mutex done;
    const auto say = [&] {
      const std::lock_guard lock(done);
      if (head_done) head_done();
    };
    const int heads = sequence.end_kv_head() - sequence.first_kv_head;
    const double tokens = static_cast<double>(sequence.count),
                 work = tokens * tokens * heads * sequence.geometry.queries_per_kv_head() * sequence.geometry.head_dim;
    for_each_device(heads, work, [&](Context& context, int first, int count) {
      cuda::add_attention_moments(context, sequence, sequence.first_kv_head + first, count, with_scored_query, into,
                                  say);
    });
  }

  std::vector<EigenPairs> eigh(std::span<const double> matrices, int dim) override {
    Context& context = next_context();
    const std::lock_guard lock(context.mutex);
    context.use();
    return cuda::eigh(context, matrices, dim);
  }

  std::vector<double> coding_costs(std::span<const CodingTask> tasks) override {
    std::vector<double> costs;
    for (const CodedSums& sums : code_and_weigh(tasks, false)) costs.push_back(sums.total);
    return costs;
  }
  std::vector<double> clip_costs(std::span<const CodingTask> tasks) override {
    std::vector<double> costs;
    for (const CodedSums& sums : code_and_weigh(tasks, true)) {
      const double shrink = tasks[costs.size()].rows->shrink_weight - 1.0;
      costs.push_back(sums.energy > 0.0 ? sums.total + shrink * sums.along * sums.along / sums.energy : sums.total);
    }
    return costs;
  }
  std::vector<std::vector<double>> error_covariances(std::span<const CodingTask> tasks) override {
    Context& context = next_context();
    const std::lock_guard lock(context.mutex);
    context.use();
    return cuda::error_covariances(context, tasks);
  }
  std::vector<KMeansResult> kmeans(std::span<const ClusterTask> tasks) override {
    Context& context = next_context();
    const std::lock_guard lock(context.mutex);
    context.use();
    return cuda::kmeans(context, tasks, host_);
  }
  std::vector<float> sorted(std::vector<float> numbers) override {
    Context& context = next_context();
    const std::lock_guard lock(context.mutex);
    context.use();
    return cuda::sorted(context, std::move(numbers));
  }
  std::unique_ptr<OutputJudge> judge_outputs(std::vector<AttentionCase> heads) override {
    return can_judge(heads) ? cuda::judge_outputs(next_context(), std::move(heads))
                            : host_.judge_outputs(std::move(heads));
  }

 private:
  static int lanes_of(std::int64_t limit) { return limit > 0 ? lanes_within(limit) : kMostLanes; }

  static void* allocate(std::size_t bytes, const char* what) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes), what);
    return memory;
  }
  static void release(void* memory) { cudaFree(memory); }

  /// @param limit  0: a share of what is free
  static std::unique_ptr<DeviceMemory> memory_of(int device, std::int64_t limit, int lanes) {
    check(cudaSetDevice(device), "choice of the device");
    std::size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "free memory");
    const auto share = static_cast<std::int64_t>(kFreeShare * static_cast<double>(free));
    const std::int64_t beside = bytes_beside(lanes);
    return std::make_unique<DeviceMemory>(
        std::max<std::int64_t>(limit > 0 ? std::min(limit - beside, share) : share, 0), beside,
        DeviceMemory::Allocator{allocate, release});
  }

  std::vector<CodedSums> code_and_weigh(std::span<const CodingTask> tasks, bool with_energy) {
    Context& context = next_context();
    const std::lock_guard lock(context.mutex);
    context.use();
    return cuda::code_and_weigh(context, tasks, with_energy);
  }

  /// Threads that call at the same time take different contexts, on all devices in turn.
  Context& next_context() {
    const std::lock_guard lock(mutex_);
    return context(next_++ % contexts_.size());
  }

  /// Made when it is first asked for. The caller holds mutex_.
  Context& context(std::size_t index) {
    std::unique_ptr<Context>& found = contexts_[index];
    if (!found) {
      const std::size_t device = index % static_cast<std::size_t>(num_devices_);
      found = std::make_unique<Context>(contexts_[device]->device(), *memories_[device]);
    }
    return *found;
  }

  /// Divides `count` heads over the devices that the dealer chooses and calls f(context, first, number of them), for
  /// each device in a thread.
  /// @param work  as DeviceDealer::Call
  template <typename F>
  void for_each_device(int count, double work, F f) {
    const DeviceDealer::Call call(dealer_, work);
    std::vector<Context*> contexts;
    {
      const std::lock_guard lock(mutex_);
      for (const std::size_t index : call.contexts()) contexts.push_back(&context(index));
    }
    const int devices = static_cast<int>(contexts.size());
    std::vector<std::exception_ptr> errors(contexts.size());
    const auto run = [&](int i) {
      const int first = count * i / devices, end = count * (i + 1) / devices;
      if (first == end) return;
      try {
        Context& context = *contexts[static_cast<std::size_t>(i)];
        const std::lock_guard lock(context.mutex);
        context.use();
        f(context, first, end - first);
      } catch (...) {
        errors[static_cast<std::size_t>(i)] = std::current_exception();
      }
    };
    std::vector<std::thread> threads;
    for (int i = 1; i < devices; ++i) threads.emplace_back(run, i);
    run(0);
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& error : errors)
      if (error) std::rethrow_exception(error);
  }

  Backend& host_;
  const int num_devices_;
  std::vector<std::unique_ptr<DeviceMemory>> memories_;  ///< of each device
  std::vector<std::unique_ptr<Context>> contexts_;  ///< the first one of each device, then others, made when needed
  std::mutex mutex_;                                ///< of next_ and contexts_
  DeviceDealer dealer_;                             ///< of calls for statistics
  std::size_t next_ = 0;
};

}  // namespace

}  // namespace kvq::cuda

extern "C" {
__attribute__((visibility("default"))) const char* kvq_cuda_build() { return kvq::cuda::kBuild; }
__attribute__((visibility("default"))) int kvq_cuda_devices(const char** reason) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  *reason = error == cudaSuccess ? "there is no device" : cudaGetErrorString(error);
  if (error != cudaSuccess) return 0;
  for (int device = 0; device < count; ++device) {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (10 * major + minor >= KVQ_LEAST_CAPABILITY) continue;
    *reason = "a device is older than this build's CMAKE_CUDA_ARCHITECTURES";
    return 0;
  }
  return count;
}
__attribute__((visibility("default"))) kvq::Backend* kvq_cuda_backend(const int* devices, int count, kvq::Backend* host,
                                                                      std::int64_t memory_limit) {
  return new kvq::cuda::CudaBackend({devices, static_cast<std::size_t>(count)}, memory_limit, *host);
}
}
