#include <kvq/artifact/golden_tensors.h>
#include <kvq/core/error.h>

#include <algorithm>
#include <cmath>
#include <span>

namespace kvq {

namespace {

std::string name_of(int layer, const char* what) { return fmt::format("layers.{}.golden.{}", layer, what); }

/// Shapes of one layer's golden tensors, for writing and for reading.
struct Shapes {
  Shapes(const LayerPlan& plan, std::int64_t count)
      : q{plan.geometry.num_q_heads, plan.geometry.head_dim},
        k{count, plan.geometry.num_kv_heads, plan.geometry.head_dim},
        v{count, plan.geometry.num_kv_heads, plan.geometry.v_head_dim},
        firm{count, plan.geometry.num_kv_heads},
        out{plan.geometry.num_q_heads, plan.geometry.v_head_dim},
        k_bytes{count, plan.geometry.num_kv_heads, row_bytes(plan.k, plan.geometry.head_dim)},
        v_bytes{count, plan.geometry.num_kv_heads, plan.v ? row_bytes(*plan.v, plan.geometry.v_head_dim) : 0} {}
  std::vector<std::int64_t> q, k, v, firm, out, k_bytes, v_bytes;
};

std::vector<std::uint8_t> read_firm(const SafetensorsFile& file, const std::string& name,
                                    const std::vector<std::int64_t>& shape) {
  std::vector<std::uint8_t> firm = file.read<std::uint8_t>(name, shape);
  if (std::any_of(firm.begin(), firm.end(), [](std::uint8_t flag) { return flag > 1; }))
    throw Error{ErrorKind::bad_input, fmt::format("{}: tensor {}: expected 0 and 1 only", file.name(), name)};
  return firm;
}

}  // namespace

void add_bf16(SafetensorsWriter& writer, std::string name, std::vector<std::int64_t> shape,
              const std::vector<std::uint16_t>& bits) {
  writer.add<std::uint16_t>(std::move(name), std::move(shape), std::span(bits));
}

std::vector<std::uint16_t> read_bf16(const SafetensorsFile& file, const std::string& name,
                                     const std::vector<std::int64_t>& shape) {
  std::vector<std::uint16_t> bits = file.read<std::uint16_t>(name, shape);
  if (std::any_of(bits.begin(), bits.end(), [](std::uint16_t x) { return (x & 0x7f80) == 0x7f80; }))
    throw Error{ErrorKind::bad_input, fmt::format("{}: tensor {}: NaN or Inf", file.name(), name)};
  return bits;
}

void add_golden_rows(SafetensorsWriter& writer, const LayerPlan& plan, const GoldenRows& rows) {
  const Shapes shapes(plan, rows.tokens.count);
  const int layer = plan.layer;
  const auto add_bytes = [&](const char* what, const std::vector<std::int64_t>& shape,
                             const std::vector<std::uint8_t>& values) {
    writer.add<std::uint8_t>(name_of(layer, what), shape, std::span(values));
  };
  add_bf16(writer, name_of(layer, "q"), shapes.q, rows.tokens.q);
  add_bf16(writer, name_of(layer, "k"), shapes.k, rows.tokens.k);
  add_bytes("k_bytes", shapes.k_bytes, rows.k.bytes);
  add_bytes("k_firm", shapes.firm, rows.k.firm);
  if (!plan.v) return;
  add_bf16(writer, name_of(layer, "v"), shapes.v, rows.tokens.v);
  add_bytes("v_bytes", shapes.v_bytes, rows.v.bytes);
  add_bytes("v_firm", shapes.firm, rows.v.firm);
  writer.add<float>(name_of(layer, "out"), shapes.out, std::span(rows.out));
}

GoldenRows read_golden_rows(const SafetensorsFile& file, const LayerPlan& plan, const Json& json) {
  GoldenRows rows;
  rows.tokens.first = json.at("first");
  rows.tokens.count = json.at("count");
  const Shapes shapes(plan, rows.tokens.count);
  const int layer = plan.layer;
  rows.tokens.q = read_bf16(file, name_of(layer, "q"), shapes.q);
  rows.tokens.k = read_bf16(file, name_of(layer, "k"), shapes.k);
  rows.k = {file.read<std::uint8_t>(name_of(layer, "k_bytes"), shapes.k_bytes),
            read_firm(file, name_of(layer, "k_firm"), shapes.firm)};
  if (!plan.v) return rows;
  rows.tokens.v = read_bf16(file, name_of(layer, "v"), shapes.v);
  rows.v = {file.read<std::uint8_t>(name_of(layer, "v_bytes"), shapes.v_bytes),
            read_firm(file, name_of(layer, "v_firm"), shapes.firm)};
  rows.out = file.read<float>(name_of(layer, "out"), shapes.out);
  if (!std::all_of(rows.out.begin(), rows.out.end(), [](float x) { return std::isfinite(x); }))
    throw Error{ErrorKind::bad_input, fmt::format("{}: tensor {}: NaN or Inf", file.name(), name_of(layer, "out"))};
  return rows;
}

Json golden_json(const GoldenRows& rows) { return {{"first", rows.tokens.first}, {"count", rows.tokens.count}}; }

}  // namespace kvq
