#include <kvq/compute/blas.h>
#include <kvq/compute/blas_memory.h>
#include <kvq/compute/parallel.h>

#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/parallel_pipeline.h>
#include <oneapi/tbb/task_arena.h>

#include <atomic>
#include <exception>
#include <thread>
#include <vector>

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

/// For callers without a ThreadLimit.
void prepare_once() {
  using Control = oneapi::tbb::global_control;
  static const bool once =
      (prepare_blas(static_cast<int>(Control::active_value(Control::max_allowed_parallelism))), true);
  (void)once;
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
  prepare_once();
  // A context of its own: when an outer loop is cancelled, because another body of it failed, this loop still runs to
  // its end, so that its caller never sees half of the results.
  oneapi::tbb::task_group_context alone(oneapi::tbb::task_group_context::isolated);
  oneapi::tbb::parallel_for(
      oneapi::tbb::blocked_range<std::int64_t>(0, count, 1),
      [&](const oneapi::tbb::blocked_range<std::int64_t>& range) {
        for (std::int64_t i = range.begin(); i < range.end(); ++i) body(i);
      },
      oneapi::tbb::simple_partitioner{}, alone);
}

void isolated_parallel_for(std::int64_t count, const std::function<void(std::int64_t)>& body) {
  oneapi::tbb::this_task_arena::isolate([&] { parallel_for(count, body); });
}

void ordered_parallel_for(std::int64_t count, int at_once, const std::function<void(std::int64_t)>& compute,
                          const std::function<void(std::int64_t)>& take) {
  namespace tbb = oneapi::tbb;
  if (at_once <= 1 || count <= 1) {
    for (std::int64_t i = 0; i < count; ++i) compute(i), take(i);
    return;
  }
  prepare_once();
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(count));
  std::atomic<std::int64_t> lowest_failed = count, next = 0;
  const auto issue = [&](tbb::flow_control& control) {
    if (next == count) control.stop();
    return next++;
  };
  const auto run = [&](std::int64_t i) {
    if (i > lowest_failed) return i;  // its result is not taken
    try {
      // A thread that waits for the loops inside compute() takes up no other index meanwhile.
      tbb::this_task_arena::isolate([&] { compute(i); });
    } catch (...) {
      errors[static_cast<std::size_t>(i)] = std::current_exception();
      for (std::int64_t lowest = lowest_failed; i < lowest && !lowest_failed.compare_exchange_weak(lowest, i);) {
      }
    }
    return i;
  };
  const auto hand_over = [&](std::int64_t i) {
    if (const std::exception_ptr& error = errors[static_cast<std::size_t>(i)]) std::rethrow_exception(error);
    take(i);
  };
  tbb::parallel_pipeline(static_cast<std::size_t>(at_once),
                         tbb::make_filter<void, std::int64_t>(tbb::filter_mode::serial_in_order, issue) &
                             tbb::make_filter<std::int64_t, std::int64_t>(tbb::filter_mode::parallel, run) &
                             tbb::make_filter<std::int64_t, void>(tbb::filter_mode::serial_in_order, hand_over));
}

}  // namespace kvq
