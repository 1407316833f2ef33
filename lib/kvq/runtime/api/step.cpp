#include <kvq/runtime/api/handles.h>
#include <kvq/runtime/kernels/plan_step/launch.h>

#include <algorithm>

using namespace kvq;
using namespace kvq::abi;

std::size_t kvq_step_plan::list_bytes() const {
  return (static_cast<std::size_t>(max_demotions) * sizeof(std::int64_t) + 255) / 256 * 256;
}

std::size_t kvq_step_plan::workspace_bytes() const { return 2 * list_bytes() + 256; }

namespace {

Status step(const kvq_step_plan& plan, const kvq_cache* cache, const kvq_step_args* args, kvq_stream stream) {
  constexpr StatusCode kBad = StatusCode::invalid_argument;
  kvq_step_args a;
  if (const Status status = read_struct(args, a, "args"); !status.ok()) return status;
  if (!cache) return Status::fail(kBad, "step: cache must not be null");
  const kvq_device_model& model = *cache->model;
  if (const Status status = check_device("step", model.device, "model"); !status.ok()) return status;
  if (model.windows != plan.windows || model.layers.front().windows.rows() != plan.window_layout.rows())
    return Status::fail(
        kBad,
        "step: the plan was made for %d sink and %d recent tokens, the cache has %d and %d, or another max_step_tokens",
        plan.windows.sink_tokens, plan.windows.recent_tokens, model.windows.sink_tokens, model.windows.recent_tokens);
  if (a.batch > plan.max_batch || a.num_tokens > plan.max_tokens)
    return Status::fail(kBad, "step: %d sequences and %d tokens, the plan's max_batch is %d and max_tokens %d", a.batch,
                        a.num_tokens, plan.max_batch, plan.max_tokens);
  if (!a.workspace || !aligned(a.workspace, 256) || a.workspace_bytes < plan.workspace_bytes())
    return Status::fail(kBad, "step: expected a workspace of %zu bytes, aligned to 256, found %zu bytes",
                        plan.workspace_bytes(), a.workspace_bytes);

  auto* lists = static_cast<std::byte*>(a.workspace);
  PlanStepParams p;
  p.batch = a.batch, p.num_tokens = a.num_tokens;
  p.seq_lens = a.seq_lens, p.token_indptr = a.token_indptr;
  p.page_table = a.page_table, p.page_indptr = a.page_indptr, p.page_table_stride = a.page_table_stride;
  p.page_shift = page_shift(model.layers.front().pages);
  p.sink_tokens = model.windows.sink_tokens, p.recent_tokens = model.windows.recent_tokens;
  p.max_rollback = model.max_rollback;
  p.window_slots = a.window_slots;
  p.window_layout = model.layers.front().windows;
  p.slot_mapping = a.slot_mapping, p.window_mapping = a.window_mapping;
  p.max_demotions = plan.max_demotions;
  p.demote_from = reinterpret_cast<std::int64_t*>(lists);
  p.demote_to = reinterpret_cast<std::int64_t*>(lists + plan.list_bytes());
  p.num_demotions = reinterpret_cast<std::int32_t*>(lists + 2 * plan.list_bytes());
  if (const Status status = check_plan_step(p); !status.ok()) return status;
  // All checks come before the first launch.
  const auto demotion = [&](const kvq_demote_group& group) {
    DemoteParams d = group.params;
    d.max_demotions = p.max_demotions, d.num_demotions = p.num_demotions, d.demote_from = p.demote_from,
    d.demote_to = p.demote_to;
    return d;
  };
  for (const kvq_demote_group& group : cache->demote_groups)
    if (const Status status = check_demote(group.variant, demotion(group)); !status.ok()) return status;
  if (const Status status = run_plan_step(p, stream); !status.ok()) return status;
  for (const kvq_demote_group& group : cache->demote_groups)
    if (const Status status = group.variant.run(demotion(group), stream); !status.ok()) return status;
  return {};
}

}  // namespace

kvq_status kvq_step_plan_create(const kvq_device_model* device_model, const kvq_step_options* options,
                                kvq_step_plan** plan, kvq_error* error) {
  return guarded(error, [&] {
    const kvq_device_model& model = required(device_model, "device_model");
    required(plan, "plan");
    kvq_step_options o;
    raise(read_struct(options, o, "options"));
    if (o.max_batch < 1 || o.max_tokens < 1)
      throw Error{ErrorKind::usage,
                  fmt::format("step: max_batch {} and max_tokens {}: expected 1 or more", o.max_batch, o.max_tokens)};
    kvq_step_plan made{
        .max_batch = o.max_batch,
        .max_tokens = o.max_tokens,
        .max_demotions = 0,
        .windows = model.windows,
        .window_layout = model.layers.front().windows,
    };
    made.max_demotions =
        static_cast<int>(std::min(std::int64_t{o.max_tokens}, std::int64_t{o.max_batch} * model.windows.recent_tokens));
    *plan = new kvq_step_plan{made};
  });
}

void kvq_step_plan_destroy(kvq_step_plan* plan) { delete plan; }

kvq_status kvq_step_workspace_bytes(const kvq_step_plan* plan, size_t* bytes, kvq_error* error) {
  return guarded(error, [&] { required(bytes, "bytes") = required(plan, "plan").workspace_bytes(); });
}

kvq_status kvq_step_run(const kvq_step_plan* plan, const kvq_cache* cache, const kvq_step_args* args, kvq_stream stream,
                        kvq_error* error) {
  if (!plan) return done(error, Status::fail(StatusCode::invalid_argument, "step: plan must not be null"));
  return done(error, step(*plan, cache, args, stream));
}
