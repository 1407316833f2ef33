#include "support/page_vectors.h"

#include <kvq/container/json.h>
#include <kvq/core/dtype.h>
#include <kvq/core/error.h>

#include <bit>
#include <sstream>

namespace kvq::test {

namespace {

ScaleType type_of(const std::string& name) {
  for (const ScaleType type : {ScaleType::fp16, ScaleType::bf16, ScaleType::fp32})
    if (name == to_string(type)) return type;
  throw Error{ErrorKind::unsupported, "page_vectors.json: scale_type " + name};
}

std::uint16_t pattern_of(const std::string& hex) { return static_cast<std::uint16_t>(std::stoul(hex, nullptr, 16)); }

Coder coder_of(const Json& side) {
  const std::string name = side.at("coder");
  const int bits = side.at("bits"), group = side.value("group_size", 0);
  const ScaleType type = type_of(side.at("scale_type"));
  if (name == "codebook") return CodebookCoder{.bits = bits, .group_size = group, .scale_type = type};
  if (name == "trellis") return TrellisCoder{.bits = bits, .group_size = group, .scale_type = type};
  const bool affine = name == "affine";
  return UniformCoder{
      .bits = bits,
      .group_size = group,
      .levels = affine ? UniformLevels::affine : UniformLevels::symmetric,
      .rule = affine ? ScaleRule::minmax : ScaleRule::absmax,
      .scale_type = type,
      .zero = side.value("zero", "float") == "integer" ? ZeroKind::integer : ZeroKind::floating,
  };
}

BitAllocation allocation_of(const Json& side) {
  BitAllocation allocation;
  const Json& heads = side.at("channel_bits");
  for (const Json& head : heads)
    for (const char digit : head.get<std::string>())
      allocation.channel_bits.push_back(static_cast<std::uint8_t>(pattern_of(std::string(1, digit))));
  if (side.at("scale_scope") == "row") allocation.segment_gain.assign(heads.size() * kGainWidths, 1.0f);
  return allocation;
}

TensorPlan side_of(const Json& side) {
  TensorPlan plan;
  plan.rotation.scope = Scope::kv_head;
  if (side.at("bits") == 16) return plan;
  plan.coder = coder_of(side);
  if (side.contains("channel_bits")) plan.allocation = allocation_of(side);
  if (side.contains("centroids")) plan.centroids = Centroids{.count = side.at("centroids")};
  return plan;
}

LayerPlan plan_of(const Json& vector) {
  const int heads = vector.at("num_kv_heads");
  return {
      .layer = 0,
      .geometry =
          {
              .num_q_heads = heads,
              .num_kv_heads = heads,
              .head_dim = vector.at("k").at("head_dim"),
              .v_head_dim = vector.at("v").at("head_dim"),
              .softmax_scale = 1.0,
          },
      .k = side_of(vector.at("k")),
      .v = side_of(vector.at("v")),
  };
}

std::vector<std::byte> bytes_of(const Json& vector) {
  std::vector<std::byte> bytes(vector.at("num_bytes").get<std::size_t>(), std::byte{0});
  for (const Json& run : vector.at("bytes")) {
    const auto offset = run.at(0).get<std::size_t>();
    const std::string hex = run.at(1);
    for (std::size_t i = 0; i < hex.size(); i += 2)
      bytes.at(offset + i / 2) = static_cast<std::byte>(std::stoul(hex.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

float number_of(ScaleType type, const std::string& hex) {
  const auto bits = static_cast<std::uint32_t>(std::stoul(hex, nullptr, 16));
  if (type == ScaleType::fp32) return std::bit_cast<float>(bits);
  const auto two = static_cast<std::uint16_t>(bits);
  return type == ScaleType::bf16 ? bf16_to_float(two) : f16_to_float(two);
}

PageVector::Row row_of(const Json& json, const PageVector& vector) {
  PageVector::Row row{
      .side = json.at("side") == "v" ? Side::v : Side::k,
      .head = json.at("head"),
      .place = json.at(vector.in_pages ? "slot" : "position"),
      .codes = {},
      .numbers = {},
      .index = {},
      .exact = {},
  };
  if (json.contains("values")) {
    std::istringstream words(json.at("values").get<std::string>());
    for (std::string word; words >> word;) row.exact.push_back(pattern_of(word));
    return row;
  }
  const Coder& coder = vector.side(row.side).coder;
  const std::string codes = json.at("codes");
  const std::size_t digits = code_bits(coder) > 4 ? 2 : 1;
  for (std::size_t at = 0; at < codes.size(); at += digits)
    row.codes.push_back(static_cast<std::uint8_t>(pattern_of(codes.substr(at, digits))));
  if (json.contains("index")) row.index = json.at("index").get<int>();
  const ScaleType type = scale_type(coder);
  for (const char* field : {"scales", "minima", "zeros"})
    for (const Json& word : json.value(field, Json::array())) row.numbers.push_back(number_of(type, word));
  return row;
}

}  // namespace

std::vector<PageVector> parse_page_vectors(const std::string& text) {
  const Json file = parse_json(text, "page_vectors.json");
  if (file.at("format") != "kvq-page-vectors" || file.at("version") != "2.2")
    throw Error{ErrorKind::unsupported, "page_vectors.json: expected kvq-page-vectors 2.2"};
  std::vector<PageVector> vectors;
  for (const Json& json : file.at("vectors")) {
    PageVector vector{
        .name = json.at("name"),
        .why = json.at("why"),
        .plan = plan_of(json),
        .in_pages = json.at("kind") == "page",
        .rows = {},
        .bytes = bytes_of(json),
    };
    vector.pages = page_layout_of(vector.plan, vector.in_pages ? json.at("page_size").get<int>() : 16);
    if (!vector.in_pages) {
      vector.windows = window_layouts_of(vector.pages, {}, 0).rings;
      vector.windows.rows = json.at("window_rows");
    }
    for (const Json& row : json.at("rows")) vector.rows.push_back(row_of(row, vector));
    vectors.push_back(std::move(vector));
  }
  return vectors;
}

}  // namespace kvq::test
