#include <kvq/compute/blas.h>
#include <kvq/compute/parallel.h>

#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/parallel_for.h>

#include <thread>

namespace kvq {

struct ThreadLimit::Impl {
  oneapi::tbb::global_control control;
};

ThreadLimit::ThreadLimit(int threads)
    : impl_(new Impl{oneapi::tbb::global_control{
          oneapi::tbb::global_control::max_allowed_parallelism,
          static_cast<std::size_t>(
              threads > 0 ? threads : static_cast<int>(std::max(1u, std::thread::hardware_concurrency())))}}) {
  blas::use_one_thread();
}
ThreadLimit::~ThreadLimit() = default;

void parallel_for(std::int64_t count, const std::function<void(std::int64_t)>& body) {
  static const bool once = (blas::use_one_thread(), true);
  (void)once;
  oneapi::tbb::parallel_for(
      oneapi::tbb::blocked_range<std::int64_t>(0, count, 1),
      [&](const oneapi::tbb::blocked_range<std::int64_t>& range) {
        for (std::int64_t i = range.begin(); i < range.end(); ++i) body(i);
      },
      oneapi::tbb::simple_partitioner{});
}

}  // namespace kvq
