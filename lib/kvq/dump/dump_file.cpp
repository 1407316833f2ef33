#include <kvq/dump/dump_file.h>

#include <kvq/core/error.h>
#include <kvq/core/text.h>
#include <kvq/dump/dump_part.h>
#include <kvq/dump/layer_loader.h>

#include <algorithm>
#include <system_error>
#include <utility>

namespace kvq {
namespace {

[[noreturn]] void reject(const DumpPart& part, const std::string& what) {
  throw Error{ErrorKind::bad_input, fmt::format("{}: {}", part.name(), what)};
}

/// The same file twice would count its sequences twice.
void check_distinct(const std::vector<std::filesystem::path>& files) {
  for (std::size_t i = 0; i < files.size(); ++i)
    for (std::size_t j = 0; j < i; ++j)
      if (std::error_code error; std::filesystem::equivalent(files[i], files[j], error))
        throw Error{ErrorKind::bad_input, fmt::format("{}: is the same file as {}", safe_line(files[i].string()),
                                                      safe_line(files[j].string()))};
}

/// Differences of one part from another. Parts of different models differ everywhere, so one line names the first
/// difference and the number of the others.
class Differences {
 public:
  Differences(const DumpPart& part, const DumpPart& first) : part_(part), first_(first) {}

  template <typename T>
  void compare(const std::string& what, const T& found, const T& expected) {
    if (found != expected)
      add(fmt::format("{}: expected '{}' as in {}, found '{}'", what, expected, first_.name(), found));
  }
  void add(const std::string& what) {
    if (count_++ == 0) line_ = what;
  }
  /// @throws Error{bad_input} if there is a difference
  void throw_if_any() const {
    if (count_ == 1) reject(part_, line_);
    if (count_ > 1) reject(part_, fmt::format("{} ({} further differences)", line_, count_ - 1));
  }

 private:
  const DumpPart &part_, &first_;
  std::string line_;
  std::size_t count_ = 0;
};

void compare_model(const DumpPart& part, const DumpPart& first, Differences& differences) {
  differences.compare("model_name", printable(part.model_name), printable(first.model_name));
  differences.compare("model_fingerprint", part.model_fingerprint, first.model_fingerprint);
  differences.compare("num_layers", part.num_layers, first.num_layers);
  differences.compare("capture_point", std::string(to_string(part.capture_point)),
                      std::string(to_string(first.capture_point)));
  const auto word = [](const DumpPart& any) {
    return std::string(any.sequences.generated.empty() ? "missing" : "there");
  };
  differences.compare("generated", word(part), word(first));
}

std::string dtype_word(const StoredTensor& tensor) { return std::string(activation_name(tensor.dtype)); }
std::string dtype_word(const std::optional<StoredTensor>& tensor) { return tensor ? dtype_word(*tensor) : "missing"; }

std::int64_t num_rows(const std::optional<StoredTensor>& tensor) { return tensor ? tensor->dataset.shape()[0] : 0; }

/// Compares a layer of which both parts hold different sequences.
void compare_layer(int layer, const DumpPart& part, const DumpPart& first, Differences& differences) {
  const LayerPart& found = part.layers.at(layer);
  const LayerPart& expected = first.layers.at(layer);
  const auto same = [&](const char* what, const auto& a, const auto& b) {
    differences.compare(fmt::format("layer {}: {}", layer, what), a, b);
  };
  const LayerGeometry &g = found.geometry, &h = expected.geometry;
  same("num_q_heads", g.num_q_heads, h.num_q_heads);
  same("num_kv_heads", g.num_kv_heads, h.num_kv_heads);
  same("head_dim", g.head_dim, h.head_dim);
  same("v_head_dim", g.v_head_dim, h.v_head_dim);
  same("softmax_scale", g.softmax_scale, h.softmax_scale);
  same("sliding_window", g.sliding_window, h.sliding_window);
  same("logit_softcapping", g.logit_softcap, h.logit_softcap);
  same("kind", std::string(to_string(g.kind)), std::string(to_string(h.kind)));
  same("rope_layout", std::string(to_string(g.rope.layout)), std::string(to_string(h.rope.layout)));
  same("rotary_dim", g.rope.dim, h.rope.dim);
  same("rotary_offset", g.rope.offset, h.rope.offset);
  same("rope_attention_factor", g.rope.attention_factor, h.rope.attention_factor);
  same("q: kvq_dtype", dtype_word(found.q), dtype_word(expected.q));
  same("k: kvq_dtype", dtype_word(found.k), dtype_word(expected.k));
  same("v: kvq_dtype", dtype_word(found.v), dtype_word(expected.v));
  same("o_proj: rows", num_rows(found.o_proj), num_rows(expected.o_proj));
  same("o_proj_metric: heads", num_rows(found.o_proj_metric), num_rows(expected.o_proj_metric));
  same("output_curvature: heads", num_rows(found.output_curvature), num_rows(expected.output_curvature));
  if (g.sink_logits != h.sink_logits)
    differences.add(fmt::format("layer {}: sink_logits differs from {}", layer, first.name()));
  if (g.rope.inv_freq != h.rope.inv_freq)
    differences.add(fmt::format("layer {}: rope_inv_freq differs from {}", layer, first.name()));
}

using PartList = std::vector<const DumpPart*>;

Sequences join(const PartList& parts) {
  Sequences joined;
  for (const DumpPart* part : parts) joined.append(part->sequences);
  return joined;
}

std::string names_of(const PartList& parts) {
  std::string names;
  for (const DumpPart* part : parts) names += (names.empty() ? "" : ", ") + part->name();
  return names;
}

}  // namespace

struct Dump::Impl {
  std::vector<DumpPart> parts;
  std::map<int, PartList> parts_of_layer;  ///< in file order
  Sequences sequences;                     ///< of every layer
  ModelGeometry model;

  void open_parts(const std::vector<std::filesystem::path>& files, Faults& faults);
  void check_agreement(Faults& faults) const;
  void join_sequences();
  void describe_model();
  const PartList& parts_with(int layer) const;
};

void Dump::Impl::open_parts(const std::vector<std::filesystem::path>& files, Faults& faults) {
  for (const auto& path : files)
    if (auto part = read_dump_part(path, faults)) parts.push_back(*std::move(part));
  for (const DumpPart& part : parts)
    for (const auto& [layer, facts] : part.layers) parts_of_layer[layer].push_back(&part);
}

void Dump::Impl::check_agreement(Faults& faults) const {
  std::map<std::pair<const DumpPart*, const DumpPart*>, Differences> found;  // in the order of the files
  const auto differences = [&](const DumpPart& part, const DumpPart& first) -> Differences& {
    return found.try_emplace({&part, &first}, part, first).first->second;
  };
  for (const DumpPart& part : parts)
    if (&part != &parts.front()) compare_model(part, parts.front(), differences(part, parts.front()));
  for (const auto& [layer, list] : parts_of_layer)
    for (const DumpPart* part : list)
      if (part != list.front()) compare_layer(layer, *part, *list.front(), differences(*part, *list.front()));
  for (const auto& pair : found) faults.collect([&] { pair.second.throw_if_any(); });
}

/// Checks that every layer has the same sequences in the same order, whichever files they come from.
void Dump::Impl::join_sequences() {
  const auto& [first_layer, first_list] = *parts_of_layer.begin();
  sequences = join(first_list);
  PartList agreed = first_list;  // layers of the same files need no second comparison
  for (const auto& [layer, list] : parts_of_layer) {
    if (list == agreed) continue;
    if (join(list) != sequences)
      throw Error{
          ErrorKind::bad_input,
          fmt::format("layer {} sees other sequences (from {}) than layer {} (from {}); all layers must see the same",
                      layer, names_of(list), first_layer, names_of(first_list))};
    agreed = list;
  }
}

void Dump::Impl::describe_model() {
  const DumpPart& first = parts.front();
  model.name = first.model_name;
  model.fingerprint = first.model_fingerprint;
  model.num_layers = first.num_layers;
  for (const DumpPart& part : parts)
    if (model.config_json.empty()) model.config_json = part.model_config;
  for (const auto& [layer, list] : parts_of_layer) {
    const LayerPart& facts = list.front()->layers.at(layer);
    model.layers.push_back({.layer = layer, .geometry = facts.geometry, .has_values = facts.v.has_value()});
  }
}

const PartList& Dump::Impl::parts_with(int layer) const {
  const auto found = parts_of_layer.find(layer);
  if (found == parts_of_layer.end()) reject(parts.front(), fmt::format("there is no layer {} in the dump", layer));
  return found->second;
}

Dump::Dump(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Dump::Dump(Dump&&) noexcept = default;
Dump& Dump::operator=(Dump&& other) noexcept {
  std::swap(impl_, other.impl_);
  return *this;
}
Dump::~Dump() {
  const hdf5::CallScope scope;  // even closing a damaged file may fail
  impl_.reset();
}

Dump Dump::open(const std::vector<std::filesystem::path>& files) {
  if (files.empty()) throw Error{ErrorKind::bad_input, "a dump needs at least one file"};
  const hdf5::CallScope scope;
  check_distinct(files);
  auto impl = std::make_unique<Impl>();
  Faults faults;
  impl->open_parts(files, faults);
  faults.throw_if_any();
  impl->check_agreement(faults);
  faults.throw_if_any();
  impl->join_sequences();
  impl->describe_model();
  return Dump(std::move(impl));
}

const ModelGeometry& Dump::model() const { return impl_->model; }
CapturePoint Dump::capture_point() const { return impl_->parts.front().capture_point; }
const std::string& Dump::producer() const { return impl_->parts.front().producer; }
bool Dump::marks_generated() const { return !impl_->sequences.generated.empty(); }
std::int64_t Dump::num_tokens() const { return impl_->sequences.tokens(); }
std::int64_t Dump::num_sequences() const { return static_cast<std::int64_t>(impl_->sequences.cu_seqlens.size()) - 1; }

std::int64_t Dump::longest_sequence() const {
  const std::vector<std::int64_t>& borders = impl_->sequences.cu_seqlens;
  std::int64_t longest = 0;
  for (std::size_t s = 0; s + 1 < borders.size(); ++s) longest = std::max(longest, borders[s + 1] - borders[s]);
  return longest;
}

std::int64_t Dump::layer_bytes(int layer) const {
  const LayerPart& facts = impl_->parts_with(layer).front()->layers.at(layer);
  const LayerGeometry& g = facts.geometry;
  const auto bytes_per_token = [](const StoredTensor& tensor, int heads, int dim) {
    return static_cast<std::int64_t>(size_of(tensor.dtype)) * heads * dim;
  };
  std::int64_t per_token =
      bytes_per_token(facts.q, g.num_q_heads, g.head_dim) + bytes_per_token(facts.k, g.num_kv_heads, g.head_dim);
  if (facts.v) per_token += bytes_per_token(*facts.v, g.num_kv_heads, g.v_head_dim);
  return num_tokens() * per_token;
}

LayerActivations Dump::load_layer(int layer) const {
  return read_layer(layer, impl_->parts_with(layer), impl_->sequences);
}

void Dump::check_layer(int layer) const { kvq::check_layer(layer, impl_->parts_with(layer)); }

}  // namespace kvq
