#include <kvq/core/text.h>
#include <kvq/diff/facts.h>

#include <map>
#include <utility>

namespace kvq {

void Facts::compare_json(const std::string& what, const Json& before, const Json& after) {
  if (before == after) return;
  if (!before.is_object() || !after.is_object()) {
    compare(what, printable(before.dump(), 60), printable(after.dump(), 60));
    return;
  }
  std::map<std::string, std::pair<Json, Json>> keys;
  for (const auto& [key, value] : before.items()) keys[key].first = value;
  for (const auto& [key, value] : after.items()) keys[key].second = value;
  for (const auto& [key, values] : keys) compare_json(what + "." + printable(key, 40), values.first, values.second);
}

void Facts::compare_geometry(const std::string& where, const LayerGeometry& a, const LayerGeometry& b) {
  compare(where + " num_q_heads", a.num_q_heads, b.num_q_heads);
  compare(where + " num_kv_heads", a.num_kv_heads, b.num_kv_heads);
  compare(where + " head_dim", a.head_dim, b.head_dim);
  compare(where + " v_head_dim", a.v_head_dim, b.v_head_dim);
  compare<std::string>(where + " kind", to_string(a.kind), to_string(b.kind));
  compare(where + " softmax_scale", a.softmax_scale, b.softmax_scale);
  compare(where + " sliding_window", a.sliding_window, b.sliding_window);
  compare(where + " logit_softcapping", a.logit_softcap, b.logit_softcap);
  if (a.sink_logits != b.sink_logits) compare<std::string>(where + " sink_logits", "one", "another");
  compare<std::string>(where + " rope layout", to_string(a.rope.layout), to_string(b.rope.layout));
  compare(where + " rotary_dim", a.rope.dim, b.rope.dim);
  compare(where + " rotary_offset", a.rope.offset, b.rope.offset);
  compare(where + " rope_attention_factor", a.rope.attention_factor, b.rope.attention_factor);
  if (a.rope.inv_freq != b.rope.inv_freq) compare<std::string>(where + " rope_inv_freq", "one", "another");
}

}  // namespace kvq
