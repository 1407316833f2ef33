#include <kvq/codec/fold_weights.h>
#include <kvq/runtime/api/handles.h>

#include <cstddef>
#include <span>

using namespace kvq;
using namespace kvq::abi;

namespace {

constexpr int kMostHidden = 1 << 24;  // larger than in any model; rejects garbage

DType dtype_of(std::int32_t type) {
  switch (type) {
    case KVQ_WEIGHT_BF16: return DType::bf16;
    case KVQ_WEIGHT_FP16: return DType::f16;
    case KVQ_WEIGHT_FP32: return DType::f32;
    default:
      throw Error{ErrorKind::usage, fmt::format("fold: weight_type: expected a kvq_weight_type, found {}", type)};
  }
}

std::size_t features(int hidden) {
  if (hidden < 1 || hidden > kMostHidden)
    throw Error{ErrorKind::usage, fmt::format("fold: hidden: expected 1 to {}, found {}", kMostHidden, hidden)};
  return static_cast<std::size_t>(hidden);
}

/// The caller's projection. @param name  of the weight, for messages
Projection projection(double* weight, double* bias, std::size_t out, std::size_t in, const char* name) {
  return {{&required(weight, name), out * in}, bias ? std::span(bias, out) : std::span<double>()};
}

std::size_t product(int heads, int dim) { return static_cast<std::size_t>(heads) * static_cast<std::size_t>(dim); }

}  // namespace

kvq_status kvq_fold_values(const kvq_model* model, std::int32_t layer, const kvq_fold_values_args* args,
                           kvq_fold_error* result, kvq_error* error) {
  return guarded(error, [&] {
    const LayerPlan& plan = layer_of(model, layer).plan;
    kvq_fold_values_args a;
    raise(read_struct(args, a, "args"));
    kvq_fold_error found{};
    if (result) raise(write_struct(found, result, "result"));  // before anything is changed
    const LayerGeometry& g = plan.geometry;
    const std::size_t hidden = features(a.hidden);
    const Projection v =
        projection(a.v_weight, a.v_bias, product(g.num_kv_heads, g.v_head_dim), hidden, "args.v_weight");
    const Projection o =
        projection(a.o_weight, a.o_bias, hidden, product(g.num_q_heads, g.v_head_dim), "args.o_weight");
    const FoldError change = fold_value_rotation(plan, a.hidden, dtype_of(a.weight_type), v, o);
    found.v_proj = change.v_proj, found.v_proj_before = change.v_proj_before;
    found.o_proj = change.o_proj, found.o_proj_before = change.o_proj_before;
    if (result) raise(write_struct(found, result, "result"));
  });
}

kvq_status kvq_fold_keys(const kvq_model* model, std::int32_t layer, const kvq_fold_keys_args* args, kvq_error* error) {
  return guarded(error, [&] {
    const LayerPlan& plan = layer_of(model, layer).plan;
    kvq_fold_keys_args a;
    raise(read_struct(args, a, "args"));
    const LayerGeometry& g = plan.geometry;
    const std::size_t hidden = features(a.hidden);
    const Projection q = projection(a.q_weight, a.q_bias, product(g.num_q_heads, g.head_dim), hidden, "args.q_weight");
    const Projection k = projection(a.k_weight, a.k_bias, product(g.num_kv_heads, g.head_dim), hidden, "args.k_weight");
    fold_key_rotation(plan, a.hidden, q, k);
  });
}

kvq_status kvq_fold_key_scales(const kvq_model* model, std::int32_t layer, const kvq_fold_key_scales_args* args,
                               kvq_error* error) {
  return guarded(error, [&] {
    const LayerPlan& plan = layer_of(model, layer).plan;
    kvq_fold_key_scales_args a;
    raise(read_struct(args, a, "args"));
    const LayerGeometry& g = plan.geometry;
    if (a.q_norm || a.k_norm) {
      if (a.q_weight || a.k_weight)
        throw Error{ErrorKind::usage, "fold: args: expected projections or norms, found both"};
      const auto dim = static_cast<std::size_t>(g.head_dim);
      fold_key_scales(plan, {&required(a.q_norm, "args.q_norm"), dim}, {&required(a.k_norm, "args.k_norm"), dim});
      return;
    }
    const std::size_t hidden = features(a.hidden);
    const Projection q = projection(a.q_weight, a.q_bias, product(g.num_q_heads, g.head_dim), hidden, "args.q_weight");
    const Projection k = projection(a.k_weight, a.k_bias, product(g.num_kv_heads, g.head_dim), hidden, "args.k_weight");
    fold_key_scales(plan, a.hidden, q, k);
  });
}
