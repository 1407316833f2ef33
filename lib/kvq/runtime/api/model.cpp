#include <kvq/runtime/api/handles.h>

#include <kvq/plan/layer_plan.h>
#include <kvq/runtime/layout_id.h>

#include <memory>

namespace kvq::abi {

namespace {

RopeLayout rope_layout(int rope) {
  switch (rope) {
    case KVQ_ROPE_NONE: return RopeLayout::none;
    case KVQ_ROPE_HALF: return RopeLayout::half;
    case KVQ_ROPE_INTERLEAVED: return RopeLayout::interleaved;
    default: throw Error{ErrorKind::usage, fmt::format("geometry: rope: expected a kvq_rope, found {}", rope)};
  }
}

LayerClaim layer_claim(const kvq_layer_geometry& g) {
  if (g.num_q_heads < 1 || g.num_kv_heads < 1 || g.head_dim < 1 || g.v_head_dim < 0)
    throw Error{ErrorKind::usage,
                fmt::format("geometry: {} query heads, {} KV heads, head_dim {}, v_head_dim {}: expected 1 or more",
                            g.num_q_heads, g.num_kv_heads, g.head_dim, g.v_head_dim)};
  if (g.fold & ~std::uint32_t{KVQ_FOLD_V | KVQ_FOLD_K | KVQ_FOLD_K_SCALES})
    throw Error{ErrorKind::usage, fmt::format("geometry: fold: unknown bits in {:#x}", g.fold)};
  LayerClaim claim{
      .num_q_heads = g.num_q_heads,
      .num_kv_heads = g.num_kv_heads,
      .head_dim = g.head_dim,
      .v_head_dim = g.v_head_dim ? g.v_head_dim : g.head_dim,
      .sliding_window = g.sliding_window,
  };
  if (g.rope != KVQ_ROPE_ANY) claim.rope = rope_layout(g.rope);
  if (g.rotary_dim != 0) claim.rotary_dim = g.rotary_dim;
  if (g.softmax_scale != 0.0) claim.softmax_scale = g.softmax_scale;
  if (g.logit_softcap != 0.0) claim.logit_softcap = g.logit_softcap;
  claim.folded = {
      .k = (g.fold & KVQ_FOLD_K) != 0,
      .v = (g.fold & KVQ_FOLD_V) != 0,
      .k_scales = (g.fold & KVQ_FOLD_K_SCALES) != 0,
  };
  return claim;
}

/// The caller's array of geometries. The struct_size of the first element is the distance of elements.
std::vector<LayerClaim> layer_claims(const kvq_model_options& o) {
  if (o.num_geometries != 1 && o.num_geometries != o.num_layers)
    throw Error{ErrorKind::usage,
                fmt::format("num_geometries: expected 1 or num_layers ({}), found {}", o.num_layers, o.num_geometries)};
  required(o.geometry, "geometry");
  std::vector<LayerClaim> claims;
  const auto* at = reinterpret_cast<const unsigned char*>(o.geometry);
  for (int i = 0; i < o.num_geometries; ++i, at += o.geometry->struct_size) {
    kvq_layer_geometry geometry;
    raise(read_struct(reinterpret_cast<const kvq_layer_geometry*>(at), geometry, "geometry"));
    claims.push_back(layer_claim(geometry));
  }
  claims.resize(static_cast<std::size_t>(o.num_layers), claims.front());
  return claims;
}

ModelClaim model_claim(const kvq_model_options& o) {
  if (o.num_layers < 1 || o.num_layers > 65536)
    throw Error{ErrorKind::usage, fmt::format("num_layers: expected 1 to 65536, found {}", o.num_layers)};
  if (o.flags & ~std::uint32_t{KVQ_MODEL_WITHOUT_WINDOWS})
    throw Error{ErrorKind::usage, fmt::format("flags: unknown bits in {:#x}", o.flags)};
  ModelClaim claim{.num_layers = o.num_layers, .layers = layer_claims(o)};
  if (o.fingerprint) claim.fingerprint = o.fingerprint;
  claim.first_layer = o.first_layer;
  claim.layer_count = o.layer_count ? o.layer_count : o.num_layers - o.first_layer;
  claim.tp_rank = o.tp_rank, claim.tp_size = o.tp_size ? o.tp_size : 1;
  if (o.activation != KVQ_BF16 && o.activation != KVQ_FP16)
    throw Error{ErrorKind::usage, fmt::format("activation: expected KVQ_BF16 ({}) or KVQ_FP16 ({}), found {}",
                                              int{KVQ_BF16}, int{KVQ_FP16}, o.activation)};
  claim.bf16 = o.activation == KVQ_BF16;
  claim.page_size = o.page_size ? o.page_size : 64;
  claim.max_step_tokens = o.max_step_tokens ? o.max_step_tokens : 1;
  claim.without_windows = o.flags & KVQ_MODEL_WITHOUT_WINDOWS;
  return claim;
}

int applied_rotation(const TensorPlan& plan, bool folded) {
  if (folded || plan.rotation.kind == RotationKind::identity) return KVQ_ROTATION_IDENTITY;
  return plan.rotation.kind == RotationKind::dense ? KVQ_ROTATION_DENSE : KVQ_ROTATION_HADAMARD;
}

kvq_layer_info layer_info(const LoadedLayer& l) {
  const LayerGeometry& g = l.plan.geometry;
  const auto group = [](const TileSide& side) { return side.exact() ? 0 : side.group_size; };
  const auto bits = [](const TensorPlan& plan, int dim) { return effective_bits(plan, dim, Windows{}, 1); };
  kvq_layer_info info{};
  info.layer = l.plan.layer;
  info.num_q_heads = g.num_q_heads, info.num_kv_heads = g.num_kv_heads;
  info.first_q_head = l.heads.first_q, info.first_kv_head = l.heads.first_kv;
  info.head_dim = g.head_dim, info.v_head_dim = g.v_head_dim;
  info.k_bits = l.pages.k.bits, info.v_bits = l.pages.v.bits;
  info.k_group_size = group(l.pages.k), info.v_group_size = group(l.pages.v);
  info.k_numbers = l.pages.k.numbers, info.v_numbers = l.pages.v.numbers;
  info.k_rotation = applied_rotation(l.plan.k, l.folded.k), info.v_rotation = applied_rotation(*l.plan.v, l.folded.v);
  info.fold =
      static_cast<std::uint32_t>((l.folded.k ? KVQ_FOLD_K : KVQ_FOLD_NONE) | (l.folded.v ? KVQ_FOLD_V : KVQ_FOLD_NONE) |
                                 (l.folded.k_scales ? KVQ_FOLD_K_SCALES : KVQ_FOLD_NONE));
  info.k_scales = !l.plan.k.rotation.channel_scale.empty() && !l.folded.k && !l.folded.k_scales;
  info.v_scales = !l.plan.v->rotation.channel_scale.empty() && !l.folded.v;
  info.sliding_window = g.sliding_window;
  info.sink_rows = l.windows.sinks.rows, info.ring_rows = l.windows.rings.rows;
  info.page_bytes = l.pages.page_bytes();
  info.sink_slot_bytes = l.windows.sinks.slot_bytes(), info.ring_slot_bytes = l.windows.rings.slot_bytes();
  info.softmax_scale = g.softmax_scale, info.logit_softcap = g.logit_softcap;
  info.k_effective_bits = bits(l.plan.k, g.head_dim), info.v_effective_bits = bits(*l.plan.v, g.v_head_dim);
  return info;
}

}  // namespace

const LoadedLayer& layer_of(const kvq_model* model, int layer) {
  const LoadedModel& m = required(model, "model").model;
  const LoadedLayer* found = m.find(layer);
  if (!found)
    throw Error{ErrorKind::usage, fmt::format("layer: expected {} to {}, found {}", m.claim.first_layer,
                                              m.claim.first_layer + m.claim.layer_count - 1, layer)};
  return *found;
}

}  // namespace kvq::abi

using namespace kvq;
using namespace kvq::abi;

kvq_status kvq_model_load(const char* path, const kvq_model_options* options, kvq_model** model, kvq_error* error) {
  return guarded(error, [&] {
    required(path, "path"), required(model, "model");
    kvq_model_options o;
    raise(read_struct(options, o, "options"));
    *model = new kvq_model{load_model(path, model_claim(o))};
  });
}

void kvq_model_destroy(kvq_model* model) { delete model; }

kvq_status kvq_model_query(const kvq_model* model, kvq_model_info* info, kvq_error* error) {
  return guarded(error, [&] {
    const LoadedModel& m = required(model, "model").model;
    kvq_model_info i{};
    i.num_layers = m.claim.num_layers, i.first_layer = m.claim.first_layer, i.layer_count = m.claim.layer_count;
    i.tp_rank = m.claim.tp_rank, i.tp_size = m.claim.tp_size;
    i.activation = m.claim.bf16 ? KVQ_BF16 : KVQ_FP16;
    i.page_size = m.claim.page_size, i.max_step_tokens = m.claim.max_step_tokens;
    i.sink_tokens = m.windows.sink_tokens, i.recent_tokens = m.windows.recent_tokens;
    for (const LoadedLayer& layer : m.layers) i.golden_layers += layer.golden.has_value();
    i.name = m.name.c_str(), i.method = m.method.c_str();
    i.content_hash = m.content_hash.c_str(), i.layout_id = layout_id(m);
    raise(write_struct(i, info, "info"));
  });
}

kvq_status kvq_model_query_layer(const kvq_model* model, std::int32_t layer, kvq_layer_info* info, kvq_error* error) {
  return guarded(error, [&] { raise(write_struct(layer_info(layer_of(model, layer)), info, "info")); });
}

kvq_status kvq_model_device_bytes(const kvq_model* model, size_t* bytes, kvq_error* error) {
  return guarded(error, [&] { required(bytes, "bytes") = required(model, "model").model.image.bytes().size(); });
}

kvq_status kvq_model_upload(const kvq_model* model, void* memory, size_t bytes, kvq_stream stream,
                            kvq_device_model** device_model, kvq_error* error) {
  return guarded(error, [&] {
    const LoadedModel& m = required(model, "model").model;
    required(device_model, "device_model");
    const auto image = m.image.bytes();
    if (bytes < image.size())
      throw Error{ErrorKind::usage, fmt::format("upload: expected {} bytes of memory, found {}", image.size(), bytes)};
    if (!image.empty() && (!memory || !aligned(memory, 256)))
      throw Error{ErrorKind::usage, "upload: memory must be aligned to 256 bytes"};

    auto made = std::make_shared<DeviceModel>();
    raise(cuda_status(cudaGetDevice(&made->device), "upload"));
    made->first_layer = m.claim.first_layer, made->windows = m.windows, made->max_rollback = m.claim.max_step_tokens;
    for (std::size_t i = 0; i < m.layers.size(); ++i) {
      const LoadedLayer& l = m.layers[i];
      made->layers.push_back({
          .key = l.key,
          .num_q_heads = l.heads.num_q,
          .num_kv_heads = l.heads.num_kv,
          .softmax_scale = static_cast<float>(l.plan.geometry.softmax_scale),
          .logit_softcap = static_cast<float>(l.plan.geometry.logit_softcap),
          .sliding_window = l.plan.geometry.sliding_window,
          .folded = l.folded,
          .center_in_o_proj = l.folded.v && !l.plan.v->center.empty(),
          .pages = l.pages,
          .windows = l.windows,
          .pointers = m.image.pointers(i, static_cast<const std::byte*>(memory)),
      });
    }
    if (!image.empty())
      raise(cuda_status(cudaMemcpyAsync(memory, image.data(), image.size(), cudaMemcpyHostToDevice, stream), "upload"));
    raise(cuda_status(cudaStreamSynchronize(stream), "upload"));
    *device_model = new kvq_device_model{std::move(made)};
  });
}

void kvq_device_model_destroy(kvq_device_model* device_model) { delete device_model; }
