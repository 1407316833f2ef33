// libFuzzer: the manifest of an artifact, its tensors and their data, as in container_input.h. Loading either works or
// ends in a clean Error. A loaded artifact can be saved again, can quantize rows and its golden rows, and decoding any
// bytes of a row stays inside all tables. Seeds: make_manifest_seeds.

#include <kvq/artifact/artifact.h>
#include <kvq/codec/codec.h>
#include <kvq/codec/golden_rows.h>
#include <kvq/codec/row_codec.h>
#include <kvq/core/error.h>

#include "container_input.h"

#include <algorithm>
#include <functional>
#include <variant>

using namespace kvq;

namespace {

/// Sets the row size and the mean bits of a plan to those of its widths, if a layout has such widths.
void fit_claims(Json& plan, std::span<const std::byte> widths, int dim) {
  BitAllocation a;
  for (const std::byte width : widths) a.channel_bits.push_back(std::to_integer<std::uint8_t>(width));
  const int scale = plan.at("scale_type") == "fp32" ? 4 : 2,
            count = plan.contains("centroids") ? fuzz::natural(plan.at("centroids").at("count")) : 0;
  int largest = 0;
  for (auto head = a.channel_bits.begin(); a.channel_bits.end() - head >= dim; head += dim) {
    if (*head > 8 || !std::is_sorted(head, head + dim, std::greater<>())) return;
    largest = std::max(largest, mixed_row_layout(&*head, dim, scale,
                                                 count == 0     ? 0
                                                 : count <= 256 ? 1
                                                                : 2,
                                                 plan["allocation"].contains("scale_scope"))
                                    .row_bytes);
  }
  plan["allocation"]["mean_bits"] = a.mean_bits();
  plan["allocation"]["row_bytes"] = common_row_bytes(largest);
}

/// Replaces claims of 0 by the numbers that follow from the widths, because no mutation changes a width and both
/// numbers consistently.
void fit_claims(fuzz::ContainerText& parts) {
  try {
    Json manifest = parse_json(parts.manifest, "fuzz");
    for (Json& layer : manifest.at("layers"))
      for (const Side which : kSides) {
        const char* const side = name(which);
        if (!layer.contains(side) || !layer.at(side).contains("allocation") ||
            layer.at(side).at("allocation").at("row_bytes") != 0)
          continue;
        const Json& offsets =
            parts.tensors.at(fmt::format("layers.{}.{}.channel_bits", fuzz::natural(layer.at("layer")), side))
                .at("data_offsets");
        const int dim = fuzz::natural(layer.at("geometry").at(which == Side::k ? "head_dim" : "v_head_dim"));
        const auto begin = static_cast<std::size_t>(fuzz::natural(offsets.at(0))),
                   end = static_cast<std::size_t>(fuzz::natural(offsets.at(1)));
        if (dim > 0 && begin <= end && end <= parts.data.size())
          fit_claims(layer[side], std::span(parts.data).subspan(begin, end - begin), dim);
      }
    parts.manifest = manifest.dump();
  } catch (const Error&) {  // the reader under test reports the fault
  } catch (const Json::exception&) {
  }
}

constexpr int kMostChannels = 32, kMostHeads = 4;  // quantizing is slow, and larger rows take the same paths

std::vector<float> wave(std::size_t count) {
  std::vector<float> x(count);
  for (std::size_t i = 0; i < count; ++i) x[i] = static_cast<float>(static_cast<int>(i * i % 23) - 11) * 0.25f;
  return x;
}

void unpack_anything(const TensorPlan& plan, int head, int dim, std::byte fill) {
  const RowCodec codec(plan, head, dim);
  const std::vector<std::byte> bytes(static_cast<std::size_t>(row_bytes(plan, dim)), fill);
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(dim));
  std::vector<float> numbers(static_cast<std::size_t>(codec.num_numbers())), row(codes.size());
  codec.unpack(bytes, codes, numbers);
  codec.decode(codes, numbers, row);
}

void code_rows(const TensorPlan& plan, int num_kv_heads, int dim) {
  if (dim > kMostChannels || num_kv_heads > kMostHeads) return;
  std::vector<float> x = wave(static_cast<std::size_t>(num_kv_heads) * 2 * static_cast<std::size_t>(dim));
  reconstruct_heads(plan, num_kv_heads, x, dim);
  if (is_exact(plan.coder)) return;
  for (int head = 0; head < num_kv_heads; ++head)
    for (const auto fill : {std::byte{0x00}, std::byte{0xff}, std::byte{0x5a}}) unpack_anything(plan, head, dim, fill);
}

void check_golden(const LayerPlan& layer, const GoldenRows& rows) {
  const LayerGeometry& g = layer.geometry;
  if (std::max(g.head_dim, g.v_head_dim) <= kMostChannels && g.num_kv_heads <= kMostHeads && rows.tokens.count <= 4)
    golden_fault(layer, rows);
}

void use(const Artifact& artifact) {
  canonical_json(artifact_manifest(artifact));
  for (const LayerPlan& layer : artifact.layers)
    if (const auto it = artifact.golden.find(layer.layer); it != artifact.golden.end()) check_golden(layer, it->second);
  for (const LayerPlan& layer : artifact.layers) {
    code_rows(layer.k, layer.geometry.num_kv_heads, layer.geometry.head_dim);
    if (layer.v) code_rows(*layer.v, layer.geometry.num_kv_heads, layer.geometry.v_head_dim);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size > (1u << 16)) return 0;
  try {
    fuzz::ContainerText parts = fuzz::parse_text(data, size);
    fit_claims(parts);
    use(load_artifact(SafetensorsFile::parse(fuzz::container_of(parts, "kvq-artifact"), "fuzz"), HashCheck::left_out));
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::internal) throw;  // libFuzzer reports a bug as a crash
  }
  return 0;
}
