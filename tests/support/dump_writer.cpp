#include "dump_writer.h"

#include <kvq/core/random.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>

namespace kvq::test {
namespace {

/// The reader under test makes the same call, but a test writes first, and the first call to HDF5 decides.
[[maybe_unused]] const herr_t no_cleanup_at_exit = H5dont_atexit();

/// Owns an HDF5 identifier. H5Idec_ref closes the object when no other reference is left.
class Id {
 public:
  Id(hid_t id, const std::string& what) : id_(id) {
    if (id < 0) throw std::runtime_error("HDF5 cannot " + what);
  }
  ~Id() { H5Idec_ref(id_); }
  Id(const Id&) = delete;
  Id& operator=(const Id&) = delete;
  operator hid_t() const { return id_; }

 private:
  hid_t id_;
};

void check(herr_t status, const std::string& what) {
  if (status < 0) throw std::runtime_error("HDF5 cannot " + what);
}

void write_attribute(hid_t object, const std::string& name, hid_t type, const void* value) {
  if (H5Aexists(object, name.c_str()) > 0) check(H5Adelete(object, name.c_str()), "delete attribute " + name);
  const Id space(H5Screate(H5S_SCALAR), "make a space");
  const Id attribute(H5Acreate2(object, name.c_str(), type, space, H5P_DEFAULT, H5P_DEFAULT), "make attribute " + name);
  check(H5Awrite(attribute, type, value), "write attribute " + name);
}

void write_string(hid_t object, const std::string& name, const std::string& value, bool fixed) {
  const Id type(H5Tcopy(H5T_C_S1), "copy a type");
  const char* text = value.c_str();
  check(H5Tset_cset(type, H5T_CSET_UTF8), "set a character set");
  check(H5Tset_size(type, fixed ? value.size() + 1 : H5T_VARIABLE), "set a string size");
  write_attribute(object, name, type, fixed ? static_cast<const void*>(text) : &text);
}

void write_integer(hid_t object, const std::string& name, std::int64_t value, bool small) {
  const auto narrow = static_cast<std::int32_t>(value);
  if (small) {
    write_attribute(object, name, H5T_STD_I32LE, &narrow);
  } else {
    write_attribute(object, name, H5T_STD_I64LE, &value);
  }
}

/// Creates and writes a dataset; returns the open dataset, so that the caller can add attributes.
hid_t make_dataset(hid_t parent, const std::string& name, hid_t type, const std::vector<hsize_t>& shape,
                   const void* data, std::int64_t chunk_tokens = 0) {
  const Id space(H5Screate_simple(static_cast<int>(shape.size()), shape.data(), nullptr), "make a space");
  const Id creation(H5Pcreate(H5P_DATASET_CREATE), "make properties");
  if (chunk_tokens > 0) {
    std::vector<hsize_t> chunk = shape;
    chunk[0] = static_cast<hsize_t>(chunk_tokens);
    check(H5Pset_chunk(creation, static_cast<int>(chunk.size()), chunk.data()), "set chunks");
  }
  const hid_t dataset = H5Dcreate2(parent, name.c_str(), type, space, H5P_DEFAULT, creation, H5P_DEFAULT);
  if (dataset < 0) throw std::runtime_error("HDF5 cannot make dataset " + name);
  if (data != nullptr) check(H5Dwrite(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data), "write dataset " + name);
  return dataset;
}

std::vector<std::uint16_t> narrowed(const std::vector<float>& values, DType dtype) {
  std::vector<std::uint16_t> bits;
  for (const float value : values) bits.push_back(dtype == DType::f16 ? float_to_f16(value) : float_to_bf16(value));
  return bits;
}

class LayerWriter {
 public:
  LayerWriter(hid_t group, const DumpContent& content, const DumpLayer& layer)
      : group_(group), content_(content), layer_(layer) {}

  void write() const {
    write_attributes();
    const LayerGeometry& g = layer_.geometry;
    write_activation("q", layer_.q, g.num_q_heads, g.head_dim);
    write_activation("k", layer_.k, g.num_kv_heads, g.head_dim);
    if (!layer_.v.empty()) write_activation("v", layer_.v, g.num_kv_heads, g.v_head_dim);
    write_rest();
  }

 private:
  void write_attributes() const {
    const LayerGeometry& g = layer_.geometry;
    const auto integer = [&](const char* name, std::int64_t value) {
      write_integer(group_, name, value, content_.small_integers);
    };
    integer("num_q_heads", g.num_q_heads);
    integer("num_kv_heads", g.num_kv_heads);
    integer("head_dim", g.head_dim);
    integer("v_head_dim", g.v_head_dim);
    integer("sliding_window", g.sliding_window);
    integer("rotary_dim", g.rope.dim);
    integer("rotary_offset", g.rope.offset);
    write_attribute(group_, "softmax_scale", H5T_IEEE_F64LE, &g.softmax_scale);
    if (g.logit_softcap > 0.0) write_attribute(group_, "logit_softcapping", H5T_IEEE_F64LE, &g.logit_softcap);
    write_string(group_, "kind", to_string(g.kind), content_.fixed_strings);
    write_string(group_, "rope_layout", to_string(g.rope.layout), content_.fixed_strings);
    if (g.rope.attention_factor != 1.0)
      write_attribute(group_, "rope_attention_factor", H5T_IEEE_F64LE, &g.rope.attention_factor);
  }

  void write_activation(const char* name, const std::vector<float>& values, int heads, int dim) const {
    const std::vector<hsize_t> shape = {static_cast<hsize_t>(content_.positions.size()), static_cast<hsize_t>(heads),
                                        static_cast<hsize_t>(dim)};
    const Id half(half_type(), "make the half type");
    const auto bits = narrowed(values, layer_.dtype);
    const bool is_float = layer_.dtype == DType::f32;
    const hid_t type = is_float                                               ? H5T_IEEE_F32LE
                       : layer_.dtype == DType::f16 && !content_.half_as_bits ? static_cast<hid_t>(half)
                                                                              : H5T_STD_U16LE;
    const void* data = is_float ? static_cast<const void*>(values.data()) : bits.data();
    const Id dataset(make_dataset(group_, name, type, shape, data, content_.chunk_tokens), name);
    write_string(dataset, "kvq_dtype", std::string(activation_name(layer_.dtype)), content_.fixed_strings);
  }

  void write_rest() const {
    const LayerGeometry& g = layer_.geometry;
    const auto width = static_cast<hsize_t>(g.num_q_heads) * static_cast<hsize_t>(g.v_head_dim);
    if (g.rope.layout != RopeLayout::none)
      set_dataset(group_, "rope_inv_freq", H5T_IEEE_F64LE, {g.rope.inv_freq.size()}, g.rope.inv_freq.data());
    if (!g.sink_logits.empty())
      set_dataset(group_, "sink_logits", H5T_IEEE_F64LE, {g.sink_logits.size()}, g.sink_logits.data());
    if (!layer_.o_proj.empty()) {
      const Id half(half_type(), "make the half type");
      set_dataset(group_, "o_proj", half, {layer_.o_proj.size() / width, width},
                  narrowed(layer_.o_proj, DType::f16).data());
    }
    if (!layer_.o_proj_metric.empty()) {
      const auto dim = static_cast<hsize_t>(g.v_head_dim);
      set_dataset(group_, "o_proj_metric", H5T_IEEE_F32LE, {static_cast<hsize_t>(g.num_kv_heads), dim, dim},
                  layer_.o_proj_metric.data());
    }
    if (!layer_.output_curvature.empty()) {
      const auto dim = static_cast<hsize_t>(g.v_head_dim);
      set_dataset(group_, "output_curvature", H5T_IEEE_F32LE, {static_cast<hsize_t>(g.num_q_heads), dim, dim},
                  layer_.output_curvature.data());
      set_attribute(group_, "output_curvature", "source", "test");
    }
  }

  hid_t group_;
  const DumpContent& content_;
  const DumpLayer& layer_;
};

void write_root(hid_t file, const DumpContent& content) {
  const auto string = [&](const char* name, const std::string& value) {
    write_string(file, name, value, content.fixed_strings);
  };
  string("format", "kvq-dump");
  const bool has_metric = std::any_of(content.layers.begin(), content.layers.end(),
                                      [](const DumpLayer& layer) { return !layer.o_proj_metric.empty(); });
  string("version", has_metric ? "1.1" : "1.0");
  string("model_name", content.model_name);
  string("producer", content.producer);
  string("capture_point", to_string(content.capture_point));
  if (!content.model_fingerprint.empty()) string("model_fingerprint", content.model_fingerprint);
  if (!content.model_config.empty()) string("model_config", content.model_config);
  if (!content.required.empty()) string("requires", content.required);
  write_integer(file, "num_layers", content.num_layers, content.small_integers);
  set_dataset(file, "/cu_seqlens", H5T_STD_I64LE, {content.cu_seqlens.size()}, content.cu_seqlens.data());
  set_dataset(file, "/positions", H5T_STD_I64LE, {content.positions.size()}, content.positions.data());
  if (!content.generated.empty())
    set_dataset(file, "/generated", H5T_STD_U8LE, {content.generated.size()}, content.generated.data());
}

std::vector<float> gaussian(std::size_t count, std::uint64_t seed, int layer, std::uint32_t which) {
  RandomStream random(seed, RandomStream::Purpose::test, static_cast<std::uint32_t>(layer), which);
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(random.next_normal());
  return values;
}

DumpLayer random_layer(const RandomDumpSpec& spec, int layer, std::size_t tokens) {
  const auto count = [&](int heads, int dim) {
    return tokens * static_cast<std::size_t>(heads) * static_cast<std::size_t>(dim);
  };
  DumpLayer result{.layer = layer, .dtype = spec.dtype};
  result.geometry = {
      .num_q_heads = spec.num_q_heads,
      .num_kv_heads = spec.num_kv_heads,
      .head_dim = spec.head_dim,
      .v_head_dim = spec.v_head_dim,
      .softmax_scale = 1.0 / spec.head_dim,
      .sliding_window = spec.sliding_window,
      .kind = spec.kind,
      .rope = spec.rope,
  };
  result.q = gaussian(count(spec.num_q_heads, spec.head_dim), spec.seed, layer, 0);
  result.k = gaussian(count(spec.num_kv_heads, spec.head_dim), spec.seed, layer, 1);
  if (spec.kind == AttentionKind::gqa)
    result.v = gaussian(count(spec.num_kv_heads, spec.v_head_dim), spec.seed, layer, 2);
  return result;
}

}  // namespace

hid_t half_type() {
  const hid_t type = H5Tcopy(H5T_IEEE_F32LE);
  H5Tset_fields(type, 15, 10, 5, 0, 10);
  H5Tset_size(type, 2);
  H5Tset_ebias(type, 15);
  return type;
}

DumpContent random_dump(const RandomDumpSpec& spec) {
  DumpContent content;
  content.capture_point = spec.capture_point;
  content.num_layers = spec.num_layers > 0 ? spec.num_layers : spec.layers.back() + 1;
  content.cu_seqlens = {0};
  for (const std::int64_t length : spec.lengths) {
    content.cu_seqlens.push_back(content.cu_seqlens.back() + length);
    for (std::int64_t t = 0; t < length; ++t) content.positions.push_back(t);
  }
  for (const int layer : spec.layers) content.layers.push_back(random_layer(spec, layer, content.positions.size()));
  return content;
}

void write_dump(const std::filesystem::path& path, const DumpContent& content, const Damage& damage) {
  const Id creation(H5Pcreate(H5P_FILE_CREATE), "make properties");
  const Id access(H5Pcreate(H5P_FILE_ACCESS), "make properties");
  check(H5Pset_userblock(creation, static_cast<hsize_t>(content.user_block_bytes)), "set a user block");
  if (content.newest_structures)
    check(H5Pset_libver_bounds(access, H5F_LIBVER_LATEST, H5F_LIBVER_LATEST), "set a library version");
  const Id file(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, creation, access), "make " + path.string());
  write_root(file, content);
  const Id layers(H5Gcreate2(file, "layers", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT), "make /layers");
  for (const DumpLayer& layer : content.layers) {
    const std::string name = std::to_string(layer.layer);
    const Id group(H5Gcreate2(layers, name.c_str(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT), "make layer " + name);
    LayerWriter(group, content, layer).write();
  }
  if (damage) damage(file);
}

void remove_attribute(hid_t file, const std::string& object, const std::string& name) {
  check(H5Adelete_by_name(file, object.c_str(), name.c_str(), H5P_DEFAULT), "delete attribute " + name);
}

void set_attribute(hid_t file, const std::string& object, const std::string& name, const std::string& value) {
  const Id target(H5Oopen(file, object.c_str(), H5P_DEFAULT), "open " + object);
  write_string(target, name, value, false);
}

void set_attribute(hid_t file, const std::string& object, const std::string& name, std::int64_t value) {
  const Id target(H5Oopen(file, object.c_str(), H5P_DEFAULT), "open " + object);
  write_attribute(target, name, H5T_STD_I64LE, &value);
}

void set_attribute(hid_t file, const std::string& object, const std::string& name, int value) {
  set_attribute(file, object, name, std::int64_t{value});
}

void set_attribute(hid_t file, const std::string& object, const std::string& name, double value) {
  const Id target(H5Oopen(file, object.c_str(), H5P_DEFAULT), "open " + object);
  write_attribute(target, name, H5T_IEEE_F64LE, &value);
}

void remove_link(hid_t file, const std::string& path) {
  check(H5Ldelete(file, path.c_str(), H5P_DEFAULT), "delete " + path);
}

void set_dataset(hid_t file, const std::string& path, hid_t type, const std::vector<hsize_t>& shape, const void* data) {
  if (H5Lexists(file, path.c_str(), H5P_DEFAULT) > 0) remove_link(file, path);
  const Id dataset(make_dataset(file, path, type, shape, data), "make " + path);
}

}  // namespace kvq::test
