#include <kvq/artifact/geometry_json.h>
#include <kvq/core/error.h>

namespace kvq {

Json geometry_to_json(const LayerGeometry& g) {
  Json json = {{"num_q_heads", g.num_q_heads},
               {"num_kv_heads", g.num_kv_heads},
               {"head_dim", g.head_dim},
               {"v_head_dim", g.v_head_dim},
               {"softmax_scale", g.softmax_scale},
               {"sliding_window", g.sliding_window},
               {"kind", to_string(g.kind)},
               {"rope",
                {{"layout", to_string(g.rope.layout)},
                 {"dim", g.rope.dim},
                 {"offset", g.rope.offset},
                 {"attention_factor", g.rope.attention_factor},
                 {"inv_freq", g.rope.inv_freq}}}};
  if (g.logit_softcap > 0.0) json["logit_softcapping"] = g.logit_softcap;
  if (!g.sink_logits.empty()) json["sink_logits"] = g.sink_logits;
  return json;
}

LayerGeometry geometry_from_json(const Json& json, std::string_view where) {
  LayerGeometry g;
  g.num_q_heads = json.at("num_q_heads");
  g.num_kv_heads = json.at("num_kv_heads");
  g.head_dim = json.at("head_dim");
  g.v_head_dim = json.at("v_head_dim");
  g.softmax_scale = json.at("softmax_scale");
  g.sliding_window = json.at("sliding_window");
  g.kind = json.at("kind") == "mla_rope" ? AttentionKind::mla_rope : AttentionKind::gqa;
  const Json& rope = json.at("rope");
  const std::string layout = rope.at("layout");
  g.rope.layout = layout == "half"          ? RopeLayout::half
                  : layout == "interleaved" ? RopeLayout::interleaved
                                            : RopeLayout::none;
  g.rope.dim = rope.at("dim");
  g.rope.offset = rope.at("offset");
  g.rope.attention_factor = rope.at("attention_factor");
  g.rope.inv_freq = rope.at("inv_freq").get<std::vector<double>>();
  g.logit_softcap = json.value("logit_softcapping", 0.0);
  g.sink_logits = json.value("sink_logits", std::vector<double>{});
  const auto fail = [&](const std::string& what) {
    throw Error{ErrorKind::bad_input, fmt::format("{}: {}", where, what)};
  };
  if (g.num_q_heads % g.num_kv_heads != 0)
    fail(fmt::format("expected num_q_heads to be a multiple of num_kv_heads {}, found {}", g.num_kv_heads,
                     g.num_q_heads));
  if (g.rope.dim % 2 != 0 || g.rope.offset + g.rope.dim > g.head_dim)
    fail(fmt::format("rotary slice [{}, {}) does not fit head_dim {}", g.rope.offset, g.rope.offset + g.rope.dim,
                     g.head_dim));
  if ((g.rope.layout == RopeLayout::none) != (g.rope.dim == 0))
    fail(fmt::format("rope layout {} and a rotary dim of {}: expected none and 0, or neither", to_string(g.rope.layout),
                     g.rope.dim));
  if (g.rope.inv_freq.size() != static_cast<std::size_t>(g.rope.dim / 2))
    fail(fmt::format("inv_freq: expected {} values, found {}", g.rope.dim / 2, g.rope.inv_freq.size()));
  if (!g.sink_logits.empty() && g.sink_logits.size() != static_cast<std::size_t>(g.num_q_heads))
    fail(fmt::format("sink_logits: expected {} values, found {}", g.num_q_heads, g.sink_logits.size()));
  return g;
}

Json model_to_json(const ModelGeometry& model) {
  Json json = {{"name", model.name}, {"fingerprint", model.fingerprint}, {"num_layers", model.num_layers}};
  if (!model.config_json.empty()) json["config"] = parse_json(model.config_json, "model_config");
  return json;
}

ModelGeometry model_from_json(const Json& json) {
  ModelGeometry model;
  model.name = json.at("name");
  model.fingerprint = json.at("fingerprint");
  model.num_layers = json.at("num_layers");
  if (json.contains("config")) model.config_json = canonical_json(json.at("config"));
  return model;
}

}  // namespace kvq
