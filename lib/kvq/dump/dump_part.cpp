#include <kvq/dump/dump_part.h>

#include <kvq/container/json.h>
#include <kvq/core/error.h>
#include <kvq/core/text.h>
#include <kvq/dump/crash_probe.h>
#include <kvq/dump/layer_part.h>
#include <kvq/dump/tensor_numbers.h>

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

namespace kvq {
namespace {

constexpr int kMaxLayers = 4096;  // the artifact's limit

/// The whole text as a number without sign or leading zeros.
std::optional<int> decimal(std::string_view text) {
  int value = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool is_plain = !text.empty() && text[0] != '-' && (text[0] != '0' || text.size() == 1);
  if (!is_plain || status != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

void check_format(const hdf5::Group& root) {
  if (const auto format = root.string_attribute("format"); format != "kvq-dump")
    fail_at(root, fmt::format("expected format kvq-dump, found '{}'", printable(format)));
  const std::string version = root.string_attribute("version");
  const auto dot = version.find('.');
  const auto major = decimal(version.substr(0, dot));
  if (dot == version.npos || !major || !decimal(version.substr(dot + 1)))
    fail_at(root, fmt::format("version: expected major.minor, found '{}'", printable(version)));
  if (major != 1)
    fail_at(root, fmt::format("kvq-dump version {} is not supported, expected 1.x", version), ErrorKind::unsupported);
}

/// The words of `requires`. A layer that has an attribute or dataset of this name needs the word.
constexpr std::array<std::string_view, 2> kFeatures = {"logit_softcapping", "sink_logits"};

/// @throws Error{unsupported} for a word that this reader does not know
std::set<std::string> read_requires(const hdf5::Group& root) {
  std::set<std::string> words;
  if (!root.has_attribute("requires")) return words;
  const std::string text = root.string_attribute("requires");
  for (std::size_t begin = text.find_first_not_of(", "); begin != text.npos;) {
    const std::size_t end = std::min(text.find_first_of(", ", begin), text.size());
    const auto word = text.substr(begin, end - begin);
    if (std::ranges::find(kFeatures, word) == kFeatures.end())
      fail_at(root,
              fmt::format("requires '{}', which this reader does not know; it knows {}", printable(word),
                          fmt::join(kFeatures, ", ")),
              ErrorKind::unsupported);
    words.insert(word);
    begin = text.find_first_not_of(", ", end);
  }
  return words;
}

/// A reader that does not know a layer's cap or sinks must not read the file, so `requires` has to name them.
void check_listed(const hdf5::Group& layer, const std::set<std::string>& words) {
  for (const std::string_view feature : kFeatures) {
    const std::string word(feature);
    if ((layer.has_attribute(word.c_str()) || layer.has(word.c_str())) && !words.contains(word))
      fail_at(layer, fmt::format("has {}, which `requires` does not list", word));
  }
}

CapturePoint read_capture_point(const hdf5::Group& root) {
  const std::string word = root.string_attribute("capture_point");
  if (word == "post_rope") return CapturePoint::post_rope;
  if (word == "pre_rope") return CapturePoint::pre_rope;
  fail_at(root, fmt::format("capture_point '{}' is not supported, expected post_rope or pre_rope", printable(word)),
          ErrorKind::unsupported);
}

std::string read_fingerprint(const hdf5::Group& root) {
  const std::string text = root.string_attribute("model_fingerprint");
  if (text.size() != 64 || text.find_first_not_of("0123456789abcdef") != text.npos)
    fail_at(root, fmt::format("model_fingerprint: expected 64 lower-case hex digits, found '{}'", printable(text)));
  return text;
}

/// Statistics and artifacts keep the configuration as a JSON object.
std::string read_model_config(const hdf5::Group& root) {
  const std::string text = root.string_attribute("model_config");
  const std::string place = root.place() + ": attribute model_config";
  if (const Json config = parse_json(text, place); !config.is_object())
    throw Error{ErrorKind::bad_input, fmt::format("{}: expected a JSON object, found {}", place, config.type_name())};
  return text;
}

void read_root(const hdf5::Group& root, DumpPart& part, Faults& faults) {
  faults.collect([&] { part.features = read_requires(root); });
  faults.collect([&] { part.model_name = root.string_attribute("model_name"); });
  faults.collect([&] { part.capture_point = read_capture_point(root); });
  faults.collect([&] { part.num_layers = read_bounded(root, "num_layers", 1, kMaxLayers); });
  faults.collect([&] { part.producer = root.string_attribute("producer"); });
  if (root.has_attribute("model_fingerprint")) faults.collect([&] { part.model_fingerprint = read_fingerprint(root); });
  if (root.has_attribute("model_config")) faults.collect([&] { part.model_config = read_model_config(root); });
}

template <typename T>
std::vector<T> read_vector(const hdf5::Group& root, const char* name, hdf5::Element element, const char* type) {
  const hdf5::Dataset dataset = root.dataset(name);
  if (dataset.element() != element) fail_at(dataset, fmt::format("expected {}, found {}", type, dataset.type_text()));
  if (dataset.shape().size() != 1)
    fail_at(dataset, fmt::format("expected 1 dimension, found {}", dataset.shape().size()));
  std::vector<T> values(static_cast<std::size_t>(dataset.shape()[0]));
  dataset.read(std::as_writable_bytes(std::span(values)));
  return values;
}

void check_cu_seqlens(const std::vector<std::int64_t>& borders, std::size_t tokens, const std::string& place) {
  if (borders.size() < 2)
    throw Error{ErrorKind::bad_input, fmt::format("{}: expected 2 or more numbers, found {}", place, borders.size())};
  if (borders.front() != 0)
    throw Error{ErrorKind::bad_input, fmt::format("{}: expected to start at 0, found {}", place, borders.front())};
  for (std::size_t s = 1; s < borders.size(); ++s)
    if (borders[s] <= borders[s - 1])
      throw Error{ErrorKind::bad_input, fmt::format("{}: sequence {} is empty or runs backwards: from {} to {}", place,
                                                    s - 1, borders[s - 1], borders[s])};
  if (std::cmp_not_equal(borders.back(), tokens))
    throw Error{ErrorKind::bad_input, fmt::format("{}: expected to end at the number of positions, {}, found {}", place,
                                                  tokens, borders.back())};
}

void check_positions(const Sequences& sequences, const std::string& place) {
  const auto& positions = sequences.positions;
  for (std::size_t s = 0; s + 1 < sequences.cu_seqlens.size(); ++s) {
    std::int64_t previous = -1;
    for (auto t = sequences.cu_seqlens[s]; t < sequences.cu_seqlens[s + 1]; ++t) {
      const std::int64_t position = positions[static_cast<std::size_t>(t)];
      if (position <= previous)
        throw Error{ErrorKind::bad_input, fmt::format("{}: token {} of sequence {}: expected more than {}, found {}",
                                                      place, t, s, previous, position)};
      previous = position;
    }
  }
}

void check_generated(const Sequences& sequences, const std::string& place) {
  const auto& flags = sequences.generated;
  if (flags.size() != sequences.positions.size())
    throw Error{ErrorKind::bad_input,
                fmt::format("{}: expected {} flags, found {}", place, sequences.positions.size(), flags.size())};
  const auto wrong = std::ranges::find_if(flags, [](std::uint8_t flag) { return flag > 1; });
  if (wrong != flags.end())
    throw Error{ErrorKind::bad_input,
                fmt::format("{}: token {}: expected 0 or 1, found {}", place, wrong - flags.begin(), *wrong)};
}

Sequences read_sequences(const hdf5::Group& root) {
  Sequences sequences;
  sequences.cu_seqlens = read_vector<std::int64_t>(root, "cu_seqlens", hdf5::Element::i64, "int64");
  sequences.positions = read_vector<std::int64_t>(root, "positions", hdf5::Element::i64, "int64");
  check_cu_seqlens(sequences.cu_seqlens, sequences.positions.size(), root.place() + ": cu_seqlens");
  check_positions(sequences, root.place() + ": positions");
  if (root.has("generated")) {
    sequences.generated = read_vector<std::uint8_t>(root, "generated", hdf5::Element::u8, "uint8");
    check_generated(sequences, root.place() + ": generated");
  }
  return sequences;
}

/// Numbers of the groups in /layers, ascending. Names with other characters than digits are ignored.
std::vector<int> layer_numbers(const hdf5::Group& layers, int num_layers) {
  std::vector<int> numbers;
  for (const std::string& name : layers.link_names()) {
    if (name.find_first_not_of("0123456789") != name.npos) continue;
    const auto number = decimal(name);
    if (!number || *number >= num_layers)
      fail_at(layers, fmt::format("expected layers from 0 to {} without leading zeros, found '{}'", num_layers - 1,
                                  printable(name)));
    numbers.push_back(*number);
  }
  if (numbers.empty()) fail_at(layers, "holds no layer");
  std::ranges::sort(numbers);
  return numbers;
}

/// Checks that the angle of every pair at every position is a number whose sine float64 can tell.
void check_angles(const hdf5::Group& layer, const LayerPart& part, const std::vector<std::int64_t>& positions) {
  constexpr double kMostAngle = 9007199254740992.0;  // 2^53 radians: from there on neighbors are 2 radians apart
  if (positions.empty()) return;
  const std::int64_t last = *std::ranges::max_element(positions);
  const std::vector<double>& frequencies = part.geometry.rope.inv_freq;
  for (std::size_t j = 0; j < frequencies.size(); ++j)
    if (const double angle = static_cast<double>(last) * frequencies[j]; !(angle <= kMostAngle))
      fail_at(layer, fmt::format("rope_inv_freq: pair {}: expected angles up to {:g}, found {:g} at position {}", j,
                                 kMostAngle, angle, last));
}

/// The numbers of small tensors; load_layer() checks those of the large ones.
void check_small_tensors(const LayerPart& layer, Faults& faults) {
  for (const auto* tensor : {&layer.o_proj_metric, &layer.output_curvature})
    if (*tensor) faults.collect([&] { check_second_moments(**tensor); });
}

void read_layers(DumpPart& part, const hdf5::Group& root, Faults& faults) {
  const hdf5::Group layers = root.group("layers");
  // If the sequences are at fault, any number of tokens is accepted, because that fault is already reported.
  const std::int64_t tokens = part.sequences.positions.empty() ? -1 : part.sequences.tokens();
  for (const int number : layer_numbers(layers, part.num_layers > 0 ? part.num_layers : kMaxLayers)) {
    faults.collect([&] {
      const hdf5::Group layer = layers.group(std::to_string(number).c_str(), fmt::format("layer {}", number));
      check_listed(layer, part.features);
      const LayerPart& facts = part.layers.emplace(number, read_layer_part(layer, tokens, faults)).first->second;
      check_angles(layer, facts, part.sequences.positions);
      check_small_tensors(facts, faults);
    });
  }
}

std::optional<DumpPart> read_structure(const std::filesystem::path& path, Faults& faults) {
  std::optional<DumpPart> part;
  faults.collect([&] {
    part.emplace(DumpPart{.file = hdf5::File::open(path)});
    const hdf5::Group root = part->file.root();
    check_format(root);  // in another format or version, no further check applies
    read_root(root, *part, faults);
    faults.collect([&] { part->sequences = read_sequences(root); });
    read_layers(*part, root, faults);
  });
  return part;
}

void rehearse_read(const StoredTensor& tensor) {
  if (!tensor.dataset.is_chunked()) return;
  std::vector<std::byte> raw(tensor.dataset.bytes());
  tensor.dataset.read(raw);
}

/// Makes all HDF5 calls that reading the file will make: those for its structure and those for chunked data.
void rehearse(const std::filesystem::path& path) {
  Faults ignored;
  const auto part = read_structure(path, ignored);
  if (!part || ignored.count() > 0) return;  // then the parent will not read any data either
  for (const auto& [number, layer] : part->layers) {
    rehearse_read(layer.q);
    rehearse_read(layer.k);
    for (const auto* tensor : {&layer.v, &layer.o_proj, &layer.o_proj_metric, &layer.output_curvature})
      if (tensor->has_value()) rehearse_read(**tensor);
  }
}

}  // namespace

void Sequences::append(const Sequences& other) {
  const std::int64_t first = tokens();
  if (cu_seqlens.empty()) cu_seqlens.push_back(0);
  for (std::size_t s = 1; s < other.cu_seqlens.size(); ++s) cu_seqlens.push_back(first + other.cu_seqlens[s]);
  positions.insert(positions.end(), other.positions.begin(), other.positions.end());
  generated.insert(generated.end(), other.generated.begin(), other.generated.end());
}

std::optional<DumpPart> read_dump_part(const std::filesystem::path& path, Faults& faults) {
  const bool survived = faults.collect([&] {
    std::error_code error;
    const auto bytes = std::filesystem::file_size(path, error);
    if (const auto fate = fate_in_child([&] { rehearse(path); }, error ? 0 : bytes))
      throw Error{ErrorKind::bad_input, fmt::format("{}: damaged HDF5 file: the HDF5 library does not survive it ({})",
                                                    safe_line(path.string()), *fate)};
  });
  return survived ? read_structure(path, faults) : std::nullopt;
}

}  // namespace kvq
