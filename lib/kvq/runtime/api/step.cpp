#include <kvq/runtime/api/handles.h>
#include <kvq/runtime/kernels/plan_step/launch.h>

#include <limits>

using namespace kvq;
using namespace kvq::abi;

namespace {

Status step(const kvq_cache* cache, const kvq_step_args* args, kvq_stream stream) {
  kvq_step_args a;
  if (const Status status = read_struct(args, a, "args"); !status.ok()) return status;
  if (!cache) return Status::fail(StatusCode::invalid_argument, "step: cache must not be null");
  const DeviceModel& model = *cache->model;
  if (const Status status = check_device("step", model.device, "model"); !status.ok()) return status;
  PlanStepParams p;
  if (const Status status = read_sequences("step", a.sequences, std::numeric_limits<int>::max(), p); !status.ok())
    return status;
  const kvq_device_layer& layer = model.layers.front();
  p.num_tokens = a.num_tokens, p.token_indptr = a.token_indptr;
  p.page_shift = page_shift(layer.pages);
  p.windows = window_rule(model.windows), p.extents = cache->extents;
  p.sink_rows = layer.windows.sinks.rows, p.ring_rows = layer.windows.rings.rows;
  p.max_rollback = model.max_rollback;
  p.ring_states = cache->ring_states, p.faults = cache->faults;
  p.slot_mapping = a.slot_mapping, p.window_mapping = a.window_mapping;
  if (const Status status = check_plan_step(p); !status.ok()) return status;
  return run_plan_step(p, stream);
}

}  // namespace

kvq_status kvq_step_run(const kvq_cache* cache, const kvq_step_args* args, kvq_stream stream, kvq_error* error) {
  return done(error, step(cache, args, stream));
}
