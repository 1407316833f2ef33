// Compares every written vector, the first level of truth, with the codec, bit for bit.

#include <kvq/codec/codec.h>
#include <kvq/codec/poisoned.h>
#include <kvq/codec/row_codec.h>
#include <kvq/container/json.h>
#include <kvq/core/dtype.h>

#include "support/compare.h"
#include "support/container_edit.h"

#include <catch2/catch.hpp>

#include <set>
#include <string>

using namespace kvq;

namespace {

Json read_vectors(const std::string& name) {
  const std::string path = KVQ_SOURCE_DIR "/formats/" + name;
  return parse_json(test::file_bytes(path), path);
}

const Json& packing_vectors() {
  static const Json file = read_vectors("vectors.json");
  return file;
}

std::uint32_t from_hex(const Json& word) {
  return static_cast<std::uint32_t>(std::stoul(word.get<std::string>(), nullptr, 16));
}

/// Converts hex patterns of a scale type to floats.
std::vector<float> numbers_of(const Json& patterns, ScaleType type) {
  std::vector<float> numbers;
  for (const Json& word : patterns) {
    const std::uint32_t pattern = from_hex(word);
    const auto half = static_cast<std::uint16_t>(pattern);
    numbers.push_back(type == ScaleType::fp32   ? std::bit_cast<float>(pattern)
                      : type == ScaleType::fp16 ? f16_to_float(half)
                                                : bf16_to_float(half));
  }
  return numbers;
}

std::vector<std::byte> bytes_of(const std::string& hex) {
  std::vector<std::byte> bytes;
  for (std::size_t i = 0; i < hex.size(); i += 2)
    bytes.push_back(static_cast<std::byte>(std::stoul(hex.substr(i, 2), nullptr, 16)));
  return bytes;
}

ScaleRule rule_of(const Json& vector) {
  const std::string name = vector.at("scale_rule");
  for (const ScaleRule rule : {ScaleRule::minmax, ScaleRule::absmax, ScaleRule::norm, ScaleRule::rms})
    if (name == to_string(rule)) return rule;
  return ScaleRule::least_squares;
}

ScaleType type_of(const Json& vector) {
  const std::string type = vector.at("scale_type");
  return type == "fp16" ? ScaleType::fp16 : type == "bf16" ? ScaleType::bf16 : ScaleType::fp32;
}

/// The largest width of a mixed row; the only width of other rows.
int bits_of(const Json& vector) {
  return vector.contains("channel_bits") ? vector.at("channel_bits")[0].get<int>() : vector.at("bits").get<int>();
}

UniformCoder coder_of(const Json& vector) {
  UniformCoder coder{.bits = bits_of(vector), .group_size = vector.value("group_size", 0)};
  coder.levels = vector.at("coder") == "affine" ? UniformLevels::affine : UniformLevels::symmetric;
  coder.rule = rule_of(vector);
  coder.scale_type = type_of(vector);
  if (vector.contains("zero")) coder.zero = vector.at("zero") == "float" ? ZeroKind::floating : ZeroKind::integer;
  return coder;
}

void check_uniform(const Json& vector, const std::vector<float>& row) {
  const UniformCoder coder = coder_of(vector);
  const int dim = static_cast<int>(row.size());
  const auto expected_codes = vector.at("codes").get<std::vector<std::uint8_t>>();
  std::vector<float> expected_numbers = numbers_of(vector.at("scales"), coder.scale_type);
  for (const float number : numbers_of(vector.at("zeros"), coder.scale_type)) expected_numbers.push_back(number);
  const std::vector<std::byte> expected_bytes = bytes_of(vector.at("bytes"));
  const std::vector<float> expected_decoded = numbers_of(vector.at("decoded_bits"), ScaleType::fp32);

  std::vector<std::uint8_t> codes(row.size());
  std::vector<float> numbers(static_cast<std::size_t>(numbers_per_row(coder, dim)));
  encode_row(coder, vector.value("clip_ratio", 1.0), row, codes, numbers);
  CHECK(codes == expected_codes);
  CHECK(test::first_bit_difference(numbers, expected_numbers) == "");

  std::vector<std::byte> bytes(static_cast<std::size_t>(row_bytes(coder, dim)));
  pack_row(coder, codes, numbers, bytes);
  CHECK(bytes == expected_bytes);
  std::vector<std::uint8_t> codes_back(codes.size());
  std::vector<float> numbers_back(numbers.size());
  unpack_row(coder, expected_bytes, codes_back, numbers_back);
  CHECK(codes_back == expected_codes);
  CHECK(test::first_bit_difference(numbers_back, expected_numbers) == "");

  std::vector<float> decoded(row.size());
  decode_row(coder, expected_codes, expected_numbers, decoded);
  CHECK(test::first_bit_difference(decoded, expected_decoded) == "");
  std::vector<float> in_place = row;
  quantize_row(coder, vector.value("clip_ratio", 1.0), in_place);
  CHECK(test::first_bit_difference(in_place, expected_decoded) == "");
}

CodebookCoder codebook_of(const Json& vector) {
  CodebookCoder coder{
      .bits = bits_of(vector),
      .group_size = vector.value("group_size", 0),
      .rule = rule_of(vector),
      .scale_type = type_of(vector),
  };
  for (const auto& [width, table] : vector.at("codebook").items())
    coder.tables[std::stoi(width)] = numbers_of(table, ScaleType::fp32);
  return coder;
}

TrellisCoder trellis_of(const Json& vector) {
  TrellisCoder coder{
      .bits = bits_of(vector),
      .group_size = vector.value("group_size", 0),
      .rule = rule_of(vector),
      .scale_type = type_of(vector),
  };
  for (const Json& taps : vector.at("trellis"))
    coder.taps.push_back({
        .bits = taps.at("bits"),
        .memory = taps.at("memory"),
        .search = taps.value("search", "binary32") == "integer" ? TrellisSearch::integer : TrellisSearch::binary32,
        .theta = numbers_of(taps.at("theta_bits"), ScaleType::fp32),
    });
  return coder;
}

Rotation rotation_of(const Json& json) {
  Rotation rotation;
  const std::string kind = json.at("kind");
  rotation.kind = kind == "dense"      ? RotationKind::dense
                  : kind == "identity" ? RotationKind::identity
                                       : RotationKind::block_hadamard;
  rotation.order = json.value("order", 0);
  rotation.signs = json.value("signs", std::vector<std::int8_t>{});
  rotation.matrix = numbers_of(json.value("matrix_bits", Json::array()), ScaleType::fp32);
  rotation.inverse = numbers_of(json.value("inverse_bits", Json::array()), ScaleType::fp32);
  rotation.channel_scale = numbers_of(json.value("channel_scale_bits", Json::array()), ScaleType::fp32);
  return rotation;
}

/// The vector's parameters as a plan of one head; the identity rotation if the vector has none.
TensorPlan plan_of(const Json& vector, std::size_t dim) {
  TensorPlan plan;
  if (vector.contains("rotation")) {
    plan.rotation = rotation_of(vector.at("rotation"));
    plan.transform = MetricTransform{.outlier_gain = {1.0}, .condition = {vector.at("condition").get<double>()}};
    plan.center = numbers_of(vector.value("center_bits", Json::array()), ScaleType::fp32);
  }
  const std::string name = vector.at("coder");
  plan.coder = name == "codebook"  ? Coder{codebook_of(vector)}
               : name == "trellis" ? Coder{trellis_of(vector)}
                                   : Coder{coder_of(vector)};
  if (name == "affine") plan.clip_ratio = {vector.value("clip_ratio", 1.0)};
  if (vector.contains("channel_bits")) {
    plan.allocation =
        BitAllocation{.channel_bits = vector.at("channel_bits").get<std::vector<std::uint8_t>>(), .channel_order = {}};
    for (std::size_t j = 0; j < dim; ++j) plan.allocation->channel_order.push_back(static_cast<std::uint16_t>(j));
    if (vector.contains("scale_scope"))
      plan.allocation->segment_gain = numbers_of(vector.at("gains_bits"), ScaleType::fp32);
  }
  if (vector.contains("centroids_bits")) {
    plan.centroids = Centroids{.count = static_cast<int>(vector.at("centroids_bits").size())};
    for (const Json& centroid : vector.at("centroids_bits"))
      for (const float number : numbers_of(centroid, ScaleType::fp32)) plan.centroids->values.push_back(number);
  }
  return plan;
}

/// Checks RowCodec, which handles every coder and alone handles tables, trellises, mixed widths and centroids.
void check_row_codec(const Json& vector, const std::vector<float>& x) {
  const int dim = static_cast<int>(x.size());
  const TensorPlan plan = plan_of(vector, x.size());
  LayerGeometry geometry{.num_q_heads = 1, .num_kv_heads = 1, .head_dim = dim, .v_head_dim = dim, .softmax_scale = 1.0};
  if (bits_of(vector) > 0) validate(plan, geometry, 0, Side::k);  // of a plan some head has channels of width 1..8
  const RowCodec codec(plan, 0, dim);
  const int centroid = plan.centroids ? nearest_centroid(*plan.centroids, 0, x) : 0;
  CHECK(centroid == vector.value("centroid", 0));
  std::vector<float> row(x.size());
  rotate_row(plan, 0, x, row, centroid);

  const auto expected_codes = vector.at("codes").get<std::vector<std::uint8_t>>();
  std::vector<float> expected_numbers = numbers_of(vector.at("scales"), type_of(vector));
  for (const float number : numbers_of(vector.at("zeros"), type_of(vector))) expected_numbers.push_back(number);
  const std::vector<std::byte> expected_bytes = bytes_of(vector.at("bytes"));
  std::vector<std::uint8_t> codes(x.size());
  std::vector<float> numbers(static_cast<std::size_t>(codec.num_numbers()));
  codec.encode(row, codes, numbers);
  CHECK(codes == expected_codes);
  CHECK(test::first_bit_difference(numbers, expected_numbers) == "");

  CHECK(static_cast<std::size_t>(row_bytes(plan, dim)) <= expected_bytes.size());
  std::vector<std::byte> bytes(expected_bytes.size(), std::byte{0xff});
  codec.pack(codes, numbers, centroid, bytes);
  CHECK(bytes == expected_bytes);
  std::vector<std::uint8_t> codes_back(codes.size(), 255);
  std::vector<float> numbers_back(numbers.size());
  CHECK(codec.unpack(expected_bytes, codes_back, numbers_back) == centroid);
  CHECK(codes_back == expected_codes);
  CHECK(test::first_bit_difference(numbers_back, expected_numbers) == "");

  codec.quantize(row);
  CHECK(test::first_bit_difference(row, numbers_of(vector.at("decoded_bits"), ScaleType::fp32)) == "");
}

/// Queries through A^-T. Row i of A^-1 is the unit row i rotated back.
std::vector<double> queries_through(TensorPlan plan, const std::vector<float>& q) {
  plan.center.clear();
  std::vector<double> q_rot(q.size(), 0.0);
  for (std::size_t j = 0; j < q.size(); ++j) {
    std::vector<float> unit(q.size(), 0.0f), column(q.size());
    unit[j] = 1.0f;
    unrotate_row(plan, 0, unit, column);
    for (std::size_t i = 0; i < q.size(); ++i) q_rot[j] += static_cast<double>(q[i]) * static_cast<double>(column[i]);
  }
  return q_rot;
}

void check_map(const Json& vector, const std::vector<float>& x) {
  const auto dim = static_cast<int>(x.size());
  const TensorPlan plan = plan_of(vector, x.size());
  CHECK(transform_condition(plan.rotation, 0, dim) == Approx(vector.at("condition").get<double>()).epsilon(1e-12));
  CHECK(inverse_error(plan.rotation, 0, dim) == 0.0);
  CHECK(orthogonality_error(plan.rotation, dim) == 0.0);
  const std::vector<float> x_rot = numbers_of(vector.at("x_rot_bits"), ScaleType::fp32),
                           x_hat_rot = numbers_of(vector.at("decoded_bits"), ScaleType::fp32);
  std::vector<float> found(x.size());
  rotate_row(plan, 0, x, found);
  CHECK(test::first_bit_difference(found, x_rot) == "");
  unrotate_row(plan, 0, x_rot, found);
  CHECK(test::first_bit_difference(found, x) == "");
  unrotate_row(plan, 0, x_hat_rot, found);
  CHECK(test::first_bit_difference(found, numbers_of(vector.at("x_hat_bits"), ScaleType::fp32)) == "");
  std::vector<float> row = x;
  reconstruct(plan, 0, row, dim);
  CHECK(test::first_bit_difference(row, found) == "");

  const std::vector<float> q = numbers_of(vector.at("q_bits"), ScaleType::fp32),
                           q_rot = numbers_of(vector.at("q_rot_bits"), ScaleType::fp32);
  CHECK(queries_through(plan, q) == std::vector<double>(q_rot.begin(), q_rot.end()));
  double before = 0.0, after = 0.0;
  for (std::size_t j = 0; j < x.size(); ++j) {
    const double center = plan.center.empty() ? 0.0 : static_cast<double>(plan.center[j]);
    before += static_cast<double>(q[j]) * (static_cast<double>(x[j]) - center);
    after += static_cast<double>(q_rot[j]) * static_cast<double>(x_rot[j]);
  }
  CHECK(before == vector.at("dot").get<double>());
  CHECK(after == before);
}

bool is_plain(const Json& vector) {
  return (vector.at("coder") == "affine" || vector.at("coder") == "symmetric") && !vector.contains("channel_bits") &&
         !vector.contains("centroids_bits");
}

void check_exact(const Json& vector, std::vector<float> row) {
  std::vector<std::byte> bytes;
  for (const float number : row) {
    const std::uint16_t pattern = exact_bits(number);
    bytes.push_back(static_cast<std::byte>(pattern & 0xffu));
    bytes.push_back(static_cast<std::byte>(pattern >> 8));
  }
  CHECK(bytes == bytes_of(vector.at("bytes")));
  CHECK(row_bytes(ExactCoder{}, static_cast<int>(row.size())) == static_cast<std::int64_t>(bytes.size()));
  quantize_row(ExactCoder{}, 1.0, row);
  CHECK(test::first_bit_difference(row, numbers_of(vector.at("decoded_bits"), ScaleType::fp32)) == "");
}

}  // namespace

TEST_CASE("The codec gives every written vector bit for bit", "[codec][golden]") {
  REQUIRE(packing_vectors().at("format") == "kvq-packing-vectors");
  REQUIRE(packing_vectors().at("version") == "1.0");
  std::set<std::string> names;
  for (const Json& vector : packing_vectors().at("vectors")) {
    INFO(vector.at("name").get<std::string>() << ": " << vector.at("why").get<std::string>());
    names.insert(vector.at("name"));
    const std::vector<float> row = numbers_of(vector.at("x_bits"), ScaleType::fp32);
    if (vector.at("coder") == "exact") {
      check_exact(vector, row);
      continue;
    }
    if (is_plain(vector)) check_uniform(vector, row);
    check_row_codec(vector, row);
  }
  CHECK(names.size() >= 303);
}

TEST_CASE("Rows go through every written transform and back bit for bit, and queries keep their products",
          "[codec][golden]") {
  const Json file = read_vectors("transform_vectors.json");
  REQUIRE(file.at("format") == "kvq-transform-vectors");
  REQUIRE(file.at("version") == "1.0");
  std::set<std::string> kinds;
  for (const Json& vector : file.at("vectors")) {
    INFO(vector.at("name").get<std::string>() << ": " << vector.at("why").get<std::string>());
    kinds.insert(vector.at("rotation").at("kind"));
    const std::vector<float> x = numbers_of(vector.at("x_bits"), ScaleType::fp32);
    check_map(vector, x);
    check_row_codec(vector, x);
  }
  CHECK(file.at("vectors").size() >= 8);
  CHECK(kinds.size() == 3);
}

TEST_CASE("The written vectors cover every width with every rule and every number type", "[codec][golden]") {
  std::set<std::string> rules, types;
  for (const Json& vector : packing_vectors().at("vectors")) {
    if (!is_plain(vector) && vector.at("coder") != "codebook") continue;
    if (vector.contains("channel_bits")) continue;
    const std::string book = vector.at("coder") == "codebook" ? "codebook " : "";
    const std::string rule = book + vector.at("scale_rule").get<std::string>() + vector.value("zero", "");
    rules.insert(rule + std::to_string(vector.at("bits").get<int>()));
    types.insert(rule + vector.at("scale_type").get<std::string>());
  }
  CHECK(rules.size() >= 5 * 8 + 8);
  CHECK(types.size() == (5 + 3) * 3);
}
