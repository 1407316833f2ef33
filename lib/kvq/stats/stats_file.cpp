#include <kvq/artifact/geometry_json.h>
#include <kvq/artifact/golden_tensors.h>
#include <kvq/artifact/versions.h>
#include <kvq/container/output_target.h>
#include <kvq/container/safetensors.h>
#include <kvq/container/temporaries.h>
#include <kvq/core/error.h>
#include <kvq/dump/number_check.h>
#include <kvq/stats/stats_file.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

namespace kvq {

namespace {

constexpr int kMajor = 1;

struct LayerRow {
  int layer = 0;
  LayerGeometry geometry;
  bool has_values = true;
  std::int64_t tokens = 0, sequences = 0;
  std::vector<Moment> moments;
  std::int64_t held_out_tokens = 0, golden_tokens = 0;
  bool curvature = false, o_proj_metric = false;
  std::string content_hash;
};

std::string name_of(int layer, const std::string& what) { return fmt::format("layers.{}.{}", layer, what); }

int moment_dim(const LayerGeometry& geometry, Moment moment) { return geometry.dim(side_of(moment)); }

/// add_layer() and its helpers add views: `sums`, `rows` and `stats` must outlive the writer.
void add_moment(SafetensorsWriter& writer, int layer, Moment moment, const std::vector<MomentSum>& sums) {
  const auto heads = static_cast<std::int64_t>(sums.size());
  const std::int64_t d = sums.front().dim;
  std::vector<std::span<const std::byte>> sum, first, weight;
  for (const MomentSum& s : sums) {
    sum.push_back(std::as_bytes(std::span(s.sum)));
    first.push_back(std::as_bytes(std::span(s.mean)));
    weight.push_back(std::as_bytes(std::span(&s.weight, 1)));
  }
  const std::string name = to_string(moment);
  writer.add_view(name_of(layer, name + ".sum"), DType::f64, {heads, d, d}, std::move(sum));
  writer.add_view(name_of(layer, name + ".first"), DType::f64, {heads, d}, std::move(first));
  writer.add_view(name_of(layer, name + ".weight"), DType::f64, {heads}, std::move(weight));
}

std::vector<MomentSum> read_moment(const SafetensorsFile& file, const LayerRow& row, Moment moment) {
  const std::int64_t heads = row.geometry.num_kv_heads, d = moment_dim(row.geometry, moment);
  const std::string name = to_string(moment);
  const auto read = [&](const char* what, const std::vector<std::int64_t>& shape) {
    const std::string tensor = name_of(row.layer, name + what);
    std::vector<double> values = file.read<double>(tensor, shape);
    if (!std::all_of(values.begin(), values.end(), [](double x) { return std::isfinite(x); }))
      throw Error{ErrorKind::numerical, fmt::format("{}: tensor {}: NaN or Inf", file.name(), tensor)};
    return values;
  };
  const auto sum = read(".sum", {heads, d, d}), first = read(".first", {heads, d}), weight = read(".weight", {heads});
  std::vector<MomentSum> sums;
  const auto n = static_cast<std::size_t>(d);
  for (std::size_t h = 0; h < static_cast<std::size_t>(heads); ++h) {
    MomentSum s(static_cast<int>(d));
    std::copy_n(sum.begin() + static_cast<std::ptrdiff_t>(h * n * n), n * n, s.sum.begin());
    std::copy_n(first.begin() + static_cast<std::ptrdiff_t>(h * n), n, s.mean.begin());
    s.weight = weight[h];
    if (!(s.weight > 0.0))
      throw Error{ErrorKind::numerical, fmt::format("{}: layer {}: {} moment of head {} has weight {}", file.name(),
                                                    row.layer, name, h, s.weight)};
    sums.push_back(std::move(s));
  }
  return sums;
}

void add_rows(SafetensorsWriter& writer, int layer, const char* name, const SampledRows& rows, std::int64_t count) {
  if (rows.heads == 0) return;
  writer.add_view(name_of(layer, name), rows.dtype, {count, rows.heads, rows.dim}, {rows.raw});
}

/// The bound of dumps holds for the rows that statistics keep of a dump.
void expect_small_numbers(const SafetensorsFile& file, const std::string& tensor, DType type,
                          std::span<const std::byte> bytes) {
  NumberCheck check(type, kMaxMagnitude);
  check.add(bytes);
  if (!check.first_bad()) return;
  float value = 0.0f;
  widen(type, bytes.data() + *check.first_bad() * size_of(type), 1, &value);
  throw Error{ErrorKind::numerical,
              std::isfinite(value) ? fmt::format("{}: tensor {}: number {} is {:g}: expected magnitudes below {:g}",
                                                 file.name(), tensor, *check.first_bad(), value, kMaxMagnitude)
                                   : fmt::format("{}: tensor {}: NaN or Inf", file.name(), tensor)};
}

SampledRows read_rows(const SafetensorsFile& file, int layer, const char* name, std::int64_t count, int heads,
                      int dim) {
  const std::string tensor = name_of(layer, name);
  const TensorInfo& info = file.info(tensor);
  const bool type_fits = info.dtype == DType::f16 || info.dtype == DType::bf16 || info.dtype == DType::f32;
  if (!type_fits || info.shape != std::vector<std::int64_t>{count, heads, dim})
    throw Error{ErrorKind::bad_input, fmt::format("{}: tensor {}: expected 16- or 32-bit floats [{}, {}, {}]",
                                                  file.name(), tensor, count, heads, dim)};
  const auto bytes = file.bytes(tensor);
  expect_small_numbers(file, tensor, info.dtype, bytes);
  return {info.dtype, heads, dim, {bytes.begin(), bytes.end()}};
}

std::vector<float> read_value_weight(const SafetensorsFile& file, const std::string& tensor, std::int64_t count,
                                     int heads) {
  std::vector<float> weights = file.read<float>(tensor, {count, heads});
  for (const float weight : weights) {
    if (!std::isfinite(weight))
      throw Error{ErrorKind::numerical, fmt::format("{}: tensor {}: NaN or Inf", file.name(), tensor)};
    if (weight < 0.0f)
      throw Error{ErrorKind::bad_input,
                  fmt::format("{}: tensor {}: expected weights of at least 0, found {}", file.name(), tensor, weight)};
  }
  return weights;
}

TokenSample read_sample(const SafetensorsFile& file, const LayerRow& row) {
  TokenSample sample;
  sample.key = file.read<std::int64_t>(name_of(row.layer, "sample.key"), {-1});
  if (!std::is_sorted(sample.key.begin(), sample.key.end()))
    throw Error{ErrorKind::bad_input,
                fmt::format("{}: tensor {}: expected ascending keys", file.name(), name_of(row.layer, "sample.key"))};
  const std::int64_t n = sample.size();
  sample.token = file.read<std::int64_t>(name_of(row.layer, "sample.token"), {n});
  const LayerGeometry& g = row.geometry;
  sample.q = read_rows(file, row.layer, "sample.q", n, g.num_q_heads, g.head_dim);
  sample.k = read_rows(file, row.layer, "sample.k", n, g.num_kv_heads, g.head_dim);
  if (row.has_values) sample.v = read_rows(file, row.layer, "sample.v", n, g.num_kv_heads, g.v_head_dim);
  const std::string weights = name_of(row.layer, "sample.value_weight");
  if (file.has(weights)) sample.value_weight = read_value_weight(file, weights, n, g.num_kv_heads);
  if (n == 0) throw Error{ErrorKind::bad_input, fmt::format("{}: layer {}: empty sample", file.name(), row.layer)};
  return sample;
}

/// Matrices [heads, Dv, Dv] of a layer.
template <typename T>
std::vector<T> read_matrices(const SafetensorsFile& file, const LayerRow& row, const char* what, std::int64_t heads) {
  const std::string tensor = name_of(row.layer, what);
  const std::int64_t dv = row.geometry.v_head_dim;
  std::vector<T> values = file.read<T>(tensor, {heads, dv, dv});
  if (!std::all_of(values.begin(), values.end(), [](T x) { return std::isfinite(x); }))
    throw Error{ErrorKind::numerical, fmt::format("{}: tensor {}: NaN or Inf", file.name(), tensor)};
  return values;
}

HeldOut read_held_out(const SafetensorsFile& file, const LayerRow& row) {
  HeldOut held;
  const std::string tensor = name_of(row.layer, "held_out.query");
  const std::vector<std::int64_t> first = file.read<std::int64_t>(name_of(row.layer, "held_out.token"), {1});
  held.token = first.front();
  held.query = file.read<std::int64_t>(tensor, {-1});
  const auto m = static_cast<std::int64_t>(held.query.size()), n = row.held_out_tokens;
  for (std::size_t i = 0; i < held.query.size(); ++i)
    if (held.query[i] < 0 || held.query[i] >= n || (i > 0 && held.query[i] <= held.query[i - 1]))
      throw Error{ErrorKind::bad_input,
                  fmt::format("{}: tensor {}: expected ascending places below {}", file.name(), tensor, n)};
  if (m == 0) throw Error{ErrorKind::bad_input, fmt::format("{}: tensor {}: empty", file.name(), tensor)};
  const LayerGeometry& g = row.geometry;
  held.q = read_rows(file, row.layer, "held_out.q", m, g.num_q_heads, g.head_dim);
  held.k = read_rows(file, row.layer, "held_out.k", n, g.num_kv_heads, g.head_dim);
  if (row.has_values) held.v = read_rows(file, row.layer, "held_out.v", n, g.num_kv_heads, g.v_head_dim);
  if (row.curvature) held.curvature = read_matrices<float>(file, row, "held_out.curvature", g.num_q_heads);
  return held;
}

void add_held_out(SafetensorsWriter& writer, int layer, const LayerGeometry& geometry, const HeldOut& held) {
  const auto m = static_cast<std::int64_t>(held.query.size());
  writer.add_view(name_of(layer, "held_out.token"), DType::i64, {1}, {std::as_bytes(std::span(&held.token, 1))});
  writer.add_view(name_of(layer, "held_out.query"), DType::i64, {m}, {std::as_bytes(std::span(held.query))});
  add_rows(writer, layer, "held_out.q", held.q, m);
  add_rows(writer, layer, "held_out.k", held.k, held.count());
  add_rows(writer, layer, "held_out.v", held.v, held.count());
  if (held.curvature.empty()) return;
  const std::int64_t dv = geometry.v_head_dim;
  writer.add_view(name_of(layer, "held_out.curvature"), DType::f32, {geometry.num_q_heads, dv, dv},
                  {std::as_bytes(std::span(held.curvature))});
}

GoldenTokens read_golden(const SafetensorsFile& file, const LayerRow& row) {
  const LayerGeometry& g = row.geometry;
  GoldenTokens golden{
      .first = file.read<std::int64_t>(name_of(row.layer, "golden.token"), {1}).front(),
      .count = row.golden_tokens,
  };
  if (golden.first < 0)
    throw Error{ErrorKind::bad_input, fmt::format("{}: tensor {}: expected at least 0, found {}", file.name(),
                                                  name_of(row.layer, "golden.token"), golden.first)};
  golden.q = read_bf16(file, name_of(row.layer, "golden.q"), {g.num_q_heads, g.head_dim});
  golden.k = read_bf16(file, name_of(row.layer, "golden.k"), {golden.count, g.num_kv_heads, g.head_dim});
  if (row.has_values)
    golden.v = read_bf16(file, name_of(row.layer, "golden.v"), {golden.count, g.num_kv_heads, g.v_head_dim});
  return golden;
}

void add_golden(SafetensorsWriter& writer, int layer, const LayerGeometry& geometry, const GoldenTokens& golden) {
  writer.add_view(name_of(layer, "golden.token"), DType::i64, {1}, {std::as_bytes(std::span(&golden.first, 1))});
  add_bf16(writer, name_of(layer, "golden.q"), {geometry.num_q_heads, geometry.head_dim}, golden.q);
  add_bf16(writer, name_of(layer, "golden.k"), {golden.count, geometry.num_kv_heads, geometry.head_dim}, golden.k);
  if (!golden.v.empty())
    add_bf16(writer, name_of(layer, "golden.v"), {golden.count, geometry.num_kv_heads, geometry.v_head_dim}, golden.v);
}

void add_layer(SafetensorsWriter& writer, const LayerStats& stats) {
  if (stats.held_out) add_held_out(writer, stats.layer, stats.geometry, *stats.held_out);
  if (stats.golden) add_golden(writer, stats.layer, stats.geometry, *stats.golden);
  if (const std::int64_t dv = stats.geometry.v_head_dim; !stats.o_proj_metric.empty())
    writer.add_view(name_of(stats.layer, "o_proj_metric"), DType::f64, {stats.geometry.num_kv_heads, dv, dv},
                    {std::as_bytes(std::span(stats.o_proj_metric))});
  for (const auto& [moment, sums] : stats.moments) add_moment(writer, stats.layer, moment, sums);
  const std::int64_t n = stats.sample.size();
  writer.add_view(name_of(stats.layer, "sample.key"), DType::i64, {n}, {std::as_bytes(std::span(stats.sample.key))});
  writer.add_view(name_of(stats.layer, "sample.token"), DType::i64, {n},
                  {std::as_bytes(std::span(stats.sample.token))});
  add_rows(writer, stats.layer, "sample.q", stats.sample.q, n);
  add_rows(writer, stats.layer, "sample.k", stats.sample.k, n);
  add_rows(writer, stats.layer, "sample.v", stats.sample.v, n);
  if (!stats.sample.value_weight.empty())
    writer.add_view(name_of(stats.layer, "sample.value_weight"), DType::f32, {n, stats.geometry.num_kv_heads},
                    {std::as_bytes(std::span(stats.sample.value_weight))});
}

Json layer_row(const LayerStats& stats) {
  Json names = Json::array();
  for (const auto& [moment, sums] : stats.moments) names.push_back(to_string(moment));
  Json row = {{"layer", stats.layer},
              {"geometry", geometry_to_json(stats.geometry)},
              {"has_values", stats.has_values},
              {"tokens", stats.tokens},
              {"sequences", stats.sequences},
              {"moments", std::move(names)},
              {"content_hash", stats.content_hash}};
  if (stats.held_out) {
    row["held_out_tokens"] = stats.held_out->count();
    row["curvature"] = !stats.held_out->curvature.empty();
  }
  if (stats.golden) row["golden_tokens"] = stats.golden->count;
  if (!stats.o_proj_metric.empty()) row["o_proj_metric"] = true;
  return row;
}

LayerRow parse_row(const Json& json, const std::string& file) {
  LayerRow row;
  row.layer = json.at("layer");
  row.geometry = geometry_from_json(json.at("geometry"), fmt::format("{}: layer {}", file, row.layer));
  row.has_values = json.at("has_values");
  row.tokens = json.at("tokens");
  row.sequences = json.at("sequences");
  row.content_hash = json.at("content_hash");
  row.held_out_tokens = json.value("held_out_tokens", std::int64_t{0});
  row.curvature = json.value("curvature", false);
  row.o_proj_metric = json.value("o_proj_metric", false);
  row.golden_tokens = json.value("golden_tokens", std::int64_t{0});
  for (const Json& name : json.at("moments")) {
    const auto moment = moment_from_string(name.get<std::string>());
    if (!moment)
      throw Error{ErrorKind::unsupported,
                  fmt::format("{}: layer {}: unknown moment \"{}\"", file, row.layer, name.get<std::string>())};
    row.moments.push_back(*moment);
  }
  return row;
}

/// Checks the content hash, because no other check finds a flipped bit in a sum.
void expect_content_hash(const SafetensorsFile& file) {
  const auto claimed = file.metadata().find("kvq.content_hash");
  const std::string expected = claimed == file.metadata().end() ? "none" : claimed->second;
  const std::string found = content_hash(file, file.metadata().at("kvq.manifest"));
  if (expected != found)
    throw Error{ErrorKind::bad_input,
                fmt::format("{}: content hash: expected {}, found {}", file.name(), expected, found),
                "the file is damaged: collect again"};
}

}  // namespace

struct StatsFile::Impl {
  SafetensorsFile file;
  StatsHeader header;
  std::vector<LayerRow> rows;
};

StatsFile::StatsFile(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
StatsFile::StatsFile(StatsFile&&) noexcept = default;
StatsFile& StatsFile::operator=(StatsFile&&) noexcept = default;
StatsFile::~StatsFile() = default;
const StatsHeader& StatsFile::header() const { return impl_->header; }
const std::string& StatsFile::name() const { return impl_->file.name(); }
const std::string& StatsFile::content_hash(std::size_t index) const { return impl_->rows.at(index).content_hash; }
const std::string& StatsFile::file_hash() const { return impl_->file.metadata().at("kvq.content_hash"); }

std::int64_t StatsFile::tokens(std::size_t index) const { return impl_->rows.at(index).tokens; }
std::int64_t StatsFile::sequences(std::size_t index) const { return impl_->rows.at(index).sequences; }

StatsFile StatsFile::open(const std::filesystem::path& path) {
  auto impl = std::make_unique<Impl>(Impl{SafetensorsFile::open(path), {}, {}});
  const Json manifest = read_manifest(impl->file, "kvq-stats", kMajor, stats_schema());
  expect_content_hash(impl->file);
  StatsHeader& header = impl->header;
  header.model = model_from_json(manifest.at("model"));
  header.producer = manifest.at("dump").at("producer");
  header.capture_point = manifest.at("dump").at("capture_point");
  header.seed = manifest.at("seed");
  header.sample_tokens = manifest.at("sample_tokens");
  if (manifest.contains("token_range"))
    header.range = TokenRange{manifest.at("token_range").at("first"), manifest.at("token_range").at("count")};
  for (const Json& json : manifest.at("layers")) {
    LayerRow row = parse_row(json, impl->file.name());
    if (row.layer >= header.model.num_layers || (!impl->rows.empty() && row.layer <= impl->rows.back().layer))
      throw Error{ErrorKind::bad_input,
                  fmt::format("{}: layers are not ascending below num_layers", impl->file.name())};
    header.model.layers.push_back({row.layer, row.geometry, row.has_values});
    impl->rows.push_back(std::move(row));
  }
  return StatsFile(std::move(impl));
}

LayerStats StatsFile::load(std::size_t index) const {
  const LayerRow& row = impl_->rows.at(index);
  LayerStats stats;
  stats.layer = row.layer;
  stats.geometry = row.geometry;
  stats.has_values = row.has_values;
  stats.tokens = row.tokens;
  stats.sequences = row.sequences;
  stats.content_hash = row.content_hash;
  for (const Moment moment : row.moments) stats.moments[moment] = read_moment(impl_->file, row, moment);
  stats.sample = read_sample(impl_->file, row);
  if (row.o_proj_metric)
    stats.o_proj_metric = read_matrices<double>(impl_->file, row, "o_proj_metric", row.geometry.num_kv_heads);
  if (row.held_out_tokens > 0) stats.held_out = read_held_out(impl_->file, row);
  if (row.golden_tokens > 0) stats.golden = read_golden(impl_->file, row);
  return stats;
}

namespace {

/// Writes the manifest and the tensors that `writer` already has; `rows` are the manifest's layers, ascending.
/// @return  the content hash
std::string write_stats(const StatsHeader& header, Json rows, SafetensorsWriter& writer,
                        const std::filesystem::path& path) {
  const auto any_row = [&](const char* key) {
    return std::any_of(rows.begin(), rows.end(), [key](const Json& row) { return row.contains(key); });
  };
  const char* version = any_row("o_proj_metric")     ? "1.4"
                        : any_row("golden_tokens")   ? "1.3"
                        : header.range               ? "1.2"
                        : any_row("held_out_tokens") ? "1.1"
                                                     : "1.0";
  Json manifest = {{"format", "kvq-stats"},
                   {"version", version},
                   {"requires", Json::array()},
                   {"model", model_to_json(header.model)},
                   {"dump", {{"producer", header.producer}, {"capture_point", header.capture_point}}},
                   {"seed", header.seed},
                   {"sample_tokens", header.sample_tokens},
                   {"layers", std::move(rows)}};
  if (header.range) manifest["token_range"] = {{"first", header.range->first}, {"count", header.range->count}};
  check_schema(manifest, stats_schema(), "the new manifest");
  std::string hash = write_manifest(writer, manifest);
  writer.write(path);
  return hash;
}

}  // namespace

std::string save_stats(const StatsHeader& header, std::span<const LayerStats> layers,
                       const std::filesystem::path& path) {
  SafetensorsWriter writer;
  Json rows = Json::array();
  for (const LayerStats& stats : layers) {
    add_layer(writer, stats);
    rows.push_back(layer_row(stats));
  }
  return write_stats(header, std::move(rows), writer, path);
}

namespace {

void expect_same_origin(const StatsFile& a, const StatsFile& b) {
  const auto refuse = [&](const char* what, const std::string& expected, const std::string& found) {
    throw Error{ErrorKind::bad_input,
                fmt::format("{}: {}: expected {} as in {}, found {}", b.name(), what, expected, a.name(), found)};
  };
  const StatsHeader &x = a.header(), &y = b.header();
  if (x.model.name != y.model.name) refuse("model name", x.model.name, y.model.name);
  if (x.model.fingerprint != y.model.fingerprint) refuse("model fingerprint", x.model.fingerprint, y.model.fingerprint);
  if (x.model.num_layers != y.model.num_layers)
    refuse("num_layers", std::to_string(x.model.num_layers), std::to_string(y.model.num_layers));
  if (x.capture_point != y.capture_point) refuse("capture_point", x.capture_point, y.capture_point);
  if (x.seed != y.seed) refuse("seed", std::to_string(x.seed), std::to_string(y.seed));
  if (x.sample_tokens != y.sample_tokens)
    refuse("sample_tokens", std::to_string(x.sample_tokens), std::to_string(y.sample_tokens));
}

/// Refuses a shard that is named twice, because its tokens would count double.
void expect_different_shards(const std::vector<StatsFile>& files) {
  std::map<std::pair<int, std::string>, const StatsFile*> seen;
  for (const StatsFile& file : files)
    for (std::size_t i = 0; i < file.header().model.layers.size(); ++i) {
      const int layer = file.header().model.layers[i].layer;
      const auto [it, fresh] = seen.try_emplace({layer, file.content_hash(i)}, &file);
      if (!fresh)
        throw Error{ErrorKind::bad_input,
                    fmt::format("{}: layer {}: the same dump data as in {}", file.name(), layer, it->second->name()),
                    "name each shard once"};
    }
}

/// One layer of one file.
struct LayerPlace {
  const StatsFile* file;
  std::size_t index;
};

/// The sum of one layer's shards, as a file of its own, so that memory never holds more than one layer.
StatsFile merge_layer(const std::vector<LayerPlace>& places, const std::filesystem::path& path) {
  const StatsHeader& header = places.front().file->header();
  LayerStats sum = places.front().file->load(places.front().index);
  for (std::size_t i = 1; i < places.size(); ++i)
    merge(sum, places[i].file->load(places[i].index), header.sample_tokens);
  save_stats(header, std::span(&sum, 1), path);
  return StatsFile::open(path);
}

}  // namespace

void StatsFile::add_to(SafetensorsWriter& writer, std::size_t index) const {
  const std::string prefix = name_of(impl_->rows.at(index).layer, "");
  for (const auto& [name, info] : impl_->file.tensors())
    if (name.starts_with(prefix)) writer.add_view(name, info.dtype, info.shape, {impl_->file.bytes(name)});
}

void merge_stats_files(const std::vector<std::filesystem::path>& inputs, const std::filesystem::path& output) {
  std::vector<StatsFile> files;
  files.reserve(inputs.size());
  for (const auto& path : inputs) files.push_back(StatsFile::open(path));
  merge_open_files(files, output);
}

void merge_open_files(const std::vector<StatsFile>& files, const std::filesystem::path& output) {
  KVQ_ASSERT(!files.empty());
  expect_different_shards(files);
  std::map<int, std::vector<LayerPlace>> layers;
  for (const StatsFile& file : files) {
    expect_same_origin(files.front(), file);
    for (std::size_t i = 0; i < file.header().model.layers.size(); ++i)
      layers[file.header().model.layers[i].layer].push_back({&file, i});
  }

  std::optional<ScratchFolder> scratch;
  std::vector<StatsFile> merged;
  merged.reserve(layers.size());  // places point into it
  for (auto& [layer, places] : layers)
    if (places.size() > 1) {
      if (!scratch) scratch.emplace(folder_of(output_target(output)) / ".kvq-merge-");
      merged.push_back(merge_layer(places, scratch->path() / fmt::format("layer-{:04d}.safetensors", layer)));
      places = {{&merged.back(), 0}};
    }

  SafetensorsWriter writer;
  Json rows = Json::array();
  const LayerPlace first = layers.begin()->second.front();
  for (const auto& [layer, places] : layers) {
    const auto [file, index] = places.front();
    if (file->tokens(index) != first.file->tokens(first.index) ||
        file->sequences(index) != first.file->sequences(first.index))
      throw Error{ErrorKind::bad_input,
                  fmt::format("layer {}: expected {} tokens in {} sequences as in layer {}, found {} in {}", layer,
                              first.file->tokens(first.index), first.file->sequences(first.index),
                              layers.begin()->first, file->tokens(index), file->sequences(index)),
                  "name the shards of every layer"};
    rows.push_back(layer_row(file->load(index)));  // loading checks every number
    file->add_to(writer, index);
  }
  StatsHeader header = files.front().header();
  const bool one_range = std::all_of(files.begin(), files.end(),
                                     [&](const StatsFile& file) { return file.header().range == header.range; });
  if (!one_range || !merged.empty()) header.range.reset();  // shards of other sequences may come from other dumps
  write_stats(header, std::move(rows), writer, output);
}

}  // namespace kvq
