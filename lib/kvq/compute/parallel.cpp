#include <kvq/compute/blas.h>
#include <kvq/compute/blas_memory.h>
#include <kvq/compute/parallel.h>

#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>

#include <thread>

namespace kvq {

struct ThreadLimit::Impl {
  oneapi::tbb::global_control control;
};

namespace {

int all_cores() { return static_cast<int>(std::max(1u, std::thread::hardware_concurrency())); }

void prepare_blas(int threads) {
  blas::use_one_thread();
  blas::reserve_buffers(threads);
}

}  // namespace

ThreadLimit::ThreadLimit(int threads) {
  const int allowed = threads > 0 ? threads : all_cores();
  prepare_blas(std::min(allowed, all_cores()));  // TBB runs no more threads than there are cores
  using Control = oneapi::tbb::global_control;
  impl_.reset(new Impl{Control{Control::max_allowed_parallelism, static_cast<std::size_t>(allowed)}});
}
ThreadLimit::~ThreadLimit() = default;

void parallel_for(std::int64_t count, const std::function<void(std::int64_t)>& body) {
  static const bool once = (prepare_blas(static_cast<int>(oneapi::tbb::global_control::active_value(
                                oneapi::tbb::global_control::max_allowed_parallelism))),
                            true);
  (void)once;
  oneapi::tbb::parallel_for(
      oneapi::tbb::blocked_range<std::int64_t>(0, count, 1),
      [&](const oneapi::tbb::blocked_range<std::int64_t>& range) {
        for (std::int64_t i = range.begin(); i < range.end(); ++i) body(i);
      },
      oneapi::tbb::simple_partitioner{});
}

void isolated_parallel_for(std::int64_t count, const std::function<void(std::int64_t)>& body) {
  oneapi::tbb::this_task_arena::isolate([&] { parallel_for(count, body); });
}

}  // namespace kvq
